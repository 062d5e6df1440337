// dS in device memory, from the kernel that computes it for dK to the one that multiplies it for dQ: neither
// scores nor dP are computed twice, five products instead of seven. It is there for some heads at a time, so
// many as keep the device busy, which bounds the memory; where one head needs more there is none. Rounded, as
// products take it, in the order in which a warp of the one kernel has it and a warp of the other
// loads it: for 64 keys and 16 queries 8 x 8 blocks, [4 times 16 keys, halves of those, halves of the
// queries], a row of 8 queries for each key.
#pragma once

#include <cmath>
#include <cstdlib>

#include "../any/key_tiles.h"
#include "../ptx/global.h"
#include "../tile/warp_product.h"
#include "score_gradient_rows.h"

namespace flash::cuda::sm90 {

struct ScoreGradients {
    static constexpr int kStepBytes = 16 * ScoreGradientRows::kQueries * 2;  // of 16 keys
    static constexpr int kGroupBytes = 64 * ScoreGradientRows::kQueries * 2;

    char* data = nullptr;  // [heads, tiles of keys, groups of queries]; nullptr: nothing is stored
    uint32_t* bad_keys;    // 1 if a key that somebody sees is not finite, else 0
    int64_t first_head;    // of all batch entries
    int64_t head_groups;
    bool beside;  // the grid before may still run: it multiplies what is in another place, or computes delta
    ScoreGradientRows rows;

    __device__ __forceinline__ char* at(int64_t head, Position key, Position query) const {
        const int64_t groups = (head - first_head) * head_groups +
                               rows.of_query_0(key / ScoreGradientRows::kKeys) +
                               query / ScoreGradientRows::kQueries;
        return data + groups * kGroupBytes;
    }
    // Of what a group of queries has, where a thread of the warpgroup begins to store.
    __device__ __forceinline__ static uint32_t place_of(uint32_t thread) {
        return thread / 32 * kStepBytes + thread % 32 * 4;
    }
    // From what at() says of a batch entry's head 0 and query 0.
    __device__ __forceinline__ int64_t offset(int head, Position query) const {
        return (head * head_groups + query / ScoreGradientRows::kQueries) * kGroupBytes;
    }
};

// How many key heads' dS is in memory at a time, and where: while one place is multiplied by the keys, the
// other one, if there are two, is filled.
class ScoreGradientSpace {
  public:
    // MiB for each multiprocessor: of 132 two places for 16384 queries and keys of a head.
    static constexpr int kMegabytes = 9;

    // query_tile: that is stored at once; copied: queries that are copied at once.
    ScoreGradientSpace(const ForwardProblem& problem, int query_tile, int copied, const Device& device)
        : key_heads_(problem.heads_k * problem.batch),
          group_(RowTiling::group_of(problem)),
          overhang_(copied * ScoreGradientRows::kKeys * 2) {
        if (has_map(problem) || problem.cu_seqlens_q || problem.cu_seqlens_k) return;
        if (key_heads_ == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0) return;
        rows_ = ScoreGradientRows(problem.seqlen_q, problem.seqlen_k, problem.window_left,
                                  problem.window_right, query_tile);
        head_groups_ = rows_.count(problem.seqlen_k);
        const char* const wish = std::getenv("FLASH_ATTN_SCORE_GRADIENT_MIB");  // 0: none
        const double megabytes = wish ? std::atof(wish) : kMegabytes * device.multiprocessors;
        choose(int64_t(megabytes * (1 << 20)), Times(problem, copied, device), wish);
    }

    bool exists() const { return at_once_ > 0; }
    // Copies of whole tiles read before the first group, and behind the last one.
    int64_t bytes() const { return exists() ? places_ * place_bytes() + 2 * overhang_ : 0; }

    // Calls launch(first key head, how many, ScoreGradients) for all of them. begins_beside: the first ones
    // run beside the grid before.
    template <class Launch>
    void each(char* space, uint32_t* bad_keys, bool begins_beside, const Launch& launch) const {
        for (int64_t first = 0, i = 0; first < key_heads_; first += at_once_, ++i) {
            const bool beside = i > 0 ? places_ > 1 : begins_beside;
            char* const place = space + overhang_ + i % places_ * place_bytes();
            launch(first, std::min(at_once_, key_heads_ - first),
                   ScoreGradients{place, bad_keys, first * group_, head_groups_, beside, rows_});
        }
    }

