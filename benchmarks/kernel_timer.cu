// One kernel of the table without torch: kernel_variants.py compiles it with a row's macros and runs it.
//
//     kernel_timer tokens width group idle seqlen:causal ...
//
// idles so many milliseconds before each sample (a burst; 0: sustained, and samples are shorter), and prints
// a line for each cell: seqlen, causal, seconds (median), FLOPs and a checksum of what was written. group:
// query heads of a key head. causal is 0 or 1, with a d behind it for the deterministic backward, or a b for
// a mask whose bits say so.
#include FLASH_SOURCE

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef FLASH_BACKWARD
namespace flash::cuda {
void FLASH_QUERY_GRADIENT(const BackwardProblem&, const Launch&) {}
void FLASH_BIAS_GRADIENT(const BackwardProblem&, const Launch&) {}
void FLASH_BIAS_GRADIENT(const BackwardProblem&, const AlignedStatistics&, const Launch&) {}
}  // namespace flash::cuda
#endif

using namespace flash;
using namespace flash::cuda;

namespace {

const int64_t kHeadDim = FLASH_KERNEL_SYMBOL.head_dim, kValueDim = FLASH_KERNEL_SYMBOL.value_dim;
constexpr int kSamples = 5;

// Nearly normal.
__global__ void draw(uint16_t* to, int64_t count, uint32_t seed) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * blockDim.x) {
        uint32_t x = uint32_t(i) * 2654435761u + seed;
        float sum = 0;
        for (int j = 0; j < 4; ++j) {
            x ^= x << 13, x ^= x >> 17, x ^= x << 5;
            sum += float(x >> 8) * 0x1p-24f;
        }
        to[i] = uint16_t(pack<DType::FLASH_DTYPE>((sum - 2) * 1.732f, 0));
    }
}

__global__ void add_up(const uint16_t* of, int64_t count, double* sum) {
    double mine = 0;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * blockDim.x)
        mine += fabs(double(unpack<DType::FLASH_DTYPE>(of[i]).x));
    atomicAdd(sum, mine);
}

class Memory {
  public:
    ~Memory() {
        for (void* block : blocks_) cudaFree(block);
    }
    void* take(int64_t bytes) {
        void* block = nullptr;
        check(cudaMalloc(&block, bytes), "cudaMalloc");
        blocks_.push_back(block);
        return block;
    }

  private:
    std::vector<void*> blocks_;
};

Device this_device() {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    return {0, properties.major * 10 + properties.minor, properties.multiProcessorCount,
            int64_t(properties.sharedMemPerBlockOptin), properties.l2CacheSize};
}

template <class T>
T* copy_of(Memory& memory, const std::vector<T>& values) {
    void* const data = memory.take(values.size() * sizeof(T));
    check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return static_cast<T*>(data);
}

// What AttentionMask has of a causal mask of as many queries as keys, a multiple of its blocks.
void see_by_bits(ForwardProblem& problem, Memory& memory) {
    const int64_t keys = problem.seqlen_k, words = mask_words(keys), blocks = mask_blocks(keys);
    std::vector<uint32_t> bits(keys * words);
    for (int64_t i = 0; i < keys; ++i)
        for (int64_t j = 0; j <= i; ++j) bits[i * words + j / 32] |= 1u << j % 32;
    problem.visible = {copy_of(memory, bits), 0, 0, words};
    const auto lists = [&](bool of_queries) {
        constexpr int some = int(Quarter::partly_seen), none = int(Quarter::hidden);
        const int32_t diagonal = some | some << 6 | none << (of_queries ? 2 : 4);
        std::vector<int32_t> counts, indices(blocks * blocks);
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t first = of_queries ? 0 : i, end = of_queries ? i + 1 : blocks;
            for (int64_t j = first; j < end; ++j)
                indices[i * blocks + j - first] = int32_t(j) | (i == j ? diagonal << kBlockBits : 0);
            counts.push_back(int32_t(end - first));
        }
        return BlockLists{
            copy_of(memory, counts), copy_of(memory, indices), 0, 0, blocks, kMaskBlock, kMaskBlock};
    };
    problem.key_blocks = lists(true);
    problem.query_blocks = lists(false);
}

struct Sizes {
    int64_t tokens, width, group;
};

