#pragma once

#include "cache_hint.h"

namespace flash::cuda {

inline void cp_async(uint32_t shared, const void* global, int bytes, bool valid) {
    char* const to = emulator::at_shared<char>(shared, bytes, bytes);
    if (reinterpret_cast<uintptr_t>(global) % bytes) emulator::fail("cp.async: alignment of the source");
    emulator::start([=] {
        if (valid)
            std::memcpy(to, global, bytes);
        else
            std::memset(to, 0, bytes);
    });
}

inline void cp_async_16(uint32_t shared, const void* global, NoHint = {}) {
    cp_async(shared, global, 16, true);
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
    cp_async(shared, global, 16, valid);
}
inline void cp_async_4(uint32_t shared, const void* global, bool valid) {
    cp_async(shared, global, 4, valid);
}

inline void cp_async_commit() {
    emulator::end_group();
}

template <int pending>
void cp_async_wait() {
    emulator::wait_for_groups(pending);
}

inline void cp_async_wait_all() {
    emulator::wait_for_all();
}

}  // namespace flash::cuda
