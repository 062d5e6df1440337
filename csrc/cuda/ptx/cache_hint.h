// What the second-level cache is to do with the lines of a copy (PTX ISA, "createpolicy").
#pragma once

#include <cstdint>

namespace flash::cuda {

struct CacheHint {
    uint64_t policy;

    // Those of what nobody reads again. A kernel that streams more than the cache holds would else drive out
    // the code that the next one begins with, whose first copies then wait for the memory, too.
    __device__ __forceinline__ static CacheHint evict_first() {
        CacheHint hint;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;\n" : "=l"(hint.policy));
        return hint;
    }
};

}  // namespace flash::cuda
