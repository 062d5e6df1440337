#include <algorithm>

#include "../launch.h"
#include "../ptx/barrier.h"
#include "../ptx/grid_dependency.h"
#include "../tile/gpu_math.h"
#include "rows.cuh"
#include "rows.h"

namespace flash::cuda {
namespace {

// A team does rows of one head: a group of lanes the products of some; then a thread each what becomes of
// those, so that what lies by rows is read and written in whole sectors.
constexpr int kThreads = 128, kRowsOfGroup = 4;
// Lanes of a group: 8 read 64 16-bit elements of a row at once, 4 read 32.
template <int kLanes>
struct Team {
    static constexpr int groups = kThreads / kLanes, rows = kRowsOfGroup * groups;
};
// That fill a multiprocessor.
constexpr int kTeams = 6;

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
            const int64_t row = first + threadIdx.x % kThreads / kLanes + i * Team<kLanes>::groups;
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

// By a team: what becomes of a tile of rows. products: of each row; meet(): the team does; nothing is stored
// before stores_may_begin().
template <DType dtype, int kLanes, class Meet, class StoresMayBegin>
__device__ __forceinline__ void compute_statistics(const BackwardProblem& problem,
                                                   const AlignedStatistics& aligned, bool vectors,
                                                   const HeadRow& tile, float* products, const Meet& meet,
                                                   const StoresMayBegin& stores_may_begin) {
    const ForwardProblem& forward = problem.forward;
    constexpr int kRows = Team<kLanes>::rows;
    const int thread = threadIdx.x % kThreads;
    const int64_t batch = tile.batch, head = tile.head, rows = forward.rows_q, first = tile.row * kRows;
    const int64_t row = first + thread;
    const bool finishes = thread < kRows && row < rows;
    const float lse = finishes ? *statistics_of<const float>(forward.lse, batch, row, head) : 0;

    float sums[kRowsOfGroup] = {};
    using Rows = Rows<dtype, kLanes>;
    multiply(sums, Rows(forward.out, batch, head, first, rows), Rows(problem.dout, batch, head, first, rows),
             int(forward.head_dim_v), vectors);
    // A softcap hides it: what of Q is not finite leaves no mark on lse.
    if (aligned.delta.data && forward.softcap != 0)
        look_for_bad(sums, Rows(forward.q, batch, head, first, rows), int(forward.head_dim));
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i) {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], step);
        if (thread % kLanes == 0) products[thread / kLanes + i * Team<kLanes>::groups] = sums[i];
    }
    meet();
    stores_may_begin();
    if (thread >= kRows) return;  // whole warps
    bool bad = false;
    if (finishes) {
        const bool seen = lse != -INFINITY;
        const float dlse =
            problem.dlse.data ? *statistics_of<const float>(problem.dlse, batch, row, head) : 0;
        const float delta = seen ? products[thread] - dlse : 0;
        if (!aligned.delta.data) {
            *statistics_of<float>(problem.delta, batch, row, head) = delta;
            return;
        }
        const int64_t place = aligned.rows.place(row);
        // Nobody computes with a row that is in no sequence, but it is copied beside its neighbours.
        bad = place < 0 || !(fabsf(lse) + fabsf(delta) < INFINITY);
        if (bad) *aligned.not_finite = 1;
        if (place >= 0) {
            *statistics_of<float>(aligned.delta, batch, place, head) = delta;
            *statistics_of<float>(aligned.lse_log2, batch, place, head) =
                seen ? lse * float(GpuMath::unit) : INFINITY;
        }
    }
    if (aligned.progress.done) aligned.progress.tell(batch * forward.heads_q + head, bad);
}

