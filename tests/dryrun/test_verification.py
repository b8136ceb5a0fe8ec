"""Verification cards: they speak of the recipes that are shipped, and what they say is what comes out today."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks import verify

from meshwright import clusters, costs
from meshwright.dryrun import checks, tiny, verification
from meshwright.dryrun.types import Collective, DryRun, RankDryRun
from meshwright.dryrun.verification import Check, VerificationReport
from meshwright.engine.worker import RunMetrics
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "cards"
NOT_MADE_YET: tuple[str, ...] = ()  # checks that cards may still lack; empty when `make verify` is done
CHEAPEST = 12  # dry runs that the tests take turns to make again
LLAMA, NO_CLASS = "llama3_8b_pretrain_config", "nemotron_nano_v2_vl_12b_sft_config"

CARDS = verification.read_all(FOLDER)


def shipped() -> set[str]:
    return {entry.name for entry in index.entries(benchmark=False)}


# The cards that lie in the repository.


def test_every_shipped_recipe_has_a_card() -> None:
    assert sorted(shipped() - {card.recipe for card in CARDS}) == []


def test_every_card_is_of_a_recipe_and_bears_its_name() -> None:
    assert [card.recipe for card in CARDS if not index.knows(card.recipe)] == []
    assert [card.recipe for card in CARDS] == sorted(path.stem for path in FOLDER.glob("*.json"))


def test_no_card_is_older_than_its_recipe() -> None:
    assert [card.recipe for card in CARDS if verification.is_stale(card)] == [], "run `make verify`"


def test_every_check_was_made() -> None:
    lacking = {card.recipe: card.missing for card in CARDS if set(card.missing) - set(NOT_MADE_YET)}
    assert lacking == {}, "run `make verify`"


def test_a_recipe_that_fails_is_withdrawn_with_the_reason() -> None:
    assert {card.recipe: card.failed for card in CARDS if card.failed and not card.withdrawn} == {}


def test_only_models_without_a_class_are_not_executed() -> None:
    excused = {
        card.recipe
        for card in CARDS
        for name in verification.CHECKS
        if (check := card.check(name)) is not None and check.outcome == "not applicable"
    }
    assert {name: checks.no_class(index.load(name)) for name in excused if not checks.no_class(index.load(name))} == {}


def test_rules_and_estimates_of_all_cards_are_todays() -> None:
    """Every one of them: all together take three seconds."""
    for card in CARDS:
        recipe = index.load(card.recipe)
        for name in ("rules", "estimate"):
            known, now = card.check(name), checks.make(name, recipe)
            assert known is not None
            told = f"{card.recipe}: run `python -m benchmarks.verify --checks rules,estimate`"
            assert (now.outcome, now.reason) == (known.outcome, known.reason), told
            assert all(_alike(*pair) for pair in _pairs(now.figures, known.figures)), told


def test_dry_runs_of_all_cards_are_compared_with_todays_estimates() -> None:
    for card in CARDS:
        known, now = card.checks.dryrun, checks.compared(card).checks.dryrun
        if known is not None and known.figures is not None:
            assert now is not None
            assert now.figures is not None
            told = f"{card.recipe}: run `python -m benchmarks.verify --checks rules,estimate`"
            assert now.figures.difference_gib == pytest.approx(known.figures.difference_gib, abs=1e-3), told


def _pairs(found: Any, expected: Any) -> list[tuple[Any, Any]]:
    """The leaves of two figures side by side."""
    ours, theirs = _leaves(msgspec.to_builtins(found)), _leaves(msgspec.to_builtins(expected))
    return [(ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()]


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _leaves(inner, f"{path}.{key}").items()}


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float):  # another machine may round otherwise
        return math.isclose(found, expected, rel_tol=1e-4)
    return bool(found == expected)


def of_the_day(found: list[VerificationReport]) -> VerificationReport:
    """One of them, another every day."""
    return found[date.today().toordinal() % len(found)]


def test_the_dry_run_of_the_day_is_what_its_card_says(tmp_path: Path) -> None:
    executed = [
        (check.figures.cpu_s, card)
        for card in CARDS
        if (check := card.checks.dryrun) and check.figures and check.versions == _here(card)
    ]
    if not executed:
        pytest.skip("no card was made with the versions that are here")
    card = of_the_day([card for _, card in sorted(executed, key=lambda pair: pair[0])[:CHEAPEST]])
    known = card.checks.dryrun
    assert known is not None
    made = made_by_the_script(card.recipe, "dryrun", tmp_path).checks.dryrun
    assert made is not None
    assert (made.outcome, made.reason) == (known.outcome, known.reason)
    assert _untimed(made) == _untimed(known), card.recipe


def _here(card: VerificationReport) -> dict[str, str]:
    return checks.versions("dryrun", index.load(card.recipe))


def _untimed(check: Check[verification.Executed]) -> verification.Executed:
    """What a dry run finds whenever it is made, and whatever the estimate says by then."""
    assert check.figures is not None
    return msgspec.structs.replace(check.figures, cpu_s=0.0, difference_gib={})


@pytest.mark.slow
def test_the_tiny_training_of_the_day_is_what_its_card_says(tmp_path: Path) -> None:
    card = of_the_day([card for card in CARDS if card.checks.tiny and card.checks.tiny.figures])
    known, made = card.checks.tiny, made_by_the_script(card.recipe, "tiny", tmp_path).checks.tiny
    assert known is not None
    assert known.figures is not None
    assert made is not None
    assert made.figures is not None
    assert made.outcome == known.outcome
    assert made.figures.layout == known.figures.layout
    assert made.figures.losses == pytest.approx(known.figures.losses, rel=1e-3)


def made_by_the_script(name: str, check: str, folder: Path) -> VerificationReport:
    command = [sys.executable, "-m", "benchmarks.verify", "--only", name, "--checks", check, "--folder", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    card = verification.read(folder, name)
    assert card is not None, ended.stdout + ended.stderr
    return card


# What a card is.


def check_of(outcome: Any = "ok", name: str = "tiny", **more: Any) -> Check[Any]:
    versions = checks.versions(name, index.load(LLAMA))
    return Check(**{"outcome": outcome, "date": "2026-01-01", "versions": versions, "seconds": 1.0, **more})


def test_a_card_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    card = verification.new_card(LLAMA)
    for name in ("rules", "estimate"):
        card = card.with_check(name, checks.make(name, index.load(LLAMA)))
    card = card.with_check("tiny", check_of("failed", reason="no"))
    path = verification.write(tmp_path, card)
    assert verification.read(tmp_path, LLAMA) == card
    assert verification.read_all(tmp_path) == [card]
    assert card.failed == ["tiny"]
    assert card.missing == ["dryrun"]
    assert json.loads(path.read_text())["checks"]["estimate"]["figures"]["fits"] is True


def test_a_write_that_is_interrupted_leaves_the_card_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = verification.new_card(LLAMA)
    verification.write(tmp_path, card)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        verification.write(tmp_path, card.with_check("tiny", check_of()))
    assert verification.read_all(tmp_path) == [card]
    assert os.listdir(tmp_path) == [f"{LLAMA}.json"]


def _larger_batch(recipe: Recipe) -> Recipe:
    train = msgspec.structs.replace(recipe.train, global_batch_size=2 * recipe.train.global_batch_size)
    return msgspec.structs.replace(recipe, train=train)


def _other_layout(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, recompute="full"))


def _other_cluster(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, cluster="4xH100")


@pytest.mark.parametrize("changed", [_larger_batch, _other_layout, _other_cluster])
def test_a_changed_recipe_makes_its_card_old(
    changed: Callable[[Recipe], Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = index.load(LLAMA)
    card = msgspec.structs.replace(verification.new_card(LLAMA).with_check("tiny", check_of()), withdrawn="it fails")
    verification.write(tmp_path, card)
    assert verification.card_of(tmp_path, LLAMA) == card
    monkeypatch.setattr(index, "load", lambda name: changed(recipe))
    assert verification.is_stale(card)
    assert verification.card_of(tmp_path, LLAMA) == verification.new_card(LLAMA)
    assert verification.new_card(LLAMA).checks == verification.Checks()


@pytest.mark.parametrize(
    ("change", "older"),
    [({"source": "elsewhere"}, False), ({"aliases": ("x",)}, False), ({"vocab": 1}, True), ({"tied": True}, True)],
)
def test_facts_of_the_model_make_a_card_old_and_words_about_it_do_not(
    change: dict[str, Any], older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verification.fingerprint(index.load(LLAMA))
    model = msgspec.structs.replace(verification.model_of(index.load(LLAMA)), **change)
    monkeypatch.setattr(verification, "model_of", lambda recipe: model)
    assert (verification.fingerprint(index.load(LLAMA)) != before) is older


def test_a_check_that_finds_the_same_keeps_its_day() -> None:
    card = verification.new_card(LLAMA).with_check("tiny", check_of())
    assert card.with_check("tiny", check_of(date="2026-02-02", seconds=9.0)) is card
    assert card.with_check("tiny", check_of("failed", date="2026-02-02")).date == "2026-02-02"


def proof(total: float = 11.0) -> DryRun:
    sent = tuple(Collective("tp", "all_gather", phase, 2, 3, 0.5) for phase in ("forward", "backward"))
    rank = RankDryRun(
        rank=0,
        pp_rank=0,
        stands_for=(0, 1),
        layers=(0,),
        memory_gib={"weights": 6.0},
        allocated_gib=6.0,
        reserved_gib=7.0,
        peak_phase="backward",
        peak_at="layer 3",
        phases={},
        timeline=(),
        holders=(),
        flops={"total": 1e12},
        collectives=(*sent, Collective("pp", "send", "forward", 2, 1, 0.25)),
        placement=(),
        traced="all",
        exact=True,
        cpu_s=1.0,
    )
    memory = {"weights": 6.0, "overhead": 5.0, "total": total, "capacity": 10.0}
    return DryRun(
        recipe=LLAMA,
        model="llama3_8b",
        cluster="2xH100",
        world=2,
        ranks=(msgspec.structs.replace(rank, rank=1, allocated_gib=1.0), rank),
        worst=1,  # place in ranks
        memory_gib=memory,
        fits=total <= 10.0,
        estimate_gib=memory,
        versions={},
        cpu_s=2.0,
        wall_s=2.0,
    )


def test_a_card_keeps_the_worst_rank_of_a_dry_run_and_adds_up_what_it_sends() -> None:
    found = checks.executed(proof())
    assert (found.worst, found.peak_phase, found.reserved_gib) == (0, "backward", 7.0)
    assert found.collectives == (
        verification.Sent("pp", "send", 2, 1, 0.25),
        verification.Sent("tp", "all_gather", 2, 6, 1.0),
    )
    assert [(one.rank, one.allocated_gib) for one in found.ranks] == [(1, 1.0), (0, 6.0)]


def test_a_dry_run_is_compared_with_the_estimate_of_its_pipeline_rank() -> None:
    name = "deepseek_v2_pretrain_config"  # whose stages differ
    recipe = index.load(name)
    case = Case(recipe, model_of(recipe), clusters.cluster(recipe.cluster))
    made = msgspec.structs.replace(checks.executed(proof()), pp_rank=recipe.layout.pp - 1, difference_gib={})
    card = checks.compared(verification.new_card(name).with_check("dryrun", check_of(name="dryrun", figures=made)))
    assert card.checks.dryrun is not None
    assert card.checks.dryrun.figures is not None
    difference = card.checks.dryrun.figures.difference_gib
    last, first = (float(costs.memory_by_stage(case)[stage].weights) for stage in (-1, 0))
    assert last != pytest.approx(first, abs=1e-3)
    assert difference["weights"] == pytest.approx(6.0 - last, abs=1e-3)
    assert set(difference) == {"weights", "overhead", "total"}
    assert checks.compared(card) is card


# Making checks.


def test_what_does_not_fit_fails_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, outcome, reason in ((11.0, "failed", "needs 11.0 of 10.0 GiB"), (9.0, "ok", "")):
        found = checks._fitting(total <= 10.0, proof(total).memory_gib, checks.executed(proof(total)))
        assert found[:2] == (outcome, reason)
        assert found[2].memory_gib["total"] == total


@pytest.mark.parametrize("error", [InputError("no", field="layout.tp", value=3), ZeroDivisionError("oh")])
def test_an_error_is_the_outcome_of_a_check(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: Recipe) -> Any:
        raise error

    monkeypatch.setitem(checks._MAKERS, "tiny", fail)
    check = checks.make("tiny", index.load(LLAMA))
    assert check.outcome == "failed"
    assert check.reason.startswith(f"{type(error).__name__}: {error}")


def test_an_interruption_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(recipe: Recipe) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(checks._MAKERS, "tiny", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checks.make("tiny", index.load(LLAMA))


def test_a_layout_that_the_rules_refuse_fails_with_their_names() -> None:
    recipe = index.load(LLAMA)
    refused = msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, tp=3))
    check = checks.make("rules", refused)
    assert check.outcome == "failed"
    errors = check.figures.findings["error"]
    assert errors
    assert all(name in check.reason for name in errors)


@pytest.mark.parametrize("name", checks.EXECUTED)
def test_a_model_without_a_class_is_not_executed_and_says_why(name: str) -> None:
    check = checks.make(name, index.load(NO_CLASS))
    assert check.outcome == "not applicable"
    assert "transformers has no class for" in check.reason


def trained(losses: list[float], norms: list[float]) -> RunMetrics:
    return RunMetrics(losses, norms, {}, 1.0, 1.0, 1.0, None, {}, {}, [], "CPU")


@pytest.mark.parametrize(
    ("alone", "norms_alone", "reason"),
    [
        ([3.0, 2.0, 1.0], [1.0] * 3, ""),
        ([3.0, 2.0, 1.00002], [1.0] * 3, "losses on two processes and on one differ by 2e-05, more than 1e-05"),
        ([3.0, 2.0, 1.0], [1.0, 1.1, 1.0], "gradient norms on two processes and on one differ by 0.091"),
        ([3.0, 2.0, 1.0], [1.0, math.nan, 1.0], "gradient norms on two processes and on one differ by inf"),
    ],
)
def test_two_processes_must_train_as_one_does(
    alone: list[float], norms_alone: list[float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {2: trained([3.0, 2.0, 1.0], [1.0] * 3), 1: trained(alone, norms_alone)}
    monkeypatch.setattr(tiny, "_trained", lambda recipe, kind, config, world: outcomes[world])
    check = checks.make("tiny", index.load(LLAMA))
    assert check.outcome == ("failed" if reason else "ok"), check.reason
    assert check.reason.startswith(reason)
    assert msgspec.json.decode(msgspec.json.encode(check), type=Check[verification.Trained]) == check


def test_a_loss_that_does_not_fall_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    same = trained([1.0, 2.0, 3.0], [1.0] * 3)
    monkeypatch.setattr(tiny, "_trained", lambda recipe, kind, config, world: same)
    assert checks.make("tiny", index.load(LLAMA)).reason == "the loss does not fall"


def test_one_process_has_the_model_and_batch_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, tuple[Recipe, Any]] = {}

    def note(recipe: Recipe, kind: Any, config: Any, world: int) -> RunMetrics:
        seen[world] = (recipe, config.to_dict())
        return trained([3.0, 2.0, 1.0], [1.0] * 3)

    monkeypatch.setattr(tiny, "_trained", note)
    tiny.run(index.load("deepseek_v2_pretrain_config"))  # a pipeline, whose tiny model has a layer for each stage
    (two, config), (one, config_alone) = seen[2], seen[1]
    assert two.layout.pp == 2
    assert one.layout.pp == 1
    assert config == config_alone
    assert (one.train, one.data, one.optimizer, one.schedule, one.moe) == (
        two.train, two.data, two.optimizer, two.schedule, two.moe,
    )  # fmt: skip
    assert one.precision.compute == two.precision.compute == "fp32"


# The script.


def test_a_run_goes_on_where_it_was_left(tmp_path: Path) -> None:
    others = ["llama3_70b_pretrain_config", "gpt_oss_20b_peft_config"]
    names = [LLAMA, *others]
    verify.quick(tmp_path, names, verification.CHECKS)
    assert [card.missing for card in verification.read_all(tmp_path)] == [["dryrun", "tiny"]] * 3
    assert verify.tasks(tmp_path, names, ["tiny"], False) == [verify.Task(name, "tiny") for name in names]
    old = {**check_of().versions, "torch": "1.0"}
    for name, check in zip(names, (check_of(), check_of("failed"), check_of(versions=old)), strict=True):
        verification.write(tmp_path, verification.card_of(tmp_path, name).with_check("tiny", check))
    assert [task.recipe for task in verify.tasks(tmp_path, names, ["tiny"], False)] == others
    assert [task.recipe for task in verify.tasks(tmp_path, names, ["tiny"], True)] == names


def test_quick_checks_leave_a_card_that_says_the_same(tmp_path: Path) -> None:
    verify.quick(tmp_path, [LLAMA], verification.CHECKS)
    path = verification.path_of(tmp_path, LLAMA)
    os.utime(path, (1, 1))
    verify.quick(tmp_path, [LLAMA], verification.CHECKS)
    assert path.stat().st_mtime == 1


def test_the_script_ends_with_1_only_where_a_failed_recipe_is_not_withdrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = verification.new_card(LLAMA).with_check("tiny", check_of("failed", reason="out of luck"))
    verification.write(tmp_path, card)
    assert not verify.summary(tmp_path, [LLAMA])
    assert f"failed: {LLAMA}, tiny: out of luck" in capsys.readouterr().out
    verification.write(tmp_path, msgspec.structs.replace(card, withdrawn="no GPU has so much memory"))
    assert verify.summary(tmp_path, [LLAMA])


def test_checks_are_made_in_processes_of_their_own() -> None:
    todo = [verify.Task(name, "rules") for name in (LLAMA, NO_CLASS)]
    made = dict(verify.answers(todo, jobs=2))
    assert {task: check.figures for task, check in made.items()} == {
        task: checks.make("rules", index.load(task.recipe)).figures for task in todo
    }


def test_a_process_that_ends_without_an_answer_is_told_on_the_card() -> None:
    ((_, check),) = verify.answers([verify.Task(LLAMA, "no such check")], jobs=1)
    assert check.outcome == "failed"
    assert check.reason == "its process ended with exit code 1"


def test_a_process_that_dies_is_told_on_the_card() -> None:
    check = checks.died("tiny", index.load(LLAMA), -9, 3.0)
    assert check.outcome == "failed"
    assert "out of memory" in check.reason


def test_an_unknown_check_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.verify", "--checks", "tinny"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "tinny is none of rules, estimate, dryrun, tiny" in ended.stderr
