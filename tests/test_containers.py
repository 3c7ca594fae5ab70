"""Arguments and results of layers, taken apart and put together again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from megatrain.execute.containers import Filling, Taker, contents, is_same

Point = namedtuple("Point", "x y")
A, B = torch.ones(2), torch.zeros(3)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    note: str = "note"


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class Holder:
    """An object of no known kind."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Doubling(dict):
    """A dict that does more than store."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, (value, value))


def put_together(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """(a copy with other tensors in the places of the old ones, the old ones)."""
    taker = Taker()
    pattern = taker.take(value)
    return Filling([tensor + 1 for tensor in taker.tensors]).fill(pattern), taker.tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, 1],
        lambda x: (x, None),
        lambda x: Point(x, "y"),
        lambda x: {"a": x, 3: "b"},
        lambda x: OrderedDict(z=x, a=2),
        lambda x: defaultdict(list, a=x),
        lambda x: UserDict(a=x),
        lambda x: Frozen(x),
        lambda x: Slotted(x),
        lambda x: Holder(x),
        lambda x: BaseModelOutput(last_hidden_state=x),
        lambda x: torch.max(x.view(1, -1), dim=0),
        lambda x: [{"deep": (Frozen([x]),)}],
    ],
)
def test_every_container_is_rebuilt_with_its_class(make: Any) -> None:
    value = make(A)
    copy, tensors = put_together(value)
    assert type(copy) is type(value) and copy is not value
    assert len(tensors) >= 1
    again, found = put_together(copy)
    assert len(found) == len(tensors)
    assert all(torch.equal(new, old + 1) for new, old in zip(found, tensors, strict=True))
    assert type(again) is type(value)


def test_what_holds_no_tensor_is_left_alone() -> None:
    for value in (1, "text", None, torch.float32, torch.Size([2]), nn.Linear(1, 1), Holder(1), (1, (2, "x")), len):
        copy, tensors = put_together(value)
        assert copy is value and tensors == []


def test_mutable_containers_are_copied_even_when_they_hold_no_tensor() -> None:
    """A layer may put one into them."""
    for value in ([], {}, UserDict(), Slotted(None), DynamicCache()):
        copy, _ = put_together(value)
        assert copy is not value and type(copy) is type(value)


def test_the_same_object_stays_one_object() -> None:
    shared = [A]
    copy, tensors = put_together({"one": shared, "two": (shared, A)})
    assert len(tensors) == 1
    assert copy["one"] is copy["two"][0] and copy["one"][0] is copy["two"][1]


def test_a_container_that_holds_itself() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    copy, _ = put_together(loop)
    assert copy[1] is copy and copy is not loop


def test_subclasses_are_filled_without_their_own_methods() -> None:
    value = Doubling()
    dict.__setitem__(value, "a", A)
    copy, tensors = put_together(value)
    assert len(tensors) == 1 and isinstance(copy["a"], torch.Tensor)


def test_model_outputs_keep_items_and_attributes_together() -> None:
    copy, _ = put_together(BaseModelOutput(last_hidden_state=A))
    assert copy.last_hidden_state is copy["last_hidden_state"] is copy[0]
    assert copy.hidden_states is None


def test_a_cache_is_copied_with_its_layers() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    taker = Taker()
    pattern = taker.take(cache)
    copy = Filling(taker.tensors).fill(pattern)
    copy.update(torch.ones(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    assert (copy.get_seq_length(), cache.get_seq_length()) == (5, 2)


def test_changes_are_seen_by_identity_and_written_back() -> None:
    live = {"kept": A, "list": [B]}
    before = contents(live)
    assert is_same(before, contents(live))
    live["kept"] = A.clone()
    assert not is_same(before, contents(live))
    live["kept"] = A
    live["more"] = 1
    assert not is_same(before, contents(live))
    taker = Taker()
    taker.keep(live["list"], "the caller's own")
    patterns = taker.take_contents(live)
    target: dict[str, Any] = {"old": 0}
    Filling(taker.tensors).write(target, patterns)
    assert target == {"kept": A, "list": "the caller's own", "more": 1}
