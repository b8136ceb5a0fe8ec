"""Concurrent clients get their responses; cached ones at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from benchmarks import web_load

CLIENTS = 50
QUICK = [
    web_load.Question("gpus", "/api/gpus"),
    *(one for one in web_load.popular() if one.kind in ("complete", "estimate")),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of its own."""
    process, where = web_load.served()
    try:
        yield where
    finally:
        process.terminate()
        assert process.wait(30) in (0, -15)


@pytest.mark.slow  # `make load` asks the same, and more
def test_fifty_concurrent_clients_meet_no_error(address: str) -> None:
    chance = random.Random(1)
    cold = asyncio.run(web_load.phase(address, CLIENTS, lambda: chance.choice(QUICK), 60, most=2 * CLIENTS))
    warm = asyncio.run(web_load.phase(address, CLIENTS, lambda: chance.choice(QUICK), 20, most=8 * CLIENTS))
    assert (cold["errors"], warm["errors"]) == ({}, {})
    assert cold["answers"] >= 2 * CLIENTS
    assert warm["median_ms"] < 1500  # on a machine that does other things too; the benchmark says how fast it is


def test_every_question_of_the_benchmark_is_understood(client: object) -> None:
    from fastapi.testclient import TestClient

    assert isinstance(client, TestClient)
    for one in web_load.popular():
        if one.kind in ("plan", "size", "recommend"):  # asked in other tests
            continue
        answer = client.post(one.path, json=json.loads(one.body)) if one.body else client.get(one.path)
        assert answer.status_code == 200, (one.path, answer.text)


def test_figures_are_what_was_seen() -> None:
    seen = web_load.Seen()
    for number in range(100):
        seen.note(QUICK[0], "200" if number else "429", float(number))
    result = web_load.figures(seen, 2.0)
    assert (result["answers"], result["errors"], result["median_ms"], result["p95_ms"]) == (100, {"429": 1}, 50.0, 95.0)
    assert result["answers_per_s"] == 50.0
