// What csrc/cuda/tile/ has besides the products: conversions, the place of a lane's accumulators, sums over
// four lanes, the functions of GpuMath, and where lanes read shared tiles. Against plain loops on the CPU.
#include <set>

#include "../../csrc/cuda/tile/element.h"
#include "../../csrc/cuda/tile/fragment.h"
#include "../../csrc/cuda/tile/gpu_math.h"
#include "../../csrc/cuda/tile/product_steps.h"
#include "../../csrc/cuda/tile/smem_tile.h"
#include "../cpp/tile_place.h"
#include "device_case.h"
#include "formats.h"

namespace flash::cuda {
namespace {

std::string name_of(DType dtype) {
    return dtype == DType::float16 ? "float16" : dtype == DType::bfloat16 ? "bfloat16" : "float32";
}

__global__ void unpack_pairs(const uint32_t* pairs, float2* to, uint32_t* finite, int count, DType dtype) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const bool half = dtype == DType::float16;
        to[i] = half ? unpack<DType::float16>(pairs[i]) : unpack<DType::bfloat16>(pairs[i]);
        finite[i] =
            half ? finite_or_zero<DType::float16>(pairs[i]) : finite_or_zero<DType::bfloat16>(pairs[i]);
    }
}

// Every pattern, in both halves.
template <DType dtype>
bool unpack() {
    std::vector<uint32_t> pairs;
    for (uint32_t low = 0; low < 0x10000; ++low) pairs.push_back(low | (low * 40503 & 0xffff) << 16);
    const DeviceArray<uint32_t> from(pairs), finite(pairs.size());
    const DeviceArray<float2> to(pairs.size());
    unpack_pairs<<<1, 256>>>(from.data(), to.data(), finite.data(), int(pairs.size()), dtype);
    const std::vector<float2> actual = to.read();
    const std::vector<uint32_t> cleared = finite.read();
    Case result("unpack " + name_of(dtype), 0), clear("finite_or_zero " + name_of(dtype), 0);
    for (size_t i = 0; i < pairs.size(); ++i) {
        const double low = decoded(dtype, pairs[i] & 0xffff), high = decoded(dtype, pairs[i] >> 16);
        result.same(actual[i].x, low);
        result.same(actual[i].y, high);
        clear.expect(cleared[i] == (std::isfinite(low) ? pairs[i] & 0xffff : 0) +
                                       (std::isfinite(high) ? pairs[i] & 0xffff0000 : 0));
    }
    return result.report() & clear.report();
}

__global__ void pack_pairs(const float2* from, uint32_t* half, uint32_t* bfloat, uint32_t* finite,
                           int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        half[i] = pack<DType::float16>(from[i].x, from[i].y);
        bfloat[i] = pack<DType::bfloat16>(from[i].x, from[i].y);
        finite[i] = finite_or_zero<DType::float32>(__float_as_uint(from[i].x));
    }
}

// Any float, and numbers halfway between two of the type.
std::vector<float> floats_of_all_sizes() {
    std::vector<float> numbers{INFINITY, -INFINITY,  NAN,   0,       -0.0f,
                               65504,    65519.996f, 65520, 3.3e38f, 3.4e38f};
    for (int i = 0; i < 20000; ++i) {
        numbers.push_back(float(decoded(DType::float32, random_bits())));
        numbers.push_back(float(decoded(DType::float32, random_bits() & 0xfffff000)));
        numbers.push_back(float(std::ldexp(uniform(-1, 1), int(random_bits() % 45) - 28)));
        numbers.push_back(float(std::ldexp(double(random_bits() % 4096), int(random_bits() % 30) - 36)));
    }
    return numbers;
}

bool pack() {
    const std::vector<float> numbers = floats_of_all_sizes();
    std::vector<float2> pairs;
    for (size_t i = 0; i < numbers.size(); ++i)
        pairs.push_back({numbers[i], numbers[numbers.size() - 1 - i]});
    const DeviceArray<float2> from(pairs);
    const DeviceArray<uint32_t> half(pairs.size()), bfloat(pairs.size()), finite(pairs.size());
    pack_pairs<<<1, 256>>>(from.data(), half.data(), bfloat.data(), finite.data(), int(pairs.size()));
    bool right = true;
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
        const std::vector<uint32_t> actual = (dtype == DType::float16 ? half : bfloat).read();
        Case result("pack " + name_of(dtype), 0);
        for (size_t i = 0; i < pairs.size(); ++i) {
            result.same(decoded(dtype, actual[i] & 0xffff), rounded(dtype, pairs[i].x));
            result.same(decoded(dtype, actual[i] >> 16), rounded(dtype, pairs[i].y));
        }
        right &= result.report();
    }
    const std::vector<uint32_t> cleared = finite.read();
    Case clear("finite_or_zero float32", 0);
    for (size_t i = 0; i < pairs.size(); ++i) {
        const float x = pairs[i].x;
        clear.expect(cleared[i] == (std::isfinite(x) ? encoded(DType::float32, x) : 0));
    }
    return right & clear.report();
}

