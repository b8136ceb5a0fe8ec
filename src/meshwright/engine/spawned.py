"""Spawned processes that do not run the user's script again.

Python's spawn imports the script that was started in every child, which repeats all of a script without
`if __name__ == "__main__":`. The functions of the engine are imported by name and do not need it. No torch here:
worker processes of the tokenizer import this module.
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from meshwright.errors import InputError, first_line

MAIN = "__main__"
GUARD = f'if __name__ == "{MAIN}":'


class _Process(SpawnProcess):
    """A spawned process that does not import the script."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        with _no_script():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


def spawn_context(sent: object = None) -> BaseContext:
    """Return the context that starts processes which receive `sent`.

    Only functions and classes of the script itself need the script in the child: then it must have a main guard.
    """
    names = _names_of_script(sent)
    if not names:
        return _Context()
    if not _has_guard():
        reason = f"is defined in the script, which every rank would run again: the script has no line {GUARD}"
        fix = (f"put the calls under {GUARD}", f"move {names[0]} to a module and import it")
        raise InputError(reason, field=", ".join(names), fix=fix)
    return get_context("spawn")


@contextmanager
def _no_script() -> Iterator[None]:
    """Hide the script from multiprocessing, which tells a child to import what is __main__ here."""
    script = sys.modules[MAIN]
    sys.modules[MAIN] = ModuleType(MAIN)
    try:
        yield
    finally:
        sys.modules[MAIN] = script


def _names_of_script(sent: object) -> list[str]:
    """Return the functions and classes of the script that are sent; raise if something cannot be sent at all."""
    names: list[str] = []

    class Pickler(ForkingPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType | type) and obj.__module__ == MAIN:
                names.append(obj.__qualname__)
            return NotImplemented

    try:
        Pickler(io.BytesIO()).dump(sent)
    except Exception as error:
        reason = f"cannot be sent to another process: {first_line(error)}"
        raise InputError(reason, fix=("define it at the top of a module and import it",)) from error
    return list(dict.fromkeys(names))


def _has_guard() -> bool:
    """Whether the script calls nothing of its own when it is imported under another name."""
    path = getattr(sys.modules[MAIN], "__file__", None)
    try:
        body = ast.parse(Path(path).read_bytes()).body if path else []
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(one, ast.If) and "__name__" in ast.dump(one.test) for one in body)
