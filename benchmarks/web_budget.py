"""Measure pages of the web UI and of the static site in Chromium against a budget of speed, size and accessibility.

`python -m benchmarks.web_budget --site build/site --save` opens every page at three widths in light and dark colors.
`--lighthouse PATH` (of `npm install lighthouse`) adds Lighthouse's scores, the median of three runs.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "web_budget.json"
AXE = HERE.parent / "tests" / "web" / "e2e" / "axe.min.js"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SIZES = {1440: 900, 1280: 800, 390: 844}
THEMES = ("light", "dark")
FIRST_CONTENT_MS, ANSWER_MS = 1000, 2000
LAYOUT_SHIFT = 0.1  # "good" of Web Vitals: columns of a long table adjust while its rows arrive
TRANSFER_BYTES, CHART_BYTES = 150_000, 500_000  # of a page, compressed; with the library that draws charts
LIGHTHOUSE_LEAST = 95
TRIES = 3  # a loaded machine delays a page: its best load counts
SERVED = {
    "plan": "/",
    "plan of a question": "/?model=llama3-70b&gpus=64xH100&goal=pretrain",
    "plan that does not fit": "/?model=llama3-405b&gpus=8xH100&goal=pretrain",
    "wrong input": "/?model=lama3-70b&gpus=64xH100&goal=pretrain",
    "explore": "/explore?target=llama3-8b&gpus=16xH100&goal=pretrain",
    "scale": "/scale?model=llama3-8b&gpu=H100&goal=sft&tokens=1B&price=2.5",
    "scale, empty": "/scale",
    "check": "/check",
    "doctor": "/doctor",
    "compare": "/compare",
    "two plans": "/compare?model=llama3-8b&gpus=8xH100&goal=sft&gpus_b=8xH200",
    "glossary": "/glossary",
    "recipes": "/recipes?query=llama3",
    "recipe": "/recipes/llama3_8b_sft_config",
    "models": "/models",
    "model": "/models/llama3_8b",
    "GPUs": "/gpus",
    "GPU": "/gpus/H100",
    "rules": "/rules?query=moe",
    "rule": "/rules/batch.divides",
    "accuracy": "/accuracy",
    "not found": "/rules/nope.nope",
    "HTTP API": "/api/docs",
}
STATIC = {
    "first page": "/",
    "model's plans": "/deepseek-ai/DeepSeek-V3/",
    "plan": "/deepseek-ai/DeepSeek-V3/64xH100/pretrain/",
    "fine-tuning plan": "/meta-llama/Meta-Llama-3.1-8B/8xH100/sft/",
    "not found": "/deepseek-ai/deepseek_v3/64xh100",
}
CATALOGUE = {
    "recipes": "/recipes.html",
    "recipe": "/recipes/llama3_8b_sft_config.html",
    "models": "/models.html",
    "model": "/models/deepseek_v3.html",
    "GPUs": "/gpus.html",
    "rules": "/rules.html",
    "rule": "/rules/batch.divides.html",
    "accuracy": "/accuracy.html",
    "glossary": "/glossary.html",
}
PAGES = {"served": SERVED, "static": {**STATIC, **CATALOGUE}}
SCORED = {  # by Lighthouse, which does not measure a page with an error status
    "static": ("first page", "model's plans", "plan", "fine-tuning plan", "models", "recipe", "accuracy"),
    "served": ("plan", "explore", "scale", "check", "doctor", "compare"),
}
WATCH = """() => {
  window.seen = { shift: 0, largest: 0, moved: [] };
  new PerformanceObserver((list) => { for (const one of list.getEntries()) if (!one.hadRecentInput) {
    seen.shift += one.value;
    const nodes = (one.sources || []).map((source) => source.node).filter(Boolean);
    seen.moved.push(...nodes.map((node) => node.id || node.className || node.nodeName));
  } }).observe({ type: "layout-shift", buffered: true });
  new PerformanceObserver((list) => { for (const one of list.getEntries()) seen.largest = one.startTime; })
    .observe({ type: "largest-contentful-paint", buffered: true });
}"""
DRAWN = "() => [...document.querySelectorAll('.plot')].every((one) => one.dataset.drawn === 'yes')"
FIRST_CONTENT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
ASK_AXE = """async (rules) => {
  const wanted = rules ? { runOnly: { type: "rule", values: rules } } : { rules: { "target-size": { enabled: true } } };
  return (await axe.run(document, { resultTypes: ["violations"], ...wanted })).violations;
}"""
OF_COLOURS = ("color-contrast", "link-in-text-block")  # axe's rules that depend on the theme


@dataclass
class Load:
    """One page at one width in one theme."""

    first_content_ms: float
    largest_content_ms: float
    transfer_bytes: int
    requests: int
    layout_shift: float
    moved: list[str]
    overflow_px: int
    charts: bool
    console: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return what is over the budget."""
        most = CHART_BYTES if self.charts else TRANSFER_BYTES
        limits = (
            ("first content ms", self.first_content_ms, FIRST_CONTENT_MS),
            ("layout shift", self.layout_shift, LAYOUT_SHIFT),
            ("bytes", self.transfer_bytes, most),
            ("px of sideways scrolling", self.overflow_px, 0),
        )
        found = [f"{name}: {value:.4g}, budget {limit:,}" for name, value, limit in limits if value > limit]
        if self.layout_shift > LAYOUT_SHIFT:
            found.append(f"moved: {', '.join(self.moved)}")
        return [*found, *(f"console: {one}" for one in self.console), *self.violations]


