"""Conversations as tokens, and which of them are answers: by the template's own marks, or by what each turn adds."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.conversations import Conversation, Message
from meshwright.engine.data.files import bad
from meshwright.engine.patching import symbol
from meshwright.errors import InputError

TrainOn = Literal["answers", "last_answer", "all"]
Span = tuple[int, int]  # of letters

MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates that write down the day would give other tokens tomorrow: they are told this one, which is also the day
# that Llama's templates fall back to.
DAY = datetime.datetime(2024, 7, 26)
MARK_FIX = "data.chat_template=FILE with {% generation %} … {% endgeneration %} around each answer"


@dataclass(frozen=True)
class Tokens:
    """One conversation: its tokens, and which of them are learnt (never the first, which nothing comes before)."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]


class Template:
    """Writes conversations as a tokenizer's chat template has it; without one only prompts and responses."""

    def __init__(self, tokenizer: Any, file: str, train_on: TrainOn) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                "the tokenizer cannot say which letters a token stands for, so answers cannot be told from prompts",
                field="data.tokenizer",
                value=tokenizer.name_or_path,
                fix=("data.tokenizer=FOLDER with a tokenizer.json",),
            )
        self.tokenizer, self.train_on = tokenizer, train_on
        self.text: str = _read(file) if file else _own(tokenizer)
        self.marked = bool(MARKS.search(self.text))
        first = tokenizer("a")["input_ids"][:1]  # which also takes back any cutting that tokenizer.json asks for
        self._bos: str = tokenizer.bos_token if first == [tokenizer.bos_token_id] else ""
        self._ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())

    @property
    def way(self) -> str:
        """How answers are found, in words."""
        if not self.text:
            return "no chat template: the prompt, a line's end and the response"
        return "answers marked by the template" if self.marked else "answers told by what each turn adds"

    def tokens(self, talks: Sequence[Conversation], places: Sequence[str]) -> list[Tokens]:
        """The conversations' tokens; places are named in errors."""
        written = [self._written(talk, where) for talk, where in zip(talks, places, strict=True)]
        # Past the tokenizer's own call, which makes lists of every token's letters; only answers' borders are needed.
        encoded = self.tokenizer.backend_tokenizer.encode_batch([text for text, _ in written], add_special_tokens=False)
        return [_marked(one, len(text), spans) for one, (text, spans) in zip(encoded, written, strict=True)]

    def tokens_of(self, talk: Conversation, where: str, mark: str, words: Sequence[str]) -> Tokens:
        """One conversation's tokens, where images stand in it: each mark of one gives way to words of its own."""
        text, spans = _replaced(*self._written(talk, where), mark, words, where)
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return _marked(encoded, len(text), spans)

    def _written(self, talk: Conversation, where: str) -> tuple[str, list[Span]]:
        """The conversation as one text, and the parts of it that are learnt."""
        if not talk.messages:
            text = self._bos + talk.text + self._end
            return text, [(0, len(text))]
        if not self.text:
            return self._joined(talk, where)
        text, spans = self._rendered(talk.messages, talk, where, mark=self.marked)
        if self.train_on == "all":
            return text, [(0, len(text))]
        if not self.marked:
            return text, self._added(text, talk, where)
        spans = [span for span in spans if span[1] > span[0]]
        return text, spans[-1:] if self.train_on == "last_answer" else spans

    @property
    def _end(self) -> str:
        if not self.tokenizer.eos_token:
            raise InputError(
                "the tokenizer has no token that ends a text",
                field="data.tokenizer",
                value=self.tokenizer.name_or_path,
                fix=("an eos_token in its tokenizer_config.json",),
            )
        return str(self.tokenizer.eos_token)

    def _joined(self, talk: Conversation, where: str) -> tuple[str, list[Span]]:
        if not talk.plain:
            raise bad(
                where,
                "a conversation of messages needs a chat template, and the tokenizer has none",
                ("data.chat_template=FILE", "data.tokenizer=FOLDER of a chat model"),
            )
        prompt = self._bos + "\n".join(str(message["content"]) for message in talk.messages[:-1]) + "\n"
        text = prompt + talk.messages[-1]["content"] + self._end
        return text, [(0 if self.train_on == "all" else len(prompt), len(text))]

    def _rendered(
        self, messages: Sequence[Message], talk: Conversation, where: str, mark: bool = False, ask: bool = False
    ) -> tuple[str, list[Span]]:
        render = symbol("transformers.utils.chat_template_utils", "render_jinja_template")
        try:
            texts, spans = render(
                conversations=[list(messages)],
                tools=talk.tools,
                chat_template=self.text,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=ask,
                strftime_now=DAY.strftime,
                date_string=DAY.strftime("%d %b %Y"),
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template can fail in any way; the row is what the user can look at
            raise bad(where, f"the chat template refuses the conversation: {error}") from None
        return texts[0], [(begin, end) for begin, end in spans[0]] if mark else []

    def _added(self, whole: str, talk: Conversation, where: str) -> list[Span]:
        """What each answer adds to the text before it, up to the token that ends the turn."""
        answers = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        if self.train_on == "last_answer":
            answers = answers[-1:]
        return [self._turn(whole, talk, number, where) for number in answers]

    def _turn(self, whole: str, talk: Conversation, number: int, where: str) -> Span:
        before, _ = self._rendered(talk.messages[:number], talk, where, ask=True) if number else ("", [])
        last = number == len(talk.messages) - 1
        through = whole if last else self._rendered(talk.messages[: number + 1], talk, where)[0]
        if not (through.startswith(before) and whole.startswith(through)):
            raise bad(
                where,
                f"the chat template writes message {number} in another way once more messages follow "
                "(or does not begin it as it asks for it), so its answer cannot be told from the rest",
                ("data.train_on=last_answer", MARK_FIX),
            )
        return len(before), _through_end_of_turn(through, len(before), self._ends)


def _replaced(text: str, spans: Sequence[Span], mark: str, words: Sequence[str], where: str) -> tuple[str, list[Span]]:
    """The text with each mark replaced by the next of the words, and the spans as they lie in it then."""
    pieces = text.split(mark)
    if len(pieces) - 1 != len(words):
        raise bad(where, f"the chat template writes {len(pieces) - 1} marks {mark} for {len(words)} images")
    found = [match.end() for match in re.finditer(re.escape(mark), text)]

    def moved(place: int) -> int:
        return place + sum(len(word) - len(mark) for end, word in zip(found, words, strict=True) if end <= place)

    joined = "".join(part for pair in zip(pieces, [*words, ""], strict=True) for part in pair)
    return joined, [(moved(begin), moved(end)) for begin, end in spans]


def _through_end_of_turn(text: str, begin: int, ends: tuple[str, ...]) -> int:
    """The end of an answer: past the token that ends its turn, without the spaces a template writes between turns."""
    bare = text.rstrip()
    return max(begin, len(bare)) if bare.endswith(ends) else len(text)


def _marked(encoded: Any, letters: int, spans: Sequence[Span]) -> Tokens:
    """A token is learnt when its first letter is: one that begins in the prompt is not the answer's."""
    ids = np.array(encoded.ids, dtype=np.int32)
    learnt = np.zeros(len(ids), dtype=np.bool_)
    for begin, end in spans:
        learnt[_first_token(encoded, begin, letters) : _first_token(encoded, end, letters)] = True
    learnt[:1] = False
    return Tokens(ids, learnt)


def _first_token(encoded: Any, letter: int, letters: int) -> int:
    """The first token that begins at a letter or behind it."""
    found = (encoded.char_to_token(place) for place in range(letter, letters))
    token: int | None = next((token for token in found if token is not None), None)  # some letters are in no token
    if token is None:
        return len(encoded.ids)
    while token < len(encoded.ids) and encoded.token_to_chars(token)[0] < letter:
        token += 1
    return token


def _read(file: str) -> str:
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", field="data.chat_template", value=file) from None
    if not text.strip():
        raise InputError("the file is empty", field="data.chat_template", value=file)
    return text


def _own(tokenizer: Any) -> str:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):  # several by name
        own = own.get("default", "")
    return str(own or "")
