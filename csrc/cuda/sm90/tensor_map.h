// Tensor maps of what the tensor memory accelerator copies (ptx/tma.h): made on the host at every launch,
// which takes no word of the driver's but the encoding. The driver's function is looked up, not linked.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../launch.h"
#include "../sanitized.h"
#include "../tile/element.h"

namespace flash::cuda::sm90 {

constexpr int kPanel = 64;  // 16-bit elements in a panel's row of 128 bytes

// Columns of a tile of such rows in shared memory: what the tensor lacks of the last panel is zeros.
constexpr int in_whole_panels(int head_dim) {
    return (head_dim + kPanel - 1) / kPanel * kPanel;
}

// Rows of all heads: [batch, rows, heads, head_dim], batch 1 where sequences are packed.
struct Rows {
    const TensorView& view;
    int64_t batch, rows, heads, head_dim;
};

inline bool fits_tensor_map(const Rows& rows, int64_t bytes) {
    const auto counts = [](int64_t extent) { return extent > 0 && extent <= INT32_MAX; };  // coordinates
    const auto fits = [&](int64_t extent, int64_t stride) {
        return extent == 1 || (stride > 0 && stride * bytes % 16 == 0 && stride * bytes < int64_t(1) << 40);
    };
    return counts(rows.batch) && counts(rows.rows) && counts(rows.heads) && counts(rows.head_dim) &&
           reinterpret_cast<uintptr_t>(rows.view.data) % 16 == 0 &&
           fits(rows.batch, rows.view.batch_stride) && fits(rows.rows, rows.view.row_stride) &&
           fits(rows.heads, rows.view.head_stride);
}

// A tensor of four axes, the innermost one contiguous; strides, of the others, and boxes in elements.
struct MapShape {
    CUtensorMapDataType type;
    int64_t element_bytes;
    int64_t extents[4], strides[3];
    int box[3];  // of the three innermost axes
    CUtensorMapSwizzle swizzle;
};

inline CUtensorMap encoded(void* data, const MapShape& shape) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                               &found),
              "cuTensorMapEncodeTiled");
#else
        check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#endif
        if (found != cudaDriverEntryPointSuccess)
            throw std::runtime_error("flash_attn: this driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<Encode>(function);
    }();
    cuuint64_t extents[4], strides[3];
    for (int i = 0; i < 4; ++i) extents[i] = cuuint64_t(shape.extents[i]);
    for (int i = 0; i < 3; ++i)  // where there is nothing to stride over, anything that is allowed
        strides[i] = shape.extents[i + 1] == 1 ? 16 : cuuint64_t(shape.strides[i] * shape.element_bytes);
    const cuuint32_t box[] = {cuuint32_t(shape.box[0]), cuuint32_t(shape.box[1]), cuuint32_t(shape.box[2]),
                              1},
                     steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        encode(&map, shape.type, 4, data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("flash_attn: cuTensorMapEncodeTiled reports error " +
                                 std::to_string(int(result)));
    return map;
}

inline CUtensorMapDataType data_type(DType dtype) {
    return dtype == DType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Boxes are kPanel elements of box_rows rows of one head, swizzled as TileLayout's panels.
inline CUtensorMap tensor_map(const Rows& rows, DType dtype, int box_rows) {
    return encoded(rows.view.data, {data_type(dtype),
                                    element_bytes(dtype),
                                    {rows.head_dim, rows.rows, rows.heads, rows.batch},
                                    {rows.view.row_stride, rows.view.head_stride, rows.view.batch_stride},
                                    {kPanel, box_rows, 1},
                                    CU_TENSOR_MAP_SWIZZLE_128B});
}

// Boxes have so many heads of each row, next to each other.
inline CUtensorMap map_of_heads(const Rows& rows, DType dtype, int box_heads, int box_rows) {
    return encoded(rows.view.data, {data_type(dtype),
                                    element_bytes(dtype),
                                    {rows.head_dim, rows.heads, rows.rows, rows.batch},
                                    {rows.view.head_stride, rows.view.row_stride, rows.view.batch_stride},
                                    {kPanel, box_heads, box_rows},
                                    CU_TENSOR_MAP_SWIZZLE_128B});
}

// Where copies put a result, 16 rows of a warp at once, if its strides let them.
struct OutputMap {
    CUtensorMap map;
    bool fits;
};

inline OutputMap output_map(const Rows& rows, DType dtype) {
    // compute-sanitizer does not know what the copy engine writes.
    const bool fits = !kSanitized && fits_tensor_map(rows, element_bytes(dtype));
    return {fits ? tensor_map(rows, dtype, 16) : CUtensorMap{}, fits};
}

// So many rows for each of the problem's query heads; boxes are box_rows numbers of one. The first of a box
// must be at a multiple of 16 bytes.
inline CUtensorMap tensor_map(const RowStatistics& statistics, const ForwardProblem& problem, int64_t rows,
                              int box_rows) {
    return encoded(statistics.data, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                     sizeof(float),
                                     {rows, 1, problem.heads_q, problem.cu_seqlens_q ? 1 : problem.batch},
                                     {0, statistics.head_stride, statistics.batch_stride},
                                     {box_rows, 1, 1},
                                     CU_TENSOR_MAP_SWIZZLE_NONE});
}

}  // namespace flash::cuda::sm90
