#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../attention/block_mask.h"
#include "../attention/score_matrix.h"
#include "checks.h"
#include "empty.h"

namespace flash {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxPosition =
    std::numeric_limits<int32_t>::max() / 2;  // positions and their sums fit 32 bits

DType dtype_of(const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Half:
            return DType::float16;
        case ScalarType::BFloat16:
            return DType::bfloat16;
        case ScalarType::Float:
            return DType::float32;
        case ScalarType::Double:
            return DType::float64;
        default:
            break;
    }
    check(false, name, " is ", DtypeAndShapeOf{tensor},
          "; its dtype must be float16, bfloat16, float32 or float64");
    __builtin_unreachable();
}

int64_t window_of(int64_t window) {
    return window < 0 ? -1 : window < kMaxPosition ? window : kMaxPosition;
}

}  // namespace

Arguments::Arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                     const CacheOptions* cache)
    : problem{}, q_(q), k_(k), v_(v) {
    check(cache || options.cu_seqlens_q.has_value() == options.cu_seqlens_k.has_value(),
          "cu_seqlens_q and cu_seqlens_k must be given together");
    for (const auto& [name, tensor] : {std::pair{"q", &q_}, {"k", &k_}, {"v", &v_}}) {
        const bool is_packed = options.cu_seqlens_q && (!cache || tensor == &q_);
        check(tensor->dim() == (is_packed ? 3 : 4), name, " is ", DtypeAndShapeOf{*tensor}, "; it must have ",
              is_packed ? "3 dimensions, [total, heads, head_dim]"
                        : "4 dimensions, [batch, seqlen, heads, head_dim]");
        check_device(name, *tensor, q_);
    }
    problem.dtype = dtype_of("q", q_);
    check_dtype("k", k_, q_.scalar_type(), " as q is; cast one of them");
    check_dtype("v", v_, q_.scalar_type(), " as q is; cast one of them");
    set_shapes(cache);
    set_sequences(options);
    if (cache) set_cache(*cache);
    set_scores(options);
    set_dropout(options);
    problem.bias = score_matrix("attn_bias", options.attn_bias, q_.scalar_type(), problem.seqlen_k);
    problem.visible =
        score_matrix("attn_mask's bits", options.attn_mask, ScalarType::Int, mask_words(problem.seqlen_k));
    check(!options.attn_mask || (options.key_block_counts && options.query_block_counts),
          "attn_mask's bits need the lists of its blocks");
    problem.key_blocks =
        block_lists("query", options.key_block_counts, options.key_block_indices, options.block_size_q,
                    options.block_size_k, problem.seqlen_q, problem.seqlen_k);
    problem.query_blocks =
        block_lists("key", options.query_block_counts, options.query_block_indices, options.block_size_k,
                    options.block_size_q, problem.seqlen_k, problem.seqlen_q);
    problem.q = view(q_);
    problem.k = view(k_);
    problem.v = view(v_);
}

void Arguments::set_shapes(const CacheOptions* cache) {
    const bool dense = q_.dim() == 4;
    const int64_t row = q_.dim() - 3, head = row + 1, dim = row + 2, key_row = k_.dim() - 3;
    problem.batch = dense ? q_.size(0) : 0;
    problem.rows_q = q_.size(row);
    problem.rows_k = k_.size(key_row);
    problem.heads_q = q_.size(head);
    problem.heads_k = k_.size(key_row + 1);
    problem.head_dim = q_.size(dim);
    problem.head_dim_v = v_.size(v_.dim() - 1);
    check(!dense || problem.batch > 0, "q has shape ", ShapeOf{q_}, "; the batch size must be positive");
    check(problem.heads_q > 0 && problem.heads_k > 0 && problem.heads_q % problem.heads_k == 0, "q has ",
          problem.heads_q, " heads and k has ", problem.heads_k, "; k's must be positive and divide q's");
    for (const auto& [name, size] : {std::pair{"q", problem.head_dim}, {"v", problem.head_dim_v}})
        check(size >= 1 && size <= kMaxHeadDim, name, " has head_dim ", size, "; it must be from 1 to ",
              kMaxHeadDim);
    check(problem.rows_q <= kMaxPosition && problem.rows_k <= kMaxPosition, "q has ", problem.rows_q,
          " rows and k ", problem.rows_k, "; at most ", kMaxPosition, " are supported");
    if (k_.dim() == 4) {
        const int64_t entries = cache ? k_.size(0) : problem.batch;
        check_shape("k", k_, {entries, problem.rows_k, problem.heads_k, problem.head_dim});
        check_shape("v", v_, {entries, problem.rows_k, problem.heads_k, problem.head_dim_v});
    } else {
        check_shape("k", k_, {problem.rows_k, problem.heads_k, problem.head_dim});
        check_shape("v", v_, {problem.rows_k, problem.heads_k, problem.head_dim_v});
    }
    problem.seqlen_q = problem.rows_q;
    problem.seqlen_k = problem.rows_k;
}

