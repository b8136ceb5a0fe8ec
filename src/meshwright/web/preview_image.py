"""The pictures that link previews show, as PNG: previewers of chats and social sites do not take SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.web.presenters import PARTS

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIZE = (1200, 630)
MARGIN = 72
INK, SOFT, CARD, TRACK, GOOD, BAD = "#1b212b", "#566072", "#ffffff", "#e6eaf0", "#0f6b4c", "#b3261e"
COLORS = dict(zip(PARTS, ("#3564d8", "#2aa3b8", "#8a5cd0", "#e0932b", "#d2506b", "#3f9c58", "#8b95a5"), strict=True))
"""Those of the memory bar in app.css."""
TILES = (("#3564d8", 0, 0), ("#93aeeb", 1, 0), ("#93aeeb", 0, 1), ("#3f9c58", 1, 1))  # the icon


def available() -> bool:
    """Return whether Pillow is installed, which draws the pictures."""
    try:
        import PIL.ImageFont  # noqa: F401
    except ImportError:
        return False
    return True


def preview(title: str, subtitle: str, plan: Mapping[str, Any], words: str) -> bytes:
    """Return a plan's picture: title, memory bar with the capacity line, and speed."""
    picture, draw = _empty()
    _text(draw, (MARGIN, 128), title, 66, INK)
    _text(draw, (MARGIN, 218), subtitle, 42, SOFT)
    estimate = plan["estimate"]
    gib, fits = estimate["memory_gib"], estimate["fits"]
    speed = f"{estimate['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" if fits else "does not fit"
    _text(draw, (MARGIN, 316), speed, 54, GOOD if fits else BAD)
    _memory_bar(draw, gib, top=424, height=58)
    _text(draw, (MARGIN, 500), f"{gib['total']:.0f} of {gib['capacity']:.0f} GiB per GPU", 32, INK)
    _text(draw, (MARGIN, 552), words, 26, SOFT)
    return _as_png(picture)


def page_preview(title: str, about: str) -> bytes:
    """Return the picture of a page that is no plan: its title and its description."""
    picture, draw = _empty()
    top = 150
    for line in _wrapped(title, 66)[:2]:
        _text(draw, (MARGIN, top), line, 66, INK)
        top += 84
    top += 28
    for line in _wrapped(about, 38)[: (SIZE[1] - MARGIN - top) // 54]:
        _text(draw, (MARGIN, top), line, 38, SOFT)
        top += 54
    return _as_png(picture)


def _empty() -> tuple[Image, ImageDraw]:
    """Return a picture with the icon and the name, and what draws on it."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", SIZE, CARD)
    draw = ImageDraw.Draw(picture)
    for color, x, y in TILES:
        left, top = MARGIN + 20 * x, 58 + 20 * y
        draw.rounded_rectangle((left, top, left + 16, top + 16), 4, fill=color)
    _text(draw, (MARGIN + 52, 60), "Meshwright", 30, SOFT)
    return picture, draw


def _as_png(picture: Image) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    picture.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _wrapped(text: str, size: int) -> list[str]:
    """Return a text as lines that fit into the picture."""
    from PIL import ImageFont

    font, lines = ImageFont.load_default(size), [""]
    for word in text.replace("×", "x").split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= SIZE[0] - 2 * MARGIN or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _text(draw: ImageDraw, at: tuple[int, int], text: str, size: int, color: str) -> None:
    """Draw a line, smaller if it would leave the picture; Pillow's own font has no multiplication sign."""
    from PIL import ImageFont

    text = text.replace("×", "x")
    width = SIZE[0] - at[0] - MARGIN
    while size > 18 and ImageFont.load_default(size).getlength(text) > width:
        size -= 2
    draw.text(at, text, font=ImageFont.load_default(size), fill=color)


def _memory_bar(draw: ImageDraw, gib: Mapping[str, float], top: int, height: int) -> None:
    left, right = MARGIN, SIZE[0] - MARGIN
    scale = (right - left) / (max(gib["total"], gib["capacity"]) * 1.02)
    draw.rectangle((left, top, right, top + height), fill=TRACK)
    at = float(left)
    for name in PARTS:
        end = at + gib[name] * scale
        if end - at >= 1:
            draw.rectangle((round(at), top, round(end) - 1, top + height), fill=COLORS[name])
        at = end
    line = round(left + gib["capacity"] * scale)
    draw.rectangle((line - 2, top - 8, line + 1, top + height + 8), fill=INK)
