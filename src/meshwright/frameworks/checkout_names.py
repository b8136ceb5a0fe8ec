"""Names in a torchtitan file that its checkout does not define, and that are one of its names with a wrong letter.

A fork registers models and config classes that our tables do not have. What no source of the checkout defines cannot
be meant; a slip of a name that it does define is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from meshwright import similar
from meshwright.frameworks.checkout import SHORT, Names, checkout_root, names_of
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.types import Settings
from meshwright.rules.rule import Finding

TITAN, CONFIG = "torchtitan", "Config"
MODEL_NAMES = ("model.name", "model.flavor")
MODEL_RULE, KEY_RULE = "torchtitan.model-name", "key.unknown"


def misspelled_names(
    framework: Framework, content: Content, settings: Settings, findings: Sequence[Finding]
) -> Iterator[Finding]:
    """Yield the misspelled model names and keywords of a file in a checkout that no finding is about."""
    root = checkout_root(framework.name, content.folder) if framework.name == TITAN else None
    if root is None:
        return
    names = names_of(framework.name, root)
    reported = {one.field for one in findings if one.rule == MODEL_RULE}
    yield from (one for one in _models(settings, names) if one.field not in reported)
    if content.format == "python":
        seen = {one.line for one in findings if one.rule == KEY_RULE}
        yield from (one for one in _keywords(content, names) if one.line not in seen)


def _models(settings: Settings, names: Names) -> Iterator[Finding]:
    """Yield model names and flavors that no source has as a text."""
    for key in MODEL_NAMES:
        setting = settings.get(key)
        if setting is None or setting.unresolved or not isinstance(setting.value, str):
            continue
        meant = _meant(setting.value, names.texts)
        if meant:
            message = f"this checkout has no {key} {setting.value}; did you mean {meant}?"
            yield Finding(
                MODEL_RULE, "error", key, message, (f'{key} = "{meant}"',), file=setting.file, line=setting.line
            )


def _keywords(content: Content, names: Names) -> Iterator[Finding]:
    """Yield keywords of config classes that no source defines."""
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(CONFIG):
            continue
        for keyword in node.keywords:
            meant = _meant(keyword.arg or "", [one for one in names.keys if len(one) > SHORT])
            if meant:
                message = f"no class of this checkout has {keyword.arg}; did you mean {meant}?"
                line = keyword.value.lineno
                yield Finding(KEY_RULE, "error", keyword.arg or "", message, (f"{meant}=…",), content.path, line)


def _meant(name: str, known: Collection[str]) -> str:
    """Return the known name of which a name is a slip; empty if it is known, or like none."""
    if not name or name in known:
        return ""
    return min((one for one in known if similar.is_slip(name, one)), default="")
