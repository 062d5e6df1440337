// wgmma: a warpgroup (four warps whose first is a multiple of 4) multiplies tiles that lie in shared memory,
// and A also in registers, while its warps go on (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions"). D is 64 x kColumns; warp w has rows 16 w .. 16 w + 15, and its lanes what Fragment<16,
// kColumns> says; A in registers is as mma.m16n8k16's.
//
// A descriptor tells where a tile lies in shared memory (PTX ISA, "Shared Memory Matrix Layout"), here always
// in panels of 128 bytes, swizzled: chunk ^ row % 8 as in TileLayout, panels at multiples of 1024 bytes.
// Depth is contiguous in Q and K (a panel's row: 64 of depth), columns are in V (`transposed`; a panel's row:
// 64 columns of one depth), and so may be rows of A (`left_transposed`; a panel's row: 64 rows of one depth).
#pragma once

#include <cstdint>

#include "../../problem.h"

namespace flash::cuda {

// panel_bytes: from a panel to the next, of transposed tiles.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int panel_bytes) {
    constexpr uint64_t swizzle_128 = 1, eight_rows = 1024;
    return swizzle_128 << 62 | eight_rows / 16 << 32 | uint64_t(panel_bytes / 16) << 16 |
           (address & 0x3ffff) / 16;
}

// Before the first wgmma that uses registers which other instructions wrote.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Until at most `pending` of the committed groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}

// Registers stay what they are until here, as far as the compiler can tell.
template <int kCount>
__device__ __forceinline__ void keep(float (&d)[kCount]) {
#pragma unroll
    for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep(uint32_t (&words)[kCount]) {
#pragma unroll
    for (uint32_t& x : words) asm volatile("" : "+r"(x)::"memory");
}
// One register, what it is made of forgotten.
__device__ __forceinline__ void keep(uint32_t& word) {
    asm volatile("" : "+r"(word));
}

// Registers may be anything from here on.
template <int kCount>
__device__ __forceinline__ void undefine(float (&d)[kCount]) {
#pragma unroll
    for (float& x : d) asm volatile("" : "=f"(x)::"memory");
}

#define FLASH_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASH_REGISTERS_32 FLASH_R0 FLASH_R8
#define FLASH_REGISTERS_48 FLASH_R0 FLASH_R8 FLASH_R16
#define FLASH_REGISTERS_64 FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24
#define FLASH_REGISTERS_80 FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32
#define FLASH_REGISTERS_96 FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40
#define FLASH_REGISTERS_112 FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40 FLASH_R48
#define FLASH_REGISTERS_128 FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40 FLASH_R48 FLASH_R56
#define FLASH_REGISTERS_176                                                                           \
    FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40 FLASH_R48 FLASH_R56 FLASH_R64 FLASH_R72 \
        FLASH_R80
#define FLASH_REGISTERS_192                                                                           \
    FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40 FLASH_R48 FLASH_R56 FLASH_R64 FLASH_R72 \
        FLASH_R80 FLASH_R88
#define FLASH_REGISTERS_256                                                                           \
    FLASH_R0 FLASH_R8 FLASH_R16 FLASH_R24 FLASH_R32 FLASH_R40 FLASH_R48 FLASH_R56 FLASH_R64 FLASH_R72 \
        FLASH_R80 FLASH_R88 FLASH_R96 FLASH_R104 FLASH_R112 FLASH_R120

#define FLASH_D8(i)                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH_D_32 FLASH_D8(0), FLASH_D8(8)
#define FLASH_D_48 FLASH_D8(0), FLASH_D8(8), FLASH_D8(16)
#define FLASH_D_64 FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24)
#define FLASH_D_80 FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32)
#define FLASH_D_96 FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40)
#define FLASH_D_112 \
    FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40), FLASH_D8(48)
#define FLASH_D_128                                                                                 \
    FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40), FLASH_D8(48), \
        FLASH_D8(56)
#define FLASH_D_176                                                                                 \
    FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40), FLASH_D8(48), \
        FLASH_D8(56), FLASH_D8(64), FLASH_D8(72), FLASH_D8(80)
