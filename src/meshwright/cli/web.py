"""The command that serves the web UI, or exports its catalogue as files."""

from __future__ import annotations

import json

import click

from meshwright import extras
from meshwright.api import SCHEMA
from meshwright.cli.answer import emit
from meshwright.cli.command import as_json, examples
from meshwright.cli.progress import waiting_line
from meshwright.errors import InputError

REQUIRED = ("fastapi", "uvicorn", "jinja2")


@click.command(
    epilog=examples(
        "meshwright web",
        "meshwright web --port 9000",
        "meshwright web --host 0.0.0.0 --allow-host gpu-box.example.org",
        "meshwright web --export site",
        "meshwright web --export site --plans popular --url https://example.org/plans",
        "meshwright web --export site --plans Qwen/Qwen3-8B:8xH100:sft",
    )
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes a free port.")
@click.option("--allow-host", "allow_hosts", multiple=True, metavar="NAME", help="Accept this Host header; repeat it.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Concurrent searches.")
@click.option("--hub", is_flag=True, help="Read hub ids outside the catalogue from this machine's cache or the hub.")
@click.option("--export", metavar="DIR", help="Write the catalogue as static files instead.")
@click.option(
    "--plans",
    multiple=True,
    metavar="PLAN",
    help="Export plans beside the catalogue: popular, or MODEL:GPUS:GOAL; repeat it.",
)
@click.option("--url", default="", metavar="URL", help="Address of the exported site, for link previews.")
@click.option("--docs", default="", metavar="URL", help="Link exported pages to this documentation.")
@as_json
def web(
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    workers: int,
    hub: bool,
    export: str | None,
    plans: tuple[str, ...],
    url: str,
    docs: str,
    as_json: bool,
) -> None:
    """Serve the web UI and the HTTP API (under /api).

    Only this machine can connect unless --host and --allow-host allow more: there are no accounts, and everybody who
    reaches the server may use it. Pages load nothing from other sites.
    """
    extras.require("web", *REQUIRED)
    if export is not None:
        _export(export, plans, url, docs, as_json)
        return
    for name, value in (("plans", plans), ("url", url), ("docs", docs)):
        if value:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise InputError("is for --export, which writes files", field=name, value=shown, fix=("--export site",))
    from meshwright.web.serve import serve
    from meshwright.web.settings import Settings

    def announce(address: str) -> None:
        line = json.dumps({"schema": SCHEMA, "address": address})
        print(line if as_json else f"Serving Meshwright at {address} (Ctrl-C to stop)", flush=True)

    serve(Settings(host=host, port=port, allow_hosts=allow_hosts, hub=hub, workers=workers), announce)


def _export(folder: str, plans: tuple[str, ...], url: str, docs: str, as_json: bool) -> None:
    from meshwright.web.export import Site, export

    def log(text: str) -> None:
        click.echo(text, err=True)

    with waiting_line("export"):
        written = export(folder, Site(plans, url, docs), log)
    if as_json:
        emit({"schema": SCHEMA, "folder": folder, "files": written})
    else:
        click.echo(f"{len(written)} files in {folder}; open {folder}/index.html")
