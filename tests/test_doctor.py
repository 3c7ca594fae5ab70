"""`megatrain doctor` on this machine, quickly: rates, files it leaves, failures of single probes, what it prints."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.machinery
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_helpers import command

from megatrain.base.units import MIB
from megatrain.plan.machine import Machine
from megatrain.probe import arithmetic, disk, gds, links, measure, timing, update
from megatrain.probe.facts import Rate, attempt
from megatrain.probe.gpu import read_gpu, try_management
from megatrain.probe.host import read_host
from megatrain.store.codecs import FORMATS, decode

TINY = dataclasses.replace(
    timing.QUICK,
    seconds=0.01,
    link_bytes=4 * MIB,
    ram_bytes=4 * MIB,
    num_parameters=1 << 18,
    matmul_size=256,
    cpu_matmul_size=64,
    disk_seconds=0.1,
    disk_bytes=64 * MIB,
    disk_blocks=((1 * MIB, 2), (8 * MIB, 2)),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "QUICK", TINY)
    monkeypatch.setattr("megatrain.commands.doctor.QUICK", TINY)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))


def by_key(rates: list[Rate] | tuple[Rate, ...]) -> dict[str, Rate]:
    return {rate.key: rate for rate in rates}


# The clock


def test_the_median_leaves_out_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    lengths = iter([100.0, 1.0, 9.0, 2.0, 3.0, 50.0])

    def work() -> None:
        nonlocal now
        now += next(lengths)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.median_seconds(work, seconds=14.0) == 2.5  # of 1, 9, 2, 3: the next would start too late
    lengths = iter([7.0, 50.0])
    assert timing.median_seconds(work, seconds=0.0) == 50.0  # one round there is always


def test_a_probe_that_fails_is_a_row() -> None:
    def fail() -> float:
        raise RuntimeError("no luck\nand more lines")

    rate = attempt("key", "label", "unit", fail)
    assert (rate.value, rate.note) == (None, "RuntimeError: no luck")


# Rates


def test_every_rate_of_the_host_is_measured() -> None:
    device = torch.device("cpu")
    rates = arithmetic.measure_host_memory(read_host(), TINY) + arithmetic.measure_arithmetic(device, TINY)
    assert set(by_key(rates)) == {"ram", "matmul.bf16", "matmul.fp32"}
    assert all(rate.value and rate.value > 0 for rate in rates), rates
    assert arithmetic.measure_device_memory(device, TINY) == []


def test_the_matrix_rate_counts_two_operations_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "median_seconds", lambda work, seconds: 2.0)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rates = arithmetic.measure_arithmetic(torch.device("cpu"), TINY)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert [rate.value for rate in rates] == [64**3, 64**3]


def test_the_update_is_measured_in_every_format() -> None:
    rates = by_key(update.measure_update(TINY))
    assert list(rates) == [f"update.{name}" for name in ("fp32", "bf16", "8bit", "4bit", "lossless")]
    assert all(rate.value and rate.value > 0 for rate in rates.values()), rates


@pytest.mark.parametrize("name", ["fp32", "8bit"])
def test_moments_to_measure_with_are_ordinary_numbers(name: str) -> None:
    numel = update.TILE + 1280
    first, second = update.stored_moments(name, numel)
    assert first.codes.numel() == FORMATS[name].num_codes(numel)
    m, v = decode(first, numel, is_signed=True, reference=second), decode(second, numel, is_signed=False)
    assert m.isfinite().all() and m.std() > 1e-4 and v.mean() > 1e-7 and v.min() >= 0
    assert torch.equal(v[update.TILE :], v[:1280])


# Disks


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    rates, is_direct = disk.measure_folders([tmp_path], TINY, "x", seconds=0.2)
    assert [rate.key for rate in rates] == ["disk_read:x", "disk_write:x"]
    assert all(rate.value and rate.value > 0 for rate in rates), rates
    assert is_direct is not None
    assert list(tmp_path.iterdir()) == []


def test_blocks_go_over_all_files_and_come_back(tmp_path: Path) -> None:
    """What a pass writes is on the disk, at the places that a pass reads."""
    with disk.open_target(tmp_path, 16 * MIB) as one, disk.open_target(tmp_path, 16 * MIB) as other:
        assert list(tmp_path.iterdir()) == []  # no name: nothing is left even after a kill
        assert disk._fill([one, other], seconds=60.0) == 32 * MIB
        (buffer,) = disk._buffers(8 * MIB, 1)
        for number in range(4):
            buffer[:] = bytes([number + 1]) * len(buffer)
            disk._move([one, other], number, buffer, True)
        seen = []
        for target in (one, other):
            for offset in (0, 8 * MIB):
                assert os.preadv(target.descriptor, [buffer], offset) == 8 * MIB
                seen.append((buffer[0], buffer[-1]))
        assert seen == [(1, 1), (3, 3), (2, 2), (4, 4)]
        with pytest.raises(OSError, match="of 8388608 bytes were read"):
            disk._move([one, other], 4, buffer, False)


def test_o_direct_refused_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, *rest))  # as some do: made, then refused
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(disk.os, "open", refuse)
    rates, is_direct = disk.measure_folders([tmp_path], TINY, "x", seconds=0.2)
    assert is_direct is False
    assert all(rate.value and "page cache" in rate.note for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = psutil.disk_usage(str(tmp_path))
    asked = []
    monkeypatch.setattr(disk.psutil, "disk_usage", lambda _: usage._replace(free=400 * MIB))
    monkeypatch.setattr(disk.os, "posix_fallocate", lambda _, start, length: asked.append(length))
    effort = dataclasses.replace(TINY, disk_bytes=1 << 40)
    assert disk.measure_folders([tmp_path], effort, "x", seconds=0.1)[0][0].value
    assert asked == [96 * MIB]
    monkeypatch.setattr(disk.psutil, "disk_usage", lambda _: usage._replace(free=100 * MIB))
    rates, is_direct = disk.measure_folders([tmp_path], effort, "x", seconds=0.1)
    assert is_direct is None and all(rate.value is None and "too little" in rate.note for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "no folder" in disk.read_folder(tmp_path / "file" / "below").error
    assert disk.read_folder(Path("a\0b")).error
    known = disk.read_folder(tmp_path / "not" / "yet")
    assert known.error == "" and known.free_bytes > 0 and known.disk == tmp_path.stat().st_dev
    assert not (tmp_path / "not").exists()


# The command


def test_the_whole_of_it_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("homes").mkdir()
    Path("file").write_text("")
    code, out, err = command(capsys, "doctor", "--quick", "--offload-dir", "homes", "--offload-dir", "file/below")
    assert (code, err) == (0, "")
    for word in ("processor", "ulimit -l", "matrix products, bf16", "update, lossless moments", "disk read, homes"):
        assert word in out
    assert "warning: file/below cannot be used for offloading" in out
    assert "not measured" not in out
    machine = Machine.from_json((tmp_path / "cache" / "machine.json").read_text())
    assert set(machine.update_ns_per_parameter) == {"fp32", "bf16", "8bit", "4bit", "lossless"}
    assert machine.ram_bytes_per_second > 0 and machine.disk_read_bytes_per_second > 0
    assert list(Path("homes").iterdir()) == []


def test_json_is_one_object_with_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "mine.json"
    code, out, _ = command(capsys, "doctor", "--quick", "--json", "--output", file)
    report = json.loads(out)
    assert code == 0 and report["profile"] == str(file) and report["problem"] == ""
    assert Machine(**report["machine"]) == Machine.from_json(file.read_text())
    assert {"key", "label", "unit", "value", "note"} == set(report["rates"][0])
    assert report["facts"]["host"]["ram_bytes"] > 0
    assert not (tmp_path / "cache").exists()
    if not torch.cuda.is_available():
        assert [finding["topic"] for finding in report["findings"]].count("gpu") == 1


def test_one_failed_probe_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise MemoryError("no memory")

    monkeypatch.setattr(arithmetic, "_matmul_rate", fail)
    code, out, _ = command(capsys, "doctor", "--quick", "--json")
    report = json.loads(out)
    rates = {rate["key"]: rate for rate in report["rates"]}
    assert code == 0
    assert (rates["matmul.bf16"]["value"], rates["matmul.bf16"]["note"]) == (None, "MemoryError: no memory")
    assert rates["ram"]["value"] > 0 and rates["update.fp32"]["value"] > 0
    assert report["machine"] is None and "matrix products, bf16" in report["problem"]
    assert not (tmp_path / "cache").exists()
    code, out, _ = command(capsys, "doctor", "--quick")
    assert code == 0 and "not measured" in out and "no profile for plans" in out


def test_an_output_that_cannot_be_is_refused_before_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda *_: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file" / "x.json"):
        code, _, err = command(capsys, "doctor", "--output", output)
        assert code == 2 and "--output" in err


# What needs a GPU: first with made-up parts of it


class FakeRuntime:
    """Of CUDA, as far as page-locking asks for it."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        return self.code

    def cudaHostUnregister(self, *_: int) -> int:  # noqa: N802
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_links_count_what_crosses_and_say_what_cannot_be_locked(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(links, "median_seconds", lambda work, seconds: (work(), 2.0)[1])
    rates, is_locked = links.measure_links(torch.device("cpu"), TINY)
    one_way = 4 * TINY.link_bytes / 2.0
    expected = (
        {"h2d": one_way, "d2h": one_way, "both_ways": 2 * one_way}
        if code == 0
        else dict.fromkeys(("h2d", "d2h", "both_ways"))
    )
    expected |= {"pageable_h2d": one_way, "pageable_d2h": one_way}
    assert {rate.key: rate.value for rate in rates} == expected
    assert is_locked is (code == 0)
    assert code == 0 or "could not be page-locked" in rates[0].note


def test_the_management_library_is_asked_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml: Any = types.ModuleType("pynvml")
    pynvml.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    pynvml.NVMLError = type("NVMLError", (Exception,), {})

    def refuse(_: str) -> int:
        raise pynvml.NVMLError("not supported")

    own, other = types.SimpleNamespace(pid=os.getpid()), types.SimpleNamespace(pid=-5)
    processes = [own, other]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="1-2"))
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": {"GPU-1-2": "handle"}.__getitem__,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: processes,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": refuse,
        "nvmlDeviceGetPciInfo": lambda _: types.SimpleNamespace(busId=b"00000000:FF:00.0"),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }.items():
        setattr(pynvml, name, answer)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    known, driver, problem = try_management(torch.device("cuda", 0))
    assert (driver, problem) == ("580.1", "")
    assert known == {
        "num_other_processes": 1,
        "pcie_generation": 4,
        "pcie_width": 8,
        "max_pcie_generation": 5,
        "numa_node": None,
    }
    processes.remove(own)  # in a container: seen under another number
    assert try_management(torch.device("cuda", 0))[0]["num_other_processes"] == 0
    pynvml.nvmlInit = lambda: refuse("")
    assert try_management(torch.device("cuda", 0)) == ({}, None, "NVMLError: not supported")


