"""What a checkpoint has beside weights and optimizer, looked at before any of it is taken over."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from megatrain.base.errors import UserError, one_line

RANDOM_NAME = "rng_state.pth"


def check_state(folder: Path) -> None:
    """Raises UserError for a trainer_state.json that is none."""
    path = folder / TRAINER_STATE_NAME
    try:
        state = TrainerState.load_from_json(str(path))
    except (OSError, ValueError, TypeError) as error:
        raise _not_written(path, error) from error
    for name in ("global_step", "max_steps"):
        value = getattr(state, name)
        if not isinstance(value, int) or value < 0:
            raise UserError(f"{path}: {name} is {value!r}, and must be a whole number and not negative: {_REMEDY}")


def check_random_state(folder: Path) -> None:
    """Raises UserError for random numbers that cannot be gone on with. Checkpoints of other programs may have none, or
    those of several processes."""
    path = folder / RANDOM_NAME
    if not path.is_file():
        return
    try:
        with safe_globals():
            saved = torch.load(path, weights_only=True)
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        torch.Generator().set_state(saved["cpu"])
    except Exception as error:  # whatever unpickling and generators make of other bytes
        raise _not_written(path, error) from error


def read_foreign_optimizer(path: Path) -> Any:
    """Of plain transformers: mapped, not read. Raises UserError for what is none."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever unpickling makes of other bytes
        raise _not_written(path, error) from error


def load_scheduler(scheduler: Any, folder: Path) -> Callable[[], None]:
    """Take over the saved schedule. Returns what takes it back. Raises UserError, the schedule as it was, for one of
    another kind."""
    path = folder / SCHEDULER_NAME
    try:
        saved = torch.load(path, weights_only=True)
        names = set(saved)
    except Exception as error:  # whatever unpickling makes of other bytes
        raise _not_written(path, error) from error
    before = copy.deepcopy(scheduler.state_dict())

    def take_back() -> None:
        scheduler.load_state_dict(copy.deepcopy(before))

    lacking = sorted(name for name in before.keys() - names if not name.startswith("_") and name != "verbose")
    if lacking:
        raise UserError(
            f"{path} is of another schedule than {type(scheduler).__name__}: it has no {lacking[0]!r}. Go on with the "
            "lr_scheduler_type that it was saved with, or start a new run from the weights"
        )
    try:
        scheduler.load_state_dict(saved)
    except Exception as error:  # of schedulers of anybody
        take_back()
        raise _not_written(path, error) from error
    return take_back


_REMEDY = "choose another checkpoint"


def _not_written(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not what was written ({one_line(error)}): {_REMEDY}")