const int32_t* Arguments::offsets(const char* name, const Tensor& tensor) {
    check(tensor.dim() == 1 && tensor.size(0) >= 2, name, " is ", DtypeAndShapeOf{tensor},
          "; it must have one dimension, of batch + 1 >= 2 offsets");
    check(tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long, name, " is ",
          DtypeAndShapeOf{tensor}, "; its dtype must be int32 (or int64)");
    check_device(name, tensor, q_);
    kept_.push_back(torch::stable::contiguous(torch::stable::to(tensor, ScalarType::Int)));
    return kept_.back().const_data_ptr<int32_t>();
}

// Reads the offsets: on the CPU only.
int64_t Arguments::longest_sequence(const char* name, const Tensor& tensor, int64_t total) const {
    // As given and before narrowing, so that no offset wraps into a plausible one.
    const Tensor wide = torch::stable::contiguous(torch::stable::to(tensor, ScalarType::Long));
    const int64_t* values = wide.const_data_ptr<int64_t>();
    const int64_t batch = tensor.size(0) - 1;
    check(values[0] == 0, name, "[0] is ", values[0], "; the first sequence must start at row 0");
    int64_t longest = 0;
    for (int64_t i = 0; i < batch; ++i) {
        check(values[i + 1] >= values[i], name, " decreases from ", values[i], " to ", values[i + 1],
              " at index ", i + 1, "; it must never decrease");
        longest = std::max(longest, values[i + 1] - values[i]);
    }
    check(values[batch] <= total, name, " ends at ", values[batch], ", but there are only ", total, " rows");
    return longest;
}

void Arguments::set_sequences(const Options& options) {
    if (!options.cu_seqlens_q) return;
    check(!options.cu_seqlens_k || options.cu_seqlens_q->numel() == options.cu_seqlens_k->numel(),
          "cu_seqlens_q has ", options.cu_seqlens_q->numel(), " offsets and cu_seqlens_k ",
          options.cu_seqlens_k ? options.cu_seqlens_k->numel() : 0, "; they must be as many");
    check(options.max_seqlen_q >= 0 && options.max_seqlen_k >= 0, "max_seqlen_q is ", options.max_seqlen_q,
          " and max_seqlen_k ", options.max_seqlen_k, "; they must not be negative");
    const auto set = [&](const char* name, const Tensor& tensor, const char* max_name, int64_t max_seqlen,
                         int64_t rows, const int32_t*& cu_seqlens, int64_t& seqlen) {
        cu_seqlens = offsets(name, tensor);
        // On a GPU the longest length is as given, and the kernels clamp the offsets: reading them here would
        // wait for all work before.
        seqlen = std::min(max_seqlen, rows);
        if (!q_.is_cpu()) return;
        seqlen = longest_sequence(name, tensor, rows);
        check(seqlen <= max_seqlen, max_name, " is ", max_seqlen, ", but ", name, " has a sequence of ",
              seqlen);
    };
    set("cu_seqlens_q", *options.cu_seqlens_q, "max_seqlen_q", options.max_seqlen_q, problem.rows_q,
        problem.cu_seqlens_q, problem.seqlen_q);
    if (options.cu_seqlens_k)
        set("cu_seqlens_k", *options.cu_seqlens_k, "max_seqlen_k", options.max_seqlen_k, problem.rows_k,
            problem.cu_seqlens_k, problem.seqlen_k);
    problem.batch = options.cu_seqlens_q->numel() - 1;
}

