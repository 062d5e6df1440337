#include "../../attention/score_matrix.h"
#include "../launch.h"
#include "rows.h"

namespace flash::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_words(const __grid_constant__ MaskPacking packing) {
    const int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x;
    if (index < words_of(packing)) pack_word(packing, index);
}

}  // namespace

void pack_mask(const MaskPacking& packing, const Launch& launch) {
    launch_kernel("pack_mask", pack_words, (words_of(packing) + kThreads - 1) / kThreads, kThreads, 0, launch,
                  packing);
}

}  // namespace flash::cuda
