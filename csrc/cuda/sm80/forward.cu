// One row of the kernel table and one element type, compiled into the kernels of each feature set.
#include "../any/rows.h"
#include "../few_queries.h"
#include "../launch.h"
#include "../ptx/grid_dependency.h"
#include "forward.cuh"

namespace flash::cuda {
namespace sm80 {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr ForwardConfiguration kConfiguration FLASH_CONFIGURATION;
constexpr int64_t kSharedBytes = sizeof(ForwardShared<kDType, kConfiguration>);

// The features need registers: where they are, fewer blocks share a multiprocessor.
constexpr int blocks_of(Features features) {
    return features == Features::none || kConfiguration.blocks == 1 ? kConfiguration.blocks
                                                                    : kConfiguration.blocks - 1;
}

template <Features features>
__global__ void __launch_bounds__(kConfiguration.warps * 32, blocks_of(features))
    attention_forward(const __grid_constant__ ForwardProblem problem,
                      const __grid_constant__ RowTiling tiling, const __grid_constant__ int splits,
                      const __grid_constant__ float score_unit, const __grid_constant__ double natural,
                      float* __restrict__ partial, const __grid_constant__ int heads) {
    extern __shared__ __align__(128) char memory[];
    if constexpr (kConfiguration.few > 0) {
        await_grid_before();
        // What combines the splits waits for this grid's end. Blocks of others would only take its places.
        if (splits > 1 && partial) let_next_grid_start();
    }
    auto& shared = *reinterpret_cast<ForwardShared<kDType, kConfiguration>*>(memory);
    const uint32_t index = splits == 1 ? blockIdx.x : blockIdx.x / uint32_t(splits);
    const RowTile tile = tiling(index, problem, true);
    if (tile.rows.empty()) return;
    const Split split =
        Split::of(problem, int(blockIdx.x - index * splits), splits, partial, kConfiguration.head_dim);
    ForwardTile<kDType, kConfiguration, features> work(problem, shared, score_unit, natural, heads);
    work.load_first(tile, split);
    if (threadIdx.x == 0) work.start_barriers();
    shared.plan.make(problem, tile, split, kConfiguration.key_tile);
    __syncthreads();
    work.run();
}

template <bool kFew>
auto kernel_of(Features features) {
    if constexpr (kFew) {
        return attention_forward<Features::none>;
    } else {
        return features == Features::none          ? attention_forward<Features::none>
               : features == Features::transformed ? attention_forward<Features::transformed>
                                                   : attention_forward<Features::all>;
    }
}

const char* why_not(const ForwardProblem& problem, const Device& device) {
    if (!kConfiguration.few) return nullptr;
    if (problem.seqlen_q > kConfiguration.query_tile) return "it is for fewer queries";
    if (features_of(problem) == Features::all) return "it takes neither dropout nor a bias";
    if (const char* reason = not_for_few(problem)) return reason;
    const int64_t tiles = tiles_of_few(problem, kConfiguration.query_tile, 1);
    if (kConfiguration.one_wave && tiles > device.multiprocessors * blocks_in(device, kSharedBytes))
        return "its blocks are too large to run all at once";
    // A row's maximum is then looked for in every tile of keys: 10 % slower where larger tiles read as much.
    if (problem.alibi_slopes && problem.heads_q == problem.heads_k && tiles > device.multiprocessors)
        return "with ALiBi others are faster, so many queries there are";
    return nullptr;
}

// The blocks that share a tile's keys; 1: any/combine.cu puts together what they write. All clusters are to
// run at once, for which an H200 has three quarters of its places, whatever their size. Large ones are spread
// unevenly, which costs more than it saves where each block has many tiles.
int cluster_of(const ForwardProblem& problem, int splits, const Device& device) {
    if (!kConfiguration.few || splits > most_in_cluster(device)) return 1;
    const int64_t places =
        std::min<int64_t>(blocks_in(device, kSharedBytes), kConfiguration.blocks) * device.multiprocessors;
    if (tiles_of_few(problem, kConfiguration.query_tile, 1) * splits * 4 > places * 3) return 1;
    return splits <= 8 || keys_of_few(problem) <= int64_t(splits) * 4 * kConfiguration.key_tile ? splits : 1;
}

int64_t workspace_bytes(const ForwardProblem& problem, int splits, const Device& device) {
    if (cluster_of(problem, splits, device) == splits) return 0;
    return Split::workspace_bytes(problem, splits, kConfiguration.head_dim);
}

void launch(const ForwardProblem& problem, int splits, const Launch& launch) {
    Features features = features_of(problem);
    if (features == Features::none && problem.visible.data && kConfiguration.blocks > 2)
        features = Features::transformed;
    const auto kernel = kernel_of<kConfiguration.few != 0>(features);
    const float score_unit = features == Features::none ? float(problem.softmax_scale * GpuMath::unit) : 1.f;
    // One unit of a kernel's scores in natural units: the scale is rounded after log2(e) went into it.
    const double natural =
        features == Features::none ? problem.softmax_scale / double(score_unit) : 1 / GpuMath::unit;
    const int heads = kConfiguration.few ? int(heads_in_rows(problem, kConfiguration.few)) : 1;
    const int cluster = cluster_of(problem, splits, launch.device);
    auto* const partial = cluster == splits ? nullptr : static_cast<float*>(launch.workspace);
    Launch of_few = launch.overlapping();
    of_few.cluster = cluster;
    ForwardProblem tiled = problem;
    tiled.heads_q /= heads;
    const RowTiling tiling =
        RowTiling::of_queries(tiled, kConfiguration.query_tile / heads, launch.device.l2_bytes / 3);
    launch_kernel(FLASH_KERNEL_NAME, kernel, tiling.count() * splits, kConfiguration.warps * 32, kSharedBytes,
                  kConfiguration.few ? of_few : launch, problem, tiling, splits, score_unit, natural, partial,
                  heads);
    combine_splits(problem, splits, partial, kConfiguration.head_dim, launch);
}

}  // namespace
}  // namespace sm80

extern constinit const ForwardKernel FLASH_KERNEL_SYMBOL{
    "sm80",
    FLASH_KERNEL_NAME,
    DType::FLASH_DTYPE,
    sm80::kConfiguration.head_dim,
    sm80::kConfiguration.head_dim,
    sm80::kConfiguration.query_tile,
    sm80::kConfiguration.key_tile,
    FLASH_FROM_KEYS,
    sm80::kConfiguration.blocks,
    sm80::kConfiguration.bias != 0,
    sm80::kSharedBytes,
    sm80::workspace_bytes,
    sm80::launch,
    0,
    sm80::why_not,
    sm80::kConfiguration.few,
};

}  // namespace flash::cuda
