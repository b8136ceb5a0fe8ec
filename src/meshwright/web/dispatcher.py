"""The dispatcher: replies are cached, equal requests run once, and searches are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meshwright import api, stages
from meshwright.api.inputs import Request, fields_of, read
from meshwright.api.verbs import VERBS
from meshwright.errors import MeshwrightError
from meshwright.version import SCHEMA
from meshwright.web import worker
from meshwright.web.cache import LRUCache, Reply
from meshwright.web.errors import error_of, to_error
from meshwright.web.settings import Settings

START_S = 60.0  # until a new worker has imported everything
SMALLER = ("fix part of the layout, such as layout.tp=8", "request fewer GPUs")
Call = tuple[str, dict[str, Any], dict[str, str]]  # verb, fields that differ from their default, texts by file name


@dataclass
class PendingRequest:
    """A request without a reply yet, and how many clients wait for it."""

    task: asyncio.Task[Reply]
    call: Call
    clients: int = 0
    started: bool = False
    stage: str = ""  # what the search is doing

    def show(self, stage: str) -> None:
        """Keep what the search is doing."""
        self.stage = stage


class Dispatcher:
    """Takes requests; replies from the cache or from one of its workers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = LRUCache(settings.cache_entries)
        self.pending: dict[bytes, PendingRequest] = {}
        self.workers = [Worker() for _ in range(settings.workers)]
        self.idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for one in self.workers:
            self.idle.put_nowait(one)
        self.slow = asyncio.Semaphore(max(1, settings.workers - 1))
        self.prefetch: asyncio.Task[Any] | None = None

    async def ask(self, verb: str, arguments: Mapping[str, Any], *, texts: bool = True, strings: bool = True) -> Reply:
        """Return the reply to a request: 200, or an error of the 400s with its fix.

        `texts` and `strings` are those of `inputs.read`.
        """
        try:
            request, files = read(VERBS[verb].request, _stripped(verb, arguments), "http", texts=texts, strings=strings)
        except MeshwrightError as error:
            return _reply(worker.BAD_REQUEST, error_of(error))
        if self.settings.hub:
            files = {**files, **await asyncio.to_thread(api.hub_texts, request)}
        if verb == "scale":
            return await self._scale(request, files)
        return await self._cached((verb, _given(request), files))

    def stage_of(self, verb: str, arguments: Mapping[str, Any]) -> str:
        """Return what the search of a pending request is doing; empty if it is not pending or has not begun."""
        try:
            request, _ = read(VERBS[verb].request, _stripped(verb, arguments), "http")
        except MeshwrightError:
            return ""
        if verb != "scale":
            return self._stage(verb, _given(request))
        given = _given(request)
        found = ((gpu, self._stage("size", {**given, "gpu": gpu})) for gpu in given["gpu"])
        return next((f"{gpu}: {stage.removeprefix('size: ')}" for gpu, stage in found if stage), "")

    def _stage(self, verb: str, given: dict[str, Any]) -> str:
        """Return the stage of a pending request by its fields: its texts may come from the hub, not from the client."""
        return next((one.stage for one in self.pending.values() if one.call[:2] == (verb, given)), "")

    async def _cached(self, call: Call) -> Reply:
        key = _key(call)
        found = self.cache.get(key)
        if found is not None:
            return found
        waiting = self.pending.get(key)
        if waiting is None:
            if len(self.pending) >= self.settings.max_pending:
                return _reply(429, to_error("too many pending requests", kind="Busy", fix=("try again in a moment",)))
            waiting = self.pending[key] = PendingRequest(asyncio.create_task(self._find(key, call)), call)
        return await self._wait(key, waiting)

    async def _wait(self, key: bytes, waiting: PendingRequest) -> Reply:
        """Wait with the other clients; a request that all of them left is not started."""
        waiting.clients += 1
        try:
            return await asyncio.shield(waiting.task)
        finally:
            waiting.clients -= 1
            if not waiting.clients and not waiting.started and not waiting.task.done():
                self._forget(key, waiting)
                waiting.task.cancel()

    async def _find(self, key: bytes, call: Call) -> Reply:
        waiting = self.pending[key]
        try:
            async with self.slow if VERBS[call[0]].slow else contextlib.nullcontext():
                reply = await (self._by_worker(call, waiting) if self.workers else self._here(call, waiting))
            if reply.cacheable and not VERBS[call[0]].private:
                self.cache.put(key, reply)
            return reply
        finally:
            self._forget(key, waiting)

    def _forget(self, key: bytes, waiting: PendingRequest) -> None:
        if self.pending.get(key) is waiting:
            del self.pending[key]

    async def _scale(self, request: Any, files: dict[str, str]) -> Reply:
        """Size several GPU types, each as a request of its own: each has its time limit and its cache entry."""
        series = []
        for gpu in request.gpu:
            reply = await self._cached(("size", {**_given(request), "gpu": gpu}, files))
            if not reply.ok:
                return reply
            series.append({"gpu": gpu, **{name: value for name, value in reply.data.items() if name != "schema"}})
        return _reply(200, {"schema": SCHEMA, "series": series}, cacheable=True)

    async def _here(self, call: Call, waiting: PendingRequest) -> Reply:
        with stages.listening(waiting.show):
            status, body = await asyncio.to_thread(worker.reply, *call)
        return _reply(status, body, cacheable=status != worker.INTERNAL_ERROR)

    async def _by_worker(self, call: Call, waiting: PendingRequest) -> Reply:
        chosen = await self.idle.get()
        waiting.started = True
        try:
            return await chosen.answer(call, self.settings.time_limit_s, waiting.show)
        finally:
            self.idle.put_nowait(chosen)

    async def start(self) -> None:
        """Start the workers, and compute what takes longest before a client asks for it."""
        await asyncio.gather(*(one.started() for one in self.workers))
        if self.workers:
            self.prefetch = asyncio.create_task(self.ask("accuracy", {"points": True}))

    async def close(self) -> None:
        """End the workers."""
        for task in (self.prefetch, *(one.task for one in self.pending.values())):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(one.end() for one in self.workers))


