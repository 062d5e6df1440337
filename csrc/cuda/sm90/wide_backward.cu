// One row of the kernel table and one element type: head dims that are too wide for one walk, dK and dV in
// one kernel, dQ in another.
#include <algorithm>

#include "backward_launch.h"
#include "key_gradients.cuh"
#include "../ptx/grid_dependency.h"
#include "../ptx/register_budget.h"
#include "query_gradient.cuh"
#include "stored_query_gradient.cuh"

namespace flash::cuda {
namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BackwardConfiguration kConfiguration FLASH_CONFIGURATION;
constexpr ForwardConfiguration kQueries = query_gradient_configuration(kConfiguration);
using Shared = BackwardShared<kConfiguration>;
using QueryShared = QueryGradientShared<kQueries>;
static_assert(kQueries.threads() == kConfiguration.threads);
constexpr ForwardConfiguration kStored = stored_query_gradient_configuration(kConfiguration);
using StoredShared = StoredQueryGradientShared<kStored>;

// Of the 512 that a multiprocessor has for each of its 128 lanes; and of the query gradient's kernel.
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
constexpr int kQueryConsumerRegisters = 224, kQueryProducerRegisters = 56;

__global__ void __launch_bounds__(kConfiguration.threads, 1)
    attention_key_gradients(const __grid_constant__ BackwardProblem problem,
                            const __grid_constant__ BackwardMaps maps,
                            const __grid_constant__ AlignedStatistics statistics,
                            const __grid_constant__ TileQueue queue, const __grid_constant__ DqSums no_sums,
                            const __grid_constant__ float score_unit, const __grid_constant__ WalkParts parts,
                            const __grid_constant__ ScoreGradients ds, int lead) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    if (!ds.beside) await_grid_before();
    let_next_grid_start();
    if (threadIdx.x == 0) shared.all_finite = statistics.progress.done || *statistics.not_finite == 0;
    __syncthreads();
    if (threadIdx.x >= kConfiguration.consumers) {
        shrink_registers<kProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers) / 32;
        const WalkEnd no_end;
        BackwardProducer<kDType, kConfiguration> producer(
            problem, maps, statistics, queue, no_sums, BackwardOrder::by_length, parts, no_end, lead, shared);
        if (warp == 0) producer.template run<false>();
        if (warp == 1) producer.template run<true>();
    } else {
        grow_registers<kConsumerRegisters>();
        constexpr bool alike = kConfiguration.values() == kConfiguration.head_dim;
        constexpr KeyRole first = alike ? KeyRole::either : KeyRole::dv,
                          second = alike ? KeyRole::either : KeyRole::dk;
        if (alike || __shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0) == 0)
            KeyGradients<kDType, kConfiguration, first>(problem, parts, shared, ds, score_unit).run();
        else
            KeyGradients<kDType, kConfiguration, second>(problem, parts, shared, ds, score_unit).run();
    }
    // Whoever waits for this grid means the one before, too.
    if (ds.beside) await_grid_before();
}

__global__ void __launch_bounds__(kConfiguration.threads, 1)
    attention_query_gradient(const __grid_constant__ BackwardProblem problem,
                             const __grid_constant__ QueryGradientMaps maps,
                             const __grid_constant__ AlignedStatistics statistics,
                             const __grid_constant__ TileQueue queue,
                             const __grid_constant__ float score_unit) {
    extern __shared__ __align__(1024) char memory[];
    QueryShared& shared = *reinterpret_cast<QueryShared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    __syncthreads();
    if (threadIdx.x >= kConfiguration.consumers) {
        shrink_registers<kQueryProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers) / 32;
        QueryGradientProducer<kDType, kQueries> producer(problem.forward, maps, queue, shared);
        if (warp == 0) producer.copy_keys();
        if (warp == 1) producer.copy_values();
        if (warp == 2) producer.plan();
    } else {
        grow_registers<kQueryConsumerRegisters>();
        QueryGradient<kDType, kQueries>(problem, statistics, shared, score_unit).run();
    }
    // It needs nothing of attention_key_gradients, but whoever waits for this grid means both.
    await_grid_before();
}

