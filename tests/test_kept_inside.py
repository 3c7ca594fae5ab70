"""What a spec says that blocks keep inside, counted without numbers, against what the engine keeps on a CPU."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from comparing import stream, the_engine
from model_zoo import CONFIGS, Block, Stack, make_batch, make_model
from torch import nn

from megatrain.plan.cost import KEPT_PER_HIDDEN, KEPT_PER_OUTPUT, activation_bytes, inside_bytes
from megatrain.run_plan import spec_of
from megatrain.spec.homes import Formats
from megatrain.spec.kept import SavedTensors
from megatrain.spec.model import LayerSpec, ModelSpec

ROWS, LENGTH = 2, 48
FORMATS = {
    torch.float32: Formats(precision="fp32", master="fp32"),
    torch.bfloat16: Formats(precision="bf16", master="split"),
}
EXACT = {"llama", "qwen2", "qwen3", "mistral", "phi3"}
"""The others: casts of a norm's weights or counts of experts' tokens, which do not grow with tokens, weigh most in rows
this short; and norms with a bias keep bf16 numbers of a token on a CPU and fp32 ones on the meta device as on a GPU."""


def make(name: str, **changes: Any) -> Any:
    if name != "phi3":
        return make_model(name, **changes)
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**CONFIGS["llama"][1], **changes)).train()


def described(model: nn.Module, dtype: torch.dtype = torch.float32) -> ModelSpec:
    return spec_of(model, FORMATS[dtype])


def blocks_of(spec: ModelSpec) -> list[LayerSpec]:
    return [layer for layer in spec.layers if layer.kind == "block"]


def predicted_bytes(spec: ModelSpec, length: int = LENGTH) -> int:
    """Of all blocks that are known, for a batch."""
    return round(sum(ROWS * length * layer.kept.per_token(length) for layer in blocks_of(spec) if layer.kept))


def kept_bytes(model: nn.Module, length: int = LENGTH) -> int:
    """By the engine, of all blocks for one batch. Streams the model."""
    names = [layer.name for layer in blocks_of(described(model))]
    _, streamed = stream(model, kept_layers=dict.fromkeys(names, "all"))
    for _ in range(2):  # in the first, one of each kind is tried, and the last is not known
        output = streamed(**make_batch(length, ROWS))
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
    store = the_engine(streamed).insides
    assert store.num_kept >= len(names)
    return store.most_kept_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "qwen3_moe",
     "gpt_oss"],
)  # fmt: skip
def test_what_blocks_keep_is_known_before_they_run(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype)
    spec = described(model, dtype)
    assert all(layer.kept is not None for layer in blocks_of(spec))
    assert predicted_bytes(spec) == pytest.approx(kept_bytes(model), rel=0 if name in EXACT else 0.015)


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_streamed_model_is_described_as_it_was_before(name: str, is_patched: bool) -> None:
    def made() -> nn.Module:
        model = make(name)
        for module in model.modules() if is_patched else ():
            if type(module).__name__.endswith(("DecoderLayer", "Block")):
                module.forward = module.forward
        return model

    _, streamed = stream(made())
    kept = [layer.kept for layer in blocks_of(described(streamed))]
    assert None not in kept and kept == [layer.kept for layer in blocks_of(described(made()))]
    streamed(**make_batch()).loss.backward()


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_scores_grow_with_the_square_of_the_length(name: str, length: int) -> None:
    model = make(name, attn_implementation="eager")
    spec = described(model)
    assert predicted_bytes(spec, length) == kept_bytes(model, length)
    assert min(layer.kept.a_pair for layer in blocks_of(spec)) >= 4 * 4, "of 4 heads"


@pytest.mark.parametrize("length", [15, 16, 17, 60])
def test_rows_that_reach_a_window_take_a_mask(length: int) -> None:
    """And with it, each head its own copy of keys and values."""
    model = make("gemma3_text", sliding_window=16)
    spec = described(model)
    masked, plain, _ = blocks_of(spec)
    assert plain.kept.long_rows is None and plain.kept.a_pair == 0
    assert masked.kept.long_rows[1].a_pair == 4, "fp32, for all heads"
    assert predicted_bytes(spec, length) == pytest.approx(kept_bytes(model, length), rel=0.015)


def test_what_is_frozen_keeps_less() -> None:
    full = predicted_bytes(described(make("llama")))
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "layers.2" in name)
    spec = described(model)
    kept = [layer.kept.a_token for layer in blocks_of(spec)]
    assert kept[0] < kept[1] < kept[2], "no gradient goes to the first one's input"
    assert predicted_bytes(spec) == kept_bytes(model) < full


def test_checkpoints_of_the_models_own_are_left_out_as_in_a_run() -> None:
    model = make("llama")
    plain = predicted_bytes(described(model))
    model.gradient_checkpointing_enable()
    assert predicted_bytes(described(model)) == plain
    assert model.is_gradient_checkpointing


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def make_stack(make_block: Any = Block, num_blocks: int = 3) -> Stack:
    def run(stack: Stack, x: torch.Tensor) -> torch.Tensor:
        for block in stack.blocks:
            x = block(x)
        return x

    torch.manual_seed(0)
    return Stack([make_block(16) for _ in range(num_blocks)], run)


def test_models_of_ones_own_are_counted_too() -> None:
    model = make_stack()
    assert predicted_bytes(described(model), 11) == kept_bytes(model, 11)


def test_dropout_keeps_a_byte_a_number_as_on_a_gpu() -> None:
    """In evaluation, too, a model is described as it trains."""
    plain, dropping = (blocks_of(described(make_stack(kind).eval()))[0].kept.a_token for kind in (Block, Dropping))
    assert dropping == plain + 16


class Routing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(-1) > 0).nonzero()
        return x.index_put((chosen[:, 0], chosen[:, 1]), super().forward(x)[chosen[:, 0], chosen[:, 1]])


def test_what_needs_numbers_is_worked_out_from_widths() -> None:
    model = make_stack(Routing)
    spec = described(model)
    layer = blocks_of(spec)[0]
    assert layer.kept is None
    numbers = KEPT_PER_OUTPUT * layer.output_width + KEPT_PER_HIDDEN * spec.hidden_size
    assert activation_bytes(spec, layer, LENGTH, compiled=False) == 4 * numbers
    assert kept_bytes(model) > 0


class TokenByToken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1] * 100):
            x = x + 1
        return super().forward(x)


def test_a_mixer_that_goes_token_by_token_is_left_at_that() -> None:
    assert blocks_of(described(make_stack(TokenByToken)))[0].kept is None


def test_blocks_that_are_built_alike_run_once_a_length() -> None:
    calls: Counter[str] = Counter()

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[x.device.type] += 1
            return super().forward(x)

    model = make_stack(Counting, num_blocks=12)
    first = described(model)
    assert calls == {"meta": 3}
    assert [layer.kept for layer in described(model).layers] == [layer.kept for layer in first.layers]
    assert calls == {"meta": 3}, "a model is counted once"
    described(model, torch.bfloat16)
    assert calls == {"meta": 6}
    model.blocks[7].norm.eps = 1e-3
    model.blocks[9].scale.requires_grad_(False)
    described(model)
    assert calls == {"meta": 15}, "two others, and the one that follows the frozen is not another"


class Changing(Block):
    """Its forward sets attributes, draws, and counts calls in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last, self.drawn = x, random.random() + torch.rand(()).item()
        return super().forward(x)


