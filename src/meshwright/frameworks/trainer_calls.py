"""Programs of the Trainer: whether a file is one, and its calls that state arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file
from meshwright.frameworks.trainer_args import PROGRAM, WRITTEN
from meshwright.frameworks.trainer_fields import LOADED_BY_TRL

TRAINER = "Trainer"
TRAINERS = ("TrainingArguments", "SFTConfig", "SFTTrainer")
FINE_TUNES = "SFTConfig"
ADAPTERS = "LoraConfig"
QUANTIZED = "BitsAndBytesConfig"
LOADED, ADAPTED, DATASET, COLLATOR, HELD_OUT, EARLY_STOP = (
    "from_pretrained",
    "get_peft_model",
    "load_dataset",
    "DataCollatorForLanguageModeling",
    "train_test_split",
    "EarlyStoppingCallback",
)
MODEL_CLASSES = ("Model", "ForCausalLM")  # of from_pretrained: processors have one too
TOKENIZER_CLASS, CONFIG_CLASS = "Tokenizer", "AutoConfig"
OF_CLASS = {TOKENIZER_CLASS: "tokenizer_name_or_path", CONFIG_CLASS: "config_name"}
"""Arguments of commands that the first argument of from_pretrained is, by its class."""
MODEL_OF = ("SFTTrainer",)
ANSWERS = "train_on_responses_only"  # Unsloth's function that masks everything but the answers
KNOWN_CALLS = (
    *TRAINERS, ADAPTERS, QUANTIZED, *OF_CLASS, *MODEL_OF, ANSWERS, LOADED, ADAPTED, DATASET, COLLATOR, HELD_OUT,
    EARLY_STOP,
)  # fmt: skip
SUFFIX = "_args.py"


def other_half(content: Content) -> Content | None:
    """Return the program of an exported file of arguments, or the arguments that an exported program imports."""
    if content.folder is None or WRITTEN not in content.text:
        return None
    name = Path(content.path).name
    if name == PROGRAM:
        imported = re.search(r"^from (\w+_args) import", content.text, re.MULTILINE)
        path = content.folder / f"{imported[1]}.py" if imported else None
        return open_file(path) if path is not None and path.is_file() else None
    program = content.folder / PROGRAM
    if not name.endswith(SUFFIX) or not program.is_file():
        return None
    found = open_file(program)
    return found if WRITTEN in found.text and f"from {Path(name).stem} import" in found.text else None


UNSLOTH = re.compile(r"^\s*(?:from|import) unsloth\b", re.MULTILINE)


def uses_trl(content: Content) -> bool:
    """Return whether a file constructs TRL's SFTTrainer or its arguments."""
    halves = (content, other_half(content))
    trees = [trainer_tree(one) for one in halves if one is not None]
    return any(name in (FINE_TUNES, *MODEL_OF) for tree in trees if tree is not None for _, name in calls_of(tree))


def uses_unsloth(content: Content) -> bool:
    """Return whether a Python file imports Unsloth, which replaces layers and checkpointing by its own."""
    return UNSLOTH.search(content.text) is not None


def trainer_tree(content: Content) -> ast.Module | None:
    """Return the syntax of a file that constructs arguments of a Trainer; None for others."""
    if not any(f"{name}(" in content.text for name in (*TRAINERS, TRAINER)):
        return None
    try:
        return ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def calls_of(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that state arguments, in the order of the file, with the name that says what they are."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name == LOADED:
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if not any(word in owner for word in MODEL_CLASSES):
                name = next((one for one in OF_CLASS if one in owner), "")
        if name in KNOWN_CALLS:
            yield node, name


def load_options(call: ast.Call, constants: Mapping[str, ast.expr]) -> list[tuple[str, ast.expr]]:
    """Return the arguments of from_pretrained that TRL passes on for a model that it gets by name.

    The name is empty for a dictionary that the program has elsewhere.
    """
    node = next((word.value for word in call.keywords if word.arg == LOADED_BY_TRL), None)
    return [] if node is None else items_of(node, constants)


def items_of(node: ast.expr, constants: Mapping[str, ast.expr]) -> list[tuple[str, ast.expr]]:
    """Return the keys and values of a dictionary that a program writes; the key is empty for what it has elsewhere."""
    node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.Constant):  # None
        return []
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(str(getattr(key, "value", "")), one) for key, one in pairs]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        return [(word.arg or "", word.value) for word in node.keywords]
    return [("", node)]
