"""A tiny chat model on the disk, recipes for it, and the command run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_helpers import CHATML, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import cli


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, and what was printed on the two outputs."""
    code = cli.run_command([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def signalled(number: int, start: str, *arguments: object) -> tuple[str, int]:
    """Run `megatrain` in a process of its own and send it a signal behind the first line that begins with `start`.

    Returns what it printed afterwards, and its exit code.
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "megatrain.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(start):
                break
        os.kill(process.pid, number)
        told = process.stdout.read()
        return told, process.wait(timeout=60)


def save_tiny_model(folder: Path) -> Path:
    """A llama of 2 blocks and 320 ids, with tokenizer and chat template, as save_pretrained leaves it."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(CHATML)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(file: Path, count: int = 40) -> Path:
    """Chats that are easy to learn: each question has the same answer."""
    lines = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"hello {number % 7}"},
            {"role": "assistant", "content": "I am fine, thank you."},
        ]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def write_recipe(folder: Path, **changes: dict[str, Any]) -> Path:
    """A recipe in `folder` that learns in a few seconds; sections are updated by `changes`."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"name": str(save_tiny_model(folder / "model"))},
        "data": {"path": str(write_chats(folder / "chats.jsonl")), "sequence_length": 64, "eval_fraction": 0.2},
        "training": {
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 4,
            "save_strategy": "no",
        },
        "engine": {"device": "cpu"},
        "sample": {"prompts": ["hello 1"], "max_new_tokens": 8},
        "output": {"dir": str(folder / "out")},
    }
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def files_below(folder: Path) -> dict[str, int]:
    """Every file with its size."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
