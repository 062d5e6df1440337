"""What a user of flash_attn 2.8 imports, calls and reads."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import flash_attn

TAIL = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": None, "deterministic": False, "return_attn_probs": False}
REQUIRED = inspect.Parameter.empty
OFFSETS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED)
QKV = {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED}

OURS = {"attn_mask": None, "attn_bias": None}  # not flash_attn's, and so by keyword only

SIGNATURES = {
    "flash_attn_func": {**QKV, **TAIL, **OURS},
    "flash_attn_kvpacked_func": {"q": REQUIRED, "kv": REQUIRED, **TAIL},
    "flash_attn_qkvpacked_func": {"qkv": REQUIRED, **TAIL},
    "flash_attn_varlen_func": {**QKV, **OFFSETS, **TAIL, "block_table": None},
    "flash_attn_varlen_kvpacked_func": {"q": REQUIRED, "kv": REQUIRED, **OFFSETS, **TAIL},
    "flash_attn_varlen_qkvpacked_func": {
        "qkv": REQUIRED, "cu_seqlens": REQUIRED, "max_seqlen": REQUIRED, **TAIL},
    "flash_attn_block_sparse_func": {**QKV, "mask": REQUIRED, **TAIL},
}


def test_signatures():
    """Names, order and defaults: people pass these by position."""
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        actual = {p.name: p.default for p in parameters}
        assert list(actual.items()) == list(expected.items()), name
        for p in parameters:
            assert p.kind == (p.KEYWORD_ONLY if p.name in OURS else p.POSITIONAL_OR_KEYWORD), name


def test_documentation():
    for name in (*SIGNATURES, "BlockSparseMask"):
        assert len(inspect.getdoc(getattr(flash_attn, name)) or "") > 40, name


def test_version():
    """TransformerEngine and others compare it; a local suffix would count as newer."""
    assert flash_attn.__version__ == "2.8.3"


def test_same_names_in_the_interface_module():
    from flash_attn import flash_attn_interface

    for name in list(SIGNATURES)[:6]:
        assert getattr(flash_attn_interface, name) is getattr(flash_attn, name)


def test_build_info():
    info = flash_attn.build_info()
    assert isinstance(info, dict) and info
    assert all(isinstance(key, str) for key in info)


def elsewhere(tmp_path):
    """Not in the checkout, whose flash_attn folder would hide the installed one from a new interpreter."""
    installed = Path(flash_attn.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return {"cwd": tmp_path, "env": environment, "text": True, "timeout": 120}


def test_self_test_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "flash_attn"]
    done = subprocess.run(command, capture_output=True, **elsewhere(tmp_path))
    assert done.returncode == 0, done.stderr
    import torch

    for word in (flash_attn.__version__, torch.__version__.split("+")[0], "cpu", "ok"):
        assert word in done.stdout, f"{word!r} not in:\n{done.stdout}"


def test_import_is_light(tmp_path):
    """No compiler, no torch.compile machinery, no optional dependency at import."""
    program = "import torch, sys; old = set(sys.modules); import flash_attn; print(*set(sys.modules) - old)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.check_output(command, **elsewhere(tmp_path)).split()
    assert "flash_attn" in loaded
    for name in ("torch._inductor", "torch.utils.cpp_extension", "triton", "einops", "transformers", "ninja"):
        assert name not in loaded
