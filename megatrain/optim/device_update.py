"""Runs updates on a device: of segments that lie there, or of segments in host memory, in part or whole, that stream
through it.

The update is the Triton kernel's, one launch for all segments of a kind (`optim/device_batch.py`), or where there is
none (no Triton, a rule that it does not know) the definition in PyTorch, a piece at a time.

Streamed, a segment goes in pieces through two sets of staging memory, each with its own stream: up, updated, and all
but the gradient down again. While one set's piece comes up, the other's is updated or goes down, so both directions of
the link are busy.

Rule: the same bits as on the CPU, whatever the pieces. (A measure may differ in its last bits: sums in another order.)

What it gives up: staging memory is kept for the next run, and is as large as the largest piece so far.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from megatrain.base.errors import UserError
from megatrain.optim import rules
from megatrain.optim.device_batch import Batch, batches
from megatrain.optim.formula import SGDScalars
from megatrain.optim.marks import HalfWrittenError, Marks, undone_on_fault
from megatrain.optim.segment import Segment
from megatrain.optim.tensors import tensors_of, with_tensors, written
from megatrain.optim.torch_update import update_or_undo
from megatrain.optim.update import Measure
from megatrain.plan.placement import STAGING_BYTES
from megatrain.spec.formats import BLOCK
from megatrain.transport.hops import Begun, hops_at_hand
from megatrain.transport.throttle import TO_DEVICE, TO_HOST

log = logging.getLogger(__name__)

TORCH_PIECE = 1 << 20
"""Parameters that the definition works on at a time, with about 100 bytes of temporaries each."""
_ALIGNMENT_BYTES = 256


class DeviceUpdater:
    """Applies update rules to segments on one device. `run` may be called from several threads at once, `run_streamed`
    from one at a time."""

    def __init__(self, device: torch.device | str, kernel: str = "auto") -> None:
        """kernel: "auto" (the Triton kernel on CUDA, or PyTorch where that does not run), "triton" or "torch".

        Raises UserError when kernel is something else, or "triton" where it does not run.
        """
        self.device = torch.device(device)
        self._kernel = _find_kernel(self.device, kernel)
        self._staging: tuple[_Staging, ...] = ()

    @property
    def path(self) -> str:
        """What runs the updates: "triton" or "torch"."""
        return "torch" if self._kernel is None else "triton"

    def run(
        self, segments: Sequence[Segment], measure: bool = False, marks: Marks | None = None
    ) -> list[Measure | None]:
        """Enqueue the update of segments that lie on the device on the current stream.

        marks: of a run that raised, to finish it. Returns for each its Measure, which waits for the updates, or None
        without `measure`.
        """
        marks = marks or Marks()
        with torch.no_grad(), _on(self.device):
            sums = self._enqueue(segments, measure, marks)
        return [_measure(of_segment) if measure else None for of_segment in sums]

    def run_streamed(
        self, segments: Sequence[Segment], measure: bool = False, marks: Marks | None = None
    ) -> list[Measure | None]:
        """Update segments that lie in host memory, behind everything on the current stream, and return when the results
        are there. As `run` otherwise. From memory that is not page-locked the copies are several times slower.
        """
        pieces = [(index, piece) for index, segment in enumerate(segments) for piece in _staging_pieces(segment)]
        sums: list[list[Tensor]] = [[] for _ in segments]
        marks = marks or Marks()
        with torch.no_grad(), _on(self.device):
            if self.device.type == "cuda":
                # Gradients may be on their way home. The host waits, and not only the staging streams: a copy from
                # memory that is not page-locked may read it when it is enqueued.
                torch.cuda.current_stream().synchronize()
            staging = self._staging_for(max((_staged_bytes(piece) for _, piece in pieces), default=0))

            def enqueue(staged: Segment) -> list[Tensor]:
                return self._enqueue([staged], measure, Marks())[0]

            try:
                for number, (index, piece) in enumerate(pieces):
                    update = functools.partial(staging[number % 2].update, piece, enqueue)
                    sums[index] += marks.once(number, update)
            finally:
                _finish(staging)
        return [_measure(of_segment) if measure else None for of_segment in sums]

    def _enqueue(self, segments: Sequence[Segment], measure: bool, marks: Marks) -> list[list[Tensor]]:
        """Update on the current stream, in pieces. Returns, with `measure`, for each segment (2,) fp64 a piece."""
        kernel = self._kernel
        sums: list[list[Tensor]] = [[] for _ in segments]
        by_kernel: list[tuple[int, Segment]] = []
        for index, segment in enumerate(segments):
            if kernel is not None and kernel.knows(segment):
                by_kernel += [(index, piece) for piece in _pieces(segment, kernel.MAX_NUMEL)]
                continue
            for piece in _pieces(segment, TORCH_PIECE):
                update = functools.partial(_update_by_definition, piece, measure)
                sums[index] += marks.once((index, piece.first), update)
        for number, batch in enumerate(batches([piece for _, piece in by_kernel])):
            assert kernel is not None
            pairs = marks.once(("batch", number), functools.partial(kernel.update_, batch, measure))
            for place, pair in zip(batch.places, pairs, strict=False):
                sums[by_kernel[place][0]].append(pair)
        return sums

    def _staging_for(self, num_bytes: int) -> tuple[_Staging, ...]:
        """Two sets of at least so many bytes each."""
        if not self._staging or self._staging[0].memory.numel() < num_bytes:
            self._staging = ()  # first let go of the old ones
            self._staging = (_Staging(num_bytes, self.device), _Staging(num_bytes, self.device))
        return self._staging


class _Staging:
    """Memory on the device for one piece of a segment from the host, and the stream that everything with it is on."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[Begun] = []
        """Copies down to the host, whose sources are here until they are over."""
        # Allocated on its stream, so that it waits for no other's work with memory that is free again.
        with self._on_stream():
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def update(self, piece: Segment, enqueue: Callable[[Segment], list[Tensor]]) -> list[Tensor]:
        """Enqueue the way of `piece` up, its update and its way down. Returns what `enqueue` does."""
        self.finish()
        hops, name = hops_at_hand()
        with self._on_stream():
            staged = self._stage(piece)
            pairs = [
                (host, device)
                for host, device in zip(tensors_of(piece), tensors_of(staged), strict=True)
                if host is not device
            ]
            for host, device in pairs:
                hops.move(device, host, f"states of {name} on their way to the device", TO_DEVICE)
            # What has come up is as it was at home until it goes down.
            staying = [tensor for tensor in written(piece) if tensor.device.type != "cpu"]
            with undone_on_fault(staying):
                sums = enqueue(staged)
            changed = [(host, device) for host, device in pairs if host is not piece.grad]
            with _no_way_back():
                for host, device in changed:
                    what = f"updated states of {name} on their way home"
                    self._under_way.append(hops.begin(host, device, what, TO_HOST))
        return sums

    def finish(self) -> None:
        """Check what has come down, where that is asked for; else it may still be on its way."""
        hops, _ = hops_at_hand()
        with self._on_stream(), _no_way_back():
            while self._under_way:
                hops.end(self._under_way.pop())

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done; whoever wanted it checked has done so."""
        self._under_way.clear()
        if self._stream is not None:
            self._stream.synchronize()

    def _stage(self, piece: Segment) -> Segment:
        """A segment in this memory with the shapes of `piece`; what lies on the device already stays where it is."""
        start_bytes = 0

        def place(tensor: Tensor) -> Tensor:
            nonlocal start_bytes
            if tensor.device.type != "cpu":
                return tensor
            placed = self.memory[start_bytes : start_bytes + tensor.nbytes].view(tensor.dtype)
            start_bytes += _round_up(tensor.nbytes)
            return placed

        return with_tensors(piece, place)

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _finish(staging: Sequence[_Staging]) -> None:
    """Also after a fault: the pieces that went before have their marks."""
    try:
        for one in staging:
            one.finish()
    finally:
        for one in staging:
            one.synchronize()


@contextlib.contextmanager
def _no_way_back() -> Iterator[None]:
    """What goes home has been tried several times."""
    try:
        yield
    except Exception as error:
        raise HalfWrittenError("a piece of an update did not come home") from error


def _pieces(segment: Segment, numel: int) -> Iterator[Segment]:
    """Parts of at most `numel` parameters, a multiple of BLOCK; none of an empty segment."""
    if 0 < segment.numel <= numel:
        yield segment  # as it is: a part costs a view of each tensor
        return
    for start in range(0, segment.numel, numel):
        yield segment.part(start, min(start + numel, segment.numel))


def _staging_pieces(segment: Segment) -> Iterator[Segment]:
    """Parts that fit in STAGING_BYTES."""
    tensors = tensors_of(segment)
    block_bytes = sum(tensor.nbytes for tensor in tensors_of(segment.part(0, BLOCK)))
    num_blocks = (STAGING_BYTES - _ALIGNMENT_BYTES * len(tensors)) // max(1, block_bytes)
    return _pieces(segment, BLOCK * max(1, num_blocks))


def _staged_bytes(piece: Segment) -> int:
    return sum(_round_up(tensor.nbytes) for tensor in tensors_of(piece))


def _round_up(num_bytes: int) -> int:
    """So that every tensor in staging memory is aligned for the widest loads."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _update_by_definition(piece: Segment, measure: bool) -> list[Tensor]:
    sums = update_or_undo(piece, measure)
    return [] if sums is None else [torch.tensor(sums, dtype=torch.float64)]


