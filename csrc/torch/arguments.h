// From the operators' arguments to a ForwardProblem. The tensors that the problem points into live as long as
// this.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "../problem.h"

namespace flash {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The arguments that all attention operators share, in the order of their schemas (library.cpp).
struct Options {
    OptionalTensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k;
    OptionalTensor alibi_slopes, rng_state;
    OptionalTensor key_block_counts, key_block_indices, query_block_counts, query_block_indices;
    int64_t block_size_q, block_size_k;
    double dropout_p, softmax_scale;
    int64_t window_size_left, window_size_right;
    double softcap;
    bool deterministic;  // of the backward; the CPU engine always is
    OptionalTensor attn_bias, attn_mask;

    static Options plain(double softmax_scale, int64_t window_size_left, int64_t window_size_right,
                         bool deterministic) {
        Options options{};
        options.softmax_scale = softmax_scale;
        options.window_size_left = window_size_left, options.window_size_right = window_size_right;
        options.deterministic = deterministic;
        return options;
    }
};

// Where k and v are a cache: [entries, capacity, Hk, D], or [pages, page_size, Hk, D] with a block table. All
// int32, one number a sequence; the table [B, pages of a sequence].
struct CacheOptions {
    OptionalTensor seqlens, left_padding, entry, block_table;
};

// Of a tensor [B or 1, H or 1, Sq or 1, Sk] whose rows are contiguous.
ScoreMatrix score_matrix_of(const Tensor& tensor);

class Arguments {
  public:
    // Checks everything; throws std::runtime_error. problem.out and problem.lse are left to the caller. With
    // a cache options.cu_seqlens_q alone says whether q is packed.
    Arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
              const CacheOptions* cache = nullptr);

    bool packed() const { return problem.cu_seqlens_q != nullptr; }

    ForwardProblem problem;

    // out-like: q's shape with the last dimension replaced.
    Tensor new_rows_like(const Tensor& tensor, int64_t head_dim) const;
    // lse-like: [B, H, Sq] or [H, Tq] in the accumulation type.
    Tensor new_statistics() const;
    RowStatistics statistics_of(const Tensor& tensor) const;
    // A tensor shaped like q (query rows) or k (key rows), with a contiguous last dimension. If that takes a
    // copy, it lives as long as this; the tensor itself is the caller's to hold.
    TensorView view(const Tensor& tensor);
    torch::headeronly::ScalarType accumulation_dtype() const;

  private:
    void set_shapes(const CacheOptions* cache);
    void set_sequences(const Options& options);
    void set_cache(const CacheOptions& cache);
    const int32_t* numbers(const char* name, const Tensor& tensor, int64_t least, int64_t most);
    void set_scores(const Options& options);
    void set_dropout(const Options& options);
    ScoreMatrix score_matrix(const char* name, const OptionalTensor& tensor, ScalarType dtype,
                             int64_t columns);
    BlockLists block_lists(const char* axis, const OptionalTensor& counts, const OptionalTensor& indices,
                           int64_t row_block, int64_t column_block, int64_t rows, int64_t columns);
    void check_block_indices(const char* axis, const BlockLists& lists, int64_t block_rows) const;
    const int32_t* offsets(const char* name, const Tensor& tensor);
    int64_t longest_sequence(const char* name, const Tensor& tensor, int64_t total) const;

    Tensor q_, k_, v_;
    std::vector<Tensor> kept_;
};

}  // namespace flash
