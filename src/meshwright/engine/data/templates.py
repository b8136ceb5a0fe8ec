"""Renders conversations with a chat template and masks the answers: by generation marks or by comparing turns."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.conversations import WEIGHT, Conversation, Message
from meshwright.engine.data.files import row_error
from meshwright.engine.data.system_messages import with_merged_system
from meshwright.engine.data.tokenizers import eos_fix
from meshwright.engine.data.tool_calls import (
    MARKED,
    marked_tool,
    printed_as_python,
    with_marked_calls,
    with_text_arguments,
)
from meshwright.engine.patching import symbol
from meshwright.errors import InputError

TrainOn = Literal["answers", "last_answer", "all"]
Span = tuple[int, int]  # in characters

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates that print the current date would produce different tokens tomorrow. They get this fixed date, which is also
# the default of Llama's templates.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
NOT_RENDERED = "the chat template does not render"
IGNORE_TOOLS = "data.columns.tools= (ignores the column)"
RENDERING_TEMPLATE = "data.chat_template=FILE of a template that renders tools"
MERGE_SYSTEM = "data.merge_system=true"
GENERATION_MARK_FIX = "data.chat_template=FILE with {% generation %} … {% endgeneration %} around each answer"


@dataclass(frozen=True)
class MaskedTokens:
    """The tokens of one conversation and their loss mask (never set on the first token, which has no context)."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class ChatTemplate:
    """Tokenizes conversations with a chat template; without one, only prompt-response pairs."""

    def __init__(self, tokenizer: Any, file: str, train_on: TrainOn, merge_system: bool = False) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                "answers cannot be masked: the tokenizer is not a fast one and has no character offsets",
                field="data.tokenizer",
                value=tokenizer.name_or_path,
                fix=("data.tokenizer=FOLDER with a tokenizer.json",),
            )
        self.tokenizer, self.train_on, self.merge_system = tokenizer, train_on, merge_system
        self.text: str = read_template(file) if file else _tokenizer_template(tokenizer)
        self.has_generation_mark = bool(GENERATION_MARK.search(self.text))
        first = tokenizer("a")["input_ids"][:1]  # the call also resets a truncation set in tokenizer.json
        self._bos: str = tokenizer.bos_token if first == [tokenizer.bos_token_id] else ""
        self._ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())

    @property
    def mask_source(self) -> str:
        """Return how answers are located, for the log."""
        if not self.text:
            return "no chat template: prompt, newline, response"
        return "answers from generation marks" if self.has_generation_mark else "answers from comparing turns"

    def tokens(self, conversations: Sequence[Conversation], locations: Sequence[str]) -> list[MaskedTokens]:
        """Return the conversations' tokens; locations are used in errors."""
        return self.encode([self.render_masked(*one) for one in zip(conversations, locations, strict=True)])

    def encode(self, rendered: Sequence[tuple[str, list[Span]]]) -> list[MaskedTokens]:
        """Return the tokens of rendered conversations."""
        # Not tokenizer(...): it builds offset lists for every token, and only the answers' boundaries are needed.
        encoded = self.tokenizer.backend_tokenizer.encode_batch(
            [text for text, _ in rendered], add_special_tokens=False
        )
        return [_mask_spans(one, len(text), spans) for one, (text, spans) in zip(encoded, rendered, strict=True)]

    def tokens_with_images(
        self, conversation: Conversation, where: str, mark: str, replacements: Sequence[str]
    ) -> MaskedTokens:
        """Return the tokens of a conversation with each image mark replaced by that image's tokens."""
        text, spans = _replace_image_marks(*self.render_masked(conversation, where), mark, replacements, where)
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return _mask_spans(encoded, len(text), spans)

    def render_masked(self, conversation: Conversation, where: str) -> tuple[str, list[Span]]:
        """Return the conversation as text, and the spans that are in the loss."""
        if not conversation.messages:
            text = self._bos + conversation.text + self._end
            return text, [(0, len(text))]
        if self.merge_system:
            conversation = with_merged_system(conversation, where)
        self._require_tools(conversation, where)
        if not self.text:
            return self._render_plain(conversation, where)
        text, spans = self._render(conversation.messages, conversation, where, mark=self.has_generation_mark)
        if self.train_on == "all":
            _refuse_weights(conversation, where)
            return text, [(0, len(text))]
        if not self.has_generation_mark:
            return text, self._answer_spans(text, conversation, where)
        spans = self._weighted_spans(text, spans, conversation, where)
        spans = [span for span in spans if span[1] > span[0]]
        return text, spans[-1:] if self.train_on == "last_answer" else spans

    def _require_tools(self, conversation: Conversation, where: str) -> None:
        """Raise for tools and tool calls that the template drops: an empty answer would be in the loss."""
        marked, names = with_marked_calls(conversation.messages)
        tools = conversation.tools
        if not names and not tools:
            return
        defined = [*tools, marked_tool(tools[0])] if tools else None
        both = replace(conversation, messages=marked, tools=defined)
        try:
            text = self._render(marked, both, where)[0] if self.text else ""
        except InputError:  # of the names: the conversation itself is rendered next
            return
        lost = next((number for name, number in names.items() if name not in text), None)
        if lost is not None:
            empty = not conversation.messages[lost].get("content")
            rest = ": an empty answer would be in the loss" if empty else ""
            raise row_error(where, f"{NOT_RENDERED} the tool calls of message {lost}{rest}")
        if tools and not re.search(rf"{MARKED}(?!\d)", text):
            raise row_error(where, f"{NOT_RENDERED} the tools of the row", (RENDERING_TEMPLATE, IGNORE_TOOLS))

    def _weighted_spans(self, text: str, spans: list[Span], conversation: Conversation, where: str) -> list[Span]:
        """Return the spans of generation marks without those of messages with weight 0."""
        answers = _answers(conversation)
        left_out = [number for number in answers if conversation.messages[number].get(WEIGHT) == 0]
        if not left_out:
            return spans
        if len(spans) == len(answers):  # one span per answer
            return [span for number, span in zip(answers, spans, strict=True) if number not in left_out]
        without = [self._answer_span(text, conversation, number, where) for number in left_out]
        return [span for span in spans if not any(start < span[1] and span[0] < end for start, end in without)]

    @property
    def _end(self) -> str:
        if not self.tokenizer.eos_token:
            raise InputError(
                "the tokenizer has no eos_token",
                field="data.tokenizer",
                value=self.tokenizer.name_or_path,
                fix=(eos_fix(self.tokenizer.name_or_path),),
            )
        return str(self.tokenizer.eos_token)

    def _render_plain(self, conversation: Conversation, where: str) -> tuple[str, list[Span]]:
        if not conversation.plain:
            raise row_error(
                where,
                "a conversation of messages needs a chat template, and the tokenizer has none",
                ("data.chat_template=FILE", "data.tokenizer=FOLDER of a chat model"),
            )
        prompt = self._bos + "\n".join(str(message["content"]) for message in conversation.messages[:-1]) + "\n"
        text = prompt + conversation.messages[-1]["content"] + self._end
        return text, [(0 if self.train_on == "all" else len(prompt), len(text))]

    def _render(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        where: str,
        mark: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        shown = [{key: value for key, value in one.items() if key != WEIGHT} for one in messages]
        try:
            found = self._apply(shown, conversation.tools, mark, add_generation_prompt)
            reason = ""
        except Exception as error:  # templates raise anything; report the row
            found, reason = ("", []), f"the chat template rejects the conversation: {error}"
        if any("tool_calls" in one for one in shown) and (reason or printed_as_python(shown, found[0])):
            try:  # some templates join the arguments of a call to other text
                return self._apply(with_text_arguments(shown), conversation.tools, mark, add_generation_prompt)
            except Exception as error:  # the first error says what is wrong
                reason = reason or f"the chat template rejects the conversation: {error}"
        if reason and self._renders_merged(conversation, where):
            reason = reason.replace("rejects the conversation", "rejects its system message", 1)
            raise row_error(where, f"{reason} ({MERGE_SYSTEM} puts it in front of the user's text)", (MERGE_SYSTEM,))
        if reason:
            raise row_error(where, reason)
        return found

    def _renders_merged(self, conversation: Conversation, where: str) -> bool:
        """Return whether a conversation that the template rejects renders once its system messages are merged."""
        try:
            merged = with_merged_system(conversation, where)
            return merged != conversation and bool(self._render(merged.messages, merged, where)[0])
        except InputError:
            return False

    def _apply(
        self, messages: list[Message], tools: list[Any] | None, mark: bool, add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        render = symbol("transformers.utils.chat_template_utils", "render_jinja_template")
        texts, spans = render(
            conversations=[messages],
            tools=tools,
            chat_template=self.text,
            return_assistant_tokens_mask=mark,
            add_generation_prompt=add_generation_prompt,
            strftime_now=TEMPLATE_DATE.strftime,
            date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0]] if mark else []

    def _answer_spans(self, full_text: str, conversation: Conversation, where: str) -> list[Span]:
        """Return the span that each answer adds to the text before it, including its end-of-turn token."""
        answers = _answers(conversation)[-1 if self.train_on == "last_answer" else 0 :]
        in_loss = [number for number in answers if conversation.messages[number].get(WEIGHT) != 0]
        return [self._answer_span(full_text, conversation, number, where) for number in in_loss]

    def _answer_span(self, full_text: str, conversation: Conversation, number: int, where: str) -> Span:
        before, _ = (
            self._render(conversation.messages[:number], conversation, where, add_generation_prompt=True)
            if number
            else ("", [])
        )
        last = number == len(conversation.messages) - 1
        through_turn = full_text if last else self._render(conversation.messages[: number + 1], conversation, where)[0]
        if not (through_turn.startswith(before) and full_text.startswith(through_turn)):
            raise row_error(
                where,
                f"the chat template renders message {number} differently once more messages follow "
                "(or differently from its generation prompt), so the answer cannot be masked",
                ("data.train_on=last_answer", GENERATION_MARK_FIX),
            )
        return len(before), _answer_end(through_turn, len(before), self._ends)


def _answers(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _refuse_weights(conversation: Conversation, where: str) -> None:
    """Raise for a message with weight 0 where every token is in the loss."""
    number = next((i for i, message in enumerate(conversation.messages) if message.get(WEIGHT) == 0), None)
    if number is not None:
        reason = f"message {number} has weight 0, and data.train_on=all trains on every token"
        raise row_error(where, reason, ("data.train_on=answers",))


def _replace_image_marks(
    text: str, spans: Sequence[Span], mark: str, replacements: Sequence[str], where: str
) -> tuple[str, list[Span]]:
    """Replace each image mark by the next replacement and shift the spans accordingly."""
    pieces = text.split(mark)
    if len(pieces) - 1 != len(replacements):
        raise row_error(
            where, f"the chat template renders {len(pieces) - 1} marks {mark} for {len(replacements)} images"
        )
    found = [match.end() for match in re.finditer(re.escape(mark), text)]

    def shift(offset: int) -> int:
        return offset + sum(
            len(replacement) - len(mark) for end, replacement in zip(found, replacements, strict=True) if end <= offset
        )

    joined = "".join(part for pair in zip(pieces, [*replacements, ""], strict=True) for part in pair)
    return joined, [(shift(start), shift(end)) for start, end in spans]


def _answer_end(text: str, start: int, ends: tuple[str, ...]) -> int:
    """Return the end of an answer: after its end-of-turn token, without the whitespace between turns."""
    stripped = text.rstrip()
    return max(start, len(stripped)) if stripped.endswith(ends) else len(text)


def _mask_spans(encoded: Any, chars: int, spans: Sequence[Span]) -> MaskedTokens:
    """Mask the tokens whose first character is in a span: tokens that start in the prompt are left out."""
    ids = np.array(encoded.ids, dtype=np.int32)
    loss_mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        loss_mask[_first_token(encoded, start, chars) : _first_token(encoded, end, chars)] = True
    loss_mask[:1] = False
    return MaskedTokens(ids, loss_mask)


def _first_token(encoded: Any, char: int, chars: int) -> int:
    """Return the first token that starts at or after a character."""
    found = (encoded.char_to_token(offset) for offset in range(char, chars))
    token: int | None = next((token for token in found if token is not None), None)  # some characters are in no token
    if token is None:
        return len(encoded.ids)
    while token < len(encoded.ids) and encoded.token_to_chars(token)[0] < char:
        token += 1
    return token


def read_template(file: str) -> str:
    """Return the text of a chat template file."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the file: {error}", field="data.chat_template", value=file) from None
    if not text.strip():
        raise InputError("the file is empty", field="data.chat_template", value=file)
    return text


def _tokenizer_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several named templates
        template = template.get("default", "")
    return str(template or "")
