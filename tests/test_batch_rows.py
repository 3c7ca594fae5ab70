"""Rows of batches, cut and joined: each once, in a stated order, and nothing joined that does not belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_helpers import batches

from megatrain.batch_rows import cut, grouped, join, joint_key, num_tokens


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()), max_size=40), st.integers(1, 60))
def test_groups_hold_each_micro_batch_once_in_order(shapes: list[tuple[int, int, bool]], most: int) -> None:
    """Of (rows, length, whether it may be joined at all) each."""
    keys = [length if may else None for _, length, may in shapes]
    sizes = [rows * length for rows, length, _ in shapes]
    groups = grouped(keys, sizes, most)
    assert sorted(number for group in groups for number in group) == list(range(len(shapes)))
    assert groups == sorted(groups) and all(list(group) == sorted(group) for group in groups)
    for group in groups:
        assert len(group) == 1 or {keys[number] for number in group} == {keys[group[0]]} != {None}
        assert len(group) == 1 or sum(sizes[number] for number in group) <= most
    for key in {*keys} - {None}:
        of_key = [group for group in groups if keys[group[0]] == key]
        counts = [len(group) for group in of_key]
        assert max(counts) - min(counts) <= 1
        # No fewer groups would do, were all as large as the largest.
        most_together = max(1, most // max(sizes[number] for group in of_key for number in group))
        assert len(of_key) == -(-sum(counts) // most_together)
        in_order = [number for group in of_key for number in group]
        assert in_order == sorted(in_order)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 7))
def test_what_is_joined_is_cut_into_the_same_rows(rows: list[int], most_rows: int) -> None:
    many = batches(*((count, 4) for count in rows))
    for batch in many:
        batch |= {"use_cache": False, "position_ids": None}
    joined = join(many)
    parts = list(cut(joined, most_rows))
    assert all(len(part["input_ids"]) <= most_rows for part in parts)
    for name in ("input_ids", "labels", "attention_mask"):
        expected = torch.cat([batch[name] for batch in many])
        assert torch.equal(joined[name], expected)
        assert torch.equal(torch.cat([part[name] for part in parts]), expected)
    assert joined["use_cache"] is False and joined["position_ids"] is None
    assert num_tokens(joined) == sum(map(num_tokens, many))


def test_masks_by_kind_are_joined_too() -> None:
    many = batches((2, 4), (1, 4))
    for batch in many:
        mask = torch.rand(len(batch["input_ids"]), 1, 4, 4)
        batch["attention_mask"] = {"full_attention": mask, "sliding_attention": mask > 0.5}
    assert joint_key(many[0], joins_positions=True) == joint_key(many[1], joins_positions=True)
    joined = join(many)["attention_mask"]
    assert joined["full_attention"].shape == (3, 1, 4, 4)
    assert torch.equal(joined["sliding_attention"][2:], many[1]["attention_mask"]["sliding_attention"])


IDS = torch.arange(8).view(2, 4)
LIKE = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": IDS[:, :3], "labels": IDS[:, :3]},
        {"attention_mask": torch.ones(2, 4)},
        {"attention_mask": None},
        {"use_cache": False},
        {"token_type_ids": IDS},
    ],
    ids=["length", "dtype", "no mask", "a setting", "an entry"],
)
def test_other_batches_have_another_key(change: dict[str, Any]) -> None:
    keys = [joint_key(batch, joins_positions=True) for batch in (LIKE, LIKE | change)]
    assert None not in keys and keys[0] != keys[1]


@pytest.mark.parametrize(
    "change",
    [
        {"pixel_values": IDS},
        {"cu_seq_lens_q": torch.tensor([0, 4, 8])},
        {"labels": None},
        {"input_ids": IDS[0]},
        {"position_ids": torch.arange(4)[None]},
        {"use_cache": "perhaps"},
        {"output_router_logits": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_known_is_joined_with_nothing(change: dict[str, Any]) -> None:
    assert joint_key(LIKE | change, joins_positions=True) is None


def test_positions_are_joined_where_kernels_look_at_them_in_every_batch() -> None:
    batch = LIKE | {"position_ids": IDS}
    assert joint_key(batch, joins_positions=True) is not None
    assert joint_key(batch, joins_positions=False) is None
    assert joint_key(LIKE | {"position_ids": None}, joins_positions=False) is not None


@pytest.mark.parametrize(
    ("longer", "tokens"),
    [
        ({"labels": torch.zeros(2, 200)}, 400),
        ({"decoder_input_ids": torch.zeros(2, 50)}, 100),
        ({"inputs_embeds": torch.zeros(2, 30, 8), "input_ids": None}, 60),
        ({"labels": torch.zeros(2)}, 8),
    ],
)
def test_tokens_are_those_of_the_longer_of_inputs_and_targets(longer: dict[str, Any], tokens: int) -> None:
    assert num_tokens(LIKE | longer) == tokens
