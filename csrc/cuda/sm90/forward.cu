// One row of the kernel table and one element type.
#include <algorithm>

#include "../any/rows.h"
#include "../few_queries.h"
#include "../ptx/grid_dependency.h"
#include "forward.cuh"
#include "problem.h"

namespace flash::cuda {
namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr ForwardConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = ForwardShared<kConfiguration>;

static_assert(2 <= kConfiguration.warpgroups && kConfiguration.warpgroups <= 4);
constexpr int kProducerRegisters = kConfiguration.producer_registers();
static_assert(kProducerRegisters >= 24);

__global__ void __launch_bounds__(kConfiguration.threads(), kConfiguration.blocks)
    attention_forward(const __grid_constant__ ForwardProblem problem,
                      const __grid_constant__ ForwardMaps maps, const __grid_constant__ OutputMap out,
                      const __grid_constant__ TileQueue queue, const __grid_constant__ float score_unit,
                      const __grid_constant__ PreciseFactor natural, const __grid_constant__ FewQueries few) {
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
        if (warp == 2) ForwardPlanner<kConfiguration>(problem, maps, queue, shared, few).run();
        if constexpr (kConfiguration.biased)
            if (warp == 3) producer.copy_bias();
    } else {
        grow_registers<kConfiguration.registers>();
        ForwardConsumer<kDType, kConfiguration>(problem, shared, score_unit, natural, out, few).run();
    }
}

// Of a head of all batch entries, at most.
int64_t tiles_of(const ForwardProblem& problem, int64_t queries) {
    return problem.cu_seqlens_q ? problem.rows_q / queries + problem.batch
                                : (problem.seqlen_q + queries - 1) / queries * problem.batch;
}

