"""The command that serves the page, or writes its catalogue pages to a folder."""

from __future__ import annotations

import json
from importlib.util import find_spec

import click

from meshwright.api import SCHEMA
from meshwright.cli.options import as_json, emit, examples, options
from meshwright.errors import InputError

NEEDED = ("fastapi", "uvicorn", "jinja2")


@click.command(
    epilog=examples(
        "meshwright web",
        "meshwright web --port 9000",
        "meshwright web --host 0.0.0.0 --allow-host gpu-box.example.org",
        "meshwright web --export site",
    )
)
@options(
    click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, metavar="P", help="0 is any free one."
    ),
    click.option(
        "--allow-host",
        "allow_hosts",
        multiple=True,
        metavar="NAME",
        help="Another name that browsers may call this server by; may be repeated.",
    ),
    click.option(
        "--workers", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Searches at once."
    ),
    click.option("--export", metavar="DIR", help="Write the catalogue pages there instead, for any static host."),
    as_json,
)
def web(host: str, port: int, allow_hosts: tuple[str, ...], workers: int, export: str | None, as_json: bool) -> None:
    """The page: ask, explore, scale, check, and look things up; with a JSON API under /api.

    Only this machine is answered unless --host and --allow-host say otherwise: there are no accounts, and everybody who
    reaches the page may use it. No page loads anything from elsewhere.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"the page needs {', '.join(missing)}", field="web", fix=('pip install "meshwright[web]"',))
    if export is not None:
        _export(export, as_json)
        return
    from meshwright.web.serve import serve
    from meshwright.web.settings import Settings

    def say(address: str) -> None:
        told = {"schema": SCHEMA, "address": address}
        print(json.dumps(told) if as_json else f"Meshwright is at {address} (Ctrl-C ends it)", flush=True)

    serve(Settings(host=host, port=port, allow_hosts=allow_hosts, workers=workers), say)


def _export(folder: str, as_json: bool) -> None:
    from meshwright.web.export import export

    written = export(folder)
    if as_json:
        emit({"schema": SCHEMA, "folder": folder, "files": written})
    else:
        click.echo(f"{len(written)} files in {folder}; open {folder}/index.html")
