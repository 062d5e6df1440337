"""The CUDA compiler that builds the kernels, and the GPU architectures that it builds them for."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

LOWEST = 80  # Ampere: older tensor cores know neither bfloat16 nor asynchronous copies
SHIPPED = (80, 90, 100, 120)  # one of each generation: its machine code runs on all chips of that generation
LARGE = (90, 100, 103)  # whose blocks can have 227 KiB of shared memory


@dataclass(frozen=True, order=True)
class Architecture:
    """capability 86 is 8.6. ptx: also as text that the driver compiles for later chips when it loads it."""

    capability: int
    ptx: bool = False

    def __str__(self):
        return f"{self.capability // 10}.{self.capability % 10}" + ("+PTX" if self.ptx else "")

    def flags(self):
        virtual = f"compute_{self.capability}"
        code = f"[sm_{self.capability},{virtual}]" if self.ptx else f"sm_{self.capability}"
        return ["-gencode", f"arch={virtual},code={code}"]


def code_for(architectures):
    return [flag for architecture in architectures for flag in architecture.flags()]


def only(capability):
    """nvcc's flags for instructions that this chip alone has: sm_90a."""
    return ["-gencode", f"arch=compute_{capability}a,code=sm_{capability}a"]


def with_less_memory(architectures):
    """Those that may run a kernel which the large ones never choose; all if there are no others."""
    others = [each for each in architectures if each.ptx or each.capability not in LARGE]
    return others or architectures


def parse(text):
    """Those of "8.0;9.0+PTX" (TORCH_CUDA_ARCH_LIST's syntax) or "80;90", without any below LOWEST."""
    found = {}
    for item in filter(None, re.split(r"[;,\s]+", text)):
        match = re.fullmatch(r"(\d+)\.?(\d)[af]?(\+PTX)?", item, flags=re.IGNORECASE)
        if not match:
            raise SystemExit(
                f"flash_attn: {item!r} in {text!r} is no GPU architecture; set FLASH_ATTN_CUDA_ARCHS to "
                'numbers like "80;90" or "8.0;9.0+PTX", to "all", or to "none" for the CPU engine only'
            )
        capability = int(match[1] + match[2])
        found[capability] = found.get(capability, False) or bool(match[3])
    return sorted(Architecture(capability, ptx) for capability, ptx in found.items() if capability >= LOWEST)


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    version: str  # "13.0"
    known: tuple  # capabilities that nvcc compiles for

    @classmethod
    def find(cls):
        """CUDA_HOME's, the one on PATH, or the one in /usr/local/cuda; None if there is none."""
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        candidates = [Path(home) / "bin" / "nvcc"] if home else []
        candidates += filter(None, [shutil.which("nvcc")])
        candidates += ["/usr/local/cuda/bin/nvcc"]
        nvcc = next((str(path) for path in candidates if os.access(path, os.X_OK)), None)
        if nvcc is None:
            return None
        version = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
        known = re.findall(r"compute_(\d+)", output_of(nvcc, "--list-gpu-arch"))
        return cls(nvcc, version[1] if version else "unknown", tuple(sorted(int(number) for number in known)))

    @property
    def root(self):
        return Path(self.nvcc).resolve().parent.parent

    @property
    def include(self):
        return self.root / "include"

    @property
    def smallest(self):
        """Options that compress device code: to a quarter of its size, before 12.8 to a third."""
        release = tuple(int(part) for part in self.version.split(".") if part.isdigit())
        return ["-compress-mode=size"] if release >= (12, 8) else ["-Xfatbin", "-compress-all"]

    @property
    def static_runtime(self):
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            library = self.root / folder / "libcudart_static.a"
            if library.is_file():
                return library
        raise SystemExit(f"flash_attn: {self.root} has nvcc, but not CUDA's runtime, libcudart_static.a")

    def shipped(self):
        """One architecture of each generation, and PTX of the newest for what comes after it."""
        *older, newest = (capability for capability in SHIPPED if capability in self.known)
        return [*map(Architecture, older), Architecture(newest, ptx=True)]

    def nearest(self, capability):
        """For a chip that is here: its machine code, or PTX where this nvcc does not know the chip yet."""
        older = max(known for known in self.known if known <= capability)
        return Architecture(older, ptx=older != capability)


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return ""


def present():
    """Capabilities of the GPUs in this machine."""
    listed = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    numbers = re.findall(r"^(\d+)\.(\d)\s*$", listed, flags=re.MULTILINE)
    return sorted({int(major + minor) for major, minor in numbers})


def choose(toolkit, environment, gpus=present):
    """(architectures, line that says why): what to compile for; none: no GPU engine."""
    cpu_only = "building the CPU engine only"
    wish = environment.get("FLASH_ATTN_CUDA_ARCHS", "").strip()
    if wish.lower() == "none":
        return [], f"FLASH_ATTN_CUDA_ARCHS is none, {cpu_only}"
    if toolkit is None and wish:
        raise SystemExit(f"flash_attn: FLASH_ATTN_CUDA_ARCHS is {wish}, but there is no nvcc; set CUDA_HOME")
    if toolkit is None:
        return [], f"no nvcc found (CUDA_HOME, PATH, /usr/local/cuda), {cpu_only}"
    if wish.lower() == "all":
        chosen, source = toolkit.shipped(), "FLASH_ATTN_CUDA_ARCHS"
    elif wish:
        chosen, source = parse(wish), "FLASH_ATTN_CUDA_ARCHS"
    elif listed := environment.get("TORCH_CUDA_ARCH_LIST", "").strip():
        chosen, source = parse(listed), "TORCH_CUDA_ARCH_LIST"
    elif found := gpus():
        chosen = sorted({toolkit.nearest(capability) for capability in found if capability >= LOWEST})
        source = "the GPUs of this machine"
    else:
        return [], f'no GPU here, {cpu_only} (FLASH_ATTN_CUDA_ARCHS="all" or "80;90" builds GPU engines)'
    if not chosen:
        return [], f"{source}: no architecture from {Architecture(LOWEST)} on, {cpu_only}"
    return chosen, f"CUDA {toolkit.version} for {', '.join(map(str, chosen))} ({source})"
