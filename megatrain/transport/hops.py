"""Hops: every copy between host and device. One that fails is made again, and so is one that arrives changed.

    fill, fetch     weights to the device
    move            gradients home, weights that were read from disk, states on their way through the device
    send, bring     inputs of layers to host memory and back

With `verify_transfers` each hop compares check sums (`store/checksum.py`) of both ends, taken where the bytes are: on
the device by the lane's own stream, behind the copy. The lane waits for them before its fence is recorded, so nobody
sees bytes that were not compared. Weights in host memory are summed once a version, behind their update, and inputs
when they are sent: so those that change while they lie there are found too, when the device gets them.
Rule: what is copied while its owner changes it is not compared: nobody uses that copy.

What it gives up: a check is as long as a read of the bytes on both sides, and a lane holds one copy at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatrain.base.errors import ChangedInTransitError, CorruptionError
from megatrain.base.faults import FaultCounts, retried
from megatrain.plan.placement import RAM
from megatrain.store.checksum import checksum
from megatrain.store.home import Home

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
    """Of a model. Each method is for work on a lane, whose stream is the current one."""

    def __init__(self, *, verifies: bool = False) -> None:
        self.verifies = verifies
        self.counts = FaultCounts()
        self.link = LinkCount()
        self._signatures: dict[Home, _Signature] = {}
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensor in host memory -> sums of what was sent there."""

    def move(self, target: torch.Tensor, source: torch.Tensor, what: str) -> None:
        """Copy. Where it verifies, all has arrived when it returns.

        what: with its layer and its way, for messages.
        """

        def copy() -> None:
            if self.verifies:
                self._copy_and_check(target, source, what)
            else:
                copy_(target, source)

        self.link.add(target, source)
        retried(copy, what, self.counts)

    def begin(self, target: torch.Tensor, source: torch.Tensor, what: str) -> Begun:
        """As `move`, but checked when `end` is called; `source` stays as it is until then."""
        sent = checksum(source) if self.verifies else None
        self.link.add(target, source)
        retried(lambda: copy_(target, source), what, self.counts)
        return Begun(target, source, what, sent)

    def end(self, begun: Begun) -> None:
        """All that was begun on the current stream has arrived when it returns, if it verifies."""
        target, source, what, sent = begun
        if sent is None:
            return
        is_first = True

        def check_or_copy_again() -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self._compare(target, sent.tolist(), what)
            else:
                self._copy_and_check(target, source, what)

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
            copy_(target, home.wire)
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
        retried(copy_and_check if self.verifies else lambda: copy_(target, home.wire), what, self.counts)

    def fetch(self, home: Home, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device of weights of a home, all or some, that is over when it returns."""
        what = f"weights of {home.name} on their way to the device"
        if home.place.is_resident:
            return source.to(device, copy=True)
        target = torch.empty_like(source, device=device)
        if source is home.wire:
            self.fill(home, home.version, target)
        else:
            self.move(target, source, what)
        if device.type == "cuda":
            # The home may be written from now on.
            torch.cuda.current_stream(device).synchronize()
        return target

    def send(self, tensor: torch.Tensor, host: torch.Tensor, name: str) -> None:
        """Copy an input of the layer of this name to host memory."""
        what, version = f"an input of {name} on its way to host memory", tensor._version

        def copy_and_check() -> None:
            sent = checksum(tensor)
            copy_(host, tensor)
            sums = sent.tolist()
            is_equal = checksum(host).tolist() == sums
            if tensor._version != version:
                return  # by the model, which will be told if a backward takes it
            self.counts.check(is_equal)
            if not is_equal:
                raise ChangedInTransitError(what)
            self._inputs[host] = sums

        self.link.add(host, tensor)
        retried(copy_and_check if self.verifies else lambda: copy_(host, tensor), what, self.counts)

    def bring(self, host: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        """Copy back what was sent."""
        what, sums = f"an input of {name} on its way back to the device", self._inputs.get(host)

        def copy_and_check() -> None:
            copy_(tensor, host)
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

    def _copy_and_check(self, target: torch.Tensor, source: torch.Tensor, what: str) -> None:
        sent = checksum(source)
        copy_(target, source)
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
    """A copy, with the sums of its source."""

    target: torch.Tensor
    source: torch.Tensor
    what: str
    sent: torch.Tensor | None


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
