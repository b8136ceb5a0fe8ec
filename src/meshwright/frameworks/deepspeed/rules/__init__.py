"""DeepSpeed's own rules: settings it rejects, overwrites or ignores."""

from __future__ import annotations

from meshwright.frameworks.deepspeed.rules import batch, optimizer, sections, zero

RULES = (*batch.RULES, *zero.RULES, *optimizer.RULES, *sections.RULES)