def test_gpudirect_storage_that_does_not_work_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "probe").write_text("left behind")
        return subprocess.CompletedProcess(command, -11, "", "")

    monkeypatch.setattr(gds.subprocess, "run", crash)
    rates = gds.measure_gds(tmp_path, "x")
    assert [(rate.key, rate.value) for rate in rates] == [("gds_read:x", None), ("gds_write:x", None)]
    assert "exit status -11" in rates[0].note and list(tmp_path.iterdir()) == []
    done = subprocess.CompletedProcess([], 0, "a library greets\n6e9 4e9\n", "")
    monkeypatch.setattr(gds.subprocess, "run", lambda *_, **__: done)
    assert [rate.value for rate in gds.measure_gds(tmp_path, "x")] == [6e9, 4e9]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_links_and_facts_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    gpu = read_gpu(device)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    rates, is_locked = links.measure_links(device, TINY)
    assert is_locked
    rates += arithmetic.measure_arithmetic(device, TINY) + arithmetic.measure_device_memory(device, TINY)
    keys = ["h2d", "d2h", "both_ways", "pageable_h2d", "pageable_d2h", "matmul.bf16", "matmul.fp32", "hbm"]
    assert [rate.key for rate in rates] == keys
    assert all(rate.value and rate.value > 0 for rate in rates), rates
    known, _, problem = try_management(device)
    assert problem == "" and known.get("num_other_processes", 0) >= 0
