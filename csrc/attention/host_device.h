// attention/ is compiled by the host compiler and by nvcc. Always inline: the CPU engine compiles these
// headers once per instruction set, and an out-of-line copy could be shared between variants by the linker.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline __attribute__((always_inline))
#endif
