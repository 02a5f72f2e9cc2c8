#!/usr/bin/env python3
"""Whole models of every architecture in random shapes, with the logits that they must have.

  python3 tests/golden/shapes.py FOLDER [COUNT] [SEED] [WORD]
      writes COUNT models of each architecture and form under FOLDER (whose names contain WORD), as
      tests/golden/models.c reads them; 0: removes FOLDER
  python3 tests/golden/shapes.py seeds FOLDER
      puts a small one of each into FOLDER as inputs of tests/fuzz/fuzz_file.c

The logits are computed in Python's numbers from the formulas of these models, one token after the
other; nothing is shared with the library. Numbers of heads, widths, experts, tied embeddings, dense
blocks, windows, scalings of the angles, biases, norms, storage and the keys that may be absent are
drawn. A tensor has its name in GGUF; folders() names it as the families' own programs do.
"""
import json
import math
import os
import random
import re
import shutil
import struct
import sys
from operator import mul


def f32(x):
    return struct.unpack('<f', struct.pack('<f', x))[0]


# ---- what models are ----

# r: rotary pairs of GGUF and of folders, 0 neighbours or 1 halves; kind: GGUF's architecture.
PAIRS = {'llama': (0, 1), 'granitemoe': (0, 1), 'olmoe': (1, 1), 'qwen2moe': (1, 1), 'qwen3moe': (1, 1),
         'deepseek': (0, None), 'deepseek2': (0, 0), 'gpt-oss': (1, 1), 'phimoe': (1, 1), 'dots1': (1, 1),
         'glm4moe': (1, 1), 'ernie4_5-moe': (0, 0), 'hunyuan-moe': (1, 1), 'bailingmoe': (0, None),
         'bailingmoe2': (1, None), 'lfm2moe': (1, 1), 'minimax-m2': (1, 1), 'llama4': (0, 0), 'dbrx': (1, None),
         'grok': (1, None)}
HEAD_NORM = ('qwen3moe', 'dots1', 'glm4moe', 'hunyuan-moe', 'bailingmoe2', 'lfm2moe')
DENSE_FIRST = ('deepseek', 'deepseek2', 'dots1', 'glm4moe', 'ernie4_5-moe', 'bailingmoe2', 'lfm2moe')
OWN_WIDTH = ('qwen3moe', 'gpt-oss', 'glm4moe', 'minimax-m2')   # heads' width is not d / heads
SIGMOID = ('deepseek2', 'dots1', 'glm4moe', 'bailingmoe2', 'lfm2moe', 'minimax-m2')


class Model:
    """Settings of one model, drawn; T: its tensors, lists of rows."""


