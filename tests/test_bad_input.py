"""Bad input is a UserError that names the thing and the remedy, before any work: what was given stays as it was."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import Block, Stack, make_batch
from surface_helpers import assert_like, assert_same_state, loss_and_gradients, plain, streamed
from torch import nn
from transformers import LlamaForCausalLM

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.folder_lock import LOCK_NAME

# mt.init: keywords -> what the message must name.
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp16"}, "precision='fp16'.*fp32.*bf16"),
    ({"precision": torch.bfloat16}, "precision=torch.bfloat16.*fp32.*bf16"),
    ({"optimizer_compression": "3bit"}, "optimizer_compression='3bit'.*4bit"),
    ({"max_vram_gb": 0}, "max_vram_gb=0 .*positive"),
    ({"max_vram_gb": "80"}, "max_vram_gb='80'.*number of GB"),
    ({"max_vram_gb": True}, "max_vram_gb=True"),
    ({"max_vram_gb": float("nan")}, "max_vram_gb=nan"),
    ({"max_ram_gb": float("inf")}, "max_ram_gb=inf"),
    ({"max_ram_gb": -1.5}, "max_ram_gb=-1.5"),
    ({"offload_dir": 3}, "offload_dir=3 .*folder"),
    ({"offload_dir": ""}, "offload_dir=''.*folder"),
    ({"offload_dir": __file__}, "offload_dir=.*test_bad_input.py' is a file: give a folder"),
    ({"offload_dir": "a\0b"}, "offload_dir='a.x00b' .*folder"),
    ({"offload_dir": b"a"}, "offload_dir=b'a' .*folder"),
    ({"compile": "yes"}, "compile='yes'.*True or False"),
    ({"device": 2.5}, "device=2.5 is not known.*'cuda'"),
    ({"device": []}, "device=\\[\\] is not known"),
    ({"device": True}, "device=True is not known"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=str)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(mt.UserError, match=message):
        mt.init(**settings)
    # The settings of before are still in force.
    assert_like(streamed(), plain())


DEVICES = {
    "gpu": "device='gpu' is not known.*'cuda'",
    "mps": "device='mps' is not supported.*'cpu'",
    "meta": "device='meta' is not supported.*'cpu'",
    "cuda:99": "device='cuda:99'.*(no CUDA device; use device='cpu'|has \\d+ CUDA devices)",
}


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_is_not_there(device: str) -> None:
    mt.init(device=device)
    assert_refused_unharmed(DEVICES[device])


def assert_refused_unharmed(message: str, model: nn.Module | None = None) -> mt.UserError:
    """mt.stream refuses the model (a plain llama if none is given), which can still be trained, and streamed."""
    given = plain() if model is None else model
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in given.named_parameters()}
    with pytest.raises(mt.UserError, match=message) as raised:
        mt.stream(given)
    assert {name: (parameter, parameter.data_ptr()) for name, parameter in given.named_parameters()} == before
    if model is None:
        loss_and_gradients(given)
        mt.init(device="cpu")
        assert_like(mt.stream(given), plain())
    return raised.value


# Memory


def test_device_memory_too_small_for_one_layer_says_how_much_it_takes() -> None:
    mt.init(device="cpu", max_vram_gb=1e-5)
    error = assert_refused_unharmed("max_vram_gb=1e-05 is too small for one layer: 'model.layers.0'")
    needed_gb = re.search(r"need ([\d.e-]+) GB", str(error))
    assert needed_gb is not None
    mt.init(device="cpu", max_vram_gb=float(needed_gb[1]) * 1.01)
    assert_like(streamed(), plain())
    mt.init(device="cpu", max_vram_gb=float(needed_gb[1]) * 0.99)
    assert_refused_unharmed("too small for one layer")


def test_host_memory_too_small_says_how_much_is_missing() -> None:
    mt.init(device="cpu", max_ram_gb=1e-4)
    error = assert_refused_unharmed("LlamaForCausalLM needs .* of host memory .*raise max_ram_gb by .*, or give")
    added_kib = re.search(r"raise max_ram_gb by ([\d.]+) KiB", str(error))
    assert added_kib is not None
    mt.init(device="cpu", max_ram_gb=1e-4 + float(added_kib[1]) * 1.01 * 1024 / 1e9)
    assert_like(streamed(), plain())


def test_an_offload_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    mt.init(device="cpu", offload_dir=tmp_path / "file" / "under")
    assert_refused_unharmed("offload_dir=.*file/under' cannot be written .*: give a folder")

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    mt.init(device="cpu", offload_dir=tmp_path)
    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    assert_refused_unharmed("offload_dir=.*cannot be written .Permission denied.")


def test_an_offload_folder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu", offload_dir=tmp_path, max_ram_gb=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr("psutil.disk_usage", lambda path: type("Usage", (), {"free": 1024}))
        assert_refused_unharmed("needs .* in offload_dir=.*1.0 KiB free.*larger disk")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    mt.init(device="cpu", offload_dir=tmp_path, max_ram_gb=1e-4)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with monkeypatch.context():
        given = plain()
        with pytest.raises(mt.UserError, match="No space left on device.*give offload_dir a folder"):
            mt.stream(given)
        loss_and_gradients(given)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


# Models


class Plain(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def blocks(make: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(2))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
        nn.ModuleList(),
        Plain(blocks=nn.ModuleList([nn.ReLU()])),
    ],
    ids=["linear", "mlp", "no_parameters", "empty_list", "list_without_parameters"],
)
def test_no_repeated_blocks(model: nn.Module) -> None:
    assert_refused_unharmed(f"{type(model).__name__} has no repeated blocks to stream: .*ModuleList", model)


@pytest.mark.parametrize("thing", ["gpt2", None, [1]])
def test_no_model_at_all(thing: Any) -> None:
    with pytest.raises(mt.UserError, match=f"torch.nn.Module, got a {type(thing).__name__}: load the model first"):
        mt.stream(thing)


def with_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = Plain(embed=nn.Embedding(5, 4), blocks=blocks())
    weight = change(model.embed.weight.data)
    model.embed.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.to(torch.int8), "embed.weight has dtype torch.int8.*unquantised"),
        (lambda w: w.to(torch.uint8), "embed.weight has dtype torch.uint8.*unquantised"),
        (lambda w: w.to(torch.float8_e4m3fn), "embed.weight has dtype torch.float8_e4m3fn.*unquantised"),
        (lambda w: w.to(torch.complex64), "embed.weight has dtype torch.complex64"),
        (lambda w: w.double(), "embed.weight has dtype torch.float64.*float32 or bfloat16"),
        (lambda w: w.half(), "the model is in float16: load it in float32 or bfloat16"),
        (lambda w: w.to_sparse(), "embed.weight is torch.sparse_coo.*dense"),
        (lambda w: w.to("meta"), "embed.weight is on the meta device.*initialize"),
    ],
    ids=["int8", "uint8", "fp8", "complex", "double", "half", "sparse", "meta"],
)
def test_weights_that_cannot_be_taken_home(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    model = with_weight(change)
    if model.embed.weight.layout is torch.strided:
        assert_refused_unharmed(message, model)
    else:
        with pytest.raises(mt.UserError, match=message):
            mt.stream(model)
    assert all(block.weight.numel() for block in model.blocks)


SHARED: dict[str, Callable[[Stack], torch.Tensor]] = {
    "all": lambda model: model.embed.weight.data,
    "view": lambda model: model.embed.weight.data.view(-1).view_as(model.head.weight),
    "through numpy": lambda model: torch.from_numpy(model.embed.weight.detach().numpy()),
}


@pytest.mark.parametrize("name", SHARED)
def test_parameters_over_the_same_memory(name: str) -> None:
    model = Stack([Block(16) for _ in range(2)], lambda _, x: x)
    model.head.weight = nn.Parameter(SHARED[name](model))
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(
        mt.UserError, match=r"embed.weight and head.weight are two parameters .*head.weight = embedding"
    ):
        mt.stream(model)
    assert_same_state(model.state_dict(), expected)
    model.head.weight = model.embed.weight
    mt.stream(model)


def test_parameters_side_by_side_in_one_storage_are_two() -> None:
    model = Stack([Block(16) for _ in range(2)], lambda _, x: x)
    pair = torch.randn(2, *model.head.weight.shape)
    model.embed.weight, model.head.weight = nn.Parameter(pair[0]), nn.Parameter(pair[1])
    assert torch.equal(mt.stream(model).state_dict()["head.weight"], pair[1])


def test_an_expanded_parameter() -> None:
    model = Stack([Block(16) for _ in range(2)], lambda _, x: x)
    model.head.weight = nn.Parameter(torch.ones(1, 1).expand_as(model.head.weight))
    with pytest.raises(mt.UserError, match="head.weight has elements that share memory"):
        mt.stream(model)


def test_lazy_weights() -> None:
    with pytest.raises(mt.UserError, match="blocks.0.weight has no shape yet: run one batch"):
        mt.stream(Plain(blocks=blocks(lambda: nn.LazyLinear(3))))


def test_a_buffer_without_values() -> None:
    model = Plain(embed=nn.Embedding(5, 4), blocks=blocks())
    model.register_buffer("scale", torch.empty(3, device="meta"))
    assert_refused_unharmed("buffer scale is on the meta device.*include_buffers=False", model)


def test_initialize_without_use_and_of_the_wrong_kind() -> None:
    with pytest.raises(mt.UserError, match="initialize was given.*leave it out"):
        mt.stream(plain(), initialize=lambda name, shape, dtype: torch.zeros(shape))
    for value, got in ((torch.zeros(3), "shape \\(3,\\)"), (None, "a NoneType")):
        with torch.device("meta"):
            model = LlamaForCausalLM(plain().config)
        for module in model.modules():
            module._buffers = {name: torch.zeros(buffer.shape) for name, buffer in module._buffers.items()}
        with pytest.raises(mt.UserError, match=f"embed_tokens.weight.*returned {got}.*\\(96, 32\\)"):
            mt.stream(model, initialize=lambda name, shape, dtype, value=value: value)


STREAM_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_slots": 0}, "num_slots=0 .*at least 1"),
    ({"num_slots": 2.0}, "num_slots=2.0 .*whole number"),
    ({"num_slots": None}, "num_slots=None"),
    ({"max_drains": 0}, "max_drains=0 .*at least 1"),
    ({"max_drains": True}, "max_drains=True"),
    ({"activation_bytes": -1}, "activation_bytes=-1 .*at least 0"),
    ({"activation_bytes": 1e9}, "activation_bytes=1000000000.0 .*whole number"),
    ({"serial": 1}, "serial=1 must be True or False"),
    ({"poison": None}, "poison=None must be True or False"),
    ({"lane_delay_seconds": -0.1}, "lane_delay_seconds=-0.1 .*not negative"),
    ({"lane_delay_seconds": float("nan")}, "lane_delay_seconds=nan .*finite"),
    ({"lane_delay_seconds": float("inf")}, "lane_delay_seconds=inf .*finite"),
    ({"lane_delay_seconds": "1"}, "lane_delay_seconds='1'"),
    ({"kept_layers": ["blocks.0"]}, "kept_layers=.'blocks.0'. must be a mapping"),
    ({"kept_layers": None}, "kept_layers=None must be a mapping"),
    ({"kept_layers": "blocks.0"}, "kept_layers='blocks.0' must be a mapping"),
    ({"kept_layers": 5}, "kept_layers=5 must be a mapping"),
    ({"kept_layers": {"blocks.0": ["all"]}}, "'blocks.0' cannot keep .'all'.: use one of"),
    ({"kept_layers": {"blocks.0": None}}, "'blocks.0' cannot keep None: use one of"),
    ({"places": ["hbm"]}, "places=.'hbm'. must be a place"),
]


@pytest.mark.parametrize(("options", "message"), STREAM_OPTIONS, ids=str)
def test_stream_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mt.UserError, match=message):
        StreamOptions(**options)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"options": {"num_slots": 2}}, "options={'num_slots': 2} must be StreamOptions"),
        ({"options": 0}, "options=0 must be StreamOptions"),
        ({"bf16": "yes"}, "bf16='yes' must be True, False, or None"),
        ({"bf16": 1}, "bf16=1 must be"),
    ],
    ids=str,
)
def test_keywords_of_stream(keywords: dict[str, Any], message: str) -> None:
    model = plain()
    with pytest.raises(mt.UserError, match=message):
        mt.stream(model, **keywords)
    assert_like(mt.stream(model), plain())


# Forwards that cannot be streamed: an error at the first call, and not a wrong number


class Clamping(nn.Module):
    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.by_data = by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_data:
            self.inner.weight.data.clamp_(-0.1, 0.1)
        else:
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


def run_all(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("by_data", [True, False])
def test_a_forward_that_changes_its_weights(by_data: bool, with_grad: bool) -> None:
    model = mt.stream(Stack([Clamping(by_data), Clamping(by_data)], run_all))
    before = mt.full_state_dict(model)
    for _ in range(2):
        with torch.set_grad_enabled(with_grad), pytest.raises(mt.UserError, match="blocks.0 changes its own weights"):
            model(**make_batch())
    assert all(torch.equal(before[name], weight) for name, weight in mt.full_state_dict(model).items())


def test_an_embedding_that_renormalises_itself() -> None:
    model = Stack([nn.Linear(16, 16) for _ in range(2)], run_all)
    model.embed = nn.Embedding(96, 16, max_norm=0.5)
    assert_refused_unharmed("embed has max_norm=0.5.*max_norm=None", model)


def test_a_batch_on_another_device() -> None:
    model = streamed()
    with pytest.raises(mt.UserError, match="embed_tokens got a tensor on meta.*model.device"):
        model(input_ids=make_batch()["input_ids"].to("meta"))
    assert_like(model, plain())


def test_streaming_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(mt.UserError, match="inference_mode.*outside"):
        mt.stream(plain())
