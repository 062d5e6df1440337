#pragma once

namespace flash::cuda {

template <class T>
T* opaque(T* pointer) {
    return pointer;
}

inline void store_global(float* to, float x, bool really) {
    if (really) *to = x;
}

inline void store_global(void* to, uint32_t x) {
    *static_cast<uint32_t*>(to) = x;
}

inline void store_global(void* to, uint2 x, bool really) {
    if (really) *static_cast<uint2*>(to) = x;
}

}  // namespace flash::cuda
