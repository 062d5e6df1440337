// Every function of csrc/cuda/ptx/ against a plain loop on the CPU.
#include "../../csrc/cuda/ptx/barrier.h"
#include "../../csrc/cuda/ptx/cp_async.h"
#include "../../csrc/cuda/ptx/exp2.h"
#include "../../csrc/cuda/ptx/ldmatrix.h"
#include "../../csrc/cuda/ptx/mbarrier.h"
#include "../../csrc/cuda/ptx/mma_sync.h"
#include "../../csrc/cuda/ptx/pair_fma.h"
#include "../../csrc/cuda/ptx/reduce.h"
#include "../../csrc/cuda/ptx/shared.h"
#include "device_case.h"
#include "formats.h"

namespace flash::cuda {
namespace {

// float32 stands for tf32.
template <DType dtype>
__global__ void multiply_fragments(const uint32_t* a, const uint32_t* b, float* d) {
    const int lane = threadIdx.x;
    uint32_t left[4];
    float sum[4];
    for (int i = 0; i < 4; ++i) {
        left[i] = a[lane * 4 + i];
        sum[i] = d[lane * 4 + i];
    }
    if constexpr (dtype == DType::float32)
        mma_m16n8k8_tf32(sum, left, b[lane * 2], b[lane * 2 + 1]);
    else
        mma_m16n8k16<dtype>(sum, left, b[lane * 2], b[lane * 2 + 1]);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

// Where the PTX manual puts element i of a lane's operand or accumulator.
struct Place {
    int row, column;
};
template <bool tf32>
Place place_a(int lane, int i) {
    if (tf32) return {lane / 4 + i % 2 * 8, lane % 4 + i / 2 * 4};
    return {lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8};
}
template <bool tf32>
Place place_b(int lane, int i) {
    if (tf32) return {lane % 4 + i * 4, lane / 4};
    return {lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4};
}
Place place_d(int lane, int i) {
    return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

template <DType dtype>
bool mma() {
    constexpr bool tf32 = dtype == DType::float32;
    constexpr int depth = tf32 ? 8 : 16, in_register = tf32 ? 1 : 2;
    double a[16][16], b[16][8], d[16][8];
    uint32_t a_bits[16][16], b_bits[16][8];
    const auto draw = [](double& x, uint32_t& bits) {
        bits = encoded(dtype, rounded(dtype, uniform(-1, 1)));
        if (tf32) bits &= 0xffffe000;
        x = decoded(dtype, bits);
    };
    // Each sum is truncated, and so are its terms where they are added up: a few units of the last place.
    Case result(std::string("mma ") + (tf32                      ? "tf32"
                                       : dtype == DType::float16 ? "float16"
                                                                 : "bfloat16"),
                0x1p-21);
    for (int trial = 0; trial < 100; ++trial) {
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < depth; ++k) draw(a[i][k], a_bits[i][k]);
        for (int k = 0; k < depth; ++k)
            for (int j = 0; j < 8; ++j) draw(b[k][j], b_bits[k][j]);
        std::vector<uint32_t> left(128), right(64);
        std::vector<float> sums(128);
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4 * in_register; ++i) {
                const auto [row, column] = place_a<tf32>(lane, i);
                left[lane * 4 + i / in_register] |= a_bits[row][column] << i % in_register * 16;
            }
            for (int i = 0; i < 2 * in_register; ++i) {
                const auto [row, column] = place_b<tf32>(lane, i);
                right[lane * 2 + i / in_register] |= b_bits[row][column] << i % in_register * 16;
            }
            for (int i = 0; i < 4; ++i) {
                const auto [row, column] = place_d(lane, i);
                d[row][column] = sums[lane * 4 + i] = float(uniform(-1, 1));
            }
        }
        const DeviceArray<uint32_t> device_a(left), device_b(right);
        const DeviceArray<float> device_d(sums);
        multiply_fragments<dtype><<<1, 32>>>(device_a.data(), device_b.data(), device_d.data());
        const std::vector<float> actual = device_d.read();
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const auto [row, column] = place_d(lane, i);
                double expected = d[row][column], magnitude = std::fabs(expected);
                for (int k = 0; k < depth; ++k) {
                    expected += a[row][k] * b[k][column];
                    magnitude += std::fabs(a[row][k] * b[k][column]);
                }
                result.error(std::fabs(actual[lane * 4 + i] - expected) / magnitude);
            }
    }
    return result.report();
}

