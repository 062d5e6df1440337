// Moves tiles of rows between global and shared memory. Rows outside the range that somebody sees, and
// columns past the head dim, become zeros on the way in, so that nothing that lies there can leak, and are
// left alone on the way out. Rows of any stride and alignment: 16-byte copies where everything is a multiple
// of 16 bytes, element by element elsewhere.
#pragma once

#include <type_traits>

#include "../../attention/mask.h"
#include "../../attention/sequence.h"
#include "../ptx/cp_async.h"
#include "../tile/smem_tile.h"

namespace flash::cuda {

// The pages of one sequence's cache, of which row 0 lies in the middle of one if there is left padding.
struct Pages {
    const int32_t* table;  // [pages]
    int page_size, entries;
    Position first_row;  // where row 0 is, counted from the first page's beginning

    Pages() = default;
    __device__ Pages(const KeyCache& cache, int64_t batch, int64_t first_row)
        : table(cache.pages + batch * cache.pages_stride),
          page_size(int(cache.page_size)),
          entries(int(cache.entries)),
          first_row(Position(first_row)) {}

    __device__ __forceinline__ Position page_of(Position row) const { return (row + first_row) / page_size; }
    // An entry that is none leads to one that exists.
    __device__ __forceinline__ int64_t existing(int32_t entry) const {
        return entry < 0 ? 0 : min(entry, entries - 1);
    }
};

// The pages of the next kRows rows, asked for while the rows before them are copied: lane i has the i'th one.
template <int kRows>
struct PagesAhead {
    Position row = -1, inside;  // the first one, in the cache and in its page
    Position page, last_page;
    int32_t entry;

    // Of rows before `end`. Divisions would be a tenth of a tile's time, so the next tile's does without.
    __device__ __forceinline__ void ask(const Pages& pages, Position first, Position end) {
        if (first == row + kRows) {
            inside += kRows;
#pragma unroll 1
            for (; inside >= pages.page_size; ++page) inside -= pages.page_size;
        } else {
            page = pages.page_of(first);
            inside = first + pages.first_row - page * pages.page_size;
            last_page = pages.page_of(end - 1);
        }
        row = first;
        entry = pages.table[min(page + lane_index(), last_page)];
    }
};

// The rows of one head: where its row 0 lies, and what may be assumed of every row.
template <class Element>
struct HeadRows {
    static constexpr bool strided = true;

    Element* data;  // [rows, head_dim]; with pages row 0 of page 0
    int64_t row_stride;
    int head_dim;
    bool vectors;  // every row starts at a multiple of 16 bytes and is a multiple of 16 bytes long; the
                   // stride fits 32 bits
    bool paged = false;
    Pages pages;
    int64_t page_stride;

    __device__ HeadRows(const TensorView& view, int64_t batch, int64_t first_row, int64_t head,
                        int64_t head_dim)
        : data(row_of<Element>(view, batch, first_row, head)),
          row_stride(view.row_stride),
          head_dim(int(head_dim)),
          vectors((reinterpret_cast<uintptr_t>(view.data) % 16 |
                   (view.batch_stride | view.row_stride | view.head_stride | head_dim) %
                       (16 / sizeof(Element))) == 0 &&
                  view.row_stride < 1 << 29) {}

    __device__ HeadRows(const TensorView& view, const Pages& pages, int64_t head, int64_t head_dim)
        : HeadRows(view, 0, 0, head, head_dim) {
        paged = true;
        this->pages = pages;
        page_stride = view.batch_stride;
    }

    // For rows that exist.
    __device__ __forceinline__ Element* row(Position index) const {
        if (!paged) return data + index * row_stride;
        return data + pages.existing(pages.table[pages.page_of(index)]) * page_stride +
               (index + pages.first_row) % pages.page_size * row_stride;
    }
};

// The rows of several heads: those of one query, then those of the next one.
template <class Element>
struct GroupedRows : HeadRows<Element> {
    static constexpr bool strided = false;

    int heads;
    int64_t head_stride;

    __device__ GroupedRows(const HeadRows<Element>& first, int heads, int64_t head_stride)
        : HeadRows<Element>(first), heads(heads), head_stride(head_stride) {}

    __device__ __forceinline__ Element* row(Position index) const {
        return this->data + index / heads * this->row_stride + index % heads * head_stride;
    }
};

// How a block's threads divide a tile: neighbours take neighbouring 16-byte chunks of a panel's row.
template <class Tile, int kThreads>
struct TileThreads {
    static constexpr int row_step = kThreads / Tile::chunks;
    static constexpr int steps = (Tile::rows + row_step - 1) / row_step;

