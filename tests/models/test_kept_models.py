"""Counts, names, sizes and errors of models are the kept ones."""

from __future__ import annotations

from tests import kept

from . import kept_models


def test_models_are_the_kept_ones() -> None:
    changed = kept.first_difference(kept_models.FILE, kept_models.answers())
    assert not changed, "python -m tests.kept writes the new values"
