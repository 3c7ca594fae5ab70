"""Everything about this machine: facts, rates, and the `Machine` that plans use.

Rule: one probe that fails is one row that says why; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatrain.base.errors import UserError
from megatrain.base.paths import write_whole
from megatrain.optim import compiler
from megatrain.optim.update import CpuUpdater
from megatrain.plan.machine import Machine
from megatrain.probe.arithmetic import measure_arithmetic, measure_device_memory, measure_host_memory
from megatrain.probe.attention import best_by_length, measure_common_attention
from megatrain.probe.disk import measure_folders, read_folder
from megatrain.probe.facts import Facts, FolderFacts, GpuFacts, Rate, SoftwareFacts, first_line
from megatrain.probe.gds import measure_gds
from megatrain.probe.gpu import driver_version, find_device, read_gpu, try_management
from megatrain.probe.host import read_host
from megatrain.probe.links import measure_links
from megatrain.probe.timing import Effort
from megatrain.probe.update import measure_update

ALL_FOLDERS = "all folders at once"
ESSENTIAL = ("matmul.bf16", "matmul.fp32", "ram", "update.fp32")
ESSENTIAL_ON_GPU = ("hbm", "pageable_h2d")
"""Without these no time can be predicted."""

Say = Callable[[str], None]


def measure_machine(folders: Sequence[Path], effort: Effort, say: Say = lambda _: None) -> Facts:
    """Facts and rates of this machine.

    Args:
        folders: for offloading; measured each alone and, where they lie on several disks, all at once.
        say: is told what is measured next.
    """
    host = read_host()
    device, no_gpu_reason = find_device()
    with _quiet():
        gpu = read_gpu(device) if device.type == "cuda" else None
        rates, can_page_lock, driver = [], None, driver_version()
        if gpu is not None:
            say("links")
            rates, can_page_lock = _try_links(device, effort)
            known, told, _ = try_management(device)
            gpu, driver = dataclasses.replace(gpu, **known), told or driver
        say("host memory")
        rates += measure_host_memory(host, effort)
        say("matrix products")
        rates += measure_arithmetic(device, effort)
        rates += measure_device_memory(device, effort)
        _give_back(gpu)
        say("attention")
        rates += measure_common_attention(device, effort)
        say("the update")
        rates += measure_update(effort)
        say("disks") if folders else None
        disk_rates, measured = _measure_folders(folders, effort, is_gpu=gpu is not None)
        software = _software(driver)
    return Facts(
        host=host,
        software=software,
        gpu=gpu,
        no_gpu_reason=no_gpu_reason,
        can_page_lock=can_page_lock,
        folders=measured,
        rates=(*rates, *disk_rates),
    )


def machine_of(facts: Facts, *, date: str) -> Machine:
    """What plans use. date: of the measurement.

    Raises UserError that names the rates without which no time can be predicted.
    """
    needed = (*ESSENTIAL, *(ESSENTIAL_ON_GPU if facts.gpu is not None else ()))
    missing = [rate.label for rate in facts.rates if rate.key in needed and rate.value is None]
    if missing:
        raise UserError(f"no profile for plans without {', '.join(missing)}: see why in the table")

    def rate(key: str) -> float:
        return facts.rate(key) or 0.0

    pageable = rate("pageable_h2d")
    update = {r.key.partition(".")[2]: r.value for r in facts.rates if r.key.startswith("update.") and r.value}
    label = _machine_label(facts.folders)
    return Machine(
        name=facts.gpu.name if facts.gpu is not None else facts.host.cpu_name,
        source=f"measured {date}",
        hbm_bytes=facts.gpu.free_bytes if facts.gpu is not None else 0,
        ram_bytes=facts.host.usable_ram_bytes,
        disk_bytes=sum(folder.free_bytes for folder in _one_a_disk(facts.folders)),
        num_cores=facts.host.num_cores,
        matmul_flops_per_second=rate("matmul.bf16"),
        fp32_flops_per_second=rate("matmul.fp32"),
        hbm_bytes_per_second=rate("hbm"),
        # What cannot be page-locked moves as pageable memory does.
        h2d_bytes_per_second=rate("h2d") or pageable,
        d2h_bytes_per_second=rate("d2h") or rate("pageable_d2h"),
        pageable_h2d_bytes_per_second=pageable,
        ram_bytes_per_second=rate("ram"),
        disk_read_bytes_per_second=rate(f"disk_read:{label}"),
        disk_write_bytes_per_second=rate(f"disk_write:{label}"),
        update_ns_per_parameter=update,
        attention_flops_per_second=best_by_length(facts.rates),
    )


def save_machine(machine: Machine, file: Path) -> None:
    """Write the profile, whole or not at all. Raises UserError where it cannot be written."""
    try:
        write_whole(file, machine.to_json() + "\n")
    except OSError as error:
        raise UserError(
            f"the profile cannot be written to {file} ({error.strerror or error}): name another file with --output"
        ) from error


def _try_links(device: torch.device, effort: Effort) -> tuple[list[Rate], bool | None]:
    try:
        return measure_links(device, effort)
    except Exception as error:
        note = first_line(error)
        return [Rate(key="pageable_h2d", label="links to the GPU", unit="bytes/s", value=None, note=note)], None


def _measure_folders(
    folders: Sequence[Path], effort: Effort, *, is_gpu: bool
) -> tuple[list[Rate], tuple[FolderFacts, ...]]:
    """Each folder alone; then one of each disk at once, where there are several disks."""
    known = [read_folder(folder) for folder in folders]
    usable = [facts for facts in known if not facts.error]
    together = [Path(facts.path) for facts in _one_a_disk(usable)]
    seconds = effort.disk_seconds / max(1, len(usable) + (len(together) > 1))
    rates: list[Rate] = []
    measured = []
    for facts in known:
        folder, is_direct = Path(facts.path), None
        if not facts.error:
            rows, is_direct = measure_folders([folder], effort, facts.path, seconds)
            rates += rows
        if not facts.error and is_gpu and effort.has_gds:
            rates += measure_gds(folder, facts.path)
        measured.append(dataclasses.replace(facts, is_direct=is_direct))
    if len(together) > 1:
        rates += measure_folders(together, effort, ALL_FOLDERS, seconds)[0]
    return rates, tuple(measured)


def _one_a_disk(folders: Sequence[FolderFacts]) -> list[FolderFacts]:
    """The first folder of each disk: the others share its speed."""
    return list({folder.disk: folder for folder in reversed(folders) if not folder.error}.values())[::-1]


def _machine_label(folders: Sequence[FolderFacts]) -> str:
    """Of the rows that are the speed of all folders together."""
    used = _one_a_disk(folders)
    return used[0].path if len(used) == 1 else ALL_FOLDERS


def _software(driver: str | None) -> SoftwareFacts:
    with CpuUpdater() as updater:
        kernel = updater.path
    return SoftwareFacts(
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        driver_version=driver,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        update_kernel=kernel,
        compilers=tuple(compiler.find_compilers()),
        num_torch_threads=torch.get_num_threads(),
        has_gds=torch.version.cuda is not None and hasattr(torch._C, "_gds_register_buffer"),
    )


def _give_back(gpu: GpuFacts | None) -> None:
    if gpu is not None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the library warns of here (no page-locking, no kernel) stands among the findings."""
    log = logging.getLogger("megatrain")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
