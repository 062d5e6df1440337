#include "../launch.h"
#include "../ptx/grid_dependency.h"
#include "../tile/fragment.h"
#include "row_tile.cuh"
#include "rows.h"

namespace flash::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kLengths = 1024;  // that are told apart

// By a warp: each number becomes the sum of those before it.
__device__ void add_up(uint32_t* numbers) {
    constexpr int kEach = kLengths / 32;
    uint32_t* const mine = numbers + lane_index() * kEach;
    uint32_t sum = 0;
    for (int i = 0; i < kEach; ++i) sum += mine[i];
    uint32_t before = sum;
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffff, before, step);
        if (lane_index() >= step) before += other;
    }
    before -= sum;
    for (int i = 0; i < kEach; ++i) {
        const uint32_t number = mine[i];
        mine[i] = before;
        before += number;
    }
}

// One block. A counting sort: tiles of nearly the same length come in any order.
__global__ void __launch_bounds__(kThreads)
    sort_by_length(const __grid_constant__ ForwardProblem problem, const __grid_constant__ RowTiling tiling) {
    let_next_grid_start();
    extern __shared__ __align__(16) char memory[];
    uint32_t* const places = reinterpret_cast<uint32_t*>(memory);  // of each length, the longest first
    const int64_t longest = tiling.longest(problem);
    const auto each_slot = [&](const auto& visit) {
        for (uint32_t slot = threadIdx.x; slot < tiling.tiles(); slot += kThreads) {
            const int64_t shorter = longest - tiling.length_of(slot, problem);
            visit(slot, shorter > 0 ? shorter * (kLengths - 1) / longest : 0);
        }
    };
    for (int i = threadIdx.x; i < kLengths; i += kThreads) places[i] = 0;
    __syncthreads();
    each_slot([&](uint32_t, int64_t length) { atomicAdd(&places[length], 1); });
    __syncthreads();
    if (threadIdx.x < 32) add_up(places);
    __syncthreads();
    each_slot([&](uint32_t slot, int64_t length) { tiling.sorted()[atomicAdd(&places[length], 1)] = slot; });
}

}  // namespace

void sort_tiles(const ForwardProblem& problem, const RowTiling& tiling, const Launch& launch) {
    launch_kernel("sort_by_length", sort_by_length, 1, kThreads, kLengths * sizeof(uint32_t), launch, problem,
                  tiling);
}

}  // namespace flash::cuda