// One number a sequence; on the CPU each is checked.
const int32_t* Arguments::numbers(const char* name, const Tensor& tensor, int64_t least, int64_t most) {
    check_dtype(name, tensor, ScalarType::Int, "");
    check_shape(name, tensor, {problem.batch});
    check_device(name, tensor, q_);
    kept_.push_back(torch::stable::contiguous(tensor));
    const int32_t* values = kept_.back().const_data_ptr<int32_t>();
    for (int64_t i = 0; q_.is_cpu() && i < problem.batch; ++i)
        check(least <= values[i] && values[i] <= most, name, "[", i, "] is ", values[i], "; it must be from ",
              least, " to ", most);
    return values;
}

void Arguments::set_cache(const CacheOptions& cache) {
    KeyCache& to = problem.cache;
    to.entries = k_.size(0);
    check(to.entries > 0, "k has shape ", ShapeOf{k_}, "; a cache must have an entry");
    check(cache.block_table || cache.entry || to.entries == problem.batch, "the cache has ", to.entries,
          " entries and q a batch of ", problem.batch, "; give cache_batch_idx, or as many");
    if (cache.block_table) {
        const Tensor& table = *cache.block_table;
        check(!q_.is_cpu(), "block_table is for GPUs; on the CPU put the pages together first");
        check(!cache.entry && !cache.left_padding,
              "block_table goes with neither cache_batch_idx nor cache_leftpad");
        check_dtype("block_table", table, ScalarType::Int, "");
        check_device("block_table", table, q_);
        check(table.dim() == 2 && table.size(0) == problem.batch, "block_table has shape ", ShapeOf{table},
              "; it must be [", problem.batch, ", pages of a sequence]");
        check(cache.seqlens.has_value(), "block_table is given without cache_seqlens");
        to.page_size = problem.rows_k;
        check(to.page_size > 0 && to.page_size % 16 == 0, "pages have ", to.page_size,
              " rows; it must be a positive multiple of 16");
        kept_.push_back(torch::stable::contiguous(table));
        to.pages = kept_.back().const_data_ptr<int32_t>();
        to.pages_stride = table.size(1);
        problem.rows_k = problem.seqlen_k = to.page_size * table.size(1);
        check(problem.rows_k <= kMaxPosition, "block_table holds ", problem.rows_k, " rows; at most ",
              kMaxPosition, " are supported");
    }
    if (cache.seqlens) to.seqlens = numbers("cache_seqlens", *cache.seqlens, 0, problem.rows_k);
    if (cache.left_padding)
        to.left_padding = numbers("cache_leftpad", *cache.left_padding, 0, problem.rows_k);
    if (cache.entry) to.entry = numbers("cache_batch_idx", *cache.entry, 0, to.entries - 1);
}

void Arguments::set_scores(const Options& options) {
    check(std::isfinite(options.softmax_scale), "softmax_scale is ", options.softmax_scale,
          "; it must be finite");
    check(std::isfinite(options.softcap) && options.softcap >= 0, "softcap is ", options.softcap,
          "; it must be finite and at least 0 (0: off)");
    problem.softmax_scale = options.softmax_scale;
    problem.deterministic = options.deterministic;
    problem.softcap = options.softcap;
    problem.window_left = window_of(options.window_size_left);
    problem.window_right = window_of(options.window_size_right);
    if (!options.alibi_slopes) return;
    const Tensor& slopes = *options.alibi_slopes;
    check_dtype("alibi_slopes", slopes, ScalarType::Float, "");
    check_device("alibi_slopes", slopes, q_);
    const bool per_batch = slopes.dim() == 2;
    check((slopes.dim() == 1 || (per_batch && slopes.size(0) == problem.batch)) &&
              slopes.size(slopes.dim() - 1) == problem.heads_q,
          "alibi_slopes has shape ", ShapeOf{slopes}, "; it must be [", problem.heads_q, "] (heads) or [",
          problem.batch, ", ", problem.heads_q, "] (batch, heads)");
    kept_.push_back(torch::stable::contiguous(slopes));
    problem.alibi_slopes = kept_.back().const_data_ptr<float>();
    problem.alibi_batch_stride = per_batch ? problem.heads_q : 0;
}

