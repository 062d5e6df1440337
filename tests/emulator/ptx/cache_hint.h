#pragma once

namespace flash::cuda {

struct NoHint {};
struct EvictFirst {};

}  // namespace flash::cuda
