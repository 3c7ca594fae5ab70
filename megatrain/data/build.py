"""From a DataConfig and a tokenizer to datasets: the one entry to this room.

Rule: the same config, files and tokenizer give the same rows in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from megatrain.base.errors import UserError
from megatrain.base.units import format_number
from megatrain.data.collate import Collator
from megatrain.data.config import DataConfig, Source
from megatrain.data.exactness import fit_collator
from megatrain.data.files import Skipped, as_sources, check_sources, read_source
from megatrain.data.packing import pack
from megatrain.data.records import check_records
from megatrain.data.rows import RowDataset
from megatrain.data.tokenise import CutCounts, tokenise
from megatrain.data.tokens import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NUM_SHOWN_FILES = 3


@dataclass(frozen=True)
class PartReport:
    """Counts of one part, training or held-out."""

    num_samples: int
    num_rows: int
    num_tokens: int
    num_targets: int
    """Tokens that enter the loss."""
    padding_share: float
    """Padding if every row were filled up to sequence_length. Batches pad to their own longest row only."""

    def __str__(self) -> str:
        return (
            f"{format_number(self.num_samples, 'sample')} in {format_number(self.num_rows, 'row')}, "
            f"{format_number(self.num_tokens, 'token')} "
            f"({self.num_targets:,} supervised), {self.padding_share:.1%} padding"
        )


@dataclass(frozen=True)
class DataReport:
    """What was read and what was left out."""

    train: PartReport
    eval: PartReport | None
    cuts: CutCounts
    skipped_files: tuple[str, ...]
    """Files of folders that are not UTF-8 text."""

    def __str__(self) -> str:
        lines = [f"train: {self.train}"]
        if self.eval is not None:
            lines.append(f"held out: {self.eval}")
        left_out = {
            "cut at sequence_length": self.cuts.num_truncated,
            "dropped (nothing supervised before sequence_length)": self.cuts.num_dropped,
            "empty": self.cuts.num_empty,
        }
        lines += [f"{what}: {count:,}" for what, count in left_out.items() if count]
        if self.skipped_files:
            more = ", ..." if len(self.skipped_files) > NUM_SHOWN_FILES else ""
            names = ", ".join(self.skipped_files[:NUM_SHOWN_FILES]) + more
            lines.append(f"files that are not text: {len(self.skipped_files):,} ({names})")
        return "\n".join(lines)


@dataclass(frozen=True)
class Datasets:
    """Ready for a torch DataLoader or a transformers Trainer (any `remove_unused_columns`)."""

    train: RowDataset
    eval: RowDataset | None
    collator: Collator
    report: DataReport
    sequence_length: int

    def fit_to(self, model: nn.Module) -> Datasets:
        """The same data with the collator that is exact for `model`. Call it once, before training.

        Raises UserError: an id beyond the vocabulary, rows longer than the model's positions, or a model that mixes
        packed samples.
        """
        config = model.config.get_text_config()
        largest = int(self.train.store.ids.max())
        if largest >= config.vocab_size:
            raise UserError(
                f"data: token id {largest} is beyond the model's vocabulary of {config.vocab_size}; use the model's "
                "own tokenizer, or model.resize_token_embeddings(len(tokenizer)) before streaming"
            )
        check_positions(config, self.sequence_length)
        return replace(self, collator=fit_collator(self.collator, model))


def check_positions(config: PreTrainedConfig, sequence_length: int) -> None:
    """Raises UserError for rows longer than the positions of a model with this (text) config."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions and sequence_length > positions:
        raise UserError(
            f"data.sequence_length is {sequence_length}, but the model has {positions} positions; lower it "
            "(or raise max_position_embeddings in the config of a model with rotary positions)"
        )


