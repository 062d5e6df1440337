// What the second-level cache is to do with the lines of a copy (PTX ISA, "createpolicy"): a type that copies
// take as their last argument.
#pragma once

#include <cstdint>

namespace flash::cuda {

struct NoHint {};

// Nobody reads them again. A kernel that streams more than the cache holds would else drive out the code that
// the next one begins with, whose first copies then wait for the memory, too.
struct EvictFirst {
    uint64_t policy;

    __device__ __forceinline__ EvictFirst() {
        asm("createpolicy.fractional.L2::evict_first.b64 %0;\n" : "=l"(policy));
    }
};

}  // namespace flash::cuda
