"""torchtitan's own rules: settings it rejects, ignores or changes."""

from __future__ import annotations

from meshwright.frameworks.torchtitan.rules import layout, settings

RULES = (*settings.RULES, *layout.RULES)
