"""Checks of TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.frameworks.start_checks.types import Given, StartCheck, Table

PLACE = "trl/trainer/sft_trainer.py: SFTTrainer.__init__"


def _with_images(key: str) -> Callable[[Given], bool]:
    return lambda given: given.model is not None and given.model.vision is not None and given.is_on(key)


TRL = Table(
    "TRL's SFTTrainer",
    {"max_length": 1024},
    (
        StartCheck("packing", _with_images("packing"),
            "{packing} does not support vision-language models, also if they train on text", {"packing": False}, PLACE),
        StartCheck("padding_free", _with_images("padding_free"),
            "{padding_free} does not support vision-language models", {"padding_free": False}, PLACE),
        StartCheck("assistant_only_loss", _with_images("assistant_only_loss"),
            "{assistant_only_loss} does not support vision-language models", {"assistant_only_loss": False}, PLACE),
    ),
)  # fmt: skip
