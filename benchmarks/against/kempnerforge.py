"""KempnerForge: its config loader, with the checks of its sections and of their layout; no model is built.

FOLDER contains the package kempnerforge of a checkout, which is not on PyPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.against import Config, ReferenceParser, Verdict, default_of


def evaluate(config: Config, folder: Path) -> Verdict:
    """Return the first error of loading a file, and of its layout on the GPUs if their number is known."""
    if not config.path.endswith(".toml"):
        return Verdict(None, "a command, which cannot be checked without running it")
    from kempnerforge.config.loader import load_config

    try:
        loaded = load_config(folder / config.path, cli_args=[])
        if config.world:
            loaded.validate(world_size=config.world)
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


def keys() -> Mapping[str, Any]:
    """Return every key of its sections, with plain defaults."""
    from kempnerforge.config.schema import JobConfig

    found: dict[str, Any] = {}
    for section in dataclasses.fields(JobConfig):
        value = getattr(JobConfig(), section.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{section.name}.{one.name}": default_of(one) for one in dataclasses.fields(value)}
    return found


REFERENCE = ReferenceParser(
    framework="kempnerforge",
    needs="KempnerForge 5666d0d",
    module="kempnerforge",
    evaluate=evaluate,
    runs_code="its config loader, the checks of its sections and of the layout on the GPUs; no model is built",
    keys=keys,
    detected_later={
        "engine.no-cp": "accepted, and ignored when it trains",
        "schedule.several-chunks": "fails when the stages are built",
        "kempnerforge.no-evaluation-data": "checked with the number of GPUs, which this case leaves open",
    },
    other_keys=dict.fromkeys(("vision_encoder.", "adapter.", "vlm.", "video."), "a section that a file may leave out"),
    other_defaults={"checkpoint.dir": "here a run without the key names no folder"},
)
