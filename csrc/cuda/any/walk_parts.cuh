// What a block walks with a tile of keys, in parts: some of the query heads of the keys' group, or, of a head
// alone, some of the queries; another block walks another part. In one walk blocks end at very different
// times where tiles of keys are few. And those that began together drift apart, since under a diagonal each
// walks another length, so that queries, gradients and sums of whole groups have to fit into the cache.
//
// In a row the first heads of all groups come first, then all second ones, and each part goes on with what
// the one before has left of dK and dV: in fp32, as threads have it. Additions are in the order of the heads,
// as in one walk, so that results don't depend on how many parts there are. Where tiles are so few that a
// part would have to wait for the one before, parts are walked at once, each from zero, and the last one to
// end adds all up, in their order.
#pragma once

#include "../ptx/counter.h"
#include "../tile/fragment.h"
#include "row_tile.cuh"

namespace flash::cuda {

class WalkParts {
  public:
    // key_heads: of all batch entries. A unit is a part of a key head's walks.
    static WalkParts whole(int64_t key_heads) { return {1, key_heads, true}; }
    static WalkParts of_heads_in_a_row(int64_t parts, int64_t key_heads) { return {parts, key_heads, true}; }
    static WalkParts of_heads_at_once(int64_t parts, int64_t key_heads) { return {parts, key_heads, false}; }
    // Of so many queries; heads have no groups.
    static WalkParts of_queries_at_once(int64_t parts, int64_t key_heads, int64_t queries) {
        WalkParts parts_of_queries(parts, key_heads, false);
        if (parts > 1) parts_of_queries.queries_ = Position(queries);
        return parts_of_queries;
    }

    FLASH_HOST_DEVICE bool divide() const { return parts_.divisor > 1; }
    bool in_a_row() const { return in_a_row_; }
    int64_t key_heads() const { return key_heads_.divisor; }
    int64_t parts_of_queries() const { return of_queries() ? parts_.divisor : 1; }
    FLASH_HOST_DEVICE bool of_queries() const { return queries_ > 0; }
    // As if a unit were a key head.
    ForwardProblem of(const ForwardProblem& problem) const {
        ForwardProblem in_parts = problem;
        in_parts.heads_k *= parts_.divisor;
        return in_parts;
    }

    // Units are counted as they are walked, heads as the tensors have them.
    FLASH_HOST_DEVICE uint32_t part(uint32_t unit) const {
        return in_a_row_ ? key_heads_.quotient(unit) : parts_.remainder(unit);
    }
    FLASH_HOST_DEVICE uint32_t key_head_of_all(uint32_t unit) const {
        return in_a_row_ ? key_heads_.remainder(unit) : parts_.quotient(unit);
    }
    FLASH_HOST_DEVICE uint32_t unit_of_heads(uint32_t unit) const {
        return key_head_of_all(unit) * parts_.divisor + part(unit);
    }
    // tiling: of the problem in parts (of()).
    __device__ __forceinline__ RowTile tile(const RowTiling& tiling, TileOrder::Place place,
                                            const ForwardProblem& problem, bool descending) const {
        place.head = unit_of_heads(place.head);
        RowTile tile = tiling(place, problem, descending);
        tile.key_head = parts_.quotient(uint32_t(tile.head));
        if (of_queries()) tile.head = tile.key_head;
        return tile;
    }
    // The same for all parts of a tile of keys. tiles: of a head.
    FLASH_HOST_DEVICE uint32_t tile_of_all(const TileOrder::Place& place, uint32_t tiles) const {
        return key_head_of_all(place.head) * tiles + place.tile;
    }
    FLASH_HOST_DEVICE Interval queries(uint32_t part) const {
        const Position first = Position(part) * queries_;
        return of_queries() ? Interval{first, first + queries_} : Interval{0, INT32_MAX};
    }

    // Counters, zero at the start, in multiples of 256; then what parts leave. tiles: of keys, of a key head.
    int64_t counter_bytes(int64_t tiles, int warps) const {
        const int64_t bytes = key_heads_.divisor * tiles * warps * int64_t(sizeof(uint32_t));
        return divide() ? (bytes + 255) / 256 * 256 : 0;
    }
    int64_t bytes(int64_t tiles, int64_t tile_elements) const {
        const int64_t places = in_a_row_ ? 1 : parts_.divisor;
        return divide() ? key_heads_.divisor * tiles * places * tile_elements * int64_t(sizeof(float)) : 0;
    }
    void lie_at(void* counters, void* gradients) {
        done_ = static_cast<uint32_t*>(counters);
        gradients_ = static_cast<float*>(gradients);
    }

