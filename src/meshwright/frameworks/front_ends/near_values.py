"""Values of keys whose full list is open (plugins, files and programs add to it): only misspelled ones are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.similar import misspelled

SWIFT_TUNERS = (
    "lora",
    "full",
    "longlora",
    "adalora",
    "llamapro",
    "adapter",
    "vera",
    "boft",
    "fourierft",
    "reft",
    "bone",
)
"""Values of tuner_type, and of train_type in older releases; a plugin registers more."""
SWIFT_ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Configs of DeepSpeed that ms-swift ships; any other value of deepspeed is a file or JSON."""
AXOLOTL_TYPES = ("chat_template", "completion", "alpaca", "alpaca_chat", "sharegpt", "input_output", "llama2_chat",
    "user_defined", "context_qa", "metharme", "orcamini", "pygmalion", "stepwise_supervised")  # fmt: skip
"""Modules of Axolotl's prompt strategies; a module of the user's own may be another one."""
_TYPE_KEY = re.compile(r"(test_)?datasets\[\d+\]\.type")


def swift_refused(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield values of ms-swift that name nothing: key, reason, value instead."""
    for key in ("tuner_type", "train_type"):
        yield from _misspelled(key, values.get(key), SWIFT_TUNERS, "ms-swift has no such adapter")
    config = values.get("deepspeed")
    if isinstance(config, str) and re.fullmatch(r"zero[\w-]*", config) and config not in SWIFT_ZERO:
        yield "deepspeed", f"neither a file nor one of {', '.join(SWIFT_ZERO)}", ""


def axolotl_dataset_types(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield types of datasets that are a misspelled one of Axolotl's."""
    for key in filter(_TYPE_KEY.fullmatch, values):
        value = values[key]
        name = re.split(r"[.:]", value, maxsplit=1)[0] if isinstance(value, str) else ""
        yield from _misspelled(key, name or None, AXOLOTL_TYPES, "Axolotl has no such type of dataset")


def _misspelled(key: str, value: Any, known: tuple[str, ...], reason: str) -> Iterator[tuple[str, str, str]]:
    near = misspelled(value, known) if isinstance(value, str) and value not in known else []
    if near:
        yield key, f"{reason}; did you mean {near[0]}?", near[0]
