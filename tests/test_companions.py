"""A streamed model in the hands of transformers' generate, accelerate and peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate
import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from model_zoo import make_batch
from surface_helpers import assert_like, assert_same_state, plain, streamed

import megatrain as mt


@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba2", "t5"])
def test_generate_with_a_cache(name: str) -> None:
    # transformers sizes T5's decoder cache by the number of encoder layers.
    changes = {"num_layers": 3} if name == "t5" else {}
    model, twin = streamed(name, **changes).eval(), plain(name, **changes).eval()
    prompt = make_batch(rows=2, length=5)["input_ids"]
    for options in ({"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}):
        outputs = []
        for m in (model, twin):
            torch.manual_seed(5)
            outputs.append(m.generate(prompt, max_new_tokens=6, **options))
        assert torch.equal(*outputs)


def test_hidden_states_and_attentions() -> None:
    model, twin = streamed(), plain()
    for m in (model, twin):
        m.set_attn_implementation("eager")
    got, expected = (m(**make_batch(), output_hidden_states=True, output_attentions=True) for m in (model, twin))
    for name in ("hidden_states", "attentions"):
        assert len(got[name]) == len(expected[name]) > 0
        assert all(torch.equal(*pair) for pair in zip(got[name], expected[name], strict=True))


# accelerate


@pytest.fixture(params=["no", "bf16"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[accelerate.Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_prepares_the_model_alone(accelerator: accelerate.Accelerator) -> None:
    model, twin = streamed(), plain()
    prepared, prepared_twin = accelerator.prepare(model), accelerator.prepare(twin)
    assert accelerator.unwrap_model(prepared) is model
    assert_like(prepared, prepared_twin)


def test_accelerate_trains(accelerator: accelerate.Accelerator) -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        figures = []
        for seed in range(3):
            loss = model(**make_batch(seed=seed)).loss
            accelerator.backward(loss)
            figures += [loss.detach(), accelerator.clip_grad_norm_(model.parameters(), 0.1)]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return figures, accelerator.get_state_dict(model)

    model, twin = streamed(), plain()
    figures, state = run(model, mt.optim.AdamW(model, lr=1e-2))
    expected_figures, expected = run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))
    # The two AdamW round differently; with autocast a gradient of rounding noise may move a weight by lr either way.
    rtol = 1e-5 if accelerator.mixed_precision == "no" else 2e-2
    torch.testing.assert_close(figures, expected_figures, rtol=rtol, atol=0)
    assert list(state) == list(expected)
    before = plain().state_dict()
    for name, weight in expected.items():
        assert not torch.equal(state[name], before[name]), name
        if accelerator.mixed_precision == "no":
            torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-5)


# peft


def with_lora(**changes: Any) -> Any:
    config = peft.LoraConfig(
        target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **changes
    )
    torch.manual_seed(7)
    return peft.get_peft_model(plain(), config)


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=str)
def test_adapters_made_before_streaming_train_and_the_rest_stays(changes: dict[str, Any]) -> None:
    model, twin = mt.stream(with_lora(**changes)), with_lora(**changes)
    assert_like(model, twin)
    before = mt.full_state_dict(model)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    model(**make_batch()).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_adapter = "lora_" in name or "modules_to_save" in name
        assert parameter.requires_grad == is_adapter
        assert torch.equal(before[name], parameter.master()) != is_adapter, name


def test_adapters_can_be_switched_off_and_merged_into_the_base() -> None:
    model, twin = mt.stream(with_lora()), with_lora()
    with model.disable_adapter(), twin.disable_adapter():
        assert torch.equal(model(**make_batch()).loss, twin(**make_batch()).loss)
    for m in (model, twin):
        m.merge_adapter()
    assert_same_state(model.state_dict(), twin.state_dict())
    assert torch.equal(model(**make_batch()).loss, twin(**make_batch()).loss)
    for m in (model, twin):
        m.unmerge_adapter()
    assert_like(model, twin)


def test_saved_adapters_load_in_plain_peft(tmp_path: Any) -> None:
    model = mt.stream(with_lora())
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain(), tmp_path)
    assert torch.equal(loaded(**make_batch()).loss, with_lora()(**make_batch()).loss)


def test_changing_adapters_after_streaming_is_refused() -> None:
    model = mt.stream(with_lora())
    with pytest.raises(mt.RefusedError, match="before mt.stream"):
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(mt.RefusedError, match="first"):
        model.merge_and_unload()


def test_layers_with_a_checkpoint_around_them() -> None:
    model, twin = mt.stream(with_lora()), with_lora()
    for m in (model, twin):
        m.base_model.model.gradient_checkpointing_enable()
        m.enable_input_require_grads()
    assert_like(model, twin)