    // By each warp before it walks: gradients, which are zero, as the part before has left them. tile: of
    // keys, of all key heads; kTiles: of 16 x 8, of all gradients that a thread may have.
    template <int kThreads, int kTiles, class... Gradients>
    __device__ __forceinline__ void begin(uint32_t part, uint32_t tile, uint32_t thread,
                                          Gradients&... gradients) const {
        if (part == 0 || !in_a_row_) return;
        while (__any_sync(0xffffffff, load_acquire(done_of<kThreads>(tile, thread)) < part)) __nanosleep(50);
        const float4* const from = place_of<kThreads, kTiles>(tile, thread);
        each([&](int i, auto& x) { set(x, __ldcg(from + i * kThreads)); }, gradients...);
    }
    // Behind it. True if the gradients are all of the group's.
    template <int kThreads, int kTiles, class... Gradients>
    __device__ __forceinline__ bool end(uint32_t part, uint32_t tile, uint32_t thread,
                                        Gradients&... gradients) const {
        const uint32_t last = parts_.divisor - 1;
        if (part == last && in_a_row_) return true;
        leave<kThreads, kTiles>(part, tile, thread, gradients...);
        __syncwarp();
        uint32_t before = 0;
        if (thread % 32 == 0) before = add_acquire_release(done_of<kThreads>(tile, thread), 1);
        if (in_a_row_ || __shfl_sync(0xffffffff, before, 0) != last) return false;
        add_up<kThreads, kTiles>(tile, thread, gradients...);
        return true;
    }
    // The same where a block's warps go on together, of parts at once. shared: of the block, to tell it.
    template <int kThreads, int kTiles, class... Gradients>
    __device__ __forceinline__ bool end_of_block(uint32_t part, uint32_t tile, bool& shared,
                                                 Gradients&... gradients) const {
        if (parts_.divisor == 1) return true;
        leave<kThreads, kTiles>(part, tile, threadIdx.x, gradients...);
        __syncthreads();
        if (threadIdx.x == 0)
            shared = add_acquire_release(done_of<kThreads>(tile, 0), 1) == parts_.divisor - 1;
        __syncthreads();
        if (!shared) return false;
        add_up<kThreads, kTiles>(tile, threadIdx.x, gradients...);
        return true;
    }

  private:
    WalkParts(int64_t parts, int64_t key_heads, bool in_a_row)
        : parts_(uint32_t(parts)), key_heads_(uint32_t(key_heads)), in_a_row_(in_a_row || parts == 1) {}

    template <int kThreads, int kTiles, class... Gradients>
    __device__ __forceinline__ void leave(uint32_t part, uint32_t tile, uint32_t thread,
                                          Gradients&... gradients) const {
        const uint32_t place = in_a_row_ ? tile : tile * parts_.divisor + part;
        float4* const to = place_of<kThreads, kTiles>(place, thread);
        each([&](int i, auto& x) { __stcg(to + i * kThreads, get(x)); }, gradients...);
    }
    template <int kThreads, int kTiles, class... Gradients>
    __device__ __forceinline__ void add_up(uint32_t tile, uint32_t thread, Gradients&... gradients) const {
        (gradients.clear(), ...);
#pragma unroll 1
        for (uint32_t part = 0; part < parts_.divisor; ++part) {
            const float4* const from = place_of<kThreads, kTiles>(tile * parts_.divisor + part, thread);
            each([&](int i, auto& x) { add(x, __ldcg(from + i * kThreads)); }, gradients...);
        }
    }

    template <int kThreads>
    __device__ __forceinline__ uint32_t* done_of(uint32_t tile, uint32_t thread) const {
        return done_ + (tile * (kThreads / 32) + thread / 32);
    }
    template <int kThreads, int kTiles>
    __device__ __forceinline__ float4* place_of(uint32_t place, uint32_t thread) const {
        return reinterpret_cast<float4*>(gradients_) + int64_t(place) * (kTiles * kThreads) + thread;
    }
    template <class Visit, class... Gradients>
    __device__ __forceinline__ static void each(const Visit& visit, Gradients&... gradients) {
        int i = 0;
        const auto of_one = [&](auto& gradient) {
#pragma unroll
            for (auto& row : gradient.value)
#pragma unroll
                for (auto& x : row) visit(i++, x);
        };
        (of_one(gradients), ...);
    }
    __device__ __forceinline__ static void set(float (&x)[4], const float4& from) {
        x[0] = from.x, x[1] = from.y, x[2] = from.z, x[3] = from.w;
    }
    __device__ __forceinline__ static void add(float (&x)[4], const float4& y) {
        x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
    }
    __device__ __forceinline__ static float4 get(const float (&x)[4]) {
        return make_float4(x[0], x[1], x[2], x[3]);
    }

    Division parts_, key_heads_;
    bool in_a_row_;
    Position queries_ = 0;        // of a part; 0: all, of some of the group's heads
    uint32_t* done_ = nullptr;    // of each tile of keys and warp: so many parts
    float* gradients_ = nullptr;  // [key heads, tiles, parts or 1, tiles of 16 x 8, threads, 4]
};

}  // namespace flash::cuda
