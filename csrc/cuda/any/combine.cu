#include "../launch.h"
#include "rows.cuh"
#include "rows.h"

namespace flash::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kThreads = 128;

// One warp a row: the average of the shares' averages, each weighted with its part of the sum of
// exponentials.
template <DType dtype>
__global__ void __launch_bounds__(kThreads)
    combine_attention(const __grid_constant__ ForwardProblem problem, int splits,
                      const float* __restrict__ partial_out, int64_t stride,
                      const float* __restrict__ partial_lse) {
    using Element = ElementOf<dtype>;
    const HeadRow at = HeadRow::of_thread<kLanes>(problem.batch, problem.seqlen_q, problem.heads_q);
    if (!at.exists) return;
    const int lane = threadIdx.x % kLanes;
    const int64_t rows = problem.batch * problem.heads_q * problem.seqlen_q;
    const int64_t row = (at.batch * problem.heads_q + at.head) * problem.seqlen_q + at.row;
    float largest = -INFINITY, sum = 0;
    for (int split = 0; split < splits; ++split) largest = fmaxf(largest, partial_lse[split * rows + row]);
    const float reference = largest == -INFINITY ? 0 : largest;
    for (int split = 0; split < splits; ++split) sum += expf(partial_lse[split * rows + row] - reference);
    const float lse = sum == 0 ? -INFINITY : reference + logf(sum);
    if (lane == 0) *statistics_of<float>(problem.lse, at.batch, at.row, at.head) = lse;
    auto* out = row_of<typename Element::Bits>(problem.out, at.batch, at.row, at.head);
    for (int64_t column = lane; column < problem.head_dim_v; column += kLanes) {
        float average = 0;
        for (int split = 0; split < splits; ++split) {
            const float weight = sum == 0 ? 0 : expf(partial_lse[split * rows + row] - reference) / sum;
            if (weight != 0) average += weight * partial_out[(split * rows + row) * stride + column];
        }
        out[column] = Element::from_float(average);
    }
}

}  // namespace

void combine_splits(const ForwardProblem& problem, int splits, const float* partial_out, int64_t stride,
                    const float* partial_lse, const Launch& launch) {
    const int64_t rows = problem.batch * problem.heads_q * problem.seqlen_q;
    dispatch_dtype(problem.dtype, [&]<DType dtype>() {
        launch_kernel("combine_attention", combine_attention<dtype>,
                      (rows * kLanes + kThreads - 1) / kThreads, kThreads, 0, launch, problem, splits,
                      partial_out, stride, partial_lse);
    });
}

}  // namespace flash::cuda
