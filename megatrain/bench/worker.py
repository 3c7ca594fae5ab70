"""The process of one row: `python -m megatrain.bench.worker FD JOB`, where JOB is JSON. It tells the file descriptor
FD, line by line in JSON, how far it is, and last `{"figures": ...}` or `{"problem": ..., "kind": ...}`.

Rule: it ends with the process that began it, and where host memory runs out, before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from megatrain.base.errors import UserError, one_line

PR_SET_PDEATHSIG = 1
DEVICE_MEMORY, HOST_MEMORY, REFUSED, FAILED = "device memory", "host memory", "refused", "failed"
"""Kinds of problem."""


def main(arguments: list[str]) -> None:
    descriptor, job = int(arguments[0]), json.loads(arguments[1])
    _end_with_parent()
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:

        def tell(event: dict[str, Any]) -> None:
            pipe.write(json.dumps(event) + "\n")
            pipe.flush()

        tell(outcome(job, tell))
    sys.stdout.flush()
    # Unmapping and unlocking a hundred GiB in order takes longer than the measurement.
    os._exit(0)


def outcome(job: dict[str, Any], tell: Any) -> dict[str, Any]:
    """job: {"work": fields of Work, "variant": fields of a peer's Variant, or None for this library}."""
    import torch

    from megatrain.bench.peers import Variant, measure_peer
    from megatrain.bench.streamed import measure_streamed
    from megatrain.bench.work import Work

    work, variant = Work(**job["work"]), job["variant"]
    try:
        if variant is None:
            return {"figures": measure_streamed(work, tell)}
        return {"figures": measure_peer(Variant(**variant), work, tell)}
    except torch.OutOfMemoryError as error:
        return {"kind": DEVICE_MEMORY, "problem": f"out of device memory ({_short(error)})"}
    except MemoryError as error:
        return {"kind": HOST_MEMORY, "problem": f"out of host memory ({_short(error)})"}
    except UserError as error:
        return {"kind": REFUSED, "problem": str(error)}
    except Exception as error:  # Of whatever the peer is made of: its row says so, and the others go on.
        name, text = type(error).__name__, _short(error)
        return {"kind": FAILED, "problem": f"failed: {text if text.startswith(name) else f'{name}: {text}'}"}


def _short(error: BaseException) -> str:
    """The first two sentences: PyTorch's next ones tell of every process on the device."""
    return ". ".join(one_line(error).split(". ")[:2])


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        # What the kernel ends first where host memory runs out is this row, and not the benchmark.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
