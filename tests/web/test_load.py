"""Load test of the HTTP API: many concurrent clients, no errors, fast cached responses."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from benchmarks import web_load

CLIENTS = 50
QUICK = [
    web_load.ApiRequest("gpus", "/api/gpus"),
    *(one for one in web_load.popular() if one.endpoint in ("complete", "estimate")),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a server."""
    process, where = web_load.start_server()
    try:
        yield where
    finally:
        process.terminate()
        assert process.wait(30) in (0, -15)


@pytest.mark.slow  # `make load` runs the same and more
def test_fifty_concurrent_clients_get_no_errors(address: str) -> None:
    rng = random.Random(1)
    cold = asyncio.run(web_load.phase(address, CLIENTS, lambda: rng.choice(QUICK), 60, limit=2 * CLIENTS))
    warm = asyncio.run(web_load.phase(address, CLIENTS, lambda: rng.choice(QUICK), 20, limit=8 * CLIENTS))
    assert (cold["errors"], warm["errors"]) == ({}, {})
    assert cold["answers"] >= 2 * CLIENTS
    assert warm["median_ms"] < 1500  # generous, for busy machines; the benchmark measures the speed


def test_every_request_of_the_benchmark_succeeds(client: object) -> None:
    from fastapi.testclient import TestClient

    assert isinstance(client, TestClient)
    for one in web_load.popular():
        if one.endpoint in ("plan", "size", "recommend"):  # covered by other tests
            continue
        answer = client.post(one.path, json=json.loads(one.body)) if one.body else client.get(one.path)
        assert answer.status_code == 200, (one.path, answer.text)


def test_figures_match_the_recorded_responses() -> None:
    stats = web_load.LoadStats()
    for number in range(100):
        stats.record(QUICK[0], "200" if number else "429", float(number))
    figures = web_load.figures(stats, 2.0)
    assert (figures["answers"], figures["errors"], figures["median_ms"], figures["p95_ms"]) == (
        100,
        {"429": 1},
        50.0,
        95.0,
    )
    assert figures["answers_per_s"] == 50.0
