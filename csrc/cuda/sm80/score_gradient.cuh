// The recomputation that both backward walks share: from Q K^T and dO V^T of a tile, the probabilities
// P = exp(S - lse) and the gradient dS = P * (dP - delta) (docs/algorithm.md).
#pragma once

#include "../../attention/dropout.h"
#include "../../attention/score.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "score_addend.cuh"

namespace flash::cuda::sm80 {

// What a score goes through besides the scale; the scale alone has to be positive. Kernels for dropout or a
// bias (all) ask at run time which there are.
enum class Features { none, transformed, all };

FLASH_HOST_DEVICE Features features_of(const ForwardProblem& problem) {
    if (problem.dropout_threshold || problem.bias.data) return Features::all;
    const bool plain = problem.softcap == 0 && !problem.alibi_slopes && problem.softmax_scale > 0;
    return plain ? Features::none : Features::transformed;
}

// Which of this lane's 8 scores of a 16 x 16 patch are kept: bit (r % 2) * 4 + column % 4 of Fragment's row r
// and column.
__device__ __forceinline__ uint32_t kept_scores(const Dropout& dropout, Position query, Position key) {
    const Philox bits = dropout.bits(query / Dropout::patch, key / Dropout::patch, lane_index());
    uint32_t kept = 0;
#pragma unroll
    for (int slot = 0; slot < Dropout::scores_per_call; ++slot)
        kept |= uint32_t(dropout.keep(bits, slot)) << slot;
    return kept;
}

// query, key: of the fragment's first row and column.
template <class Scores>
__device__ __forceinline__ void drop(Scores& p, const Dropout& dropout, Position query, Position key) {
#pragma unroll
    for (int m = 0; m < Scores::row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < Scores::column_tiles; n += 2) {
            const uint32_t kept = kept_scores(dropout, query + m * 16, key + n * 8);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!(kept >> i & 1)) p.at(2 * m + i / 4, 2 * n + i % 4) = 0;
        }
}

// The part of the score matrix that a warp's fragment covers.
struct ScorePart {
    Position first_query, first_key;
    Position diagonal;  // Sk - Sq
    bool dropout;       // the problem has any
};

// lse and delta of the fragment's rows. A row that saw no key has lse = -inf and probabilities of 0.
template <int rows>
struct RowConstants {
    float lse_log2[rows], delta[rows];

    template <class Scores>
    __device__ __forceinline__ void load(const float* lse, const float* delta_of_row) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const float natural = lse[Scores::row(r)];
            lse_log2[r] = natural == -INFINITY ? INFINITY : natural * float(GpuMath::unit);
            delta[r] = delta_of_row[Scores::row(r)];
        }
    }
};

// What dS is the gradient of.
enum class Of { dot_products, scores };

// s: Q K^T on entry, what multiplies dO on return (P, without the dropped ones). dp: dO V^T on entry, dS on
// return. Without features dS still lacks the factor softmax_scale, which the caller gives to the sums.
template <Features features, Of of = Of::dot_products, DType dtype, class Scores>
__device__ __forceinline__ void differentiate(Scores& s, Scores& dp, const RowConstants<Scores::rows>& row,
                                              const ScoreTransform<GpuMath>& transform,
                                              const Dropout& dropout, const ScoreAddend<dtype>& addend,
                                              const ScorePart& part) {
    const bool drop = features == Features::all && part.dropout;
    const bool has_bias = features == Features::all && addend.bias;
    BiasPart<dtype, Fragment<16, 16>> bias;  // of the next 16 x 16 scores; more have no registers
    const auto load_bias = [&](int m, int n) {
        if (has_bias) addend.load_bias(bias, part.first_query + m * 16, part.first_key + n * 8);
    };
    load_bias(0, 0);
    const float keep_scale = drop ? float(dropout.keep_scale()) : 1.f;
#pragma unroll
    for (int m = 0; m < Scores::row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < Scores::column_tiles; n += 2) {
            uint32_t kept = 0;
            if (drop) kept = kept_scores(dropout, part.first_query + m * 16, part.first_key + n * 8);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = 2 * m + i / 4, column = 2 * n + i % 4;
                const float dot = s.at(r, column);
                float gradient = dp.at(r, column), probability, derivative = 1;
                bool hidden = false;
                if constexpr (features == Features::none) {
                    probability = GpuMath::exponential(dot * transform.inner - row.lse_log2[r]);
                } else {
                    const int distance = part.first_query + Scores::row(r) + part.diagonal - part.first_key -
                                         Scores::column(column);
                    float score = transform.score(dot, float(distance < 0 ? -distance : distance));
                    if (has_bias) {
                        const float addend = bias.at(i / 4, i % 4);
                        hidden = addend == -INFINITY;
                        score += addend;
                    }
                    probability = GpuMath::exponential(score - row.lse_log2[r]);
                    if (of == Of::dot_products) derivative = transform.derivative(dot);
                }
                if (drop) gradient = kept >> i & 1 ? gradient * keep_scale : 0;
                dp.at(r, column) = hidden ? 0 : probability * (gradient - row.delta[r]) * derivative;
                if (drop) probability = kept >> i & 1 ? probability * keep_scale : 0;
                s.at(r, column) = hidden ? 0 : probability;
            }
            if (n + 2 < Scores::column_tiles)
                load_bias(m, n + 2);
            else if (m + 1 < Scores::row_tiles)
                load_bias(m + 1, 0);
            if constexpr (features == Features::all) end_block(part.first_query < 0);
        }
}

}  // namespace flash::cuda::sm80
