"""From samples to pieces to rows: nothing lost, nothing doubled, nothing supervised that should not be."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import CHATML, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.errors import UserError
from megatrain.data.packing import pack
from megatrain.data.records import Sample
from megatrain.data.rows import RowDataset
from megatrain.data.tokenise import CutCounts, piece_lengths, tokenise
from megatrain.data.tokens import TokenStore, TokenWriter


def store_of(format: str, *records: dict, length: int = 64, **tokenizer: object) -> tuple[TokenStore, CutCounts]:
    samples = [Sample(format, record, f"record {number}") for number, record in enumerate(records)]
    return tokenise(samples, tiny_tokenizer(CHATML, **tokenizer), length)


def supervised_text(store: TokenStore) -> str:
    return tiny_tokenizer().decode(store.ids[store.supervised])


@given(st.integers(1, 300), st.integers(8, 40))
def test_piece_lengths(num_tokens: int, limit: int) -> None:
    lengths = piece_lengths(num_tokens, limit)
    assert sum(lengths) == num_tokens
    assert max(lengths) <= limit
    assert len(lengths) == -(-num_tokens // limit)
    assert min(lengths) >= 2 or num_tokens == 1


@given(st.lists(st.integers(1, 20), max_size=80), st.integers(20, 50))
def test_pack_places_every_piece_once_and_fits(lengths: list[int], capacity: int) -> None:
    rows = pack(np.array(lengths, np.int64), capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= capacity for total in sums)
    assert all(row == sorted(row) for row in rows)
    # Two rows that would fit into one mean that a fit was missed.
    assert all(left + right > capacity for at, left in enumerate(sums) for right in sums[at + 1 :])


def test_pack_is_the_best_fit() -> None:
    """5 goes beside 5, not into the emptier row; by hand."""
    assert pack(np.array([5, 7, 5, 3, 1]), 10) == [[0, 2], [1, 3], [4]]


@given(st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=50), min_size=1, max_size=20), st.integers(8, 30))
def test_rows_hold_the_pieces_as_written(samples: list[list[int]], limit: int) -> None:
    writer = TokenWriter()
    for ids in samples:
        writer.add(ids, [True] * len(ids), piece_lengths(len(ids), limit))
    store = writer.finish()
    rows = RowDataset(store, pack(store.piece_lengths, limit), packed=True)
    found = []
    for item in rows:
        ids, labels, positions = (item[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        assert len(ids) == len(labels) == len(positions) <= limit
        assert labels == [-100 if position == 0 else id for id, position in zip(ids, positions, strict=True)]
        starts = [at for at, position in enumerate(positions) if position == 0] + [len(ids)]
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            assert positions[start:end] == list(range(end - start))
            found.append(ids[start:end])
    cut = [ids[at : at + n] for ids in samples for at, n in _pieces(len(ids), limit)]
    assert sorted(found) == sorted(cut)
    assert rows.num_tokens == sum(map(len, samples))
    assert rows.num_targets == rows.num_tokens - len(cut)


def _pieces(num_tokens: int, limit: int) -> list[tuple[int, int]]:
    lengths = piece_lengths(num_tokens, limit)
    return list(zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True))


def test_text_is_whole_and_ends() -> None:
    text = "hello there, how are you? " * 20
    store, counts = store_of("text", {"text": text}, {"text": "b c"}, length=32)
    assert tiny_tokenizer().decode(store.ids) == f"{text}<|end|>b c<|end|>"
    assert store.num_samples == 2 and store.num_pieces > 2
    assert store.piece_lengths.max() == 32
    assert counts == CutCounts()


def test_begin_of_text_where_the_tokenizer_has_one() -> None:
    store, _ = store_of("text", {"text": "a"}, with_bos=True)
    assert tiny_tokenizer().decode(store.ids) == "<|bos|>a<|end|>"
    store, _ = store_of("prompt_completion", {"prompt": "a", "completion": "b"}, with_bos=True)
    assert tiny_tokenizer().decode(store.ids) == "<|bos|>ab<|end|>"


def test_only_the_completion_is_supervised() -> None:
    store, _ = store_of("prompt_completion", {"prompt": "hello there,", "completion": " how are you?"})
    assert tiny_tokenizer().decode(store.ids) == "hello there, how are you?<|end|>"
    assert supervised_text(store) == " how are you?<|end|>"


def test_completion_that_would_merge_with_the_prompt() -> None:
    """The prompt keeps the ids that it has alone: those the model gets when it generates."""
    tokenizer = tiny_tokenizer()
    prompt, completion = "hell", "o there"
    assert tokenizer(prompt + completion)["input_ids"][:2] != tokenizer(prompt)["input_ids"][:2]
    store, _ = store_of("prompt_completion", {"prompt": prompt, "completion": completion})
    head = tokenizer(prompt)["input_ids"]
    assert store.ids[: len(head)].tolist() == head
    assert supervised_text(store) == "o there<|end|>"


def test_first_token_is_no_target_even_without_a_prompt() -> None:
    store, _ = store_of("prompt_completion", {"prompt": "", "completion": "a b c"})
    assert store.supervised.tolist() == [False] + [True] * (len(store.ids) - 1)


def test_what_is_cut_is_counted() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 100}]
    late = [{"role": "user", "content": "a " * 200}, {"role": "assistant", "content": "b"}]
    store, counts = store_of("messages", {"messages": talk}, {"messages": late}, length=64)
    assert counts == CutCounts(num_truncated=1, num_dropped=1)
    assert store.piece_lengths.tolist() == [64]
    _, counts = store_of("text", {"text": ""}, {"text": "a"})
    assert counts == CutCounts(num_empty=1)
    _, counts = store_of("prompt_completion", {"prompt": "a", "completion": ""})
    assert counts == CutCounts(num_empty=1)


def test_no_end_of_text_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"no end-of-text token; set tokenizer\.eos_token"):
        tokenise([Sample("text", {"text": "a"}, "here")], tokenizer, 64)
