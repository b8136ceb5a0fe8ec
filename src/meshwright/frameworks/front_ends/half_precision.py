"""bf16 and fp16 of a front end's file, as the front end passes them to the Trainer, which takes at most one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.types import Settings
from meshwright.rules.rule import Finding

HALVES = ("bf16", "fp16")
ON = ("true", "auto", "full")
AUTO = "auto"


def passed_halves(one: FrontEnd, values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the formats that a file sets, each with whether the Trainer gets it as on."""
    passed = {name: str(values[name]).lower() in ON for name in HALVES if name in values}
    dropped = _dropped(one, values)
    return {**passed, dropped: False} if dropped else passed


def dropped_half(one: FrontEnd, settings: Settings, is_command: bool) -> Iterator[Finding]:
    """Yield a format that the front end turns off because the other one is on."""
    dropped = _dropped(one, {name: settings[name].value for name in HALVES if name in settings})
    if not dropped or any(settings[name].unresolved for name in HALVES):
        return
    (kept,) = (name for name in HALVES if name != dropped)
    dashes, colon = ("--", "") if is_command else ("", ":")
    shown, other = (f"{dashes}{name}{colon} {str(settings[name].value).lower()}" for name in (dropped, kept))
    message = f"{shown} has no effect: {other} is set as well, and {one.title} then computes in {kept}"
    at = settings[dropped]
    yield Finding("key.unused", "warning", dropped, message, (f"without {dashes}fp16",), at.file, at.line)


def _dropped(one: FrontEnd, values: Mapping[str, Any]) -> str:
    """Return the format that Axolotl turns off (utils/config: resolve_dtype): bf16 if it is auto, else fp16.

    Before 0.10, auto turned fp16 off as well.
    """
    if not one.keeps_one_half or not all(str(values.get(name)).lower() in ON for name in HALVES):
        return ""
    return "bf16" if str(values["bf16"]).lower() == AUTO else "fp16"
