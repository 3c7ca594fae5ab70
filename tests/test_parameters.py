"""HomeParameter: reading one, changing one in place, its gradient. As in plain PyTorch, or refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import make_batch
from surface_helpers import assert_like, assert_same_gradients, assert_same_state, plain, streamed
from torch import nn

import megatrain as mt

# One of a block and one that stays on the device.
PLACES = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]


def foreach(function: Callable[..., Any], *others: Any) -> Callable[[nn.Parameter], Any]:
    return lambda p: function([p, p.data[:2]], *others)


def set_data(p: nn.Parameter, value: torch.Tensor) -> None:
    p.data = value


def set_rows(p: nn.Parameter) -> None:
    for index, row in enumerate(p.data):
        row.fill_(index)


def augmented(p: nn.Parameter) -> None:
    before = p
    p += 1
    p -= 0.5
    p *= 3
    p /= 7
    p **= 2
    assert p is before


# Change in place -> function of the parameter, run under no_grad.
CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "add_itself": lambda p: p.add_(p, alpha=0.5),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "augmented": augmented,
    "lerp_": lambda p: p.lerp_(torch.zeros(p.shape), 0.3),
    "clamp_": lambda p: p.clamp_(-0.01, 0.01),
    "data": lambda p: p.data.mul_(2),
    "data_of_data": lambda p: p.data.data.mul_(2),
    "data_assigned": lambda p: set_data(p, torch.full(p.shape, 0.25)),
    "data_assigned_from_a_parameter": lambda p: set_data(p, p * 2),
    "detach": lambda p: p.detach().add_(1),
    "setitem": lambda p: p.__setitem__(slice(1, 3), 5.0),
    "setitem_of_data": lambda p: p.data.__setitem__(0, 5.0),
    "setitem_by_mask": lambda p: p.data.__setitem__(p > 0, 0.0),
    "row": lambda p: p.data[0].zero_(),
    "row_by_tensor": lambda p: p.data[torch.tensor(1)].zero_(),
    "part": lambda p: p[..., 2:4].fill_(3),
    "part_of_a_part": lambda p: p.data[1:5][1:2].mul_(9),
    "rows": set_rows,
    "flat": lambda p: p.view(-1)[::2].zero_(),
    "reshaped": lambda p: p.data.reshape(2, -1).T.mul_(2),
    "transposed": lambda p: p.data.unsqueeze(0).transpose(0, -1)[3].fill_(1),
    "chunk": lambda p: p.data.chunk(2)[1].fill_(4),
    "split": lambda p: torch.split(p.data, 5)[0].sub_(1),
    "unbind": lambda p: p.unbind()[2].add_(1),
    "expanded_as": lambda p: p.data.view_as(p).neg_(),
    "out": lambda p: torch.add(p, 1, out=p.data),
    "out_of_itself": lambda p: torch.mul(p, 3, out=p),
    "hardtanh_in_place": lambda p: nn.functional.hardtanh(p, -0.01, 0.01, inplace=True),
    "foreach_mul": foreach(torch._foreach_mul_, 3.0),
    "foreach_add": foreach(torch._foreach_add_, [2.0, 3.0]),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.arange(p.numel()) / p.numel(), [p]),
    "init_ones": lambda p: nn.init.ones_(p),
    "init_normal": lambda p: nn.init.normal_(p, std=0.02),
    "init_uniform": lambda p: nn.init.uniform_(p),
    "init_truncated": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "random_data": lambda p: p.data.normal_(),
    "bernoulli_": lambda p: p.bernoulli_(0.3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_reach_the_home(change: str, place: str) -> None:
    model, twin = streamed(), plain()
    # Forwards before and after: a copy on the device must not outlive the change.
    assert torch.equal(model(**make_batch()).loss, twin(**make_batch()).loss)
    before = twin.get_parameter(place).clone()
    for m in (model, twin):
        torch.manual_seed(2)
        with torch.no_grad():
            CHANGES[change](m.get_parameter(place))
    assert not torch.equal(twin.get_parameter(place), before)
    assert_like(model, twin)


@pytest.mark.parametrize(
    "change", ["mul_", "row", "flat", "rows", "init_normal", "foreach_mul", "data_assigned", "out"]
)
def test_changes_reach_the_exact_master_of_a_bf16_model(change: str) -> None:
    mt.init(device="cpu", precision="bf16")
    model, twin = streamed(), plain()
    for m in (model, twin):
        torch.manual_seed(2)
        with torch.no_grad():
            parameter = m.get_parameter(PLACES[0])
            if change == "data_assigned":
                parameter.data = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
            else:
                CHANGES[change](parameter)
    assert model.get_parameter(PLACES[0]).dtype == torch.bfloat16
    assert torch.equal(model.get_parameter(PLACES[0]).master(), twin.get_parameter(PLACES[0]))
    assert torch.equal(model.get_parameter(PLACES[0]), twin.get_parameter(PLACES[0]).bfloat16())


def test_a_bf16_value_that_a_master_has_already_changes_nothing() -> None:
    model = mt.stream(plain().bfloat16())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape))
    before = mt.full_state_dict(model)
    model.load_state_dict(model.state_dict())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_state(mt.full_state_dict(model), before)
    parameter, master = model.model.norm.weight, before["model.norm.weight"]
    value = parameter.detach().cpu().clone()
    value[3] = 7.0
    with torch.no_grad():
        parameter.copy_(value)
        parameter.data[8:].copy_(value[8:].neg())
    expected = torch.cat([master[:8], -value[8:].float()])
    expected[3] = 7.0
    assert torch.equal(parameter.master(), expected)


def test_a_conversion_to_the_same_keeps_the_low_halves_of_masters() -> None:
    mt.init(device="cpu", precision="bf16")
    model = streamed()
    model.model.to("cpu", torch.bfloat16)
    model.lm_head.bfloat16()
    model.get_parameter(PLACES[0]).data = model.get_parameter(PLACES[0])
    for name, master in mt.named_parameters(model):
        assert torch.equal(master, plain().get_parameter(name)), name


# As in plain PyTorch: a leaf that requires grad is not changed in grad mode, nor is a view of it.
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", ["mul_", "setitem", "part", "flat", "unbind", "out_of_itself", "hardtanh_in_place"])
def test_no_change_in_grad_mode(change: str, place: str) -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        with pytest.raises(RuntimeError):
            CHANGES[change](m.get_parameter(place))
    assert_like(model, twin)


def test_data_and_frozen_parameters_may_be_changed_in_grad_mode() -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        m.get_parameter(PLACES[0]).data.mul_(2)
        m.get_parameter(PLACES[1]).detach()[3:].zero_()
        m.lm_head.weight.requires_grad_(False).mul_(3)[0].zero_()
    assert_like(model, twin)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "matmul": lambda p: p.t() @ p if p.dim() == 2 else p @ p,
    "equal": lambda p: p == p,
    "to": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data.clone(),
    "view": lambda p: p.detach().view(-1)[3:9].clone(),
    "index": lambda p: p[[0, 2]],
    "rows": lambda p: torch.stack([row.sum() for row in p]),
    "cat": lambda p: torch.cat([p, p.data]),
    "numpy": lambda p: torch.from_numpy(p.detach().cpu().numpy().copy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p.view(-1)[3].item()),
    "deepcopy": lambda p: copy.deepcopy(p.data),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.detach())),
    "zeros_like": torch.zeros_like,
    "new": lambda p: p.new_ones(3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", READS)
def test_reading(read: str, place: str) -> None:
    got, expected = (READS[read](m.get_parameter(place)) for m in (streamed(), plain()))
    assert type(got) is torch.Tensor
    assert (got.dtype, got.device) == (expected.dtype, expected.device)
    assert torch.equal(got, expected)


def test_views_follow_what_they_view() -> None:
    parameter = streamed().get_parameter(PLACES[0])
    view = parameter.data[1:3]
    assert (view.shape, view.requires_grad, view.device) == ((2, 32), False, parameter.device)
    before = view.clone()
    with torch.no_grad():
        parameter.add_(1)
    assert torch.equal(view, before + 1)
    leaf = view.requires_grad_()
    (leaf * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 32), 2.0))


def test_an_array_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        streamed().get_parameter(PLACES[1]).detach().numpy()[0] = 1


def test_a_penalty_on_weights_has_gradients() -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        penalty = sum((p**2).sum() for p in m.parameters())
        (m(**make_batch()).loss + 0.1 * penalty).backward()
    for (name, got), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        # Two terms, added in either order.
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-6, atol=1e-7, msg=name)
    for m in (model, twin):
        m.zero_grad()
        sum((p.view(-1)[1:] ** 2).sum() for p in m.parameters()).backward()
    assert_same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (model, twin)))


# The gradient


def test_gradients_are_read_changed_and_set() -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        first, second = (m.get_parameter(place) for place in PLACES)
        assert first.grad is None
        first.grad = torch.ones_like(first)
        m(**make_batch()).loss.backward()
        first.grad.mul_(0.5)
        second.grad = second.grad * 3
        m.lm_head.weight.grad = None
        m(**make_batch(seed=4)).loss.backward()
    assert_same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (model, twin)))


def test_gradients_that_do_not_fit_are_refused() -> None:
    parameter = streamed().get_parameter(PLACES[0])
    with pytest.raises(RuntimeError, match="up_proj"):
        parameter.grad = torch.ones(())
    with pytest.raises(TypeError, match="up_proj"):
        parameter.grad = 1.0
    parameter.requires_grad_(False)
    with pytest.raises(mt.RefusedError, match="up_proj.weight is frozen.*requires_grad_"):
        parameter.grad = torch.ones(parameter.shape)


def test_named_in_a_backward_it_is_an_error_and_not_a_missing_gradient() -> None:
    model = streamed()
    loss = model(**make_batch()).loss
    with pytest.raises(mt.RefusedError, match="grad.*named_gradients"):
        torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(RuntimeError, match="grad"):
        loss.backward(inputs=list(model.parameters()))
    assert_like(model, plain())


# Refused by name

REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "register_hook": (lambda p: p.register_hook(print), "named_gradients"),
    "post_hook": (lambda p: p.register_post_accumulate_grad_hook(print), "named_gradients"),
    "retain_grad": (lambda p: p.retain_grad(), "named_gradients"),
    "resize_": (lambda p: p.data.resize_(3), "change the model first"),
    "t_": (lambda p: p.data.t_(), "change the model first"),
    "squeeze_": (lambda p: p.data.squeeze_(), "change the model first"),
    "detach_": (lambda p: p.detach_(), "requires_grad_"),
    "share_memory_": (lambda p: p.share_memory_(), "mt.named_parameters"),
    "untyped_storage": (lambda p: p.untyped_storage(), "mt.named_parameters"),
    "data dtype": (lambda p: set_data(p, torch.zeros(p.shape, dtype=torch.float16)), "float16.*copy_"),
    "data of a view": (lambda p: set_data(p.data, torch.zeros(p.shape)), "copy_"),
    "data shape": (lambda p: set_data(p, torch.zeros(3)), "copy_"),
    "deepcopy": (copy.deepcopy, "save_pretrained"),
    "pickle": (pickle.dumps, "save_pretrained"),
    "__set__": (lambda p: setattr(p.data, "grad", torch.zeros(p.shape)), "copy_"),
    "fused": (lambda p: torch._fused_sgd_([p], *[[p.detach().clone()]] * 2, **FUSED), "mt.optim.AdamW"),
}
FUSED = dict(weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True)


@pytest.mark.parametrize("call", REFUSALS)
def test_refused_by_name(call: str) -> None:
    function, remedy = REFUSALS[call]
    model = streamed()
    with pytest.raises(mt.RefusedError, match=remedy):
        function(model.get_parameter(PLACES[0]))
    assert_like(model, plain())


def test_it_is_not_swapped_for_a_tensor_that_is_not_at_home() -> None:
    model = streamed()
    with pytest.raises(RuntimeError, match="slots"):
        torch.utils.swap_tensors(model.lm_head.weight, nn.Parameter(torch.zeros(96, 32)))
    with pytest.raises(mt.UserError, match="embed_tokens.weight was replaced.*functional_call"):
        torch.func.functional_call(model, dict(plain().named_parameters()), (), make_batch())
    assert_like(model, plain())
