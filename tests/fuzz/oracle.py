"""A second interpreter of the routers and the layer, and cases drawn at random that it computed.

    python3 tests/fuzz/oracle.py check FILE-OR-FOLDER...    recomputes golden cases and compares
    python3 tests/fuzz/oracle.py draw FOLDER FIRST COUNT    writes case_SEED.safetensors for COUNT
                                                            seeds from FIRST on

The formulas are written again here from the definition of the routers, in numpy and float64,
section by section in its order; nothing is taken from the headers. Derivatives come from a tape of
elementary operations (tape.py), so that no backward formula of the library is repeated. Every
discrete decision is noted with its margin, so that draw.py can leave out cases that rounding
decides. tests/golden/README.md describes the files, tests/golden/golden.c compares the library with
them, tests/fuzz/oracle.sh does all of that.
"""

import math
import os
import sys

import numpy as np

sys.dont_write_bytecode = True  # the repository stays as it is
from case import configure, read_case, write_case
from tape import (ACTS, Var, absolute, assign, backward, clear, constant, descending, entropy, exact_weights, length,
                  lift, log, log_sum_exp, logistic, normal_cdf, ratio, relu, sigmoid, smooth_step, softmax, softplus,
                  sqrt, stack_columns, stack_rows, tanh, unit, where)

# ---- the layer ----

# No gradient is wanted for these, whatever they take part in.
NO_GRADIENT = ("router.selection_bias", "router.ac_running", "router.cutoff", "router.cutoff_updates")


