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
    patch_rows, patch_columns = (seqlen_q + 15) // 16, (seqlen_k + 15) // 16
    shape = (batch * num_heads, patch_rows, 8, patch_columns, 4)  # a call each
    head, patch_row, row, patch_column, pair = np.ogrid[tuple(map(slice, shape))]
    counter = (patch_column * 32 + row * 4 + pair, patch_row, head, np.array(offset & 0xFFFFFFFF))
    words = philox_4x32_10([np.broadcast_to(x, shape) for x in counter],
                           (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)))
    threshold = threshold_of(dropout_p)
    kept = np.empty((batch * num_heads, patch_rows, 2, 8, patch_columns, 2, 4, 2), dtype=bool)
    for i, word in enumerate(words):
        kept[:, :, i // 2, :, :, i % 2, :, 0] = (word & np.uint64(0xFFFF)) >= threshold
        kept[:, :, i // 2, :, :, i % 2, :, 1] = (word >> np.uint64(16)) >= threshold
    kept = kept.reshape(batch, num_heads, patch_rows * 16, patch_columns * 16)
    return kept[:, :, :seqlen_q, :seqlen_k]
