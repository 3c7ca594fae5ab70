"""Models that are not from transformers: whatever a block takes, returns, sets or changes, as in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from comparing import assert_equal, assert_same_accumulation, assert_same_step, gradients, stream, the_engine, zero_grad
from model_zoo import VOCAB, Block, Stack, make_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
LENGTHS = (7, 12, 9)


def blocks(count: int = 3, make: Callable[[int], nn.Module] = Block) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make(WIDTH) for _ in range(count)]


def in_turn(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h)
    return h


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch)["loss"] / len(LENGTHS)


def check(model: nn.Module, except_for: tuple[str, ...] = ()) -> None:
    """One batch, and layer-major accumulation, are bit-equal to plain PyTorch; so are the buffers afterwards."""
    plain, model = stream(model.train())
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch)["loss"])
        zero_grad(plain, model)
    batches = [make_batch(length, seed=length) for length in LENGTHS]
    assert_same_accumulation(plain, model, batches, loss_of, except_for=except_for)
    assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))


class Keywords(Block):
    """Takes keywords only and returns a dict."""

    def forward(self, *, x: torch.Tensor, shift: float, extra: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"out": super().forward(x + extra["bias"][0]) + shift, "shift": shift, "untouched": None}


def run_keywords(model: Stack, h: torch.Tensor) -> torch.Tensor:
    bias = h.mean(dim=-1, keepdim=True)
    for index, block in enumerate(model.blocks):
        result = block(x=h, shift=0.1 * index, extra={"bias": (bias, "label")})
        assert result["untouched"] is None and result["shift"] == 0.1 * index
        h = result["out"]
    return h


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Tuples(Block):
    def forward(self, pair: Pair) -> tuple[Pair, list[torch.Tensor]]:  # type: ignore[override]
        left = super().forward(pair.left + pair.right)
        return Pair(left, pair.right * 2), [left.sum(dim=-1, keepdim=True)]


def run_tuples(model: Stack, h: torch.Tensor) -> torch.Tensor:
    pair, total = Pair(h, h.flip(-1)), torch.zeros(())
    for block in model.blocks:
        pair, [summed] = block(pair)
        total = total + summed
    return pair.left + pair.right + total


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    memory: dict[str, torch.Tensor]
    penalty: torch.Tensor | None = None


class Stateful(Block):
    """Takes a dataclass and returns another one; changes the mapping in it."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden = super().forward(state.hidden + state.memory.get("last", 0.0))
        state.memory["last"] = torch.tanh(hidden)
        penalty = hidden.square().mean()
        return State(hidden, state.memory, penalty if state.penalty is None else state.penalty + penalty)


def run_stateful(model: Stack, h: torch.Tensor) -> torch.Tensor:
    memory: dict[str, torch.Tensor] = {}
    state = State(h, memory)
    for block in model.blocks:
        state = block(state)
        assert state.memory is memory and memory["last"].requires_grad
    return state.hidden + state.penalty


class Appending(Block):
    """Appends to a list that the model made."""

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        losses.append(x.square().mean() * 0.1)
        return x


def run_appending(model: Stack, h: torch.Tensor) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    for block in model.blocks:
        h = block(h, losses)
    assert len(losses) == len(model.blocks)
    return h + sum(losses)


class Setting(Block):
    """Sets an attribute that the model reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.loss = x.square().mean() * 0.1
        return x


def run_setting(model: Stack, h: torch.Tensor) -> torch.Tensor:
    h = in_turn(model, h)
    return h + sum(block.loss for block in model.blocks)


class Changing(Block):
    """Batch statistics, a buffer that is replaced at every call, and a count of calls that changes the result."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.zeros(width))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2) + self.mean
        self.mean = self.mean * 0.9 + x.detach().mean(dim=(0, 1)) * 0.1
        self.num_calls += 1
        return x * (1.0 + 0.01 * self.num_calls)


class Random(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training) + 0.1 * torch.rand(x.shape)


