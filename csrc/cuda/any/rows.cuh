// A group of lanes reads or writes a row of 16-bit or 32-bit elements, 16 bytes a lane where the rows allow
// it.
#pragma once

#include "../../attention/sequence.h"
#include "../tile/element.h"

namespace flash::cuda {

// Which row of which head a group of kLanes lanes works on, heads of a position next to each other as they
// lie in memory. block: blocks work in that order, from 0 on.
struct HeadRow {
    int64_t batch, row, head;
    bool exists;

    template <int kLanes>
    __device__ static HeadRow of_thread(int64_t batches, int64_t rows, int64_t heads, uint32_t block) {
        const int64_t index = (block * int64_t(blockDim.x) + threadIdx.x) / kLanes;
        const int64_t count = batches * rows * heads;
        // Divisions of 64 bits take longer than the row does.
        return count <= UINT32_MAX ? of_index(uint32_t(index), uint32_t(rows), uint32_t(heads), index < count)
                                   : of_index(index, rows, heads, index < count);
    }
    template <class Integer>
    __device__ static HeadRow of_index(Integer index, Integer rows, Integer heads, bool exists = true) {
        const Integer position = index / heads;
        return {int64_t(position / rows), int64_t(position % rows), int64_t(index % heads), exists};
    }
};

template <DType dtype>
struct ElementOf {
    using Bits = uint16_t;
    using Pair = uint32_t;  // two elements next to each other
    __device__ static float to_float(uint16_t bits) { return unpack<dtype>(bits).x; }
    __device__ static float2 to_floats(uint32_t pair) { return unpack<dtype>(pair); }
    __device__ static uint32_t pair_of(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
    __device__ static uint16_t from_float(float x) { return uint16_t(pack<dtype>(x, 0)); }
};

template <>
struct ElementOf<DType::float32> {
    using Bits = float;
    using Pair = float2;
    __device__ static float to_float(float x) { return x; }
    __device__ static float2 to_floats(float2 pair) { return pair; }
    __device__ static float2 pair_of(float low, float high) { return make_float2(low, high); }
    __device__ static float from_float(float x) { return x; }
};

// Calls run.template operator()<dtype>() for a dtype that GPU engines know.
template <class Run>
void dispatch_dtype(DType dtype, const Run& run) {
    if (dtype == DType::float16)
        run.template operator()<DType::float16>();
    else if (dtype == DType::bfloat16)
        run.template operator()<DType::bfloat16>();
    else
        run.template operator()<DType::float32>();
}

}  // namespace flash::cuda
