"""DeepSpeed's own rules: settings it rejects, overwrites or ignores."""

from __future__ import annotations

from meshwright.frameworks.deepspeed.rules import batch, optimizer, sections, zero
from meshwright.frameworks.device_map import device_map_rule

RULES = (*batch.RULES, *zero.RULES, *optimizer.RULES, *sections.RULES, device_map_rule("deepspeed"))
