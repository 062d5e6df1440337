// Where dQ is summed up while blocks walk by keys: fp32 additions in device memory, from which nobody knows
// which one is the last.
//
// Sums of all of dQ, cleared before the walk and rounded after it, go through device memory four times at
// twice dQ's size, which for short sequences is a fifth of the time. There a few places for sums are enough,
// which stay in the second-level cache. A unit is what the blocks of one key head add to: the sums of its
// group's query heads, of one batch entry (of all, where sequences are packed). The last block of a unit
// rounds its sums to dQ and clears their place for a later unit, whose blocks wait for that before they add.
// They wait for blocks of lower indices alone, which the device starts first (as single-pass scans assume,
// too), and there are so many places that those are done by then.
//
// For long sequences one block would be at a unit for long, and little is gained; and where heads go in large
// sections, so many units are begun at once that the cache doesn't hold them. Then all units have places,
// cleared at the start, and finish_dq rounds them. (On sm90 mostly beside the walk: sm90/dq_zeros.cuh,
// sm90/dq_finish.cuh. There blocks often know which addition is the first:
// sm90/backward_dq.cuh.)
#pragma once

#include <algorithm>

#include "../ptx/barrier.h"
#include "../ptx/counter.h"
#include "../ptx/reduce.h"
#include "../tile/warp_product.h"
#include "loader.cuh"
#include "row_tile.cuh"

namespace flash::cuda {

class DqSums {
  public:
    // Nothing is summed.
    explicit DqSums(const RowTiling& queries) : queries_(queries), places_(1), unit_tiles_(1) {}

    // Whether the units are those of short sequences.
    static bool units_are_small(const RowTiling& queries, int64_t group, int64_t tile_elements) {
        return group * queries.tiles() * tile_elements * int64_t(sizeof(float)) < kLargeUnit;
    }

    // keys: the tiling of the walk, of which the device runs so many blocks at once. group: query heads of a
    // key head. Tiles of queries are tile_elements numbers large. in_walk: units that are small are finished
    // by their last blocks. scale: what dQ is of the sums. parts: units are one of so many equal parts of a
    // head's tiles of queries.
    DqSums(const RowTiling& keys, const RowTiling& queries, int64_t group, int64_t blocks_at_once,
           int64_t tile_elements, bool in_walk, float scale, int64_t parts = 1)
        : queries_(queries),
          units_(keys.heads()),
          sharers_(keys.tiles()),
          in_walk_(in_walk && keys.count() > 0 && units_are_small(queries, group, tile_elements)),
          places_(uint32_t(places(keys, blocks_at_once))),
          unit_tiles_(uint32_t(group * queries.tiles() / parts)),
          tile_elements_(tile_elements),
          scale_(scale) {}

    // So many places, of units whose walk stores first summands and makes dQ of the sums. Nothing has to be
    // zero.
    static DqSums of_places(const RowTiling& queries, int64_t group, int64_t places, int64_t tile_elements,
                            float scale, int64_t parts = 1) {
        DqSums sums(queries);
        sums.places_ = Division(uint32_t(places));
        sums.unit_tiles_ = Division(uint32_t(group * queries.tiles() / parts));
        sums.tile_elements_ = tile_elements;
        sums.scale_ = scale;
        sums.in_walk_ = true;
        return sums;
    }

    // Counters, then sums; all zero at the start.
    int64_t bytes() const { return bytes_of(places_.divisor); }
    // Of the first places.
    int64_t bytes_of(int64_t places) const {
        return counter_bytes() + places * unit_elements() * int64_t(sizeof(float));
    }
    void lie_at(void* workspace) {
        done_ = static_cast<uint32_t*>(workspace);
        sums_ = reinterpret_cast<float*>(static_cast<char*>(workspace) + counter_bytes());
    }

    int64_t tiles() const { return units_ * unit_tiles_.divisor; }
    // How many tiles of keys add to a unit.
    __device__ __forceinline__ uint32_t sharers() const { return sharers_; }
    // How many tiles the walk does not finish.
    int64_t unfinished_tiles() const { return in_walk_ ? 0 : tiles(); }

    __device__ __forceinline__ bool exist() const { return sums_ != nullptr; }

    // Of all places' tiles.
    __device__ __forceinline__ uint32_t index(uint32_t unit, uint32_t tile) const {
        return places_.remainder(unit) * unit_tiles_.divisor + tile;
    }
    __device__ __forceinline__ float* at(uint32_t index) const { return sums_ + index * tile_elements_; }
    __device__ __forceinline__ float* of_tile(uint32_t unit, uint32_t tile) const {
        return at(index(unit, tile));
    }
    // A unit's tiles are those of each of its query heads, in each those of all batch entries that it has.
    __device__ __forceinline__ uint32_t tiles_of_head() const { return queries_.tiles(); }
    __device__ __forceinline__ uint32_t first_tile(int64_t batch) const { return queries_.first_tile(batch); }
    __device__ __forceinline__ float* of_head(uint32_t unit, int i, int64_t batch) const {
        return of_tile(unit, i * tiles_of_head() + first_tile(batch));
    }

