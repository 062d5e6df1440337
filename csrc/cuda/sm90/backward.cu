// One row of the kernel table and one element type.
#include "backward_turns.cuh"
#include "backward_walk.cuh"

#include <algorithm>

#include "../ptx/grid_dependency.h"
#include "backward_launch.h"
#include "dq_finish.cuh"

namespace flash::cuda {

void FLASH_BIAS_GRADIENT(const BackwardProblem& problem, const AlignedStatistics& statistics,
                         const Launch& launch);  // bias_gradient.cu

namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BackwardConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = BackwardShared<kConfiguration>;

// Of the 512 that a multiprocessor has for each of its 128 lanes. With fewer than 240 the products would wait
// for each other; so the warp that copies keeps a few numbers in memory.
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

// kInWalk: dQ is finished there; turns: see backward_dq.cuh.
template <bool kInWalk>
__global__ void __launch_bounds__(kConfiguration.threads, 1)
    attention_backward(const __grid_constant__ BackwardProblem problem,
                       const __grid_constant__ BackwardMaps maps,
                       const __grid_constant__ KeyGradientMaps gradients,
                       const __grid_constant__ AlignedStatistics statistics,
                       const __grid_constant__ TileQueue queue, const __grid_constant__ DqSums dq_sums,
                       const __grid_constant__ DqZeros dq_zeros, uint32_t* turns, BackwardOrder order,
                       const __grid_constant__ float score_unit, const __grid_constant__ DqFinish dq_finish,
                       const __grid_constant__ WalkParts parts, const __grid_constant__ WalkEnd end,
                       int lead) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
    }
    const bool beside = statistics.progress.done;
    if (!beside) await_grid_before();
    let_next_grid_start();
    if (threadIdx.x == 0) shared.all_finite = beside || *statistics.not_finite == 0;
    __syncthreads();
    // Asked where it is wanted: kept, it takes a register from the products.
    const auto walks = [&] { return kInWalk || dq_finish.block_walks(); };
    const DqFinisher<kDType, kConfiguration> finisher(problem, dq_sums, dq_finish, parts, end, shared);
    if (threadIdx.x >= kConfiguration.consumers) {
        shrink_registers<kProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers) / 32;
        BackwardProducer<kDType, kConfiguration> producer(problem, maps, statistics, queue, dq_sums, order,
                                                          parts, end, lead, shared);
        if (warp < kConfiguration.warpgroups) {
            DqAdder<kDType, kConfiguration> adder(dq_sums, turns, order == BackwardOrder::turns, shared,
                                                  warp);
            if constexpr (kInWalk)
                adder.add_up();
            else if (walks())
                adder.add_to_sums();
        } else if (warp == kConfiguration.warpgroups) {
            if (walks()) producer.template run<false>();
            if constexpr (!kInWalk) finisher.load();
        } else if constexpr (kInWalk) {
            producer.template run<true>();
        } else if (walks()) {
            producer.template run<true>(dq_zeros);
        }
    } else {
        grow_registers<kConsumerRegisters>();
        if (walks())
            BackwardConsumer<kDType, kConfiguration, kInWalk>(problem, gradients, dq_sums, parts, shared,
                                                              score_unit)
                .run();
        if constexpr (!kInWalk) finisher.store();
    }
    // Whoever waits for this grid means the one before, too.
    if (statistics.progress.done) await_grid_before();
}

const char* why_not(const BackwardProblem& whole, const Device&) {
    const ForwardProblem& problem = whole.forward;
    if (const char* lack = lacks(problem, kConfiguration.transformed, kConfiguration.biased)) return lack;
    if (kConfiguration.biased && problem.softcap != 0) return "it has no softcap beside a bias";
    const BlockLists& lists = problem.query_blocks;
    if (lists.counts && problem.deterministic) return "with a map of blocks it adds dQ up in no fixed order";
    if (lists.counts &&
        (lists.column_block % kConfiguration.query_tile != 0 || lists.row_block < kConfiguration.key_tile))
        return "the map's blocks are too small for its tiles, or no multiples of them";
    if (const char* reason = why_not_backward(whole)) return reason;
    return switched_off();
}