__global__ void __launch_bounds__(kStored.threads(), 1)
    attention_stored_query_gradient(const __grid_constant__ BackwardProblem problem,
                                    const __grid_constant__ CUtensorMap keys,
                                    const __grid_constant__ TileQueue queue,
                                    const __grid_constant__ ScoreGradients ds) {
    extern __shared__ __align__(1024) char memory[];
    StoredShared& shared = *reinterpret_cast<StoredShared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    await_grid_before();
    let_next_grid_start();
    if (threadIdx.x == 0) shared.looks = *ds.bad_keys != 0;
    __syncthreads();
    if (threadIdx.x >= kStored.consumers()) {
        shrink_registers<kStored.producer_registers()>();
        const int warp = int(threadIdx.x - kStored.consumers()) / 32;
        StoredQueryGradientProducer<kDType, kStored> producer(problem.forward, keys, ds, queue, shared);
        if (warp == 0) producer.copy();
        if (warp == 1) producer.plan();
    } else {
        grow_registers<kStored.registers>();
        StoredQueryGradient<kDType, kStored>(problem, shared).run();
    }
}

RowTiling query_tiling(const ForwardProblem& problem, int tile, const Device& device) {
    return RowTiling::across_blocks(problem, tile, device.l2_bytes / 6, device.multiprocessors);
}

const char* why_not(const BackwardProblem& whole, const Device& device) {
    const ForwardProblem& problem = whole.forward;
    if (const char* lack = lacks(problem, kConfiguration.transformed, false)) return lack;
    const BlockLists& lists = problem.query_blocks;
    if (lists.counts && (lists.row_block % kQueries.key_tile != 0 || lists.column_block % 64 != 0))
        return "the map's blocks are no multiples of its tiles";
    if (const char* reason = why_not_backward(whole)) return reason;
    if (query_tiling(problem, kQueries.queries(), device).count() > INT32_MAX)
        return "there are too many queries for its counter";
    return switched_off();
}

// Of dK's and dV's kernel.
struct Walk {
    WalkParts parts;
    RowTiling keys;

    Walk(const ForwardProblem& problem, const Device& device)
        : parts(KeyTiles(problem, device.multiprocessors, kConfiguration.query_tile, kConfiguration.key_tile)
                    .at_once()),
          keys(tiling(parts.of(problem), device)) {}

    int64_t counter_bytes() const { return parts.counter_bytes(keys.tiles(), kConfiguration.consumers / 32); }
    int64_t gradient_bytes() const {
        const int columns = std::max(kConfiguration.head_dim, kConfiguration.values());
        return parts.bytes(keys.tiles(), 2 * kConfiguration.key_tile * columns);
    }

  private:
    // dQ's kernel fills the end of the other one; behind long walks it need not, and they are slower so.
    static RowTiling tiling(const ForwardProblem& problem, const Device& device) {
        const auto of_keys = RowTiling::are_long(problem, kConfiguration.key_tile)
                                 ? RowTiling::of_keys
                                 : RowTiling::of_keys_soon_done;
        return of_keys(problem, kConfiguration.key_tile, device.l2_bytes / 3, device.multiprocessors);
    }
};

ScoreGradientSpace space_of_ds(const ForwardProblem& problem, const Device& device) {
    return ScoreGradientSpace(problem, kConfiguration.query_tile, kStored.queries(), device);
}

// Two queues' counters, statistics, the parts' counters, what parts leave, dS.
int64_t workspace_bytes(const BackwardProblem& problem, const Device& device) {
    const Walk walk(problem.forward, device);
    return 2 * padded(TileQueue::workspace_bytes) + StatisticsSpace(problem.forward).bytes() +
           walk.counter_bytes() + padded(walk.gradient_bytes()) +
           space_of_ds(problem.forward, device).bytes();
}

template <class... Arguments>
void launch_walk(void (*kernel)(Arguments...), const RowTiling& tiling, int threads, int64_t shared_bytes,
                 const Launch& launch, const std::type_identity_t<Arguments>&... arguments) {
    launch_kernel(FLASH_KERNEL_NAME, kernel, std::min<int64_t>(tiling.count(), launch.device.multiprocessors),
                  threads, shared_bytes, launch, arguments...);
}

