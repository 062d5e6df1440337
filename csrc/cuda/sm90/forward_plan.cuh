// What the warps of a block tell each other: the planner which tile of queries is next, the producer where
// its keys lie, the consumers whether they have to be given a tile again.
#pragma once

#include "../../attention/score.h"
#include "../any/query_rows.cuh"
#include "../any/split.cuh"
#include "../any/visible_bits.cuh"
#include "../ptx/mbarrier.h"
#include "../tile/gpu_math.h"
#include "key_walk.cuh"
#include "ring.h"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

struct ForwardConfiguration {
    int head_dim, key_tile;
    int warpgroups;        // that compute, 64 queries each
    int stages;            // tiles of keys, and of values, in flight
    int query_slots;       // 64 queries each, taken by the warpgroups in turn
    int registers;         // of a thread that computes
    bool stages_output;    // O leaves by way of shared memory
    bool turns;            // warpgroups start their products one after the other
    bool transformed;      // scores have a softcap, ALiBi, or a scale that is not positive
    bool biased;           // or a bias, and perhaps those
    int diagonal_keys;     // under a diagonal or a map it is for more of them
    int held_queries = 0;  // so many of their columns are in registers as well
    int value_dim = 0;     // head dim of the values, if it is another
    int from_queries = 0;  // it is for so many, or more
    int few = 0;           // rows of a warpgroup that hold whole queries, all heads that share keys
    int blocks = 1;        // that share a multiprocessor

    // Tiles of queries, and of keys, do not overlap: in little code of few queries, in few registers of
    // blocks that have each other to overlap with.
    constexpr bool one_by_one() const { return few > 0 || blocks > 1; }
    constexpr int values() const { return value_dim ? value_dim : head_dim; }
    constexpr int columns() const { return in_whole_panels(head_dim); }
    constexpr int value_columns() const { return in_whole_panels(values()); }
    constexpr int queries() const { return 64 * warpgroups; }
    constexpr int consumers() const { return 128 * warpgroups; }
    constexpr int threads() const { return consumers() + 128; }
    // Of a thread that copies. Each is given as many as all can have, in eights, and those that compute take
    // some of them.
    constexpr int producer_registers() const {
        return 65536 / blocks / threads() / 8 * 8 * (warpgroups + 1) - registers * warpgroups;
    }
};

// How many tiles of queries a block takes beyond the one whose last keys it asks for (TileQueue): of those
// with few keys one, since a tile would else be wanted before it is planned and copied; and under a map,
// whose lists are read first, if no more than two tiles of keys are on their way.
inline uint32_t tiles_ahead(const ForwardProblem& problem, const ForwardConfiguration& c) {
    return problem.seqlen_k <= 10 * c.key_tile || (problem.key_blocks.counts && c.stages <= 2);
}

// A tile of keys, beside its stage. A warpgroup's flags are in bits of its own.
struct alignas(16) KeyNote {
    static constexpr uint32_t masked = 1, hidden = 2, last = 4;  // to a warpgroup; last that it sees
    static constexpr uint32_t gap = 8;      // hides the next tile, but not all that follow
    static constexpr uint32_t absent = 16;  // visited, as all are when care is taken, but hidden by a map
    static constexpr int kBits = 5;
    static constexpr uint32_t end = 1 << 20, careful = 1 << 21;  // of the tile of queries
    static constexpr uint32_t partial = 1 << 22;                 // bits say what is visible

    Position first;
    Interval seen;  // what of it exists and some row sees
    uint32_t flags;

    static constexpr uint32_t of_each(uint32_t flags, int warpgroups) {
        return warpgroups ? flags | of_each(flags, warpgroups - 1) << kBits : 0;
    }
    // The warpgroup's flags, and those of all.
    __device__ __forceinline__ static uint32_t flags_of(uint32_t flags, int warpgroup) {
        return (flags >> kBits * warpgroup & ((1 << kBits) - 1)) | (flags & ~(end - 1));
    }
};

enum class Work { tile, nothing, end };

// How few queries fill a tile, and in how many parts its keys are visited, which are tiles of their own.
struct FewQueries {
    int heads = 1;  // that are rows
    int splits = 1;
    float* partial = nullptr;  // of splits that are no cluster

    // The blocks that have a tile's parts, one each.
    __device__ __forceinline__ bool is_cluster() const { return splits > 1 && !partial; }

    // The split of a number of TileQueue's, which becomes one of the tiling's.
    __device__ __forceinline__ Split take_split(uint32_t& index, const ForwardProblem& problem,
                                                int64_t stride) const {
        const uint32_t tile = index / uint32_t(splits);
        const int split = int(index - tile * splits);
        index = tile;
        return Split::of(problem, split, splits, partial, stride);
    }
};

