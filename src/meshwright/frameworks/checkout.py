"""Keys, values and classes of the framework's own source, for a file that is in a checkout of the framework.

Our tables are those of one commit. A checkout has the keys of its own commit, so what its source defines is no error.
Versions of torchtitan before 0.2 read a file without a test for unknown keys: there they have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from meshwright import file_access, similar
from meshwright.frameworks.framework import Content, Framework, ParsedConfig
from meshwright.frameworks.mapping import map_to_recipe
from meshwright.frameworks.types import Settings
from meshwright.recipes.key_maps import config_keys
from meshwright.rules.rule import Finding

SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "megatron-lm": (("megatron/training/arguments.py", "megatron/arguments.py"), ("megatron",)),
    "megatron-deepspeed": (("megatron/arguments.py",), ("megatron",)),
    "megatron-bridge": (("src/megatron/bridge/training/config.py",), ("src/megatron/bridge", "scripts")),
    "automodel": (("nemo_automodel/__init__.py",), ("nemo_automodel",)),
    "torchtitan": (("torchtitan/train.py", "torchtitan/config_manager.py"), ("torchtitan",)),
    "kempnerforge": (("kempnerforge/__init__.py",), ("kempnerforge",)),
    "axolotl": (("src/axolotl/__init__.py",), ("src/axolotl",)),
    "llama-factory": (("src/llamafactory/__init__.py",), ("src/llamafactory",)),
    "ms-swift": (("swift/__init__.py",), ("swift",)),
    "trl": (("trl/__init__.py",), ("trl",)),
}
"""Files of which every checkout of a framework has one, and the folders that define its keys, by framework."""
LEVELS = 8  # folders above a file that may be the root of its checkout
SHORT = 5  # letters of a name that too many others are like
MOST_FILES, MOST_BYTES = 5_000, 80_000_000  # of a checkout that are read
REMOVED = ("key.removed", "torchtitan.other-version")
UNKNOWN_FLAG = "megatron-bridge.unknown-flag"
KEYS = ("key.unknown", "key.unused", "automodel.target-keyword", UNKNOWN_FLAG, *REMOVED)
FLAT = ("axolotl", "llama-factory", "ms-swift", "trl")  # frameworks whose keys are arguments, without sections
DATASET = "torchtitan.dataset-name"
VALUES = (
    "value.invalid",
    "automodel.recipe-unknown",
    "megatron-bridge.unknown-recipe",
    DATASET,
    "torchtitan.model-name",
)
OWN_DATA = re.compile(r"data(?!_parallel)")  # start of the name of a key that selects the data of a checkout
PRESET = "torchtitan.preset"
MODULES = ("models", "experiments")  # folders of torchtitan whose packages --module names
MEMORY = "memory."  # start of the rules on what fits
TARGET = "automodel.target-unknown"
_DEFINED = re.compile(
    r"^[ \t]*(?:class|def)[ \t]+(\w+)|^[ \t]+(\w+)[ \t]*:[ \t]*[\w\"'\[]|[\"']--([\w.-]+)[\"']"
    r"|\bget\(\s*[\"']([\w.]+)[\"']",
    re.MULTILINE,
)
_FLAGS = re.compile(r"[\"'](--?[\w.-]+)[\"']")
_TEXTS = re.compile(r"[\"']([\w./-]{1,60})[\"']")
_MODULE = re.compile(r"--module (\w+):")
_WORD = re.compile(r"[A-Za-z_]\w*")
LOADERS = {"torchtitan": ("torchtitan/config_manager.py", "torchtitan/config/manager.py")}
"""Files of a checkout that read a config file, by framework."""
IGNORED = "this checkout ignores keys that it does not define"
_BUILDS = re.compile(r"\btype\(k\.title\(\)|def _dict_to_dataclass\b")  # sections of a config file
_REJECTS = re.compile(r"\binvalid_fields\b|\bunknown_(?:keys|fields)\b")
_ABSENT_VALUE = re.compile(r": allowed: |: was removed: |does not exist|\bhas no\b")
_OF_TYPE = re.compile(r"must be (?:true or false|an? (?:integer|number))")  # the key may have words in a checkout
_NUMBER = re.compile(r"-?\d*\.?\d+(?:[eE][-+]?\d+)?")
_MISSPELLED = re.compile(r"did you mean|it is written")


class Names(msgspec.Struct, frozen=True):
    """What the source of a checkout defines."""

    keys: frozenset[str]  # functions, classes, fields, flags, and keys that are read with get
    texts: frozenset[str]  # short texts in quotes, such as the values that a field accepts
    flags: frozenset[str]  # of argument parsers, with dashes


def without_newer_names(
    framework: Framework, content: Content, settings: Settings, findings: Sequence[Finding]
) -> tuple[list[Finding], list[str]]:
    """Return the findings that are not about names of the checkout that a file is in, and a note on those names."""
    if not any(one.rule in (*KEYS, *VALUES, TARGET, PRESET) for one in findings):
        return list(findings), []
    root = checkout_root(framework.name, content.folder)
    if root is None:
        return list(findings), []
    written = {**content.settings, **settings}  # a front end's settings are those of the Trainer
    newer = [one for one in findings if _is_defined(framework, root, written, one)]
    if any(OWN_DATA.match(one.field.rpartition(".")[2]) for one in newer):  # it names the loader, not a dataset
        newer += [one for one in findings if one.rule == DATASET and one not in newer]
    if not newer:
        return _without_effect(framework, root, findings), []
    names = ", ".join(dict.fromkeys(one.field for one in newer))
    note = f"not checked, as only the checkout {root} of {framework.title} defines it: {names}"
    kept = [one for one in findings if one not in newer]
    kept += _older_values(framework, newer, written)
    if any(one.rule in REMOVED for one in newer):  # a batch or a layout may be set by a key that we do not read
        kept = [one for one in kept if not one.rule.startswith(MEMORY)]
        kept = [one for one in kept if not is_about_new_name(framework, newer, one)]
    return _without_effect(framework, root, kept), [note]


def _older_values(framework: Framework, older: Sequence[Finding], settings: Settings) -> list[Finding]:
    """Return the values that a key of the checkout's version cannot have, by the key that replaced it."""
    keys = config_keys(framework.key_map)
    rows = {one.field: row for one in older if one.rule in REMOVED and (row := keys.get(one.field)) is not None}
    renamed = {
        row.replacement: setting
        for field, row in rows.items()
        if row.replacement in keys and row.replacement not in settings and (setting := settings.get(field)) is not None
    }
    by_name = {row.replacement: field for field, row in rows.items()}
    found = map_to_recipe(framework, ParsedConfig(settings=renamed)).findings if renamed else ()
    return [
        msgspec.structs.replace(
            one, field=by_name[one.field], message=one.message.replace(one.field, by_name[one.field]), fix=()
        )
        for one in found
        if one.rule == "value.invalid" and one.field in by_name
    ]


