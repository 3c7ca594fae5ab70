"""Raises KeyboardInterrupt where the interpreter looks for signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

OURS = ("megatrain/execute", "megatrain/transport", "megatrain/store", "contextlib.py")


def interrupted(run: Callable[[], Any], at: int | None, *, ours: Sequence[str] = OURS) -> int:
    """Raise KeyboardInterrupt at the `at`-th place where the interpreter looks for signals: where a function of ours
    starts, or a C function it called ends. Returns the number of places."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event not in ("call", "c_return") or not any(part in frame.f_code.co_filename for part in ours):
            return
        count += 1
        if count == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return count
