"""python -m flash_attn: what a bug report needs."""

import sys

import torch

from .info import build_info, self_test

# Rounding of inputs and outputs of order 1: a few units in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}


def main():
    info = build_info()
    for name in ("version", "interface_version", "torch", "python", "platform", "compiler", "threads"):
        print(f"{name:18} {info[name]}")
    for engine in info["engines"]:
        state = "usable" if engine["usable"] else f"not usable: {engine['why_not']}"
        if engine["chosen"]:
            state = "runs here"
        print(f"{'engine':18} {engine['name']} {engine['configuration']}: {state}")
    print(f"{'GPU':18} no GPU engine is compiled in; CUDA tensors raise an error")
    ok = True
    for dtype, tolerance in TOLERANCES.items():
        errors = self_test(dtype)
        passed = all(error < tolerance for error in errors)
        ok &= passed
        verdict = f"{'ok' if passed else 'FAILED'} (error of out {errors[0]:.1e}, dq {errors[1]:.1e})"
        print(f"{'self-test':18} {dtype}: {verdict}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