// Without a map.
bool every_query_sees_keys(const ForwardProblem& problem) {
    if (problem.cu_seqlens_q || problem.cu_seqlens_k) return false;
    return problem.window_right < 0 || problem.seqlen_k - problem.seqlen_q + problem.window_right >= 0;
}

// Whether a block does all tiles of a unit (backward_dq.cuh): if the cache holds the queries, gradients and
// sums of as many units as there are blocks, which other blocks don't share then, and if few blocks idle at
// the end; or if there is but one tile. Every query has to see the first tile of keys; without a map. parts:
// of queries, each a unit.
bool does_whole_units(const ForwardProblem& problem, const Device& device, int64_t parts) {
    if (!every_query_sees_keys(problem) || problem.window_left >= 0 || problem.seqlen_k == 0) return false;
    if (problem.seqlen_k <= kConfiguration.key_tile) return true;
    const int64_t units = problem.batch * problem.heads_k * parts;
    const int64_t blocks = device.multiprocessors, rounds = (units + blocks - 1) / blocks;
    const int64_t unit_bytes =
        RowTiling::group_of(problem) * problem.seqlen_q / parts * kConfiguration.head_dim * 8;
    const bool fits = blocks * unit_bytes < device.l2_bytes * (problem.window_right >= 0 ? 4 : 3) / 4;
    return fits && units * 10 >= rounds * blocks * 9;
}

// How one launch adds dQ up (backward_dq.cuh), and in which order blocks take tiles of keys.
struct Walk {
    KeyTiles tiles;
    WalkParts at_once;  // if tiles are few
    BackwardOrder order;
    WalkParts parts;
    ForwardProblem in_parts;  // as if a part were a key head's whole group
    RowTiling keys;
    WalkEnd end;
    DqSums dq_sums;
    DqZeros dq_zeros;
    DqFinish dq_finish;

    Walk(const ForwardProblem& problem, const Device& device)
        : tiles(problem, device.multiprocessors, kConfiguration.query_tile, kConfiguration.key_tile),
          at_once(tiles.at_once()),
          order(order_of(problem, device)),
          parts(parts_of(problem, device)),
          in_parts(parts.of(problem)),
          keys(tiling(in_parts, device)),
          end(ends_free(problem, device) ? WalkEnd(keys.last_section(), keys.heads()) : WalkEnd()),
          dq_sums(sums(in_parts, device)),
          dq_zeros(zeros(problem, device)),
          dq_finish(whole_units() ? DqFinish() : finish(problem, device)) {}

    bool whole_units() const { return order == BackwardOrder::whole_units; }
    bool last_keys_store() const {
        return order == BackwardOrder::turns || order == BackwardOrder::stores_first;
    }
    // How many tiles of queries are left to copy when a block takes its next tile of keys; -1: it does when
    // there is room for the plan. Blocks that wait for each other should begin in the order in which they
    // take tiles.
    int lead(const ForwardProblem& problem) const {
        if (order == BackwardOrder::turns)
            return kConfiguration.head_dim == 96 ||
                   (kConfiguration.head_dim == 128 && problem.seqlen_k > 1024);
        return order == BackwardOrder::by_length ? lead_by_length(problem) : -1;
    }
    int64_t blocks(const Device& device) const {
        const int64_t walkers = whole_units() ? keys.heads() : keys.count();
        const int64_t least = dq_sums.unfinished_tiles() > 0;  // dQ is zero where there are no keys
        return std::min<int64_t>(std::max(walkers, least) + dq_finish.blocks(), device.multiprocessors);
    }
    int64_t parts_counter_bytes() const {
        return parts.counter_bytes(keys.tiles(), kConfiguration.consumers / 32);
    }
    int64_t parts_bytes() const {
        return parts.bytes(keys.tiles(), 2 * kConfiguration.key_tile * kConfiguration.head_dim);
    }
    int64_t turns_bytes() const {
        return last_keys_store() ? padded(keys.heads() * keys.tiles() * 2 * int64_t(sizeof(uint32_t))) : 0;
    }