def _measure(sums: Sequence[Tensor]) -> Measure:
    """Of a segment, from the sums of its pieces in order."""
    pairs = [pair.tolist() for pair in sums]
    return Measure(sum((change for change, _ in pairs), 0.0), sum((weight for _, weight in pairs), 0.0))


def _find_kernel(device: torch.device, name: str) -> ModuleType | None:
    """The kernel's module for DeviceUpdater's argument; None stands for PyTorch."""
    if name not in ("auto", "triton", "torch"):
        raise UserError(f'device kernel {name!r}: use "auto", "triton" or "torch"')
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return None
    try:
        return _load_kernel(device)
    except Exception as error:  # Triton calls a C compiler, PTX assembler and driver, and raises what they do
        reason = f"{type(error).__name__}: {error}"
    if name == "triton":
        raise UserError(
            f"the Triton kernel was asked for but does not run on {device} ({reason}): install PyTorch for CUDA and a "
            'C compiler, or use "auto"'
        )
    log.warning(
        "The Triton kernel of the update does not run on %s (%s). Updates there run in PyTorch, several times slower, "
        "with the same results; PyTorch for CUDA and a C compiler bring the kernel.",
        device,
        reason,
    )
    return None


def _load_kernel(device: torch.device) -> ModuleType:
    """The kernel's module, after a first update of one number. Raises whatever goes wrong."""
    import triton  # noqa: F401

    from megatrain.optim import device_kernel

    if device.type != "cuda" and not device_kernel.is_interpreted():
        raise RuntimeError("Triton runs on CUDA devices alone")
    one = torch.ones(1, device=device)
    scalars = SGDScalars.at(lr=0.5, weight_decay=0.0)
    with _on(device):
        segment = Segment(rule=rules.SGD, scalars=scalars, weights=one, grad=one.clone())
        device_kernel.update_(Batch(segment), measure=False)
    if one.item() != 0.5:
        raise RuntimeError(f"its first update gave {one.item()} instead of 0.5")
    return device_kernel


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
