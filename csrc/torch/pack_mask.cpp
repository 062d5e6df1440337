#include <torch/csrc/stable/ops.h>

#include "../attention/score_matrix.h"
#include "checks.h"
#include "empty.h"
#include "execution.h"
#include "operators.h"

namespace flash {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_mask(Tensor mask, int64_t seqlen_q) {
    check(mask.dim() == 4, "attn_mask has shape ", ShapeOf{mask},
          "; it must be [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]");
    check_dtype("attn_mask", mask, ScalarType::Bool, "; a float mask is an attn_bias");
    const Tensor visible = torch::stable::contiguous(mask);
    const int64_t batch = mask.size(0), heads = mask.size(1), rows = mask.size(2), columns = mask.size(3);
    check(rows == 1 || rows == seqlen_q, "attn_mask has ", rows, " rows for ", seqlen_q, " queries");
    const int64_t row_blocks = mask_blocks(seqlen_q), column_blocks = mask_blocks(columns);
    const auto ints = [&](std::vector<int64_t> sizes) { return new_empty(mask, sizes, ScalarType::Int); };
    const auto no_quarters = [&] {
        Tensor quarters =
            new_empty(mask, {batch, heads, 2 * mask_blocks(rows), 2 * column_blocks}, ScalarType::Bool);
        return torch::stable::zero_(quarters);
    };
    const Tensor bits = ints({batch, heads, rows, mask_words(columns)});
    const Tensor some = no_quarters(), holes = no_quarters();
    const Tensor key_counts = ints({batch, heads, row_blocks}),
                 key_indices = ints({batch, heads, row_blocks, column_blocks}),
                 query_counts = ints({batch, heads, column_blocks}),
                 query_indices = ints({batch, heads, column_blocks, row_blocks});
    const auto data = [](const Tensor& tensor) { return static_cast<int32_t*>(tensor.data_ptr()); };
    execute({visible.const_data_ptr<bool>(), batch * heads, rows, columns, seqlen_q,
             static_cast<uint32_t*>(bits.data_ptr()), static_cast<bool*>(some.data_ptr()),
             static_cast<bool*>(holes.data_ptr()), data(key_counts), data(key_indices), data(query_counts),
             data(query_indices)},
            mask);
    return {bits, key_counts, key_indices, query_counts, query_indices};
}

}  // namespace flash
