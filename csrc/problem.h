// The contract between the torch layer and the engines: everything one attention call needs, as plain data.
// Shapes in comments use B batch, Sq and Sk sequence lengths, H query heads, Hk key heads, D head dim, Dv
// value head dim, Tq and Tk packed totals. Dense tensors are [B, S, H, D]; packed ones [T, H, D] with offsets
// in cu_seqlens.
#pragma once

#include <cstdint>

namespace flash {

enum class DType { float16, bfloat16, float32, float64 };

// Rows of a dense or packed tensor. The last dimension is contiguous, the other strides count elements and
// are free (0 for expanded tensors). Packed tensors have batch_stride 0: their rows count from the first
// sequence's first row.
struct TensorView {
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// One number per query row and head: [B, H, Sq] dense, [H, Tq] packed (batch_stride 0); rows are contiguous.
// float, or double where the inputs are float64.
struct RowStatistics {
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

// Which blocks of the other axis each block row visits, as compressed lists (see attention/block_mask.h).
struct BlockLists {
    const int32_t* counts = nullptr;  // [B or 1, H or 1, block rows]
    const int32_t* indices =
        nullptr;               // [B or 1, H or 1, block rows, capacity], ascending; undefined past the count
    int64_t batch_stride = 0;  // in block rows; 0 where one map serves every batch entry
    int64_t head_stride = 0;   // in block rows; 0 where one map serves every head
    int64_t capacity = 0;      // blocks along the other axis
    int64_t row_block = 0;     // rows of a block on this axis
    int64_t column_block = 0;  // rows of a block on the other axis
};

// One number for each score: [B or 1, H or 1, Sq or 1, Sk], rows contiguous; 0 is the stride of what is
// shared.
struct ScoreMatrix {
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
};

// Keys and values that wait in a cache: k and v are [entries, capacity, Hk, D], of which each sequence uses a
// part, or pages [entries, page_size, Hk, D] that a table puts together. Forward only.
struct KeyCache {
    const int32_t* seqlens = nullptr;       // [B] rows in use, counted from row 0; nullptr: all
    const int32_t* left_padding = nullptr;  // [B] rows in front of the first key; nullptr: none
    const int32_t* entry = nullptr;         // [B] of k and v; nullptr: the batch entry's own
    int64_t entries = 0;
    const int32_t* pages = nullptr;  // [B, pages_stride]: row j lies in page [j / page_size]; nullptr: none
    int64_t pages_stride = 0;
    int64_t page_size = 0;
};

struct ForwardProblem {
    DType dtype;
    int64_t batch;
    int64_t heads_q, heads_k;  // heads_k divides heads_q; query head h reads key head h / (heads_q / heads_k)
    int64_t head_dim, head_dim_v;
    int64_t seqlen_q, seqlen_k;             // dense: the lengths; packed: the longest sequence's
    int64_t rows_q, rows_k;                 // rows of a batch entry in memory: Sq and Sk, or Tq and Tk
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1], packed only
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1], packed only, and not with a cache
    KeyCache cache;                         // only of an operator of its own
    TensorView q;                           // [B, Sq, H, D]
    TensorView k;                           // [B, Sk, Hk, D]
    TensorView v;                           // [B, Sk, Hk, Dv]
    TensorView out;                         // [B, Sq, H, Dv]
    RowStatistics lse;                      // [B, H, Sq], natural logarithm
    double softmax_scale;
    double softcap = 0;                   // 0: off
    int64_t window_left = -1;             // keys to the left of the diagonal; -1: all of them
    int64_t window_right = -1;            // keys to the right of the diagonal; -1: all, 0: causal
    const float* alibi_slopes = nullptr;  // [B or 1, H]
    int64_t alibi_batch_stride = 0;
    const int64_t* rng_state = nullptr;  // [2]: seed, offset; read by the engine, never by the host
    uint32_t dropout_threshold = 0;      // a score is dropped if its 16 random bits are below; 0: no dropout
    ScoreMatrix bias;                    // added to the scores, elements as q's; dense problems only
    ScoreMatrix visible;                 // bit j % 32 of word j / 32: key j exists; strides count words; with
                                         // lists of its blocks (attention/score_matrix.h)
    BlockLists key_blocks;               // per query block; counts == nullptr: no block mask
    BlockLists query_blocks;             // per key block, the transpose; the backward's
    // Bits that depend on nothing but the row: of out whatever else is in the batch, of dq over runs. out, dk
    // and dv are bitwise repeatable always.
    bool deterministic = false;
    int64_t splits = 0;  // blocks of a GPU that share the keys of a query tile; 0: as many as fill it
};

// A bool mask to be packed into ForwardProblem::visible, and its blocks to be listed.
struct MaskPacking {
    const bool* mask;  // [matrices, rows, columns]
    int64_t matrices, rows, columns;
    int64_t queries;  // rows, or how many share the one row
    uint32_t* bits;   // [matrices, rows, mask_words(columns)]
    bool* some;       // [matrices, 2 * blocks of rows, 2 * blocks of columns]: a score exists; false on entry
    bool* holes;      // the same: one is hidden
    // BlockLists of each matrix: of its blocks of queries, and the transpose.
    int32_t *key_counts, *key_indices, *query_counts, *query_indices;
};

struct BackwardProblem {
    ForwardProblem forward;  // out and lse hold what the forward wrote
    TensorView dout;         // [B, Sq, H, Dv]
    RowStatistics dlse;      // [B, H, Sq]; data == nullptr: lse has no gradient
    TensorView dq;           // [B, Sq, H, D]
    TensorView dk;           // [B, Sk, Hk, D]
    TensorView dv;           // [B, Sk, Hk, Dv]
    ScoreMatrix dbias;       // float (double); zero on entry; data == nullptr: not wanted
    RowStatistics delta;     // [B, H, Sq] workspace: rowsum(dO * O) - dlse
};

}  // namespace flash
