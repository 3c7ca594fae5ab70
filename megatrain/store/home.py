"""Home: where a layer's weights live for good: in host memory, on the device or on disk.

Two sections: `wire` (what crosses the link, in the compute dtype, page-locked) and `low` (the low halves of split
masters). Moments belong to the optimizer and gradients to `HomeGradients`; both lie apart. Each has a tier of its own.
Rule: whoever reads or writes weights waits for `updated` first; whoever writes them waits for `copied` too, and
whoever writes them or moments for `captured`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megatrain.base.errors import UpdateError, kind_of_update_error
from megatrain.base.fence import Fence, bare
from megatrain.plan.placement import CPU, DISK_TIER, Place
from megatrain.spec.layout import Field, GradientLayout, padded, view_field, wire_bytes
from megatrain.store.buffers import BufferPool
from megatrain.store.gradients import HomeGradients
from megatrain.store.lending import Lending
from megatrain.store.masters import join, split_
from megatrain.store.tier import Tier

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Of (target, source), which may return before it is over."""


class Home:
    """The weights of one streamed layer (or of several that share a parameter), and their gradients.

    Args:
        name: the layer's name, for messages.
        fields: its parameters in wire order.
        tiers: where sections come from, by tier.
        grad_dtype: dtype of gradients on the wire.
        place: tiers of its parts, and where it is updated.
        keeps_gradients: until `zero_grad`; else their update uses them up.
        rooms: of gradients that are kept, by tier; where there is none each home keeps its own memory for them.
    """

    def __init__(
        self,
        name: str,
        fields: list[Field],
        tiers: Mapping[str, Tier],
        grad_dtype: torch.dtype,
        place: Place = CPU,
        *,
        keeps_gradients: bool = True,
        rooms: Mapping[str, BufferPool] | None = None,
    ) -> None:
        self.name = name
        self.fields = fields
        self.tiers = tiers
        self.place = place
        self.grad_dtype = grad_dtype
        wire = tiers[place.weights].empty(wire_bytes(fields), pinned=True, owner=f"weights of {name}")
        num_low = sum(1 for field in fields if field.is_split) and _num_elements(fields)
        owner = f"low halves of {name}"
        self.hold(wire, tiers[place.low].empty(2 * num_low, pinned=place.is_staged, owner=owner).view(torch.int16))
        self.updated = Fence.done()
        self.captured = Fence.done()
        """A checkpoint has what it needs of this home: until then nobody may change it."""
        self.copied = Fence.done()
        """So with weights that were copied to the device apart from slots."""
        self.version = 0
        self.num_lendings = 0
        """How often somebody got a view of the weights, into which they may write."""
        self.torn: UpdateError | None = None
        """Why its states cannot be used any more."""
        self.due: set[object] = set()
        """Updates of steps that were begun, which it has not had."""
        # Their sizes were chosen for the homes that are there from the start.
        self._rooms = {place.gradients: (rooms or {}).get(place.gradients) if keeps_gradients else None}
        room = self._rooms[place.gradients]
        self.grads = HomeGradients(tiers[place.gradients], grad_dtype, is_kept=keeps_gradients, room=room, owner=name)
        self.trainable: dict[Field, bool] = dict.fromkeys(fields, True)
        self._layouts: dict[tuple[bool, ...], GradientLayout] = {}
        self._lending = Lending()

    def hold(self, wire: torch.Tensor, low: torch.Tensor) -> None:
        """The weights (flat uint8) and low halves (flat int16) are there from now on."""
        # One statement: an interrupt leaves no views of what has left.
        self._flat: dict[Field, tuple[torch.Tensor, torch.Tensor | None]]
        self._flat, self.wire, self.low = {}, wire, low

    def check_process(self) -> None:
        """Raises RefusedError in a forked process."""
        for tier in self.tiers.values():
            tier.check_process()

    def wait(self) -> None:
        """Until its last update is over. Raises RefusedError in a forked process, where no thread would end it."""
        self.check_process()
        self.updated.wait()

    def check_sound(self) -> None:
        """Raises UpdateError where an update has left it with states that cannot be used."""
        if self.torn is not None:
            raise bare(self.torn)

    def tear(self, error: BaseException) -> None:
        """An update has written a part of its states, and cannot write the rest because of `error`."""
        if self.torn is None:
            self.torn = kind_of_update_error(error)(
                f"the update of {self.name!r} was written in part ({type(error).__name__}: {error}): its states cannot "
                "be used any more. Nothing of this run can be saved from here on: go on from the last checkpoint"
            )

    @property
    def num_parameters(self) -> int:
        return sum(field.numel for field in self.fields)

    @property
    def is_trainable(self) -> bool:
        return any(self.trainable.values())

    def gradient_layout(self) -> GradientLayout:
        """Layout for the fields that are trainable now."""
        key = tuple(self.trainable.values())
        if key not in self._layouts:
            self._layouts[key] = GradientLayout.of([field for field in self.fields if self.trainable[field]])
        return self._layouts[key]

    def weights(self, field: Field) -> torch.Tensor:
        """The compute weights (the field's shape and wire dtype), viewing the home. Wait for `updated` first."""
        return view_field(self.wire, field)

    def flat(self, field: Field) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`weights` flat, and `low_half` or None where there is none: made once, since every update asks for them."""
        if field not in self._flat:
            low = self.low_half(field) if field.is_split else None
            self._flat[field] = self.weights(field).view(-1), low
        return self._flat[field]

    def low_half(self, field: Field) -> torch.Tensor:
        """Low 16 bits of a split master, flat int16, viewing the home."""
        assert field.is_split
        return self.low[field.offset : field.offset + field.numel]

    def read(self, field: Field) -> torch.Tensor:
        """A copy of the exact master in the field's shape, on the CPU: fp32 if split, else the wire dtype.

        Raises RefusedError in a forked process.
        """
        self.wait()
        self.check_sound()
        self.settle()
        if not field.is_split:
            return self.weights(field).to("cpu", copy=True)
        hi = self.weights(field).view(-1)
        return join(hi, self.low_half(field).to(hi.device)).view(field.shape).cpu()

    def saved(self, field: Field) -> torch.Tensor:
        """The field in the dtype its model was loaded in, on the CPU. Shares the home's bytes where it lies there and
        nothing has to be converted."""
        self.wait()
        if field.dtype == field.saved_dtype and self.wire.device.type == "cpu":
            self.expose()
            self.num_lendings += 1
            return self._lending.lend(self.weights(field))
        self.settle()
        return self.as_saved(field)

    def as_saved(self, field: Field) -> torch.Tensor:
        """The same, neither lent nor waited for: for whoever keeps others from changing it."""
        weights = on_host(self.weights(field))
        if field.is_split and field.saved_dtype != field.dtype:
            weights = join(weights.view(-1), on_host(self.low_half(field))).view(field.shape)
        return weights.to(field.saved_dtype)

    def captured_master(self, field: Field) -> torch.Tensor:
        """The exact fp32 master on the CPU, which may view the home; as `as_saved` neither lent nor waited for."""
        weights = on_host(self.weights(field))
        if field.is_split:
            return join(weights.view(-1), on_host(self.low_half(field))).view(field.shape)
        return weights

    @property
    def is_lent(self) -> bool:
        """Somebody still holds what `saved` returned, and reads it without waiting: an update must be done before its
        step returns, as in plain PyTorch, where such tensors change with the step and not after it."""
        return self._lending.is_any_out

    def write(self, field: Field, value: torch.Tensor) -> None:
        """Overwrite the master with `value` (any float dtype, same shape, on any device).

        Raises RefusedError in a forked process.
        """
        self.wait()
        self.expose()  # and so behind what the update has still to write
        assert tuple(value.shape) == field.shape, f"{field.name}: {tuple(value.shape)} is not {field.shape}"
        # First: a copy to the device that is under way is of no use any more, whatever it reads.
        self.version += 1
        if field.is_split and value.dtype == torch.bfloat16:
            self.weights(field).copy_(value.detach())
            self.low_half(field).zero_()
        elif field.is_split:
            master = value.detach().to(device=self.wire.device, dtype=torch.float32).contiguous()
            split_(master.view(-1), self.weights(field).view(-1), self.low_half(field))
        else:
            self.weights(field).copy_(value.detach())

    def prepare_move(self, place: Place, copy: Copy) -> Callable[[], None]:
        """Copies weights and low halves to where `place` has them. What is returned takes the copies over, and may be
        called again after an interrupt; gradients go to their new tier from then on.

        Nobody else is at the home between the two, it holds no gradients, and nothing of it is lent. On a device the
        caller waits for the copies. Raises UserError or torch.OutOfMemoryError where there is no room.
        """
        wire = self._copied(self.wire, "weights", place, copy, pinned=True)
        low = self._copied(self.low, "low", place, copy, pinned=place.is_staged)

        def take_over() -> None:
            self.hold(wire, low)
            self.place = place
            self.grads.move(self.tiers[place.gradients], self._rooms.get(place.gradients))

        return take_over

    def _copied(self, tensor: torch.Tensor, part: str, place: Place, copy: Copy, *, pinned: bool) -> torch.Tensor:
        """`tensor` itself where it may stay."""
        if not self.place.is_apart(part, place):
            return tensor
        owner = f"{part} of {self.name}"
        target = self.tiers[place.tiers[part]].empty(tensor.nbytes, pinned=pinned, owner=owner).view(tensor.dtype)
        copy(target, tensor)
        return target

    def settle(self) -> None:
        """Until what was written to disk can be read where it is mapped."""
        if self.place.low == DISK_TIER:
            self.expose()

    def expose(self) -> None:
        """Somebody who is no update is about to change a part, or to hold a view of it."""
        self.captured.wait()
        self.copied.wait()
        for tier in self.tiers.values():
            tier.expose()
        self.check_sound()


def behind(home: Home, fence: Fence | None) -> list[Fence]:
    """What an update of `home` waits for: gradients, whoever still reads it, its last update. fence: its own.

    Where that failed, the update is done again: from now on it is open, and nothing that failed is waited for.
    """
    before, others = home.updated, [home.grads.arrived, home.captured, home.copied]
    if fence is None or fence.error is None:
        return [*others, before]
    has_failed = before.error is not None
    fence.reopen()
    return others if has_failed else [*others, before]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of what lies on a device.

    Fresh memory is touched by all threads first (8.6 GB/s on 16 cores): then the copy runs at 16.8 GB/s, else at 1.4.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).zero_().copy_(tensor)


def _num_elements(fields: list[Field]) -> int:
    return max(field.offset + padded(field.numel) for field in fields)


def expose_held(homes: Iterable[Home], are_states_held: bool) -> bool:
    """Somebody may have written into what they hold: what was read ahead of homes that are concerned is of no use.

    Returns whether states or gradients are held: nobody may see them half done.
    """
    is_any_held = are_states_held
    for home in homes:
        is_any_held |= home.grads.is_lent
        if are_states_held or home.is_lent or home.grads.is_lent:
            home.expose()
    return is_any_held
