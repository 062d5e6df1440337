// The products of csrc/cuda/tile/warp_product.h for FLASH_DTYPE, on tiles of every shape that kernels have,
// divided among four warps as kernels do, against a plain loop in double.
#include "../../csrc/cuda/tile/warp_product.h"
#include "../cpp/tile_place.h"
#include "device_case.h"
#include "formats.h"

namespace flash::cuda {
namespace {

constexpr DType kDType = DType::FLASH_DTYPE;
constexpr bool kSingle = kDType == DType::float32;
constexpr int kWarps = 4;
using Element = std::conditional_t<kSingle, uint32_t, uint16_t>;

template <int kRows, int kColumns>
using Tile = SmemTile<kRows, kColumns, element_bytes(kDType)>;

extern __shared__ __align__(128) char memory[];

// kRows x kColumns of D, divided among warps: kWarpRows of them along the rows, the others along the columns.
template <int kRows, int kColumns, int kWarpRows>
struct WarpPart {
    static constexpr int rows = kRows / kWarpRows, columns = kColumns / (kWarps / kWarpRows);
    using Accumulators = Fragment<rows, columns>;

    __device__ static int row() { return int(threadIdx.x) / 32 / (kWarps / kWarpRows) * rows; }
    __device__ static int column() { return int(threadIdx.x) / 32 % (kWarps / kWarpRows) * columns; }

    // d [kRows, kColumns]
    __device__ static void load(Accumulators& part, const float* d) {
        for (int r = 0; r < part.rows; ++r)
            for (int c = 0; c < part.columns; ++c)
                part.at(r, c) = d[(row() + part.row(r)) * kColumns + column() + part.column(c)];
    }
    __device__ static void store(const Accumulators& part, float* d) {
        for (int r = 0; r < part.rows; ++r)
            for (int c = 0; c < part.columns; ++c)
                d[(row() + part.row(r)) * kColumns + column() + part.column(c)] = part.at(r, c);
    }
};

template <class T>
__device__ Element& element(char* tile, int row, int column) {
    return *reinterpret_cast<Element*>(tile + place<T>(row, column));
}

template <class T>
__device__ void fill(char* tile, const Element* from) {
    for (int i = threadIdx.x; i < T::rows * T::columns; i += kWarps * 32)
        element<T>(tile, i / T::columns, i % T::columns) = from[i];
}

// D [M, N] += A B. The shapes of A and B are those of the tiles that hold them.
template <int M, int N, int K, int kWarpRows>
struct RowsByRows {
    static constexpr const char* name = "rows by rows";
    using A = Tile<M, K>;
    using B = Tile<N, K>;
    using Part = WarpPart<M, N, kWarpRows>;
    static constexpr int a_row = K, a_depth = 1, b_column = K, b_depth = 1;  // strides of A[i][k] and B[k][j]

    __device__ static void run(typename Part::Accumulators& d, uint32_t a, uint32_t b) {
        multiply_rows_by_rows<kDType, A, B>(d, A::lane_rows_first(a) + Part::row() * A::row_bytes,
                                            B::lane_columns_first(b) + Part::column() * B::row_bytes);
    }
};

template <int M, int N, int K, int kWarpRows>
struct RowsByColumns {
    static constexpr const char* name = "rows by columns";
    using A = Tile<M, K>;
    using B = Tile<K, N>;
    using Part = WarpPart<M, N, kWarpRows>;
    static constexpr int a_row = K, a_depth = 1, b_column = 1, b_depth = N;

    __device__ static void run(typename Part::Accumulators& d, uint32_t a, uint32_t b) {
        multiply_rows_by_columns<kDType, A, B>(
            d, A::lane_rows_first(a) + Part::row() * A::row_bytes,
            B::template part<Part::columns>(B::lane_rows_first(b), 0, Part::column()));
    }
};

template <int M, int N, int K, int kWarpRows>
struct ColumnsByColumns {
    static constexpr const char* name = "columns by columns";
    using A = Tile<K, M>;
    using B = Tile<K, N>;
    using Part = WarpPart<M, N, kWarpRows>;
    static constexpr int a_row = 1, a_depth = M, b_column = 1, b_depth = N;

