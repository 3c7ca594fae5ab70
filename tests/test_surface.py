"""What a user may call on a streamed model does what it does on a plain one, or is refused by name.

A refusal says what to do instead, and leaves the model as it was.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from model_zoo import Block, Stack, make_batch
from surface_helpers import (
    assert_like,
    assert_same_gradients,
    assert_same_state,
    loss_and_gradients,
    plain,
    streamed,
)
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import LlamaForCausalLM

import megatrain as mt
from megatrain.execute import guard
from megatrain.execute.model import REFUSED


def distributed(model: nn.Module) -> nn.Module:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


def step(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], None]:
    def run(model: nn.Module) -> None:
        optimizer = make(model.parameters())
        model(**make_batch()).loss.backward()
        optimizer.step()

    return run


LORA = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
PROMPT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

# Call -> (what the message names, what it says to do).
REFUSALS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "half": (lambda m: m.half(), "half", "bfloat16"),
    "bfloat16": (lambda m: m.bfloat16(), "bfloat16", "mt.init"),
    "double": (lambda m: m.double(), "double", "mt.init"),
    "to_dtype": (lambda m: m.to(torch.float16), "float16", "mt.init"),
    "to_like": (lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)), "bfloat16", "mt.init"),
    "to_device": (lambda m: m.to("cuda:0"), "cuda:0", "mt.init"),
    "to_format": (lambda m: m.to(memory_format=torch.channels_last), "memory_format", "before mt.stream"),
    "cuda": (lambda m: m.cuda(), "cuda", "mt.init"),
    "type": (lambda m: m.type(torch.float64), "float64", "mt.init"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), "to_empty", "home"),
    "share_memory": (lambda m: m.share_memory(), "share_memory", "before mt.stream"),
    "resize": (lambda m: m.resize_token_embeddings(100), "resize_token_embeddings", "before mt.stream"),
    "tie_weights": (lambda m: m.tie_weights(), "tie_weights", "before mt.stream"),
    "dequantize": (lambda m: m.dequantize(), "dequantize", "unquantised"),
    "compile": (lambda m: m.compile(), "compile", "mt.init"),
    "torch.compile": (torch.compile, "OptimizedModule", "mt.init"),
    "add_adapter": (lambda m: m.add_adapter(LORA), "add_adapter", "before mt.stream"),
    "load_adapter": (lambda m: m.load_adapter("nowhere"), "load_adapter", "before mt.stream"),
    "peft_lora": (lambda m: peft.get_peft_model(m, LORA), "peft", "first"),
    "peft_prompt": (lambda m: peft.get_peft_model(m, PROMPT), "peft", "first"),
    "peft_inject": (lambda m: peft.inject_adapter_in_model(LORA, m), "peft", "first"),
    "peft_of_a_part": (lambda m: peft.get_peft_model(m.model, LORA), "peft", "first"),
    "set_input_embeddings": (lambda m: m.set_input_embeddings(nn.Embedding(96, 32)), "embed_tokens", "first"),
    "set_output_embeddings": (lambda m: m.set_output_embeddings(nn.Linear(32, 96)), "lm_head", "first"),
    "new_module": (lambda m: m.model.add_module("extra", nn.Linear(2, 2)), "extra", "first"),
    "new_submodule": (lambda m: setattr(m.model.layers[0].mlp, "up_proj", nn.Linear(32, 48)), "up_proj", "first"),
    "append_layer": (lambda m: m.model.layers.append(nn.Linear(2, 2)), "ModuleList", "first"),
    "new_parameter": (lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.zeros(96, 32))), "weight", "copy_"),
    "tie": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "weight", "before mt.stream"),
    "register_parameter": (lambda m: m.register_parameter("own", nn.Parameter(torch.zeros(1))), "own", "mt.stream"),
    "parametrize": (
        lambda m: parametrize.register_parametrization(m.lm_head, "weight", nn.Tanh()),
        "lm_head.weight",
        "first",
    ),
    "prune": (lambda m: prune.l1_unstructured(m.lm_head, "weight", amount=0.3), "weight_orig", "before mt.stream"),
    "load_assign": (lambda m: m.load_state_dict(plain().state_dict(), assign=True), "assign", "leave assign out"),
    "deepcopy": (copy.deepcopy, "deepcopy", "save_pretrained"),
    "copy": (copy.copy, "copying", "save_pretrained"),
    "pickle": (pickle.dumps, "pickling", "save_pretrained"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "pickling", "save_pretrained"),
    "deepcopy_layer": (lambda m: copy.deepcopy(m.model.layers[0]), "model.layers.0", "save_pretrained"),
    "pickle_layer": (lambda m: pickle.dumps(m.model.layers[0]), "model.layers.0", "save_pretrained"),
    "pickle_part": (lambda m: pickle.dumps(m.model.norm), "model.norm.weight", "save_pretrained"),
    "averaged": (torch.optim.swa_utils.AveragedModel, "deepcopy", "save_pretrained"),
    "half_of_a_part": (lambda m: m.model.half(), "float16", "before mt.stream"),
    "dtype_of_a_layer": (lambda m: m.model.layers[1].to(torch.bfloat16), "bfloat16", "before mt.stream"),
    "half_of_a_wrapper": (lambda m: nn.Sequential(m).half(), "float16", "before mt.stream"),
    "share_memory_of_a_part": (lambda m: m.model.norm.share_memory(), "share_memory_", "mt.named_parameters"),
    "DataParallel": (nn.DataParallel, "DataParallel", "one device"),
    "DistributedDataParallel": (distributed, "DistributedDataParallel", "gradient_accumulation_steps"),
    "torch.optim": (step(torch.optim.AdamW), "torch.optim.adamw.AdamW", "mt.optim.AdamW"),
    "torch.optim_foreach": (step(lambda p: torch.optim.SGD(p, foreach=True)), "torch.optim.sgd.SGD", "mt.optim.AdamW"),
    "torch.optim_fused": (step(lambda p: torch.optim.Adam(p, fused=True)), "torch.optim.adam.Adam", "mt.optim.AdamW"),
}


@pytest.mark.parametrize("call", REFUSALS)
def test_refused_by_name_and_the_model_is_unharmed(call: str) -> None:
    function, named, remedy = REFUSALS[call]
    model = streamed()
    with pytest.raises(mt.RefusedError) as raised:
        function(model)
    assert named in str(raised.value)
    assert remedy in str(raised.value)
    assert_like(model, plain())


def test_every_refusal_of_the_tables_is_tested() -> None:
    named = {entry[1] for entry in REFUSALS.values()}
    assert REFUSED.keys() | guard.WRAPPERS.keys() <= named | {"FullyShardedDataParallel"}


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "to_device": lambda m: m.to("cpu"),
    "to_dtype": lambda m: m.to(torch.float32),
    "to_both": lambda m: m.to("cpu", torch.float32, non_blocking=True),
    "to_like": lambda m: m.to(torch.zeros(1)),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float32),
    "to_of_a_part": lambda m: m.model.to("cpu", torch.float32),
    "to_of_a_wrapper": lambda m: nn.Sequential(m).to("cpu"),
    "eval_and_train": lambda m: m.eval().train(),
    "requires_grad": lambda m: m.requires_grad_(False).requires_grad_(True),
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),
    "checkpointing_reentrant": lambda m: m.gradient_checkpointing_enable({"use_reentrant": True}),
    "checkpointing_of_a_part": lambda m: m.model.gradient_checkpointing_enable(),
    "activation_checkpointing": lambda m: m.activation_checkpointing_enable(),
    "checkpointing_off": lambda m: m.gradient_checkpointing_disable(),
    "input_require_grads": lambda m: m.enable_input_require_grads(),
    "zero_grad": lambda m: m.zero_grad(),
    "stream_again": mt.stream,
    "same_module": lambda m: setattr(m, "lm_head", m.lm_head),
    "same_parameter": lambda m: setattr(m.lm_head, "weight", m.lm_head.weight),
    "buffer": lambda m: m.register_buffer("note", torch.ones(1), persistent=False),
    "wrapped": lambda m: nn.Sequential(m, nn.Linear(2, 2)),
    "set_attention": lambda m: m.set_attn_implementation("eager"),
    "read_and_drop": lambda m: [p.detach().clone().mul_(2) for p in m.parameters()],
}


@pytest.mark.parametrize("call", HARMLESS)
def test_harmless_calls_change_nothing(call: str) -> None:
    model, twin = streamed(), plain()
    HARMLESS[call](model)
    if call == "set_attention":
        HARMLESS[call](twin)
    assert_like(model, twin)


def test_it_looks_like_the_plain_model() -> None:
    model, twin = streamed(), plain()
    assert repr(model) == repr(twin)
    assert isinstance(model, LlamaForCausalLM) and type(model).__name__ == "LlamaForCausalLM"
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.is_leaf
        assert (parameter.shape, parameter.dtype, parameter.device) == (expected.shape, expected.dtype, expected.device)
        assert (parameter.numel(), parameter.stride()) == (expected.numel(), expected.stride())
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == twin.num_parameters(**options)
    assert model.get_memory_footprint() == twin.get_memory_footprint()
    assert torch.equal(model.get_input_embeddings().weight, twin.get_input_embeddings().weight)
    assert torch.equal(model.get_output_embeddings().weight, twin.get_output_embeddings().weight)


def test_an_own_module_gains_no_methods_of_transformers() -> None:
    model = mt.stream(Stack([Block(16) for _ in range(2)], lambda self, x: x))
    assert not hasattr(model, "save_pretrained") and not hasattr(model, "gradient_checkpointing_enable")
    with pytest.raises(mt.RefusedError, match="deepcopy"):
        copy.deepcopy(model)


def test_its_class_makes_plain_models() -> None:
    model = streamed()
    made = type(model)(model.config)
    assert type(made) is LlamaForCausalLM and type(next(made.parameters())) is nn.Parameter
    layer = type(model.model.layers[0])(model.config, 0)
    assert type(next(layer.parameters())) is nn.Parameter


def test_parametrized_and_pruned_before_streaming() -> None:
    def make() -> nn.Module:
        model = plain()
        nn.utils.parametrizations.weight_norm(model.lm_head)
        parametrize.register_parametrization(model.model.norm, "weight", nn.Tanh())
        prune.l1_unstructured(model.model.layers[1].mlp.up_proj, "weight", amount=0.3)
        return model

    assert_like(mt.stream(make()), make())


def test_parts_of_a_streamed_model_and_wrappers_cannot_be_streamed_again() -> None:
    model = streamed()
    for other in (model.model, nn.Sequential(model)):
        with pytest.raises(mt.UserError, match="streamed already.*whole model"):
            mt.stream(other)
    assert_like(model, plain())


# Weights in and out


def test_state_dict_of_the_model_and_of_its_parts() -> None:
    model, twin = streamed("gpt2"), plain("gpt2")
    assert_same_state(model.state_dict(), twin.state_dict())
    assert_same_state(model.transformer.state_dict(), twin.transformer.state_dict())
    assert_same_state(model.transformer.h[1].state_dict(prefix="x."), twin.transformer.h[1].state_dict(prefix="x."))
    assert_same_state(nn.Sequential(model).state_dict(), nn.Sequential(twin).state_dict())
    assert model.state_dict()._metadata == twin.state_dict()._metadata
    kept = model.state_dict(keep_vars=True)
    assert kept["lm_head.weight"] is model.lm_head.weight
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_same_state(torch.load(file), twin.state_dict())


def test_loaded_weights_are_used_by_the_next_forward() -> None:
    model, other = streamed(), plain()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    loss_and_gradients(model)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert_like(model, other)
    # A part, and one entry alone.
    third = plain()
    third.lm_head.load_state_dict({"weight": torch.ones(96, 32)})
    third.model.layers[0].load_state_dict(other.model.layers[2].state_dict())
    model.load_state_dict(plain().state_dict())
    model.load_state_dict({"lm_head.weight": torch.ones(96, 32)}, strict=False)
    model.model.layers[0].load_state_dict(other.model.layers[2].state_dict())
    assert_like(model, third)


def test_a_state_dict_that_does_not_fit_raises_as_in_torch() -> None:
    model = streamed()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch for lm_head.weight"):
        model.load_state_dict(plain().state_dict() | {"lm_head.weight": torch.zeros(3, 3)})
    model.load_state_dict(plain().state_dict())
    assert_like(model, plain())


def test_masters_gradients_and_full_state() -> None:
    model, twin = streamed("gpt2"), plain("gpt2")
    for m in (model, twin):
        m(**make_batch()).loss.backward()
    assert_same_state(dict(mt.named_parameters(model)), {n: p.detach() for n, p in twin.named_parameters()})
    assert_same_state(dict(mt.named_gradients(model)), {n: p.grad for n, p in twin.named_parameters()})
    state = mt.full_state_dict(model)
    assert_same_state(state, twin.state_dict())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    state["lm_head.weight"].zero_()
    assert_like(model, twin)


def test_apply_with_an_initialiser_writes_home() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            module.weight.data[0].zero_()

    model, twin = streamed(), plain()
    for m in (model, twin):
        torch.manual_seed(3)
        m.apply(initialise)
    assert_like(model, twin)


# Training


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torch_clipping_really_clips(clip: Callable[..., Any]) -> None:
    model, twin = streamed(), plain()
    results = []
    for m in (model, twin):
        m(**make_batch()).loss.backward()
        results.append(clip(m.parameters(), 0.01))
    if results[1] is not None:
        assert torch.equal(*results) and results[1] > 0.01
    gradients = [{name: p.grad for name, p in m.named_parameters()} for m in (model, twin)]
    assert_same_gradients(*gradients)


def test_what_torch_clipped_is_what_the_optimizer_takes() -> None:
    states = []
    for clip in (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01), lambda m: mt.clip_grad_norm_(m, 0.01)):
        model = streamed()
        optimizer = mt.optim.AdamW(model, lr=1e-2, eps=1e-3)
        model(**make_batch()).loss.backward()
        clip(model)
        optimizer.step()
        states.append(mt.full_state_dict(model))
    for name, weight in states[0].items():
        torch.testing.assert_close(weight, states[1][name], rtol=1e-6, atol=1e-8)


def test_freezing_and_unfreezing_after_streaming() -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        m.model.layers[1].requires_grad_(False)
        m.model.norm.weight.requires_grad = False
        m.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    assert_like(model, twin)
    for m in (model, twin):
        m.requires_grad_(True)
    assert_like(model, twin)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model_and_of_a_part(to_none: bool) -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        m(**make_batch()).loss.backward()
        m.model.layers[0].zero_grad(set_to_none=to_none)
        m.lm_head.zero_grad(set_to_none=to_none)
    assert_same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (model, twin)))
    for m in (model, twin):
        m.zero_grad(set_to_none=to_none)
    assert_same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (model, twin)))


def test_checkpointing_enabled_before_streaming() -> None:
    model = plain()
    model.gradient_checkpointing_enable()
    assert_like(mt.stream(model), plain())


def test_hooks_fire_as_often_and_see_the_same() -> None:
    seen: list[list[tuple[str, Any]]] = []
    for model in (streamed(), plain()):
        events: list[tuple[str, Any]] = []
        for name in ("model.embed_tokens", "model.layers.1", "model.norm", "lm_head"):
            part = model.get_submodule(name)
            part.register_forward_pre_hook(lambda m, i, n=name, e=events: e.append((f"{n} in", i[0].detach())))
            part.register_forward_hook(lambda m, i, o, n=name, e=events: e.append((f"{n} out", o.detach())))
        model.model.layers[1].register_full_backward_hook(lambda m, i, o, e=events: e.append(("back", i[0])))
        model(**make_batch()).loss.backward()
        seen.append(events)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    assert all(torch.equal(got, expected) for (_, got), (_, expected) in zip(*seen, strict=True))


def test_hooks_inside_a_layer_see_the_same_and_may_change_it() -> None:
    outputs = []
    results = []
    for model in (streamed(), plain()):
        inner = model.model.layers[1].mlp
        inner.register_forward_hook(lambda m, i, o: o * 0.5)
        inner.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))
        results.append(loss_and_gradients(model))
    # The backward may run a layer again, and its inner hooks with it.
    assert all(torch.equal(output, outputs[-1]) for output in outputs)
    assert torch.equal(results[0][0], results[1][0])
    assert_same_gradients(results[0][1], results[1][1])
