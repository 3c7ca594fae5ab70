"""One job of `quality.py`: train a model in one format from one seed, and say what the held-out loss is.

The loop is written once; what differs between formats and LoRA is a `Trainee`: how a step is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import megatrain as mt
from megatrain import api
from megatrain.base.config import Config
from megatrain.execute.engine import engine_of
from megatrain.execute.first_line import MOMENTS

MAX_NORM = 1.0
LEFT_OUT = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "encodings",
    "lib2to3",
    "idlelib",
    "turtledemo",
    "tkinter",
}
"""Folders of the standard library that are not in every installation, or that are tables rather than text."""
HELDOUT_SHARE = 0.1
FINETUNE_BYTES = 3_000_000
"""Of text that is put into tokens for fine-tuning, at most: several times what a run sees."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all jobs of an experiment share."""

    steps: int
    rows: int
    """Sequences a step, in one micro-batch."""
    length: int
    """Tokens of a sequence."""
    lr: float
    """Peak: linear warm-up over a tenth of the steps, then a cosine down to a tenth of it."""
    lora_lr: float = 2e-4
    weight_decay: float = 0.01
    heldout_rows: int
    """Sequences that the final loss is measured on."""
    curve_rows: int
    """The first of them, which the curve is measured on."""
    log_every: int = 20
    """Steps between two points of the curve."""
    hidden: int = 256
    """Width of the model from scratch; it has 4 layers."""


EXPERIMENTS = {
    "scratch": Settings(steps=300, rows=32, length=256, lr=2e-3, weight_decay=0.1, heldout_rows=1024, curve_rows=128),
    "finetune": Settings(steps=100, rows=8, length=256, lr=5e-5, heldout_rows=256, curve_rows=64),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of results."""

    experiment: str
    master: str
    """"fp32" (fp32 compute), "split" or "bf16" (bf16 compute), or "lora"."""
    moments: str
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.master}/{self.moments}/{self.seed}"


class TwoBitConfig(Config):
    """`mt.init` refuses moments in 2 bits; the formats behind it know them. Made as 4 bits, it says 2."""

    @property
    def moments(self) -> str:
        return "2bit"


class Trainee(Protocol):
    """A model on its way."""

    model: nn.Module

    def step(self, batch: dict[str, Tensor], lr: float) -> Tensor:
        """One optimizer step. Returns the loss before it."""

    def digest(self) -> str:
        """Of all trained weights, to the last bit."""

    def close(self) -> None:
        """Give back what it holds."""


def run_job(job: Job, model_path: Path | None, device: str, num_threads: int) -> dict[str, Any]:
    """The job's line.

    Args:
        model_path: folder of the model to fine-tune.
        num_threads: of PyTorch and of the optimizer on the CPU.
    """
    start = time.perf_counter()
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(job.seed)
    settings = job.settings
    corpus = tokens_of(model_path if job.experiment == "finetune" else None)
    with deterministic(device):
        trainee = make_trainee(job, model_path, device, num_threads)
        try:
            curve = list(train(trainee, corpus.train, corpus.windows(settings, settings.curve_rows), job, device))
            losses = heldout_losses(
                trainee.model, corpus.windows(settings, settings.heldout_rows), settings.rows, device
            )
            digest = trainee.digest()
        finally:
            trainee.close()
    line = dataclasses.asdict(job)
    line |= {"loss": float(losses.mean()), "stderr": float(losses.std() / math.sqrt(len(losses))), "curve": curve}
    line |= {"weights": digest, "data": corpus.digest, "seconds": round(time.perf_counter() - start, 2)}
    line["environment"] = f"torch {torch.__version__}, {device_name(device)}"
    del trainee
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return line


def train(
    trainee: Trainee, tokens: Tensor, heldout: Tensor, job: Job, device: str
) -> Iterator[tuple[int, float | None, float]]:
    """(step, mean training loss since the last point, held-out loss) at the start and every `log_every` steps."""
    settings = job.settings
    order = torch.Generator().manual_seed(job.seed)
    peak = settings.lora_lr if job.master == "lora" else settings.lr
    yield 0, None, float(heldout_losses(trainee.model, heldout, settings.rows, device).mean())
    losses: list[Tensor] = []
    for step in range(settings.steps):
        starts = torch.randint(len(tokens) - settings.length, (settings.rows,), generator=order)
        ids = torch.stack([tokens[start : start + settings.length] for start in starts.tolist()]).to(device)
        losses.append(trainee.step({"input_ids": ids, "labels": ids}, peak * schedule(step, settings.steps)))
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            mean = float(torch.stack(losses).float().mean())
            losses.clear()
            yield step + 1, mean, float(heldout_losses(trainee.model, heldout, settings.rows, device).mean())


def schedule(step: int, num_steps: int) -> float:
    """Share of the peak learning rate."""
    num_warmup = max(1, num_steps // 10)
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def heldout_losses(model: nn.Module, windows: Tensor, num_rows: int, device: str) -> Tensor:
    """Mean loss of each sequence: (windows,) fp32. windows: (windows, length)."""
    losses = []
    with torch.no_grad():
        for ids in windows.split(num_rows):
            ids = ids.to(device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            losses.append(cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1).cpu())
    return torch.cat(losses)


# Trainees


def make_trainee(job: Job, model_path: Path | None, device: str, num_threads: int) -> Trainee:
    if job.experiment == "finetune":
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    else:
        model = small_model(job.settings.hidden, job.settings.length)
    if job.master == "lora":
        return Adapted(model, job, device)
    return Streamed(model, job, device, num_threads)


def small_model(hidden: int, length: int) -> nn.Module:
    """A Llama of 4 layers over bytes, of fresh random weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=(hidden * 8 // 3 + 15) // 16 * 16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class Streamed:
    """All parameters, by this library, in the job's formats."""

    def __init__(self, model: nn.Module, job: Job, device: str, num_threads: int) -> None:
        set_formats(job, device)
        with contextlib.redirect_stdout(io.StringIO()):
            self.model = mt.stream(model)
        self._optimizer = mt.optim.AdamW(
            self.model,
            lr=job.settings.lr,
            weight_decay=job.settings.weight_decay,
            seed=job.seed,
            num_threads=num_threads,
        )

    def step(self, batch: dict[str, Tensor], lr: float) -> Tensor:
        (loss,) = mt.accumulate(self.model, [batch])
        mt.clip_grad_norm_(self.model, MAX_NORM)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def digest(self) -> str:
        return digest_of(mt.named_parameters(self.model))

    def close(self) -> None:
        engine = engine_of(self.model)
        assert engine is not None
        engine.close()


def set_formats(job: Job, device: str) -> None:
    """`mt.init` with the job's formats."""
    precision = "fp32" if job.master == "fp32" else "bf16"
    known = {"precision": precision, "master": job.master, "device": device}
    if job.moments == "2bit":
        MOMENTS.setdefault("2bit", "LOSSY 2-bit moments (for measurements alone)")
        api._config = TwoBitConfig(optimizer_compression="4bit", **known)
    else:
        mt.init(optimizer_compression=False if job.moments == "fp32" else job.moments, **known)


class Adapted:
    """LoRA of rank 16 on all linear layers of a bf16 model, adapters and moments in fp32, by PyTorch alone."""

    def __init__(self, model: nn.Module, job: Job, device: str) -> None:
        import peft

        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(model.bfloat16(), config).to(device)
        self._autocast = torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
        # For the held-out loss too, which calls the model without this class.
        self.model.forward = self._autocast(self.model.forward)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), weight_decay=job.settings.weight_decay)

    def step(self, batch: dict[str, Tensor], lr: float) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.values(), MAX_NORM)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def digest(self) -> str:
        return digest_of((name, p.detach().cpu()) for name, p in self._trained.items())

    def close(self) -> None:
        self._optimizer.state.clear()


