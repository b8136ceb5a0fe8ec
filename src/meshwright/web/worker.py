"""A process that answers questions one after the other, and that may open nothing but this package's own data.

    python -m meshwright.web.worker

Questions come on standard input and answers leave on standard output, each as four bytes of length and then JSON: a
question is [verb, arguments, texts], an answer [status, object]. A search that takes too long is ended with its
process, which no thread would allow.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshwright import api, file_access
from meshwright.errors import MeshwrightError
from meshwright.web.errors import to_error, told_of
from meshwright.web.handlers import answer

LENGTH = struct.Struct("!I")
MEMORY_BYTES = 6 << 30
BEHIND = 5  # in priority to the server, so that what is known already is told at once while others search
BAD_QUESTION, FAULT = 422, 500
FIRST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("recommend", {"model": "llama3_8b", "gpus": "8xH100", "goal": "sft"}),
    ("complete", {"kind": "models", "query": "llama"}),
)
"""Asked of itself, so that the first asker does not wait for imports."""


def reply(verb: str, asked: dict[str, Any], texts: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Status and object for a question; the only files are the texts that came with it."""
    try:
        with file_access.only(texts):
            return 200, answer(verb, asked)
    except MeshwrightError as error:
        return BAD_QUESTION, told_of(error)
    except (MemoryError, RecursionError):
        return BAD_QUESTION, to_error("needs more memory than one question may take", fix=("ask for less",))
    except Exception as error:
        import traceback

        traceback.print_exc()
        return FAULT, to_error(
            f"a fault of ours: {type(error).__name__}", error="Fault", fix=("report it as an issue",)
        )


def close_the_machine() -> None:
    """From here on this process opens only files of Python and of this package, and starts and reaches nothing."""
    folders = tuple(f"{place}{os.sep}" for place in _own_places())
    measurements = os.path.abspath(api.shipped_measurements())

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if _writes(args) or not (path.startswith(folders) or path == measurements):
                raise PermissionError(f"a question may not open {path}")
        elif event in FORBIDDEN or event.startswith("socket."):
            raise PermissionError(f"a question may not cause {event}")

    sys.addaudithook(watch)


FORBIDDEN = frozenset(
    ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir")
)


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _own_places() -> set[str]:
    """The folders of Python's library, of what is installed, and of this package."""
    libraries: set[str | None] = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {os.path.abspath(place) for place in (*libraries, str(Path(__file__).resolve().parents[1])) if place}


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _questions(stream: BinaryIO) -> Iterator[Any]:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        yield msgspec.json.decode(stream.read(LENGTH.unpack(head)[0]))


def main() -> None:
    """Answers until nobody asks any more."""
    _limit_memory()
    with suppress(AttributeError, OSError):
        os.nice(BEHIND)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for verb, asked in FIRST:
        reply(verb, asked, {})
    gc.freeze()  # what is loaded by now stays; looking through it again and again costs a tenth of an answer
    close_the_machine()
    for verb, asked, texts in _questions(sys.stdin.buffer):
        body = msgspec.json.encode(reply(verb, asked, texts), enc_hook=str)
        out.write(LENGTH.pack(len(body)) + body)
        out.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        main()
