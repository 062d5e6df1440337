"""Hugging Face's transformers, unpatched, on a GPU: attn_implementation="flash_attention_2", and the adapter
of examples/hugging_face.py, which is registered under a name of its own.

Logits and gradients in half precision may err at most twice as much as those of transformers' own eager
attention in the same precision, against eager in float32 (tests/transformers_case.py).
"""

import pytest
import torch
from gpu import DEVICE, HALVES, needs_gpu
from transformers_case import (
    DECODERS,
    Models,
    check_autocast,
    check_batch,
    check_cross_attention,
    check_generation,
)

import hugging_face

pytestmark = needs_gpu
IMPLEMENTATIONS = ["flash_attention_2", hugging_face.ADAPTER]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    hugging_face.register_adapter()
    return request.param


def test_flash_attention_2_is_this_library():
    """transformers' flash_attention_2 calls flash_attn_func of this package, and neither a kernel of the hub
    nor another library."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    import flash_attn
    functions, _ = lazy_import_flash_attention("flash_attention_2")
    assert functions[:2] == (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", ["equal", "left", "right", "packed"])
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_logits_and_gradients(implementation, name, layout, dtype):
    check_batch(Models(name, implementation, dtype, DEVICE), layout)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [*DECODERS, "bart"])
def test_generation(implementation, name, dtype):
    check_generation(Models(name, implementation, dtype, DEVICE))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention(implementation, side, dtype):
    """With padding on the right, transformers' own function cuts the decoder's queries by the end of the
    encoder's mask, and its result is not eager's, whoever computes the attention."""
    if (implementation, side) == ("flash_attention_2", "right"):
        pytest.skip("transformers cuts the decoder's queries by the end of the encoder's mask")
    check_cross_attention(Models("bart", implementation, dtype, DEVICE), side)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_autocast(implementation, name):
    check_autocast(name, implementation, DEVICE)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled(name):
    """torch.compile of the whole model: the results of the model that is not compiled."""
    models = Models(name, "flash_attention_2", torch.bfloat16, DEVICE)
    compiled, arguments = torch.compile(models.tested), dict(input_ids=models.sequences[2][None])
    if name == "llama":
        arguments["use_cache"] = False
    actual, expected = (model(**arguments).logits.float() for model in (compiled, models.tested))
    assert (actual - expected).norm() <= 0.02 * expected.norm()
