"""Chat conversations to tokens, and which of them the assistant wrote.

Rule: never guess. The places of the assistant's turns come from the template's own `{% generation %}` marks, or from
renderings that are checked to be pieces of the whole; where neither works the user is told.
Gives up: templates that change a turn by what it contains, without marks, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Span = tuple[int, int]
_PLAIN_KEYS = ("role", "content", "name")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Turns `messages` into (token ids, supervised flags) with the tokenizer's own template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                "data: the samples are `messages`, but the tokenizer has no chat template; take an instruct model, "
                "set tokenizer.chat_template, or write the samples as `prompt` and `completion`"
            ) from error
        if not tokenizer.is_fast:
            raise UserError("data: `messages` need a fast tokenizer (one with character offsets); load a fast one")
        self.tokenizer = tokenizer
        self.has_marks = bool(_GENERATION_MARK.search(template))
        special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special)
        self.special_strings = tuple(special.values())

    def encode(self, messages: Messages, tools: list[Any] | None, where: str) -> tuple[list[int], list[bool]]:
        """Returns ids and flags of equal length. Raises UserError if the template cannot render or be split."""
        if self.has_marks:
            ids, flags = self._encode_by_marks(messages, tools, where)
        else:
            ids, flags = self._encode_by_renderings(messages, tools, where)
        self._supervise_end_of_turn(ids, flags)
        if not any(flags):
            raise UserError(f"{where}: the chat template marks no token as the assistant's; repair the template")
        return ids, flags

    def _encode_by_marks(self, messages: Messages, tools: Any, where: str) -> tuple[list[int], list[bool]]:
        out = self._apply(messages, tools, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return out["input_ids"], [bool(flag) for flag in out["assistant_masks"]]

    def _encode_by_renderings(self, messages: Messages, tools: Any, where: str) -> tuple[list[int], list[bool]]:
        whole = self._apply(messages, tools, where, tokenize=False)
        spans = spans_by_prefixes(self._renderer(tools), messages, whole)
        if spans is None:
            spans = spans_by_markers(self._renderer(tools), messages, whole)
        if spans is None:
            raise UserError(
                f"{where}: the chat template renders earlier turns differently as the conversation grows, so the "
                "assistant's turns cannot be found exactly; use a template with {% generation %} marks"
            )
        spans = [(start, self._end_of_turn(whole, start, end)) for start, end in spans]
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], flags_of_spans(encoded["offset_mapping"], spans)

    def _apply(self, messages: Messages, tools: Any, where: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # templates are programs of their own: they raise what they like
            raise UserError(f"{where}: the chat template refuses this conversation: {error}") from error

    def _renderer(self, tools: Any) -> Callable[..., str | None]:
        def render(messages: Messages, add_generation_prompt: bool = False) -> str | None:
            try:
                return self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            except Exception:  # a template may refuse a part of a conversation that it accepts as a whole
                return None

        return render

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Leave out white space after the end-of-turn token: generation has stopped before it."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self.special_strings) else end

    def _supervise_end_of_turn(self, ids: list[int], flags: list[bool]) -> None:
        """Marks around the content alone would leave out the token that ends the turn: add it, in place."""
        for last in range(len(ids) - 1):
            ends_here = flags[last] and not flags[last + 1]
            if ends_here and ids[last] not in self.special_ids and ids[last + 1] in self.special_ids:
                flags[last + 1] = True


def spans_by_prefixes(render: Callable[..., str | None], messages: Messages, whole: str) -> list[Span] | None:
    """Character spans of the assistant's turns in `whole`: from the end of the rendering that asks for the turn to the
    end of the rendering that has it. None unless each of these renderings is a prefix of the next and of `whole`."""
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = render(messages[:index], add_generation_prompt=True) if index else None
        turn = whole if index == len(messages) - 1 else render(messages[: index + 1])
        if head is None or turn is None or not (turn.startswith(head) and whole.startswith(turn)):
            return None
        spans.append((len(head), len(turn)))
    return spans


def spans_by_markers(render: Callable[..., str | None], messages: Messages, whole: str) -> list[Span] | None:
    """For templates that are not prefix-stable: render once with a marker in place of each content. What stands between
    the markers is the template's own; with the contents put back it must be `whole`, letter by letter, else None.

    A turn begins after the generation prompt where the template's text has it (the model writes what follows), else at
    its content.
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    if any(value is not None for turn in turns for key, value in turn.items() if key not in _PLAIN_KEYS):
        return None  # reasoning or tool calls are the assistant's too, and would pass as the template's text
    markers = [f"content-of-message-{index}-stands-here" for index in range(len(messages))]
    marked = render([{**message, "content": marker} for message, marker in zip(messages, markers, strict=True)])
    glue = None if marked is None else _split_at(marked, markers)
    if glue is None or not whole.startswith(glue[0]):
        return None
    asked = render(messages, add_generation_prompt=True) or ""
    prompt = asked[len(whole) :] if asked.startswith(whole) else ""
    spans: list[Span] = []
    end = len(glue[0])
    for message, before, after in zip(messages, glue[:-1], glue[1:], strict=True):
        content = _content_at(whole, end, message["content"], after)
        if content is None:
            return None
        written = len(before.rpartition(prompt)[2]) if prompt and prompt in before else 0
        if message["role"] == "assistant":
            spans.append((end - written, end + len(content)))
        end += len(content) + len(after)
    return spans if end == len(whole) else None


def _split_at(text: str, markers: list[str]) -> list[str] | None:
    """The pieces between the markers, one more than there are markers; None if they do not stand there in order."""
    pieces = []
    for marker in markers:
        piece, found, text = text.partition(marker)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _content_at(whole: str, start: int, content: str, after: str) -> str | None:
    """The content as it stands at `start`, followed by `after`: as given, or trimmed."""
    for candidate in (content, content.strip()):
        if whole.startswith(candidate + after, start):
            return candidate
    return None


def flags_of_spans(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """A token is supervised if any of its characters lies in a span. Both lists are in order."""
    flags: list[bool] = []
    current = 0
    for start, end in offsets:
        while current < len(spans) and start >= spans[current][1]:
            current += 1
        flags.append(current < len(spans) and end > spans[current][0])
    return flags