def load(browser: Any, url: str, width: int, theme: str, axe: str, shot: Path | None = None) -> Load:
    """Open a page as a first visitor, and return its best load of up to three."""
    best: Load | None = None
    for _ in range(TRIES):
        found = _load(browser, url, width, theme, axe if best is None else "", shot)
        if best is None:
            best = found
        best.first_content_ms = min(best.first_content_ms, found.first_content_ms)
        best.largest_content_ms = min(best.largest_content_ms, found.largest_content_ms)
        if best.first_content_ms <= FIRST_CONTENT_MS:
            break
    assert best is not None
    return best


def _load(browser: Any, url: str, width: int, theme: str, axe: str, shot: Path | None) -> Load:
    context = browser.new_context(viewport={"width": width, "height": SIZES[width]}, color_scheme=theme)
    try:
        page = context.new_page()
        page.set_default_timeout(60_000)
        console: list[str] = []
        page.on("console", lambda m: console.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: console.append(f"error: {error}"))
        page.add_init_script(f"({WATCH})()")
        sizes: list[float] = []
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        page.goto(url)
        page.wait_for_function(DRAWN)
        page.wait_for_timeout(200)  # what comes after the load: shifts and lazy parts
        seen = page.evaluate("() => seen")
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        found = Load(
            first_content_ms=round(page.evaluate(FIRST_CONTENT) or 0.0, 1),
            largest_content_ms=round(seen["largest"], 1),
            transfer_bytes=int(sum(sizes)),
            requests=len(sizes),
            layout_shift=round(seen["shift"], 4),
            moved=list(dict.fromkeys(seen["moved"]))[:6],
            overflow_px=wide - width,
            charts=page.locator("script[src*=vega]").count() > 0,
            console=[one for one in console if "status of 4" not in one],  # the browser notes a page's own status
        )
        if shot is not None:
            page.screenshot(path=shot, full_page=True)
        if axe:
            found.violations = _violations(page, axe, theme, width)
        return found
    finally:
        context.close()


def _violations(page: Any, axe: str, theme: str, width: int) -> list[str]:
    """Return what axe-core objects to with all details open: everything in light colors, contrast in dark ones."""
    page.evaluate(axe)
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    found = page.evaluate(ASK_AXE, None if theme == "light" else list(OF_COLOURS))
    return [f"axe {one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"][:4]]


def answer_ms(browser: Any, address: str) -> float:
    """Return the time from choosing another model on the first page to its answer, the best of three."""
    best = float("inf")
    for model in ("llama3-70b", "qwen3-8b", "deepseek-v3"):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.goto(address)
        chip = page.locator("#chips-model .chip", has_text=model).first
        before = page.locator("#verdict").inner_text()
        start = time.monotonic()
        chip.click()
        page.wait_for_function("(text) => document.querySelector('#verdict').innerText !== text", arg=before)
        best = min(best, 1000 * (time.monotonic() - start))
        context.close()
    return round(best)


