"""What can be wrong with a folder of offload_dir is said by name: links, working directories, limits on files."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from comparing import closed_later, the_engine
from disk_helpers import Faults, Times, failure, random_buffer
from model_zoo import make_model

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.base.errors import DiskError, UserError
from megatrain.store.disk import DiskStore
from megatrain.store.tier import PAGE_BYTES

NUM_BYTES = 20 * PAGE_BYTES
LARGEST_BYTES = 4 << 20
ON_DISK = StreamOptions(places="disk")


# Links and working directories


@pytest.mark.parametrize("below", ["", "below"])
def test_a_link_to_nowhere(below: str, tmp_path: Path) -> None:
    lost, loop = tmp_path / "lost", tmp_path / "loop"
    lost.symlink_to(tmp_path / "gone")
    loop.symlink_to(loop)
    for link in (lost, loop):
        with pytest.raises(UserError, match=rf"offload_dir=.*{link} is a symbolic link .to .* that leads nowhere"):
            mt.init(device="cpu", offload_dir=link / below)
    (tmp_path / "gone").mkdir()
    mt.init(device="cpu", offload_dir=lost / below)
    closed_later(stream(make_model("llama"), options=ON_DISK))
    lost.unlink()
    lost.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="lost is a symbolic link .to .*elsewhere. that leads nowhere"):
        stream(make_model("llama"), options=ON_DISK)


def test_a_relative_folder_is_that_of_the_time_of_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mt.init(device="cpu", offload_dir=["one", Path("two"), tmp_path / "three", "~/four"])
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    model = closed_later(stream(make_model("llama"), options=ON_DISK))
    folders = [tmp_path / "here" / "one", tmp_path / "here" / "two", tmp_path / "three", tmp_path / "home" / "four"]
    assert the_engine(model).memory.disk.folders == folders
    assert all(folder.is_dir() for folder in folders)
    assert not list((tmp_path / "there").iterdir())


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    mt.init(device="cpu", offload_dir=tmp_path)
    with pytest.raises(UserError, match="offload_dir='one' is relative to a working directory that is gone"):
        mt.init(device="cpu", offload_dir="one")


# Limits on files


@pytest.fixture
def calls() -> Faults:
    return Faults()


@pytest.fixture
def store(tmp_path: Path, calls: Faults) -> DiskStore:
    return DiskStore([tmp_path], num_threads=2, block_bytes=4 * PAGE_BYTES, calls=calls)


@contextlib.contextmanager
def limit(num_bytes: int) -> Iterator[None]:
    """`ulimit -f` of this process within the block: outside it pytest writes its own files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_of_the_process_is_named(store: DiskStore, calls: Faults) -> None:
    told = r"cannot reserve 16.0 MiB .File too large.: .*4.0 MiB.*raise it, .*ulimit -f"
    with limit(LARGEST_BYTES), pytest.raises(UserError, match=told):
        store.allocate(4 * LARGEST_BYTES)
    extent = store.allocate(NUM_BYTES)
    calls.on_write = fail = Times(errno.EFBIG, -1)
    told = r"could not write .*File too large.: .*4.0 MiB.*raise it, .*ulimit -f"
    with limit(LARGEST_BYTES), pytest.raises(DiskError, match=told):
        extent.write(0, random_buffer(NUM_BYTES)).wait()
    assert fail.num_calls <= NUM_BYTES // PAGE_BYTES / 4, "each block is tried once: it does not pass"


def test_a_limit_below_a_page(tmp_path: Path) -> None:
    told = r"cannot be used for files of homes .*1.0 KiB.*raise it, .*ulimit -f"
    with limit(1024), pytest.raises(UserError, match=told):
        DiskStore([tmp_path / "folder"])


def test_a_file_system_without_larger_files_is_named(store: DiskStore, calls: Faults) -> None:
    def too_large(_: int) -> None:
        raise failure(errno.EFBIG)

    calls.on_reserve = too_large
    with pytest.raises(UserError, match=r"File too large.: .* has no larger files: give offload_dir another folder"):
        store.allocate(NUM_BYTES)
