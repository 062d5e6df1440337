// setmaxnreg: a warpgroup gives registers back, or takes those that another one gave back (PTX ISA,
// "setmaxnreg"). By all its warps; multiples of 8.
#pragma once

namespace flash::cuda {

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace flash::cuda
