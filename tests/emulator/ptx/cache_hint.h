#pragma once

namespace flash::cuda {

// There is no such cache here: every hint is none.
struct NoHint {};
struct EvictFirst : NoHint {};

}  // namespace flash::cuda
