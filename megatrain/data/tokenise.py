"""Samples to tokens: what is an id, what is supervised, how long things are cut.

Rule: text loses no token, a prompt is never supervised, and whatever is cut or dropped is counted.
Gives up: one giant document is tokenised in one call; many smaller files use all cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from megatrain.base.errors import UserError
from megatrain.data.chat import ChatEncoder
from megatrain.data.records import Sample
from megatrain.data.tokens import TokenStore, TokenWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES_A_BATCH = 256
T = TypeVar("T")
Encoded = tuple[list[int], list[bool]]


@dataclass
class CutCounts:
    """What did not go in whole."""

    num_empty: int = 0
    """Samples without text, without completion, or with a single token: skipped."""

    num_truncated: int = 0
    """Conversations and pairs cut at sequence_length."""

    num_dropped: int = 0
    """Conversations and pairs whose supervised part lies wholly beyond sequence_length: skipped."""


def tokenise(
    samples: Iterable[Sample], tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> tuple[TokenStore, CutCounts]:
    """Token ids of all samples, in order, and what was cut."""
    writer, counts = TokenWriter(), CutCounts()
    encode = _Encoder(tokenizer)
    for batch in _batches(samples, SAMPLES_A_BATCH):
        for sample, (ids, supervised) in zip(batch, encode(batch), strict=True):
            if sample.format == "text":
                _add_text(writer, counts, ids, supervised, sequence_length)
            else:
                _add_turns(writer, counts, ids, supervised, sequence_length)
    return writer.finish(), counts


def piece_lengths(num_tokens: int, sequence_length: int) -> list[int]:
    """Full pieces and a rest. A rest of one token could not be predicted: it takes one from the piece before."""
    lengths = [sequence_length] * (num_tokens // sequence_length)
    rest = num_tokens % sequence_length
    if rest == 1 and lengths:
        lengths[-1] -= 1
        rest = 2
    return [*lengths, rest] if rest else lengths


def _add_text(writer: TokenWriter, counts: CutCounts, ids: list[int], supervised: list[bool], limit: int) -> None:
    if len(ids) < 2:
        counts.num_empty += 1
        return
    writer.add(ids, supervised, piece_lengths(len(ids), limit))


def _add_turns(writer: TokenWriter, counts: CutCounts, ids: list[int], supervised: list[bool], limit: int) -> None:
    if not ids:
        counts.num_empty += 1
    elif not any(supervised[1:limit]):
        counts.num_dropped += 1
    else:
        counts.num_truncated += len(ids) > limit
        writer.add(ids[:limit], supervised[:limit], [min(len(ids), limit)])


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class _Encoder:
    """A batch of samples of one format to (ids, supervised) each; empty lists for a sample without content."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.chat: ChatEncoder | None = None
        self.prefix = _prefix_ids(tokenizer)

    def __call__(self, batch: list[Sample]) -> list[Encoded]:
        if batch[0].format == "messages":
            self.chat = self.chat or ChatEncoder(self.tokenizer)
            return [self.chat.encode(s.record["messages"], s.record.get("tools"), s.where) for s in batch]
        self._check_eos()
        return self._texts(batch) if batch[0].format == "text" else self._pairs(batch)

    def _texts(self, batch: list[Sample]) -> list[Encoded]:
        out: list[Encoded] = []
        for ids in self._ids([sample.record["text"] for sample in batch]):
            whole = [*self.prefix, *ids, self.tokenizer.eos_token_id] if ids else []
            out.append((whole, [True] * len(whole)))
        return out

    def _pairs(self, batch: list[Sample]) -> list[Encoded]:
        prompts = self._ids([sample.record["prompt"] for sample in batch])
        completions = self._ids([sample.record["completion"] for sample in batch])
        joined = self._ids([sample.record["prompt"] + sample.record["completion"] for sample in batch])
        return [self._pair(*ids) for ids in zip(prompts, completions, joined, strict=True)]

    def _pair(self, prompt: list[int], completion: list[int], joined: list[int]) -> Encoded:
        """The joined text where the prompt's ids begin it (so no white space is made up between the two); otherwise
        both apart: when generating, the model gets the prompt tokenised alone."""
        if not completion:
            return [], []
        if joined[: len(prompt)] == prompt:
            completion = joined[len(prompt) :]
        head = [*self.prefix, *prompt]
        ids = [*head, *completion, self.tokenizer.eos_token_id]
        return ids, [False] * len(head) + [True] * (len(completion) + 1)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        out = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return out["input_ids"]

    def _check_eos(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                "data: the tokenizer has no end-of-text token; set tokenizer.eos_token (it ends every document)"
            )


def _prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that this tokenizer puts before a text (a begin-of-text token, or none)."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
