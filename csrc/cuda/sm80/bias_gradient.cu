// One row of the kernel table and one element type; every backward of the engine and that type launches it
// where a bias' gradient is wanted.
#include "bias_gradient.cuh"

#include "../launch.h"

namespace flash::cuda {
namespace sm80 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BiasGradientConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = BiasGradientShared<kDType, kConfiguration>;
static_assert(sizeof(Shared) <= 99 * 1024);  // so that every chip can hold one block

__global__ void __launch_bounds__(kConfiguration.warps * 32)
    bias_gradient(const __grid_constant__ BackwardProblem problem, const __grid_constant__ BiasTiles tiles) {
    extern __shared__ __align__(128) char memory[];
    BiasGradientTile<kDType, kConfiguration>(problem, *reinterpret_cast<Shared*>(memory), tiles, blockIdx.x)
        .run();
}

}  // namespace
}  // namespace sm80

void FLASH_KERNEL_SYMBOL(const BackwardProblem& problem, const Launch& launch) {
    using namespace sm80;
    const BiasTiles tiles(problem, kConfiguration.query_tile, kConfiguration.key_tile);
    launch_kernel(FLASH_KERNEL_NAME, bias_gradient, tiles.count(), kConfiguration.warps * 32, sizeof(Shared),
                  launch, problem, tiles);
}

}  // namespace flash::cuda