  private:
    // In what a multiprocessor takes for a tile of keys, whose four products run at 1.25 of the fifth's rate.
    struct Times {
        double keys, queries;  // of a key head, all multiprocessors
        double query_tile;     // of a tile of queries, one of them
        double seven;          // what the walk that computes scores twice takes, of what is least here
        bool diagonal;

        Times(const ForwardProblem& problem, int copied, const Device& device)
            : seven(problem.head_dim > 192 ? 1.18 : 1.12), diagonal(has_diagonal(problem)) {
            const double group = double(RowTiling::group_of(problem)), blocks = device.multiprocessors;
            constexpr int kKeys = ScoreGradientRows::kKeys;
            keys = double((problem.seqlen_k + kKeys - 1) / kKeys) / blocks;
            query_tile = 1.25 * copied / (4 * kKeys) * double(problem.seqlen_k) /
                         (group * double(problem.seqlen_q));
            queries = double((problem.seqlen_q + copied - 1) / copied) * group / blocks * query_tile;
        }

        double least(int64_t heads) const { return double(heads) * (keys + queries) / (diagonal ? 2 : 1); }
        // beside: dQ's kernel and the next heads' other one fill a third of each other's ends, as measured.
        // Under a diagonal the longest tiles come first, and little is idle.
        double of(int64_t heads, bool beside) const {
            const double of_keys = double(heads) * keys, of_queries = double(heads) * queries;
            const double all = least(heads);
            if (diagonal)
                return 0.2 + (beside ? all : of_keys / 2 + std::max(of_queries / 2, query_tile));
            const double rounds = std::ceil(of_keys) + std::ceil(of_queries / query_tile) * query_tile;
            return beside ? all + 0.65 * (rounds - all) : rounds;
        }
        double of_all(int64_t heads, int64_t at_once, bool beside) const {
            const int64_t rest = heads % at_once;
            return double(heads / at_once) * of(at_once, beside) + (rest > 0 ? of(rest, beside) : 0);
        }
    };

    // asked: for this much memory. Else heads that fill the device badly are left to the walk for dQ.
    void choose(int64_t most, const Times& times, bool asked) {
        const int64_t of_each = std::max<int64_t>(group_ * head_groups_ * ScoreGradients::kGroupBytes, 1);
        if (of_each > most) return;
        if (key_heads_ <= most / of_each) {
            at_once_ = key_heads_;
            return;
        }
        places_ = most / of_each > 1 ? 2 : 1;
        const int64_t room = most / places_ / of_each;
        double best = asked ? HUGE_VAL : times.seven * times.least(key_heads_);
        for (int64_t heads = room; heads > room / 2 && heads > room - 32; --heads) {
            const double time = times.of_all(key_heads_, heads, places_ > 1);
            if (time >= best) continue;
            best = time;
            const int64_t turns = (key_heads_ + heads - 1) / heads;
            at_once_ = (key_heads_ + turns - 1) / turns;
        }
    }

    int64_t place_bytes() const { return at_once_ * group_ * head_groups_ * ScoreGradients::kGroupBytes; }

    int64_t key_heads_, group_, overhang_;
    ScoreGradientRows rows_;
    int64_t head_groups_;               // of a query head
    int64_t at_once_ = 0, places_ = 1;  // key heads of a place, and places
};

// By a warpgroup: dS^T of 64 keys. to: what at() says, and place_of().
template <DType dtype, int kColumns>
__device__ __forceinline__ void store_score_gradients(char* to,
                                                      const RegisterOperand<dtype, 16, kColumns>& ds) {
    constexpr int block[4] = {0, 2, 1, 3};  // of the operand's registers
    char* const mine = opaque(to);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_global(mine + k * ScoreGradients::kGroupBytes + block[i] * 128, ds.value[k][0][i]);
}

// By a warp, from shared memory: dS of 16 queries and 64 keys. lane_first: of the group, and 16 bytes a lane.
template <DType dtype>
__device__ __forceinline__ void load_score_gradients(RegisterOperand<dtype, 16, 64>& ds,
                                                     uint32_t lane_first) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        ldmatrix_x4_transposed(ds.value[k][0], lane_first + k * ScoreGradients::kStepBytes);
}

}  // namespace flash::cuda::sm90