    FLASH_HOST_DEVICE int64_t unit_elements() const { return unit_tiles_.divisor * tile_elements_; }
    // How many tiles a unit has, and which queries a tile holds.
    FLASH_HOST_DEVICE const Division& unit_tiles() const { return unit_tiles_; }
    __device__ __forceinline__ RowTile rows_of(const ForwardProblem& problem, uint32_t unit,
                                               uint32_t tile) const {
        return queries_(unit * unit_tiles_.divisor + tile, problem, false);
    }

    __device__ __forceinline__ float scale() const { return scale_; }

    // By one thread, before a barrier in front of the block's first addition.
    __device__ __forceinline__ void wait_for_place(uint32_t unit) const {
        if (!exist() || unit < places_.divisor) return;
        while (load_acquire(done_ + (unit - places_.divisor)) <= sharers_) __nanosleep(50);
    }

    // By one thread, behind a barrier after the block's last addition: true if the block is to finish the
    // unit, after another barrier.
    __device__ __forceinline__ bool last_of(uint32_t unit) const {
        return exist() && in_walk_ && add_acquire_release(done_ + unit, 1) == sharers_ - 1;
    }

    // By one thread, behind a barrier after that.
    __device__ __forceinline__ void free_place(uint32_t unit) const { count(unit); }

    // Where every unit has a place: by one thread, when what the block has added is in device memory; and
    // whether all blocks of the unit have done that.
    __device__ __forceinline__ void count(uint32_t unit) const { add_release(done_ + unit, 1); }
    __device__ __forceinline__ bool is_complete(uint32_t unit) const {
        return load_acquire(done_ + unit) >= sharers_;
    }

  private:
    static constexpr int64_t kLargeUnit = 1 << 20;  // bytes; 256 KiB take a block 12 us on an H100

    // As many as the units that blocks which run at once belong to, and more for those that take longer;
    // where heads go in sections, whole ones, since blocks must not wait for their own section's.
    int64_t places(const RowTiling& keys, int64_t blocks_at_once) const {
        const int64_t section = keys.section(), blocks = section * keys.tiles();
        const int64_t needed = section * (1 + (blocks_at_once * 7 / 4 + blocks - 1) / blocks);
        const int64_t few = std::min(std::max(needed, keys.last_section()), units_);
        return std::max<int64_t>(1, in_walk_ ? few : units_);
    }

    int64_t counter_bytes() const { return (units_ * int64_t(sizeof(uint32_t)) + 255) / 256 * 256; }

    RowTiling queries_;
    int64_t units_ = 0;
    uint32_t sharers_ = 0;  // blocks of a unit
    bool in_walk_ = false;
    Division places_;
    Division unit_tiles_;  // tiles of queries, of all its heads
    int64_t tile_elements_ = 0;
    float scale_ = 1;
    uint32_t* done_ = nullptr;  // of each unit: blocks, and one more when it is finished
    float* sums_ = nullptr;  // [places, group, tiles of queries, warps, their accumulators], so that a warp
                             // adds to consecutive addresses
};

// A tile of sums and what a thread has of it: the accumulators of dQ += dS K, for which kRowWarps warps
// divide the rows and the others the columns.
template <DType dtype, int kRows, int kColumns, int kWarps, int kRowWarps>
class DqTile {
  public:
    static constexpr int threads = kWarps * 32, column_warps = kWarps / kRowWarps;
    using Accumulators = Fragment<kRows / kRowWarps, kColumns / column_warps>;

    // The warp's first ones.
    __device__ __forceinline__ static int row() {
        return threadIdx.x / 32 / column_warps * Accumulators::row_tiles * 16;
    }
    __device__ __forceinline__ static int column() {
        return threadIdx.x / 32 % column_warps * Accumulators::column_tiles * 8;
    }

    // Of a tile's numbers, those of a warp; each of its lanes has 4 of every 128.
    static constexpr int warp_elements = kRows * kColumns / kWarps;

    __device__ __forceinline__ static void add(float* sums, const Accumulators& dq) {
        sums += threads_place();
        each([&](int m, int n, int place) {
            const auto& x = dq.value[m][n];
#if __CUDA_ARCH__ >= 900
            reduce_add(reinterpret_cast<float4*>(sums + place), make_float4(x[0], x[1], x[2], x[3]));
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) reduce_add(sums + place + e * 32, x[e]);
#endif
        });
    }

