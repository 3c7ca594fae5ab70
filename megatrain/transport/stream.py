"""The stream: weights to the device ahead of use, gradients home behind it, updates beside both.

Lanes: `compute` is the caller; `h2d` fills slots, `d2h` drains gradients; `cpu` updates, `disk update` does so where
states come from disk, so that they hold up no others, `update` on the device; `disk` reads weights. One visit:

    acquire: predict -> h2d copies home -> slot (after home.updated and slot.used)  -> caller runs behind slot.filled
    release: slot.used stands behind the caller's work
    drain:   d2h copies packet -> slab (after home.updated: an update may still read the slab; after the last drain)
    disk:    reads weights into a host slot, from which h2d copies; states go through the window of their update
    update:  a lane changes the home (after its last update; after a checkpoint captured it; after the caller's work so
             far, where that reads the home)

Homes on the device take no slot: acquire hands out the home itself, behind `updated`.

Invariants: a slot is refilled only behind `used`; weights are copied only behind `updated`; at most `max_drains`
packets are in flight. Lanes keep no order but that of fences, so whatever touches a home, slot or slab names the fence
of what touched it before. What it gives up: the compute lane is one stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping

import torch

from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.fence import Fence
from megatrain.plan.placement import DISK_TIER, HBM_TIER, Place
from megatrain.store.home import Home, behind
from megatrain.transport.counters import Counters
from megatrain.transport.disk import DiskWindow, WeightReader
from megatrain.transport.drain import GradientPacket, land
from megatrain.transport.hops import Hops, copy_, working_on
from megatrain.transport.lane import Lane
from megatrain.transport.predictor import Predictor
from megatrain.transport.recorder import Recorder, on_host
from megatrain.transport.ring import Loan, SlabRing
from megatrain.transport.slots import Slot, SlotPool, State
from megatrain.transport.stall import StallClock
from megatrain.transport.throttle import TO_DEVICE, TO_HOST


class LaneStream:
    """
    Args:
        homes: all homes that will be acquired.
        block_bytes: wire bytes of the largest block that is streamed; 0 if none is.
        rings: bounded slabs for gradients that are not kept, by type of the device where they lie. None: homes keep
            their gradients in slabs of their own.
        window, reader: of states and weights on disk, where there are any. The window is the `disk update` lane's.
        resident: the home that is updated as the others are, but never acquired.
        hops: what copies between host and device.
    """

    def __init__(
        self,
        homes: list[Home],
        block_bytes: int,
        device: torch.device,
        options: StreamOptions,
        rings: Mapping[str, SlabRing] | None = None,
        window: DiskWindow | None = None,
        reader: WeightReader | None = None,
        resident: Home | None = None,
        hops: Hops | None = None,
    ) -> None:
        self.device = device
        self.hops = hops or Hops()
        self.window = window
        self.recorder: Recorder | None = None
        self.counters = Counters()
        self.predictor: Predictor[Home] = Predictor()
        self.slots = SlotPool(
            device=device,
            num_slots=options.num_slots if block_bytes else 0,
            block_bytes=block_bytes,
            largest_bytes=max((home.wire.numel() for home in homes if not home.place.is_resident), default=0),
        )
        self._rings = dict(rings or {})
        self._max_drains = options.max_drains
        self._poison = options.poison
        self._delay_seconds = delay_seconds = options.lane_delay_seconds
        self._h2d = Lane("h2d", device, delay_seconds=delay_seconds)
        self._d2h = Lane("d2h", device, delay_seconds=delay_seconds)
        self._cpu = Lane("cpu", torch.device("cpu"), delay_seconds=delay_seconds)
        self._update_lanes = [self._cpu]
        self._disk_update = self._device_update = None
        if window is not None:
            self._disk_update = Lane("disk update", torch.device("cpu"), delay_seconds=delay_seconds)
            self._update_lanes.append(self._disk_update)
        self._reader = reader
        self._lanes = [self._h2d, self._d2h, *self._update_lanes, *([] if reader is None else [reader.lane])]
        if any(home is not None and home.place.update == "device" for home in (*homes, resident)):
            self._add_device_update()
        self._in_use: dict[Home, tuple[Slot, int]] = {}
        self._drains: deque[tuple[Fence, GradientPacket]] = deque()
        self._may_be_draining = False
        self._stall = {name: StallClock(device, name) for name in ("weights", "drain")}
        self._clock = 0

    @property
    def total_device_bytes(self) -> int:
        return self.slots.total_bytes

    @property
    def _all_rings(self) -> list[SlabRing]:
        return [*self._rings.values(), *([] if self._reader is None else [self._reader.slots])]

    def _add_device_update(self) -> None:
        self._device_update = Lane("update", self.device, delay_seconds=self._delay_seconds)
        self._device_update.recorder = self.recorder
        self._update_lanes.append(self._device_update)
        self._lanes.append(self._device_update)

    def record(self, recorder: Recorder | None) -> None:
        """Tell it what the lanes do from now on; None: nobody is told."""
        self.recorder = recorder
        for part in (*self._lanes, *self._stall.values(), *([] if self.window is None else [self.window])):
            part.recorder = recorder

    def _computed(self) -> Fence:
        """Behind the caller's work so far."""
        fence = Fence.on_current_stream(self.device)
        return fence if self.recorder is None else self.recorder.behind_compute(fence)

    def acquire(self, home: Home) -> torch.Tensor:
        """The home's wire section (flat uint8) in a slot; the caller's stream is ordered behind the copy."""
        home.check_sound()
        self.counters.visit(home)
        if home.place.is_resident:
            with self.waiting("weights", home.updated):
                home.updated.order(self._compute_stream())
            return home.wire
        self._clock += 1
        if home in self._in_use:
            slot, count = self._in_use[home]
            self._in_use[home] = (slot, count + 1)
            return slot.buffer[: home.wire.numel()]
        slot = self.slots.find(home)
        if slot is None:
            self.counters.num_late_transfers += 1
            slot = self._fill(home, keep=[])
            if slot is None:
                raise UserError(
                    f"no slot for {home.name}: as many layers are in use as there are slots. Call no more of the model "
                    "inside a layer, and in accumulate checkpoint no more than the head"
                )
        with self.waiting("weights", slot.filled):
            slot.filled.order(self._compute_stream())
        slot.ready()
        self._in_use[home] = (slot, 1)
        weights = slot.use(self._clock)
        self.predictor.observe(home)
        self._prefetch(home)
        return weights

    def release(self, home: Home) -> None:
        """The caller's work so far was the last that reads the weights."""
        if home.place.is_resident:
            return
        slot, count = self._in_use[home]
        if count > 1:
            self._in_use[home] = (slot, count - 1)
            return
        if self._poison:
            slot.buffer.fill_(0xFF)
        slot.release(self._computed())
        if self._poison:
            slot.free()
        # Last: whatever an interrupt leaves undone can be seen from `is_idle`.
        self._in_use.pop(home, None)

    @property
    def is_idle(self) -> bool:
        """No weights are in use, and every slab that is lent will come back."""
        return not self._in_use and all(ring.is_settled for ring in self._all_rings)

    def recover(self) -> None:
        """After an interrupt at any place: no weights are in use, and every drain has landed."""
        self._in_use.clear()
        for slot in self.slots.slots:
            # A copy may be on its way into it. The next one calls it off, or goes the same lane behind it.
            slot.state, slot.home, slot.used = State.FREE, None, Fence.on_current_stream(self.device)
        self.flush()
        if not all(ring.is_settled for ring in self._all_rings):
            for lane in self._lanes:
                lane.flush()
            for ring in self._all_rings:
                ring.reset()

    def drain(self, home: Home, packet: GradientPacket) -> None:
        """Send a pass's gradients home. Waits (for room, not for the copy) when too many are on their way."""
        self._drains = deque(drain for drain in self._drains if not drain[0].is_recorded)
        with self.waiting("drain", self._drains[0][0] if self._drains else None):
            while len(self._drains) >= self._max_drains:
                fence, _ = self._drains.popleft()
                fence.order(self._compute_stream())
        after = [self._computed(), home.updated, home.grads.arrived]
        self._may_be_draining = True
        ring = self._rings.get(home.grads.device.type)
        loan = None if ring is None else ring.lend(home)
        if loan is not None:
            after.append(loan.turn)
        land_ = functools.partial(self._land, home, packet, ring, loan)
        fence = self._d2h.submit(land_, after=after, label=("drain", home.name))
        home.grads.arrived = fence
        self._drains.append((fence, packet))
        self.counters.drain(packet.num_bytes)

    def send(self, tensor: torch.Tensor, host: torch.Tensor, name: str) -> Fence:
        """Copy an activation to the host, behind the caller's work so far. name: of its layer."""

        def copy() -> None:
            self.hops.send(tensor, host, name)
            if self._d2h.stream is not None:
                # The copy goes on after this work is done with the tensor: its memory must not be given away yet.
                tensor.record_stream(self._d2h.stream)

        return self._d2h.submit(copy, after=(self._computed(),), label=("send input", name))

    def bring(self, host: torch.Tensor, tensor: torch.Tensor, sent: Fence, name: str) -> Fence:
        """Copy an activation back into `tensor`, whose memory the caller's stream may still be reading for others."""
        bring = functools.partial(self.hops.bring, host, tensor, name)
        return self._h2d.submit(bring, after=(self._computed(), sent), label=("bring input", name))

    def update(self, home: Home, work: Callable[[], None], fence: Fence | None = None) -> None:
        """Queue an update of `home`, where it is updated, behind its gradients and its last update. From now on
        `updated` is behind it.

        fence: its own; that of an update which failed, where that is done again.
        """
        home.check_sound()
        if self.window is not None:
            self.window.end_exposures()
        failure = None if fence is None else fence.error
        after = behind(home, fence)
        lane, fence = self._cpu, fence or Fence()
        if home.place.update == "device":
            lane = self._device_update
            after.append(self._computed())
        elif DISK_TIER in home.place.tiers.values() and self._disk_update is not None:
            lane = self._disk_update
        assert lane is not None
        before, version = (home.updated, home.grads.used), home.version

        def update() -> None:
            with working_on(self.hops, home):
                work()
            self.hops.sign(home, version)

        try:
            # A reader that comes between sees the old fence or the new one, never a home without either.
            home.updated = home.grads.used = fence
            lane.submit(update, after=after, fence=fence, label=("update", home.name))
        except BaseException:
            # An interrupt does not tell whether it is queued. When the lane has nothing left, it is done or never was.
            with contextlib.suppress(Exception):
                lane.flush()
            if not fence.is_recorded:
                home.updated, home.grads.used = before
                fence.record() if failure is None else fence.fail(failure)
            raise
        for ring in self._rings.values():
            ring.take_back(home, fence)

    def rest(self) -> None:
        """All updates of a step are queued: behind them, their writes are waited for and the next states read ahead."""
        if self.window is not None and self._disk_update is not None:
            self.window.end_step()
            self._disk_update.submit_last(self.window.rest, label=("wait for writes", "of this step"))
        if self.recorder is not None:
            self.recorder.end_step()

    def flush(self) -> None:
        """Wait until every drain has landed; raise what went wrong in one."""
        # An interrupt may have kept a drain's fence from being noted: the lane itself knows when all is over.
        if self._may_be_draining:
            with on_host(self.recorder, "wait", "for gradients on their way"):
                self._d2h.flush()
            self._drains.clear()
            self._may_be_draining = False

    def quiesce(self) -> None:
        """Wait until no lane has anything left to do, on the device either; raise what went wrong."""
        self.flush()
        for lane in self._lanes:
            lane.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def slot_bytes(self) -> int:
        """Of one slot for blocks; 0 if none is streamed."""
        return self.slots.block_bytes

    def resize_slots(self, num_slots: int) -> None:
        """So many slots for blocks from now on, if any are streamed. All is quiet. Raises torch.OutOfMemoryError."""
        if self.slots.block_bytes:
            self.slots.resize(num_slots)

    def prepare_move(self, home: Home, place: Place) -> None:
        """Make what `home` will need in `place`: a lane, slabs. All is quiet. The order of visits is learned anew.

        Raises UserError where there is no slot for its weights, torch.OutOfMemoryError.
        """
        if not (place.is_resident or self.slots.fits(home)):
            raise UserError(f"{home.name} cannot leave the device: there is no slot for its weights")
        if place.update == "device" and self._device_update is None:
            self._add_device_update()
        tier = home.tiers[place.gradients]
        ring, num_bytes = self._rings.get(tier.device.type), home.gradient_layout().numel * home.grad_dtype.itemsize
        if not home.grads.is_kept and (ring is None or ring.slab_bytes < num_bytes):
            slabs = [tier.empty(num_bytes, pinned=True) for _ in range(self._max_drains + 1)]
            self._rings[tier.device.type] = SlabRing(slabs)
        self.predictor.forget()

    def waiting(self, cause: str, behind: Fence | None = None) -> StallClock:
        """A context around a wait of the compute lane: "weights" or "drain", behind a fence if that is known."""
        clock = self._stall[cause]
        clock.behind = behind
        return clock

    def stall_seconds(self) -> dict[str, float]:
        """Seconds for which the compute lane waited, by cause."""
        return {name: clock.seconds() for name, clock in self._stall.items()}

    def prediction_stats(self) -> dict[str, float]:
        """What was predicted of visits, and of pieces of states on disk."""
        stats = {**self.predictor.stats("prediction"), "num_late_transfers": self.counters.num_late_transfers}
        if self.window is not None:
            stats |= {**self.window.predictor.stats("disk_prediction"), "disk_wait_seconds": self.window.wait_seconds}
        return stats

    def busy_seconds(self) -> dict[str, float]:
        """Seconds in which each lane worked, on CUDA on the device (`Lane.busy_seconds`)."""
        return {lane.name: lane.busy_seconds for lane in self._lanes}

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _compute_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _prefetch(self, home: Home) -> None:
        keep = [home, *self.predictor.predict(len(self.slots.slots) - 1)]
        for index, predicted in enumerate(keep):
            if self.slots.find(predicted) is None:
                self._fill(predicted, keep=keep[:index])

    def _fill(self, home: Home, keep: list[Home]) -> Slot | None:
        slot = self.slots.candidate(home, keep)
        if slot is None:
            return None
        if slot.home is not None:
            slot.free()
        target, is_wanted, version = slot.buffer[: home.wire.numel()], slot.claim(), home.version

        def copy_from(loan: Loan) -> None:
            assert loan.slab is not None
            if is_wanted():
                what = f"weights of {home.name} on their way to the device"
                self.hops.move(target, loan.slab[: target.numel()], what, TO_DEVICE)

        def copy() -> None:
            if is_wanted():
                self.hops.fill(home, version, target)

        if home.place.weights == DISK_TIER:
            assert self._reader is not None
            loan, arrived = self._reader.read(home)
            filled = self._h2d.submit(lambda: copy_from(loan), after=(slot.used, arrived), label=("fetch", home.name))
            self._reader.slots.take_back(home, filled)
        else:
            filled = self._h2d.submit(copy, after=(slot.used, home.updated), label=("fetch", home.name))
        slot.fill(home, filled)
        self.counters.transfer(home.wire.numel())
        return slot

    def _land(self, home: Home, packet: GradientPacket, ring: SlabRing | None, loan: Loan | None) -> None:
        if ring is not None and loan is not None:
            home.grads.borrow(ring.take(loan, self._d2h.stream), packet.layout)
        what = f"gradients of {home.name} on their way home"
        stays = home.place.gradients == HBM_TIER
        receive = land(home, packet, copy_ if stays else functools.partial(self.hops.move, what=what, way=TO_HOST))
        if self._d2h.stream is not None:
            self._d2h.stream.synchronize()
        receive()
