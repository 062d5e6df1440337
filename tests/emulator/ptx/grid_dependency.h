// Grids run one after the other.
#pragma once

namespace flash::cuda {

inline void let_next_grid_start() {}
inline void await_grid_before() {}

}  // namespace flash::cuda