    // Bytes from a tile's sums in shared memory to a thread's first ones.
    __device__ __forceinline__ static uint32_t shared_place(uint32_t thread) {
        return thread / 32 * warp_elements * 4 + thread % 32 * 16;
    }
    // The thread's part of the sums, from its place in shared memory on.
    __device__ __forceinline__ static void store_shared(uint32_t place, const Accumulators& dq) {
        each([&](int m, int n, int first) {
            const auto& x = dq.value[m][n];
            cuda::store_shared(place + first * 4, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                             __float_as_uint(x[2]), __float_as_uint(x[3])));
        });
    }

    // dq += the sums there.
    __device__ __forceinline__ static void add_shared(Accumulators& dq, uint32_t place) {
        each([&](int m, int n, int first) {
            auto& x = dq.value[m][n];
            const uint4 sum = load_shared_16(place + first * 4);
            x[0] += __uint_as_float(sum.x), x[1] += __uint_as_float(sum.y);
            x[2] += __uint_as_float(sum.z), x[3] += __uint_as_float(sum.w);
        });
    }

    // Sums that are complete, past the first-level cache, which doesn't see additions; of so many columns of
    // the tile.
    __device__ __forceinline__ static void load(Accumulators& dq, const float* sums, int columns = kColumns) {
        sums += threads_place();
        each([&](int m, int n, int place) {
            auto& x = dq.value[m][n];
            if (column() + n * 8 >= columns) return;
#if __CUDA_ARCH__ >= 900
            const float4 sum = __ldcg(reinterpret_cast<const float4*>(sums + place));
            x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = __ldcg(sums + place + e * 32);
#endif
        });
    }

    // What the same thread has loaded.
    __device__ __forceinline__ static void clear(float* sums) {
        sums += threads_place();
        each([&](int, int, int place) {
#if __CUDA_ARCH__ >= 900
            __stcg(reinterpret_cast<float4*>(sums + place), make_float4(0, 0, 0, 0));
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) __stcg(sums + place + e * 32, 0.f);
#endif
        });
    }

    // The sums become dQ, by way of a tile in shared memory. By the block's first threads.
    __device__ __forceinline__ static void store(const BackwardProblem& problem, const RowTile& tile,
                                                 Accumulators& dq, float scale, uint32_t shared_tile) {
        using Tile = SmemTile<kRows, kColumns, element_bytes(dtype)>;
        const ForwardProblem& forward = problem.forward;
        dq *= tile.unowned ? 0 : scale;
        const HeadRows<Bits<dtype>> out(problem.dq, tile.unowned ? 0 : tile.batch,
                                        tile.sequence.first_query_row, tile.head, forward.head_dim);
        store_fragment<dtype, Tile>(shared_tile, dq, row(), column());
        barrier_of<threads>(0);
        store_tile<threads, Tile>(out, shared_tile, tile.first, tile.rows);
        barrier_of<threads>(0);
    }

  private:
    template <class Visit>
    __device__ __forceinline__ static void each(const Visit& visit) {
#pragma unroll
        for (int m = 0; m < Accumulators::row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < Accumulators::column_tiles; ++n)
                visit(m, n, (m * Accumulators::column_tiles + n) * 4 * 32);
    }

    // Four floats are added at once from Hopper on; before, one, and the lanes' lie together.
    __device__ __forceinline__ static uint32_t threads_place() {
#if __CUDA_ARCH__ >= 900
        constexpr uint32_t lane = 4;
#else
        constexpr uint32_t lane = 1;
#endif
        return threadIdx.x / 32 * warp_elements + lane_index() * lane;
    }
};

// By the block's first threads: the index-th of the tiles that the walk has left. The kernels that call it
// are no template: before CUDA 13 the linker takes one instance for those of all files, whatever their chips.
template <class Tile>
__device__ __forceinline__ void finish_tile(const BackwardProblem& problem, const DqSums& sums,
                                            uint32_t index, uint32_t shared_tile) {
    const uint32_t unit = sums.unit_tiles().quotient(index), tile = sums.unit_tiles().remainder(index);
    const RowTile rows = sums.rows_of(problem.forward, unit, tile);
    if (rows.rows.empty()) return;
    typename Tile::Accumulators dq;
    Tile::load(dq, sums.of_tile(unit, tile), int(problem.forward.head_dim));
    Tile::store(problem, rows, dq, sums.scale(), shared_tile);
}

// By the block's first threads: the next tile's sums are on their way while one is stored.
template <class Tile>
__device__ __forceinline__ void finish_unit(const BackwardProblem& problem, const DqSums& sums, uint32_t unit,
                                            uint32_t shared_tile) {
    const uint32_t tiles = sums.unit_tiles().divisor;
    typename Tile::Accumulators dq, next;
    Tile::load(next, sums.of_tile(unit, 0));
#pragma unroll 1
    for (uint32_t tile = 0; tile < tiles; ++tile) {
        dq = next;
        if (tile + 1 < tiles) Tile::load(next, sums.of_tile(unit, tile + 1));
        Tile::clear(sums.of_tile(unit, tile));
        const RowTile rows = sums.rows_of(problem.forward, unit, tile);
        if (!rows.rows.empty()) Tile::store(problem, rows, dq, sums.scale(), shared_tile);
    }
    barrier_of<Tile::threads>(0);
    if (threadIdx.x == 0) sums.free_place(unit);
}

// As a function of its own, which leaves the registers of the walk alone.
template <class Tile>
__device__ __noinline__ void finish_unit_apart(const BackwardProblem& problem, const DqSums& sums,
                                               uint32_t unit, uint32_t shared_tile) {
    finish_unit<Tile>(problem, sums, unit, shared_tile);
}

}  // namespace flash::cuda
