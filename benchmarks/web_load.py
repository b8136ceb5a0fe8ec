"""50 concurrent clients of `meshwright web`: errors, latencies and responses per second, as a table and a JSON file.

    python -m benchmarks.web_load [--clients 50] [--seconds 15] [--address http://127.0.0.1:8765]

Every client sends its next request when it has its response. "new" are requests that are not cached, "mixed" is one new
question among ten, "cached" are repeated requests, "pages" the same as HTML. Without an address a
server of its own is started. The clients run on the same cores as the server.
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
class Question:
    """One request."""

    kind: str
    path: str
    body: bytes = b""

    def sent(self, host: str) -> bytes:
        """The request as bytes."""
        head = f"{'POST' if self.body else 'GET'} {self.path} HTTP/1.1\r\nHost: {host}\r\n"
        if self.body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n"
        return f"{head}\r\n".encode() + self.body


def get(kind: str, /, **asked: Any) -> Question:
    """A question by GET."""
    return Question(kind, f"/api/{kind}?{urlencode(asked, doseq=True)}")


def popular() -> list[Question]:
    """What people ask: mostly for a plan."""
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
    found += [get("models", query="qwen3"), Question("gpus", "/api/gpus"), get("rules", pitfalls=True)]
    text = json.dumps({"text": SCRIPT, "name": "train.sh", "gpus": "8xH100"}).encode()
    return [*found, Question("check", "/api/check", text)]


def pages() -> list[Question]:
    """The same as pages."""
    asked = [urlencode({"model": m, "gpus": g, "goal": "sft"}) for m in MODELS[:4] for g in CLUSTERS[:3]]
    found = [Question("ask page", f"/?{one}") for one in asked]
    return [*found, *(Question(f"{name} page", f"/{name}") for name in ("recipes", "models", "gpus", "rules"))]


def new(chance: random.Random) -> Iterator[Question]:
    """Requests that are not cached: each has its own sequence length."""
    for number in count(1):
        model, gpus = chance.choice(MODELS), chance.choice(CLUSTERS)
        asked = {"gpus": gpus, "seq": 1024 + 64 * number}
        if number % 3 == 0:
            yield get("estimate", target=model, goal="sft", **asked)
        else:
            yield get("recommend", model=model, goal=chance.choice(("sft", "peft", "pretrain")), **asked)


@dataclass
class Seen:
    """What the clients saw."""

    ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, question: Question, status: str, ms: float) -> None:
        """One answer."""
        self.ms.append(ms)
        self.kinds.setdefault(question.kind, []).append(ms)
        if status != "200":
            self.errors[status] = self.errors.get(status, 0) + 1


class Client:
    """One connection that asks and waits, and asks again."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, question: Question) -> str:
        """The status of the answer, which is read to its end."""
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
        self.writer.write(question.sent(f"{self.host}:{self.port}"))
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = head.partition("content-length:")[2].partition("\r\n")[0]
        await self.reader.readexactly(int(length))
        if "connection: close" in head:
            self.close()
        return head.split(" ", 2)[1]

    def close(self) -> None:
        """Hangs up."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def phase(
    address: str, clients: int, next_question: Callable[[], Question], seconds: float, most: int | None = None
) -> dict[str, Any]:
    """Run all clients for so long or until so many requests were sent; return the figures."""
    split, seen = urlsplit(address), Seen()
    begun = time.perf_counter()
    asked = 0

    async def one() -> None:
        nonlocal asked
        client = Client(split.hostname or "127.0.0.1", split.port or 80)
        while time.perf_counter() - begun < seconds and (most is None or asked < most):
            asked += 1
            question, start = next_question(), time.perf_counter()
            try:
                status = await client.ask(question)
            except (OSError, EOFError, ValueError) as error:
                status = type(error).__name__
                client.close()
            seen.note(question, status, 1000 * (time.perf_counter() - start))
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return figures(seen, time.perf_counter() - begun)


def figures(seen: Seen, seconds: float) -> dict[str, Any]:
    """Counts, and latencies in milliseconds."""
    ordered = sorted(seen.ms)

    def share(part: float) -> float:
        return round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1) if ordered else 0.0

    return {
        "answers": len(ordered),
        "errors": seen.errors,
        "median_ms": share(0.5),
        "p95_ms": share(0.95),
        "p99_ms": share(0.99),
        "max_ms": share(1.0),
        "answers_per_s": round(len(ordered) / seconds, 1),
        "median_ms_by_kind": {k: round(sorted(v)[len(v) // 2], 1) for k, v in sorted(seen.kinds.items())},
    }


def cpu_s(pid: int | None) -> float | None:
    """CPU seconds that a server and its workers have taken; Linux only."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in (pid, *children)]
    except OSError:
        return None
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


async def measure(address: str, clients: int, seconds: float, pid: int | None = None) -> dict[str, Any]:
    """Every phase, one after the other, on a server that has answered nothing yet."""
    chance = random.Random(8)
    fresh, known = new(chance), popular()

    def mixed() -> Question:
        return next(fresh) if chance.random() < NEW_SHARE else chance.choice(known)

    found: dict[str, Any] = {}

    async def noted(name: str, next_question: Callable[[], Question], most: int | None = None) -> None:
        before = cpu_s(pid)
        found[name] = await phase(address, clients, next_question, seconds if most is None else 8 * seconds, most)
        after = cpu_s(pid)
        if before is not None and after is not None:
            found[name]["server_cpu_ms_per_answer"] = round(1000 * (after - before) / found[name]["answers"], 2)

    await noted("new", lambda: next(fresh), most=2 * clients)
    await noted("mixed", mixed)
    await phase(address, 4, iter([*known, *known]).__next__, 8 * seconds, most=len(known))
    await noted("cached", lambda: chance.choice(known))
    shown = pages()
    await phase(address, 4, iter([*shown, *shown]).__next__, 8 * seconds, most=len(shown))
    await noted("pages", lambda: chance.choice(shown))
    return found


def served() -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and its address."""
    command = [sys.executable, "-m", "meshwright", "web", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise RuntimeError("no output")
    return process, json.loads(process.stdout.readline())["address"]


async def settled(address: str) -> None:
    """Waits until the server has what it works out by itself."""
    while (await phase(address, 1, lambda: Question("accuracy", "/api/accuracy?points=true"), 120, most=1))["errors"]:
        await asyncio.sleep(0.2)


def main() -> int:
    """Prints the table and writes the result; exit 1 with any error or a median over the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--address", default="")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    options = parser.parse_args()
    process, address = (None, options.address) if options.address else served()
    before = os.getloadavg()
    try:
        asyncio.run(settled(address))
        found = asyncio.run(measure(address, options.clients, options.seconds, process.pid if process else None))
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
        "command": f"python -m benchmarks.web_load --clients {options.clients} --seconds {options.seconds:g}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average_before": [round(one, 1) for one in before],
        "note": options.note,
        "clients": options.clients,
        "phases": found,
    }
    out = Path(__file__).parent / "results" / f"web_load_{result['date']}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    good = not any(row["errors"] for row in found.values()) and found["mixed"]["median_ms"] < GOAL_MS
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
