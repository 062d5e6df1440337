#pragma once

namespace flash::cuda {

template <int kRegisters>
void shrink_registers() {}

template <int kRegisters>
void grow_registers() {}

}  // namespace flash::cuda
