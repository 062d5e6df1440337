#include "../launch.h"
#include "../ptx/grid_dependency.h"
#include "rows.cuh"
#include "rows.h"
#include "split.cuh"

namespace flash::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 4, kThreads = kWarps * kLanes;
constexpr int kMostOfLane = kMostSplits / kLanes;

struct CombineShared {
    float4 averages[kWarps][kLanes];
    float weights[kWarps][kMostSplits];
};

// One warp a row, or where shares are many one block: the average of the shares' averages, each weighted with
// its part of the sum of exponentials. A lane works out the weights of some shares, and averages four
// columns: its loads wait for nothing but the weights.
template <DType dtype>
__global__ void __launch_bounds__(kThreads)
    combine_attention(const __grid_constant__ ForwardProblem problem, int splits,
                      const float* __restrict__ partial_out, int64_t stride,
                      const float* __restrict__ partial_lse, int warps) {
    extern __shared__ __align__(16) char memory[];
    auto& [averages, shares] = *reinterpret_cast<CombineShared*>(memory);
    using Element = ElementOf<dtype>;
    const HeadRow at =
        warps > 1 ? HeadRow::of_thread<kThreads>(problem.batch, problem.seqlen_q, problem.heads_q, blockIdx.x)
                  : HeadRow::of_thread<kLanes>(problem.batch, problem.seqlen_q, problem.heads_q, blockIdx.x);
    await_grid_before();
    if (!at.exists) return;
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const auto over_lanes = [](float x, auto combine) {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2)
            x = combine(x, __shfl_xor_sync(0xffffffff, x, step));
        return x;
    };
    const int64_t rows = problem.batch * problem.heads_q * problem.seqlen_q;
    const int64_t row = (at.batch * problem.heads_q + at.head) * problem.seqlen_q + at.row;
    float weights[kMostOfLane], largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
        const int split = i * kLanes + lane;
        weights[i] = split < splits ? partial_lse[split * rows + row] : -INFINITY;
        largest = fmaxf(largest, weights[i]);
    }
    largest = over_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
    const float reference = largest == -INFINITY ? 0 : largest;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) sum += weights[i] = expf(weights[i] - reference);
    sum = over_lanes(sum, [](float a, float b) { return a + b; });
    const float lse = sum == 0 ? -INFINITY : reference + logf(sum);
    const bool first_warp = warps == 1 || warp == 0;
    if (first_warp && lane == 0) *statistics_of<float>(problem.lse, at.batch, at.row, at.head) = lse;
    const float factor = sum == 0 ? 0 : 1 / sum;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) shares[warp][i * kLanes + lane] = weights[i] * factor;
    __syncwarp();
    auto* out = row_of<typename Element::Bits>(problem.out, at.batch, at.row, at.head);
    // The warp's shares.
    const int each = (splits + warps - 1) / warps;
    const int begin = warps > 1 ? warp * each : 0, end = min(splits, begin + each);
    for (int64_t first = 0; first < problem.head_dim_v; first += 4 * kLanes) {
        const int64_t column = first + lane * 4;
        const float* const of_row = partial_out + row * stride + (column < stride ? column : 0);
        float average[4] = {};
#pragma unroll 8
        for (int split = begin; split < end; ++split) {
            const float weight = shares[warp][split];
            const float4 x = *reinterpret_cast<const float4*>(of_row + split * rows * stride);
            const float share[4] = {x.x, x.y, x.z, x.w};
            for (int e = 0; e < 4; ++e) average[e] += weight == 0 ? 0 : weight * share[e];
        }
        if (warps > 1) {
            __syncthreads();  // the last columns' have been read
            averages[warp][lane] = make_float4(average[0], average[1], average[2], average[3]);
            __syncthreads();
            if (!first_warp) continue;
#pragma unroll
            for (int other = 1; other < kWarps; ++other) {
                const float4 x = averages[other][lane];
                average[0] += x.x, average[1] += x.y, average[2] += x.z, average[3] += x.w;
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (column + e < problem.head_dim_v) out[column + e] = Element::from_float(average[e]);
    }
}

}  // namespace

void combine_splits(const ForwardProblem& whole, int splits, float* partial, int64_t stride,
                    const Launch& launch) {
    if (splits == 1 || !partial) return;
    const Split parts = Split::of(whole, 0, splits, partial, stride);
    ForwardProblem problem = whole;
    if (problem.cu_seqlens_q) problem.batch = 1, problem.seqlen_q = problem.rows_q;
    const int64_t rows = problem.batch * problem.heads_q * problem.seqlen_q;
    const int warps = splits > 4 ? kWarps : 1, rows_of_block = kWarps / warps;
    dispatch_dtype(problem.dtype, [&]<DType dtype>() {
        launch_kernel("combine_attention", combine_attention<dtype>,
                      (rows + rows_of_block - 1) / rows_of_block, kThreads, sizeof(CombineShared),
                      launch.overlapping(), problem, splits, static_cast<const float*>(parts.out), stride,
                      static_cast<const float*>(parts.lse), warps);
    });
}

}  // namespace flash::cuda
