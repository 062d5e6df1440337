// Hopper's own kernels can be switched off, to compare them with the portable ones: FLASH_ATTN_SM90=0.
#pragma once

#include <cstdlib>
#include <string_view>

namespace flash::cuda::sm90 {

inline const char* switched_off() {
    const char* const value = std::getenv("FLASH_ATTN_SM90");
    return value && std::string_view(value) == "0" ? "FLASH_ATTN_SM90=0 switches it off" : nullptr;
}

}  // namespace flash::cuda::sm90