    __device__ __forceinline__ static int first_row() {
        return opaque(threadIdx.x) % kThreads / Tile::chunks;
    }
    __device__ __forceinline__ static int chunk() { return opaque(threadIdx.x) % Tile::chunks; }
};

// For rows of any alignment.
template <int kThreads, class Tile, class Rows>
__device__ __forceinline__ void load_elements(uint32_t tile, const Rows& from, Position first,
                                              Interval seen) {
    using Threads = TileThreads<Tile, kThreads>;
#pragma unroll 1
    for (int row = Threads::first_row(); row < Tile::rows; row += Threads::row_step) {
        const bool valid = seen.contains(first + row);
        const auto* source = valid ? from.row(first + row) : from.data;
#pragma unroll 1
        for (int panel = 0; panel < Tile::panels; ++panel) {
            constexpr int elements = Tile::chunk_elements, in_word = elements / 4;
            uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const int column = panel * Tile::panel + Threads::chunk() * elements + i;
                if (valid && column < from.head_dim)
                    words[i / in_word] |= uint32_t(source[column]) << i % in_word * 16;
            }
            store_shared(tile + Tile::offset(row, panel, Threads::chunk()),
                         make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
    __threadfence_block();  // whoever waits for this thread's copies sees these as well
}

// Copies of whole tiles by two instructions a chunk, for the loops over tiles that nearly all are whole. What
// does not change from tile to tile stays in registers: where this thread's chunk of row 0 lies, unless
// kFrugal. hint: of ptx/cache_hint.h.
template <int kThreads, class Tile, bool kFrugal = false>
class WholeTiles {
  public:
    template <class Element>
    __device__ __forceinline__ explicit WholeTiles(const HeadRows<const Element>& rows)
        : source_(kFrugal ? nullptr : place_of(rows)), usable_(is_whole(rows) && !rows.paged) {}

    __device__ __forceinline__ bool usable() const { return usable_; }

    // Every step of a tile is in one page.
    template <class Element>
    __device__ __forceinline__ static bool usable_pages(const HeadRows<const Element>& rows) {
        return is_whole(rows) && rows.paged &&
               (rows.pages.page_size | rows.pages.first_row) % Threads::row_step == 0;
    }

    // Starts the copies of rows [first, first + Tile::rows), which all exist. row_stride: of the rows.
    template <class Element, class Hint = NoHint>
    __device__ __forceinline__ void load(uint32_t tile, const HeadRows<const Element>& rows, Position first,
                                         int row_stride, Hint hint = {}) const {
        static_assert(Threads::row_step % 8 == 0);  // so that one step's permutation serves all
        const uint32_t place = tile + Tile::offset(Threads::first_row(), 0, Threads::chunk());
        const int64_t row_bytes = int64_t(row_stride) * Tile::element_bytes,
                      step_bytes = row_bytes * Threads::row_step;
        const char* source = kFrugal ? place_of(rows, first) : source_ + first * row_bytes;
#pragma unroll
        for (int step = 0; step < Threads::steps; ++step, source += step_bytes)
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                cp_async_16(place + panel * Tile::panel_bytes + step * Threads::row_step * Tile::row_bytes,
                            source + panel * Tile::row_bytes, hint);
    }

    // The same of the pages that were asked for, by whole warps.
    template <class Element, class Hint = NoHint>
    __device__ __forceinline__ static void load_pages(uint32_t tile, const PagesAhead<Tile::rows>& ahead,
                                                      const HeadRows<const Element>& rows, Hint hint = {}) {
        static_assert(Tile::rows / 16 < 32);
        const uint32_t place = tile + Tile::offset(Threads::first_row(), 0, Threads::chunk());
        const Pages& pages = rows.pages;
        const int32_t existing = int32_t(pages.existing(ahead.entry));
        int page = 0;
        Position inside = ahead.inside;
        const Element* const of_thread =
            rows.data + Threads::first_row() * rows.row_stride + Threads::chunk() * Tile::chunk_elements;
        // All of them first: what stands behind a copy is read again.
        const Element* sources[Threads::steps];
#pragma unroll
        for (int step = 0; step < Threads::steps; ++step) {
            const int64_t entry = __shfl_sync(0xffffffff, existing, page);
            sources[step] = of_thread + entry * rows.page_stride + inside * rows.row_stride;
            inside += Threads::row_step;
            if (inside == pages.page_size) inside = 0, ++page;
        }
#pragma unroll
        for (int step = 0; step < Threads::steps; ++step)
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                cp_async_16(place + panel * Tile::panel_bytes + step * Threads::row_step * Tile::row_bytes,
                            sources[step] + panel * Tile::panel, hint);
    }

  private:
    using Threads = TileThreads<Tile, kThreads>;

    template <class Element>
    __device__ __forceinline__ static bool is_whole(const HeadRows<const Element>& rows) {
        return Tile::rows % Threads::row_step == 0 && rows.vectors && rows.head_dim == Tile::columns;
    }

    // Of this thread's first chunk of a tile that starts at row `first`.
    template <class Element>
    __device__ __forceinline__ static const char* place_of(const HeadRows<const Element>& rows,
                                                           Position first = 0) {
        return reinterpret_cast<const char*>(rows.data + (first + Threads::first_row()) * rows.row_stride +
                                             Threads::chunk() * Tile::chunk_elements);
    }

    const char* source_;
    std::conditional_t<kFrugal, int, bool> usable_;  // which of the two spills less
};

// Starts the copies of rows [first, first + Tile::rows); the caller commits and waits. Where rows are not
// vectors the copy is done on return, and seen by other threads after the barrier that follows the wait.
// kMayBeWhole: not for who has asked WholeTiles already.
template <int kThreads, class Tile, bool kMayBeWhole = true, class Rows>
__device__ __forceinline__ void load_tile(uint32_t tile, const Rows& from, Position first, Interval seen) {
    using Threads = TileThreads<Tile, kThreads>;
    if (!from.vectors) {
        load_elements<kThreads, Tile>(tile, from, first, seen);
        return;
    }
    // Nearly all tiles are whole; the others pay for their tests.
    if constexpr (Rows::strided && kMayBeWhole) {
        const WholeTiles<kThreads, Tile> whole(from);
        if (whole.usable() && seen.begin <= first && seen.end >= first + Tile::rows) {
            whole.load(tile, from, first, int(from.row_stride));
            return;
        }
    }
    const int row0 = Threads::first_row(), chunk = Threads::chunk(), column0 = chunk * Tile::chunk_elements;
    const uint32_t place = tile + Tile::offset(row0, 0, chunk);
#pragma unroll 1
    for (int row = row0; row < Tile::rows; row += Threads::row_step) {
        const bool exists = seen.contains(first + row);
        const auto* source = (exists ? from.row(first + row) : from.data) + column0;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel) {
            const int column = panel * Tile::panel;
            const bool valid = exists && column0 + column < from.head_dim;
            // Where nothing is read the address still has to be one of the tensor.
            cp_async_16(place + panel * Tile::panel_bytes + (row - row0) * Tile::row_bytes,
                        valid ? source + column : from.data, valid);
        }
    }
}

// Rows [first, first + kRows) of which those in `written` exist, from the part of a tile that starts at
// `tile`, at a multiple of 8 rows. kThreads threads with consecutive indices share the work; they have to be
// synchronised since it was written.
template <int kThreads, class Tile, int kRows = Tile::rows, class Rows>
__device__ __forceinline__ void store_tile(const Rows& to, uint32_t tile, Position first, Interval written) {
    using Element = std::remove_pointer_t<decltype(to.data)>;
    using Threads = TileThreads<Tile, kThreads>;
    const int row0 = Threads::first_row(), chunk = Threads::chunk(), column0 = chunk * Tile::chunk_elements;
    const int64_t step_elements = Threads::row_step * to.row_stride;
    // The one of `row`, from that of the step before.
    const auto next = [&](Element* before, int row) {
        return Rows::strided ? before + step_elements : to.row(first + row) + column0;
    };
    Element* target =
        Rows::strided ? to.data + (first + row0) * to.row_stride + column0 : next(nullptr, row0);
    if (Rows::strided && kRows % Threads::row_step == 0 && to.vectors && to.head_dim == Tile::columns &&
        written.begin <= first && written.end >= first + kRows) {
#pragma unroll
        for (int step = 0; step < kRows / Threads::row_step; ++step, target += step_elements)
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                *reinterpret_cast<uint4*>(target + panel * Tile::panel) =
                    load_shared_16(tile + Tile::offset(row0 + step * Threads::row_step, panel, chunk));
        return;
    }
    if (to.vectors) {
#pragma unroll 1
        for (int row = row0; row < kRows; row += Threads::row_step, target = next(target, row)) {
            if (!written.contains(first + row)) continue;
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                if (column0 + panel * Tile::panel < to.head_dim)
                    *reinterpret_cast<uint4*>(target + panel * Tile::panel) =
                        load_shared_16(tile + Tile::offset(row, panel, chunk));
        }
        return;
    }
#pragma unroll 1
    for (int row = row0; row < kRows; row += Threads::row_step, target = next(target, row)) {
        if (!written.contains(first + row)) continue;
#pragma unroll 1
        for (int panel = 0; panel < Tile::panels; ++panel) {
            const uint4 x = load_shared_16(tile + Tile::offset(row, panel, chunk));
            const uint32_t words[4] = {x.x, x.y, x.z, x.w};
            constexpr int elements = Tile::chunk_elements, in_word = elements / 4;
#pragma unroll
            for (int i = 0; i < elements; ++i) {
                const int column = panel * Tile::panel + i;
                if (column0 + column < to.head_dim)
                    target[column] = Element(words[i / in_word] >> i % in_word * 16);
            }
        }
    }
}

}  // namespace flash::cuda