void time_cell(const Sizes& sizes, int idle, int64_t seqlen, bool causal, char how) {
    Memory memory;
    const int64_t batch = sizes.tokens / seqlen, heads = sizes.width / kHeadDim;
    const auto tensor = [&](uint32_t seed, int64_t tensor_heads, int64_t head_dim) {
        const int64_t width = tensor_heads * head_dim, elements = sizes.tokens * width;
        uint16_t* data = static_cast<uint16_t*>(memory.take(elements * 2));
        draw<<<1024, 256>>>(data, elements, seed);
        return TensorView{data, seqlen * width, width, head_dim};
    };
    const auto of_queries = [&](uint32_t seed, int64_t head_dim) { return tensor(seed, heads, head_dim); };
    const auto of_keys = [&](uint32_t seed, int64_t head_dim) {
        return tensor(seed, heads / sizes.group, head_dim);
    };
    const auto statistics = [&] {
        const std::vector<float> values(batch * heads * seqlen, std::log(float(seqlen)) + 0.5f);
        return RowStatistics{copy_of(memory, values), heads * seqlen, seqlen};
    };
    BackwardProblem problem{};
    ForwardProblem& forward = problem.forward;
    forward.dtype = DType::FLASH_DTYPE;
    forward.batch = batch, forward.heads_q = heads, forward.heads_k = heads / sizes.group;
    forward.head_dim = kHeadDim, forward.head_dim_v = kValueDim;
    forward.seqlen_q = forward.seqlen_k = forward.rows_q = forward.rows_k = seqlen;
    forward.q = of_queries(1, kHeadDim), forward.k = of_keys(2, kHeadDim);
    forward.v = of_keys(3, kValueDim), forward.out = of_queries(4, kValueDim);
    forward.lse = statistics();
    forward.softmax_scale = 1 / std::sqrt(double(kHeadDim));
    if (how == 'b')
        see_by_bits(forward, memory);
    else if (causal)
        forward.window_right = 0;
    forward.deterministic = how == 'd';
    Launch launch{this_device(), nullptr, nullptr};
    const double scores = 2.0 * sizes.tokens * heads * seqlen * (causal ? 0.5 : 1);
#ifdef FLASH_BACKWARD
    problem.dout = of_queries(5, kValueDim), problem.dq = of_queries(6, kHeadDim);
    problem.dk = of_keys(7, kHeadDim), problem.dv = of_keys(8, kValueDim);
    problem.delta = statistics();
    const TensorView results[] = {problem.dq, problem.dk, problem.dv};
    launch.workspace = memory.take(FLASH_KERNEL_SYMBOL.workspace_bytes(problem, launch.device) + 1);
    const auto run = [&] { FLASH_KERNEL_SYMBOL.launch(problem, launch); };
    const double flops = (3.0 * kHeadDim + 2.0 * kValueDim) * scores;
#else
    const TensorView results[] = {forward.out};
    const int64_t workspace = FLASH_KERNEL_SYMBOL.workspace_bytes(forward, 1, launch.device);
    if (workspace) launch.workspace = memory.take(workspace);
    const auto run = [&] { FLASH_KERNEL_SYMBOL.launch(forward, 1, launch); };
    const double flops = double(kHeadDim + kValueDim) * scores;
#endif
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    const int calls = idle ? std::clamp(int(7e12 / flops), 1, 64) : std::clamp(int(2e12 / flops), 1, 20);
    std::vector<float> milliseconds;
    for (int i = 0; i <= kSamples; ++i) {  // the first one warms up
        std::this_thread::sleep_for(std::chrono::milliseconds(idle));
        if (idle) run();
        cudaEventRecord(begin);
        for (int j = 0; j < calls; ++j) run();
        cudaEventRecord(end);
        check(cudaEventSynchronize(end), FLASH_KERNEL_NAME);
        float sample;
        cudaEventElapsedTime(&sample, begin, end);
        if (i) milliseconds.push_back(sample / calls);
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    double* sum = static_cast<double*>(memory.take(sizeof(double)));
    cudaMemset(sum, 0, sizeof(double));
    int64_t written = 0;
    for (const TensorView& view : results) {
        const int64_t count = sizes.tokens * view.row_stride;
        add_up<<<1024, 256>>>(static_cast<const uint16_t*>(view.data), count, sum);
        written += count;
    }
    double checksum;
    check(cudaMemcpy(&checksum, sum, sizeof checksum, cudaMemcpyDeviceToHost), "checksum");
    std::printf("%lld %d %.9g %.6g %.9g\n", static_cast<long long>(seqlen), causal,
                milliseconds[kSamples / 2] / 1e3, flops, checksum / written);
    std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
    const Sizes sizes{std::atoll(arguments[1]), std::atoll(arguments[2]), std::atoll(arguments[3])};
    const int idle = std::atoi(arguments[4]);
    for (int i = 5; i < count; ++i) {
        char* causal;
        const int64_t seqlen = std::strtoll(arguments[i], &causal, 10);
        time_cell(sizes, idle, seqlen, causal[1] == '1', causal[1] ? causal[2] : 0);
    }
}
