"""Programs whose trainer is a class of transformers or TRL, also if their arguments come from a parser."""

from __future__ import annotations

import ast

from meshwright.frameworks.framework import Content
from meshwright.frameworks.types import SourcedValue

PACKAGES = ("transformers", "trl", "unsloth")
TRAINER = "Trainer"
TRAINS = "train"
KINDS = ("", "Seq2Seq", "SFT", "Reward", "DPO", "KTO", "ORPO", "CPO", "GRPO", "PPO", "RLOO", "BCO", "GKD")
PARSERS = ("HfArgumentParser(", "TrlParser(")  # of a Trainer's arguments: a class of the repository is then one too


def trainer_call(content: Content) -> SourcedValue | None:
    """Return the call that constructs a trainer of transformers or TRL, or of a class derived from one; else None.

    A file that only defines such a class, without calling its train(), is no program.
    """
    if f"{TRAINER}(" not in content.text or not any(package in content.text for package in PACKAGES):
        return None
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = list(ast.walk(tree))
    parses = any(parser in content.text for parser in PARSERS)
    names = {name for node in nodes for name in _imported(node, parses)}
    names |= {one.name for one in nodes if isinstance(one, ast.ClassDef) and names & {*map(ast.unparse, one.bases)}}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if not any(isinstance(one.func, ast.Attribute) and one.func.attr == TRAINS for one in calls):
        return None
    made = min((one for one in calls if ast.unparse(one.func) in names), key=lambda one: one.lineno, default=None)
    return None if made is None else SourcedValue(ast.unparse(made.func), made.lineno, content.path)


def _imported(node: ast.AST, of_any: bool) -> list[str]:
    """Return the trainers that an import makes available, by the program's names; `of_any`: from any package."""
    if isinstance(node, ast.ImportFrom) and (of_any or (node.module or "").partition(".")[0] in PACKAGES):
        return [one.asname or one.name for one in node.names if one.name.endswith(TRAINER)]
    if isinstance(node, ast.Import):
        known = [one.asname or one.name for one in node.names if one.name in PACKAGES]
        return [f"{name}.{kind}{TRAINER}" for name in known for kind in KINDS]
    return []
