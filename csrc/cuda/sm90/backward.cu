// One row of the kernel table and one element type.
#include "backward.cuh"

#include <algorithm>

#include "problem.h"

namespace flash::cuda {
namespace sm90 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr BackwardConfiguration kConfiguration FLASH_CONFIGURATION;
using Shared = BackwardShared<kConfiguration>;

// Of the 512 that a multiprocessor has for each of its 128 lanes. With fewer than 240 the products would wait
// for each other; so the warp that copies keeps a few numbers in memory.
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

// kWholeUnits: a block does all tiles of a unit (backward_dq.cuh).
template <bool kWholeUnits>
__global__ void __launch_bounds__(kConfiguration.threads, 1)
    attention_backward(const __grid_constant__ BackwardProblem problem,
                       const __grid_constant__ BackwardMaps maps,
                       const __grid_constant__ AlignedStatistics statistics,
                       const __grid_constant__ TileQueue queue, const __grid_constant__ DqSums dq_sums,
                       uint32_t* turns, const __grid_constant__ float score_unit) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.start();
        fence_async_proxy();
        // Of packed sequences, rows that belong to none are copied, too, and nobody has looked at them.
        shared.all_finite = !problem.forward.cu_seqlens_q && *statistics.not_finite == 0;
    }
    __syncthreads();
    if (threadIdx.x >= kConfiguration.consumers) {
        shrink_registers<kProducerRegisters>();
        const int warp = int(threadIdx.x - kConfiguration.consumers) / 32;
        BackwardProducer<kDType, kConfiguration, kWholeUnits> producer(problem, maps, statistics, queue,
                                                                       dq_sums, shared);
        if (warp < kConfiguration.warpgroups)
            add_dqs<kDType, kConfiguration, kWholeUnits>(dq_sums, turns, shared, warp);
        else if (warp == kConfiguration.warpgroups)
            producer.template run<false>();
        else
            producer.template run<true>();
    } else {
        grow_registers<kConsumerRegisters>();
        BackwardConsumer<kDType, kConfiguration, kWholeUnits>(problem, dq_sums, shared, score_unit).run();
    }
}

__global__ void __launch_bounds__(kConfiguration.consumers)
    finish_dq(const __grid_constant__ BackwardProblem problem, const __grid_constant__ DqSums dq_sums) {
    extern __shared__ __align__(1024) char memory[];
    finish_tile<Dq<kDType, kConfiguration>>(problem, dq_sums, blockIdx.x, shared_address(memory));
}

const char* why_not(const BackwardProblem& whole, const Device&) {
    const ForwardProblem& problem = whole.forward;
    if (const char* lack = lacks(problem)) return lack;
    const BlockLists& lists = problem.query_blocks;
    if (lists.counts && problem.deterministic) return "with a map of blocks it adds dQ up in no fixed order";
    if (lists.counts &&
        (lists.column_block % kConfiguration.query_tile != 0 || lists.row_block < kConfiguration.key_tile))
        return "the map's blocks are too small for its tiles, or no multiples of them";
    if (lists.head_stride != 0 && problem.heads_q != problem.heads_k)
        return "grouped heads must share their map of blocks";
    if (const char* reason = cannot_copy({queries_of(problem, problem.q, problem.head_dim),
                                          queries_of(problem, whole.dout, problem.head_dim_v),
                                          keys_of(problem, problem.k, problem.head_dim),
                                          keys_of(problem, problem.v, problem.head_dim_v)}))
        return reason;
    // The gradients are contiguous (store_rows.cuh).
    if ((problem.head_dim | problem.head_dim_v) % 4 != 0) return "the head dims are no multiples of 4";
    return switched_off();
}

RowTiling key_tiling(const ForwardProblem& problem, const Device& device) {
    return RowTiling::of_keys(problem, kConfiguration.key_tile, device.l2_bytes / 3);
}

// Whether a block does all tiles of a unit (backward_dq.cuh): if the cache holds the queries, gradients and
// sums of as many units as there are blocks, which other blocks don't share then, and if few blocks idle at
// the end. Every query has to see the first tile of keys.
bool does_whole_units(const ForwardProblem& problem, const RowTiling& keys, const Device& device) {
    const bool packed = problem.cu_seqlens_q || problem.cu_seqlens_k, causal = problem.window_right >= 0;
    if (packed || problem.query_blocks.counts || problem.window_left >= 0) return false;
    if (causal && problem.seqlen_k - problem.seqlen_q + problem.window_right < 0) return false;
    const int64_t blocks = device.multiprocessors, rounds = (keys.heads() + blocks - 1) / blocks;
    const int64_t unit_bytes = RowTiling::group_of(problem) * problem.seqlen_q * kConfiguration.head_dim * 8;
    const bool fits = blocks * unit_bytes < device.l2_bytes * (causal ? 5 : 3) / 4;
    return fits && keys.heads() * 10 >= rounds * blocks * 9;
}

