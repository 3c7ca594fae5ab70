"""Modules of a block in tiles of tokens: what they make inside exists for one tile at a time.

A layer's recomputation and backward hold what every module in it keeps for its backward: for an MLP four times its
width a token. Modules whose output at a token depends on that token alone (an MLP, a norm) need not: they are called
with some tokens at a time, forward without a graph, and in the backward each tile is computed again and had its vjp
before the next one. Attention and whatever else couples tokens runs as it is.

    layer.run -> its modules' forwards are replaced for the length of the call
      module(x) -> token-wise? (`token_wise.py`, measured once) -> TileFunction: a tile of x at a time
                -> else the module's own forward; modules inside it are asked in turn

Rule: a module that is not known to be token-wise runs whole, and so does one with hooks on or in it, and one that draws
random numbers, which would be others in a tile. The gradients of its weights are summed over the tiles in fp32 and
rounded once, as a product over all tokens is. So the result differs from that of whole modules by the order of sums.
What it gives up: the forward of a tiled module is computed once more in the backward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.execute.context import CallContext, RngState, without_saved_tensor_hooks
from megatrain.execute.layer import StreamedLayer
from megatrain.execute.parameters import HomeParameter
from megatrain.execute.token_wise import KEEPS_LITTLE, reason_to_run_whole
from megatrain.plan.cost import tokens_of_tile

logger = logging.getLogger("megatrain")


def tile_layers(layers: Sequence[StreamedLayer], config: Config, device: torch.device) -> None:
    """Let the blocks run their modules in tiles where `config.tile_tokens` says so. Compiled blocks are one piece."""
    if config.tile_tokens is False or config.compile:
        return
    for layer in layers:
        if layer.kind == "block":
            layer.tiles = LayerTiles(layer, config.tile_tokens, device)


class LayerTiles:
    """Of one layer.

    Args:
        setting: `Config.tile_tokens`.
    """

    def __init__(self, layer: StreamedLayer, setting: int | None, device: torch.device) -> None:
        self._names = {module: name for name, module in layer.module.named_modules(prefix=layer.name)}
        inside = [module for module in layer.modules if module is not layer.module]
        self._modules = [module for module in inside if "forward" not in vars(module)]
        self._setting, self._device = setting, device
        self._reasons: dict[tuple[nn.Module, tuple[bool, ...]], str] = {}
        """By module and training flags in it: why it runs whole; empty: it runs in tiles."""

        self._is_inside = False
        """A module that is tried, or runs in tiles, calls others."""

    @contextlib.contextmanager
    def in_place(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """For the length of the block the layer's modules run in tiles, if one of its arguments is long enough."""
        if self._is_inside or not any(map(self._length, (*args, *kwargs.values()))):
            yield
            return
        try:
            for module in self._modules:
                vars(module)["forward"] = functools.partial(self._forward, module)
            yield
        finally:
            for module in self._modules:
                vars(module).pop("forward", None)

    def _length(self, value: Any) -> int | None:
        """Tokens of a row in one tile of `value`, (rows, tokens, ...); None: whole."""
        is_states = type(value) is torch.Tensor and value.dim() >= 3 and value.is_floating_point()
        return tokens_of_tile(self._setting, *value.shape[:2]) if is_states else None

    def _forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of the module's own forward."""
        length = self._length(args[0]) if len(args) == 1 and not kwargs and not self._is_inside else None
        run = functools.partial(type(module).forward, module)
        if length is None or not self._may_run(module, args[0], length):
            return run(*args, **kwargs)
        rng = RngState.get(self._device)
        try:
            with self._inside():
                call = _TiledCall(module, length, self._device)
                return TileFunction.apply(call, args[0], *call.weights)
        except _HasDrawnError:
            # A probability was raised since it was tried.
            rng.set(self._device)
            self._reasons[_key(module)] = _HasDrawnError.reason
            return run(*args)

    def _may_run(self, module: nn.Module, x: torch.Tensor, length: int) -> bool:
        """In tiles."""
        inside = list(module.modules())
        if any(map(_has_hooks, inside)) or nn.modules.module._has_any_global_hook():
            return False
        if any(isinstance(parameter, HomeParameter) for of in inside for parameter in of._parameters.values()):
            return False  # of another layer's home
        key = _key(module)
        if key not in self._reasons and torch.is_inference_mode_enabled():
            return False  # no graph to look at
        if key not in self._reasons:
            with self._inside():
                self._reasons[key] = reason_to_run_whole(module, x, length, self._device)
            self._tell(module, self._reasons[key])
        return not self._reasons[key]

    def _tell(self, module: nn.Module, reason: str) -> None:
        if reason != KEEPS_LITTLE:
            logger.info("%s runs %s", self._names[module], f"whole, not in tiles: {reason}" if reason else "in tiles")

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False


