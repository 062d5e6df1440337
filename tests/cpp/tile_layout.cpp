// Brute force over the layouts of shared tiles (csrc/cuda/tile/tile_layout.h): every element has a place of
// its own, a lane's address moved to any part, row and column is that of the element it stands for, and no
// access of a warp meets a bank twice. Prints the number of accesses; a failure returns 1.
#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

#include "../../csrc/cuda/tile/tile_layout.h"
#include "tile_place.h"

using flash::cuda::TileLayout;

static int64_t accesses = 0;

static bool fail(const char* what, int rows, int columns, int bytes) {
    std::fprintf(stderr, "%s: tile of %d x %d, %d bytes an element\n", what, rows, columns, bytes);
    return false;
}

// One access: `width` bytes at each lane's address. The hardware serves 128 bytes at a time, lanes in order.
static bool conflict_free(const std::vector<uint32_t>& addresses, uint32_t width) {
    const size_t lanes = 128 / width;
    ++accesses;
    for (size_t first = 0; first < addresses.size(); first += lanes) {
        std::set<uint32_t> banks;
        for (size_t lane = first; lane < first + lanes; ++lane) {
            if (addresses[lane] % width) return false;
            for (uint32_t byte = 0; byte < width; byte += 4) banks.insert((addresses[lane] + byte) / 4 % 32);
        }
        if (banks.size() != 32) return false;
    }
    return true;
}

// access(lane): its address.
template <class Access>
static bool warp_conflict_free(uint32_t width, const Access& access) {
    std::vector<uint32_t> addresses;
    for (int lane = 0; lane < 32; ++lane) addresses.push_back(access(lane));
    return conflict_free(addresses, width);
}

template <class Layout>
static bool elements_have_places() {
    std::set<uint32_t> taken;
    for (int row = 0; row < Layout::rows; ++row)
        for (int column = 0; column < Layout::columns; ++column) taken.insert(place<Layout>(row, column));
    return taken.size() == size_t(Layout::rows) * Layout::columns &&
           *taken.rbegin() == Layout::bytes - Layout::element_bytes;
}

// What both element types share: 16-byte copies of neighbouring chunks, and stores of accumulators
// (fragment.h), a pair of neighbouring columns each.
template <class Layout>
static bool copies_and_stores() {
    constexpr int bytes = Layout::element_bytes;
    for (int panel = 0; panel < Layout::panels; ++panel)
        for (int row = 0; row + 32 / Layout::chunks <= Layout::rows; row += 32 / Layout::chunks)
            if (!warp_conflict_free(16, [&](int lane) {
                    return Layout::offset(row + lane / Layout::chunks, panel, lane % Layout::chunks);
                }))
                return false;
    for (int row = 0; row < Layout::rows; row += 8)
        for (int column = 0; column < Layout::columns; column += 8)
            if (!warp_conflict_free(2 * bytes, [&](int lane) {
                    return place<Layout>(row + lane / 4, column + lane % 4 * 2);
                }))
                return false;
    return true;
}

// ldmatrix takes four 8 x 8 matrices, eight rows' 16 bytes at a time, in the two orders of smem_tile.h.
template <class Layout>
static bool operands_of_16_bits() {
    for (const bool rows_first : {true, false})
        for (int row0 = 0; row0 < Layout::rows; row0 += 16)
            for (int column0 = 0; column0 < Layout::columns; column0 += 16) {
                bool right = true;
                const auto address = [&](int lane) {
                    const int row = rows_first ? lane % 16 : lane % 8 + lane / 16 * 8;
                    const int column = rows_first ? lane / 16 * 8 : lane / 8 % 2 * 8;
                    const uint32_t moved = Layout::at(place<Layout>(row, column), row0, column0);
                    right &= moved == place<Layout>(row0 + row, column0 + column);
                    return moved;
                };
                if (!warp_conflict_free(16, address) || !right) return false;
            }
    return true;
}

template <class Layout, int kExtent>
static bool operands_of_32_bits() {
    const uint32_t tile = 4096;
    for (int start = 0; start < Layout::columns; start += kExtent)
        for (int row = 0; row < Layout::rows; row += 8)
            for (int column = 0; column < kExtent; column += 8) {
                const uint32_t part = Layout::template part<kExtent>(tile, 0, start);
                const auto by_rows = [&](int lane) {
                    return Layout::at(Layout::by_rows(part, lane), row, column);
                };
                const auto even = [&](int lane) {
                    return Layout::at(Layout::by_columns(part, lane), row, column);
                };
                const auto odd = [&](int lane) {
                    return Layout::at_odd_row(Layout::by_columns(part, lane), row, column);
                };
                for (int lane = 0; lane < 32; ++lane) {
                    const int g = lane / 4, t = lane % 4, first = start + column;
                    if (by_rows(lane) != tile + place<Layout>(row + g, first + 2 * t) ||
                        by_rows(lane) + 4 != tile + place<Layout>(row + g, first + 2 * t + 1) ||
                        even(lane) != tile + place<Layout>(row + 2 * t, first + g) ||
                        odd(lane) != tile + place<Layout>(row + 2 * t + 1, first + g))
                        return false;
                }
                if (!warp_conflict_free(8, by_rows) || !warp_conflict_free(4, even) ||
                    !warp_conflict_free(4, odd))
                    return false;
            }
    return true;
}

template <int kRows, int kColumns>
static bool check() {
    using Half = TileLayout<kRows, kColumns, 2>;
    using Single = TileLayout<kRows, kColumns, 4>;
    if (!elements_have_places<Half>() || !copies_and_stores<Half>() || !operands_of_16_bits<Half>())
        return fail("wrong", kRows, kColumns, 2);
    if (!elements_have_places<Single>() || !copies_and_stores<Single>() ||
        !operands_of_32_bits<Single, 16>() || !operands_of_32_bits<Single, 32>() ||
        !operands_of_32_bits<Single, kColumns>())
        return fail("wrong", kRows, kColumns, 4);
    return true;
}

int main() {
    const bool right = check<64, 32>() && check<64, 64>() && check<32, 96>() && check<64, 128>() &&
                       check<32, 160>() && check<64, 192>() && check<128, 256>();
    std::printf("%ld accesses\n", long(accesses));
    return right && accesses > 10000 ? 0 : 1;
}
