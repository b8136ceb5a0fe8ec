"""A process that answers requests one after the other and may open nothing but this package's data.

    python -m meshwright.web.worker

Requests arrive on standard input and replies leave on standard output, each as four bytes of length and then JSON: a
request is [verb, fields, texts], a reply [status, object]. Before its reply, a long search sends [0, stage] for every
stage that it names, at most a few per second. A search that takes too long is ended by killing its
process, which is not possible with a thread.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshwright import api, file_access, stages
from meshwright.api.inputs import remote_fixes
from meshwright.api.verbs import VERBS
from meshwright.errors import MeshwrightError
from meshwright.web.errors import error_of, to_error

LENGTH = struct.Struct("!I")
MEMORY_BYTES = 6 << 30
NICENESS = 5  # below the server, so that cached replies are sent at once while workers search
STAGE, BAD_REQUEST, INTERNAL_ERROR = 0, 422, 500
STAGE_EVERY_S = 0.25
WARM_UP: tuple[tuple[str, dict[str, Any]], ...] = (
    ("recommend", {"model": "llama3_8b", "gpus": "8xH100", "goal": "sft"}),
    ("complete", {"kind": "models", "query": "llama"}),
)
"""Answered at the start, so that the first client does not wait for imports."""


def reply(name: str, fields: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[int, Any]:
    """Return status and response of a validated request; the only files are the texts sent with it."""
    verb = VERBS[name]
    try:
        with file_access.only(texts):
            return 200, verb.answer(verb.request(**fields))
    except MeshwrightError as error:
        return BAD_REQUEST, error_of(error, remote_fixes(error, verb.request, fields))
    except (MemoryError, RecursionError):
        return BAD_REQUEST, to_error("needs more memory than one request may use", fix=("request less",))
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = f"internal error: {type(error).__name__}"
        return INTERNAL_ERROR, to_error(message, kind="InternalError", fix=("report it as an issue",))


def restrict_process() -> None:
    """Allow this process to open files of Python and of this package only, and to start and connect to nothing."""
    folders = tuple(f"{folder}{os.sep}" for folder in _allowed_folders())
    measurements = os.path.abspath(api.shipped_measurements())

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if _writes(args) or not (path.startswith(folders) or path == measurements):
                raise PermissionError(f"a request may not open {path}")
        elif event in FORBIDDEN or event.startswith("socket."):
            raise PermissionError(f"a request may not cause {event}")

    sys.addaudithook(audit)


FORBIDDEN = frozenset(
    ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir")
)


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _allowed_folders() -> set[str]:
    """Return the folders of Python's library, of installed packages, and of this package."""
    libraries: set[str | None] = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {os.path.abspath(place) for place in (*libraries, str(Path(__file__).resolve().parents[1])) if place}


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # not supported on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _requests(stream: BinaryIO) -> Iterator[Any]:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        yield msgspec.json.decode(stream.read(LENGTH.unpack(head)[0]))


def main() -> None:
    """Answer requests until the input ends."""
    _limit_memory()
    with suppress(AttributeError, OSError):
        os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything a library prints goes to stderr
    for name, fields in WARM_UP:
        reply(name, fields, {})
    gc.freeze()  # imported modules stay; scanning them in every collection costs a tenth of a request
    restrict_process()
    for name, fields, texts in _requests(sys.stdin.buffer):
        with stages.listening(_StageSender(out).send):
            answer = reply(name, fields, texts)
        _send(out, answer)


def _send(out: BinaryIO, message: Any) -> None:
    body = msgspec.json.encode(message, enc_hook=str)
    out.write(LENGTH.pack(len(body)) + body)
    out.flush()


class _StageSender:
    """Sends the stages of one request, not more often than a person can read them."""

    def __init__(self, out: BinaryIO) -> None:
        self.out, self.sent = out, time.monotonic()

    def send(self, text: str) -> None:
        """Send a stage if the last one is old enough."""
        now = time.monotonic()
        if now - self.sent >= STAGE_EVERY_S:
            self.sent = now
            _send(self.out, (STAGE, text))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        main()
