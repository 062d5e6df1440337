// One row of the kernel table and one element type, compiled into the kernels of each feature set.
#include "../any/rows.h"
#include "../launch.h"
#include "backward.cuh"

namespace flash::cuda {

void FLASH_QUERY_GRADIENT(const BackwardProblem& problem, const Launch& launch);  // query_gradient.cu

namespace sm80 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BackwardConfiguration kConfiguration FLASH_CONFIGURATION;
constexpr int kThreads = kConfiguration.warps * 32;
constexpr int64_t kSharedBytes = sizeof(BackwardShared<kDType, kConfiguration>);
constexpr int kDqBytes = kConfiguration.query_tile * kConfiguration.head_dim * element_bytes(kDType);

// The features need registers: where they are, fewer blocks share a multiprocessor.
constexpr int blocks_of(Features features) {
    return features == Features::none || kConfiguration.blocks == 1 ? kConfiguration.blocks
                                                                    : kConfiguration.blocks - 1;
}

template <Features features>
__global__ void __launch_bounds__(kThreads, blocks_of(features))
    attention_backward(const __grid_constant__ BackwardProblem problem,
                       const __grid_constant__ RowTiling tiling, float* dq_sums) {
    extern __shared__ __align__(128) char memory[];
    auto& shared = *reinterpret_cast<BackwardShared<kDType, kConfiguration>*>(memory);
    const RowTile tile = tiling(blockIdx.x, problem.forward, false);
    if (tile.rows.empty()) return;
    BackwardTile<kDType, kConfiguration, features> work(problem, shared, dq_sums);
    work.load_keys(tile);
    if (threadIdx.x == 0) {
        work.start_barriers();
        BackwardPlan<kDType, kConfiguration>(problem, shared, dq_sums).start(tile);
    }
    __syncthreads();
    work.run();
}

__global__ void __launch_bounds__(kThreads)
    finish_dq(const __grid_constant__ BackwardProblem problem, const __grid_constant__ RowTiling tiling,
              const float* dq_sums) {
    extern __shared__ __align__(128) char memory[];
    const RowTile tile = tiling(blockIdx.x, problem.forward, false);
    if (tile.rows.empty()) return;
    DqFinish<kDType, kConfiguration>::run(problem, tile, dq_sums, memory);
}

int64_t workspace_bytes(const BackwardProblem& problem) {
    if (problem.forward.deterministic) return 0;
    return problem.forward.heads_q * DqSums::tiles(problem.forward, kConfiguration.query_tile) *
           kConfiguration.query_tile * kConfiguration.head_dim * sizeof(float);
}

template <Features features>
void launch_features(const BackwardProblem& problem, const Launch& launch) {
    compute_delta(problem, launch);
    float* dq_sums = problem.forward.deterministic ? nullptr : static_cast<float*>(launch.workspace);
    if (dq_sums)
        check(cudaMemsetAsync(dq_sums, 0, workspace_bytes(problem), static_cast<cudaStream_t>(launch.stream)),
              FLASH_KERNEL_NAME);
    const RowTiling keys =
        RowTiling::of_keys(problem.forward, kConfiguration.key_tile, launch.device.l2_bytes);
    launch_kernel(FLASH_KERNEL_NAME, attention_backward<features>, keys.count(), kThreads, kSharedBytes,
                  launch, problem, keys, dq_sums);
    if (dq_sums) {
        // A block list may cut queries elsewhere; the sums' tiles are counted from the first query.
        BackwardProblem whole = problem;
        whole.forward.key_blocks = {};
        const RowTiling queries = RowTiling::of_queries(whole.forward, kConfiguration.query_tile, 0);
        launch_kernel(FLASH_KERNEL_NAME, finish_dq, queries.count(), kThreads, kDqBytes, launch, whole,
                      queries, dq_sums);
    } else {
        FLASH_QUERY_GRADIENT(problem, launch);
    }
}

void launch(const BackwardProblem& problem, const Launch& launch) {
    const Features features = features_of(problem.forward);
    if (features == Features::none)
        launch_features<Features::none>(problem, launch);
    else if (features == Features::transformed)
        launch_features<Features::transformed>(problem, launch);
    else
        launch_features<Features::dropout>(problem, launch);
}

}  // namespace
}  // namespace sm80

extern constinit const BackwardKernel FLASH_KERNEL_SYMBOL{
    "sm80",
    FLASH_KERNEL_NAME,
    sm80::kDType,
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
