"""The page of the doctor: an example at once, curves with marked findings, and a summary without anything private."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.web.html import Page
from tests.web.test_pages import read

from meshwright import api
from meshwright.doctor.curves import MAX_POINTS, _thinned
from meshwright.web import charts, example_files


@pytest.fixture(scope="module")
def example(client: Any) -> tuple[str, dict[str, Any]]:
    """The log as a user's file, and the response of the API."""
    log = example_files.log().replace("[titan]", "[host-a7.secret.example]:[titan]")
    reply = client.post("/api/doctor", json={"log": log, "curves": True, **example_files.LOG_FIELDS})
    assert reply.status_code == 200
    return log, reply.json()


def test_the_page_opens_with_an_example(client: Any) -> None:
    page = read(client, "/doctor")
    for text in ("example", "loss.spikes", "speed.sustained-slowdown", "memory.out-of-memory"):
        assert text in page.text
    assert page.numbers["last_step"] == example_files.LOG_STEPS


def test_a_log_has_the_figures_of_the_command_line(client: Any, cli: Any, tmp_path: Any) -> None:
    (tmp_path / "train.log").write_text(example_files.log())
    answer = cli("doctor", str(tmp_path / "train.log"), "--model", "llama3-8b", "--gpus", "8xH100")
    page = Page(client.post("/doctor", data={"log": example_files.log(), **example_files.LOG_FIELDS}).text)
    assert page.wrong == []
    figures = {name: value for name, value in page.numbers.items() if name.startswith("figures.")}
    assert figures == {f"figures.{n}.measured": one["measured"] for n, one in enumerate(answer["figures"])}
    assert all(one["message"] in page.text for one in answer["findings"])
    assert "curves" not in answer


def test_findings_are_marked_on_the_curves_that_show_them(example: Any) -> None:
    _, answer = example
    specs = {one["title"]: one["spec"] for one in charts.curves(answer["curves"], answer["findings"])}
    assert [*specs] == ["loss", "step time, s", "tokens/s per GPU", "gradient norm", "memory, GiB"]
    marked = {
        title: {row["finding"] for layer in spec["layer"] for row in layer["data"]["values"] if "finding" in row}
        for title, spec in specs.items()
    }
    assert marked["loss"] == {"loss.spikes"}
    assert marked["tokens/s per GPU"] == {"speed.sustained-slowdown"}
    assert marked["memory, GiB"] == {"memory.growing", "memory.out-of-memory"}
    assert len(next(one for one in answer["curves"] if one["name"] == "loss")["steps"]) == example_files.LOG_STEPS


def test_thinning_keeps_spikes_and_gaps() -> None:
    points = [(step, None if step == 7777 else 90.0 if step == 5001 else 1.0) for step in range(20_000)]
    kept = _thinned(points)
    assert len(kept) <= MAX_POINTS + 1
    assert (5001, 90.0) in kept
    assert (7777, None) in kept
    assert [one[0] for one in kept] == sorted(one[0] for one in kept)


def test_a_shared_summary_has_nothing_private_and_needs_no_storage(client: Any, example: Any) -> None:
    _, answer = example
    private = {**answer, "model": "acme-secret-13b", "recipe": "acme", "path": "/home/ann/run", "gpus": "8xH100"}
    shared = api.shareable(private)
    text = json.dumps(api.to_json(shared)) + shared.text
    for word in ("secret", "acme", "/home", "train.log", "rank 0", "4711"):
        assert word not in text
    assert api.read_shared(shared.token) == shared
    page = read(client, "/doctor", {"shared": shared.token})
    assert "A shared diagnosis" in page.text
    assert "The loss jumps and recovers." in page.text


@pytest.mark.parametrize("token", ["x", "eJw=", "A" * 9000, "é"])
def test_a_wrong_link_is_reported(client: Any, token: str) -> None:
    assert "is not the link of a diagnosis" in read(client, "/doctor", {"shared": token}, 422).text


def test_a_link_with_foreign_text_shows_none_of_it(client: Any) -> None:
    made = api.SharedDiagnosis(
        kind="<b>", engine="x", model="evil model", gpus="evil", steps=1, last_step=1, total_steps=None, starts=1,
        figures=[], findings=[{"rule": "evil.rule", "severity": "error", "steps": None}],  # type: ignore[list-item]
    )  # fmt: skip
    assert "evil" not in read(client, "/doctor", {"shared": made.token}).text


def test_logs_are_not_kept(client: Any, example: Any) -> None:
    log, _ = example
    cache = client.app.state.dispatcher.cache
    assert log not in str(cache.entries.keys())
    assert not [one for one in cache.entries.values() if b"loss.spikes" in one.body and b"looked_for" in one.body]


def test_a_text_without_a_log_is_an_error(client: Any) -> None:
    reply = client.post("/doctor", data={"log": "hello"})
    assert reply.status_code == 422
    assert Page(reply.text).wrong == []
