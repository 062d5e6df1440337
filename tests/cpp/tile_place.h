// Where the tests expect an element of a shared tile: its chunk's offset and its place in the chunk.
#pragma once

#include <cstdint>

template <class Layout>
constexpr uint32_t place(int row, int column) {
    return Layout::offset(row, column / Layout::panel, column % Layout::panel / Layout::chunk_elements) +
           column % Layout::chunk_elements * Layout::element_bytes;
}