class _Files(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as GitHub Pages does: compressed, and 404.html for addresses that are none."""

    def log_message(self, *words: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        """Send a file."""
        path = Path(self.translate_path(self.path))
        below = self.path.lstrip("/").partition("/")[2]
        if below and not path.exists():  # links of 404.html start with the path of the site's address
            path = Path(self.translate_path(f"/{below}"))
        if path.is_dir():
            path = path / "index.html"
        status = 200 if path.is_file() else 404
        path = path if path.is_file() else Path(self.directory) / "404.html"
        body, kind = path.read_bytes(), self.guess_type(str(path))
        self.send_response(status)
        if kind.startswith("text/") or "json" in kind or "svg" in kind or "javascript" in kind:
            body = gzip.compress(body, 6)
            self.send_header("content-encoding", "gzip")
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "max-age=600")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def files_served(site: Path) -> Iterator[str]:
    """Serve a static site; yield its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def web_served() -> Iterator[str]:
    """Serve the web UI; yield its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(f"{address}/api/health", server)
        yield address
    finally:
        server.terminate()
        server.wait()


def _wait_for(health: str, server: subprocess.Popen[bytes], most_s: float = 60.0) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def lighthouse(program: str, url: str, preset: str) -> dict[str, Any]:
    """Return Lighthouse's scores of a page, and the audits that cost points: the run of median performance."""
    runs = sorted((_lighthouse(program, url, preset) for _ in range(TRIES)), key=lambda one: one["performance"])
    return runs[TRIES // 2]


def _lighthouse(program: str, url: str, preset: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        device = ["--preset=desktop"] if preset == "desktop" else []
        command = [
            program, url, *device, "--quiet", "--only-categories=performance,accessibility", "--output=json",
            f"--output-path={out.name}", f"--chrome-flags=--headless=new {' '.join(FLAGS)}",
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "CHROME_PATH": CHROMIUM or ""}, capture_output=True)
        report = json.loads(Path(out.name).read_text(encoding="utf-8"))
    audits = report["audits"]
    lost = {
        ref["id"]: audits[ref["id"]].get("displayValue") or audits[ref["id"]]["title"]
        for category in report["categories"].values()
        for ref in category["auditRefs"]
        if ref["weight"] and (audits[ref["id"]]["score"] or 0) < 0.9 and audits[ref["id"]]["score"] is not None
    }
    scores = {name: round(100 * one["score"]) for name, one in report["categories"].items()}
    return {**scores, "lost": lost}


def _rows(
    browser: Any, kind: str, address: str, pages: Mapping[str, str], axe: str, shots: Path | None
) -> Iterator[dict[str, Any]]:
    for name, path in pages.items():
        for width in SIZES:
            for theme in THEMES:
                shot = shots and shots / f"{kind}-{name}-{width}-{theme}.png".replace(" ", "_").replace("'", "")
                found = load(browser, address + path, width, theme, axe, shot)
                yield {"kind": kind, "page": name, "path": path, "width": width, "theme": theme, **asdict(found),
                       "problems": found.problems}  # fmt: skip
                for one in found.problems:
                    print(f"{kind} {name} {width} {theme}: {one}", flush=True)


def _summary(rows: Sequence[Mapping[str, Any]], answered_ms: float | None) -> dict[str, Any]:
    plain, charts = ([row for row in rows if row["charts"] is wanted] for wanted in (False, True))
    return {
        "loads": len(rows),
        "pages": len({(row["kind"], row["page"]) for row in rows}),
        "problems": sum(len(row["problems"]) for row in rows),
        "first_content_ms": {"most": max(row["first_content_ms"] for row in rows), "median": _median(rows)},
        "first_own_answer_ms": answered_ms,
        "layout_shift": max(row["layout_shift"] for row in rows),
        "transfer_bytes": {
            "page": max((row["transfer_bytes"] for row in plain), default=0),
            "page with charts": max((row["transfer_bytes"] for row in charts), default=0),
        },
        "violations": sum(len(row["violations"]) for row in rows),
        "console_errors": sum(len(row["console"]) for row in rows),
    }


def _median(rows: Sequence[Mapping[str, Any]]) -> float:
    values = sorted(float(row["first_content_ms"]) for row in rows)
    return values[len(values) // 2]


def main() -> int:
    """Measure all pages; 1 if any is over the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, help="the built static site")
    parser.add_argument("--lighthouse", metavar="PATH", help="the program lighthouse")
    parser.add_argument("--only", default="", help="pages whose name contains this")
    parser.add_argument("--kind", choices=("served", "static"), help="pages of the web UI, or of the site; else both")
    parser.add_argument("--shots", type=Path, help="keep a screenshot of every load here")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    if given.shots:
        given.shots.mkdir(parents=True, exist_ok=True)
    axe, rows, scores = AXE.read_text(encoding="utf-8"), list[dict[str, Any]](), list[dict[str, Any]]()
    places = _places(given.site, given.kind)
    with sync_playwright() as playwright, ExitStack() as open_:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        version = browser.version
        addresses = {kind: open_.enter_context(place) for kind, place in places.items()}
        answered = answer_ms(browser, addresses["served"]) if "served" in addresses else None
        for kind, address in addresses.items():
            wanted = {name: path for name, path in PAGES[kind].items() if given.only in name}
            rows += _rows(browser, kind, address, wanted, axe, given.shots)
        browser.close()
    summary = _summary(rows, answered)
    print(json.dumps(summary, indent=1), flush=True)
    _keep(given.save, version, summary, rows, scores)
    if given.lighthouse:  # a minute for every page: the loads are kept before
        with ExitStack() as open_:
            addresses = {kind: open_.enter_context(place) for kind, place in _places(given.site, given.kind).items()}
            for row in _scores(given.lighthouse, addresses):
                scores.append(row)
                _keep(given.save, version, summary, rows, scores)
    return 1 if summary["problems"] else 0


def _places(site: Path | None, kind: str | None) -> dict[str, AbstractContextManager[str]]:
    """Return what serves the pages that are wanted."""
    found = {"served": web_served()} | ({} if site is None else {"static": files_served(site)})
    return {name: place for name, place in found.items() if kind in (None, name)}


def _keep(
    wanted: bool, version: str, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], scores: Sequence[Any]
) -> None:
    """Write the results so far."""
    if wanted:
        kept = [{key: value for key, value in row.items() if key != "moved"} for row in rows]
        text = {"chromium": version, "summary": summary, "lighthouse": scores, "loads": kept}
        RESULTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _scores(program: str, addresses: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for kind, address in addresses.items():
        for name in SCORED[kind]:
            for preset in ("desktop", "mobile"):
                row = {"kind": kind, "page": name, "preset": preset}
                row |= lighthouse(program, address + PAGES[kind][name], preset)
                print(row, flush=True)
                yield row


if __name__ == "__main__":
    sys.exit(main())
