#pragma once

namespace flash::cuda {

template <class T>
T* opaque(T* pointer) {
    return pointer;
}

inline void store_global(void* to, uint2 x) {
    *static_cast<uint2*>(to) = x;
}

}  // namespace flash::cuda
