"""Everything that training of a transformers model may involve gives the bits of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_same_gradients, assert_same_step, gradients, stream, the_engine, zero_grad
from model_zoo import VOCAB, make_batch, make_model, padded_batch
from torch import nn

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.spec.layout import padded

# Names that transformers is about to change.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "gpt_neox": {"hidden_dropout": 0.2, "attention_dropout": 0.2, "attn_implementation": "eager"},
    "llama": {"attention_dropout": 0.2},
    "t5": {"dropout_rate": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
}


def loss(model: Any, **changes: Any) -> torch.Tensor:
    return model(**(make_batch() | changes)).loss


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "mixtral", "qwen3_next", "bert"])
def test_padding(name: str) -> None:
    plain, model = stream(make_model(name))
    assert_same_step(plain, model, lambda each: each(**padded_batch()).loss)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name: str) -> None:
    plain, model = stream(make_model(name, **DROPOUT[name]))
    seen = []
    for seed in (1, 2):
        assert_same_step(plain, model, loss, seed=seed)
        seen.append(gradients(model))
        zero_grad(plain, model)
    assert not torch.equal(*(next(reversed(each.values())) for each in seen)), "nothing was dropped"


def test_the_random_state_is_where_plain_training_leaves_it() -> None:
    plain, model = stream(make_model("gpt2", **DROPOUT["gpt2"]))
    after = []
    for each in (plain, model):
        torch.manual_seed(7)
        loss(each).backward()
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_gradient_checkpointing_changes_nothing(name: str, when: str) -> None:
    model = make_model(name, **DROPOUT.get(name, {}))
    reference = copy.deepcopy(model)
    if when == "before":
        model.gradient_checkpointing_enable()
    _, model = stream(model)
    if when == "after":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(reference, model, lambda each: loss(each, use_cache=False))


def freeze(model: nn.Module, *parts: str) -> list[str]:
    """Freeze parameters whose name contains one of `parts`."""
    names = [name for name, _ in model.named_parameters() if any(part in name for part in parts)]
    assert names
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


FROZEN = {
    "layers": ("layers.0.", "layers.2."),
    "parts of layers": ("q_proj", "layernorm"),
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "all but the head": ("model.",),
    "all but the first layer": ("embed_tokens", "layers.1.", "layers.2.", "norm", "lm_head"),
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen(what: str) -> None:
    model = make_model("llama")
    frozen = freeze(model, *FROZEN[what])
    plain, model = stream(model)
    assert_same_step(plain, model, loss)
    assert not gradients(model).keys() & set(frozen)


def test_what_is_frozen_has_no_moments_gradients_or_drain() -> None:
    model = make_model("llama")
    freeze(model, "embed_tokens", "layers.0.", "layers.1.mlp")
    _, model = stream(model)
    optimizer = mt.optim.AdamW(model)
    loss(model).backward()
    optimizer.step()
    engine = the_engine(model)
    engine.wait()
    homes = {home.name: home for home in engine.homes}
    for name in ("model.embed_tokens", "model.layers.0"):
        assert not homes[name].is_trainable
        assert homes[name].grads.slab_bytes == 0
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == trained
    # layers 1 and 2, the head, the final norm.
    assert mt.stats(model)["num_drains"] == 4
    of_layer = [p for n, p in model.named_parameters() if n.startswith("model.layers.1.") and p.requires_grad]
    assert homes["model.layers.1"].gradient_layout().numel == sum(padded(p.numel()) for p in of_layer)
    assert mt.stats(model)["visits"]["model.layers.0"] == 1, "a frozen layer below which nothing trains runs once"


def test_frozen_and_trained_in_turn() -> None:
    plain, model = stream(make_model("llama"))
    for flag in (False, True, False):
        for each in (plain, model):
            each.model.layers[1].requires_grad_(flag)
        assert_same_step(plain, model, loss)
        zero_grad(plain, model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_tied_embeddings(name: str) -> None:
    plain, model = stream(make_model(name, tie_word_embeddings=True))
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_same_step(plain, model, loss)


def test_a_parameter_without_a_gradient_keeps_none() -> None:
    model = make_model("llama")
    model.model.layers[1].never_used = nn.Parameter(torch.ones(3))
    model.unused = nn.Linear(4, 4)
    plain, model = stream(model)
    assert_same_step(plain, model, loss)
    assert model.get_parameter("unused.weight").grad is None
    assert model.get_parameter("model.layers.1.never_used").grad is None


def test_two_losses_in_one_backward() -> None:
    plain, model = stream(make_model("llama"))
    assert_same_step(plain, model, lambda each: loss(each) + 0.5 * each(**make_batch(5, seed=9)).loss)


def test_two_backwards_add_up() -> None:
    plain, model = stream(make_model("llama"))
    for seed in (1, 2, 3):
        for each in (plain, model):
            each(**make_batch(seed=seed)).loss.backward()
    assert_same_gradients(plain, model)


def test_backwards_out_of_order_and_twice() -> None:
    plain, model = stream(make_model("llama"))
    for each in (plain, model):
        first, second = loss(each), each(**make_batch(5, seed=9)).loss
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    assert_same_gradients(plain, model)


def test_a_forward_that_is_dropped_leaves_nothing() -> None:
    plain, model = stream(make_model("llama"))
    for each in (plain, model):
        loss(each)
        loss(each).backward()
    assert_same_gradients(plain, model)


@pytest.mark.parametrize("change", ["step", "write"])
def test_weights_changed_before_the_backward_are_refused(change: str) -> None:
    """As plain PyTorch refuses to differentiate through weights that were changed in place."""
    _, model = stream(make_model("llama"))
    optimizer = mt.optim.AdamW(model)
    loss(model).backward()
    late = loss(model)
    if change == "step":
        optimizer.step()
    else:
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
    with pytest.raises(UserError, match="lm_head were changed between its forward and its backward"):
        late.backward()
    zero_grad(model)
    loss(model).backward()


def test_forwards_in_eval_and_without_grad_between_forward_and_backward() -> None:
    plain, model = stream(make_model("gpt2", **DROPOUT["gpt2"]))

    def run(each: Any) -> torch.Tensor:
        step_loss = loss(each)
        each.eval()
        with torch.no_grad():
            outside.append(each(**make_batch(6, seed=3)).logits)
        outside.append(each(**make_batch(6, seed=4)).logits.detach())
        each.train()
        return step_loss

    outside: list[torch.Tensor] = []
    assert_same_step(plain, model, run)
    assert torch.equal(outside[0], outside[2]) and torch.equal(outside[1], outside[3])


GENERATING = ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2", "t5"]


@pytest.mark.parametrize("name", GENERATING)
def test_generate_between_steps(name: str) -> None:
    plain, model = stream(make_model(name))
    prompt = make_batch(5)["input_ids"]
    written = []
    for each in (plain, model):
        loss(each).backward()
        each.eval()
        settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        written.append(each.generate(prompt, **settings))
        each.train()
        loss(each).backward()
    assert torch.equal(written[0].sequences, written[1].sequences)
    assert all(map(torch.equal, written[0].logits, written[1].logits))
    assert_same_gradients(plain, model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mamba2", "t5"])
def test_hidden_states_are_the_same(name: str) -> None:
    plain, model = stream(make_model(name))
    key = "decoder_hidden_states" if name == "t5" else "hidden_states"
    left, right = (each(**make_batch(), output_hidden_states=True)[key] for each in (plain, model))
    assert len(left) == len(right) == 4
    assert all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_attentions_and_router_logits_are_the_same(name: str) -> None:
    plain, model = stream(make_model(name, attn_implementation="eager"))
    outputs = [each(**make_batch(), output_attentions=True) for each in (plain, model)]
    for key in ("attentions", "router_logits"):
        if key in outputs[0]:
            left, right = (each[key] for each in outputs)
            assert len(left) == len(right) == 3
            assert all(map(torch.equal, left, right))
    penalty = sum(each.square().sum() for each in outputs[1].attentions)
    penalty.backward()
    sum(each.square().sum() for each in outputs[0].attentions).backward()
    assert_same_gradients(plain, model)


def test_hidden_states_can_be_saved(tmp_path: Path) -> None:
    plain, model = stream(make_model("t5"))
    for each in (plain, model):
        states = each(**make_batch(), output_hidden_states=True).decoder_hidden_states
        torch.save(states, tmp_path / "states")
        assert all(map(torch.equal, torch.load(tmp_path / "states"), states))


def test_a_loss_on_hidden_states() -> None:
    """A hidden state has its use in the loss added to those in the next block in another order than in plain PyTorch.

    Each sum of three terms differs by at most 2 roundings from another order; such an error goes down through the
    layers below it as any gradient does. So gradients agree to a few roundings of their largest element.
    """
    plain, model = stream(make_model("llama"))

    def run(each: Any) -> torch.Tensor:
        outputs = each(**make_batch(), output_hidden_states=True)
        return outputs.loss + sum(state.square().mean() for state in outputs.hidden_states)

    for each in (plain, model):
        run(each).backward()
    left, right = gradients(plain), gradients(model)
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(right[name], gradient, rtol=0, atol=64 * 2.0**-24 * largest)
    # The last state is used by the loss and the head only, each once: the same sum in any order.
    assert torch.equal(left["lm_head.weight"], right["lm_head.weight"])


def test_a_custom_loss_on_logits() -> None:
    plain, model = stream(make_model("qwen3"))
    target = torch.randint(VOCAB, (2, 11))

    def run(each: Any) -> torch.Tensor:
        logits = each(input_ids=make_batch()["input_ids"]).logits
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)
        return -(log_probabilities.gather(-1, target[..., None]).squeeze(-1) * torch.rand(2, 11)).mean()

    assert_same_step(plain, model, run)


def test_a_loss_with_weights_of_its_own() -> None:
    plain, model = stream(make_model("llama"))
    torch.manual_seed(5)
    value_head = nn.Linear(32, 1)
    heads = {id(plain): copy.deepcopy(value_head), id(model): value_head}

    def run(each: Any) -> torch.Tensor:
        hidden = each(**make_batch(), output_hidden_states=True).hidden_states[-1]
        return heads[id(each)](hidden).square().mean()

    assert_same_step(plain, model, run)
    assert_same_gradients(*heads.values())


def test_input_embeddings_get_their_gradient() -> None:
    """Soft prompts: the first layer's input is a leaf of the user's own."""
    plain, model = stream(make_model("llama"))
    torch.manual_seed(5)
    prompts = [torch.randn(2, 6, 32, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        prompts[1].copy_(prompts[0])
    for each, prompt in zip((plain, model), prompts, strict=True):
        each(inputs_embeds=prompt, labels=make_batch(6)["labels"]).loss.backward()
    assert torch.equal(prompts[0].grad, prompts[1].grad)
    assert_same_gradients(plain, model)


def test_the_cache_of_a_training_forward_is_that_of_plain_pytorch() -> None:
    """use_cache is left on, and a second turn reads what the first wrote, with gradients."""
    plain, model = stream(make_model("llama"))

    def run(each: Any) -> torch.Tensor:
        first = each(**make_batch(6))
        second = make_batch(5, seed=4)
        cached = each(**second, past_key_values=first.past_key_values)
        assert cached.past_key_values.get_seq_length() == 11
        return first.loss + cached.loss

    assert_same_step(plain, model, run)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values(name: str) -> None:
    """The last layers read keys and values of earlier ones, from a mapping that is handed through."""
    plain, model = stream(make_model(name))
    assert_same_step(plain, model, loss)


def test_weights_loaded_in_bf16_compute_in_bf16() -> None:
    model = make_model("llama").to(torch.bfloat16)
    plain, model = stream(model)
    assert the_engine(model).precision == "bf16"
    for each in (plain, model):
        loss(each).backward()
    assert_equal(
        {n: g.float() for n, g in gradients(plain).items()}, {n: g.float() for n, g in gradients(model).items()}
    )
