"""What the operating system can do to the disk tier: each fault is a clear error or a clean recovery; no one hangs."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disk_helpers import Faults, Times, failure, page_buffer, random_buffer, read_back, reserved_bytes, wait_until

from megatrain.base import folder_lock
from megatrain.base.errors import DiskError, UserError
from megatrain.base.mounts import file_system_of
from megatrain.store import disk_file, disk_threads
from megatrain.store.disk import DiskStore
from megatrain.store.tier import PAGE_BYTES

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parent.parent
NUM_BYTES = 20 * PAGE_BYTES + 77


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "FIRST_PAUSE_SECONDS", 1e-4)


@pytest.fixture
def calls() -> Faults:
    return Faults()


@pytest.fixture
def store(tmp_path: Path, calls: Faults) -> DiskStore:
    return DiskStore([tmp_path / "a", tmp_path / "b"], num_threads=2, block_bytes=4 * PAGE_BYTES, calls=calls)


# Short and failing calls


@pytest.mark.parametrize("short_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES + 100])
def test_short_calls_are_continued(store: DiskStore, calls: Faults, short_bytes: int) -> None:
    extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    calls.on_read = calls.on_write = lambda offset, size: min(size, short_bytes)
    extent.write(0, values).wait()
    assert torch.equal(read_back(extent), values)
    assert torch.equal(extent.mapped(), values)


@pytest.mark.parametrize("what", ["on_read", "on_write"])
def test_errors_that_pass_are_counted(store: DiskStore, calls: Faults, what: str) -> None:
    extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    setattr(calls, what, Times(errno.EIO, disk_file.NUM_RETRIES))
    extent.write(0, values).wait()
    assert torch.equal(read_back(extent), values)
    assert store.num_retries == disk_file.NUM_RETRIES


def test_an_error_that_stays_is_named_and_spoils_nothing_else(store: DiskStore, calls: Faults, tmp_path: Path) -> None:
    extent, other, values = store.allocate(NUM_BYTES), store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    extent.write(0, values).wait()
    bad = PAGE_BYTES  # of the file in each folder: within the first extent
    calls.on_read = lambda offset, size: Times(errno.EIO, -1)() if offset <= bad < offset + size else None
    fence = extent.read(0, page_buffer(NUM_BYTES))
    for _ in range(2):
        with pytest.raises(DiskError, match=rf"{tmp_path}.*could not read 16384 bytes at offset 0 \(errno 5"):
            fence.wait()
    assert store.num_retries >= disk_file.NUM_RETRIES
    other.write(0, values).wait()
    assert torch.equal(read_back(other), values)
    calls.on_read = None
    assert torch.equal(read_back(extent), values)


def test_a_file_that_ends_too_early(store: DiskStore, calls: Faults) -> None:
    extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    extent.write(0, values).wait()
    num_calls = 0

    def nothing(offset: int, size: int) -> int | None:
        nonlocal num_calls
        num_calls += 1
        return 0 if num_calls <= 3 else None

    calls.on_read = nothing
    assert torch.equal(read_back(extent), values)
    assert store.num_retries == 3
    calls.on_read = lambda offset, size: 0
    with pytest.raises(DiskError, match="the file ends there"):
        extent.read(0, page_buffer(NUM_BYTES)).wait()


def test_a_failed_transfer_gives_its_buffer_back_last(store: DiskStore, calls: Faults) -> None:
    extent = store.allocate(NUM_BYTES)

    def slow_or_full(offset: int, size: int) -> None:
        if offset == 0:
            raise failure(errno.ENOSPC)
        time.sleep(0.1)

    calls.on_write = slow_or_full
    with pytest.raises(DiskError):
        extent.write(0, page_buffer(NUM_BYTES)).wait()
    assert calls.num_running == 0, "a call still used the buffer when its fence failed"


# Full disks


def test_a_disk_that_is_full_when_space_is_reserved(store: DiskStore, calls: Faults, tmp_path: Path) -> None:
    kept, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    kept.write(0, values).wait()
    before = reserved_bytes(store)
    sizes: list[int] = []

    def full(num_bytes: int) -> None:
        sizes.append(num_bytes)
        if len(sizes) == 2:
            raise failure(errno.ENOSPC)

    calls.on_reserve = full
    with pytest.raises(UserError, match=rf"{tmp_path}/b: cannot reserve 8.0 MiB \(No space.*iB are free: make room"):
        store.allocate(2**24)
    assert reserved_bytes(store) == before, "what the first folder reserved is given back"
    extent = store.allocate(NUM_BYTES)
    extent.write(0, values).wait()
    assert torch.equal(read_back(extent), values) and torch.equal(read_back(kept), values)


def test_what_a_full_disk_had_left_is_told(store: DiskStore, calls: Faults, monkeypatch) -> None:
    if file_system_of(store._disks[0].file.folder) == "tmpfs":
        pytest.skip("needs a disk that reserves what there is before it fails")
    reserve, usage, seen = calls.reserve, disk_file.psutil.disk_usage, []

    def fill(fd: int, offset: int, num_bytes: int) -> None:
        reserve(fd, offset, num_bytes // 2)
        raise failure(errno.ENOSPC)

    monkeypatch.setattr(calls, "reserve", fill)
    monkeypatch.setattr(disk_file.psutil, "disk_usage", lambda path: seen.append(reserved_bytes(store)) or usage(path))
    with pytest.raises(UserError, match="cannot reserve 8.0 MiB .* are free"):
        store.allocate(2**24)
    assert seen == [[0, 0]], "free bytes were read before the half that had been reserved was given back"


ON_A_SMALL_DISK = """
import os, sys
from megatrain.base.errors import UserError
from megatrain.store.disk import DiskStore

