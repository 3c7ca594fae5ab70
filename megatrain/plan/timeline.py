"""Memory of a step over time, tier by tier, from rows that a reader can add up. Pure.

Three things move: what some layers keep that they compute inside, on the device alone; inputs of the other layers,
which pile up over the forward and are used up over the backward; gradients, where they are kept for the exact norm,
which pile up over the backward and are used up by the updates, ahead of the next forward's visits. In memory inputs
and gradients share one room (`store/buffers.py`), so neither need be whole beside the other, and the peak of their sum
is what counts, not the sum of their peaks. On disk, and on the device of a run that was not planned, each home keeps
its slab from step to step, and gradients count whole at every moment.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatrain.base.units import GB, GIB
from megatrain.plan.choice import Choice, Kept
from megatrain.plan.cost import compute_bytes, inside_bytes, kept_bytes, tile_of, working_bytes
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM, STAGING_BYTES, TIERS
from megatrain.plan.rows import Row, host_slot_bytes, update_slot_bytes
from megatrain.plan.schedule import MAX_DRAINS
from megatrain.plan.workload import Workload
from megatrain.spec.model import LayerSpec, ModelSpec

PROCESS_BYTES = int(1.7 * GB)
"""Host memory of Python, PyTorch and CUDA without a model: measured, 1.6 GiB."""
CONTEXT_BYTES = GIB // 2
"""Device memory of the CUDA context: measured."""

ROOM_SLACK = 0.01
"""Of the room for inputs and gradients, for what does not fit end to end: pages, and inputs freed in another
order than they came."""

INPUTS_ON_THEIR_WAY = 6
"""Layer inputs of a micro-batch that are on the device though their home is the host: brought back ahead of their use
(`transport/activations.py`), and on their way out."""

ROW_NAMES = ("weights", "low halves", "gradients", "moments", "activations", "buffers")
_PART_ROWS = {"weights": "weights", "low": "low halves", "moments": "moments"}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes by (tier, row) over the moments of a step: each visit of the forward, then each of the backward."""

    fixed: Mapping[tuple[str, str], int]
    moving: Mapping[tuple[str, str], Sequence[int]]

    def total(self, tier: str) -> list[int]:
        """Bytes of a tier at each moment."""
        base = sum(num_bytes for (of, _), num_bytes in self.fixed.items() if of == tier)
        curves = [curve for (of, _), curve in self.moving.items() if of == tier]
        return [base + sum(values) for values in zip(*curves, strict=True)] if curves else [base]

    def peak(self, tier: str) -> int:
        return max(self.total(tier))

    rooms: Mapping[str, int]
    """Bytes that inputs of layers and kept gradients share, by tier; part of the other two."""

    def rows(self) -> list[Row]:
        """What each tier holds at the moment of its peak. They add up to `peak`."""
        rows = []
        for tier in TIERS:
            total = self.total(tier)
            at = total.index(max(total))
            now = {name: num_bytes for (of, name), num_bytes in self.fixed.items() if of == tier}
            for (of, name), curve in self.moving.items():
                if of == tier:
                    now[name] = now.get(name, 0) + curve[at]
            rows += [Row(tier=tier, name=name, num_bytes=now[name]) for name in ROW_NAMES if now.get(name)]
        return rows


class _Activations(NamedTuple):
    """Bytes over the moments of a step."""

    inputs: list[int]
    """Of layers that wait for their backward, wherever they are."""
    insides: list[int]
    """Of layers that keep what they compute inside."""


