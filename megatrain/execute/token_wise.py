"""Whether a module's output at a token depends on that token alone, found by running it. Knows no module by name.

Tried on the first tokens of the first input that it meets, two tiles of them:

- whole and in tiles, output and gradient of the input are the same to rounding;
- a token that is changed changes no bit of any other's output;
- it leads to its input and weights alone, draws no random numbers, sets no attributes and changes no buffers;
- it makes no choices (a router's top-k), which near a tie would be others where products round otherwise.

And whether it is worth it: a linear layer keeps nothing but its input, which is there anyway.

What is not seen: a coupling of tokens that are further apart than two tiles, in a module that shows none nearer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.base.errors import UserError
from megatrain.execute.attributes import BUFFERS, Attributes, set_attributes, setting_attributes
from megatrain.execute.context import RngState, without_saved_tensor_hooks
from megatrain.execute.leaves import num_uses

KEEPS_LITTLE = "it keeps little beside its input"
WORTH_BYTES = 0.5
"""Of those of its input: what a module must keep beside input and output to run in tiles."""

NEAR = {torch.float32: 2.0**-16, torch.float64: 2.0**-44, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Of a token's norm: how far whole and tiled may be apart, by the coarsest dtype in it. Sums of n terms in another
order are off by about sqrt(n) roundings, 2^7 of 2^-24 where an MLP is 19,000 wide; 16-bit results by a few."""


def reason_to_run_whole(module: nn.Module, x: torch.Tensor, length: int, device: torch.device) -> str:
    """Empty where `module` may run in tiles.

    Args:
        x: its input, (rows, tokens, ...).
        length: tokens of a row in one tile.
    """
    sample = x[:, : 2 * length].detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    inside = list(module.modules())
    before = RngState.get(device)
    try:
        with _own_buffers(inside) as changed, setting_attributes(inside) as attributes, torch.enable_grad():
            with without_saved_tensor_hooks():
                reason = _Trial(module, sample, length).reason()
    finally:
        has_drawn = not RngState.get(device).equals(before)
        before.set(device)
    if has_drawn:
        return "it draws random numbers"
    if attributes or changed:
        return f"it changes {'its buffers' if changed else 'attributes of itself'}"
    return reason


class _Trial:
    def __init__(self, module: nn.Module, sample: torch.Tensor, length: int) -> None:
        self._module, self._sample, self._length = module, sample, length
        self._weights = list(module.parameters())

    def reason(self) -> str:
        try:
            return self._reason()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a module raises for fewer tokens
            return f"with fewer tokens it raises {type(error).__name__}"

    def _reason(self) -> str:
        sample = self._sample
        choices, kept = _Choices(), _Kept([sample, *self._weights])
        with choices, torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            whole = self._run(sample)
        is_states = type(whole) is torch.Tensor and whole.is_floating_point() and whole.device == sample.device
        if not is_states or whole.shape[:2] != sample.shape[:2]:
            return "its result has not the tokens of its input"
        kept.forget(whole)
        if kept.num_bytes < WORTH_BYTES * sample.nbytes:
            return KEEPS_LITTLE
        if choices.were_made:
            return "it makes choices that depend on rounding, as a router does"
        try:
            num_uses("it", [whole], [sample], self._weights)
        except UserError:
            return "it uses tensors that are neither its input nor its weights"
        return self._coupling(whole)

    def _coupling(self, whole: torch.Tensor) -> str:
        sample = self._sample
        generator = torch.Generator(sample.device).manual_seed(0)
        of_output = torch.randn(whole.shape, generator=generator, dtype=torch.float32, device=whole.device)
        of_output = of_output.to(whole.dtype)
        if not whole.requires_grad:
            return "its result has no gradient"
        (of_whole,) = torch.autograd.grad(whole, sample, of_output)
        whole, near = whole.detach(), self._near(whole)
        for start in range(0, sample.shape[1], self._length):
            tokens = slice(start, start + self._length)
            piece = sample[:, tokens].detach().contiguous().requires_grad_()
            output = self._run(piece)
            (of_piece,) = torch.autograd.grad(output, piece, of_output[:, tokens])
            if not (_is_near(output, whole[:, tokens], near) and _is_near(of_piece, of_whole[:, tokens], near)):
                return "it couples tokens: a part of them alone has another result"
        return self._probe(whole)

    def _probe(self, whole: torch.Tensor) -> str:
        changed = self._sample.detach().clone()
        token = changed.shape[1] // 2
        changed[0, token] = 1 - changed[0, token]
        is_same = (self._run(changed.requires_grad_()).detach() == whole).flatten(2).all(-1)
        is_same[0, token] = True
        return "" if bool(is_same.all()) else "it couples tokens: one that changes has others change"

    def _near(self, whole: torch.Tensor) -> float:
        dtypes = {whole.dtype, self._sample.dtype, *(weight.dtype for weight in self._weights)}
        kind = whole.device.type
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        return max(NEAR[dtype] for dtype in dtypes)

    def _run(self, x: torch.Tensor) -> Any:
        return type(self._module).forward(self._module, x)


def _is_near(found: torch.Tensor, expected: torch.Tensor, near: float) -> bool:
    """Token for token."""
    if found.shape != expected.shape:
        return False
    difference = (found.detach().float() - expected.float()).flatten(2).norm(dim=-1)
    return bool((difference <= near * expected.float().flatten(2).norm(dim=-1)).all())


class _Choices(TorchDispatchMode):
    """Sees whether whole numbers are made: places of a sort, numbers of experts, counts."""

    were_made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self.were_made |= not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        return result


class _Kept:
    """Counts what a forward keeps for its backward, beside tensors that are there anyway."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._bytes: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._there:
            self._bytes[storage.data_ptr()] = storage.nbytes()
        # No address is used twice meanwhile. Without its graph: a result may be saved by what made it.
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def forget(self, output: torch.Tensor) -> None:
        """It is there anyway."""
        self._bytes.pop(output.untyped_storage().data_ptr(), None)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())


@contextlib.contextmanager
def _own_buffers(modules: list[nn.Module]) -> Iterator[Attributes]:
    """The modules have copies of their buffers for the length of the block. Those that it changed are in the yielded
    dict afterwards."""
    given = {(module, name): buffer for module in modules for name, buffer in module._buffers.items()}
    copies = {place: None if buffer is None else buffer.clone() for place, buffer in given.items()}
    changed: Attributes = {}
    set_attributes(copies, BUFFERS)
    try:
        yield changed
    finally:
        for (module, name), buffer in given.items():
            now = module._buffers.get(name)
            if now is not copies[module, name] or (buffer is not None and not torch.equal(now, buffer)):
                changed[module, name] = now
        set_attributes(given, BUFFERS)
