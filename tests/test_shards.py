"""Reading ranges of safetensors files ahead, what it leaves in the page cache; random fills in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import assert_equal, closed_later
from model_zoo import make_model
from safetensors.torch import load_file, save_file

import megatrain as mt
from megatrain.load import shards
from megatrain.load.fills import PIECE_NUMEL, ParallelFills

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float8_e8m0fnu),
)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_tensors_are_those_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype, those included that only safetensors knows; scalars, empty ones, ones of several blocks."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(shards, "_MAPPED_BYTES", 8192)
    path = str(tmp_path / "a.safetensors")
    tensors = {str(dtype): torch.randn(33).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "large": torch.randn(100, 101)}
    save_file(tensors, path, {"format": "pt"})
    found = shards.read_headers([path])
    expected = load_file(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        made = found[key].read()
        assert (made.dtype, made.shape) == (value.dtype, value.shape)
        assert torch.equal(as_bytes(made), as_bytes(value))
        assert torch.equal(as_bytes(shards.Once(made)[...]), as_bytes(value))
    made = found["large"].read()
    made += 1  # its memory is its own
    assert torch.equal(found["large"].read(), expected["large"])


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_page_cache_is_left_as_it_was(tmp_path: Path, is_warm: bool) -> None:
    make_model("llama", hidden_size=256, vocab_size=16384).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if shards._is_cached(file.fileno()):
            pytest.skip("files of this file system are in memory")
        if is_warm:
            path.read_bytes()
        closed_later(mt.from_pretrained(tmp_path))
        assert shards._is_cached(file.fileno()) == is_warm


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "is not there"),
        (lambda path: os.truncate(path, path.stat().st_size - 9), "cut short.*it ends at byte"),
    ],
)
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    """Found while it is read ahead, told by whoever asks."""
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in paths:
        save_file({path.stem: torch.ones(50)}, path)
    found = shards.read_headers([str(path) for path in paths])
    ahead = shards.ReadAhead({name: {name: one} for name, one in found.items()})
    spoil(paths[1])
    ahead.announce("b")
    assert_equal({"a": torch.ones(50)}, ahead.take("a"))
    with pytest.raises(mt.UserError, match=message):
        ahead.take("b")


def test_the_next_layer_is_read_while_one_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path)
    announced, held = [], []
    announce, take = shards.ReadAhead.announce, shards.ReadAhead.take

    def record(self: shards.ReadAhead, unit: str) -> None:
        announced.append(unit)
        announce(self, unit)
        held.append(len(self._started))

    def taking(self: shards.ReadAhead, unit: str) -> dict[str, torch.Tensor]:
        announced.append(f"take {unit}")
        return take(self, unit)

    monkeypatch.setattr(shards.ReadAhead, "announce", record)
    monkeypatch.setattr(shards.ReadAhead, "take", taking)
    closed_later(mt.from_pretrained(tmp_path))
    for layer in range(2):
        # Announced before the layer after it is taken, once this one was.
        first, then = f"take model.layers.{layer}", f"model.layers.{layer + 1}"
        assert announced.index(first) < announced.index(then) < announced.index(f"take {then}")
    assert max(held) <= 2  # never more than a layer ahead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fills_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    def filled(threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(5)
        try:
            with ParallelFills():
                normal = torch.empty(3, PIECE_NUMEL // 2 + 77, dtype=dtype).normal_(1.0, 2.0)
                return [normal, torch.empty_like(normal).uniform_(-1.0, 3.0), torch.empty(5, dtype=dtype).normal_()]
        finally:
            torch.set_num_threads(before)

    one, three = filled(1), filled(3)
    assert all(map(torch.equal, one, three))
    normal, uniform = (value.float() for value in one[:2])
    assert normal.mean().item() == pytest.approx(1.0, abs=0.02)
    assert normal.std().item() == pytest.approx(2.0, rel=0.01)
    assert (uniform.mean().item(), uniform.min().item(), uniform.max().item()) == pytest.approx(
        (1.0, -1.0, 3.0), abs=0.02
    )
    # No piece repeats another, and the next fill goes on.
    flat = normal.flatten()
    assert not torch.equal(flat[:64], flat[PIECE_NUMEL : PIECE_NUMEL + 64])
    torch.manual_seed(5)
    torch.empty(5, dtype=dtype).normal_()
    plain = torch.empty(5, dtype=dtype).normal_()
    torch.manual_seed(5)
    with ParallelFills():
        small = [torch.empty(5, dtype=dtype).normal_() for _ in range(2)]
    assert torch.equal(small[1], plain)


def test_a_generator_of_its_own_is_honoured() -> None:
    with ParallelFills():
        values = [torch.empty(2 * PIECE_NUMEL).normal_(generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    plain = torch.empty(2 * PIECE_NUMEL).normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(values[0], plain) and torch.equal(values[1], plain) and not torch.equal(values[2], plain)
