#pragma once

#include "cache_hint.h"

namespace flash::cuda {

inline void tma_prefetch_map(const CUtensorMap*) {}

// Each element of a box at (x, row, head, batch): use(its place in shared memory, from the box's first byte,
// and where it lies in the tensor, or nullptr outside of that).
template <class Use>
void each_of_box(const emulator::TensorMap& map, uint32_t shared, int x, int row, int head, int batch,
                 const Use& use) {
    const int element_bytes = int(map.strides[0]);
    for (int i = 0; i < map.box[2] * map.box[1]; ++i)
        for (int j = 0; j < map.box[0]; ++j) {
            const int64_t at[] = {x + j, row + i % map.box[1], head + i / map.box[1], batch};
            char* element = const_cast<char*>(map.data);
            bool inside = true;
            for (int k = 0; k < 4; ++k) {
                inside = inside && at[k] >= 0 && at[k] < map.extents[k];
                element += at[k] * map.strides[k];
            }
            uint32_t place = shared + (i * map.box[0] + j) * element_bytes;
            if (map.swizzled) place ^= place / 128 % 8 * 16;
            use(place - shared, inside ? element : nullptr);
        }
}

// The box's place in shared memory, and its bytes.
inline char* place_of_box(const emulator::TensorMap& map, uint32_t shared, int x, int& bytes) {
    if (x * map.strides[0] % 16) emulator::fail("a copy that does not begin at 16 bytes");
    bytes = map.box[0] * map.box[1] * map.box[2] * int(map.strides[0]);
    return emulator::at_shared<char>(shared, bytes, map.swizzled ? 1024 : 128);
}

inline void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int row, int head,
                     int batch, NoHint = {}) {
    const auto* const from = reinterpret_cast<const emulator::TensorMap*>(map);
    int bytes;
    char* const to = place_of_box(*from, shared, x, bytes);
    auto* const told = emulator::at_shared<emulator::Mbarrier>(barrier);
    emulator::start([=] {
        each_of_box(*from, shared, x, row, head, batch, [&](uint32_t place, const char* element) {
            uint32_t bits = 0;
            if (element) std::memcpy(&bits, element, from->strides[0]);
            std::memcpy(to + place, &bits, from->strides[0]);
        });
        told->receive(bytes);
    });
}

inline void tma_store(uint32_t shared, const CUtensorMap* map, int x, int row, int head, int batch) {
    const auto* const tensor = reinterpret_cast<const emulator::TensorMap*>(map);
    int bytes;
    const char* const from = place_of_box(*tensor, shared, x, bytes);
    emulator::start([=] {
        each_of_box(*tensor, shared, x, row, head, batch, [&](uint32_t place, char* element) {
            if (element) std::memcpy(element, from + place, tensor->strides[0]);
        });
    });
}

inline void fence_async_proxy() {}
inline void fence_async_proxy_of_memory() {}

}  // namespace flash::cuda
