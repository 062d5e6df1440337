// Where the elements of a tile in shared memory lie: rows of `kColumns`, cut into panels of 128 bytes (64 for
// 16-bit tiles of 96 and 192 columns, which warps divide in halves), each panel row contiguous. The 16-byte
// chunks of a panel's row are permuted so that what a warp reads or writes at once lies in different banks:
//
//     16 bits, panel of 64   chunk ^ row % 8         eight rows, one chunk of each (ldmatrix)
//     16 bits, panel of 32   chunk ^ row / 2 % 4
//     32 bits, panel of 32   chunk ^ 2 f(row),       four rows, two neighbouring chunks of each: 8 columns
//                            f = row % 4 ^ row / 4 % 2
//
// 32-bit accesses are those of mma.m16n8k8 (smem_tile.h) with g = lane / 4 and t = lane % 4, four times 32
// bytes at once, in four places:
//
//     by rows      8 bytes a lane of row g, half a warp    rows 0 1 2 3: f 0 1 2 3    rows 4 5 6 7: f 1 0 3 2
//     by columns   4 bytes of row 2t, or of row 2t + 1     rows 0 2 4 6: f 0 2 1 3    rows 1 3 5 7: f 1 3 0 2
//
// A lane's address is made once: the permutation of (row0 + r, column0 + c) for row0 a multiple of 8 and
// column0 a multiple of 16 (32 bits: of 8) is that of (r, c) exclusive-or a constant.
#pragma once

#include <cstdint>

#include "../../attention/host_device.h"

namespace flash::cuda {

constexpr int usual_panel(int columns, int element_bytes) {
    return element_bytes == 2 && columns % 64 == 0 && columns % 192 != 0 ? 64 : 32;
}

template <int kRows, int kColumns, int kElementBytes, int kPanel = usual_panel(kColumns, kElementBytes)>
struct TileLayout {
    static constexpr int rows = kRows, columns = kColumns;
    static constexpr int element_bytes = kElementBytes;
    static constexpr int panel = kPanel;
    static constexpr int panels = kColumns / panel;
    static constexpr int chunk_elements = 16 / kElementBytes;
    static constexpr int chunks = panel / chunk_elements;  // in a panel's row
    static constexpr int row_bytes = panel * kElementBytes;
    static constexpr int panel_bytes = kRows * row_bytes;
    static constexpr int bytes = kRows * kColumns * kElementBytes;
    static_assert(kElementBytes == 2 || kElementBytes == 4);
    static_assert(kColumns % 32 == 0 && kRows % 8 == 0);

    // Byte offset of the chunk'th 16 bytes of a panel's row.
    FLASH_HOST_DEVICE static constexpr uint32_t offset(int row, int panel_index, int chunk) {
        const int permuted = chunk ^ (kElementBytes == 4 ? (row % 4 ^ row / 4 % 2) * 2
                                      : panel == 64      ? row % 8
                                                         : row / 2 % 4);
        return panel_index * panel_bytes + row * row_bytes + permuted * 16;
    }

    // Where a lane's address, or a part's, moves by whole 8 rows and 16 columns (32 bits: 8).
    FLASH_HOST_DEVICE static constexpr uint32_t at(uint32_t address, int row, int column) {
        return (address ^ (column % panel / chunk_elements * 16)) + column / panel * panel_bytes +
               row * row_bytes;
    }

    // A part of the tile that starts at `column`. Parts are whole panels or divide one, so that their columns
    // and the start share no bit.
    template <int kExtent>
    FLASH_HOST_DEVICE static constexpr uint32_t part(uint32_t address, int row, int column) {
        static_assert(kExtent % panel == 0 || panel % kExtent == 0);
        return at(address, row, column);
    }

    // 32 bits: row g, columns 2t and 2t + 1 of what starts at `address`, which may be a part's.
    FLASH_HOST_DEVICE static constexpr uint32_t by_rows(uint32_t address, int lane) {
        static_assert(kElementBytes == 4);
        return inside(address, lane / 4, lane % 4 * 2);
    }

    // 32 bits: row 2t, column g.
    FLASH_HOST_DEVICE static constexpr uint32_t by_columns(uint32_t address, int lane) {
        static_assert(kElementBytes == 4);
        return inside(address, lane % 4 * 2, lane / 4);
    }

    // at() for row 2t + 1 of a lane's address by columns: its f differs from that of row 2t by 1.
    FLASH_HOST_DEVICE static constexpr uint32_t at_odd_row(uint32_t by_columns, int row, int column) {
        return at(by_columns ^ 32, row + 1, column);
    }

  private:
    // (row, column) of the 8 x 8 elements at `address`, whose lowest 7 bits are those of a multiple of 8
    // columns in an unpermuted row.
    FLASH_HOST_DEVICE static constexpr uint32_t inside(uint32_t address, int row, int column) {
        const uint32_t permutation = offset(row, 0, 0) % row_bytes;
        return (address ^ permutation) + row * row_bytes + column * kElementBytes;
    }
};

}  // namespace flash::cuda
