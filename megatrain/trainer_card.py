"""What a Trainer knows for the card of its model: data, optimizer, how long it has trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers

from megatrain.save.card import Facts, model_facts, state_facts

if TYPE_CHECKING:
    from megatrain.trainer_checkpoints import CheckpointingTrainer


def trainer_facts(trainer: CheckpointingTrainer) -> Facts:
    """`trainer.card_facts` come last and count most."""
    of_model = model_facts(trainer.model, trainer.engine)
    facts = {
        "data": _data(trainer),
        "optimizer": _optimizer(trainer),
        "tokens, padding included": _tokens(trainer),
    }
    known = {name: fact for name, fact in facts.items() if fact}
    return {**of_model, **known, **state_facts(vars(trainer.state)), **trainer.card_facts}


def _data(trainer: transformers.Trainer) -> str:
    """The name of a dataset of the Hub."""
    info = getattr(trainer.train_dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    # Builders of plain files are named by their format.
    return "" if name in (None, "json", "csv", "text", "parquet", "arrow", "generator", "pandas") else str(name)


def _optimizer(trainer: transformers.Trainer) -> str:
    optimizer, args = trainer.optimizer, trainer.args
    if optimizer is None:
        return ""
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return f"{type(optimizer).__name__}, learning rate {max(rates):g}, {schedule} schedule"


def _tokens(trainer: CheckpointingTrainer) -> str:
    """From the floating-point operations, which a run that goes on goes on counting."""
    per_token = trainer.num_flops_per_token
    total = trainer.state.total_flos + trainer.current_flos
    return f"{round(total / per_token):,}" if total and per_token else ""
