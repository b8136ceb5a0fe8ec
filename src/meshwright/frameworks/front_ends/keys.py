"""Keys that a front end does not have, and values that it does not accept, by its table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from meshwright.frameworks.front_ends.checked_choices import with_checked
from meshwright.frameworks.front_ends.describe import METHOD_KEYS, FrontEnd
from meshwright.frameworks.front_ends.older_keys import ADDED, OPPOSITE, SHARES, VALUES, has_both
from meshwright.frameworks.front_ends.synonyms import synonym
from meshwright.frameworks.hf_arguments import NO, is_switch
from meshwright.frameworks.key_table import NULLS, PLACEHOLDER, Key, KeyTable
from meshwright.frameworks.other_versions import OLDER_ACCEPT, WAS_REMOVED
from meshwright.frameworks.trainer_names import refused_name
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps.hugging_face import ATTENTION_KERNELS, meant_kernel, refused_kernel
from meshwright.rules.rule import Finding, Severity
from meshwright.similar import is_slip, misspelled

OTHERS = 3  # keys that are like none of the front end's: the file is that of a program with its own arguments
PROGRAM_OPTIONS = ("config", "help", "launcher", "ray")
KERNEL_KEYS = ("attn_implementation", "attn_impl", "flash_attn")
SHORT_KERNELS = {"flash_attn": {"flash_attention_2": "fa2", "flash_attention_3": "fa3", "eager": "disabled"}}
"""Kernels as the values of a key that has names of its own for them."""
OWN_KERNELS = {
    "axolotl": ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager", "xformers", "sage", "fp8"),
    "llama_factory_v1": ("sdpa", "flash_attention_2", "eager"),
    **dict.fromkeys(("ms_swift", "ms_swift_megatron"), (*ATTENTION_KERNELS, "flash_attn")),
}
"""Attention kernels of front ends that take other names than transformers, by table.

CANONICAL_ATTN_IMPLS of Axolotl's schemas/enums.py; AttentionFunction of LLaMA-Factory's v1/utils/types.py; AttnImpl of
ms-swift's model/utils.py.
"""


class _Place(NamedTuple):
    """A key of a file in the front end's table."""

    key: str
    owner: str  # section of the table that has it
    name: str
    path: str  # with the index of each list, which the table's owner does not have
    depth: int  # of the owner
    setting: SourcedValue
    is_command: bool

    @property
    def shown(self) -> str:
        return f"--{self.key}" if self.is_command else self.key

    def named(self, name: str) -> str:
        """Return the key of another name in the same section."""
        return ".".join((*self.key.split(".")[: self.depth], name))

    def with_value(self, key: str, value: Any) -> tuple[str, ...]:
        """Return the fix that sets a key; none without a value."""
        return (_formatted(key, value, self.is_command),) if value else ()

    def finding(self, rule: str, severity: Severity, message: str, fix: tuple[str, ...] = ()) -> Finding:
        return Finding(rule, severity, self.key, message, fix, self.setting.file, self.setting.line)


def key_findings(
    one: FrontEnd, known: KeyTable, settings: Settings, is_open: bool, is_command: bool, table: str
) -> Iterator[Finding]:
    """Yield keys that the front end does not have, and values that it does not accept; `table` is the table's name."""
    reported: set[str] = set()
    is_others = is_of_other_program(one, known, settings, is_command, table)
    for key, setting in settings.items():
        of_program = is_command and key in PROGRAM_OPTIONS
        if of_program or one.is_of_command(key) or key.split(".")[0] == "ENV":
            continue
        key = _spelled(known, key)
        owner, name, found = find_key(known, key)
        depth = len(owner.split(".")) if owner else 0
        at = _Place(key, owner, name, ".".join((*key.split(".")[:depth], name)), depth, setting, is_command)
        if not name or at.path in reported:
            continue
        if found is not None:
            row = (
                msgspec.structs.replace(found, choices=()) if is_others else with_checked(table, owner, found, settings)
            )
            yield from _value_finding(one, at, row, table)
            continue
        reported.add(at.path)
        if at.path in one.removed.get(table, {}):
            yield _removed(one, settings, key, at.path, is_command, table)
        elif is_command and is_switch(known.find(owner, name.removeprefix(NO))):
            message = f"{one.title} has no {at.shown}: {name.removeprefix(NO)} is off by default"
            yield at.finding("key.unknown", "error", message, (f"without {at.shown}",))
        else:
            yield from _unknown(one, known, settings, at, is_open, is_others, table)


