"""The settings that a patch writes into a user's file: in the same order in every process."""

from __future__ import annotations

from meshwright.frameworks import framework
from meshwright.frameworks.patch_file import _changes


def test_changes_are_in_the_order_of_the_export() -> None:
    sections = ("training", "parallelism", "optimizer", "checkpoint", "compile", "metrics", "profiling", "validation")
    after = {f"{section}.{name}": 1 for section in sections for name in ("first", "second")}
    assert list(_changes(framework("torchtitan"), {}, {}, after, set(after))) == list(after)
