"""Megatron-Bridge's own constraints: settings it rejects, ignores or replaces."""

from __future__ import annotations

from meshwright.frameworks.megatron_bridge.rules import data, formats, saving, schedule, start
from meshwright.frameworks.short_warmups import short_warmup_rule

LENGTHS = (*schedule.RULES, short_warmup_rule("megatron-bridge"))
RULES = (*start.RULES, *data.RULES, *formats.RULES, *saving.RULES, *LENGTHS)