def _without_effect(framework: Framework, root: str, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; an error on a key that the loader of the checkout ignores is a warning."""
    if not _ignores_unknown_keys(framework.name, root):
        return list(findings)
    return [
        msgspec.structs.replace(one, severity="warning", message=f"{one.message}; {IGNORED}")
        if one.rule in KEYS and one.severity == "error" and not _is_misspelled(names_of(framework.name, root), one)
        else one
        for one in findings
    ]


def _is_misspelled(names: Names, finding: Finding) -> bool:
    """Return whether a key is a known one of ours or of the checkout with wrong letters: its value has no effect."""
    section, _, name = finding.field.rpartition(".")
    own = {one.rpartition(".")[2] for one in names.flags if one.startswith(f"--{section}.")} or names.keys
    slips = finding.rule == "key.unknown" and any(similar.is_slip(name, one) for one in own if len(one) > SHORT)
    return slips or bool(_MISSPELLED.search(finding.message))


@lru_cache(maxsize=8)
def _ignores_unknown_keys(name: str, root: str) -> bool:
    """Return whether a checkout reads config files without a test for keys that it does not define."""
    paths = [Path(root, one) for one in LOADERS.get(name, ())]
    text = "".join(one.read_text(errors="replace") for one in paths if one.is_file())
    return bool(_BUILDS.search(text)) and not _REJECTS.search(text)


def is_about_new_name(framework: Framework, removed: Sequence[Finding], finding: Finding) -> bool:
    """Return whether a finding asks for a key that the file sets by the name of an older version."""
    keys = config_keys(framework.key_map)
    rows = (keys.get(one.field) for one in removed if one.rule in REMOVED)
    names = {row.replacement.replace("=", " ").split()[0] for row in rows if row is not None and row.replacement}
    return bool(finding.fix) and any(fix.replace("=", " ").partition(" ")[0] in names for fix in finding.fix)


def _is_defined(framework: Framework, root: str, settings: Settings, finding: Finding) -> bool:
    """Return whether a checkout defines the name that a finding is about, and the table of our commit does not."""
    setting = settings.get(finding.field)
    value = "" if setting is None or setting.unresolved else str(setting.value)
    if finding.rule == TARGET:
        return _resolves(root, value)
    if finding.rule == PRESET:
        module = _MODULE.match(finding.message)
        return module is not None and any(Path(root, "torchtitan", one, module[1]).is_dir() for one in MODULES)
    is_word = bool(_OF_TYPE.search(finding.message)) and not _NUMBER.fullmatch(value)
    if finding.rule == "value.invalid" and not is_word and not _ABSENT_VALUE.search(finding.message):
        return False  # the value exists, and fails beside others, or is out of range
    if finding.rule in VALUES:
        found = names_of(framework.name, root)
        listed = [str(one) for one in setting.value] if setting is not None and isinstance(setting.value, list) else []
        accepts = all(one in found.texts or one.rpartition(".")[2] in found.keys for one in listed or [value])
        return bool(value) and accepts
    if finding.rule not in KEYS:
        return False
    names = names_of(framework.name, root)
    if finding.rule == UNKNOWN_FLAG:
        return finding.field in names.flags
    section, dot, _ = finding.field.partition(".")
    if dot and f"--{finding.field}" in names.flags:
        return True  # a parser of the checkout adds the whole key
    if dot and framework.name in FLAT and section in names.keys - our_names(framework.name, framework.key_map):
        return True  # a table of keys that only the checkout has
    written_key = finding.field
    if "[" in written_key and (table := written_key.partition("[")[0]) not in config_keys(framework.key_map):
        written_key = table  # of a list of tables, the source defines the list
    key = _WORD.findall(written_key.rpartition(".")[2].lstrip("-").replace("-", "_"))
    name = key[0] if key else ""
    is_nested = "." in finding.field and finding.rule not in REMOVED  # if we know it, it is a key of another section
    is_ours = is_nested and name in our_names(framework.name, framework.key_map)
    return bool(name) and not is_ours and name in names.keys


def checkout_root(name: str, folder: Path | None) -> str | None:
    """Return the checkout of a framework that a folder is in; None if it is in none."""
    if folder is None or file_access.closed() or name not in SOURCES:
        return None
    start = folder.resolve()
    places = (start, *list(start.parents)[:LEVELS])
    return next((str(one) for one in places if any((one / mark).is_file() for mark in SOURCES[name][0])), None)


@lru_cache(maxsize=8)
def names_of(name: str, root: str) -> Names:
    """Return the names that the source of a checkout defines."""
    keys: set[str] = set()
    texts: set[str] = set()
    flags: set[str] = set()
    for text in _sources(Path(root), SOURCES[name][1]):
        found = (one.rpartition(".")[2] for groups in _DEFINED.findall(text) for one in groups if one)
        keys.update(one.replace("-", "_") for one in found)
        texts.update(_TEXTS.findall(text))
        flags.update(_FLAGS.findall(text))
    return Names(frozenset(keys), frozenset(texts), frozenset(flags))


def _sources(root: Path, folders: Sequence[str]) -> Iterator[str]:
    size = count = 0
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            size, count = size + path.stat().st_size, count + 1
            if count > MOST_FILES or size > MOST_BYTES:
                return
            yield path.read_text(errors="replace")


def _resolves(root: str, dotted: str) -> bool:
    """Return whether a checkout has the module, class or function of a dotted name."""
    place, parts = Path(root), dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place = place / parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place = place / f"{parts.pop(0)}.py"
    file = place / "__init__.py" if place.is_dir() else place
    if not parts:
        return place != Path(root)
    return file.is_file() and re.search(rf"\b{re.escape(parts[0])}\b", file.read_text(errors="replace")) is not None


@cache
def our_names(name: str, key_map: str) -> frozenset[str]:
    """Return the names of all keys in our tables of a framework."""
    here = Path(__file__).parent
    plain = name.replace("-", "_")
    tables = [*(here / plain).glob("*.tsv"), *(here / "front_ends").glob(f"{plain}*.tsv")]
    words = {word for path in tables for word in _WORD.findall(path.read_text(encoding="utf-8"))}
    keys = config_keys(key_map).values()
    return frozenset(words | {one.key.rpartition(".")[2] for one in keys if one.status != "removed"})
