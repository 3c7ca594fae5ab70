"""The half of `Trainer` that saves and loads.

A checkpoint folder appears only when it is complete, with a manifest of its files, and weights are read back into their
homes group by group.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from megatrain.arguments import num_times
from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent
from megatrain.base.units import format_bytes
from megatrain.execute.engine import Engine
from megatrain.execute.model import without_card
from megatrain.save.card import WEIGHTS, write_card, write_facts
from megatrain.save.checkpoints import check_sound, checkpoints_in, newest_sound, write_manifest
from megatrain.save.folder import whole_folder
from megatrain.save.weights import checkpoint_bytes, read_exact, read_weights, save_exact
from megatrain.trainer_card import trainer_facts

logger = logging.getLogger("megatrain")


class CheckpointingTrainer(transformers.Trainer):
    """Over a streamed model."""

    engine: Engine
    num_flops_per_token: int
    """As `floating_point_ops` counts them; 0 where it counts otherwise."""

    card_facts: Mapping[str, str] = {}
    """More lines for the model card: name -> fact."""

    def sound_checkpoint(self, given: str | bool | None) -> str | bool | None:
        """What `resume_from_checkpoint` means: for True the newest checkpoint that is not damaged, if there is any.

        Raises UserError that names the damaged files of the one that is given, or of the last where all are damaged.
        """
        if given is True and (known := checkpoints_in(Path(self.args.output_dir))):
            given = str(newest_sound(known, "resume_from_checkpoint=True"))
        elif isinstance(given, str) and os.path.isdir(given):
            check_sound(Path(given), "resume_from_checkpoint")
        return given

    def checkpoint_dir(self) -> str:
        """Of this step."""
        return _checkpoint_dir(self.args.output_dir, self.state.global_step)

    def check_space(self, num_steps: int) -> None:
        """Before the first step. Raises UserError where the disk cannot hold the checkpoints that are there at once."""
        args = self.args
        num_saves = num_times(args.save_strategy, args.save_steps, num_steps, args.num_train_epochs)
        if not num_saves:
            return
        limit = self.args.save_total_limit
        # The oldest goes only when the newest is complete.
        num_at_once = min(num_saves, limit + 1) if limit else 1
        optimizer = None if self.args.save_only_model else self.optimizer
        each_bytes = checkpoint_bytes(self.model, self.engine, optimizer)
        free_bytes = shutil.disk_usage(existing_parent(Path(self.args.output_dir))).free
        if num_at_once * each_bytes > free_bytes:
            raise UserError(
                f"output_dir: {self.args.output_dir} has {format_bytes(free_bytes)} free, and {num_at_once} of its "
                f"checkpoints need {format_bytes(num_at_once * each_bytes)}: make room there, choose a folder on "
                "another disk, or keep fewer (save_total_limit, save_only_model)"
            )
        if not limit and num_saves * each_bytes > free_bytes:
            logger.warning(
                "%s has room for %d of the %d checkpoints of this run (%s each): set save_total_limit",
                self.args.output_dir,
                free_bytes // each_bytes,
                num_saves,
                format_bytes(each_bytes),
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save complete weights, configuration and tokenizer, as from_pretrained() of plain transformers loads them.

        A card (README.md) says what was trained, unless there is one that is not this library's. Where the optimizer
        keeps an average of the weights, it is saved the same way in the folder `ema` beside them.
        """
        target = output_dir or self.args.output_dir
        needed_bytes = checkpoint_bytes(self.model, self.engine)
        with whole_folder(target, keep_others=True, needed_bytes=needed_bytes) as folder:
            self._save(str(folder))
            if not _internal_call and self.state.global_step:
                write_card(folder, trainer_facts(self), instead_of=Path(target))
        if not _internal_call and getattr(self.optimizer, "ema_decay", None) is not None:
            average = os.path.join(target, "ema")
            with self.optimizer.ema_weights(), whole_folder(average, needed_bytes=needed_bytes) as folder:
                self._save(str(folder))
                of_average = {WEIGHTS: f"their average over steps (decay {self.optimizer.ema_decay:g})"}
                write_card(folder, trainer_facts(self) | of_average)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is None and not isinstance(self.model, transformers.PreTrainedModel):
            # transformers writes the state of a plain module as it is, and a file cannot hold a tied weight twice.
            once = {name for name, _ in self.model.named_parameters()}
            again = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
            state_dict = {name: tensor for name, tensor in self.model.state_dict().items() if name not in again}
        with without_card(self.model):  # there is more to say, or nothing in a checkpoint
            super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """checkpoint-STEP in the output folder, in one piece."""
        run_dir = self._get_output_dir(trial=trial)
        target = _checkpoint_dir(run_dir, self.state.global_step)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._note_best_checkpoint(run_dir, target)
        optimizer = None if self.args.save_only_model else self.optimizer
        needed_bytes = checkpoint_bytes(self.model, self.engine, optimizer)
        with whole_folder(target, needed_bytes=needed_bytes) as folder:
            self.save_model(str(folder), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(folder))
                self._save_rng_state(str(folder))
            save_exact(self.model, self.engine, folder, is_whole=not self.args.save_only_model)
            self._note_callback_states()
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            write_facts(folder, trainer_facts(self))
            write_manifest(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(target)
        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _note_best_checkpoint(self, run_dir: str, target: str) -> None:
        if not self.state.best_global_step:
            return
        best = _checkpoint_dir(run_dir, self.state.best_global_step)
        if best == target or os.path.exists(best):
            self.state.best_model_checkpoint = best

    def _note_callback_states(self) -> None:
        states: dict[str, list[dict[str, Any]]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {name: s if len(s) > 1 else s[0] for name, s in states.items()}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        for name in (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME):
            if not os.path.isfile(os.path.join(resume_from_checkpoint, name)):
                raise UserError(
                    f"{resume_from_checkpoint} has no {name}, so training cannot go on from it exactly (it was saved "
                    "with save_only_model, or by something else): start a new run from its weights instead"
                )
        check_sound(Path(resume_from_checkpoint), "resume_from_checkpoint")
        read_weights(self.model, resume_from_checkpoint)
        read_exact(self.model, self.engine, Path(resume_from_checkpoint), required=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Mapped, not read: the saved moments need not fit beside those at home.
        path = os.path.join(checkpoint, OPTIMIZER_NAME)
        self.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        check_sound(best, "load_best_model_at_end")
        read_weights(self.model, best)
        read_exact(self.model, self.engine, best, required=False)


def _checkpoint_dir(run_dir: str, step: int) -> str:
    return os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
