#include <algorithm>

#include "../launch.h"
#include "../ptx/grid_dependency.h"
#include "../tile/gpu_math.h"
#include "rows.cuh"
#include "rows.h"

namespace flash::cuda {
namespace {

// A block does the rows of one head: a group of lanes the products of some; then a thread each what becomes
// of those, so that what lies by rows is read and written in whole sectors.
constexpr int kThreads = 128, kRowsOfGroup = 4;
// Lanes of a group: 8 read 64 16-bit elements of a row at once, 4 read 32.
template <int kLanes>
struct Block {
    static constexpr int groups = kThreads / kLanes, rows = kRowsOfGroup * groups;
};

template <DType dtype>
struct Vector {
    using Element = ElementOf<dtype>;
    static constexpr int length = 16 / sizeof(typename Element::Bits);

    __device__ explicit Vector(const typename Element::Bits* from, bool once = false) {
        const uint4* const vector = reinterpret_cast<const uint4*>(from);
        *reinterpret_cast<uint4*>(x) = once ? __ldcs(vector) : *vector;
    }
    __device__ float operator[](int i) const { return Element::to_float(x[i]); }

    alignas(16) typename Element::Bits x[length];
};

// The group's rows of an operand.
template <DType dtype, int kLanes>
class Rows {
  public:
    using Bits = typename ElementOf<dtype>::Bits;

    // Those that don't exist are the last one.
    __device__ Rows(const TensorView& view, int64_t batch, int64_t head, int64_t first, int64_t rows) {
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i) {
            const int64_t row = first + threadIdx.x / kLanes + i * Block<kLanes>::groups;
            rows_[i] = row_of<const Bits>(view, batch, row < rows ? row : rows - 1, head);
        }
    }
    __device__ const Bits* operator[](int i) const { return rows_[i]; }

  private:
    const Bits* rows_[kRowsOfGroup];
};

// a: nobody reads it again soon.
template <DType dtype, int kLanes>
__device__ void multiply(float (&sums)[kRowsOfGroup], const Rows<dtype, kLanes>& a,
                         const Rows<dtype, kLanes>& b, int columns, bool vectors) {
    using Element = ElementOf<dtype>;
    constexpr int kVector = Vector<dtype>::length;
    for (int column = threadIdx.x % kLanes * kVector; column < columns; column += kLanes * kVector) {
        if (vectors) {
#pragma unroll
            for (int i = 0; i < kRowsOfGroup; ++i) {
                const Vector<dtype> x(a[i] + column, true), y(b[i] + column);
#pragma unroll
                for (int e = 0; e < kVector; ++e) sums[i] += x[e] * y[e];
            }
        } else {
            // The same numbers in the same order: how the rows lie decides no bit.
            for (int i = 0; i < kRowsOfGroup; ++i)
                for (int e = column; e < column + kVector && e < columns; ++e)
                    sums[i] += Element::to_float(a[i][e]) * Element::to_float(b[i][e]);
        }
    }
}

// Rows with an element that is not finite become NaN; they are whole vectors.
template <DType dtype, int kLanes>
__device__ void look_for_bad(float (&sums)[kRowsOfGroup], const Rows<dtype, kLanes>& rows, int columns) {
    constexpr int kVector = Vector<dtype>::length;
    for (int column = threadIdx.x % kLanes * kVector; column < columns; column += kLanes * kVector)
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i) {
            const Vector<dtype> x(rows[i] + column);
#pragma unroll
            for (int e = 0; e < kVector; ++e) sums[i] += x[e] * 0;
        }
}

bool rows_are_vectors(const TensorView& view, int64_t head_dim, int64_t element_bytes) {
    const int64_t elements = view.batch_stride | view.row_stride | view.head_stride | head_dim;
    return (reinterpret_cast<uintptr_t>(view.data) | elements * element_bytes) % 16 == 0;
}

