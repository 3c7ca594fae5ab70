"""Hops: every copy between host and device. One that fails is made again, and so is one that arrives changed.

    fill, fetch     weights to the device
    move            gradients home, weights that were read from disk, states on their way through the device
    send, bring     inputs of layers to host memory and back

With `verify_transfers` each hop compares check sums (`store/checksum.py`) of both ends, taken where the bytes are: on
the device by the lane's own stream, behind the copy. The lane waits for them before its fence is recorded, so nobody
sees bytes that were not compared. Weights in host memory are summed once a version, behind their update, and inputs
when they are sent: so those that change while they lie there are found too, when the device gets them.
With a throttle (`transport/throttle.py`) each hop takes as long as it would on a slower link.
Rule: what is copied while its owner changes it is not compared: nobody uses that copy.

What it gives up: a check is as long as a read of the bytes on both sides, and a lane holds one copy at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatrain.base.errors import ChangedInTransitError, CorruptionError
from megatrain.base.faults import FaultCounts, retried
from megatrain.base.fence import Fence
from megatrain.plan.placement import RAM
from megatrain.store.checksum import checksum
from megatrain.store.home import Home
from megatrain.transport.throttle import TO_DEVICE, TO_HOST, Throttle

Sums = list[int]


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """What all hops copy with, in one place, so that a test can put faults there."""
    target.copy_(source, non_blocking=True)


class LinkCount:
    """Bytes that crossed the link between host and device, by direction. Any lane may count.

    Where the device is the CPU there is no link, and both stay 0.
    """

    def __init__(self) -> None:
        self.to_device_bytes = self.to_host_bytes = 0
        self._lock = threading.Lock()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy that is made."""
        if target.device.type == source.device.type:
            return
        with self._lock:
            if target.device.type == "cpu":
                self.to_host_bytes += target.nbytes
            else:
                self.to_device_bytes += target.nbytes

    def stats(self) -> dict[str, int]:
        return {"link_to_device_bytes": self.to_device_bytes, "link_to_host_bytes": self.to_host_bytes}


class _Signature(NamedTuple):
    """Of a home's weights in host memory."""

    version: int
    sums: Sums
    num_lendings: int
    """Of the home's weights until then; -1: somebody held them, and might write."""