void launch(const BackwardProblem& problem, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    char* const counters = static_cast<char*>(launch.workspace);
    char* const workspace = counters + 2 * padded(TileQueue::workspace_bytes);
    const StatisticsSpace space(forward);
    Walk walk(forward, launch.device);
    const ScoreGradientSpace of_scores = space_of_ds(forward, launch.device);
    const int64_t for_delta = of_scores.exists() ? blocks_for_delta(forward, walk.keys, launch) : 0;
    AlignedStatistics statistics = space.at(workspace, for_delta > 0);
    char* const parts_counters = workspace + space.bytes();
    walk.parts.lie_at(parts_counters, parts_counters + walk.counter_bytes());
    clear(workspace + space.zeros(), space.bytes() - space.zeros() + walk.counter_bytes(), launch);
    compute_delta(problem, statistics, for_delta, launch);
    const float unit = score_unit(forward, kConfiguration.transformed);
    constexpr int query_tile = kConfiguration.query_tile, key_tile = kConfiguration.key_tile;
    const BackwardMaps maps = maps_of(problem, statistics, kDType, query_tile, key_tile, false);

    const RowTiling& keys = walk.keys;
    void* const key_counter = counter_at(counters, launch);
    void* const query_counter = counter_at(counters + padded(TileQueue::workspace_bytes), launch);
    const DqSums no_sums = DqSums::of_places(RowTiling::of_queries(forward, query_tile, 0), 1, 1, 0, 1);
    const auto launch_keys = [&](const TileQueue& queue, const ScoreGradients& ds) {
        launch_walk(attention_key_gradients, queue.tiling, kConfiguration.threads, sizeof(Shared),
                    launch.overlapping(), problem, maps, statistics, queue, no_sums, unit, walk.parts, ds,
                    lead_by_length(forward));
    };
    if (of_scores.exists()) {
        const RowTiling queries = query_tiling(forward, kStored.queries(), launch.device);
        const int64_t group = RowTiling::group_of(forward), parts = keys.heads() / walk.parts.key_heads();
        char* const memory = parts_counters + walk.counter_bytes() + padded(walk.gradient_bytes());
        const auto launch_some = [&](int64_t first, int64_t heads, const ScoreGradients& ds) {
            launch_keys(TileQueue(keys, first * parts, heads * parts, 0, key_counter), ds);
            const TileQueue queue(queries, first * group, heads * group, tiles_ahead(forward, kStored),
                                  query_counter);
            launch_walk(attention_stored_query_gradient, queue.tiling, kStored.threads(),
                        sizeof(StoredShared), launch.overlapping(), problem, maps.k, queue, ds);
        };
        // Copies bring whole tiles, of which some blocks may have been stored by nobody: what is not seen.
        if (kSanitized) set_zero(memory, of_scores.bytes(), FLASH_KERNEL_NAME, launch);
        of_scores.each(memory, space.bad_keys(workspace), for_delta > 0, launch_some);
        return;
    }
    launch_keys(TileQueue(keys, keys.count(), 0, key_counter), {});

    const RowTiling queries = query_tiling(forward, kQueries.queries(), launch.device);
    const QueryGradientMaps query_maps{
        tensor_map(queries_of(forward, forward.q, forward.head_dim), kDType, 64),
        tensor_map(queries_of(forward, problem.dout, forward.head_dim_v), kDType, 64), maps.k, maps.v};
    // Where there are no keys, the grid before is delta's.
    launch_walk(attention_query_gradient, queries, kConfiguration.threads, sizeof(QueryShared),
                keys.count() > 0 ? launch.overlapping() : launch, problem, query_maps, statistics,
                TileQueue(queries, queries.count(), tiles_ahead(forward, kQueries), query_counter),
                unit);
}

}  // namespace
}  // namespace sm90

extern constinit const BackwardKernel FLASH_KERNEL_SYMBOL{
    "sm90",
    FLASH_KERNEL_NAME,
    DType::FLASH_DTYPE,
    sm90::kConfiguration.head_dim,
    sm90::kConfiguration.values(),
    sm90::kConfiguration.query_tile,
    sm90::kConfiguration.key_tile,
    FLASH_FROM_KEYS,
    1,
    int64_t(std::max({sizeof(sm90::Shared), sizeof(sm90::QueryShared), sizeof(sm90::StoredShared)})),
    sm90::workspace_bytes,
    sm90::launch,
    90,
    sm90::why_not,
};

}  // namespace flash::cuda
