"""A second interpreter of integer inference models: headers that moe_export_c wrote.

Operations are computed as the comments of their functions in moe.h, moe_kernels.h and
moe_routers.h describe them, in integers without limits: where the library has 32 bits, a result
that does not fit is an error. Vectors lie where the header says, so that an error in the plan of
scratch memory shows. Routing is documented within bounds, so Router computes it in floating point
and compares; what follows is computed with the library's own weights and must have its bits.
"""

import ast
import math
import re

import numpy as np

NONE = 0xffffffff


class Wrong(Exception):
    """The model or the library breaks a rule."""


def require(good, text, *values):
    if not good:
        raise Wrong(text % values)


def int32(v):
    """Numbers that the library has in 32 bits."""
    v = np.asarray(v, np.int64)
    require(np.abs(v).max(initial=0) < 1 << 31, "%d is no int32", np.abs(v).max(initial=0))
    return v


# ---- headers ----


def parse(text):
    """The constants of a header, by what follows the model's name."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    found = {}
    constant = r"static const (?:unsigned )?\w+ (\w+)(?:\[\d+\])?(?: MOE_FLASH\w*)? = (\{.*?\});"
    for name, value in re.findall(constant, text, re.S):
        value = re.sub(r"\(float\)", "", value).replace("MOEI_INT_NONE", str(NONE))
        value = re.sub(r"\b([A-Za-z_]\w*)", r'"\1"', value).replace('"NULL"', "None")
        found[name.partition("_")[2]] = ast.literal_eval(value.replace("{", "(").replace("}", ",)"))
    return found


class Fields:
    def __init__(self, names, values):
        self.__dict__.update(zip(names.split(), values))


def op_of(row):
    op = Fields("run shape at input other out factor factor2 index", row)
    op.run = op.run.replace("moei_int_op_", "")
    op.n, op.k, op.low, op.high, op.shift = op.shape
    op.round = 1 << op.shift >> 1
    return op


def mixture_of(row):
    m = Fields("router score n_score expert n_expert shared n_shared experts stride z p sum choices block "
               "weight_bits zeros copies constants copy n_copy constant n_constant", row)
    m.router = Fields("gate select values weight scale n_experts top_k most scratch groups groups_kept factor z_bits "
                      "weight_shift flags threshold tokens bias thresholds scales table over kept kept_from kept_end",
                      m.router)
    return m


# ---- scalar functions ----


def exp2(d, bits):
    """2^(-d / 2^bits) in units of 1/32768: 1 - t p(t), p a cubic, t with 14 bits and p with 17."""
    whole, rest = d >> bits, d & ((1 << bits) - 1)
    t = rest << (14 - bits) if bits <= 14 else rest >> (bits - 14)
    if whole > 16:
        return 0
    p = 90851 - ((31452 - ((7097 - (961 * t >> 14)) * t >> 14)) * t >> 14)
    value = ((((1 << 31) - p * t) >> 15 >> whole) + 1) >> 1
    error = abs(value - 32768.0 * 2.0 ** (-d / 2.0 ** bits))
    require(error < (1.9 if bits > 14 else 1.0), "2^(-%d / 2^%d) is not %d", d, bits, value)
    return value


def squares(x, also):
    """sum x^2 + also = result 4^e, 2^30 <= result < 2^32: result and 2 e."""
    s, power = int((x * x).sum()) + also, 0
    while s >= 1 << 32:
        s, power = s >> 2, power + 2
    while 0 < s < 1 << 30:
        s, power = s << 2, power - 2
    return s, power


# ---- a model ----


class Model:
    def __init__(self, text, experts=None):
        parts = parse(text)
        self.weights = bytes(v & 255 for v in parts["weights"]) if "weights" in parts else b""
        self.experts = bytes(v & 255 for v in parts["experts"]) if "experts" in parts else experts
        require(self.experts is not None or "mixtures" not in parts, "the experts' constants are nowhere")
        self.ops = [op_of(row) for row in parts["ops"]]
        self.mixtures = [mixture_of(row) for row in parts.get("mixtures", ())]
        self.attentions = [Fields("heads d_head keys values value room bits", a) for a in parts.get("attentions", ())]
        _, _, _, _, self.d_in, self.d_out, self.length, scratch, state, _, self.output_scale, *rest = parts[""]
        self.n_main = rest[6]
        self.vectors = np.zeros((scratch - state) // 4 * 2, np.int16)
        self.state = np.zeros(state, np.int8)
        self.place = 0

    # -- memory --

    def read(self, at, n):
        return self.vectors[at:at + n].astype(np.int64)

    def write(self, op, y):
        """A vector, zeros behind it."""
        padded = np.zeros((op.n + 3) // 4 * 4, np.int64)
        padded[:op.n] = y
        self.vectors[op.out:op.out + len(padded)] = padded

    def wide(self, at, n):
        return self.vectors[at:at + 2 * n].view(np.int32)

    def constants(self, op, kind, n, skip=0):
        begin = op.at + skip
        return np.frombuffer(self.base, "<" + kind, n, self.base_at + begin).astype(np.int64)

    def put(self, op, values):
        """clamp((v + round) >> shift)"""
        self.write(op, np.clip((int32(values) + op.round) >> op.shift, op.low, op.high))

    # -- a call --

    def infer(self, entered, choices):
        """The output codes for an input; choices: of each MoE layer what the library chose."""
        require(self.length == 0 or self.place < self.length, "the sequence is too long")
        self.chosen, self.token, self.weight = list(choices), 0, 32767
        self.base, self.base_at = self.weights, 0
        if self.d_in == 0:
            self.token = entered[0]
        else:
            self.vectors[:(self.d_in + 3) // 4 * 4] = 0
            self.vectors[:self.d_in] = entered
        self.run_ops(0, self.n_main)
        self.place += 1
        return self.read(self.ops[self.n_main - 1].out, self.d_out)

    def run_ops(self, first, n):
        for op in self.ops[first:first + n]:
            getattr(self, "op_" + op.run)(op)

    # -- products --

    def matrix(self, op):
        """bias [n], factor [n] and weights times block scales [n,k]."""
        four = op.run.startswith("int4")
        k4, blocks, group = (op.k + 3) // 4 * 4, (op.k + 31) // 32, 4 if four else 2
        groups, head = (op.n + 3) // 4 if four else op.n // 2, 4 * group
        size = 24 + 2 * k4 + 8 * blocks if four else 12 + 2 * k4
        raw = np.frombuffer(self.base, np.uint8, groups * size, self.base_at + op.at).reshape(groups, size)
        bias = raw[:, :head].copy().view("<i4").astype(np.int64).reshape(-1)
        factor = (raw[:, -8:] if four else raw[:, 8:12]).copy().view("<i2").astype(np.int64).reshape(-1)
        rows = (self.codes_4(raw[:, 16:-8], op.k) if four else self.codes_8(raw[:, 12:])).reshape(-1, k4)
        if not four and op.n % 2:
            alone = np.frombuffer(self.base, np.uint8, 8 + k4, self.base_at + op.at + groups * size)
            bias = np.append(bias, alone[:4].copy().view("<i4"))
            factor = np.append(factor, alone[4:6].copy().view("<i2"))
            rows = np.vstack([rows, alone[8:].view(np.int8).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(1, k4)])
        return bias[:op.n], factor[:op.n], rows[:op.n, :op.k]

    @staticmethod
    def codes_8(raw):
        a = raw[:, 0::2].copy().view(np.int8).astype(np.int64)
        b = raw.copy().view("<i2").astype(np.int64) - a >> 8
        return np.stack([a, b], 1)

    @staticmethod
    def codes_4(raw, k):
        """[fours, 4, k4]: of each input the sum of its four codes times 1, 16, 256 and 4096."""
        parts, at = [], 0
        for first in range(0, k, 32):
            count = (min(k - first, 32) + 3) // 4 * 4
            left = raw[:, at:at + 2 * count].copy().view("<i2").astype(np.int64) - 0x888
            codes = []
            for _ in range(4):
                codes.append((left + 8) % 16 - 8)
                left = (left - codes[-1]) // 16
            at += 2 * count
            scale = raw[:, at:at + 8].copy().view("<i2").astype(np.int64)
            parts.append(np.stack(codes, 1) * scale[:, :, None])
            at += 8
        return np.concatenate(parts, 2) if parts else np.zeros((len(raw), 4, 0), np.int64)

    def products(self, op):
        bias, factor, w = self.matrix(op)
        x = self.read(op.input, op.k)
        require(np.abs(x).max(initial=0) <= 127, "an input of a product is not narrow")
        total = bias + w @ x
        require(np.abs(bias).max(initial=0) + 127 * np.abs(w).sum(1).max(initial=0) < 1 << 30, "a sum may overflow")
        return total * factor >> 16

    def op_int8(self, op):
        self.put(op, self.products(op))

    def op_int8_add(self, op):
        total = self.wide(op.out, op.n)
        total[:] = int32(total + (self.products(op) * self.weight >> 16))

    op_int4, op_int4_add = op_int8, op_int8_add

    def halves(self, op, weight):
        """Products of 16-bit inputs: a power of two that makes them finest, then bytes."""
        bias, factor, w = self.matrix(op)
        x, e = self.read(op.input, op.k), 0
        every = int(np.bitwise_or.reduce(np.abs(x))) if op.k else 0
        while e < 14 and every << (e + 1) <= 32639:
            e += 1
        x = x << e
        upper = np.clip(x + 128 >> 8, -127, 127)
        lower = np.clip(x - 256 * upper, -127, 127)
        u = 1
        for part, share in ((upper, weight), (lower, weight + 128 >> 8)):
            u = u + (((bias + w @ part) * factor >> 16) * share >> 16)
        v = u << 6 - e if e <= 6 else u + (1 << e - 6 >> 1) >> e - 6
        k4 = (op.k + 3) // 4 * 4
        after = self.constants(op, "i4", op.n, op.n // 2 * (12 + 2 * k4) + op.n % 2 * (8 + k4))
        return int32(v + (after * weight >> 16))

    def op_int16(self, op):
        self.put(op, self.halves(op, 127 * 256))

    def op_int16_add(self, op):
        total = self.wide(op.out, op.n)
        total[:] = int32(total + self.halves(op, self.weight))

    # -- elementwise --

    def op_curve(self, op):
        c = np.frombuffer(self.weights, "<i2", 65, op.at).astype(np.int64)
        u = self.read(op.input, op.n) + 32768
        i, f = u >> 10, u & 1023
        self.put(op, c[i] + ((c[i + 1] - c[i]) * f >> 10))

    def op_multiply(self, op):
        self.put(op, self.read(op.input, op.n) * self.read(op.other, op.n))

    def op_add(self, op):
        self.put(op, self.read(op.input, op.n) * op.factor + self.read(op.other, op.n) * op.factor2)

    def op_rescale(self, op):
        self.put(op, self.read(op.input, op.n) * op.factor)

    # -- sequences --

    def op_row(self, op):
        r = self.token if op.index == 0 else self.place
        table = op_of(["int8", (op.k, op.n, 0, 0, 0), op.at, 0, 0, 0, 0, 0, 0])
        _, factor, w = self.matrix(table)
        self.put(op, (w[r] << 15) * factor[r] >> 16)

    def op_norm(self, op):
        n, x = op.n, self.read(op.input, op.n)
        low, high = self.constants(op, "u4", 2)
        gain = self.constants(op, "i2", n, 8)
        bias = self.constants(op, "i4", n, 8 + (n + 1) // 2 * 4) if op.index else 0
        s = int(x.sum()) if op.index else 0
        d = (n * int((x * x).sum()) - s * s) * 4 ** op.factor + (int(high) << 32) + int(low) or 1
        require(d < 1 << 62, "the sum of a norm")
        e = 0
        while d >= 1 << 32:
            d, e = d >> 2, e + 1
        while d < 1 << 30:
            d, e = d << 2, e - 1
        root = ((1 << 30) - 1) // math.isqrt(d)
        v, up = n * x - s, 7 + op.factor - e
        t = int32(v << up if up >= 0 else v >> -up) * root >> 16
        self.put(op, (t * np.sign(gain) * np.abs(gain) >> 16) + bias)

    def op_rotate(self, op):
        half, x = op.k // 2, self.read(op.input, op.n).reshape(-1, 2, op.k // 2)
        require(np.abs(x).max(initial=0) <= 23169, "too large to be rotated")
        near, far = (self.constants(op, "i2", 2 * half, 4 * half * r).reshape(-1, 2).T
                     for r in (self.place % 16, 16 + self.place // 16))
        c = near[0] * far[0] - near[1] * far[1] >> 15
        s = near[1] * far[0] + near[0] * far[1] >> 15
        a, b = x[:, 0], x[:, 1]
        self.put(op, np.stack([a * c - b * s, a * s + b * c], 1).reshape(-1))

    def op_attention(self, op):
        a, n = self.attentions[op.index], self.place + 1
        width = a.heads * a.d_head
        for at, vector in ((a.keys, op.other), (a.values, a.value)):
            new = self.read(vector, width)
            require(np.abs(new).max(initial=0) <= 127, "a key or value is not narrow")
            self.state[at + self.place * width:at + n * width] = new
        keys, values = (self.state[at:at + n * width].reshape(n, a.heads, a.d_head).astype(np.int64)
                        for at in (a.keys, a.values))
        q, less = self.read(op.input, width).reshape(a.heads, a.d_head), (self.place >> 9).bit_length()
        out = np.zeros((a.heads, a.d_head), np.int64)
        for h in range(a.heads):
            s = int32(keys[:, h] @ q[h])
            w = np.array([min(32767, exp2(int((s.max() - v) * op.factor >> 16), a.bits) >> less) for v in s])
            total, down = int(w.sum()), 0
            while total >> down >= 1 << 16:
                down += 1
            r = ((op.factor2 << 15) >> less) // (total >> down)
            out[h] = (int32(w @ values[:, h]) >> down) * r >> 16
        shift = op.shift - less
        out = np.clip((out.reshape(-1) + (1 << shift >> 1)) >> shift, op.low, op.high)
        self.write(Fields("n out", (width, op.out)), out)

    # -- MoE layers --

    def op_mixture(self, op):
        m = self.mixtures[op.index]
        self.run_ops(m.score, m.n_score)
        experts, weights = self.chosen[op.index]
        z = self.read(m.z, m.router.n_experts * (2 if m.router.gate == "moei_int_gate_predicted" else 1))
        Router(m.router, self.weights, self.token, z).check(experts, weights)
        require(len(experts) <= m.router.most, "too many choices")
        self.vectors[m.choices] = len(experts)
        self.vectors[m.choices + 1:m.choices + 1 + len(experts)] = experts
        at = m.choices + 1 + m.router.most
        self.vectors[at:at + len(experts)] = weights
        self.wide(m.sum, (op.n + 1) // 2 * 2)[:] = len(experts) * op.factor + op.factor2 >> 1
        for e, w in sorted(zip(experts, weights)):
            self.weight = w
            if e < m.zeros:
                self.block(m, e, m.stride)
                self.run_ops(m.expert, m.n_expert)
                continue
            self.base, self.base_at = self.weights, 0
            if e >= m.constants:
                self.run_ops(m.constant + (e - m.constants) * m.n_constant, m.n_constant)
            elif e >= m.copies:
                self.run_ops(m.copy, m.n_copy)
        self.base, self.base_at, self.weight = self.weights, 0, 32767
        self.run_ops(m.shared, m.n_shared)
        self.put(op, self.wide(m.sum, op.n))

    def block(self, m, e, size):
        """The constants of an expert: in place, or the first bytes of them in scratch memory."""
        self.base, self.base_at = self.experts, m.experts + e * m.stride
        if m.block != NONE:
            memory = memoryview(self.vectors).cast("B")
            memory[2 * m.block:2 * m.block + size] = self.experts[self.base_at:self.base_at + size]
            self.base, self.base_at = memory, 2 * m.block

    def each(self, op, measure):
        """For each expert: the k operations behind this one, then a number of what they make."""
        m, first = self.mixtures[op.index], self.ops.index(op) + 1
        z = []
        for e in range(m.router.n_experts):
            self.block(m, e, op.at)
            self.run_ops(first, op.k)
            z.append(int(int32(measure(self.read(op.input, op.n), op))) * op.factor >> 16)
        self.base, self.base_at = self.weights, 0
        z = np.clip((np.array(z) + op.round) >> op.shift, op.low, op.high)
        self.write(Fields("n out", (len(z), op.out)), z)

    def op_norm_l1(self, op):
        self.each(op, lambda v, op: np.abs(v).sum() << op.factor2)

    def op_norm_linf(self, op):
        self.each(op, lambda v, op: np.abs(v).max() << op.factor2)

    def op_norm_l2(self, op):
        def measure(v, op):
            result, power = squares(v, 0)
            root, up = math.isqrt(result), power // 2 + op.factor2
            return root << up if up >= 0 else root >> -up
        self.each(op, measure)

    def op_match(self, op):
        self.each(op, lambda v, op: (v @ self.read(op.other, op.n)) << op.factor2)

    def op_unit(self, op):
        x = self.read(op.input, op.n)
        square, power = squares(x, op.at)
        m = (op.factor << 15) // math.isqrt(square) if square else 0
        shift = 15 + op.shift + power // 2
        y = np.clip((int32(x * m) + (1 << shift >> 1)) >> shift, op.low, op.high) if m else 0 * x
        self.write(op, y)

    def op_cluster(self, op):
        experts, weights = self.choices_at(self.mixtures[op.index], op.other)
        best = sorted(range(len(experts)), key=lambda j: -weights[j])[:op.factor2]
        total = sum(weights[j] for j in best) if op.factor2 > 1 else len(best)
        c = np.full(op.n, op.factor, np.int64)
        if total > 0:
            c[:] = 0
            for j in best:
                a = weights[j] * 32767 // total if op.factor2 > 1 else 32767
                row = np.frombuffer(self.weights, "<i2", op.n, op.at + experts[j] * ((op.n + 3) // 4 * 4) * 2)
                c += a * row.astype(np.int64) + (1 << 14) >> 15
        self.put(op, self.read(op.input, op.n) * c)

    def choices_at(self, m, at):
        count = int(self.vectors[at])
        experts, weights = self.read(at + 1, count), self.read(at + 1 + m.router.most, count)
        return [int(e) for e in experts], [int(w) for w in weights]

    # -- weights of experts --

    def op_apply_weight(self, op):
        self.put(op, self.read(op.input, op.n) * (self.weight * op.factor + (1 << 14) >> 15))
        self.weight = 32767

    def op_set_weight(self, op):
        self.weight = int(self.vectors[op.input + op.k])

    def op_accumulate(self, op):
        total = self.wide(op.out, op.n)
        total[:] = int32(total + (int32(self.read(op.input, op.n) * self.weight) + op.round >> op.shift))

    def op_add_rest(self, op):
        _, weights = self.choices_at(self.mixtures[op.index], op.other)
        rest = min(max(op.at - (sum(weights) >> op.factor2), -32767), 32767)
        total = self.wide(op.out, op.n)
        part = self.read(op.input, op.n) * op.factor + op.round >> op.shift
        total[:] = int32(total + (part * rest >> 16))


# ---- routing ----


class Router:
    """A router in floating point, on the same logits, and what it says of the library's choice."""

    def __init__(self, r, tables, token, z):
        self.r, self.tables, self.token = r, tables, token
        self.z, self.predicted = z[:r.n_experts], z[r.n_experts:]
        self.octaves = self.z * 2.0 ** -r.z_bits
        self.use(r.gate or r.values or "moei_int_gate_logits")

    def use(self, function):
        """Takes a gate: units of p in one, and the documented error of p in units."""
        self.kind = function.split("_", 3)[3]
        softplus = 2.0 ** (8 + self.r.z_bits / 2) / math.sqrt(math.log(2.0))
        self.unit, self.error = {"softmax": (2.0 ** 20, 128.0), "sigmoid": (2.0 ** 20, 128.0),
                                 "sqrt_softplus": (softplus, 4.0), "logits": (256.0, 2.0),
                                 "relu": (256.0, 2.0), "predicted": (256.0, 2.0)}[self.kind]

    def table(self, at, kind, n, skip=0):
        return np.frombuffer(self.tables, "<" + kind, n, at + skip).astype(np.float64)

    def gate(self, among):
        """p of these experts."""
        o = self.octaves[among]
        if self.kind == "softmax":
            e = 2.0 ** (o - o.max())
            return e / e.sum()
        if self.kind == "sigmoid":
            return 1.0 / (1.0 + 2.0 ** -o)
        if self.kind == "sqrt_softplus":
            return np.sqrt(np.logaddexp2(0.0, o) * math.log(2.0))
        z = (self.predicted if self.kind == "predicted" else self.z)[among].astype(np.float64)
        return np.maximum(z, 0.0) if self.kind == "relu" else z

    def best(self, key, k, among=None):
        """The k largest in order, and whether each beats the next by more than the error."""
        order = np.argsort(-key, kind="stable")
        order = order if among is None else order[np.isin(order, among)]
        gaps = key[order][:-1] - key[order][1:]
        return order[:k], (gaps[:k] > 2.0 * self.error).all()

    def select(self):
        """Experts in order of choice, and whether that is sure."""
        r, e = self.r, self.r.n_experts
        how = r.select.replace("moei_int_select_", "")
        if how == "logits":
            return np.argsort(-self.z, kind="stable")[:r.top_k], True
        if how == "hash":
            row = np.frombuffer(self.tables, np.uint8, r.top_k, r.table + self.token * r.top_k).astype(int)
            if not r.gate:
                return row, True
        p = self.gate(np.arange(e)) * self.unit
        key = p + (self.table(r.bias, "i4", e) if r.bias != NONE else 0.0)
        if how == "hash":
            return self.best(key, r.top_k, row)
        if how == "top_k":
            return self.best(key, r.top_k)
        if how == "grouped":
            return self.grouped(key)
        if how == "each":
            groups = np.arange(e).reshape(r.groups, -1)
            parts = [self.best(key, r.top_k // r.groups, among) for among in groups]
            order, sure = self.best(key, r.top_k, np.concatenate([part for part, _ in parts]))
            return order, sure and all(clear for _, clear in parts)
        if how == "top_p":
            order, sure = self.best(p, e)
            sums = np.cumsum(p[order])
            count = int(np.append(np.flatnonzero(sums > r.threshold) + 1, e)[0])
            sure &= (np.abs(sums - r.threshold) > e * self.error).all()
            return self.best(key, count, order[:count]) if r.bias != NONE else (order[:count], sure)
        least = self.table(r.thresholds, "i4", e) if r.thresholds != NONE else np.full(e, float(r.threshold))
        above, clear = np.flatnonzero(p > least), (np.abs(p - least) > self.error).all()
        if above.size:
            order, sure = self.best(key, len(above), above)
            return order, sure and clear
        order, sure = self.best(p, 1 if r.flags & 1 else 0)
        return order, sure and clear

    def grouped(self, key):
        r = self.r
        parts = -np.sort(-key.reshape(r.groups, -1), 1)
        worth = parts[:, :2].sum(1) if r.flags & 2 else parts[:, 0]
        kept, clear = self.best(worth, r.groups_kept)
        among = np.flatnonzero(np.isin(np.arange(r.n_experts) // parts.shape[1], kept))
        order, sure = self.best(key, r.top_k, among)
        return order, sure and clear

    def weights(self, experts):
        """Codes before the scale, and their error."""
        r, how = self.r, self.r.weight.replace("moei_int_weight_", "")
        one = 2.0 ** 15
        if how == "one":
            return np.full(len(experts), one), 1.0
        if how == "uniform":
            return np.full(len(experts), one / len(experts)), 1.0
        if how == "sparsemixer":
            return self.sparsemixer(experts) * one, 4.0
        if how == "softmax":
            e = 2.0 ** (self.octaves - self.octaves.max())
            return e[experts] / e.sum() * one, 4.0
        if how == "over":
            return self.weights_over(experts)
        self.use(r.values)
        p = self.gate(experts)
        if how == "raw":
            return p * self.unit / 2.0 ** r.weight_shift, self.error / 2.0 ** r.weight_shift + 1.0
        return self.normalized(p, how), self.quotient_error()

    def quotient_error(self):
        return 4.0 * 2.0 ** max(0, 8 - self.r.z_bits) if self.kind == "sqrt_softplus" else 4.0

    @staticmethod
    def normalized(p, how):
        size = p.sum() if how == "sum" else math.sqrt((p * p).sum())
        return p / size * 2.0 ** 15 if size else p * 0.0

    def weights_over(self, experts):
        """Some choices are normalized; the others, from kept_from to kept_end, keep p."""
        r = self.r
        kept = (experts >= r.kept_from) & (experts < r.kept_end)
        self.use(r.kept)
        wanted = self.gate(np.arange(r.n_experts))[experts] * 2.0 ** 15
        self.use(r.values)
        if not kept.all():
            wanted[~kept] = self.normalized(self.gate(experts[~kept]), r.over.replace("moei_int_weight_", ""))
        return wanted, 5.0

    def sparsemixer(self, experts):
        left, found = np.ones(self.r.n_experts, bool), []
        for e in experts:
            apart = self.z[e] - self.z
            size = np.maximum(np.abs(self.z), self.z[e])
            stay = left & (apart * 65536 <= size * self.r.threshold)
            found.append(1.0 / (2.0 ** (self.octaves - self.octaves[e]))[stay].sum())
            left[e] = False
        return np.array(found)

    def check(self, experts, weights):
        order, sure = self.select()
        if sure:
            require(list(order) == list(experts), "chosen %s, not %s", experts, list(order))
        require(len(set(experts)) == len(experts), "an expert twice")
        if not len(experts):
            return
        wanted, error = self.weights(np.array(experts))
        if self.r.scale:
            own = self.r.scales != NONE
            factor = self.table(self.r.scales, "i2", self.r.n_experts)[experts] if own else self.r.factor
            wanted = np.clip(wanted, -32767, 32767) * factor / 32768.0
            error += 1.0
        off = np.abs(np.clip(wanted, -32767, 32767) - weights)
        require((off <= error).all(), "weights %s, not %s", weights, [round(float(w), 2) for w in wanted])
