// One row of the kernel table and one element type, compiled into the kernels of each feature set.
#include "../any/key_tiles.h"
#include "../any/rows.h"
#include "../launch.h"
#include "backward.cuh"

namespace flash::cuda {

void FLASH_QUERY_GRADIENT(const BackwardProblem& problem, const Launch& launch);  // query_gradient.cu
void FLASH_BIAS_GRADIENT(const BackwardProblem& problem, const Launch& launch);   // bias_gradient.cu

namespace sm80 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BackwardConfiguration kConfiguration FLASH_CONFIGURATION;
constexpr int kThreads = kConfiguration.warps * 32;
constexpr int64_t kSharedBytes = sizeof(BackwardShared<kDType, kConfiguration>);

// The features need registers: where they are, fewer blocks share a multiprocessor.
constexpr int blocks_of(Features features) {
    return features == Features::none || kConfiguration.blocks == 1 ? kConfiguration.blocks
                                                                    : kConfiguration.blocks - 1;
}

template <Features features>
__global__ void __launch_bounds__(kThreads, blocks_of(features))
    attention_backward(const __grid_constant__ BackwardProblem problem,
                       const __grid_constant__ RowTiling tiling, const __grid_constant__ DqSums dq_sums,
                       const __grid_constant__ WalkParts parts) {
    extern __shared__ __align__(128) char memory[];
    auto& shared = *reinterpret_cast<BackwardShared<kDType, kConfiguration>*>(memory);
    const TileOrder::Place place = tiling.place(blockIdx.x);
    const RowTile tile = parts.tile(tiling, place, problem.forward, false);
    BackwardTile<kDType, kConfiguration, features> work(problem, shared, dq_sums, parts);
    work.load_first(tile);
    if (threadIdx.x == 0) {
        work.start_barriers();
        BackwardPlan<kDType, kConfiguration>(problem, shared, dq_sums, parts)
            .start(place, tile, tiling.tiles());
    }
    if (threadIdx.x == 32) dq_sums.wait_for_place(place.head);
    __syncthreads();
    work.run();
}

__global__ void __launch_bounds__(kThreads)
    finish_dq(const __grid_constant__ BackwardProblem problem, const __grid_constant__ DqSums dq_sums) {
    extern __shared__ __align__(128) char memory[];
    finish_tile<Dq<kDType, kConfiguration>>(problem, dq_sums, blockIdx.x, shared_address(memory));
}

constexpr int kDqElements = kConfiguration.query_tile * kConfiguration.head_dim;

// What one launch walks, in which order, and how it adds dQ up.
struct Walk {
    WalkParts parts;
    RowTiling queries, keys;
    DqSums dq_sums;

    Walk(const ForwardProblem& problem, const Device& device)
        : parts(KeyTiles(problem, blocks_at_once(device), kConfiguration.query_tile, kConfiguration.key_tile)
                    .at_once()),
          queries(query_tiling(problem)),
          keys(RowTiling::of_keys(parts.of(problem), kConfiguration.key_tile,
                                  device.l2_bytes / (finishes_dq(parts.of(problem)) ? 12 : 3))),
          dq_sums(problem.deterministic ? DqSums(queries) : sums(parts.of(problem), device)) {}

    // Zero at the start: the parts' counters, then what dQ's sums need. Then what parts leave.
    int64_t zeros() const { return counter_bytes() + (dq_sums_exist() ? dq_sums.bytes() : 0); }
    int64_t bytes() const {
        return zeros() + parts.bytes(keys.tiles(), 2 * kConfiguration.key_tile * kConfiguration.head_dim);
    }
    void lie_at(void* workspace) {
        char* const counters = static_cast<char*>(workspace);
        parts.lie_at(counters, counters + zeros());
        if (dq_sums_exist()) dq_sums.lie_at(counters + counter_bytes());
    }
    bool dq_sums_exist() const { return dq_sums.tiles() > 0; }

  private:
    static int64_t blocks_at_once(const Device& device) {
        return int64_t(device.multiprocessors) * kConfiguration.blocks;
    }
    int64_t counter_bytes() const { return parts.counter_bytes(keys.tiles(), kConfiguration.warps); }

    static RowTiling query_tiling(const ForwardProblem& problem) {
        // A block list may cut queries elsewhere; the sums' tiles are counted from the first query.
        ForwardProblem dense = problem;
        dense.key_blocks = {};
        return RowTiling::of_queries(dense, kConfiguration.query_tile, 0);
    }

    DqSums sums(const ForwardProblem& problem, const Device& device) const {
        return DqSums(keys, queries, RowTiling::group_of(problem), blocks_at_once(device), kDqElements, true,
                      features_of(problem) == Features::none ? float(problem.softmax_scale) : 1.f,
                      parts.parts_of_queries());
    }

    // Sums that are finished in the walk want to stay in the cache as well, those of two sections.
    bool finishes_dq(const ForwardProblem& problem) const {
        return !problem.deterministic &&
               DqSums::units_are_small(queries, RowTiling::group_of(problem), kDqElements);
    }
};

int64_t workspace_bytes(const BackwardProblem& problem, const Device& device) {
    return Walk(problem.forward, device).bytes();
}

template <Features features>
void launch_features(const BackwardProblem& problem, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    compute_delta(problem, launch);
    Walk walk(forward, launch.device);
    if (walk.zeros() > 0) set_zero(launch.workspace, walk.zeros(), FLASH_KERNEL_NAME, launch);
    walk.lie_at(launch.workspace);
    launch_kernel(FLASH_KERNEL_NAME, attention_backward<features>, walk.keys.count(), kThreads, kSharedBytes,
                  launch, problem, walk.keys, walk.dq_sums, walk.parts);
    if (problem.dbias.data) FLASH_BIAS_GRADIENT(problem, launch);
    if (forward.deterministic)
        FLASH_QUERY_GRADIENT(problem, launch);
    else
        launch_kernel(FLASH_KERNEL_NAME, finish_dq, walk.dq_sums.unfinished_tiles(), kThreads,
                      kDqElements * element_bytes(kDType), launch, problem, walk.dq_sums);
}

void launch(const BackwardProblem& problem, const Launch& launch) {
    const Features features = features_of(problem.forward);
    if (features == Features::none)
        launch_features<Features::none>(problem, launch);
    else if (features == Features::transformed)
        launch_features<Features::transformed>(problem, launch);
    else
        launch_features<Features::all>(problem, launch);
}

}  // namespace
}  // namespace sm80

extern constinit const BackwardKernel FLASH_KERNEL_SYMBOL{
    "sm80",
    FLASH_KERNEL_NAME,
    sm80::kDType,
    sm80::kConfiguration.head_dim,
    sm80::kConfiguration.head_dim,
    sm80::kConfiguration.query_tile,
    sm80::kConfiguration.key_tile,
    FLASH_FROM_KEYS,
    sm80::kConfiguration.blocks,
    sm80::kSharedBytes,
    sm80::workspace_bytes,
    sm80::launch,
};

}  // namespace flash::cuda
