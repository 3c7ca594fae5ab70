"""Speed of the disk tier beside plain threads on the same folders: reading, writing, and both at once.

    python benchmarks/disk.py --dir DIR                             # 4 GB, 4 threads, blocks of 8 MiB
    python benchmarks/disk.py --dir DIR1 --dir DIR2 --gb 16 --rounds 9

The store moves extents of 32 blocks, as homes of layers would be, through two slots for each direction. The plain side
is what one writes by hand: as many threads a folder, which take blocks of the same size from a list and move them
between a file opened as the store's is (past the page cache, where the file system allows it) and the same slots: a
buffer that stays in the processor's cache, or pages of another kind, change what a disk gives.
Rule: the two sides take turns, the first one changing from round to round, so that a busy neighbour slows both alike.
Each side's files are written once before anything is timed. GB are 1e9 bytes.

The table gives GB/s, median and lowest to highest round; "ratio" is that of the medians, "in pairs" the ratios of the
two sides within a round. With `both at once` each side reads one half of the bytes while it writes the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.base.fence import Fence
from megatrain.base.mounts import file_system_of
from megatrain.base.units import GB, MIB, format_bytes
from megatrain.store.disk import DiskStore
from megatrain.store.tier import round_up

SIDES = ("store", "plain threads")
EXTENT_BLOCKS = 32
NUM_SLOTS = 2
"""For each direction: so many transfers are under way at once."""
Slots = dict[bool, list[torch.Tensor]]
"""Whether it is written -> flat uint8 tensors of an extent's size."""


@dataclass(frozen=True)
class Case:
    """What both sides do in a round: numbers of the extents to read and to write."""

    name: str
    read: range
    write: range


