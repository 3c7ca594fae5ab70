"""Prompts of a recipe's samples as tokens, and whether the model can answer them at the length that is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from transformers import BatchEncoding

from megatrain.base.errors import UserError
from megatrain.recipe import SampleConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, sample: SampleConfig) -> BatchEncoding:
    """One row of tokens: the prompt as a user's question where there is a chat template, else as it stands."""
    if not (sample.chat and tokenizer.chat_template):
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def check_samples(sample: SampleConfig, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuse, before the weights are read, samples that are empty or longer than the context. Raises UserError."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    for prompt in sample.prompts:
        num_tokens = encode_prompt(tokenizer, prompt, sample)["input_ids"].shape[1]
        if num_tokens == 0:
            raise UserError(f"sample.prompts: {prompt!r} has no token to go on from; write something, or leave it out")
        room = math.inf if context is None else context - num_tokens
        if room < sample.max_new_tokens:
            remedy = f"use {room} or fewer" if room >= 1 else "shorten the prompt"
            raise UserError(
                f"sample.max_new_tokens is {sample.max_new_tokens}, but the model has {context} positions, of which "
                f"the prompt {prompt[:40]!r} leaves {max(0, room)}; {remedy}"
            )
