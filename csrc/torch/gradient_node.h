// A node of autograd in C++, which the stable ABI has no words for: torch's own, of an operator of aten.
#pragma once

namespace flash {

// Gives aten::_scaled_dot_product_fused_attention_overrideable and its backward our kernels, once.
void register_gradient_node();

}  // namespace flash
