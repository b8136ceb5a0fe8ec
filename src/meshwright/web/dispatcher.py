"""The desk where questions arrive: answers are remembered, equal questions asked once, and searches bounded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from meshwright.web import worker
from meshwright.web.cache import LRUCache
from meshwright.web.errors import to_error
from meshwright.web.handlers import HEAVY, side_by_side
from meshwright.web.settings import Settings

RETRY_S = 2
STARTED_S = 60.0  # until a fresh worker has imported everything and answers
MAY_BE_EMPTY = ("seq", "tokens", "query", "family", "framework")
"""A form's field that nobody filled in."""
SMALLER = ("fix part of the layout, such as layout.tp=8", "ask for fewer GPUs")
Question = tuple[str, dict[str, Any], dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """An answer as it goes out: status, JSON text and its tag."""

    status: int
    body: bytes
    lasts: bool = False  # the same question has the same answer

    @property
    def ok(self) -> bool:
        """Whether the question was understood."""
        return self.status == 200

    @property
    def size(self) -> int:
        """Bytes that it takes to remember."""
        return len(self.body)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The answer as an object; do not change it, others get the same."""
        found: dict[str, Any] = msgspec.json.decode(self.body)
        return found

    @cached_property
    def tag(self) -> str:
        """What changes when the answer does."""
        return f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'


@dataclass
class PendingRequest:
    """A question that is not answered yet, and how many wait for its answer."""

    task: asyncio.Task[Reply]
    askers: int = 0
    begun: bool = False


class Dispatcher:
    """Takes questions; answers them from memory or by one of its workers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.remembered: LRUCache[bytes, Reply] = LRUCache(settings.remembered)
        self.asked: dict[bytes, PendingRequest] = {}
        self.workers = [Worker() for _ in range(settings.workers)]
        self.idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for one in self.workers:
            self.idle.put_nowait(one)
        self.heavy = asyncio.Semaphore(max(1, settings.workers - 1))
        self.ahead: asyncio.Task[Any] | None = None

    async def ask(self, verb: str, asked: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> Reply:
        """The reply to a question: 200, or an error of the 400s with its way out."""
        if verb == "scale":
            return await self._side_by_side(dict(asked), texts or {})
        question = normal(verb, asked, texts or {})
        key = hashlib.blake2b(msgspec.json.encode(question, enc_hook=str, order="sorted"), digest_size=16).digest()
        found = self.remembered.get(key)
        if found is not None:
            return found
        waiting = self.asked.get(key)
        if waiting is None:
            if len(self.asked) >= self.settings.waiting:
                return _reply(
                    429, to_error("too many questions wait already", error="Busy", fix=("ask again in a moment",))
                )
            waiting = self.asked[key] = PendingRequest(asyncio.create_task(self._find(key, question)))
        return await self._answer(key, waiting)

    async def _answer(self, key: bytes, waiting: PendingRequest) -> Reply:
        """Waits with the others for an answer; a question that nobody waits for any more is not begun."""
        waiting.askers += 1
        try:
            return await asyncio.shield(waiting.task)
        finally:
            waiting.askers -= 1
            if not waiting.askers and not waiting.begun and not waiting.task.done():
                self._forget(key, waiting)
                waiting.task.cancel()

    async def _find(self, key: bytes, question: Question) -> Reply:
        waiting = self.asked[key]
        try:
            async with self.heavy if question[0] in HEAVY else contextlib.nullcontext():
                reply = await (self._by_worker(question, waiting) if self.workers else self._here(question))
            if reply.lasts:
                self.remembered.put(key, reply)
            return reply
        finally:
            self._forget(key, waiting)

    def _forget(self, key: bytes, waiting: PendingRequest) -> None:
        if self.asked.get(key) is waiting:
            del self.asked[key]

    async def _side_by_side(self, asked: dict[str, Any], texts: Mapping[str, str]) -> Reply:
        """Several GPU types: one question for each, so that each has its time and is remembered."""
        found: dict[str, dict[str, Any]] = {}
        for gpu in asked.pop("gpu"):
            reply = await self.ask("size", {**asked, "gpu": gpu}, texts)
            if not reply.ok:
                return reply
            found[gpu] = reply.data
        return _reply(200, side_by_side(found))

    async def _here(self, question: Question) -> Reply:
        status, body = await asyncio.to_thread(worker.reply, *question)
        return _reply(status, body, lasts=status != worker.FAULT)

    async def _by_worker(self, question: Question, waiting: PendingRequest) -> Reply:
        chosen = await self.idle.get()
        waiting.begun = True
        try:
            return await chosen.answer(question, self.settings.search_s)
        finally:
            self.idle.put_nowait(chosen)

    async def start(self) -> None:
        """Starts the workers, so that the first asker need not wait for imports, nor for what takes longest."""
        await asyncio.gather(*(one.started() for one in self.workers))
        if self.workers:
            self.ahead = asyncio.create_task(self.ask("accuracy", {"points": True}))

    async def close(self) -> None:
        """Ends the workers."""
        for task in (self.ahead, *(one.task for one in self.asked.values())):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(one.end() for one in self.workers))


def normal(verb: str, asked: Mapping[str, Any], texts: Mapping[str, str]) -> Question:
    """A question without what does not change its answer: empty values, and blanks around words."""
    said = {name: value.strip() if isinstance(value, str) else value for name, value in asked.items()}
    for name in ("goal", "engine", "framework", "to", "kind"):
        if isinstance(said.get(name), str):
            said[name] = said[name].lower()
    kept = {name: value for name, value in said.items() if not _says_nothing(name, value)}
    return verb, kept, dict(texts)


def _says_nothing(name: str, value: Any) -> bool:
    return value is None or value in ([], ()) or (value == "" and name in MAY_BE_EMPTY)


def _reply(status: int, body: dict[str, Any], lasts: bool = False) -> Reply:
    return Reply(status, msgspec.json.encode(body, enc_hook=str), lasts)


class Worker:
    """One process that answers, started when it is needed and again when it had to be ended."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.fresh = True

    async def started(self) -> asyncio.subprocess.Process:
        """The process, started if there is none."""
        if self.process is None or self.process.returncode is not None:
            package = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "meshwright.web.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,  # Ctrl-C is for the server, which ends its workers itself
            )  # fmt: skip
            self.fresh = True
        return self.process

    async def answer(self, question: Question, seconds: float) -> Reply:
        """The reply to a question within so many seconds; the process is ended where it takes longer."""
        process = await self.started()
        limit = seconds + (STARTED_S if self.fresh else 0)
        try:
            raw = await asyncio.wait_for(self._exchanged(process, msgspec.json.encode(question, enc_hook=str)), limit)
        except TimeoutError:
            await self.end()
            reason = f"the search took more than {seconds:g} s and was ended"
            return _reply(422, to_error(reason, error="TooLong", fix=SMALLER))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.end()
            reason = "the search ended without an answer: it needed more than one question may take"
            return _reply(422, to_error(reason, error="TooMuch", fix=SMALLER))
        except asyncio.CancelledError:
            await self.end()
            raise
        self.fresh = False
        status, body = msgspec.json.decode(raw, type=tuple[int, msgspec.Raw])
        return Reply(status, bytes(body), lasts=status != worker.FAULT)

    async def _exchanged(self, process: asyncio.subprocess.Process, sent: bytes) -> bytes:
        if process.stdin is None or process.stdout is None:
            raise ConnectionError("a worker without pipes")
        process.stdin.write(worker.LENGTH.pack(len(sent)) + sent)
        await process.stdin.drain()
        head = await process.stdout.readexactly(worker.LENGTH.size)
        return await process.stdout.readexactly(worker.LENGTH.unpack(head)[0])

    async def end(self) -> None:
        """Ends the process and waits for it."""
        process, self.process = self.process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