def digest_of(weights: Iterator[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(name.encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# Text


@dataclass(frozen=True)
class Corpus:
    """Tokens of text, and of text from other files."""

    train: Tensor
    """(tokens,) int64."""
    heldout: Tensor
    digest: str
    """Of both: it differs between versions of Python."""

    def windows(self, settings: Settings, num_rows: int) -> Tensor:
        """The first `num_rows` of the `heldout_rows` sequences, spread over the held-out text: (num_rows, length)."""
        stride = (len(self.heldout) - settings.length) // settings.heldout_rows
        assert stride > 0, "too little held-out text"
        all_rows = self.heldout.unfold(0, settings.length, stride)[: settings.heldout_rows]
        # The first rows of an order that mixes the text, so that the curve sees all of it.
        order = torch.randperm(settings.heldout_rows, generator=torch.Generator().manual_seed(0))
        return all_rows[order[:num_rows]]


@functools.cache
def tokens_of(model_path: Path | None) -> Corpus:
    """The standard library's source: bytes, or tokens of the model in that folder."""
    train, heldout = standard_library()
    digest = hashlib.sha256(train + heldout).hexdigest()[:16]
    if model_path is None:
        parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (train, heldout)]
        return Corpus(*parts, digest)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    texts = [part[:FINETUNE_BYTES].decode(errors="ignore") for part in (train, heldout)]
    # In pieces: a tokenizer is slow on one text of megabytes.
    pieces = [[text[i : i + 2000] for i in range(0, len(text), 2000)] for text in texts]
    ids = [tokenizer(many, add_special_tokens=False)["input_ids"] for many in pieces]
    parts = [torch.tensor([token for piece in many for token in piece]) for many in ids]
    return Corpus(*parts, digest)


def standard_library() -> tuple[bytes, bytes]:
    """Source files to train on, and other ones that are held out, each in an order that mixes the modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for file in folder.rglob("*.py"):
        path = file.relative_to(folder)
        # _sysconfigdata says how this Python was built.
        if not LEFT_OUT & set(path.parts) and not path.name.startswith("_sysconfigdata"):
            files[hashlib.sha256(path.as_posix().encode()).digest()] = file
    assert files, f"no Python source in {folder}"
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for digest, file in sorted(files.items()):
        # The order goes by the first bytes, the choice by the last.
        parts[digest[-1] < 256 * HELDOUT_SHARE].append(file.read_bytes())
    return b"\n\n".join(parts[0]), b"\n\n".join(parts[1])


# The machine


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """PyTorch's deterministic algorithms on a GPU, where there are any; on the CPU they are so anyway."""
    if not device.startswith("cuda"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
