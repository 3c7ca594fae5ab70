"""Machines that one need not own. Pure data.

`h200-128gb` is where the figures of docs/performance.md were measured. All others are estimated: rates of the H200
scaled by published figures of each chip, at the share of them that the H200 sustained (matrix products 0.77, memory
0.90, link 0.87), update costs by the bandwidth of host memory (and no better than its cores allow).
"""

from __future__ import annotations

import dataclasses

from megatrain.base.errors import UserError
from megatrain.base.units import GB, GIB
from megatrain.plan.machine import Machine

H200_UPDATE = {"fp32": 0.212, "bf16": 0.178, "8bit": 0.194, "4bit": 0.194}
"""ns a parameter on 16 cores with AVX-512, 122.7 GB/s with fp32 moments: docs/performance.md."""

AVX2_UPDATE = {"fp32": 0.214, "bf16": 0.223, "8bit": 0.262, "4bit": 0.275}
"""The same on 16 cores without AVX-512."""

H200 = Machine(
    name="h200-128gb",
    source="measured (docs/performance.md); disk, fp32 products and lossless updates estimated",
    hbm_bytes=139 * GIB,
    ram_bytes=128 * GIB,
    disk_bytes=2000 * GB,
    num_cores=16,
    matmul_flops_per_second=760e12,
    fp32_flops_per_second=50e12,
    hbm_bytes_per_second=4300e9,
    h2d_bytes_per_second=55e9,
    d2h_bytes_per_second=55e9,
    pageable_h2d_bytes_per_second=8.5e9,
    ram_bytes_per_second=122.7e9,
    disk_read_bytes_per_second=6e9,
    disk_write_bytes_per_second=5e9,
    update_ns_per_parameter={**H200_UPDATE, "lossless": 1.5},
)


def _update(ram_bytes_per_second: float, num_cores: int, *, has_avx512: bool) -> dict[str, float]:
    """Estimated: fp32 moments by the bandwidth of memory, codes by cores."""
    by_cores = (H200_UPDATE if has_avx512 else AVX2_UPDATE)["fp32"] * H200.num_cores / num_cores
    by_memory = H200_UPDATE["fp32"] * H200.ram_bytes_per_second / ram_bytes_per_second
    exact = max(by_memory, by_cores / 2)  # memory bounds 16 cores; half as many would still nearly fill it
    codes = H200_UPDATE if has_avx512 else AVX2_UPDATE
    coded = {name: max(ns * H200.num_cores / num_cores, exact * 0.5) for name, ns in codes.items() if name != "fp32"}
    return {"fp32": exact, **coded, "lossless": 1.5 * H200.num_cores / num_cores}


def _estimated(base: str, **changes: object) -> Machine:
    avx512 = bool(changes.pop("has_avx512", True))
    machine = dataclasses.replace(H200, **changes)
    update = _update(machine.ram_bytes_per_second, machine.num_cores, has_avx512=avx512)
    return dataclasses.replace(machine, source=f"estimated from {base}", update_ns_per_parameter=update)