def test_a_model_is_as_it_was() -> None:
    model = make_stack(Changing).eval()
    hooked: list[nn.Module] = []
    model.blocks[0].register_forward_hook(lambda module, *_: hooked.append(module))
    model.blocks[1].forward = model.blocks[1].forward  # somebody's patch
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    assert blocks_of(described(model))[0].kept is not None
    for module, attributes, parameters, buffers in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert all(module._parameters[name] is value for name, value in parameters.items())
        assert all(module._buffers[name] is value for name, value in buffers.items())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert not hooked
    model(**make_batch())
    assert hooked == [model.blocks[0]]


def test_what_autograd_has_let_go_of_is_not_kept() -> None:
    x = torch.ones(1000, requires_grad=True)
    saved = SavedTensors([x])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        (x * 2).exp()  # a branch that leads nowhere
        kept = (x * 3).exp()
        twice = kept * x
    assert saved.num_bytes() == kept.nbytes and twice.requires_grad


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3"])
def test_all_that_was_planned_to_be_kept_is(name: str) -> None:
    """What is planned is a bound: had it been too little, the last to ask would be computed again."""
    model = make(name)
    spec = described(model)
    planned = {
        layer.name: inside_bytes(spec, layer, "all", ROWS * LENGTH, LENGTH, compiled=False) for layer in blocks_of(spec)
    }
    _, streamed = stream(model, kept_layers=dict.fromkeys(planned, "all"), kept_bytes=sum(planned.values()))
    for _ in range(2):
        streamed(**make_batch(LENGTH, ROWS)).loss.backward()
    store = the_engine(streamed).insides
    assert store.num_kept == 2 * len(planned)
    assert store.most_kept_bytes == pytest.approx(sum(planned.values()), rel=0.04)
