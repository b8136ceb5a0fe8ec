"""Try the fixes of a config file's findings on its settings, before they are suggested."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright import config_io, file_access
from meshwright.errors import InputError
from meshwright.frameworks.applied_fixes import fixed_text
from meshwright.frameworks.framework import Content
from meshwright.frameworks.other_versions import is_rejected
from meshwright.frameworks.trainer_files import started_program
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.rules import Finding

MOST = 12  # findings whose fixes are tried; more are rare, and each costs a check
REPLACED = (
    "key.", "deepspeed.renamed", "automodel.nan-check", "automodel.rng-ignored", "torchtitan.other-version",
    "torchtitan.toml-removed", "megatron-bridge.unknown-flag", "automodel.optimizer-argument",
    "automodel.target-keyword", "automodel.key-ignored",
)  # fmt: skip
"""Rules about a key itself: the fix replaces its line."""
NOT_FOUND = "no change of this file's settings was found that resolves it"
_REMOVAL = re.compile(r"(?:without|remove) ([\w.\[\]]+)")
_DOTTED = re.compile(r"([\w.\[\]]+\.)(\w+): (.*)")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.\[\]-]*=")
_NAMED = re.compile(rf"--|{_OVERRIDE.pattern}")
_CONFIG_NAME = re.compile(r"""["']([^"'\s]+\.(?:json|ya?ml))["']""")
CONFIGS = (".json", ".yaml", ".yml")
FindingsAfter = Callable[[Content], Sequence[Finding]]


def tried_fixes(content: Content, findings: Sequence[Finding], findings_after: FindingsAfter) -> tuple[Finding, ...]:
    """Return the findings with fixes that work: all settings of a fix together, or the first that works alone.

    Advice without such a fix is left out: nothing is wrong with the settings as they are.
    """
    if not content.settings:  # a script, whose settings come from a command line
        return tuple(findings)
    errors = [one for one in findings if is_rejected(one)]
    wrong = [one for one in findings if one.severity != "advice"]
    resolving: dict[tuple[str, str], Finding] = {}
    tried = [
        _tried(content, one, wrong if one.severity == "advice" else errors, findings_after, findings, resolving)
        if one.fix
        else one
        for one in findings[:MOST]
    ]
    kept = (one for one in tried if one.severity != "advice" or one.no_fix != NOT_FOUND)
    return (*(_with_other_fix(one, resolving) for one in kept), *findings[MOST:])


def _with_other_fix(finding: Finding, resolving: Mapping[tuple[str, str], Finding]) -> Finding:
    """Return a finding whose own fix does not work with the one of another finding that resolves it too."""
    other = resolving.get((finding.rule, finding.field))
    if finding.no_fix != NOT_FOUND or other is None:
        return finding
    where = f"line {other.line}" if other.line else other.field
    return msgspec.structs.replace(finding, no_fix=f"the fix of {where} resolves it: {' '.join(other.fix)}")


def _tried(
    content: Content,
    finding: Finding,
    known: Sequence[Finding],
    findings_after: FindingsAfter,
    findings: Sequence[Finding],
    resolving: dict[tuple[str, str], Finding],
) -> Finding:
    """Return the finding with the part of its fix that works; unchanged if the fix cannot be parsed.

    `known` are the errors before the fix, of advice also the warnings: it leads to no others. `resolving` gets the
    other findings that the fix resolves too.
    """
    for fix in (finding.fix, *((one,) for one in finding.fix if len(finding.fix) > 1)):
        changed = content_with_fix(content, finding, fix)
        if changed is None:
            return finding
        try:
            after = findings_after(changed)
        except InputError:
            continue
        harmful = ("error", "warning") if finding.severity == "advice" else ("error",)
        left = {(one.rule, one.field) for one in after}
        if (finding.rule, finding.field) not in left and not _harm(
            fix, known, [one for one in after if one.severity in harmful]
        ):
            works = msgspec.structs.replace(finding, fix=fix)
            resolving.update({key: works for one in findings if (key := (one.rule, one.field)) not in left})
            return works
    return msgspec.structs.replace(finding, fix=(), no_fix=NOT_FOUND)


def _harm(fix: Sequence[str], before: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Return whether a fix leads to a new finding of these, or to one about the very settings that it changes."""
    known = {(one.rule, one.field) for one in before}
    texts = {one.message for one in before}
    names = {re.split(r"[ =:]", text)[0].rpartition(".")[2] for text in fix if not _REMOVAL.fullmatch(text)}
    changed = [one for one in after if one.message not in texts]
    return any((one.rule, one.field) not in known or _mentions(one, names) for one in changed)


