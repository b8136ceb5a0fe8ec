"""Pictures of a data set: from files of its folder, base64 text or bytes, decoded within limits."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from meshwright.engine.data.files import row_error
from meshwright.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 64 << 20
MOST_PIXELS = 64_000_000  # of a picture when decoded: a small file can hold a picture that fills the memory
FROM_ELSEWHERE = ("http://", "https://", "ftp://", "file://")


def load_picture(reference: Any, root: Path, where: str) -> Any:
    """The picture as Pillow has it, in RGB."""
    opened = open_picture(reference, root, where)
    try:
        return opened.convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and others for damaged files
        raise row_error(where, f"the image cannot be decoded: {error}") from None


def open_picture(reference: Any, root: Path, where: str) -> Any:
    """The picture, its size known and nothing of it decoded yet."""
    image = _pillow()
    if isinstance(reference, image.Image):
        return _small_enough(reference, where)
    try:
        opened = image.open(io.BytesIO(_bytes(reference, root, where)), formats=FORMATS)
    except image.DecompressionBombError:
        raise row_error(where, f"the image has more than {MOST_PIXELS:,} pixels") from None
    except OSError as error:
        raise row_error(where, f"the image is none of {', '.join(FORMATS)}, or damaged: {error}") from None
    return _small_enough(opened, where)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "images are decoded by Pillow, which is not installed", field="data.images", fix=("pip install pillow",)
        ) from None
    return Image


def _small_enough(picture: Any, where: str) -> Any:
    if picture.width * picture.height > MOST_PIXELS:
        size = f"{picture.width} × {picture.height}"
        raise row_error(where, f"the image has {size} pixels, more than {MOST_PIXELS:,}")
    return picture


def _bytes(reference: Any, root: Path, where: str) -> bytes:
    if isinstance(reference, dict):  # as Parquet files have them
        held = reference.get("bytes")
        reference = held if held is not None else reference.get("path") or reference.get("url")
    if isinstance(reference, bytes):
        return _few_enough(reference, where)
    if not isinstance(reference, str) or not reference:
        raise row_error(where, f"an image is a path, base64 text or bytes, not {type(reference).__name__}")
    if reference.startswith(FROM_ELSEWHERE):
        raise row_error(
            where, "images are not fetched from elsewhere", ("put the image beside the data and name its path",)
        )
    if reference.startswith("data:"):
        return _decoded(reference.partition(",")[2], where)
    return _file(reference, root, where)


def _decoded(text: str, where: str) -> bytes:
    try:
        return _few_enough(base64.b64decode(text, validate=True), where)
    except binascii.Error as error:
        raise row_error(where, f"the image is no base64 text: {error}") from None


def _file(reference: str, root: Path, where: str) -> bytes:
    path = (root / reference).resolve()
    if not path.is_relative_to(root.resolve()):
        raise row_error(
            where, f"the image {reference} lies outside the data's folder {root}", (f"move it into {root}",)
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise row_error(where, f"the image {reference} is larger than {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise row_error(where, f"the image {reference} cannot be read: {error.strerror}") from None
    try:  # a column of base64 text without anything that says so
        return _decoded(reference, where)
    except InputError:
        raise row_error(where, f"there is no image {reference[:80]} in {root}") from None


def _few_enough(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise row_error(where, f"an image is larger than {MOST_BYTES >> 20} MiB")
    return data