DqSums dq_sums_of(const ForwardProblem& problem, const RowTiling& keys, const Device& device) {
    const RowTiling queries = RowTiling::of_queries(problem, kConfiguration.query_tile, 0);
    const int64_t group = RowTiling::group_of(problem), blocks = device.multiprocessors;
    constexpr int elements = kConfiguration.query_tile * kConfiguration.head_dim;
    const float scale = float(problem.softmax_scale);
    return does_whole_units(problem, keys, device)
               ? DqSums::of_blocks(queries, group, std::min(blocks, keys.heads()), elements, scale)
               : DqSums(keys, queries, group, blocks, elements, false, scale);
}

// Of a part of the workspace, so that the next one is aligned.
int64_t padded(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

AlignedRows aligned_rows(const ForwardProblem& problem) {
    return {problem.cu_seqlens_q, problem.batch, problem.rows_q};
}
RowStatistics statistics_at(const ForwardProblem& problem, void* data) {
    const int64_t rows = aligned_rows(problem).count();
    return {data, problem.cu_seqlens_q ? 0 : rows * problem.heads_q, rows};
}
int64_t statistics_bytes(const ForwardProblem& problem) {
    const int64_t batches = problem.cu_seqlens_q ? 1 : problem.batch;
    const int64_t elements = batches * problem.heads_q * aligned_rows(problem).count();
    return padded(elements * int64_t(sizeof(float)));
}

int64_t turns_bytes(const ForwardProblem& problem, const DqSums& dq_sums) {
    const int64_t bytes = dq_sums.tiles() * kConfiguration.warpgroups * int64_t(sizeof(uint32_t));
    return problem.deterministic ? padded(bytes) : 0;
}

// The queue's counter, lse in log 2, delta, whether they are finite, turns, then the sums of dQ.
int64_t workspace_bytes(const BackwardProblem& problem, const Device& device) {
    const ForwardProblem& forward = problem.forward;
    const DqSums dq_sums = dq_sums_of(forward, key_tiling(forward, device), device);
    return padded(TileQueue::workspace_bytes) + 2 * statistics_bytes(forward) + padded(4) +
           turns_bytes(forward, dq_sums) + dq_sums.bytes();
}

void launch(const BackwardProblem& problem, const Launch& launch) {
    const ForwardProblem& forward = problem.forward;
    char* const workspace = static_cast<char*>(launch.workspace) + padded(TileQueue::workspace_bytes);
    const int64_t bytes = statistics_bytes(forward);
    char* const zeros = workspace + 2 * bytes;
    const AlignedStatistics statistics{statistics_at(forward, workspace),
                                       statistics_at(forward, workspace + bytes), aligned_rows(forward),
                                       reinterpret_cast<uint32_t*>(zeros)};
    const RowTiling keys = key_tiling(forward, launch.device);
    const bool whole_units = does_whole_units(forward, keys, launch.device);
    DqSums dq_sums = dq_sums_of(forward, keys, launch.device);
    char* const turns = zeros + padded(4);
    const int64_t before_sums = turns_bytes(forward, dq_sums);
    check(cudaMemsetAsync(zeros, 0, padded(4) + before_sums + (whole_units ? 0 : dq_sums.bytes()),
                          static_cast<cudaStream_t>(launch.stream)),
          FLASH_KERNEL_NAME);
    compute_delta(problem, statistics, launch);
    dq_sums.lie_at(turns + before_sums);
    constexpr int query_tile = kConfiguration.query_tile, key_tile = kConfiguration.key_tile;
    const int64_t count = whole_units ? keys.heads() : keys.count();
    // In turns, blocks have to begin in the order of their tiles: as the device starts them, one for each.
    // Else by a counter, since blocks in step would add to the same sums at the same time.
    const int64_t blocks = before_sums ? count : std::min<int64_t>(count, launch.device.multiprocessors);
    const TileQueue queue(keys, count, false, before_sums ? nullptr : launch.workspace);
    const BackwardMaps maps{
        tensor_map(queries_of(forward, forward.q, forward.head_dim), kDType, query_tile),
        tensor_map(queries_of(forward, problem.dout, forward.head_dim_v), kDType, query_tile),
        tensor_map(keys_of(forward, forward.k, forward.head_dim), kDType, key_tile),
        tensor_map(keys_of(forward, forward.v, forward.head_dim_v), kDType, key_tile),
        tensor_map(statistics.lse_log2, forward, statistics.rows.count(), query_tile),
        tensor_map(statistics.delta, forward, statistics.rows.count(), query_tile)};
    launch_kernel(FLASH_KERNEL_NAME, whole_units ? attention_backward<true> : attention_backward<false>,
                  blocks, kConfiguration.threads, sizeof(Shared), launch, problem, maps, statistics, queue,
                  dq_sums, before_sums ? reinterpret_cast<uint32_t*>(turns) : nullptr,
                  float(forward.softmax_scale * GpuMath::unit));
    launch_kernel(FLASH_KERNEL_NAME, finish_dq, dq_sums.unfinished_tiles(), kConfiguration.consumers,
                  query_tile * kConfiguration.head_dim * 2, launch, problem, dq_sums);
}

}  // namespace
}  // namespace sm90

extern constinit const BackwardKernel FLASH_KERNEL_SYMBOL{
    "sm90",
    FLASH_KERNEL_NAME,
    DType::FLASH_DTYPE,
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