  private:
    BackwardOrder order_of(const ForwardProblem& problem, const Device& device) const {
        if (has_map(problem)) return BackwardOrder::by_length;
        if (does_whole_units(problem, device, at_once.parts_of_queries())) return BackwardOrder::whole_units;
        if (problem.deterministic) return BackwardOrder::turns;
        if (!every_query_sees_keys(problem)) return BackwardOrder::by_length;
        // Where sequences are long or heads few, to wait for each other takes longer than to clear sums.
        // Under a diagonal blocks come in turns by themselves, if they begin so; and longer ones, and fewer
        // heads, may do so if they end together.
        if (end_may_be_free(problem, device) && problem.seqlen_k <= 2048) return BackwardOrder::turns;
        const bool few_heads = problem.batch * problem.heads_q * 2 < device.multiprocessors * 3;
        if (few_heads) return BackwardOrder::by_length;
        if (problem.window_right >= 0 && problem.seqlen_k <= 1024) return BackwardOrder::turns;
        return sees_all(problem) && problem.seqlen_k * kConfiguration.head_dim <= 1 << 16
                   ? BackwardOrder::stores_first
                   : BackwardOrder::by_length;
    }
    // What is walked in parts (walk_parts.cuh). In a row where tiles of keys differ: as few as give the
    // blocks enough tiles to end together, and leave the cache what blocks that run together share; but no
    // walk should become so short that its begin and end count. In turns the fewer heads the better.
    WalkParts parts_of(const ForwardProblem& problem, const Device& device) const {
        if (at_once.divide()) return at_once;
        const int64_t group = RowTiling::group_of(problem), blocks = device.multiprocessors;
        const bool in_turns = order == BackwardOrder::turns;
        const bool by_diagonal =
            order == BackwardOrder::by_length && has_diagonal(problem) && !has_map(problem);
        if (group == 1 || !(in_turns || by_diagonal) || tiles.are_few())
            return WalkParts::whole(tiles.key_heads());
        const int64_t queries = tiles.mean_queries(), head_bytes = kConfiguration.head_dim * 8;
        const auto fit = [&](int64_t bytes) { return bytes * 4 <= device.l2_bytes * 5; };
        const bool all_fit = fit(problem.batch * problem.heads_q * queries * head_bytes);
        const int64_t together = std::max(problem.seqlen_q, blocks * kConfiguration.key_tile);
        const auto suffice = [&](int64_t heads) {
            return by_diagonal && (all_fit || (2 * tiles.count() * group / heads >= 15 * blocks &&
                                               fit(heads * together * head_bytes)));
        };
        int64_t heads = group;
        for (int64_t fewer = group - 1; fewer > 1 && fewer * queries >= (in_turns ? 2048 : 4096); --fewer)
            if (group % fewer == 0 && !suffice(heads)) heads = fewer;
        // Single heads only where there are no other parts, and where the cache asks for them.
        const bool too_large = !suffice(group) && !fit(group * together * head_bytes);
        if (heads == group && group > 3 && queries >= 4096 && too_large) heads = 1;
        return WalkParts::of_heads_in_a_row(group / heads, tiles.key_heads());
    }
    // Whether the last heads' tiles are those of walk_end.h. It takes the time to clear their sums, and to
    // make dQ of them at the very end: of short walks more than is won.
    bool end_may_be_free(const ForwardProblem& problem, const Device& device) const {
        return has_diagonal(problem) && every_query_sees_keys(problem) && RowTiling::group_of(problem) == 1 &&
               !problem.deterministic && problem.seqlen_k >= 768 &&
               tiles.count() >= 4 * device.multiprocessors;
    }
    bool ends_free(const ForwardProblem& problem, const Device& device) const {
        return order == BackwardOrder::turns && !parts.divide() && end_may_be_free(problem, device);
    }
    static bool sees_all(const ForwardProblem& problem) {
        return problem.window_right < 0 && problem.window_left < 0 && !problem.cu_seqlens_q &&
               !problem.cu_seqlens_k && !has_map(problem);
    }