class TimelineMaker:
    """The timelines of one model and workload, for any choice. What choices share is worked out once.

    Args:
        sizes: for each home its bytes by part.
        shares_device: gradients on the device share their room with inputs there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        sizes: list[dict[str, int]],
        *,
        keeps_gradients: bool,
        compiled: bool,
        shares_device: bool = True,
    ) -> None:
        self._spec, self._workload, self._sizes = spec, workload, sizes
        self._keeps_gradients, self._compiled = keeps_gradients, compiled
        self._sharing = (RAM, HBM_TIER) if shares_device else (RAM,)
        self._numels = [sum(field.numel for field in home.fields) for home in spec.homes]
        self._packets = [home.grad_dtype.itemsize * n for home, n in zip(spec.homes, self._numels, strict=True)]
        self._blocks = {layer.home for layer in spec.layers if layer.kind == "block"}
        self._curves: dict[tuple[int, Kept, int], _Activations] = {}
        self._known_insides: dict[Any, int] = {}
        self._last_beside: tuple[Any, Any, tuple[int, list[int], list[int]]] | None = None
        blocks = [layer for layer in spec.layers if layer.kind == "block"]
        self._num_blocks = len(blocks)
        self._may_keep_less = all(
            len(kept_bytes(spec, layer, workload.length, compiled=compiled)) > 1 for layer in blocks
        )
        self._waiting = self._gradient_moments()

    def input_bytes(self, choice: Choice) -> int:
        """Of all layers' inputs that wait for the backward, at most."""
        return max(self._activations(choice).inputs)

    def inside_bytes(self, choice: Choice) -> int:
        """Of what layers keep that they compute inside, at most."""
        return max(self._activations(choice).insides)

    def returning_bytes(self, choice: Choice) -> int:
        """Device memory of inputs on their way to the host or back, where not all stay: of a few micro-batches."""
        each = choice.rows * self._workload.length * self._spec.hidden_size * compute_bytes(self._spec)
        return min(self.input_bytes(choice), INPUTS_ON_THEIR_WAY * each)

    def activation_budget(self, choice: Choice, device_bytes: int) -> int | None:
        """The most inputs that may stay on the device beside everything else; None if not even none."""
        rest, gradients, working = self._beside(choice)
        inputs, insides = self._activations(choice)
        working = [at_work + inside for at_work, inside in zip(working, insides, strict=True)]
        if self._shares_device(gradients):
            # The room is there at every moment, whatever is in it.
            most = int((device_bytes - rest - max(working)) / (1 + ROOM_SLACK))
            rooms = [most - waiting for waiting in gradients]
        else:
            rooms = [
                device_bytes - rest - waiting - at_work for waiting, at_work in zip(gradients, working, strict=True)
            ]
        if min(rooms) < 0:
            return None
        if all(num_bytes <= room for room, num_bytes in zip(rooms, inputs, strict=True)):
            return self.input_bytes(choice)
        # What comes and goes takes room too, at every moment at which not all stay.
        returning = self.returning_bytes(choice)
        budget = min(
            room - returning for room, num_bytes in zip(rooms, inputs, strict=True) if num_bytes > room - returning
        )
        return budget if budget >= 0 else None

    def most_kept(self, choice: Choice, device_bytes: int) -> list[Kept]:
        """What blocks may keep of what they compute inside: in all, and as long as the inputs of the others stay on
        the device. Nothing where not even the rest fits.

        Compiled blocks first keep their input alone, as many as may, then of these as many as may their products, then
        all: by how much time a byte saves, which is 17, 3.6 and 0.2 in the figures of `plan/cost.py`.
        """
        budgets: dict[Kept, int | None] = {}

        def fits(kept: Kept, with_inputs: bool) -> bool:
            tried = dataclasses.replace(choice, kept=kept)
            if kept not in budgets:
                budgets[kept] = self.activation_budget(tried, device_bytes)
            budget = budgets[kept]
            return budget is not None and not (with_inputs and budget < self.input_bytes(tried))

        if not self._may_keep_less:
            most = _most(self._num_blocks, lambda n: fits(Kept(n), False))
            return [Kept(most), Kept(_most(most, lambda n: fits(Kept(n), True)))]
        inputs = _most(self._num_blocks, lambda n: fits(Kept(0, 0, n), False))
        products = _most(inputs, lambda n: fits(Kept(0, n, inputs - n), False))
        whole = _most(products, lambda n: fits(Kept(n, products - n, inputs - products), False))
        return [Kept(whole, products - whole, inputs - products)]

    def _beside(self, choice: Choice) -> tuple[int, list[int], list[int]]:
        """Device memory beside activations: what stays, gradients over time, layers at work over time."""
        # A search asks for one choice after the other that differ in what is kept alone.
        key = choice.rows, choice.group, choice.num_slots
        if self._last_beside is None or self._last_beside[0] != key or self._last_beside[1] is not choice.places:
            rest = sum(self._device_fixed(choice).values())
            beside = rest, self._gradient_curve(choice, HBM_TIER), self._working_curve(choice.rows)
            self._last_beside = key, choice.places, beside
        return self._last_beside[2]

    def timeline(self, choice: Choice) -> Timeline:
        fixed = self._device_fixed(choice)
        for place, sizes in zip(choice.places, self._sizes, strict=True):
            for part, row in _PART_ROWS.items():
                tier = place.tiers[part]
                if tier != HBM_TIER:
                    fixed[tier, row] = fixed.get((tier, row), 0) + sizes[part]
        fixed[RAM, "buffers"] = self._host_buffers(choice)
        budget = choice.activation_bytes
        inputs, insides = self._activations(choice)
        stay = [min(num_bytes, budget) for num_bytes in inputs]
        go = [num_bytes - kept for num_bytes, kept in zip(inputs, stay, strict=True)]
        returning = self.returning_bytes(choice)
        on_device = [
            kept + (returning if gone else 0) + inside + at_work
            for kept, gone, inside, at_work in zip(stay, go, insides, self._working_curve(choice.rows), strict=True)
        ]
        moving: dict[tuple[str, str], Sequence[int]] = {
            (HBM_TIER, "activations"): on_device,
            (RAM, "activations"): go,
        }
        for tier in TIERS if self._keeps_gradients else ():
            moving[tier, "gradients"] = self._gradient_curve(choice, tier)
        rooms = {}
        waiting = self._gradient_curve(choice, HBM_TIER)
        if self._shares_device(waiting):
            rooms[HBM_TIER] = _room(stay, waiting)
            # What is in it counts above.
            moving[HBM_TIER, "buffers"] = [rooms[HBM_TIER] - a - b for a, b in zip(stay, waiting, strict=True)]
        rooms[RAM] = _room(go, moving.get((RAM, "gradients")))
        moving[RAM, "buffers"] = [
            rooms[RAM] - a - b for a, b in zip(go, moving.get((RAM, "gradients"), [0] * len(go)), strict=True)
        ]
        return Timeline(fixed=fixed, moving=moving, rooms=rooms)

    def working_bytes(self, rows: int) -> int:
        """Device memory of the largest layer at work."""
        return max(self._working_curve(rows))

    def passed_on_bytes(self, choice: Choice) -> int:
        """What a layer passes to the next one lies on the device until that is visited, whether it is then copied or
        kept."""
        return self._layer_input_bytes(choice.group_tokens(self._workload))

    # What moves.

    def _layer_input_bytes(self, num_tokens: int) -> int:
        """Inputs of one layer, of the micro-batches that go together."""
        return num_tokens * self._spec.hidden_size * compute_bytes(self._spec)

    def _activations(self, choice: Choice) -> _Activations:
        num_tokens = choice.group_tokens(self._workload)
        key = num_tokens, choice.kept, choice.rows
        if key not in self._curves:
            self._curves[key] = self._activation_curves(num_tokens, choice.kept_layers(self._spec), choice.rows)
        return self._curves[key]

    def _activation_curves(self, num_tokens: int, kept: Mapping[int, str], rows: int) -> _Activations:
        inputs, insides = [], []
        for index, layer in enumerate(self._spec.layers):
            # Token ids are all that an embedding needs again; a layer that keeps its insides has its input among them.
            waits = layer.kind != "embedding" and index not in kept
            inputs.append(self._layer_input_bytes(num_tokens) if waits else 0)
            insides.append(self._inside_bytes(layer, kept[index], num_tokens, rows) if index in kept else 0)
        up = [list(itertools.accumulate(sizes)) for sizes in (inputs, insides)]
        return _Activations(*([*curve, *reversed(curve)] for curve in up))

    def _inside_bytes(self, layer: LayerSpec, keeps: str, num_tokens: int, rows: int) -> int:
        length = self._workload.length
        is_tiled = tile_of(self._spec, layer, rows, length) is not None
        key = layer.output_width, layer.attention, layer.kept, keeps, num_tokens, is_tiled
        if key not in self._known_insides:
            self._known_insides[key] = inside_bytes(
                self._spec, layer, keeps, num_tokens, length, compiled=self._compiled, is_tiled=is_tiled
            )
        return self._known_insides[key]

    def _gradient_moments(self) -> list[tuple[int, int]]:
        """For each home: until which moment of the forward its last gradients wait, from which of the backward on new
        ones do."""
        layers = self._spec.layers
        moments = []
        for index in range(len(self._spec.homes)):
            visits = [at for at, layer in enumerate(layers) if layer.home == index]
            first = visits[0] if visits else len(layers)
            kinds = {layers[at].kind for at in visits}
            # A head is backward in its forward's visit.
            over = first if kinds == {"head"} else 2 * len(layers) - 1 - first
            moments.append((first, over if visits else len(layers)))
        return moments

    def _gradient_curve(self, choice: Choice, tier: str) -> list[int]:
        """Of those that are kept."""
        num_moments = 2 * len(self._spec.layers)
        if not self._keeps_gradients:
            return [0] * num_moments
        steps = [0] * (num_moments + 1)
        for place, sizes, (until, since) in zip(choice.places, self._sizes, self._waiting, strict=True):
            if place.gradients != tier:
                continue
            steps[0] += sizes["gradients"]
            if tier in self._sharing:
                steps[until] -= sizes["gradients"]
                steps[since] += sizes["gradients"]
        return list(itertools.accumulate(steps))[:num_moments]

    def _working_curve(self, rows: int) -> list[int]:
        known: dict[object, int] = {}
        curve = []
        for layer in self._spec.layers:
            key = layer.kind, layer.output_width, layer.matrix_parameters, layer.attention, layer.may_tile, layer.kept
            if key not in known:
                known[key] = working_bytes(self._spec, layer, self._workload, rows, compiled=self._compiled)
            curve.append(known[key])
        kinds = [layer.kind for layer in self._spec.layers]
        # A forward without a graph holds a part of what the backward does; counted whole, to be sure. The logits of the
        # last micro-batch live on until the backward has begun.
        back = [0 if kind == "head" else num_bytes for num_bytes, kind in zip(curve, kinds, strict=True)]
        return [*curve, *reversed(back)]

    # What stays.

    def _shares_device(self, gradients: Sequence[int]) -> bool:
        """gradients: those on the device, over time."""
        return HBM_TIER in self._sharing and max(gradients) > 0

    def _device_fixed(self, choice: Choice) -> dict[tuple[str, str], int]:
        fixed = {(HBM_TIER, row): 0 for row in _PART_ROWS.values()}
        for place, sizes in zip(choice.places, self._sizes, strict=True):
            for part, row in _PART_ROWS.items():
                fixed[HBM_TIER, row] += sizes[part] * (place.tiers[part] == HBM_TIER)
        fixed[HBM_TIER, "buffers"] = self._device_buffers(choice) + self.passed_on_bytes(choice)
        return fixed

    def _device_buffers(self, choice: Choice) -> int:
        homes = self._spec.homes
        streamed = [index for index, place in enumerate(choice.places) if place.weights != HBM_TIER]
        block = max((self._sizes[i]["weights"] for i in streamed if i in self._blocks), default=0)
        largest = max((self._sizes[i]["weights"] for i in streamed if homes[i].layers), default=0)
        slots = choice.num_slots * block + (largest if largest > block else 0)
        layered = [index for index, home in enumerate(homes) if home.layers]
        # Where a step has several groups, sums stay until the last one.
        has_groups = len(choice.group_sizes(self._workload)) > 1
        sums = 4 * (sum(self._numels) if has_groups else max(self._numels[index] for index in layered))
        drains = sum(sorted((self._packets[index] for index in layered), reverse=True)[:MAX_DRAINS])
        resident = sum(self._sizes[index]["weights"] for index, home in enumerate(homes) if not home.layers)
        staging = 2 * STAGING_BYTES if any(place.is_staged for place in choice.places) else 0
        return slots + sums + drains + resident + staging + self._ring(choice, HBM_TIER) + CONTEXT_BYTES

    def _host_buffers(self, choice: Choice) -> int:
        on_disk = [s["weights"] for s, p in zip(self._sizes, choice.places, strict=True) if p.weights == DISK_TIER]
        slot_bytes = update_slot_bytes(zip(self._spec.homes, choice.places, self._sizes, strict=True))
        slots = host_slot_bytes(max(on_disk, default=0), slot_bytes)
        return PROCESS_BYTES + self._ring(choice, RAM) + slots

    def _ring(self, choice: Choice, tier: str) -> int:
        """Gradients on their way where none are kept."""
        if self._keeps_gradients:
            return 0
        sizes = [n for n, place in zip(self._packets, choice.places, strict=True) if place.gradients == tier]
        return (MAX_DRAINS + 1) * max(sizes, default=0)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where smaller ones do."""
    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _room(inputs: Sequence[int], gradients: Sequence[int] | None) -> int:
    return int((1 + ROOM_SLACK) * max(map(sum, zip(inputs, gradients or [0] * len(inputs), strict=True))))