class TileFunction(torch.autograd.Function):
    """Inputs: the call, (rows, tokens, ...), and the module's weights. Output: (rows, tokens, ...)."""

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        output = call.forward(x)
        ctx.call = call
        # The weights too: where a layer keeps its insides they are in another slot by then.
        ctx.save_for_backward(x, *weights)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        try:
            x, *weights = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise UserError(
                f"the input of {type(ctx.call.module).__name__}, which runs in tiles of tokens, is changed in place "
                "after it: say mt.init(tile_tokens=False), or write x = x + y for x += y"
            ) from error
        return (None, *ctx.call.backward(x, weights, grad, ctx.needs_input_grad[1:]))


class _TiledCall:
    """One call of a token-wise module.

    Args:
        length: tokens of a row in one tile, at most.
    """

    def __init__(self, module: nn.Module, length: int, device: torch.device) -> None:
        self.module = module
        self._length, self._device = length, device
        inside = list(module.modules())
        named = [(owner, name, parameter) for owner in inside for name, parameter in owner._parameters.items()]
        self._places = [(owner, name, id(parameter)) for owner, name, parameter in named if parameter is not None]
        by_id = {id(parameter): parameter for _, _, parameter in named if parameter is not None}
        self._ids, self.weights = list(by_id), list(by_id.values())
        self._context = CallContext(inside, device)
        self._context.forward_done(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises _HasDrawnError for a module that draws random numbers."""
        before, output = RngState.get(self._device), None
        for start, end in self._tiles(x):
            tile = self._run(x[:, start:end])
            if output is None:
                output = tile.new_empty((*x.shape[:2], *tile.shape[2:]))
            output[:, start:end] = tile
        if not RngState.get(self._device).equals(before):
            raise _HasDrawnError
        assert output is not None, "there are more tokens than one tile has"
        return output

    def backward(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], grad: torch.Tensor, needs_grad: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of `x` and of `weights`, None for those that need none or are not used."""
        needs_x, *needs_weights = needs_grad
        own = [w.detach().requires_grad_(needs) for w, needs in zip(weights, needs_weights, strict=True)]
        of_x = torch.zeros_like(x) if needs_x else None
        sums: list[torch.Tensor | None] = [None] * len(own)
        with self._context.restored(), without_saved_tensor_hooks(), self._bound(own):
            for start, end in self._tiles(x):
                piece = x[:, start:end].detach().requires_grad_(needs_x)
                of_piece, found = self._gradients(piece, own, grad[:, start:end])
                if of_piece is not None:
                    of_x[:, start:end] = of_piece
                sums = [_added(total, new) for total, new in zip(sums, found, strict=True)]
        return [of_x, *(None if of is None else of.to(w.dtype) for of, w in zip(sums, own, strict=True))]

    def _gradients(
        self, piece: torch.Tensor, own: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Of one tile: of its input, and of each of the weights."""
        wanted = [tensor for tensor in (piece, *own) if tensor.requires_grad]
        with torch.enable_grad():
            output = self._run(piece)
        found = iter(torch.autograd.grad(output, wanted, grad, allow_unused=True))
        of_piece, *of_weights = [next(found) if tensor.requires_grad else None for tensor in (piece, *own)]
        return of_piece, of_weights

    def _run(self, piece: torch.Tensor) -> torch.Tensor:
        # Modules may view their input as rows.
        return type(self.module).forward(self.module, piece.contiguous())

    def _tiles(self, x: torch.Tensor) -> Iterator[tuple[int, int]]:
        """(start, end) of each, about equally long."""
        num_tokens = x.shape[1]
        number = -(-num_tokens // self._length)
        return itertools.pairwise(num_tokens * index // number for index in range(number + 1))

    @contextlib.contextmanager
    def _bound(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """The module holds `weights` as its parameters for the length of the block."""
        held = [owner._parameters[name] for owner, name, _ in self._places]
        of = dict(zip(self._ids, weights, strict=True))
        try:
            for owner, name, key in self._places:
                owner._parameters[name] = of[key]
            yield
        finally:
            for (owner, name, _), parameter in zip(self._places, held, strict=True):
                owner._parameters[name] = parameter


class _HasDrawnError(Exception):
    """A module drew random numbers in a tile."""

    reason = "it draws random numbers"


def _added(total: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """Their sum, in fp32 at least. Changes `total`."""
    if new is None or total is not None:
        return total if new is None else total.add_(new)
    # A copy: a gradient may be the very tensor that came in.
    return new.to(torch.promote_types(new.dtype, torch.float32), copy=True)


def _key(module: nn.Module) -> tuple[nn.Module, tuple[bool, ...]]:
    return module, tuple(inside.training for inside in module.modules())


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