def _mentions(finding: Finding, names: set[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", finding.message) for name in names if name)


def content_with_fix(content: Content, finding: Finding, fix: Sequence[str]) -> Content | None:
    """Return the file with a fix in its settings, or in the config of the finding, which it names.

    None if the fix is not written as settings.
    """
    if _is_elsewhere(content, finding):
        changed: Content | None = content
        for text in fix:
            changed = changed and with_named_file_fixed(changed, finding, text)
        return changed
    settings = with_fix(content, finding, fix)
    return None if settings is None else msgspec.structs.replace(content, settings=settings)


def _is_elsewhere(content: Content, finding: Finding) -> bool:
    """Return whether a finding is about another config than the file itself."""
    return finding.file.endswith(CONFIGS) and Path(finding.file).name != Path(content.path).name


def with_named_file_fixed(content: Content, finding: Finding, text: str) -> Content | None:
    """Return a file with a setting changed in the config that it names; None if that is not possible.

    Only checks read the changed config: it is not written.
    """
    if content.folder is None or file_access.closed():
        return None
    named = dict.fromkeys(_named_configs(content))
    names = [name for name in named if name in content.beside or (content.folder / name).is_file()]
    if finding.file.endswith(CONFIGS):
        names = [name for name in names if Path(name).name == Path(finding.file).name]
    if not names:
        return None
    name = names[0]
    before = content.beside[name] if name in content.beside else (content.folder / name).read_text("utf-8")
    fixed = fixed_text(before, name, [text])
    return None if fixed.left else msgspec.structs.replace(content, beside={**content.beside, name: fixed.text})


def _named_configs(content: Content) -> Iterator[str]:
    """Yield the configs that a file names: in its commands, its settings or its code, or in a program it starts."""
    words = [word for one in content.launches for word in (*one.args, *one.launcher_args.values())]
    for word in (*words, *content.settings.values()):
        if not word.unresolved and str(word.value).endswith(CONFIGS):
            yield str(word.value)
    programs = (started_program(content, one.program) for one in content.launches)
    for code in (content if content.format == "python" else None, *programs):
        if code is not None:
            yield from (found[1] for found in _CONFIG_NAME.finditer(code.text))


def with_fix(content: Content, finding: Finding, fix: Sequence[str]) -> Settings | None:
    """Return the settings of the file with a fix; None if the fix is not written as settings."""
    settings = dict(content.settings)
    if finding.rule.startswith(REPLACED):
        settings = _without(settings, finding.field)
    for text in fix:
        removed = _REMOVAL.fullmatch(text)
        added = {} if removed else _parsed(content, text)
        if added is None:
            return None
        for key in (removed[1],) if removed else added:
            settings = _without(settings, key)
        sections = {key.rpartition(".")[0] for key in added}  # a section replaces a value: bf16: true
        settings = {key: value for key, value in settings.items() if key not in sections} | added
    return settings


def _without(settings: Settings, key: str) -> dict[str, SourcedValue]:
    return {name: value for name, value in settings.items() if name != key and not name.startswith(f"{key}.")}


def _parsed(content: Content, text: str) -> dict[str, SourcedValue] | None:
    """Return the settings that a fix writes, e.g. `a.b: 1` or `"a": {"b": 1}`; None if it is not written as such."""
    prefix, snippet = "", f"{{{text}}}" if content.format == "json" else text
    dotted = _DOTTED.fullmatch(text) if content.format == "yaml" else None
    if dotted:
        prefix, snippet = dotted[1], f"{dotted[2]}: {dotted[3]}"
    try:
        leaves = config_io.parse_leaves(snippet, content.format, content.path)
    except InputError:
        return None
    if not leaves or "…" in text:
        return None
    values = {f"{prefix}{key}": leaf for key, leaf in leaves.items()}
    lines = {key: content.settings[key].line if key in content.settings else 0 for key in values}
    return {k: SourcedValue(v.value, lines[k], content.path, pyyaml=v.pyyaml) for k, v in values.items()}


def without_flag(args: Sequence[SourcedValue], key: str) -> tuple[SourcedValue, ...]:
    """Return a command's arguments without a flag and its values, or without KEY=VALUE."""
    kept: list[SourcedValue] = []
    values: int | None = None  # of the dropped flag so far; None: after another argument
    for one in args:
        text = str(one.value)
        override = _OVERRIDE.match(text)
        # The word after a flag is its value even if it contains =; a dotted key is always an override.
        if text.startswith("--") or (override and (values != 0 or "." in override[0])):
            is_key = _same_key(text.partition("=")[0], key)
            values = 0 if is_key and text.startswith("--") and "=" not in text else None
            if is_key:
                continue
        elif values is not None:
            values += 1
            continue
        kept.append(one)
    return tuple(kept)


def as_typed(args: Sequence[SourcedValue], key: str) -> str:
    """Return a flag or key as a command's arguments spell it; empty if they do not name it."""
    names = (str(one.value).partition("=")[0] for one in args if _NAMED.match(str(one.value)))
    return next((name for name in names if _same_key(name, key)), "")


def _same_key(one: str, other: str) -> bool:
    return one.lstrip("-+~").replace("-", "_") == other.lstrip("-+~").replace("-", "_")
