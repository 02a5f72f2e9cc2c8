"""Random networks of several modules, computed by a second interpreter.

    python3 tests/fuzz/nets.py draw FOLDER FIRST COUNT
    python3 tests/fuzz/nets.py check FOLDER

draw, for COUNT seeds from FIRST on: net_SEED.safetensors, a network's file, and
call_SEED.safetensors, a call of it and what must come out. Modules are computed by their formulas
in moe.h (>>network), MoE layers by oracle.py; the file is written as moe.h describes it. A wanted
result of a call is want.NAME as in golden cases, with the number of the module: want.weights.3,
want.grad.3.router.weight. tests/fuzz/nets.c compares the library with them, and makes inference
models in integers: check runs their headers by integers.py and compares the bits.
"""

import json
import os
import sys
import zlib

import numpy as np

sys.dont_write_bytecode = True  # the repository stays as it is
import draw
import integers
import oracle
from case import read_case, write_case
from packed import PACKED
from tape import ACTS, Var, backward, clear, last_bits, softmax, sqrt, stack_columns, stack_rows

# ---- a network ----


class Net:
    """One call of a network: tensors are those of its file and of the call."""

    def __init__(self, modules, tensors, training, precision=np.float64, move=None, product=None):
        clear(precision, move)
        self.modules, self.tensors, self.training = modules, tensors, training
        self.product = product  # of rows and a packed matrix of an expert
        self.leaves, self.layers, self.inputs = {}, {}, []
        self.margin = np.inf
        self.n = len(tensors["token_ids" if "token_ids" in tensors else "x"])
        self.real = tensors.get("mask", np.ones(self.n)) != 0
        self.offsets = tensors.get("seq", np.array([0, self.n]))
        self.sequence = np.searchsorted(self.offsets, np.arange(self.n), "right") - 1
        self.position = np.arange(self.n) - self.offsets[self.sequence]
        self.attended, self.last = None, None  # what the last attention gives, the last MoE layer

    def leaf(self, name):
        if name not in self.leaves:
            self.leaves[name] = Var(self.tensors[name])
        return self.leaves[name]

    def forward(self):
        h = None if "token_ids" in self.tensors else self.leaf("x")
        for i, module in enumerate(self.modules):
            self.inputs.append(h)
            h = getattr(self, module["module"])(i, module, h)
        return h

    def linear(self, i, _, x):
        return x @ self.leaf("%d.weight" % i).T + self.leaf("%d.bias" % i)

    def activation(self, _, module, x):
        return ACTS[module["act"]](x)

    def layer_norm(self, i, _, x):
        apart = x - x.mean(-1)
        return apart / sqrt((apart * apart).mean(-1) + 1e-5) * self.leaf("%d.weight" % i) + self.leaf("%d.bias" % i)

    def rms_norm(self, i, _, x):
        return x / sqrt((x * x).mean(-1) + 1e-5) * self.leaf("%d.weight" % i)

    def residual(self, i, module, x):
        return x + self.inputs[i - module["span"]]

    def embedding(self, i, *_):
        return self.leaf("%d.weight" % i)[self.tensors["token_ids"]]

    def positions(self, i, _, x):
        return x + self.leaf("%d.weight" % i)[self.position]

    def tied(self, i, _, x):
        return x @ self.leaf("0.weight").T + self.leaf("%d.bias" % i)

    def dropout(self, _i, _m, x):
        return x  # rate 0, or not in training

    # -- attention --

    def rotated(self, v, width, base):
        """The halves of each head, by angles position / base^(2 i / width)."""
        angle = self.position[:, None] / base ** (2.0 * np.arange(width // 2)[None] / width)
        a, b = v[:, :width // 2], v[:, width // 2:]
        return stack_columns([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])

    def seen(self, full):
        """Which tokens [j] a token [i] attends to."""
        same = self.sequence[:, None] == self.sequence[None]
        order = full | np.tri(self.n, dtype=bool)
        return same & order & self.real[:, None] & self.real[None]

    def attention_heads(self, i, module, x):
        """Of each head: A and what it gives of every token, before the mean over heads."""
        heads, width = module["heads"], module["d_head"]
        q, k, v = (x @ self.leaf("%d.%s" % (i, name)).T for name in ("query", "key", "value"))
        for h in range(heads):
            at = np.s_[:, h * width:(h + 1) * width]
            qh, kh = q[at], k[at]
            if module["rotary"]:
                base = module["rotary_base"]
                qh, kh = self.rotated(qh, width, base), self.rotated(kh, width, base)
            a = softmax(qh @ kh.T / np.sqrt(width), self.seen(module["full"]))
            yield a, v[at] @ self.leaf("%d.output" % i)[at].T

    def attention(self, i, module, x):
        weights, outputs = zip(*self.attention_heads(i, module, x))
        y = sum(a @ o for a, o in zip(weights, outputs))
        self.attended = {
            "attention.weights": stack_rows([a.reshape(1, self.n, self.n) for a in weights]),
            "attention.outputs": stack_rows([(o * len(outputs)).reshape(1, *o.shape) for o in outputs]),
            "attention.output": y,
        }
        return y

    # -- layers --

    def layer(self, i, module, x):
        """The settings and tensors of a module as those of a layer alone."""
        prefix = "%d." % i
        names = [name[len(prefix):] for name in self.tensors if name.startswith(prefix)]
        tensors = {name: self.tensors[prefix + name] for name in names}
        for name in ("mask", "seq", "token_ids"):
            if name in self.tensors:
                tensors[name] = self.tensors[name]
        settings = dict(module["settings"], n_tokens=self.n)
        if not self.training:
            settings["evaluation"] = 1
        layer = oracle.Layer(settings, tensors, alone=False)
        layer.leaves.update({name: self.leaf(prefix + name) for name in names})
        layer.leaves["x"] = x
        layer.product = self.product
        self.layers[i] = layer
        return layer

    def feed_forward(self, i, module, x):
        layer = self.layer(i, module, x)
        y = layer.expert(0, x)["output"]
        self.margin = min(self.margin, layer.margin)
        return y

    def mixture(self, i, module, x):
        layer = self.layer(i, module, x)
        if layer.c.input == "adaptive_clustering":
            layer.tensors.update(self.previous(layer))
        if layer.c.refine == "attention":
            layer.leaves.update(self.attended)
            layer.tensors.update({name: v.value for name, v in self.attended.items()})
        if "teacher.%d" % i in self.tensors:
            layer.tensors["teacher"] = self.tensors["teacher.%d" % i]
        if layer.has("router.residual") and self.last:
            layer.leaves["previous.logits"] = self.last.spread(self.last.clean)
            layer.tensors["previous.logits"] = layer.leaves["previous.logits"].value
        self.last = layer
        layer.found = layer.forward()
        self.margin = min(self.margin, layer.margin)
        return layer.found["y"]

    def previous(self, layer):
        """What adaptive clustering reads of the last MoE layer: choices, best first, and x."""
        weights = np.full((self.n, self.last.c.n_experts), -np.inf)
        weights[self.last.real] = self.last.final
        order = np.argsort(-weights, 1, kind="stable")
        kept = np.isfinite(np.take_along_axis(weights, order, 1))
        falling = np.where(kept, np.take_along_axis(weights, order, 1), 0.0)
        layer.close((falling[:, :-1] - falling[:, 1:])[kept[:, 1:]], falling[kept[:, 0], 0])  # 0 is no share
        return {"previous.experts": np.where(kept, order, -1), "previous.weights": falling,
                "previous.input": self.last.leaves["x"].value}

    # -- results --

    def wants(self):
        """What must come out, by name."""
        y = self.forward()
        result = {"y": y.value}
        total = (y * self.tensors["dy"]).sum().reshape(1)
        for i, layer in self.layers.items():
            for name, value in getattr(layer, "found", {}).items():
                if name.startswith("loss.") and self.training:
                    total = total + value
                if name in ("weights", "selected") or name.startswith("loss.") and self.training:
                    result["%s.%d" % (name, i)] = value.value
        if self.training:
            backward(total)
            result.update(self.gradients())
            for i, layer in self.layers.items():
                if hasattr(layer, "counts"):
                    result.update({"after.%d.%s" % (i, name): value for name, value in layer.state().items()})
        return result

    def gradients(self):
        found = {}
        for name, leaf in self.leaves.items():
            number, _, rest = name.partition(".")
            layer = self.layers.get(int(number)) if number.isdigit() else None
            frozen = layer and layer.c.score == "random" and rest in ("router.weight", "router.bias")
            if not frozen and rest not in oracle.NO_GRADIENT + ("router.load", "router.table"):
                found["grad." + name] = np.zeros_like(leaf.value) if leaf.grad is None else leaf.grad
        return found


# ---- drawing ----

SWITCHES = {"router.bias": "router_bias", "router.temperature": "cosine_learn_tau",
            "router.selection_bias": "selection_bias", "router.expert_scale": "expert_scale",
            "shared.sigmoid": "shared_sigmoid", "experts.gate_bias": "expert_bias", "router.predictor": "predictor"}
RENAMED = {"drop_factor": "capacity_factor", "drop_factor_eval": "capacity_factor_eval", "drop_min": "capacity_min",
           "shared": "d_shared"}
NO_FIELDS = ("n_tokens", "case", "evaluation", "ties")
BATCHED = ("expert_choice", "affinity", "sinkhorn", "balanced")  # selections that decoding cannot do


class Mixture(draw.Draw):
    """An MoE layer of a network."""

    def __init__(self, seed, net):
        self.net = net
        self.WITHOUT = ("given", "noise", "load", "locality", "gumbel", "dropped", "switch", "compete", "dselect",
                        "cutoff") + (BATCHED if net.decodes else ())
        if not net.ids:
            self.WITHOUT += ("hash",)
        super().__init__(seed)

    def compose_sizes(self):
        s, net = self.settings, self.net
        self.evaluation, self.wide = net.evaluation, net.wide
        self.d, self.n = net.width, net.n
        scores = ["linear"] * 4 + ["norm", "mlp", "random", "attentive", "competition"]
        scores += ["cosine"] * 2 if self.d > 1 else []
        self.score = self.put("score", *scores)
        before = net.last
        self.clusters = bool(before) and self.chance(0.4)
        self.e = self.number(before.e if self.clusters else 1, self.pick(4, 8, 16) + (before.e if before else 0))
        self.k = self.number(1, min(self.e, self.pick(1, 2, 4)))
        s.update(n_tokens=self.n, d_model=self.d, n_experts=self.e, top_k=self.k)

    def compose_experts(self):
        """Also swiglu as in gpt-oss."""
        super().compose_experts()
        if self.kind != "swiglu" or self.settings.get("score") == "norm" or self.later.random() < 0.6:
            return
        self.settings["swiglu_alpha"] = float(self.later.choice([0.5, 1.0, 1.702]))
        self.settings["swiglu_limit"] = float(self.later.choice([0.0, 0.8, 7.0]))
        self.settings["swiglu_offset"] = float(self.later.choice([0.0, 1.0, -0.5]))
        if self.later.random() < 0.5:
            for name in ("gate", "up", "down"):
                self.normal("experts.%s_bias" % name, *self.shapes["experts." + name][0][:2])

    def compose_input(self):
        s, before = self.settings, self.net.last
        self.soft = self.soft and not self.net.decodes
        if not self.clusters or before.soft or before.settings["weight"] in ("uniform", "one"):
            if self.put("input", *["plain"] * 3, "scaled_rms") == "scaled_rms":
                self.normal("router.input_scale", self.d, scale=1.0)
            return
        s["input"] = "adaptive_clustering"
        modes = ["code", "random"] + (["paper", "running"] if before.d == self.d else [])
        if self.net.decodes:
            modes = [mode for mode in modes if mode in ("random", "running")]
        mode = self.put("ac_mode", *modes)
        self.put("ac_spread", *["mad", "variance", "pairwise"][:2 if mode == "code" else 3])
        s["ac_mix"] = self.number(1, before.k)
        if mode == "running":
            self.put("ac_rho", 0.5, 0.9)
        if mode in ("running", "random"):
            self.normal("router.ac_running", self.e, self.d)

    def compose_refine(self):
        super().compose_refine()
        s, net = self.settings, self.net
        if self.refine == "attention" and (net.heads == 0 or net.attention_width != self.d):
            s["refine"] = self.refine = "none"
        if self.refine == "none":
            for name in ("causal", "lower_entropy_only", "similarity_tau", "similarity_scale", "similarity_learned",
                         "heads", "attention_heads", "attention_head", "attention_sigma", "attention_u"):
                s.pop(name, None)
            self.shapes.pop("router.similarity", None)
        elif net.decodes or net.heads and net.causal:
            s["causal"] = 1
        if self.refine == "attention":
            s["heads"] = net.heads
            if s["attention_heads"] == "fixed":
                s["attention_head"] = self.number(0, net.heads - 1)
            if net.decodes and s["attention_heads"] == "min_entropy":
                s["attention_heads"] = "all"
        for name in ("attention.output", "attention.outputs"):
            self.shapes.pop(name, None)

    def compose_capacity(self):
        if not self.net.decodes:
            super().compose_capacity()

    def compose_later(self):
        super().compose_later()
        before = self.net.last
        if before and (before.soft or before.e != self.e):
            self.settings.pop("router_residual", None)
            self.shapes.pop("router.residual", None)
        self.shapes.pop("previous.logits", None)

    def parameters(self, dice):
        """Its tensors, by name."""
        t = {name: (dice.standard_normal(shape) * scale).astype(np.float32)
             for name, (shape, scale) in self.shapes.items() if name != "teacher"}
        self.adjust(t)
        if "router.ac_running" in t:
            t["router.ac_running"] = np.abs(t["router.ac_running"]) + np.float32(0.3)
        if self.settings.get("select") == "hash":
            t["router.table"] = np.array([dice.permutation(self.e)[:self.k] for _ in range(self.net.ids)], np.int64)
        return t

    def fields(self):
        """As files name them."""
        s = self.settings
        found = {RENAMED.get(name, name.replace(".", "_")): value for name, value in s.items() if name not in NO_FIELDS}
        for name, field in SWITCHES.items():
            if name in self.shapes:
                found[field] = 1
        if "shared" in s:
            found["n_shared"] = 1
        if s["expert"] == "linear":
            found.pop("d_ff")
        if s["expert"] in ("mlp", "linear") and not {"experts.fc1.bias", "experts.bias"} & set(self.shapes):
            found["no_expert_bias"] = 1
        if s.get("select") == "hash":
            found["table_size"] = self.net.ids
        if self.soft:
            found["soft_sequences"] = max(1, self.net.sequences)
        found["untrained"] = 1
        return {name: value for name, value in found.items() if value != 0}


class FeedForward(Mixture):
    """An expert for every token."""

    def compose(self):
        self.e = self.k = self.matrices = 1
        self.d, self.wide, self.soft = self.net.width, self.net.wide, False
        self.settings.update(n_tokens=self.net.n, d_model=self.d, n_experts=1, top_k=1)
        self.compose_experts()
        self.settings = {k: v for k, v in self.settings.items() if not k.startswith(("shared", "apply_to"))}
        self.shapes = {k: v for k, v in self.shapes.items() if k.startswith("experts.")}

    def compose_latent(self):
        return self.d

    def fields(self):
        names = ("expert", "d_ff", "d_low", "act", "no_expert_bias", "expert_bias", "swiglu_alpha", "swiglu_limit",
                 "swiglu_offset")
        return {name: value for name, value in super().fields().items() if name in names}


class DrawNet:
    """A network and a call of it."""

    def __init__(self, seed):
        self.seed = seed
        self.dice = np.random.default_rng([seed, 1000])
        self.evaluation = self.chance(0.25)
        self.decodes = self.chance(0.5)
        self.causal = self.decodes or self.chance(0.6)
        self.wide = self.chance(0.15)
        self.n = self.number(1, 12 if self.chance(0.5) else 24)
        self.ids = self.number(1, 20) if self.chance(0.4) else 0
        self.sequences = self.number(2, 3) if self.n > 6 and self.chance(0.4) else 0
        self.masked = self.n > 1 and self.chance(0.25)
        self.width = self.number(1, 70 if self.wide else 12)
        self.d_in = 0 if self.ids else self.width
        self.modules, self.widths, self.shapes, self.drawn = [], [], {}, {}
        self.last, self.heads, self.attention_width = None, 0, 0
        self.compose()

    def chance(self, p):
        return self.dice.random() < p

    def number(self, first, last):
        return int(self.dice.integers(first, last + 1))

    def add(self, kind, width=None, **settings):
        i = len(self.modules)
        self.widths.append(self.width)
        self.modules.append(dict(module=kind, **settings))
        self.width = width or self.width
        return "%d." % i

    def compose(self):
        if self.ids:
            name = self.add("embedding", vocabulary=self.ids, d=self.width)
            self.shapes[name + "weight"] = ((self.ids, self.width), 1.0)
        kinds = ["linear", "activation", "layer_norm", "rms_norm", "attention", "attention", "residual", "dropout",
                 "feed_forward", "positions"] + ["mixture"] * 6
        for _ in range(self.number(1, 7)):
            getattr(self, "add_" + str(self.dice.choice(kinds)))()
        if self.last is None:
            self.add_mixture()
        if self.ids and self.width == self.widths[1] and self.chance(0.5):
            name = self.add("tied", self.ids)
            self.shapes[name + "bias"] = ((self.ids,), 0.5)
        elif self.chance(0.3):
            self.add_linear()

    def add_linear(self):
        before, after = self.width, self.number(1, 12)
        name = self.add("linear", after, d_out=after)
        self.shapes[name + "weight"] = ((after, before), before ** -0.5)
        self.shapes[name + "bias"] = ((after,), 0.5)

    def add_activation(self):
        self.add("activation", act=str(self.dice.choice(draw.ACTS)))

    def add_rms_norm(self):
        self.shapes[self.add("rms_norm") + "weight"] = ((self.width,), 0.3)

    def add_layer_norm(self):
        name = self.add("layer_norm")
        self.shapes[name + "weight"] = ((self.width,), 0.3)
        self.shapes[name + "bias"] = ((self.width,), 0.5)

    def add_dropout(self):
        self.add("dropout", rate=0.25 if self.evaluation else 0.0)

    def add_positions(self):
        self.shapes[self.add("positions", most=self.n) + "weight"] = ((self.n, self.width), 0.5)

    def add_residual(self):
        before = [i for i, width in enumerate(self.widths) if width == self.width and (i > 0 or not self.ids)]
        if before:
            self.add("residual", span=len(self.modules) - int(self.dice.choice(before)))

    def add_attention(self):
        heads, width = self.number(1, 3), self.number(1, 6)
        rotary = int(width % 2 == 0 and self.chance(0.6))
        more = {"rotary_base": float(self.dice.choice([100.0, 10000.0]))} if rotary else {}
        name = self.add("attention", heads=heads, d_head=width, full=int(not self.causal), rotary=rotary, **more)
        for part in ("query", "key", "value"):
            self.shapes[name + part] = ((heads * width, self.width), self.width ** -0.5)
        self.shapes[name + "output"] = ((self.width, heads * width), (heads * width) ** -0.5)
        self.heads, self.attention_width = heads, self.width

    def add_layer(self, kind, made):
        self.drawn[len(self.modules)] = made
        self.add(kind, settings=made.settings)
        return made

    def add_feed_forward(self):
        self.add_layer("feed_forward", FeedForward([self.seed, len(self.modules)], self))

    def add_mixture(self):
        made = Mixture([self.seed, len(self.modules)], self)
        if "scale" in made.settings:
            made.settings["scale"] = abs(made.settings["scale"])
        self.last = self.add_layer("mixture", made)

    # -- numbers --

    def numbers(self, attempt):
        """The tensors of the file, and those of the call."""
        dice = np.random.default_rng([self.seed, 2000 + attempt])
        normal = lambda shape, scale=1.0: (dice.standard_normal(shape) * scale).astype(np.float32)
        stored = {}
        for i, module in enumerate(self.modules):
            prefix = "%d." % i
            stored.update({name: normal(*shape) for name, shape in self.shapes.items() if name.startswith(prefix)})
            if i in self.drawn:
                stored.update({prefix + name: t for name, t in self.drawn[i].parameters(dice).items()})
            if module["module"].endswith("norm"):
                stored[prefix + "weight"] += np.float32(1.0)
        call = {"dy": normal((self.n, self.width))}
        if self.ids:
            call["token_ids"] = dice.integers(0, self.ids, self.n)
        else:
            call["x"] = normal((self.n, self.d_in))
        if self.masked:
            call["mask"] = (dice.random(self.n) < 0.7).astype(np.uint8)
            call["mask"][dice.integers(self.n)] = 1
        if self.sequences:
            inner = 1 + dice.choice(self.n - 1, self.sequences - 1, replace=False)
            call["seq"] = np.array([0, *sorted(inner), self.n], np.int64)
        if any("teacher" in made.shapes for made in self.drawn.values()):
            for i, made in self.drawn.items():
                if self.modules[i]["module"] == "mixture" and not made.soft:
                    call["teacher.%d" % i] = normal((self.n, made.e))
        return stored, call

    def config(self):
        """As files have it."""
        modules = [dict({k: v for k, v in module.items() if k != "settings"},
                        **(self.drawn[i].fields() if i in self.drawn else {}))
                   for i, module in enumerate(self.modules)]
        return {"format": 1, "net": {"d_in": self.d_in, "modules": modules}}


def rounded(drawn, tensors):
    """Results in float with errors of a bit in each operation."""
    with np.errstate(all="ignore"):
        return Net(drawn.modules, tensors, not drawn.evaluation, np.float32, last_bits(drawn.dice)).wants()


def where_sure(name, value, rough):
    """The name in the file: want. is for float and double, want64. for double alone."""
    if draw.is_sure(name, value, rough):
        return "want." + name
    near = all(oracle.error_of(r[name], value) < 0.01 for r in rough)
    return ("want64." if near and np.abs(value).max(initial=0.0) > 1e-5 else "left.") + name


def in_use(drawn, tensors):
    """Outputs of inference with every type of packed weights, where decisions are clear."""
    found = {}
    for name, product in [("real", None), *PACKED.items()]:
        net = Net(drawn.modules, tensors, False, product=product)
        y = net.forward().value
        if net.margin >= draw.CLEAR and np.isfinite(y).all():
            found["want.packed." + name] = y
    return found


def near_integers(drawn, tensors, draws=4):
    """What inference models compute, for the call as one sequence, and how far they may be from it:
    four times what errors of a code in every vector change, which is 1/127 of its range, 1/32 for
    weights of 4 bits, and 1 where all are 0, which tells nothing of the range. The largest of some
    draws: few draws seldom meet a choice of experts that such errors decide."""
    tensors = {name: t for name, t in tensors.items() if name not in ("mask", "seq")}
    dice = np.random.default_rng([drawn.seed, 3000])
    found = {"exact": Net(drawn.modules, tensors, False).forward().value}
    for name, size in ("int8", 127.0), ("int4", 32.0):
        def move(v):
            return v + dice.uniform(-1.0, 1.0, v.shape) * (np.abs(v).max(initial=0.0) / size or 1.0)
        off = [np.abs(Net(drawn.modules, tensors, False, move=move).forward().value - found["exact"]).max()
               for _ in range(draws)]
        found[name] = 4.0 * np.array([max(off)]) + 0.02 * np.abs(found["exact"]).max()
    return {"sequence." + name: value for name, value in found.items() if np.isfinite(value).all()}


def case(seed, tries=8):
    """A network, its tensors, those of the call and the results; None: decisions are too close."""
    drawn = DrawNet(seed)
    for attempt in range(tries):
        stored, call = drawn.numbers(attempt)
        tensors = {**stored, **call}
        with np.errstate(all="ignore"):
            net = Net(drawn.modules, tensors, not drawn.evaluation)
            wants = net.wants()
        if not net.margin >= draw.CLEAR or not all(np.isfinite(v).all() for v in wants.values()):
            continue
        rough = [rounded(drawn, tensors) for _ in range(3)]
        wants = {where_sure(name, value, rough): value for name, value in wants.items()}
        if all(name.startswith("want.") or name.split(".")[1] in ("grad", "loss") for name in wants):
            with np.errstate(all="ignore"):
                sequence = near_integers(drawn, tensors) if drawn.decodes else {}
            return drawn, stored, call, {**wants, **in_use(drawn, tensors), **sequence}
    return None


# ---- files ----


def path_of(folder, what, seed):
    return os.path.join(folder, "%s_%06d.safetensors" % (what, seed))


def write(folder, seed, drawn, stored, call, wants):
    stored = {name: t.astype(np.float32) for name, t in stored.items()}
    write_case(path_of(folder, "net", seed), {"moe": json.dumps(drawn.config())}, stored)
    settings = {"seed": seed, "n_tokens": drawn.n}
    if drawn.evaluation:
        settings["evaluation"] = 1
    wants = {name: value.astype(np.uint8) if name.startswith("want.selected.") else np.float64(value)
             for name, value in wants.items() if not name.startswith("left.")}
    write_case(path_of(folder, "call", seed), settings, {**call, **wants})


# ---- what nets.c made ----


def answers(path):
    """Of each call: the input, the output, and for each MoE layer the experts and their weights."""
    calls = []
    with open(path) as file:
        for line in file:
            what, *numbers = line.split()
            numbers = [int(v) for v in numbers]
            if what == "in":
                calls.append([numbers, None, []])
            elif what == "out":
                calls[-1][1] = numbers
            else:
                calls[-1][2].append((numbers[0::2], numbers[1::2]))
    return calls


def check_integers(header):
    """The bits of an inference model."""
    start = header[:-len(".h")]
    experts = None
    if os.path.exists(start + ".experts"):
        with open(start + ".experts", "rb") as file:
            experts = file.read()
    with open(header) as file:
        model = integers.Model(file.read(), experts)
    calls = answers(start + ".answers")
    for t, (entered, wanted, chosen) in enumerate(calls):
        got = [int(v) for v in model.infer(entered, chosen)]
        integers.require(got == wanted, "token %d: %s, not %s", t, wanted, got)
    folder, kind = os.path.split(start)
    kind, seed = kind.split("_")
    _, call = read_case(path_of(folder, "call", int(seed)))
    if "sequence." + kind in call:
        off = np.abs(model.output_scale * np.array([wanted for _, wanted, _ in calls]) - call["sequence.exact"]).max()
        most = float(call["sequence." + kind])
        if off > most:
            _, stored = read_case(path_of(folder, "net", int(seed)))
            most = float(near_integers(DrawNet(int(seed)), {**stored, **call}, 64)["sequence." + kind][0])
        integers.require(off <= most, "an output is %.2g from the network's, more than %.2g", off, most)


def check_saved(path):
    """A file that moe_net_save wrote of one that was drawn; it leaves out settings that are 0."""
    folder, name = os.path.split(path)
    seed = int(name[len("saved_"):-len(".safetensors")])
    metadata, saved = read_case(path)
    drawn, stored = read_case(path_of(folder, "net", seed))
    before, after = (json.loads(text["moe"])["net"] for text in (drawn, metadata))
    integers.require(before["d_in"] == after["d_in"], "d_in")
    for i, (a, b) in enumerate(zip(before["modules"], after["modules"])):
        for name, value in a.items():
            integers.require(b.get(name, value) == value, "module %d: %s is %s, was %s", i, name, b.get(name), value)
    integers.require(len(before["modules"]) == len(after["modules"]), "the number of modules")
    for name, t in stored.items():
        integers.require(np.array_equal(saved[name].reshape(t.shape), t), "%s has changed", name)
    integers.require(saved.keys() == stored.keys(), "other tensors")
    sums = "".join("%08x" % zlib.crc32(t.tobytes()) for t in saved.values())
    integers.require(metadata["moe.crc32"] == sums, "moe.crc32 is not %s", sums)


def check(folder):
    counts = [0, 0]
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".h") and not name.startswith("saved_"):
            continue
        try:
            (check_integers if name.endswith(".h") else check_saved)(os.path.join(folder, name))
            counts[0] += 1
        except integers.Wrong as reason:
            counts[1] += 1
            print("%s FAILED: %s" % (name, reason))
    print("%d passed, %d failed" % tuple(counts))
    return counts[1] > 0 or counts[0] == 0


def main(words):
    if len(words) == 2 and words[0] == "check":
        return check(words[1])
    if len(words) == 4 and words[0] == "draw":
        first, count, written = int(words[2]), int(words[3]), 0
        os.makedirs(words[1], exist_ok=True)
        for seed in range(first, first + count):
            found = case(seed)
            if found:
                write(words[1], seed, *found)
                written += 1
        print("%d networks of %d seeds" % (written, count))
        return written == 0
    sys.stderr.write(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(int(main(sys.argv[1:])))
