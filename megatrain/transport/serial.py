"""The serial twin: no lanes, no slots, no prefetch. What the stream does, done one thing after the other.

It is the truth that the stream is tested against: results must be bit-equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from megatrain.base.errors import UpdateError
from megatrain.base.fence import Fence
from megatrain.plan.placement import Place
from megatrain.store.home import Home, behind
from megatrain.transport.counters import Counters
from megatrain.transport.drain import GradientPacket, land
from megatrain.transport.hops import Hops, copy_
from megatrain.transport.recorder import Recorder


class SerialStream:
    """Same verbs as `LaneStream`; every verb has done its work when it returns."""

    total_device_bytes = slot_bytes = 0
    window = None
    is_idle = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.hops = Hops()
        self.counters = Counters()
        self.recorder: Recorder | None = None

    def record(self, recorder: Recorder | None) -> None:
        """Tell it what is done from now on; None: nobody is told."""
        self.recorder = recorder

    @contextlib.contextmanager
    def _recorded(self, lane: str, what: str, name: str) -> Iterator[None]:
        """Around what a lane of this name would do."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        record = recorder.begin(lane, (what, name), stream)
        yield
        recorder.end(record, stream)

    def acquire(self, home: Home) -> torch.Tensor:
        """The home's wire section (flat uint8) on the device."""
        self.counters.visit(home)
        home.check_sound()
        home.wait()
        if home.place.is_resident:
            return home.wire
        self.counters.transfer(home.wire.numel())
        weights = torch.empty(home.wire.numel(), dtype=torch.uint8, device=self.device)
        with self._recorded("h2d", "fetch", home.name):
            return weights.copy_(home.wire)

    def release(self, home: Home) -> None:
        del home

    def recover(self) -> None:
        """Nothing is ever under way."""

    def drain(self, home: Home, packet: GradientPacket) -> None:
        """Bring a pass's gradients home."""
        home.wait()
        with self._recorded("d2h", "drain", home.name):
            receive = land(home, packet, copy_)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        receive()
        self.counters.drain(packet.num_bytes)

    def send(self, tensor: torch.Tensor, host: torch.Tensor, name: str) -> Fence:
        with self._recorded("d2h", "send input", name):
            host.copy_(tensor)
        return Fence.done()

    def bring(self, host: torch.Tensor, tensor: torch.Tensor, sent: Fence, name: str) -> Fence:
        sent.wait()
        with self._recorded("h2d", "bring input", name):
            tensor.copy_(host)
        return Fence.done()

    def update(self, home: Home, work: Callable[[], None], fence: Fence | None = None) -> None:
        """Run an update of `home`. What fails in it is raised by whoever reads the home, as with lanes."""
        home.check_sound()
        failure = None if fence is None else fence.error
        for other in behind(home, fence):
            other.wait()
        before, fence = home.updated, fence or Fence()
        try:
            with self._recorded("update" if home.place.update == "device" else "cpu", "update", home.name):
                work()
        except UpdateError as error:
            fence.fail(error)
        except BaseException:
            home.updated = before
            fence.record() if failure is None else fence.fail(failure)
            raise
        else:
            fence.record()
        home.updated = home.grads.used = fence

    def rest(self) -> None:
        """Nothing is read ahead."""
        if self.recorder is not None:
            self.recorder.end_step()

    def flush(self) -> None:
        """Everything is always over."""

    def quiesce(self) -> None:
        """Everything is always over, but for what was enqueued on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def resize_slots(self, num_slots: int) -> None:
        """There are none."""

    def prepare_move(self, home: Home, place: Place) -> None:
        """A home needs nothing here."""

    def waiting(self, cause: str, behind: Fence | None = None) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def stall_seconds(self) -> dict[str, float]:
        return {}

    def prediction_stats(self) -> dict[str, float]:
        return {}

    def busy_seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is nothing to end."""
