#include "plan.h"

#include <algorithm>
#include <string_view>

#include "few_queries.h"
#include "split_times.h"

namespace flash::cuda {
namespace {

constexpr int kLowestCapability = 80;

std::string decimal(int capability) {
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// Machine code runs on later chips of its generation, PTX on all later ones.
bool compiled_for(int capability) {
    for (const Architecture* built = architectures; built->capability; ++built)
        if (built->capability <= capability && (built->ptx || built->capability / 10 == capability / 10))
            return true;
    return false;
}

template <class Kernel>
bool takes_head_dims(const Kernel& kernel, const ForwardProblem& problem) {
    return problem.head_dim <= kernel.head_dim && problem.head_dim_v <= kernel.value_dim;
}

// "192", or where they differ "192 and values of 128".
std::string head_dims(int64_t head_dim, int64_t value_dim) {
    return std::to_string(head_dim) +
           (value_dim == head_dim ? "" : " and values of " + std::to_string(value_dim));
}

// As many blocks as the kernel was made for fit a multiprocessor at once.
template <class Kernel>
bool all_blocks_fit(const Kernel& kernel, const Device& device) {
    return blocks_in(device, kernel.shared_bytes) >= kernel.blocks;
}

bool is_for_few(const ForwardKernel& kernel) {
    return kernel.few > 0;
}

bool is_for_few(const BackwardKernel&) {
    return false;
}

const ForwardProblem& forward_of(const ForwardProblem& problem) {
    return problem;
}

const ForwardProblem& forward_of(const BackwardProblem& problem) {
    return problem.forward;
}

// What a kernel's from_keys is compared with: in the backward how many keys a query sees on average, rounded
// up (measured under a causal mask).
int64_t keys_for(const ForwardKernel&, const ForwardProblem& problem) {
    return most_keys(problem);
}

int64_t keys_for(const BackwardKernel&, const ForwardProblem& problem) {
    const int64_t rows = std::min(problem.seqlen_q, problem.seqlen_k);
    const int64_t hidden = problem.window_right < 0 ? 0 : (rows - 1) / 2;
    return std::min(most_keys(problem), problem.seqlen_k - hidden);
}

// With deterministic=True no packed sequence's kernel depends on how long the others are.
bool asks_no_length(const ForwardProblem& problem) {
    return problem.deterministic && problem.cu_seqlens_k;
}
constexpr const char* kDependsOnLength =
    "with deterministic=True no packed sequence's kernel depends on how long the others are";

// What else a kernel has against a problem, or nullptr.
const char* objection(const ForwardKernel& kernel, const ForwardProblem& problem, const Device& device) {
    if (kernel.capability && kernel.capability != device.capability) return "it is for other GPUs";
    if (problem.bias.data && !kernel.takes_bias) return "its tiles leave no registers for a bias";
    if (kernel.from_keys > 0 && asks_no_length(problem)) return kDependsOnLength;
    return kernel.why_not ? kernel.why_not(problem, device) : nullptr;
}

const char* objection(const BackwardKernel& kernel, const BackwardProblem& problem, const Device& device) {
    if (kernel.capability && kernel.capability != device.capability) return "it is for other GPUs";
    if (kernel.from_keys > 0 && !kernel.capability && asks_no_length(problem.forward))
        return kDependsOnLength;
    return kernel.why_not ? kernel.why_not(problem, device) : nullptr;
}

bool enough_keys(const ForwardKernel& kernel, const ForwardProblem& problem) {
    return kernel.from_keys <= keys_for(kernel, problem);
}

// With deterministic=True Hopper's own take all: packed sequences as if each were alone.
bool enough_keys(const BackwardKernel& kernel, const ForwardProblem& problem) {
    return kernel.from_keys <= keys_for(kernel, problem) || (kernel.capability && problem.deterministic);
}

// Kernels for long sequences have large tiles, of which a map of small blocks would leave much unused.
// Hopper's say for themselves which maps they take.
template <class Kernel>
bool blocks_fill_tiles(const Kernel& kernel, const ForwardProblem& problem) {
    const BlockLists& lists = problem.key_blocks;
    return !lists.counts || kernel.from_keys == 0 || kernel.capability ||
           std::min(lists.row_block, lists.column_block) >= std::max(kernel.query_tile, kernel.key_tile);
}

// The first kernel that the device can run and that suits the problem; among those of the same head dim one
// whose blocks all fit.
template <class Kernel, class Problem>
const Kernel* first_fit(const Kernel* const* kernels, const Problem& whole, const Device& device) {
    const ForwardProblem& problem = forward_of(whole);
    if (device.capability < kLowestCapability || !compiled_for(device.capability)) return nullptr;
    const Kernel* first = nullptr;
    for (; *kernels; ++kernels) {
        const Kernel& kernel = **kernels;
        if (kernel.dtype != problem.dtype || !takes_head_dims(kernel, problem) ||
            kernel.shared_bytes > device.shared_bytes_per_block || !enough_keys(kernel, problem) ||
            !blocks_fill_tiles(kernel, problem) || objection(kernel, whole, device))
            continue;
        if (first && kernel.head_dim != first->head_dim) break;
        if (is_for_few(kernel) || all_blocks_fit(kernel, device)) return &kernel;
        if (!first) first = &kernel;
    }
    return first;
}

// "float16, bfloat16"
template <class Kernel>
std::string dtypes_of(const Kernel* const* kernels, std::string_view engine) {
    std::string listed;
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64})
        for (auto kernel = kernels; *kernel; ++kernel)
            if (engine == (*kernel)->engine && (*kernel)->dtype == dtype) {
                listed += (listed.empty() ? "" : ", ") + std::string(name_of(dtype));
                break;
            }
    return listed;
}

template <class Kernel>
std::string no_kernel_for(DType dtype, const Kernel* const* kernels, std::string_view engine) {
    const std::string dtypes = dtypes_of(kernels, engine);
    if (dtypes.empty()) return "it has no kernel for this pass";
    return std::string("it has no kernel for ") + name_of(dtype) + ", only for " + dtypes;
}

// Why a kernel of the problem's dtype is not the chosen one.
template <class Kernel, class Problem>
std::string reason_of(const Kernel& kernel, const Kernel* chosen, const Problem& whole,
                      const Device& device) {
    const ForwardProblem& problem = forward_of(whole);
    if (!takes_head_dims(kernel, problem))
        return "it takes head dims up to " + head_dims(kernel.head_dim, kernel.value_dim) + ", here it is " +
               head_dims(problem.head_dim, problem.head_dim_v);
    if (!enough_keys(kernel, problem))
        return "it is for queries that see " + std::to_string(kernel.from_keys) +
               " keys or more, here they see " + std::to_string(keys_for(kernel, problem));
    if (const char* reason = objection(kernel, whole, device)) return reason;
    if (!blocks_fill_tiles(kernel, problem)) return "its tiles are larger than the map's blocks";
    if (kernel.shared_bytes > device.shared_bytes_per_block)
        return "it needs " + std::to_string(kernel.shared_bytes) + " bytes of shared memory, this GPU has " +
               std::to_string(device.shared_bytes_per_block);
    return std::string(chosen->name) + " of " + chosen->engine + " comes first";
}

template <class Kernel, class Problem>
std::vector<WhyNot> refusals(const Kernel* const* kernels, const Problem& problem, const Device& device) {
    const DType dtype = forward_of(problem).dtype;
    std::vector<WhyNot> reasons;
    const Kernel* const chosen = first_fit(kernels, problem, device);
    const std::string no_device = why_not(device);
    for (const std::string_view engine : engine_names()) {
        bool has_dtype = false;
        for (auto kernel = kernels; *kernel; ++kernel) {
            if (engine != (*kernel)->engine || (*kernel)->dtype != dtype) continue;
            has_dtype = true;
            if (*kernel != chosen && no_device.empty())
                reasons.push_back(
                    {(*kernel)->engine, (*kernel)->name, reason_of(**kernel, chosen, problem, device)});
        }
        if (!no_device.empty())
            reasons.push_back({std::string(engine), "", no_device});
        else if (!has_dtype)
            reasons.push_back({std::string(engine), "", no_kernel_for(dtype, kernels, engine)});
    }
    return reasons;
}

}  // namespace

