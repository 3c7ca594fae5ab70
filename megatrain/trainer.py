"""`Trainer`: transformers.Trainer over a streamed model, with the same arguments, callbacks and logs.

What differs from its base class, and nothing else does:
- the model is streamed in place, never moved, wrapped, autocast or compiled as a whole;
- all micro-batches of a step run layer-major at the first `training_step` of the step, and the following calls hand
  back the losses that are known already, so the loop's counters, callbacks and logs stay as they are;
- the optimizer is a megatrain one, and the clip is the exact global norm over all homes;
- a checkpoint folder appears only when it is complete, and weights are read back into their homes group by group;
- going on from a checkpoint of the last step makes no further step (transformers makes one within an epoch).

Rule: a micro-batch must not be changed between `get_batch_samples` and `training_step`, because by then it has run.
It gives up what megatrain/arguments.py refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from megatrain import api
from megatrain.arguments import check_arguments, check_model
from megatrain.base.errors import PlanError, RefusedError, StoppedRunError, UserError
from megatrain.data.lengths import likely_workload
from megatrain.execute.engine import Engine, engine_of
from megatrain.layer_reports import LayerReports
from megatrain.logged_trainer import LoggedTrainer
from megatrain.micro_batches import MicroBatches
from megatrain.optim.foreign import check_given_optimizer, check_optimizer
from megatrain.optimizer_choice import choice_of, update_threads
from megatrain.run_folder import check_output_dir, find_best_checkpoint, holding_run_folder
from megatrain.save.checkpoints import later_than
from megatrain.stopping import StopWhenTold, drop_dead_pipes, say

logger = logging.getLogger("megatrain")

Batch = dict[str, Any]


class Trainer(LoggedTrainer):
    """Takes what transformers.Trainer takes; see docs/training_arguments.md for each of the arguments.

    A model that is not streamed yet is streamed here, as `megatrain.stream(model)` would with `bf16=args.bf16`.
    Raises UserError, before any work, for arguments or an optimizer that cannot be honoured.
    """

    log_layers: bool = True
    """Hand grad_norm/LAYER and update_ratio/LAYER to callbacks and integrations at every logging step."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        check_model(model)
        check_output_dir(args)
        given = inspect.signature(transformers.Trainer).bind(model, args, *positional, **keywords).arguments
        check_given_optimizer(given, model)
        if args.n_gpu > 1:
            args._n_gpu = 1  # else transformers multiplies the batch by the GPUs and wraps the model
        self._batches: list[Batch] = []
        self._losses: deque[tuple[Batch, torch.Tensor]] = deque()
        self._micro_batches: MicroBatches | None = None
        self._given_dataset = given.get("train_dataset")  # transformers calls `model_init` before it keeps its own
        self._reads_logits = (
            type(self).compute_loss is not Trainer.compute_loss
            or given.get("compute_loss_func") is not None
            or args.label_smoothing_factor > 0
        )
        if model is not None:
            model = _streamed(model, args, self._given_dataset, self._reads_logits)
        super().__init__(model, args, *positional, **keywords)
        self._place_layer_reports()

    @property
    def engine(self) -> Engine:
        """The engine that streams the model."""
        engine = engine_of(self.model)
        assert engine is not None, "the model was streamed in __init__ or call_model_init"
        return engine

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> transformers.trainer_utils.TrainOutput:
        """Train, as in transformers. Returns when the last update is done and the weights are at home.

        With resume_from_checkpoint=True it goes on from the newest checkpoint in the output folder that is not damaged.
        Ctrl-C and SIGTERM end the step, save a checkpoint and raise StoppedRunError, which is a SystemExit(0); a second
        one ends it at once.

        Raises UserError where another process trains in the output folder, which is this run's until the call returns.
        """
        with holding_run_folder(self.args):
            return self._train(resume_from_checkpoint, *args, **kwargs)

    def _train(
        self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any
    ) -> transformers.trainer_utils.TrainOutput:
        self._stop = StopWhenTold()
        self.add_callback(self._stop)
        saves_model_alone = self.args.save_only_model
        try:
            with self._stop.listening(), self._saves_end():
                output = super().train(self.sound_checkpoint(resume_from_checkpoint), *args, **kwargs)
        except BrokenPipeError:
            if not self._stop.is_stopping:
                raise
            # What the output was piped into has ended by the same Ctrl-C, in the middle of the log of the last step.
            drop_dead_pipes()
            if not os.path.isdir(self.checkpoint_dir()):
                self._save_checkpoint(self.model, trial=None)
                self.saves.finish(must_succeed=True)
        finally:
            self.args.save_only_model = saves_model_alone
            self.remove_callback(self._stop)
        self.engine.wait()
        self.engine.report.finish()
        self.run_logger.finish()
        if self._stop.is_stopping:
            self.say_how_to_go_on(self._stop.name)
            raise StoppedRunError
        return output

    def _init_training_state(
        self, max_steps: int, num_steps_an_epoch: int, num_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Epochs that are done, and micro-batches of the next one. A run at its end has no next one: the loop of
        transformers would make one more step wherever that end is within an epoch."""
        start = super()._init_training_state(max_steps, num_steps_an_epoch, num_epochs, *args, **kwargs)
        self.state.compute_steps(self.args, self.state.max_steps)  # transformers goes on with the checkpoint's
        find_best_checkpoint(self.state, self.args.output_dir)
        self._left_behind = later_than(self.state.global_step, Path(self.args.output_dir))
        return (num_epochs, 0) if self.state.global_step >= max_steps else start

    def say_how_to_go_on(self, name: str) -> None:
        """After a signal (its name) and the checkpoint."""
        say(
            f"megatrain: ended by {name} after step {self.state.global_step}; go on with "
            "trainer.train(resume_from_checkpoint=True)"
        )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh streamed model from `model_init`. The one before is given up first: two need not fit in memory."""
        if self.model is not None:
            self.saves.finish()
            self.engine.close()
            self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None
            self._micro_batches = None
            for name in ("model", "optimizer", "lr_scheduler"):
                setattr(self.callback_handler, name, None)
            self.accelerator.free_memory()
        return _streamed(super().call_model_init(trial), self.args, self._given_dataset, self._reads_logits)

    # Placement: the engine owns it

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # No autocast: the engine computes in its own precision. No placement: it would move the model.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no", "device_placement": False}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UserError(
                "accelerate was configured for DeepSpeed or FSDP (by its launcher or its environment variables); "
                "weights are streamed here instead: start the script with plain `python`"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the weights stay in their homes."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    # A step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        """The micro-batches of the coming step, and the number of target tokens in all of them."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.saves.meter.begin_step()
        self._batches = list(batches)
        self._losses.clear()
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Loss of one micro-batch, detached. The first call of a step runs all of its micro-batches.

        Raises RefusedError when it is called with another micro-batch than the one that has run.
        """
        if not self._losses:
            # Called with something else than the loop fetched: it is a step of its own.
            is_next = bool(self._batches) and self._batches[0] is inputs
            batches = self._batches if is_next else [inputs]
            self._batches = []
            self._losses.extend(zip(batches, self._run_step(model, batches, num_items_in_batch), strict=True))
        expected, loss = self._losses.popleft()
        if expected is not inputs:
            raise RefusedError(
                "training_step got another micro-batch than get_batch_samples returned, and that one has run already: "
                "change batches in the data collator or in get_batch_samples"
            )
        return loss

    def _run_step(
        self, model: nn.Module, batches: list[Batch], num_items: torch.Tensor | int | None
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches. Returns their losses, as scalars on the host."""
        model.train()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        losses = self._runner(model).run(batches, num_items)
        # One transfer for all: the loop then tests and adds them on the host, without a wait for each.
        if hasattr(self, "_tr_loss"):
            self._tr_loss = self._tr_loss.cpu()
        return list(torch.stack(losses).cpu())

    @property
    def most_rows(self) -> int | None:  # type: ignore[override]
        return None if self._micro_batches is None else self._micro_batches.most_rows

    def _runner(self, model: nn.Module) -> MicroBatches:
        if self._micro_batches is None:
            loss_of = functools.partial(self._micro_batch_loss, model)
            self._micro_batches = MicroBatches(model, self.engine, loss_of, self._loss_obstacle)
        return self._micro_batches

    def _loss_obstacle(self) -> str:
        """Why the loss of a micro-batch is not that of its model, or nothing."""
        if getattr(self.compute_loss, "__func__", None) is not Trainer.compute_loss:
            return "compute_loss is a function of your own, which may couple rows"
        if self.compute_loss_func is not None:
            return "compute_loss_func is a function of your own, which may couple rows"
        return "label_smoothing_factor makes another loss of the model's" if self.label_smoother is not None else ""

    def _micro_batch_loss(self, model: nn.Module, inputs: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_counted = self.model_accepts_loss_kwargs and num_items is not None
            is_scaled = is_counted or self.compute_loss_func is not None
        return loss if is_scaled else loss / self.current_gradient_accumulation_steps

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """As in transformers; a module of the user's own may also return the bare loss."""
        if not (isinstance(model, transformers.PreTrainedModel) or hasattr(model, "peft_config")):
            model = _BareLoss(model)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def floating_point_ops(self, inputs: Batch) -> int:
        """6 x parameters without embeddings x tokens, the convention of transformers.

        The parameters are counted once: a walk over the model for each micro-batch takes longer than a small one runs.
        """
        main_input = getattr(self.model, "main_input_name", "input_ids")
        if main_input not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        return inputs[main_input].numel() * self._num_flops

    @property
    def num_flops_per_token(self) -> int:
        is_own = getattr(self.floating_point_ops, "__func__", None) is Trainer.floating_point_ops
        return self._num_flops if is_own and hasattr(self.model, "num_parameters") else 0

    @functools.cached_property
    def _num_flops(self) -> int:
        return 6 * self.model.num_parameters(exclude_embeddings=True)

    # Optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments name, with transformers' two groups: with weight decay, and without."""
        if self.optimizer is not None:
            return self.optimizer
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        optimizer_class, options = self.optimizer_cls_and_kwargs or choice_of(self.args)
        options = {"seed": self.args.seed, "num_threads": update_threads(self.engine, self.args), **options}
        if self.engine.config.clip == "layer" and self.args.max_grad_norm > 0:
            options = {"max_norm": self.args.max_grad_norm, **options}
        # An empty group stays, as in transformers: schedules and saved optimizers count groups.
        self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        optimizer = self.create_optimizer()
        check_optimizer("create_optimizer returned", optimizer, self.model)
        # accelerate takes an optimizer so marked as it is. Its wrapper would copy the state through the device, and
        # would hide `step_was_skipped`, by which a skipped step pauses the schedule.
        optimizer._is_accelerate_prepared = True
        self._max_steps = max_steps
        self.check_optimizer_settings()
        self.check_space(max_steps)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return grad_norm if grad_norm is not None else self._norm(float("inf"))

    def _norm(self, max_norm: float) -> torch.Tensor:
        """Global norm before clipping."""
        if self.engine.config.clip == "layer":
            # The layers' updates have clipped by their own norms.
            return torch.tensor(self.engine.consumed_norm)
        return api.clip_grad_norm_(self.model, max_norm)

    # Logs of layers

    def _place_layer_reports(self) -> None:
        """Behind the callbacks that print, so that the console is not flooded, and before all others."""
        if not self.log_layers:
            return
        callbacks = self.callback_handler.callbacks
        console = [callback for callback in callbacks if isinstance(callback, (PrinterCallback, ProgressCallback))]
        others = [callback for callback in callbacks if callback not in console]
        self.callback_handler.callbacks = [*console, LayerReports(), *others]


class _BareLoss:
    """A model whose output, where it is a bare tensor, becomes the 1-tuple that transformers expects."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._model(**inputs)
        return (outputs,) if isinstance(outputs, torch.Tensor) else outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _stream(model: nn.Module, args: transformers.TrainingArguments, dataset: Any, reads_logits: bool) -> nn.Module:
    told = api.told_workload()
    workload = told or likely_workload(dataset, args)
    if workload is not None and reads_logits:
        workload = dataclasses.replace(workload, reads_logits=True)
    try:
        return api.stream(model, bf16=args.bf16, workload=workload)
    except PlanError as error:
        if workload is None or told is not None:
            raise
        # Its length is a guess, so it is no reason to refuse.
        logger.warning("memory is not planned for the longest rows: %s", error)
        return api.stream(model, bf16=args.bf16)


def _streamed(model: nn.Module, args: transformers.TrainingArguments, dataset: Any, reads_logits: bool) -> nn.Module:
    """The model, streamed if it was not; `args.device` becomes the engine's device."""
    check_model(model)
    if engine_of(model) is None:
        model = _stream(model, args, dataset, reads_logits)
    engine = engine_of(model)
    if args.bf16 and engine.precision != "bf16":
        raise UserError(
            f"bf16=True, but the model is streamed in {engine.precision}: leave bf16 off, or use "
            "megatrain.init(precision='bf16') before the model is streamed"
        )
    if args.use_cpu and engine.device.type != "cpu":
        raise UserError(
            f"use_cpu=True, but the model is streamed on {engine.device}: call megatrain.init(device='cpu') before"
        )
    if engine.device.type == "cpu":
        args.dataloader_pin_memory = False  # it helps copies to a GPU alone; without one torch warns of it
    args.__dict__["_setup_devices"] = engine.device  # the cached value behind args.device
    return model
