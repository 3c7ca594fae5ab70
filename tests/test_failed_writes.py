"""Files that could not be written are named, with the reason; what is said of other checkpoints is true."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from saving_helpers import AtStep, make_trainer

import megatrain as mt
from megatrain.run_log import LOG_NAME
from megatrain.save.failed_writes import WriteError, writing
from megatrain.save.tensor_files import Entry, TensorFile
from megatrain.store.disk_calls import DiskCalls


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("limit_bytes", "name"), [(30_000, "optimizer.safetensors"), (3_000, "training_args.bin")])
def test_a_limit_of_file_sizes_is_named_with_the_file(
    tmp_path: Path, limit_bytes: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """30,000 is no multiple of a block: a part of one is written, and the rest cannot go past the page cache."""
    trainer = make_trainer(tmp_path, max_steps=2)
    with files_of_at_most(limit_bytes):
        trainer.train()
    told = f"checkpoint-2 was not saved ({name} could not be written in {tmp_path}"
    assert told in caplog.text
    assert "files of this process may have" in caplog.text and "`ulimit -f`" in caplog.text
    assert "training goes on, and there is no checkpoint before it" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_the_checkpoint_before_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        limit = AtStep(3, lambda: stack.enter_context(files_of_at_most(30_000)))
        make_trainer(tmp_path, None, {"callbacks": [limit]}, max_steps=4).train()
    assert "training goes on, and checkpoint-2, the last before it, is as it was" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", LOG_NAME}


def test_a_model_that_is_saved_at_the_end_tells_it_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    with files_of_at_most(10_001), pytest.raises(WriteError, match=r"model.safetensors could not .* files of this"):
        trainer.save_model(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a could not be written in .*: the quota on that disk is"),
        (OSError(errno.EROFS, "Read-only", "elsewhere/b"), "b could not .* in elsewhere: the file system is"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "a could not be written .* the quota"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "a could .* Pytorch"),
        (OSError(errno.EFBIG, "File too large"), "a could not .* larger than files of its file system may be"),
        (OSError(errno.ENOSPC, "No space left"), "a could not be written in .*: No space left on device"),
    ],
)  # fmt: skip
def test_causes_in_words(tmp_path: Path, error: Exception, told: str) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "a").touch()
    os.utime(tmp_path / "old", (0, 0))
    with pytest.raises(WriteError, match=told), writing(tmp_path):
        raise type(error)(*error.args, *([error.filename] if getattr(error, "filename", None) else []))
    with pytest.raises(mt.UserError), writing(tmp_path):
        raise mt.UserError("of another kind")


class FirstPartOnly(DiskCalls):
    """The first write takes a part of a page."""

    is_first = True

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        if self.is_first:
            self.is_first = False
            return os.pwritev(fd, [view[:4096]], offset) - 3000  # what was cut is written again
        return super().write(fd, view, offset)


def test_a_write_that_stopped_inside_of_a_page_goes_on(tmp_path: Path) -> None:
    tensor = torch.arange(9_000)
    file = TensorFile(tmp_path / "a.safetensors", [Entry.of("x", tensor)], lambda: None, FirstPartOnly())
    file.write("x", tensor)
    assert file.close().num_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], tensor)
