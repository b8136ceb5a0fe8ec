"""Conversations with images: dataset rows, encoded with the model's chat template and image processor."""

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
    note_unused_columns,
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
from meshwright.engine.vision.image_loading import load_image, open_image
from meshwright.engine.vision.image_tokens import Document, ImageTokenSpec, Ints, build_sample, stack_padded
from meshwright.errors import InputError, first_line
from meshwright.recipes.types import Data

IMAGE_MARK = "<image>"  # position of a column's image in the text; without marks images come first
_PLACEHOLDER = (
    "\ue000image\ue000"  # an image while its text is parsed; a private-use character that no dataset contains
)
IMAGE_COLUMNS = ("images", "image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")


@dataclass(frozen=True)
class Record:
    """A conversation with images, and references to those images."""

    where: str
    conversation: Conversation
    images: tuple[Any, ...]

    @property
    def hash_fraction(self) -> float:
        """A hash of the messages in [0, 1): equal for equal conversations."""
        digest = hashlib.blake2b(msgspec.json.encode(self.conversation.messages), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


def read_records(
    rows: Rows, recipe_columns: Mapping[str, str], train_on: str, rewrite: Callable[[Row], Row] | None = None
) -> list[Record]:
    """Parse all rows; raise at a row without target tokens."""
    found: list[Record] = []
    columns: dict[str, str] = {}
    image_columns = (recipe_columns["images"],) if recipe_columns.get("images") else IMAGE_COLUMNS
    for where, read in rows:
        row = _rewrite_row(read, rewrite, where)
        if not columns:
            columns = detect_columns(row, recipe_columns, rows.name)
            if rewrite is None:
                note_unused_columns(rows.name, set(row) - {*columns.values(), *image_columns})
        found.append(_record(row, columns, image_columns, where))
        reason = untrainable_reason(found[-1].conversation, train_on)
        if reason:
            raise row_error(where, reason)
    if not found:
        raise no_rows(rows.name)
    return found


def _rewrite_row(row: Row, rewrite: Callable[[Row], Row] | None, where: str) -> Row:
    try:
        return row if rewrite is None else rewrite(row)
    except (KeyError, TypeError, ValueError) as error:
        raise row_error(where, f"the row does not match this dataset's format: {error!r}") from None


def _record(row: Row, columns: Mapping[str, str], image_columns: Sequence[str], where: str) -> Record:
    inline: list[Any] = []
    if "messages" in columns and isinstance(row.get(columns["messages"]), list):
        name = columns["messages"]
        row = {**row, name: [_extract_images(message, inline) for message in row[name]]}
    conversation = parse_conversation(row, columns, where)
    from_column = next((_as_list(row[name]) for name in image_columns if row.get(name) is not None), [])
    if inline and from_column:
        from_column = []  # the column repeats the images of the messages
    messages = [dict(message) for message in conversation.messages]
    if from_column:
        _insert_placeholders(messages, len(from_column), where)
    images = (*inline, *from_column)
    with_images = [message for message in messages if _PLACEHOLDER in message["content"]]
    if any(message["role"] == "assistant" for message in with_images):
        raise row_error(where, "an assistant message contains an image; only text can be generated")
    count = sum(message["content"].count(_PLACEHOLDER) for message in with_images)
    if count != len(images):
        raise row_error(where, f"the text has {count} image placeholders, but the row has {len(images)} images")
    for message in with_images:
        message["content"] = _content_parts(message["content"])
    return Record(where, replace(conversation, messages=messages), images)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _extract_images(message: Any, found: list[Any]) -> Any:
    """Replace the images of a message by placeholders and append them to `found`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
            value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
            if value is not None:  # else the image is in the image column
                found.append(value)
            texts.append(_PLACEHOLDER)
        else:
            texts.append(part.get("text", "") if isinstance(part, dict) and part.get("type") == "text" else str(part))
    return {**message, "content": "".join(texts)}


def _insert_placeholders(messages: list[Message], count: int, where: str) -> None:
    """Insert placeholders for a column's images at their marks, or before the first user message."""
    if any(_PLACEHOLDER in message["content"] for message in messages):
        return
    user_messages = [message for message in messages if message["role"] == "user"]
    if not user_messages:
        raise row_error(where, "no message has the role user, so the images cannot be placed")
    if any(IMAGE_MARK in message["content"] for message in user_messages):
        for message in user_messages:
            message["content"] = message["content"].replace(IMAGE_MARK, _PLACEHOLDER)
    else:
        user_messages[0]["content"] = _PLACEHOLDER * count + user_messages[0]["content"]


def _content_parts(content: str) -> list[dict[str, str]]:
    """Split content at placeholders into the parts that vision chat templates expect."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(_PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


class RecordEncoder:
    """Encodes records: the chat template renders the text, the processor turns images into patches."""

    def __init__(self, processor: Processor, spec: ImageTokenSpec, data: Data, root: Path) -> None:
        self.processor, self.spec, self.root, self.data = processor, spec, root, data
        self.template = ChatTemplate(processor.tokenizer, data.chat_template, data.train_on, data.merge_system)

    def document(self, record: Record) -> Document:
        """Return a record as tokens and pixels."""
        images = [load_image(one, self.root, record.where) for one in record.images]
        pixels, grids = self.processor.pixels_and_grids(images)
        shapes: Sequence[Any] = [()] * len(pixels) if grids is None else list(grids)
        texts = [self.processor.image_text(self.spec.tokens_for_grid(shape)) for shape in shapes]
        tokens = self.template.tokens_with_images(record.conversation, record.where, self.processor.mark, texts)
        return Document(tokens.ids.astype(np.int64), tokens.loss_mask, pixels, grids)

    def length(self, record: Record) -> int:
        """Return the tokens of a record, from its image sizes without decoding them."""
        images = [open_image(one, self.root, record.where) for one in record.images]
        texts = [self.processor.image_text(self.processor.tokens_for(one.height, one.width)) for one in images]
        return len(self.template.tokens_with_images(record.conversation, record.where, self.processor.mark, texts).ids)


class Processor:
    """The tokenizer and image processor of a model's folder.

    transformers' combined processor is not used: it needs torchvision, for videos that are not supported here.
    """

    def __init__(self, tokenizer: Any, image_processor: Any, spec: ImageTokenSpec) -> None:
        self.tokenizer, self.image_processor, self.spec = tokenizer, image_processor, spec
        names = [tokenizer.convert_ids_to_tokens(i) for i in (spec.image_token, *spec.before, *spec.after)]
        if None in names:
            raise _processor_mismatch(tokenizer, f"has no token {spec.image_token}, the model's image token")
        # Templates of models that take whole images (Gemma) render only the image start token.
        self.image, self.mark = names[0], names[1] if spec.whole_images else names[0]
        self.end = names[-1]

    def image_text(self, count: int) -> str:
        """Return the text of an image with `count` tokens."""
        inner = self.image * count
        return f"\n\n{self.mark}{inner}{self.end}\n\n" if self.spec.whole_images else inner

    def pixels_and_grids(self, images: Sequence[Any]) -> tuple[NDArray[np.float32], Ints | None]:
        """Return patches and grids of images; or whole images and None."""
        whole = self.spec.whole_images
        if not images:
            none = np.zeros((0, *self.spec.shape), dtype=np.float32)
            return none, None if whole else np.zeros((0, 3), dtype=np.int64)
        processed = self.image_processor(list(images), return_tensors="pt")
        pixels = processed["pixel_values"].numpy().astype(np.float32)
        if pixels.shape[1:] != self.spec.shape:
            raise _processor_mismatch(
                self.tokenizer, f"returns pixels of shape {pixels.shape[1:]}, the model expects {self.spec.shape}"
            )
        return pixels, None if whole else processed["image_grid_thw"].numpy().astype(np.int64)

    def tokens_for(self, height: int, width: int) -> int:
        """Return the tokens of an image of this size."""
        if self.spec.whole_images:
            return self.spec.tokens
        return int(self.image_processor.get_number_of_image_patches(height, width, {})) // self.spec.merge**2


def _processor_mismatch(tokenizer: Any, reason: str) -> InputError:
    return InputError(
        f"the processor {reason}",
        field="data.tokenizer",
        value=tokenizer.name_or_path,
        fix=("data.tokenizer=the model's folder",),
    )


def load_processor(tokenizer: Any, spec: ImageTokenSpec) -> Processor:
    """Load the processor in a tokenizer's folder; remote code is never run."""
    folder = tokenizer.name_or_path
    processor = _image_processor(spec.processor)
    try:
        image_processor = processor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistake
        raise InputError(
            f"no readable image processor in this folder: {first_line(error)}",
            field="data.tokenizer",
            value=folder,
            fix=("data.tokenizer=FOLDER of the model, with its preprocessor_config.json", "--dataset mock"),
        ) from None
    if not tokenizer.chat_template:
        tokenizer.chat_template = _legacy_chat_template(Path(folder))
    return Processor(tokenizer, image_processor, spec)


def _image_processor(family: str) -> Any:
    """Return the Pillow image processor of a transformers model family: bitwise equal on every machine."""
    module = f"transformers.models.{family}.image_processing_pil_{family}"
    names = symbol(module, "__dict__")
    return symbol(module, next((name for name in names if name.endswith("ImageProcessorPil")), "*ImageProcessorPil"))


def _legacy_chat_template(folder: Path) -> str | None:
    """Return the chat template from chat_template.json, where older processors keep it."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        return str(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["chat_template"])
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise InputError(f"cannot read the file: {error}", field="data.tokenizer", value=path) from None


class ImageConversations:
    """A corpus of conversations with images: one per sample, or several packed."""

    def __init__(self, records: Sequence[Record], encoder: RecordEncoder, seq_length: int, packed: bool) -> None:
        self.records, self.encoder, self.seq_length, self.packed = records, encoder, seq_length, packed
        capacity = seq_length + 1
        lengths = [min(encoder.length(record), capacity) for record in records] if packed else []
        self.packs = pack(lengths, capacity) if packed else [[i] for i in range(len(records))]

    def __len__(self) -> int:
        return len(self.packs)

    def sample(self, index: int) -> Sample:
        """Return one sample."""
        documents = [self._truncated(self.records[i]) for i in self.packs[index]]
        return build_sample(documents, self.encoder.spec, self.seq_length, self.packed)

    def _truncated(self, record: Record) -> Document:
        document, capacity = self.encoder.document(record), self.seq_length + 1
        if len(document.tokens) <= capacity or self.encoder.data.truncation == "end":
            return document  # build_sample truncates the end
        if self.encoder.data.truncation == "drop":
            return replace(document, loss_mask=np.zeros_like(document.loss_mask))
        raise too_long(record.where, len(document.tokens), capacity)


class ShuffledImages(Shuffled):
    """An endless shuffled source of samples with images."""

    def __init__(self, corpus: ImageConversations, seed: int) -> None:
        super().__init__(corpus, seed)
        self.spec = corpus.encoder.spec

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        return stack_padded([self.corpus.sample(self.index(number)) for number in numbers], self.spec)
