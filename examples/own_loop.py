"""A training loop of one's own: accumulation, clipping, a schedule, evaluation, saving.

    python examples/own_loop.py

Everything but the four calls of `mt` is as in plain PyTorch. The model is tiny and random, the text is Python's own
documentation, a byte a token; put any causal language model and any text in their places.
"""

from __future__ import annotations

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import megatrain as mt

NUM_STEPS, NUM_MICRO_BATCHES, NUM_ROWS, LENGTH = 30, 4, 4, 64


def read_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of LENGTH tokens to train on, and 16 to evaluate on."""
    text = "\n".join(topics.values()).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    return rows[16:], rows[:16]


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    model.eval()
    loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


def main() -> None:
    torch.manual_seed(0)
    train_rows, eval_rows = read_rows()
    model = mt.stream(make_model())
    optimizer = mt.optim.AdamW(model, lr=5e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=NUM_STEPS)
    eval_rows = eval_rows.to(model.device)

    print(f"before: evaluation loss {evaluate(model, eval_rows):.3f}")
    for step in range(1, NUM_STEPS + 1):
        picked = train_rows[torch.randint(len(train_rows), (NUM_MICRO_BATCHES * NUM_ROWS,))].to(model.device)
        batches = [{"input_ids": rows, "labels": rows} for rows in picked.split(NUM_ROWS)]

        losses = mt.accumulate(model, batches)  # forward and backward of all of them, layer by layer
        norm = mt.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {sum(losses).item():.3f}, gradient norm {norm.item():.2f}")
    print(f"after: evaluation loss {evaluate(model, eval_rows):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = LlamaForCausalLM.from_pretrained(folder)
        print(f"saved and loaded by plain transformers: {evaluate(again, eval_rows.cpu()):.3f}")


if __name__ == "__main__":
    main()
