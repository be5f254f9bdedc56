"""The machine and the libraries of a run."""

import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import maxmoe

# Environment variables by which libraries choose kernels.
FLAGS = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_vbmi",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
]


def cpu_flags() -> set[str]:
    """Flags of the first CPU, as Linux calls them; empty elsewhere."""
    return set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())


def describe() -> dict[str, object]:
    """The machine and the libraries, for the JSON file."""
    here = cpu_flags()
    return {
        "cpu": _cpuinfo("model name") or platform.processor(),
        "cpu_family_and_model": [_cpuinfo("cpu family"), _cpuinfo("model")],
        "cpu_flags": [flag for flag in FLAGS if flag in here],
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "maxmoe": maxmoe.build_info(),
    }


def available_memory() -> float:
    """Bytes that a process can still allocate, by the estimate of Linux; infinite elsewhere."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    values = [value for name, _, value in (line.partition(":") for line in lines) if name.strip() == key]
    return values[0].strip() if values else ""
