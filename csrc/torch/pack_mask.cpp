#include <torch/csrc/stable/ops.h>

#include "../attention/score_matrix.h"
#include "checks.h"
#include "empty.h"
#include "execution.h"
#include "operators.h"

namespace flash {

std::tuple<Tensor, Tensor, Tensor> pack_mask(Tensor mask) {
    check(mask.dim() == 4, "attn_mask has shape ", ShapeOf{mask},
          "; it must be [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]");
    check_dtype("attn_mask", mask, ScalarType::Bool, "; a float mask is an attn_bias");
    const Tensor visible = torch::stable::contiguous(mask);
    const int64_t batch = mask.size(0), heads = mask.size(1), rows = mask.size(2), columns = mask.size(3);
    Tensor bits = new_empty(mask, {batch, heads, rows, mask_words(columns)}, ScalarType::Int);
    const auto no_blocks = [&] {
        Tensor blocks =
            new_empty(mask, {batch, heads, mask_blocks(rows), mask_blocks(columns)}, ScalarType::Bool);
        return torch::stable::zero_(blocks);
    };
    const Tensor some = no_blocks(), holes = no_blocks();
    execute({visible.const_data_ptr<bool>(), batch * heads, rows, columns,
             static_cast<uint32_t*>(bits.data_ptr()), static_cast<bool*>(some.data_ptr()),
             static_cast<bool*>(holes.data_ptr())},
            mask);
    return {bits, some, holes};
}

}  // namespace flash
