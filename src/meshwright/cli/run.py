"""Run a command and turn every way it can end into an exit code."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn, TextIO

import click

from meshwright import extras
from meshwright.cli.answer import decide, decided
from meshwright.cli.app import app
from meshwright.cli.progress import Interrupted
from meshwright.errors import MeshwrightError
from meshwright.version import SCHEMA

BAD_INPUT = 2
OUTPUT_FAILED = 3
INTERRUPTED = 130
SAVED = 75
SHOW_CURSOR = "\x1b[?25h"
START_OF_LINE = "\r\x1b[2K"


def run(args: list[str] | None = None) -> NoReturn:
    """Run the command line; bad input or a failed output never ends in a traceback."""
    arguments = sys.argv[1:] if args is None else args
    for stream in (sys.stdout, sys.stderr):
        _replace_unencodable(stream)
    if sys.stdout is None:
        _print_error("the output cannot be written: standard output is closed")
        sys.exit(OUTPUT_FAILED)
    output = sys.stdout
    decide(0)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        # An error with a file name is about a file of the command; without one it is about stdout.
        code = _file_failed(error, arguments) if error.filename is not None else _output_failed(error)
    except SystemExit as ended:  # if a pipe is closed, click replaces stdout and exits; rich just exits
        closed = sys.stdout is not output or isinstance(ended.__context__, BrokenPipeError)
        code = _output_failed(BrokenPipeError()) if closed else ended.code
    sys.exit(code if isinstance(code, int) else 0)


def _run(arguments: list[str]) -> Any:
    """Run a command and return its exit code."""
    try:
        return app.main(arguments, prog_name="meshwright", standalone_mode=False)
    except MeshwrightError as error:
        if error.exit_code in (INTERRUPTED, SAVED):
            _end_line(_stop_line(error))
            return _print_json(error.to_dict(), arguments, error.exit_code)
        return _report(error.to_dict(), error.message, arguments, error.exit_code)
    except ImportError as error:
        explained = extras.explain(error, next((word for word in arguments if not word.startswith("-")), "meshwright"))
        if explained is None:
            raise
        return _report(explained.to_dict(), explained.message, arguments, explained.exit_code)
    except Interrupted as error:
        _end_line(str(error))
        return INTERRUPTED
    except (KeyboardInterrupt, click.Abort):  # Ctrl-C, or Ctrl-D at a prompt
        _end_line("interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        from meshwright.cli.usage_errors import to_error

        found = to_error(error, arguments)
        return _report(found.to_dict() | {"kind": "UsageError"}, found.message, arguments, BAD_INPUT)


def _stop_line(error: MeshwrightError) -> str:
    """Return the line about a run that was stopped: what was saved, and how to resume."""
    if not error.fix:
        return error.message
    return f"{error.message}; {getattr(error, 'next_step', 'resume with')}: {' | '.join(error.fix)}"


def _end_line(text: str) -> None:
    """Print the last line of an interrupted command, with the cursor visible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if stream.isatty():
                stream.write(SHOW_CURSOR)
                stream.flush()
    with suppress(OSError, ValueError, AttributeError):
        print(f"{START_OF_LINE * sys.stderr.isatty()}{text}", file=sys.stderr, flush=True)


def _report(details: dict[str, Any], text: str, arguments: list[str], code: int) -> int:
    _print_error(text, [str(fix) for fix in details["fix"] if not (" " in str(fix) and str(fix) in text)])
    return _print_json(details, arguments, code)


def _print_json(details: dict[str, Any], arguments: list[str], code: int) -> int:
    of_check = arguments[:1] == ["check"] and "--format json" in " ".join(arguments).replace("=", " ")
    if "--json" in arguments or of_check:
        print(json.dumps({"schema": SCHEMA, "error": details}, indent=2))
    return code


def _print_error(text: str, fixes: list[str] | None = None) -> None:
    """Print the error and its fixes on stderr, if there is one."""
    if sys.stderr is None:  # print would take stdout then
        return
    try:
        print(f"error: {text}", file=sys.stderr)
        if fixes:
            print("fix:   " + " | ".join(fixes), file=sys.stderr)
    except OSError:  # stderr is closed; the exit code remains
        _discard(sys.stderr)


def _file_failed(error: OSError, arguments: list[str]) -> int:
    text = f"{error.filename}: {error.strerror}"
    details = {"kind": type(error).__name__, "field": "", "value": str(error.filename), "message": text, "fix": []}
    return _report(details, text, arguments, OUTPUT_FAILED)


def _output_failed(error: OSError) -> int:
    """Return the exit code: that of the answer if the reader closed the pipe, as `| head` does; 3 for a full disk."""
    _discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return decided()
    _print_error(f"the output cannot be written: {error.strerror or error}")
    return OUTPUT_FAILED


def _discard(stream: TextIO) -> None:
    """Redirect a stream to the null device: the interpreter flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unencodable(stream: TextIO | None) -> None:
    """Print question marks for characters that the encoding lacks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
