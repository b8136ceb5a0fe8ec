"""Conversations about images: rows of a data set, written out by the model's own processor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.conversations import (
    Conversation,
    Message,
    detect_columns,
    parse_conversation,
    untrainable_reason,
)
from meshwright.engine.data.files import Row, Rows, no_rows, row_error
from meshwright.engine.data.packing import pack
from meshwright.engine.data.sample_types import Sample, Samples
from meshwright.engine.data.sft_cache import too_long
from meshwright.engine.data.shuffle import Shuffled
from meshwright.engine.data.templates import ChatTemplate
from meshwright.engine.patching import symbol
from meshwright.engine.vision.image_loading import load_picture, open_picture
from meshwright.engine.vision.image_tokens import Document, ImageTokenSpec, Ints, sample_of, stack_padded
from meshwright.errors import InputError, first_line
from meshwright.recipes.types import Data

MARK = "<image>"  # where an image of a column goes in the text; without marks images come first
_HERE = "\ue000image\ue000"  # stands for an image while the text around it is read; no data set has it
IMAGE_COLUMNS = ("images", "image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")


@dataclass(frozen=True)
class Record:
    """A conversation whose messages have images among their parts, and where those images are."""

    where: str
    talk: Conversation
    pictures: tuple[Any, ...]

    @property
    def share(self) -> float:
        """A number in [0, 1) that equal conversations have in common."""
        digest = hashlib.blake2b(msgspec.json.encode(self.talk.messages), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


def read_records(
    rows: Rows, given: Mapping[str, str], train_on: str, rewrite: Callable[[Row], Row] | None = None
) -> list[Record]:
    """All rows as conversations; a row without anything to learn is refused by its place."""
    found: list[Record] = []
    columns: dict[str, str] = {}
    image_column = ""
    for where, read in rows:
        row = _rewritten(read, rewrite, where)
        if not columns:
            image_column = given.get("images") or next((name for name in IMAGE_COLUMNS if name in row), "")
            columns = detect_columns(row, given, rows.name)
        found.append(_record(row, columns, image_column, where))
        reason = untrainable_reason(found[-1].talk, train_on)
        if reason:
            raise row_error(where, reason)
    if not found:
        raise no_rows(rows.name)
    return found


def _rewritten(row: Row, rewrite: Callable[[Row], Row] | None, where: str) -> Row:
    try:
        return row if rewrite is None else rewrite(row)
    except (KeyError, TypeError, ValueError) as error:
        raise row_error(where, f"the row is not as the rows of this data set are: {error!r}") from None


def _record(row: Row, columns: Mapping[str, str], image_column: str, where: str) -> Record:
    inside: list[Any] = []
    if "messages" in columns and isinstance(row.get(columns["messages"]), list):
        name = columns["messages"]
        row = {**row, name: [_without_pictures(message, inside) for message in row[name]]}
    talk = parse_conversation(row, columns, where)
    beside = _as_list(row.get(image_column)) if image_column else []
    if inside and beside:
        beside = []  # the column repeats, for readers that want them apart, what the messages hold
    messages = [dict(message) for message in talk.messages]
    if beside:
        _place(messages, len(beside), where)
    pictures = (*inside, *beside)
    held = [message for message in messages if _HERE in message["content"]]
    if any(message["role"] == "assistant" for message in held):
        raise row_error(where, "an answer holds an image; models that see answer with text")
    count = sum(message["content"].count(_HERE) for message in held)
    if count != len(pictures):
        raise row_error(where, f"the text has places for {count} images, and there are {len(pictures)}")
    for message in held:
        message["content"] = _parts(message["content"])
    return Record(where, replace(talk, messages=messages), pictures)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _without_pictures(message: Any, found: list[Any]) -> Any:
    """A message whose images are taken out of its content and stand elsewhere."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
            value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
            if value is not None:  # else a place for an image of the column
                found.append(value)
            texts.append(_HERE)
        else:
            texts.append(part.get("text", "") if isinstance(part, dict) and part.get("type") == "text" else str(part))
    return {**message, "content": "".join(texts)}


def _place(messages: list[Message], count: int, where: str) -> None:
    """Puts the images of a column where the text marks them, or before the first question."""
    if any(_HERE in message["content"] for message in messages):
        return
    asked = [message for message in messages if message["role"] == "user"]
    if not asked:
        raise row_error(where, "no message asks anything (role user), so its images have no place")
    if any(MARK in message["content"] for message in asked):
        for message in asked:
            message["content"] = message["content"].replace(MARK, _HERE)
    else:
        asked[0]["content"] = _HERE * count + asked[0]["content"]


