"""LLaMA-Factory's chat templates: their names, and the one that belongs to a model.

A template writes markers around messages, such as <start_of_turn> of Gemma. The markers of another family are not in
the tokenizer of a model: they become plain text, and the model learns a format that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from meshwright.frameworks.model_match import QUANTIZED
from meshwright.frameworks.types import Settings
from meshwright.rules.rule import Finding, Severity
from meshwright.similar import closest

RULE = "data.template-of-another-family"
TEMPLATE, MODEL, STAGE = "template", "model_name_or_path", "stage"
TITLE = "LLaMA-Factory"
META = "meta-"
REMOVED = (
    "aquila", "atom", "baichuan", "baichuan2", "belle", "bluelm", "chatglm2", "codegeex2", "codegeex4", "cpm", "cpm3",
    "intern", "marco", "orion", "skywork_o1", "telechat", "xverse", "yayi", "ziya",
)  # fmt: skip
"""Templates of versions before 0.9.4."""


FAMILIES = (("gemma4", "gemma4"), ("gemma", "gemma3"), ("llama3", "llama3"), ("qwen", "qwen3"), ("phi_3", "phi"),
    ("phi3", "phi"))  # fmt: skip
"""How the names of templates start in other front ends, and the template here with the same markers."""


class ChatTemplate(msgspec.Struct, frozen=True):
    """A template of LLaMA-Factory's source."""

    markers: tuple[str, ...]  # around a user's message; without any it is plain text for every model
    models: frozenset[str]  # names of chat models whose template it is


@cache
def templates() -> dict[str, ChatTemplate]:
    """Return the templates by name."""
    lines = Path(__file__).with_name("llama_factory_templates.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = (line.split("\t") for line in lines)
    return {name: ChatTemplate(tuple(markers.split()), frozenset(models.split())) for name, markers, models in rows}


def templates_of(model: str) -> tuple[str, ...]:
    """Return the templates of a chat model, by its name on the hub or its folder; empty for others.

    The hub has Llama 3 and 3.1 with and without the prefix Meta-, and weights in 4 bits under a longer name.
    """
    name = QUANTIZED.sub("", model.rstrip("/").rpartition("/")[2].lower()).removeprefix(META)
    return tuple(key for key, one in templates().items() if {name, META + name} & one.models)


def unknown_markers(template: str, model: str) -> str:
    """Return the markers that a template of another front end writes and a chat model reads as plain text.

    Empty if it has them. chatml is written for models of every family, whose tokenizer then gets its markers.
    """
    name = next((ours for start, ours in FAMILIES if template.startswith(start)), "")
    own = templates_of(model)
    if not name or not own:
        return ""
    markers = templates()[name].markers
    return "" if {*markers} & {marker for one in own for marker in templates()[one].markers} else " ".join(markers)


def foreign_template(settings: Settings, key: str, model: str, fix: str, shown: str) -> Iterator[Finding]:
    """Yield the template of another family than the model's, by the keys of another front end."""
    setting, named = settings.get(key), settings.get(model)
    if setting is None or named is None or setting.unresolved or named.unresolved:
        return
    if markers := unknown_markers(str(setting.value), str(named.value)):
        message = f"{shown} writes {markers}, which {named.value} reads as plain text"
        yield Finding(RULE, "warning", key, message, (fix,), setting.file, setting.line)


def template_findings(settings: Settings, is_command: bool) -> Iterator[Finding]:
    """Yield a template that does not exist, or one whose markers the model does not know."""
    setting, model = settings.get(TEMPLATE), settings.get(MODEL)
    if setting is None or setting.unresolved or setting.value in (None, ""):
        return
    name, shown = str(setting.value), f"--{TEMPLATE}" if is_command else TEMPLATE
    named = "" if model is None or model.unresolved else str(model.value)
    own = templates_of(named)
    written = f"{shown} " if is_command else f"{shown}: "
    if name not in templates():
        if name in REMOVED:
            message = f"{shown}: {name}: {TITLE} has no such template since version 0.9.4; older versions have it"
            yield Finding("value.invalid", "warning", TEMPLATE, message, (), setting.file, setting.line)
            return
        similar = tuple(closest(name, templates(), 1))
        near = similar or own[:1]
        hint = f"; that of {named} is {own[0]}" if own else "; another version may have it"
        hint = f"; did you mean {similar[0]}?" if similar else hint
        message = f"{shown}: {name}: {TITLE} has no such template{hint}"
        severity: Severity = "error" if near else "warning"
        fix = tuple(f"{written}{one}" for one in near)
        yield Finding("value.invalid", severity, TEMPLATE, message, fix, setting.file, setting.line)
        return
    stage = settings.get(STAGE)
    markers, known = templates()[name].markers, {marker for one in own for marker in templates()[one].markers}
    if not own or not markers or known & {*markers} or (stage is not None and stage.value == "pt"):
        return
    unknown = " ".join(markers)
    message = f"{shown}: {name} writes {unknown}, which {named} reads as plain text: its template is {own[0]}"
    yield Finding(RULE, "warning", TEMPLATE, message, (f"{written}{own[0]}",), setting.file, setting.line)