const char* name_of(DType dtype) {
    constexpr const char* names[] = {"float16", "bfloat16", "float32", "float64"};
    return names[int(dtype)];
}

const ForwardKernel* kernel_for(const ForwardProblem& problem, const Device& device) {
    return first_fit(forward_kernels, problem, device);
}

const BackwardKernel* kernel_for(const BackwardProblem& problem, const Device& device) {
    return first_fit(backward_kernels, problem, device);
}

int splits_for(int64_t blocks, int64_t key_tiles, int multiprocessors, int resident) {
    if (key_tiles <= 4 || blocks * 10 >= int64_t(multiprocessors) * 8 || blocks == 0) return 1;
    const int64_t places = int64_t(multiprocessors) * resident;
    const int64_t most = std::min<int64_t>({kMostSplits, places, key_tiles});
    // Waves of blocks, of which the last one may be short, times the longest block's tiles.
    const auto time = [&](int64_t splits) {
        return (blocks * splits + places - 1) / places * ((key_tiles + splits - 1) / splits);
    };
    return fewest_splits(most, 85, time);
}

int splits_for_few(int64_t blocks, int64_t key_tiles, int multiprocessors, int resident, bool pages,
                   int cluster) {
    if (blocks == 0) return 1;
    const int64_t most =
        std::min<int64_t>({kMostSplits, int64_t(multiprocessors) * resident / blocks, key_tiles});
    // The memory is the limit: blocks of a multiprocessor share what it reads, of which one alone reads three
    // quarters. What a block does to find its pages others hide. More parts than a cluster has take another
    // kernel, as long as a tile of a block alone.
    const auto time = [&](int64_t splits) {
        const int64_t together = (blocks * splits + multiprocessors - 1) / multiprocessors;
        return (std::max<int64_t>(4, 3 * together) + (pages ? 2 : 0)) * ((key_tiles + splits - 1) / splits) +
               (cluster > 1 && splits > cluster ? 4 : 0);
    };
    return fewest_splits(most, 95, time);
}

