#include "../launch.h"
#include "../tile/gpu_math.h"
#include "rows.cuh"
#include "rows.h"

namespace flash::cuda {
namespace {

constexpr int kLanes = 8;  // a row of 64 16-bit elements is one 16-byte load a lane
constexpr int kThreads = 256;

template <DType dtype>
__device__ float product(const typename ElementOf<dtype>::Bits* a, const typename ElementOf<dtype>::Bits* b,
                         int columns, bool vectors) {
    using Element = ElementOf<dtype>;
    constexpr int kVector = 16 / sizeof(typename Element::Bits);
    const int lane = threadIdx.x % kLanes;
    float sum = 0;
    if (vectors) {
        for (int column = lane * kVector; column < columns; column += kLanes * kVector) {
            typename Element::Bits x[kVector], y[kVector];
            *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(a + column);
            *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(b + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum += Element::to_float(x[i]) * Element::to_float(y[i]);
        }
    } else {
        // The same numbers in the same order: how the rows lie decides no bit.
        for (int column = lane * kVector; column < columns; column += kLanes * kVector)
            for (int i = column; i < column + kVector && i < columns; ++i)
                sum += Element::to_float(a[i]) * Element::to_float(b[i]);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    return sum;
}

// Of a row that is whole vectors.
template <DType dtype>
__device__ bool is_finite(const typename ElementOf<dtype>::Bits* row, int columns) {
    using Element = ElementOf<dtype>;
    constexpr int kVector = 16 / sizeof(typename Element::Bits);
    float zero = 0;  // NaN if an element is not finite
    for (int column = threadIdx.x % kLanes * kVector; column < columns; column += kLanes * kVector) {
        typename Element::Bits x[kVector];
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(row + column);
#pragma unroll
        for (int i = 0; i < kVector; ++i) zero = fmaf(Element::to_float(x[i]), 0, zero);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) zero += __shfl_xor_sync(0xffffffff, zero, step);
    return zero == 0;
}

bool rows_are_vectors(const TensorView& view, int64_t head_dim, int64_t element_bytes) {
    const int64_t elements = view.batch_stride | view.row_stride | view.head_stride | head_dim;
    return (reinterpret_cast<uintptr_t>(view.data) | elements * element_bytes) % 16 == 0;
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads)
    attention_delta(const __grid_constant__ BackwardProblem problem,
                    const __grid_constant__ AlignedStatistics aligned, bool vectors, int64_t batches) {
    using Bits = typename ElementOf<dtype>::Bits;
    const ForwardProblem& forward = problem.forward;
    const HeadRow at = HeadRow::of_thread<kLanes>(batches, forward.rows_q, forward.heads_q);
    const int64_t batch = at.exists ? at.batch : 0, row = at.exists ? at.row : 0;
    const float sum = product<dtype>(row_of<const Bits>(forward.out, batch, row, at.head),
                                     row_of<const Bits>(problem.dout, batch, row, at.head),
                                     int(forward.head_dim_v), vectors);
    bool hidden = false;  // by a softcap: what of Q is not finite leaves no mark on lse
    if (aligned.delta.data && forward.softcap != 0)
        hidden = !is_finite<dtype>(row_of<const Bits>(forward.q, batch, row, at.head), int(forward.head_dim));
    if (!at.exists || threadIdx.x % kLanes != 0) return;
    const float lse = *statistics_of<const float>(forward.lse, at.batch, at.row, at.head);
    const bool seen = lse != -INFINITY;
    const float dlse =
        problem.dlse.data ? *statistics_of<const float>(problem.dlse, at.batch, at.row, at.head) : 0;
    const float delta = hidden ? NAN : seen ? sum - dlse : 0;
    if (!aligned.delta.data) {
        *statistics_of<float>(problem.delta, at.batch, at.row, at.head) = delta;
        return;
    }
    const int64_t place = aligned.rows.place(at.row);
    if (place < 0) return;
    *statistics_of<float>(aligned.delta, at.batch, place, at.head) = delta;
    *statistics_of<float>(aligned.lse_log2, at.batch, place, at.head) =
        seen ? lse * float(GpuMath::unit) : INFINITY;
    if (!(fabsf(lse) + fabsf(delta) < INFINITY)) *aligned.not_finite = 1;
}

}  // namespace

void compute_delta(const BackwardProblem& problem, const AlignedStatistics& to, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    const int64_t batches = forward.cu_seqlens_q ? 1 : forward.batch;
    const int64_t rows = batches * forward.rows_q * forward.heads_q;
    dispatch_dtype(forward.dtype, [&]<DType dtype>() {
        const int64_t bytes = sizeof(typename ElementOf<dtype>::Bits);
        const bool vectors = rows_are_vectors(forward.out, forward.head_dim_v, bytes) &&
                             rows_are_vectors(problem.dout, forward.head_dim_v, bytes);
        launch_kernel("attention_delta", attention_delta<dtype>, (rows * kLanes + kThreads - 1) / kThreads,
                      kThreads, 0, launch, problem, to, vectors, batches);
    });
}

void compute_delta(const BackwardProblem& problem, const Launch& launch) {
    compute_delta(problem, {}, launch);
}

}  // namespace flash::cuda
