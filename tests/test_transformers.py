"""Hugging Face's transformers, unpatched, with this library, on a CPU.

Models in half precision on a GPU: tests/test_cuda_transformers.py. On a CPU two gates stop
`attn_implementation="flash_attention_2"`, whatever is installed: is_flash_attn_2_available() is false unless
torch.cuda.is_available() (or another vendor's), and a model with its weights on a CPU is refused where no GPU
is there. What is left, and tested here:

- "flash_attention_2" with one pretence: torch says that it has a GPU. Everything behind that gate is
  transformers' own code, with our functions on CPU tensors: the names it imports, the arguments it passes.
- "io_aware": examples/hugging_face.py, registered through AttentionInterface and AttentionMaskInterface, the
  documented extension points. Nothing is pretended.

Each model in float32, where results have to agree to a part in 10^5, and in bfloat16.
"""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from transformers_case import (
    DECODERS,
    METADATA,
    Models,
    check_autocast,
    check_batch,
    check_cross_attention,
    check_generation,
    transformers,
)

import flash_attn
import hugging_face
from transformers.utils import import_utils

DTYPES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = ["flash_attention_2", hugging_face.ADAPTER]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """torch says that there is a GPU; what transformers remembers of the answer is forgotten."""
    remembered = (import_utils.is_torch_cuda_available, import_utils.is_flash_attn_2_available)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for function in remembered:
            function.cache_clear()
        yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if request.param == "flash_attention_2":
        request.getfixturevalue("pretended_gpu")
    else:
        hugging_face.register_adapter()
    return request.param


def build(name, implementation, dtype):
    if (name, implementation, dtype) == ("gpt2", "flash_attention_2", torch.float32):
        pytest.skip("transformers looks for a Linear in a float32 layer, to learn the dtype; GPT-2 has none")
    return Models(name, implementation, dtype)


def test_metadata_opens_the_gate(pretended_gpu):
    assert importlib.metadata.version("flash-attn") == flash_attn.__version__
    assert import_utils.is_flash_attn_2_available()


def test_without_metadata_the_gate_stays_shut():
    """That the metadata, and nothing else, opens it."""
    program = ("import sys, torch\n"
               "sys.path[:] = [path for path in sys.path if path not in sys.argv[1:]]\n"
               "torch.cuda.is_available = lambda: True\n"
               "import flash_attn, transformers\n"
               "print(transformers.utils.is_flash_attn_2_available())")
    if METADATA is None:
        pytest.skip("flash-attn is installed: its metadata cannot be taken away here")
    done = subprocess.run([sys.executable, "-c", program, METADATA.name], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU opens the gate")
def test_a_cpu_alone_is_refused():
    with pytest.raises(ImportError, match="not available on CPU"):
        Models("llama", "flash_attention_2", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["equal", "left", "right", "packed"])
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_logits_and_gradients(implementation, name, layout, dtype):
    check_batch(build(name, implementation, dtype), layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*DECODERS, "bart"])
def test_generation(implementation, name, dtype):
    check_generation(build(name, implementation, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention(implementation, side, dtype):
    if (implementation, side) == ("flash_attention_2", "right"):
        pytest.skip("transformers cuts the decoder's queries by the end of the encoder's mask")
    check_cross_attention(build("bart", implementation, dtype), side)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_autocast(implementation, name):
    check_autocast(name, implementation)


@pytest.mark.parametrize("name,forgotten", [("gemma2", "softcap"), ("gemma2", "sliding_window"),
                                            ("mistral", "sliding_window"), ("llama", "scaling"),
                                            ("bert", "position_ids"), ("gpt2", "position_ids")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_forgotten_argument_shows(name, forgotten, dtype):
    """The checks above can fail: an adapter that ignores one argument does not pass them."""
    def forgetful(*args, **kwargs):
        value = {"scaling": 1.0}.get(forgotten)
        return hugging_face.attention_forward(*args, **{**kwargs, forgotten: value})

    hugging_face.register_adapter()
    transformers.AttentionInterface.register(hugging_face.ADAPTER, forgetful)
    try:
        with pytest.raises(AssertionError, match="at most"):
            check_batch(Models(name, hugging_face.ADAPTER, dtype), "packed")
    finally:
        hugging_face.register_adapter()
