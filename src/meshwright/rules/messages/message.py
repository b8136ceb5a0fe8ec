"""The type of a known error message."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

Table = Mapping[str, Mapping[str, str]]
"""Source file of a public repository → message, with {} for its values → ids it may mean, best first."""


class Message(msgspec.Struct, frozen=True):
    """An error message as its framework writes it; {} marks a value."""

    text: str
    source: str  # repository and file that raises it
    ids: tuple[str, ...]  # of rules, findings of the doctor or known errors, best first


class KnownError(msgspec.Struct, frozen=True):
    """An error that is not about the recipe: of the environment, the files or the launch."""

    cause: str
    fix: tuple[str, ...]  # overrides, environment variables or sentences
    fault: str = ""  # the kind of failure that it is one of: network, gpu_fault; the doctor reports that kind
