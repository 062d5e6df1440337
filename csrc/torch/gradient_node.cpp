// aten::_scaled_dot_product_fused_attention_overrideable is there for backends to supply, has no kernel of
// its own for CPU and CUDA, and scaled_dot_product_attention does not choose it there. torch differentiates
// it in C++, which costs the host of a call less than an autograd function in Python does. Ours reads tensors
// in this library's layout: gradient_node.py alone calls it, and says so by a dropout_p that nobody else has.
#include "gradient_node.h"

#include <torch/csrc/stable/library.h>

#include <cmath>

#include "checks.h"
#include "operators.h"

namespace flash {
namespace {

namespace boxed = torch::stable::detail;  // from, to and the class of a library

constexpr const char* kForward = "_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "_scaled_dot_product_fused_attention_overrideable_backward";
// dropout_p of our calls. The backward gets it, too, and no other argument is there for the second.
constexpr double kPlain = -1, kDeterministic = -2;

// What plain_attention_* take besides tensors, from what a node of autograd keeps.
struct PlainOptions {
    double softmax_scale;
    int64_t window_right;
    bool deterministic;

    PlainOptions(const Tensor& q, StableIValue dropout_p, StableIValue is_causal, StableIValue scale) {
        const auto mark = boxed::to<double>(dropout_p);
        const auto given = boxed::to<std::optional<double>>(scale);
        check(mark == kPlain || mark == kDeterministic, "aten::", kForward,
              " has a kernel for flash_attn_func's own calls alone; call flash_attn_func");
        // As Python's ** would have it, so that both ways give the same bits. Shapes are checked later.
        softmax_scale = given ? *given : q.dim() ? std::pow(double(q.size(q.dim() - 1)), -0.5) : 1;
        window_right = boxed::to<bool>(is_causal) ? 0 : -1;
        deterministic = mark == kDeterministic;
    }
};

// Undefined, which costs nothing to save for the backward.
StableIValue no_tensor() {
    AtenTensorHandle tensor;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&tensor));
    return boxed::from(tensor);
}

void free_tensor(StableIValue argument) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object(boxed::to<AtenTensorHandle>(argument)));
}

// Both are boxed by hand: most of their arguments and results are empty, and as TORCH_BOX's tensors they take
// 2 us, forward and backward.

// (query, key, value, attn_bias?, dropout_p, is_causal, return_debug_mask, scale?) -> (output, logsumexp,
// cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask)
void forward(StableIValue* stack, uint64_t, uint64_t) {
    const auto q = boxed::to<Tensor>(stack[0]), k = boxed::to<Tensor>(stack[1]),
               v = boxed::to<Tensor>(stack[2]);
    const auto attn_bias = boxed::to<OptionalTensor>(stack[3]);  // none, but ours to free
    const PlainOptions options(q, stack[4], stack[5], stack[7]);
    const auto [out, lse] = plain_attention_forward(q, k, v, options.softmax_scale, -1, options.window_right,
                                                    options.deterministic);
    stack[0] = boxed::from(out), stack[1] = boxed::from(lse);
    for (const int unused : {2, 3, 6, 7, 8}) stack[unused] = no_tensor();
    for (const int unused : {4, 5}) stack[unused] = boxed::from(int64_t(0));
}

// (grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
// max_k, dropout_p, is_causal, philox_seed, philox_offset, scale?) -> (grad_query, grad_key, grad_value,
// grad_attn_bias)
void backward(StableIValue* stack, uint64_t, uint64_t) {
    const auto dout = boxed::to<Tensor>(stack[0]), q = boxed::to<Tensor>(stack[1]),
               k = boxed::to<Tensor>(stack[2]), v = boxed::to<Tensor>(stack[3]),
               out = boxed::to<Tensor>(stack[6]), lse = boxed::to<Tensor>(stack[7]);
    for (const int unused : {4, 8, 9, 14, 15}) free_tensor(stack[unused]);
    TORCH_ERROR_CODE_CHECK(torch_delete_list(boxed::to<StableListHandle>(stack[5])));
    const PlainOptions options(q, stack[12], stack[13], stack[16]);
    stack[3] = no_tensor();
    if (!dout.defined()) {  // what used out had no gradient for it
        for (const int gradient : {0, 1, 2}) stack[gradient] = no_tensor();
        return;
    }
    const auto [dq, dk, dv] = plain_attention_backward(dout, {}, q, k, v, out, lse, options.softmax_scale, -1,
                                                       options.window_right, options.deterministic);
    stack[0] = boxed::from(dq), stack[1] = boxed::from(dk), stack[2] = boxed::from(dv);
}

}  // namespace

void register_gradient_node() {
    static boxed::StableLibrary libraries[] = {
        {boxed::StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__},
        {boxed::StableLibrary::Kind::IMPL, "aten", "CUDA", __FILE__, __LINE__},
    };
    for (auto& library : libraries) library.impl(kForward, forward).impl(kBackward, backward);
}

}  // namespace flash
