"""The page of sizes: bands as areas, a price per GPU type, and the same smallest cluster as the plan."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from tests.web.test_pages import read

from meshwright.web import charts
from meshwright.web.dispatcher import PendingRequest, Worker, _key

QUERY = {"model": "llama3-8b", "gpu": "H100 H200", "goal": "sft", "tokens": "1B", "price": "H100=2.5,H200=3.4"}


@pytest.fixture(scope="module")
def found(client: Any) -> Any:
    """The sizes of two GPU types."""
    asked = {**QUERY, "gpu": QUERY["gpu"].split(), "max_gpus": "64"}
    return client.get("/api/scale", params=asked).json()


def test_every_type_has_its_own_price(client: Any, found: Any) -> None:
    for one, price in zip(found["series"], (2.5, 3.4), strict=True):
        size = one["most_efficient"]
        assert size["cost"] == pytest.approx(size["gpu_hours"] * price, rel=1e-6)
    page = read(client, "/scale", {**QUERY, "max_gpus": "64"})
    assert "zigzag" in page.text
    assert any(one.startswith("/?") and "llama3-8b" in one for one in page.addresses)


def test_bands_are_areas(found: Any) -> None:
    specs = charts.scaling(found["series"])
    assert [*specs] == ["tokens_per_s", "mfu", "days", "cost"]
    for name, spec in specs.items():
        assert [layer["mark"]["type"] for layer in spec["layer"]] == ["area", "line"]
        assert all(row["low"] < row[name] < row["high"] for row in spec["data"]["values"])


@pytest.mark.parametrize(("low", "high", "ticks"), [(1.5, 2000, [10, 100, 1000]), (30, 400, [50, 100, 200])])
def test_axes_of_one_or_many_decades_have_round_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert charts.log_ticks([{"low": low, "high": high}]) == ticks


def test_a_price_for_one_of_two_types_is_an_error_with_the_fix(client: Any) -> None:
    page = read(client, "/scale", {**QUERY, "price": "H100=2.5"}, 422)
    assert "has no price for H200" in page.text


@pytest.mark.parametrize(
    ("model", "gpu", "goal", "few"),
    [("llama3-70b", "H100", "pretrain", "1xH100"), ("llama3-8b", "A100-40", "pretrain", "1xA100-40")],
)
def test_plan_and_scale_agree_on_the_smallest_cluster(client: Any, model: str, gpu: str, goal: str, few: str) -> None:
    plan = client.get("/api/recommend", params={"model": model, "gpus": few, "goal": goal}).json()
    asked = {"model": model, "gpu": gpu, "goal": goal, "max_gpus": "32"}
    sizes = client.get("/api/size", params=asked).json()
    assert plan["smallest_that_fits"] == sizes["smallest"]["gpus"]
    without = next(one["gpus"] for one in sizes["sizes"] if one["fits"] and not one["host_gib"])
    counts = [int(number) for number in re.findall(r"(\d+)x", plan["smallest_without_offload"])]
    assert without == counts[0] * (counts[1] if len(counts) > 1 else 1)
    text = " ".join(read(client, "/scale", asked).text.split())
    assert f"smallest without offload: {without} GPUs" in text


def test_the_page_can_ask_what_its_search_is_doing(client: Any) -> None:
    asked = {"model": "llama3-8b", "gpu": "H100 H200", "goal": "sft"}
    assert client.get("/scale/progress", params=asked).json() == {"stage": ""}
    dispatcher = client.app.state.dispatcher
    call = ("size", {"model": "llama3-8b", "goal": "sft", "gpu": "H200"}, {"config.json": "of the hub"})
    pending = PendingRequest(task=None, call=call)
    pending.show("size: 64 GPUs (12 of 60 counts done)")
    dispatcher.pending[_key(call)] = pending
    try:
        found = client.get("/scale/progress", params=asked).json()
    finally:
        del dispatcher.pending[_key(call)]
    assert found == {"stage": "H200: 64 GPUs (12 of 60 counts done)"}
    assert client.get("/scale/progress", params={"model": "nope", "overrides": "'"}).json() == {"stage": ""}


def test_a_worker_sends_the_stages_of_a_search_before_its_reply() -> None:
    async def ask() -> tuple[list[str], Any]:
        seen: list[str] = []
        one = Worker()
        try:
            call = ("size", {"model": "llama3-70b", "goal": "pretrain", "gpu": "H100", "max_gpus": 256}, {})
            return seen, await one.answer(call, 60, seen.append)
        finally:
            await one.end()

    stages, reply = asyncio.run(ask())
    assert reply.ok
    assert reply.data["sizes"]
    assert all(re.fullmatch(r"size: [0-9,]+ GPUs \([0-9]+ of [0-9]+ counts done\)", one) for one in stages)
    assert stages
