"""Muon: the definition on a plain model, bit for bit, in every format and place; torch.optim.Muon within rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparing import the_engine
from model_zoo import make_batch, make_model
from torch import nn
from update_cases import make_segment, tensors
from update_training import MAX_NORM, assert_same, batches, result, start, train

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.report import layer_report
from megatrain.optim import definition, formula, muon, rules
from megatrain.optim.muon import Muon
from megatrain.optim.orthogonal import orthogonalise
from megatrain.optim.segment import Segment
from megatrain.spec.formats import BLOCK
from megatrain.store.masters import split_

RACES = {"poison": True, "lane_delay_seconds": 0.002}
PLACES = {"model.embed_tokens": "hbm", "model.layers.0": "hbm", "model.layers.1": "stream"}
NUMBERS = {"adamw_lr": 3e-3, "adamw_weight_decay": 0.05}


def start_muon(options: StreamOptions | None = None, numbers: dict | None = None, **settings: Any) -> tuple[Any, Muon]:
    return start(options, Muon, {**NUMBERS, **(numbers or {})}, **settings)


def hidden_names(optimizer: Muon) -> set[str]:
    groups = [group for group in optimizer.param_groups if group["use_muon"]]
    return {parameter._field.name for group in groups for parameter in group["params"]}


# --- which parameters are Muon's ---


def test_matrices_of_blocks_are_muons_and_all_else_is_adamws() -> None:
    model, optimizer = start_muon()
    in_blocks = {name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2}
    assert hidden_names(optimizer) == in_blocks
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    assert {len(of) for of in optimizer.state.values()} == {2, 3}  # a step, and one or two moments


class Odd(nn.Module):
    """A block with weights of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.positions = nn.Embedding(4, 6)
        self.slid = nn.Conv1d(6, 6, 3, groups=6)
        self.gate = nn.Linear(6, 1)
        self.mixed = nn.Parameter(torch.ones(1, 1, 6))
        self.experts = nn.Parameter(torch.ones(3, 6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mixed


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.between = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)
        self.blocks[0].linear.weight = self.between.weight  # shared with a layer outside


def test_what_is_no_hidden_matrix_is_adamws() -> None:
    model = stream(OddModel())
    assert hidden_names(Muon(model)) == {"blocks.0.experts", "blocks.1.linear.weight", "blocks.1.experts"}


def test_a_group_may_say_whose_it_is() -> None:
    model = stream(OddModel())
    embedding = model.embedding.weight
    rest = [parameter for parameter in model.parameters() if parameter is not embedding]
    groups = [{"params": [embedding], "use_muon": True}, {"params": rest, "weight_decay": 0.0, "lr": 0.5}]
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.2)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, True, False]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]
    named = Muon([{"params": list(model.named_parameters()), "use_muon": False}])
    assert not hidden_names(named)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients=.*three numbers"),
        ({"ns_steps": 100}, "ns_steps=100.*0 to 99"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"adjust_lr_fn": "fast"}, "adjust_lr_fn='fast'.*match_rms_adamw"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"adamw_betas": (0.9,)}, "betas="),
        ({"fused": True}, "fused=True.*refused"),
    ],
)
def test_bad_numbers_are_named(numbers: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start_muon(numbers=numbers)


def test_a_vector_is_refused_with_the_remedy() -> None:
    model = stream(OddModel())
    with pytest.raises(UserError, match=r"head.bias of shape \(9,\) is no matrix.*use_muon=False"):
        Muon([{"params": [model.head.bias], "use_muon": True}])


# --- the orthogonalisation ---


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    """Jordan et al. (2024): within [0.7, 1.2] for values that begin above 0.01 or so; bf16 adds some per cent."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix = left @ torch.diag(torch.linspace(0.1, 1, min(shape))) @ right
    result = orthogonalise(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert result.dtype == torch.bfloat16
    assert result.shape == shape
    values = torch.linalg.svdvals(result.float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    # Along the same singular vectors.
    turned = left.T @ result.float() @ right.T
    assert (turned - torch.diag(turned.diag())).abs().max() < 0.05


def test_zeros_stay_zero() -> None:
    assert not orthogonalise(torch.zeros(4, 6), (3.4445, -4.7750, 2.0315), 5, 1e-7).any()


# --- the definition on a plain model ---


class Definition:
    """Muon and AdamW on plain tensors, whole parameters at a time."""

    def __init__(self, model: nn.Module, hidden: set[str], precision: str, numbers: dict) -> None:
        self.model, self.hidden, self.precision, self.numbers = model, hidden, precision, numbers
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        self.states = {name: [torch.zeros_like(w) for _ in range(2)] for name, w in self.masters.items()}
        self.num_steps = 0
        self._write()

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        """Clip by the global norm, and update."""
        self.num_steps += 1
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32).item() for gradient in grads.values()]
        clip = min(1.0, MAX_NORM / (math.hypot(*norms) + 1e-6))
        for name, gradient in grads.items():
            self._update(self.masters[name], gradient.float(), self.states[name], name in self.hidden, clip)
        self._write()

    def _update(
        self, w: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], is_hidden: bool, clip: float
    ) -> None:
        if not is_hidden:
            lr, decay = self.numbers["adamw_lr"], self.numbers["adamw_weight_decay"]
            scalars = formula.AdamWScalars.at(self.num_steps, lr, 0.9, 0.999, 1e-8, decay, clip)
            formula.adamw_(w, g, *states, scalars)
            return
        direction = torch.empty_like(w)
        scalars = formula.MuonDirectionScalars.at(0.95, self.numbers["nesterov"], clip)
        formula.muon_direction_(direction, g, states[0], scalars)
        rows, columns = w.shape[-2:]
        matrices = [orthogonalise(one, (3.4445, -4.7750, 2.0315), 5, 1e-7) for one in direction.view(-1, rows, columns)]
        lr, is_original = self.numbers["lr"], self.numbers["adjust_lr_fn"] is None
        factor = math.sqrt(max(1, rows / columns)) if is_original else 0.2 * math.sqrt(max(rows, columns))
        scalars = formula.MuonStepScalars.at(lr, lr * factor, self.numbers["weight_decay"])
        formula.muon_step_(w, torch.stack(matrices).view(w.shape).float(), scalars)

    def _write(self) -> None:
        for name, parameter in self.model.named_parameters():
            master = self.masters[name]
            parameter.data = master.clone()
            if self.precision == "bf16":
                upper = torch.empty(master.numel(), dtype=torch.bfloat16)
                split_(master.view(-1), upper, torch.empty(master.numel(), dtype=torch.int16))
                parameter.data = upper.view(master.shape)


@pytest.mark.parametrize(
    ("name", "precision", "numbers"),
    [
        ("llama", "fp32", {"nesterov": True, "adjust_lr_fn": None}),
        ("llama", "bf16", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        ("qwen3_moe", "bf16", {"nesterov": True, "adjust_lr_fn": None}),
    ],
)
def test_steps_are_the_definition(name: str, precision: str, numbers: dict) -> None:
    mt.init(device="cpu", precision=precision)
    numbers = {"lr": 1e-2, "weight_decay": 0.1, **NUMBERS, **numbers}
    plain, model = make_model(name), make_model(name)
    model.load_state_dict(plain.state_dict())
    stream(model)
    optimizer = Muon(model, **numbers)
    truth = Definition(plain, hidden_names(optimizer), precision, numbers)
    assert any(master.dim() == 3 for master in truth.masters.values()) == (name == "qwen3_moe")
    before = {name: master.clone() for name, master in truth.masters.items()}
    for seed in range(4):
        batch = make_batch(8, rows=2, seed=seed)
        mt.accumulate(model, [batch])
        mt.clip_grad_norm_(model, MAX_NORM)
        truth.model.zero_grad()
        truth.model(**batch).loss.backward()
        grads = {name: p.grad for name, p in truth.model.named_parameters() if p.grad is not None}
        truth.step(grads)
        optimizer.step()
        optimizer.zero_grad()
    after = {name: value.float() for name, value in mt.named_parameters(model)}
    assert_same(after, truth.masters)
    assert all(not torch.equal(after[each], before[each]) for each in after)
    for parameter in model.parameters():
        state, field = optimizer.state[parameter], parameter._field.name
        kept = state["momentum_buffer"] if field in truth.hidden else state["exp_avg"]
        assert torch.equal(kept, truth.states[field][0])


# --- torch.optim.Muon ---


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_agree_with_torch_muon(nesterov: bool, adjust_lr_fn: str | None) -> None:
    """Gradients are small whole numbers and the momentum is 0.5, so momenta and directions are exact in fp32 on both
    sides for some steps, and the orthogonal matrices are the same bits. What differs is the weight's own rounding:
    with u = 2^-24, ours rounds decay, product and difference and theirs may contract two of them, at most 3u |w| and 1u
    of the step (below 0.1) on each side in each of 4 steps, with |w| < 1: 4 x 2 x 3.1u.
    """
    numbers = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.5, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    model, optimizer = start_muon(numbers=numbers)
    hidden = hidden_names(optimizer)
    values = mt.full_state_dict(model)
    theirs = {name: nn.Parameter(values[name].clone()) for name in hidden}
    torch_muon = torch.optim.Muon(theirs.values(), **numbers)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for parameter in model.parameters():
            gradient = torch.randint(-16, 17, tuple(parameter.shape), generator=generator).float()
            parameter.grad = gradient
            if parameter._field.name in hidden:
                theirs[parameter._field.name].grad = gradient.clone()
        optimizer.step()
        torch_muon.step()
    ours = dict(mt.named_parameters(model))
    for name, expected in theirs.items():
        assert expected.abs().max() < 1
        assert (ours[name] - expected.detach()).abs().max() <= 4 * 2 * 3.1 * 2.0**-24, name


# --- formats, places, pieces ---


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize(
    ("master", "compression"),
    [("fp32", False), ("split", False), ("split", "8bit"), ("bf16", "4bit"), ("bf16", "bf16")],
)
def test_no_result_depends_on_lanes_or_places(master: str, compression: bool | str, clip: str) -> None:
    settings = {"precision": "fp32" if master == "fp32" else "bf16", "master": master, "clip": clip}
    settings |= {"optimizer_compression": compression, "numbers": {"ema_decay": 0.9}}
    results = []
    for options in ({"serial": True}, RACES, {"places": PLACES, **RACES}):
        model, optimizer = start_muon(StreamOptions(**options), **settings)
        train(model, optimizer, batches(3), clip)
        results.append(result(model, optimizer))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lossless_momenta_are_fp32_momenta(precision: str) -> None:
    weights = []
    for compression in (False, "lossless"):
        model, optimizer = start_muon(optimizer_compression=compression, precision=precision)
        train(model, optimizer, batches(3))
        weights.append(mt.full_state_dict(model))
    assert_same(weights[1], weights[0])


def run_in_pieces(half: Segment, numel: int) -> None:
    for first in range(0, half.numel, numel):
        definition.update_(half.part(first, min(first + numel, half.numel)))


@pytest.mark.parametrize("format_name", ["fp32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize("master", ["fp32", "split", "bf16"])
def test_both_halves_in_any_pieces_are_the_whole(master: str, format_name: str) -> None:
    scalars = formula.MuonDirectionScalars.at(0.9, nesterov=True, clip=0.3)
    newton_schulz = ((1.0, 1.0, 1.0), 1, 1e-7)
    numbers = muon._Numbers(direction=scalars, lr=0.1, weight_decay=0.1, adjust_lr_fn=None, newton_schulz=newton_schulz)
    results = []
    for numel in (777, 3 * BLOCK, BLOCK):
        flat = make_segment(1, 777, master, torch.bfloat16, format_name, rules.MOMENTUM, has_ema=True)
        flat = replace(flat, rule=rules.MUON, scalars=scalars)
        update = muon.MatrixUpdate(flat=flat, shape=(7, 111), numbers=numbers)
        direction = torch.empty(777)
        run_in_pieces(update.momentum_half(direction), numel)
        run_in_pieces(update.step_half(direction.bfloat16()), numel)
        results.append({"direction": direction, **tensors(flat)})
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize(("shape", "numel"), [((8, 16), 128), ((5, 8, 16), 128), ((40, 6, 6), 1152), ((3, 6, 6), 108)])
def test_a_stack_is_cut_into_as_few_matrices_as_end_with_a_block(shape: tuple[int, ...], numel: int) -> None:
    assert muon.part_numel(shape, is_lossless=False) == numel
    assert muon.part_numel(shape, is_lossless=True) == math.prod(shape)


# --- what every optimizer does ---


@pytest.mark.parametrize("compression", [False, "4bit", "lossless"])
def test_training_goes_on_from_a_state_dict(compression: bool | str) -> None:
    settings = {"precision": "bf16", "optimizer_compression": compression, "numbers": {"ema_decay": 0.9}}
    many = list(batches(4))
    model, optimizer = start_muon(**settings)
    train(model, optimizer, iter(many))
    first, its_optimizer = start_muon(**settings)
    train(first, its_optimizer, iter(many[:2]))
    weights = mt.full_state_dict(first)
    saved = its_optimizer.state_dict()
    saved = {**saved, "state": {i: {k: t.clone() for k, t in s.items()} for i, s in saved["state"].items()}}
    second, other = start_muon(**settings)
    second.load_state_dict(weights)
    other.load_state_dict(saved)
    train(second, other, iter(many[2:]))
    assert_same(result(second, other), result(model, optimizer))


def test_a_step_with_a_bad_gradient_changes_nothing() -> None:
    model, optimizer = start_muon()
    many = list(batches(2))
    train(model, optimizer, iter(many[:1]))
    before = {name: tensor.clone() for name, tensor in result(model, optimizer).items()}
    mt.accumulate(model, many[1])
    weight = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    gradient = weight.grad
    gradient[0, 0] = math.nan
    weight.grad = gradient
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(result(model, optimizer), before)


def test_updates_are_measured() -> None:
    model, optimizer = start_muon()
    the_engine(model).measure_updates = True
    before = {name: value.clone() for name, value in mt.full_state_dict(model).items()}
    train(model, optimizer, batches(1))
    after, names = mt.full_state_dict(model), [name for name in before if name.startswith("model.layers.1.")]
    change = sum((after[name] - before[name]).double().square().sum() for name in names)
    weight = sum(before[name].double().square().sum() for name in names)
    ratio = layer_report(the_engine(model))["model.layers.1"]["update_ratio"]
    assert ratio == pytest.approx(math.sqrt(change / weight), rel=1e-6)


def test_a_schedule_reaches_both_parts() -> None:
    """With a learning rate of 0 nothing moves; the momenta do."""
    model, optimizer = start_muon()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = {name: value.clone() for name, value in mt.full_state_dict(model).items()}
    train(model, optimizer, batches(1))
    scheduler.step()
    assert_same(mt.full_state_dict(model), before)
    assert all(state["step"] == 1 for state in optimizer.state.values())


# --- on a GPU ---


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("compression", [False, "4bit"])
def test_no_result_depends_on_the_place_on_a_gpu(compression: bool | str) -> None:
    """The matrices of all places are orthogonalised on the GPU, so they have the same bits."""
    settings = {"device": "cuda", "precision": "bf16", "optimizer_compression": compression}
    many = [[{name: ids.cuda() for name, ids in batch.items()} for batch in step] for step in batches(3)]
    results = []
    for places in ({}, PLACES, "hbm", "stream"):
        model, optimizer = start_muon(StreamOptions(places=places, **RACES), **settings)
        train(model, optimizer, iter(many))
        results.append({name: tensor.cpu() for name, tensor in result(model, optimizer).items()})
    for other in results[1:]:
        assert_same(other, results[0])
