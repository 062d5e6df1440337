#pragma once

namespace flash::cuda {

inline void store_global(void* to, uint2 x) {
    *static_cast<uint2*>(to) = x;
}

}  // namespace flash::cuda
