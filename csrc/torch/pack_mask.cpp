#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "execution.h"
#include "operators.h"

namespace flash {

std::tuple<Tensor, Tensor> pack_mask(Tensor mask, int64_t block) {
    check(mask.dim() == 4, "attn_mask has shape ", ShapeOf{mask},
          "; it must be [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]");
    check_dtype("attn_mask", mask, ScalarType::Bool, "; a float mask is an attn_bias");
    check(block > 0 && block % 32 == 0, "blocks of ", block, " keys are no whole words of 32 bits");
    const Tensor visible = torch::stable::contiguous(mask);
    const int64_t batch = mask.size(0), heads = mask.size(1), rows = mask.size(2), columns = mask.size(3);
    const auto in = [](int64_t length, int64_t piece) { return (length + piece - 1) / piece; };
    Tensor bits = torch::stable::new_empty(mask, {batch, heads, rows, in(columns, 32)}, ScalarType::Int);
    Tensor blocks =
        torch::stable::new_empty(mask, {batch, heads, in(rows, block), in(columns, block)}, ScalarType::Bool);
    torch::stable::zero_(blocks);
    execute({visible.const_data_ptr<bool>(), batch * heads, rows, columns, block,
             static_cast<uint32_t*>(bits.data_ptr()), static_cast<bool*>(blocks.data_ptr())},
            mask);
    return {bits, blocks};
}

}  // namespace flash
