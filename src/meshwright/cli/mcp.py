"""The command that serves the tools for coding agents."""

from __future__ import annotations

from importlib.util import find_spec

import click

from meshwright.cli.options import as_json, emit, examples, options
from meshwright.errors import InputError

HOST, PORT = "127.0.0.1", 8766
NEEDED = ("mcp", "mcp_types")  # the second is part of the package since 2.0


@click.command(
    epilog=examples(
        "meshwright mcp",
        "meshwright mcp --http --port 8766",
        "meshwright mcp --http --host 0.0.0.0 --allow-host gpu-box.lan",
        "meshwright mcp --json",
    )
)
@options(
    click.option("--http", is_flag=True, help="Streamable HTTP instead of standard input and output."),
    click.option("--host", metavar="ADDRESS", help=f"Where HTTP listens; {HOST} by default."),
    click.option("--port", type=click.IntRange(0, 65535), help=f"{PORT} by default; 0 takes a free one."),
    click.option("--allow-host", "allow_hosts", multiple=True, metavar="NAME", help="A name requests may use for it."),
    as_json,
)
def mcp(http: bool, host: str | None, port: int | None, allow_hosts: tuple[str, ...], as_json: bool) -> None:
    """Serve the same answers as tools for coding agents (Model Context Protocol); no file is opened or written.

    HTTP listens on this machine alone, and refuses requests whose Host or Origin is another name unless it is allowed.
    --json shows the tools and their schemas instead.
    """
    if as_json:
        from meshwright.mcp import tools

        emit(tools.described())
        return
    for name, value in (("host", host), ("port", port), ("allow-host", allow_hosts or None)):
        if value is not None and not http:
            raise InputError("is for HTTP", field=name, value=value, fix=("--http",))
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError("serving tools needs the mcp package", field="mcp", fix=('pip install "meshwright[mcp]"',))
    from meshwright.mcp import server

    if http:
        server.serve_http(host or HOST, PORT if port is None else port, allow_hosts, click.echo)
    else:
        server.serve_stdio()
