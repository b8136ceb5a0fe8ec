"""One server and one headless Chromium for all tests here; every page is watched for errors and foreign requests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.web_budget import files_served

from meshwright.web import export as exporting

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PATIENCE_MS = 60_000
PLANS = ("deepseek-v3:64xH100:pretrain", "llama3.1-8b:8xH100:sft")  # of the static site
ABORTED = ("htmx:afterRequest", "htmx:sendAbort")  # htmx reports a request that a newer one replaces as an error


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the page is served."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        _until_open(f"http://127.0.0.1:{port}/api/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _until_open(health: str, server: subprocess.Popen[bytes], most_s: float = 60.0) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


@pytest.fixture(scope="module")  # while it is open an event loop runs here, and other tests could not run theirs
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, context: Any, address: str) -> None:
        self.address, self.wrong = address, list[str]()
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", self._requested)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(ABORTED):
            self.wrong.append(f"{message.type}: {message.text}")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.wrong.append(f"request to {request.url}")

    def open(self, path: str) -> Any:
        """Goes to a page and waits until its charts are drawn."""
        self.page.goto(self.address + path)
        self.drawn()
        return self.page

    def drawn(self) -> None:
        """Waits for all charts."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.plot')].every((one) => one.dataset.drawn === 'yes')"
        )

    def numbers(self, within: str = "body") -> dict[str, float]:
        """The numbers shown, by the field of the answer that each is."""
        return dict(
            self.page.eval_on_selector_all(
                f"{within} data[data-of]", "all => all.map((one) => [one.dataset.of, Number(one.value)])"
            )
        )


@pytest.fixture
def watched(browser: Any, address: str) -> Iterator[Watched]:
    """A fresh page on which nothing may go wrong."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
    made = Watched(context, address)
    yield made
    context.close()
    assert made.wrong == []


@pytest.fixture
def meshwright(cli: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The JSON object of `meshwright WORDS… --json`; the page is answered by the server's own process."""
    return cli


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core, which judges a page's accessibility."""
    return (Path(__file__).parent / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site with two plans and no catalogue."""
    place = tmp_path_factory.mktemp("static") / "site"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exporting, "_pages", lambda catalogue: iter(()))
        # Playwright's event loop runs in this thread.
        with ThreadPoolExecutor(1) as apart:
            apart.submit(exporting.export, str(place), exporting.Site(PLANS)).result()
    with files_served(place) as address:
        yield address
