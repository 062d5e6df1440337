#pragma once

namespace flash::cuda {

inline void add_release(uint32_t* counter, uint32_t x) {
    *counter += x;
}

inline uint32_t add_acquire_release(uint32_t* counter, uint32_t x) {
    const uint32_t before = *counter;
    *counter += x;
    return before;
}

inline uint32_t load_acquire(const uint32_t* counter) {
    return *counter;
}

inline uint64_t load_acquire(const uint64_t* ticket) {
    emulator::look_again();
    return *ticket;
}

inline void store_release(uint64_t* ticket, uint64_t x) {
    *ticket = x;
}

inline uint32_t add_relaxed(uint32_t* counter, uint32_t x) {
    return add_acquire_release(counter, x);
}

}  // namespace flash::cuda
