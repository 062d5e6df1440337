// Kernels that compute-sanitizer can follow (tools/sanitize.sh, FLASH_ATTN_SANITIZE=1).
#pragma once

namespace flash::cuda {

#if defined(FLASH_SANITIZED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace flash::cuda
