"""One function per rule, grouped by subject; nothing else decides what is valid."""

from meshwright.rules import topology  # noqa: F401  # importing a subject registers its rules
from meshwright.rules.judge import illegal_by_rule, judge, legal, message, repair
from meshwright.rules.rule import RULES, Finding, Rule, Severity

__all__ = ["RULES", "Finding", "Rule", "Severity", "illegal_by_rule", "judge", "legal", "message", "repair"]