// rows[lane]: the row of shared memory whose address the lane gives.
__global__ void load_matrices(const uint16_t* from, const int* rows, uint32_t* plain, uint32_t* transposed) {
    __shared__ __align__(16) uint16_t memory[32][8];
    const int lane = threadIdx.x;
    for (int i = 0; i < 8; ++i) memory[lane][i] = from[lane * 8 + i];
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, shared_address(memory[rows[lane]]));
    for (int i = 0; i < 4; ++i) plain[lane * 4 + i] = r[i];
    ldmatrix_x4_transposed(r, shared_address(memory[rows[lane]]));
    for (int i = 0; i < 4; ++i) transposed[lane * 4 + i] = r[i];
}

bool ldmatrix() {
    Case plain("ldmatrix", 0), transposed("ldmatrix transposed", 0);
    for (int trial = 0; trial < 20; ++trial) {
        std::vector<uint16_t> memory(256);
        for (auto& x : memory) x = uint16_t(random_bits());
        std::vector<int> rows(32);
        for (int& row : rows) row = int(random_bits() % 32);
        const DeviceArray<uint16_t> from(memory);
        const DeviceArray<int> device_rows(rows);
        const DeviceArray<uint32_t> first(128), second(128);
        load_matrices<<<1, 32>>>(from.data(), device_rows.data(), first.data(), second.data());
        const std::vector<uint32_t> actual = first.read(), other = second.read();
        const auto element = [&](int matrix, int row, int column) {
            return uint32_t(memory[rows[matrix * 8 + row] * 8 + column]);
        };
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int g = lane / 4, t = lane % 4;
                plain.expect(actual[lane * 4 + i] == (element(i, g, 2 * t) | element(i, g, 2 * t + 1) << 16));
                transposed.expect(other[lane * 4 + i] ==
                                  (element(i, 2 * t, g) | element(i, 2 * t + 1, g) << 16));
            }
    }
    return plain.report() & transposed.report();
}

// Four groups of copies, of which all but `pending` are waited for; `to` gets what has to be there then.
// pending -1: no groups, and all copies are waited for. Kind 0: 16 bytes, 1: 16 bytes where valid[i] and
// zeros elsewhere, 2: 4 bytes so.
template <int kind, int pending>
__global__ void copy_groups(const uint32_t* from, const int* valid, uint32_t* to) {
    __shared__ __align__(16) uint32_t memory[4][128][4];
    const int thread = threadIdx.x;
    for (int group = 0; group < 4; ++group)
        for (int i = 0; i < 4; ++i) memory[group][thread][i] = 0xffffffff;
    __syncthreads();
    for (int group = 0; group < 4; ++group) {
        const int place = group * 128 + thread;
        const uint32_t address = shared_address(memory[group][thread]);
        if constexpr (kind == 0) cp_async_16(address, from + place * 4);
        if constexpr (kind == 1) cp_async_16(address, from + place * 4, valid[place]);
        if constexpr (kind == 2)
            for (int i = 0; i < 4; ++i) cp_async_4(address + i * 4, from + place * 4 + i, valid[place]);
        if constexpr (pending >= 0) cp_async_commit();
    }
    if constexpr (pending < 0)
        cp_async_wait_all();
    else
        cp_async_wait<pending>();
    for (int group = 0; group < (pending < 0 ? 4 : 4 - pending); ++group)
        for (int i = 0; i < 4; ++i)
            to[(group * 128 + thread) * 4 + i] = load_shared_4(shared_address(&memory[group][thread][i]));
    cp_async_wait<0>();
}

