"""The pipeline view of a rehearsal's file: both files that the command writes, and others that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.web.rehearsals import MICRO_BATCHES, RANKS, response_text, trace_text

PATH = "/explore/rehearsal"
PASSES = 2 * RANKS * MICRO_BATCHES


def drawn(reply: Any) -> int:
    return sum(reply.text.count(f'class="pass-{kind} shade') for kind in "FBIW")


@pytest.mark.parametrize("text", [response_text(), trace_text()], ids=["out", "trace"])
def test_every_pass_of_the_pipeline_is_drawn(client: Any, text: str) -> None:
    reply = client.post(PATH, data={"rehearsal": text})
    assert reply.status_code == 200
    assert drawn(reply) == PASSES
    assert "llama3_70b_pretrain_config on 64xH100" in reply.text
    assert f"{RANKS} ranks, {MICRO_BATCHES} micro batches" in reply.text


def test_the_json_has_parts_and_the_trace_has_collectives(client: Any) -> None:
    whole = client.post(PATH, data={"rehearsal": response_text()}).text
    assert "pipeline bubble" in whole
    assert "all_gather" in whole
    trace = client.post(PATH, data={"rehearsal": trace_text()}).text
    assert trace.count("tp all_gather: ") == 10


def test_without_a_pipeline_the_collectives_are_drawn(client: Any) -> None:
    trace = client.post(PATH, data={"rehearsal": trace_text(1)})
    assert trace.status_code == 200
    assert trace.text.count("tp all_gather: ") == 10
    assert drawn(trace) == 0
    assert "No pipeline" in client.post(PATH, data={"rehearsal": response_text(1)}).text


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(response_text()), **values})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "neither a rehearsal"),
        ('{"kind": "estimate"}', "neither a rehearsal"),
        ('{"traceEvents": []}', "a trace of another program"),
        (changed(step_s=-1), "step_s must be a positive number"),
        (changed(passes=[{"rank": 0}]), "as rehearse --out writes it"),
        (changed(step_s=1).replace('"step_s": 1', '"step_s": 1e999'), "not a finite number"),
        (changed(step_s=float("nan")), "not a finite number"),
        (changed(passes=3), "as rehearse --out writes it"),
        (
            changed(passes=[{"rank": 10**9, "kind": "F", "chunk": 0, "micro_batch": 0, "start_s": 0, "end_s": 1}]),
            "cannot be drawn",
        ),
        (
            changed(passes=[{"rank": 0, "kind": "<b>", "chunk": 0, "micro_batch": 0, "start_s": 0, "end_s": 1}]),
            "cannot be drawn",
        ),
        (
            changed(passes=[{"rank": 0, "kind": "B", "chunk": 0, "micro_batch": 0, "start_s": 0, "end_s": 1}]),
            "no forward pass",
        ),
        (trace_text().replace('"ts": 0', '"ts": -5'), "time is negative"),
        (trace_text().replace('"chunk": 0', '"chunk": "x"'), "as rehearse --trace writes it"),
        (trace_text().replace('"args": {"name"', '"args": {"nam"'), "as rehearse --trace writes it"),
        (trace_text().replace('"dur"', '"duration"'), "as rehearse --trace writes it"),
    ],
)
def test_other_files_are_refused_with_what_to_drop(client: Any, text: str, reason: str) -> None:
    reply = client.post(PATH, data={"rehearsal": text})
    assert reply.status_code == 422
    assert reason in reply.text
    assert "meshwright rehearse RECIPE" in reply.text
    assert "<b>" not in reply.text
