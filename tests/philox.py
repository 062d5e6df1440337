"""Philox-4x32-10 and the dropout mask that is drawn from it, in numpy, from the published round function."""

import numpy as np

MASK32 = np.uint64(0xFFFFFFFF)


def philox_4x32_10(counter, key):
    """counter: four arrays of uint32 values, key: two integers. Returns four arrays of uint64 below 2**32."""
    x0, x1, x2, x3 = (np.asarray(x, dtype=np.uint64) for x in counter)
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * x0
        product1 = np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (
            (product1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0), product1 & MASK32,
            (product0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1), product0 & MASK32)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3


def threshold_of(dropout_p):
    return round(dropout_p * 65536)


def keep_scale(dropout_p):
    return 65536 / (65536 - threshold_of(dropout_p))


def keep_mask(seed, offset, dropout_p, batch, num_heads, seqlen_q, seqlen_k):
    """bool array [B, H, Sq, Sk], False where the probability is dropped.

    One Philox call serves 8 of the scores of a 16 x 16 patch: a 16-bit value for each of 2 query halves x 2
    key halves x 2 neighbouring keys.
    """
    head = np.arange(batch * num_heads)[:, None, None]
    query = np.arange(seqlen_q)[None, :, None]
    key = np.arange(seqlen_k)[None, None, :]
    shape = (batch * num_heads, seqlen_q, seqlen_k)
    x0 = np.broadcast_to(key // 16 * 32 + query % 8 * 4 + key % 8 // 2, shape)
    x1 = np.broadcast_to(query // 16, shape)
    x2 = np.broadcast_to(head, shape)
    x3 = np.full(shape, offset & 0xFFFFFFFF)
    words = philox_4x32_10((x0, x1, x2, x3), (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)))
    slot = np.broadcast_to(query // 8 % 2 * 4 + key // 8 % 2 * 2 + key % 2, shape)
    word = np.choose(slot // 2, words)
    value = (word >> (16 * (slot % 2)).astype(np.uint64)) & np.uint64(0xFFFF)
    return (value >= threshold_of(dropout_p)).reshape(batch, num_heads, seqlen_q, seqlen_k)