template <int kind, int pending>
bool cp_async() {
    constexpr const char* names[] = {"16", "16 or zeros", "4 or zeros"};
    const std::string wait = pending < 0 ? "no groups" : std::to_string(pending) + " pending";
    Case result("cp_async " + std::string(names[kind]) + ", " + wait, 0);
    for (int trial = 0; trial < 5; ++trial) {
        std::vector<uint32_t> numbers(2048);
        for (auto& x : numbers) x = random_bits() & 0x7fffffff;
        std::vector<int> valid(512);
        for (int& x : valid) x = int(random_bits() % 2);
        const DeviceArray<uint32_t> from(numbers), to(2048);
        const DeviceArray<int> device_valid(valid);
        copy_groups<kind, pending><<<1, 128>>>(from.data(), device_valid.data(), to.data());
        const std::vector<uint32_t> actual = to.read();
        for (size_t i = 0; i < size_t(pending < 0 ? 4 : 4 - pending) * 512; ++i)
            result.expect(actual[i] == (kind == 0 || valid[i / 4] ? numbers[i] : 0));
    }
    return result.report();
}

__device__ void dawdle() {
    const long long start = clock64();
    while (clock64() - start < 3000) continue;
}

// Two pairs of warps: in each the warps take turns to write, late, and both read what was written.
__global__ void take_turns(uint32_t* to, int rounds) {
    __shared__ uint32_t memory[2][32];
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 64, warp = threadIdx.x / 32 % 2;
    for (int round = 0; round < rounds; ++round) {
        if (warp == round % 2) {
            dawdle();
            store_shared(shared_address(&memory[pair][lane]), round * 64 + pair * 32 + lane);
        }
        barrier_of<64>(1 + pair);
        to[round * 128 + threadIdx.x] = load_shared_4(shared_address(&memory[pair][lane]));
        barrier_of<64>(1 + pair);
    }
}

bool barrier() {
    constexpr int rounds = 8;
    const DeviceArray<uint32_t> to(rounds * 128);
    take_turns<<<1, 128>>>(to.data(), rounds);
    const std::vector<uint32_t> actual = to.read();
    Case result("barrier_of", 0);
    for (int round = 0; round < rounds; ++round)
        for (int thread = 0; thread < 128; ++thread)
            result.expect(actual[round * 128 + thread] ==
                          uint32_t(round * 64 + thread / 64 * 32 + thread % 32));
    return result.report();
}

// Tiles of 128 x 4 go through two stages. Warp 0 copies them: a stage is full when its lanes' copies are
// done. The others, one of which is late, read them: a stage is empty when all three have.
__global__ void pass_through_stages(const uint32_t* from, uint32_t* to, int tiles) {
    __shared__ __align__(16) uint32_t memory[2][128][4];
    __shared__ uint64_t full[2], empty[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < 2) {
        mbarrier_init(shared_address(&full[threadIdx.x]), 32);
        mbarrier_init(shared_address(&empty[threadIdx.x]), 3);
    }
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % 2, round = tile / 2;
        if (warp == 0) {
            mbarrier_wait(shared_address(&empty[stage]), round % 2 ^ 1);
            for (int row = lane; row < 128; row += 32)
                cp_async_16(shared_address(memory[stage][row]), from + (tile * 128 + row) * 4);
            mbarrier_arrive_behind_copies(shared_address(&full[stage]));
            continue;
        }
        mbarrier_wait(shared_address(&full[stage]), round % 2);
        if (warp - 1 == tile % 3) dawdle();
        for (int row = (warp - 1) * 32 + lane; row < 128; row += 96)
            for (int i = 0; i < 4; ++i)
                to[(tile * 128 + row) * 4 + i] = load_shared_4(shared_address(&memory[stage][row][i]));
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&empty[stage]));
    }
    cp_async_wait<0>();
}

