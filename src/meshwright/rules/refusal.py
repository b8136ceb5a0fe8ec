"""The error of a recipe that cannot run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.rules.rule import Finding


def for_shell(fixes: Iterable[str]) -> str:
    """Return fixes as they are typed: overrides are quoted where a shell would read them otherwise."""
    is_override = re.compile(r"[a-z_][\w.]*=\S*")
    return " ".join(shlex.quote(one) if is_override.fullmatch(one) else one for one in fixes)


class RefusedError(MeshwrightError):
    """The rules report findings that block this recipe on these GPUs (exit code 1)."""

    exit_code = 1

    def __init__(
        self,
        blocking: Sequence[Finding],
        reason: str = "the rules refuse this layout:",
        findings: Sequence[Finding] = (),
        missing: Mapping[str, str] = {},
        repair: Sequence[str] = (),
        lines: Sequence[str] = (),
    ) -> None:
        """Join the findings; `missing` are options that the command needs besides, with the reason of each.

        A `repair` removes all of them at once: it replaces the fixes of the findings. `lines` end the message.
        """
        listed = "\n  ".join([*(f"{one.message} ({one.rule})" for one in blocking), *missing.values(), *lines])
        fixes = repair or [fix for finding in blocking for fix in finding.fix]
        together = for_shell(dict.fromkeys(fixes))  # no two disagree
        fix = " ".join((together, *missing))
        super().__init__(f"{reason}\n  {listed}", fix=(fix,) if together else ())
        self.findings = tuple(findings or blocking)

    def to_dict(self) -> dict[str, object]:
        """Return the error with all findings, also those that do not block."""
        return {**super().to_dict(), "findings": msgspec.to_builtins(self.findings)}
