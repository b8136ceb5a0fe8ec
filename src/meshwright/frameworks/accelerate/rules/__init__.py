"""Accelerate's own rules: settings it rejects, overwrites or ignores."""

from __future__ import annotations

from meshwright.frameworks.accelerate.rules import data, processes, sharding

RULES = (*processes.RULES, *sharding.RULES, *data.RULES)