class Layer:
    """One call of a layer. Padding is left out at the start: arrays have a row per real token."""

    def __init__(self, settings, tensors, precision=np.float64, move=None, alone=True):
        if alone:  # otherwise it is a part of what is on the tape
            clear(precision, move)
        self.c = configure(settings)
        step = tensors.get("router.step", np.zeros(1))[0]
        if self.c.switch_at and step < self.c.switch_at:
            self.c.select = self.c.switch_from
        self.competes = self.c.compete_rate > 0.0 and self.c.training and step >= self.c.compete_from
        if self.c.compete_rate > 0.0 and not self.competes:
            self.c.loss_distill = 0.0
        self.tensors = tensors
        self.leaves = {}
        self.margin = np.inf  # of the closest decision
        self.exact = "ties" in settings  # equal scores are exactly equal
        self.product = None  # of rows and a matrix of packed weights of experts, without gradient
        n = self.c.n_tokens
        mask = tensors.get("mask", np.ones(n))
        self.real = np.flatnonzero(mask)
        self.n = len(self.real)
        offsets = tensors.get("seq", [0, n])
        before = np.concatenate([[0], np.cumsum(mask != 0)])  # real tokens before each
        spans = [(int(before[a]), int(before[b])) for a, b in zip(offsets[:-1], offsets[1:])]
        self.sequences = [np.arange(a, b) for a, b in spans if b > a]
        self.without = self.c.n_zero + self.c.n_copy + self.c.n_constant  # experts without matrices
        self.matrices = self.c.n_experts - self.without

    # -- what a case holds --

    def has(self, name):
        return name in self.tensors

    def leaf(self, name):
        if name not in self.leaves:
            self.leaves[name] = Var(self.tensors[name])
        return self.leaves[name]

    def rows(self, name):
        """Of the real tokens."""
        return self.leaf(name)[self.real]

    def given(self, name):
        return self.tensors[name][self.real]

    def close(self, *gaps):
        """Notes how clear a decision is. NaN is not clear at all; inf says nothing."""
        for gap in gaps:
            gap = np.asarray(gap, np.float64)
            gap = np.where(np.isnan(gap), 0.0, gap)
            gap = gap[np.isfinite(gap)]
            self.margin = min(self.margin, gap.min()) if gap.size else self.margin

    def first(self, score, k, all_of_them=False):
        """The k largest of each row, as a mask, and how clear that is."""
        chosen = np.zeros(score.shape, bool)
        for t, row in enumerate(score):
            if (np.isnan(row) | (row == np.inf)).any():  # numbers have left their type
                self.close(0.0)
            order = descending(row)
            order = order[np.isfinite(row[order])]
            chosen[t, order[:k]] = True
            falling = row[order]
            gaps = falling[:-1] - falling[1:]
            # Equal zeros are equal however they are rounded.
            gaps[(gaps == 0.0) & ((falling[1:] == 0.0) | self.exact)] = np.inf
            self.close(gaps if all_of_them else gaps[k - 1:k])
        return chosen

    # -- experts --

    def linear(self, v, name, bias=None, row=None):
        weight = self.leaf(name) if row is None else self.leaf(name)[row]
        if self.product and name.startswith(("experts.", "shared.", "latent.")):
            v = Var(self.product(v.value, weight.value))
        else:
            v = v @ weight.T
        if bias is None or not self.has(bias):
            return v
        return v + (self.leaf(bias) if row is None else self.leaf(bias)[row])

    def expert(self, e, v):
        """All that is computed on the way, by name."""
        c = self.c
        if e >= self.matrices:
            return {"output": self.expert_without_matrices(e - self.matrices, v)}
        if c.expert == "linear":
            return {"output": self.linear(v, "experts.weight", "experts.bias", e)}
        if c.expert == "mlp":
            gate = self.linear(v, "experts.fc1.weight", "experts.fc1.bias", e)
            hidden = ACTS[c.act](gate)
            output = self.linear(hidden, "experts.fc2.weight", "experts.fc2.bias", e)
            return {"gate": gate, "act": hidden, "hidden": hidden, "output": output}
        nodes = {}
        if c.expert == "factorised":
            nodes["down"] = self.linear(v, "experts.reduce", row=e)
            nodes["gate"] = self.linear(nodes["down"], "experts.expand", row=e)
        else:
            nodes["gate"] = self.limited(self.linear(v, "experts.gate", "experts.gate_bias", e), -np.inf)
        nodes["up"] = self.limited(self.linear(v, "experts.up", "experts.up_bias", e), -c.swiglu_limit)
        if c.swiglu_alpha != 1.0:
            nodes["act"] = nodes["gate"] * sigmoid(nodes["gate"] * c.swiglu_alpha)
        else:
            nodes["act"] = ACTS[c.act if c.expert == "glu" else "silu"](nodes["gate"])
        nodes["product"] = nodes["hidden"] = nodes["act"] * (nodes["up"] + c.swiglu_offset)
        nodes["output"] = self.linear(nodes["product"], "experts.down", "experts.down_bias", e)
        return nodes

    def limited(self, v, low):
        """gpt-oss: v within low and swiglu_limit; the slope beyond is 0."""
        high = self.c.swiglu_limit
        if high == 0.0 or self.c.expert != "swiglu":
            return v
        self.close(np.abs(v.value - low), np.abs(v.value - high))
        return where((v.value > low) & (v.value < high), v, np.clip(v.value, low, high))

    def expert_without_matrices(self, i, v):
        """14A: zero, copy and constant experts, in this order."""
        if i < self.c.n_zero:
            return v * 0.0
        if i < self.c.n_zero + self.c.n_copy:
            return v
        i -= self.c.n_zero + self.c.n_copy
        a = softmax(v @ self.leaf("experts.constant_gate")[i].T)
        return a[:, 0:1] * v + a[:, 1:2] * self.leaf("experts.constant")[i:i + 1]

    def seen(self):
        """What experts see: x, or h of 14C."""
        x = self.rows("x")
        return self.linear(x, "latent.in") if self.has("latent.in") else x

    def shared(self, v):
        gate = self.linear(v, "shared.gate")
        y = self.linear(ACTS["silu"](gate) * self.linear(v, "shared.up"), "shared.down")
        if self.has("shared.sigmoid"):
            y = y * sigmoid(v @ self.leaf("shared.sigmoid").reshape(-1, 1))
        return y

    # -- 1. input --

    def input(self):
        c = self.c
        x = self.rows("router_x" if self.has("router_x") else "x")
        if c.input == "jitter" and c.training:
            return x * self.given("jitter")
        if c.input == "scaled_rms":
            size = sqrt((x * x).mean(-1) + 1e-6)
            return x / size * self.leaf("router.input_scale").reshape(1, -1) * c.d_model ** -0.5
        if c.input == "adaptive_clustering":
            return x * self.feature_weights(x.value)
        return x

    def feature_weights(self, x):
        """m_t of adaptive clustering, a constant."""
        c = self.c
        ranked = self.ranked_before()
        n_clusters = int(self.given("previous.experts").max(initial=0)) + 1
        if c.ac_mode in ("running", "random"):
            table = np.array(self.tensors["router.ac_running"], np.float64)
        else:
            h = self.given("previous.input") if c.ac_mode == "paper" else x
            table, _ = self.clusters(h, n_clusters)
        m = np.ones((self.n, c.d_model))
        for t, best in enumerate(ranked):
            total = sum(w for _, w in best[:c.ac_mix])
            if best:
                m[t] = sum(w / total * table[e] for e, w in best[:c.ac_mix])
        return m

    def ranked_before(self):
        """Pairs of expert and weight that each token has from the previous layer, best first."""
        experts, weights = self.given("previous.experts"), self.given("previous.weights")
        return [[(e, w) for e, w in ((row[i], ws[i]) for i in descending(ws)) if e >= 0]
                for row, ws in zip(experts, weights)]

    def clusters(self, h, count):
        """M [count,d] of all clusters, and which have two tokens or more; M of the others is 1."""
        home = np.array([r[0][0] if r else -1 for r in self.ranked_before()], int)
        large = [k for k in range(count) if (home == k).sum() >= 2]
        table = np.ones((count, self.c.d_model))
        if large:
            table[large] = self.weights_of_clusters([np.asarray(h, np.float64)[home == k] for k in large])
        return table, large

    def weights_of_clusters(self, clusters):
        """M_kq of clusters of at least two tokens."""
        c = self.c
        spread = {
            "mad": lambda h: np.abs(h - h.mean(0)).mean(0),
            "variance": lambda h: ((h - h.mean(0)) ** 2).mean(0),
            "pairwise": lambda h: np.abs(h[:, None] - h[None]).mean((0, 1)),
        }[c.ac_spread]
        s = np.array([spread(h) for h in clusters])
        if c.ac_lambda > 0.0:
            return np.array([exact_weights(row, c.ac_lambda) for row in s])
        if c.ac_mode in ("paper", "running"):
            m = 1.0 / (s + 1e-6)
            return m / m.mean(1, keepdims=True)
        if c.ac_spread == "variance":
            return 1.0 / (s + 0.1)
        m = 1.0 / (s + 1e-4)
        m = np.minimum(m, 10.0 * m.mean())
        return m / m.mean(0)

    # -- 2. score --

    def score(self, u):
        c = self.c
        if c.score in ("linear", "random"):
            return self.linear(u, "router.weight", "router.bias")
        if c.score == "cosine":
            v = self.linear(u, "router.projection") if self.has("router.projection") else u
            v = v if c.cosine_keep_length else unit(v)
            tau = self.leaf("router.temperature").reshape(1, 1) if self.has("router.temperature") else c.cosine_tau
            return v @ unit(self.leaf("router.weight")).T / tau
        if c.score == "grap":
            block = c.d_model // c.n_experts
            sums = u @ Var(np.kron(np.eye(c.n_experts), np.ones((block, 1))))
            return ratio(sums, length(u) * math.sqrt(block)) if c.grap_cosine else sums / block
        if c.score == "mlp":
            hidden = ACTS[c.router_act](self.linear(u, "router.fc1.weight", "router.fc1.bias"))
            return self.linear(hidden, "router.fc2.weight", "router.fc2.bias")
        if c.score == "dselect":
            return self.score_dselect(u)
        nodes = [self.expert(e, self.seen()) for e in range(c.n_experts)]
        if c.score == "norm":
            return stack_columns([self.norm(node[c.norm_node]) for node in nodes])
        if c.score == "competition":
            return self.responses(nodes)
        hidden = ACTS[c.router_act](self.linear(u, "router.fc1.weight", "router.fc1.bias"))
        query = self.linear(hidden, "router.query")
        keys = [self.linear(node["hidden"], "router.key") for node in nodes]
        return stack_columns([(query * key).sum(-1) for key in keys]) / math.sqrt(query.shape[1])

    def responses(self, nodes):
        """How experts answer: CompeteSMoE of 2025, or of 2024."""
        outputs = [node["output"] for node in nodes]
        return stack_columns([length(y) if self.c.compete == "norm" else softplus(y).mean(-1) for y in outputs])

    def compete(self, z):
        """14H: the experts' responses are the logits; the router is taught."""
        c = self.c
        c.gate, c.gate_temperature, c.select = "softmax", 1.0, "top_k"
        self.taught = z
        self.clean = self.responses([self.expert(e, self.seen()) for e in range(c.n_experts)])
        return self.clean

    def norm(self, v):
        if self.c.norm_order == "l2":
            return length(v)
        if self.c.norm_order == "l1":
            return absolute(v).sum(-1)
        size = absolute(v)
        falling = -np.sort(-size.value, 1)
        self.close((falling[:, 0] - falling[:, 1])[falling[:, 0] > 0.0] if falling.shape[1] > 1 else [])
        return size[np.arange(self.n), size.value.argmax(1)].reshape(-1, 1)

    def score_dselect(self, u):
        """14F: selectors choose by smooth binary codes."""
        bits = max(1, math.ceil(math.log2(self.c.n_experts)))
        step = smooth_step(self.linear(u, "router.codes"))
        share = softmax(self.linear(u, "router.mix"))
        self.selectors = []
        for i in range(share.shape[1]):
            columns = []
            for e in range(self.c.n_experts):
                q = lift(1.0)
                for j in range(bits):
                    bit = step[:, i * bits + j:i * bits + j + 1]
                    q = q * (bit if e >> j & 1 else 1.0 - bit)
                columns.append(q)
            self.selectors.append(stack_columns(columns))
        return sum(share[:, i:i + 1] * q for i, q in enumerate(self.selectors))

    # -- 3. noise, with what 14A and 14D put before it --

    def logits(self, u):
        c = self.c
        z = self.score(u)
        if self.has("router.residual") and self.has("previous.logits"):
            z = z + self.linear(self.rows("previous.logits"), "router.residual")
        if c.logit_cap > 0.0:
            z = c.logit_cap * tanh(z / c.logit_cap)
        self.clean = z
        self.noise_scale = lift(c.noise_sigma or 1.0 / c.n_experts)
        if c.noise == "none" or not c.training:
            return z
        noise = self.given("noise")
        if c.noise == "noisy_topk":
            self.noise_scale = softplus(self.linear(u, "router.noise_weight")) + c.noise_floor
            return z + noise * self.noise_scale
        return z + noise

    # -- 4. gate --

    def gate(self, z):
        t = self.c.gate_temperature
        return {
            "softmax": lambda: softmax(z / t),
            "sigmoid": lambda: sigmoid(z / t),
            "sqrt_softplus": lambda: sqrt(softplus(z)),
            "relu": lambda: relu(z),
            "identity": lambda: z,
        }[self.c.gate]()

    # -- 5. refine --

    def refine(self, u, r):
        if self.c.refine == "none":
            return r
        how = self.refine_similarity if self.c.refine == "similarity" else self.refine_attention
        return stack_rows([how(at, u[at], r[at]) for at in self.sequences])

    def earlier(self, n):
        """Whom causality lets tokens look at: a mask [i,j]."""
        return np.tril(np.ones((n, n), bool)) if self.c.causal else np.ones((n, n), bool)

    def neighbours(self, r):
        """Whom tokens look at."""
        near = self.earlier(len(r.value))
        if self.c.lower_entropy_only:
            h = entropy(r).value
            apart = np.abs(h - h.T)[near & ~np.eye(len(h), dtype=bool)]
            self.close(apart)
            near &= h.T <= h
        return near

    def refine_similarity(self, _, u, r):
        c = self.c
        v = unit(u) if c.similarity_scale == "l2" else u
        left = v @ self.leaf("router.similarity") if self.has("router.similarity") else v
        s = left @ v.T / c.similarity_tau
        if c.similarity_scale == "rsqrt_d":
            s = s / math.sqrt(c.d_model)
        return softmax(s, self.neighbours(r)) @ r

    def refine_attention(self, at, u, r):
        c = self.c
        near = self.neighbours(r)
        if c.attention_u == "output":
            u = self.rows("attention.output")[at]
        tokens = self.real[at]
        weights, outputs = self.leaf("attention.weights"), self.leaf("attention.outputs")
        a = [weights[h][np.ix_(tokens, tokens)] for h in range(weights.shape[0])]
        o = [outputs[h][tokens] for h in range(weights.shape[0])]
        if c.attention_heads == "all":
            used = range(len(a))
        else:
            used = [c.attention_head if c.attention_heads == "fixed" else self.sharpest_head(a)]
        logs, live = [], []
        for h in used:
            apart = (u * u).sum(-1) - 2.0 * (u @ o[h].T) + (o[h] * o[h]).sum(-1).T
            live.append(near & (a[h].value > 0.0))
            logs.append(where(live[-1], log(where(live[-1], a[h], 1.0)) - apart / (2.0 * c.attention_sigma ** 2), 0.0))
        # One softmax over heads and tokens is the product of that over heads and those within.
        mixed = softmax(stack_columns(logs), np.concatenate(live, 1)) @ stack_rows([r] * len(logs))
        return where(np.concatenate(live, 1).any(1, keepdims=True), mixed, r)

    def sharpest_head(self, a):
        near = self.earlier(a[0].shape[0])
        mean = np.array([entropy(where(near, h, 0.0)).value.mean() for h in a])
        order = np.sort(mean)
        self.close(order[1:2] - order[:1])
        return int(mean.argmin())

    # -- 6. select --

    def select(self, z, p):
        c = self.c
        bias = self.tensors["router.selection_bias"] if self.has("router.selection_bias") else 0.0
        biased = p.value + bias
        self.ranking = z.value if c.weight == "sparsemixer" else biased  # of choices, sections 8 and 9
        rises = c.gate in ("softmax", "sigmoid", "sqrt_softplus") and c.refine == "none"
        score = z.value if rises and not self.has("router.selection_bias") else biased
        if self.has("dropped"):  # 14B: expert dropout
            dropped = self.tensors["dropped"]
            dropped = np.broadcast_to(dropped if dropped.ndim == 1 else dropped[self.real], score.shape) != 0
        else:
            dropped = np.zeros(score.shape, bool)
        hide = lambda v: np.where(dropped, -np.inf, v)
        if c.select == "top_k":
            return self.first(hide(score), c.top_k)
        if c.select == "dense":
            return ~dropped
        if c.select == "positive":
            self.close(np.abs(z.value) if c.gate == "relu" else np.abs(p.value))
            return hide(p.value) > 0.0
        if c.select == "threshold":
            return self.select_threshold(hide(p.value))
        if c.select == "expert_choice":
            chosen_by = z.value if c.expert_choice_score == "z" else p.value
            chosen = np.zeros(chosen_by.shape, bool)
            for at in self.sequences if c.expert_choice_scope == "sequences" else [np.arange(self.n)]:
                chosen[at] = self.first(hide(chosen_by)[at].T, self.choice_capacity(len(at))).T
            return chosen
        if c.select == "grouped_each":
            return np.concatenate([self.first(part, c.top_k // c.groups)
                                   for part in np.split(hide(score), c.groups, 1)], 1)
        return {
            "hash": lambda: self.indicated(self.tensors["router.table"][self.given("token_ids")]),
            "given": lambda: self.indicated(self.given("given")),
            "grouped_top_k": lambda: self.select_groups(biased),
            "top_p": lambda: self.select_top_p(p.value),
            "affinity": lambda: self.select_affinity(z.value),
            "sinkhorn": lambda: self.first(self.sinkhorn(z.value) if c.training else z.value, c.top_k),
            "balanced": lambda: self.select_balanced(z.value) if c.training else self.first(z.value, c.top_k),
            "sample": lambda: self.first(p.value, c.top_k),  # evaluation
            "expert_threshold": lambda: self.select_cutoff(z.value),
        }[c.select]()

    def indicated(self, experts):
        chosen = np.zeros((self.n, self.c.n_experts), bool)
        for t, row in enumerate(experts):
            chosen[t, row[row >= 0]] = True
        return chosen

    def choice_capacity(self, n):
        c = self.c
        exact = (c.capacity_factor or 1.0) * n / c.n_experts
        self.close(np.abs(exact + 0.5 - np.round(exact + 0.5)) or np.inf)
        return min(max(1, math.floor(exact + 0.5)), n)

    def select_groups(self, score):
        c = self.c
        parts = score.reshape(self.n, c.groups, -1)
        best = -np.sort(-parts, 2)
        worth = best[:, :, 0] if c.group_score == "max" else best[:, :, :2].sum(2)
        kept = np.repeat(self.first(worth, c.groups_kept), c.n_experts // c.groups, 1)
        return self.first(np.where(kept, score, -np.inf), c.top_k)

    def select_top_p(self, p):
        chosen = np.zeros(p.shape, bool)
        for t, row in enumerate(p):
            order = descending(row)
            sums = np.cumsum(row[order])
            self.close(np.abs(sums - self.c.top_p))
            beyond = np.flatnonzero(sums > self.c.top_p)
            count = beyond[0] + 1 if beyond.size else len(row)
            chosen[t, order[:count]] = True
            self.first(row[None], count)  # for its margin
        return chosen

    def theta(self):
        if not self.c.threshold_learned:
            return lift(self.c.threshold)
        theta = self.leaf("router.threshold").reshape(1, -1)
        return sigmoid(theta) if self.c.threshold_sigmoid else theta

    def select_threshold(self, p):
        above = p - self.theta().value
        self.close(np.abs(above))
        chosen = above > 0.0
        when = self.c.threshold_fallback
        if when == "always" or when == "evaluation" and not self.c.training:
            none = ~chosen.any(1)
            chosen[none] = self.first(p[none], 1)
        return chosen

    def select_affinity(self, delta):
        """LocMoE+: experts keep a prefix of the tokens whose best expert they are."""
        c = self.c
        best = self.first(delta, 1)
        chosen = np.zeros_like(best)
        for e in range(c.n_experts):
            tokens = np.flatnonzero(best[:, e])
            if not tokens.size:
                continue
            order = tokens[descending(delta[tokens, e])]
            sums = np.cumsum(np.maximum(delta[order, e], 0.0))
            wanted = c.affinity_sum if c.affinity_sum > 0.0 else c.affinity_mass * sums[-1]
            if sums[-1] > 0.0:
                self.close(np.abs(sums - wanted) if c.affinity_mass < 1.0 or c.affinity_sum else np.inf)
            reach = np.flatnonzero(sums >= wanted)
            count = reach[0] + 1 if reach.size else len(order)
            count = max(c.capacity_min, count if wanted > 0.0 else 0)
            count = min(count, c.capacity or len(order), len(order))
            chosen[order[:count], e] = True
            self.first(delta[tokens, e][None], count)  # for its margin
        return chosen

    def sinkhorn(self, z):
        n, experts = z.shape
        q = np.exp(z - z.max(1, keepdims=True))
        d1 = np.ones(experts)
        for _ in range(100):
            d0 = (1.0 / n) / (q @ d1)
            before, d1 = d1, (1.0 / experts) / (q.T @ d0)
            change = np.abs(d1 - before).mean()
            self.close(abs(change / 1e-4 - 1.0))  # whether this step is the last
            if change < 1e-4:
                break
        return d0[:, None] * q * d1

    def select_balanced(self, z):
        """BASE: experts take floor(N/E) tokens, N mod E of them one more; the largest sum."""
        n, experts = z.shape
        least, more = n // experts, n % experts
        columns = [(e, False) for e in range(experts) for _ in range(least)]
        columns += [(e, True) for e in range(experts)] if more else []
        # Rows beyond the tokens fill the seats that stay free: only second ones may.
        values = np.zeros((len(columns), len(columns)))
        for i, (e, free) in enumerate(columns):
            values[:n, i] = z[:, e]
            values[n:, i] = 0.0 if free else -1e6
        chosen = np.zeros(z.shape, bool)
        for t, i in enumerate(assign(-values)[:n]):
            chosen[t, columns[i][0]] = True
        self.close(self.loss_of_second_best(z, chosen, least))
        return chosen

    def loss_of_second_best(self, z, chosen, least):
        """By how much the sum falls at least when tokens move in a circle of experts."""
        experts = z.shape[1]
        loss = np.full((experts, experts), np.inf)
        for e in range(experts):
            if chosen[:, e].any():
                loss[e] = (z[chosen[:, e], e][:, None] - z[chosen[:, e]]).min(0)
        full = chosen.sum(0) > least  # such an expert may hand its seat to one that has fewer
        loss[np.ix_(~full, full)] = np.minimum(loss[np.ix_(~full, full)], 0.0)
        np.fill_diagonal(loss, np.inf)
        for e in range(experts):
            loss = np.minimum(loss, loss[:, e:e + 1] + loss[e:e + 1])
        return loss.diagonal()

    def select_cutoff(self, z):
        """14D: expert threshold."""
        a, updates = self.tensors["router.cutoff"], float(self.tensors["router.cutoff_updates"].reshape(-1)[0])
        cutoff = a / (1.0 - self.c.threshold_rho ** updates) if updates > 0.0 else a
        self.close(np.abs(z - cutoff))
        return z >= cutoff

    # -- 7. weight --

    def weigh(self, z, p, chosen):
        w = self.weights(z, p, chosen)
        return w * self.leaf("router.expert_scale").reshape(1, -1) if self.has("router.expert_scale") else w

    def weights(self, z, p, chosen):
        c = self.c
        if self.competes:
            part = where(chosen, z, 0.0)
            return softmax(z, chosen) if c.compete == "norm" else ratio(part, part.sum(-1) + z * 0.0)
        if c.weight == "sparsemixer":
            return self.sparsemixer(z)
        if c.weight == "softmax":
            w = softmax(z, chosen & self.counted(chosen))
            return w + where(chosen & ~self.counted(chosen), p, 0.0)
        f = lift(chosen * 1.0)
        if c.select == "threshold" and c.threshold_learned:
            theta = self.theta()
            apart = (p.value - theta.value) / 0.01
            slope = chosen * logistic(apart) * logistic(-apart) / 0.01
            f = Var(f.value, (p, lambda g: g * slope), (theta, lambda g: -g * slope))
        if c.weight == "one":
            return f
        if c.weight == "uniform":
            return f / np.maximum(chosen.sum(1, keepdims=True), 1)
        w = where(chosen, p, 0.0) * f
        counted = self.counted(chosen)
        part = where(counted, w, 0.0)
        if c.weight == "sum":
            return where(counted, ratio(part, part.sum(-1) + w * 0.0), w)
        if c.weight == "p_norm":
            powers = where(part.value > 0.0, where(part.value > 0.0, part, 1.0) ** c.weight_p, 0.0).sum(-1)
            good = powers.value > 0.0
            size = where(good, where(good, powers, 1.0) ** (1.0 / c.weight_p), 0.0)
            return where(counted, ratio(part, size + w * 0.0), w)
        return w

    def counted(self, chosen):
        """14A: over whom weights are normalised."""
        counted = chosen.copy()
        if self.c.weight_over == "nonzero":
            counted[:, self.matrices:self.matrices + self.c.n_zero] = False
        if self.c.weight_over == "real":
            counted[:, self.matrices:] = False
        return counted

    def sparsemixer(self, z):
        c = self.c
        left = np.ones(z.shape, bool)
        w = z * 0.0
        for j in range(c.top_k):
            top = np.where(left, z.value, -np.inf).max(1, keepdims=True)
            apart = ratio(lift(top - z.value), lift(np.maximum(np.abs(z.value), top))).value
            self.close(np.abs(apart - 2.0 * c.sparsemixer_eps)[left])
            stay = left & (apart <= 2.0 * c.sparsemixer_eps)
            share = softmax(z, stay)
            best = self.first(np.where(left, z.value, -np.inf), 1)
            pick, factor = best, np.ones((self.n, 1))
            if c.sparsemixer_sample and c.training:  # 14E
                pick = self.first(np.where(stay, z.value + self.given("gumbel")[:, j], -np.inf), 1)
                sure = (pick & best).any(1) | (self.given("uniform")[:, j] > 0.75)
                factor = np.where(sure, 1.0, 1.0 / 3.0)[:, None]
            picked = where(pick, share, 0.0)
            w = w + Var(picked.value * factor, (picked, lambda g: g))
            left = left & ~pick
        self.sampled = ~left
        return w

    # -- 8. capacity --

    def place(self, u, p, w, chosen):
        """The surviving choices."""
        c = self.c
        limits = self.capacities(u)
        if limits is None:
            return chosen, w
        rank = np.zeros(chosen.shape, int)  # of choice
        for t in range(self.n):
            order = descending(np.where(chosen[t], self.ranking[t], -np.inf))
            rank[t, order] = np.arange(c.n_experts)
        self.first(np.where(chosen, self.ranking, -np.inf), 1, all_of_them=True)
        tokens = np.arange(self.n)
        if c.drop_order == "priority":
            tokens = descending(p.value.max(1))
            self.first(p.value.max(1)[None], 1, all_of_them=True)
        kept = np.zeros_like(chosen)
        for e in range(c.n_experts):
            mine = tokens[chosen[tokens, e]]
            if c.drop_order == "score":
                order = mine[descending(p.value[mine, e])]
                self.first(p.value[mine, e][None], min(limits[e], len(mine)))
            else:
                order = mine[np.argsort(rank[mine, e], kind="stable")]
            kept[order[:limits[e]], e] = True
        w = where(kept, w, 0.0)
        return kept, ratio(w, w.sum(-1) + w * 0.0) if c.renormalize == "after" else w

    def locality_bound(self, u):
        """C_min of LocMoE."""
        delta = np.abs((unit(u) @ unit(self.leaf("router.weight")).T).value).max()
        exact = math.exp(min(self.c.d_model * delta ** 2 / (2.0 - delta ** 2), 100.0)) / self.c.n_experts
        self.close(abs(exact - round(exact)) if exact < self.n + 1 else np.inf)
        return min(max(1, math.ceil(exact)), self.n)

    def capacities(self, u):
        """C of each expert; None: no limit."""
        c = self.c
        least, factor = max(c.drop_min, c.capacity_min), c.drop_factor
        if not c.training and c.drop_factor_eval > 0.0:
            factor = c.drop_factor_eval
        if c.select not in ("expert_choice", "expert_threshold") and c.capacity_factor > 0.0:
            factor = c.capacity_factor
        if c.drop_capacity:
            return [min(c.drop_capacity, self.n)] * c.n_experts
        if c.capacity_bound == "every":
            least = max(least, self.locality_bound(u))
            factor = factor or 1e-9  # alone it is the capacity
        if not factor:
            return None
        even = [factor * c.top_k * self.n / c.n_experts] * c.n_experts
        if self.without:  # 14A
            share = factor * c.top_k * self.n / (c.zero_tau * self.matrices + self.without)
            even = [share * (c.zero_tau if e < self.matrices else 1.0) for e in range(c.n_experts)]
        for exact in even:
            self.close(abs(exact - round(exact)) if exact > 0.5 and exact != round(exact) else np.inf)
        return [min(max(least, math.ceil(exact)), self.n) for exact in even]

    # -- 9. losses --

    def losses(self, u, z, r, p, w, chosen):
        """w is that of section 7; chosen is S before capacity."""
        c = self.c
        every = {
            "balance": lambda: self.loss_balance(p, chosen),
            "z": lambda: (log_sum_exp(z) ** 2).mean(),
            "importance": lambda: self.variation({"probabilities": lambda: p, "gate": lambda: self.gate(self.clean),
                                                  "weights": lambda: w}[c.importance_over]().sum(0), c.unbiased),
            "load": lambda: self.variation(self.load(z), c.unbiased),
            "entropy": lambda: entropy(p).mean(),
            "usage_entropy": lambda: -entropy(p.mean(0)),
            "locality": lambda: self.loss_locality(p),
            "l1": lambda: (p.sum(0) * chosen.sum(0)).sum() * (c.n_experts / (c.top_k * self.n ** 2)),
            "orthogonal": self.loss_orthogonal,
            "distill": lambda: self.loss_distill(z),
            "stable_balance": lambda: self.loss_stable(z, chosen),
            "selector_entropy": lambda: sum(entropy(q).mean() for q in self.selectors),
            "selector_reach": self.loss_reach,
            "predictor": lambda: self.loss_predictor(u, chosen),
        }
        found = {}
        for name, value in every.items():
            factor = getattr(c, "loss_" + name)
            if factor > 0.0:
                found[name] = value().reshape(1) * factor
        if c.loss_similarity_same > 0.0 or c.loss_similarity_diff > 0.0:
            found["similarity"] = self.loss_similarity(p).reshape(1)
        return found

    def loss_balance(self, p, chosen):
        c = self.c
        total = p.sum(-1)
        share = ratio(p, total + p * 0.0)
        if c.balance_over == "first":
            chosen = chosen & self.first(np.where(chosen, self.ranking, -np.inf), 1)
        cost = np.ones(c.n_experts)
        cost[self.matrices:] = c.zero_tau

        def of(tokens):
            n = chosen[tokens].sum(0).astype(float)
            f = n / len(tokens) if c.balance_over == "tokens" else n / max(n.sum(), 1.0)
            if c.zero_average and self.without:
                f[self.matrices:] = f[self.matrices:].mean()
            return (share[tokens].mean(0) * (f * cost)).sum() * c.n_experts
        if c.balance_scope == "batch":
            return of(np.arange(self.n))
        return sum(of(at) for at in self.sequences) / len(self.sequences)

    def variation(self, total, unbiased):
        """CV^2."""
        n = total.value.size
        if n == 1:
            return total.sum() * 0.0
        apart = total - total.mean()
        variance = (apart * apart).sum() / (n - 1 if unbiased else n)
        return ratio(variance, total.mean() ** 2)

    def load(self, noisy):
        c = self.c
        if c.top_k >= c.n_experts:
            return noisy.sum(0) * 0.0
        parts = []
        for e in range(c.n_experts):
            others = np.where(np.arange(c.n_experts) == e, -np.inf, noisy.value)
            kth = np.argsort(-others, 1, kind="stable")[:, c.top_k - 1]
            self.first(others, c.top_k, all_of_them=True)
            threshold = noisy[np.arange(self.n), kth].reshape(-1, 1)
            scale = self.noise_scale[:, e:e + 1] if self.noise_scale.shape else self.noise_scale
            parts.append(normal_cdf((self.clean[:, e:e + 1] - threshold) / scale))
        return stack_columns(parts).sum(0)

    def loss_similarity(self, p):
        c = self.c
        n, experts = p.shape
        if n == 1:
            return p.sum() * 0.0
        if self.has("distances"):
            apart = self.tensors["distances"][np.ix_(self.real, self.real)]
        else:
            x = self.rows("x").value
            apart = np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))
        np.fill_diagonal(apart := np.array(apart), 0.0)
        both = (p @ p.T)  # sum_e p(e given x) p(e given x')
        all_pairs = p.sum(-1) @ p.sum(-1).T
        value = (both * apart).sum() * (c.loss_similarity_same / experts)
        if experts > 1:
            value = value - ((all_pairs - both) * apart).sum() * (c.loss_similarity_diff / (experts ** 2 - experts))
        return value / (n * n - n)

    def loss_locality(self, p):
        c = self.c
        node = np.arange(c.n_experts) * c.nodes // c.n_experts
        node = self.tensors["expert_node"] if self.has("expert_node") else node
        home = self.given("home") if self.has("home") else np.zeros(self.n, int)
        on_node = p @ Var(np.eye(c.nodes)[node])
        total = lift(0.0)
        for o in range(c.nodes):
            tokens = np.flatnonzero(home == o)
            if tokens.size:
                local = np.full(c.nodes, 0.01 / max(c.nodes - 1, 1))
                local[o] = 0.99 if c.nodes > 1 else 1.0
                q = on_node[tokens].mean(0)
                q = where(q.value > 0.0, q, 0.0)
                total = total + (-entropy(q) - (q * np.log(local)).sum()) * (len(tokens) / self.n)
        return total

    def loss_orthogonal(self):
        w = unit(self.leaf("router.weight"))
        cos = w @ w.T
        return (cos * cos * (1.0 - np.eye(len(cos.value)))).sum()

    def loss_distill(self, z):
        teacher = z.value if self.competes else self.given("teacher")
        z = self.taught if self.competes else z
        share = softmax(lift(teacher)).value
        if self.c.distill == "mse":
            apart = softmax(z) - share
            return (apart * apart).mean()
        wanted = share if self.c.distill == "ce_soft" else self.first(teacher, 1) * 1.0
        return (log_sum_exp(z) - (z * wanted).sum(-1)).mean()

    def loss_stable(self, z, chosen):
        """14F"""
        n = chosen.sum(0)
        mean = n.sum() / len(n)
        return (where(chosen, sigmoid(z), 0.0).sum(0) * ((n - mean) / mean)).sum() if mean > 0.0 else z.sum() * 0.0

    def loss_predictor(self, u, chosen):
        """14K: reaches the predictor alone"""
        v = constant(u) @ self.leaf("router.predictor").T
        return softplus(where(chosen, -v, v)).sum(-1).mean()

    def loss_reach(self):
        total = lift(0.0)
        for q in self.selectors:
            mass = q.sum(-1)
            large = mass.value > 1e-6
            total = total + where(large, 1.0 / where(large, mass, 1.0), 1e6).mean()
        return total

    # -- the whole --

    def combine(self, w, kept):
        c = self.c
        seen = self.seen()
        y = lift(np.zeros((self.n, 1)))
        for e in range(c.n_experts):
            we = w[:, e:e + 1]
            if c.apply_to == "input":
                y = y + where(kept[:, e:e + 1], self.expert(e, seen * we)["output"], 0.0)
            else:
                y = y + we * self.expert(e, seen)["output"]
        return self.linear(y, "latent.out") if self.has("latent.out") else y

    def soft(self, u):
        """Soft MoE: logits, outputs."""
        c = self.c
        seen, slots = self.seen(), self.leaf("router.slots")
        if c.soft_normalise:
            z = unit(u) @ (unit(slots) * self.leaf("router.scale").reshape(1, 1)).T
        else:
            z = u @ slots.T
        parts = []
        for at in self.sequences:
            inputs = softmax(z[at], axis=0).T @ seen[at]
            outputs = stack_rows([self.expert(e, inputs[e * c.slots:(e + 1) * c.slots])["output"]
                                  for e in range(c.n_experts)])
            parts.append(softmax(z[at]) @ outputs)
        y = stack_rows(parts)
        combined = np.concatenate([softmax(z[at]).value for at in self.sequences])
        self.final = combined.reshape(self.n, c.n_experts, c.slots).sum(2)
        return z, self.linear(y, "latent.out") if self.has("latent.out") else y

    def forward(self):
        """All that is wanted, by name; gradients are added by derive."""
        c, want = self.c, {}
        u = self.input()
        losses = {}
        if c.select == "soft":
            z, y = self.soft(u)
        else:
            z = self.logits(u)
            if self.competes:
                z = self.compete(z)
            r = self.gate(z)
            p = self.refine(u, r)
            chosen = self.select(z, p)
            w = self.weigh(z, p, chosen)
            chosen = self.sampled if c.weight == "sparsemixer" else chosen
            losses = self.losses(u, z, r, p, w, chosen)
            kept, w = self.place(u, p, w, chosen)
            w = w * c.scale
            y = self.combine(w, kept)
            if c.add_input:  # StableMoE, BASE
                y = y + (1.0 - w.sum(-1)) * self.rows("x")
            self.counts = chosen.sum(0)
            self.final = np.where(kept, w.value, -np.inf)
            want = {"gate": self.spread(r), "probabilities": self.spread(p), "weights": self.spread(w),
                    "selected": self.spread(lift(kept * 1.0))}
        y = self.spread(y)
        if self.has("shared.gate"):
            y = y + self.shared(self.leaf("x"))
        return {"logits": self.spread(z), **want, "y": y, **{"loss." + k: v for k, v in losses.items()}}

    # -- 10. state, after one step of the optimizer --

    def state(self):
        c, after = self.c, {}
        if c.bias_rate > 0.0:
            b = self.tensors["router.selection_bias"]
            after["router.selection_bias"] = b + c.bias_rate * np.sign(self.counts.mean() - self.counts)
        if c.input == "adaptive_clustering" and c.ac_mode == "running":
            m, large = self.clusters(self.given("previous.input"), c.n_experts)
            table = np.array(self.tensors["router.ac_running"], np.float64)
            table[large] = c.ac_rho * table[large] + (1.0 - c.ac_rho) * m[large]
            after["router.ac_running"] = table
        return after

    def spread(self, rows):
        """Zeros for padding."""
        whole = np.zeros((self.c.n_tokens, rows.shape[1]))
        whole[self.real] = rows.value
        return Var(whole, (rows, lambda g: g[self.real]))

    def wants(self):
        """What a case file wants, by name, as arrays."""
        found = self.forward()
        result = {name: v.value for name, v in found.items()}
        if self.c.training:
            total = (found["y"] * self.tensors["dy"]).sum().reshape(1)
            for name, v in found.items():
                total = total + v if name.startswith("loss.") else total
            backward(total)
            for name, leaf in self.leaves.items():
                frozen = self.c.score == "random" and name in ("router.weight", "router.bias")
                if name not in NO_GRADIENT and not frozen:
                    result["grad." + name] = np.zeros_like(leaf.value) if leaf.grad is None else leaf.grad
            result.update({"after." + name: value for name, value in self.state().items()})
        return result


