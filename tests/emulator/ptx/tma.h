#pragma once

namespace flash::cuda {

inline void tma_prefetch_map(const CUtensorMap*) {}

inline void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int row, int head,
                     int batch) {
    const auto* const from = reinterpret_cast<const emulator::TensorMap*>(map);
    if (x * from->strides[0] % 16) emulator::fail("a copy that does not begin at 16 bytes");
    const int element_bytes = int(from->strides[0]), bytes = from->box[0] * from->box[1] * element_bytes;
    char* const to = emulator::at_shared<char>(shared, bytes, from->swizzled ? 1024 : 128);
    auto* const told = emulator::at_shared<emulator::Mbarrier>(barrier);
    emulator::start([=] {
        for (int i = 0; i < from->box[1]; ++i)
            for (int j = 0; j < from->box[0]; ++j) {
                const int64_t at[] = {x + j, row + i, head, batch};
                const char* source = from->data;
                bool inside = true;
                for (int k = 0; k < 4; ++k) {
                    inside = inside && at[k] >= 0 && at[k] < from->extents[k];
                    source += at[k] * from->strides[k];
                }
                uint32_t place = shared + (i * from->box[0] + j) * element_bytes;
                if (from->swizzled) place ^= place / 128 % 8 * 16;
                uint32_t element = 0;
                if (inside) std::memcpy(&element, source, element_bytes);
                std::memcpy(to + (place - shared), &element, element_bytes);
            }
        told->receive(bytes);
    });
}

inline void fence_async_proxy() {}
inline void fence_async_proxy_of_memory() {}

}  // namespace flash::cuda