// A tile of queries. While the output of one is finished, the next one's keys are multiplied, and when the
// last of those have been asked for, the one after that is planned.
constexpr int kPlans = 3;

struct ForwardPlan {
    static constexpr Position kFar = 1 << 30;

    Work work;
    bool careful;  // given again: values that are not finite are kept from rows that don't see them
    bool has_keys;
    bool redo;  // the consumers' answer
    // Rows that follow their maximum then. The others compute the same bits again.
    uint32_t following[KeyStart::kLists * 2];
    uint32_t multiply;  // a bit for each warpgroup that has something to multiply
    RowTile tile;
    Split split;     // of few queries
    Interval share;  // the split's keys
    Mask mask;
    // The keys that the mask leaves the tile's first row, also where there are none; those of row i lie i
    // further.
    alignas(8) Interval reach;
    ScoreTransform<GpuMath> transform;  // if scores are transformed
    VisibleBits bits;
    KeyStart start;
    // Of a warpgroup's queries: what some of them see, and what all do.
    struct alignas(16) Sight {
        Interval some, all;
    } sights[KeyStart::kLists];

    // Where the tile's keys are. By one thread.
    __device__ void locate(const ForwardProblem& problem, const ForwardConfiguration& c) {
        mask = Mask(problem, tile.sequence);
        share = c.few ? split.keys(tile, mask, c.key_tile) : Interval(0, kFar);
        start.visited = visited(tile, mask, share, c.key_tile);
    }

    // Of the tile; of few queries it is located. By a warp: a lane looks at a warpgroup's queries. A map's
    // lists are read.
    __device__ void make(const ForwardProblem& problem, const ForwardConfiguration& c, int heads = 1) {
        const int i = lane_index();
        const Position queries = c.few ? c.few / heads : 64;  // of a warpgroup
        if (i == 0) {
            if (!c.few) locate(problem, c);
            const Position center = tile.first + mask.diagonal();
            reach = {mask.left < 0 ? -kFar : center - mask.left,
                     mask.right < 0 ? kFar : center + mask.right + 1};
            if (c.transformed)
                transform = ScoreTransform<GpuMath>(problem, tile.unowned ? 0 : tile.batch, tile.head);
            bits = VisibleBits(problem, tile.batch, tile.head);
            for (uint32_t& rows : following)
                if (!careful) rows = 0;
        }
        __syncwarp();
        bool visits = false;
        if (i < KeyStart::kLists) {
            const BlockLists& map = problem.key_blocks;
            const Position first = tile.first + i * queries;
            const Interval rows = intersection({first, first + queries}, tile.rows);
            Sight sight{{0, 0}, {0, INT32_MAX}};
            if (!rows.empty()) {
                const Interval of_first = visible(rows.begin), of_last = visible(rows.end - 1);
                sight = {{of_first.begin, of_last.end}, {of_last.begin, of_first.end}};
            }
            sights[i] = sight;
            visits = !sight.some.empty();
            if (map.counts) {
                BlockList list{nullptr, 0, 1};
                if (visits) list = block_list_of(map, tile.batch, tile.head, rows.begin).within(sight.some);
                if (problem.visible.data)
                    while (list.count > 0 && !sees(list.indices[list.count - 1], rows.begin, sight.some))
                        --list.count;
                visits = list.count > 0;
                start.set(i, list);
            }
        }
        const uint32_t visitors = __ballot_sync(0xffffffff, visits);
        if (i == 0) {
            start.mapped = problem.key_blocks.counts;
            start.row_halves = tile.first / kMaskQuarter;
            has_keys = start.mapped ? visitors != 0 : !start.visited.empty();
            multiply = has_keys && careful ? ~0u : visitors;
        }
        __syncwarp();
    }

    // By all queries of a tile, but for a map: begins with a tile of keys.
    __device__ static Interval visited(const RowTile& tile, const Mask& mask, const Interval& share,
                                       int key_tile) {
        if (tile.unowned) return {0, 0};
        const Interval first = intersection(mask.keys_of(tile.rows.begin), share);
        return {first.begin / key_tile * key_tile, intersection(mask.keys_of(tile.rows.end - 1), share).end};
    }

    // Whether the 64 queries from `first` on, which see `some` but for bits, see any of a block of an element
    // mask.
    __device__ static bool sees(int32_t listed, Position first, const Interval& some) {
        bool sees = !is_partial(listed);
        for (int i = 0; i < 2; ++i) {
            const Position begin = block_of(listed) * Position(kMaskBlock) + i * kMaskQuarter;
            sees |= quarter_of(listed, first / kMaskQuarter % 2, i) != Quarter::hidden &&
                    !intersection({begin, begin + kMaskQuarter}, some).empty();
        }
        return sees;
    }

