"""What oracle.py computes with: arrays that know where they came from, and functions of them."""

import math

import numpy as np

tape = []  # every Var in the order in which it was made
real = [np.float64]  # the type that is computed in
moves = [None]  # what each array becomes, or None


def clear(precision, move=None):
    """Begins again, in that type; move: a function of the result of each operation, for errors."""
    del tape[:]
    real[0] = precision
    moves[0] = move


def last_bits(dice):
    """Errors of float arithmetic."""
    return lambda v: v * (1.0 + 1e-7 * dice.integers(-1, 2, v.shape))


class Var:
    """An array and where it came from: parents are pairs (Var, its gradient of ours)."""

    __array_priority__ = 1  # numpy leaves array + Var to us

    def __init__(self, value, *parents):
        self.value = np.asarray(value, real[0])
        if moves[0]:
            self.value = moves[0](self.value).astype(real[0])
        self.parents = parents
        self.grad = None
        tape.append(self)

    shape = property(lambda self: self.value.shape)
    T = property(lambda self: Var(self.value.T, (self, lambda g: g.T)))

    def __add__(self, other):
        other = lift(other)
        return Var(self.value + other.value, (self, lambda g: g), (other, lambda g: g))

    def __mul__(self, other):
        other = lift(other)
        return Var(self.value * other.value, (self, lambda g: g * other.value), (other, lambda g: g * self.value))

    def __truediv__(self, other):
        other = lift(other)
        return Var(self.value / other.value, (self, lambda g: g / other.value),
                   (other, lambda g: -g * self.value / other.value / other.value))

    def __matmul__(self, other):
        return Var(self.value @ other.value, (self, lambda g: g @ other.value.T), (other, lambda g: self.value.T @ g))

    def __pow__(self, n):
        return Var(self.value ** n, (self, lambda g: g * n * self.value ** (n - 1)))

    def __getitem__(self, at):
        def scatter(g):
            whole = np.zeros_like(self.value)
            np.add.at(whole, at, g)
            return whole
        return Var(self.value[at], (self, scatter))

    def sum(self, axis=None):
        """Summed axes stay, with length 1."""
        return Var(self.value.sum(axis, keepdims=True), (self, lambda g: np.broadcast_to(g, self.value.shape)))

    def reshape(self, *shape):
        return Var(self.value.reshape(*shape), (self, lambda g: g.reshape(self.value.shape)))

    def mean(self, axis=None):
        total = self.sum(axis)
        return total * (total.value.size / max(self.value.size, 1))

    __radd__ = __add__
    __rmul__ = __mul__
    __neg__ = lambda self: self * -1.0
    __sub__ = lambda self, other: self + -lift(other)
    __rsub__ = lambda self, other: lift(other) + -self
    __rtruediv__ = lambda self, other: lift(other) / self


def lift(a):
    return a if isinstance(a, Var) else Var(a)


def constant(a):
    """Passes no gradient."""
    return Var(a.value)


def backward(end):
    """Sets grad of everything that end, one number, depends on."""
    end.grad = np.ones_like(end.value)
    for var in reversed(tape):
        for parent, pull in var.parents if var.grad is not None else ():
            g = pull(var.grad)
            while g.ndim > parent.value.ndim:
                g = g.sum(0)
            for axis, n in enumerate(parent.shape):  # undo broadcasting
                g = g.sum(axis, keepdims=True) if n == 1 and g.shape[axis] != 1 else g
            parent.grad = g if parent.grad is None else parent.grad + g


def elementwise(f, slope):
    return lambda v: Var(f(v.value), (v, lambda g: g * slope(v.value)))


def where(mask, a, b):
    a, b = lift(a), lift(b)
    return Var(np.where(mask, a.value, b.value), (a, lambda g: g * mask), (b, lambda g: g * ~mask))


def stack_rows(parts):
    ends = np.cumsum([0] + [len(p.value) for p in parts])
    return Var(np.concatenate([p.value for p in parts]),
               *[(p, lambda g, a=a, b=b: g[a:b]) for p, a, b in zip(parts, ends[:-1], ends[1:])])


def stack_columns(parts):
    return stack_rows([p.T for p in parts]).T


# ---- functions ----

def logistic(v):
    return np.exp(-np.logaddexp(0.0, -v))


erfc = np.vectorize(math.erfc, otypes=[np.float64])
bell = lambda v: np.exp(-0.5 * v * v) / math.sqrt(2.0 * math.pi)
below = lambda v: 0.5 * erfc(-v / math.sqrt(2.0))  # Phi