# ---- checking ----

def error_of(got, want):
    got, want = np.asarray(got, float).reshape(-1), np.asarray(want, float).reshape(-1)
    if got.size != want.size:
        return np.inf
    error = np.abs(got - want).max(initial=0.0) / (1e-6 + np.abs(want).max(initial=0.0))
    return np.inf if np.isnan(error) else error  # no comparison finds a NaN the larger


def check_case(path):
    """The largest error and where."""
    settings, tensors = read_case(path)
    got = Layer(settings, tensors).wants()
    real_rows = np.flatnonzero(tensors.get("mask", np.ones(int(settings["n_tokens"]))))
    worst = (0.0, "")
    for name, want in tensors.items():
        name = name[5:] if name.startswith("want.") else ""
        if not name or "evaluation" in settings and name.startswith(("grad.", "loss.")):
            continue
        value = got.get(name, np.zeros(0))
        if name in ("logits", "gate", "probabilities") and value.size:
            value, want = value[real_rows], want.reshape(value.shape)[real_rows]
        worst = max(worst, (error_of(value, want), name))
    return worst


def check(paths):
    passed = failed = 0
    for path in paths:
        files = [os.path.join(path, f) for f in sorted(os.listdir(path))] if os.path.isdir(path) else [path]
        for file in files:
            if not file.endswith(".safetensors"):
                continue
            worst, name = check_case(file)
            good = worst <= 1e-9
            passed, failed = passed + good, failed + (not good)
            print("%-36s %-7s %.1e %s" % (os.path.basename(file)[:-12], "ok" if good else "FAILED", worst, name))
    print("%d passed, %d failed" % (passed, failed))
    return failed > 0 or passed == 0


def draw(folder, first, count):
    """Cases of seeds; those whose decisions are close whatever the numbers are left out."""
    import draw as drawing
    os.makedirs(folder, exist_ok=True)
    written = 0
    for seed in range(first, first + count):
        found = drawing.case(seed)
        if found is not None:
            write_case(os.path.join(folder, "case_%06d.safetensors" % seed), *found)
            written += 1
    print("%d cases of %d seeds" % (written, count))
    return written == 0


def main(words):
    if len(words) >= 2 and words[0] == "check":
        return check(words[1:])
    if len(words) == 4 and words[0] == "draw":
        return draw(words[1], int(words[2]), int(words[3]))
    sys.stderr.write(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(int(main(sys.argv[1:])))
