"""From a recipe to a run: model, data and trainer, checked and ready. Both the run and its rehearsal start here.

Rule: what can be refused without the weights is refused before they are read or fetched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from transformers import PrinterCallback

from megatrain import api
from megatrain.base.units import format_count, format_number
from megatrain.commands.console import print_block, print_fact, print_step
from megatrain.commands.model import check_fits, find_model
from megatrain.commands.progress import Work
from megatrain.commands.samples import check_samples, encode_prompt
from megatrain.data.build import Datasets, build_datasets
from megatrain.data.collate import sample_lengths
from megatrain.optimizer_choice import OptimizerConfig
from megatrain.plan.flops import ModelWork, counted_flops, model_work
from megatrain.plan.workload import Workload
from megatrain.recipe import Recipe, SampleConfig
from megatrain.save.card import Facts
from megatrain.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn
    from transformers import PreTrainedTokenizerBase, TrainingArguments


class CountingTrainer(Trainer):
    """Counts what is trained on, without padding."""

    notes_model = True

    def __init__(self, model_work: ModelWork, **keywords: Any) -> None:
        self._model_work = model_work
        self.num_tokens = 0
        self._counted_flops = 0
        super().__init__(**keywords)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        lengths = [length for batch in batches for length in sample_lengths(batch)]
        self.num_tokens += sum(lengths)
        self._counted_flops += counted_flops(self._model_work, lengths)
        return batches, num_items

    def say_how_to_go_on(self, name: str) -> None:
        """Nothing: the command does."""

    def work(self) -> Work:
        """What was done so far."""
        return Work(
            num_tokens=self.num_tokens,
            counted_flops=self._counted_flops,
            stall_seconds=sum(self.engine.stats()["stall_seconds"].values()),
        )


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What a trainer is made of. The model may be streamed already."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    datasets: Datasets
    work: ModelWork
    optimizer: OptimizerConfig
    card: Facts
    """What the recipe tells for the model card."""

    def trainer(self, arguments: TrainingArguments) -> CountingTrainer:
        """A trainer that prints nothing of its own. Streams the model if it is not streamed yet."""
        trainer = CountingTrainer(
            self.work,
            model=self.model,
            args=arguments,
            train_dataset=self.datasets.train,
            eval_dataset=self.datasets.eval,
            data_collator=self.datasets.collator,
            processing_class=self.tokenizer,
            optimizer_cls_and_kwargs=self.optimizer.choice(arguments),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.card_facts = self.card
        return trainer


def prepare(recipe: Recipe, arguments: TrainingArguments, console: Console) -> Ingredients:
    """Gets the model, reads the data and loads the weights. Raises UserError for what the user can mend."""
    api.init(**{name: getattr(recipe.engine, name) for name in recipe.engine.__dataclass_fields__})
    found = find_model(recipe.model, console)
    check_samples(recipe.sample, found.tokenizer, found.config)
    check_fits(found, recipe, bf16=arguments.bf16)
    print_step(console, "reading the data")
    with _no_warnings("megatrain.data"):  # they stand in the report below
        datasets = build_datasets(recipe.data, found.tokenizer)
    transformers.utils.logging.disable_progress_bar()
    model, weights = found.open()
    work = model_work(model)
    dtype = str(model.dtype).removeprefix("torch.")
    print_fact(console, "model", f"{recipe.model.given}, {format_count(work.num_parameters)} parameters, {dtype}")
    print_fact(console, "", f"from {found.origin}")
    print_fact(console, "data", str(datasets.report))
    if weights is not None:
        api.stream(model, weights, bf16=arguments.bf16, workload=_workload(datasets, arguments))
    datasets = datasets.fit_to(model)
    return Ingredients(
        model=model,
        tokenizer=found.tokenizer,
        datasets=datasets,
        work=work,
        optimizer=recipe.optimizer,
        card={**found.facts, "data": _sources(recipe)},
    )


def _sources(recipe: Recipe) -> str:
    """For the model card. Of files the name and not the place."""
    given = recipe.data.path
    sources = [given] if isinstance(given, (str, os.PathLike)) else given
    names = [source if ":" in str(source) else os.path.basename(os.fspath(source)) for source in sources]
    return ", ".join(map(str, names))


def _workload(datasets: Datasets, arguments: TrainingArguments) -> Workload:
    """A step, every row as long as the longest: so that memory is planned for the worst."""
    rows, train = arguments.per_device_train_batch_size, datasets.train
    varied = train.num_tokens < len(train) * train.longest
    return Workload(
        num_sequences=rows * arguments.gradient_accumulation_steps,
        length=train.longest,
        rows=rows,
        masked=train.packed or (varied and rows > 1),
        varied=varied,
        reads_logits=arguments.label_smoothing_factor > 0,
    )


@contextlib.contextmanager
def _no_warnings(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def closing_engine(trainer: CountingTrainer) -> Iterator[None]:
    """Ends the engine's lanes whatever happens, so that a failed or interrupted run does not hang."""
    try:
        yield
    finally:
        trainer.engine.close()


def generate_sample(ingredients: Ingredients, prompt: str, sample: SampleConfig, max_new_tokens: int) -> str:
    """The model's answer to a prompt, the likeliest token at each place."""
    model, tokenizer = ingredients.model, ingredients.tokenizer
    batch = encode_prompt(tokenizer, prompt, sample).to(model.device)
    with _eval_mode(model):
        tokens = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **dict.fromkeys(("temperature", "top_p", "top_k")),  # else those of the model's own file draw warnings
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return tokenizer.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def print_samples(ingredients: Ingredients, sample: SampleConfig, console: Console, when: str) -> None:
    """Prompt and answer, one after another."""
    from rich.text import Text

    if sample.prompts:
        number = format_number(len(sample.prompts), "sample")
        print_step(console, f"writing {number} of at most {sample.max_new_tokens:,} tokens each")
    for prompt in sample.prompts:
        console.print(Text(f"sample {when}: {prompt}", style="bold"))
        print_block(console, generate_sample(ingredients, prompt, sample, sample.max_new_tokens) or "(nothing)")


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
