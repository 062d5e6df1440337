// The products of csrc/cuda/sm90/warpgroup_product.h for FLASH_DTYPE: every number of columns that wgmma has
// here, both orders of an operand in shared memory, A in registers or some of it; against a plain loop in
// double.
#include "../../csrc/cuda/ptx/tma.h"
#include "../../csrc/cuda/sm90/tensor_map.h"
#include "../../csrc/cuda/sm90/warpgroup_product.h"
#include "../../csrc/cuda/tile/tile_layout.h"
#include "../../csrc/cuda/tile/warp_product.h"
#include "../cpp/tile_place.h"
#include "device_case.h"
#include "formats.h"

namespace flash::cuda {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr int kThreads = 128;

// What the copies leave of kRows x kColumns: whole panels, zeros where the columns end inside one.
template <int kRows, int kColumns>
using Tile = TileLayout<kRows, sm90::in_whole_panels(kColumns), 2, sm90::kPanel>;

extern __shared__ __align__(1024) char memory[];

template <class T>
__device__ uint16_t& element(char* tile, int row, int column) {
    return *reinterpret_cast<uint16_t*>(tile + place<T>(row, column));
}

// step: from a panel's first column to the next one's.
template <class T>
__device__ void fill(char* tile, const uint16_t* from, int columns, int step = sm90::kPanel) {
    for (int i = threadIdx.x; i < T::rows * T::columns; i += kThreads) {
        const int row = i / T::columns, place = i % T::columns;
        const int column = place / sm90::kPanel * step + place % sm90::kPanel;
        element<T>(tile, row, place) = column < columns ? from[row * columns + column] : 0;
    }
}

// D [64, N] = A B, A [64, K], in memory as kRows x kColumns each.
template <int N, int K>
struct RowsByRows {
    static constexpr const char* name = "rows by rows";
    static constexpr int a_rows = 64, a_columns = K, b_rows = N, b_columns = K;

    __device__ static void run(Fragment<16, N>& d, uint32_t a, uint32_t b) {
        sm90::multiply_rows_by_rows<kDType, K, N>(d, a, 64, b);
    }
};

template <int N, int K>
struct ColumnsByColumns {
    static constexpr const char* name = "columns by columns";
    static constexpr int a_rows = K, a_columns = 64, b_rows = K, b_columns = N;

    __device__ static void run(Fragment<16, N>& d, uint32_t a, uint32_t b) {
        sm90::multiply_columns_by_columns<kDType, K, N>(d, a, b);
    }
};

template <int K>
using Left = RegisterOperand<kDType, 16, K>;

// By way of accumulators, as P gets there.
template <int K>
__device__ Left<K> in_registers() {
    Fragment<16, K> from;
    for (int r = 0; r < from.rows; ++r)
        for (int c = 0; c < from.columns; ++c)
            from.at(r, c) =
                unpack<kDType>(
                    element<Tile<64, K>>(memory, int(threadIdx.x) / 32 * 16 + from.row(r), from.column(c)))
                    .x;
    return Left<K>(from);
}

template <int N, int K>
struct RegistersByRows {
    static constexpr const char* name = "registers by rows";
    static constexpr int a_rows = 64, a_columns = K, b_rows = N, b_columns = K;

    __device__ static void run(Fragment<16, N>& d, uint32_t, uint32_t b) {
        const Left<K> a = in_registers<K>();
        wgmma_fence();
        sm90::multiply_registers_by_rows<kDType, K, N>(d, a.value, b);
    }
};

// Its first columns, and the others from panels that overlap.
template <int N, int K>
struct HeldRowsByRows : RowsByRows<N, K> {
    static constexpr const char* name = "held rows by rows";
    static constexpr int step = 48;

    __device__ static void run(Fragment<16, N>& d, uint32_t a, uint32_t b) {
        sm90::HeldRows<kDType, 32> held;
        held.load<Tile<64, K>>(memory, int(threadIdx.x) / 32 * 16);
        wgmma_fence();
        sm90::multiply_held_rows_by_rows<kDType, K, step>(d, held, a, 64, b);
    }
};

template <int N, int K>
struct RegistersByColumns {
    static constexpr const char* name = "registers by columns";
    static constexpr int a_rows = 64, a_columns = K, b_rows = K, b_columns = N;

