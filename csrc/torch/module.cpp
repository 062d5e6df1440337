// The Python module: what this binary holds and what it would run, in plain numbers. Importing it registers
// the operators (library.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>

#include "../engine.h"
#include "gradient_node.h"

namespace flash {
namespace {

using pybind11::dict, pybind11::list;

list engine_reports() {
    list reports;
    for (const EngineReport& report : engines()) {
        dict entry;
        entry["name"] = report.name;
        entry["configuration"] = report.configuration;
        entry["usable"] = report.usable;
        entry["chosen"] = report.chosen;
        entry["why_not"] = report.why_not;
        reports.append(entry);
    }
    return reports;
}

template <class Kernel>
void append_kernels(list& rows, const char* pass, const Kernel* const* kernels) {
    for (; *kernels; ++kernels) {
        dict row;
        row["engine"] = (*kernels)->engine;
        row["pass"] = pass;
        row["name"] = (*kernels)->name;
        row["dtype"] = cuda::name_of((*kernels)->dtype);
        row["head_dim"] = (*kernels)->head_dim;
        row["head_dim_v"] = (*kernels)->value_dim;
        row["query_tile"] = (*kernels)->query_tile;
        row["key_tile"] = (*kernels)->key_tile;
        row["from_keys"] = (*kernels)->from_keys;
        row["blocks"] = (*kernels)->blocks;
        row["shared_bytes"] = (*kernels)->shared_bytes;
        rows.append(row);
    }
}

list kernel_rows() {
    list rows;
    append_kernels(rows, "forward", cuda::forward_kernels);
    append_kernels(rows, "backward", cuda::backward_kernels);
    return rows;
}

list device_rows() {
    if (cuda::devices().found.empty()) throw std::runtime_error(cuda::devices().why_none);
    list rows;
    for (const cuda::Device& device : cuda::devices().found) {
        dict row;
        row["capability"] = device.capability;
        row["multiprocessors"] = device.multiprocessors;
        row["shared_bytes_per_block"] = device.shared_bytes_per_block;
        rows.append(row);
    }
    return rows;
}

// Sizes and options without tensors. Where choosing asks only whether there is a pointer, any one will do.
ForwardProblem problem_of(const dict& sizes) {
    alignas(16) static int32_t something = 0;
    static const float some_slope = 0;
    const auto number = [&](const char* name) { return sizes[name].cast<int64_t>(); };
    ForwardProblem problem{};
    const std::string dtype = sizes["dtype"].cast<std::string>();
    for (const DType candidate : {DType::float16, DType::bfloat16, DType::float32, DType::float64})
        if (dtype == cuda::name_of(candidate)) problem.dtype = candidate;
    problem.batch = number("batch");
    problem.heads_q = number("heads_q");
    problem.heads_k = number("heads_k");
    problem.head_dim = number("head_dim");
    problem.head_dim_v = number("head_dim_v");
    problem.seqlen_q = number("seqlen_q");
    problem.seqlen_k = number("seqlen_k");
    problem.rows_q = number("rows_q");
    problem.rows_k = number("rows_k");
    problem.window_left = number("window_left");
    problem.window_right = number("window_right");
    if (sizes["packed"].cast<bool>()) problem.cu_seqlens_q = problem.cu_seqlens_k = &something;
    const auto [block_q, block_k] = sizes["block_size"].cast<std::pair<int64_t, int64_t>>();
    if (block_q) {
        problem.key_blocks.counts = problem.query_blocks.counts = &something;
        problem.key_blocks.row_block = problem.query_blocks.column_block = block_q;
        problem.key_blocks.column_block = problem.query_blocks.row_block = block_k;
    }
    if (!sizes["attn_bias"].is_none()) {
        const auto strides = sizes["attn_bias"].cast<std::array<int64_t, 3>>();
        problem.bias = {&something, strides[0], strides[1], strides[2]};
    }
    if (sizes["alibi"].cast<bool>()) problem.alibi_slopes = &some_slope;
    problem.softmax_scale = sizes["softmax_scale"].cast<double>();
    problem.softcap = sizes["softcap"].cast<double>();
    problem.dropout_threshold = sizes["dropout_p"].cast<double>() > 0;
    const auto contiguous = [](int64_t rows, int64_t heads, int64_t head_dim) {
        return TensorView{nullptr, rows * heads * head_dim, heads * head_dim, head_dim};
    };
    problem.q = contiguous(problem.rows_q, problem.heads_q, problem.head_dim);
    problem.k = contiguous(problem.rows_k, problem.heads_k, problem.head_dim);
    problem.v = contiguous(problem.rows_k, problem.heads_k, problem.head_dim_v);
    problem.out = contiguous(problem.rows_q, problem.heads_q, problem.head_dim_v);
    return problem;
}

template <class Problem>
dict plan_of(const Problem& problem, const std::optional<cuda::Device>& device) {
    dict entry;
    list others;
    if (device)
        for (const cuda::WhyNot& other : cuda::why_not(problem, *device))
            others.append(pybind11::make_tuple(other.engine, other.kernel, other.reason));
    entry["others"] = others;
    try {
        const Plan plan = device ? choose(problem, *device) : choose(problem);
        entry["engine"] = plan.engine;
        entry["configuration"] = plan.configuration;
        entry["splits"] = plan.splits;
        entry["workspace_bytes"] = plan.workspace_bytes;
    } catch (const std::runtime_error& refusal) {
        entry["engine"] = pybind11::none();
        entry["error"] = refusal.what();
    }
    return entry;
}

dict plans(const dict& sizes, const std::optional<dict>& device_row) {
    std::optional<cuda::Device> device;
    if (device_row)
        device = {0, (*device_row)["capability"].cast<int>(), (*device_row)["multiprocessors"].cast<int>(),
                  (*device_row)["shared_bytes_per_block"].cast<int64_t>()};
    BackwardProblem problem{};
    problem.forward = problem_of(sizes);
    problem.forward.deterministic = sizes["deterministic"].cast<bool>();
    problem.dout = problem.forward.out;
    dict both;
    both["forward"] = plan_of(folded(problem.forward), device);
    both["backward"] = plan_of(problem, device);
    return both;
}

PYBIND11_MODULE(_C, module) {
    module.doc() = "flash_attn's operators (registered as torch.ops.flash_attn) and what this binary holds.";
    module.def(
        "engines", engine_reports,
        "Engines and configurations compiled in, best first: name, configuration, usable, chosen, why_not. "
        "Starts CUDA in this process if there are GPU engines.");
    module.def("kernels", kernel_rows, "The CUDA kernels compiled in, in the order in which they are tried.");
    module.def("devices", device_rows,
               "The GPUs that the GPU engines see; raises, saying why, if they see none.");
    module.def(
        "plan", plans, pybind11::arg("sizes"), pybind11::arg("device"),
        "What forward and backward of these sizes would run on a device (a row of devices(); None: the CPU), "
        "and why not the others.");
    module.def("splits_for", &cuda::splits_for, pybind11::arg("blocks"), pybind11::arg("key_tiles"),
               pybind11::arg("multiprocessors"), pybind11::arg("resident"));
    module.def("splits_for_few", &cuda::splits_for_few, pybind11::arg("blocks"), pybind11::arg("key_tiles"),
               pybind11::arg("multiprocessors"), pybind11::arg("resident"), pybind11::arg("pages") = false,
               pybind11::arg("cluster") = 1);
    module.def("register_gradient_node", register_gradient_node,
               "Gives torch's overrideable attention operator our kernels: operators.py asks, once.");
    module.attr("compiler") = __VERSION__;
    module.attr("cuda_toolkit") = cuda::toolkit;
}

}  // namespace
}  // namespace flash
