// One row of the kernel table and one element type, compiled into the kernels of each feature set; the
// backward of every row with that head dim launches them.
#include "query_gradient.cuh"

#include "../launch.h"

namespace flash::cuda {
namespace sm80 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr QueryGradientConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = QueryGradientShared<kDType, kConfiguration>;
static_assert(sizeof(Shared) <= 99 * 1024);  // so that every chip can hold one block

template <Features features>
__global__ void __launch_bounds__(kConfiguration.warps * 32,
                                  features == Features::none ? kConfiguration.blocks : 1)
    query_gradient(const __grid_constant__ BackwardProblem problem,
                   const __grid_constant__ RowTiling tiling) {
    extern __shared__ __align__(128) char memory[];
    auto& shared = *reinterpret_cast<Shared*>(memory);
    const RowTile tile = tiling(blockIdx.x, problem.forward, true);
    if (tile.rows.empty()) return;
    QueryGradientTile<kDType, kConfiguration, features> work(problem, shared);
    work.load_first(tile);
    if (threadIdx.x == 0) work.start_barriers();
    shared.plan.make(problem.forward, tile, Split(), kConfiguration.key_tile);
    __syncthreads();
    work.run();
}

}  // namespace
}  // namespace sm80

void FLASH_KERNEL_SYMBOL(const BackwardProblem& problem, const Launch& launch) {
    using namespace sm80;
    const Features features = features_of(problem.forward);
    const auto kernel = features == Features::none          ? query_gradient<Features::none>
                        : features == Features::transformed ? query_gradient<Features::transformed>
                                                            : query_gradient<Features::all>;
    const RowTiling queries =
        RowTiling::of_queries(problem.forward, kConfiguration.query_tile, launch.device.l2_bytes / 3);
    launch_kernel(FLASH_KERNEL_NAME, kernel, queries.count(), kConfiguration.warps * 32, sizeof(Shared),
                  launch, problem, queries);
}

}  // namespace flash::cuda
