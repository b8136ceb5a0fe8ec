"""Runs a command and turns every way it can end into the exit codes of the contract."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any, NoReturn, TextIO

import click

from meshwright.api import SCHEMA
from meshwright.cli.app import app
from meshwright.errors import MeshwrightError

BAD_INPUT = 2
OUTPUT_FAILED = 3
INTERRUPTED = 130


def run(args: list[str] | None = None) -> NoReturn:
    """Runs the command line; never ends in a traceback for a user's mistake or an output that fails."""
    words = sys.argv[1:] if args is None else args
    for stream in (sys.stdout, sys.stderr):
        _replace_what_cannot_be_shown(stream)
    if sys.stdout is None:
        _complain("the answer cannot be written: standard output is closed")
        sys.exit(OUTPUT_FAILED)
    output = sys.stdout
    try:
        code = _answer(words)
        sys.stdout.flush()
    except OSError as error:
        # With a name it is about a file of the command's own, without about the output.
        code = _file_failed(error, words) if error.filename is not None else _output_failed(error)
    except SystemExit as ended:  # when the reader of a pipe goes away, click swaps stdout and leaves; rich just leaves
        gone = sys.stdout is not output or isinstance(ended.__context__, BrokenPipeError)
        code = _output_failed(BrokenPipeError()) if gone else ended.code
    sys.exit(code if isinstance(code, int) else 0)


def _answer(words: list[str]) -> Any:
    """Runs a command; the exit code of however it ends."""
    try:
        return app.main(words, prog_name="meshwright", standalone_mode=False)
    except MeshwrightError as error:
        return _tell(error.to_dict(), str(error), words, error.exit_code)
    except (KeyboardInterrupt, click.Abort):  # Ctrl-C, also with Ctrl-D at a question
        return INTERRUPTED
    except click.ClickException as error:
        text = error.format_message()
        details = {"kind": "UsageError", "field": "", "value": None, "message": text, "fix": ["meshwright --help"]}
        return _tell(details, text, words, BAD_INPUT)


def _tell(details: dict[str, Any], text: str, words: list[str], code: int) -> int:
    _complain(text, [str(f) for f in details["fix"]])
    if "--json" in words:
        print(json.dumps({"schema": SCHEMA, "error": details}, indent=2))
    return code


def _complain(text: str, fixes: list[str] | None = None) -> None:
    """The error and its way out on stderr, where there is one."""
    if sys.stderr is None:  # print would take stdout then
        return
    try:
        print(f"error: {text}", file=sys.stderr)
        if fixes:
            print("fix:   " + " | ".join(fixes), file=sys.stderr)
    except OSError:  # nobody listens; the exit code still tells
        _discard(sys.stderr)


def _file_failed(error: OSError, words: list[str]) -> int:
    text = f"{error.filename}: {error.strerror}"
    details = {"kind": type(error).__name__, "field": "", "value": str(error.filename), "message": text, "fix": []}
    return _tell(details, text, words, OUTPUT_FAILED)


def _output_failed(error: OSError) -> int:
    """A reader that has enough, as with `| head`, is fine; a full disk is not."""
    _discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    _complain(f"the answer cannot be written: {error.strerror or error}")
    return OUTPUT_FAILED


def _discard(stream: TextIO) -> None:
    """Sends the rest of a stream nowhere: the interpreter flushes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_what_cannot_be_shown(stream: TextIO | None) -> None:
    """An encoding without our characters shows question marks in their place."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
