"""Megatron-Bridge's own constraints: settings it rejects, ignores or replaces."""

from __future__ import annotations

from meshwright.frameworks.megatron_bridge.rules import data, formats, saving, schedule, start

RULES = (*start.RULES, *data.RULES, *formats.RULES, *saving.RULES, *schedule.RULES)
