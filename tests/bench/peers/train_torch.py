#!/usr/bin/env python3
"""The model of the bench `text` (tests/bench/bench.c) in PyTorch, one thread: a byte language model
with attention and mixtures of experts.

    python3 tests/bench/peers/train_torch.py TEXT [FORM] [STEPS]

Trains on the bytes of the file TEXT: forward, backward, clipping, AdamW. FORM is how the experts
are computed:
    loop    rows sorted by expert; one product per expert and matrix
    padded  rows sorted by expert into places of equal size; one batched product per matrix
With STEPS it takes so many and prints a line for each, then the median. Without, it takes a step
for every line that it reads, and answers

    seconds S tokens_per_second X loss Y

S is processor time. OPENBLAS_CORETYPE in the environment chooses OpenBLAS's kernels: older ones do
not know newer processors.
"""

import math
import sys
import time

import torch
import torch.nn.functional as F

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 128, 4, 4
EXPERTS, CHOSEN, INNER = 8, 2, 512
LENGTH, BATCH = 128, 16
RATE, CLIP, BALANCE = 1e-3, 1.0, 0.01


class Permute(torch.autograd.Function):
    """Rows in another order; going back is a plain selection too, without adding up."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, dy):
        return dy.index_select(0, ctx.inverse), None, None


def rms_norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


def normal(*shape, spread):
    return torch.nn.Parameter(torch.randn(*shape) * spread)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))
        self.into = normal(3 * WIDTH, WIDTH, spread=WIDTH ** -0.5)
        self.out = normal(WIDTH, WIDTH, spread=WIDTH ** -0.5)

    def forward(self, x, turns, mask):
        qkv = F.linear(rms_norm(x, self.gain), self.into).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0,
            3, 1, 4)
        q, k = rotate(qkv[:2], *turns)
        v = qkv[2]
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q * (WIDTH // HEADS) ** -0.5, k.transpose(-1, -2))
            y = torch.matmul(torch.softmax(scores + mask, -1), v)
        return x + F.linear(y.transpose(1, 2).reshape(-1, WIDTH), self.out)


def rotate(x, cosine, sine):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


class Mixture(torch.nn.Module):
    """Softmax over all experts, the best two, their probabilities divided by their sum; swiglu
    experts. Gate and up in one matrix are slower here."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))
        self.router = normal(EXPERTS, WIDTH, spread=WIDTH ** -0.5)
        spread_in, spread_out = WIDTH ** -0.5, INNER ** -0.5
        if form == "loop":
            self.gate = torch.nn.ParameterList([normal(INNER, WIDTH, spread=spread_in) for _ in range(EXPERTS)])
            self.up = torch.nn.ParameterList([normal(INNER, WIDTH, spread=spread_in) for _ in range(EXPERTS)])
            self.out = torch.nn.ParameterList([normal(WIDTH, INNER, spread=spread_out) for _ in range(EXPERTS)])
        else:
            self.gate = normal(EXPERTS, INNER, WIDTH, spread=spread_in)
            self.up = normal(EXPERTS, INNER, WIDTH, spread=spread_in)
            self.out = normal(EXPERTS, WIDTH, INNER, spread=spread_out)

    def loop(self, rows, counts):
        ys = []
        for part, gate, up, out in zip(rows.split(counts), self.gate, self.up, self.out):
            ys.append(F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), out))
        return torch.cat(ys)

    def padded(self, rows, counts):
        room = max(counts)
        places = torch.cat([torch.arange(n) + e * room for e, n in enumerate(counts)])
        x = rows.new_zeros(EXPERTS * room, WIDTH).index_copy(0, places, rows).view(EXPERTS, room, WIDTH)
        h = F.silu(torch.bmm(x, self.gate.transpose(1, 2))) * torch.bmm(x, self.up.transpose(1, 2))
        y = torch.bmm(h, self.out.transpose(1, 2))
        return y.view(-1, WIDTH).index_select(0, places)

    def forward(self, x):
        tokens = x.shape[0]
        h = rms_norm(x, self.gain)
        p = torch.softmax(F.linear(h, self.router), -1)
        best, chosen = p.topk(CHOSEN, -1)
        weights = best / best.sum(-1, keepdim=True)
        order = torch.argsort(chosen.view(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
        twice = h.unsqueeze(1).expand(-1, CHOSEN, -1).reshape(-1, WIDTH)
        rows = Permute.apply(twice, order, inverse)
        y = (self.loop if self.form == "loop" else self.padded)(rows, counts.tolist())
        y = Permute.apply(y, inverse, order).view(tokens, CHOSEN, WIDTH)
        y = torch.bmm(weights.unsqueeze(1), y).squeeze(1)
        balance = BALANCE * EXPERTS * (counts / (tokens * CHOSEN) * p.mean(0)).sum()
        return x + y, balance


class Model(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.embedding = normal(VOCABULARY, WIDTH, spread=WIDTH ** -0.5)
        self.attentions = torch.nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.mixtures = torch.nn.ModuleList([Mixture(form) for _ in range(LAYERS)])
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.turns = angles.cos(), angles.sin()
        self.mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)

    def forward(self, tokens):
        x, extra = F.embedding(tokens, self.embedding), 0.0
        for attention, mixture in zip(self.attentions, self.mixtures):
            x, balance = mixture(attention(x, self.turns, self.mask))
            extra = extra + balance
        return F.linear(rms_norm(x, self.gain), self.embedding, self.bias), extra


class Trainer:
    def __init__(self, path, form):
        with open(path, "rb") as file:
            self.text = torch.tensor(list(file.read()), dtype=torch.long)
        self.model = Model(form)
        self.parameters = list(self.model.parameters())
        # foreach=True is slower here: the tensors of one expert stay in the cache between the
        # operations.
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                                           foreach=False)
        self.steps = 0

    def batch(self):
        """The same pieces of text as in the bench: sequence number s starts at 9973 s, around
        the end."""
        room = len(self.text) - LENGTH - 1
        starts = [(self.steps * BATCH + i) * 9973 % room for i in range(BATCH)]
        tokens = torch.cat([self.text[s:s + LENGTH] for s in starts])
        labels = torch.cat([self.text[s + 1:s + LENGTH + 1] for s in starts])
        return tokens, labels

    def clip(self):
        gradients = [p.grad for p in self.parameters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm().item()
        if norm > CLIP:
            torch._foreach_mul_(gradients, CLIP / norm)

    def step(self):
        tokens, labels = self.batch()
        start = time.process_time()
        logits, extra = self.model(tokens)
        loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + extra).backward()
        self.clip()
        self.optimizer.step()
        taken = time.process_time() - start
        self.steps += 1
        return taken, loss.item()


def report(taken, loss):
    print("seconds %.6f tokens_per_second %.1f loss %.5f" % (taken, BATCH * LENGTH / taken, loss), flush=True)


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    form = sys.argv[2] if len(sys.argv) > 2 else "loop"
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    torch.set_num_threads(1)
    torch.manual_seed(42)
    trainer = Trainer(sys.argv[1], form)
    times = []
    for _ in range(steps) if steps > 0 else sys.stdin:
        taken, loss = trainer.step()
        times.append(taken)
        report(taken, loss)
    if steps > 0:
        print("median of %d:" % steps, end=" ")
        report(sorted(times)[steps // 2], loss)
    return 0


if __name__ == "__main__":
    sys.exit(main())
