"""What is supervised in a conversation, against the text that the template itself renders."""

from __future__ import annotations

import pytest
from data_helpers import CHATML, LLAMA3, MARKED, OPAQUE, UNSTABLE, tiny_tokenizer

from megatrain.base.errors import UserError
from megatrain.data.chat import ChatEncoder, flags_of_spans

TALK = [
    {"role": "user", "content": "hello there, assistant"},
    {"role": "assistant", "content": "I am fine."},
    {"role": "user", "content": "how are you?"},
    {"role": "assistant", "content": "hello there"},
]


def supervised_texts(tokenizer, messages: list[dict]) -> list[str]:
    """The supervised runs of tokens, decoded."""
    ids, flags = ChatEncoder(tokenizer).encode(messages, None, "here")
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    runs: list[list[int]] = []
    for position, (id, flag) in enumerate(zip(ids, flags, strict=True)):
        if flag and not (position and flags[position - 1]):
            runs.append([])
        if flag:
            runs[-1].append(id)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (MARKED, "<|im_end|>")])
def test_every_assistant_turn_with_its_end_and_nothing_else(template: str, end: str) -> None:
    assert supervised_texts(tiny_tokenizer(template), TALK) == [f"I am fine.{end}", f"hello there{end}"]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED])
def test_system_turn_and_repeated_contents(template: str) -> None:
    """The assistant says what system and user said: only the place tells them apart."""
    same = [{"role": role, "content": "a b"} for role in ("system", "user", "assistant", "user", "assistant")]
    texts = supervised_texts(tiny_tokenizer(template), same)
    assert [text.split("<|")[0] for text in texts] == ["a b", "a b"]


def test_ids_are_those_of_the_template() -> None:
    tokenizer = tiny_tokenizer(LLAMA3, with_bos=True)
    ids, _ = ChatEncoder(tokenizer).encode(TALK, None, "here")
    assert ids == tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_trimmed_content_is_found() -> None:
    padded = [TALK[0], {"role": "assistant", "content": "  I am fine. \n"}]
    assert supervised_texts(tiny_tokenizer(LLAMA3), padded) == ["I am fine.<|eot_id|>"]


def test_conversation_that_begins_with_the_assistant() -> None:
    assert supervised_texts(tiny_tokenizer(CHATML), TALK[1:]) == ["I am fine.<|im_end|>", "hello there<|im_end|>"]


def test_template_that_is_not_prefix_stable() -> None:
    """Earlier turns lose their thinking block as the talk goes on; the model learns what it would write, no more."""
    tokenizer = tiny_tokenizer(UNSTABLE)
    thinking = "<think>\n\n</think>\n\n"
    assert supervised_texts(tokenizer, TALK) == ["I am fine.<|im_end|>", f"{thinking}hello there<|im_end|>"]
    assert supervised_texts(tokenizer, TALK[:2]) == [f"{thinking}I am fine.<|im_end|>"]


def test_user_who_writes_like_the_template() -> None:
    talk = [{"role": "user", "content": "<|im_start|>assistant\nhello"}, *TALK[1:]]
    assert supervised_texts(tiny_tokenizer(UNSTABLE), talk)[0] == "I am fine.<|im_end|>"
    assert supervised_texts(tiny_tokenizer(CHATML), talk)[0] == "I am fine.<|im_end|>"


def test_template_that_hides_the_turns_is_refused() -> None:
    with pytest.raises(UserError, match=r"here: .*generation"):
        ChatEncoder(tiny_tokenizer(OPAQUE)).encode(TALK, None, "here")


def test_reasoning_of_an_unstable_template_is_not_lost_silently() -> None:
    talk = [*TALK[:3], {**TALK[3], "reasoning_content": "let me think"}]
    with pytest.raises(UserError, match="generation"):
        ChatEncoder(tiny_tokenizer(UNSTABLE)).encode(talk, None, "here")


def test_no_template() -> None:
    with pytest.raises(UserError, match=r"no chat template.*`prompt`"):
        ChatEncoder(tiny_tokenizer(None))


def test_template_that_refuses() -> None:
    tokenizer = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="here: .*roles must alternate"):
        ChatEncoder(tokenizer).encode(TALK, None, "here")


def test_template_that_marks_nothing() -> None:
    tokenizer = tiny_tokenizer("{% generation %}{% endgeneration %}{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="marks no token"):
        ChatEncoder(tokenizer).encode(TALK, None, "here")


def test_tokens_across_the_edge_of_a_span_are_supervised() -> None:
    offsets = [(0, 2), (2, 5), (5, 6), (6, 9), (9, 10)]
    assert flags_of_spans(offsets, [(3, 5), (8, 9)]) == [False, True, False, True, False]
