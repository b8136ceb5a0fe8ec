"""Verification reports: they match the shipped recipes, and their figures are reproduced today."""

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
NOT_RUN_YET: tuple[str, ...] = ()  # checks that reports may lack until `make verify` has run
CHEAPEST = 12  # dry runs that the daily test rotates through
LLAMA, NO_CLASS = "llama3_8b_pretrain_config", "nemotron_nano_v2_vl_12b_sft_config"

REPORTS = list(verification.read().values())


def shipped() -> set[str]:
    return {entry.name for entry in index.entries(benchmark=False)}


# The reports in the repository.


def test_every_shipped_recipe_has_a_report() -> None:
    assert sorted(shipped() - {report.recipe for report in REPORTS}) == []


def test_every_report_is_one_sorted_line_of_a_known_recipe() -> None:
    assert [report.recipe for report in REPORTS if not index.is_known(report.recipe)] == []
    assert [report.recipe for report in REPORTS] == sorted({report.recipe for report in REPORTS})
    assert len(verification.REPORTS.read_text().splitlines()) == len(REPORTS)


def test_no_report_is_stale() -> None:
    assert [report.recipe for report in REPORTS if verification.is_stale(report)] == [], "run `make verify`"


def test_every_check_has_run() -> None:
    lacking = {report.recipe: report.missing for report in REPORTS if set(report.missing) - set(NOT_RUN_YET)}
    assert lacking == {}, "run `make verify`"


def test_a_recipe_that_fails_is_withdrawn_with_the_reason() -> None:
    assert {report.recipe: report.failed for report in REPORTS if report.failed and not report.withdrawn} == {}


def test_only_models_without_a_class_are_not_executed() -> None:
    excused = {
        report.recipe
        for report in REPORTS
        for name in verification.CHECKS
        if (check := report.check(name)) is not None and check.outcome == "not applicable"
    }
    assert {
        name: checks.unsupported_model(index.load(name))
        for name in excused
        if not checks.unsupported_model(index.load(name))
    } == {}


def test_rules_and_estimates_of_all_reports_are_current() -> None:
    """All of them together take three seconds."""
    for report in REPORTS:
        recipe = index.load(report.recipe)
        for name in ("rules", "estimate"):
            known, now = report.check(name), checks.run_check(name, recipe)
            assert known is not None
            hint = f"{report.recipe}: run `python -m benchmarks.verify --checks rules,estimate`"
            assert (now.outcome, now.reason) == (known.outcome, known.reason), hint
            assert all(_alike(*pair) for pair in _pairs(now.figures, known.figures)), hint


def test_dry_runs_of_all_reports_are_compared_with_current_estimates() -> None:
    for report in REPORTS:
        known, now = report.checks.dryrun, checks.with_current_estimate(report).checks.dryrun
        if known is not None and known.figures is not None:
            assert now is not None
            assert now.figures is not None
            hint = f"{report.recipe}: run `python -m benchmarks.verify --checks rules,estimate`"
            assert now.figures.difference_gib == pytest.approx(known.figures.difference_gib, abs=1e-3), hint


def _pairs(found: Any, expected: Any) -> list[tuple[Any, Any]]:
    """Return the leaves of two results in pairs."""
    ours, theirs = _leaves(msgspec.to_builtins(found)), _leaves(msgspec.to_builtins(expected))
    return [(ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()]


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _leaves(inner, f"{path}.{key}").items()}


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float):  # other machines may round differently
        return math.isclose(found, expected, rel_tol=1e-4)
    return bool(found == expected)


def of_the_day(reports: list[VerificationReport]) -> VerificationReport:
    """Return another report every day."""
    return reports[date.today().toordinal() % len(reports)]


def test_the_dry_run_of_the_day_reproduces_its_report() -> None:
    executed = [
        (check.figures.cpu_s, report)
        for report in REPORTS
        if (check := report.checks.dryrun) and check.figures and check.versions == _here(report)
    ]
    if not executed:
        pytest.skip("no report was made with the installed versions")
    report = of_the_day([report for _, report in sorted(executed, key=lambda pair: pair[0])[:CHEAPEST]])
    known = report.checks.dryrun
    assert known is not None
    # In this process: the script, which imports torch in another, is in the slow test below.
    made = checks.run_check("dryrun", index.load(report.recipe))
    assert (made.outcome, made.reason) == (known.outcome, known.reason)
    assert _untimed(made) == _untimed(known), report.recipe