def draw(m, r):
    """Settings that all architectures have, then those of single ones."""
    a, hf = m.arch, m.folder
    m.layers = r.choice((1, 2, 2, 3, 4))
    m.heads = r.choice((1, 2, 3, 4, 5, 6))
    m.kv = r.choice([k for k in range(1, m.heads + 1) if m.heads % k == 0])
    m.hd = r.choice((4, 6, 8, 10, 16)) if a != 'gpt-oss' else 8
    m.d = m.heads * m.hd if a not in OWN_WIDTH and a != 'deepseek2' else r.choice((18, 24, 30, 33, 48))
    m.vd = m.hd
    m.rot = m.hd
    if a in ('glm4moe', 'bailingmoe2', 'minimax-m2'):
        m.rot = m.hd // 2 - m.hd // 2 % 2 or m.hd
    if a in ('olmoe', 'deepseek', 'dots1') and not hf:
        m.kv = m.heads
    m.vocab = r.choice((37, 61, 80, 97))
    m.experts = r.choice((1, 2, 3, 5, 8, 9))
    m.top = r.randint(1, min(m.experts, 4))
    m.ff, m.dense_ff = r.choice((5, 8, 13, 20, 32)), r.choice((7, 16, 33))
    m.dense = set(range(r.choice((0, 1, max(m.layers - 1, 0), min(2, m.layers - 1)))) if a in DENSE_FIRST else ())
    m.tied = r.random() < 0.4
    m.eps = f32(r.choice((1e-5, 1e-6)))
    m.base = r.choice((10000.0, 500000.0, 1e6))
    m.context = 4096
    m.shared, m.shared_count, m.gated = 0, 0, a == 'qwen2moe'
    if a in ('qwen2moe', 'hunyuan-moe', 'granitemoe'):
        m.shared = r.choice((6, 12, 17)) if a != 'granitemoe' or r.random() < 0.6 else 0
    if a == 'hunyuan-moe' and hf:
        m.shared = m.ff
    if a in DENSE_FIRST and a != 'lfm2moe' or a == 'bailingmoe':
        m.shared_count = r.choice((1, 2, 3) if a in ('deepseek', 'bailingmoe', 'dots1') else (0, 1, 2))
        if a == 'bailingmoe2' or a == 'glm4moe' or (a == 'deepseek2' and not hf):
            m.shared_count = m.shared_count or 1
        m.shared = m.shared_count * m.ff
    m.bias = a in ('qwen2moe', 'gpt-oss', 'phimoe') or (a == 'glm4moe' and r.random() < 0.7)
    m.out_bias = a in ('gpt-oss', 'phimoe')
    if hf and a in ('granitemoe', 'olmoe', 'qwen3moe', 'dots1', 'hunyuan-moe') and r.random() < 0.4:
        m.bias = m.out_bias = True
    if not hf and a in ('llama', 'granitemoe') and r.random() < 0.3:
        m.bias = m.out_bias = True
    m.head_norm = a in HEAD_NORM and (a != 'glm4moe' or r.random() < 0.6)
    m.whole_norm = a in ('olmoe', 'minimax-m2')
    m.norm_after = a == 'hunyuan-moe'
    m.sinks = a == 'gpt-oss'
    m.windows = [0] * m.layers
    m.chunks = [0] * m.layers
    m.rotates = [True] * m.layers
    m.scaling = None
    m.q_rank = m.kv_rank = m.nope = 0
    m.clamp = f32(r.choice((0.5, 1.6))) if a == 'dbrx' or (a == 'olmoe' and hf and r.random() < 0.5) else 0.0
    m.scores = a in SIGMOID and not (a == 'deepseek2' and r.random() < 0.5)
    m.weight_norm = a not in ('olmoe', 'qwen2moe', 'deepseek')
    m.weight_scale = 1.0
    m.groups = m.groups_kept = 1
    m.group_max = False
    m.selection = a in ('glm4moe', 'minimax-m2') or (a == 'deepseek2' and m.scores) or (
        a in ('ernie4_5-moe', 'bailingmoe2', 'lfm2moe', 'dots1') and (hf or r.random() < 0.7))
    if hf and a in ('olmoe', 'qwen2moe', 'qwen3moe', 'lfm2moe'):
        m.weight_norm = r.random() < 0.5
    if a in ('deepseek2', 'dots1', 'glm4moe', 'bailingmoe', 'bailingmoe2'):
        m.weight_norm = r.random() < 0.5 and not (hf and a == 'deepseek2' and not m.scores)
        m.weight_scale = f32(r.choice((1.0, 2.5)))
    if a == 'bailingmoe2' or (a == 'deepseek2' and (m.scores or not hf)) or (hf and a in ('dots1', 'glm4moe')):
        m.groups = r.choice((1, 2, 4))
        if m.groups > 1:
            m.experts = m.groups * r.choice((2, 3))
            m.groups_kept = r.randint(1, m.groups - 1)
            m.top = r.randint(1, min(4, m.experts // m.groups * m.groups_kept))
    m.embedding_scale = m.residual = m.logit_scale = 1.0
    m.logit_cap = m.score_cap = 0.0
    m.truncate = True
    m.scale = 1 / math.sqrt(m.hd)
    m.storage = 'f32' if not hf else r.choice(('bf16', 'bf16', 'f16', 'f32'))
    m.nextn = 1 if not hf and a in ('glm4moe', 'bailingmoe2') and r.random() < 0.4 else 0
    draw_one(m, r)
    draw_scaling(m, r)


def draw_one(m, r):
    a, hf = m.arch, m.folder
    if a == 'granitemoe':
        m.embedding_scale, m.residual = r.choice((1.0, 2.5)), f32(r.choice((1.0, 0.6)))
        m.logit_scale, m.scale = 1 / f32(r.choice((1.0, 0.4, 3.0))), f32(r.choice((0.2, 0.4)))
    elif a == 'deepseek2':
        m.q_rank, m.kv_rank = r.choice((0, 9, 20)), r.choice((10, 16, 24))
        m.nope, m.rot, m.vd = r.choice((6, 9, 10)), r.choice((4, 8)), r.choice((5, 12, 16))
        m.hd, m.kv = m.nope + m.rot, m.heads
        m.scale = 1 / math.sqrt(m.hd)
        m.halves = not hf and r.random() < 0.5
        if hf and not m.scores:
            m.groups = r.choice((1, 2))
            m.experts = m.groups * r.choice((2, 4))
            m.groups_kept, m.group_max = 1, m.groups > 1
            m.top = r.randint(1, m.experts // m.groups)
    elif a == 'gpt-oss':
        m.hd = m.rot = m.vd = r.choice((8, 16))
        m.scale = 1 / math.sqrt(m.hd)
        m.window = r.choice((3, 5, 8))
        m.windows = [m.window if i % 2 == 0 else 0 for i in range(m.layers)]
        m.truncate = not hf or r.random() < 0.5
        if hf and r.random() < 0.5:
            m.storage, m.d, m.ff = 'mxfp4', r.choice((32, 64)), r.choice((32, 64))
    elif a == 'llama' and hf and r.random() < 0.5:
        m.windows = [r.choice((3, 7))] * m.layers
    elif a == 'bailingmoe':
        m.rot = r.choice((m.hd, m.hd // 2 - m.hd // 2 % 2 or m.hd))
        m.scale = 1 / math.sqrt(m.rot)
    elif a == 'lfm2moe':
        m.layers = max(m.layers, 2)
        m.dense = {i for i in m.dense if i < m.layers}
        m.windows, m.chunks, m.rotates = [0] * m.layers, [0] * m.layers, [True] * m.layers
        m.convolution = [i for i in range(m.layers) if r.random() < 0.5] or [0]
        m.taps = r.choice((2, 3, 4))
        m.tied = True
    elif a == 'llama4':
        m.layers = r.choice((2, 4, 5))
        m.step = r.choice((1, 2))
        m.dense = {i for i in range(m.layers) if (i + 1) % m.step != 0}
        m.shared = m.ff
        m.chunk, m.floor, m.growth = (r.choice((4, 8)), r.choice((3, 6)), 0.1) if hf else (8192, 8192, 0.1)
        m.unchunked = not hf and r.random() < 0.3
        m.rotates = [i % 4 != 3 or m.unchunked for i in range(m.layers)]
        m.qk_plain = True
        m.windows = [0] * m.layers
        m.chunks = [m.chunk if m.rotates[i] and not m.unchunked else 0 for i in range(m.layers)]
    elif a == 'grok':
        m.given = r.random() < 0.5
        m.scale = f32(0.07) if m.given else 0.08838834764831845
        m.score_cap, m.embedding_scale = (25.0, 12.0) if m.given else (30.0, 78.38367176906169)
        m.logit_scale = 0.75 if m.given else 0.5773502691896257
        m.logit_cap = 4.0 if m.given and r.random() < 0.5 else 0.0
        m.beside = r.choice((0, 6, 15)) # width of the dense part
    if a == 'phimoe':
        m.sparsemixer = hf
        m.top = 2
        m.experts = max(m.experts, 2)
        m.tied = False
    if a == 'glm4moe' and hf or a == 'dots1' and hf:
        m.scores = True
    if hf and a in ('qwen3moe', 'qwen2moe') and m.layers > 1 and r.random() < 0.4:
        m.dense = {r.randrange(m.layers)}
        if len(m.dense) == m.layers:
            m.dense = set()
    if hf and a == 'qwen3moe' and r.random() < 0.5:
        m.storage, m.block = 'fp8', r.choice((16, 32))


def draw_scaling(m, r):
    """How angles are scaled: a name and its numbers."""
    a, hf = m.arch, m.folder
    kinds = [None, None]
    if a in ('gpt-oss', 'deepseek2'):
        kinds = [None, 'yarn', 'yarn'] + ['linear'] * (a == 'deepseek2' and not hf)
    elif a == 'phimoe':
        kinds = ['longrope', 'longrope', None]
    elif a == 'llama4':
        kinds = [None, 'freqs'] if not hf else [None, 'llama3']
    elif a in ('llama', 'granitemoe'):
        kinds = [None, 'linear', 'yarn', 'llama3' if hf else 'freqs' if a == 'llama' else None]
    elif a == 'hunyuan-moe' and hf:
        kinds = [None, 'dynamic']
    elif a != 'lfm2moe':
        kinds = [None, 'linear', 'yarn']
    m.scaling = r.choice(kinds)
    m.factor, m.original, m.magnitude = 1.0, m.context, 1.0
    half = m.rot // 2
    m.factors = [1.0] * half
    if m.scaling in ('linear', 'yarn', 'llama3'):
        m.factor = r.choice((2.0, 8.0, 40.0))
    if m.scaling in ('yarn', 'llama3'):
        m.original = r.choice((16, 64, 256, 4096))
    if m.scaling == 'freqs':
        m.factors = [f32(r.uniform(1, 8)) for _ in range(half)]
    if m.scaling == 'longrope':
        m.original, m.context = 512, 1024
        m.short = [f32(r.uniform(1, 2)) for _ in range(half)]
        m.long = [f32(r.uniform(1, 9)) for _ in range(half)]
        m.n_ctx = r.choice((256, 1024))
        m.factors = m.long if m.n_ctx > m.original else m.short
        m.magnitude = math.sqrt(1 + math.log(2) / math.log(512)) if hf else f32(r.choice((1.0, 1.19)))
    m.log_multiplier = f32(0.0707) if a == 'deepseek2' and r.random() < 0.7 else 0.0
    if m.scaling == 'yarn':
        get = 1 + 0.1 * math.log(m.factor)
        m.mscale = m.mscale_all = r.choice((0.0, 0.707, 1.0)) if a == 'deepseek2' and hf else 0.0
        if m.mscale and r.random() < 0.3:
            m.mscale = 1.3
        if a != 'deepseek2':
            m.magnitude = get
        elif hf:
            both = 1 + 0.1 * m.mscale_all * math.log(m.factor)
            m.magnitude = (1 + 0.1 * m.mscale * math.log(m.factor)) / both if m.mscale_all else get
            m.scale *= both * both if m.mscale_all else 1
        elif not m.log_multiplier:
            m.magnitude = get
        m.attention_factor = f32(1.1) if hf and a == 'gpt-oss' and r.random() < 0.3 else 0.0
        m.magnitude = m.attention_factor or m.magnitude
    m.attn_factor = 1.0
    if m.scaling in ('linear', 'yarn') and not hf and r.random() < 0.3:
        m.attn_factor = f32(r.choice((0.9, 1.2)))
    m.magnitude *= m.attn_factor
    if a == 'deepseek2' and not hf:
        s = m.magnitude * (1 + m.log_multiplier * math.log(m.factor))
        m.scale *= (s * (1 + 0.1 * math.log(m.factor)) if m.scaling == 'linear' else s) ** 2
    if m.scaling == 'dynamic':
        m.alpha = 3.0
        m.real_base = m.base * m.alpha ** (m.hd / (m.hd - 2.0))


def angles(m):
    """Angle of one step of each rotary pair."""
    base = getattr(m, 'real_base', m.base)
    n, out = m.rot, []
    plain = [base ** (-2.0 * i / n) for i in range(n // 2)]
    fast, slow = (8.0, 1.0) if m.arch == 'grok' else (32.0, 1.0)
    for i, a in enumerate(plain):
        if m.scaling == 'linear':
            a /= m.factor
        elif m.scaling == 'yarn':
            def c(b):
                return n * math.log(m.original / (2 * math.pi * b)) / (2 * math.log(base))
            low, high = c(fast), c(slow)
            if m.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(0, low), min(n - 1, high)
            keep = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
            a = a / m.factor * (1 - keep) + a * keep
        elif m.scaling == 'llama3':
            length = 2 * math.pi / a
            if length > m.original / 1.0:
                a /= m.factor
            elif length >= m.original / 4.0:
                s = (m.original / length - 1.0) / (4.0 - 1.0)
                a = (1 - s) * a / m.factor + s * a
        out.append(a / m.factors[i])
    return out


# ---- weights ----


def rows_of(r, rows, columns, size=1.0):
    s = size / math.sqrt(columns) * math.sqrt(3)
    return [[f32(r.uniform(-s, s)) for _ in range(columns)] for _ in range(rows)]


def vector(r, n, middle=1.0, spread=0.3):
    return [f32(r.uniform(middle - spread, middle + spread)) for _ in range(n)]


def weights(m, r):
    T = {'token_embd.weight': rows_of(r, m.vocab, m.d, math.sqrt(m.d)),
         ('token_embd_norm' if m.arch == 'lfm2moe' else 'output_norm') + '.weight': vector(r, m.d)}
    if not m.tied:
        T['output.weight'] = rows_of(r, m.vocab, m.d, 2.0)
    if m.arch == 'phimoe':
        T['output_norm.bias'], T['output.bias'] = vector(r, m.d, 0), vector(r, m.vocab, 0)
    if m.scaling == 'freqs':
        T['rope_freqs.weight'] = m.factors
    if m.scaling == 'longrope' and not m.folder:
        T['rope_factors_long.weight'], T['rope_factors_short.weight'] = m.long, m.short
    for i in range(m.layers + m.nextn):
        for name, value in list(block_attention(m, r, i).items()) + list(block_mlp(m, r, i).items()):
            T['blk.%d.%s' % (i, name)] = value
    m.T = T


def block_attention(m, r, i):
    second = {'gpt-oss': 'post_attention_norm', 'glm4moe': 'post_attention_norm', 'dbrx': 'attn_output_norm'}
    t = {'attn_norm.weight': vector(r, m.d), second.get(m.arch, 'ffn_norm') + '.weight': vector(r, m.d)}
    if m.arch == 'phimoe':
        t['attn_norm.bias'], t['ffn_norm.bias'] = vector(r, m.d, 0), vector(r, m.d, 0)
    if m.arch == 'lfm2moe' and i in m.convolution:
        t.update({'shortconv.conv.weight': rows_of(r, m.d, m.taps),
                  'shortconv.in_proj.weight': rows_of(r, 3 * m.d, m.d),
                  'shortconv.out_proj.weight': rows_of(r, m.d, m.d)})
        return t
    q, k, v = m.heads * m.hd, m.kv * m.hd, m.kv * m.vd
    if m.kv_rank:
        if m.q_rank:
            t.update({'attn_q_a.weight': rows_of(r, m.q_rank, m.d), 'attn_q_a_norm.weight': vector(r, m.q_rank),
                      'attn_q_b.weight': rows_of(r, q, m.q_rank)})
        else:
            t['attn_q.weight'] = rows_of(r, q, m.d)
        t.update({'attn_kv_a_mqa.weight': rows_of(r, m.kv_rank + m.rot, m.d),
                  'attn_kv_a_norm.weight': vector(r, m.kv_rank),
                  'attn_kv_b.weight': rows_of(r, m.heads * (m.nope + m.vd), m.kv_rank)})
    else:
        t.update({'attn_q.weight': rows_of(r, q, m.d, 2), 'attn_k.weight': rows_of(r, k, m.d, 2),
                  'attn_v.weight': rows_of(r, v, m.d)})
    t['attn_output.weight'] = rows_of(r, m.d, m.heads * m.vd)
    if m.bias:
        t.update({'attn_q.bias': vector(r, q, 0), 'attn_k.bias': vector(r, k, 0), 'attn_v.bias': vector(r, v, 0)})
    if m.out_bias:
        t['attn_output.bias'] = vector(r, m.d, 0)
    if m.head_norm or m.whole_norm:
        t['attn_q_norm.weight'] = vector(r, m.hd if m.head_norm else q)
        t['attn_k_norm.weight'] = vector(r, m.hd if m.head_norm else k)
    if m.sinks:
        t['attn_sinks.weight'] = vector(r, m.heads, 0, 1)
    if m.arch == 'grok':
        t['attn_output_norm.weight'] = vector(r, m.d)
        t['post_ffw_norm.weight' if m.given else 'layer_output_norm.weight'] = vector(r, m.d)
    return t


def block_mlp(m, r, i):
    if i in m.dense:
        return {'ffn_gate.weight': rows_of(r, m.dense_ff, m.d), 'ffn_up.weight': rows_of(r, m.dense_ff, m.d),
                'ffn_down.weight': rows_of(r, m.d, m.dense_ff)}
    t = {'ffn_gate_inp.weight': rows_of(r, m.experts, m.d, 2),
         'ffn_gate_exps.weight': [rows_of(r, m.ff, m.d) for _ in range(m.experts)],
         'ffn_up_exps.weight': [rows_of(r, m.ff, m.d) for _ in range(m.experts)],
         'ffn_down_exps.weight': [rows_of(r, m.d, m.ff) for _ in range(m.experts)]}
    if m.selection:
        t['exp_probs_b.bias'] = vector(r, m.experts, 0, 0.2)
    if m.arch == 'gpt-oss':
        t.update({'ffn_gate_inp.bias': vector(r, m.experts, 0), 'ffn_gate_exps.bias': rows_of(r, m.experts, m.ff),
                  'ffn_up_exps.bias': rows_of(r, m.experts, m.ff), 'ffn_down_exps.bias': rows_of(r, m.experts, m.d)})
    if m.shared:
        t.update({'ffn_gate_shexp.weight': rows_of(r, m.shared, m.d), 'ffn_up_shexp.weight': rows_of(r, m.shared, m.d),
                  'ffn_down_shexp.weight': rows_of(r, m.d, m.shared)})
    if m.gated:
        t['ffn_gate_inp_shexp.weight'] = vector(r, m.d, 0)
    if m.arch == 'grok' and m.beside:
        t.update({'ffn_gate.weight': rows_of(r, m.beside, m.d), 'ffn_up.weight': rows_of(r, m.beside, m.d),
                  'ffn_down.weight': rows_of(r, m.d, m.beside)})
    return t


# ---- what models compute ----


def times(w, x):
    return [sum(map(mul, row, x)) for row in w]


def plus(x, y):
    return [a + b for a, b in zip(x, y)] if y is not None else x


def rms(x, w, eps, b=None):
    s = 1 / math.sqrt(sum(map(mul, x, x)) / len(x) + eps)
    return plus([v * s * g for v, g in zip(x, w)] if w is not None else [v * s for v in x], b)


def norm(m, x, w, b=None):
    if m.arch != 'dbrx' and not (m.arch == 'phimoe' and m.folder):
        return rms(x, w, m.eps, b)
    mean = sum(x) / len(x)
    return rms([v - mean for v in x], w, m.eps, b)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softmax(x):
    most = max(x)
    e = [math.exp(v - most) for v in x]
    s = sum(e)
    return [v / s for v in e]


def rotate(m, x, t):
    """x: one head's rotated part."""
    x, half = list(x), m.rot // 2
    for i, a in enumerate(m.angles):
        p, q = (i, i + half) if m.pairs else (2 * i, 2 * i + 1)
        c, s = math.cos(a * t) * m.magnitude, math.sin(a * t) * m.magnitude
        x[p], x[q] = x[p] * c - x[q] * s, x[p] * s + x[q] * c
    return x


def cut(x, n):
    return [x[i:i + n] for i in range(0, len(x), n)]


def heads_of(m, B, x, which, t, i):
    """Queries ('q') or keys ('k') of a token, by head."""
    y = plus(times(B('attn_%s.weight' % which), x), B('attn_%s.bias' % which))
    w = B('attn_%s_norm.weight' % which)
    if m.arch == 'dbrx':
        y = [max(-m.clamp, min(m.clamp, v)) for v in y]
    if m.whole_norm:
        y = rms(y, w, m.eps)
    if m.clamp and m.arch == 'olmoe':
        y = [max(-m.clamp, min(m.clamp, v)) for v in y]
    y = cut(y, m.hd)
    if m.head_norm and not m.norm_after:
        y = [rms(h, w, m.eps) for h in y]
    if m.rotates[i]:
        y = [rotate(m, h[:m.rot], t) + h[m.rot:] for h in y]
    if m.norm_after:
        y = [rms(h, w, m.eps) for h in y]
    if m.arch == 'llama4':
        if m.rotates[i]:
            y = [rms(h, None, m.eps) for h in y]
        elif which == 'q':
            g = 1 + m.growth * math.log(math.floor((t + 1) / m.floor) + 1)
            y = [[v * g for v in h] for h in y]
    return y


def latent(m, B, x, t):
    q = times(B('attn_q_b.weight'), rms(times(B('attn_q_a.weight'), x), B('attn_q_a_norm.weight'), m.eps)) if m.q_rank \
        else times(B('attn_q.weight'), x)
    q = [h[:m.nope] + rotate(m, h[m.nope:], t) for h in cut(q, m.hd)]
    c = times(B('attn_kv_a_mqa.weight'), x)
    pe = rotate(m, c[m.kv_rank:], t)
    both = cut(times(B('attn_kv_b.weight'), rms(c[:m.kv_rank], B('attn_kv_a_norm.weight'), m.eps)), m.nope + m.vd)
    return q, [h[:m.nope] + pe for h in both], [h[m.nope:] for h in both]


def attention(m, B, x, t, i, cache):
    if m.kv_rank:
        q, k, v = latent(m, B, x, t)
    else:
        q, k = heads_of(m, B, x, 'q', t, i), heads_of(m, B, x, 'k', t, i)
        v = plus(times(B('attn_v.weight'), x), B('attn_v.bias'))
        if m.clamp:
            v = [max(-m.clamp, min(m.clamp, e)) for e in v]
        v = cut(v, m.vd)
    cache.append((k, v))
    first = max(0, t - m.windows[i] + 1) if m.windows[i] else t - t % m.chunks[i] if m.chunks[i] else 0
    out = []
    for h in range(m.heads):
        g = h // (m.heads // m.kv)
        s = [sum(map(mul, q[h], past[0][g])) * m.scale for past in cache[first:]]
        if m.score_cap:
            s = [m.score_cap * math.tanh(e / m.score_cap) for e in s]
        p = softmax(s + [B('attn_sinks.weight')[h]] if m.sinks else s)
        out += [sum(p[j] * past[1][g][e] for j, past in enumerate(cache[first:])) for e in range(m.vd)]
    return plus(times(B('attn_output.weight'), out), B('attn_output.bias'))


def convolution(m, B, x, cache):
    y = cut(times(B('shortconv.in_proj.weight'), x), m.d)
    cache.append(list(map(mul, y[0], y[2])))
    last = cache[-m.taps:]
    taps = B('shortconv.conv.weight')
    s = [sum(taps[c][m.taps - len(last) + j] * u[c] for j, u in enumerate(last)) for c in range(m.d)]
    return times(B('shortconv.out_proj.weight'), list(map(mul, y[1], s)))


def gelu(g):
    return 0.5 * g * (1 + math.tanh(0.7978845608028654 * (g + 0.044715 * g ** 3)))


def expert(m, gate, up, down, x, biases=None):
    g, u = times(gate, x), times(up, x)
    if biases:
        g, u = [min(v, 7.0) for v in plus(g, biases[0])], [max(-7.0, min(7.0, v)) for v in plus(u, biases[1])]
        return plus(times(down, [a * sigmoid(1.702 * a) * (b + 1) for a, b in zip(g, u)]), biases[2])
    act = gelu if m.arch == 'grok' else lambda v: v * sigmoid(v)
    return times(down, [act(a) * b for a, b in zip(g, u)])


def dense(m, B, x):
    return expert(m, B('ffn_gate.weight'), B('ffn_up.weight'), B('ffn_down.weight'), x)


def sparsemixer(l):
    out, best, masked = [], None, list(l)
    for _ in range(2):
        best = max(range(len(l)), key=lambda e: masked[e])
        top = masked[best]
        kept = [e for e in range(len(l)) if masked[e] > -math.inf and (top - l[e]) / max(abs(l[e]), top) <= 0.02]
        total = sum(math.exp(l[e] - top) for e in kept)
        out.append((best, 1 / total))
        masked[best] = -math.inf
    return out


def route(m, B, x):
    """Pairs of an expert and its weight."""
    l = plus(times(B('ffn_gate_inp.weight'), x), B('ffn_gate_inp.bias'))
    if m.arch == 'phimoe' and m.sparsemixer:
        return sparsemixer(l)
    p = [sigmoid(v) for v in l] if m.scores or m.arch == 'llama4' else softmax(l)
    by = plus(p, B('exp_probs_b.bias'))
    if m.arch in ('gpt-oss', 'llama4'):
        by = l
    groups = cut(list(range(m.experts)), m.experts // m.groups)
    worth = [sum(sorted((by[e] for e in g), reverse=True)[:1 if m.group_max else 2]) for g in groups]
    kept = sorted(range(m.groups), key=lambda g: -worth[g])[:m.groups_kept]
    chosen = sorted((e for g in kept for e in groups[g]), key=lambda e: -by[e])[:m.top]
    ranked = sorted(by, reverse=True)
    if m.groups == 1 and m.top < m.experts:
        m.margin = min(m.margin, ranked[m.top - 1] - ranked[m.top])
    if m.arch == 'gpt-oss':
        return list(zip(chosen, softmax([l[e] for e in chosen])))
    total = sum(p[e] for e in chosen) if m.weight_norm and m.arch != 'llama4' else 1.0
    return [(e, p[e] / total * m.weight_scale) for e in chosen]


def mixture(m, B, x):
    y = [0.0] * m.d
    for e, w in route(m, B, x):
        biases = [B('ffn_%s_exps.bias' % n)[e] for n in ('gate', 'up', 'down')] if m.arch == 'gpt-oss' else None
        inner, w = ([v * w for v in x], 1.0) if m.arch == 'llama4' else (x, w)
        out = expert(m, B('ffn_gate_exps.weight')[e], B('ffn_up_exps.weight')[e], B('ffn_down_exps.weight')[e], inner,
                     biases)
        y = [a + w * b for a, b in zip(y, out)]
    if m.shared:
        out = expert(m, B('ffn_gate_shexp.weight'), B('ffn_up_shexp.weight'), B('ffn_down_shexp.weight'), x)
        g = sigmoid(sum(map(mul, B('ffn_gate_inp_shexp.weight'), x))) if m.gated else 1.0
        y = [a + g * b for a, b in zip(y, out)]
    if m.arch == 'grok' and m.beside:
        out = dense(m, B, x)
        y = [(a + b) * math.sqrt(0.5) for a, b in zip(y, out)]
    return y


def step(m, token, t, caches):
    """The logits of the token at position t."""
    T = m.T
    x = [v * m.embedding_scale for v in T['token_embd.weight'][token]]
    for i in range(m.layers):
        def B(name):
            return T.get('blk.%d.%s' % (i, name))
        y = norm(m, x, B('attn_norm.weight'), B('attn_norm.bias'))
        y = convolution(m, B, y, caches[i]) if B('shortconv.conv.weight') else attention(m, B, y, t, i, caches[i])
        if m.arch == 'grok':
            y = rms(y, B('attn_output_norm.weight'), m.eps)
        x = [a + m.residual * b for a, b in zip(x, y)]
        second = B('ffn_norm.weight') or B('post_attention_norm.weight') or B('attn_output_norm.weight')
        y = norm(m, x, second, B('ffn_norm.bias'))
        y = dense(m, B, y) if i in m.dense else mixture(m, B, y)
        if m.arch == 'grok':
            y = rms(y, B('layer_output_norm.weight') or B('post_ffw_norm.weight'), m.eps)
        x = [a + m.residual * b for a, b in zip(x, y)]
    x = norm(m, x, T.get('output_norm.weight') or T.get('token_embd_norm.weight'), T.get('output_norm.bias'))
    y = plus(times(T.get('output.weight') or T['token_embd.weight'], x), T.get('output.bias'))
    y = [v * m.logit_scale for v in y]
    return [m.logit_cap * math.tanh(v / m.logit_cap) for v in y] if m.logit_cap else y


def gold(m, r):
    m.angles, m.margin = angles(m), math.inf
    m.pairs = PAIRS[m.arch][m.folder]
    prompt = [r.randrange(m.vocab) for _ in range(r.randint(9, 14))]
    caches, logits, greedy, gap = [[] for _ in range(m.layers)], [], [], math.inf
    for t, token in enumerate(prompt):
        logits.append(step(m, token, t, caches))
    y = logits[-1]
    for t in range(3):
        best = sorted(y, reverse=True)
        gap = min(gap, best[0] - best[1])
        greedy.append(y.index(best[0]))
        y = step(m, greedy[-1], len(prompt) + t, caches)
    most = max(abs(v) for row in logits for v in row)
    positions = [0, len(prompt) // 2, len(prompt) - 1]
    m.is_clear = gap > 1e-3 * most and m.margin > 1e-5
    return {'prompt': prompt, 'positions': positions, 'logits': [logits[p] for p in positions], 'greedy': greedy,
            'logits_after_greedy': y, 'tolerance': 2e-5 * most, 'n_ctx': getattr(m, 'n_ctx', 256)}


# ---- GGUF ----


def flat(v):
    return [e for row in v for e in flat(row)] if isinstance(v[0], list) else v


def dims(v):
    return dims(v[0]) + [len(v)] if isinstance(v, list) else []


def gguf_keys(m, r):
    a = m.arch
    k = {'context_length': m.context, 'embedding_length': m.d, 'block_count': m.layers + m.nextn,
         'feed_forward_length': m.dense_ff if m.dense or a in DENSE_FIRST else m.ff, 'attention.head_count': m.heads,
         'expert_count': m.experts, 'expert_used_count': m.top, 'rope.freq_base': m.base,
         'attention.layer_norm_%sepsilon' % ('' if a == 'dbrx' else 'rms_'): m.eps}
    if m.kv != m.heads or r.random() < 0.7:
        k['attention.head_count_kv'] = m.kv
    if m.hd * m.heads != m.d or r.random() < 0.4:
        k['attention.key_length'], k['attention.value_length'] = m.hd, m.vd
    if m.rot != m.hd or r.random() < 0.5:
        k['rope.dimension_count'] = m.rot
    if a not in ('llama', 'granitemoe', 'olmoe', 'dbrx', 'phimoe'):
        k['expert_feed_forward_length'] = m.ff
    if a in SIGMOID or a == 'bailingmoe2':
        k['expert_gating_func'] = 2 if m.scores else 1
        if a == 'glm4moe' and m.scores and r.random() < 0.5 or a == 'deepseek2' and not m.scores and r.random() < 0.5:
            del k['expert_gating_func']
    if a in ('deepseek2', 'dots1', 'glm4moe', 'bailingmoe', 'bailingmoe2') and (m.weight_norm or r.random() < 0.5):
        k['expert_weights_norm'] = m.weight_norm
    if m.weight_scale != 1 or r.random() < 0.3 and a in DENSE_FIRST and a != 'ernie4_5-moe':
        k['expert_weights_scale'] = m.weight_scale
    if m.groups > 1:
        k['expert_group_count'], k['expert_group_used_count'] = m.groups, m.groups_kept
    if a in DENSE_FIRST or a == 'bailingmoe':
        k['leading_dense_block_count'] = len(m.dense)
    if m.shared_count:
        k['expert_shared_count'] = m.shared_count
    if m.shared and a in ('granitemoe', 'qwen2moe', 'hunyuan-moe', 'ernie4_5-moe', 'bailingmoe2'):
        k['expert_shared_feed_forward_length'] = m.shared if a != 'bailingmoe2' else m.ff
    if m.nextn:
        k['nextn_predict_layers'] = m.nextn
    if a == 'granitemoe':
        k.update({'embedding_scale': m.embedding_scale, 'residual_scale': m.residual, 'attention.scale': m.scale,
                  'logit_scale': 1 / m.logit_scale})
    if a == 'gpt-oss':
        k['attention.sliding_window'] = m.window
    if a == 'dbrx':
        k['attention.clamp_kqv'] = m.clamp
    if a == 'ernie4_5-moe':
        k['interleave_moe_layer_step'] = 1
    if a == 'llama4':
        k['interleave_moe_layer_step'] = m.step
        k['feed_forward_length'] = m.dense_ff
        if m.unchunked:
            k['attention.sliding_window'] = 0
    if a == 'lfm2moe':
        k['attention.head_count_kv'] = [0 if i in m.convolution else m.kv for i in range(m.layers)]
        k['shortconv.l_cache'] = m.taps
    if a == 'grok':
        k['feed_forward_length'] = m.beside or m.ff
        if m.given:
            k.update({'attention.output_scale': m.scale, 'attn_logit_softcapping': 25.0, 'embedding_scale': 12.0,
                      'logit_scale': 0.75, 'final_logit_softcapping': m.logit_cap, 'router_logit_softcapping': 30.0})
    if m.kv_rank:
        k.update({'attention.q_lora_rank': m.q_rank, 'attention.kv_lora_rank': m.kv_rank, 'rope.dimension_count': m.rot,
                  'attention.key_length': m.hd, 'attention.value_length': m.vd, 'attention.head_count_kv': m.heads})
        if m.halves:
            k.update({'attention.key_length': m.kv_rank + m.rot, 'attention.value_length': m.kv_rank,
                      'attention.key_length_mla': m.hd, 'attention.value_length_mla': m.vd,
                      'attention.head_count_kv': 1})
    if m.scaling in ('linear', 'yarn'):
        k.update({'rope.scaling.type': m.scaling, 'rope.scaling.factor': m.factor})
        if m.attn_factor != 1:
            k['rope.scaling.attn_factor'] = m.attn_factor
        if m.log_multiplier:
            k['rope.scaling.yarn_log_multiplier'] = m.log_multiplier
    if m.scaling == 'yarn':
        k['rope.scaling.original_context_length'] = m.original
    elif m.scaling == 'longrope':
        k['rope.scaling.original_context_length'] = m.original
        if m.magnitude != 1:
            k['rope.scaling.attn_factor'] = m.magnitude
    elif m.scaling is None and r.random() < 0.2:
        k.update({'rope.scaling.type': 'none', 'rope.scaling.factor': 7.0})
    return k


def key_bytes(name, v):
    def text(s):
        return struct.pack('<Q', len(s)) + s.encode()
    kinds = ((bool, 7, '<?'), (int, 4, '<I'), (float, 6, '<f'))
    if name.startswith('split.'):
        return text(name) + (struct.pack('<Ii', 5, v) if name == 'split.tensors.count' else struct.pack('<IH', 2, v))
    if isinstance(v, str):
        return text(name) + struct.pack('<I', 8) + text(v)
    if isinstance(v, list):
        return text(name) + struct.pack('<IIQ', 9, 5, len(v)) + struct.pack('<%di' % len(v), *v)
    for kind, code, form in kinds:
        if isinstance(v, kind):
            return text(name) + struct.pack('<I', code) + struct.pack(form, v)
    raise TypeError(name)


def gguf_tensors(m, r):
    """The tensors as files of this architecture have them."""
    T = dict(m.T)
    for i in range(m.layers + m.nextn):
        def pop(name):
            return T.pop('blk.%d.%s' % (i, name))
        if m.kv_rank and m.halves:
            heads = cut(pop('attn_kv_b.weight'), m.nope + m.vd)
            T['blk.%d.attn_k_b.weight' % i] = [list(map(list, zip(*h[:m.nope]))) for h in heads]
            T['blk.%d.attn_v_b.weight' % i] = [h[m.nope:] for h in heads]
        if m.arch in ('dbrx', 'bailingmoe2') or (m.arch == 'llama' and not m.bias and m.seed % 3 == 0):
            T['blk.%d.attn_qkv.weight' % i] = pop('attn_q.weight') + pop('attn_k.weight') + pop('attn_v.weight')
        if m.arch == 'llama' and m.seed % 4 == 1: # older files: one tensor for an expert
            for which in ('gate', 'up', 'down'):
                for e, w in enumerate(pop('ffn_%s_exps.weight' % which)):
                    T['blk.%d.ffn_%s.%d.weight' % (i, which, e)] = w
    return list(T.items())


def gguf_write(path, keys, tensors):
    head = b'GGUF' + struct.pack('<IQQ', 3, len(tensors), len(keys))
    head += b''.join(key_bytes(k, v) for k, v in keys)
    data = b''
    for name, v in tensors:
        d = dims(v)
        head += struct.pack('<Q', len(name)) + name.encode() + struct.pack('<I%dQIQ' % len(d), len(d), *d, 0, len(data))
        data += struct.pack('<%df' % len(flat(v)), *flat(v))
        data += bytes(-len(data) % 32)
    with open(path, 'wb') as f:
        f.write(head + bytes(-len(head) % 32) + data)


def gguf(m, r, path):
    keys = [('general.architecture', m.arch), ('tokenizer.ggml.model', 'no_vocab')]
    keys += [(m.arch + '.vocab_size', m.vocab)] + [(m.arch + '.' + k, v) for k, v in gguf_keys(m, r).items()]
    tensors = gguf_tensors(m, r)
    if m.seed % 5 != 2:
        gguf_write(path + '.gguf', keys, tensors)
        return
    count = 3
    for part in range(count):
        own = [('split.no', part), ('split.count', count), ('split.tensors.count', len(tensors))]
        gguf_write('%s-%05d-of-%05d.gguf' % (path, part + 1, count), (keys if part == 0 else []) + own,
                   tensors[part * len(tensors) // count:(part + 1) * len(tensors) // count])


# ---- folders ----

TYPES = {'llama': 'mixtral', 'qwen2moe': 'qwen2_moe', 'qwen3moe': 'qwen3_moe', 'gpt-oss': 'gpt_oss',
         'glm4moe': 'glm4_moe', 'ernie4_5-moe': 'ernie4_5_moe', 'hunyuan-moe': 'hunyuan_v1_moe', 'lfm2moe': 'lfm2_moe',
         'minimax-m2': 'minimax_m2', 'llama4': 'llama4_text'}
COMMON = {'token_embd.weight': 'model.embed_tokens.weight', 'output_norm.weight': 'model.norm.weight',
          'output_norm.bias': 'model.norm.bias', 'output.weight': 'lm_head.weight', 'output.bias': 'lm_head.bias',
          'token_embd_norm.weight': 'model.embedding_norm.weight'}
BLOCK = {'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm',
         'post_attention_norm': 'post_attention_layernorm', 'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj',
         'attn_v': 'self_attn.v_proj', 'attn_output': 'self_attn.o_proj', 'attn_q_norm': 'self_attn.q_norm',
         'attn_k_norm': 'self_attn.k_norm', 'attn_q_a': 'self_attn.q_a_proj',
         'attn_q_a_norm': 'self_attn.q_a_layernorm',
         'attn_q_b': 'self_attn.q_b_proj', 'attn_kv_a_mqa': 'self_attn.kv_a_proj_with_mqa',
         'attn_kv_a_norm': 'self_attn.kv_a_layernorm', 'attn_kv_b': 'self_attn.kv_b_proj', 'ffn_gate': 'mlp.gate_proj',
         'ffn_up': 'mlp.up_proj', 'ffn_down': 'mlp.down_proj', 'ffn_gate_inp': 'mlp.gate',
         'ffn_gate_shexp': 'mlp.shared_experts.gate_proj', 'ffn_up_shexp': 'mlp.shared_experts.up_proj',
         'ffn_down_shexp': 'mlp.shared_experts.down_proj'}
OTHER = {
    'qwen2moe': {'ffn_gate_shexp': 'mlp.shared_expert.gate_proj', 'ffn_up_shexp': 'mlp.shared_expert.up_proj',
                 'ffn_down_shexp': 'mlp.shared_expert.down_proj', 'ffn_gate_inp_shexp': 'mlp.shared_expert_gate'},
    'granitemoe': {'ffn_gate_inp': 'block_sparse_moe.router.layer', 'ffn_down_shexp': 'shared_mlp.output_linear',
                   'ffn_down_exps': 'block_sparse_moe.output_linear'},
    'hunyuan-moe': {'attn_q_norm': 'self_attn.query_layernorm', 'attn_k_norm': 'self_attn.key_layernorm',
                    'ffn_gate_inp': 'mlp.gate.wg', 'ffn_gate_shexp': 'mlp.shared_mlp.gate_proj',
                    'ffn_up_shexp': 'mlp.shared_mlp.up_proj', 'ffn_down_shexp': 'mlp.shared_mlp.down_proj'},
    'gpt-oss': {'ffn_gate_inp': 'mlp.router'},
    'lfm2moe': {'attn_norm': 'operator_norm', 'ffn_norm': 'ffn_norm', 'attn_output': 'self_attn.out_proj',
                'attn_q_norm': 'self_attn.q_layernorm', 'attn_k_norm': 'self_attn.k_layernorm',
                'shortconv.conv': 'conv.conv', 'shortconv.in_proj': 'conv.in_proj',
                'shortconv.out_proj': 'conv.out_proj',
                'ffn_gate': 'feed_forward.w1', 'ffn_up': 'feed_forward.w3', 'ffn_down': 'feed_forward.w2',
                'ffn_gate_inp': 'feed_forward.gate'},
    'llama4': {'ffn_gate': 'feed_forward.gate_proj', 'ffn_up': 'feed_forward.up_proj',
               'ffn_down': 'feed_forward.down_proj', 'ffn_gate_inp': 'feed_forward.router',
               'ffn_gate_shexp': 'feed_forward.shared_expert.gate_proj',
               'ffn_up_shexp': 'feed_forward.shared_expert.up_proj',
               'ffn_down_shexp': 'feed_forward.shared_expert.down_proj'}}
SELECTION = {'ernie4_5-moe': 'mlp.moe_statics.e_score_correction_bias', 'lfm2moe': 'feed_forward.expert_bias',
             'minimax-m2': 'block_sparse_moe.e_score_correction_bias'}
W123 = {'llama': 'block_sparse_moe', 'phimoe': 'block_sparse_moe', 'minimax-m2': 'block_sparse_moe',
        'lfm2moe': 'feed_forward'}


def turned(w):
    return [list(map(list, zip(*e))) for e in w]


def folder_experts(m, T, rest, out):
    """The experts of block `rest` under the names of folders."""
    gate, up, down = (T.pop(rest + 'ffn_%s_exps.weight' % n) for n in ('gate', 'up', 'down'))
    to = 'model.layers.' + rest[4:]
    if m.arch in W123:
        T[rest + 'ffn_gate_inp'] = None
        out[to + W123[m.arch] + '.gate.weight'] = T.pop(rest + 'ffn_gate_inp.weight')
    if m.arch == 'granitemoe':
        out[to + 'block_sparse_moe.input_linear.weight'] = [g + u for g, u in zip(gate, up)]
        out[to + 'block_sparse_moe.output_linear.weight'] = down
        if m.shared:
            out[to + 'shared_mlp.input_linear.weight'] = T.pop(rest + 'ffn_gate_shexp.weight') + T.pop(
                rest + 'ffn_up_shexp.weight')
    elif m.arch == 'gpt-oss':
        both = [[row for pair in zip(g, u) for row in pair] for g, u in zip(gate, up)]
        bias = [[v for pair in zip(g, u) for v in pair] for g, u in zip(T.pop(rest + 'ffn_gate_exps.bias'),
                                                                        T.pop(rest + 'ffn_up_exps.bias'))]
        out[to + 'mlp.experts.gate_up_proj_bias'] = bias
        out[to + 'mlp.experts.down_proj_bias'] = T.pop(rest + 'ffn_down_exps.bias')
        if m.storage == 'mxfp4':
            out[to + 'mlp.experts.gate_up_proj_blocks'], out[to + 'mlp.experts.down_proj_blocks'] = both, down
        else:
            out[to + 'mlp.experts.gate_up_proj'], out[to + 'mlp.experts.down_proj'] = turned(both), turned(down)
    elif m.arch == 'llama4':
        out[to + 'feed_forward.experts.gate_up_proj'] = turned([g + u for g, u in zip(gate, up)])
        out[to + 'feed_forward.experts.down_proj'] = turned(down)
    else:
        names = ('w1', 'w3', 'w2') if m.arch in W123 else ('gate_proj', 'up_proj', 'down_proj')
        for e in range(m.experts):
            for n, w in zip(names, (gate, up, down)):
                out[to + '%s.experts.%d.%s.weight' % (W123.get(m.arch, 'mlp'), e, n)] = w[e]


def folder_tensors(m):
    T, out = dict(m.T), {}
    for i in range(m.layers):
        rest = 'blk.%d.' % i
        if rest + 'ffn_gate_exps.weight' in T:
            folder_experts(m, T, rest, out)
        if rest + 'exp_probs_b.bias' in T:
            bias = T.pop(rest + 'exp_probs_b.bias')
            name = SELECTION.get(m.arch, 'mlp.gate.e_score_correction_bias')
            out['model.layers.%d.%s' % (i, name)] = [bias] if m.arch == 'ernie4_5-moe' else bias
    for name, v in T.items():
        if v is None:
            continue
        if not name.startswith('blk.'):
            out[COMMON[name]] = v
            continue
        _, i, rest = name.split('.', 2)
        stem, kind = rest.rsplit('.', 1)
        if stem == 'shortconv.conv':
            v = [[row] for row in v]
        if stem == 'ffn_gate_inp_shexp':
            v = [v]
        to = 'self_attn.sinks' if stem == 'attn_sinks' else {**BLOCK, **OTHER.get(m.arch, {})}[stem] + '.' + kind
        out['model.layers.%s.%s' % (i, to)] = v
    return out


def bf16(values):
    bits = struct.unpack('<%dI' % len(values), struct.pack('<%df' % len(values), *values))
    return [(b + 0x7fff + (b >> 16 & 1)) >> 16 for b in bits]


E4M3 = sorted((math.ldexp(c & 7, -9) if c < 8 else math.ldexp(8 + (c & 7), (c >> 3) - 10), c) for c in range(0x7f))
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(table, x):
    code = min(table, key=lambda row: abs(row[0] - abs(x)))
    return (-code[0], code[1] | 0x80) if x < 0 else code


def round_stored(m):
    """Makes the weights what the files will say."""
    def half(v):
        if isinstance(v[0], list):
            return [half(row) for row in v]
        if m.storage == 'f16':
            return list(struct.unpack('<%de' % len(v), struct.pack('<%de' % len(v), *v)))
        return list(struct.unpack('<%df' % len(v), struct.pack('<%dI' % len(v), *[b << 16 for b in bf16(v)])))
    for name, v in m.T.items():
        if m.storage == 'f32' or name.endswith('exp_probs_b.bias'):
            continue
        if m.storage == 'mxfp4' and name.endswith('_exps.weight'):
            m.T[name] = [[mx_round(row) for row in e] for e in v]
        elif m.storage == 'fp8' and re.search(r'(attn_[qkv]|attn_output|ffn_(gate|up|down)(_exps)?)\.weight$', name):
            m.T[name] = [fp8(m, e)[0] for e in v] if 'exps' in name else fp8(m, v)[0]
        else:
            m.T[name] = half(v)


def fp8(m, w):
    """A matrix in E4M3: its values, bytes and scales of blocks. Scales are powers of two, so that
    rounding twice changes nothing."""
    n = m.block
    lines, columns = -(-len(w) // n), -(-len(w[0]) // n)
    scales = [[0.0] * columns for _ in range(lines)]
    for b in range(lines):
        for c in range(columns):
            most = max(abs(v) for row in w[b * n:b * n + n] for v in row[c * n:c * n + n])
            scales[b][c] = 2.0 ** (math.ceil(math.log2(most / 448)) if most else 0)
    codes = [[nearest(E4M3, v / scales[i // n][j // n]) for j, v in enumerate(row)] for i, row in enumerate(w)]
    values = [[c[0] * scales[i // n][j // n] for j, c in enumerate(row)] for i, row in enumerate(codes)]
    return values, bytes(c[1] for row in codes for c in row), scales


def mx_scale(block):
    most = max(abs(v) for v in block)
    return max(0, min(254, math.ceil(math.log2(most / 6)) + 127)) if most else 0


def mx_code(v, e):
    x = abs(v) / 2.0 ** (e - 127)
    return min(range(8), key=lambda c: abs(FP4[c] - x)) | (8 if v < 0 else 0)


def mx_round(row):
    out = []
    for block in cut(row, 32):
        e = mx_scale(block)
        out += [math.copysign(FP4[mx_code(v, e) & 7], v) * 2.0 ** (e - 127) for v in block]
    return out


def config(m, r):
    a = m.arch
    c = {'model_type': TYPES.get(a, a), 'vocab_size': m.vocab, 'hidden_size': m.d, 'num_hidden_layers': m.layers,
         'num_attention_heads': m.heads, 'num_key_value_heads': m.kv, 'hidden_act': 'silu', 'rms_norm_eps': m.eps,
         'max_position_embeddings': m.context, 'rope_theta': m.base, 'num_experts_per_tok': m.top,
         'tie_word_embeddings': m.tied, 'intermediate_size': m.dense_ff}
    if a not in ('llama', 'granitemoe', 'olmoe', 'deepseek2', 'phimoe', 'ernie4_5-moe', 'lfm2moe', 'qwen2moe'):
        c['head_dim'] = m.hd
    if a in ('llama', 'granitemoe', 'gpt-oss', 'phimoe', 'minimax-m2', 'llama4'):
        c.update({'num_local_experts': m.experts, 'intermediate_size': m.ff})
    elif a in ('olmoe', 'qwen2moe', 'qwen3moe', 'hunyuan-moe', 'lfm2moe'):
        c['num_experts'] = m.experts
    elif a == 'ernie4_5-moe':
        c.update({'moe_num_experts': m.experts, 'moe_k': m.top, 'moe_num_shared_experts': m.shared_count,
                  'moe_layer_start_index': len(m.dense), 'moe_layer_interval': 1, 'use_bias': False})
    else:
        c['n_routed_experts'] = m.experts
    if a in ('olmoe', 'hunyuan-moe'):
        c['intermediate_size'] = m.ff
    if a not in ('llama', 'granitemoe', 'olmoe', 'gpt-oss', 'phimoe', 'minimax-m2', 'llama4'):
        c['moe_intermediate_size'] = m.ff
    if a in ('olmoe', 'qwen2moe', 'qwen3moe', 'lfm2moe', 'deepseek2', 'dots1', 'glm4moe'):
        c['norm_topk_prob'] = m.weight_norm
    if a in ('deepseek2', 'dots1', 'glm4moe'):
        c.update({'n_shared_experts': m.shared_count, 'n_group': m.groups, 'topk_group': m.groups_kept,
                  'routed_scaling_factor': m.weight_scale, 'first_k_dense_replace': len(m.dense),
                  'scoring_func': 'sigmoid' if m.scores else 'softmax'})
        c['topk_method'] = 'noaux_tc' if m.scores else 'group_limited_greedy' if m.group_max else 'greedy'
    if a == 'deepseek2':
        c['model_type'] = 'deepseek_v3' if m.scores else 'deepseek_v2'
        c.update({'q_lora_rank': m.q_rank or None, 'kv_lora_rank': m.kv_rank, 'qk_nope_head_dim': m.nope,
                  'qk_rope_head_dim': m.rot, 'v_head_dim': m.vd, 'head_dim': m.rot})
    if a == 'granitemoe':
        c.update({'embedding_multiplier': m.embedding_scale, 'residual_multiplier': m.residual,
                  'attention_multiplier': m.scale, 'logits_scaling': 1 / m.logit_scale})
        if m.shared:
            c.update({'model_type': 'granitemoeshared', 'shared_intermediate_size': m.shared})
    if a == 'hunyuan-moe':
        c.update({'moe_topk': [m.top] * m.layers, 'num_shared_expert': [1] * m.layers})
    if a == 'olmoe':
        c['clip_qkv'] = m.clamp or None
    if a == 'gpt-oss':
        c.update({'sliding_window': m.window, 'swiglu_limit': 7.0,
                  'layer_types': ['sliding_attention' if w else 'full_attention' for w in m.windows]})
    if a == 'llama':
        c['sliding_window'] = m.windows[0] or None
    if a == 'phimoe':
        c.update({'router_jitter_noise': 0.01, 'sliding_window': None})
    if a == 'glm4moe':
        c.update({'partial_rotary_factor': m.rot / m.hd, 'use_qk_norm': m.head_norm, 'attention_bias': m.bias})
    if a == 'minimax-m2':
        c.update({'rotary_dim': m.rot, 'scoring_func': 'sigmoid', 'use_routing_bias': True, 'use_qk_norm': True})
    if a == 'lfm2moe':
        c.update({'layer_types': ['conv' if i in m.convolution else 'full_attention' for i in range(m.layers)],
                  'num_dense_layers': len(m.dense), 'conv_L_cache': m.taps, 'norm_eps': m.eps, 'use_expert_bias': True,
                  'routed_scaling_factor': 1.0})
    if a in ('qwen2moe', 'qwen3moe'):
        c.update({'mlp_only_layers': sorted(m.dense), 'decoder_sparse_step': 1})
    if a == 'llama4':
        c.update({'intermediate_size_mlp': m.dense_ff, 'no_rope_layers': [int(v) for v in m.rotates],
                  'interleave_moe_layer_step': m.step, 'attn_scale': m.growth, 'floor_scale': m.floor,
                  'attn_temperature_tuning': True, 'use_qk_norm': True, 'attention_chunk_size': m.chunk,
                  'layer_types': ['chunked_attention' if v else 'full_attention' for v in m.rotates]})
    if m.storage == 'fp8':
        c['quantization_config'] = {'quant_method': 'fp8', 'weight_block_size': [m.block, m.block]}
    config_scaling(m, r, c)
    return c


def config_scaling(m, r, c):
    s = {'rope_type' if r.random() < 0.5 else 'type': m.scaling, 'factor': m.factor}
    if m.scaling == 'yarn':
        s.update({'original_max_position_embeddings': m.original, 'truncate': m.truncate})
        if m.arch == 'gpt-oss' or r.random() < 0.5:
            s.update({'beta_fast': 32.0, 'beta_slow': 1.0})
        if m.mscale_all:
            s.update({'mscale': m.mscale, 'mscale_all_dim': m.mscale_all})
        if m.attention_factor:
            s['attention_factor'] = m.attention_factor
    elif m.scaling == 'llama3':
        s.update({'original_max_position_embeddings': m.original, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0})
    elif m.scaling == 'longrope':
        s.update({'short_factor': m.short, 'long_factor': m.long})
        del s['factor']
        c['original_max_position_embeddings'] = m.original
    elif m.scaling == 'dynamic':
        s['alpha'] = m.alpha
    if m.scaling is None:
        if r.random() < 0.5 or m.arch == 'gpt-oss': # without the key, gpt_oss has YaRN
            c['rope_scaling'] = None
    elif m.seed % 3 == 0 and m.scaling not in ('dynamic', 'longrope'): # as transformers 5 writes it
        del c['rope_theta']
        c['rope_parameters'] = {**s, 'rope_theta': m.base}
        c['rope_parameters'].setdefault('rope_type', m.scaling)
    else:
        c['rope_scaling'] = s


def stored(m, name, v):
    """dtype, shape and bytes of the tensors that one tensor becomes."""
    shape = dims(v)[::-1]
    values = flat(v)
    if m.storage == 'mxfp4' and name.endswith('_blocks'):
        blocks = cut(values, 32)
        scales = [mx_scale(b) for b in blocks]
        data = b''.join(bytes(mx_code(b[2 * i], e) | mx_code(b[2 * i + 1], e) << 4 for i in range(16))
                        for b, e in zip(blocks, scales))
        by = shape[:-1] + [shape[-1] // 32]
        return [(name, 'U8', by + [16], data), (name[:-6] + 'scales', 'U8', by, bytes(scales))]
    if m.storage == 'fp8' and name.endswith('_proj.weight'):
        _, codes, scales = fp8(m, v)
        data = struct.pack('<%df' % len(flat(scales)), *flat(scales))
        return [(name, 'F8_E4M3', shape, codes), (name + '_scale_inv', 'F32', dims(scales)[::-1], data)]
    if m.storage == 'f32' or name.endswith(('correction_bias', 'expert_bias')):
        return [(name, 'F32', shape, struct.pack('<%df' % len(values), *values))]
    if m.storage == 'f16':
        return [(name, 'F16', shape, struct.pack('<%de' % len(values), *values))]
    return [(name, 'BF16', shape, struct.pack('<%dH' % len(values), *bf16(values)))]


def safetensors(path, tensors):
    head, data = {'__metadata__': {'format': 'pt'}}, b''
    for name, kind, shape, own in tensors:
        head[name] = {'dtype': kind, 'shape': shape, 'data_offsets': [len(data), len(data) + len(own)]}
        data += own
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text + data)


def folder(m, r, path):
    os.makedirs(path, exist_ok=True)
    tensors = [t for name, v in folder_tensors(m).items() for t in stored(m, name, v)]
    r.shuffle(tensors)
    with open(path + '/config.json', 'w') as f:
        json.dump(config(m, r), f, indent=1)
    if m.seed % 4 != 1:
        safetensors(path + '/model.safetensors', tensors)
        return
    names = ['model-%05d-of-00003.safetensors' % i for i in (1, 2, 3)]
    for i, name in enumerate(names):
        safetensors(path + '/' + name, tensors[i::3])
    with open(path + '/model.safetensors.index.json', 'w') as f:
        json.dump({'metadata': {}, 'weight_map': {t[0]: names[i % 3] for i, t in enumerate(tensors)}}, f)


def tiny(m):
    """Whether weights fit into a seed; it makes the widths those of one."""
    m.vocab, m.ff, m.dense_ff = 3, 2, 2
    m.shared = 2 * (m.shared_count or 1) if m.shared else 0
    if m.arch in OWN_WIDTH or m.arch == 'deepseek2':
        m.d, m.q_rank, m.kv_rank = 8, min(m.q_rank, 2), min(m.kv_rank, 2)
    return m.d <= 8 and m.layers <= 2 and m.experts <= 2 and m.storage in ('f16', 'bf16', 'f32', 'fp8')


def seeds(out):
    """Small models as inputs of tests/fuzz/fuzz_file.c: the file and config.json in one."""
    for arch, pairs in PAIRS.items():
        for is_folder in (False, True):
            for seed in range(100000 if pairs[is_folder] is not None else 0):
                r, m = random.Random('%s %d %d' % (arch, is_folder, seed)), Model()
                m.arch, m.folder, m.seed = arch, is_folder, 4
                draw(m, r)
                if tiny(m):
                    break
            else:
                continue
            weights(m, r)
            path = os.path.join(out, 'made')
            (folder if is_folder else gguf)(m, r, path)
            names = [path + '/model.safetensors', path + '/config.json'] if is_folder else [path + '.gguf']
            parts = [b'', b''] + [open(name, 'rb').read() for name in names]
            for name in names:
                os.remove(name)
            with open('%s/whole-%s-%s' % (out, arch, 'folder' if is_folder else 'file'), 'wb') as f:
                f.write(b'MOEP' + b''.join(struct.pack('<H', len(p)) + p for p in parts))
    shutil.rmtree(os.path.join(out, 'made'), ignore_errors=True)


def make(out, arch, is_folder, seed):
    """One model; another one is drawn where two tokens or experts are nearly equal."""
    for again in range(50):
        r = random.Random('%s %d %d %d' % (arch, is_folder, seed, again))
        m = Model()
        m.arch, m.folder, m.seed = arch, is_folder, seed
        draw(m, r)
        weights(m, r)
        if is_folder:
            round_stored(m)
        g = gold(m, r)
        if m.is_clear:
            break
    name = '%s/%s-%s-%d' % (out, arch, 'folder' if is_folder else 'file', seed)
    (folder if is_folder else gguf)(m, r, name)
    with open(name + ('/gold.json' if is_folder else '.json'), 'w') as f:
        json.dump(g, f)


def main():
    if sys.argv[1] == 'seeds':
        seeds(sys.argv[2])
        return
    out, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    if count == 0:
        shutil.rmtree(out, ignore_errors=True)
        return
    os.makedirs(out, exist_ok=True)
    for arch, pairs in PAIRS.items():
        for is_folder in (False, True):
            for seed in range(first, first + count):
                if pairs[is_folder] is not None and (len(sys.argv) < 5 or sys.argv[4] in arch):
                    make(out, arch, is_folder, seed)


if __name__ == '__main__':
    main()