__global__ void split_floats(const float* from, float2* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const SplitFloat parts = split(__float_as_uint(from[i]));
        to[i] = make_float2(__uint_as_float(parts.big), __uint_as_float(parts.small));
    }
}

// big has 11 bits, small is exactly the rest and no larger than half a unit of big's last place.
bool split_float() {
    const std::vector<float> numbers = floats_of_all_sizes();
    const DeviceArray<float> from(numbers);
    const DeviceArray<float2> to(numbers.size());
    split_floats<<<1, 256>>>(from.data(), to.data(), int(numbers.size()));
    const std::vector<float2> actual = to.read();
    Case exact("parts of a float", 0), small("small part of a float", 0x1p-11),
        special("parts of no number", 0);
    for (size_t i = 0; i < numbers.size(); ++i) {
        const double x = numbers[i], big = actual[i].x, rest = actual[i].y;
        if (std::fabs(x) < 0x1.ffep127) {
            exact.expect(big + rest == x && (encoded(DType::float32, big) & 0x1fff) == 0);
            if (x != 0) small.error(std::fabs(rest) / std::ldexp(1, std::max(std::ilogb(x), -126)));
        } else {
            special.same(rest, std::isfinite(x) ? float(x - big) : x);
            special.expect(std::isnan(x) || (std::isfinite(big) && big * x > 0));
        }
    }
    return exact.report() & small.report() & special.report();
}

template <int kRows, int kColumns>
__global__ void number_fragment(float* by_place, float* by_value) {
    Fragment<kRows, kColumns> fragment;
    fragment.clear();
    for (int r = 0; r < fragment.rows; ++r)
        for (int c = 0; c < fragment.columns; ++c) {
            by_place[fragment.row(r) * kColumns + fragment.column(c)] = fragment.at(r, c);
            fragment.at(r, c) = float(fragment.row(r) * kColumns + fragment.column(c));
        }
    for (int m = 0; m < kRows / 16; ++m)
        for (int n = 0; n < kColumns / 8; ++n)
            for (int i = 0; i < 4; ++i)
                by_value[((m * kColumns / 8 + n) * 32 + threadIdx.x) * 4 + i] = fragment.value[m][n][i];
}

// Rows and columns are those of mma_sync's accumulators, each once.
template <int kRows, int kColumns>
bool fragment() {
    const DeviceArray<float> by_place(kRows * kColumns), by_value(kRows * kColumns);
    number_fragment<kRows, kColumns><<<1, 32>>>(by_place.data(), by_value.data());
    Case result("fragment " + std::to_string(kRows) + " x " + std::to_string(kColumns), 0);
    for (const float x : by_place.read()) result.same(x, 0);
    const std::vector<float> actual = by_value.read();
    for (int m = 0; m < kRows / 16; ++m)
        for (int n = 0; n < kColumns / 8; ++n)
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 4; ++i) {
                    const int row = m * 16 + lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
                    result.same(actual[((m * kColumns / 8 + n) * 32 + lane) * 4 + i],
                                row * kColumns + column);
                }
    return result.report();
}

__global__ void reduce_quads(const float* from, float* largest, float* sums) {
    largest[threadIdx.x] = quad_max(from[threadIdx.x]);
    sums[threadIdx.x] = quad_sum(from[threadIdx.x]);
}

bool quads() {
    Case largest("quad_max", 0), sum("quad_sum", 0x1p-23);
    for (int trial = 0; trial < 20; ++trial) {
        std::vector<float> numbers(32);
        for (float& x : numbers) x = float(uniform(-1, 1));
        if (trial == 0)
            for (float& x : numbers) x = -INFINITY;
        const DeviceArray<float> from(numbers), first(32), second(32);
        reduce_quads<<<1, 32>>>(from.data(), first.data(), second.data());
        const std::vector<float> actual = first.read(), sums = second.read();
        for (int lane = 0; lane < 32; ++lane) {
            double expected = -INFINITY, total = 0, magnitude = 0;
            for (int i = lane / 4 * 4; i < lane / 4 * 4 + 4; ++i) {
                expected = std::max(expected, double(numbers[i]));
                total += numbers[i];
                magnitude += std::fabs(numbers[i]);
            }
            largest.same(actual[lane], expected);
            if (trial == 0)
                sum.same(sums[lane], -INFINITY);
            else
                sum.error(std::fabs(sums[lane] - total) / magnitude);
        }
    }
    return largest.report() & sum.report();
}