bool mbarrier() {
    constexpr int tiles = 12;
    std::vector<uint32_t> numbers(tiles * 512);
    for (auto& x : numbers) x = random_bits();
    const DeviceArray<uint32_t> from(numbers), to(numbers.size());
    pass_through_stages<<<1, 128>>>(from.data(), to.data(), tiles);
    const std::vector<uint32_t> actual = to.read();
    Case result("mbarrier", 0);
    for (size_t i = 0; i < numbers.size(); ++i) result.expect(actual[i] == numbers[i]);
    return result.report();
}

// Stores at the lane's place, loads from its neighbour's.
__global__ void pass_on(const uint32_t* from, uint32_t* to) {
    __shared__ __align__(16) uint32_t memory[7][32];
    const int lane = threadIdx.x, other = lane ^ 1;
    const uint32_t* x = from + lane * 7;
    uint32_t* y = to + lane * 7;
    const uint32_t base = shared_address(memory);
    store_shared(base + lane * 16, make_uint4(x[0], x[1], x[2], x[3]));
    store_shared(base + 512 + lane * 8, make_uint2(x[4], x[5]));
    store_shared(base + 768 + lane * 4, x[6]);
    __syncwarp();
    const uint4 four = load_shared_16(base + other * 16);
    const uint2 two = load_shared_8(opaque(base) + 512 + other * 8);
    y[0] = four.x, y[1] = four.y, y[2] = four.z, y[3] = four.w;
    y[4] = two.x, y[5] = two.y;
    y[6] = load_shared_4(shared_address(&memory[6][other]));
}

bool shared_memory() {
    std::vector<uint32_t> numbers(224);
    for (auto& x : numbers) x = random_bits();
    const DeviceArray<uint32_t> from(numbers), to(224);
    pass_on<<<1, 32>>>(from.data(), to.data());
    const std::vector<uint32_t> actual = to.read();
    Case result("shared memory", 0);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 7; ++i) result.expect(actual[lane * 7 + i] == numbers[(lane ^ 1) * 7 + i]);
    return result.report();
}

__global__ void exponentials(const float* from, float* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = exp2_approximate(from[i]);
}

bool exp2() {
    std::vector<float> x{-INFINITY, INFINITY, NAN, 0, 1, -126, 127, 128, -150, -1000, 1e-40f};
    for (int i = 0; i < 50000; ++i) x.push_back(float(uniform(-126, 128)));
    for (int i = 0; i < 5000; ++i) x.push_back(float(std::ldexp(uniform(-1, 1), -int(random_bits() % 30))));
    const DeviceArray<float> from(x), to(x.size());
    exponentials<<<1, 256>>>(from.data(), to.data(), int(x.size()));
    const std::vector<float> actual = to.read();
    Case special("exp2 of special numbers", 0), relative("exp2", 0x1p-22);
    for (size_t i = 0; i < x.size(); ++i) {
        const double exact = std::exp2(double(x[i]));
        if (std::isnan(exact) || std::isinf(exact) || std::isinf(x[i]) || x[i] == 0)
            special.same(actual[i], exact);
        else if (exact < 0x1p-126)
            special.same(actual[i], 0);  // subnormal results are none
        else if (exact < 0x1.fffffp127)
            relative.error(std::fabs(actual[i] / exact - 1));
    }
    return special.report() & relative.report();
}

__global__ void wait_behind(const float* x, const float* y, float* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = behind(x[i], y[i]);
}

bool order() {
    std::vector<float> x{0, -0.0f, INFINITY, -INFINITY}, y{INFINITY, 0, 1, 0x1p-140f};
    for (int i = 0; i < 1000; ++i) {
        x.push_back(float(uniform(-1e6, 1e6)));
        y.push_back(float(std::exp2(uniform(-140, 127))));
    }
    const DeviceArray<float> of(x), after(y), to(x.size());
    wait_behind<<<1, 256>>>(of.data(), after.data(), to.data(), int(x.size()));
    const std::vector<float> actual = to.read();
    Case result("behind", 0);
    for (size_t i = 0; i < x.size(); ++i) {
        result.same(actual[i], x[i]);
        result.same(std::signbit(actual[i]), std::signbit(x[i]));
    }
    return result.report();
}

