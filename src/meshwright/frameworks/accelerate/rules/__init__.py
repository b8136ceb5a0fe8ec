"""Accelerate's own rules: settings it rejects, overwrites or ignores."""

from __future__ import annotations

from meshwright.frameworks.accelerate.rules import processes, sharding

RULES = (*processes.RULES, *sharding.RULES)