exp = elementwise(np.exp, np.exp)
log = elementwise(np.log, lambda v: 1.0 / v)
sqrt = elementwise(np.sqrt, lambda v: 0.5 / np.sqrt(v))
tanh = elementwise(np.tanh, lambda v: 1.0 - np.tanh(v) ** 2)
absolute = elementwise(np.abs, np.sign)
normal_cdf = elementwise(below, bell)
sigmoid = elementwise(logistic, lambda v: logistic(v) * (1.0 - logistic(v)))  # in float, what saturation leaves
softplus = elementwise(lambda v: np.logaddexp(0.0, v), logistic)
relu = elementwise(lambda v: np.maximum(v, 0.0), lambda v: v > 0.0)
smooth_step = elementwise(lambda v: np.where(v <= -0.5, 0.0, np.where(v >= 0.5, 1.0, -2.0 * v ** 3 + 1.5 * v + 0.5)),
                          lambda v: np.where(np.abs(v) < 0.5, 1.5 - 6.0 * v * v, 0.0))
ACTS = {
    "relu": relu,
    "relu2": lambda v: relu(v) * relu(v),
    "silu": lambda v: v * sigmoid(v),
    "gelu": lambda v: v * normal_cdf(v),
    "gelu_tanh": lambda v: 0.5 * v * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v * v * v))),
    "tanh": tanh,
    "sigmoid": sigmoid,
    "identity": lambda v: v,
}


def ratio(a, b):
    """a / b, and 0 where b is 0."""
    good = b.value != 0.0
    return where(good, a / where(good, b, 1.0), 0.0)


def softmax(z, among=True, axis=-1):
    """Over the entries of the mask; a row without any is 0."""
    among = np.broadcast_to(among, z.shape)
    top = np.where(among, z.value, -np.inf).max(axis, keepdims=True)
    e = where(among, exp(where(among, z - np.where(np.isfinite(top), top, 0.0), 0.0)), 0.0)
    return ratio(e, e.sum(axis))


def log_sum_exp(z):
    top = z.value.max(-1, keepdims=True)
    return log(exp(z - top).sum(-1)) + top


def length(v):
    """The l2 norm of rows; its slope at 0 is 0."""
    square = (v * v).sum(-1)
    good = square.value > 0.0
    return where(good, sqrt(where(good, square, 1.0)), 0.0)


def unit(v):
    """Rows divided by their length; those shorter than 1e-12 are 0 and pass no gradient."""
    size = length(v)
    good = size.value >= 1e-12
    return where(good, v / where(good, size, 1.0), 0.0)


def entropy(p):
    """Of rows; 0 ln 0 = 0 with slope 0."""
    good = p.value > 0.0
    return -where(good, p * log(where(good, p, 1.0)), 0.0).sum(-1)


def descending(v):
    """Indices from the largest on; of equal values the lower index comes first."""
    return np.argsort(-v, kind="stable")


def exact_weights(s, scale):
    """scale / (s + alpha) with that alpha > -min s for which the mean is 1, by bisection."""
    low, high = -s.min(), scale  # the mean is infinite at the first, at most 1 at the second
    for _ in range(200):
        alpha = 0.5 * (low + high)
        low, high = (alpha, high) if (scale / (s + alpha)).mean() > 1.0 else (low, alpha)
    return scale / (s + high)


def assign(cost):
    """The column of each row of the cheapest assignment (Kuhn's method with potentials)."""
    n = len(cost)
    row_of, way = np.zeros(n + 1, int), np.zeros(n + 1, int)
    u, v = np.zeros(n + 1), np.zeros(n + 1)
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, used = np.full(n + 1, np.inf), np.zeros(n + 1, bool)
        while row_of[column]:
            used[column] = True
            slack = cost[row_of[column] - 1] - u[row_of[column]] - v[1:]
            better = ~used[1:] & (slack < least[1:])
            least[1:][better], way[1:][better] = slack[better], column
            following = 1 + int(np.where(used[1:], np.inf, least[1:]).argmin())
            step = least[following]
            u[row_of[used]] += step
            v[used] -= step
            least[~used] -= step
            column = following
        while column:
            row_of[column] = row_of[way[column]]
            column = way[column]
    answer = np.zeros(n, int)
    answer[row_of[1:] - 1] = np.arange(n)
    return answer
