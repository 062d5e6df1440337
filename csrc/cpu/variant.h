// The CPU engine as compiled for one instruction set. setup.py compiles forward.cpp and backward.cpp once per
// row of its table; engine.cpp picks the best variant that the machine runs.
#pragma once

#include "../problem.h"
#include "parallel.h"

namespace flash::cpu {

struct Variant {
    const char* isa;
    size_t (*forward_scratch_bytes)(const ForwardProblem&);    // per thread
    size_t (*backward_scratch_bytes)(const BackwardProblem&);  // per thread
    void (*forward)(const ForwardProblem&, const Threads&);
    void (*backward)(const BackwardProblem&, const Threads&);
};

#define FLASH_DECLARE_CPU_VARIANT(isa)                     \
    namespace isa {                                        \
    size_t forward_scratch_bytes(const ForwardProblem&);   \
    size_t backward_scratch_bytes(const BackwardProblem&); \
    void forward(const ForwardProblem&, const Threads&);   \
    void backward(const BackwardProblem&, const Threads&); \
    }

// Returns work(pointer to the problem's element type).
#define FLASH_DISPATCH_ELEMENT(dtype, work)  \
    switch (dtype) {                         \
        case DType::float16:                 \
            return work((Half*)nullptr);     \
        case DType::bfloat16:                \
            return work((BFloat16*)nullptr); \
        case DType::float32:                 \
            return work((float*)nullptr);    \
        case DType::float64:                 \
            return work((double*)nullptr);   \
    }                                        \
    __builtin_unreachable()

}  // namespace flash::cpu
