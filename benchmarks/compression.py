"""How far optimizer moments compress: a small language model is trained on real text, and its moments are measured.

    python benchmarks/compression.py                      # gradients rounded to bf16, as they arrive from the device
    python benchmarks/compression.py --gradients fp32

The text is the documentation of Python's standard library, the tokens are a byte-pair code of it, the optimizer is
PyTorch's AdamW. Three tables, in bits a number, over all parameters:

- Where the bits are: the order-0 entropy of sign, exponent and each byte of the mantissa. "of block" is the exponent's
  entropy below the largest exponent of its block of 128 numbers, with that one's share, and counts in the sum, which is
  what coding one byte after the other can reach.
- Exact codes: what `LosslessMoment` takes, and zlib and lzma over the fp32 bytes (of a quarter of the numbers, for
  time). lzma looks for repetitions of any length. After the first steps it finds none but rows of zeros: the bytes of
  the mantissas do not tell about each other either.
- Lossy codes: what the formats of `store/codecs.py` take, and the RMS of their error relative to the RMS of the moment.
"""

from __future__ import annotations

import argparse
import logging
import lzma
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.data.builtin import python_docs
from megatrain.spec.formats import FORMATS, Format
from megatrain.store import codecs, rounding
from megatrain.store.lossless import PIECE, LosslessMoment
from megatrain.store.planes import BLOCK

VOCABULARY, SEQUENCE, BATCH = 2048, 64, 8
LOSSY = ("8bit", "4bit")


class Snapshot(NamedTuple):
    """The moments after some steps, all parameters one after the other."""

    step: int
    loss: float
    m: Tensor
    """(numel,) fp32."""
    v: Tensor

    @property
    def moments(self) -> tuple[tuple[str, Tensor], ...]:
        return ("m", self.m), ("v", self.v)


class Entropy(NamedTuple):
    """Bits a number."""

    sign: float
    exponent: float
    mantissa: tuple[float, float, float]
    """Its upper 7 bits and its two lower bytes."""
    block_exponent: float


