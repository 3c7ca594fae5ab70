"""Device memory that runs out for true: the same step with fewer rows, or an error that leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.execute.engine import engine_of
from megatrain.execute.retry import StepTooLargeError
from megatrain.micro_batches import MicroBatches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def all_of_the_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    mt.init()


def step_within(max_vram_gb: float | None) -> tuple[dict[str, torch.Tensor], int | None]:
    """Gradients and loss of 8 x 2048 tokens, whose logits take 2.1 GB, and the rows that were run at a time."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()  # a limit is of what is taken anew
    mt.init(precision="fp32", max_vram_gb=max_vram_gb, logits_in_pieces=False)
    config = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8)
    model = mt.stream(LlamaForCausalLM(LlamaConfig(vocab_size=32000, **config))).train()
    ids = torch.randint(0, 32000, (8, 2048), generator=torch.Generator().manual_seed(3)).cuda()

    def loss_of(batch: dict, num_items: torch.Tensor) -> torch.Tensor:
        return model(**batch, num_items_in_batch=num_items).loss

    rows = MicroBatches(model, engine_of(model), loss_of, lambda: "")
    before_bytes = torch.cuda.memory_allocated()
    try:
        (loss,) = rows.run([{"input_ids": ids, "labels": ids, "use_cache": False}], torch.tensor(8 * 2047).cuda())
        return {**dict(mt.named_gradients(model)), "loss": loss.cpu()}, rows.most_rows
    except torch.OutOfMemoryError:
        assert torch.cuda.memory_allocated() - before_bytes < 2**20
        raise
    finally:
        engine_of(model).close()


def test_fewer_rows_of_what_does_not_fit() -> None:
    whole, rows = step_within(None)
    assert rows is None
    whole = {name: value.clone() for name, value in whole.items()}
    cut, rows = step_within(2.5)
    assert rows in (1, 2, 4)
    for name, value in whole.items():
        # Sums over 16,376 tokens in another order, and matrix products of other shapes.
        torch.testing.assert_close(cut[name], value, rtol=1e-5, atol=1e-4 * float(value.abs().max()), msg=name)


def test_merged_micro_batches_that_do_not_fit() -> None:
    """Eight of 1 x 2048 tokens, merged into one, whose logits take 2.1 GB: apart again, before less is kept."""
    found = []
    for max_vram_gb, exact in ((None, True), (2.5, False)):
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        mt.init(precision="fp32", max_vram_gb=max_vram_gb, exact=exact, logits_in_pieces=False)
        config = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8)
        model = mt.stream(LlamaForCausalLM(LlamaConfig(vocab_size=32000, **config))).train()
        engine = engine_of(model)
        engine.merging.most_tokens = 0 if exact else 8 * 2048  # more than there is said to be room for
        ids = torch.randint(0, 32000, (8, 2048), generator=torch.Generator().manual_seed(3)).cuda()
        budget_bytes = engine.activations.budget_bytes
        mt.accumulate(model, [{"input_ids": row[None], "labels": row[None]} for row in ids])
        assert engine.activations.budget_bytes == budget_bytes
        found.append(dict(mt.named_gradients(model)))
        engine.close()
    assert 2048 <= engine.merging.most_tokens < 8 * 2048
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-4 * float(value.abs().max()), msg=name)


def test_one_row_that_does_not_fit() -> None:
    """Its logits alone take 0.26 GB, and their gradient as much."""
    with pytest.raises(StepTooLargeError, match="a single row of 2,048 tokens"):
        step_within(0.5)
