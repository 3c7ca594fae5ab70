"""A mixture of experts with a router and an auxiliary loss of one's own.

    python examples/custom_router.py

Each block returns its hidden state and the loss of its router. Both are outputs, so gradients of both come back to it.
An expert that got no token in a step has no gradient and is not updated.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import megatrain as mt

NUM_STEPS, LENGTH, WIDTH, NUM_EXPERTS = 60, 64, 64, 4


class RoutedBlock(nn.Module):
    """Mixes each token with the two before it, then sends it to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(3 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (rows, LENGTH, WIDTH). Returns the new x, and a loss that is 1 when all experts get as much."""
        past = functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).flatten(2)
        tokens = self.norm(x + self.mix(past)).flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        weight, choice = shares.max(-1)
        out = torch.zeros_like(tokens)
        for index in choice.unique().tolist():
            mine = (choice == index).nonzero().squeeze(-1)
            out = out.index_add(0, mine, weight[mine, None] * functional.silu(self.experts[index](tokens[mine])))
        load = functional.one_hot(choice, NUM_EXPERTS).float().mean(0)
        return x + out.view_as(x), NUM_EXPERTS * (load * shares.mean(0)).sum()


class RoutedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x, balance = self.embedding(ids), 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        entropy = functional.cross_entropy(self.head(x)[:, :-1].transpose(1, 2), ids[:, 1:])
        return {"loss": entropy + 0.01 * balance}


def main() -> None:
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    model = mt.stream(RoutedModel())
    optimizer = mt.optim.AdamW(model, lr=3e-3)
    device = next(model.parameters()).device
    for step in range(1, NUM_STEPS + 1):
        picked = rows[torch.randint(len(rows), (8,))].to(device)
        losses = mt.accumulate(model, [{"ids": part} for part in picked.split(4)])
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {sum(losses).item():.3f}")


if __name__ == "__main__":
    main()
