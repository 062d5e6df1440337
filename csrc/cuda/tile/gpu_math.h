// The arithmetic of attention/score.h and attention/online_softmax.h on a GPU: exponentials of base 2, one
// instruction each.
#pragma once

#include "../../attention/host_device.h"
#include "../ptx/exp2.h"
#include "../ptx/reciprocal.h"

namespace flash::cuda {

// A factor more precise than a float, without the double that takes a GPU long.
struct PreciseFactor {
    float high, low;
    explicit PreciseFactor(double x) : high(float(x)), low(float(x - high)) {}
};

struct GpuMath {
    using Real = float;
    using Value = float;
    using Condition = bool;

    static constexpr double unit = 1.4426950408889634;  // log2(e)

    __device__ __forceinline__ static float broadcast(float x) { return x; }
    __device__ __forceinline__ static float select(bool condition, float yes, float no) {
        return condition ? yes : no;
    }
    __device__ __forceinline__ static float exponential(float x) { return exp2_approximate(x); }
    // 0 from 2^126 on.
    __device__ __forceinline__ static float reciprocal(float x) { return reciprocal_approximate(x); }
    // x * factor + log(y), rounded once: the backward recomputes every probability from it.
    __device__ __forceinline__ static float plus_log(float x, double factor, float y) {
        return float(x * factor + double(logf(y)));
    }
    __device__ __forceinline__ static float plus_log(float x, PreciseFactor factor, float y) {
        return fmaf(x, factor.high, fmaf(x, factor.low, logf(y)));
    }
    // 1 - 2 / (1 + e^2x), right at both infinities, and near 0, where that would cancel, an odd polynomial of
    // relative error 4e-8 (minimax on [-0.55, 0.55]).
    __device__ __forceinline__ static float tanh(float x) {
        const float square = x * x;
        float ratio = fmaf(square, 0.0164383977f, -0.0526722244f);
        ratio = fmaf(square, ratio, 0.133207311f);
        ratio = fmaf(square, ratio, -0.333329469f);
        const float near = fmaf(x, square * ratio, x);
        const float far = 1 - __fdividef(2, 1 + exp2_approximate(x * float(2 * unit)));
        return fabsf(x) < 0.55f ? near : far;
    }
};

}  // namespace flash::cuda
