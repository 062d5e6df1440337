// A kernel that starts while the one before it in its stream ends (Launch::overlaps; PTX ISA,
// "griddepcontrol"). On chips before Hopper nothing overlaps.
#pragma once

namespace flash::cuda {

// When all blocks of a grid have called this, or ended, the next one may start. It says nothing of memory.
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

// Until the grid before has ended and what it wrote is to be seen.
__device__ __forceinline__ void await_grid_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace flash::cuda
