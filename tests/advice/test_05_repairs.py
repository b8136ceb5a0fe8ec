"""Item 5: one repair per answer, the same findings in every command, and contradicting overrides named."""

from __future__ import annotations

import random
from typing import Any

import pytest

BROKEN = [
    ("llama3-8b", "pretrain", "7xH100", ("layout.tp=3",)),
    ("llama3-8b", "pretrain", "8xH100", ("layout.tp=4", "layout.pp=4")),
    ("llama3-8b", "pretrain", "8xH100", ("layout.strategy=ddp", "layout.tp=2", "layout.cp=8")),
    ("qwen3-30b-a3b", "sft", "8xH100", ("layout.ep=3", "layout.tp=16")),
    ("llama3-70b", "pretrain", "64xH100", ("layout.vp=3", "layout.pp=7")),
    ("qwen3-8b", "sft", "4xH100", ("layout.micro_batch_size=3", "layout.cp=3")),
]


def recommend(meshwright: Any, model: str, goal: str, gpus: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    found = meshwright("recommend", model, "--gpus", gpus, "--goal", goal, *overrides, "--json")
    answer: dict[str, Any] = found.json
    return answer


def errors(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in answer["findings"] if one["severity"] == "error"]


def applied(overrides: tuple[str, ...], repair: dict[str, Any]) -> tuple[str, ...]:
    new = {text.partition("=")[0] for text in repair["overrides"]}
    return (*(text for text in overrides if text.partition("=")[0] not in new), *repair["overrides"])


@pytest.mark.parametrize(("model", "goal", "gpus", "overrides"), BROKEN)
def test_one_repair_removes_every_error(
    meshwright: Any, model: str, goal: str, gpus: str, overrides: tuple[str, ...]
) -> None:
    answer = recommend(meshwright, model, goal, gpus, overrides)
    repair = answer["repair"]
    assert errors(answer)
    assert all(one["message"] for one in answer["findings"])
    assert {one["rule"] for one in errors(answer)} <= set(repair["removes"])
    assert all(one["fix"] and set(one["fix"]) <= set(repair["overrides"]) for one in errors(answer))
    assert not repair["contract"]
    after = recommend(meshwright, model, goal, gpus, applied(overrides, repair))
    assert not errors(after)
    assert after["estimate"]["fits"]


@pytest.mark.parametrize(("model", "goal", "gpus", "overrides"), BROKEN[:3])
def test_a_repair_has_nothing_to_spare(
    meshwright: Any, model: str, goal: str, gpus: str, overrides: tuple[str, ...]
) -> None:
    answer = recommend(meshwright, model, goal, gpus, overrides)
    typed = {text.partition("=")[0] for text in overrides}
    changed = {text.partition("=")[0] for text in answer["repair"]["overrides"]} & typed
    for key in changed:  # with the user's own value of one changed field, the repair no longer works
        own = next(text for text in overrides if text.startswith(f"{key}="))
        rest = [text for text in answer["repair"]["overrides"] if not text.startswith(f"{key}=")]
        tried = (*(text for text in overrides if text != own and text.partition("=")[0] not in changed), own, *rest)
        assert errors(recommend(meshwright, model, goal, gpus, tried))


def test_the_repair_is_printed_once(meshwright: Any) -> None:
    out = meshwright("recommend", "llama3-8b", "--gpus", "7xH100", "--goal", "pretrain", "layout.tp=3").out
    assert out.count("✗ error") == 4
    assert out.count("Repair") == 1
    assert "fix:" not in out
    assert "global_batch_size" not in out.partition("Repair")[2]  # a layout is enough


def test_every_command_has_the_same_findings(meshwright: Any) -> None:
    recipe, rest = "llama3_8b_pretrain_config", ("--gpus", "7xH100", "layout.tp=3", "--json")
    checked = meshwright("check", recipe, *rest).json
    asked = meshwright("recommend", "llama3-8b", "--goal", "pretrain", *rest).json
    ranked = meshwright("plan", "llama3-8b", "--goal", "pretrain", *rest).json
    estimated = meshwright("estimate", recipe, *rest).json
    started = meshwright("launch", recipe, "--scheduler", "slurm", "--gpus", "7xH100", "layout.tp=3", "--json").json
    found = [{(f["rule"], f["message"]) for f in errors(one)} for one in (checked, asked, ranked, estimated)]
    assert len(found[0]) == 4
    assert all(one == found[0] for one in found)
    assert {text for _, text in found[0]} <= set(str(started["error"]).split("'")) or all(
        text in str(started["error"]) for _, text in found[0]
    )
    assert checked["repair"] == estimated["repair"]
    assert asked["repair"] == ranked["repair"]
    # A recommendation chooses faster kernels; the change of the layout is the same.
    figures = ("step_s", "total_gib")
    repairs = [{k: v for k, v in one["repair"].items() if k not in figures} for one in (checked, asked)]
    assert repairs[0] == repairs[1]
    assert asked["repair"]["step_s"] < checked["repair"]["step_s"]


@pytest.mark.parametrize(
    ("gpus", "overrides", "pair"),
    [
        ("8xH100", ("layout.tp=4", "layout.pp=4"), {"layout.tp=4", "layout.pp=4"}),
        ("8xH100", ("train.seed=3", "layout.tp=4", "layout.cp=4"), {"layout.tp=4", "layout.cp=4"}),
        ("8xH100", ("layout.strategy=ddp", "layout.tp=2"), {"layout.strategy=ddp", "layout.tp=2"}),
        (
            "8xH100",
            ("train.global_batch_size=12", "optimizer.lr=1e-4", "layout.micro_batch_size=8"),
            {"train.global_batch_size=12", "layout.micro_batch_size=8"},
        ),
    ],
)
def test_contradicting_overrides_are_named(
    meshwright: Any, gpus: str, overrides: tuple[str, ...], pair: set[str]
) -> None:
    answer = recommend(meshwright, "llama3-8b", "pretrain", gpus, overrides)
    found = answer["contradiction"]
    assert set(found["overrides"]) == pair
    assert found["reason"]
    for text in found["fix"]:
        kept = tuple(one for one in overrides if f"remove {one}" != text)
        assert len(kept) == len(overrides) - 1
        assert not errors(recommend(meshwright, "llama3-8b", "pretrain", gpus, kept))


def test_one_impossible_value_contradicts_nothing(meshwright: Any) -> None:
    answer = recommend(meshwright, "llama3-8b", "pretrain", "8xH100", ("layout.tp=3", "train.seed=5"))
    assert "contradiction" not in answer
    assert answer["repair"]


def test_check_names_the_pair_too(meshwright: Any) -> None:
    words = ("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", "layout.tp=8", "layout.cp=2", "train.seed=1")
    answer = meshwright(*words, "--json").json
    assert set(answer["contradiction"]["overrides"]) == {"layout.tp=8", "layout.cp=2"}


def test_advice_stays_inside_a_node(meshwright: Any) -> None:
    words = ("llama31_405b_sft_config", "--gpus", "64xH100", "layout.tp=8", "layout.pp=1", "layout.offload=none")
    answer = meshwright("check", *words, "--json").json
    fixes = [text for one in answer["findings"] for text in one["fix"]]
    fixes += answer.get("repair", {}).get("overrides", [])
    degrees = [int(text.partition("=")[2]) for text in fixes if text.startswith("layout.tp=")]
    assert errors(answer)
    assert all(tp <= 8 for tp in degrees)


def test_no_advice_on_gathers_under_pipeline_parallelism(meshwright: Any) -> None:
    words = ("llama3_8b_pretrain_config", "--gpus", "16xH100", "layout.pp=2", "layout.tp=1", "layout.sp=false")
    answer = meshwright("check", *words, "--json").json
    assert not any("reshard_after_forward" in text for one in answer["findings"] for text in one["fix"])


@pytest.mark.slow
def test_repairs_of_random_layouts_work(meshwright: Any) -> None:
    draw, repaired = random.Random(5), 0
    for _ in range(40):
        model, goal = draw.choice([("llama3-8b", "pretrain"), ("qwen3-30b-a3b", "sft"), ("llama3-70b", "sft")])
        gpus = f"{draw.choice([6, 8, 12, 16, 32])}xH100"
        names = draw.sample(["tp", "pp", "cp", "ep", "micro_batch_size", "vp"], 3)
        overrides = tuple(f"layout.{name}={draw.choice([1, 2, 3, 4, 6, 8, 16])}" for name in names)
        found = meshwright("recommend", model, "--gpus", gpus, "--goal", goal, *overrides, "--json")
        answer = found.json
        if found.code == 2 or not errors(answer) or "repair" not in answer:
            continue
        after = recommend(meshwright, model, goal, gpus, applied(overrides, answer["repair"]))
        assert not errors(after), (model, gpus, overrides, answer["repair"])
        repaired += 1
    assert repaired >= 10
