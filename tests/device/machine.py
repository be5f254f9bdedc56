"""The machine of a device check."""

import subprocess
import time

import torch

from benchmarks import machine


def describe(device: torch.device) -> dict[str, object]:
    """Return date, processor, libraries and device, for the JSON file."""
    return {"date": time.strftime("%Y-%m-%d"), **machine.describe(), **_gpu(device)}


def _gpu(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {"device": device.type}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "cuda": torch.version.cuda,
    }
