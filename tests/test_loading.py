"""mt.from_pretrained: bit-equal to transformers, for checkpoints of every kind that it loads, and plain words else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from comparing import assert_equal, assert_same_step, closed_later
from model_zoo import ARCHITECTURES, make_batch, make_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megatrain as mt
from megatrain.commands.model import _open_named
from megatrain.execute.engine import engine_of
from megatrain.load.interception import loading_by
from megatrain.loading import _Opening
from megatrain.models import ResolvedModel

BYTES = "20KB"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str = "llama", **changes: Any) -> Path:
        make_model(name, **changes).save_pretrained(tmp_path / "model", max_shard_size=BYTES)
        return tmp_path / "model"

    return save


def load(folder: Path, **keywords: Any) -> Any:
    return closed_later(mt.from_pretrained(folder, **keywords))


def assert_like_plain(folder: Path, model_class: Any = AutoModelForCausalLM, **keywords: Any) -> Any:
    """Weights, dtypes, ties, buffers, mode and configs. Returns the streamed model."""
    plain = model_class.from_pretrained(folder, **keywords)
    streamed = load(folder, model_class=model_class, **keywords)
    expected, state = plain.state_dict(), streamed.state_dict()
    assert_equal(expected, state)
    assert {name: value.dtype for name, value in expected.items()} == {name: v.dtype for name, v in state.items()}
    assert_equal(dict(plain.named_buffers()), dict(streamed.named_buffers()))
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in streamed.named_parameters()]
    modes = [{name: module.training for name, module in model.named_modules()} for model in (plain, streamed)]
    assert modes[0] == modes[1]
    assert str(plain.config) == str(streamed.config)
    assert str(getattr(plain, "generation_config", None)) == str(getattr(streamed, "generation_config", None))
    return streamed


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_transformers_for_every_architecture(
    saved: Callable[..., Path], name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused experts among them (mixtral, qwen3_moe, ...), whose files hold them one by one."""
    folder = saved(name)
    assert len(shards(folder)) > 1
    assert_like_plain(folder, type(make_model(name)), dtype=dtype)
    assert "megatrain" not in {record.name for record in caplog.records}


def test_trains_like_the_plain_model(saved: Callable[..., Path]) -> None:
    folder = saved("mixtral")
    streamed = load(folder, attn_implementation="eager").train()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    assert_same_step(plain, streamed, lambda model: model(**make_batch()).loss)
    ids = make_batch()["input_ids"]
    assert torch.equal(
        plain.eval().generate(ids, max_new_tokens=4, do_sample=False),
        streamed.eval().generate(ids, max_new_tokens=4, do_sample=False),
    )


