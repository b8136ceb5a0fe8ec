"""Load-test `meshwright web` with 50 concurrent clients: errors, latencies and throughput as a table and a JSON file.

    python -m benchmarks.web_load [--clients 50] [--seconds 15] [--address http://127.0.0.1:8765]

Every client sends its next request as soon as it has a response. "new" are uncached requests, "mixed" is one uncached
request in ten, "cached" are repeated requests, "pages" the same as HTML. Without an address a server is started. The
clients run on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

GOAL_MS = 200
NEW_SHARE = 0.1
SCRIPT = """#!/bin/bash
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer
"""
MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "qwen3-8b", "deepseek-v3", "gpt-oss-20b", "qwen3-32b", "kimi-k2")
CLUSTERS = ("8xH100", "64xH100", "4x8xH200", "16xA100-80", "64xGB200", "8xB200")


@dataclass(frozen=True)
class ApiRequest:
    """One request."""

    endpoint: str
    path: str
    body: bytes = b""

    def to_bytes(self, host: str) -> bytes:
        """Return the HTTP request as bytes."""
        head = f"{'POST' if self.body else 'GET'} {self.path} HTTP/1.1\r\nHost: {host}\r\n"
        if self.body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n"
        return f"{head}\r\n".encode() + self.body


def get(endpoint: str, /, **query: Any) -> ApiRequest:
    """Return a GET request."""
    return ApiRequest(endpoint, f"/api/{endpoint}?{urlencode(query, doseq=True)}")


def popular() -> list[ApiRequest]:
    """Return typical requests, mostly for plans."""
    found = [get("recommend", model=m, gpus=g, goal="sft") for m in MODELS[:4] for g in CLUSTERS[:3]]
    found += [
        get("recommend", model=m, gpus=g, goal="pretrain", explain=True) for m in MODELS[4:] for g in CLUSTERS[3:6]
    ]
    found += [
        get("estimate", target=f"{m}_{g}_config") for m in ("llama3_8b", "llama3_70b") for g in ("sft", "pretrain")
    ]
    found += [get("complete", kind="models", query=typed) for typed in ("l", "ll", "llama", "llama3-7", "qwen3")]
    found += [get("plan", target="llama3-70b", gpus="64xH100", goal="pretrain")]
    found += [get("size", model="llama3-70b", goal="pretrain", gpu="H100", tokens="1T", price=2.5)]
    found += [get("check", target="llama3_8b_pretrain_config", gpus="16xA100-80")]
    found += [
        get("export", target="llama3_8b_pretrain_config", to=to, gpus="8xH100") for to in ("torchtitan", "automodel")
    ]
    found += [get("schedule", target="llama3_70b_pretrain_config", first=16), get("recipes", query="llama", goal="sft")]
    found += [get("models", query="qwen3"), ApiRequest("gpus", "/api/gpus"), get("rules", pitfalls=True)]
    text = json.dumps({"text": SCRIPT, "name": "train.sh", "gpus": "8xH100"}).encode()
    return [*found, ApiRequest("check", "/api/check", text)]


def pages() -> list[ApiRequest]:
    """Return requests for HTML pages."""
    query = [urlencode({"model": m, "gpus": g, "goal": "sft"}) for m in MODELS[:4] for g in CLUSTERS[:3]]
    found = [ApiRequest("plan page", f"/?{one}") for one in query]
    return [*found, *(ApiRequest(f"{name} page", f"/{name}") for name in ("recipes", "models", "gpus", "rules"))]


def new(rng: random.Random) -> Iterator[ApiRequest]:
    """Yield uncached requests, each with its own sequence length."""
    for number in count(1):
        model, gpus = rng.choice(MODELS), rng.choice(CLUSTERS)
        query = {"gpus": gpus, "seq": 1024 + 64 * number}
        if number % 3 == 0:
            yield get("estimate", target=model, goal="sft", **query)
        else:
            yield get("recommend", model=model, goal=rng.choice(("sft", "peft", "pretrain")), **query)


@dataclass
class LoadStats:
    """Latencies and errors of all clients."""

    ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    by_endpoint: dict[str, list[float]] = field(default_factory=dict)

    def record(self, request: ApiRequest, status: str, ms: float) -> None:
        """Record one response."""
        self.ms.append(ms)
        self.by_endpoint.setdefault(request.endpoint, []).append(ms)
        if status != "200":
            self.errors[status] = self.errors.get(status, 0) + 1


class Client:
    """One keep-alive connection with one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, request: ApiRequest) -> str:
        """Send a request, read the response and return its status."""
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
        self.writer.write(request.to_bytes(f"{self.host}:{self.port}"))
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = head.partition("content-length:")[2].partition("\r\n")[0]
        await self.reader.readexactly(int(length))
        if "connection: close" in head:
            self.close()
        return head.split(" ", 2)[1]

    def close(self) -> None:
        """Close the connection."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def phase(
    address: str, clients: int, next_request: Callable[[], ApiRequest], seconds: float, limit: int | None = None
) -> dict[str, Any]:
    """Run all clients for `seconds` or until `limit` requests; return the figures."""
    split, stats = urlsplit(address), LoadStats()
    started = time.perf_counter()
    query = 0

    async def one() -> None:
        nonlocal query
        client = Client(split.hostname or "127.0.0.1", split.port or 80)
        while time.perf_counter() - started < seconds and (limit is None or query < limit):
            query += 1
            request, start = next_request(), time.perf_counter()
            try:
                status = await client.send(request)
            except (OSError, EOFError, ValueError) as error:
                status = type(error).__name__
                client.close()
            stats.record(request, status, 1000 * (time.perf_counter() - start))
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return figures(stats, time.perf_counter() - started)


def figures(stats: LoadStats, seconds: float) -> dict[str, Any]:
    """Return counts, and latencies in milliseconds."""
    ordered = sorted(stats.ms)

    def share(part: float) -> float:
        return round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1) if ordered else 0.0

    return {
        "answers": len(ordered),
        "errors": stats.errors,
        "median_ms": share(0.5),
        "p95_ms": share(0.95),
        "p99_ms": share(0.99),
        "max_ms": share(1.0),
        "answers_per_s": round(len(ordered) / seconds, 1),
        "median_ms_by_kind": {k: round(sorted(v)[len(v) // 2], 1) for k, v in sorted(stats.by_endpoint.items())},
    }


def cpu_s(pid: int | None) -> float | None:
    """Return the CPU seconds of a server and its workers; Linux only."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in (pid, *children)]
    except OSError:
        return None
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