_PCIE4 = {"h2d_bytes_per_second": 27e9, "d2h_bytes_per_second": 27e9, "pageable_h2d_bytes_per_second": 6e9}

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        H200,
        _estimated(
            "h200-128gb with twice its host memory",
            name="h200-256gb",
            ram_bytes=256 * GIB,
        ),
        _estimated(
            "h200-128gb with four times its host memory",
            name="h200-512gb",
            ram_bytes=512 * GIB,
        ),
        _estimated(
            "h200-128gb and a host with 1.5 TB of DDR5 in 12 channels, 64 cores",
            name="h200-1.5tb",
            ram_bytes=1500 * GB,
            disk_bytes=8000 * GB,
            num_cores=64,
            ram_bytes_per_second=300e9,
            disk_read_bytes_per_second=12e9,
            disk_write_bytes_per_second=8e9,
        ),
        _estimated(
            "h200-1.5tb with 2 TB and the data sheet of the B300 (288 GB, 2,250 TFLOPS, 8 TB/s) on the links of PCIe 5",
            name="b300-2tb",
            hbm_bytes=267 * GIB,
            ram_bytes=2000 * GB,
            disk_bytes=8000 * GB,
            num_cores=64,
            matmul_flops_per_second=1730e12,
            fp32_flops_per_second=56e12,
            hbm_bytes_per_second=7200e9,
            ram_bytes_per_second=300e9,
            disk_read_bytes_per_second=12e9,
            disk_write_bytes_per_second=8e9,
        ),
        _estimated(
            "h200-128gb and the data sheet of the GH200 (96 GB of HBM3, 480 GB of LPDDR5X, NVLink-C2C, 72 Arm cores)",
            name="gh200",
            has_avx512=False,
            hbm_bytes=94 * GIB,
            ram_bytes=470 * GB,
            num_cores=72,
            hbm_bytes_per_second=3600e9,
            h2d_bytes_per_second=370e9,
            d2h_bytes_per_second=290e9,
            pageable_h2d_bytes_per_second=100e9,
            ram_bytes_per_second=350e9,
        ),
        _estimated(
            "h200-128gb and the data sheet of the A100 (80 GB, 312 TFLOPS, 2.0 TB/s, PCIe 4); 512 GiB, 32 cores",
            name="a100",
            has_avx512=False,
            hbm_bytes=79 * GIB,
            ram_bytes=512 * GIB,
            num_cores=32,
            matmul_flops_per_second=240e12,
            fp32_flops_per_second=15e12,
            hbm_bytes_per_second=1800e9,
            ram_bytes_per_second=150e9,
            **_PCIE4,
        ),
        _estimated(
            "h200-128gb and the data sheet of the RTX 4090 (165 TFLOPS, 1.0 TB/s, PCIe 4); 128 GiB, 16 cores",
            name="rtx4090",
            has_avx512=False,
            hbm_bytes=23 * GIB,
            matmul_flops_per_second=127e12,
            fp32_flops_per_second=63e12,
            hbm_bytes_per_second=900e9,
            ram_bytes_per_second=60e9,
            **_PCIE4,
        ),
        _estimated(
            "h200-128gb and the data sheet of the RTX 3090 (71 TFLOPS, 0.94 TB/s, PCIe 4); 128 GiB, 16 cores",
            name="rtx3090",
            has_avx512=False,
            hbm_bytes=23 * GIB,
            matmul_flops_per_second=55e12,
            fp32_flops_per_second=27e12,
            hbm_bytes_per_second=840e9,
            ram_bytes_per_second=45e9,
            disk_read_bytes_per_second=5e9,
            disk_write_bytes_per_second=4e9,
            **_PCIE4,
        ),
        _estimated(
            "h200-128gb and the data sheet of the RTX A6000 (155 TFLOPS, 0.77 TB/s, PCIe 4); 256 GiB, 16 cores",
            name="a6000",
            has_avx512=False,
            hbm_bytes=47 * GIB,
            ram_bytes=256 * GIB,
            matmul_flops_per_second=119e12,
            fp32_flops_per_second=30e12,
            hbm_bytes_per_second=690e9,
            ram_bytes_per_second=100e9,
            **_PCIE4,
        ),
    )
}


def nearest_machine(device_name: str) -> Machine:
    """The machine of the catalogue with this kind of GPU (as CUDA names it); the smallest for one that is in none.

    Its rates are then a guess, and `source` says so.
    """
    plain = device_name.lower().replace(" ", "").replace("-", "")  # "NVIDIA GeForce RTX 4090", "NVIDIA H200"
    for name, machine in MACHINES.items():
        if name.partition("-")[0] in plain:
            return machine
    smallest = min(MACHINES.values(), key=lambda machine: machine.matmul_flops_per_second)
    guess = f"a guess from {smallest.name}: run `megatrain doctor`"
    return dataclasses.replace(smallest, name=device_name, source=guess)


def machine_named(name: str) -> Machine:
    """Raises UserError for one that is not in the catalogue."""
    if name not in MACHINES:
        raise UserError(f"there is no machine {name!r}: use one of {', '.join(MACHINES)}, a file, or this")
    return MACHINES[name]
