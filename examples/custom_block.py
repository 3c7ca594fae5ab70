"""A model of one's own, not from transformers: any torch.nn.Module whose blocks are in a ModuleList.

    python examples/custom_block.py

Each block, the embedding and the head are streamed; the forward stays as it is written here.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import megatrain as mt

NUM_STEPS, NUM_ROWS, LENGTH, WIDTH = 60, 8, 64, 64


class ConvolutionBlock(nn.Module):
    """Mixes each position with the 7 before it, then its channels. (rows, LENGTH, WIDTH) -> the same."""

    def __init__(self, dropout: float = 0.05) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, kernel_size=8, groups=WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = functional.pad(self.norm(x).transpose(1, 2), (7, 0))
        value, gate = self.gate(self.mix(past).transpose(1, 2)).chunk(2, dim=-1)
        return x + self.dropout(self.out(value * functional.silu(gate)))


class ConvolutionModel(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(ConvolutionBlock() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (rows, LENGTH). Returns the loss of predicting each byte from those before it."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])


def main() -> None:
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    model = mt.stream(ConvolutionModel())
    optimizer = mt.optim.AdamW(model, lr=3e-3)
    device = next(model.parameters()).device

    for step in range(1, NUM_STEPS + 1):
        loss = model(rows[torch.randint(len(rows), (NUM_ROWS,))].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
