// Which rows a block owns: a tile of one head's queries (forward) or keys (backward).
#pragma once

#include "../../attention/block_mask.h"
#include "../../attention/mask.h"
#include "../../attention/sequence.h"

namespace flash::cuda::sm80 {

struct RowTile {
    int64_t batch, head;
    Sequence sequence;
    Interval rows;   // empty: nothing to do
    Position first;  // of the tile, a multiple of 16 not after the first row
    bool unowned;    // rows past the last packed sequence: they get zeros
};

// Heads per key head, and a query head's key head.
__device__ __forceinline__ int group_of(const ForwardProblem& problem) {
    return uint32_t(problem.heads_q) / uint32_t(problem.heads_k);
}
__device__ __forceinline__ int64_t key_head_of(const ForwardProblem& problem, int64_t head) {
    return uint32_t(head) / uint32_t(group_of(problem));
}

// Cuts one axis of a problem into tiles. Blocks count tiles first, then heads, then batch entries, so that
// blocks that run together read the same keys and values.
struct RowTiling {
    int64_t rows, heads, batch;
    Position tile;
    const int32_t* cu_seqlens;
    BlockLists lists;

    __host__ __device__ static RowTiling of_queries(const ForwardProblem& problem, Position tile) {
        return {problem.cu_seqlens_q ? problem.rows_q : problem.seqlen_q,
                problem.heads_q,
                problem.batch,
                tile,
                problem.cu_seqlens_q,
                problem.key_blocks};
    }
    __host__ __device__ static RowTiling of_keys(const ForwardProblem& problem, Position tile) {
        return {problem.cu_seqlens_k ? problem.rows_k : problem.seqlen_k,
                problem.heads_k,
                problem.batch,
                tile,
                problem.cu_seqlens_k,
                problem.query_blocks};
    }

    // Blocks that don't start at a multiple of 16 leave room for the rows before them.
    __host__ __device__ RowTiles dense_tiles() const {
        return RowTiles(rows, lists, lists.counts && lists.row_block % 16 != 0 ? tile - 16 : tile);
    }
    __host__ __device__ int64_t tiles_per_head() const {
        return cu_seqlens ? PackedTiles{cu_seqlens, batch, rows, tile}.slots() : dense_tiles().count();
    }
    __host__ __device__ int64_t count() const { return tiles_per_head() * heads * (cu_seqlens ? 1 : batch); }

    // descending: a head's last tile first, which under a causal mask is the longest one of queries.
    __device__ __forceinline__ RowTile operator()(uint32_t index, const ForwardProblem& problem, bool queries,
                                                  bool descending) const {
        // 32 bits: 64-bit divisions would keep the block's first loads waiting.
        const uint32_t per_head = uint32_t(tiles_per_head()), of_heads = index / per_head;
        uint32_t slot = index % per_head;
        if (descending) slot = per_head - 1 - slot;
        const int64_t head = of_heads % uint32_t(heads);
        if (!cu_seqlens) {
            const int64_t entry = of_heads / uint32_t(heads);
            const Interval owned = dense_tiles()[Position(slot)];
            return {entry, head, sequence_of(problem, entry), owned, owned.begin / 16 * 16, false};
        }
        const PackedTiles packed{cu_seqlens, batch, rows, tile};
        const int64_t entry = packed.sequence_of_slot(slot);
        const Sequence sequence = entry < batch ? sequence_of(problem, entry) : unowned_rows(problem);
        const int64_t first = (int64_t(slot) - packed.first_slot(entry)) * tile;
        const Interval all{0, queries ? sequence.seqlen_q : sequence.seqlen_k};
        return {entry,           head,          sequence, intersection({first, first + tile}, all),
                Position(first), entry == batch};
    }
};

}  // namespace flash::cuda::sm80