def _here(report: VerificationReport) -> dict[str, str]:
    return checks.versions("dryrun", index.load(report.recipe))


def _untimed(check: Check[verification.DryRunResult]) -> verification.DryRunResult:
    """Return the figures of a dry run that do not depend on its duration or on the estimate."""
    assert check.figures is not None
    return msgspec.structs.replace(check.figures, cpu_s=0.0, difference_gib={})


@pytest.mark.slow
def test_the_tiny_training_of_the_day_reproduces_its_report(tmp_path: Path) -> None:
    report = of_the_day([report for report in REPORTS if report.checks.tiny and report.checks.tiny.figures])
    known, made = report.checks.tiny, run_script(report.recipe, "tiny", tmp_path / "reports.jsonl").checks.tiny
    assert known is not None
    assert known.figures is not None
    assert made is not None
    assert made.figures is not None
    assert made.outcome == known.outcome
    assert made.figures.layout == known.figures.layout
    assert made.figures.losses == pytest.approx(known.figures.losses, rel=1e-3)


def run_script(name: str, check: str, file: Path) -> VerificationReport:
    command = [sys.executable, "-m", "benchmarks.verify", "--only", name, "--checks", check, "--file", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    reports = verification.read(file)
    assert name in reports, ended.stdout + ended.stderr
    return reports[name]


# A report.


def check_of(outcome: Any = "ok", name: str = "tiny", **more: Any) -> Check[Any]:
    versions = checks.versions(name, index.load(LLAMA))
    return Check(**{"outcome": outcome, "date": "2026-01-01", "versions": versions, "seconds": 1.0, **more})


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    report = verification.empty(LLAMA)
    for name in ("rules", "estimate"):
        report = report.with_check(name, checks.run_check(name, index.load(LLAMA)))
    report = report.with_check("tiny", check_of("failed", reason="no"))
    path = tmp_path / "reports.jsonl"
    verification.update(path, [report])
    assert verification.read(path) == {LLAMA: report}
    assert report.failed == ["tiny"]
    assert report.missing == ["dryrun"]
    assert json.loads(path.read_text())["checks"]["estimate"]["figures"]["fits"] is True


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = verification.empty(LLAMA)
    path = tmp_path / "reports.jsonl"
    verification.update(path, [report])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        verification.update(path, [report.with_check("tiny", check_of())])
    assert verification.read(path) == {LLAMA: report}
    assert os.listdir(tmp_path) == ["reports.jsonl"]


def test_an_update_replaces_one_line_and_keeps_the_others_in_order(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    verification.update(path, [verification.empty(NO_CLASS), verification.empty(LLAMA)])
    before = path.read_text().splitlines()
    verification.update(path, [verification.empty(NO_CLASS).with_check("tiny", check_of())])
    after = path.read_text().splitlines()
    assert list(verification.read(path)) == [LLAMA, NO_CLASS]
    assert after[0] == before[0]
    assert after[1] != before[1]


def _larger_batch(recipe: Recipe) -> Recipe:
    train = msgspec.structs.replace(recipe.train, global_batch_size=2 * recipe.train.global_batch_size)
    return msgspec.structs.replace(recipe, train=train)


def _other_layout(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, recompute="full"))


def _other_cluster(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, cluster="4xH100")


@pytest.mark.parametrize("changed", [_larger_batch, _other_layout, _other_cluster])
def test_a_changed_recipe_makes_its_report_stale(
    changed: Callable[[Recipe], Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = index.load(LLAMA)
    report = msgspec.structs.replace(verification.empty(LLAMA).with_check("tiny", check_of()), withdrawn="it fails")
    assert verification.current({LLAMA: report}, LLAMA) == report
    monkeypatch.setattr(index, "load", lambda name: changed(recipe))
    assert verification.is_stale(report)
    assert verification.current({LLAMA: report}, LLAMA) == verification.empty(LLAMA)
    assert verification.empty(LLAMA).checks == verification.Checks()


@pytest.mark.parametrize(
    ("change", "older"),
    [({"source": "elsewhere"}, False), ({"aliases": ("x",)}, False), ({"vocab": 1}, True), ({"tied": True}, True)],
)
def test_architecture_changes_make_a_report_stale_and_description_changes_do_not(
    change: dict[str, Any], older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verification.fingerprint(index.load(LLAMA))
    model = msgspec.structs.replace(verification.model_of(index.load(LLAMA)), **change)
    monkeypatch.setattr(verification, "model_of", lambda recipe: model)
    assert (verification.fingerprint(index.load(LLAMA)) != before) is older


def test_a_check_with_the_same_result_keeps_its_date() -> None:
    report = verification.empty(LLAMA).with_check("tiny", check_of())
    assert report.with_check("tiny", check_of(date="2026-02-02", seconds=9.0)) is report
    assert report.with_check("tiny", check_of("failed", date="2026-02-02")).date == "2026-02-02"


def dry_run_result(total: float = 11.0) -> DryRun:
    sent = tuple(Collective("tp", "all_gather", phase, 2, 3, 0.5) for phase in ("forward", "backward"))
    rank = RankDryRun(
        rank=0,
        pp_rank=0,
        represents=(0, 1),
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


def test_a_report_keeps_the_worst_rank_of_a_dry_run_and_sums_its_collectives() -> None:
    found = checks.summarize(dry_run_result())
    assert (found.worst, found.peak_phase, found.reserved_gib) == (0, "backward", 7.0)
    assert found.collectives == (
        verification.CollectiveTotal("pp", "send", 2, 1, 0.25),
        verification.CollectiveTotal("tp", "all_gather", 2, 6, 1.0),
    )
    assert [(one.rank, one.allocated_gib) for one in found.ranks] == [(1, 1.0), (0, 6.0)]


def test_a_dry_run_is_compared_with_the_estimate_of_its_pipeline_rank() -> None:
    name = "deepseek_v2_pretrain_config"  # whose stages differ
    recipe = index.load(name)
    case = Case(recipe, model_of(recipe), clusters.cluster(recipe.cluster))
    made = msgspec.structs.replace(checks.summarize(dry_run_result()), pp_rank=recipe.layout.pp - 1, difference_gib={})
    report = checks.with_current_estimate(
        verification.empty(name).with_check("dryrun", check_of(name="dryrun", figures=made))
    )
    assert report.checks.dryrun is not None
    assert report.checks.dryrun.figures is not None
    difference = report.checks.dryrun.figures.difference_gib
    last, first = (float(costs.memory_by_stage(case)[stage].weights) for stage in (-1, 0))
    assert last != pytest.approx(first, abs=1e-3)
    assert difference["weights"] == pytest.approx(6.0 - last, abs=1e-3)
    assert set(difference) == {"weights", "overhead", "total"}
    assert checks.with_current_estimate(report) is report


# Running checks.


def test_a_recipe_that_does_not_fit_fails_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, outcome, reason in ((11.0, "failed", "needs 11.0 of 10.0 GiB"), (9.0, "ok", "")):
        found = checks._memory_outcome(
            total <= 10.0, dry_run_result(total).memory_gib, checks.summarize(dry_run_result(total))
        )
        assert found[:2] == (outcome, reason)
        assert found[2].memory_gib["total"] == total


@pytest.mark.parametrize("error", [InputError("no", field="layout.tp", value=3), ZeroDivisionError("oh")])
def test_an_error_is_the_outcome_of_a_check(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: Recipe) -> Any:
        raise error

    monkeypatch.setitem(checks._CHECKS, "tiny", fail)
    check = checks.run_check("tiny", index.load(LLAMA))
    assert check.outcome == "failed"
    assert check.reason.startswith(f"{type(error).__name__}: {error}")


def test_an_interruption_is_not_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(recipe: Recipe) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(checks._CHECKS, "tiny", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checks.run_check("tiny", index.load(LLAMA))


def test_a_layout_with_rule_errors_fails_with_the_rule_ids() -> None:
    recipe = index.load(LLAMA)
    refused = msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, tp=3))
    check = checks.run_check("rules", refused)
    assert check.outcome == "failed"
    errors = check.figures.findings["error"]
    assert errors
    assert all(name in check.reason for name in errors)


@pytest.mark.parametrize("name", checks.ENGINE_CHECKS)
def test_a_model_without_a_class_is_not_applicable_with_the_reason(name: str) -> None:
    check = checks.run_check(name, index.load(NO_CLASS))
    assert check.outcome == "not applicable"
    assert "transformers has no class for" in check.reason


def trained(losses: list[float], norms: list[float]) -> RunMetrics:
    return RunMetrics(losses, norms, {}, [], None, None, None, 1.0, 1.0, 1.0, None, {}, {}, [], "CPU")


@pytest.mark.parametrize(
    ("alone", "norms_alone", "reason"),
    [
        ([3.0, 2.0, 1.0], [1.0] * 3, ""),
        ([3.0, 2.0, 1.00002], [1.0] * 3, "losses on two processes and on one differ by 2e-05, more than 1e-05"),
        ([3.0, 2.0, 1.0], [1.0, 1.1, 1.0], "gradient norms on two processes and on one differ by 0.091"),
        ([3.0, 2.0, 1.0], [1.0, math.nan, 1.0], "gradient norms on two processes and on one differ by inf"),
    ],
)
def test_two_processes_must_train_like_one(
    alone: list[float], norms_alone: list[float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {2: trained([3.0, 2.0, 1.0], [1.0] * 3), 1: trained(alone, norms_alone)}
    monkeypatch.setattr(tiny, "_train", lambda recipe, kind, config, world: outcomes[world])
    check = checks.run_check("tiny", index.load(LLAMA))
    assert check.outcome == ("failed" if reason else "ok"), check.reason
    assert check.reason.startswith(reason)
    assert msgspec.json.decode(msgspec.json.encode(check), type=Check[verification.TinyRunResult]) == check


def test_a_loss_that_does_not_fall_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    same = trained([1.0, 2.0, 3.0], [1.0] * 3)
    monkeypatch.setattr(tiny, "_train", lambda recipe, kind, config, world: same)
    assert checks.run_check("tiny", index.load(LLAMA)).reason == "the loss does not fall"


def test_one_process_uses_the_model_and_batch_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, tuple[Recipe, Any]] = {}

    def note(recipe: Recipe, kind: Any, config: Any, world: int) -> RunMetrics:
        seen[world] = (recipe, config.to_dict())
        return trained([3.0, 2.0, 1.0], [1.0] * 3)

    monkeypatch.setattr(tiny, "_train", note)
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


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    others = ["llama3_70b_pretrain_config", "gpt_oss_20b_peft_config"]
    names = [LLAMA, *others]
    path = tmp_path / "reports.jsonl"
    verify.run_quick_checks(path, names, verification.CHECKS)
    assert [report.missing for report in verification.read(path).values()] == [["dryrun", "tiny"]] * 3
    assert verify.pending_tasks(path, names, ["tiny"], False) == [verify.Task(name, "tiny") for name in names]
    old = {**check_of().versions, "torch": "1.0"}
    for name, check in zip(names, (check_of(), check_of("failed"), check_of(versions=old)), strict=True):
        verification.update(path, [verification.read(path)[name].with_check("tiny", check)])
    assert [task.recipe for task in verify.pending_tasks(path, names, ["tiny"], False)] == others
    assert [task.recipe for task in verify.pending_tasks(path, names, ["tiny"], True)] == names


def test_quick_checks_do_not_rewrite_unchanged_reports(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    verify.run_quick_checks(path, [LLAMA], verification.CHECKS)
    os.utime(path, (1, 1))
    verify.run_quick_checks(path, [LLAMA], verification.CHECKS)
    assert path.stat().st_mtime == 1


def test_the_script_exits_with_1_only_if_a_failed_recipe_is_not_withdrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verification.empty(LLAMA).with_check("tiny", check_of("failed", reason="out of luck"))
    path = tmp_path / "reports.jsonl"
    verification.update(path, [report])
    assert not verify.print_summary(path, [LLAMA])
    assert f"failed: {LLAMA}, tiny: out of luck" in capsys.readouterr().out
    verification.update(path, [msgspec.structs.replace(report, withdrawn="no GPU has so much memory")])
    assert verify.print_summary(path, [LLAMA])


def test_checks_run_in_processes_of_their_own() -> None:
    todo = [verify.Task(name, "rules") for name in (LLAMA, NO_CLASS)]
    made = dict(verify.results(todo, jobs=2))
    assert {task: check.figures for task, check in made.items()} == {
        task: checks.run_check("rules", index.load(task.recipe)).figures for task in todo
    }


def test_a_process_that_exits_without_a_result_fails_its_check() -> None:
    ((_, check),) = verify.results([verify.Task(LLAMA, "no such check")], jobs=1)
    assert check.outcome == "failed"
    assert check.reason == "its process exited with code 1"


def test_a_killed_process_fails_its_check() -> None:
    check = checks.crashed("tiny", index.load(LLAMA), -9, 3.0)
    assert check.outcome == "failed"
    assert "out of memory" in check.reason


def test_an_unknown_check_is_rejected() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.verify", "--checks", "tinny"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "tinny is none of rules, estimate, dryrun, tiny" in ended.stderr