def _parts(content: str) -> list[dict[str, str]]:
    """The content as chat templates of models that see take it."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(_HERE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


class Writer:
    """Turns records into documents: the template writes the text, the processor makes patches of the images."""

    def __init__(self, processor: Processor, optics: ImageTokenSpec, data: Data, root: Path) -> None:
        self.processor, self.optics, self.root, self.data = processor, optics, root, data
        self.template = ChatTemplate(processor.tokenizer, data.chat_template, data.train_on)

    def document(self, record: Record) -> Document:
        """A record as tokens and pixels."""
        pictures = [load_picture(one, self.root, record.where) for one in record.pictures]
        pixels, grids = self.processor.seen(pictures)
        shapes: Sequence[Any] = [()] * len(pixels) if grids is None else list(grids)
        words = [self.processor.words(self.optics.tokens_of(shape)) for shape in shapes]
        tokens = self.template.tokens_with_images(record.talk, record.where, self.processor.mark, words)
        return Document(tokens.ids.astype(np.int64), tokens.loss_mask, pixels, grids)

    def length(self, record: Record) -> int:
        """Tokens of a record, told by the sizes of its images without decoding them."""
        pictures = [open_picture(one, self.root, record.where) for one in record.pictures]
        words = [self.processor.words(self.processor.tokens_for(one.height, one.width)) for one in pictures]
        return len(self.template.tokens_with_images(record.talk, record.where, self.processor.mark, words).ids)


class Processor:
    """The tokenizer and image processor of a model's folder.

    transformers' own class for both is not asked: it needs torchvision for the videos that nobody has here.
    """

    def __init__(self, tokenizer: Any, images: Any, optics: ImageTokenSpec) -> None:
        self.tokenizer, self.images, self.optics = tokenizer, images, optics
        named = [tokenizer.convert_ids_to_tokens(i) for i in (optics.image_token, *optics.before, *optics.after)]
        if None in named:
            raise _foreign(tokenizer, f"has no token {optics.image_token}, which stands for an image in the model")
        # Templates of models that see whole pictures write the token that begins one.
        self.image, self.mark = named[0], named[1] if optics.whole else named[0]
        self.end = named[-1]

    def words(self, count: int) -> str:
        """What is written in the place of an image that becomes so many tokens."""
        inner = self.image * count
        return f"\n\n{self.mark}{inner}{self.end}\n\n" if self.optics.whole else inner

    def seen(self, pictures: Sequence[Any]) -> tuple[NDArray[np.float32], Ints | None]:
        """The patches of pictures and their shapes; or whole pictures, and None."""
        whole = self.optics.whole
        if not pictures:
            none = np.zeros((0, *self.optics.shape), dtype=np.float32)
            return none, None if whole else np.zeros((0, 3), dtype=np.int64)
        made = self.images(list(pictures), return_tensors="pt")
        pixels = made["pixel_values"].numpy().astype(np.float32)
        if pixels.shape[1:] != self.optics.shape:
            raise _foreign(
                self.tokenizer, f"makes images of the shape {pixels.shape[1:]}, the model takes {self.optics.shape}"
            )
        return pixels, None if whole else made["image_grid_thw"].numpy().astype(np.int64)

    def tokens_for(self, height: int, width: int) -> int:
        """How many tokens a picture of this size becomes."""
        if self.optics.whole:
            return self.optics.tokens
        return int(self.images.get_number_of_image_patches(height, width, {})) // self.optics.merge**2


def _foreign(tokenizer: Any, reason: str) -> InputError:
    return InputError(
        f"the processor {reason}",
        field="data.tokenizer",
        value=tokenizer.name_or_path,
        fix=("data.tokenizer=the folder of the model itself",),
    )


def load_processor(tokenizer: Any, optics: ImageTokenSpec) -> Processor:
    """The processor in a tokenizer's folder; no code of its own is ever run."""
    folder = tokenizer.name_or_path
    processor = _image_processor(optics.processor)
    try:
        images = processor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistakes
        raise InputError(
            f"holds no image processor that can be read: {first_line(error)}",
            field="data.tokenizer",
            value=folder,
            fix=("data.tokenizer=FOLDER of the model, with its preprocessor_config.json", "--dataset mock"),
        ) from None
    if not tokenizer.chat_template:
        tokenizer.chat_template = _older_template(Path(folder))
    return Processor(tokenizer, images, optics)


def _image_processor(family: str) -> Any:
    """transformers' image processor of a family, of the kind that computes with Pillow: the same on every machine."""
    module = f"transformers.models.{family}.image_processing_pil_{family}"
    names = symbol(module, "__dict__")
    return symbol(module, next((name for name in names if name.endswith("ImageProcessorPil")), "*ImageProcessorPil"))


def _older_template(folder: Path) -> str | None:
    """The chat template of a folder that keeps it in a file of its own, as processors once did."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        return str(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["chat_template"])
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise InputError(f"cannot be read: {error}", field="data.tokenizer", value=path) from None


class Conversations:
    """Conversations about images by index: one in each sample, or several."""

    def __init__(self, records: Sequence[Record], writer: Writer, seq_length: int, packed: bool) -> None:
        self.records, self.writer, self.seq_length, self.packed = records, writer, seq_length, packed
        room = seq_length + 1
        lengths = [min(writer.length(record), room) for record in records] if packed else []
        self.packs = pack(lengths, room) if packed else [[i] for i in range(len(records))]

    def __len__(self) -> int:
        return len(self.packs)

    def sample(self, index: int) -> Sample:
        """One sample."""
        documents = [self._fitting(self.records[i]) for i in self.packs[index]]
        return sample_of(documents, self.writer.optics, self.seq_length, self.packed)

    def _fitting(self, record: Record) -> Document:
        document, room = self.writer.document(record), self.seq_length + 1
        if len(document.tokens) <= room or self.writer.data.truncation == "end":
            return document  # what is too long is cut off where samples are laid out
        if self.writer.data.truncation == "drop":
            return replace(document, loss_mask=np.zeros_like(document.loss_mask))
        raise too_long(record.where, len(document.tokens), room)


class ShuffledImages(Shuffled):
    """Samples with images without an end, in an order of its own for every epoch."""

    def __init__(self, corpus: Conversations, seed: int) -> None:
        super().__init__(corpus, seed)
        self.optics = corpus.writer.optics

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        return stack_padded([self.corpus.sample(self.index(number)) for number in numbers], self.optics)
