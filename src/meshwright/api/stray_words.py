"""Words of a command line that are neither options nor overrides, and where they belong."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright import clusters, models
from meshwright.api.argument_names import meant_option, recipe_key, repeats_goal
from meshwright.api.inputs import Field, Request, fields_of, flags_of
from meshwright.api.paths import blend_of
from meshwright.api.run_comparison import is_run
from meshwright.errors import InputError, closest
from meshwright.file_access import missing_path
from meshwright.notes import note
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import REMOVED_KEYS
from meshwright.recipes.overrides import native_key
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.unknown_keys import known_keys

CLUSTERS = ("clusters", "gpus")
"""What the options that name GPUs complete."""
ONE_MODEL = ("recommend", "plan", "estimate")
"""Commands of one model, for which another command compares several."""
_CLUSTER = re.compile(r"[0-9]+(x[0-9]+)?x[A-Za-z]|auto$", re.IGNORECASE)


def accepted_words(command: str, request: type[Request], given: dict[str, Any]) -> dict[str, Any]:
    """Return a command's values without words that repeat --goal; raise InputError for words that are no KEY=VALUE."""
    for word in given.get("overrides", ()):
        if "=" not in word:
            raise stray_word(word, command, fields_of(request), given)
        if "." in word.partition("=")[0]:
            continue
        if is_repeated(word, str(given.get("goal", ""))):
            given = {**given, "overrides": tuple(one for one in given["overrides"] if one != word)}
        else:
            refuse_option_word(word, command, flags_of(request))
    return given


def stray_word(word: str, command: str, fields: Sequence[Field], given: Mapping[str, Any]) -> InputError:
    """Return the error for a word that is neither an option nor key=value, with the option or key it belongs to."""
    if command == "compare" and is_run(given.get("target")):
        if os.path.isdir(word):
            reason = "the folder has no finished step: its run was refused or ended before the first one"
            return InputError(reason, "target", word, [f"meshwright compare {given['target']} OTHER_RUN"])
        return missing_path(word, "target", "no such run")
    fields = [field for field in fields if "cli" in field.input.surfaces]
    free = [field for field in fields if not field.input.positional and field.name not in given]
    fixes = [f"{field.flag} {word}" for field in free if word.lower() in field.input.choices]
    fixes = [one for one in fixes if one.startswith("--to ")] or fixes  # not the framework of the file that is read
    if not fixes and _CLUSTER.match(word):
        fixes = [f"{field.flag} {word}" for field in free if field.input.complete == "clusters"]
    if not fixes and "dataset" in given and os.path.exists(word):  # --dataset *.jsonl, which a shell expands
        others = [one for one in given.get("overrides", ()) if "=" not in one and os.path.exists(one)]
        blend = blend_of(dict.fromkeys([str(given["dataset"]), *others], 1.0))
        reason = "is a second dataset; write several as a blend with their weights, or put them into one folder"
        return InputError(reason, "argument", word, [blend])
    if not fixes and command == "doctor" and os.path.isfile(word):  # run1.log run2.log, or *.log
        logs = [one for one in (str(given.get("run", "")), *given.get("overrides", ())) if os.path.isfile(one)]
        together = f"cat {shlex.join(logs)} | meshwright doctor -"
        return InputError("is a second log; those of one run are read in order", "argument", word, [together])
    first = next((given[name] for name in ("model", "target") if isinstance(given.get(name), str)), "")
    if not fixes and command in ONE_MODEL and first and _is_model(word):
        on = [one for name in ("gpus", "goal") if name in given for one in (f"--{name}", str(given[name]))]
        both = shlex.join(["meshwright", "compare", first, word, *on])
        return InputError(f"is a second model; {command} takes one, compare takes several", "argument", word, [both])
    split = _split_cluster(fields, given)
    if not fixes and split:
        return InputError("belongs to the option before it; quote a value with spaces", "argument", word, [split])
    own = native_key(word)
    if not fixes and own is not None:
        fixes = [format_override(own, recipe_fields()[own].default)]
    near = closest(word, [field.flag.partition("/")[0] for field in fields if not field.input.positional])
    hint = fixes or near or [f"meshwright {command} --help"]
    reason = "neither an option nor key=value"
    return InputError(f"{reason}; did you mean {hint[0]}?" if fixes or near else reason, "argument", word, hint)


def _is_model(word: str) -> bool:
    """Return whether a word is a model of the catalogue, or one whose config.json is on this machine."""
    try:
        models.find(word)
    except InputError:
        return False
    return True


def _split_cluster(fields: Sequence[Field], given: Mapping[str, Any]) -> str:
    """Return the quoted cluster of --gpus 12 nodes of 8 H100, which a shell splits into words; empty if it is none."""
    field = next((field for field in fields if field.input.complete in CLUSTERS and field.name in given), None)
    words = [word for word in given.get("overrides", ()) if "=" not in word]
    if field is None:
        return ""
    text = " ".join((str(given[field.name]), *words))
    try:
        clusters.cluster(text)
    except InputError:
        return ""
    return f"{field.flag} {shlex.quote(text)}"


def is_repeated(word: str, goal: str) -> bool:
    """Return whether KEY=VALUE only repeats --goal, which a note says."""
    key, _, value = word.partition("=")
    if not goal or not repeats_goal(key, value, goal):
        return False
    note(f"{word} is what --goal {goal} means")
    return True


def refuse_option_word(word: str, verb: str, flags: Sequence[str]) -> None:
    """Raise InputError for KEY=VALUE that is an option of the command and no key of a recipe: tokens=1T."""
    key, _, value = word.partition("=")
    name = key.strip().lower().replace("-", "_")
    if recipe_key(key) is not None or name in REMOVED_KEYS or key in known_keys():
        return
    flag = f"--{name.replace('_', '-')}"
    meant = [f"{flag} {value}"] if flag in flags else meant_option(name, value, flags, False, verb)
    if meant:
        if meant[0].startswith("--goal"):  # a recipe has a goal of its own
            meant = [*meant, *meant_option(name, value, (), True, verb)]
        what = f"is an option, not a key of a recipe; write {' or '.join(meant)}"
        raise InputError(what, field=key, value=value, fix=meant)
