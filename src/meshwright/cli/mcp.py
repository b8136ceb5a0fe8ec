"""The command that serves the tools for coding agents."""

from __future__ import annotations

import click

from meshwright import extras
from meshwright.cli.answer import emit
from meshwright.cli.command import as_json, examples
from meshwright.errors import InputError

HOST, PORT = "127.0.0.1", 8766
REQUIRED = ("mcp", "uvicorn")


@click.command(
    epilog=examples(
        "meshwright mcp",
        "meshwright mcp --http --port 8766",
        "meshwright mcp --http --host 0.0.0.0 --allow-host gpu-box.lan",
        "meshwright mcp --json",
    )
)
@click.option("--http", is_flag=True, help="Use streamable HTTP instead of standard input and output.")
@click.option("--host", metavar="ADDRESS", help=f"Address to listen on; {HOST} by default.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"{PORT} by default; 0 takes a free port.")
@click.option("--allow-host", "allow_hosts", multiple=True, metavar="NAME", help="Accept this Host header; repeat it.")
@as_json
def mcp(http: bool, host: str | None, port: int | None, allow_hosts: tuple[str, ...], as_json: bool) -> None:
    """Serve the verbs as tools for coding agents (Model Context Protocol). Nothing is run or written.

    On standard input and output, arguments may be paths of this machine; over HTTP, files are sent as text. HTTP
    listens on this machine only, and rejects requests whose Host or Origin is another name unless it is allowed.
    --json prints the tools and their schemas instead.
    """
    if as_json:
        from meshwright.mcp import tools

        emit(tools.describe())
        return
    for name, value in (("host", host), ("port", port), ("allow-host", allow_hosts or None)):
        if value is not None and not http:
            raise InputError("applies to --http only", field=name, value=value, fix=("--http",))
    extras.require("mcp", *REQUIRED)
    from meshwright.mcp import server

    if http:
        server.serve_http(host or HOST, PORT if port is None else port, allow_hosts, click.echo)
    else:
        server.serve_stdio()