template <DType dtype, int kLanes>
__global__ void __launch_bounds__(kThreads) attention_delta(const __grid_constant__ BackwardProblem problem,
                                                            const __grid_constant__ AlignedStatistics aligned,
                                                            bool vectors, int64_t batches, int64_t tiles) {
    extern __shared__ __align__(16) char memory[];
    let_next_grid_start();
    // The walk begins with what was read last, and finds dO in the cache.
    const HeadRow tile = HeadRow::of_thread<kThreads>(batches, tiles, problem.forward.heads_q,
                                                      gridDim.x - 1 - blockIdx.x);
    // All threads wait, so that whoever waits for this grid means both.
    compute_statistics<dtype, kLanes>(
        problem, aligned, vectors, tile, reinterpret_cast<float*>(memory), [] { __syncthreads(); },
        [] { await_grid_before(); });
}

template <DType dtype, int kLanes>
__global__ void __launch_bounds__(kTeams* kThreads, 1)
    attention_delta_beside(const __grid_constant__ BackwardProblem problem,
                           const __grid_constant__ AlignedStatistics aligned, bool vectors, uint32_t tiles,
                           uint32_t count) {
#if __CUDA_ARCH__ == 900
    extern __shared__ __align__(16) char memory[];
    const uint32_t team = threadIdx.x / kThreads;
    float* const products = reinterpret_cast<float*>(memory) + team * Team<kLanes>::rows;
    const auto meet = [&] { barrier_of<kThreads>(1 + team); };
    await_grid_before();
    let_next_grid_start();  // which finds counters that are zero, and these blocks running
    for (uint32_t i = blockIdx.x * kTeams + team; i < count; i += gridDim.x * kTeams) {
        const HeadRow tile = HeadRow::of_index(i, tiles, uint32_t(problem.forward.heads_q));
        compute_statistics<dtype, kLanes>(problem, aligned, vectors, tile, products, meet, [] {});
        meet();  // the products have been read
    }
#endif
}

__global__ void __launch_bounds__(kThreads) attention_clear(uint4* data, int64_t count) {
    let_next_grid_start();
    for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
         i += gridDim.x * int64_t(kThreads))
        data[i] = uint4{};
}

// Calls run.template operator()<dtype, lanes>(vectors, tiles of a head).
template <class Run>
void dispatch_delta(const BackwardProblem& problem, const Run& run) {
    const ForwardProblem& forward = problem.forward;
    dispatch_dtype(forward.dtype, [&]<DType dtype>() {
        const int64_t bytes = sizeof(typename ElementOf<dtype>::Bits);
        const bool vectors = rows_are_vectors(forward.out, forward.head_dim_v, bytes) &&
                             rows_are_vectors(problem.dout, forward.head_dim_v, bytes);
        const auto run_with = [&]<int kLanes>() {
            constexpr int rows = Team<kLanes>::rows;
            run.template operator()<dtype, kLanes>(vectors, (forward.rows_q + rows - 1) / rows);
        };
        if (forward.head_dim_v * bytes % 128 == 0)
            run_with.template operator()<8>();
        else
            run_with.template operator()<4>();
    });
}

}  // namespace

void compute_delta(const BackwardProblem& problem, const AlignedStatistics& to, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    const int64_t batches = forward.cu_seqlens_q ? 1 : forward.batch;
    dispatch_delta(problem, [&]<DType dtype, int kLanes>(bool vectors, int64_t tiles) {
        launch_kernel("attention_delta", attention_delta<dtype, kLanes>, batches * tiles * forward.heads_q,
                      kThreads, Team<kLanes>::rows * sizeof(float), launch, problem, to, vectors, batches,
                      tiles);
    });
}

void compute_delta_beside(const BackwardProblem& problem, AlignedStatistics& to, int64_t blocks,
                          const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    dispatch_delta(problem, [&]<DType dtype, int kLanes>(bool vectors, int64_t tiles) {
        if constexpr (dtype != DType::float32) {
            to.progress.all = uint32_t(tiles * Team<kLanes>::rows / 32);
            launch_kernel("attention_delta_beside", attention_delta_beside<dtype, kLanes>, blocks,
                          kTeams * kThreads, kTeams * Team<kLanes>::rows * sizeof(float), launch, problem,
                          to, vectors, uint32_t(tiles),
                          uint32_t(forward.batch * tiles * forward.heads_q));
        }
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
