// The operators' C++ side; schemas in library.cpp. Each checks, allocates, fills the problem and runs an
// engine.
#pragma once

#include <tuple>

#include "arguments.h"

namespace flash {

// The options as parameters, in the order of the schemas: the boxing wrapper wants them one by one.
#define FLASH_OPTION_PARAMETERS                                                                           \
    OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, \
        OptionalTensor alibi_slopes, OptionalTensor rng_state, OptionalTensor key_block_counts,           \
        OptionalTensor key_block_indices, OptionalTensor query_block_counts,                              \
        OptionalTensor query_block_indices, int64_t block_size_q, int64_t block_size_k, double dropout_p, \
        double softmax_scale, int64_t window_size_left, int64_t window_size_right, double softcap,        \
        bool deterministic, OptionalTensor attn_bias, OptionalTensor attn_mask
#define FLASH_OPTION_ARGUMENTS                                                                        \
    {cu_seqlens_q,      cu_seqlens_k,     max_seqlen_q,      max_seqlen_k,       alibi_slopes,        \
     rng_state,         key_block_counts, key_block_indices, query_block_counts, query_block_indices, \
     block_size_q,      block_size_k,     dropout_p,         softmax_scale,      window_size_left,    \
     window_size_right, softcap,          deterministic,     attn_bias,          attn_mask}

std::tuple<Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, FLASH_OPTION_PARAMETERS);

// Without any option but these: a call's arguments take 0.1 us each on their way through the dispatcher.
std::tuple<Tensor, Tensor> plain_attention_forward(Tensor q, Tensor k, Tensor v, double softmax_scale,
                                                   int64_t window_size_left, int64_t window_size_right,
                                                   bool deterministic);

std::tuple<Tensor, Tensor> attention_cached(Tensor q, Tensor k, Tensor v, OptionalTensor cu_seqlens_q,
                                            int64_t max_seqlen_q, OptionalTensor cache_seqlens,
                                            OptionalTensor cache_leftpad, OptionalTensor cache_batch_idx,
                                            OptionalTensor block_table, OptionalTensor alibi_slopes,
                                            double softmax_scale, int64_t window_size_left,
                                            int64_t window_size_right, double softcap, int64_t num_splits);

std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor dout, OptionalTensor dlse, Tensor q, Tensor k,
                                                      Tensor v, Tensor out, Tensor lse,
                                                      FLASH_OPTION_PARAMETERS);

std::tuple<Tensor, Tensor, Tensor> plain_attention_backward(Tensor dout, OptionalTensor dlse, Tensor q,
                                                            Tensor k, Tensor v, Tensor out, Tensor lse,
                                                            double softmax_scale, int64_t window_size_left,
                                                            int64_t window_size_right, bool deterministic);

// As attention_backward, and the gradient of attn_bias, in its shape and the accumulation type.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_with_bias(Tensor dout, OptionalTensor dlse,
                                                                        Tensor q, Tensor k, Tensor v,
                                                                        Tensor out, Tensor lse,
                                                                        FLASH_OPTION_PARAMETERS);

// mask: bool [B or 1, H or 1, Sq or 1, Sk], True where a score exists. bits: int32 [..., ceil(Sk / 128) * 4],
// key j is bit j % 32 of word j / 32. The rest are lists of blocks of 128 x 128 (BlockSparseMask) for
// seqlen_q queries.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_mask(Tensor mask, int64_t seqlen_q);

// exp(score - the row's maximum score) as [B, H, Sq, Sk] with both lengths rounded up to 128 (packed: of the
// longest sequences); negative where dropout drops it, 0 where nothing is visible. Always made on the CPU.
Tensor attention_probabilities(Tensor q, Tensor k, Tensor v, FLASH_OPTION_PARAMETERS);

}  // namespace flash
