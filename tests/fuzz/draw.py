"""Draws random compositions of all stages and numbers for them: cases for oracle.py to compute.

A seed gives a composition and, should its decisions turn out to be too close, further numbers for
the same composition. What the definition of the routers refuses is not drawn.
"""

import numpy as np

import oracle
from tape import last_bits

CLEAR = 3e-4  # no decision of a case is closer
EXACT = 1e-5  # what float arithmetic may move a value that is wanted, of its tensor's largest
GATED = ("swiglu", "factorised", "glu")
NODES = {
    "linear": ["output"],
    "mlp": ["gate", "act", "output"],
    "swiglu": ["gate", "up", "act", "product", "output"],
    "glu": ["gate", "up", "act", "product", "output"],
    "factorised": ["down", "gate", "up", "act", "product", "output"],
}
ACTS = ("tanh", "silu", "gelu", "sigmoid", "identity", "relu", "gelu_tanh", "relu2")


class Draw:
    WITHOUT = ()  # selections and losses that are not drawn, and "noise"

    def __init__(self, seed):
        self.dice = np.random.default_rng([seed, 0])
        self.later = np.random.default_rng([seed, 0, 14])  # section 14: what came first stays as it was
        self.settings = {}
        self.step = None  # of the optimizer
        self.updates = None  # of the cutoffs of expert_threshold
        self.dropped = ()  # the shape of what expert dropout excludes
        self.shapes = {}  # of parameters and inputs that are normal numbers: name to (shape, scale)
        self.compose()

    # -- the composition --

    def pick(self, *values):
        return values[self.dice.integers(len(values))]

    def chance(self, p):
        return self.dice.random() < p

    def put(self, key, *values):
        """Draws a setting and returns it."""
        self.settings[key] = self.pick(*values)
        return self.settings[key]

    def number(self, first, last):
        return int(self.dice.integers(first, last + 1))

    def compose(self):
        self.compose_sizes()
        self.compose_without_matrices()
        self.compose_experts()
        self.soft = self.chance(0.06) and self.matrices == self.e
        self.compose_input()
        if self.soft:
            self.compose_soft()
        else:
            self.compose_score()
            self.compose_selection()
            self.compose_weight()
            self.compose_capacity()
            self.compose_losses()
        s = self.settings
        plain = self.score in ("linear", "random") and s["input"] == "plain" and "noise" not in self.shapes
        if plain and not self.soft and self.chance(0.1) and self.refine == "none" and self.select != "sinkhorn":
            s["ties"] = 1
        if not self.soft and s["weight"] == "raw" and self.gate == "sigmoid" and self.chance(0.3):
            s.update(add_input=1, apply_to="output")
        elif not self.soft and self.chance(0.25):
            s["scale"] = self.pick(-1.0, 0.5, 2.5)
        if not self.soft:
            self.compose_later()

    def compose_without_matrices(self):
        """14A: the last experts have none."""
        self.matrices = self.e
        if self.score in ("norm", "attentive", "competition") or self.later.random() > 0.2:
            return
        counts = dict(zip(("n_zero", "n_copy", "n_constant"), self.later.integers(0, 3, 3).tolist()))
        if sum(counts.values()) >= self.e:
            return
        self.settings.update(counts)
        self.matrices -= sum(counts.values())
        if counts["n_constant"]:
            self.normal("experts.constant", counts["n_constant"], self.d)
            self.normal("experts.constant_gate", counts["n_constant"], 2, self.d)

    def compose_later(self):
        """The other settings of section 14."""
        s, dice = self.settings, self.later
        if self.score == "dselect" and not self.evaluation:
            s["loss.selector_entropy"] = 0.1
            s["loss.selector_reach"] = 0.1 * (self.e & (self.e - 1) > 0)
        taken = ("threshold_learned", "drop_factor", "capacity_bound")
        if self.select == "threshold" and not any(key in s for key in taken):
            self.compose_cutoff()
        if self.score != "dselect" and dice.random() < 0.1:
            s["logit_cap"] = float(dice.choice([0.5, 2.0, 30.0]))
        if not self.evaluation and dice.random() < 0.1:
            s["loss.stable_balance"] = 0.3
        samples = s["weight"] == "sparsemixer" and not self.evaluation and "gumbel" not in self.WITHOUT
        if samples and dice.random() < 0.5:
            s["sparsemixer_sample"] = 1
            self.normal("gumbel", self.n, self.k, self.e, scale=1.0)
            self.normal("uniform", self.n, self.k)
        each = [g for g in range(2, self.k + 1) if self.k % g == 0 and self.e % g == 0]
        if self.select == "top_k" and s["weight"] != "sparsemixer" and each and dice.random() < 0.4:
            s.update(select="grouped_each", groups=int(dice.choice(each)))
        if self.select in ("affinity", "expert_choice") and dice.random() < 0.3:
            by_number = self.select == "expert_choice" or dice.random() < 0.5
            s.update({"drop_capacity": int(dice.integers(1, 4))} if by_number else
                     {str(dice.choice(["drop_factor", "capacity_factor"])): float(dice.choice([0.5, 1.0, 1.3]))})
            s["drop_order"] = str(dice.choice(["position", "priority", "score"]))
            s["renormalize"] = str(dice.choice(["before", "after"]))
        renamed = "drop_factor" in s and "drop_factor_eval" not in s and self.select != "expert_choice"
        if renamed and dice.random() < 0.4:
            s["capacity_factor"] = s.pop("drop_factor")
            s["capacity_min"] = max(s.pop("drop_min", 1), s.get("capacity_min", 1))
        if self.matrices < self.e:
            if s["weight"] in ("sum", "softmax", "p_norm"):
                s["weight_over"] = str(dice.choice(["all", "real"] + ["nonzero"] * (s["n_zero"] > 0)))
            if "loss.balance" in s:
                s["zero_tau"] = float(dice.choice([1.0, 0.75, 0.5]))
                s["zero_average"] = int(dice.integers(2))
        if self.score != "dselect" and dice.random() < 0.1:
            s["router_residual"] = 1
            self.matrix("router.residual", self.e, self.e)
            self.normal("previous.logits", self.n, self.e)
        self.compose_dropout()
        self.compose_switch()
        self.compose_competition()

    def compose_cutoff(self):
        """14D: expert threshold, at another step of its state."""
        if "cutoff" in self.WITHOUT or self.later.random() < 0.5:
            return
        self.select = self.settings["select"] = "expert_threshold"
        self.settings["threshold_rho"] = float(self.later.choice([0.5, 0.9]))
        self.normal("router.cutoff", self.e, scale=0.3)
        self.updates = int(self.later.integers(0, 4))

    def compose_dropout(self):
        """14B: which experts a token, or all, cannot select."""
        names = ("top_k", "grouped_each", "threshold", "positive", "dense", "expert_choice")
        able = self.settings["select"] in names and self.settings["weight"] != "sparsemixer"
        if able and not self.evaluation and "dropped" not in self.WITHOUT and self.later.random() < 0.1:
            self.dropped = (self.e,) if self.later.random() < 0.3 else (self.n, self.e)

    def compose_switch(self):
        """14H: another selection before or after this one, which is that of the step."""
        s, dice = self.settings, self.later
        if "switch" in self.WITHOUT or s["weight"] == "sparsemixer" or self.select == "given" or dice.random() > 0.1:
            return
        others = ["top_k", "dense", "top_p", "positive", "affinity", "sinkhorn"]
        others += ["expert_choice"] * ("capacity_factor" not in s and "drop_factor" not in s)
        if self.dropped:
            others = ["top_k", "dense", "positive"]
        other = str(dice.choice([name for name in others if name != s["select"]]))
        s["switch_at"] = 5
        # its factor, 1 unless given, would limit the load before it
        if dice.random() < 0.5 or "router.predictor" in self.shapes or other == "expert_choice":
            s["switch_from"], self.step = other, 5 + int(dice.integers(3))
        else:
            s["switch_from"], s["select"], self.step = s["select"], other, int(dice.integers(5))

    def compose_competition(self):
        """14H: the experts compete in this call, or would in a later one."""
        s, dice = self.settings, self.later
        able = self.score == "linear" and s["select"] == "top_k" and self.refine == "none" and "noise" not in s
        able = able and s["weight"] != "sparsemixer" and self.matrices == self.e and "switch_at" not in s
        taken = ("ties", "logit_cap", "router_residual")
        if not able or any(name in s for name in taken) or "router.selection_bias" in self.shapes:
            return
        if self.evaluation or "compete" in self.WITHOUT or dice.random() > 0.8:
            return
        s.update(compete_rate=1.0, compete=str(dice.choice(["softplus", "norm"])))
        s.update({"loss.distill": 0.5, "distill": str(dice.choice(["mse", "ce_soft"]))})
        self.shapes.pop("teacher", None)
        if dice.random() < 0.3:
            s["compete_from"], self.step = 5, int(dice.integers(3, 8))

    def compose_sizes(self):
        s = self.settings
        self.evaluation = self.chance(0.15)
        if self.evaluation:
            s["evaluation"] = 1
        self.score = self.put("score", *["linear"] * 4, "cosine", "cosine", "norm", "mlp", "random", "grap",
                              "attentive", "competition")
        self.wide = self.chance(0.2)  # so that kernels fill their vectors and panels
        self.e = self.number(1, self.pick(4, 8, 40 if self.wide else 16))
        self.d = self.number(1, 70 if self.wide else 12)
        if self.score == "grap":
            self.e = self.number(1, 6)
            self.d = self.e * self.number(1, 3)
        if self.score == "cosine":
            self.d = max(self.d, 2)  # cos of single numbers is 1 or -1
        self.n = self.number(1, self.pick(3, 12, 40 if self.wide else 24))
        self.k = self.number(1, min(self.e, self.pick(1, 2, 4, 16)))
        s.update(n_tokens=self.n, d_model=self.d, n_experts=self.e, top_k=self.k, case="drawn")

    def compose_latent(self):
        """14C: the width in which experts work."""
        if self.later.random() > 0.15 or self.settings.get("n_copy", 0) + self.settings.get("n_constant", 0) > 0:
            return self.d
        width = self.settings["d_latent"] = int(self.later.integers(1, 2 * self.d + 1))
        self.matrix("latent.in", width, self.d)
        self.matrix("latent.out", self.d, width)
        return width

    def compose_experts(self):
        e, d = self.matrices, self.compose_latent()
        f = self.number(1, 70 if self.wide else 12)
        kind = self.put("expert", "swiglu", "swiglu", "mlp", "factorised", "linear", "glu")
        self.kind, self.width = kind, f
        self.settings["d_ff"] = f
        if kind == "linear":
            self.matrix("experts.weight", e, d, d)
            self.maybe_bias("experts.bias", d)
        elif kind == "mlp":
            self.put("act", *ACTS)
            self.matrix("experts.fc1.weight", e, f, d)
            self.matrix("experts.fc2.weight", e, d, f)
            if self.chance(0.7):
                self.normal("experts.fc1.bias", e, f)
                self.normal("experts.fc2.bias", e, d)
        else:
            self.matrix("experts.up", e, f, d)
            self.matrix("experts.down", e, d, f)
            if kind == "glu":
                self.put("act", *ACTS)
            if kind != "factorised":
                self.matrix("experts.gate", e, f, d)
            else:
                low = self.settings["d_low"] = self.number(1, 5)
                self.matrix("experts.reduce", e, low, d)
                self.matrix("experts.expand", e, f, low)
        if self.chance(0.2):
            width = self.settings["shared"] = self.number(1, 7)
            self.matrix("shared.gate", width, self.d)
            self.matrix("shared.up", width, self.d)
            self.matrix("shared.down", self.d, width)
            if self.chance(0.5):
                self.normal("shared.sigmoid", self.d)
        self.settings["apply_to"] = self.pick("output", "output", "output", "input")

    def maybe_bias(self, name, width):
        if self.chance(0.7):
            self.normal(name, self.matrices, width)

    def matrix(self, name, *shape):
        self.shapes[name] = (shape, shape[-1] ** -0.5)

    def normal(self, name, *shape, scale=0.5):
        self.shapes[name] = (shape, scale)

    def compose_input(self):
        self.normal("x", self.n, self.d, scale=1.0)
        self.normal("dy", self.n, self.d, scale=1.0)
        self.masked = self.n > 1 and self.chance(0.25)
        self.several = self.n > 1 and self.chance(0.3)
        if self.chance(0.15):
            self.normal("router_x", self.n, self.d, scale=1.0)
        kind = self.put("input", *["plain"] * 4, "jitter", "scaled_rms", "adaptive_clustering", "adaptive_clustering")
        if kind == "scaled_rms":
            self.normal("router.input_scale", self.d, scale=1.0)
        if kind == "adaptive_clustering":
            mode = self.put("ac_mode", "paper", "paper", "code", "running", "random")
            self.put("ac_spread", *["mad", "variance", "pairwise"][:2 if mode == "code" else 3])
            if mode == "paper" and self.chance(0.3):
                self.put("ac_lambda", 0.5, 1.0, 3.0)
            self.settings["ac_mix"] = self.number(1, self.k)
            if mode == "running":
                self.put("ac_rho", 0.5, 0.9, 0.99)

    def compose_soft(self):
        s = self.settings
        s["select"] = "soft"
        s["score"] = "linear"
        s["apply_to"] = "output"
        slots = s["slots"] = self.number(1, 3)
        self.matrix("router.slots", self.e * slots, self.d)
        if self.chance(0.5):
            s["soft_normalise"] = 1
            self.normal("router.scale", 1, scale=1.0)

    def compose_score(self):
        s, e, d = self.settings, self.e, self.d
        if self.score == "attentive" and self.kind == "linear":
            self.score = s["score"] = "mlp"
        if self.score in ("linear", "random"):
            self.normal("router.weight", e, d, scale=self.pick(1.0, 1.0, 2.0, 12.0) * d ** -0.5)
            if self.chance(0.3):
                self.normal("router.bias", e)
        if self.score == "cosine":
            width = d
            if self.chance(0.5):
                width = s["cosine_dim"] = self.number(2, 6)
                self.matrix("router.projection", width, d)
            self.matrix("router.weight", e, width)
            self.put("cosine_keep_length", 0, 0, 1)
            s["cosine_tau"] = 0.5
            if self.chance(0.4):
                self.normal("router.temperature", 1)
        if self.score == "grap":
            self.put("grap_cosine", 0, 1)
        if self.score == "norm":
            self.put("norm_node", *NODES[self.kind])
            self.put("norm_order", "l2", "l1", "linf")
        if self.score == "mlp" and "dselect" not in self.WITHOUT and self.later.random() < 0.4:
            self.score = s["score"] = "dselect"
            self.shape_selectors()
        if self.score in ("mlp", "attentive"):
            width = s["router_hidden"] = self.width if self.score == "attentive" else self.number(1, 8)
            self.put("router_act", *ACTS)
            self.matrix("router.fc1.weight", width, d)
            self.normal("router.fc1.bias", width)
            if self.score == "mlp":
                self.matrix("router.fc2.weight", e, width)
                self.normal("router.fc2.bias", e)
            else:
                self.matrix("router.query", width, width)
                self.matrix("router.key", width, width)
        self.gate = self.put("gate", "softmax", "softmax", "softmax", "sigmoid", "sqrt_softplus", "relu", "identity")
        if self.gate in ("softmax", "sigmoid"):
            self.put("gate_temperature", 1.0, 1.0, 0.5, 2.0)
        self.compose_refine()

    def shape_selectors(self):
        """The tensors of DSelect-k, a selector for each of K."""
        d = self.d
        self.normal("router.codes", self.k * max(1, (self.e - 1).bit_length()), d, scale=0.5 * d ** -0.5)
        self.matrix("router.mix", self.k, d)

    def compose_refine(self):
        s = self.settings
        self.refine = self.put("refine", "none", "none", "none", "similarity", "attention")
        if self.refine == "none":
            return
        self.put("causal", 0, 1)
        if self.gate in ("softmax", "sigmoid"):
            self.put("lower_entropy_only", 0, 0, 1)
        if self.refine == "similarity":
            self.put("similarity_tau", 0.5, 1.0, 2.0)
            self.put("similarity_scale", "none", "l2", "rsqrt_d")
            if self.put("similarity_learned", 0, 1):
                self.matrix("router.similarity", self.d, self.d)
        else:
            heads = s["heads"] = self.number(1, 3)
            if self.put("attention_heads", "min_entropy", "all", "fixed") == "fixed":
                s["attention_head"] = self.number(0, heads - 1)
            self.put("attention_sigma", 1.0, 2.0, 3.0)
            if self.put("attention_u", "input", "input", "output") == "output":
                self.normal("attention.output", self.n, self.d, scale=1.0)
            self.normal("attention.outputs", heads, self.n, self.d, scale=1.0)

    def compose_selection(self):
        s, e = self.settings, self.e
        kinds = ["top_k"] * 4 + ["grouped_top_k", "hash", "top_p", "threshold", "threshold", "positive",
                                 "expert_choice", "expert_choice", "affinity", "dense", "given", "sinkhorn", "balanced"]
        kinds += ["sample"] if self.evaluation else []
        kinds = [kind for kind in kinds if kind not in self.WITHOUT]
        self.select = self.put("select", *kinds)
        if self.select == "grouped_top_k":
            groups = s["groups"] = self.pick(*[g for g in range(1, e + 1) if e % g == 0])
            kept = s["groups_kept"] = self.number(1, groups)
            self.k = s["top_k"] = min(self.k, kept * (e // groups))
            self.put("group_score", "max", "top2_sum")
        if self.select in ("sample", "balanced"):
            self.k = s["top_k"] = 1
        if self.score == "dselect":
            self.shape_selectors()
        if self.select in ("top_k", "grouped_top_k") and self.chance(0.3):
            self.normal("router.selection_bias", e, scale=0.2)
            if self.chance(0.5):
                self.put("bias_rate", 0.001, 0.1)
        if self.select == "top_p":
            self.put("top_p", 0.3, 0.6, 0.9)
        if self.select == "threshold":
            s["threshold"] = {"softmax": round(0.7 / e, 3), "sqrt_softplus": 0.8}.get(self.gate, 0.4)
            self.put("threshold_fallback", "always", "evaluation", "never")
            if self.chance(0.5):
                s["threshold_learned"] = 1
                self.put("threshold_sigmoid", 0, 0, 1)
                self.normal("router.threshold", e, scale=0.3)
        if self.select == "expert_choice":
            self.put("capacity_factor", 0.5, 1.0, 1.5, 2.0)
            self.put("expert_choice_score", "p", "z")
            self.put("expert_choice_scope", "batch", "sequences")
            if self.chance(0.4):
                self.normal("router.predictor", e, self.d)
        if self.select == "affinity":
            if self.chance(0.5):
                self.put("affinity_sum", 0.3, 1.0, 2.5)
            else:
                self.put("affinity_mass", 0.25, 0.5, 0.75)
            s["capacity_min"] = self.number(1, 3)
            if self.chance(0.4):
                s["capacity"] = self.number(3, 5)

    def compose_weight(self):
        kinds = ["raw", "sum", "sum", "uniform", "one"]
        if self.gate in ("softmax", "sigmoid", "sqrt_softplus"):
            kinds += ["p_norm"]
        learned = "threshold_learned" in self.settings
        if self.refine == "none" and not learned:
            kinds += ["softmax"]
        if self.select == "top_k" and self.refine == "none" and "router.selection_bias" not in self.shapes:
            kinds += ["sparsemixer"]
        weight = self.put("weight", *kinds)
        if weight == "p_norm":
            self.put("weight_p", 0.5, 1.0, 2.0, 3.0)
        if weight == "sparsemixer":
            self.put("sparsemixer_eps", 0.01, 0.1, 0.25)
        if self.chance(0.2):
            self.normal("router.expert_scale", self.e, scale=1.0)
        reads = weight not in ("uniform", "one") or self.select not in ("hash", "given", "dense")
        if "noise" not in self.WITHOUT and not self.evaluation and reads and self.chance(0.25):
            noise = self.put("noise", "noisy_topk", "gaussian", "gumbel")
            self.normal("noise", self.n, self.e, scale=1.0)
            if noise == "noisy_topk":
                self.normal("router.noise_weight", self.e, self.d)
                self.put("noise_floor", 0.01, 0.25)
            if noise == "gaussian" and self.chance(0.5):
                self.put("noise_sigma", 0.25, 0.75)

    def compose_capacity(self):
        s = self.settings
        if self.select in ("expert_choice", "affinity") or self.chance(0.7):
            return
        if self.score == "linear" and self.chance(0.3):
            s["capacity_bound"] = "every"
            if self.chance(0.5):
                return
            self.put("drop_factor", 0.5, 1.0)
        elif self.chance(0.5):
            s["drop_capacity"] = self.number(1, max(1, self.n // 2))
        else:
            self.put("drop_factor", 0.5, 1.0, 1.3)
            s["drop_min"] = self.number(1, 2)
            if self.chance(0.3):
                self.put("drop_factor_eval", 0.3, 0.7)
        self.put("drop_order", "position", "priority", "score")
        self.put("renormalize", "before", "after")

    def compose_losses(self):
        s = self.settings
        if self.evaluation:
            return
        losses = ["balance", "z", "importance", "entropy", "usage_entropy", "similarity_same", "similarity_diff",
                  "locality", "l1"]
        losses += ["load"] if s.get("noise") in ("noisy_topk", "gaussian") else []
        losses += ["orthogonal"] if self.score in ("linear", "cosine") and self.d > 1 else []
        losses += ["distill"] if self.select != "given" else []
        losses += ["predictor"] if "router.predictor" in self.shapes else []
        for name in losses:
            if name not in self.WITHOUT and self.chance(0.5 if name in ("load", "predictor") else 0.15):
                self.put("loss." + name, 0.1, 0.5, 1.0)
        if "loss.balance" in s:
            self.put("balance_over", "pairs", "tokens", "first")
            self.put("balance_scope", "batch", "sequences")
        if "loss.distill" in s:
            self.put("distill", "ce_hard", "ce_soft", "mse")
            self.normal("teacher", self.n, self.e, scale=1.0)
        if "loss.importance" in s:
            self.put("importance_over", "probabilities", "gate", "weights")
            self.put("unbiased", 0, 1)
        if "loss.locality" in s:
            s["nodes"] = self.number(2, 4)

    # -- numbers --

    def numbers(self, seed, attempt):
        """Every tensor of a case; each number is a float's."""
        self.dice = np.random.default_rng([seed, 1 + attempt])
        n, e, d, s = self.n, self.e, self.d, self.settings
        t = {name: (self.dice.standard_normal(shape) * scale).astype(np.float32)
             for name, (shape, scale) in self.shapes.items()}
        if "ties" in s:  # products of these are exact, so that equal ones are equal in every type
            for name in ("x", "router_x", "router.weight", "router.bias"):
                if name in t:
                    t[name] = self.dice.integers(-2, 3, t[name].shape).astype(np.float32) / 2
        if self.chance(0.1):
            t["x"][self.number(0, n - 1)] = 0.0
        if self.masked:
            t["mask"] = (self.dice.random(n) < 0.7).astype(np.uint8)
            t["mask"][self.number(0, n - 1)] = 1
        if self.several:
            inner = sorted(set(self.dice.integers(1, n, self.number(1, 3)).tolist()))
            t["seq"] = np.array([0] + inner + [n], np.int64)
        self.adjust(t)
        if s["input"] == "jitter":
            t["jitter"] = self.dice.uniform(0.9, 1.1, (n, d)).astype(np.float32)
        if s["input"] == "adaptive_clustering":
            self.previous(t)
        if s.get("refine") == "attention":
            t["attention.weights"] = self.attention(s["heads"], s["causal"])
        if self.soft:
            return t
        if self.select == "hash":
            ids = self.number(1, 9)
            t["router.table"] = np.array([self.dice.permutation(e)[:self.k] for _ in range(ids)], np.int64)
            t["token_ids"] = self.dice.integers(0, ids, n)
        if self.select == "given":
            t["given"] = np.array([self.dice.permutation(e)[:self.k] for _ in range(n)], np.int64)
            t["given"][self.dice.random(t["given"].shape) < 0.2] = -1
        if "loss.locality" in s:
            t["home"] = self.dice.integers(0, s["nodes"], n)
            t["expert_node"] = self.dice.integers(0, s["nodes"], e)
        return t

    def adjust(self, t):
        """Parameters that are not just normal numbers."""
        s = self.settings
        for name in ("router.input_scale", "router.expert_scale"):
            if name in t:
                t[name] = np.float32(1.0) + np.float32(0.3) * t[name]
        for name in ("router.temperature", "router.scale"):
            if name in t:
                t[name] = np.abs(t[name]) + np.float32(0.3)
        if "router.threshold" in t:
            theta = s["threshold"]
            t["router.threshold"] += np.float32(np.log(theta / (1.0 - theta)) if s["threshold_sigmoid"] else theta)
        if self.step is not None:
            t["router.step"] = np.full(1, self.step, np.float32)
        if self.updates is not None:
            t["router.cutoff_updates"] = np.full(1, self.updates, np.float32)
        if self.dropped:
            t["dropped"] = (self.dice.random(self.dropped) < 0.3).astype(np.uint8)
        if "bias_rate" in s:
            t["router.load"] = np.zeros(self.e + 1, np.float32)

    def previous(self, t):
        """What the previous mixture layer chose; some tokens have fewer experts, or none."""
        columns = max(self.settings["ac_mix"], self.number(1, self.k))
        experts = np.array([self.dice.permutation(self.e)[:columns] for _ in range(self.n)], np.int64)
        experts[self.dice.random(experts.shape) < 0.1] = -1
        t["previous.experts"] = experts
        t["previous.weights"] = self.dice.uniform(0.1, 1.0, experts.shape).astype(np.float32)
        t["previous.input"] = self.dice.standard_normal((self.n, self.d)).astype(np.float32)
        if self.settings["ac_mode"] in ("running", "random"):
            t["router.ac_running"] = self.dice.uniform(0.2, 2.0, (self.e, self.d)).astype(np.float32)

    def attention(self, heads, causal):
        a = np.exp(self.dice.standard_normal((heads, self.n, self.n)))
        if causal:
            a = np.tril(a) if self.dice.random() < 0.7 else a
        a[self.dice.random(a.shape) < 0.1] = 0.0
        return (a / np.maximum(a.sum(2, keepdims=True), 1e-3)).astype(np.float32)


def rounded(drawn, tensors, dice):
    """What is wanted, computed in float with errors of a bit in each operation."""
    with np.errstate(all="ignore"):  # where numbers vanish in float the case is not sure
        move = None if "ties" in drawn.settings else last_bits(dice)
        return oracle.Layer(drawn.settings, tensors, np.float32, move).wants()


def is_sure(name, value, rough):
    """Whether float arithmetic tells the value: what is next to nothing by cancellation is not."""
    size = np.abs(value).max(initial=0.0)
    if not all(oracle.error_of(r[name], value) < EXACT for r in rough):
        return False
    return size > 1e-5 or not name.startswith(("grad.", "loss."))


def case(seed, tries=12):
    """Settings and tensors of a seed, or None when all its numbers have close decisions."""
    drawn = Draw(seed)
    for attempt in range(tries):
        tensors = drawn.numbers(seed, attempt)
        layer = oracle.Layer(drawn.settings, tensors)
        wants = layer.wants()
        if layer.margin < CLEAR:
            continue
        rough = [rounded(drawn, tensors, drawn.dice) for _ in range(4)]
        left = [name for name, value in wants.items() if not is_sure(name, value, rough)]
        if all(name.startswith(("grad.", "loss.")) for name in left):
            break
    else:
        return None
    settings = dict(drawn.settings, seed=seed, not_compared=" ".join(left))
    for name, value in wants.items():
        if name not in left:
            tensors["want." + name] = value.astype(np.uint8) if name == "selected" else np.float64(value)
    return settings, tensors
