"""From a recipe to a run: model, data and trainer, checked and ready. Both the run and its rehearsal start here.

Rule: what can be refused without the weights is refused before they are read or fetched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from megatrain import api
from megatrain.base.errors import UserError
from megatrain.base.units import format_count, format_number
from megatrain.commands.console import print_block, print_fact, print_step
from megatrain.commands.progress import Work
from megatrain.commands.samples import check_samples, encode_prompt
from megatrain.data.build import Datasets, build_datasets
from megatrain.data.collate import sample_lengths
from megatrain.execute.model import Initialize
from megatrain.loading import open_pretrained
from megatrain.models import ResolvedModel, resolve_model
from megatrain.optimizer_choice import OptimizerConfig
from megatrain.plan.flops import ModelWork, counted_flops, model_work
from megatrain.plan.workload import Workload
from megatrain.recipe import Recipe, SampleConfig
from megatrain.save.card import BASE_MODEL, BASE_WEIGHTS, Facts, base_model_name
from megatrain.save.folder import WEIGHT_NAMES
from megatrain.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments


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
    resolved = resolve_model(
        recipe.model.name,
        revision=recipe.model.revision,
        cache_dir=recipe.model.cache_dir,
        say=lambda line: print_step(console, line),
    )
    tokenizer = _load(AutoTokenizer.from_pretrained, resolved, "tokenizer")
    model_config = _load(AutoConfig.from_pretrained, resolved, "config")
    check_samples(recipe.sample, tokenizer, model_config)
    _check_fits(recipe, model_config, arguments)
    print_step(console, "reading the data")
    with _no_warnings("megatrain.data"):  # they stand in the report below
        datasets = build_datasets(recipe.data, tokenizer)
    print_step(console, "loading the weights")
    transformers.utils.logging.disable_progress_bar()
    model, weights = _open_model(resolved, recipe.model.dtype, console)
    work = model_work(model)
    dtype = str(model.dtype).removeprefix("torch.")
    print_fact(console, "model", f"{recipe.model.name}, {format_count(work.num_parameters)} parameters, {dtype}")
    print_fact(console, "", f"from {resolved.origin}")
    print_fact(console, "data", str(datasets.report))
    if weights is not None:
        api.stream(model, weights, bf16=arguments.bf16, workload=_workload(datasets, arguments))
    datasets = datasets.fit_to(model)
    return Ingredients(
        model=model,
        tokenizer=tokenizer,
        datasets=datasets,
        work=work,
        optimizer=recipe.optimizer,
        card=_card(recipe, resolved),
    )


def _card(recipe: Recipe, resolved: ResolvedModel) -> Facts:
    """For the model card. Of files the name and not the place."""
    given = recipe.data.path
    sources = [given] if isinstance(given, (str, os.PathLike)) else given
    names = [source if ":" in str(source) else os.path.basename(os.fspath(source)) for source in sources]
    of_weights = {BASE_WEIGHTS: resolved.note} if resolved.note else {}
    return {BASE_MODEL: base_model_name(recipe.model.name), **of_weights, "data": ", ".join(map(str, names))}


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


def _check_fits(recipe: Recipe, config: PreTrainedConfig, arguments: TrainingArguments) -> None:
    """Refuse a model that does not fit in memory before the data is read and its weights are loaded."""
    dtype = {} if recipe.model.dtype == "auto" else {"dtype": recipe.model.dtype}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, **dtype)
        model.tie_weights()
    except Exception:
        return  # a class that cannot be built without values: the check comes when it has them
    api.check_fits(model, bf16=arguments.bf16)


def _open_model(resolved: ResolvedModel, dtype: str, console: Console) -> tuple[nn.Module, Initialize | None]:
    """The model and what makes its weights; None if it has them, because its files cannot be read a layer at a time."""
    what = "causal language model"
    if any((resolved.path / name).is_file() for name in WEIGHT_NAMES):
        opened = _load(open_pretrained, resolved, what, model_class=AutoModelForCausalLM, dtype=dtype)
        return opened.model, opened.source
    print_step(console, "no safetensors in that folder: all weights are in memory once before they go home")
    return _load(AutoModelForCausalLM.from_pretrained, resolved, what, dtype=dtype), None


def _load(load: Callable[..., Any], resolved: ResolvedModel, what: str, **options: Any) -> Any:
    """What `load` (from_pretrained of a class of transformers) makes of the model's folder."""
    try:
        return load(resolved.path, local_files_only=True, **options)
    except Exception as error:  # broken files come out as errors of JSON, tokenizers, safetensors, torch
        raise UserError(f"model.name: {resolved.path} cannot be loaded as a {what}: {error}") from error


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