def _unknown(
    one: FrontEnd, known: KeyTable, settings: Settings, at: _Place, is_open: bool, is_others: bool, table: str
) -> Iterator[Finding]:
    """Yield that the front end has no such key, with the key that is meant, if one is near."""
    owner, name, value = at.owner, at.name, at.setting.value
    is_foreign = one.has_other_programs and not at.is_command  # the file's program may have keys of its own
    near = synonym(known, owner, name) or (_typo(known, owner, name) if is_foreign else known.near(owner, name))
    near = "" if is_foreign and isinstance(value, list) and name == f"{near}s" else near
    near = near or _near_removed(one, name, owner, table)
    says_nothing = value is None and not at.is_command and not one.rejects  # debug: without a value, as in templates
    if (is_open or says_nothing) and not near:
        return
    right = at.named(near)
    refuses = one.rejects and not is_open and not owner and not is_foreign
    is_typo = bool(near) and (not is_others or is_slip(name, near))
    severity: Severity = "error" if is_typo or refuses else "warning"
    verb = "has no" if one.rejects else "ignores"
    hint = "; the program that reads this file must have it" if is_foreign else ""
    hint = _hint(settings, right, "--" if at.is_command else "") if near else hint
    target = known.find(owner, near)
    fits = target is not None and not target.problem(value) and right not in settings
    fits = fits and len(at.key.split(".")) == at.depth + 1  # the value is that of the key, not of one inside it
    fix = (_formatted(right, value, at.is_command),) if fits else ()
    rule = "key.unknown" if severity == "error" else "key.unused"
    yield at.finding(rule, severity, f"{one.title} {verb} {at.shown}{hint}", fix)


def _value_finding(one: FrontEnd, at: _Place, found: Key, table: str) -> Iterator[Finding]:
    """Yield why the front end does not accept the value of a key that it has."""
    key, value, is_known = at.key, at.setting.value, not at.setting.unresolved
    if is_known and (older := VALUES.get((table, key, str(value)))):
        version, now = older
        message = f"{at.shown}: {value}: was removed: since version {version} it is {now}; {OLDER_ACCEPT} it"
        yield at.finding("value.invalid", "error", message, (_formatted(key, now, at.is_command),))
    elif at.is_command and value is True and found.types and "bool" not in found.types and not one.uses_click:
        message = f"{at.shown} has no value: the parser of {one.title} expects one"
        yield at.finding("value.invalid", "error", message)
    elif is_known and (problem := found.problem(value)):
        meant = found.meant(value) or (_short_kernel(found, value) if found.choices else "")
        message = f"{at.shown}: {value}: {problem}"
        since = SHARES.get((table, key)) if is_share(value) else None
        if since:
            message += f" since version {since}; {OLDER_ACCEPT} a share of the training"
        yield at.finding("value.invalid", "warning" if since else "error", message, at.with_value(key, meant))
    elif is_known and (refused := _refused_kernel(table, found, value)):
        reason, meant = refused
        message = f"{one.title} has no {at.shown} {value}; {reason}"
        yield at.finding("value.invalid", "error", message, at.with_value(key, meant))
    elif is_known and at.path == key and (name := refused_name(key, value, table)):
        joint = WAS_REMOVED if name.removed else " does not exist; " if name.meant else ": "
        message = f"{at.shown}: {value}{joint}{name.reason}"
        yield at.finding("value.invalid", "error", message, at.with_value(key, name.meant))


def _spelled(known: KeyTable, key: str) -> str:
    """Return a key as the table has it: those of fsdp_config are read with and without the prefix fsdp_."""
    section, _, name = key.rpartition(".")
    if section != "fsdp_config":
        return key
    names = (f"{section}.{one}" for one in (name, name.removeprefix("fsdp_"), f"fsdp_{name}"))
    return next((one for one in names if find_key(known, one)[2] is not None), key)


def is_share(value: Any) -> bool:
    """Return whether a number of steps is a share of the training."""
    return isinstance(value, float) and 0 < value < 1


def is_of_other_program(one: FrontEnd, known: KeyTable, settings: Settings, is_command: bool, table: str) -> bool:
    """Return whether a file has so many keys of another kind that a program with arguments of its own reads it."""
    return one.has_other_programs and not is_command and _unlike_any(one, known, settings, table) >= OTHERS


def _unlike_any(one: FrontEnd, known: KeyTable, settings: Settings, table: str) -> int:
    """Return how many top-level keys of a file no release of the front end has, and none of its keys is like."""
    names = {key.partition(".")[0].partition("[")[0] for key in settings if not one.is_of_command(key)}
    unknown = [name for name in names if known.find("", name) is None and name not in one.removed.get(table, {})]
    return sum(not synonym(known, "", name) and not _typo(known, "", name) for name in unknown)


def value_findings(settings: Settings, refused: Iterable[tuple[str, str, str]], is_command: bool) -> Iterator[Finding]:
    """Yield values that are refused because of others, or because they name nothing: key, reason, value instead."""
    for key, reason, value in refused:
        place = key if key in settings else next((other for other in METHOD_KEYS if other in settings), "")
        if not place or settings[place].unresolved:
            continue
        setting = settings[place]
        as_option = is_command and "[" not in key  # an item of a list has no option: its line is in the file
        written = "not set" if place != key or setting.value is None else str(setting.value)
        written = written.lower() if isinstance(setting.value, bool) else written
        shown = f"--{key}" if as_option else key
        fix = (_formatted(key, value, as_option),) if value else ()
        yield Finding("value.invalid", "error", key, f"{shown}: {written}: {reason}", fix, setting.file, setting.line)