// Why others than the one for few queries are faster, or nullptr.
const char* why_no_gain(const ForwardProblem& problem, const Device& device) {
    if (std::max(problem.head_dim, problem.head_dim_v) * 2 <= kConfiguration.head_dim)
        return "it is for larger head dims";
    if (rows_of_few(problem) <= 16) return "smaller tiles are enough";
    if (rows_of_few(problem) > 2048) return "it is for fewer queries";
    const TurnTimes times = times_of_few(problem, kConfiguration.few, kConfiguration.queries(),
                                         kConfiguration.key_tile, kConfiguration.head_dim, device);
    if (times.blocks > INT32_MAX / kMostSplits) return "there are too many queries for its counter";
    // Others have a tile of 128 queries for each head, all of its keys, and start sooner. Of caches, and
    // where that leaves most of the GPU idle, they are the portable ones, which are slower; hardly so without
    // heads that share keys.
    const int64_t blocks = tiles_of(problem, 128) * problem.heads_q,
                  waves = (blocks + device.multiprocessors - 1) / device.multiprocessors;
    const bool portable =
        problem.cache.entries || (blocks * 2 < device.multiprocessors && problem.heads_q > problem.heads_k);
    const int64_t others = waves * times.key_tiles * 2 * times.readers * (portable ? 140 : 107) / 100,
                  start = 3 * 2 * times.readers;
    return times(times.splits()) + start > others ? "others are faster, so many keys there are" : nullptr;
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
    const KeyCache& cache = problem.cache;
    if (!kConfiguration.few && (cache.pages || cache.seqlens || cache.entry))
        return "it reads no cache of keys";
    if (cache.pages && cache.page_size % kConfiguration.key_tile != 0)
        return "the cache's pages are no whole tiles";
    if (const char* reason = cannot_copy({queries_of(problem, problem.q, problem.head_dim),
                                          keys_of(problem, problem.k, problem.head_dim),
                                          keys_of(problem, problem.v, problem.head_dim_v)}))
        return reason;
    if (!fits_store_rows(problem.out, problem.head_dim_v))
        return "the output's rows, or what lies between them, are no multiples of 8 bytes";
    if constexpr (kConfiguration.few > 0) {
        if (const char* reason = not_for_few(problem)) return reason;
        if (const char* reason = why_no_gain(problem, device)) return reason;
        return switched_off();
    }
    const int64_t tiles = tiles_of(problem, kConfiguration.queries());
    if (tiles * problem.heads_q > INT32_MAX) return "there are too many queries for its counter";
    // The bits of a row are not to depend on how many others there are, or how long those are.
    if (problem.deterministic) return switched_off();
    if (problem.seqlen_q < kConfiguration.from_queries) return "it is for more queries";
    if (kConfiguration.blocks > 1 && tiles * problem.heads_q <= device.multiprocessors)
        return "a multiprocessor would have one of its blocks";
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

RowTiling tiling_of(const ForwardProblem& problem, int heads, const Device& device) {
    ForwardProblem tiled = problem;
    tiled.heads_q /= heads;
    const Position queries = kConfiguration.few ? kConfiguration.warpgroups * (kConfiguration.few / heads)
                                                : kConfiguration.queries();
    return RowTiling::across_blocks(tiled, queries, device.l2_bytes / 6, device.multiprocessors);
}

// In front of partial results.
int64_t counter_bytes(const ForwardProblem& problem) {
    return kConfiguration.few || TileQueue::needs_counter(problem) ? TileQueue::workspace_bytes : 0;
}

// Of blocks that have a part of a tile's keys each and nothing else; 1: any/combine.cu puts together what
// they write.
int cluster_of(const ForwardProblem& problem, int splits, const Device& device) {
    if (!kConfiguration.few) return 1;
    const int64_t tiles = tiling_of(problem, int(heads_in_rows(problem, kConfiguration.few)), device).count();
    return clusters_fit(tiles, splits, device) ? splits : 1;
}

int64_t workspace_bytes(const ForwardProblem& problem, int splits, const Device& device) {
    if (splits > 1 && cluster_of(problem, splits, device) == splits) return 0;
    return counter_bytes(problem) + Split::workspace_bytes(problem, splits, kConfiguration.values());
}

CUtensorMap query_map(const ForwardProblem& problem, int heads) {
    const Rows rows = queries_of(problem, problem.q, problem.head_dim);
    return kConfiguration.few ? map_of_heads(rows, kDType, heads, kConfiguration.few / heads)
                              : tensor_map(rows, kDType, 64);
}

void launch(const ForwardProblem& problem, int splits, const Launch& launch) {
    const float unit = score_unit(problem, kConfiguration.transformed);
    const PreciseFactor natural(kConfiguration.transformed ? 1 / GpuMath::unit
                                                           : problem.softmax_scale / unit);
    FewQueries few;
    Launch overlapping = launch.overlapping();
    void* counter = launch.workspace;
    if (kConfiguration.few) {
        few.heads = int(heads_in_rows(problem, kConfiguration.few));
        few.splits = splits;
        overlapping.cluster = cluster_of(problem, splits, launch.device);
        if (overlapping.cluster > 1)
            counter = nullptr;  // a tile for each block
        else
            few.partial =
                reinterpret_cast<float*>(static_cast<char*>(launch.workspace) + counter_bytes(problem));
    }
    const RowTiling tiling = tiling_of(problem, few.heads, launch.device);
    const int64_t count = tiling.count() * few.splits;
    const TileQueue queue(tiling, count, kConfiguration.few || tiles_ahead(problem, kConfiguration),
                          counter_at(counter, launch));
    const ForwardMaps maps{
        query_map(problem, few.heads),
        tensor_map(keys_of(problem, problem.k, problem.head_dim), kDType, kConfiguration.key_tile),
        tensor_map(keys_of(problem, problem.v, problem.head_dim_v), kDType, kConfiguration.key_tile),
        kConfiguration.biased ? bias_map(problem, kDType, 64) : CUtensorMap{}};
    const Rows rows = queries_of(problem, problem.out, problem.head_dim_v);
    const OutputMap out = kConfiguration.stages_output ? output_map(rows, kDType) : OutputMap{};
    launch_kernel(FLASH_KERNEL_NAME, attention_forward,
                  std::min<int64_t>(count, launch.device.multiprocessors * kConfiguration.blocks),
                  kConfiguration.threads(), sizeof(Shared), overlapping, problem, maps, out, queue, unit,
                  natural, few);
    combine_splits(problem, few.splits, few.partial, kConfiguration.values(), launch);
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
    sm90::kConfiguration.blocks,
    true,
    sizeof(sm90::Shared),
    sm90::workspace_bytes,
    sm90::launch,
    90,
    sm90::why_not,
    sm90::kConfiguration.few,
};

}  // namespace flash::cuda