    // Blocks that begin together should add to the same sums no more often than they keep apart by
    // themselves: under a diagonal by the queries that one tile of keys sees and the next one doesn't.
    RowTiling tiling(const ForwardProblem& problem, const Device& device) const {
        const bool all = problem.window_right < 0 && problem.window_left < 0;
        const bool crowd = all || kConfiguration.query_tile == kConfiguration.key_tile;
        const int64_t blocks = device.multiprocessors;
        const int64_t together = order == BackwardOrder::stores_first      ? blocks / 2
                                 : order == BackwardOrder::turns && !crowd ? 1
                                                                           : blocks;
        if (parts.divide() && parts.in_a_row())
            return RowTiling::of_keys_apart(problem, kConfiguration.key_tile, parts.key_heads(), together);
        return last_keys_store() ? RowTiling::of_keys_together(problem, kConfiguration.key_tile, together,
                                                               ends_free(problem, device) ? blocks : 0)
                                 : RowTiling::of_keys_soon_done(problem, kConfiguration.key_tile,
                                                                device.l2_bytes / 3, blocks);
    }

    DqZeros zeros(const ForwardProblem& problem, const Device& device) const {
        const bool all_stored = last_keys_store() && keys.count() > 0 && every_query_sees_keys(problem);
        return whole_units() || all_stored ? DqZeros() : DqZeros(keys, device.multiprocessors);
    }

    // So many blocks finish dQ as keep up with those that walk (a block 40 to 60 GB/s); where all tiles take
    // the same time, no more than would be idle in the last round.
    DqFinish finish(const ForwardProblem& problem, const Device& device) const {
        const int64_t blocks = device.multiprocessors, tiles = std::max<int64_t>(keys.count(), 1);
        const bool equal = sees_all(problem);
        const int64_t rounds = (tiles + blocks - 1) / blocks, walkers = (tiles + rounds - 1) / rounds;
        const int64_t enough = 6144 / std::max<int64_t>(problem.seqlen_k, 1);
        const int64_t finishers = std::min({enough, (blocks + 14) / 16, equal ? blocks - walkers : blocks});
        return {dq_sums.unfinished_tiles(), finishers};
    }

    DqSums sums(const ForwardProblem& problem, const Device& device) const {
        const RowTiling queries = RowTiling::of_queries(problem, kConfiguration.query_tile, 0);
        const int64_t group = RowTiling::group_of(problem);
        constexpr int elements = kConfiguration.query_tile * kConfiguration.head_dim;
        const float scale = float(problem.softmax_scale);
        const int64_t units = keys.heads();
        const int64_t places = std::min<int64_t>(units, device.multiprocessors);
        const int64_t summed = keys.tiles() > 1 ? elements : 0;  // else dQ is one product
        return whole_units()
                   ? DqSums::of_places(queries, group, places, summed, scale, at_once.parts_of_queries())
                   : DqSums(keys, queries, group, device.multiprocessors, elements, false, scale,
                            at_once.parts_of_queries());
    }
};

// The queue's counter, statistics; from where their zeros begin on: turns, the parts' and dQ's counters, how
// far zeros of dQ's sums are; those; what parts leave.
int64_t workspace_bytes(const BackwardProblem& problem, const Device& device) {
    const Walk walk(problem.forward, device);
    return padded(TileQueue::workspace_bytes) + StatisticsSpace(problem.forward).bytes() +
           walk.turns_bytes() + walk.parts_counter_bytes() + padded(walk.dq_finish.bytes()) +
           padded(walk.dq_zeros.bytes()) + padded(walk.dq_sums.bytes()) + walk.parts_bytes();
}

