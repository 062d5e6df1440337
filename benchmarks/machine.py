"""What a number depends on besides the code, and how long a call takes on this machine."""

import datetime
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

import flash_attn

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw",
             "power.limit")
CYCLES_PER_SECOND = 2e9  # about; of the kernel that holds the GPU


def seconds_per_call(calls, repeats, device):
    """-> mean seconds a call, and whether the host was out of the measurement. The calls take turns."""
    if device == "cuda":
        return _seconds_on_gpu(calls, repeats)
    begin = time.perf_counter()
    for i in range(repeats):
        calls[i % len(calls)]()
    return (time.perf_counter() - begin) / repeats, True


def _seconds_on_gpu(calls, repeats):
    """Between two events on the GPU. A kernel that only waits holds it until the host has queued every call,
    and one call goes before the first event, so that neither host time nor a cold start count."""
    for held in (1e-3 + 2e-4 * repeats, 1e-2 + 2e-3 * repeats):  # seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(held * CYCLES_PER_SECOND))
        calls[-1]()
        begin.record()
        for i in range(repeats):
            calls[i % len(calls)]()
        end.record()
        host_was_ahead = not begin.query()
        end.synchronize()
        if host_was_ahead:
            break
    return begin.elapsed_time(end) / 1e3 / repeats, host_was_ahead


def gemm_gflops(dtype, device):
    """Rate of torch.mm, what attention's products can hope for: the best of 8, on a GPU their median."""
    size = GEMM_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    repeats, statistic = (10, statistics.median) if device == "cuda" else (1, min)
    samples = [seconds_per_call([lambda: torch.mm(a, b)], repeats, device)[0] for _ in range(8)]
    return 2 * size**3 / statistic(samples) / 1e9


def gpu_state():
    """Driver, clocks in MHz, degrees and watts as nvidia-smi tells them, or why it does not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader,nounits",
               f"--id=GPU-{torch.cuda.get_device_properties().uuid}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return {"unknown": str(error)}
    return dict(zip(GPU_STATE, (value.strip() for value in text.split(","))))


def gpu_state_under_load():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(400):  # half a second of an H100
        torch.mm(a, a)
    state = gpu_state()
    torch.cuda.synchronize()
    return state


def processor(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def machine(device):
    build_info = getattr(flash_attn, "build_info", None)
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(device),
        "threads": torch.get_num_threads(),
        # Neighbours' load slows the implementations unequally: a table from a busy machine is not evidence.
        "load_average": os.getloadavg()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_config": torch.__config__.show(),
        "flash_attn": getattr(flash_attn, "__version__", "unknown"),
        "build_info": build_info() if build_info else None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        described["gpu"] = {
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "shared_bytes_per_multiprocessor": properties.shared_memory_per_multiprocessor,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "fa3_library": os.path.basename(os.environ.get("FA3_LIBRARY", "")) or None,
            "state_before": gpu_state(),
            "state_under_load": gpu_state_under_load(),
        }
    return described