class Checkpointed(Block):
    """Recomputes a part of itself, and randomly so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.part, x, use_reentrant=False)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * Doubled.apply(x * self.scale)


def run_with_embedding(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h) + model.embed.weight.mean(dim=0)
    return h


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain blocks": lambda: Stack(blocks(), in_turn),
    "keywords and a dict": lambda: Stack(blocks(make=Keywords), run_keywords),
    "tuples": lambda: Stack(blocks(make=Tuples), run_tuples),
    "dataclasses": lambda: Stack(blocks(make=Stateful), run_stateful),
    "a list that is appended to": lambda: Stack(blocks(make=Appending), run_appending),
    "attributes": lambda: Stack(blocks(make=Setting), run_setting),
    "a weight of another layer": lambda: Stack(blocks(), run_with_embedding),
    "checkpointing inside": lambda: Stack(blocks(make=Checkpointed), in_turn),
    "an autograd function": lambda: Stack(blocks(make=OwnFunction), in_turn),
    "random": lambda: Stack(blocks(make=Random), in_turn),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_any_make(name: str) -> None:
    # Used several times a micro-batch: test_accumulate_rounding has a bound.
    check(MODELS[name](), except_for=("embed.weight",) if name == "a weight of another layer" else ())


def test_attributes_of_the_last_micro_batch_stay() -> None:
    plain, model = stream(Stack(blocks(make=Setting), run_setting))
    batches = [make_batch(length, seed=length) for length in LENGTHS]
    assert_same_accumulation(plain, model, batches, loss_of)
    for left, right in zip(plain.blocks, model.blocks, strict=True):
        assert torch.equal(left.loss, right.loss)


def test_a_block_changes_its_own_state_once_a_call() -> None:
    """Accumulation is left out: its micro-batches run last to first, which state carried between them notices."""
    plain, model = stream(Stack(blocks(make=Changing), in_turn))
    for seed in (1, 2, 3):
        batch = make_batch(seed=seed)
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch)["loss"])
        assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))
        zero_grad(plain, model)
    assert [block.num_calls for block in model.blocks] == [3, 3, 3]


class Nested(nn.Module):
    """Lists in lists, a Sequential of blocks, and weights that the top level uses directly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.groups = nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(2))
        self.tail = nn.Sequential(*blocks(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(input_ids) * self.gain
        for group in self.groups:
            for block in group:
                h = block(h)
        logits = (self.tail(h) * self.gain) @ self.embed.weight.T
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_nested_lists_and_weights_used_at_the_top() -> None:
    model = Nested()
    check(model, except_for=("embed.weight", "gain"))
    names = [layer.name for layer in the_engine(model).layers]
    assert names == ["embed", "groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1", "tail.0", "tail.1"]
    assert "unused" not in gradients(model)


class Sharing(Block):
    """Takes a weight as an argument."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + x @ weight


class SharingStack(Stack):
    def __init__(self) -> None:
        super().__init__(blocks(make=Sharing), lambda model, h: h)
        self.mixing = nn.Parameter(torch.eye(WIDTH))
        self._run = lambda model, h: model.run(h)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h, self.mixing)
        return h


def test_a_weight_as_an_argument_gets_its_gradient() -> None:
    check(SharingStack(), except_for=("mixing",))


def test_a_layer_may_be_called_twice_or_left_out() -> None:
    def run(model: Stack, h: torch.Tensor) -> torch.Tensor:
        for index in model.order:
            h = model.blocks[index](h)
        return h

    model = Stack(blocks(), run)
    model.order = [0, 1, 0, 2, 0]
    plain, model = stream(model)
    for order in ([0, 1, 0, 2, 0], [2, 0], [0, 1, 2], [1, 1]):
        plain.order = model.order = order
        batch = make_batch(seed=len(order))
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch)["loss"])
        zero_grad(plain, model)


class Experts(Block):
    """Each token goes to one of four experts; which get none depends on the batch."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = super().forward(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero(as_tuple=True)
            if len(rows[0]):
                out = out.index_put(rows, expert(x[rows]), accumulate=True)
        return out


def test_an_expert_without_a_token_gets_no_gradient() -> None:
    def run(model: Stack, h: torch.Tensor) -> torch.Tensor:
        choice = torch.zeros(h.shape[:2], dtype=torch.long)
        choice[:, ::2] = model.choice
        for block in model.blocks:
            h = block(h, choice)
        return h

    model = Stack(blocks(make=Experts), run)
    plain, model = stream(model)
    for choice in (2, 0, 3):
        plain.choice = model.choice = choice
        assert_same_step(plain, model, lambda each: each(**make_batch())["loss"])
        assert "blocks.1.experts.1.weight" not in gradients(model)
        assert f"blocks.1.experts.{choice}.weight" in gradients(model)
        zero_grad(plain, model)


def test_autocast_around_the_forward() -> None:
    plain, model = stream(Stack(blocks(), in_turn))

    def run(each: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = each(**make_batch())
        assert outputs["logits"].dtype == torch.bfloat16
        return outputs["loss"]

    assert_same_step(plain, model, run)


def test_the_caller_may_ask_for_the_gradient_of_a_hidden_state() -> None:
    """Of a tensor that several layers use, too: nothing is cut off from the graph that the model sees."""
    plain, model = stream(Stack(blocks(make=Keywords), run_keywords))
    found = []
    for each in (plain, model):
        hidden: list[torch.Tensor] = []
        each.embed.register_forward_hook(lambda module, args, output, hidden=hidden: hidden.append(output))
        loss = each(**make_batch())["loss"]
        hidden[0].retain_grad()
        loss.backward()
        found.append(hidden[0].grad)
    # Its two uses outside of blocks are added to those inside in another order: one rounding each.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=4 * 2.0**-24 * found[0].abs().max().item())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_computes_padded_places_like_others() -> None:
    """Evaluated with a padding mask, a plain one packs its batch and leaves zeros there."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    plain, model = stream(nn.TransformerEncoder(layer, 3).eval())
    x, mask = torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        out, packed = (each(x, src_key_padding_mask=mask) for each in (model, plain))
        torch.testing.assert_close(out[~mask], packed[~mask])
        assert out[mask].all() and not packed[mask].any()
        plain.use_nested_tensor = False
        assert torch.equal(out, plain(x, src_key_padding_mask=mask))
