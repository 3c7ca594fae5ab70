"""After mt.init, plain from_pretrained: weights stay in their files until they are streamed or somebody asks."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from comparing import assert_equal, assert_same_step, closed_later
from model_zoo import ARCHITECTURES, make_batch, make_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, TrainingArguments

import megatrain as mt
import megatrain.execute.deferred as deferred
import megatrain.load.deferral as deferral
from megatrain.execute.deferred import DeferredParameter
from megatrain.execute.engine import engine_of


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests count as large."""
    monkeypatch.setattr(deferral, "PLAIN_BYTES", 0)


def saved(folder: Path, name: str = "llama", **changes: Any) -> Path:
    make_model(name, **changes).save_pretrained(folder / "model", max_shard_size="20KB")
    return folder / "model"


def load_plainly(folder: Path, model_class: Any = AutoModelForCausalLM, **keywords: Any) -> Any:
    mt.init(device="cpu", defer_loading=False)
    model = model_class.from_pretrained(folder, **keywords)
    mt.init(device="cpu")
    assert num_deferred(model) == 0
    return model


def num_deferred(model: nn.Module) -> int:
    return sum(isinstance(parameter, DeferredParameter) for parameter in model.parameters())


def load(folder: Path, model_class: Any = AutoModelForCausalLM, **keywords: Any) -> Any:
    model = model_class.from_pretrained(folder, **keywords)
    assert num_deferred(model) == len(list(model.parameters())) > 0
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_plain_loading_streamed_and_read(tmp_path: Path, name: str, dtype: str) -> None:
    folder, model_class = saved(tmp_path, name), type(make_model(name))
    plain = load_plainly(folder, model_class, dtype=dtype)
    state = plain.state_dict()
    for take in (lambda model: closed_later(mt.stream(model)), lambda model: model):
        model = load(folder, model_class, dtype=dtype)
        assert (model.dtype, model.device, model.training) == (plain.dtype, plain.device, plain.training)
        assert model.num_parameters() == plain.num_parameters()
        model = take(model)
        assert_equal(state, model.state_dict())
        assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))
        assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert num_deferred(model) == 0


def test_the_base_model_and_a_head_that_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path, "mixtral")
    assert_equal(load_plainly(folder, AutoModel).state_dict(), load(folder, AutoModel).state_dict())
    caplog.clear()
    classifier = load(folder, AutoModelForSequenceClassification)
    assert "score.weight" in caplog.text and "initialised anew" in caplog.text
    assert classifier.score.weight.std().item() == pytest.approx(classifier.config.initializer_range, rel=0.5)
    body = {name: value for name, value in classifier.state_dict().items() if name != "score.weight"}
    whole = load_plainly(folder).state_dict()
    assert_equal({name: value for name, value in whole.items() if name != "lm_head.weight"}, body)


def test_the_mission_s_snippet(tmp_path: Path) -> None:
    """With the arguments' precision, which is known when the weights go home."""
    folder = saved(tmp_path, dtype=torch.bfloat16)
    data = [{key: value[0] for key, value in make_batch().items()}] * 8
    arguments = TrainingArguments(tmp_path / "out", max_steps=2, use_cpu=True, bf16=True, report_to=[])
    states = []
    for load_model in (load, load_plainly):
        model = load_model(folder, torch_dtype=torch.float32)
        trainer = mt.Trainer(model=closed_later(model), train_dataset=data, args=arguments)
        assert engine_of(model).precision == "bf16"
        trainer.train()
        states.append(mt.full_state_dict(model))
    assert_equal(*states)


# Used before it is streamed


def ask(model: Any) -> Any:
    return model(**make_batch()).loss


USES: dict[str, Callable[[Any], Any]] = {
    "forward": ask,
    "inference": lambda model: torch.inference_mode()(ask)(model),
    "generate": lambda model: model.generate(make_batch()["input_ids"], max_new_tokens=2, do_sample=False),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to": lambda model: model.to("cpu"),
    "save_pretrained": lambda model: model.save_pretrained(model.name_or_path + "-again"),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), kwargs=make_batch()
    ),
    "compile": lambda model: torch.compile(model, backend="eager")(**make_batch()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}


def test_a_model_is_compiled_beside_streamed_ones(tmp_path: Path) -> None:
    """Weights are read before the tracing, which no streamed model disturbs; later they cannot be, and it says so."""
    folder = saved(tmp_path)
    expected = ask(load_plainly(folder))
    streamed = mt.stream(load_plainly(folder))
    compiled = torch.compile(load(folder), backend="eager")
    assert torch.equal(ask(compiled), expected)
    model = load(folder)
    with pytest.raises(Exception, match=r"model.embed_tokens.weight is still in its file.*torch.compile\(model\)"):
        torch.compile(ask, backend="eager")(model)
    assert num_deferred(model) and torch.equal(ask(model), expected)
    torch._dynamo.reset()
    assert torch.equal(ask(streamed), expected)


