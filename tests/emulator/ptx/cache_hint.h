#pragma once

namespace flash::cuda {

struct CacheHint {
    static CacheHint evict_first() { return {}; }
};

}  // namespace flash::cuda