#define FLASH_D_192                                                                                 \
    FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40), FLASH_D8(48), \
        FLASH_D8(56), FLASH_D8(64), FLASH_D8(72), FLASH_D8(80), FLASH_D8(88)
#define FLASH_D_256                                                                                        \
    FLASH_D8(0), FLASH_D8(8), FLASH_D8(16), FLASH_D8(24), FLASH_D8(32), FLASH_D8(40), FLASH_D8(48),        \
        FLASH_D8(56), FLASH_D8(64), FLASH_D8(72), FLASH_D8(80), FLASH_D8(88), FLASH_D8(96), FLASH_D8(104), \
        FLASH_D8(112), FLASH_D8(120)

// D = A B + (accumulate ? D : 0), 16 of depth.
template <DType dtype, int kColumns, bool transposed, bool left_transposed = false>
struct Wgmma;

#define FLASH_WGMMA(dtype, type, n, left_transposed, transposed, a, b, c, e, f, p_ss, p_rs)                  \
    template <>                                                                                              \
    struct Wgmma<dtype, n, transposed, left_transposed> {                                                    \
        __device__ __forceinline__ static void multiply(float (&d)[n / 2], uint64_t left, uint64_t right,    \
                                                        bool accumulate) {                                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " p_ss                                              \
                         ", 0;\n"                                                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                     \
                         " {" FLASH_REGISTERS_##n "}, " a ", " b ", p, 1, 1, " #left_transposed              \
                                                  ", " #transposed "; }\n"                                   \
                         : FLASH_D_##n                                                                       \
                         : "l"(left), "l"(right), "r"(int(accumulate)));                                     \
        }                                                                                                    \
        __device__ __forceinline__ static void multiply(float (&d)[n / 2], const uint32_t (&left)[4],        \
                                                        uint64_t right, bool accumulate) {                   \
            asm volatile(                                                                                    \
                "{ .reg .pred p; setp.ne.b32 p, " p_rs                                                       \
                ", 0;\n"                                                                                     \
                "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FLASH_REGISTERS_##n     \
                "}, {" a ", " b ", " c ", " e "}, " f ", p, 1, 1, " #transposed "; }\n"                      \
                : FLASH_D_##n                                                                                \
                : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int(accumulate))); \
        }                                                                                                    \
    };

#define FLASH_WGMMA_OF(n, ...)                                 \
    FLASH_WGMMA(DType::bfloat16, "bf16", n, 0, 0, __VA_ARGS__) \
    FLASH_WGMMA(DType::bfloat16, "bf16", n, 0, 1, __VA_ARGS__) \
    FLASH_WGMMA(DType::bfloat16, "bf16", n, 1, 1, __VA_ARGS__) \
    FLASH_WGMMA(DType::float16, "f16", n, 0, 0, __VA_ARGS__)   \
    FLASH_WGMMA(DType::float16, "f16", n, 0, 1, __VA_ARGS__)   \
    FLASH_WGMMA(DType::float16, "f16", n, 1, 1, __VA_ARGS__)

FLASH_WGMMA_OF(32, "%16", "%17", "%18", "%19", "%20", "%18", "%21")
FLASH_WGMMA_OF(48, "%24", "%25", "%26", "%27", "%28", "%26", "%29")
FLASH_WGMMA_OF(64, "%32", "%33", "%34", "%35", "%36", "%34", "%37")
FLASH_WGMMA_OF(80, "%40", "%41", "%42", "%43", "%44", "%42", "%45")
FLASH_WGMMA_OF(96, "%48", "%49", "%50", "%51", "%52", "%50", "%53")
FLASH_WGMMA_OF(112, "%56", "%57", "%58", "%59", "%60", "%58", "%61")
FLASH_WGMMA_OF(128, "%64", "%65", "%66", "%67", "%68", "%66", "%69")
FLASH_WGMMA_OF(176, "%88", "%89", "%90", "%91", "%92", "%90", "%93")
FLASH_WGMMA_OF(192, "%96", "%97", "%98", "%99", "%100", "%98", "%101")
FLASH_WGMMA_OF(256, "%128", "%129", "%130", "%131", "%132", "%130", "%133")

}  // namespace flash::cuda
