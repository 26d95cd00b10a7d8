"""The NVIDIA GPUs and driver of this machine, without torch."""

import re
from pathlib import Path

# The first driver for CUDA 13, for which torch 2.13 and vLLM 0.32 are built.
MIN_DRIVER = 580
# Ampere. Trainer and engine compute in bfloat16, which older GPUs do not support.
MIN_CAPABILITY = (8, 0)


def gpu_count() -> int:
    """Return the number of GPUs of this machine, whether CUDA sees them or not."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the loaded driver, such as "550.54.15"; "" if unknown."""
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text()) if file.is_file() else None
    return match[0] if match else ""


def driver_fix() -> str:
    """Return how to repair a driver that torch cannot use."""
    version = driver_version()
    if version and int(version.partition(".")[0]) >= MIN_DRIVER:
        return f"let this process use a GPU (CUDA_VISIBLE_DEVICES, `docker run --gpus all`); driver {version} is new enough"
    found = f" (driver {version} is loaded)" if version else ""
    return f"install NVIDIA driver {MIN_DRIVER} or later, which CUDA 13 requires{found}"


def capability_problem(name: str, capability: tuple[int, int]) -> str:
    """Return why a GPU is unsupported; "" if it is supported."""
    if capability >= MIN_CAPABILITY:
        return ""
    found, needed = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
    return f"{name} has compute capability {found}; expected {needed} (Ampere) or higher, because of bfloat16"
