#!/usr/bin/env python3
"""Writes a small model with a vocabulary, for the tests of examples/chat.c.

    python3 tests/examples/chat_model.py FILE.gguf [--no-words] [--lacks-z]
        --lacks-z: the model has no row for the letter z
    python3 tests/examples/chat_model.py NAME --longrope
        a phimoe model of tests/golden/shapes.py whose RoPE factors depend on the context

An architecture like Mixtral's, 2 blocks of 4 experts, with random weights (F32); a byte-level
vocabulary with the control tokens of a chat, and a chat template."""

import os
import random
import struct
import sys

WIDTH, HEADS, EXPERTS, HIDDEN, BLOCKS = 32, 2, 4, 16, 2


def string(text):
    data = text.encode('utf-8')
    return struct.pack('<Q', len(data)) + data


def key(name, kind, value):
    packed = {4: lambda v: struct.pack('<I', v), 6: lambda v: struct.pack('<f', v), 8: string}
    if isinstance(value, list):
        return string(name) + struct.pack('<IIQ', 9, kind, len(value)) + b''.join(packed[kind](v) for v in value)
    return string(name) + struct.pack('<I', kind) + packed[kind](value)


def stand_ins():
    """The characters that stand for the 256 bytes."""
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def longrope(name):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'golden'))
    import shapes
    m, seed = shapes.Model(), 0
    while getattr(m, 'scaling', None) != 'longrope':
        m, seed = shapes.Model(), seed + 1
        m.arch, m.folder, m.seed, r = 'phimoe', False, 0, random.Random(seed)
        shapes.draw(m, r)
    m.original, m.context = 4096, 131072
    shapes.weights(m, r)
    shapes.gguf(m, r, name)


def main():
    if '--longrope' in sys.argv:
        longrope(sys.argv[1])
        return
    tokens = stand_ins() + ['he', 'll', '<|endoftext|>', '<|im_start|>', '<|im_end|>']
    types, rows = [1] * 258 + [3] * 3, len(tokens)
    if '--lacks-z' in sys.argv:
        tokens.append(tokens.pop(ord('z')))
        types.append(types.pop(ord('z')))
        rows -= 1
    shapes = {'token_embd': (WIDTH, rows), 'output': (WIDTH, rows), 'output_norm': (WIDTH,)}
    for block in range(BLOCKS):
        at = 'blk.%d.' % block
        for name in 'attn_q', 'attn_k', 'attn_v', 'attn_output':
            shapes[at + name] = (WIDTH, WIDTH)
        shapes[at + 'attn_norm'] = shapes[at + 'ffn_norm'] = (WIDTH,)
        shapes[at + 'ffn_gate_inp'] = (WIDTH, EXPERTS)
        shapes[at + 'ffn_gate_exps'] = shapes[at + 'ffn_up_exps'] = (WIDTH, HIDDEN, EXPERTS)
        shapes[at + 'ffn_down_exps'] = (HIDDEN, WIDTH, EXPERTS)
    keys = [key('general.architecture', 8, 'llama'), key('llama.block_count', 4, BLOCKS),
            key('llama.context_length', 4, 256), key('llama.embedding_length', 4, WIDTH),
            key('llama.feed_forward_length', 4, HIDDEN), key('llama.attention.head_count', 4, HEADS),
            key('llama.attention.layer_norm_rms_epsilon', 6, 1e-5), key('llama.expert_count', 4, EXPERTS),
            key('llama.expert_used_count', 4, 2), key('tokenizer.ggml.model', 8, 'gpt2'),
            key('tokenizer.ggml.pre', 8, 'qwen2'), key('tokenizer.ggml.tokens', 8, tokens),
            key('tokenizer.ggml.token_type', 4, types).replace(b'\x09\0\0\0\x04', b'\x09\0\0\0\x05'),
            key('tokenizer.ggml.merges', 8, ['h e', 'l l']),
            key('tokenizer.ggml.eos_token_id', 4, tokens.index('<|endoftext|>')),
            key('tokenizer.chat_template', 8, "{{ '<|im_start|>' + role }}")]
    if '--no-words' in sys.argv:
        keys = [pair for pair in keys if b'tokenizer.' not in pair]
    infos, data, rng = [], b'', random.Random(1)
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        spread = 1 if len(shape) == 1 or name == 'token_embd' else 1.5 / shape[0] ** 0.5
        values = [1.0 if len(shape) == 1 else rng.gauss(0, spread) for _ in range(count)]
        infos.append(string(name + '.weight') + struct.pack('<I%dQIQ' % len(shape), len(shape), *shape, 0, len(data)))
        data += struct.pack('<%df' % count, *values)
        data += b'\0' * (-len(data) % 32)
    head = b'GGUF' + struct.pack('<IQQ', 3, len(infos), len(keys)) + b''.join(keys) + b''.join(infos)
    with open(sys.argv[1], 'wb') as file:
        file.write(head + b'\0' * (-len(head) % 32) + data)


main()