class Hops:
    """Of a model. Each method is for work on a lane, whose stream is the current one.

    Without a GPU there is no link, and the ways that a copy would take on one are throttled all the same: where the
    tensors do not tell, the caller does.
    """

    def __init__(self, *, verifies: bool = False, throttle: Throttle | None = None) -> None:
        self.verifies = verifies
        self.throttle = throttle
        self.counts = FaultCounts()
        self.link = LinkCount()
        self._signatures: dict[Home, _Signature] = {}
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensor in host memory -> sums of what was sent there."""

    def move(self, target: torch.Tensor, source: torch.Tensor, what: str, way: str | None = None) -> None:
        """Copy. Where it verifies, or the link is throttled, all has arrived when it returns.

        what: with its layer and its way, for messages. way: where it is known; None: as the devices say.
        """

        def copy() -> None:
            if self.verifies:
                self._copy_and_check(target, source, what, way)
            else:
                self._copy(target, source, way)

        self.link.add(target, source)
        retried(copy, what, self.counts)

    def begin(self, target: torch.Tensor, source: torch.Tensor, what: str, way: str | None = None) -> Begun:
        """As `move`, but checked, and held back, when `end` is called; `source` stays as it is until then."""
        sent = checksum(source) if self.verifies else None
        self.link.add(target, source)
        over = self._begin(target, source, way)
        retried(lambda: copy_(target, source), what, self.counts)
        return Begun(target, source, what, way, sent, over)

    def end(self, begun: Begun) -> None:
        """All that was begun on the current stream has arrived when it returns, if it verifies."""
        target, source, what, way, sent, over = begun
        self._hold_back(over)
        if sent is None:
            return
        is_first = True

        def check_or_copy_again() -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self._compare(target, sent.tolist(), what)
            else:
                self._copy_and_check(target, source, what, way)

        retried(check_or_copy_again, what, self.counts)

    def sign(self, home: Home, version: int) -> None:
        """The home's weights are of this version now."""
        if self.verifies and home.place.weights == RAM:
            self._signature(home, version)

    def fill(self, home: Home, version: int, target: torch.Tensor) -> None:
        """Copy a home's weights, which were of this version when that was queued, from host memory to the device."""
        what = f"weights of {home.name} on their way to the device"

        def copy_and_check() -> None:
            signature = self._signature(home, version)
            self._copy(target, home.wire, TO_DEVICE)
            is_equal = checksum(target).tolist() == signature.sums
            is_same = is_equal or checksum(home.wire).tolist() == signature.sums
            if home.version != version or not (is_same or self._is_binding(home, signature)):
                return
            self.counts.check(is_equal)
            if not is_same:
                raise CorruptionError(
                    f"weights of {home.name} changed in host memory, where nothing has written them: go on from the "
                    "last checkpoint, on other hardware if it happens again"
                )
            if not is_equal:
                raise ChangedInTransitError(what)

        self.link.add(target, home.wire)
        copy = functools.partial(self._copy, target, home.wire, TO_DEVICE)
        retried(copy_and_check if self.verifies else copy, what, self.counts)

    def fetch(self, home: Home, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device of weights of a home, all or some, behind the caller's work so far. The home may be
        written behind its `copied`."""
        what = f"weights of {home.name} on their way to the device"
        if home.place.is_resident:
            return source.to(device, copy=True)
        target = torch.empty_like(source, device=device)
        if source is home.wire:
            self.fill(home, home.version, target)
        else:
            self.move(target, source, what, TO_DEVICE)
        if device.type == "cuda":
            home.copied.order(torch.cuda.current_stream(device))  # the last one may be on another stream
            home.copied = Fence.on_current_stream(device)
        return target

    def send(self, tensor: torch.Tensor, host: torch.Tensor, name: str) -> None:
        """Copy an input of the layer of this name to host memory."""
        what, version = f"an input of {name} on its way to host memory", tensor._version

        def copy_and_check() -> None:
            sent = checksum(tensor)
            self._copy(host, tensor, TO_HOST)
            sums = sent.tolist()
            is_equal = checksum(host).tolist() == sums
            if tensor._version != version:
                return  # by the model, which will be told if a backward takes it
            self.counts.check(is_equal)
            if not is_equal:
                raise ChangedInTransitError(what)
            self._inputs[host] = sums

        self.link.add(host, tensor)
        copy = functools.partial(self._copy, host, tensor, TO_HOST)
        retried(copy_and_check if self.verifies else copy, what, self.counts)

    def bring(self, host: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        """Copy back what was sent."""
        what, sums = f"an input of {name} on its way back to the device", self._inputs.get(host)

        def copy_and_check() -> None:
            self._copy(tensor, host, TO_DEVICE)
            if sums is None:
                return
            try:
                self._compare(tensor, sums, what)
            except ChangedInTransitError:
                if checksum(host).tolist() == sums:
                    raise
                raise CorruptionError(
                    f"an input of {name} changed in host memory, where nothing has written it: go on from the last "
                    "checkpoint, on other hardware if it happens again"
                ) from None

        self.link.add(tensor, host)
        retried(copy_and_check, what, self.counts)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, way: str | None) -> None:
        """Where the link is throttled, it is over when it returns."""
        if self.throttle is not None:
            _synchronize(target, source)  # what a copy waits for is not the link's time
        over = self._begin(target, source, way)
        copy_(target, source)
        if over is not None:
            _synchronize(target, source)
        self._hold_back(over)

    def _begin(self, target: torch.Tensor, source: torch.Tensor, way: str | None) -> float | None:
        """When the throttle lets a copy be over that begins now; None: whenever it is."""
        way = way or _way(target, source)
        return None if self.throttle is None or way is None else self.throttle.begin(way, target.nbytes)

    def _hold_back(self, over: float | None) -> None:
        if self.throttle is not None and over is not None:
            self.throttle.wait(over)

    def _copy_and_check(self, target: torch.Tensor, source: torch.Tensor, what: str, way: str | None = None) -> None:
        sent = checksum(source)
        self._copy(target, source, way)
        # On a device these come behind the copy, too.
        self._compare(target, sent.tolist(), what)

    def _compare(self, target: torch.Tensor, sums: Sums, what: str) -> None:
        is_equal = checksum(target).tolist() == sums
        self.counts.check(is_equal)
        if not is_equal:
            raise ChangedInTransitError(what)

    def _signature(self, home: Home, version: int) -> _Signature:
        """Of the home as it was at this version. Not kept, and of no meaning, where it has another by now."""
        known = self._signatures.get(home)
        if known is not None and known.version == version and self._is_binding(home, known):
            return known
        num_lendings = -1 if home.is_lent else home.num_lendings
        signature = _Signature(version, checksum(home.wire).tolist(), num_lendings)
        if home.version == version:
            self._signatures[home] = signature
        return signature

    def _is_binding(self, home: Home, signature: _Signature) -> bool:
        """Nobody can have written into a view of the weights since."""
        return signature.num_lendings == home.num_lendings


class Begun(NamedTuple):
    """A copy, with the sums of its source where it is checked."""

    target: torch.Tensor
    source: torch.Tensor
    what: str
    way: str | None
    sent: torch.Tensor | None
    over: float | None
    """When the throttle lets it be."""


def _way(target: torch.Tensor, source: torch.Tensor) -> str | None:
    """Over the link; None where a copy does not cross it."""
    if target.device.type == source.device.type:
        return None
    return TO_HOST if target.device.type == "cpu" else TO_DEVICE


def _synchronize(*tensors: torch.Tensor) -> None:
    """Wait for the current stream of the device that one of them is on."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
            return


_work = threading.local()


@contextlib.contextmanager
def working_on(hops: Hops, home: Home) -> Iterator[None]:
    """This thread updates `home`: copies that this takes are hops of its model."""
    before = hops_at_hand()
    _work.hops, _work.name = hops, home.name
    try:
        yield
    finally:
        _work.hops, _work.name = before


def hops_at_hand() -> tuple[Hops, str]:
    """Those of what this thread works on, and its name."""
    if not hasattr(_work, "hops"):
        _work.hops, _work.name = Hops(), "an update"
    return _work.hops, _work.name
