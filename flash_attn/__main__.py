"""python -m flash_attn: what a bug report needs."""

import sys

import torch

from . import _C
from .info import build_info, self_test

# Rounding of inputs and outputs of order 1: a few units in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}


def gpu_dtypes():
    """What the GPU engines have kernels of both passes for."""
    by_pass = {name: set() for name in ("forward", "backward")}
    for kernel in _C.kernels():
        by_pass[kernel["pass"]].add(getattr(torch, kernel["dtype"]))
    return [dtype for dtype in TOLERANCES if all(dtype in dtypes for dtypes in by_pass.values())]


def main():
    info = build_info()
    for name in (
        "version", "interface_version", "torch", "python", "platform", "compiler", "cuda_toolkit", "threads"
    ):
        print(f"{name:18} {info[name]}")
    for engine in info["engines"]:
        state = "usable" if engine["usable"] else f"not usable: {engine['why_not']}"
        if engine["chosen"]:
            state = "runs here"
        print(f"{'engine':18} {engine['name']} {engine['configuration']}: {state}")
    gpu_engines = [engine for engine in info["engines"] if engine["name"] != "cpu"]
    if not gpu_engines:
        print(f"{'GPU':18} no GPU engine is compiled in; CUDA tensors raise an error")
    tests = [("cpu", dtype) for dtype in TOLERANCES]
    if any(engine["usable"] for engine in gpu_engines) and torch.cuda.is_available():
        for index, device in enumerate(_C.devices()):
            name = torch.cuda.get_device_name(index)
            print(f"{'GPU':18} {index}: {name}, {device['multiprocessors']} multiprocessors")
        tests += [("cuda", dtype) for dtype in gpu_dtypes()]
    ok = True
    for device, dtype in tests:
        errors = self_test(dtype, device)
        passed = all(error < TOLERANCES[dtype] for error in errors)
        ok &= passed
        verdict = f"{'ok' if passed else 'FAILED'} (error of out {errors[0]:.1e}, dq {errors[1]:.1e})"
        print(f"{'self-test':18} {device} {dtype}: {verdict}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