def main() -> None:
    """Train, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100, 300], help="when to measure")
    parser.add_argument("--gradients", choices=("bf16", "fp32"), default="bf16", help="what AdamW sees (default: bf16)")
    options = parser.parse_args()
    snapshots = list(train(sorted(options.steps), options.gradients))
    entropies = print_entropies(snapshots)
    print_exact(snapshots)
    print_lossy(snapshots)
    print_verdict(snapshots[-1], entropies[-2:])
    print_speed(snapshots[-1])


# Training


def train(steps: list[int], gradients: str) -> Iterator[Snapshot]:
    """The moments of a new model at each of `steps`."""
    torch.set_num_threads(1)  # as sums in another order would make other moments
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokens = encoded_text()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
        )
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    print(f"{sum(p.numel() for p in parameters) / 1e6:.1f}M parameters, {len(tokens)} tokens, {gradients} gradients")
    for step in range(1, steps[-1] + 1):
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,)).tolist()
        batch = torch.stack([tokens[start : start + SEQUENCE] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters if gradients == "bf16" else ():
            parameter.grad.copy_(parameter.grad.bfloat16())
        optimizer.step()
        if step in steps:
            states = [optimizer.state[parameter] for parameter in parameters]
            m, v = (torch.cat([state[name].view(-1) for state in states]) for name in ("exp_avg", "exp_avg_sq"))
            yield Snapshot(step, loss.item(), m, v)


def encoded_text() -> Tensor:
    """(tokens,) int64."""
    texts = ["\n".join(message["content"] for message in chat["messages"]) for chat in python_docs()]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    return torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])


# Where the bits are


def print_entropies(snapshots: list[Snapshot]) -> list[Entropy]:
    """Of each moment of each snapshot."""
    print("\nWhere the bits are (entropy, bits a number)")
    print(f"{'step':>5} {'loss':>5}      sign  exponent  of block  mantissa: 7 +     8 +     8      sum")
    found = []
    for snapshot in snapshots:
        for name, moment in snapshot.moments:
            entropy = entropy_of(moment)
            mantissa = "  ".join(f"{bits:6.3f}" for bits in entropy.mantissa)
            total = entropy.sign + entropy.block_exponent + sum(entropy.mantissa)
            row = f"{entropy.sign:6.3f}  {entropy.exponent:8.3f}  {entropy.block_exponent:8.3f}     {mantissa}"
            print(f"{snapshot.step:5d} {snapshot.loss:5.2f}  {name}  {row}   {total:6.3f}")
            found.append(entropy)
    return found


def entropy_of(moment: Tensor) -> Entropy:
    bits = moment.numpy().view(np.uint32)
    exponents = (bits >> 23 & 0xFF).astype(np.uint8)
    blocks = exponents[: len(bits) // BLOCK * BLOCK].reshape(-1, BLOCK)
    largest = blocks.max(axis=1)
    distances = (largest[:, None] - blocks).reshape(-1)
    return Entropy(
        sign=order_0(bits >> 31),
        exponent=order_0(exponents),
        mantissa=(order_0(bits >> 16 & 0x7F), order_0(bits >> 8 & 0xFF), order_0(bits & 0xFF)),
        block_exponent=order_0(distances) + order_0(largest) / BLOCK,
    )


def order_0(symbols: np.ndarray) -> float:
    """Entropy of single symbols, in bits."""
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / len(symbols)
    return abs(float(shares @ np.log2(shares)))


# What codes make of them


def print_exact(snapshots: list[Snapshot]) -> None:
    print("\nExact codes: bits a number (times smaller than fp32)")
    print(f"{'step':>5}                m               v            both     zlib m  zlib v  lzma m  lzma v")
    for snapshot in snapshots:
        bits = [bits_a_number(lossless(moment).num_coded_bytes, moment) for _, moment in snapshot.moments]
        ours = "  ".join(f"{b:6.2f} ({32 / b:5.3f}x)" for b in (*bits, statistics.mean(bits)))
        raw = [quarter_of(moment).numpy().tobytes() for _, moment in snapshot.moments]
        theirs = [8 * len(compress(r)) / (len(r) // 4) for compress in (zlib.compress, lzma.compress) for r in raw]
        print(f"{snapshot.step:5d}  {ours}     " + "  ".join(f"{b:6.2f}" for b in theirs))


def quarter_of(moment: Tensor) -> Tensor:
    """Runs of numbers from all over a moment."""
    return torch.cat(moment.split(1 << 14)[::4])


def lossless(moment: Tensor) -> LosslessMoment:
    """Coded, and checked to come back bit for bit."""
    coded = LosslessMoment(moment.numel())
    coded.copy_(moment)
    assert torch.equal(coded.to_tensor().view(torch.int32), moment.view(torch.int32))
    return coded


def print_lossy(snapshots: list[Snapshot]) -> None:
    print("\nLossy codes: bits a number, relative RMS error of m and v")
    print(f"{'step':>5}" + "".join(f"  {name}: bits       m       v " for name in LOSSY))
    for snapshot in snapshots:
        row = f"{snapshot.step:5d}"
        for name in LOSSY:
            bits = bits_a_number(FORMATS[name].num_bytes(snapshot.m.numel()), snapshot.m)
            m_error, v_error = lossy_errors(snapshot, FORMATS[name])
            row += f"  {bits:10.2f}  {m_error:6.1%}  {v_error:6.1%} "
        print(row)


def lossy_errors(snapshot: Snapshot, format_: Format) -> tuple[float, float]:
    """Relative RMS errors of m and v, stored beside each other."""
    numel = snapshot.m.numel()
    random = rounding.random_bits(rounding.make_key(0, snapshot.step, 0), 0, numel, torch.device("cpu"))
    m, v = (
        codecs.Stored(
            format_,
            torch.empty(format_.num_codes(numel), dtype=format_.dtype),
            torch.empty(format_.num_scales(numel)),
        )
        for _ in range(2)
    )
    codecs.encode_(snapshot.v, v, random, is_signed=False)
    codecs.encode_(snapshot.m, m, random, is_signed=True, reference=v)
    return (
        relative_error(codecs.decode(m, numel, is_signed=True, reference=v), snapshot.m),
        relative_error(codecs.decode(v, numel, is_signed=False), snapshot.v),
    )


def relative_error(decoded: Tensor, exact: Tensor) -> float:
    return float((decoded - exact).double().norm() / exact.double().norm())


def bits_a_number(num_bytes: int, moment: Tensor) -> float:
    return 8 * num_bytes / moment.numel()


def print_verdict(last: Snapshot, entropies: list[Entropy]) -> None:
    """What the last step says about exact codes."""
    bits = statistics.mean(sum(entropy.mantissa) for entropy in entropies)
    print(f"\nAt step {last.step} the mantissas alone carry {bits:.1f} of their 23 bits, and an exact code keeps them.")
    print(f"So it is at most {32 / bits:.2f} times smaller than fp32, even if sign and exponent were free. In 2 to 8")
    print("bits a number there is no room for them: such formats are lossy, whatever the code.")


# Speed


def print_speed(snapshot: Snapshot) -> None:
    print("\nOne thread of LosslessMoment, processor time (zlib's share included)")
    for name, moment in snapshot.moments:
        coded, buffer = lossless(moment), torch.empty(PIECE)
        pieces = [(start, stop) for start, stop in coded.pieces() if stop - start == PIECE]
        encode = best_nanoseconds(lambda c=coded, x=moment, p=pieces: [c.encode_(i, x[i:j]) for i, j in p], len(pieces))
        decode = best_nanoseconds(lambda c=coded, b=buffer, p=pieces: [c.decode(i, j, b) for i, j in p], len(pieces))
        print(f"{name}: encode {encode:.1f} ns a number, decode {decode:.1f}")


def best_nanoseconds(work: Callable[[], object], num_pieces: int) -> float:
    """Of several runs, for one number."""
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds) / (num_pieces * PIECE) * 1e9


if __name__ == "__main__":
    main()
