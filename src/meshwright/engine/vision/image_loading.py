"""Loads dataset images from files, base64 text or bytes, with size limits."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from meshwright.engine.data.files import require_package, row_error
from meshwright.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 << 20
MAX_PIXELS = 64_000_000  # when decoded: a small file can decode to an image that fills memory
URL_SCHEMES = ("http://", "https://", "ftp://", "file://")


def load_image(reference: Any, root: Path, where: str) -> Any:
    """Return the image as an RGB Pillow image."""
    opened = open_image(reference, root, where)
    try:
        return opened.convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and others for corrupt files
        raise row_error(where, f"the image cannot be decoded: {error}") from None


def open_image(reference: Any, root: Path, where: str) -> Any:
    """Open an image without decoding it, so that its size is known."""
    pillow = require_package("PIL.Image", "data.images", "pillow")
    if isinstance(reference, pillow.Image):
        return _check_pixels(reference, where)
    try:
        opened = pillow.open(io.BytesIO(_bytes(reference, root, where)), formats=FORMATS)
    except pillow.DecompressionBombError:
        raise row_error(where, f"the image has more than {MAX_PIXELS:,} pixels") from None
    except OSError as error:
        raise row_error(where, f"the image is not one of {', '.join(FORMATS)}, or is corrupt: {error}") from None
    return _check_pixels(opened, where)


def _check_pixels(image: Any, where: str) -> Any:
    if image.width * image.height > MAX_PIXELS:
        size = f"{image.width} × {image.height}"
        raise row_error(where, f"the image has {size} pixels, more than {MAX_PIXELS:,}")
    return image


def _bytes(reference: Any, root: Path, where: str) -> bytes:
    if isinstance(reference, dict):  # as in Parquet files
        data = reference.get("bytes")
        reference = data if data is not None else reference.get("path") or reference.get("url")
    if isinstance(reference, bytes):
        return _check_bytes(reference, where)
    if not isinstance(reference, str) or not reference:
        raise row_error(where, f"an image is a path, base64 text or bytes, not {type(reference).__name__}")
    if reference.startswith(URL_SCHEMES):
        raise row_error(where, "images are not downloaded", ("put the image next to the data and use its path",))
    if reference.startswith("data:"):
        return _decode_base64(reference.partition(",")[2], where)
    return _file(reference, root, where)


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return _check_bytes(base64.b64decode(text, validate=True), where)
    except binascii.Error as error:
        raise row_error(where, f"the image is not valid base64: {error}") from None


def _file(reference: str, root: Path, where: str) -> bytes:
    path = (root / reference).resolve()
    if not path.is_relative_to(root.resolve()):
        raise row_error(where, f"the image {reference} is outside the dataset folder {root}", (f"move it into {root}",))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise row_error(where, f"the image {reference} is larger than {MAX_BYTES >> 20} MiB")
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise row_error(where, f"the image {reference} cannot be read: {error.strerror}") from None
    try:  # base64 text without a data: prefix
        return _decode_base64(reference, where)
    except InputError:
        raise row_error(where, f"no image {reference[:80]} in {root}") from None


def _check_bytes(data: bytes, where: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise row_error(where, f"an image is larger than {MAX_BYTES >> 20} MiB")
    return data
