"""Where layer-major accumulation adds in another order than plain accumulation, it is equal within derived bounds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comparing import accumulate_plainly, assert_same_accumulation, gradients, stream, the_engine, zero_grad
from model_zoo import make_batch, make_model
from torch import nn

LENGTHS = (7, 12, 9)
ULP = 2.0**-23


def batches() -> list[dict[str, torch.Tensor]]:
    return [make_batch(length, seed=length) for length in LENGTHS]


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(**batch).loss / len(LENGTHS)


def reordering_bounds(plain: nn.Module, apart: nn.Module, parts: Mapping[str, list[str]]) -> dict[str, torch.Tensor]:
    """How far sums of the same terms in two orders may be apart, for every element.

    A sum of K fp32 terms is off by at most (K - 1) * 2^-24 * sum |term|, whatever its order (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2, first order); two sums differ by at most twice that.

    Args:
        apart: computes what `plain` does with a parameter of its own for each use.
        parts: name in `plain` -> names of its uses in `apart`.
    """
    total: dict[str, torch.Tensor] = {}
    for batch in batches():
        zero_grad(apart)
        loss_of(apart, batch).backward()
        terms = gradients(apart)
        for name, uses in parts.items():
            total[name] = total.get(name, 0) + sum(terms[use].abs() for use in uses if use in terms)
    return {name: (len(parts[name]) * len(LENGTHS) - 1) * ULP * total[name] for name in parts}


def check_within(plain: nn.Module, model: nn.Module, bounds: Mapping[str, torch.Tensor]) -> None:
    assert_same_accumulation(plain, model, batches(), loss_of, except_for=list(bounds))
    left, right = gradients(plain), gradients(model)
    for name, bound in bounds.items():
        assert ((left[name] - right[name]).abs() <= bound).all(), name


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5", "bert"])
def test_tied_embeddings_are_equal_to_rounding(name: str) -> None:
    """The embedding's part and the head's are added for all micro-batches each, not for each micro-batch."""
    plain, model = stream(make_model(name, tie_word_embeddings=True))
    apart = copy.deepcopy(plain)
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for owner_name, owner in apart.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, attribute, f"{owner_name}.{attribute}"))
    parts = {}
    for tied in places.values():
        if len(tied) > 1:
            parts[tied[0][2]] = [place for _, _, place in tied]
            for owner, attribute, _ in tied:
                owner._parameters[attribute] = nn.Parameter(owner._parameters[attribute].detach().clone())
    assert parts
    check_within(plain, model, reordering_bounds(plain, apart, parts))


def test_a_layer_called_several_times_is_equal_to_rounding() -> None:
    """ALBERT with two groups over four layers, beside one with a group for each layer."""
    plain, model = stream(make_model("albert", tie_word_embeddings=False))
    apart = make_model("albert", tie_word_embeddings=False, num_hidden_groups=4)
    prefix = "albert.encoder.albert_layer_groups."
    state = plain.state_dict()
    for name in apart.state_dict():
        if name.startswith(prefix):
            index, rest = name.removeprefix(prefix).split(".", 1)
            state[name] = plain.state_dict()[f"{prefix}{int(index) // 2}.{rest}"]
    apart.load_state_dict(state)
    parts = {}
    for name, _ in plain.named_parameters():
        if name.startswith(prefix):
            index, rest = name.removeprefix(prefix).split(".", 1)
            parts[name] = [f"{prefix}{2 * int(index) + call}.{rest}" for call in (0, 1)]
    check_within(plain, model, reordering_bounds(plain, apart, parts))


def test_a_loss_on_hidden_states() -> None:
    """As without accumulation (test_exactness), a state's use in the loss is added in another order."""
    plain, model = stream(make_model("llama"))

    def loss_on_states(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        outputs = each(**batch, output_hidden_states=True)
        return outputs.loss + sum(state.square().mean() for state in outputs.hidden_states)

    expected = accumulate_plainly(plain, batches(), loss_on_states)
    losses = the_engine(model).accumulate([lambda batch=batch: loss_on_states(model, batch) for batch in batches()])
    assert all(map(torch.equal, expected, losses))
    left, right = gradients(plain), gradients(model)
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(right[name], gradient, rtol=0, atol=64 * 2.0**-24 * largest)
