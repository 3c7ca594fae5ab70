"""Files that could not be written: which one, why in words, and what helps.

Each library tells it in its own way: OSError with or without a name, `torch.save` a RuntimeError without a reason,
safetensors a text with the number of the error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from megatrain.base.units import format_bytes
from megatrain.save.checkpoints import checkpoints_in

_TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "unexpected pos")

_CAUSES = {
    errno.EDQUOT: "the quota on that disk is used up; make room there, or save to another disk",
    errno.EROFS: "the file system is read-only; save to another disk",
    errno.EACCES: "this process may not write there; change the permissions, or save to another folder",
    errno.ENOENT: "its folder has gone while it was written",
}


class WriteError(OSError):
    """A file could not be written. The message names it, with the reason and a remedy."""

    def __str__(self) -> str:
        return self.args[1]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written in the block is told as WriteError; other errors are raised as they are.

    path: the file, or a folder: then it is the file in it that was written last, where the error does not name one.
    """
    try:
        yield
    except Exception as error:  # safetensors' own is derived from nothing else
        number = _number(error)
        if number is None or isinstance(error, WriteError):
            raise
        raise _told(number, error, path) from error


def said_of_earlier(target: Path) -> str:
    """What is true of the checkpoints before the one that was not saved."""
    others = [folder for folder in checkpoints_in(target.parent) if folder != target]
    return f"{others[-1].name}, the last before it, is as it was" if others else "there is no checkpoint before it"


def _number(error: Exception) -> int | None:
    """The errno of what was not written; None for an error of another kind."""
    if isinstance(error, OSError):
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    return errno.EIO if any(words in str(error) for words in _TORCH_WRITE_ERRORS) else None


def _told(number: int, error: Exception, path: Path) -> WriteError:
    given = getattr(error, "filename", None)
    if given is not None:
        path = Path(os.fsdecode(given))
    elif path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        path = max(files, key=lambda file: file.stat().st_mtime_ns, default=path)
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    is_limited = limit_bytes != resource.RLIM_INFINITY
    if number == errno.EIO and is_limited and path.is_file() and path.stat().st_size >= limit_bytes:
        number = errno.EFBIG  # torch.save gives no reason
    if number == errno.EFBIG and is_limited:
        cause = f"files of this process may have {format_bytes(limit_bytes)} at most; raise that limit (`ulimit -f`)"
    elif number == errno.EFBIG:
        cause = "it is larger than files of its file system may be; save to another disk"
    elif number == errno.EIO:
        cause = str(error).splitlines()[0]
    else:
        cause = _CAUSES.get(number, os.strerror(number))
    return WriteError(number, f"{path.name} could not be written in {path.parent}: {cause}")
