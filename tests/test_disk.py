"""The disk tier: bytes come back whatever the sizes, space is reserved and given back, one run a folder."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from disk_helpers import page_buffer, random_buffer, read_back, reserved_bytes, start_python, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.errors import RefusedError, UserError
from megatrain.base.folder_lock import LOCK_NAME
from megatrain.base.mounts import file_system_of
from megatrain.store.disk import DiskStore
from megatrain.store.tier import PAGE_BYTES, round_up

pytestmark = pytest.mark.timeout(180)

NUM_FOLDERS = (1, 2, 3)
BLOCK_PAGES = (1, 2, 5)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], DiskStore]:
    folders = [tmp_path_factory.mktemp("disk") for _ in range(max(NUM_FOLDERS))]
    return {
        (num_folders, pages): DiskStore(folders[:num_folders], num_threads=2, block_bytes=pages * PAGE_BYTES)
        for num_folders in NUM_FOLDERS
        for pages in BLOCK_PAGES
    }


operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "map write", "map read"]), st.integers(0, 10**6), st.integers(0, 10**6)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(NUM_FOLDERS), st.sampled_from(BLOCK_PAGES), operations)
def test_an_extent_is_a_bytearray(stores, data, num_folders: int, pages: int, operations) -> None:
    num_bytes = data.draw(st.integers(0, 16 * PAGE_BYTES))
    padded_bytes = round_up(num_bytes, PAGE_BYTES)
    neighbours = [stores[num_folders, pages].allocate(3 * PAGE_BYTES + 1) for _ in range(2)]
    extent = stores[num_folders, pages].allocate(num_bytes)
    truth = bytearray(padded_bytes)
    mapped = extent.mapped()
    for what, first, second in operations:
        if what.startswith("map"):
            start, end = sorted((first % (num_bytes + 1), second % (num_bytes + 1)))
        else:
            start, end = sorted(value % (padded_bytes // PAGE_BYTES + 1) * PAGE_BYTES for value in (first, second))
            # The end of the extent as it is, or its last page whole.
            end = min(end, num_bytes) if first % 2 and start <= num_bytes else end
        buffer = random_buffer(end - start)
        if what == "write":
            extent.write(start, buffer).wait()
            truth[start:end] = buffer.numpy().tobytes()
        elif what == "map write":
            mapped[start:end] = buffer
            truth[start:end] = buffer.numpy().tobytes()
        elif what == "read":
            extent.read(start, buffer).wait()
            inside = min(end, num_bytes) - start  # bytes between the extent's end and its page's are nobody's
            assert buffer[:inside].numpy().tobytes() == bytes(truth[start : start + inside])
        else:
            assert mapped[start:end].numpy().tobytes() == bytes(truth[start:end])
    assert read_back(extent).numpy().tobytes() == bytes(truth[:num_bytes])
    assert mapped.numpy().tobytes() == bytes(truth[:num_bytes])
    for neighbour in neighbours:
        assert not read_back(neighbour).any(), "an extent was written beyond its end"


def test_a_read_leaves_the_bytes_around_its_buffer_alone(stores) -> None:
    extent = stores[2, 1].allocate(PAGE_BYTES + 100)
    extent.write(0, random_buffer(2 * PAGE_BYTES)).wait()
    around = page_buffer(2 * PAGE_BYTES)
    extent.read(0, around[: PAGE_BYTES + 100]).wait()
    assert around[:PAGE_BYTES].any() and not around[PAGE_BYTES + 100 :].any()


def test_the_mapping_and_direct_io_see_the_same_bytes(tmp_path) -> None:
    store = DiskStore([tmp_path / "a", tmp_path / "b"], block_bytes=2**18)
    extent = store.allocate(3 * 2**20 + 5)
    mapped = extent.mapped()
    for _ in range(5):
        values = random_buffer(extent.num_bytes)
        mapped.copy_(values)
        assert torch.equal(read_back(extent), values), "written in place, read past the cache"
        values = random_buffer(extent.num_bytes)
        extent.write(0, values).wait()
        assert torch.equal(mapped, values), "written past the cache, read in place"
        assert torch.equal(extent.mapped(), values)
    store.close()
    assert torch.equal(mapped, values), "a mapping outlives the store"


def test_many_transfers_at_once(stores) -> None:
    extents = [stores[3, 2].allocate(round_up(size, 1)) for size in range(1, 200_000, 17_001)]
    for _ in range(3):
        values = [random_buffer(extent.num_bytes) for extent in extents]
        written = [extent.write(0, value) for extent, value in zip(extents, values, strict=True)]
        for fence in written:
            fence.wait()
        buffers = [page_buffer(extent.num_bytes) for extent in extents]
        fences = [extent.read(0, buffer) for extent, buffer in zip(extents, buffers, strict=True)]
        for fence, buffer, value in zip(fences, buffers, values, strict=True):
            fence.wait()
            assert torch.equal(buffer, value)


def test_space_is_reserved_and_given_back(tmp_path) -> None:
    if file_system_of(tmp_path) == "tmpfs":
        pytest.skip("needs blocks of a disk")
    store = DiskStore([tmp_path / "a", tmp_path / "b"])
    extent = store.allocate(2**22)
    assert min(reserved_bytes(store)) >= 2**21
    kept = store.allocate(2**20)
    kept.write(0, random_buffer(2**20)).wait()
    values = read_back(kept)
    view = extent.mapped()[100:101]
    del extent
    gc.collect()
    assert min(reserved_bytes(store)) >= 2**21 + 2**19, "a view keeps the space"
    assert int(view) == 0
    del view
    gc.collect()
    assert max(reserved_bytes(store)) < 2**21, "the space of what is gone is free again"
    assert torch.equal(read_back(kept), values)
    assert not read_back(store.allocate(2**20)).any()


def test_counters(tmp_path) -> None:
    store = DiskStore([tmp_path], block_bytes=PAGE_BYTES)
    extent = store.allocate(10 * PAGE_BYTES)
    assert (store.read_bytes, store.written_bytes, store.busy_seconds) == (0, 0, 0.0)
    extent.write(0, page_buffer(10 * PAGE_BYTES)).wait()
    extent.read(0, page_buffer(4 * PAGE_BYTES)).wait()
    assert (store.read_bytes, store.written_bytes) == (4 * PAGE_BYTES, 10 * PAGE_BYTES)
    assert 0 < store.read_seconds and 0 < store.write_seconds
    assert max(store.read_seconds, store.write_seconds) <= store.busy_seconds
    assert store.num_retries == 0


# Processes

HOLD = """
import sys, torch
from megatrain.store.disk import DiskStore
stores = [DiskStore([sys.argv[1]]) for _ in range(2)]
extent = stores[0].allocate(2**20)
extent.mapped().fill_(1)
print("ready", flush=True)
sys.stdin.read()
"""


def test_one_process_a_folder_and_a_killed_one_leaves_nothing(tmp_path) -> None:
    holder = start_python(HOLD, tmp_path)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n", holder.stderr
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*another"):
            DiskStore([tmp_path])
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert os.listdir(tmp_path) == [LOCK_NAME]
    store = DiskStore([tmp_path])
    assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()
    assert not read_back(store.allocate(PAGE_BYTES)).any()
    again = start_python(HOLD, tmp_path)
    _, errors = again.communicate(timeout=120)
    assert f"in use by process {os.getpid()}" in errors, "closing nothing, this process holds it"


def test_the_forks_of_a_killed_process_hold_nothing(tmp_path) -> None:
    fork = "import os, time\nchild = os.fork()\nif child == 0: time.sleep(150)\nprint(child, flush=True)\n"
    holder = start_python(HOLD.replace("print", fork + "print"), tmp_path)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        DiskStore([tmp_path]).close()
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_folder_that_was_made_again_is_held_again(tmp_path) -> None:
    store = DiskStore([tmp_path])
    (tmp_path / LOCK_NAME).unlink()
    others = [DiskStore([tmp_path]) for _ in range(2)]
    assert os.listdir(tmp_path) == [LOCK_NAME]
    assert "in use by process" in start_python(HOLD, tmp_path).communicate(timeout=120)[1]
    for each in (store, *others):
        each.close()


def test_a_process_that_ends_finishes_its_writes_and_takes_its_lock_along(tmp_path) -> None:
    code = """
