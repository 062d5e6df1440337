"""Instruction sets that the CPU engine's hot files are compiled for: the only table of them.

setup.py compiles forward.cpp and backward.cpp once per row, tests compile the tile products once per row, and
engine.cpp has the same names with the run-time check of each.
"""

import platform

_AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]

_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
_AMX = [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"]

# name -> compiler flags; the name is the namespace FLASH_CPU_ISA too
VARIANTS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": _AVX512_BF16, "amx": _AMX}
