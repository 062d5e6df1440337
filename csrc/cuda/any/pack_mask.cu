#include "../../attention/score_matrix.h"
#include "../launch.h"
#include "../tile/fragment.h"
#include "rows.h"

namespace flash::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_words(const __grid_constant__ MaskPacking packing) {
    const int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x;
    if (index < words_of(packing)) pack_word(packing, index);
}

// A warp for each list, 32 blocks at a time.
__global__ void __launch_bounds__(kThreads) list_blocks(const __grid_constant__ MaskPacking packing) {
    const int64_t index = blockIdx.x * int64_t(kThreads / 32) + threadIdx.x / 32;
    if (index >= MaskList::count_of(packing)) return;
    const MaskList list(packing, index);
    const int64_t capacity = list.capacity();
    int32_t count = 0;
    for (int64_t first = 0; first < capacity; first += 32) {
        const int64_t column = first + lane_index();
        const int32_t block = column < capacity ? list.block(column) : -1;
        const uint32_t listed = __ballot_sync(0xffffffff, block >= 0);
        if (block >= 0) list.indices()[count + __popc(listed & ((1u << lane_index()) - 1))] = block;
        count += __popc(listed);
    }
    if (lane_index() == 0) list.count() = count;
}

int64_t blocks_for(int64_t count, int64_t in_block) {
    return (count + in_block - 1) / in_block;
}

}  // namespace

void pack_mask(const MaskPacking& packing, const Launch& launch) {
    launch_kernel("pack_mask", pack_words, blocks_for(words_of(packing), kThreads), kThreads, 0, launch,
                  packing);
    launch_kernel("list_blocks", list_blocks, blocks_for(MaskList::count_of(packing), kThreads / 32),
                  kThreads, 0, launch, packing);
}

}  // namespace flash::cuda