void Arguments::set_dropout(const Options& options) {
    check(options.dropout_p >= 0 && options.dropout_p < 1, "dropout_p is ", options.dropout_p,
          "; it must be at least 0 and below 1");
    if (options.dropout_p == 0) return;
    check(options.softcap == 0, "softcap is ", options.softcap, " and dropout_p ", options.dropout_p,
          "; softcap does not support dropout");
    check(options.rng_state.has_value(), "dropout_p is ", options.dropout_p, ", so rng_state must be given");
    check_dtype("rng_state", *options.rng_state, ScalarType::Long, "");
    check_shape("rng_state", *options.rng_state, {2});
    check_device("rng_state", *options.rng_state, q_);
    kept_.push_back(torch::stable::contiguous(*options.rng_state));
    problem.rng_state = kept_.back().const_data_ptr<int64_t>();
    const double threshold = std::round(options.dropout_p * 65536);
    problem.dropout_threshold = uint32_t(threshold < 65535 ? threshold : 65535);
}

ScoreMatrix Arguments::score_matrix(const char* name, const OptionalTensor& tensor, ScalarType dtype,
                                    int64_t columns) {
    if (!tensor) return {};
    check(!packed(), name, " does not support packed sequences");
    check_dtype(name, *tensor, dtype, dtype == ScalarType::Int ? "" : " as q is");
    check_device(name, *tensor, q_);
    const int64_t sizes[] = {problem.batch, problem.heads_q, problem.seqlen_q};
    bool fits = tensor->dim() == 4 && tensor->size(3) == columns;
    for (int i = 0; fits && i < 3; ++i) fits = tensor->size(i) == sizes[i] || tensor->size(i) == 1;
    check(fits, name, " has shape ", ShapeOf{*tensor}, "; it must be [1 or ", problem.batch, ", 1 or ",
          problem.heads_q, ", 1 or ", problem.seqlen_q, ", ", columns, "]");
    bool kept_as_is =
        (columns <= 1 || tensor->stride(3) == 1) && tensor->stride(2) < int64_t(1) << 31;  // kernels' strides
    // Bits are read 16 bytes at a time, and on a GPU a bias, too.
    const bool aligned = dtype == ScalarType::Int || tensor->is_cuda();
    const int64_t width = 16 / int64_t(tensor->element_size());
    if (aligned) {
        kept_as_is &= reinterpret_cast<uintptr_t>(tensor->data_ptr()) % 16 == 0;
        for (int i = 0; i < 3; ++i) kept_as_is &= tensor->size(i) == 1 || tensor->stride(i) % width == 0;
    }
    if (kept_as_is) {
        kept_.push_back(*tensor);
    } else {
        const int64_t room = aligned ? (columns + width - 1) / width * width : columns;
        Tensor padded = new_empty(*tensor, {tensor->size(0), tensor->size(1), tensor->size(2), room}, dtype);
        Tensor rows = torch::stable::narrow(padded, 3, 0, columns);
        torch::stable::copy_(rows, *tensor);
        kept_.push_back(rows);
    }
    return score_matrix_of(kept_.back());
}

ScoreMatrix score_matrix_of(const Tensor& tensor) {
    const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
    return {tensor.data_ptr(), stride(0), stride(1), stride(2)};
}

