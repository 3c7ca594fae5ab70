"""Does training on whole documents help where documents are long? Held-out loss by position, against short pieces.

    python benchmarks/long_documents.py                                    # on a CPU, about 10 minutes on two cores
    python benchmarks/long_documents.py --length 8192 --shortest 2048 --short 512 --steps 60 --documents 4 --held-out 40
                                                                           # on a GPU

One small real model (SmolLM2-135M-Instruct, as the quickstart gets it) is fine-tuned twice from the same weights, with
exact masters and moments, on source files of Python's standard library: once on each file whole, once on the same
tokens of the same steps cut into pieces, of which none sees another. Then both read the same held-out files whole, and
so does the model as it was.

What differs by design: the first token of a piece is never predicted, so the cut text has fewer targets (1 in --short).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

import megatrain as mt
from megatrain.data.builtin import python_source
from megatrain.execute.engine import engine_of
from megatrain.models import resolve_model

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_NORM = 1.0
VARIANTS = ("before", "whole", "cut")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Token ids of whole documents, (tokens,) int64 each."""

    train: list[Tensor]
    held_out: list[Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Train twice, print one table."""
    options = read_options(arguments)
    transformers_logging.disable_progress_bar()
    path = resolve_model(options.model, say=lambda line: print(line, flush=True)).path
    documents = read_documents(str(path), options)
    print(told(documents, options), flush=True)
    losses = {name: run(str(path), documents, name, options) for name in VARIANTS}
    print_table(losses, options)


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help=f"a folder, or a name (default: {MODEL})")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest document (default: 2048)")
    parser.add_argument("--shortest", type=int, default=1024, help="of the shortest (default: 1024)")
    parser.add_argument("--short", type=int, default=256, help="of a piece (default: 256)")
    parser.add_argument("--steps", type=int, default=5, help="default: 5")
    parser.add_argument("--documents", type=int, default=2, help="a step (default: 2)")
    parser.add_argument("--held-out", type=int, default=8, help="documents that are held out (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak; 2 steps of warm-up, then a line to 0 (1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and the order of documents (default: 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


# Text


def read_documents(path: str, options: argparse.Namespace) -> Documents:
    """Files of `shortest` to `length` tokens, the end of text included, mixed by the seed."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [document["text"] for document in python_source()]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    whole = [torch.tensor([*tokens, tokenizer.eos_token_id]) for tokens in ids]
    fitting = [tokens for tokens in whole if options.shortest <= len(tokens) <= options.length]
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(options.seed)).tolist()
    if len(order) <= options.held_out:
        raise SystemExit(f"only {len(order)} files have {options.shortest} to {options.length} tokens")
    mixed = [fitting[index] for index in order]
    return Documents(train=mixed[options.held_out :], held_out=mixed[: options.held_out])


def steps_of(documents: Documents, options: argparse.Namespace) -> Iterator[list[Tensor]]:
    """The documents of each step, the same for both ways of training; anew from the first when all were seen."""
    count = len(documents.train)
    for step in range(options.steps):
        first = step * options.documents
        yield [documents.train[index % count] for index in range(first, first + options.documents)]


def micro_batches(documents: list[Tensor], short: int | None) -> list[dict[str, Tensor]]:
    """A row a document; or, with `short`, a row a piece of it, those of one length together."""
    if short is None:
        rows = [[tokens] for tokens in documents]
    else:
        pieces = [piece for tokens in documents for piece in cut(tokens, short)]
        lengths = sorted({len(piece) for piece in pieces})
        rows = [[piece for piece in pieces if len(piece) == length] for length in lengths]
    stacked = [torch.stack(group) for group in rows]
    return [{"input_ids": ids, "labels": ids} for ids in stacked]


def cut(tokens: Tensor, short: int) -> list[Tensor]:
    """Pieces of `short` tokens and a rest. A rest of one token has nothing to predict and goes with the one before."""
    pieces = list(tokens.split(short))
    if len(pieces) > 1 and len(pieces[-1]) == 1:
        pieces[-2:] = [torch.cat(pieces[-2:])]
    return pieces


def told(documents: Documents, options: argparse.Namespace) -> str:
    trained = sum(len(tokens) for step in steps_of(documents, options) for tokens in step)
    held_out = sum(len(tokens) for tokens in documents.held_out)
    return (
        f"{len(documents.train)} files to train on, {len(documents.held_out)} held out with {held_out:,} tokens; "
        f"{options.steps} steps of {options.documents} files, {trained:,} tokens"
    )


# Training and reading


def run(path: str, documents: Documents, name: str, options: argparse.Namespace) -> list[Tensor]:
    """The loss of each token of each held-out document behind the training that `name` says, (tokens - 1,) fp32."""
    torch.manual_seed(options.seed)
    mt.init(device=options.device)
    model = mt.from_pretrained(path, dtype="bfloat16" if options.device.startswith("cuda") else "float32")
    engine = engine_of(model)
    assert engine is not None
    start = time.perf_counter()
    try:
        if name != "before":
            train(model, documents, options.short if name == "cut" else None, options)
        losses = [token_losses(model, tokens, options.device) for tokens in documents.held_out]
    finally:
        engine.close()
    mean = torch.cat(losses).mean().item()
    print(f"{name}: held-out loss {mean:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    return losses


def train(model: nn.Module, documents: Documents, short: int | None, options: argparse.Namespace) -> None:
    model.train()
    optimizer = mt.optim.AdamW(model, lr=options.lr, weight_decay=0.0)
    for step, chosen in enumerate(steps_of(documents, options)):
        mt.accumulate(model, micro_batches(chosen, short))
        mt.clip_grad_norm_(model, MAX_NORM)
        optimizer.param_groups[0]["lr"] = options.lr * min((step + 1) / 2, 1 - step / options.steps)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def token_losses(model: nn.Module, tokens: Tensor, device: str) -> Tensor:
    """(tokens - 1,) fp32, each with all that stands before it in the document."""
    model.eval()
    logits = model(input_ids=tokens[None].to(device), use_cache=False).logits[0, :-1]
    return cross_entropy(logits.float(), tokens[1:].to(device), reduction="none").cpu()


# What came of it


def ranges(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Positions of tokens: up to a piece's length, then doubling."""
    edges = [1, options.short]
    while edges[-1] < options.length:
        edges.append(min(2 * edges[-1], options.length))
    return list(zip(edges, edges[1:], strict=False))


def print_table(losses: dict[str, list[Tensor]], options: argparse.Namespace) -> None:
    """Mean loss of the tokens of each range; and by how much pieces are worse, with its standard error over
    documents."""
    print("\n| positions | tokens | before | whole documents | pieces | pieces - whole |")
    print("| --- | --- | --- | --- | --- | --- |")
    for low, high in [*ranges(options), (1, options.length)]:
        parts = {name: [of[low - 1 : high - 1] for of in losses[name]] for name in VARIANTS}
        count = sum(map(len, parts["whole"]))
        if not count:
            continue
        means = [f"{torch.cat(parts[name]).mean().item():.4f}" for name in VARIANTS]
        print(f"| {low:,} to {high - 1:,} | {count:,} | {' | '.join(means)} | {difference(parts)} |")


def difference(parts: dict[str, list[Tensor]]) -> str:
    """Over documents that reach so far, each counted once."""
    each = [(cut - whole).mean() for cut, whole in zip(parts["cut"], parts["whole"], strict=True) if len(cut)]
    values = torch.stack(each)
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{values.mean().item():+.4f} ± {error:.4f} ({len(values)} files)"


if __name__ == "__main__":
    main()