    __device__ static void run(typename Part::Accumulators& d, uint32_t a, uint32_t b) {
        multiply_columns_by_columns<kDType, A, B>(
            d, A::template part<Part::rows>(A::lane_columns_first(a), 0, Part::row()),
            B::template part<Part::columns>(B::lane_rows_first(b), 0, Part::column()));
    }
};

// A goes from its tile into accumulators, and from there into the product.
template <int M, int N, int K, int kWarpRows>
struct RegistersByColumns {
    static constexpr const char* name = "registers by columns";
    using A = Tile<M, K>;
    using B = Tile<K, N>;
    using Part = WarpPart<M, N, kWarpRows>;
    static constexpr int a_row = K, a_depth = 1, b_column = 1, b_depth = N;
    static_assert(kWarpRows == kWarps);

    __device__ static void run(typename Part::Accumulators& d, uint32_t, uint32_t b) {
        Fragment<Part::rows, K> from;
        for (int r = 0; r < from.rows; ++r)
            for (int c = 0; c < from.columns; ++c) {
                const Element x = element<A>(memory, Part::row() + from.row(r), from.column(c));
                if constexpr (kSingle)
                    from.at(r, c) = __uint_as_float(x);
                else
                    from.at(r, c) = unpack<kDType>(x).x;
            }
        const RegisterOperand<kDType, Part::rows, K> left(from);
        multiply_registers_by_columns<kDType, B>(d, left, B::lane_rows_first(b));
    }
};

template <class Product>
__global__ void __launch_bounds__(kWarps * 32)
    multiply_tiles(const Element* a, const Element* b, const float* initial, float* d) {
    fill<typename Product::A>(memory, a);
    fill<typename Product::B>(memory + Product::A::bytes, b);
    __syncthreads();
    typename Product::Part::Accumulators sums;
    Product::Part::load(sums, initial);
    Product::run(sums, shared_address(memory), shared_address(memory) + Product::A::bytes);
    Product::Part::store(sums, d);
}

template <class Product>
struct Operands {
    std::vector<Element> a, b;
    std::vector<float> initial;

    // positive: errors of one sign would add up.
    explicit Operands(bool positive, int rows, int columns)
        : a(Product::A::bytes / sizeof(Element)),
          b(Product::B::bytes / sizeof(Element)),
          initial(rows * columns) {
        const auto draw = [&] { return rounded(kDType, uniform(positive ? 0 : -1, 1)); };
        for (Element& x : a) x = Element(encoded(kDType, draw()));
        for (Element& x : b) x = Element(encoded(kDType, draw()));
        for (float& x : initial) x = float(draw());
    }