import mmap, sys, torch
from megatrain.store.disk import DiskStore
buffer = torch.frombuffer(mmap.mmap(-1, 2**24), dtype=torch.uint8)
fence = DiskStore([sys.argv[1]], block_bytes=4096).allocate(2**24).write(0, buffer)
"""
    process = start_python(code, tmp_path)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_lock_file_that_nobody_holds_is_taken_over(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOCK_NAME).write_text('{"pid": 1, "host": "elsewhere", "start_time": 1.0}')
    DiskStore([tmp_path]).close()
    assert not [record for record in caplog.records if "memory" not in record.message]


def test_other_files_are_named_and_stay(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    left, other = tmp_path / ".megatrain-12-abc", tmp_path / "notes.txt"
    for path in (left, other):
        path.write_text("something")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        DiskStore([tmp_path]).close()
    assert left.name in caplog.text and other.name not in caplog.text
    assert left.exists() and other.exists()


def test_a_forked_process_changes_nothing(tmp_path) -> None:
    store = DiskStore([tmp_path])
    extents = [store.allocate(2**20) for _ in range(2)]
    values = random_buffer(2**20)
    for extent in extents:
        extent.write(0, values).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _in_fork(store, extents, values, tmp_path)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for extent in extents:
        assert torch.equal(read_back(extent), values)
    assert "in use by process" in start_python(HOLD, tmp_path).communicate(timeout=120)[1], "the lock is its parent's"


def _in_fork(store: DiskStore, extents: list, values: torch.Tensor, folder: Path) -> int:
    for attempt in (
        lambda: extents[0].read(0, values),
        lambda: extents[0].write(0, values),
        lambda: store.allocate(1),
    ):
        with pytest.raises(RefusedError, match="forked"):
            attempt()
    with pytest.raises(UserError, match="in use"):
        DiskStore([folder])
    if not torch.equal(extents[0].mapped(), values):
        return 2
    extents.clear()  # its parent still has them
    gc.collect()
    store.close()
    return 0


# Folders and endings


def test_folders_that_cannot_be_used(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(UserError, match="file cannot be used"):
        DiskStore([tmp_path / "file"])
    with pytest.raises(UserError, match="/proc/nothing cannot be used"):
        DiskStore(["/proc/nothing"])
    with pytest.raises(UserError, match="link twice"):
        DiskStore([tmp_path / "folder", tmp_path / "link"])
    with pytest.raises(UserError, match="names no folder"):
        DiskStore([])


def test_folders_are_made(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore(["~/below/folder"])
    assert os.listdir(tmp_path / "below" / "folder") == [LOCK_NAME]
    assert len(store.is_direct) == 1


def test_closing_twice_and_using_it_afterwards(tmp_path) -> None:
    store = DiskStore([tmp_path], block_bytes=PAGE_BYTES)
    extent = store.allocate(2**20)
    values = random_buffer(2**20)
    fence = extent.write(0, values)
    mapped = extent.mapped()
    store.close()
    store.close()
    fence.wait()
    assert torch.equal(mapped, values), "what was asked before is done"
    for attempt in (
        lambda: extent.read(0, values),
        lambda: extent.write(0, values),
        lambda: extent.mapped(),
        lambda: store.allocate(1),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            attempt()


def test_a_store_that_is_dropped_ends_its_threads(tmp_path) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if tmp_path.name in thread.name]

    store = DiskStore([tmp_path], num_threads=3)
    extent = store.allocate(PAGE_BYTES)
    del store
    assert not read_back(extent).any(), "an extent keeps its store"
    assert len(threads()) == 3
    del extent
    gc.collect()
    wait_until(lambda: not threads())
