import os
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.utils.deterministic

import flash_attn

# pytest's importlib mode leaves sys.path alone, so that an installed flash_attn is what gets tested; the
# helpers beside this file have to be found all the same.
sys.path.insert(0, str(Path(__file__).parent))


def has_gpu_engine():
    return any(engine["usable"] and engine["name"] != "cpu" for engine in flash_attn.build_info()["engines"])


# pytest-xdist's workers share the processor. Each with threads for all of it, they would stand in line.
torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and has_gpu_engine() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def poison_fresh_memory():
    """Fresh tensors hold NaN (integers: the largest value), also those that C++ gets from aten::new_empty or
    aten::empty_like, so whatever an engine reads before writing, or forgets to write, shows.

    warn_only: the reference may use operations without a deterministic implementation.
    """
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def seed(request):
    """Each test has its own seed; FLASH_ATTN_TEST_SEED replaces it. Printed, so that a failure shows it."""
    value = int(os.environ.get("FLASH_ATTN_TEST_SEED", zlib.crc32(request.node.name.encode())))
    print(f"FLASH_ATTN_TEST_SEED={value}")
    torch.manual_seed(value)
    return value


@pytest.fixture
def threads():
    """A function that sets the number of CPU threads; the old number returns after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
