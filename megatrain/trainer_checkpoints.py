"""The half of `Trainer` that saves and loads.

A checkpoint folder appears only when it is complete, with a manifest of its files, and weights are read back into their
homes group by group.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from megatrain.arguments import num_times
from megatrain.arithmetic import arithmetic_of, go_on_with
from megatrain.background_saves import BackgroundSaves, has_own_on_save
from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent
from megatrain.base.units import format_bytes
from megatrain.execute.engine import Engine
from megatrain.execute.model import without_card
from megatrain.execute.report import say_on_a_line_of_its_own
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.commit import check_whole
from megatrain.optim.saved import settings_of
from megatrain.resuming import check_random_state, check_state, load_scheduler, read_foreign_optimizer
from megatrain.run_plan import disk_write_rate
from megatrain.save.adapters import save_trained, saves_adapters
from megatrain.save.card import WEIGHTS, Facts, write_card, write_facts
from megatrain.save.checkpoints import (
    FOREIGN_OPTIMIZER_NAME,
    check_sound,
    checkpoints_in,
    drop_surplus,
    missing_in,
    newest_sound,
)
from megatrain.save.failed_writes import writing
from megatrain.save.folder import whole_folder
from megatrain.save.layers import can_save_by_layer
from megatrain.save.saving import Saving, spare_host_bytes
from megatrain.save.weights import check_saved, checkpoint_bytes, read_exact, read_optimizer, read_weights
from megatrain.stopping import StopWhenTold
from megatrain.trainer_card import trainer_facts

logger = logging.getLogger("megatrain")


class CheckpointingTrainer(transformers.Trainer):
    """Over a streamed model."""

    engine: Engine
    num_flops_per_token: int
    """As `floating_point_ops` counts them; 0 where it counts otherwise."""

    card_facts: Mapping[str, str] = {}
    """More lines for the model card: name -> fact."""

    notes_model = False
    """Whether `save_model` writes a manifest, as checkpoints have it. A folder of your own you may want to change."""

    most_rows: int | None = None
    """Of a micro-batch that run at a time, where the device did not hold more."""

    _stop: StopWhenTold | None = None
    _is_on_save_due = _has_failed_to_save = False
    _max_steps = 0
    """Of the run that is about to begin."""

    _left_behind: set[str] = set()
    """Checkpoints of later steps than the run began with: damaged, or of a branch that it does not go on."""

    def sound_checkpoint(self, given: str | bool | None) -> str | bool | None:
        """What `resume_from_checkpoint` means: for True the newest checkpoint that is not damaged, if there is any.

        Raises UserError that names the damaged files of the one that is given, or of the last where all are damaged.
        """
        if given is True and (known := checkpoints_in(Path(self.args.output_dir))):
            start = newest_sound(known, "resume_from_checkpoint=True")
            if start.passed_by:
                logger.warning("%s: resuming from %s", start.passed_by, start.folder.name)
            given = str(start.folder)
        elif isinstance(given, str) and os.path.isdir(given):
            check_sound(Path(given), "resume_from_checkpoint")
        return given

    @property
    def is_stopping(self) -> bool:
        """The run ends before its last step, because of a signal."""
        return self._stop is not None and self._stop.is_stopping

    @functools.cached_property
    def saves(self) -> BackgroundSaves:
        """The checkpoint that is being written, if there is one."""
        config = self.engine.config
        return BackgroundSaves(
            bytes_per_second=disk_write_rate(),
            clip=config.clip,
            on_error=config.on_save_error,
            is_behind=config.save_in_background,
        )

    def checkpoint_dir(self) -> str:
        """Of this step."""
        return _checkpoint_dir(self.args.output_dir, self.state.global_step)

    def check_optimizer_settings(self) -> None:
        """Before the first step. Raises UserError where a param group holds what no checkpoint could."""
        try:
            settings_of(self.optimizer)
        except UserError as error:
            if self.args.save_strategy != "no":
                raise
            logger.warning("%s: Ctrl-C would save a checkpoint, and now cannot", error)

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
        if line := self.saves.said_before(each_bytes, spare_host_bytes(self.engine), self.engine.plan):
            say_on_a_line_of_its_own(line)
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
        self.saves.finish()
        check_whole(self.engine, "saving")
        target = output_dir or self.args.output_dir
        is_trained = not _internal_call and self.state.global_step
        self._save_whole(target, trainer_facts(self) if is_trained else None, keep_others=True)
        if not _internal_call and getattr(self.optimizer, "ema_decay", None) is not None:
            of_average = {WEIGHTS: f"their average over steps (decay {self.optimizer.ema_decay:g})"}
            with self.optimizer.ema_weights():
                self._save_whole(os.path.join(target, "ema"), trainer_facts(self) | of_average)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_whole(self, target: str, facts: Facts | None, **how: Any) -> None:
        """A model to load, layer by layer. facts: for its card."""
        with contextlib.ExitStack() as stack:
            needed_bytes = checkpoint_bytes(self.model, self.engine)
            folder = stack.enter_context(whole_folder(target, needed_bytes=needed_bytes, **how))
            is_by_layer = can_save_by_layer(self.model)
            with writing(folder), without_progress_bar() if is_by_layer else contextlib.nullcontext():
                self._save(str(folder), {} if is_by_layer else None)
            if facts is not None:  # behind a card that peft writes
                write_card(folder, facts, instead_of=Path(target))
            if not is_by_layer:
                return
            saving = Saving(self.model, self.engine, None, folder, has_manifest=self.notes_model, is_checkpoint=False)
            context = stack.pop_all()
        saving.run(context)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is None and not isinstance(self.model, transformers.PreTrainedModel):
            # transformers writes the state of a plain module as it is, and a file cannot hold a tied weight twice.
            once = {name for name, _ in self.model.named_parameters()}
            again = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
            state_dict = {name: tensor for name, tensor in self.model.state_dict().items() if name not in again}
        with without_card(self.model):  # there is more to say, or nothing in a checkpoint
            super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """checkpoint-STEP in the output folder, in one piece. Layers are written beside the steps that come."""
        self.saves.finish()
        started = time.perf_counter()
        check_whole(self.engine, "saving a checkpoint", waits=False)  # what fails later fails the checkpoint
        run_dir = self._get_output_dir(trial=trial)
        target = _checkpoint_dir(run_dir, self.state.global_step)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        best_before = self.state.best_model_checkpoint
        self._note_best_checkpoint(run_dir, target)
        optimizer = None if self.args.save_only_model else self.optimizer

        def forget() -> None:
            self._is_on_save_due, self._has_failed_to_save = False, True
            if self.state.best_model_checkpoint == target:
                self.state.best_model_checkpoint = best_before

        self._has_failed_to_save = False
        spare_bytes, needed_bytes = spare_host_bytes(self.engine), checkpoint_bytes(self.model, self.engine, optimizer)
        with self.saves.told(target, forget, must_succeed=self.is_stopping):
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(whole_folder(target, needed_bytes=needed_bytes))
                with writing(folder):
                    saving = self._prepare_saving(folder, optimizer, spare_bytes)
                context = stack.pop_all()
            before_seconds = time.perf_counter() - started
            self.saves.begin(
                saving,
                context,
                target,
                is_behind=self._may_save_behind(),
                is_last=self.control.should_training_stop,
                before_seconds=before_seconds,
                num_bytes=needed_bytes,
                spare_bytes=spare_bytes,
                when_complete=functools.partial(self._end_checkpoint, run_dir, target, copy.copy(self.state)),
                when_failed=forget,
            )

    def _may_save_behind(self) -> bool:
        """Nobody waits for the checkpoint, or for the model as it is now, and nobody holds what it is made of and may
        change it."""
        callbacks = self.callback_handler.callbacks
        if any(has_own_on_save(callback) for callback in callbacks):
            return False
        is_held = any(home.is_lent for home in self.engine.homes) or (self.optimizer and self.optimizer.is_lending)
        return self.engine.config.save_in_background and self.is_in_train and not is_held

    def _prepare_saving(self, folder: Path, optimizer: HomeOptimizer | None, spare_bytes: int) -> Saving:
        """Write into `folder` all that is small, as it is now; returns what will write the rest."""
        is_by_layer = can_save_by_layer(self.model)
        with without_progress_bar():
            self._save(str(folder), {} if is_by_layer else None)
        if optimizer is not None:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            self._save_rng_state(str(folder))
        if saves_adapters(self.model):
            save_trained(self.model, folder)
        self._note_callback_states()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        write_facts(folder, trainer_facts(self))
        return Saving(
            self.model,
            self.engine,
            optimizer,
            folder,
            has_weights=is_by_layer,
            spare_bytes=spare_bytes,
            notes={"arithmetic": arithmetic_of(self, self.state.max_steps)},
        )

    @contextlib.contextmanager
    def _saves_end(self) -> Iterator[None]:
        """At the end of the block no checkpoint is being written any more. An interrupt drops the one that is; after an
        error it is completed: it is what there is to go on from."""
        self.callback_handler.on_save = self._on_save
        try:
            yield
            self.saves.finish(must_succeed=self.is_stopping)
        except Exception:
            try:
                self.saves.finish()
            except Exception as error:  # the first one is raised
                logger.warning("a checkpoint was not completed: %s", error)
            raise
        finally:
            del self.callback_handler.on_save
            self.saves.call_off()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.saves.meter.end_step(is_saving=self.saves.is_under_way)
        self.saves.poll()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.saves.finish(must_succeed=self.is_stopping)
        if self.is_stopping:
            # The run is not over: no best model yet, and the last checkpoint is the one to go on from.
            self.state.best_model_checkpoint = None
        return super()._finalize_training(*args, **kwargs)

    def _end_checkpoint(self, run_dir: str, target: str, state: transformers.TrainerState) -> None:
        """It is complete. state: that of its step."""
        if self._is_on_save_due:
            self._is_on_save_due = False
            # Not `on_save` itself, which also takes back a wish to save: by now that may be the next one.
            self.control = self.callback_handler.call_event("on_save", self.args, state, self.control)
        if self.args.push_to_hub:
            self._push_from_checkpoint(target)
        newest, best = Path(target), self.state.best_model_checkpoint
        self._left_behind.discard(newest.name)
        drop_surplus(Path(run_dir), self.args.save_total_limit, newest=newest, best=best, first=self._left_behind)

    def _on_save(
        self, args: transformers.TrainingArguments, state: transformers.TrainerState, control: Any
    ) -> transformers.TrainerControl:
        """In the place of the callbacks' event, which comes when the checkpoint is complete: those of transformers look
        into its folder, which they find by the step of the state."""
        has_failed, self._has_failed_to_save = self._has_failed_to_save, False
        if self.saves.is_under_way or has_failed:
            self._is_on_save_due = not has_failed
            control.should_save = False
            return control
        return type(self.callback_handler).on_save(self.callback_handler, args, state, control)

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
        folder = Path(resume_from_checkpoint)
        for name in missing_in(folder):
            raise UserError(
                f"{resume_from_checkpoint} has no {name}, so training cannot go on from it exactly (it was saved "
                "with save_only_model, or by something else): start a new run from its weights instead"
            )
        check_sound(folder, "resume_from_checkpoint")
        check_state(folder)
        check_random_state(folder)
        check_saved(self.model, self.engine, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also loads the weights, which `_load_from_checkpoint` has looked at: the optimizer, which is made between the
        two, can refuse a checkpoint as well, and nothing is overwritten before all has been looked at."""
        if checkpoint is None:
            return
        folder, arithmetic = Path(checkpoint), None
        # Mapped, not read: the saved moments need not fit beside those at home.
        if (folder / FOREIGN_OPTIMIZER_NAME).is_file():
            saved = read_foreign_optimizer(folder / FOREIGN_OPTIMIZER_NAME)
        else:
            settings, saved = read_optimizer(folder, self.optimizer)
            arithmetic = settings.get("arithmetic")
        said = go_on_with(self, folder, arithmetic, self._max_steps)
        load_optimizer = self.optimizer.prepared_load(saved)
        take_schedule_back = load_scheduler(self.lr_scheduler, folder)
        try:
            read_weights(self.model, folder)
        except UserError:  # adapters are looked at when they are read
            take_schedule_back()
            raise
        read_exact(self.model, self.engine, folder)
        load_optimizer()
        say_on_a_line_of_its_own(f"megatrain: {said}")

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        check_sound(best, "load_best_model_at_end")
        check_saved(self.model, self.engine, best)
        read_weights(self.model, best)
        read_exact(self.model, self.engine, best)


def _checkpoint_dir(run_dir: str, step: int) -> str:
    return os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Over the files that transformers writes: none of weights."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
