"""Flags that a training program adds to Megatron-LM's parser: programs of Megatron-LM, and files that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright import file_access
from meshwright.frameworks.framework import Content
from meshwright.frameworks.megatron_lm.arguments import KEY_MAP, UNREAD_ARGS, flag_of, key_of
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_choices import all_program_flags, parser_flags, program_flags
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

GENERIC = ("train.py", "finetune.py")
"""Names that programs of other repositories have too."""
ADDS = "add_argument"
MOST_BYTES = 2_000_000
SHORT = 12  # characters of a flag in which two wrong letters make another word
LEVELS = 4  # folders above the script where the program of a relative path is looked for


class ProgramFlags(msgspec.Struct, frozen=True):
    """The flags of a program beside those of Megatron-LM's parser."""

    keys: frozenset[str] = frozenset()
    complete: bool = True  # whether the program accepts no others


def own_flags(content: Content, launch: LaunchCommand | None, is_found: bool = True) -> ProgramFlags:
    """Return the flags that the program of a script adds; `is_found`: False if a script's program is not known."""
    if launch is None:
        return ProgramFlags() if is_found else ProgramFlags(all_program_flags(), complete=False)
    if launch.program.unresolved and "$" in str(launch.program.value).rpartition("/")[2]:
        return ProgramFlags(all_program_flags(), complete=False)
    program = str(launch.program.value)
    name = program.rpartition("/")[2]
    if launch.is_module:
        program = program.replace(".", "/") + ".py"
        name = program.rpartition("/")[2]
    listed = program_flags(program)
    text = _text(program, content.folder)
    read = frozenset(_added(text)) if text is not None else frozenset()
    complete = listed is not None and (name not in GENERIC or _is_theirs(program))
    return ProgramFlags(read | frozenset(listed or ()), complete)


def _is_theirs(program: str) -> bool:
    """Return whether a path of a generic name ends as one of Megatron-LM's programs."""
    return any(program.endswith(path) for path in ("mimo/train.py", "multimodal/train.py", "modelopt/finetune.py"))


def _text(program: str, folder: Path | None) -> str | None:
    """Return the text of the program if it is there: beside the script, or relative to a folder above it."""
    if folder is None or file_access.closed() or "$" in program:
        return None
    places = [Path(program)] if program.startswith("/") else [Path(program), *_above(folder, program)]
    found = next((one for one in places if one.is_file()), None)
    if found is None or found.stat().st_size > MOST_BYTES:
        return None
    return found.read_text(errors="replace")


def _above(folder: Path, program: str) -> Iterator[Path]:
    start = folder.resolve()
    yield start / program
    for parent in list(start.parents)[:LEVELS]:
        yield parent / program


@lru_cache(maxsize=64)
def _added(text: str) -> tuple[str, ...]:
    """Return the keys of the flags that a program's file adds to a parser."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    added = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == ADDS)
    names = (one.value for call in added for one in call.args if isinstance(one, ast.Constant))
    return tuple(key_of(name) for name in names if isinstance(name, str) and name.startswith("--"))


def _is_typo(key: str) -> bool:
    """Return whether a flag differs from one of Megatron-LM's in a letter or two."""
    from rapidfuzz.distance import Levenshtein

    most = 1 if len(key) < SHORT else 2
    similar = (one for one in parser_flags() if one[0] == key[0])  # patch_size is no typing error of batch_size
    near = [one for one in similar if Levenshtein.distance(key, one, score_cutoff=most) <= most]
    return any(re.sub(r"\D", "", one) == re.sub(r"\D", "", key) for one in near)  # data_path2 is another flag


def split_settings(settings: Settings, own: ProgramFlags) -> tuple[Mapping[str, SourcedValue], tuple[Finding, ...]]:
    """Return the settings that Megatron-LM's table describes, and warnings on flags that the program may add itself."""
    known = config_keys(KEY_MAP)
    kept, findings = {}, []
    for key, setting in settings.items():
        if key == "vocab_size" and str(setting.value) == "0":
            continue  # of a program without text: NullTokenizer adds the only token
        if key in known or not flag_of(key).startswith("--") or key == UNREAD_ARGS:
            kept[key] = setting
        elif key in own.keys:
            continue
        elif own.complete or _is_typo(key):
            kept[key] = setting  # reported as unknown, with the flag that is meant
        else:
            message = f"{flag_of(key)} is no flag of Megatron-LM: the program must add it"
            findings.append(Finding("key.unused", "warning", key, message, (), file=setting.file, line=setting.line))
    return kept, tuple(findings)
