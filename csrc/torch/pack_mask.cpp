#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "checks.h"
#include "operators.h"

namespace flash {

std::tuple<Tensor, Tensor> pack_mask(Tensor mask, int64_t block) {
    check(mask.dim() == 4, "attn_mask has shape ", ShapeOf{mask}, "; it must be [batch or 1, heads or 1, seqlen_q or 1, ",
          "seqlen_k]");
    check_dtype("attn_mask", mask, ScalarType::Bool, "; a float mask is an attn_bias");
    check(mask.is_cpu(), "attn_mask is on ", DeviceOf{mask}, "; masks of elements are not there on GPUs yet");
    check(block > 0 && block % 32 == 0, "blocks of ", block, " keys are no whole words of 32 bits");
    const Tensor visible = torch::stable::contiguous(mask);
    const int64_t heads = mask.size(0) * mask.size(1), rows = mask.size(2), columns = mask.size(3);
    const int64_t words = (columns + 31) / 32, block_rows = (rows + block - 1) / block,
                  block_columns = (columns + block - 1) / block;
    Tensor bits = torch::stable::new_empty(mask, {mask.size(0), mask.size(1), rows, words}, ScalarType::Int);
    Tensor blocks =
        torch::stable::new_empty(mask, {mask.size(0), mask.size(1), block_rows, block_columns}, ScalarType::Bool);
    torch::stable::zero_(blocks);
    const bool* from = visible.const_data_ptr<bool>();
    auto* to = static_cast<uint32_t*>(bits.data_ptr());
    auto* any = static_cast<bool*>(blocks.data_ptr());
    for (int64_t row = 0; row < heads * rows; ++row, from += columns, to += words) {
        bool* of_row = any + (row / rows * block_rows + row % rows / block) * block_columns;
        for (int64_t word = 0; word < words; ++word) {
            uint32_t packed = 0;
            for (int64_t key = word * 32; key < columns && key < word * 32 + 32; ++key)
                packed |= uint32_t(from[key]) << key % 32;
            to[word] = packed;
            if (packed) of_row[word * 32 / block] = true;
        }
    }
    return {bits, blocks};
}

}  // namespace flash