// to: exponential, tanh, plus_log of x, broadcast and select.
__global__ void evaluate(const float* x, float* to, double factor, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        to[i * 4] = GpuMath::exponential(x[i]);
        to[i * 4 + 1] = GpuMath::tanh(x[i]);
        to[i * 4 + 2] = GpuMath::plus_log(x[i], factor, fabsf(x[i]) + 0.5f);
        to[i * 4 + 3] = GpuMath::select(x[i] < 0, GpuMath::broadcast(1), x[i]);
    }
}

bool math() {
    const double factor = uniform(0.3, 1);
    std::vector<float> x{0, INFINITY, -INFINITY, 60, -60};
    for (int i = 0; i < 20000; ++i) x.push_back(float(uniform(-20, 20) * std::pow(uniform(0, 1), 4)));
    const DeviceArray<float> from(x), to(x.size() * 4);
    evaluate<<<1, 256>>>(from.data(), to.data(), factor, int(x.size()));
    const std::vector<float> actual = to.read();
    // logf is a unit of the last place off, then the sum is rounded.
    Case exponential("GpuMath::exponential", 0x1p-22), tanh("GpuMath::tanh", 5e-7),
        plus_log("GpuMath::plus_log", 0x1.8p-23), select("GpuMath::select", 0);
    for (size_t i = 0; i < x.size(); ++i) {
        const double number = x[i], exact = std::exp2(number);
        tanh.error(number == 0 ? std::fabs(actual[i * 4 + 1])
                               : std::fabs(actual[i * 4 + 1] / std::tanh(number) - 1));
        select.same(actual[i * 4 + 3], number < 0 ? 1 : number);
        if (!std::isfinite(number)) continue;
        exponential.error(std::fabs(actual[i * 4] / exact - 1));
        const double logarithm = std::log(double(std::fabs(x[i]) + 0.5f));
        plus_log.error(std::fabs(actual[i * 4 + 2] - number * factor - logarithm) /
                       (std::fabs(number * factor) + std::fabs(logarithm)));
    }
    return exponential.report() & tanh.report() & plus_log.report() & select.report();
}

// Of a tile at address 0, of a part of 32 bits that starts at column 8.
template <int kRows, int kColumns>
__global__ void lane_addresses(uint32_t* to) {
    using Half = SmemTile<kRows, kColumns>;
    using Single = SmemTile<kRows, kColumns, 4>;
    uint32_t* address = to + threadIdx.x * 4;
    address[0] = Half::by_rows(Half::lane_rows_first(0));
    address[1] = Half::by_columns(Half::lane_columns_first(0));
    address[2] = Single::by_rows(Single::at(Single::lane_rows_first(0), 0, 8));
    address[3] = Single::by_columns(Single::at(Single::lane_columns_first(0), 0, 8));
}

// What each lane reads at, and that the lanes which the hardware serves together read 32 banks.
// tests/cpp/tile_layout.cpp has the rest of the layout.
template <int kRows, int kColumns>
bool addresses() {
    using Half = TileLayout<kRows, kColumns, 2>;
    using Single = TileLayout<kRows, kColumns, 4>;
    const DeviceArray<uint32_t> to(128);
    lane_addresses<kRows, kColumns><<<1, 32>>>(to.data());
    const std::vector<uint32_t> actual = to.read();
    Case result("addresses in " + std::to_string(kRows) + " x " + std::to_string(kColumns), 0);
    constexpr int widths[4] = {16, 16, 8, 4};
    for (int kind = 0; kind < 4; ++kind) {
        const int width = widths[kind], together = 128 / width;
        std::set<uint32_t> banks;
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            const uint32_t expected[4] = {place<Half>(lane % 16, lane / 16 * 8),
                                          place<Half>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8),
                                          place<Single>(g, 8 + 2 * t), place<Single>(2 * t, 8 + g)};
            const uint32_t address = actual[lane * 4 + kind];
            result.expect(address == expected[kind]);
            if (lane % together == 0) banks.clear();
            for (int byte = 0; byte < width; byte += 4) banks.insert((address + byte) / 4 % 32);
            if (lane % together == together - 1) result.expect(banks.size() == 32);
        }
    }
    return result.report();
}

constexpr bool (*const kCases[])() = {
    unpack<DType::float16>,
    unpack<DType::bfloat16>,
    pack,
    split_float,
    fragment<16, 64>,
    fragment<32, 16>,
    fragment<64, 96>,
    quads,
    math,
    addresses<64, 64>,
    addresses<32, 96>,
    addresses<64, 192>,
    addresses<64, 256>,
};

}  // namespace
}  // namespace flash::cuda

int main(int argc, char** argv) {
    return flash::run_cases(argc, argv, flash::cuda::kCases);
}