    __device__ static void run(Fragment<16, N>& d, uint32_t, uint32_t b) {
        const Left<K> a = in_registers<K>();
        d.clear();
        wgmma_fence();
        sm90::multiply_registers_by_columns<kDType, K, N>(d, a.value, b);
    }
};

template <class Product, int N>
__global__ void __launch_bounds__(kThreads) multiply(const uint16_t* a, const uint16_t* b, float* to) {
    using A = Tile<Product::a_rows, Product::a_columns>;
    using B = Tile<Product::b_rows, Product::b_columns>;
    if constexpr (requires { Product::step; })
        fill<A>(memory, a, Product::a_columns, Product::step);
    else
        fill<A>(memory, a, Product::a_columns);
    fill<B>(memory + A::bytes, b, Product::b_columns);
    fence_async_proxy();
    __syncthreads();
    Fragment<16, N> d;
    wgmma_fence();
    Product::run(d, shared_address(memory), shared_address(memory) + A::bytes);
    wgmma_commit();
    wgmma_wait<0>();
    keep(sm90::registers_of(d));
    for (int r = 0; r < d.rows; ++r)
        for (int c = 0; c < d.columns; ++c)
            to[(int(threadIdx.x) / 32 * 16 + d.row(r)) * N + d.column(c)] = d.at(r, c);
}

template <template <int, int> class Kind, int N, int K>
bool product() {
    using Product = Kind<N, K>;
    // Of sums whose terms are cut off now and then.
    Case result(std::string(Product::name) + ", 64 x " + std::to_string(N) + " x " + std::to_string(K),
                (K / 4 + 4) * 0x1p-23);
    std::vector<uint16_t> a(Product::a_rows * Product::a_columns), b(Product::b_rows * Product::b_columns);
    for (auto* operand : {&a, &b})
        for (uint16_t& x : *operand) x = uint16_t(encoded(kDType, rounded(kDType, uniform(-1, 1))));
    const DeviceArray<uint16_t> device_a(a), device_b(b);
    const DeviceArray<float> to(64 * N);
    constexpr int bytes =
        Tile<Product::a_rows, Product::a_columns>::bytes + Tile<Product::b_rows, Product::b_columns>::bytes;
    flash::check(
        cudaFuncSetAttribute(multiply<Product, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    multiply<Product, N><<<1, kThreads, bytes>>>(device_a.data(), device_b.data(), to.data());
    const std::vector<float> actual = to.read();
    const auto left = [&](int i, int k) {
        return decoded(kDType,
                       a[Product::a_rows == K ? k * Product::a_columns + i : i * Product::a_columns + k]);
    };
    const auto right = [&](int k, int j) {
        return decoded(kDType, b[Product::b_rows == N && Product::b_columns == K ? j * K + k : k * N + j]);
    };
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < N; ++j) {
            double expected = 0, magnitude = 0;
            for (int k = 0; k < K; ++k) {
                expected += left(i, k) * right(k, j);
                magnitude += std::fabs(left(i, k) * right(k, j));
            }
            result.error(std::fabs(actual[i * N + j] - expected) / magnitude);
        }
    return result.report();
}

// Depths that no number of columns or rows equals, so that a mistaken order shows.
template <int N>
bool products() {
    bool right = product<RowsByRows, N, 144>() & product<RegistersByRows, N, 144>();
    right &= product<HeldRowsByRows, N, 144>();
    right &= product<RegistersByColumns, N, 144>() & product<ColumnsByColumns, N, 144>();
    return right;
}

constexpr bool (*const kCases[])() = {
    products<32>,  products<48>,  products<64>,  products<80>,  products<96>,
    products<112>, products<128>, products<176>, products<192>, products<256>,
};

}  // namespace
}  // namespace flash::cuda

int main(int argc, char** argv) {
    return flash::run_cases(argc, argv, flash::cuda::kCases);
}
