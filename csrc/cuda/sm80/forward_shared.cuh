// What the kernel table says of a forward kernel, and what its block keeps in shared memory.
#pragma once

#include "key_stages.cuh"

namespace flash::cuda::sm80 {

struct ForwardConfiguration {
    int head_dim, query_tile, key_tile, warps, blocks, columns, bias, retries, few, one_wave;
};

template <DType dtype, ForwardConfiguration c>
struct ForwardShared {
    alignas(128) char q[c.query_tile * c.head_dim * element_bytes(dtype)];  // at the end O
    KeyStages<dtype, c.key_tile, c.head_dim, 2> keys;
    alignas(128) char p[c.columns > 1 ? c.query_tile * c.key_tile * element_bytes(dtype) : 16];
    float exchange[c.warps][c.columns > 1 ? c.query_tile * c.columns / c.warps : 1];
    bool beyond[c.warps];
    uint8_t maxima[c.warps];                    // what note_maxima() said of the warp's rows
    uint32_t bad_keys[(c.key_tile + 31) / 32];  // keys whose value is not finite, a bit each
    QueryPlan<dtype, c.warps> plan;
};

}  // namespace flash::cuda::sm80
