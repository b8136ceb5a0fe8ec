"""What Megatron-Bridge refuses, ignores or replaces, beyond what our own rules see."""

from __future__ import annotations

from meshwright.frameworks.megatron_bridge.rules import data, formats, saving, schedule, start

RULES = (*start.RULES, *data.RULES, *formats.RULES, *saving.RULES, *schedule.RULES)