int splits_of(const ForwardProblem& problem, const ForwardKernel& kernel, const Device& device) {
    // How many there are depends on the batch, so the bits of a row would.
    if (problem.deterministic) return 1;
    // A list may leave out most of a block's share.
    if (problem.key_blocks.counts) return 1;
    if (kernel.capability && !kernel.few) return 1;  // Hopper's own take problems that need none
    if (!kernel.few && (problem.cu_seqlens_q || is_windowed(problem))) return 1;
    const int64_t key_tiles = (keys_of_few(problem) + kernel.key_tile - 1) / kernel.key_tile;
    if (problem.splits)
        return int(std::max<int64_t>(1, std::min<int64_t>({problem.splits, key_tiles, kMostSplits})));
    // One block alone would wait for its keys where two read as fast as they can.
    const int resident = int(blocks_in(device, kernel.shared_bytes));
    if (kernel.few && kernel.capability)
        return times_of_few(problem, kernel.few, kernel.query_tile, kernel.key_tile, kernel.head_dim, device)
            .splits();
    if (kernel.few)
        return splits_for_few(tiles_of_few(problem, kernel.few, kernel.query_tile / kernel.few), key_tiles,
                              device.multiprocessors, resident, problem.cache.pages, most_in_cluster(device));
    const int64_t query_tiles = (problem.seqlen_q + kernel.query_tile - 1) / kernel.query_tile;
    return splits_for(query_tiles * problem.heads_q * problem.batch, key_tiles, device.multiprocessors,
                      std::min(resident, kernel.blocks));
}

std::vector<WhyNot> why_not(const ForwardProblem& problem, const Device& device) {
    return refusals(forward_kernels, problem, device);
}

std::vector<WhyNot> why_not(const BackwardProblem& problem, const Device& device) {
    return refusals(backward_kernels, problem, device);
}

std::string why_not(const Device& device) {
    if (device.capability < kLowestCapability)
        return "it needs a GPU of compute capability " + decimal(kLowestCapability) + ", this one has " +
               decimal(device.capability);
    if (!compiled_for(device.capability))
        return "it was compiled for " + architecture_list() + ", which this GPU of " +
               decimal(device.capability) +
               " can't run; build with FLASH_ATTN_CUDA_ARCHS=" + std::to_string(device.capability);
    return "";
}

std::vector<const char*> engine_names() {
    std::vector<const char*> names;
    for (auto kernel = forward_kernels; *kernel; ++kernel)
        if (std::none_of(names.begin(), names.end(),
                         [&](std::string_view name) { return name == (*kernel)->engine; }))
            names.push_back((*kernel)->engine);
    return names;
}

std::string architecture_list() {
    std::string listed;
    for (const Architecture* built = architectures; built->capability; ++built)
        listed += (listed.empty() ? "" : ", ") + decimal(built->capability) + (built->ptx ? "+PTX" : "");
    return listed;
}

}  // namespace flash::cuda