template <DType dtype, int kLanes>
__global__ void __launch_bounds__(kThreads) attention_delta(const __grid_constant__ BackwardProblem problem,
                                                            const __grid_constant__ AlignedStatistics aligned,
                                                            bool vectors, int64_t batches, int64_t tiles) {
    const ForwardProblem& forward = problem.forward;
    constexpr int kRows = Block<kLanes>::rows;
    let_next_grid_start();
    // The walk begins with what was read last, and finds dO in the cache.
    const HeadRow tile =
        HeadRow::of_thread<kThreads>(batches, tiles, forward.heads_q, gridDim.x - 1 - blockIdx.x);
    const int64_t batch = tile.batch, head = tile.head, rows = forward.rows_q, first = tile.row * kRows;
    const int64_t row = first + threadIdx.x;
    const bool finishes = threadIdx.x < kRows && row < rows;
    const float lse = finishes ? *statistics_of<const float>(forward.lse, batch, row, head) : 0;

    float sums[kRowsOfGroup] = {};
    using Rows = Rows<dtype, kLanes>;
    multiply(sums, Rows(forward.out, batch, head, first, rows), Rows(problem.dout, batch, head, first, rows),
             int(forward.head_dim_v), vectors);
    // A softcap hides it: what of Q is not finite leaves no mark on lse.
    if (aligned.delta.data && forward.softcap != 0)
        look_for_bad(sums, Rows(forward.q, batch, head, first, rows), int(forward.head_dim));
    extern __shared__ __align__(16) char memory[];
    float* const of_rows = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i) {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], step);
        if (threadIdx.x % kLanes == 0) of_rows[threadIdx.x / kLanes + i * Block<kLanes>::groups] = sums[i];
    }
    __syncthreads();
    await_grid_before();  // all threads do, so that whoever waits for this grid means both
    if (!finishes) return;
    const bool seen = lse != -INFINITY;
    const float dlse = problem.dlse.data ? *statistics_of<const float>(problem.dlse, batch, row, head) : 0;
    const float delta = seen ? of_rows[threadIdx.x] - dlse : 0;
    if (!aligned.delta.data) {
        *statistics_of<float>(problem.delta, batch, row, head) = delta;
        return;
    }
    const int64_t place = aligned.rows.place(row);
    // Nobody computes with a row that is in no sequence, but it is copied beside its neighbours.
    if (place < 0 || !(fabsf(lse) + fabsf(delta) < INFINITY)) *aligned.not_finite = 1;
    if (place < 0) return;
    *statistics_of<float>(aligned.delta, batch, place, head) = delta;
    *statistics_of<float>(aligned.lse_log2, batch, place, head) =
        seen ? lse * float(GpuMath::unit) : INFINITY;
}

__global__ void __launch_bounds__(kThreads) attention_clear(uint4* data, int64_t count) {
    let_next_grid_start();
    for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
         i += gridDim.x * int64_t(kThreads))
        data[i] = uint4{};
}

}  // namespace

void compute_delta(const BackwardProblem& problem, const AlignedStatistics& to, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    const int64_t batches = forward.cu_seqlens_q ? 1 : forward.batch;
    dispatch_dtype(forward.dtype, [&]<DType dtype>() {
        const int64_t bytes = sizeof(typename ElementOf<dtype>::Bits);
        const bool vectors = rows_are_vectors(forward.out, forward.head_dim_v, bytes) &&
                             rows_are_vectors(problem.dout, forward.head_dim_v, bytes);
        const auto run = [&](auto kernel, int rows) {
            const int64_t tiles = (forward.rows_q + rows - 1) / rows;
            launch_kernel("attention_delta", kernel, batches * tiles * forward.heads_q, kThreads,
                          rows * sizeof(float), launch, problem, to, vectors, batches, tiles);
        };
        if (forward.head_dim_v * bytes % 128 == 0)
            run(attention_delta<dtype, 8>, Block<8>::rows);
        else
            run(attention_delta<dtype, 4>, Block<4>::rows);
    });
}

void compute_delta(const BackwardProblem& problem, const Launch& launch) {
    compute_delta(problem, {}, launch);
}

void clear(void* data, int64_t bytes, const Launch& launch) {
    const int64_t count = bytes / int64_t(sizeof(uint4)), blocks = (count + kThreads - 1) / kThreads;
    launch_kernel("attention_clear", attention_clear,
                  std::min<int64_t>(blocks, 8 * launch.device.multiprocessors), kThreads, 0, launch,
                  static_cast<uint4*>(data), count);
}

}  // namespace flash::cuda
