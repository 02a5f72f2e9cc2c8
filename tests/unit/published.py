#!/usr/bin/env python3
"""Files of published mixture layers, and what the models compute with them, from the formulas
alone.

  python3 tests/unit/published.py make FOLDER [SEED] [FILES]
      writes models under FOLDER (each family in every form, element type and packing that it is
      shipped in), inputs and outputs, and FOLDER/cases.txt
  python3 tests/unit/published.py check FOLDER
      compares the files that tests/unit/published.c wrote beside them with the originals:
      names, shapes, types and bits

  python3 tests/unit/published.py seeds FOLDER MADE
      puts small ones of the models in MADE, which make wrote, into FOLDER as inputs of
      tests/fuzz/fuzz_file.c

Nothing here shares code with the library: numbers are Python's, the formulas those of the models'
papers and programs (shared/routers.md names them). A line of cases.txt: name path prefix preset
tokens width file-to-compare(-: none) family dtype. NAME.xy holds tokens * width inputs, then as
many outputs, doubles, little-endian. NAME.values, where it is there, holds gate, up and down of all
experts, which the layer must have to the bit.
"""
import json
import math
import os
import random
import shutil
import struct
import sys

# ---- numbers as they are stored ----


def f32(x):
    return struct.unpack('<f', struct.pack('<f', x))[0]


def bf16_bits(x):
    bits = struct.unpack('<I', struct.pack('<f', x))[0]
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16


PLAIN = {'F32': ('f', 4), 'F16': ('e', 2), 'F64': ('d', 8)}


def encode(values, dtype):
    """The bytes of a flat list."""
    if dtype == 'BF16':
        return struct.pack('<%dH' % len(values), *[bf16_bits(v) for v in values])
    return struct.pack('<%d%s' % (len(values), PLAIN[dtype][0]), *values)