BlockLists Arguments::block_lists(const char* axis, const OptionalTensor& counts,
                                  const OptionalTensor& indices, int64_t row_block, int64_t column_block,
                                  int64_t rows, int64_t columns) {
    BlockLists lists;
    if (!counts || !indices) return lists;
    check(!packed(), "block masks do not support packed sequences");
    check(row_block > 0 && column_block > 0, "the ", axis, " blocks have sizes ", row_block, " and ",
          column_block, "; they must be positive");
    const int64_t block_rows = (rows + row_block - 1) / row_block,
                  capacity = (columns + column_block - 1) / column_block;
    for (const auto& [part, tensor] : {std::pair{"counts", &*counts}, {"indices", &*indices}}) {
        const std::string name = std::string("the mask's ") + axis + " block " + part;
        check_dtype(name.c_str(), *tensor, ScalarType::Int, "");
        check_device(name.c_str(), *tensor, q_);
        check(tensor->dim() == (tensor == &*counts ? 3 : 4) &&
                  (tensor->size(0) == 1 || tensor->size(0) == problem.batch) &&
                  (tensor->size(1) == 1 || tensor->size(1) == problem.heads_q) &&
                  tensor->size(2) == block_rows,
              name, " have shape ", ShapeOf{*tensor}, "; they must be [1 or ", problem.batch, ", 1 or ",
              problem.heads_q, ", ", block_rows, "...] for blocks of ", row_block, " and ", rows, " rows");
    }
    check_shape("the mask's block indices", *indices,
                {counts->size(0), counts->size(1), block_rows, capacity});
    check(capacity < 1 << kBlockBits, "the mask has ", capacity, " blocks along the other axis of its ", axis,
          " blocks; there must be fewer than ", 1 << kBlockBits);
    kept_.push_back(torch::stable::contiguous(*counts));
    lists.counts = kept_.back().const_data_ptr<int32_t>();
    kept_.push_back(torch::stable::contiguous(*indices));
    lists.indices = kept_.back().const_data_ptr<int32_t>();
    lists.batch_stride = counts->size(0) == 1 ? 0 : counts->size(1) * block_rows;
    lists.head_stride = counts->size(1) == 1 ? 0 : block_rows;
    lists.capacity = capacity;
    lists.row_block = row_block;
    lists.column_block = column_block;
    if (q_.is_cpu()) check_block_indices(axis, lists, counts->numel());
    return lists;
}

void Arguments::check_block_indices(const char* axis, const BlockLists& lists, int64_t block_rows) const {
    for (int64_t row = 0; row < block_rows; ++row) {
        check(lists.counts[row] >= 0 && lists.counts[row] <= lists.capacity, "the mask lists ",
              lists.counts[row], " blocks in ", axis, " block row ", row, " of ", lists.capacity);
        for (int64_t i = 0; i < lists.counts[row]; ++i) {
            const int32_t* const listed = lists.indices + row * lists.capacity + i;
            const int64_t index = block_of(*listed), before = i ? block_of(listed[-1]) : -1;
            check(index < lists.capacity && index > before, "the mask's ", axis, " block row ", row,
                  " lists block ", index, "; blocks must ascend below ", lists.capacity);
        }
    }
}

TensorView Arguments::view(const Tensor& tensor) {
    const int64_t dims = tensor.dim();
    const auto of = [&](const Tensor& x) -> TensorView {
        return {x.data_ptr(), dims == 4 ? x.stride(0) : 0, x.stride(dims - 3), x.stride(dims - 2)};
    };
    if (tensor.size(dims - 1) == 1 || tensor.stride(dims - 1) == 1) return of(tensor);
    kept_.push_back(torch::stable::contiguous(tensor));
    return of(kept_.back());
}

ScalarType Arguments::accumulation_dtype() const {
    return problem.dtype == DType::float64 ? ScalarType::Double : ScalarType::Float;
}

Tensor Arguments::new_rows_like(const Tensor& tensor, int64_t head_dim) const {
    std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
    sizes.back() = head_dim;
    return new_empty(tensor, sizes, tensor.scalar_type());
}

Tensor Arguments::new_statistics() const {
    const std::vector<int64_t> sizes = packed() ? std::vector{problem.heads_q, problem.rows_q}
                                                : std::vector{problem.batch, problem.heads_q, problem.rows_q};
    return new_empty(q_, sizes, accumulation_dtype());
}

RowStatistics Arguments::statistics_of(const Tensor& tensor) const {
    const int64_t head_stride = problem.rows_q;
    return {tensor.data_ptr(), packed() ? 0 : problem.heads_q * head_stride, head_stride};
}

}  // namespace flash