template <DType dtype>
__global__ void multiply_pairs(const uint32_t* x, const uint32_t* y, const uint32_t* z, uint32_t* to,
                               int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = pair_fma<dtype>(x[i], y[i], z[i]);
}

template <DType dtype>
bool pairs() {
    const uint32_t infinity = encoded(dtype, INFINITY), one = encoded(dtype, 1);
    std::vector<uint32_t> x{infinity | one << 16, one | infinity << 16}, y{0, 0}, z{0, 0};
    const auto draw = [] { return encoded(dtype, rounded(dtype, uniform(-4, 4))); };
    for (int i = 0; i < 2000; ++i)
        for (auto* to : {&x, &y, &z}) to->push_back(draw() | draw() << 16);
    const DeviceArray<uint32_t> a(x), b(y), c(z), d(x.size());
    multiply_pairs<dtype><<<1, 256>>>(a.data(), b.data(), c.data(), d.data(), int(x.size()));
    const std::vector<uint32_t> actual = d.read();
    Case result(std::string("pair_fma ") + (dtype == DType::float16 ? "float16" : "bfloat16"), 0);
    for (size_t i = 0; i < x.size(); ++i)
        for (int half = 0; half < 32; half += 16) {
            const auto value = [&](const std::vector<uint32_t>& of) {
                return decoded(dtype, of[i] >> half & 0xffff);
            };
            result.same(value(actual), rounded(dtype, value(x) * value(y) + value(z)));
        }
    return result.report();
}

// Each thread adds its numbers to four of 32 sums, in fours where the chip can.
__global__ void add_up(const float* numbers, float* sums, bool fours) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, place = thread % 8 * 4;
    const float* x = numbers + thread * 4;
#if __CUDA_ARCH__ >= 900
    if (fours) {
        reduce_add(reinterpret_cast<float4*>(sums + place), make_float4(x[0], x[1], x[2], x[3]));
        return;
    }
#endif
    for (int i = 0; i < 4; ++i) reduce_add(sums + place + i, x[i]);
}

// Integers: their sums are exact in any order.
template <bool fours>
bool reduce() {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (fours && major < 9) return true;
    std::vector<float> numbers(4096), expected(32), before(32);
    for (auto& x : numbers) x = float(int(random_bits() % 2001) - 1000);
    for (auto& x : before) x = float(int(random_bits() % 2001) - 1000);
    expected = before;
    for (size_t i = 0; i < numbers.size(); ++i) expected[i % 32] += numbers[i];
    const DeviceArray<float> from(numbers), sums(before);
    add_up<<<4, 256>>>(from.data(), sums.data(), fours);
    const std::vector<float> actual = sums.read();
    Case result(fours ? "reduce_add of four" : "reduce_add", 0);
    for (size_t i = 0; i < 32; ++i) result.same(actual[i], expected[i]);
    return result.report();
}

constexpr bool (*const kCases[])() = {
    mma<DType::float16>,
    mma<DType::bfloat16>,
    mma<DType::float32>,
    ldmatrix,
    cp_async<0, -1>,
    cp_async<0, 0>,
    cp_async<0, 1>,
    cp_async<0, 3>,
    cp_async<1, 0>,
    cp_async<1, 2>,
    cp_async<2, 0>,
    cp_async<2, 1>,
    barrier,
    mbarrier,
    shared_memory,
    exp2,
    order,
    pairs<DType::float16>,
    pairs<DType::bfloat16>,
    reduce<false>,
    reduce<true>,
};

}  // namespace
}  // namespace flash::cuda

int main(int argc, char** argv) {
    return flash::run_cases(argc, argv, flash::cuda::kCases);
}