@pytest.mark.parametrize("use", USES)
def test_whoever_asks_for_the_weights_has_a_plain_model(tmp_path: Path, use: str) -> None:
    folder = saved(tmp_path)
    plain, model = load_plainly(folder), load(folder)
    held = list(model.parameters())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    result = USES[use](model)
    assert num_deferred(model) == 0
    assert all(one is other and type(one) is nn.Parameter for one, other in zip(held, model.parameters(), strict=True))
    assert_equal(plain.state_dict(), model.state_dict())
    if isinstance(result, nn.Module):
        assert_equal(plain.state_dict(), result.state_dict())
    assert_same_step(plain, model, ask)
    for optimizer in optimizers:
        optimizer.step()
    assert_equal(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16)])
def test_conversions(tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    folder = saved(tmp_path)
    plain, model = convert(load_plainly(folder)), convert(load(folder))
    assert plain.dtype == model.dtype
    assert_equal(plain.state_dict(), model.state_dict())


def test_what_needs_no_value_reads_none(tmp_path: Path) -> None:
    model = load(saved(tmp_path))
    count = num_deferred(model)
    model.train().eval().requires_grad_(False).requires_grad_(True)
    model.gradient_checkpointing_enable()
    model.zero_grad()
    torch.optim.AdamW(model.parameters())
    assert not model.lm_head.weight.is_meta and model.lm_head.weight.grad is None
    assert "not read yet" in repr(model.lm_head.weight)
    assert model.get_memory_footprint() > sum(p.numel() * p.element_size() for p in model.parameters()) - 1
    assert num_deferred(model) == count


def test_one_layer_is_read_and_the_rest_is_streamed(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    plain, model = load_plainly(folder), load(folder)
    count = num_deferred(model)
    for each in (plain, model):
        torch.manual_seed(3)
        each.resize_token_embeddings(99)
        with torch.no_grad():
            each.model.layers[1].mlp.up_proj.weight.mul_(2.0)
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    layer = list(model.model.layers[1].parameters())
    assert num_deferred(model) == count - 2 - len(layer)
    assert not any(isinstance(parameter, DeferredParameter) for parameter in layer)
    closed_later(mt.stream(model))
    assert_equal(plain.state_dict(), model.state_dict())
    assert_same_step(plain, model, ask)


def test_adapters_are_put_on_before_anything_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = saved(tmp_path)
    models = []
    for load_model in (load_plainly, load):
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(load_model(folder), config))
    plain, model = models
    assert num_deferred(model) > 20
    closed_later(mt.stream(model))
    assert_same_step(plain, model, ask)
    plain.save_pretrained(tmp_path / "adapter")
    # A folder of an adapter: transformers loads the base model, then into it.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert num_deferred(again) == 0
    assert torch.equal(ask(again), ask(plain))


def test_a_layer_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(saved(tmp_path))
    monkeypatch.setattr(deferred, "free_host_bytes", lambda: 1000)
    with pytest.raises(mt.UserError, match=r"embed_tokens.weight was asked for before mt.stream.*are free.*mt.Trainer"):
        ask(model)
    monkeypatch.undo()
    assert num_deferred(model) > 20


def test_a_damaged_file_is_told_when_it_is_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(mt.UserError, match="damaged or was cut short"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_model_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    import gc

    model = load(saved(tmp_path))
    ask(model)
    gone = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert gone() is None


# What is loaded as ever


def test_what_is_not_for_streaming_is_loaded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    plain = load_plainly(folder).state_dict()
    for keywords in ({"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"state_dict": dict(plain)}):
        path = None if "state_dict" in keywords else folder
        config = {} if path else {"config": transformers.LlamaConfig.from_pretrained(folder)}
        model = transformers.LlamaForCausalLM.from_pretrained(path, **config, **keywords)
        assert num_deferred(model) == 0
        assert_equal(plain, model.state_dict())
    torch.save(plain, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert num_deferred(AutoModelForCausalLM.from_pretrained(tmp_path)) == 0
    monkeypatch.setattr(deferral, "PLAIN_BYTES", 2**30)
    assert num_deferred(AutoModelForCausalLM.from_pretrained(folder)) == 0


def test_a_model_without_repeated_blocks(tmp_path: Path) -> None:
    folder = saved(tmp_path, num_hidden_layers=0)
    assert num_deferred(AutoModelForCausalLM.from_pretrained(folder)) == 0


def test_a_pipeline(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 4}, unk_token="b"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="b")
    answers = []
    for load_model in (load_plainly, load):
        model = load_model(saved(tmp_path))
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        answers.append(pipe("a b", max_new_tokens=3, do_sample=False, return_tensors=True))
    assert answers[0] == answers[1]


def test_quantised_models_are_for_transformers(tmp_path: Path) -> None:
    """The reader of the quantised format is asked, as in plain transformers."""
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match="Unknown quantization type"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config={"quant_method": "none-such"})


def test_switched_off_transformers_is_as_it_was(tmp_path: Path) -> None:
    names = ("_load_pretrained_model", "_finalize_model_loading")
    own = {name: vars(transformers.PreTrainedModel)[name].__func__ for name in names}
    assert {function.__module__ for function in own.values()} == {"megatrain.load.interception"}
    mt.init(device="cpu", defer_loading=False)
    for name in names:
        assert vars(transformers.PreTrainedModel)[name].__func__.__module__ == "transformers.modeling_utils"
    with pytest.raises(mt.UserError, match="defer_loading=1 must be True or False"):
        mt.init(defer_loading=1)
