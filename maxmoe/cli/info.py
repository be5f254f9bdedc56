"""The command `info`: the installation, for bug reports."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import maxmoe
from maxmoe.cli.waiting_threads import waiting_of_this_process


def add_options(_command: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options."""


def info(_options: argparse.Namespace) -> str:
    """Return the report of `info`: versions, build, instruction set in use, processor and threads."""
    packages = {"torch": str(torch.__version__)}  # its metadata may lack the variant, such as "+cu132"
    for package in ("maxmoe", "transformers", "safetensors"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    core = maxmoe.build_info()
    facts = {
        **packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "threads:wait": waiting_of_this_process(torch.get_num_threads()),
        "cuda": f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.version.cuda else "not in torch",
        "core": core.pop("core"),
        **{f"core:{name}": fact for name, fact in core.items()},
    }
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {fact}" for name, fact in facts.items())


def _processor() -> str:
    """Return the model name of the processor, which `platform.processor` leaves empty on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
