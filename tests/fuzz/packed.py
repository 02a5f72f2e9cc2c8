"""Rows [m,k] times a packed matrix [n,k], by the types of packed weights in moe_kernels.h."""

import numpy as np


def f16(rows, matrix):
    return rows @ matrix.astype(np.float16).astype(np.float64).T


def bf16(rows, matrix):
    bits = matrix.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7fff + (bits >> 16 & 1)  # to nearest even
    return rows @ (bits >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64).T


def blocks_of(v, size):
    """[rows, blocks, size], with zeros at the end."""
    rest = -v.shape[1] % size
    return np.pad(v, ((0, 0), (0, rest))).reshape(len(v), -1, size)


def divide(a, b):
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0.0)


def quantized_rows(rows, size):
    """Codes and scales of blocks of activations."""
    x = blocks_of(rows, size)
    most = np.abs(x).max(2, keepdims=True, initial=0.0)
    most[most < 64.0 * np.finfo(np.float64).tiny] = 0.0
    return np.rint(x * divide(np.full_like(most, 127.0), most)), most / 127.0


def codes_8(blocks, stored):
    """Codes and scales of blocks of weights; scales are kept as `stored`."""
    scale = (np.abs(blocks).max(2, keepdims=True, initial=0.0) / 127.0).astype(stored).astype(np.float64)
    w = divide(blocks, scale + np.zeros_like(blocks))
    return np.sign(w) * np.minimum(np.floor(np.abs(w) + 0.5), 127.0), scale


def codes_4(blocks, stored):
    first = np.abs(blocks).argmax(2)[..., None]
    scale = (np.take_along_axis(blocks, first, 2) / -8.0).astype(stored).astype(np.float64)
    w = np.minimum(np.floor(divide(blocks, scale + np.zeros_like(blocks)) + 8.5) - 8.0, 7.0)
    return np.where(scale != 0.0, w, 0.0), scale


def quantized(codes, size, stored):
    def product(rows, matrix):
        width = size or max(matrix.shape[1], 1)
        q, q_scale = quantized_rows(rows, width)
        w, w_scale = codes(blocks_of(matrix, width), stored)
        sums = np.einsum("igp,jgp->ijg", q, w)
        return (sums * (w_scale[None, :, :, 0] * q_scale[:, None, :, 0])).sum(2)
    return product


PACKED = {
    "f16": f16,
    "bf16": bf16,
    "q8": quantized(codes_8, 0, np.float32),
    "q8_block": quantized(codes_8, 32, np.float16),
    "q4": quantized(codes_4, 32, np.float16),
}
