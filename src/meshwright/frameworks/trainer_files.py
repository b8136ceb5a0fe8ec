"""Python files that construct a Trainer's arguments: those that export writes, and a user's program with literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file
from meshwright.frameworks.trainer_args import SAMPLE_LENGTH, WRITTEN
from meshwright.frameworks.types import SourcedValue

TRAINERS = ("TrainingArguments", "SFTConfig")
FINE_TUNES = "SFTConfig"
ADAPTERS = "LoraConfig"
QUANTIZED = "BitsAndBytesConfig"
SUFFIX = "_args.py"
_LENGTH = re.compile(rf"^{SAMPLE_LENGTH} = (\d+)", re.MULTILINE)


def file_arguments(content: Content) -> dict[str, SourcedValue]:
    """Return the keyword arguments of the Trainer, TRL and PEFT that a Python file constructs."""
    found: dict[str, SourcedValue] = {}
    for call, name in _calls(content):
        if name == ADAPTERS:
            found["use_peft"] = SourcedValue(True, call.lineno, content.path)
        for keyword in call.keywords:
            if keyword.arg is None or (name == QUANTIZED and keyword.arg != "load_in_4bit"):
                continue
            try:
                value, unresolved = ast.literal_eval(keyword.value), ""
            except ValueError:
                value, unresolved = ast.unparse(keyword.value), "it is computed by the program"
            if value is not None:
                found[keyword.arg] = SourcedValue(value, keyword.value.lineno, content.path, unresolved)
    length = _LENGTH.search(content.text) if found else None
    if length:
        line = content.text[: length.start()].count("\n") + 1
        found[SAMPLE_LENGTH] = SourcedValue(int(length[1]), line, content.path)
    return found


def fine_tunes(content: Content) -> bool:
    """Return whether a file constructs the arguments of TRL's SFTTrainer."""
    return any(name == FINE_TUNES for _, name in _calls(content))


def _calls(content: Content) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that construct arguments, with the name of the class."""
    if not any(f"{name}(" in content.text for name in TRAINERS):
        return
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in (*TRAINERS, ADAPTERS, QUANTIZED):
                yield node, name


def written_beside(content: Content) -> Content | None:
    """Return the arguments file that an export wrote with this config; None if there is none."""
    if content.folder is None:
        return None
    name, own = Path(content.path).name, module_name(Path(content.path).stem)
    for path in sorted(content.folder.glob(f"*{SUFFIX}")):
        found = open_file(path)
        if WRITTEN in found.text and (path.name == own or f'deepspeed="{name}"' in found.text):
            return found
    return None


def config_beside(content: Content) -> Path | None:
    """Return the YAML file that an export wrote with this arguments file."""
    if content.folder is None or WRITTEN not in content.text:
        return None
    own = Path(content.path).name
    return next((path for path in sorted(content.folder.glob("*.yaml")) if module_name(path.stem) == own), None)


def module_name(stem: str) -> str:
    """Return the name of the arguments file of a recipe, which is that of a module."""
    return f"{stem.replace('-', '_').replace('.', '_')}{SUFFIX}"