async def measure(address: str, clients: int, seconds: float, pid: int | None = None) -> dict[str, Any]:
    """Run all phases in sequence on a server with an empty cache."""
    rng = random.Random(8)
    fresh, known = new(rng), popular()

    def mixed() -> ApiRequest:
        return next(fresh) if rng.random() < NEW_SHARE else rng.choice(known)

    found: dict[str, Any] = {}

    async def noted(name: str, next_request: Callable[[], ApiRequest], limit: int | None = None) -> None:
        before = cpu_s(pid)
        found[name] = await phase(address, clients, next_request, seconds if limit is None else 8 * seconds, limit)
        after = cpu_s(pid)
        if before is not None and after is not None:
            found[name]["server_cpu_ms_per_answer"] = round(1000 * (after - before) / found[name]["answers"], 2)

    await noted("new", lambda: next(fresh), limit=2 * clients)
    await noted("mixed", mixed)
    await phase(address, 4, iter([*known, *known]).__next__, 8 * seconds, limit=len(known))
    await noted("cached", lambda: rng.choice(known))
    shown = pages()
    await phase(address, 4, iter([*shown, *shown]).__next__, 8 * seconds, limit=len(shown))
    await noted("pages", lambda: rng.choice(shown))
    return found


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and address."""
    command = [sys.executable, "-m", "meshwright", "web", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise RuntimeError("no output")
    return process, json.loads(process.stdout.readline())["address"]


async def wait_until_ready(address: str) -> None:
    """Wait until the server has finished its startup computations."""
    while (await phase(address, 1, lambda: ApiRequest("accuracy", "/api/accuracy?points=true"), 120, limit=1))[
        "errors"
    ]:
        await asyncio.sleep(0.2)


def main() -> int:
    """Print and save the table; return 1 on any error or a median above the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--address", default="")
    parser.add_argument("--note", default="", help="other load on the machine")
    args = parser.parse_args()
    process, address = (None, args.address) if args.address else start_server()
    before = os.getloadavg()
    try:
        asyncio.run(wait_until_ready(address))
        found = asyncio.run(measure(address, args.clients, args.seconds, process.pid if process else None))
    finally:
        if process is not None:
            process.terminate()
            process.wait(20)
    print(f"{'':<14}{'answers':>9}{'errors':>8}{'median':>10}{'p95':>10}{'p99':>10}{'per s':>9}{'server CPU':>13}")
    for name, row in found.items():
        times = "".join(f"{row[key]:>7.0f} ms" for key in ("median_ms", "p95_ms", "p99_ms"))
        cpu = row.get("server_cpu_ms_per_answer")
        line = f"{name:<14}{row['answers']:>9}{sum(row['errors'].values()):>8}{times}{row['answers_per_s']:>9.1f}"
        print(line + ("" if cpu is None else f"{cpu:>7.1f} ms/answer"))
    result = {
        "date": date.today().isoformat(),
        "command": f"python -m benchmarks.web_load --clients {args.clients} --seconds {args.seconds:g}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average_before": [round(one, 1) for one in before],
        "note": args.record,
        "clients": args.clients,
        "phases": found,
    }
    out = Path(__file__).parent / "results" / f"web_load_{result['date']}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    good = not any(row["errors"] for row in found.values()) and found["mixed"]["median_ms"] < GOAL_MS
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
