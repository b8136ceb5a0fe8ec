"""What torchtitan refuses, ignores or changes by itself, beyond the arithmetic that our own rules know."""

from __future__ import annotations

from meshwright.frameworks.torchtitan.rules import layout, settings

RULES = (*settings.RULES, *layout.RULES)
