"""Names that our tables do not have, or that a recent version removed: a file may be for another version.

Our tables are those of one commit, and a file does not name the version that reads it. A name that is like a known
one is a typing error in every version. Another unknown name belongs to a newer or older version as likely as it is a
mistake: a warning, unless the version is known: of a file in a checkout of the framework that it starts, or of one
that export wrote. A file with several such names is for an older version or a fork, and its removed keys are warnings,
however old they are; so are flags that it leaves out, for which a fork may have a default. A file with a name that only
its own program can add is read by that program, which brings its version of the framework with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright import similar
from meshwright.frameworks.checkout import checkout_root, our_names
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.trainer_args import WRITTEN
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
NO_VERSION = "no version has both"  # in the finding of a key of older releases beside one of newer releases
GROWING = ("model.backend.",)  # AutoModel's kernels and number formats, to which every version adds
WAS_REMOVED = ": was removed: "  # in the finding of a value that older versions have
ABSENT_FLAGS = tuple(
    f"megatron-lm.{name}" for name in ("no-length", "no-learning-rate", "no-data", "save-without-interval")
)
"""Rules on flags without a default in Megatron-LM: a fork may have one, or another flag for the same."""
SEVERAL = 2  # old and unknown names from which a file is for an older version or for a fork
PINNED = frozenset(("third_party", "thirdparty", "3rdparty", "third-party", "submodules", "external", "vendor"))
"""Folders of a repository with other repositories, each at a commit of its own."""
ADDED = "must add it"  # in the warning on a name that the program beside the framework must define
FORK = 5  # names of its own from which a program may build another model, or validate its arguments otherwise
OF_THE_MODEL = ("megatron-lm.", "memory.", "pipeline.even-split", "precision.fp8-widths")
"""Starts of the rules that such a program may not have: layers may compute nothing, FP8 kernels may be its own."""
OF_MEGATRON = tuple(
    f"megatron-lm.{name}"
    for name in ("max-connections", "query-groups", "head-dim", "virtual-layers", "batch-schedule")
)
"""Rules that hold for every program on Megatron-Core: they divide sizes, or order kernels."""
MAY_CHANGE = "flags that only the program has may change it"
MAY_ACCEPT = "another version may accept it"  # in the finding of a name that our version rejects
OF_ARGUMENTS = ("accelerate", "deepspeed")
WITHOUT_SUGGESTIONS = ("megatron-bridge",)
"""Frameworks most of whose keys are never suggested: an unknown key without a suggestion may be a typing error."""
_ABSENT = re.compile(r"\b(has no|does not accept|ignores)\b")
_MEANT = re.compile(
    r"did you mean|use dashes|it is written|already set|is its opposite|that is the default|is a module|is an option of"
)
_SUGGESTED = re.compile(r"did you mean (--?)?([\w.-]+)\?")
_ALLOWED = re.compile(r"(\[[^\[\]]*\]|\S+): allowed: (.+)$")
_DIGITS = re.compile(r"\d+")


def with_open_version(
    framework: Framework, content: Content, settings: Settings, findings: Sequence[Finding]
) -> list[Finding]:
    """Return the findings; an error on a name that another version of the framework may have is a warning."""
    root = checkout_root(framework.name, content.folder)
    if _is_exported(framework, content):
        return list(findings)
    if root is not None and not _starts_another_copy(content, root):
        return list(findings)
    errors = [one for one in findings if one.severity == "error"]
    named = [one for one in errors if _depends(framework, settings, one)]
    removed = [one for one in errors if one.rule in REMOVED and NO_VERSION not in one.message]
    removed = [one for one in removed if not _has_new_name(framework, settings, one)]
    signs = len({one.field for one in (*named, *removed)}) + _starts_a_pinned_copy(content)
    added = [one for one in findings if one.rule == "key.unused" and ADDED in one.message]
    has_program = bool(added)
    if has_program or ((named or removed) and signs >= SEVERAL):
        named += [one for one in errors if one in removed or _is_of_a_fork(framework, one)]
        named += [one for one in errors if one.rule in ABSENT_FLAGS]
    if has_program:
        named += [one for one in errors if one.rule == "key.unknown" and not _MEANT.search(one.message)]
    if named or has_program:  # a file for another version may have its values too
        named += [one for one in errors if one.rule == "value.invalid" and _ALLOWED.search(one.message) and not one.fix]
    changed = [_as_warning(framework, one) if one in named else one for one in findings]
    own = {one.field for one in (*added, *(one for one in named if one.rule == "key.unknown"))}
    return [_may_change(one) for one in changed] if len(own) >= FORK else changed


def _is_exported(framework: Framework, content: Content) -> bool:
    """Return whether the first comment of a file says that it was exported for the version of our tables.

    The file for Accelerate or DeepSpeed is not all of an export: arguments of the program are beside it.
    """
    if framework.name in OF_ARGUMENTS:
        return False
    head = next((line for line in content.text.splitlines()[:2] if line.startswith("# ")), "")
    return WRITTEN in head and framework.version in head


def _may_change(finding: Finding) -> Finding:
    """Return a finding of a program with several names of its own: an error on its model is a warning."""
    if finding.severity != "error" or finding.rule in OF_MEGATRON or not finding.rule.startswith(OF_THE_MODEL):
        return finding
    return msgspec.structs.replace(finding, severity="warning", message=f"{finding.message}; {MAY_CHANGE}")


def is_rejected(finding: Finding) -> bool:
    """Return whether the version of our tables rejects a setting: an error, or a warning that another may accept it."""
    return finding.severity == "error" or finding.message.endswith(MAY_ACCEPT)


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
    swapped = value != known and sorted(value) == sorted(known)  # bf61: no later variant of bf16
    is_numbered = numbered and not swapped and _DIGITS.sub("", known) == _DIGITS.sub("", value)
    return value.startswith(f"{known}_") or bool(is_numbered)


def _starts_a_pinned_copy(content: Content) -> bool:
    """Return whether a command starts a program of a copy of the framework that the repository keeps or links."""
    return any(PINNED & set(str(one.program.value).lower().split("/")[:-1]) for one in content.launches)


def _starts_another_copy(content: Content, root: str) -> bool:
    """Return whether every program is named by a path outside the checkout: a copy with a version of its own."""
    programs = [Path(str(one.program.value)) for one in content.launches if not one.is_module]
    return bool(programs) and all(one.is_absolute() and not one.is_relative_to(root) for one in programs)


def _is_of_a_fork(framework: Framework, finding: Finding) -> bool:
    """Return whether a name may be one of a fork: it is like a known one by its words, and not by wrong letters."""
    if finding.rule == "torchtitan.dataset-name":
        return True
    if finding.rule not in UNKNOWN or framework.name in WITHOUT_SUGGESTIONS:
        return False
    meant = _SUGGESTED.search(finding.message)
    if meant is None:
        return not _MEANT.search(finding.message)
    known = meant[2].replace("-", "_")
    return (
        not similar.misspelled(finding.field, [known]) or known.rpartition(".")[2] == finding.field.rpartition(".")[2]
    )


def _has_new_name(framework: Framework, settings: Settings, finding: Finding) -> bool:
    """Return whether the file also has the new name of a removed key: no version has both."""
    row = config_keys(framework.key_map).get(finding.field)
    instead = {word.lstrip("-") for word in row.replacement.replace("=", " ").split()} if row is not None else set()
    return bool(instead & settings.keys())


def _recently_removed(framework: Framework, settings: Settings, finding: Finding) -> bool:
    """Return whether versions in use have a key, and the file has not its new name too."""
    keys = config_keys(framework.key_map)
    row = keys.get(finding.field)
    if row is None:
        return OLDER_ACCEPT in finding.message
    return row.until.startswith(RECENT) and not _has_new_name(framework, settings, finding)


def _as_warning(framework: Framework, finding: Finding) -> Finding:
    hint = f"; that is {framework.title} at {framework.version}: {MAY_ACCEPT}"
    message = finding.message if OLDER_ACCEPT in finding.message else f"{finding.message}{hint}"
    return msgspec.structs.replace(finding, severity="warning", message=message)