def build_datasets(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Read, check, tokenise, split and pack. Raises UserError that names file, line and remedy."""
    sources = as_sources(config.path)
    eval_sources = [] if config.eval_path is None else as_sources(config.eval_path)
    check_sources(sources)
    if config.eval_path is not None:
        check_sources(eval_sources, "data.eval_path")
    skipped, counts = Skipped(), CutCounts()
    store = _read(sources, config, tokenizer, skipped, counts, config.max_samples)
    if eval_sources:
        held_out = _read(eval_sources, config, tokenizer, skipped, counts, None)
        pieces, eval_pieces = np.arange(store.num_pieces), np.arange(held_out.num_pieces)
    else:
        held_out = store
        pieces, eval_pieces = _split(store, config)
    train = RowDataset(store, _rows(store, pieces, config), config.packing)
    eval_rows = _rows(held_out, eval_pieces, config)[: config.eval_samples]
    eval = RowDataset(held_out, eval_rows, config.packing) if eval_rows else None
    report = DataReport(
        train=_report(train, config),
        eval=None if eval is None else _report(eval, config),
        cuts=counts,
        skipped_files=tuple(skipped.files),
    )
    _warn(report)
    collator = Collator(pad_token_id=_pad_token_id(tokenizer), packed=config.packing)
    return Datasets(train, eval, collator, report, config.sequence_length)


def _read(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    skipped: Skipped,
    counts: CutCounts,
    max_samples: int | None,
) -> TokenStore:
    raws = chain.from_iterable(read_source(source, config.format, skipped) for source in sources)
    samples = check_records(islice(raws, max_samples), config.format)
    store, cuts = tokenise(samples, tokenizer, config.sequence_length)
    for name, count in vars(cuts).items():
        setattr(counts, name, getattr(counts, name) + count)
    if store.num_samples == 0:
        _refuse_nothing(sources, config, cuts, skipped)
    return store


def _refuse_nothing(sources: Sequence[Source], config: DataConfig, cuts: CutCounts, skipped: Skipped) -> None:
    names = ", ".join(str(source) if not hasattr(source, "column_names") else "the dataset" for source in sources)
    if cuts.num_dropped:
        raise UserError(
            f"data: in {names} all {cuts.num_dropped} samples reach sequence_length {config.sequence_length} before "
            "their first supervised token; raise data.sequence_length"
        )
    raise UserError(
        f"data: nothing to train on in {names} ({cuts.num_empty} empty samples, {len(skipped.files)} files that are "
        "not UTF-8 text); name a source with text in it"
    )


def _split(store: TokenStore, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Piece numbers to train on and to hold out: whole samples by `seed`, or the last part of one single text."""
    everything = np.arange(store.num_pieces)
    if not config.eval_fraction:
        return everything, everything[:0]
    alone = store.num_samples == 1
    num_units = store.num_pieces if alone else store.num_samples
    if num_units < 2:
        raise UserError(
            f"data.eval_fraction is {config.eval_fraction}, but there is one sample of one piece only; give more data, "
            "a smaller data.sequence_length, or data.eval_path"
        )
    num_held_out = min(max(round(num_units * config.eval_fraction), 1), num_units - 1)
    if alone:
        return everything[:-num_held_out], everything[-num_held_out:]
    order = np.random.default_rng(config.seed).permutation(num_units)
    return store.pieces_of(order[num_held_out:]), store.pieces_of(order[:num_held_out])


def _rows(store: TokenStore, pieces: np.ndarray, config: DataConfig) -> list[list[int]]:
    if not config.packing:
        return [[piece] for piece in pieces.tolist()]
    rows = pack(store.piece_lengths[pieces], config.sequence_length)
    return [pieces[row].tolist() for row in rows]


def _report(dataset: RowDataset, config: DataConfig) -> PartReport:
    samples = np.searchsorted(dataset.store.sample_offsets, dataset.members, side="right")
    return PartReport(
        num_samples=len(np.unique(samples)),
        num_rows=len(dataset),
        num_tokens=dataset.num_tokens,
        num_targets=dataset.num_targets,
        padding_share=1 - dataset.num_tokens / (len(dataset) * config.sequence_length),
    )


def _warn(report: DataReport) -> None:
    cuts = report.cuts
    if cuts.num_truncated or cuts.num_dropped:
        logger.warning(
            "data: %d samples are longer than data.sequence_length and were cut, %d more were dropped because nothing "
            "supervised was left",
            cuts.num_truncated,
            cuts.num_dropped,
        )


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Padding never enters the loss, so any id will do where the tokenizer names none."""
    for id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id is not None:
            return int(id)
    return 0
