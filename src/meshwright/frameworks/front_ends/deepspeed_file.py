"""The DeepSpeed config that a front end's file or command names: checked as one of the Trainer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

import msgspec

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.deepspeed.client_optimizer import OPTIMIZER
from meshwright.frameworks.framework import Content
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.trainer import open_deepspeed_config
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.rules.rule import Finding

KEYS = ("deepspeed", "dist_config.config_file")
MISMATCH = "deepspeed.argument-mismatch"


def named_config(settings: Settings) -> SourcedValue | None:
    """Return the setting that names DeepSpeed's config; None if there is none."""
    return next((settings[key] for key in KEYS if key in settings and settings[key].value), None)


def deepspeed_findings(
    one: FrontEnd, content: Content, settings: Settings, arguments: Mapping[str, SourcedValue]
) -> Iterator[Finding]:
    """Yield what DeepSpeed, or the Trainer that passes the config on, refuses in the config."""
    inner = _opened(content, settings)
    if inner is None or inner.format != "json":
        return
    from meshwright.frameworks.check_file import findings_without_fixes
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK
    from meshwright.frameworks.deepspeed.parse import parse_json

    parsed = parse_json(inner, arguments)
    filled = msgspec.structs.replace(inner, settings=parsed.settings)
    for finding in (*parsed.findings, *findings_without_fixes(FRAMEWORK, filled)):
        is_of_arguments = finding.rule == MISMATCH or finding.field == OPTIMIZER
        own = _in_own_keys(one, settings, finding, content.format == "shell") if is_of_arguments else finding
        is_of_front_end = is_of_arguments and not any(change.startswith('"') for change in own.fix)
        yield own if is_of_front_end else _with_fix_of_config(own, inner.path)


def missing_file_notes(content: Content, settings: Settings) -> Iterator[str]:
    """Yield a note if the config is a file that is not here; ms-swift also has names for its own configs."""
    setting = named_config(settings)
    if setting is None or setting.unresolved or file_access.closed():
        return
    if PurePath(str(setting.value)).suffix == ".json" and _opened(content, settings) is None:
        yield f"the DeepSpeed config {setting.value} was not found and is not checked"


def _opened(content: Content, settings: Settings) -> Content | None:
    setting = named_config(settings)
    if setting is None or setting.unresolved or not isinstance(setting.value, str):
        return None
    try:
        return open_deepspeed_config(content, setting)
    except InputError:
        return None


def _with_fix_of_config(finding: Finding, path: str) -> Finding:
    """Return a finding with the change of the config in words: fixes are those of the file that names it."""
    changes = " and ".join(finding.fix)
    return msgspec.structs.replace(finding, fix=(), no_fix=f"in {path}: {changes}" if changes else finding.no_fix)


def _in_own_keys(one: FrontEnd, settings: Settings, finding: Finding, is_command: bool) -> Finding:
    """Return a finding on an argument of the Trainer with the key of the front end."""
    for key, name in one.names.items():
        flag = f"--{name} "
        if key in settings and flag in finding.message:
            own = f"--{key} " if is_command else f"{key}: "
            fix = tuple(change.replace(flag, own) for change in finding.fix)
            return msgspec.structs.replace(finding, message=finding.message.replace(flag, own), fix=fix)
    return finding
