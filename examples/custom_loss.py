"""A loss of one's own: what the model's outputs are worth is a function of (outputs, batch).

    python examples/custom_loss.py

Here: cross entropy that counts letters three times as much as other characters, and a penalty on large logits. The
step's loss is the sum over its micro-batches, so each is divided by what the whole step has: then it does not matter
how the step is cut.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import megatrain as mt

NUM_STEPS, NUM_ROWS, LENGTH = 40, 8, 64
IS_LETTER = torch.tensor([chr(byte).isalpha() for byte in range(256)])


def weights(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What each target counts. (rows, LENGTH - 1)"""
    targets = batch["input_ids"][:, 1:]
    return torch.where(IS_LETTER.to(targets.device)[targets], 3.0, 1.0)


def make_loss(batches: list[dict[str, torch.Tensor]]) -> Any:
    """The loss of each micro-batch of a step. It returns a scalar."""
    total = sum(weights(batch).sum() for batch in batches)

    def loss_fn(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1], batch["input_ids"][:, 1:]
        entropy = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        penalty = 1e-4 * logits.logsumexp(-1).square()
        return ((entropy + penalty) * weights(batch)).sum() / total

    return loss_fn


def main() -> None:
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = mt.stream(GPT2LMHeadModel(config))
    optimizer = mt.optim.AdamW(model, lr=3e-3)

    for step in range(1, NUM_STEPS + 1):
        picked = rows[torch.randint(len(rows), (NUM_ROWS,))].to(model.device)
        batches = [{"input_ids": part} for part in picked.split(2)]
        losses = mt.accumulate(model, batches, loss_fn=make_loss(batches))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {sum(losses).item():.3f}")


if __name__ == "__main__":
    main()
