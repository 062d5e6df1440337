// A problem as both of Hopper's passes see it: the tensors that they copy, and reasons not to take it, or
// nullptr.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "../tile/gpu_math.h"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

// view: laid out as q, and as k.
inline Rows queries_of(const ForwardProblem& problem, const TensorView& view, int64_t head_dim) {
    const bool packed = problem.cu_seqlens_q;
    return {view, packed ? 1 : problem.batch, problem.rows_q, problem.heads_q, head_dim};
}
inline Rows keys_of(const ForwardProblem& problem, const TensorView& view, int64_t head_dim) {
    const int64_t entries = problem.cache.entries ? problem.cache.entries : problem.batch;
    const int64_t rows = problem.cache.pages ? problem.cache.page_size : problem.rows_k;
    return {view, problem.cu_seqlens_k ? 1 : entries, rows, problem.heads_k, head_dim};
}

// To compare Hopper's kernels with the portable ones: FLASH_ATTN_SM90=0. Asked last: it takes as long as the
// rest.
inline const char* switched_off() {
    const char* const value = std::getenv("FLASH_ATTN_SM90");
    return value && std::string_view(value) == "0" ? "FLASH_ATTN_SM90=0 switches it off" : nullptr;
}

// A bias as copies see it: where batch entries or heads share it, there is one of them.
template <class Use>
auto with_rows_of_bias(const ForwardProblem& problem, const Use& use) {
    const ScoreMatrix& bias = problem.bias;
    const TensorView view{bias.data, bias.batch_stride, bias.row_stride, bias.head_stride};
    return use(Rows{view, bias.batch_stride ? problem.batch : 1, bias.row_stride ? problem.seqlen_q : 1,
                    bias.head_stride ? problem.heads_q : 1, problem.seqlen_k});
}

// Boxes as bias_tile.cuh wants them.
inline CUtensorMap bias_map(const ForwardProblem& problem, DType dtype, int box_rows) {
    return with_rows_of_bias(problem, [&](const Rows& rows) {
        return tensor_map(rows, dtype, problem.bias.row_stride ? box_rows : 1);
    });
}

// transformed, biased: what the kernel is for (transformed_scores.cuh, bias_tile.cuh).
inline const char* lacks(const ForwardProblem& problem, bool transformed, bool biased) {
    if (problem.dropout_threshold) return "it has no dropout";
    if (biased != (problem.bias.data != nullptr)) return biased ? "it is for a bias" : "it has no biases";
    if (biased)
        return with_rows_of_bias(problem, [](const Rows& rows) { return fits_tensor_map(rows, 2); })
                   ? nullptr
                   : "the bias's rows, or what lies between them, are no multiples of 16 bytes, or too many";
    if (transformed == (problem.softcap != 0 || problem.alibi_slopes || !(problem.softmax_scale > 0)))
        return nullptr;
    return transformed ? "it is for a softcap, ALiBi, or a scale that is not positive"
                       : "it has no softcap, no ALiBi, and no negative scale";
}

// From what products leave to a score in log 2: what transforms scores scales them, too.
inline float score_unit(const ForwardProblem& problem, bool transformed) {
    return transformed ? 1 : float(problem.softmax_scale * GpuMath::unit);
}

inline const char* cannot_copy(std::initializer_list<Rows> tensors) {
    for (const Rows& rows : tensors)
        if (!fits_tensor_map(rows, 2))
            return "rows, or what lies between them, are no multiples of 16 bytes, or too many";
    return nullptr;
}

}  // namespace flash::cuda::sm90