    std::vector<float> multiply() const {
        const DeviceArray<Element> device_a(a), device_b(b);
        const DeviceArray<float> from(initial), to(initial.size());
        constexpr int bytes = Product::A::bytes + Product::B::bytes;
        check(cudaFuncSetAttribute(multiply_tiles<Product>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   bytes));
        multiply_tiles<Product>
            <<<1, kWarps * 32, bytes>>>(device_a.data(), device_b.data(), from.data(), to.data());
        return to.read();
    }
    double left(int i, int k) const { return decoded(kDType, a[i * Product::a_row + k * Product::a_depth]); }
    double right(int k, int j) const {
        return decoded(kDType, b[k * Product::b_depth + j * Product::b_column]);
    }
};

// 16 bits: every few terms the sum is truncated, and so are the terms. float32: about as good as multiplying
// and adding floats in order, which without one of the products, with operands cut off instead of rounded or
// with sums left to the tensor cores over many steps it would not be.
template <template <int, int, int, int> class Kind, int M, int N, int K, int kWarpRows>
bool product() {
    using Product = Kind<M, N, K, kWarpRows>;
    const std::string name = std::string(Product::name) + " " + std::to_string(M) + " x " +
                             std::to_string(N) + " x " + std::to_string(K) + ", " +
                             std::to_string(kWarpRows) + " warp rows";
    const double steps = K / (kSingle ? 16 : 4) + 4;
    Case largest(name, steps * 0x1p-23), mean(name + ", error over that of floats", 1.25);
    double squares = 0, squares_of_floats = 0;
    for (const bool positive : {false, true}) {
        const Operands<Product> operands(positive, M, N);
        const std::vector<float> actual = operands.multiply();
        for (int i = 0; i < M; ++i)
            for (int j = 0; j < N; ++j) {
                float in_floats = operands.initial[i * N + j];
                double expected = in_floats, magnitude = std::fabs(expected);
                for (int k = 0; k < K; ++k) {
                    const double x = operands.left(i, k), y = operands.right(k, j);
                    expected += x * y;
                    magnitude += std::fabs(x * y);
                    in_floats = std::fma(float(x), float(y), in_floats);
                }
                const double error = (actual[i * N + j] - expected) / magnitude;
                const double error_of_floats = (in_floats - expected) / magnitude;
                largest.error(std::fabs(error));
                squares += error * error;
                squares_of_floats += error_of_floats * error_of_floats;
            }
        mean.error(std::sqrt(squares / squares_of_floats));
    }
    return largest.report() & (!kSingle || mean.report());
}

// Infinities and NaN become what they become in additions and multiplications of floats, wherever they stand
// and whatever meets them; float32's largest numbers are no infinities.
template <template <int, int, int, int> class Kind>
bool special_numbers() {
    constexpr int M = 64, N = 64, K = 32;
    using Product = Kind<M, N, K, 4>;
    Case result(std::string("special numbers, ") + Product::name, 0);
    std::vector<uint32_t> special{encoded(kDType, INFINITY), encoded(kDType, -INFINITY),
                                  encoded(kDType, NAN)};
    if (kSingle) {
        for (const uint32_t nan : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xff801000u})
            special.push_back(nan);
        for (const uint32_t large : {0x7f7fffffu, 0xff7fffffu, 0x7f7ff000u, 0x7f7fefffu})
            special.push_back(large);
    }
    for (int trial = 0; trial < 4; ++trial) {
        Operands<Product> operands(false, M, N);
        // Quarters: products with the largest numbers stay finite, and zeros and ones are among them.
        for (Element& x : operands.b)
            if (random_bits() % 4 == 0) x = Element(encoded(kDType, int(random_bits() % 3) - 1));
        for (Element& x : operands.b) x = Element(encoded(kDType, rounded(kDType, decoded(kDType, x) / 4)));
        const auto put = [&](std::vector<Element>& x) {
            const int place = int(random_bits() % x.size());
            x[place] = Element(special[random_bits() % special.size()]);
        };
        for (int i = 0; i < 40; ++i) put(operands.a);
        for (int i = 0; i < 3; ++i)
            operands.b[random_bits() % operands.b.size()] = Element(special[trial % 3]);
        const std::vector<float> actual = operands.multiply();
        for (int i = 0; i < M; ++i)
            for (int j = 0; j < N; ++j) {
                double expected = operands.initial[i * N + j], magnitude = std::fabs(expected);
                for (int k = 0; k < K; ++k) {
                    const double x = operands.left(i, k) * operands.right(k, j);
                    expected += x;
                    magnitude += std::fabs(x);
                }
                // The largest numbers, which can't be rounded up, have 11 bits.
                const float sum = actual[i * N + j];
                if (!std::isfinite(expected))
                    result.same(sum, expected);
                else if (magnitude < 0x1p127)
                    result.expect(std::fabs(sum - expected) <= 0x1p-9 * magnitude);
            }
    }
    return result.report();
}

// Accumulators to one part of a tile; the rest stays as it was.
template <int kRows, int kColumns, int kWarpRows>
__global__ void __launch_bounds__(kWarps * 32) store_part(const float* from, Element* to, int warp) {
    using T = Tile<kRows, kColumns>;
    using Part = WarpPart<kRows, kColumns, kWarpRows>;
    for (int i = threadIdx.x; i < T::bytes; i += kWarps * 32) memory[i] = char(0xff);
    __syncthreads();
    typename Part::Accumulators d;
    Part::load(d, from);
    if (warp < 0 || int(threadIdx.x) / 32 == warp)
        store_fragment<kDType, T>(shared_address(memory), d, Part::row(), Part::column());
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kColumns; i += kWarps * 32)
        to[i] = element<T>(memory, i / kColumns, i % kColumns);
}