def decode(data, dtype):
    if dtype == 'BF16':
        halves = struct.unpack('<%dH' % (len(data) // 2), data)
        return list(struct.unpack('<%df' % len(halves), struct.pack('<%dI' % len(halves), *[h << 16 for h in halves])))
    return list(struct.unpack('<%d%s' % (len(data) // PLAIN[dtype][1], PLAIN[dtype][0]), data))


def half(x):
    return struct.unpack('<e', struct.pack('<e', x))[0]


def pack_q8_0(values):
    out = b''
    for at in range(0, len(values), 32):
        block = values[at:at + 32]
        scale = half(max(abs(v) for v in block) / 127)
        out += struct.pack('<e', scale)
        out += struct.pack('<32b', *[max(-127, min(127, round(v / scale))) if scale else 0 for v in block])
    return out


def unpack_q8_0(data):
    out = []
    for at in range(0, len(data), 34):
        scale = struct.unpack('<e', data[at:at + 2])[0]
        out += [scale * q for q in struct.unpack('<32b', data[at + 2:at + 34])]
    return out


def pack_q4_0(values):
    out = b''
    for at in range(0, len(values), 32):
        block = values[at:at + 32]
        most = max(block, key=abs)
        scale = half(most / -8)
        q = [max(0, min(15, int(v / scale + 8.5))) if scale else 8 for v in block]
        out += struct.pack('<e', scale) + bytes(q[i] | q[i + 16] << 4 for i in range(16))
    return out


def unpack_q4_0(data):
    out = []
    for at in range(0, len(data), 18):
        scale = struct.unpack('<e', data[at:at + 2])[0]
        q = data[at + 2:at + 18]
        out += [scale * ((b & 15) - 8) for b in q] + [scale * ((b >> 4) - 8) for b in q]
    return out


# Blocks of GGUF, by the layouts that llama.cpp's files have: name: (number, elements, bytes,
# offsets of binary16 scales, the largest |code * inner scale|, values of a block).

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6)


def at16(b, i):
    return struct.unpack('<e', b[i:i + 2])[0]


def halves(q):
    return [v & 15 for v in q] + [v >> 4 for v in q]


def fives(b, at):
    high = struct.unpack('<I', b[at:at + 4])[0]
    return [q + 16 * (high >> j & 1) for j, q in enumerate(halves(b[at + 4:at + 20]))]


def signed(v):
    return v - 256 if v > 127 else v


def q2_k(b):
    s, q, out = b[:16], b[16:80], []
    for h in range(2):
        for k in range(4):
            for x in range(32):
                i = 8 * h + 2 * k + x // 16
                out.append(at16(b, 80) * (s[i] & 15) * (q[32 * h + x] >> 2 * k & 3) - at16(b, 82) * (s[i] >> 4))
    return out


def q3_k(b):
    high, q, s, out = b[:32], b[32:96], b[96:108], []
    scales = []
    for i in range(16):
        low = s[i] & 15 if i < 8 else s[i - 8] >> 4
        scales.append((low | (s[8 + i % 4] >> 2 * (i // 4) & 3) << 4) - 32)
    for h in range(2):
        for k in range(4):
            for x in range(32):
                v = (q[32 * h + x] >> 2 * k & 3) - (0 if high[x] >> (4 * h + k) & 1 else 4)
                out.append(at16(b, 108) * scales[8 * h + 2 * k + x // 16] * v)
    return out


def k_scales(s):
    pairs = [(s[j] & 63, s[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        pairs.append((s[j + 4] & 15 | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4))
    return pairs


def q45_k(b, high, q):
    out = []
    for j, (scale, low) in enumerate(k_scales(b[4:16])):
        for x in range(32):
            byte = q[32 * (j // 2) + x]
            v = (byte >> 4 if j % 2 else byte & 15) + (16 * (high[x] >> j & 1) if high else 0)
            out.append(at16(b, 0) * scale * v - at16(b, 2) * low)
    return out


def q6_k(b):
    low, high, s, out = b[:128], b[128:192], b[192:208], []
    for h in range(2):
        for k in range(4):
            for x in range(32):
                v = low[64 * h + 32 * (k & 1) + x]
                v = (v >> 4 if k > 1 else v & 15) | (high[32 * h + x] >> 2 * k & 3) << 4
                out.append(at16(b, 208) * signed(s[8 * h + 2 * k + x // 16]) * (v - 32))
    return out


def iq4_xs(b):
    high, out = struct.unpack('<H', b[2:4])[0], []
    for j in range(8):
        scale = ((b[4 + j // 2] >> 4 * (j & 1) & 15) | (high >> 2 * j & 3) << 4) - 32
        out += [at16(b, 0) * scale * IQ4[v] for v in halves(b[8 + 16 * j:24 + 16 * j])]
    return out


BLOCKS = {
    'Q4_0': (2, 32, 18, (0,), 8, lambda b: [at16(b, 0) * (v - 8) for v in halves(b[2:])]),
    'Q4_1': (3, 32, 20, (0, 2), 15, lambda b: [at16(b, 0) * v + at16(b, 2) for v in halves(b[4:])]),
    'Q5_0': (6, 32, 22, (0,), 16, lambda b: [at16(b, 0) * (v - 16) for v in fives(b, 2)]),
    'Q5_1': (7, 32, 24, (0, 2), 31, lambda b: [at16(b, 0) * v + at16(b, 2) for v in fives(b, 4)]),
    'Q8_0': (8, 32, 34, (0,), 128, lambda b: [at16(b, 0) * signed(v) for v in b[2:]]),
    'Q2_K': (10, 256, 84, (80, 82), 45, q2_k),
    'Q3_K': (11, 256, 110, (108,), 128, q3_k),
    'Q4_K': (12, 256, 144, (0, 2), 945, lambda b: q45_k(b, None, b[16:])),
    'Q5_K': (13, 256, 176, (0, 2), 1953, lambda b: q45_k(b, b[16:48], b[48:])),
    'Q6_K': (14, 256, 210, (208,), 4096, q6_k),
    'IQ4_NL': (20, 32, 18, (0,), 127, lambda b: [at16(b, 0) * IQ4[v] for v in halves(b[2:])]),
    'IQ4_XS': (23, 256, 136, (0,), 4064, iq4_xs),
    'MXFP4': (39, 32, 17, (), 6, lambda b: [FP4[v] * 2.0 ** (b[0] - 127) for v in halves(b[1:])]),
}


def random_blocks(rng, name, count, extreme):
    """Blocks of random codes with scales that make values near 1, or (extreme) any finite ones."""
    _, _, size, scales, most, _ = BLOCKS[name]
    out = b''
    for _ in range(count):
        b = bytearray(rng.randrange(256) for _ in range(size))
        for at in scales:
            bits = rng.choice([rng.randrange(0x7c00), rng.randrange(0x400), 1, 0x7bff, 0]) | rng.choice([0, 0x8000])
            usual = struct.pack('<e', rng.choice([-1, 1]) * rng.uniform(0.3, 1.5) / most)
            b[at:at + 2] = struct.pack('<H', bits) if extreme else usual
        if name == 'MXFP4':
            b[0] = rng.choice([0, 1, 2, 3, 251, rng.randrange(252)]) if extreme else rng.randrange(123, 127)
        out += bytes(b)
    return out


def block_values(name, data):
    size, read = BLOCKS[name][2], BLOCKS[name][5]
    return [v for at in range(0, len(data), size) for v in read(data[at:at + size])]


# ---- what a layer computes ----


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def rows(matrix, x):
    return [dot(row, x) for row in matrix]


def sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v))


def softmax(z):
    top = max(z)
    e = [math.exp(v - top) for v in z]
    s = math.fsum(e)
    return [v / s for v in e]


class Close(Exception):
    """Two scores are so near that rounding could decide: another input is wanted."""


def best(scores, k):
    """The k largest, and a check that the choice does not hang on rounding."""
    order = sorted(range(len(scores)), key=lambda e: -scores[e])
    if k < len(order) and scores[order[k - 1]] - scores[order[k]] < 2e-4 * (1e-3 + abs(scores[order[k]])):
        raise Close()
    return order[:k]


def route(m, x):
    """The chosen experts with their weights."""
    z = rows(m['router'], x)
    if 'router_bias' in m:
        z = [a + b for a, b in zip(z, m['router_bias'])]
    k = m['k']
    kind = m['method']
    if kind == 'softmax_selected':
        chosen = best(z, k)
        return list(zip(chosen, softmax([z[e] for e in chosen])))
    if kind == 'sigmoid_input':
        return [(e, sigmoid(z[e])) for e in best(z, k)]
    if kind == 'sparsemixer':
        picked, left = [], list(z)
        for _ in range(k):
            top = max(left)
            best(left, 1)
            gates = []
            for v, kept in zip(z, left):
                far = (top - v) / max(abs(v), top) if max(abs(v), top) > 0 else 0
                if abs(far - 0.02) < 1e-4:
                    raise Close()
                gates.append(-math.inf if kept == -math.inf or far > 0.02 else kept)
            e = left.index(top)
            total = math.fsum(math.exp(v - top) for v in gates if v > -math.inf)
            picked.append((e, 1 / total))
            left[e] = -math.inf
        return picked
    r = softmax(z) if m['gate'] == 'softmax' else [sigmoid(v) for v in z]
    p = [a + b for a, b in zip(r, m['correction'])] if 'correction' in m else r
    if m.get('groups', 1) > 1:
        size = len(p) // m['groups']
        group = [sorted(p[g * size:(g + 1) * size], reverse=True) for g in range(m['groups'])]
        value = [g[0] if m['group_score'] == 'max' else g[0] + g[1] for g in group]
        kept = best(value, m['groups_kept'])
        p = [v if e // size in kept else -math.inf for e, v in enumerate(p)]
    chosen = best(p, k)
    w = [r[e] for e in chosen]
    if m['norm']:
        total = math.fsum(w)
        w = [v / total for v in w]
    return [(e, v * m.get('scale', 1.0)) for e, v in zip(chosen, w)]


def gated(gate, up, down, x, b=None, oss=None):
    g = rows(gate, x)
    u = rows(up, x)
    if b is not None:
        g = [a + c for a, c in zip(g, b[0])]
        u = [a + c for a, c in zip(u, b[1])]
    if oss is None:
        h = [a * sigmoid(a) * c for a, c in zip(g, u)]
    else:
        g = [min(a, oss) for a in g]
        u = [max(-oss, min(oss, c)) for c in u]
        h = [a * sigmoid(1.702 * a) * (c + 1) for a, c in zip(g, u)]
    y = rows(down, h)
    return [a + c for a, c in zip(y, b[2])] if b is not None else y


def layer(m, x):
    y = [0.0] * len(x)
    for e, w in route(m, x):
        xe = [w * v for v in x] if m['method'] == 'sigmoid_input' else x
        out = gated(m['gate_proj'][e], m['up_proj'][e], m['down_proj'][e], xe,
                    (m['gate_bias'][e], m['up_bias'][e],
                     m['down_bias'][e]) if 'gate_bias' in m else None, m.get('limit'))
        y = [a + (1.0 if m['method'] == 'sigmoid_input' else w) * b for a, b in zip(y, out)]
    if 'shared_gate' in m:
        s = gated(m['shared_gate'], m['shared_up'], m['shared_down'], x)
        f = sigmoid(dot(m['shared_sigmoid'], x)) if 'shared_sigmoid' in m else 1.0
        y = [a + f * b for a, b in zip(y, s)]
    return y


# ---- random layers, as they come out of a file again ----


def flat(t):
    return [v for part in t for v in flat(part)] if isinstance(t, list) else [t]


def shape_of(t):
    return [len(t)] + shape_of(t[0]) if isinstance(t, list) else []


def shaped(values, shape):
    if not shape:
        return values[0]
    step = len(values) // shape[0]
    return [shaped(values[i * step:(i + 1) * step], shape[1:]) for i in range(shape[0])]


def matrix(rng, *shape, spread=None):
    if not shape:
        return rng.gauss(0, spread)
    if spread is None:
        spread = 1.2 / math.sqrt(shape[-1])
    return [matrix(rng, *shape[1:], spread=spread) for _ in range(shape[0])]


def random_layer(rng, family, experts, d, f, k, settings):
    """Numbers of any precision; what is stored rounds them."""
    m = {'family': family, 'E': experts, 'H': d, 'I': f, 'k': k, 'method': 'plain', 'gate': 'softmax', 'norm': False}
    m['router'] = matrix(rng, experts, d, spread=1.5 / math.sqrt(d))
    for name in ('gate_proj', 'up_proj'):
        m[name] = matrix(rng, experts, f, d)
    m['down_proj'] = matrix(rng, experts, d, f)
    if family in ('mixtral', 'gpt_oss', 'granite_moe'):
        m['method'] = 'softmax_selected'
    if family == 'phi35_moe':
        m['method'] = 'sparsemixer'
    if family == 'llama4':
        m['method'] = 'sigmoid_input'
    if family in ('deepseek_v3', 'glm4_moe', 'dots1', 'minimax_m2'):
        m['gate'] = 'sigmoid'
        m['correction'] = matrix(rng, experts, spread=0.3)
        m['group_score'] = 'top2'
    if family == 'minimax_m2':
        m['norm'] = True
    if family == 'deepseek_v2':
        m['group_score'] = 'max'
    if family == 'gpt_oss':
        m['limit'] = 7.0
        m['router_bias'] = matrix(rng, experts, spread=0.5)
        m['gate_bias'] = matrix(rng, experts, f, spread=3.0)
        m['up_bias'] = matrix(rng, experts, f, spread=4.0)
        m['down_bias'] = matrix(rng, experts, d, spread=0.5)
    shared = {'qwen2_moe': f + 5, 'qwen3_next': f + 3, 'llama4': f, 'deepseek_v2': 2 * f, 'deepseek_v3': f,
              'glm4_moe': f, 'dots1': 2 * f}.get(family, 0)
    if family in ('qwen2_moe', 'qwen3_next'):
        m['shared_sigmoid'] = matrix(rng, d, spread=1 / math.sqrt(d))
    m.update(settings)
    shared = m.get('S', shared)
    if shared:
        m['S'] = shared
        m['shared_gate'] = matrix(rng, shared, d)
        m['shared_up'] = matrix(rng, shared, d)
        m['shared_down'] = matrix(rng, d, shared)
    return m


# ---- safetensors ----


def names_of(m, form):
    """(name, key, expert or None, how) of each tensor; how tells its layout."""
    family = m['family']
    each = {'mixtral': ('w1', 'w3', 'w2'), 'phi35_moe': ('w1', 'w3', 'w2'),
            'minimax_m2': ('w1', 'w3', 'w2')}.get(family, ('gate_proj', 'up_proj', 'down_proj'))
    out = [({'llama4': 'router.weight', 'gpt_oss': 'router.weight', 'granite_moe': 'router.layer.weight'}.get(family,
        'gate.weight'), 'router', None, '')]
    if family == 'gpt_oss':
        out += [('router.bias', 'router_bias', None, ''), ('experts.gate_up_proj', 'both', None, 'turned in_turn'),
                ('experts.gate_up_proj_bias', 'bias', None, 'in_turn'),
                ('experts.down_proj', 'down_proj', None, 'turned'), ('experts.down_proj_bias', 'down_bias', None, '')]
    elif family == 'llama4':
        out += [('experts.gate_up_proj', 'both', None, 'turned'), ('experts.down_proj', 'down_proj', None, 'turned')]
    elif family == 'granite_moe':
        out += [('input_linear.weight', 'both', None, ''), ('output_linear.weight', 'down_proj', None, '')]
    elif form == 'fused':
        out += [('experts.gate_up_proj', 'both', None, ''), ('experts.down_proj', 'down_proj', None, '')]
    else:
        for e in range(m['E']):
            out += [('experts.%d.%s.weight' % (e, name), key, e, '') for name,
                    key in zip(each, ('gate_proj', 'up_proj', 'down_proj'))]
    if 'correction' in m:
        out.append(('e_score_correction_bias' if family == 'minimax_m2' else 'gate.e_score_correction_bias',
                    'correction', None, ''))
    if 'shared_gate' in m:
        shared = 'shared_expert' if family in ('qwen2_moe', 'qwen3_next', 'llama4') else 'shared_experts'
        out += [('%s.%s_proj.weight' % (shared, part), 'shared_' + part, None, '') for part in ('gate', 'up', 'down')]
    if 'shared_sigmoid' in m:
        out.append(('shared_expert_gate.weight', 'shared_sigmoid', None, 'row'))
    return out


def turned(t):
    return [[list(column) for column in zip(*expert)] for expert in t]


def tensor_of(m, key, expert, how):
    """A tensor as it lies in the file: nested lists."""
    if key in ('both', 'bias'):
        gate, up = (m['gate_proj'], m['up_proj']) if key == 'both' else (m['gate_bias'], m['up_bias'])
        if 'in_turn' in how:
            t = [[row for pair in zip(g, u) for row in pair] for g, u in zip(gate, up)]
        else:
            t = [g + u for g, u in zip(gate, up)]
    else:
        t = m[key] if expert is None else m[key][expert]
    if 'turned' in how:
        t = turned(t)
    return [t] if 'row' in how else t


def put_back(m, key, expert, how, t):
    """What was read of a file takes the place of the numbers that it was made of."""
    if 'row' in how:
        t = t[0]
    if 'turned' in how:
        t = turned(t)
    if key in ('both', 'bias'):
        names = ('gate_proj', 'up_proj') if key == 'both' else ('gate_bias', 'up_bias')
        f = m['I']
        m[names[0]] = [e[0::2] if 'in_turn' in how else e[:f] for e in t]
        m[names[1]] = [e[1::2] if 'in_turn' in how else e[f:] for e in t]
    elif expert is None:
        m[key] = t
    else:
        m[key][expert] = t


def write_safetensors(path, tensors, metadata=None):
    """tensors: (name, dtype, shape, bytes)."""
    header, at = {}, 0
    if metadata is not None:
        header['__metadata__'] = metadata
    for name, dtype, shape, data in tensors:
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + b''.join(t[3] for t in tensors))


def read_safetensors(path):
    with open(path, 'rb') as file:
        data = file.read()
    n = struct.unpack('<Q', data[:8])[0]
    header = json.loads(data[8:8 + n])
    metadata = header.pop('__metadata__', None)
    return metadata, {name: (t['dtype'], t['shape'], data[8 + n + t['data_offsets'][0]:8 + n + t['data_offsets'][1]])
                      for name, t in header.items()}


def strangers(rng, prefix):
    """Tensors of the rest of the model, some of types that are not read."""
    stem = prefix.rsplit('.', 1)[0]
    data = bytes(rng.randrange(256) for _ in range(24))
    out = [('model.embed_tokens.weight', 'BF16', [3, 4], data),
           (stem + '.self_attn.q_proj.weight', 'F8_E4M3', [4, 6], data), (stem + '.input_layernorm.weight', 'F32', [6],
        data),
           ('model.layers.0.mlp.gate_proj.weight', 'F16', [12], data), ('model.layers.0.mlp.up_proj.weight', 'F16',
               [12], data), ('a.bool', 'BOOL', [24], data)]
    other = prefix.replace('.3.', '.4.')
    return out + [(other + '.gate.weight', 'F32', [2, 3], data), (other + '.experts.0.w1.weight', 'F32', [6], data),
                  (prefix + 'x.gate.weight', 'F32', [2, 3], data)]


CONFIG = {'mixtral': 'mixtral', 'phi35_moe': 'phimoe', 'granite_moe': 'granitemoe', 'llama4': 'llama4_text'}


def config_of(m):
    family = m['family']
    c = {'model_type': CONFIG.get(family, family), 'architectures': ['X'], 'hidden_act': 'silu', 'hidden_size': m['H'],
         'num_experts_per_tok': m['k'], 'rope_scaling': None,
         'rope_parameters': {'a': [1, {'b': -2.5e-3}],
                             'quantization_config': 1}, 'torch_dtype': 'bfloat16', 'eos_token_id': [1,
             2], 'use_cache': True}
    c[{'mixtral': 'num_local_experts', 'phi35_moe': 'num_local_experts', 'minimax_m2': 'num_local_experts',
       'gpt_oss': 'num_local_experts', 'llama4': 'num_local_experts',
       'granite_moe': 'num_local_experts', 'deepseek_v2': 'n_routed_experts', 'deepseek_v3': 'n_routed_experts',
       'glm4_moe': 'n_routed_experts',
       'dots1': 'n_routed_experts'}.get(family, 'num_experts')] = m['E']
    c['intermediate_size' if family in ('mixtral', 'phi35_moe', 'minimax_m2', 'gpt_oss', 'llama4', 'granite_moe',
                                        'olmoe') else 'moe_intermediate_size'] = m['I']
    if family in ('qwen2_moe', 'qwen3_next', 'qwen3_moe', 'olmoe', 'deepseek_v2', 'deepseek_v3', 'glm4_moe', 'dots1'):
        c['norm_topk_prob'] = m['norm']
    if family in ('mixtral', 'gpt_oss'):
        c['norm_topk_prob'] = False  # which their programs do not read
    if family in ('deepseek_v2', 'deepseek_v3', 'glm4_moe', 'dots1'):
        c.update(routed_scaling_factor=m.get('scale', 1.0), n_group=m.get('groups', 1),
                 topk_group=m.get('groups_kept', 1), first_k_dense_replace=1)
        c['n_shared_experts'] = m['S'] // m['I'] if 'S' in m else None
    if family == 'deepseek_v2':
        c.update(topk_method='group_limited_greedy' if m.get('groups', 1) > 1 else 'greedy', scoring_func='softmax')
    if family == 'deepseek_v3':
        c.update(topk_method='noaux_tc', scoring_func='sigmoid')
    if family == 'minimax_m2':
        c.update(scoring_func='sigmoid', shared_intermediate_size=0)
    if family == 'phi35_moe':
        c['router_jitter_noise'] = 0.01
    if family == 'gpt_oss':
        c.update(swiglu_limit=m['limit'], experts_per_token=m['k'], quantization_config=None)
    if family == 'llama4':
        return {'model_type': 'llama4', 'text_config': c,
                'vision_config': {'hidden_size': 7, 'model_type': 'llama4_vision_model', 'hidden_act': 'gelu'}}
    return c


def store(rng, folder, m, form, dtype, prefix, shards, how):
    """Writes the model; its numbers become what the file holds. The path that is to be opened."""
    tensors = []
    for name, key, expert, layout in names_of(m, form):
        t = tensor_of(m, key, expert, layout)
        own = 'F32' if key == 'correction' else dtype
        data = encode(flat(t), own)
        put_back(m, key, expert, layout, shaped(decode(data, own), shape_of(t)))
        tensors.append((prefix + '.' + name, own, shape_of(t), data))
    tensors += strangers(rng, prefix)
    rng.shuffle(tensors)
    if 'config' in how:
        with open(os.path.join(folder, 'config.json'), 'w') as file:
            json.dump(config_of(m), file, indent=2)
    if shards == 1:
        name = 'model.safetensors' if 'folder' in how else 'layer.safetensors'
        write_safetensors(os.path.join(folder, name), tensors, {'format': 'pt'} if rng.random() < 0.7 else None)
        return folder if 'folder' in how else os.path.join(folder, name)
    weight_map = {}
    for s in range(shards):
        name = 'model-%05d-of-%05d.safetensors' % (s + 1, shards)
        part = tensors[s::shards]
        write_safetensors(os.path.join(folder, name), part, {'format': 'pt'})
        weight_map.update((t[0], name) for t in part)
    for name in ('model.layers.9.mlp.gate.weight', 'lm_head.weight'):
        weight_map[name] = 'model-99999-of-99999.safetensors'  # is not asked for, and not there
    with open(os.path.join(folder, 'model.safetensors.index.json'), 'w') as file:
        json.dump({'metadata': {'total_size': 1}, 'weight_map': weight_map}, file, indent=1)
    return folder if 'folder' in how else os.path.join(folder, 'model.safetensors.index.json')


# ---- GGUF ----

ARCH = {'mixtral': 'llama', 'phi35_moe': 'phimoe', 'minimax_m2': 'minimax-m2', 'qwen2_moe': 'qwen2moe',
        'qwen3_moe': 'qwen3moe', 'qwen3_next': 'qwen3next', 'olmoe': 'olmoe',
        'deepseek_v2': 'deepseek2', 'deepseek_v3': 'deepseek2', 'glm4_moe': 'glm4moe', 'dots1': 'dots1',
        'llama4': 'llama4', 'gpt_oss': 'gpt-oss', 'granite_moe': 'granitemoe'}
TYPES = {'F32': 0, 'F16': 1, 'BF16': 30, **{name: row[0] for name, row in BLOCKS.items()}}


def gguf_string(s):
    return struct.pack('<Q', len(s)) + s.encode()


def gguf_value(kind, v):
    """The type's number and the bytes."""
    plain = {'u8': (0, 'B'), 'i8': (1, 'b'), 'u16': (2, 'H'), 'i16': (3, 'h'), 'u32': (4, 'I'), 'i32': (5, 'i'),
             'f32': (6, 'f'), 'bool': (7, 'B'), 'u64': (10, 'Q'), 'i64': (11, 'q'),
             'f64': (12, 'd')}
    if kind == 'string':
        return 8, gguf_string(v)
    if isinstance(kind, tuple):
        parts = [gguf_value(kind[1], x) for x in v]
        number = gguf_value(kind[1], v[0])[0] if v else 4
        return 9, struct.pack('<IQ', number, len(v)) + b''.join(p[1] for p in parts)
    return plain[kind][0], struct.pack('<' + plain[kind][1], v)


def gguf_pack(rng, t, kind, extreme):
    if kind not in PLAIN and kind != 'BF16' and (extreme or rng.random() < 0.8 or kind not in ('Q8_0', 'Q4_0')):
        data = random_blocks(rng, kind, len(flat(t)) // BLOCKS[kind][1], extreme)
        return data, shaped(block_values(kind, data), shape_of(t))
    if kind in ('Q8_0', 'Q4_0'):
        data = (pack_q8_0 if kind == 'Q8_0' else pack_q4_0)(flat(t))
        return data, shaped((unpack_q8_0 if kind == 'Q8_0' else unpack_q4_0)(data), shape_of(t))
    data = encode(flat(t), kind)
    return data, shaped(decode(data, kind), shape_of(t))


def gguf_names(m, form):
    out = [('ffn_gate_inp.weight', 'router', None)]
    if form == 'fused':
        out += [('ffn_gate_up_exps.weight', 'both', None), ('ffn_down_exps.weight', 'down_proj', None)]
    elif form == 'old':
        for e in range(m['E']):
            out += [('ffn_gate.%d.weight' % e, 'gate_proj', e), ('ffn_up.%d.weight' % e, 'up_proj', e),
                    ('ffn_down.%d.weight' % e, 'down_proj', e)]
    else:
        out += [('ffn_gate_exps.weight', 'gate_proj', None), ('ffn_up_exps.weight', 'up_proj', None),
                ('ffn_down_exps.weight', 'down_proj', None)]
    if 'gate_bias' in m:
        out += [('ffn_gate_inp.bias', 'router_bias', None), ('ffn_down_exps.bias', 'down_bias', None)]
        out += [('ffn_gate_up_exps.bias', 'bias', None)] if form == 'fused' else [('ffn_gate_exps.bias', 'gate_bias',
            None), ('ffn_up_exps.bias', 'up_bias', None)]
    if 'correction' in m:
        out.append(('exp_probs_b.bias', 'correction', None))
    if 'shared_gate' in m:
        out += [('ffn_gate_shexp.weight', 'shared_gate', None), ('ffn_up_shexp.weight', 'shared_up', None),
                ('ffn_down_shexp.weight', 'shared_down', None)]
    if 'shared_sigmoid' in m:
        out.append(('ffn_gate_inp_shexp.weight', 'shared_sigmoid', None))
    return out


def as_llama_cpp(rng, m):
    """What llama.cpp computes of a layer, where it is not what the family's own program does."""
    family = m['family']
    if family in ('qwen2_moe', 'qwen3_moe', 'olmoe', 'qwen3_next'):
        m['norm'] = family in ('qwen3_moe', 'qwen3_next')  # the file does not say
    if family == 'phi35_moe':
        m['method'] = 'softmax_selected'
    if family == 'deepseek_v2':
        m['group_score'] = 'top2'
        m['norm'] = rng.random() < 0.5
        m['scale'] = rng.choice([1.0, 16.0, 1.5])


def routing_keys(rng, m, a):
    """The keys of the deepseek families. What is left out is what llama.cpp then takes."""
    keys = [(a + 'expert_shared_count', 'u32', 1)]
    if m['family'] != 'dots1' and rng.random() < 0.4:
        m['gate'] = 'sigmoid' if m['family'] == 'glm4_moe' else 'softmax'
    else:
        keys.append((a + 'expert_gating_func', 'u32', 1 if m['gate'] == 'softmax' else 2))
    if rng.random() < 0.4:
        m['norm'] = False
    else:
        keys.append((a + 'expert_weights_norm', 'bool', int(m['norm'])))
    scale = m.get('scale', 1.0)
    if rng.random() < 0.3:
        scale = rng.choice([None, 0.0])
        m['scale'] = 1.0
    if scale is not None:
        keys.append((a + 'expert_weights_scale', 'f32', scale))
    return keys


def store_gguf(rng, folder, m, form, kind, version, extreme=False):
    arch = ARCH[m['family']]
    a = arch + '.'
    keys = [('general.name', 'string', 'made at random'), (a + 'block_count', 'u32', 5),
            ('tokenizer.ggml.tokens', ('array', 'string'), ['a', 'bc', '', 'd' * 300]),
            ('tokenizer.ggml.scores', ('array', 'f32'), [0.5, -1.0]), ('other.nested', ('array', ('array', 'u16')),
                [[1, 2], [3], []]), ('x.' + a + 'expert_used_count', 'u32', 77),
            (a + 'expert_count', 'u32', m['E']), (a + 'expert_used_count',
                                                  rng.choice(['u32', 'u16', 'i32', 'u64', 'i64']), m['k'])]
    alignment = rng.choice([None, 32, 64, 8])
    if alignment:
        keys.append(('general.alignment', 'u32', alignment))
    if m['family'] == 'minimax_m2':
        keys.append((a + 'expert_gating_func', 'u32', 2))
    if m['family'] in ('deepseek_v2', 'deepseek_v3', 'glm4_moe', 'dots1'):
        keys += routing_keys(rng, m, a)
        if m.get('groups', 1) > 1:
            keys += [(a + 'expert_group_count', 'u32', m['groups']),
                     (a + 'expert_group_used_count', 'u32', m['groups_kept'])]
        if 'scale' in m:
            m['scale'] = f32(m['scale'])
    rng.shuffle(keys)
    keys.insert(rng.choice([0, 0, len(keys)]), ('general.architecture', 'string', arch))
    tensors = [('token_embd.weight', 12, [256, 4], b'\x11' * 576), ('blk.3.attn_q.weight', 0, [2, 2], b'\x22' * 16),
               ('blk.3.ffn_norm.weight', 0, [2], b'\x33' * 8),
               ('blk.0.ffn_gate.weight', 0, [2], b'\x44' * 8), ('blk.0.ffn_up.weight', 0, [2],
                                                                b'\x44' * 8), ('blk.4.ffn_gate_inp.weight', 0, [2],
                   b'\x44' * 8)]
    for name, key, expert in gguf_names(m, form):
        t = tensor_of(m, key, expert, '')
        own = 'F32' if key in ('router', 'router_bias', 'correction', 'shared_sigmoid', 'gate_bias', 'up_bias',
                               'down_bias', 'bias') else kind
        if own in BLOCKS and shape_of(t)[-1] % BLOCKS[own][1] != 0:
            own = 'F16'
        data, back = gguf_pack(rng, t, own, extreme)
        put_back(m, key, expert, '', back)
        tensors.append(('blk.3.' + name, TYPES[own], shape_of(t)[::-1], data))
    rng.shuffle(tensors)
    step = alignment or 32
    infos, body = b'', b''
    for name, number, ne, data in tensors:
        body += b'\0' * (-len(body) % step)
        infos += gguf_string(name) + struct.pack('<I%dQIQ' % len(ne), len(ne), *ne, number, len(body))
        body += data
    head = b'GGUF' + struct.pack('<IQQ', version, len(tensors), len(keys))
    for key, what, v in keys:
        number, data = gguf_value(what, v)
        head += gguf_string(key) + struct.pack('<I', number) + data
    head += infos
    head += b'\0' * (-len(head) % step)
    path = os.path.join(folder, 'model.gguf')
    with open(path, 'wb') as file:
        file.write(head + body)
    return path


# ---- the cases ----


def add_case(rng, folder, lines, name, m, path, prefix, preset, original, dtype, tokens=5):
    xs, ys = [], []
    while len(xs) < tokens:
        x = [f32(rng.gauss(0, 1)) for _ in range(m['H'])]
        try:
            ys.append(layer(m, x))
            xs.append(x)
        except Close:
            pass
    with open(os.path.join(folder, name + '.xy'), 'wb') as file:
        file.write(struct.pack('<%dd' % (2 * tokens * m['H']), *(flat(xs) + flat(ys))))
    lines.append(' '.join([name, path, prefix, preset, str(tokens), str(m['H']), original, m['family'], dtype]))


PREFIX = {'mixtral': 'model.layers.3.block_sparse_moe', 'phi35_moe': 'model.layers.3.block_sparse_moe',
          'minimax_m2': 'model.layers.3.block_sparse_moe',
          'granite_moe': 'model.layers.3.block_sparse_moe', 'llama4': 'language_model.model.layers.3.feed_forward'}
ONLY_ONE_FORM = ('llama4', 'gpt_oss', 'granite_moe')
# Families whose names alone do not say which they are.
NAMELESS = ('phi35_moe', 'qwen3_next', 'qwen3_moe', 'olmoe', 'glm4_moe', 'dots1')


def settings_of(rng, family, experts):
    s = {}
    if family in ('qwen2_moe', 'qwen3_moe', 'olmoe', 'qwen3_next'):
        s['norm'] = rng.random() < 0.5
    if family in ('deepseek_v3', 'glm4_moe', 'dots1'):
        s.update(norm=rng.random() < 0.7, scale=rng.choice([1.0, 2.5, 1.75]))
    if family == 'deepseek_v2':
        s.update(scale=rng.choice([1.0, 16.0, 1.5]))
        if rng.random() < 0.3:
            s.update(norm=True, scale=1.0)
    if family in ('deepseek_v2', 'deepseek_v3', 'glm4_moe', 'dots1') and rng.random() < 0.75:
        groups = rng.choice([g for g in (2, 4, experts // 2) if experts % (2 * g) == 0 or g == 2])
        s.update(groups=groups, groups_kept=rng.randint(1, groups))
    if family == 'gpt_oss':
        s['limit'] = rng.choice([7.0, 3.5])
    if family == 'deepseek_v2' and rng.random() < 0.3:
        s['S'] = 0
    return s


def preset_settings(family):
    """What the presets of the library say, for models without config.json; None: too many
    experts for a small file."""
    return {'mixtral': (2, {}), 'phi35_moe': (2, {}), 'minimax_m2': (8, {}), 'qwen2_moe': (8, {'norm': False}),
            'qwen3_moe': (8, {'norm': True}), 'olmoe': (8, {'norm': False}),
            'deepseek_v2': (6, {'groups': 8, 'groups_kept': 3, 'scale': 16.0}), 'deepseek_v3': (8,
                {'groups': 8, 'groups_kept': 4, 'scale': 2.5, 'norm': True}),
            'llama4': (1, {}), 'gpt_oss': (4, {}), 'granite_moe': (8, {})}.get(family)


def make(folder, seed, rounds):
    rng = random.Random(seed)
    lines = []
    os.makedirs(folder, exist_ok=True)
    families = list(ARCH)
    dtypes = ['F32', 'F16', 'BF16', 'F32', 'BF16', 'F64']
    n = 0

    def place():
        nonlocal n
        n += 1
        name = 'case%03d' % n
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        return name, os.path.join(folder, name)

    def sizes(family):
        experts = rng.choice([4, 6, 8, 12])
        f = rng.choice([4, 7, 10, 16])
        d = rng.choice([5, 8, 2 * f, f, 13])  # 2 f and f: shapes that do not tell which dimension is which
        s = settings_of(rng, family, experts)
        k = rng.randint(1, min(4, experts, s.get('groups_kept', 1) * experts // s.get('groups', 1)))
        return experts, d, f, max(k, 2) if family == 'phi35_moe' else k, s

    for r in range(rounds):
        for family in families:
            for form in ('each',) if family in ONLY_ONE_FORM else ('each', 'fused'):
                for how in ('config', 'config shards', 'plain'):
                    prefix = PREFIX.get(family, 'model.layers.3.mlp')
                    if form == 'fused' and family not in ('llama4', 'gpt_oss', 'granite_moe'):
                        prefix = 'model.layers.3.mlp'
                    dtype = dtypes[n % len(dtypes)]
                    name, where = place()
                    experts, d, f, k, s = sizes(family)
                    preset = '-'
                    if how == 'plain':
                        given = preset_settings(family)
                        if given is None:
                            continue
                        k, s = given
                        experts = 16 if k > 4 else 8
                        if family in NAMELESS or form == 'fused':
                            preset = family
                    m = random_layer(rng, family, experts, d, f, k, s)
                    shards = rng.choice([2, 3]) if 'shards' in how else 1
                    if rng.random() < 0.3:
                        how += ' folder'
                    path = store(rng, where, m, form, dtype, prefix, shards, how)
                    shown = rng.choice([prefix, prefix, prefix + '.', prefix.rsplit('.', 1)[0],
                                        prefix.rsplit('.', 1)[0] + '.mlp'])
                    add_case(rng, folder, lines, name, m, path, shown, preset,
                             '-' if form == 'fused' else path + '=' + prefix, dtype)
            for kind in ('F32', 'F16', 'BF16', 'Q8_0', 'Q4_0'):
                name, where = place()
                experts, d, f, k, s = sizes(family)
                if kind.startswith('Q'):
                    d, f = rng.choice([32, 64]), 32
                form = rng.choice(['each', 'each', 'fused', 'old'] if family == 'mixtral'
                                  else ['each', 'each', 'fused'])
                if family == 'gpt_oss':
                    s['limit'] = 7.0
                m = random_layer(rng, family, experts, d, f, k, s)
                as_llama_cpp(rng, m)
                path = store_gguf(rng, where, m, form, kind, rng.choice([2, 3]))
                add_case(rng, folder, lines, name, m, path, rng.choice(['blk.3', 'blk.3.']), '-', '-', kind)
        for kind in BLOCKS:
            for extreme in (False, True):
                name, where = place()
                m = random_layer(rng, 'olmoe', 4, BLOCKS[kind][1], BLOCKS[kind][1], 2, {})
                path = store_gguf(rng, where, m, rng.choice(['each', 'fused']), kind, 3, extreme)
                with open(os.path.join(folder, name + '.values'), 'wb') as file:
                    values = flat([m['gate_proj'], m['up_proj'], m['down_proj']])
                    file.write(struct.pack('<%dd' % len(values), *values))
                add_case(rng, folder, lines, name, m, path, 'blk.3', '-', '-', kind, 0 if extreme else 5)
    with open(os.path.join(folder, 'cases.txt'), 'w') as file:
        file.write('\n'.join(lines) + '\n')
    print('%d models' % len(lines))


def tensors_at(path):
    """All tensors of a model, wherever they lie."""
    if os.path.isdir(path):
        inside = os.path.join(path, 'model.safetensors.index.json')
        path = inside if os.path.exists(inside) else os.path.join(path, 'model.safetensors')
    if path.endswith('.json'):
        with open(path) as file:
            files = sorted(set(json.load(file)['weight_map'].values()))
        out = {}
        for name in files:
            if os.path.exists(os.path.join(os.path.dirname(path), name)):
                out.update(read_safetensors(os.path.join(os.path.dirname(path), name))[1])
        return out
    return read_safetensors(path)[1]


def make_once(folder, seed, rounds):
    """What make makes, from the folder TEST_KEPT of the environment if another build has left it.

    The models are the same for each build, and make takes most of the test's time.
    """
    kept = os.environ.get('TEST_KEPT')
    if not kept:
        make(folder, seed, rounds)
        return
    kept = os.path.join(kept, '%s-%d-%d' % (os.path.basename(folder), seed, rounds))
    if not os.path.isdir(kept):
        make(folder, seed, rounds)
        own = '%s.%d' % (kept, os.getpid())
        shutil.copytree(folder, own)
        try:
            os.rename(own, kept)
        except OSError:  # another build was faster
            shutil.rmtree(own)
        return
    shutil.copytree(kept, folder, dirs_exist_ok=True)


def check(folder):
    passed, failed = 0, 0
    with open(os.path.join(folder, 'cases.txt')) as file:
        lines = file.read().split('\n')
    for line in lines:
        if not line or line.split()[6] == '-':
            continue
        name, original, dtype = line.split()[0], line.split()[6], line.split()[8]
        path, prefix = original.rsplit('=', 1)
        want = {n: t for n, t in tensors_at(path).items() if n.startswith(prefix + '.')}
        metadata, found = read_safetensors(os.path.join(folder, name + '.out.safetensors'))
        good = metadata == {'format': 'pt'} and sorted(want) == sorted(found)
        for n in want:
            # the correction bias stays F32 beside weights of 16 bits, as in the models' files
            own = 'F32' if n.endswith('correction_bias') and dtype != 'F64' else dtype
            if good and (found[n][1] != want[n][1] or found[n][0] != own):
                good = False
            if good and want[n][0] == own == 'F64' and found[n][2] != want[n][2]:  # a build of 32 bits has read it
                good = found[n][2] == encode([f32(v) for v in decode(want[n][2], 'F64')], 'F64')
            elif good and want[n][0] == own:
                good = found[n][2] == want[n][2]
            elif good:  # F32 as F64
                good = decode(found[n][2], own) == decode(want[n][2], want[n][0])
        passed, failed = passed + good, failed + (not good)
        if not good:
            print('%s: the written file differs from %s' % (name, path))
    print('%d passed, %d failed' % (passed, failed))
    return 0 if passed and not failed else 1


def seeds(folder, source):
    """Small models as inputs of tests/fuzz/fuzz_file.c: the file, what lies beside it, prefix
    and preset in one."""
    with open(os.path.join(source, 'cases.txt')) as file:
        lines = [line.split() for line in file.read().split('\n') if line]
    kept = set()
    for name, path, prefix, preset, _, _, _, family, dtype in lines:
        where = os.path.dirname(path) if not os.path.isdir(path) else path
        form = (family, os.path.basename(path))
        size = sum(os.path.getsize(os.path.join(where, f)) for f in os.listdir(where))
        if form in kept or size > 8000:
            continue
        kept.add(form)
        if os.path.isdir(path):
            path = os.path.join(path, 'model.safetensors.index.json'
                                if 'model.safetensors.index.json' in os.listdir(path) else 'model.safetensors')
        pieces = [prefix.encode(), b'' if preset == '-' else preset.encode()]
        shards = sorted(f for f in os.listdir(where) if '-of-' in f)
        for f in [path, os.path.join(where, 'config.json')] + [os.path.join(where, f) for f in shards[:2]]:
            data = open(f, 'rb').read() if os.path.exists(f) else b''
            for i, shard in enumerate(shards):
                data = data.replace(shard.encode(),
                                    ('%s.safetensors' % 'ab'[i]).encode()) if f == path and i < 2 else data
            pieces.append(data)
        if len(shards) > 2:
            continue
        with open(os.path.join(folder, 'published-%s-%s' % (family, name)), 'wb') as file:
            file.write(b'MOEP' + b''.join(struct.pack('<H', len(p)) + p for p in pieces))


def main():
    if len(sys.argv) >= 3 and sys.argv[1] == 'make':
        make_once(sys.argv[2], *(int(word) for word in (sys.argv[3:5] + ['1', '1'])[:2]))
        return 0
    if len(sys.argv) == 4 and sys.argv[1] == 'seeds':
        seeds(sys.argv[2], sys.argv[3])
        return 0
    if len(sys.argv) == 3 and sys.argv[1] == 'check':
        return check(sys.argv[2])
    print(__doc__)
    return 2


if __name__ == '__main__':
    sys.exit(main())