def test_what_it_saves_has_the_names_that_it_read(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("qwen3_moe")
    load(folder).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert_equal({key: value for shard in shards(folder) for key, value in load_file(shard).items()}, again)


def test_shards_of_different_dtypes(saved: Callable[..., Path]) -> None:
    folder = saved()
    for index, shard in enumerate(shards(folder)):
        dtype = [torch.bfloat16, torch.float32, torch.float16][index % 3]
        save_file({key: value.to(dtype) for key, value in load_file(shard).items()}, shard, {"format": "pt"})
    assert_like_plain(folder)
    assert_like_plain(folder, dtype="bfloat16")


def test_bf16_with_parameters_that_stay_fp32(saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"}, raising=False)
    model = assert_like_plain(saved(), dtype="bfloat16")
    assert model.state_dict()["model.norm.weight"].dtype == torch.float32


def test_arguments_of_transformers(saved: Callable[..., Path]) -> None:
    folder = saved()
    config = LlamaConfig.from_pretrained(folder, rms_norm_eps=1e-3)
    model = load(folder, config=config, attn_implementation="eager", dtype=torch.bfloat16)
    assert (model.config.rms_norm_eps, model.config._attn_implementation) == (1e-3, "eager")
    assert engine_of(model).precision == "bf16"
    assert load(folder, hidden_act="relu").config.hidden_act == "relu"
    for shard in shards(folder):
        save_file({f"odd.{key}": value for key, value in load_file(shard).items()}, shard, {"format": "pt"})
    assert_like_plain(folder, key_mapping={r"^odd\.": ""})


# Tied weights


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_tied_weights_are_tied_whichever_of_them_the_files_have(
    saved: Callable[..., Path], has_head: bool, has_embedding: bool
) -> None:
    folder = saved("llama", tie_word_embeddings=True)
    for shard in shards(folder):
        tensors = load_file(shard)
        if "model.embed_tokens.weight" in tensors:
            weight = tensors.pop("model.embed_tokens.weight")
            tensors |= {"model.embed_tokens.weight": weight} if has_embedding else {}
            tensors |= {"lm_head.weight": weight.clone()} if has_head else {}
            save_file(tensors, shard, {"format": "pt"})
    if has_head or has_embedding:
        model = assert_like_plain(folder)
    else:
        model = load(folder)
        assert model.state_dict()["lm_head.weight"].std() > 0.01
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_with_two_values_are_not_tied(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = assert_like_plain(folder)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert "ties lm_head.weight to model.embed_tokens.weight" in caplog.text


# Missing, unexpected, other shapes


def test_the_base_model_s_files_and_a_head_that_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_model("llama")
    whole.model.save_pretrained(tmp_path, max_shard_size=BYTES)
    torch.manual_seed(5)
    model = load(tmp_path)
    assert "1 weight is not in the checkpoint and was initialised anew: lm_head.weight" in caplog.text
    state = model.state_dict()
    assert_equal(
        {name: value for name, value in state.items() if name != "lm_head.weight"},
        {f"model.{name}": value for name, value in whole.model.state_dict().items()},
    )
    assert state["lm_head.weight"].std().item() == pytest.approx(whole.config.initializer_range, rel=0.1)
    torch.manual_seed(5)
    assert torch.equal(load(tmp_path).state_dict()["lm_head.weight"], state["lm_head.weight"])
    torch.manual_seed(6)
    assert not torch.equal(load(tmp_path).state_dict()["lm_head.weight"], state["lm_head.weight"])


def test_what_a_model_says_that_it_may_lack_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").model.save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", {"lm_head"})
    assert load(tmp_path).state_dict()["lm_head.weight"].std() > 0.01
    assert not caplog.records


def test_a_whole_model_s_files_for_the_base_model(saved: Callable[..., Path]) -> None:
    assert_like_plain(saved("mixtral"), transformers.MixtralModel)


def test_unexpected_weights_are_named(saved: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = saved()
    shard = shards(folder)[0]
    save_file(load_file(shard) | {"vision.tower": torch.ones(2)}, shard, {"format": "pt"})
    assert_like_plain(folder)
    assert "1 weight in the checkpoint is not in the model and was left out: vision.tower" in caplog.text


def test_other_shapes_are_named(saved: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = saved()
    vocabulary, width = make_model("llama").model.embed_tokens.weight.shape
    config = LlamaConfig.from_pretrained(folder, vocab_size=vocabulary + 3)
    with pytest.raises(mt.UserError, match=rf"lm_head.weight .*\({vocabulary}, {width}\).*\({vocabulary + 3}, {width}"):
        mt.from_pretrained(folder, config=config)
    model = load(folder, config=config, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == (vocabulary + 3, width)
    assert "2 weights are not in the checkpoint" in caplog.text


# What cannot be loaded


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"model-00002-of-.*damaged or was cut short.*get that file anew"),
        (lambda path: path.write_bytes(b"\x00" * 99), "model-00002-of-.*damaged"),
        (lambda path: path.write_bytes(b""), "model-00002-of-.*damaged"),
        (lambda path: path.unlink(), "model-00002-of-.* is not there.*get the checkpoint anew"),
        (lambda path: (path.parent / "model.safetensors.index.json").write_text("{"), "cannot be loaded"),
        (lambda path: (path.parent / "model.safetensors.index.json").write_text("{}"), "cannot be loaded"),
        (lambda path: (path.parent / "config.json").write_text('{"model_type": "none"}'), "cannot be loaded.*none"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(
    saved: Callable[..., Path], spoil: Callable[[Path], None], message: str, dtype: str
) -> None:
    folder = saved()
    spoil(shards(folder)[1])
    with pytest.raises(mt.UserError, match=message):
        mt.from_pretrained(folder, dtype=dtype)


def test_a_checkpoint_without_safetensors(tmp_path: Path) -> None:
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(mt.UserError, match=r"no safetensors.*save_pretrained\(folder\).*mt.stream"):
        mt.from_pretrained(tmp_path)
    with pytest.raises(mt.UserError, match="nowhere: there is no such folder"):
        mt.from_pretrained(str(tmp_path / "nowhere"))


def test_an_adapter_is_refused(saved: Callable[..., Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(saved())
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(mt.UserError, match="holds an adapter.*peft"):
        mt.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize(
    "keywords",
    [{"device_map": "auto"}, {"quantization_config": {"bits": 4}}, {"state_dict": {}}, {"output_loading_info": True}],
)
def test_arguments_without_sense_are_refused_by_name(keywords: dict[str, Any]) -> None:
    with pytest.raises(mt.UserError, match=f"{next(iter(keywords))}=.*is not for a streamed model"):
        mt.from_pretrained("anything", **keywords)


def test_too_little_memory_is_told_before_a_weight_is_read(saved: Callable[..., Path]) -> None:
    mt.init(device="cpu", max_ram_gb=1e-4)
    with pytest.raises(mt.UserError, match="needs .* of host memory"):
        mt.from_pretrained(saved())


def test_transformers_is_as_it_was_afterwards(saved: Callable[..., Path]) -> None:
    names = ("_load_pretrained_model", "_finalize_model_loading", "init_weights", "tie_weights")
    before = {name: vars(PreTrainedModel)[name] for name in names}
    hook = transformers.utils.logging.set_tqdm_hook(None)
    folder = saved()
    load(folder)
    with pytest.raises(mt.UserError):
        mt.from_pretrained(folder, no_such_argument_of_llama=1, config=LlamaConfig.from_pretrained(folder))
    for name, value in before.items():
        now = vars(PreTrainedModel)[name]
        assert getattr(now, "__func__", now) is getattr(value, "__func__", value)
    assert hook is transformers.utils.logging.set_tqdm_hook(hook)
    assert logging.getLogger("transformers").level == transformers.utils.logging.get_verbosity()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert all(parameter.device.type == "cpu" for parameter in plain.parameters())


def test_other_threads_load_as_ever(saved: Callable[..., Path]) -> None:
    folder = saved()
    loader = _Opening(folder)
    with loading_by(loader), ThreadPoolExecutor(1) as pool:
        plain = pool.submit(AutoModelForCausalLM.from_pretrained, folder).result()
    assert loader.opened is None
    assert all(parameter.device.type == "cpu" for parameter in plain.parameters())
    # transformers itself puts stand-ins for some of its methods while it loads: calls must not put back each other's.
    before = {name: vars(PreTrainedModel)[name] for name in ("tie_weights", "init_weights")}
    with ThreadPoolExecutor(3) as pool:
        models = [closed_later(model) for model in pool.map(mt.from_pretrained, [folder] * 9)]
    assert {name: vars(PreTrainedModel)[name] for name in before} == before
    for model in models:
        assert_equal(plain.state_dict(), model.state_dict())


def test_the_command_reads_safetensors_home_and_other_files_whole(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, weights = _open_named(ResolvedModel(path=saved(), origin=""), "bfloat16", Console())
    assert weights is not None and model.device.type == "meta"
    assert "once before" not in capsys.readouterr().out
    plain = make_model("llama")
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    model, weights = _open_named(ResolvedModel(path=tmp_path, origin=""), "float32", Console(width=200))
    assert weights is None
    assert_equal(plain.state_dict(), model.state_dict())
    assert "all weights are in memory once before they go home" in capsys.readouterr().out
