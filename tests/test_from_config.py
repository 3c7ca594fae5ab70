"""mt.from_config: the initialisation of the architecture, a layer at a time."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, closed_later
from model_zoo import ARCHITECTURES, make_batch, make_model
from torch import nn
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

import megatrain as mt
from megatrain.load.initial import Initialiser
from megatrain.load.units import names_of, parameters_on_meta

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip


def build(config: Any, **keywords: Any) -> Any:
    return closed_later(mt.from_config(config, **keywords))


def state_of(*arguments: Any, **keywords: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in build(*arguments, **keywords).state_dict().items()}


def assert_like_initialised(plain: nn.Module, streamed: Any) -> None:
    """Constants and buffers to the bit; what is random with the same spread, class by class."""
    expected, state = plain.state_dict(), streamed.state_dict()
    assert expected.keys() == state.keys()
    assert_equal(dict(plain.named_buffers()), dict(streamed.named_buffers()))
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in streamed.named_parameters()]
    classes: dict[str, list[list[torch.Tensor]]] = {}
    for name in expected:
        values = expected[name].float().flatten(), state[name].float().flatten()
        if values[0].numel() > 0 and (values[0] == values[0][0]).all():
            assert torch.equal(*values), name
        pair = classes.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), [[], []])
        for one, value in zip(pair, values, strict=True):
            one.append(value)
    for name, (old, new) in classes.items():
        spreads, count = [torch.cat(values).std().item() for values in (old, new)], torch.cat(old).numel()
        if count > 100 and spreads[0] > 0:
            assert spreads[1] == pytest.approx(spreads[0], rel=5 / count**0.5), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_distribution_of_transformers(name: str) -> None:
    model_class, config = type(make_model(name)), make_model(name).config
    streamed = build(config, model_class=model_class)
    plain = model_class(config)
    assert_like_initialised(plain, streamed)
    assert streamed.training
    assert str(plain.config) == str(streamed.config)


def test_dtype_path_and_first_use(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    model = build(tmp_path, dtype="bfloat16", attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model.state_dict(), state_of(config, dtype=torch.bfloat16))
    losses = mt.accumulate(model, [make_batch()])
    assert losses[0].item() == pytest.approx(torch.tensor(300.0).log().item(), rel=0.05)
    assert config.dtype is None


def test_values_depend_on_the_seed_alone() -> None:
    config = LlamaConfig(**WIDE)
    before = torch.get_rng_state()
    state = state_of(config)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(77)
    torch.set_num_threads(2)
    try:
        assert_equal(state, state_of(config, seed=0))
    finally:
        torch.set_num_threads(1)
    other = state_of(config, seed=1)
    matrices = [name for name, value in state.items() if value.dim() > 1]
    assert all(not torch.equal(state[name], other[name]) for name in matrices)
    # No two parameters share their numbers.
    firsts = [tuple(state[name].flatten()[:4].tolist()) for name in matrices]
    assert len(set(firsts)) == len(firsts)


def test_values_do_not_depend_on_the_order_of_layers() -> None:
    def source() -> Initialiser:
        with parameters_on_meta():
            model = type(make_model("qwen3_next"))(make_model("qwen3_next").config)
        return Initialiser(model, set(names_of(model)), 0)

    one, other = source(), source()
    units = sorted({one.unit_of(name) for name in names_of(one._model)})
    assert len(units) > 3
    values = {unit: one.make(unit) for unit in units}
    random.Random(0).shuffle(units)
    for unit in units:
        assert_equal(values[unit], other.make(unit))


# Parameters that _init_weights leaves alone, and models that write through `.data`


class OddConfig(PreTrainedConfig):
    model_type = "odd"


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.full((16,), 0.5))
        self.ramp = nn.Parameter(torch.linspace(0.0, 1.0, 16))
        self.noise = nn.Parameter(torch.randn(64, 16) * 3)
        self.scaled = nn.Parameter(torch.ones(16))
        self.mixed = nn.PReLU()
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.3)
            module.bias.data.zero_()
        elif isinstance(module, OddBlock):
            module.scaled.data.mul_(2.0)
            module.linear.weight.data.div_(3.0)


def test_what_the_architecture_leaves_alone_comes_from_its_constructors() -> None:
    streamed = build(OddConfig(), model_class=OddModel)
    assert_like_initialised(OddModel(OddConfig()), streamed)
    state = streamed.state_dict()
    assert state["blocks.0.linear.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    assert state["blocks.0.noise"].std().item() == pytest.approx(3, rel=0.2)
    assert not torch.equal(state["blocks.0.noise"], state["blocks.1.noise"])
    assert_equal(state, state_of(OddConfig(), model_class=OddModel))


class EmptyBlock(OddBlock):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.full((4,), torch.nan))


def test_a_parameter_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OddBlock", EmptyBlock)
    with pytest.raises(mt.UserError, match="OddModel: neither.*gives blocks.0.noise a value"):
        mt.from_config(OddConfig(), model_class=OddModel)


@pytest.mark.parametrize(
    ("config", "keywords", "message"),
    [
        ("no/such/place/at-all", {}, "no/such/place/at-all: there is no such folder"),
        (LlamaConfig(**WIDE), {"seed": "0"}, "seed='0' must be a whole number"),
        (LlamaConfig(**WIDE), {"no_such_argument": 1}, "config of a LlamaConfig.*no_such_argument"),
        (AutoConfig.for_model("vit"), {}, "cannot be loaded.*ViTConfig"),
        (LlamaConfig(**WIDE | {"num_hidden_layers": 0}), {}, "no repeated blocks"),
    ],
)
def test_refusals(config: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(mt.UserError, match=message):
        mt.from_config(config, **keywords)