store = DiskStore([sys.argv[1]])
try:
    store.allocate(2**24)
except UserError as error:
    print(error)
print(os.fstat(store._disks[0].file.fd).st_blocks)
store.allocate(2**22)
"""


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    """On a disk of 8 MiB of its own: some file systems reserve all there is first, and whoever else writes there then
    fails."""
    mount = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path)]
    try:
        subprocess.run([*own, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    done = subprocess.run(
        [*own, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    told, num_blocks = done.stdout.splitlines()
    assert "cannot reserve 16.0 MiB" in told and "8.0 MiB are free" in told
    assert num_blocks == "0"


def test_a_disk_that_gives_reserved_space_away(store: DiskStore, calls: Faults) -> None:
    extent = store.allocate(PAGE_BYTES)
    calls.on_write = fault = Times(errno.ENOSPC, -1)
    with pytest.raises(DiskError, match=r"errno 28.*does not keep what it reserved"):
        extent.write(0, page_buffer(PAGE_BYTES)).wait()
    assert fault.num_calls == 1, "there is no use in trying again"


def test_an_interrupted_allocation_gives_its_space_back(store: DiskStore, calls: Faults) -> None:
    sizes: list[int] = []

    def interrupt(num_bytes: int) -> None:
        sizes.append(num_bytes)
        if len(sizes) == 2:
            raise KeyboardInterrupt

    calls.on_reserve = interrupt
    with pytest.raises(KeyboardInterrupt):
        store.allocate(2**22)
    assert reserved_bytes(store) == [0, 0]
    assert not read_back(store.allocate(NUM_BYTES)).any()


# File systems that lack something


@pytest.mark.parametrize("refused_by", ["open", "write"])
@pytest.mark.parametrize("refuse_nameless", [False, True])
def test_direct_io_refused(tmp_path: Path, caplog, refused_by: str, refuse_nameless: bool) -> None:
    calls = Faults(refuse_direct=refused_by, refuse_nameless=refuse_nameless)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        store = DiskStore([tmp_path], block_bytes=4 * PAGE_BYTES, calls=calls)
    assert store.is_direct == (False,)
    told = [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]
    assert len(told) == 1
    assert str(tmp_path) in told[0] and file_system_of(tmp_path) in told[0] and "page cache" in told[0]
    assert os.listdir(tmp_path) == [folder_lock.LOCK_NAME]
    extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    extent.write(0, values).wait()
    assert torch.equal(extent.mapped(), values)
    assert torch.equal(read_back(extent), values)


def test_buffered_io_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    if file_system_of(tmp_path) == "tmpfs":
        pytest.skip("tmpfs is the page cache")
    store = DiskStore([tmp_path], calls=Faults(refuse_direct="open"))
    extent, values = store.allocate(2**22), random_buffer(2**22)
    num_pages = 2**22 // PAGE_BYTES
    mapped = extent.mapped()

    def cached_pages() -> int:
        found = (ctypes.c_uint8 * num_pages)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(2**22), found) == 0
        return sum(page & 1 for page in found)

    os.pwrite(store._disks[0].file.fd, b"x" * 2**20, 0)
    assert cached_pages() >= 2**20 // PAGE_BYTES
    extent.write(0, values).wait()
    assert cached_pages() <= num_pages // 50
    assert torch.equal(read_back(extent), values)
    assert cached_pages() <= num_pages // 50


def test_a_write_back_that_fails_is_an_error_of_the_write(tmp_path: Path) -> None:
    calls = Faults(refuse_direct="open")
    store = DiskStore([tmp_path], calls=calls)
    extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    calls.on_sync = Times(errno.EIO, 2)
    extent.write(0, values).wait()
    assert store.num_retries == 2 and torch.equal(read_back(extent), values)
    calls.on_sync = Times(errno.EIO, -1)
    with pytest.raises(DiskError, match="could not write"):
        extent.write(0, values).wait()


def test_without_nameless_files_names_are_gone_at_once(tmp_path: Path) -> None:
    calls = Faults(refuse_nameless=True)
    store = DiskStore([tmp_path], calls=calls)
    assert [name.startswith(disk_file.FILE_PREFIX) for name in calls.opened] == [True]
    assert os.listdir(tmp_path) == [folder_lock.LOCK_NAME]
    assert not read_back(store.allocate(NUM_BYTES)).any()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(tmp_path: Path, code: int) -> None:
    class Unwritable(Faults):
        def open(self, path, flags):
            raise failure(code)

    with pytest.raises(UserError, match=f"{tmp_path} cannot be used.*{os.strerror(code)}"):
        DiskStore([tmp_path], calls=Unwritable())


@pytest.mark.parametrize(
    ("text", "is_free"),
    [
        ("", True),
        ("[1]", True),
        ('{"pid": 1, "host": "elsewhere", "start_time": 1.5}', False),
        ('{"pid": 4194999, "host": "HOST", "start_time": 1.5}', True),
        ('{"pid": 1, "host": "HOST", "start_time": 1.5}', True),
        ('{"pid": PARENT, "host": "HOST", "start_time": START}', False),
    ],
)
def test_without_flock_the_text_of_the_lock_file_counts(tmp_path: Path, monkeypatch, text: str, is_free: bool) -> None:
    def refuse(*_: int) -> None:
        raise failure(errno.ENOLCK)

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    start_time = folder_lock.psutil.Process(os.getppid()).create_time()
    for word, value in (("HOST", os.uname().nodename), ("PARENT", os.getppid()), ("START", start_time)):
        text = text.replace(word, str(value))
    (tmp_path / folder_lock.LOCK_NAME).write_text(text)
    if is_free:
        DiskStore([tmp_path]).close()
    else:
        with pytest.raises(UserError, match="is in use by process .* or delete .*lock"):
            DiskStore([tmp_path])


# Threads and interrupts


def test_a_dead_thread_hangs_no_one(store: DiskStore, calls: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = store.allocate(NUM_BYTES)
    calls.on_read = lambda offset, size: time.sleep(0.02)
    original = disk_threads.IoThreads._take

    def die(self: disk_threads.IoThreads) -> disk_threads.Block | None:
        if threading.current_thread().name.endswith("a-0"):
            raise MemoryError("no memory for a block")
        return original(self)

    monkeypatch.setattr(disk_threads.IoThreads, "_take", die)
    fences = []
    with pytest.raises(MemoryError):
        for _ in range(6000):  # until the thread had its turn
            fences.append(extent.read(0, page_buffer(NUM_BYTES)))
            time.sleep(0.01)
    for fence in fences:
        try:
            fence.wait()
        except MemoryError:
            continue
    store.close()


def test_an_interrupted_call_gives_its_buffer_back(store: DiskStore, calls: Faults, monkeypatch) -> None:
    extent, buffer = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
    values = buffer.clone()
    calls.on_read = lambda offset, size: time.sleep(0.05)
    original = disk_threads.IoThreads.put

    def interrupt(self: disk_threads.IoThreads, blocks: list) -> None:
        if self is store._disks[1].threads:
            wait_until(lambda: calls.num_running > 0)
            raise KeyboardInterrupt
        original(self, blocks)

    monkeypatch.setattr(disk_threads.IoThreads, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        extent.read(0, buffer)
    assert calls.num_running == 0
    buffer.copy_(values)
    monkeypatch.undo()
    calls.on_read = None
    assert not read_back(extent).any()
    assert torch.equal(buffer, values), "a block was read into a buffer that was used again"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGUSR1 is Ctrl-C (pytest's own timeout has SIGALRM)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, previous)


# Python swallows those that come while something is being freed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_leave_the_store_usable(store: DiskStore, interrupts: None) -> None:
    def is_interrupted(seconds: float) -> bool:
        extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
        timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        try:
            timer.start()
            for _ in range(20):
                extent.write(0, values).wait()
                read_back(extent)
                store.allocate(3 * PAGE_BYTES)
            timer.join()
        except KeyboardInterrupt:
            return True
        return False

    num_interrupts = 0
    for number in range(150):
        num_interrupts += is_interrupted(1e-5 + number * 2e-5)
        # Writes that were interrupted may still be under way: another extent.
        extent, values = store.allocate(NUM_BYTES), random_buffer(NUM_BYTES)
        extent.write(0, values).wait()
        assert torch.equal(read_back(extent), values)
    assert num_interrupts > 10
    gc.collect()
    store.close()
