"""The config that Megatron-Bridge's runner prints before it trains: YAML between the other lines of a log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.doctor.formats.text import Line
from meshwright.errors import InputError
from meshwright.frameworks import content_of, framework
from meshwright.frameworks.framework import Content
from meshwright.frameworks.megatron_bridge.keys import sections

HEAD = re.compile(r"_target_: megatron\.bridge\.\S*ConfigContainer\s*$")
SECTION = re.compile(r"([a-z_]\w*):(?:\s|$)")
LENGTHS = ("dataset.seq_length", "dataset.sequence_length", "model.seq_length")
MOST_LINES = 5_000


class PrintedConfig(NamedTuple):
    """A config of a log, and the sequence length in it."""

    text: str
    length: int | None


def printed_config(lines: Sequence[Line], path: str) -> PrintedConfig | None:
    """Return the config of the last start; None if the log has none, or only a part of it."""
    start = next((place for place in range(len(lines) - 1, -1, -1) if HEAD.match(lines[place].text)), None)
    if start is None:
        return None
    head, end, kept = lines[start], 1, [lines[start].text]
    for line in lines[start + 1 : start + MOST_LINES]:
        section = SECTION.match(line.text)
        is_section = section is not None and section[1] in sections()
        if line.prefix != head.prefix or not (is_section or line.text.startswith((" ", "- "))):
            continue  # of another rank, between its lines
        kept.append(line.text)
        end = len(kept) if is_section else end
    text = "\n".join((*kept[:end], *_rest(kept[end:])))
    return _parsed(text, path)


def _rest(lines: Sequence[str]) -> list[str]:
    """Return the indented lines of the last section: what follows it is deeper or no YAML."""
    indent, found = "", list[str]()
    for line in lines:
        indent = indent or line[: len(line) - len(line.lstrip())]
        if not line.startswith((indent, "- ")) or not re.match(r"\s*(?:- |[\w.]+:(?: |$))", line):
            break
        found.append(line)
    return found


def config_content(text: str, path: str) -> Content:
    """Return a printed config as a file."""
    return content_of(text, f"{path} (config)", "yaml")


def _parsed(text: str, path: str) -> PrintedConfig | None:
    """Return a config that has a layout and a batch, with its length."""
    try:
        settings = framework("megatron-bridge").parse(config_content(text, path)).settings
    except InputError:
        return None
    if not {"model.tensor_model_parallel_size", "train.global_batch_size"} <= settings.keys():
        return None
    lengths = (settings[key].value for key in LENGTHS if key in settings)
    return PrintedConfig(text, next((one for one in lengths if isinstance(one, int)), None))