def plugin_findings(one: FrontEnd, settings: Settings) -> Iterator[Finding]:
    """Yield the keys that the front end ignores because their plugin is not in plugins."""
    listed = plugins_of(settings)
    for start, plugin in one.plugins.items():
        used = [key for key in settings if key.startswith(start) and str(settings[key].value).lower() == "true"]
        if not used or plugin in listed or any(setting.unresolved for setting in listed.values()):
            continue
        message = f"{one.title} ignores {' and '.join(used)}: plugins does not list {plugin}"
        fix = (plugin_line(plugin, settings),)
        first = settings[used[0]]
        yield Finding("value.invalid", "error", "plugins", message, fix, first.file, first.line)


def plugins_of(settings: Settings) -> dict[str, SourcedValue]:
    """Return the plugins that a file lists, each with its setting."""
    keys = [key for key in settings if key.split("[")[0] == "plugins"]
    return {str(item): settings[key] for key in keys for item in _items(settings[key].value)}


def plugin_line(plugin: str, settings: Settings) -> str:
    """Return the line of a file that lists a plugin beside those that it lists already."""
    return f"plugins: [{', '.join((*plugins_of(settings), plugin))}]"


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _hint(settings: Settings, right: str, dashes: str) -> str:
    """Return what a message says about the key that an unknown one means."""
    if right in settings:
        return f"; its key {right} is already set to {settings[right].value} in line {settings[right].line}"
    return f"; did you mean {dashes}{right}?"


def _typo(known: KeyTable, owner: str, name: str) -> str:
    """Return the key of an owner that a name is with a few wrong letters; else empty."""
    near = misspelled(name, known.owners.get(owner, ()))
    return near[0] if near else ""


def _near_removed(one: FrontEnd, name: str, owner: str, table: str) -> str:
    """Return the top-level key of older releases that a name is with a letter wrong; else empty."""
    names = () if owner else tuple(one.removed.get(table, {}))
    return next((known for known in misspelled(name, names) if is_slip(name, known)), "")


def _removed(one: FrontEnd, settings: Settings, written: str, key: str, is_command: bool, table: str) -> Finding:
    """Return the finding of a key that older releases have, with the key of today; `written`: with those inside it."""
    setting, dashes = settings[written], "--" if is_command else ""
    version, right = one.removed[table][key]
    is_opposite, right = right.startswith(OPPOSITE), right.removeprefix(OPPOSITE)
    named = f", which has {dashes}{right} with the opposite meaning" if is_opposite else ""
    named = f", which named it {dashes}{right}" if right and not is_opposite else named
    newer = has_both(table, version, settings) if table in ADDED else ""
    other = f"no version has both {dashes}{key} and {dashes}{newer}" if newer else f"{OLDER_ACCEPT} {dashes}{key}"
    message = f"{one.title} has no {dashes}{key} since version {version}{named}; {other}"
    value = str(setting.value).lower() not in ("true", "1") if is_opposite else setting.value
    fix = (_formatted(right, value, is_command),) if right and right not in settings else ()
    fix = fix or (f"without {dashes}{key}",)
    return Finding("key.removed", "error", written, message, fix, setting.file, setting.line)


def _short_kernel(key: Key, value: Any) -> str:
    """Return the kernel that transformers' or another program's name of it means for a key with names of its own."""
    short = SHORT_KERNELS.get(key.name, {}).get(meant_kernel(str(value)), "") if key.name in KERNEL_KEYS else ""
    return short if short in key.choices else ""


def _refused_kernel(table: str, key: Key, value: Any) -> tuple[str, str] | None:
    """Return why a front end refuses an attention kernel, and the one that may be meant; None if it has it.

    A text in braces is a dict of kernels by part of the model.
    """
    if key.name not in KERNEL_KEYS or key.choices or not isinstance(value, str) or value.strip().startswith("{"):
        return None
    if value.strip().lower() in NULLS or PLACEHOLDER.fullmatch(value.strip()):
        return None
    return refused_kernel(value.strip(), OWN_KERNELS.get(table, ATTENTION_KERNELS))


def find_key(known: KeyTable, key: str) -> tuple[str, str, Key | None]:
    """Return the section, the name and the table's row of a key; without a name, no table has the section's keys."""
    owner, parts = "", key.split(".")
    for place, part in enumerate(parts):
        name, bracket, _ = part.partition("[")
        found = known.find(owner, name)
        if found is None or place == len(parts) - 1:
            is_item = bool(bracket) and found is not None  # an item of a list is compared with its own table
            return owner, name, found if not is_item else Key(name)
        inner = f"{owner}.{name}".strip(".") + ("[]" if bracket else "")
        if inner not in known.owners:
            return owner, "", None
        owner = inner
    return owner, "", None


def _formatted(key: str, value: Any, is_command: bool) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"--{key} {text}" if is_command else f"{key}: {text}"
