"""What the GPU and its driver say. Through nvidia-ml-py where it is installed; the rest through PyTorch."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from megatrain.base.mounts import read_text
from megatrain.probe.facts import GpuFacts, first_line


def find_device() -> tuple[torch.device, str]:
    """The compute device, and why that is not a GPU (empty where it is one)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device()), ""
    if torch.version.cuda is None:
        return torch.device("cpu"), f"PyTorch {torch.__version__} is a build without CUDA"
    told = str(caught[0].message).strip().splitlines()[0] if caught else "PyTorch finds no CUDA device"
    return torch.device("cpu"), told


def driver_version(root: Path = Path("/")) -> str | None:
    """Of NVIDIA's driver, as the kernel tells it."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text(root, "proc/driver/nvidia/version"))
    return found[1] if found else None


def read_gpu(device: torch.device) -> GpuFacts:
    """Before anything is measured."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=total_bytes,
        free_bytes=free_bytes + torch.cuda.memory_reserved(device),
    )


def read_management(device: torch.device) -> tuple[dict[str, Any], str | None]:
    """Fields of GpuFacts that only the driver's management library knows, and the driver's version.

    Call it while the link is at work or right after: an idle one is slowed down. Empty where nvidia-ml-py is missing.
    """
    if importlib.util.find_spec("pynvml") is None:
        return {}, None
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        asked = {
            "num_other_processes": lambda: _num_others(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            "pcie_generation": lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_width": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "max_pcie_generation": lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            "max_pcie_width": lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            "numa_node": lambda: _numa_node(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        }
        known = {}
        for name, ask in asked.items():
            try:
                known[name] = ask()
            except pynvml.NVMLError:  # a virtual GPU tells little
                continue
        return known, _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def try_management(device: torch.device) -> tuple[dict[str, Any], str | None, str]:
    """`read_management`, and what went wrong with it."""
    try:
        return *read_management(device), ""
    except Exception as error:
        return {}, None, first_line(error)


def _num_others(processes: list[Any]) -> int:
    """Users of the GPU beside this process, which is one itself; in a container its number may be another one."""
    others = [process for process in processes if process.pid != os.getpid()]
    return len(others) if len(others) < len(processes) else max(0, len(others) - 1)


def _numa_node(bus_id: str | bytes, root: Path = Path("/")) -> int | None:
    """The NUMA node that the GPU hangs on, or None where Linux does not know."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    text = read_text(root, f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").strip()
    return int(text) if text.isdigit() else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