    // Whether a row's reference is a maximum with ALiBi, which makes the probability of a row's only key 1:
    // if the warpgroup sees no other tile, whose keys could be much nearer.
    template <ForwardConfiguration c>
    __device__ __forceinline__ bool alibi_first(int warpgroup) const {
        const Interval& some = sights[warpgroup].some;
        return c.transformed && some.begin / c.key_tile == (some.end - 1) / c.key_tile;
    }

    // row: of the tile.
    __device__ __forceinline__ bool follows(int row) const { return following[row / 32] >> row % 32 & 1; }
    __device__ __forceinline__ void follow(int row) { atomicOr(&following[row / 32], 1u << row % 32); }

    __device__ __forceinline__ Interval visible(Position query) const {
        return tile.unowned ? Interval(0, 0) : intersection(mask.keys_of(query), share);
    }
};

// Plans on their way from the warp that makes them to those that walk them, and their places' way back.
struct PlanRing {
    ForwardPlan plans[kPlans];
    uint64_t planned[kPlans], done[kPlans];
    uint64_t walked[kPlans];  // the plan's keys have all been asked for

    __device__ __forceinline__ ForwardPlan& operator[](uint32_t n) { return plans[n % kPlans]; }

    // By one thread. warps: those that say when they are done with a plan, beside the one that copies values,
    // which may be behind those that multiply, where there are none.
    __device__ void start(int warps) {
        for (int i = 0; i < kPlans; ++i) {
            mbarrier_init(shared_address(&planned[i]), kWarpArrivals);
            mbarrier_init(shared_address(&walked[i]), kWarpArrivals);
            mbarrier_init(shared_address(&done[i]), (warps + 1) * kWarpArrivals);
        }
    }

    // By the warp that makes plans: until the n-th one's place is free, and all keys have been asked for but
    // those of `ahead` plans.
    __device__ __forceinline__ void await_room(uint32_t n, uint32_t ahead) const {
        mbarrier_wait(in_ring(done, n), parity(done, n) ^ 1);
        const uint32_t behind = n - 1 - ahead;
        if (n > ahead) mbarrier_wait(in_ring(walked, behind), parity(walked, behind));
    }

    // By a warp that copies: each plan in turn, and its number.
    template <class Copy>
    __device__ __forceinline__ void each(const Copy& copy) {
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(planned, n), parity(planned, n));
            __syncwarp();  // else the plan could change before a lane has seen that
            ForwardPlan& plan = (*this)[n];
            if (plan.work == Work::end) break;
            copy(plan, n);
        }
    }
};

// Walks a plan's tiles of keys, and makes their notes. By a warp, of which lane i looks after warpgroup i.
// What it reads of the plan it keeps: whoever reads shared memory waits for as long as products run.
template <ForwardConfiguration c>
class NoteWriter {
  public:
    __device__ __forceinline__ NoteWriter(const ForwardPlan& plan, const ForwardProblem& problem)
        : map_(problem.key_blocks),
          sight_(plan.sights[index()]),
          walk_(plan.start, sight_.some.end, map_, index()),
          flags_((plan.careful ? KeyNote::careful : 0) | (plan.bits.rows ? KeyNote::partial : 0)) {}

    __device__ __forceinline__ bool more() const { return walk_.more(); }

    // The next tile's first key.
    __device__ __forceinline__ Position next() {
        const Position first = walk_.first();
        walk_.advance(map_);
        return first;
    }
    __device__ __forceinline__ KeyNote next_note() {
        const uint32_t hidden = walk_.hidden();
        const Interval keys(walk_.first(), walk_.first() + c.key_tile);
        walk_.advance(map_);
        const bool careful = flags_ & KeyNote::careful, end = !walk_.more();
        const bool lacks = hidden & Walk::all_hidden, partial = hidden & Walk::some_hidden && !lacks;
        uint32_t mine = 0;
        if (partial || keys.begin < sight_.all.begin || keys.end > sight_.all.end) mine |= KeyNote::masked;
        if (careful) {
            mine |= end ? KeyNote::last : 0;
            if (lacks) mine |= KeyNote::absent | (sight_.some.empty() ? 0 : KeyNote::masked);
        } else if (lacks || intersection(keys, sight_.some).empty()) {
            mine |= KeyNote::hidden;
        } else if (keys.end >= walk_.list_end()) {
            mine |= KeyNote::last;
        } else if (walk_.hidden() & Walk::all_hidden) {
            mine |= KeyNote::gap;
        }
        mine = mine << KeyNote::kBits * index() | (partial ? flags_ & KeyNote::partial : 0);
        uint32_t flags = __reduce_or_sync(0xffffffff, mine) | (end ? KeyNote::end : 0);
        // They take care together. What a bias hides may be anywhere.
        constexpr uint32_t each = KeyNote::of_each(KeyNote::masked, c.warpgroups);
        if (careful) flags |= KeyNote::careful | (c.biased || flags & each ? each : 0);
        return {keys.begin, {keys.begin, min(keys.end, walk_.last())}, flags};
    }