def main() -> None:
    """Read the options, run the rounds, print the table and one line of JSON."""
    options = parse_options()
    block_bytes = options.block_mib * MIB
    num_folders = len(options.dir)
    extent_bytes = block_bytes * round_up(EXTENT_BLOCKS, num_folders)
    half = max(1, round(options.gb * GB / 2 / extent_bytes))
    num_bytes = 2 * half * extent_bytes
    cases = [
        Case("read", range(2 * half), range(0)),
        Case("write", range(0), range(2 * half)),
        Case("both at once", range(half), range(half, 2 * half)),
    ]
    slots = {is_write: [page_buffer(extent_bytes) for _ in range(NUM_SLOTS)] for is_write in (False, True)}
    store = DiskStore(options.dir, num_threads=options.threads, block_bytes=block_bytes)
    sides = {
        "store": StoreSide(store, slots, 2 * half),
        "plain threads": PlainSide(store, slots, options, num_bytes // num_folders),
    }
    for folder, is_direct in zip(options.dir, store.is_direct, strict=True):
        print(f"{folder}: {file_system_of(Path(folder))}, {'direct' if is_direct else 'buffered'}")
    print(
        f"{format_bytes(num_bytes)} a round, blocks of {options.block_mib} MiB, {options.threads} threads a folder, "
        f"{options.rounds} rounds"
    )
    for side in sides.values():
        side.run(cases[1])
    rates = measure(sides, cases, options.rounds, extent_bytes)
    rows = [make_row(case, rates[case.name]) for case in cases]
    print_table(rows)
    facts: dict[str, Any] = {
        "folders": num_folders,
        "threads": options.threads,
        "block_mib": options.block_mib,
        "bytes": num_bytes,
    }
    # What the store says of itself, warm-up included: a step's transfers are predicted from it.
    facts["metered_gb_per_second"] = {
        "read": store.read_bytes / GB / store.read_seconds,
        "write": store.written_bytes / GB / store.write_seconds,
        "both": (store.read_bytes + store.written_bytes) / GB / store.busy_seconds,
    }
    print(json.dumps({**facts, "is_direct": store.is_direct, "retries": store.num_retries, "rows": rows}))
    store.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", required=True, help="folder on the disk; repeat it for several")
    parser.add_argument("--gb", type=float, default=4.0, help="bytes a round, in 1e9 (default: 4)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each row (default: 7)")
    parser.add_argument("--threads", type=int, default=4, help="of each folder (default: 4)")
    parser.add_argument("--block-mib", type=int, default=8, help="MiB of a block (default: 8)")
    return parser.parse_args()


# --- the two sides ---


def page_buffer(num_bytes: int) -> torch.Tensor:
    """Random bytes that start on a page: some disks are faster with zeros."""
    tensor = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    tensor.view(torch.int64).random_()
    return tensor


class StoreSide:
    """Reads and writes extents through a few slots, as homes on disk do."""

    def __init__(self, store: DiskStore, slots: Slots, num_extents: int) -> None:
        self._extents = [store.allocate(slots[False][0].numel()) for _ in range(num_extents)]
        self._slots = slots

    def run(self, case: Case) -> None:
        streams = [self._move(case.read, is_write=False), self._move(case.write, is_write=True)]
        while streams:
            streams = [stream for stream in streams if next(stream, None) is not None]

    def _move(self, numbers: range, *, is_write: bool) -> Iterator[Fence]:
        """Yields after each transfer; waits for a slot's last one before it is used again."""
        fences = [Fence.done() for _ in range(NUM_SLOTS)]
        for number in numbers:
            place = number % NUM_SLOTS
            fences[place].wait()
            extent, slot = self._extents[number], self._slots[is_write][place]
            fences[place] = extent.write(0, slot) if is_write else extent.read(0, slot)
            yield fences[place]
        for fence in fences:
            fence.wait()


class PlainSide:
    """Threads with a file a folder and nothing else. Each file holds its share of each extent, one behind the other."""

    def __init__(self, store: DiskStore, slots: Slots, options: argparse.Namespace, share_bytes: int) -> None:
        self._block_bytes = store.block_bytes
        self._num_threads = options.threads
        self._slots = {
            is_write: [block.numpy() for slot in both for block in slot.split(store.block_bytes)]
            for is_write, both in slots.items()
        }
        self._extent_blocks = slots[False][0].numel() // store.block_bytes // len(options.dir)
        self._files = []
        for folder, is_direct in zip(options.dir, store.is_direct, strict=True):
            fd, path = tempfile.mkstemp(dir=folder)
            os.close(fd)
            self._files.append(os.open(path, os.O_RDWR | (os.O_DIRECT if is_direct else 0)))
            os.unlink(path)
            os.posix_fallocate(self._files[-1], 0, share_bytes)

    def run(self, case: Case) -> None:
        threads = []
        for place, fd in enumerate(self._files):
            blocks: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
            for block in self._blocks(case):
                blocks.put(block)
            for _ in range(self._num_threads):
                blocks.put(None)
                threads.append(threading.Thread(target=self._work, args=(fd, place, blocks)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _blocks(self, case: Case) -> Iterator[tuple[int, bool]]:
        """Number of a block in each file, whether it is written: reads and writes take turns."""
        size = self._extent_blocks
        reads, writes = (range(r.start * size, r.stop * size) for r in (case.read, case.write))
        for read, write in itertools.zip_longest(reads, writes):
            yield from [] if read is None else [(read, False)]
            yield from [] if write is None else [(write, True)]

    def _work(self, fd: int, place: int, blocks: queue.SimpleQueue[tuple[int, bool] | None]) -> None:
        while (block := blocks.get()) is not None:
            number, is_write = block
            buffers = self._slots[is_write]
            buffer = buffers[(number * len(self._files) + place) % len(buffers)]
            call = os.pwritev if is_write else os.preadv
            assert call(fd, [buffer], number * self._block_bytes) == self._block_bytes


# --- time ---


def measure(
    sides: dict[str, Any], cases: list[Case], num_rounds: int, extent_bytes: int
) -> dict[str, dict[str, list[float]]]:
    """GB/s of each round: case -> side -> rounds."""
    rates: dict[str, dict[str, list[float]]] = {case.name: {side: [] for side in SIDES} for case in cases}
    for number in range(num_rounds):
        for case in cases:
            num_bytes = extent_bytes * (len(case.read) + len(case.write))
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                start = time.perf_counter()
                sides[side].run(case)
                rates[case.name][side].append(num_bytes / GB / (time.perf_counter() - start))
    return rates


def make_row(case: Case, rates: dict[str, list[float]]) -> dict[str, Any]:
    medians = {side: statistics.median(values) for side, values in rates.items()}
    own, plain = (rates[side] for side in SIDES)
    pairs = [first / second for first, second in zip(own, plain, strict=True)]
    return {
        "name": case.name,
        "median_gb_per_second": medians,
        "spread_gb_per_second": {side: (min(values), max(values)) for side, values in rates.items()},
        "ratio": medians["store"] / medians["plain threads"],
        "ratio_in_pairs": (statistics.median(pairs), min(pairs), max(pairs)),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'GB/s':14}" + "".join(f"{side:>26}" for side in SIDES) + f"{'ratio':>8}{'in pairs':>22}")
    for row in rows:
        line = f"{row['name']:14}"
        for side in SIDES:
            low, high = row["spread_gb_per_second"][side]
            line += f"{row['median_gb_per_second'][side]:10.3f} ({low:6.3f}-{high:6.3f})"
        median, low, high = row["ratio_in_pairs"]
        print(line + f"{row['ratio']:8.2f}{median:8.2f} ({low:5.2f}-{high:5.2f})")
    print(flush=True)


if __name__ == "__main__":
    main()
