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
    const auto no_quarters = [&] {
        Tensor quarters = new_empty(mask, {batch, heads, 2 * mask_blocks(rows), 2 * mask_blocks(columns)},
                                    ScalarType::Bool);
        return torch::stable::zero_(quarters);
    };
    const Tensor some = no_quarters(), holes = no_quarters();
    execute({visible.const_data_ptr<bool>(), batch * heads, rows, columns,
             static_cast<uint32_t*>(bits.data_ptr()), static_cast<bool*>(some.data_ptr()),
             static_cast<bool*>(holes.data_ptr())},
            mask);
    return {bits, some, holes};
}

}  // namespace flash