  private:
    using Walk = KeyWalk<c.key_tile>;

    __device__ __forceinline__ static int index() { return lane_index() < c.warpgroups ? lane_index() : 0; }

    const BlockLists& map_;
    const ForwardPlan::Sight sight_;
    Walk walk_;
    const uint32_t flags_;  // that all notes have, and partial blocks'
};

// What a query of a plan's tile sees of a tile of keys, but for bits. flags: the warpgroup's. What it needs
// of shared memory is read at once: each read waits for as long as products run.
class RowSight {
  public:
    __device__ __forceinline__ RowSight(const ForwardPlan& plan, const KeyNote& note, uint32_t flags)
        : reach_(plan.reach), seen_(note.seen), first_(note.first) {
        if (flags & KeyNote::absent) seen_.end = 0;
    }
    __device__ __forceinline__ Interval operator[](int query) const {
        return intersection({reach_.begin + query, reach_.end + query}, seen_);
    }
    __device__ __forceinline__ Position first() const { return first_; }  // of the keys

  private:
    Interval reach_, seen_;
    Position first_;
};

// Each warpgroup's part of a bias' tile is read when its scores are there, and then the next one is copied.
template <ForwardConfiguration c, bool kBiased = c.biased>
struct ForwardBias {
    static constexpr int producers = 0;  // warps that leave plans
    __device__ void start() {}
};
template <ForwardConfiguration c>
struct ForwardBias<c, true> {
    static constexpr int producers = 1;
    alignas(1024) char tiles[c.warpgroups][64 * c.key_tile * 2];
    uint64_t full[c.warpgroups], empty[c.warpgroups];

    // By one thread.
    __device__ void start() {
        for (int i = 0; i < c.warpgroups; ++i) {
            mbarrier_init(shared_address(&full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), 4 * kWarpArrivals);
        }
    }
};

// Each warp's rows on their way out.
template <ForwardConfiguration c, bool kStages = c.stages_output>
struct OutputStage {
    __device__ uint32_t of_warp(int) const { return 0; }
};
template <ForwardConfiguration c>
struct OutputStage<c, true> {
    alignas(1024) char rows[4 * c.warpgroups][16 * c.value_columns() * 2];
    __device__ uint32_t of_warp(int warp) const { return shared_address(rows[warp]); }
};

template <ForwardConfiguration c>
struct ForwardShared {
    static constexpr int query_bytes = 64 * c.columns() * 2, key_bytes = c.key_tile * c.columns() * 2;
    static constexpr int value_bytes = c.key_tile * c.value_columns() * 2;

    alignas(1024) char q[c.query_slots][query_bytes];
    alignas(1024) char k[c.stages][key_bytes];
    alignas(1024) char v[c.stages][value_bytes];
    uint64_t q_full[2 * c.warpgroups];  // each awaited by one warpgroup alone, which must see all its phases
    uint64_t q_empty[c.query_slots];
    static_assert(c.warpgroups <= c.query_slots && c.query_slots <= 2 * c.warpgroups);
    uint64_t k_full[c.stages], k_empty[c.stages], v_full[c.stages], v_empty[c.stages];
    KeyNote notes[2 * c.stages];  // read until the values are multiplied, when the keys are long gone
    PlanRing plans;
    uint32_t bad_keys[(c.key_tile + 31) / 32];
    ForwardBias<c> bias;
    OutputStage<c> output;
    uint64_t located;  // of few queries: the first plan's tile is

    __device__ __forceinline__ KeyNote& note(uint32_t tile) { return notes[tile % (2 * c.stages)]; }

    // By one thread.
    __device__ void start() {
        for (uint64_t& full : q_full) mbarrier_init(shared_address(&full), 1);
        for (uint64_t& empty : q_empty) mbarrier_init(shared_address(&empty), 4 * kWarpArrivals);
        plans.start(c.warpgroups * 4 + bias.producers);
        for (int i = 0; i < kPlans; ++i) plans[i].redo = false;
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&k_full[i]), 1);
            mbarrier_init(shared_address(&v_full[i]), 1);
            mbarrier_init(shared_address(&k_empty[i]), c.warpgroups * 4 * kWarpArrivals);
            mbarrier_init(shared_address(&v_empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
        bias.start();
        if (c.few) mbarrier_init(shared_address(&located), 1);
    }
};

}  // namespace flash::cuda::sm90
