"""Promise: what this library lacks of flash_attn is an ImportError that says what to use instead."""

import importlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn
from flash_attn import not_shipped


@pytest.mark.parametrize("name", sorted(not_shipped.MODULES))
def test_modules(name):
    assert importlib.util.find_spec(name) is not None
    for wanted in (name, f"{name}.part"):
        with pytest.raises(ImportError, match=f"{name} is not part of this library; use ") as caught:
            importlib.import_module(wanted)
        assert caught.value.name == name


def test_in_a_new_interpreter(tmp_path):
    """Nothing but flash_attn's own import comes before."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flash_attn.__file__).parent.parent)}
    command = [sys.executable, "-c", "import flash_attn.flash_blocksparse_attention"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "use flash_attn.flash_attn_block_sparse_func" in done.stderr


def test_what_the_sentences_name_exists():
    for instead in not_shipped.MODULES.values():
        for word in instead.replace(",", " ").split():
            if word.startswith("flash_attn."):
                module, _, name = word.rpartition(".")
                assert hasattr(importlib.import_module(module), name), word


def test_a_name():
    with pytest.raises(ImportError, match="ParallelMHA is not part of this library; use MHA"):
        from flash_attn.modules.mha import ParallelMHA  # noqa: F401
    from flash_attn.modules import mha

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mha.Nothing
    assert not hasattr(mha, "__wrapped__")


def test_unknown_modules_are_left_to_python():
    """flash_attn.cute in particular: others take its presence for FlashAttention 4."""
    assert importlib.util.find_spec("flash_attn.cute") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'flash_attn.nothing'"):
        importlib.import_module("flash_attn.nothing")


def test_one_finder():
    """Behind Python's own, so that a module that is installed wins."""
    modules = [type(finder).__module__ for finder in sys.meta_path]
    assert modules.count(not_shipped.__name__) == 1
    assert modules.index(not_shipped.__name__) > sys.meta_path.index(importlib.machinery.PathFinder)
