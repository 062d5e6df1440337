// What dot products pass through besides their scale (attention/score.h), in a warp's accumulators. Whether
// there is a softcap or ALiBi is asked around loops, not in them.
#pragma once

#include "../../attention/mask.h"
#include "../../attention/score.h"
#include "../ptx/log2.h"
#include "../ptx/reciprocal.h"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"

namespace flash::cuda::sm90 {

class TransformedScores {
  public:
    // between: how far along the keys it is from the scores' first column to where the first row meets its
    // diagonal; or, of transposed scores, along the queries.
    __device__ __forceinline__ TransformedScores(const ScoreTransform<GpuMath>& transform, Position between)
        : transform_(transform), between_(between) {}

    // Dot products become scores, but for ALiBi. The tanh is 1 - 2 / (1 + e^2x), wrong by 3e-7 at most:
    // 16-bit inputs have no use for GpuMath's, whose error is small beside itself, and which takes twice as
    // long.
    template <class Scores>
    __device__ __forceinline__ void scale_and_cap(Scores& s) const {
        const float cap = transform_.cap;
        if (cap == 0) {
            s *= transform_.inner;
            return;
        }
        const float twice = transform_.inner * float(2 * GpuMath::unit);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const float above = 1 + GpuMath::exponential(s.at(r, column) * twice);
                s.at(r, column) = fmaf(reciprocal_approximate(above), -2 * cap, cap);
            }
    }

    template <class Scores>
    __device__ __forceinline__ void add_alibi(Scores& s) const {
        if (transform_.slope == 0) return;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column)
                s.at(r, column) = fmaf(distance<Scores>(r, column), -transform_.slope, s.at(r, column));
    }

    // A gradient of scores becomes one of dot products, but for their scale. A softcap's derivative is
    // 1 - tanh^2, and what the tanh was a probability still says: there are no registers to keep it in.
    // p_of(tile), lse_of(tile): four of a lane's probabilities, and their queries' lse, in log 2.
    template <class Scores, class POf, class LseOf>
    __device__ __forceinline__ void differentiate_cap(Scores& ds, const POf& p_of,
                                                      const LseOf& lse_of) const {
        if (transform_.cap == 0) return;
        const float inverse = GpuMath::reciprocal(transform_.cap);
#pragma unroll
        for (int tile = 0; tile < Scores::column_tiles; ++tile) {
            const float4 p = p_of(tile), lse = lse_of(tile);
            const float scores[4] = {log2_approximate(p.x) + lse.x, log2_approximate(p.y) + lse.y,
                                     log2_approximate(p.z) + lse.z, log2_approximate(p.w) + lse.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i / 2, column = tile * 2 + i % 2;
                const float capped = fmaf(distance<Scores>(r, column), transform_.slope, scores[i]);
                // At least -1: a probability of 0 says no more than that the score was low.
                const float tanh = fmaxf(capped * inverse, -1);
                ds.at(r, column) *= fmaf(tanh, -tanh, 1);
            }
        }
    }

  private:
    template <class Scores>
    __device__ __forceinline__ float distance(int r, int column) const {
        const float of_first = float(between_ + Scores::row(r) - Scores::column(0));
        return fabsf(of_first - float(column / 2 * 8 + column % 2));
    }

    ScoreTransform<GpuMath> transform_;
    Position between_;
};

}  // namespace flash::cuda::sm90
