// One row of the kernel table and one element type.
#include <algorithm>

#include "../ptx/grid_dependency.h"
#include "forward.cuh"
#include "problem.h"

namespace flash::cuda {
namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr ForwardConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = ForwardShared<kConfiguration>;

// A thread is given as many registers as all can have, in eights; warps that copy give some to those that
// compute.
static_assert(2 <= kConfiguration.warpgroups && kConfiguration.warpgroups <= 4);
constexpr int kRegisters = 65536 / kConfiguration.threads() / 8 * 8,
              kProducerRegisters = kRegisters * (kConfiguration.warpgroups + 1) -
                                   kConfiguration.registers * kConfiguration.warpgroups;
static_assert(kProducerRegisters >= 24);

__global__ void __launch_bounds__(kConfiguration.threads(), 1)
    attention_forward(const __grid_constant__ ForwardProblem problem,
                      const __grid_constant__ ForwardMaps maps, const __grid_constant__ OutputMap out,
                      const __grid_constant__ TileQueue queue, const __grid_constant__ float score_unit,
                      const __grid_constant__ PreciseFactor natural) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x < 3) tma_prefetch_map(threadIdx.x == 0 ? &maps.q : threadIdx.x == 1 ? &maps.k : &maps.v);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    let_next_grid_start();
    __syncthreads();
    if (threadIdx.x >= kConfiguration.consumers()) {
        shrink_registers<kProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers()) / 32;
        ForwardProducer<kDType, kConfiguration> producer(problem, maps, shared);
        if (warp == 0) producer.copy_keys();
        if (warp == 1) producer.copy_values();
        if (warp == 2) ForwardPlanner<kConfiguration>(problem, maps, queue, shared).run();
        if constexpr (kConfiguration.biased)
            if (warp == 3) producer.copy_bias();
    } else {
        grow_registers<kConfiguration.registers>();
        ForwardConsumer<kDType, kConfiguration>(problem, shared, score_unit, natural, out).run();
    }
}

const char* why_not(const ForwardProblem& problem, const Device& device) {
    if (const char* lack = lacks(problem, kConfiguration.transformed, kConfiguration.biased)) return lack;
    const BlockLists& lists = problem.key_blocks;
    // The row for fewer keys has tiles of 64 or 128.
    const bool leaves = lists.counts ? lists.column_block % 128 == 0 : problem.window_right >= 0;
    if (leaves && problem.seqlen_k <= kConfiguration.diagonal_keys)
        return "under a diagonal or a map of blocks it is for more keys";
    // A warpgroup's queries lie in one block, a block of keys is whole tiles.
    if (lists.counts && (lists.column_block % kConfiguration.key_tile != 0 || lists.row_block % 64 != 0))
        return "the map's blocks are no multiples of its tiles";
    if (problem.cache.pages || problem.cache.seqlens || problem.cache.entry)
        return "it reads no cache of keys";
    if (const char* reason = cannot_copy({queries_of(problem, problem.q, problem.head_dim),
                                          keys_of(problem, problem.k, problem.head_dim),
                                          keys_of(problem, problem.v, problem.head_dim_v)}))
        return reason;
    if (!fits_store_rows(problem.out, problem.head_dim_v))
        return "the output's rows, or what lies between them, are no multiples of 8 bytes";
    const int64_t tiles = problem.cu_seqlens_q ? problem.rows_q / kConfiguration.queries() + problem.batch
                                               : (problem.seqlen_q + kConfiguration.queries() - 1) /
                                                     kConfiguration.queries() * problem.batch;
    if (tiles * problem.heads_q > INT32_MAX) return "there are too many queries for its counter";
    // The bits of a row are not to depend on how many others there are, or how long those are.
    if (problem.deterministic) return switched_off();
    if (problem.seqlen_q < kConfiguration.from_queries) return "it is for more queries";
    if (tiles * problem.heads_q * 2 < device.multiprocessors)
        return "there are too few queries to keep the GPU busy";
    // Where large tiles leave multiprocessors idle, a later row's of 128 queries end first; under a diagonal,
    // where a tile takes half as long as the longest one, where there are more, too.
    const int64_t busy = has_diagonal(problem) ? device.multiprocessors * 3 / 2
                                               : device.multiprocessors * 128 / kConfiguration.queries();
    if (kConfiguration.warpgroups > 2 && tiles * problem.heads_q <= busy)
        return "smaller tiles keep more of the GPU busy";
    return switched_off();
}

RowTiling tiling_of(const ForwardProblem& problem, const Device& device) {
    return RowTiling::across_blocks(problem, kConfiguration.queries(), device.l2_bytes / 6,
                                    device.multiprocessors);
}

int64_t workspace_bytes(const ForwardProblem& problem, int) {
    return TileQueue::needs_counter(problem) ? TileQueue::workspace_bytes : 0;
}

void launch(const ForwardProblem& problem, int, const Launch& launch) {
    const float unit = score_unit(problem, kConfiguration.transformed);
    const PreciseFactor natural(kConfiguration.transformed ? 1 / GpuMath::unit
                                                           : problem.softmax_scale / unit);
    const RowTiling tiling = tiling_of(problem, launch.device);
    const TileQueue queue(tiling, tiling.count(), tiles_ahead(problem, kConfiguration),
                          counter_at(launch.workspace, launch));
    const ForwardMaps maps{
        tensor_map(queries_of(problem, problem.q, problem.head_dim), kDType, 64),
        tensor_map(keys_of(problem, problem.k, problem.head_dim), kDType, kConfiguration.key_tile),
        tensor_map(keys_of(problem, problem.v, problem.head_dim_v), kDType, kConfiguration.key_tile),
        kConfiguration.biased ? bias_map(problem, kDType, 64) : CUtensorMap{}};
    const Rows rows = queries_of(problem, problem.out, problem.head_dim_v);
    const OutputMap out = kConfiguration.stages_output ? output_map(rows, kDType) : OutputMap{};
    launch_kernel(FLASH_KERNEL_NAME, attention_forward,
                  std::min<int64_t>(tiling.count(), launch.device.multiprocessors), kConfiguration.threads(),
                  sizeof(Shared), launch.overlapping(), problem, maps, out, queue, unit, natural);
}

}  // namespace
}  // namespace sm90

extern constinit const ForwardKernel FLASH_KERNEL_SYMBOL{
    "sm90",
    FLASH_KERNEL_NAME,
    DType::FLASH_DTYPE,
    sm90::kConfiguration.head_dim,
    sm90::kConfiguration.values(),
    sm90::kConfiguration.queries(),
    sm90::kConfiguration.key_tile,
    FLASH_FROM_KEYS,
    1,
    true,
    sizeof(sm90::Shared),
    sm90::workspace_bytes,
    sm90::launch,
    90,
    sm90::why_not,
};

}  // namespace flash::cuda
