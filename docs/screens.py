"""Pictures of the pages for the README: starts the server and keeps what headless Chromium shows of each page."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

HERE = Path(__file__).parent / "screens"
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--hide-scrollbars"]
LLAMA = {"gpus": "64xH100", "goal": "pretrain"}
BUDGET = {"gpu": "H100 H200", "goal": "pretrain", "tokens": "1T", "price": "H100=2.5,H200=3.4"}
FAST = "layout.tp=4 layout.pp=4 layout.vp=2 layout.cp=2 layout.pp_schedule=zbv layout.recompute=none"
LEAN = "layout.tp=8 layout.pp=4 layout.vp=1 layout.cp=1 layout.pp_schedule=1f1b layout.recompute=selective"
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "ask": ("/", {"model": "llama3-70b", **LLAMA}),
    "explore": ("/explore", {"target": "llama3-70b", **LLAMA, "a": FAST, "b": LEAN}),
    "scale": ("/scale", {"model": "llama3-70b", **BUDGET}),
    "check": ("/check", {}),
    "doctor": ("/doctor", {}),
    "compare": ("/compare", {}),
    "recipes": ("/recipes", {"query": "qwen3"}),
    "recipe": ("/recipes/llama3_70b_pretrain_config", {}),
    "models": ("/models", {"query": "qwen3"}),
    "gpus": ("/gpus", {}),
    "rules": ("/rules", {"query": "pipeline"}),
    "accuracy": ("/accuracy", {}),
}
TALL = {
    "ask": 1500,
    "explore": 2400,
    "scale": 1500,
    "check": 1500,
    "doctor": 1500,
    "compare": 1200,
    "recipe": 1500,
    "accuracy": 1400,
}
LARGEST = 200 << 10


def main() -> None:
    """Makes all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ask, explore, …, ask-dark, ask-phone")
    wanted = parser.parse_args().names
    from playwright.sync_api import sync_playwright

    HERE.mkdir(exist_ok=True)
    port = _free_port()
    server = subprocess.Popen([sys.executable, "-m", "meshwright", "web", "--port", str(port)])
    try:
        _until_open(port)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            for name in [*PAGES, "ask-dark", "ask-phone"]:
                if not wanted or name in wanted:
                    _picture(browser, f"http://127.0.0.1:{port}", name)
            browser.close()
    finally:
        server.terminate()
        server.wait()


def _picture(browser: Any, address: str, name: str) -> None:
    page_name, _, kind = name.partition("-")
    path, query = PAGES[page_name]
    width = 390 if kind == "phone" else 1200
    high = 2600 if kind == "phone" else TALL.get(page_name, 900)
    context = browser.new_context(
        viewport={"width": width, "height": high}, color_scheme="dark" if kind == "dark" else "light"
    )
    page = context.new_page()
    page.goto(f"{address}{path}?{urlencode(query)}", timeout=120_000)
    if page_name == "explore":
        page.wait_for_selector("#compare .pipeline", timeout=60_000)
    page.wait_for_function("() => [...document.querySelectorAll('.plot')].every((one) => one.dataset.drawn)")
    page.wait_for_timeout(700)
    to = HERE / f"{name}.png"
    page.screenshot(path=to)
    _smaller(to)
    context.close()


def _smaller(path: Path) -> None:
    """The picture in few colours, which these pages have anyway."""
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _until_open(port: int, most_s: float = 60.0) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
