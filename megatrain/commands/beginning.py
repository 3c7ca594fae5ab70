"""What a command does when its run has been checked and begins to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class AtBegin(TrainerCallback):
    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._act()
