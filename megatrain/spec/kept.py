"""What blocks keep inside for their backward: counted on a forward without numbers, on PyTorch's meta device.

The model's own forward runs on a few tokens, so that masks, positions and the states of blocks come as its authors make
them. Of blocks that are built alike one runs, and the others give its result.

Rules: the model is as it was afterwards, and its weights are not looked at. What cannot run without numbers (routing by
a loop over experts, kernels of others) is not known, which is no error.
Gives up: what GPUs save otherwise than the meta device, but for `stand_ins.py`, and what does not grow with a batch.
"""

from __future__ import annotations

import contextlib
import logging
import random
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.spec.discover import FoundLayer
from megatrain.spec.stand_ins import DeviceKernels

logger = logging.getLogger("megatrain")

ROWS = 2
"""Of a batch: with one, what is a copy otherwise may be a view."""
NUM_LENGTHS = 3
"""Of forwards: as many as tell apart what does not grow, what grows with tokens, and what grows with their square."""
LONGEST = 1024
"""Of these lengths where there is no window; the others are parts of it, of which mixers' chunks are divisors."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class SavedTensors:
    """What autograd saves of a forward, in bytes: each memory once, and none of what it has let go of since.

    Args:
        there: tensors that are there anyway, as long as the forward lasts.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        self._there = {_memory(tensor) for tensor in there}
        self._saved: list[weakref.ref[torch.Tensor]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is saved in place of `tensor`."""
        # Without its graph: a result that is saved by the very operation that made it would hold itself.
        saved = tensor.detach()
        self._saved.append(weakref.ref(saved))
        return saved

    def num_bytes(self) -> int:
        """After the forward, while its graph lives."""
        alive = [saved for saved in (reference() for reference in self._saved) if saved is not None]
        sizes = {_memory(saved): _num_bytes(saved) for saved in alive}
        return sum(num_bytes for memory, num_bytes in sizes.items() if memory not in self._there)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors over the same memory have in common as long as one of them lives, on the meta device too."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class KeptInside:
    """Bytes, in the formats of a spec."""

    a_token: float
    a_pair: float
    """Of tokens of a row, (query, key), hidden ones too: a mask of the block's own, the scores of attention that is no
    fused kernel."""
    long_rows: tuple[int, KeptInside] | None = None
    """(tokens, what is kept from so many on): rows that a window is not longer than take a mask."""

    def per_token(self, length: int) -> float:
        """In rows of `length` tokens."""
        if self.long_rows is not None and length >= self.long_rows[0]:
            return self.long_rows[1].per_token(length)
        return self.a_token + self.a_pair * length


_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, dict[str, KeptInside]]] = weakref.WeakKeyDictionary()


def kept_inside(
    model: nn.Module,
    found: Sequence[FoundLayer],
    dtypes: Mapping[int, torch.dtype],
    *,
    window: int = 0,
    max_length: int | None = None,
) -> dict[str, KeptInside]:
    """By name of block; without those that are not known. Counted once for a model and its dtypes.

    Args:
        dtypes: id(parameter) -> what the device computes with.
        window: of attention; 0: none. Rows are longer than it.
        max_length: positions that the model has; None: it does not say.
    """
    lengths = _lengths(window, max_length)
    config = getattr(model, "config", None)
    built = tuple((dtypes[id(p)], p.shape, p.requires_grad) for p in model.parameters())
    key = lengths, built, getattr(config, "_attn_implementation", None)
    known = _known.setdefault(model, {})
    if key not in known:
        known[key] = _measured(model, found, dtypes, lengths)
    return known[key]


def _lengths(window: int, max_length: int | None) -> tuple[int, ...]:
    """Of rows, growing."""
    longest = max(LONGEST, 4 * window) if window else LONGEST
    longest = longest if max_length is None else min(longest, max_length)
    if window:
        return tuple(window + (longest - window) * part // NUM_LENGTHS for part in range(1, NUM_LENGTHS + 1))
    return tuple(longest >> part for part in reversed(range(NUM_LENGTHS)))


def _measured(
    model: nn.Module, found: Sequence[FoundLayer], dtypes: Mapping[int, torch.dtype], lengths: Sequence[int]
) -> dict[str, KeptInside]:
    if len(set(lengths)) < NUM_LENGTHS or lengths[0] < 1:
        return {}
    with _on_meta(model, found, dtypes) as blocks:
        counts = [_counted(model, blocks, length) for length in lengths]
    names = set.intersection(*(set(count) for count in counts))
    return {name: _fitted(lengths, [count[name] for count in counts]) for name in names}


def _fitted(lengths: Sequence[int], counts: Sequence[int]) -> KeptInside:
    """Through three points; what does not grow is left out. counts: bytes of batches of rows of these lengths."""
    (one, two, three), (few, more, most) = lengths, (count / ROWS for count in counts)
    lower, upper = (more - few) / (two - one), (most - more) / (three - two)
    a_pair = (upper - lower) / (three - one)
    if a_pair <= 0:  # padding, which weighs less in longer rows
        return KeptInside(a_token=upper, a_pair=0.0)
    return KeptInside(a_token=lower - a_pair * (one + two), a_pair=a_pair)


def _counted(model: nn.Module, blocks: Mapping[str, _Block], length: int) -> dict[str, int]:
    """Bytes of a batch by name of block, of those that were called."""
    ids = torch.zeros(ROWS, length, dtype=torch.long, device="meta")
    has_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    known: dict[Hashable, tuple[Any, int]] = {}
    for block in blocks.values():
        block.known, block.num_bytes = known, 0
    try:
        with torch.inference_mode(False), torch.enable_grad(), _same_random_numbers(), DeviceKernels():
            model(ids, **({"decoder_input_ids": ids} if has_decoder else {}))
    except Exception as error:  # noqa: BLE001 - whatever a model raises where there are no numbers
        logger.debug("what blocks keep inside is not known of all before they run: %s", error)
    return {name: block.num_bytes for name, block in blocks.items() if block.num_bytes}


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Those of the CPU, from which layers may be dropped, are drawn again afterwards."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _on_meta(
    model: nn.Module, found: Sequence[FoundLayer], dtypes: Mapping[int, torch.dtype]
) -> Iterator[dict[str, _Block]]:
    """All of the model's tensors are on the meta device, it trains, and its layers run as their authors wrote them.
    At the end every attribute of its modules is as it was."""
    modules = list(model.modules())
    places = [
        (place, dict(place))
        for module in modules
        for place in (vars(module), *(value for value in vars(module).values() if isinstance(value, dict)))
    ]
    made: dict[int, nn.Parameter] = {}
    blocks = {}
    try:
        for module in modules:
            own = vars(module)
            own["training"] = True
            if "gradient_checkpointing" in own:
                own["gradient_checkpointing"] = False  # as in a streamed model
            for hooks in _HOOKS:
                own[hooks].clear()
            _move(module, dtypes, made)
        for layer in found:
            forward = _own_forward(layer.module)
            if layer.kind == "block":
                forward = blocks[layer.name] = _Block(layer, forward)
            vars(layer.module)["forward"] = forward
        yield blocks
    finally:
        for place, before in places:
            if len(place) != len(before) or any(place.get(name) is not value for name, value in before.items()):
                place.clear()
                place.update(before)


def _move(module: nn.Module, dtypes: Mapping[int, torch.dtype], made: dict[int, nn.Parameter]) -> None:
    """Put stand-ins on the meta device for the module's own parameters and buffers. made: by id of a parameter."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in made:
            empty = torch.empty(parameter.shape, dtype=dtypes[id(parameter)], device="meta")
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        module._parameters[name] = made[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="meta")


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """As the module's authors wrote it or somebody else patched it, if it is a streamed layer too."""
    is_streamed, patched = "_streamed_layer" in vars(module), vars(module).get("forward")
    if patched is not None:
        return patched.__wrapped__ if is_streamed else patched
    # A streamed layer's class is a subclass of its own.
    return super(type(module), module).forward if is_streamed else type(module).forward.__get__(module)


class _Block:
    """The forward of a block: runs, and is counted, where none like it has."""

    def __init__(self, layer: FoundLayer, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._build = _build(layer)
        self._weights = list(layer.module.parameters())
        self.known: dict[Hashable, tuple[Any, int]] = {}
        """By build and arguments: result, bytes."""
        self.num_bytes = 0
        """The most that a call kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        key = self._build, tuple(kwargs), tuple(map(_kind, leaves))
        if key not in self.known:
            # Masks and positions are there anyway, for all layers.
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
            saved = SavedTensors([*self._weights, *tensors])
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                result = self._forward(*args, **kwargs)
            self.known[key] = result, saved.num_bytes()
        result, num_bytes = self.known[key]
        self.num_bytes = max(self.num_bytes, num_bytes)
        return result


def _build(layer: FoundLayer) -> Hashable:
    """Equal for blocks that are built alike. What counts a block's place in its list does not matter."""
    place = layer.name.rpartition(".")[2]
    parts = []
    for module in layer.module.modules():
        own = vars(module).items()
        plain = tuple((k, v) for k, v in own if isinstance(v, _PLAIN) and not (type(v) is int and str(v) == place))
        weights = tuple((name, _kind(parameter)) for name, parameter in module._parameters.items())
        parts.append((type(module), plain, weights, tuple(module._modules)))
    return tuple(parts)


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, _PLAIN) else type(value)