template <int kRows, int kColumns, int kWarpRows>
bool store() {
    using Part = WarpPart<kRows, kColumns, kWarpRows>;
    constexpr int warp_columns = kWarps / kWarpRows, bytes = Tile<kRows, kColumns>::bytes;
    Case result("store_fragment " + std::to_string(kRows) + " x " + std::to_string(kColumns), 0);
    for (int warp = -1; warp < kWarps; ++warp) {
        std::vector<float> numbers(kRows * kColumns);
        for (float& x : numbers) x = float(uniform(-1, 1));
        const DeviceArray<float> from(numbers);
        const DeviceArray<Element> to(numbers.size());
        const auto kernel = store_part<kRows, kColumns, kWarpRows>;
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<1, kWarps * 32, bytes>>>(from.data(), to.data(), warp);
        const std::vector<Element> actual = to.read();
        for (int i = 0; i < kRows * kColumns; ++i) {
            const int owner = i / kColumns / Part::rows * warp_columns + i % kColumns / Part::columns;
            const bool written = warp < 0 || owner == warp;
            result.expect(actual[i] ==
                          (written ? Element(encoded(kDType, rounded(kDType, numbers[i]))) : Element(-1)));
        }
    }
    return result.report();
}

constexpr bool (*const kCases[])() = {
    product<RowsByRows, 64, 64, 64, 2>,
    product<RowsByRows, 64, 64, 96, 4>,
    product<RowsByRows, 32, 64, 128, 1>,
    product<RowsByRows, 32, 64, 192, 2>,
    product<RowsByRows, 32, 32, 256, 2>,
    product<RowsByColumns, 64, 64, 64, 4>,
    product<RowsByColumns, 64, 96, 64, 4>,
    product<RowsByColumns, 64, 64, 128, 2>,
    product<RowsByColumns, 32, 192, 32, 2>,
    product<RowsByColumns, 32, 256, 64, 1>,
    product<ColumnsByColumns, 64, 64, 64, 2>,
    product<ColumnsByColumns, 64, 96, 64, 4>,
    product<ColumnsByColumns, 128, 64, 32, 2>,
    product<ColumnsByColumns, 64, 192, 32, 2>,
    product<ColumnsByColumns, 32, 256, 64, 2>,
    product<RegistersByColumns, 64, 64, 64, 4>,
    product<RegistersByColumns, 128, 96, 32, 4>,
    product<RegistersByColumns, 64, 128, 32, 4>,
    product<RegistersByColumns, 64, 192, 64, 4>,
    special_numbers<RowsByRows>,
    special_numbers<ColumnsByColumns>,
    special_numbers<RegistersByColumns>,
    store<64, 64, 2>,
    store<64, 32, 2>,
    store<64, 96, 4>,
    store<32, 96, 2>,  // a warp's 48 columns are neither whole panels nor a part of one
    store<32, 192, 2>,
    store<32, 256, 1>,
};

}  // namespace
}  // namespace flash::cuda

int main(int argc, char** argv) {
    return flash::run_cases(argc, argv, flash::cuda::kCases);
}
