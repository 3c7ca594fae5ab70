"""An mt.stream that fails half way loses nothing: the model is as it was, and can be used, or streamed, again."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_same_step, closed_later
from model_zoo import make_batch, make_model
from torch import nn
from transformers import AutoModelForCausalLM

import megatrain as mt
import megatrain.load.deferral as deferral
from megatrain import api
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.execute.deferred import DeferredParameter
from megatrain.execute.engine import Engine
from megatrain.plan.placement import Place
from megatrain.store.home import Home


def ask(model: Any) -> torch.Tensor:
    return model(**make_batch()).loss


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException, method: str = "write") -> None:
    """The call of that number raises, and those after it."""
    plain, calls = getattr(Home, method), []

    def call(self: Home, *args: Any) -> Any:
        calls.append(self)
        if len(calls) >= number:
            raise copy.copy(error)  # one that is raised again would hold the frames of every model
        return plain(self, *args)

    monkeypatch.setattr(Home, method, call)


# Weights in memory


@pytest.mark.parametrize("error", [MemoryError("none left"), KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("number", [1, 8, 20])
def test_weights_that_went_home_come_back(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu")
    model, plain = make_model("llama"), make_model("llama")
    before, parameters = copied(model), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        fail_at(patch, number, error)
        with pytest.raises(type(error)):
            stream(model)
    assert_equal(before, model.state_dict())
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert_same_step(plain, model, ask)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    now = copied(model)
    closed_later(stream(model))
    assert_equal(now, model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [None, "disk", "hbm", Place(low="disk")])
def test_they_come_back_exact_from_every_tier(
    dtype: torch.dtype, places: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mt.init(device="cpu", precision="bf16", offload_dir=tmp_path)
    model = make_model("llama").to(dtype)
    before = copied(model)
    with monkeypatch.context() as patch:
        fail_at(patch, 15, MemoryError("none left"))
        with pytest.raises(MemoryError):
            stream(model, options=StreamOptions(places=places))
    assert_equal(before, model.state_dict())
    closed_later(stream(model, options=StreamOptions(places=places)))
    assert_equal(before, mt.full_state_dict(model) if dtype == torch.float32 else model.state_dict())


def test_weights_that_were_rounded_do_not_come_back_as_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bf16 master of a float32 model."""
    mt.init(device="cpu", precision="bf16", master="bf16")
    model = make_model("llama")
    with monkeypatch.context() as patch:
        fail_at(patch, 8, MemoryError("none left"))
        with pytest.raises(MemoryError):
            stream(model)
    assert "rounded to torch.bfloat16" in caplog.text and "load the model anew" in caplog.text
    with pytest.raises(mt.UserError, match="embed_tokens.weight lost its values to an mt.stream.*load the model anew"):
        stream(model)


