#pragma once

namespace flash::cuda {

inline uint32_t shared_address(const void* pointer) {
    const int64_t offset = static_cast<const char*>(pointer) - emulator::shared_memory();
    if (offset < 0 || offset > emulator::shared_bytes()) emulator::fail("not an address in shared memory");
    return uint32_t(offset);
}

inline uint32_t opaque(uint32_t x) {
    return x;
}

template <class T>
void store_shared(uint32_t address, T x) {
    *emulator::at_shared<T>(address) = x;
}

inline uint32_t load_shared_4(uint32_t address) {
    return *emulator::at_shared<uint32_t>(address);
}
inline uint2 load_shared_8(uint32_t address) {
    return *emulator::at_shared<uint2>(address);
}
inline uint4 load_shared_16(uint32_t address) {
    return *emulator::at_shared<uint4>(address);
}

}  // namespace flash::cuda
