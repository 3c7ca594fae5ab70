"""`megatrain doctor`: what this machine is, how fast it is, what slows it down; keeps the profile that plans use.

facts -> measured rates -> findings -> profile
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent, looking_at, machine_profile_path, user_path
from megatrain.base.units import GB, format_bytes, format_number
from megatrain.commands.console import make_console, print_fact, print_remark, print_step, print_table, print_warning
from megatrain.plan.threads import divide_cores
from megatrain.probe.facts import BYTES_PER_SECOND, FLOPS_PER_SECOND, Facts, GpuFacts, HostFacts, Rate
from megatrain.probe.judge import Finding, findings
from megatrain.probe.timing import FULL, QUICK

if TYPE_CHECKING:
    from rich.console import Console

    from megatrain.plan.machine import Machine


def doctor(
    offload_dirs: Sequence[Path] = (), *, quick: bool = False, as_json: bool = False, output: Path | None = None
) -> None:
    """Measures, prints and keeps the profile in `output` (None: where plans look for it).

    Raises UserError, before any work, where `output` cannot be.
    """
    folders = [user_path(folder, "--offload-dir") for folder in offload_dirs]
    file = machine_profile_path() if output is None else user_path(output, "--output")
    if output is not None:
        _check_output(file)
    from megatrain.probe.measure import measure_machine  # torch: only now

    effort = QUICK if quick else FULL
    console = make_console()
    if as_json:
        facts = measure_machine(folders, effort)
        machine, problem = _keep(facts, file, quick)
        print(json.dumps(_report(facts, machine, problem, file), indent=2))
        return
    console.rule("[bold]megatrain doctor[/]" + (" --quick" if quick else ""), align="left")
    facts = measure_machine(folders, effort, lambda what: print_step(console, f"measuring {what}"))
    _print_facts(console, facts)
    print_table(console, "measured", [(r.label, r.note, _format_rate(r)) for r in facts.rates])
    _print_findings(console, findings(facts))
    machine, problem = _keep(facts, file, quick)
    if problem:
        print_warning(console, problem)
    else:
        # Plans for this machine need a GPU; the file may be taken to another all the same.
        use = ", for `megatrain plan MODEL --machine this`" if machine is not None and machine.hbm_bytes else ""
        print_fact(console, "profile", f"{file}{use}")


def _check_output(file: Path) -> None:
    with looking_at("--output"):
        folder = existing_parent(file.parent)
        if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(f"--output: {file} cannot be written; name a file in a folder that can be written")


def _keep(facts: Facts, file: Path, quick: bool) -> tuple[Machine | None, str]:
    """The profile, saved, and why there is none: what was measured is printed all the same."""
    from megatrain.probe.measure import machine_of, save_machine

    try:
        today = datetime.date.today().isoformat()
        machine = machine_of(facts, date=f"{today}, quickly" if quick else today)
        save_machine(machine, file)
    except UserError as error:
        return None, str(error)
    return machine, ""


def _report(facts: Facts, machine: Machine | None, problem: str, file: Path) -> dict[str, Any]:
    """For programs."""
    known = dataclasses.asdict(facts)
    rates = known.pop("rates")
    return {
        "facts": _plain(known),
        "rates": rates,
        "findings": [dataclasses.asdict(finding) for finding in findings(facts)],
        "machine": None if machine is None else dataclasses.asdict(machine),
        "profile": None if machine is None else str(file),
        "problem": problem,
    }


def _plain(value: Any) -> Any:
    """Sets as sorted lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (frozenset, tuple, list)):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [_plain(item) for item in items]
    return value


def _print_facts(console: Console, facts: Facts) -> None:
    host, software = facts.host, facts.software
    print_fact(console, "system", ", ".join(filter(None, [f"Linux {host.kernel_release}", host.virtualisation])))
    print_fact(console, "processor", _processor(host))
    print_fact(console, "threads", divide_cores(host.num_cores).describe())
    print_fact(console, "memory", _memory(host))
    print_fact(console, "gpu", "none" if facts.gpu is None else _gpu(facts.gpu))
    cuda = f"CUDA {software.cuda_version}" if software.cuda_version else "without CUDA"
    driver = f", driver {software.driver_version}" if software.driver_version else ""
    gds = ", with GPUDirect storage" if software.has_gds else ""
    print_fact(console, "software", f"PyTorch {software.torch_version}, {cuda}{driver}{gds}")
    kernel = "PyTorch" if software.update_kernel == "torch" else f"the C kernel, {software.update_kernel}"
    compiler = f"compiler {software.compilers[0]}" if software.compilers else "no compiler"
    print_fact(console, "update", f"{kernel} ({compiler})")
    for folder in facts.folders:
        told = folder.error or f"{folder.file_system or 'unknown'}, {format_bytes(folder.free_bytes)} free"
        print_fact(console, "offload", f"{folder.path}: {told}" + (", O_DIRECT" if folder.is_direct else ""))
    if not facts.folders:
        print_fact(console, "offload", "no folder given: no disk is measured (--offload-dir DIR)")


def _processor(host: HostFacts) -> str:
    nodes = format_number(len(host.numa_nodes), "NUMA node") if host.numa_nodes else ""
    cores = f"{host.num_cores} of {format_number(host.num_cores_present, 'core')}"
    return ", ".join(filter(None, [host.cpu_name, cores, nodes]))


def _memory(host: HostFacts) -> str:
    parts = [f"{format_bytes(host.ram_bytes)}, {format_bytes(host.available_bytes)} available"]
    if host.cgroup is not None:
        group = host.cgroup
        parts.append(f"limit {format_bytes(group.limit_bytes)}, {format_bytes(group.used_bytes)} used (control group)")
    locked = "unlimited" if host.locked_limit_bytes is None else format_bytes(host.locked_limit_bytes)
    parts += [f"ulimit -l {locked}", f"swap {format_bytes(host.swap_bytes)}" if host.swap_bytes else "no swap"]
    if host.huge_pages:
        parts.append(f"huge pages {host.huge_pages}, shared {host.shared_huge_pages or 'unknown'}")
    return "; ".join(parts)


def _gpu(gpu: GpuFacts) -> str:
    parts = [f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"]
    known = f"PCIe generation {gpu.pcie_generation} x{gpu.pcie_width}"
    parts.append(known if gpu.pcie_width else "PCIe and other users unknown (pip install nvidia-ml-py tells)")
    if gpu.num_other_processes:
        parts.append("shared with other processes")
    return ", ".join(parts)


def _format_rate(rate: Rate) -> str:
    if rate.value is None:
        return "not measured"
    if rate.unit == BYTES_PER_SECOND:
        return f"{rate.value / GB:.3g} GB/s"
    if rate.unit == FLOPS_PER_SECOND:
        return f"{rate.value / 1e12:.3g} TFLOP/s" if rate.value >= 1e12 else f"{rate.value / 1e9:.3g} GFLOP/s"
    return f"{rate.value:.3g} {rate.unit}"


def _print_findings(console: Console, found: Sequence[Finding]) -> None:
    if not found:
        print_fact(console, "findings", "nothing that slows this machine down was found")
    for finding in found:
        kind, style = ("note", "bold") if finding.is_note else ("warning", "bold yellow")
        print_remark(console, kind, finding.text, style, finding.remedy)
        if console.is_terminal:
            console.print()
