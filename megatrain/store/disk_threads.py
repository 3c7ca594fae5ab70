"""The threads that move blocks to and from one folder, and the transfers that blocks belong to.

Rule: every fence ends. A block that fails fails its transfer; a thread that dies fails all that waits in its queue.
Reads and writes take turns, so that a long write behind does not hold up the read that the next layer waits for.
Operations on the same bytes are ordered by fences alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.base.fence import Fence, bare
from megatrain.store.disk_sums import BlockGuard


class Transfer:
    """The blocks of one read or write, under one fence that passes (or fails) when the last block is over."""

    def __init__(self, owner: object) -> None:
        self.fence = Fence()
        self.num_left = 0
        """Blocks that are not over; set before the first is queued."""
        self._owner = owner  # its space must not be given away in the meantime
        self._num_running = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Whether a block should still run: after an error there is no use in the rest."""
        with self._lock:
            self._num_running += self._error is None
            return self._error is None

    def end(self, *, has_run: bool, error: BaseException | None) -> None:
        """Only now a failed transfer fails: before, its other blocks were in the caller's buffer."""
        with self._lock:
            self._error = self._error or (None if error is None else bare(error))
            self._num_running -= has_run
            self.num_left -= 1
            is_last = self.num_left == 0
        if is_last and self._error is None:
            self.fence.record()
        elif is_last:
            self.fence.fail(self._error)

    def cancel(self, error: BaseException) -> None:
        """Blocks that wait will not run; returns when those that run are over and the buffer is the caller's again."""
        with self._lock:
            self._error = self._error or (None if error is None else bare(error))
        while self._num_running:
            time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Block:
    """`view` of the caller's buffer <-> the file at `offset`."""

    transfer: Transfer
    view: memoryview
    offset: int
    is_write: bool
    guard: BlockGuard


class Meter:
    """Bytes moved, and the seconds in which anything was moving."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._num_running = 0
        self._started = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._num_running == 0:
                self._started = time.perf_counter()
            self._num_running += 1

    def end(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._num_running -= 1
            if self._num_running == 0:
                self.seconds += time.perf_counter() - self._started


class IoThreads:
    """
    Args:
        run: moves a block; called by several threads at once.
    """

    def __init__(self, name: str, num_threads: int, run: Callable[[Block], None]) -> None:
        self._run = run
        self._reads: deque[Block] = deque()
        self._writes: deque[Block] = deque()
        self._is_write_next = False
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"megatrain-disk-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, blocks: Sequence[Block]) -> None:
        """Queue blocks, all reads or all writes. Raises what ended the threads."""
        if self._error is not None:
            raise bare(self._error)
        # Extending a deque is one step: an interrupt leaves all of them in it or none. Whoever is woken empties the
        # queue, so blocks whose wake-up an interrupt swallowed go with the next ones.
        (self._writes if blocks[0].is_write else self._reads).extend(blocks)
        for _ in self._threads[: len(blocks)]:
            self._wake.put(True)
        if self._error is not None:  # they ended in the meantime
            self._fail_waiting(self._error)

    def end(self) -> None:
        """Let the threads end when the queue is empty; returns at once."""
        for _ in self._threads:
            self._wake.put(False)

    def close(self) -> None:
        """End the threads when the queue is empty; blocks that come later fail."""
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._die(RuntimeError("the disk store is closed: its model cannot be used any more"))

    def _work(self) -> None:
        try:
            while self._wake.get():
                self._empty()
            self._empty()
        except BaseException as error:  # noqa: BLE001 - whatever it was, those who wait have to see it
            self._die(error)

    def _empty(self) -> None:
        # In functions of their own: a thread that waits keeps no block, so no buffer and no store, alive.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        block = self._take()
        if block is None:
            return False
        has_run, error = False, None
        try:
            has_run = block.transfer.begin()
            if has_run:
                self._run(block)
        except BaseException as caught:  # noqa: BLE001 - it belongs to whoever waits for the block
            error = caught
        block.transfer.end(has_run=has_run, error=error)
        return True

    def _take(self) -> Block | None:
        queues = (self._writes, self._reads) if self._is_write_next else (self._reads, self._writes)
        for blocks in queues:
            try:
                block = blocks.popleft()
            except IndexError:
                continue
            self._is_write_next = not block.is_write
            return block
        return None

    def _die(self, error: BaseException) -> None:
        self._error = self._error or bare(error)
        self._fail_waiting(self._error)

    def _fail_waiting(self, error: BaseException) -> None:
        for blocks in (self._reads, self._writes):
            while blocks:
                try:
                    block = blocks.popleft()
                except IndexError:
                    break
                block.transfer.end(has_run=False, error=error)
