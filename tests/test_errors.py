"""Bad input raises before anything runs, and the message says which argument and what it was."""

import math
import re

import pytest
import torch

import flash_attn

ERRORS = (RuntimeError, ValueError, TypeError)


def tensors(batch=2, seqlen_q=4, seqlen_k=6, num_heads=4, num_heads_k=2, head_dim=8, dtype=torch.float32,
            device="cpu"):
    q = torch.randn(batch, seqlen_q, num_heads, head_dim).to(device, dtype)
    k = torch.randn(batch, seqlen_k, num_heads_k, head_dim).to(device, dtype)
    return {"q": q, "k": k, "v": k.clone()}


def expect(arguments, *words, call=None):
    """Every word, a regular expression, stands somewhere in the message."""
    call = flash_attn.flash_attn_func if call is None else call
    with pytest.raises(ERRORS) as error:
        call(**arguments)
    message = str(error.value)
    for word in words:
        assert re.search(word, message), f"{word!r} not in: {message}"


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


BAD_TENSORS = {
    "q of 3 dimensions": ({"q": ones(4, 4, 8)}, [r"\bq\b", r"4, 4, 8"]),
    "k of 5 dimensions": ({"k": ones(2, 6, 2, 8, 1)}, [r"\bk\b", r"2, 6, 2, 8, 1"]),
    "v of 3 dimensions": ({"v": ones(6, 2, 8)}, [r"\bv\b", r"6, 2, 8"]),
    "other batch in k": ({"k": ones(3, 6, 2, 8)}, [r"\bk\b", r"3, 6, 2, 8"]),
    "other batch in v": ({"v": ones(3, 6, 2, 8)}, [r"\bv\b", r"3, 6, 2, 8"]),
    "other head dim in k": ({"k": ones(2, 6, 2, 16)}, [r"\bk\b", r"16"]),
    "other length in v": ({"v": ones(2, 7, 2, 8)}, [r"\bv\b", r"7"]),
    "other heads in v": ({"v": ones(2, 6, 4, 8)}, [r"\bv\b", r"2, 6, 4, 8|\b4\b"]),
    "int q": ({"q": ones(2, 4, 4, 8, dtype=torch.int32)}, [r"\bq\b", r"(?i)int"]),
    "all int": ({name: ones(2, 4, 2, 8, dtype=torch.int64) for name in "qkv"}, [r"\bq\b", r"(?i)int64|long"]),
    "bool k": ({"k": ones(2, 6, 2, 8, dtype=torch.bool)}, [r"\bk\b", r"(?i)bool"]),
    "complex": ({n: ones(2, 4, 2, 8, dtype=torch.complex64) for n in "qkv"}, [r"\bq\b"]),
    "mixed dtypes": ({"v": ones(2, 6, 2, 8, dtype=torch.bfloat16)}, [r"\bv\b", "bfloat16", "float32"]),
    "mixed devices": ({"k": torch.empty(2, 6, 2, 8, device="meta")}, [r"\bk\b", "meta", "(?i)cpu"]),
    "indivisible heads": ({"k": ones(2, 6, 3, 8), "v": ones(2, 6, 3, 8)}, [r"\b3\b", r"\b4\b", "head"]),
    "fewer query heads": ({"k": ones(2, 6, 8, 8), "v": ones(2, 6, 8, 8)}, [r"\b8\b", r"\b4\b", "head"]),
    "no heads": ({"q": ones(2, 4, 0, 8)}, ["head", r"\b0\b"]),
    "head dim 257": ({n: ones(2, 4, 2, 257) for n in "qkv"}, ["257", "256", "head"]),
    "value head dim 300": ({"v": ones(2, 6, 2, 300)}, ["300", "256"]),
    "head dim 0": ({n: ones(2, 4, 2, 0) for n in "qkv"}, ["head", r"\b0\b"]),
    "batch of 0": ({n: ones(0, 4, 2, 8) for n in "qkv"}, ["batch", r"\b0\b"]),
    "not a tensor": ({"k": [[1.0]]}, [r"\bk\b|list"]),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors(name):
    change, words = BAD_TENSORS[name]
    expect({**tensors(), **change}, *words)


BAD_OPTIONS = {
    "dropout 1": ({"dropout_p": 1.0}, ["dropout_p", r"\b1"]),
    "dropout below 0": ({"dropout_p": -0.1}, ["dropout_p", r"-0\.1"]),
    "dropout above 1": ({"dropout_p": 1.5}, ["dropout_p", r"1\.5"]),
    "dropout NaN": ({"dropout_p": math.nan}, ["dropout_p", "(?i)nan"]),
    "scale NaN": ({"softmax_scale": math.nan}, ["softmax_scale", "(?i)nan"]),
    "scale inf": ({"softmax_scale": math.inf}, ["softmax_scale", "(?i)inf"]),
    "softcap below 0": ({"softcap": -1.0}, ["softcap", "-1"]),
    "softcap NaN": ({"softcap": math.nan}, ["softcap", "(?i)nan"]),
    "softcap with dropout": ({"softcap": 1.0, "dropout_p": 0.1}, ["softcap", "dropout"]),
    "window of one": ({"window_size": (3,)}, ["window_size"]),
    "window of three": ({"window_size": (3, 3, 3)}, ["window_size"]),
    "window a number": ({"window_size": 3}, ["window_size", "3"]),
    "slopes of wrong length": ({"alibi_slopes": ones(3)}, ["alibi_slopes", r"\b3\b"]),
    "slopes of wrong batch": ({"alibi_slopes": ones(3, 4)}, ["alibi_slopes", r"3, 4"]),
    "slopes of 3 dimensions": ({"alibi_slopes": ones(1, 2, 4)}, ["alibi_slopes", r"1, 2, 4"]),
    "float64 slopes": ({"alibi_slopes": ones(4, dtype=torch.float64)}, ["alibi_slopes", "float64|double"]),
    "int slopes": ({"alibi_slopes": ones(4, dtype=torch.int32)}, ["alibi_slopes", "(?i)int"]),
    "slopes elsewhere": ({"alibi_slopes": torch.empty(4, device="meta")}, ["alibi_slopes", "meta"]),
    "slopes that want a gradient": ({"alibi_slopes": ones(4).requires_grad_()}, ["alibi_slopes", "grad"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    change, words = BAD_OPTIONS[name]
    expect({**tensors(), **change}, *words)


def test_slopes_that_want_a_gradient_are_fine_without_grad_mode():
    slopes = ones(4)
    with torch.no_grad():
        out = flash_attn.flash_attn_func(**(inputs := tensors()), alibi_slopes=slopes.requires_grad_())
    assert torch.equal(out, flash_attn.flash_attn_func(**inputs, alibi_slopes=slopes.detach()))


def packed(**change):
    inputs = {name: x.flatten(0, 1) for name, x in tensors().items()}
    offsets = {"cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32),
               "cu_seqlens_k": torch.tensor([0, 6, 12], dtype=torch.int32),
               "max_seqlen_q": 4, "max_seqlen_k": 6}
    return {**inputs, **offsets, **change}


BAD_OFFSETS = {
    "first not 0": [1, 4, 8], "decreasing": [0, 5, 3, 8], "negative": [0, -1, 8],
    "beyond the total": [0, 4, 13],
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
@pytest.mark.parametrize("argument", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_offsets(name, argument, dtype):
    offsets = torch.tensor(BAD_OFFSETS[name], dtype=dtype)
    other = "cu_seqlens_k" if argument == "cu_seqlens_q" else "cu_seqlens_q"
    fitting = torch.linspace(0, 8, len(offsets)).to(torch.int32)
    change = {argument: offsets, other: fitting, "max_seqlen_q": 20, "max_seqlen_k": 20}
    expect(packed(**change), argument, call=flash_attn.flash_attn_varlen_func)


BAD_PACKED = {
    "float offsets": ({"cu_seqlens_q": torch.tensor([0.0, 4.0, 8.0])}, ["cu_seqlens_q", "(?i)float"]),
    "bool offsets": ({"cu_seqlens_k": torch.tensor([False, True, True])}, ["cu_seqlens_k", "(?i)bool"]),
    "offsets of 2 dimensions": ({"cu_seqlens_q": torch.tensor([[0, 4, 8]])}, ["cu_seqlens_q", r"1, 3|dim"]),
    "one offset": (
        {"cu_seqlens_q": torch.tensor([0]), "cu_seqlens_k": torch.tensor([0])}, ["cu_seqlens_q|batch"]),
    "no offsets": ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, ["cu_seqlens_q"]),
    "two lengths": ({"cu_seqlens_k": torch.tensor([0, 6, 9, 12])}, ["cu_seqlens_k", r"\b4\b|\b3\b"]),
    "max_seqlen too small": ({"max_seqlen_q": 3}, ["max_seqlen_q", r"\b3\b"]),
    "max_seqlen_k too small": ({"max_seqlen_k": 5}, ["max_seqlen_k", r"\b5\b"]),
    "negative max_seqlen": ({"max_seqlen_q": -1}, ["max_seqlen_q", "-1"]),
    "dense q": ({"q": ones(2, 4, 4, 8)}, [r"\bq\b", r"2, 4, 4, 8"]),
    "other total in v": ({"v": ones(11, 2, 8)}, [r"\bv\b", "11"]),
    "slopes of wrong batch": ({"alibi_slopes": ones(3, 4)}, ["alibi_slopes", "3, 4"]),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_arguments(name):
    change, words = BAD_PACKED[name]
    expect(packed(**change), *words, call=flash_attn.flash_attn_varlen_func)


@pytest.mark.parametrize("change", [{"dropout_p": 0.1}, {"return_attn_probs": True}], ids=str)
def test_block_table_goes_without_dropout(change):
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn.flash_attn_varlen_func(
            **packed(block_table=torch.zeros(2, 1, dtype=torch.int32), **change))


def block_mask(*shape, dtype=torch.bool, block_size=2):
    return flash_attn.BlockSparseMask.from_block_map(torch.ones(*shape, dtype=dtype), block_size)


BAD_MASKS = {
    "int map": (lambda: block_mask(1, 1, 2, 3, dtype=torch.int32), ["block_map", "(?i)int32|int"]),
    "map of 2 dimensions": (lambda: block_mask(2, 3), ["block_map", "2, 3"]),
    "block size 0": (lambda: block_mask(1, 1, 2, 3, block_size=0), ["block_size", "0"]),
    "block size -1": (lambda: block_mask(1, 1, 2, 3, block_size=(2, -1)), ["block_size", "-1"]),
    "block size of three": (lambda: block_mask(1, 1, 2, 3, block_size=(2, 2, 2)), ["block_size"]),
    "block size 1.5": (lambda: block_mask(1, 1, 2, 3, block_size=1.5), ["block_size", r"1\.5"]),
    "too few query blocks": (lambda: block_mask(1, 1, 1, 3), ["mask|block", r"\b1\b", r"\b2\b"]),
    "too many key blocks": (lambda: block_mask(1, 1, 2, 4), ["mask|block", r"\b4\b", r"\b3\b"]),
    "wrong batch": (lambda: block_mask(3, 1, 2, 3), ["mask|block", r"\b3\b", r"\b2\b"]),
    "wrong heads": (lambda: block_mask(1, 2, 2, 3), ["mask|block", r"\b2\b", r"\b4\b"]),
    "a tensor": (lambda: torch.ones(1, 1, 2, 3, dtype=torch.bool), ["mask|block", "Tensor|BlockSparseMask"]),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_bad_block_masks(name):
    make, words = BAD_MASKS[name]
    call = flash_attn.flash_attn_block_sparse_func
    expect(tensors(), *words, call=lambda **inputs: call(**inputs, mask=make()))


def test_bad_packed_layouts():
    expect({"qkv": ones(2, 4, 2, 4, 8)}, "qkv", "2, 4, 2, 4, 8", call=flash_attn.flash_attn_qkvpacked_func)
    expect({"q": ones(2, 4, 4, 8), "kv": ones(2, 6, 3, 4, 8)}, "kv", "2, 6, 3, 4, 8",
           call=flash_attn.flash_attn_kvpacked_func)


def test_everything_still_works_after_an_error():
    inputs = tensors()
    before = flash_attn.flash_attn_func(**inputs)
    with pytest.raises(ERRORS):
        flash_attn.flash_attn_func(**inputs, dropout_p=2.0)
    assert torch.equal(flash_attn.flash_attn_func(**inputs), before)
