"""Accelerate's own rules: settings it rejects, overwrites or ignores."""

from __future__ import annotations

from meshwright.frameworks.accelerate.rules import arguments, data, processes, sharding, unsloth
from meshwright.frameworks.device_map import device_map_rule
from meshwright.frameworks.validation_memory import validation_memory_rule

RULES = (
    *processes.RULES,
    *sharding.RULES,
    *arguments.RULES,
    *data.RULES,
    *unsloth.RULES,
    device_map_rule("accelerate"),
    validation_memory_rule("accelerate"),
)