def test_weights_that_cannot_be_read_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What went wrong first is what is raised, and the next mt.stream says what it left."""
    mt.init(device="cpu")
    model = make_model("llama")
    with monkeypatch.context() as patch:
        fail_at(patch, 8, MemoryError("none left"))
        fail_at(patch, 3, OSError(5, "Input/output error"), "read")
        with pytest.raises(MemoryError):
            stream(model)
    assert "Input/output error" in caplog.text and "load the model anew" in caplog.text
    with pytest.raises(mt.UserError, match="lost its values to an mt.stream.*load the model anew"):
        stream(model)


def test_a_model_that_shares_a_parameter_with_a_streamed_one() -> None:
    mt.init(device="cpu")
    model, other = make_model("llama"), make_model("llama")
    other.lm_head.weight = model.lm_head.weight
    closed_later(stream(model))
    with pytest.raises(mt.UserError, match="lm_head.weight lost its values to an mt.stream"):
        stream(other)


def num_engines() -> int:
    gc.collect()
    return sum(type(one) is Engine for one in gc.get_objects())


def test_a_failed_stream_leaves_no_lanes_and_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu")
    model, threads = make_model("llama"), threading.active_count()
    engines = num_engines()
    fail_at(monkeypatch, 8, error := MemoryError("none left"))
    with pytest.raises(MemoryError):
        stream(model)
    assert threading.active_count() <= threads, "also while somebody holds the error, and with it the frames"
    error.__traceback__ = None
    assert num_engines() <= engines


def test_values_that_initialize_makes_are_made_again() -> None:
    mt.init(device="cpu")
    truth = make_model("llama")
    state = copied(truth)
    with torch.device("meta"):
        model = type(truth)(truth.config)
    model.model.rotary_emb = truth.model.rotary_emb
    asked: list[str] = []

    def initialize(name: str, *_: Any) -> torch.Tensor:
        asked.append(name)
        if len(asked) == 8:
            raise MemoryError("none left")
        return state[name]

    with pytest.raises(MemoryError):
        stream(model, initialize)
    closed_later(stream(model, initialize))
    assert_equal(state, model.state_dict())


# Weights in files


def in_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Path]]:
    """A plain model, one whose weights are in its files, and the files."""
    monkeypatch.setattr(deferral, "PLAIN_BYTES", 0)
    make_model("llama").save_pretrained(folder, max_shard_size="20KB")
    mt.init(device="cpu", defer_loading=False)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    mt.init(device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert num_deferred(model) == len(list(model.parameters()))
    return plain, model, sorted(folder.glob("*.safetensors"))


def num_deferred(model: nn.Module) -> int:
    return sum(isinstance(parameter, DeferredParameter) for parameter in model.parameters())


def streamed_again(model: Any) -> Any:
    return closed_later(mt.stream(model))


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize("use", [streamed_again, lambda model: model])
def test_a_file_that_is_whole_again_is_read_again(
    index: int, use: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model, files = in_files(tmp_path, monkeypatch)
    whole = files[index].read_bytes()
    files[index].write_bytes(whole[:-50])
    for _ in range(2):
        with pytest.raises(mt.UserError, match="cut short.*get that file anew; nothing was loaded"):
            mt.stream(model)
        assert num_deferred(model) == len(list(model.parameters()))
    files[index].write_bytes(whole)
    model = use(model)
    assert_equal(plain.state_dict(), model.state_dict())
    assert_same_step(plain, model, ask)


def test_what_was_read_ahead_in_vain_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is bad while another failure ends the stream, and whole before the next one."""
    plain, model, files = in_files(tmp_path, monkeypatch)
    kept = {file: file.read_bytes() for file in files}
    with monkeypatch.context() as patch:
        # Behind the first layer of all, with the next one announced.
        fail_at(patch, 1, MemoryError("none left"))
        for file in files[1:]:
            file.write_bytes(kept[file][:-50])
        with pytest.raises((MemoryError, mt.UserError)):
            mt.stream(model)
    for file in files:
        file.write_bytes(kept[file])
    assert_equal(plain.state_dict(), streamed_again(model).state_dict())


def test_a_layer_that_was_asked_for_before_comes_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, _ = in_files(tmp_path, monkeypatch)
    count = num_deferred(model)
    for each in (plain, model):
        with torch.no_grad():
            each.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    read = count - num_deferred(model)
    with monkeypatch.context() as patch:
        fail_at(patch, 15, MemoryError("none left"))
        with pytest.raises(MemoryError):
            mt.stream(model)
    assert read > 1 and num_deferred(model) == count - read
    assert_equal(plain.state_dict(), streamed_again(model).state_dict())


def test_an_interrupt_while_homes_take_over_gives_the_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu", precision="fp32")
    model = make_model("llama")
    before = dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in before.items()}
    replace = api.replace_parameters

    def half_way(*args: Any) -> None:
        replace(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "replace_parameters", half_way)
    with pytest.raises(KeyboardInterrupt):
        mt.stream(model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in values)
    monkeypatch.undo()
    closed_later(mt.stream(model))
