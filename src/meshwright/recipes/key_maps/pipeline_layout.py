"""Pipeline layout strings of Megatron-Core such as Et*3|(tt|)*2tmL."""

from __future__ import annotations

import re

from meshwright.errors import InputError

MAX_CHARS = 100_000  # longer than any model: nested repeats can expand without bound


def parse_pipeline_layout(layout: str, key: str, symbols: str = "EtmL|") -> tuple[int, ...]:
    """Return the number of decoder layers in every stage of a layout string; spaces and commas are ignored."""
    text = re.sub(r"[\s,'\"]", "", layout)
    for _ in range(20):
        text, groups = re.subn(r"\(([^()]*)\)\*(\d{1,4})|\(([^()]*)\)(?!\*)", _repeat_group, text)
        text, repeats = re.subn(r"([A-Za-z|])\*(\d{1,4})", lambda part: part[1] * int(part[2]), text)
        if len(text) > MAX_CHARS or not groups + repeats:
            break
    if not text or len(text) > MAX_CHARS or set(text) - set(symbols):
        raise InputError(
            "is not a pipeline layout: E embedding, t layer, m MTP layer, L loss, | between stages, *n repeats",
            field=key,
            value=layout,
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _repeat_group(part: re.Match[str]) -> str:
    return part[1] * int(part[2]) if part[2] else part[3]


def format_pipeline_layout(layers: tuple[int, ...], mtp_layers: int = 0) -> str:
    """Return the layout string of stages with these layer counts: embedding in the first, MTP and loss in the last."""
    *before, last = ["t" * count for count in layers]
    return "E" + "|".join([*before, last + "m" * mtp_layers + "L"])
