"""Runs a command and turns every way it can end into the exit codes of the contract."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import click

from meshwright.api import SCHEMA
from meshwright.cli.app import app
from meshwright.errors import MeshwrightError

BAD_INPUT = 2
INTERRUPTED = 130


def run(args: list[str] | None = None) -> NoReturn:
    """Runs the command line; never ends in a traceback for a user's mistake."""
    words = sys.argv[1:] if args is None else args
    try:
        code = app.main(words, prog_name="meshwright", standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        code = _tell(error.to_dict(), str(error), words, error.exit_code)
    except BrokenPipeError:  # the reader of a pipe went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except click.Abort:  # Ctrl-C or Ctrl-D at a question
        code = INTERRUPTED
    except click.ClickException as error:
        text = error.format_message()
        details = {"kind": "UsageError", "field": "", "value": None, "message": text, "fix": ["meshwright --help"]}
        code = _tell(details, text, words, BAD_INPUT)
    sys.exit(code if isinstance(code, int) else 0)


def _tell(details: dict[str, Any], text: str, words: list[str], code: int) -> int:
    if "--json" in words:
        print(json.dumps({"schema": SCHEMA, "error": details}, indent=2))
    print(f"error: {text}", file=sys.stderr)
    fixes = [str(f) for f in details["fix"]]
    if fixes:
        print("fix:   " + " | ".join(fixes), file=sys.stderr)
    return code
