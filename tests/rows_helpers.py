"""Micro-batches whose rows are cut or joined, a device that does not hold them, and how near results must be."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatrain.data.exactness import PROBE_TOKENS

LOSS_RTOL = 1e-6
"""Of a loss: a sum of at most 64 terms in fp32 in another order, each within 2^-24 of its size, or a quarter of that
where errors are as often up as down."""
GRADIENT_TOLERANCE = 1e-5
"""Of a gradient, as a share of the largest of its tensor: sums over at most 100 tokens in another order, 100 * 2^-24 =
6e-6 where all errors go one way."""


class Memory:
    """Stands for a device: the MLP of the last block finds no memory for more than `most_rows` rows.

    Args:
        in_backward: it does when the block is recomputed.
    """

    def __init__(self, model: Any, most_rows: int, *, in_backward: bool = False) -> None:
        self.num_failures = 0
        self.rows: list[int] = []
        """Of each call, in order."""
        self.most_rows = most_rows
        mlp = model.model.layers[-1].mlp
        plain = mlp.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            self.rows.append(len(hidden))
            is_backward = torch._C._current_graph_task_id() != -1
            is_probe = hidden.shape[:2] == (2, PROBE_TOKENS)  # takes next to nothing of a true memory
            if len(hidden) > self.most_rows and is_backward == in_backward and not is_probe:
                self.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
            return plain(hidden)

        mlp.forward = forward


def batches(*shapes: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of (rows, tokens), with unlike numbers of targets in their rows, and rows without any."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for num_rows, num_tokens in shapes:
        ids = torch.randint(0, 64, (num_rows, num_tokens), generator=generator)
        labels = ids.clone()
        for index in range(num_rows):
            labels[index, : (3 * index) % num_tokens] = -100
        labels[0] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=LOSS_RTOL, atol=0)
    for name, value in expected.items():
        largest = value.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=GRADIENT_TOLERANCE * largest, msg=name)


def num_targets(many: list[dict]) -> torch.Tensor:
    return sum(batch["labels"][:, 1:].ne(-100).sum() for batch in many)


def mixtral(**changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4)  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**config | changes))


class Capacity(LlamaForCausalLM):
    """Takes something from its neighbours in the batch."""

    def forward(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + 1e-3 * outputs.logits.flip(0)
        outputs.loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return outputs
