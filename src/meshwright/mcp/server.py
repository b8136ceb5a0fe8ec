"""Serve the tools over the Model Context Protocol: on standard input and output, or over HTTP for this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_process
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError

from meshwright import __version__
from meshwright.api.inputs import BODY_BYTES
from meshwright.api.verbs import Verb
from meshwright.errors import InputError, OutputError, unknown
from meshwright.mcp.compact import output_schema
from meshwright.mcp.executor import Reply, failure, reply
from meshwright.mcp.tools import SECONDS, TOOLS, description, input_schema, instructions, title

WORKERS = 2  # processes
PATH = "/mcp"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Executor:
    """Runs calls in worker processes; a call that takes too long is ended with its process.

    `files` allows paths of this machine: for a client that the user started.
    """

    def __init__(self, seconds: float = SECONDS, workers: int = WORKERS, files: bool = False) -> None:
        self.seconds, self.files = seconds, files
        self.workers = anyio.CapacityLimiter(workers)
        self.warming = anyio.Lock()

    async def warm(self) -> None:
        """Start a worker and import what calls need; calls that arrive meanwhile wait for it."""
        async with self.warming:
            await self._reply("recommend", dict(TOOLS["recommend"].calls[0]))

    async def reply(self, name: str, arguments: dict[str, Any]) -> Reply:
        """Return the answer of a tool within the time limit."""
        try:
            with anyio.fail_after(self.seconds):
                async with self.warming:
                    pass
                return await self._reply(name, arguments)
        except TimeoutError:
            reason = f"took longer than the time limit of {self.seconds:g} s"
            return failure(InputError(reason, fix=("fix more of the layout with overrides", "request fewer GPUs")))
        except anyio.BrokenWorkerProcess:
            return failure(InputError("the worker process ended", fix=("try again", "request less")))

    async def _reply(self, name: str, arguments: dict[str, Any]) -> Reply:
        return await anyio.to_process.run_sync(
            reply, name, arguments, self.files, cancellable=True, limiter=self.workers
        )


def make_server(executor: Executor) -> Server[Any]:
    """Return the server with its tools."""

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool, executor.files) for tool in TOOLS.values()])

    async def call_tool(_: Any, call: types.CallToolRequestParams) -> types.CallToolResult:
        if call.name not in TOOLS:
            raise MCPError(code=types.INVALID_PARAMS, message=unknown("tool", call.name[:80], TOOLS).reason)
        return _result(await executor.reply(call.name, call.arguments or {}))

    return Server(
        "meshwright",
        version=__version__,
        title="Meshwright",
        instructions=instructions(executor.files),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=lambda name: input_schema(TOOLS[name], executor.files) if name in TOOLS else None,
    )


def _described(tool: Verb, files: bool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=title(tool),
        description=description(tool),
        input_schema=input_schema(tool, files),
        output_schema=output_schema(tool.name),
        annotations=types.ToolAnnotations(
            title=title(tool), read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )


def _result(found: Reply) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=found.text)],
        structured_content=found.answer,
        is_error=found.failed,
    )


async def _serving(serve: Callable[[Server[Any]], Awaitable[None]], files: bool) -> None:
    executor = Executor(files=files)
    async with anyio.create_task_group() as group:
        group.start_soon(_warm, executor)
        await serve(make_server(executor))
        group.cancel_scope.cancel()


async def _warm(executor: Executor) -> None:
    with suppress(anyio.BrokenWorkerProcess):  # the first call reports it
        await executor.warm()


def serve_stdio() -> None:
    """Serve on standard input and output until the input ends."""

    async def serve(server: Server[Any]) -> None:
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    try:
        anyio.run(_serving, serve, True)
    except* BrokenPipeError:  # the client is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def security(allow_hosts: Sequence[str] = ()) -> TransportSecuritySettings:
    """Return the Host and Origin names that are accepted: this machine's and those allowed (against DNS rebinding)."""
    for name in allow_hosts:
        if not name or any(mark in name for mark in "/*@ ") or not name.isprintable():
            raise InputError(
                "must be a host name as in a Host header", "allow-host", name, ("--allow-host gpu-box.lan",)
            )
    names = (*LOOPBACK, *allow_hosts)
    hosts = [host for name in names for host in (name, f"{name}:*")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts],
    )


def serve_http(host: str, port: int, allow_hosts: Sequence[str], announce: Callable[[str], None]) -> None:
    """Serve over streamable HTTP until interrupted; announce the address once it is open."""
    guard = security(allow_hosts)

    async def serve(server: Server[Any]) -> None:
        import uvicorn

        app = server.streamable_http_app(
            streamable_http_path=PATH,
            json_response=True,
            stateless_http=True,
            max_request_body_size=BODY_BYTES,
            transport_security=guard,
            host=host,
        )
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        await uvicorn.Server(config).serve(sockets=[place])

    with _bound(host, port) as place, suppress(KeyboardInterrupt):
        announce(f"http://{f'[{host}]' if ':' in host else host}:{place.getsockname()[1]}{PATH}")
        anyio.run(_serving, serve, False)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot listen: {why}", field="port", value=f"{host}:{port}", fix=("--port 0",)) from error