void launch(const BackwardProblem& problem, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    char* const workspace = static_cast<char*>(launch.workspace) + padded(TileQueue::workspace_bytes);
    const StatisticsSpace space(forward);
    Walk walk(forward, launch.device);
    const int64_t for_delta = walk.whole_units() ? 0 : blocks_for_delta(forward, walk.keys, launch);
    AlignedStatistics statistics = space.at(workspace, for_delta > 0);
    char* const turns = workspace + space.bytes();
    char* const parts_counters = turns + walk.turns_bytes();
    char* const finish_counter = parts_counters + walk.parts_counter_bytes();
    char* const zeros_counters = finish_counter + padded(walk.dq_finish.bytes());
    char* const sums = zeros_counters + padded(walk.dq_zeros.bytes());
    char* const zeros = workspace + space.zeros();
    const int64_t zero_units = std::max(walk.dq_zeros.lead(), walk.end.heads());
    const int64_t zero_sums = walk.whole_units() ? 0 : walk.dq_sums.bytes_of(zero_units);
    walk.dq_finish.lie_at(finish_counter);
    walk.dq_zeros.lie_at(zeros_counters);
    walk.dq_sums.lie_at(sums);
    walk.parts.lie_at(parts_counters, sums + padded(walk.dq_sums.bytes()));
    clear(zeros, sums - zeros + zero_sums, launch);
    compute_delta(problem, statistics, for_delta, launch);
    constexpr int query_tile = kConfiguration.query_tile, key_tile = kConfiguration.key_tile;
    // By a counter, since blocks in step would add to the same sums at the same time; strictly, since blocks
    // wait for those that take tiles before them.
    const TileQueue queue(walk.keys, walk.whole_units() ? walk.keys.heads() : walk.keys.count(), 0,
                          counter_at(launch.workspace, launch), !walk.whole_units(), walk.dq_finish.blocks());
    const BackwardMaps maps =
        maps_of(problem, statistics, kDType, query_tile, key_tile, kConfiguration.biased);
    const KeyGradientMaps gradients{output_map(keys_of(forward, problem.dk, forward.head_dim), kDType),
                                    output_map(keys_of(forward, problem.dv, forward.head_dim_v), kDType)};
    launch_kernel(FLASH_KERNEL_NAME,
                  walk.whole_units() ? attention_backward<true> : attention_backward<false>,
                  walk.blocks(launch.device), kConfiguration.threads, sizeof(Shared), launch.overlapping(),
                  problem, maps, gradients, statistics, queue, walk.dq_sums, walk.dq_zeros,
                  walk.last_keys_store() ? reinterpret_cast<uint32_t*>(turns) : nullptr, walk.order,
                  score_unit(forward, kConfiguration.transformed), walk.dq_finish, walk.parts, walk.end,
                  walk.lead(forward));
    if constexpr (kConfiguration.biased)
        if (problem.dbias.data) FLASH_BIAS_GRADIENT(problem, statistics, launch);
}

}  // namespace
}  // namespace sm90

extern constinit const BackwardKernel FLASH_KERNEL_SYMBOL{
    "sm90",
    FLASH_KERNEL_NAME,
    DType::FLASH_DTYPE,
    sm90::kConfiguration.head_dim,
    sm90::kConfiguration.head_dim,
    sm90::kConfiguration.query_tile,
    sm90::kConfiguration.key_tile,
    FLASH_FROM_KEYS,
    1,
    sizeof(sm90::Shared),
    sm90::workspace_bytes,
    sm90::launch,
    90,
    sm90::why_not,
};

}  // namespace flash::cuda