def _key(call: Call) -> bytes:
    """Return what equal requests share."""
    return hashlib.blake2b(msgspec.json.encode(call, enc_hook=str, order="sorted"), digest_size=16).digest()


def _stripped(verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without surrounding spaces, and without empty values of optional fields."""
    fields = {field.name: field for field in fields_of(VERBS[verb].request)}
    kept = {}
    for name, value in arguments.items():
        field = fields.get(name)
        if field is not None and isinstance(value, str):
            value = value.strip()
        if field is None or field.required or value not in ("", [], ()):
            kept[name] = value
    return kept


def _given(request: Request) -> dict[str, Any]:
    """Return the fields that differ from their default."""
    fields = {field.name: getattr(request, field.name) for field in fields_of(type(request))}
    defaults = {field.name: field.python_default for field in fields_of(type(request)) if not field.required}
    return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}


def _reply(status: int, body: Any, cacheable: bool = False) -> Reply:
    return Reply(status, msgspec.json.encode(body, enc_hook=str), cacheable)


class Worker:
    """One worker process, started on first use and again after it had to be killed."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.fresh = True

    async def started(self) -> asyncio.subprocess.Process:
        """Return the process, started if there is none."""
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

    async def answer(self, call: Call, seconds: float, show: Callable[[str], None]) -> Reply:
        """Return the reply within a time limit, and show its stages; kill the process if it takes longer."""
        process = await self.started()
        limit = seconds + (START_S if self.fresh else 0)
        try:
            sent = msgspec.json.encode(call, enc_hook=str)
            status, body = await asyncio.wait_for(self._exchange(process, sent, show), limit)
        except TimeoutError:
            await self.end()
            reason = f"the search exceeded the time limit of {seconds:g} s"
            return _reply(worker.BAD_REQUEST, to_error(reason, kind="TooLong", fix=SMALLER))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.end()
            reason = "the search ended without a result: it needed more memory than one request may use"
            return _reply(worker.BAD_REQUEST, to_error(reason, kind="TooMuch", fix=SMALLER))
        except asyncio.CancelledError:
            await self.end()
            raise
        self.fresh = False
        return Reply(status, bytes(body), cacheable=status != worker.INTERNAL_ERROR)

    async def _exchange(
        self, process: asyncio.subprocess.Process, sent: bytes, show: Callable[[str], None]
    ) -> tuple[int, msgspec.Raw]:
        if process.stdin is None or process.stdout is None:
            raise ConnectionError("a worker without pipes")
        process.stdin.write(worker.LENGTH.pack(len(sent)) + sent)
        await process.stdin.drain()
        while True:
            head = await process.stdout.readexactly(worker.LENGTH.size)
            raw = await process.stdout.readexactly(worker.LENGTH.unpack(head)[0])
            status, body = msgspec.json.decode(raw, type=tuple[int, msgspec.Raw])
            if status != worker.STAGE:
                return status, body
            show(msgspec.json.decode(body, type=str))

    async def end(self) -> None:
        """Kill the process and wait for it."""
        process, self.process = self.process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
