"""Names that our tables do not have, or that a recent version removed: a file may be for another version.

Our tables are those of one commit, and a file does not name the version that reads it. A name that is like a known
one is a typing error in every version. Another unknown name belongs to a newer or older version as likely as it is a
mistake: a warning, unless the file is in a checkout of the framework, whose version is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from meshwright.frameworks.checkout import checkout_root, our_names
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.types import Settings
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_choices import all_program_flags
from meshwright.rules.rule import Finding

UNKNOWN = ("key.unknown", "automodel.target-keyword", "automodel.target-unknown", "automodel.recipe-unknown")
UNKNOWN_BRIDGE = ("megatron-bridge.unknown-recipe",)
REMOVED = ("key.removed", "torchtitan.other-version")
RECENT = ("0.16", "0.17", "0.18", "0.19", "0.20", "2026")
"""Starts of the last versions and dates of keys that files in use may still have: about a year before our tables."""
OLDER_ACCEPT = "older versions accept"  # in the finding of a front end's key
GROWING = ("model.backend.",)  # AutoModel's kernels and number formats, to which every version adds
WAS_REMOVED = ": was removed: "  # in the finding of a value that older versions have
WITHOUT_SUGGESTIONS = ("megatron-bridge",)
"""Frameworks most of whose keys are never suggested: an unknown key without a suggestion may be a typing error."""
_ABSENT = re.compile(r"\b(has no|does not accept|ignores)\b")
_MEANT = re.compile(
    r"did you mean|use dashes|it is written|already set|is its opposite|that is the default|is a module"
)
_ALLOWED = re.compile(r"(\[[^\[\]]*\]|\S+): allowed: (.+)$")
_DIGITS = re.compile(r"\d+")


def with_open_version(
    framework: Framework, content: Content, settings: Settings, findings: Sequence[Finding]
) -> list[Finding]:
    """Return the findings; an error on a name that another version of the framework may have is a warning."""
    if checkout_root(framework.name, content.folder) is not None:
        return list(findings)
    errors = [one for one in findings if one.severity == "error"]
    named = [one for one in errors if _depends(framework, settings, one)]
    if named:  # a file for another version may have its values too
        named += [one for one in errors if one.rule == "value.invalid" and _ALLOWED.search(one.message) and not one.fix]
    return [_as_warning(framework, one) if one in named else one for one in findings]


def _depends(framework: Framework, settings: Settings, finding: Finding) -> bool:
    """Return whether a finding is right only for some versions of the framework."""
    if finding.rule in (*UNKNOWN, *UNKNOWN_BRIDGE):
        is_absent = bool(_ABSENT.search(finding.message)) and not _MEANT.search(finding.message)
        return is_absent and not _is_a_mistake(framework, finding)
    if finding.rule == "value.invalid":
        is_named = finding.field.startswith(GROWING) and bool(_ALLOWED.search(finding.message)) and not finding.fix
        return is_named or _is_variant(finding) or WAS_REMOVED in finding.message
    return finding.rule in REMOVED and _recently_removed(framework, settings, finding)


def _is_a_mistake(framework: Framework, finding: Finding) -> bool:
    """Return whether a key is a mistake in every version: our tables have it elsewhere, or it may be misspelled."""
    if finding.rule == "key.unknown" and framework.name in WITHOUT_SUGGESTIONS:
        return True
    section, _, name = finding.field.rpartition(".")
    if finding.rule == "key.unknown" and framework.name == "megatron-lm":
        return finding.field in all_program_flags()
    return bool(section) and name != "_target_" and name in our_names(framework.name, framework.key_map)


def _is_variant(finding: Finding) -> bool:
    """Return whether a value is named like a later variant of an accepted one: te_ops beside te, fa4 beside fa3."""
    found = _ALLOWED.search(finding.message)
    if found is None:
        return False
    accepted = found[2].lower().split(", ")
    values = [one.strip(" \"'[]").lower() for one in found[1].split(",")]
    others = [one for one in values if one not in accepted]
    return bool(others) and all(any(_extends(one, known) for known in accepted if known) for one in others)


def _extends(value: str, known: str) -> bool:
    numbered = _DIGITS.search(value) and _DIGITS.search(known)
    return value.startswith(f"{known}_") or bool(numbered and _DIGITS.sub("", known) == _DIGITS.sub("", value))


def _recently_removed(framework: Framework, settings: Settings, finding: Finding) -> bool:
    """Return whether versions in use have a key, and the file has not its new name too."""
    keys = config_keys(framework.key_map)
    row = keys.get(finding.field)
    if row is None:
        return OLDER_ACCEPT in finding.message
    if not row.until.startswith(RECENT):
        return False
    instead = {word.lstrip("-") for word in row.replacement.replace("=", " ").split()}
    return not instead & settings.keys()  # no version has both names


def _as_warning(framework: Framework, finding: Finding) -> Finding:
    hint = f"; that is {framework.title} at {framework.version}: another version may accept it"
    message = finding.message if OLDER_ACCEPT in finding.message else f"{finding.message}{hint}"
    return msgspec.structs.replace(finding, severity="warning", message=message)
