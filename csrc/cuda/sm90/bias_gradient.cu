// One row of the kernel table and one element type; the backward of that type and head dim launches it where
// a bias' gradient is wanted.
#include "bias_gradient.cuh"

#include <algorithm>

#include "backward_launch.h"

namespace flash::cuda {
namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BiasGradientConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = BiasGradientShared<kConfiguration>;
static_assert(sizeof(Shared) <= 227 * 1024);

// Of the 512 that a multiprocessor has for each of its 128 lanes.
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

__global__ void __launch_bounds__(kConfiguration.threads, 1)
    bias_gradient(const __grid_constant__ BackwardProblem problem, const __grid_constant__ BackwardMaps maps,
                  const __grid_constant__ TileNumbers queue, const __grid_constant__ BiasTiles tiles,
                  const __grid_constant__ Division group, const __grid_constant__ float score_unit) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    __syncthreads();
    if (threadIdx.x >= kConfiguration.consumers) {
        shrink_registers<kProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers) / 32;
        const BiasGradientProducer<kDType, kConfiguration> producer(problem.forward, maps, queue, tiles,
                                                                    group, shared);
        if (warp == 0)
            producer.copy_for_scores();
        else if (warp == 1)
            producer.copy_for_gradients();
    } else {
        grow_registers<kConsumerRegisters>();
        BiasGradientConsumer<kDType, kConfiguration>(problem, shared, score_unit).run();
    }
}

}  // namespace
}  // namespace sm90

// The workspace begins with a queue's counter, which the backward has done with.
void FLASH_KERNEL_SYMBOL(const BackwardProblem& problem, const AlignedStatistics& statistics,
                         const Launch& launch) {
    using namespace sm90;
    constexpr int query_tile = kConfiguration.query_tile, key_tile = kConfiguration.key_tile;
    const BiasTiles tiles(problem, query_tile, key_tile);
    launch_kernel(
        FLASH_KERNEL_NAME, bias_gradient, std::min<int64_t>(tiles.count(), launch.device.multiprocessors),
        kConfiguration.threads, sizeof(Shared), launch, problem,
        maps_of(problem, statistics, kDType, query_tile, key_tile, true),
        TileNumbers(tiles.count(), 0, counter_at(launch.workspace, launch)), tiles,
        Division(uint32_t(RowTiling::group_of(problem.forward))), score_unit(problem.forward, false));
}

}  // namespace flash::cuda
