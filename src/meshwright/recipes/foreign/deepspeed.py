"""DeepSpeed's JSON keys (0.18, 2026)."""

from __future__ import annotations

from meshwright.recipes.foreign.word import Joint, Word

WORDS: tuple[Word, ...] = ()

JOINTS: tuple[Joint, ...] = ()
