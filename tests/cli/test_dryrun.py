"""dryrun and recommend --dry-run with a fake dry run: text, JSON, plots, exit codes, bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meshwright import api, host_memory
from meshwright import dryrun as dryrun_room
from meshwright.cli import timeline
from meshwright.dryrun import cpu_budget
from meshwright.dryrun.types import Collective, DryRun, Holder, Moment, Placement, RankDryRun
from meshwright.engine.faults import RunError
from meshwright.errors import InputError
from meshwright.rules import RefusedError

RECIPE, GPUS = "llama3_8b_pretrain_config", "8xH100"
MEMORY_KEYS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "total", "capacity")
HELD = {"weights": 4.0, "gradients": 2.0, "optimizer": 8.0, "activations": 20.0, "logits": 1.0, "buffers": 0.5}
PHASES = ("build", "data", "forward", "backward", "gradients", "optimizer")


def moments(count: int) -> tuple[Moment, ...]:
    """Activations rise to the middle of the step and fall again."""
    half = count / 2
    return tuple(
        Moment(
            phase="forward" if place < half else "backward",
            label=f"layer {place}",
            gib={"weights": 4.0, "optimizer": 8.0, "activations": 20.0 * (1 - abs(place - half) / half)},
        )
        for place in range(count)
    )


def rank(number: int, pp_rank: int, more: float = 0.0, count: int = 40) -> RankDryRun:
    held = {**HELD, "activations": HELD["activations"] + more}
    return RankDryRun(
        rank=number,
        pp_rank=pp_rank,
        represents=(pp_rank, *((2, 3) if pp_rank == 1 else ())),
        layers=tuple(range(8 * pp_rank, 8 * pp_rank + 8)),
        memory_gib=held,
        allocated_gib=sum(held.values()),
        reserved_gib=sum(held.values()) + 1,
        peak_phase="backward",
        peak_at="micro batch 2, layer 7",
        phases={phase: {**held, "activations": place * 4.0} for place, phase in enumerate(PHASES)},
        timeline=moments(count),
        holders=tuple(
            Holder(
                "activations", "aten.mm", f"transformers/models/llama/modeling_llama.py:{n} in LlamaMLP.forward", 8, 1.5
            )
            for n in range(12)
        ),
        flops={"forward": 1e15, "recompute": 0.0, "backward": 2e15, "total": 3e15},
        collectives=(
            Collective("fsdp", "all_gather", "forward", 8, 33, 3.5),
            Collective("fsdp", "all_gather", "backward", 8, 32, 3.4),
            Collective("fsdp", "reduce_scatter", "backward", 8, 33, 7.0),
        ),
        placement=tuple(
            Placement(
                f"model.layers.{{}}.p{n}.weight", 8, (4096, 4096), (512, 4096), "float32", "fsdp: Shard(0)", n > 0, 0.06
            )
            for n in range(10)
        ),
        traced="2 of 8 layers traced, 6 replayed",
        exact=False,
        cpu_s=12.0,
    )


def dry_run_result(more: float = 0.0, count: int = 40) -> DryRun:
    ranks = (rank(0, 0, count=count), rank(2, 1, more or 1.0, count))
    memory = {**ranks[1].memory_gib, "overhead": 4.0, "total": ranks[1].allocated_gib + 4.0, "capacity": 79.6}
    estimate = {**memory, "activations": 18.0, "total": memory["total"] + 18.0 - memory["activations"]}
    return DryRun(
        recipe=RECIPE,
        model="llama3_8b",
        cluster=GPUS,
        world=8,
        ranks=ranks,
        worst=1,
        memory_gib=memory,
        fits=memory["total"] <= memory["capacity"],
        estimate_gib=estimate,
        versions={"torch": "2.13.0"},
        cpu_s=24.0,
        wall_s=13.0,
    )


@pytest.fixture
def fake_dry_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets what the dry run finds out, or how it fails; the calls it gets."""
    calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def found(result: DryRun | BaseException) -> list[tuple[Any, Any, dict[str, Any]]]:
        def prove(recipe: Any, cluster: Any, **settings: Any) -> DryRun:
            calls.append((recipe, cluster, settings))
            settings["progress"]("rank 0 of 8")
            if isinstance(result, BaseException):
                raise result
            return result

        stand_in = SimpleNamespace(dry_run=prove)  # the real one imports torch, which takes seconds
        monkeypatch.setitem(sys.modules, "meshwright.dryrun.run", stand_in)
        monkeypatch.setattr(dryrun_room, "run", stand_in, raising=False)
        return calls

    return found


def test_the_answer_has_the_shape_of_the_contract(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright("dryrun", RECIPE, "--gpus", GPUS, "layout.recompute=full", "--exact", "--json")
    assert answer.code == 0, answer.err
    asked, cluster, settings = calls[0]
    assert (asked.layout.recompute, str(cluster), settings["exact"], settings["processes"]) == (
        "full",
        GPUS,
        True,
        None,
    )
    found = answer.json
    assert tuple(found["memory_gib"]) == MEMORY_KEYS
    assert found["difference_gib"]["activations"] == pytest.approx(3.0)
    assert "capacity" not in found["difference_gib"]
    assert found["peak"] == {
        "rank": 2,
        "phase": "backward",
        "at": "micro batch 2, layer 7",
        "allocated_gib": 36.5,
        "reserved_gib": 37.5,
    }
    assert [r["rank"] for r in found["ranks"]] == [0, 2]
    for key in ("flops", "collectives", "holders", "timeline", "placement", "phases"):
        assert found[key] == found["ranks"][1][key]
    assert len(found["placement"]) == 10
    assert found["collectives"][0] == {
        "axis": "fsdp", "kind": "all_gather", "phase": "forward", "ranks": 8, "count": 33, "gib": 3.5
    }  # fmt: skip
    assert (found["fits"], found["recipe"], found["cluster"]) == (True, RECIPE, GPUS)
    assert set(found) >= {"model", "versions", "cpu_s", "wall_s", "estimate_gib"}
    assert answer.err == ""  # progress outside of terminals: one line every ten seconds


def test_the_cluster_is_the_recipes_unless_one_is_given(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    assert meshwright("dryrun", RECIPE).code == 0
    assert str(calls[0][1]) == str(api.cluster(api.recipe(RECIPE).cluster))


def test_text_names_what_holds_the_peak_and_fits_a_terminal(meshwright: Any, fake_dry_run: Any) -> None:
    fake_dry_run(dry_run_result())
    answer = meshwright("dryrun", RECIPE, "--gpus", GPUS)
    assert answer.code == 0
    for words in (
        "40.5 of 79.6 GiB on the fullest GPU (estimated 37.5, +3.0): fits",
        "the peak is in backward, micro batch 2, layer 7, on rank 2: torch allocates 36.5 and reserves 37.5 GiB",
        "modeling_llama.py:3 in LlamaMLP.forward",
        "10 of 12 lines of code",
        "8 of 10 kinds of parameters",
        "float32, frozen",
        "forward 1,000.0  backward 2,000.0  total 3,000.0 TFLOP per step",
        "✓ rank 2 (pp 1, also 2–3): layers 8–15, 36.5 GiB allocated",
        "2 of 8 layers traced, 6 replayed",
        "2 kinds of ranks of 8 executed without a GPU in 24 s of CPU time, 13 s in all (torch 2.13.0)",
    ):
        assert words in answer.out
    lines = answer.out.splitlines()
    row = next(line.split() for line in lines if line.startswith("fsdp  all_gather"))
    assert row == ["fsdp", "all_gather", "8", "65", "6.90", "forward,", "backward"]
    drawn = [line for line in lines if "│" in line or "┼" in line or "└" in line]
    assert max(map(len, drawn)) <= 80
    assert any("75.6 ┼──" in line for line in drawn)  # the capacity less the overhead


@pytest.mark.parametrize("count", [1, 2, 69, 70, 71, 1000])
def test_a_timeline_is_as_high_as_its_moments_and_as_wide_as_a_terminal(count: int) -> None:
    from meshwright.cli.console import plain

    shown = [plain(line) for line in timeline.drawn(msgspec.to_builtins(moments(count)), 40.0)]
    assert len(shown) == timeline.ROWS + 2
    assert max(map(len, shown)) <= 80
    body = shown[: timeline.ROWS]
    heights = [
        sum(line[9:].ljust(timeline.COLUMNS)[column] in "WOA" for line in body) for column in range(timeline.COLUMNS)
    ]
    marked = shown[-1].index("^") - 9
    assert heights[marked] == max(heights)
    top = 40.0 * 1.05
    peak = max(sum(m.gib.values()) for m in moments(count))
    assert heights[marked] == pytest.approx(peak / top * timeline.ROWS, abs=1)


def test_a_timeline_beyond_the_limit_crosses_its_line() -> None:
    from meshwright.cli.console import plain

    shown = [plain(line) for line in timeline.drawn(msgspec.to_builtins(moments(70)), 20.0)]
    line = next(line for line in shown if "┼" in line)
    assert "A" in line
    assert "─" in line
    assert timeline.drawn([], 20.0) == []


def test_what_does_not_fit_is_a_no(meshwright: Any, fake_dry_run: Any) -> None:
    fake_dry_run(dry_run_result(more=60.0))
    answer = meshwright("dryrun", RECIPE, "--gpus", GPUS)
    assert answer.code == 1
    assert "does not fit" in answer.out
    assert "✗ rank 2" in answer.out
    assert "✓ rank 0" in answer.out
    result = meshwright("dryrun", RECIPE, "--gpus", GPUS, "--json")
    assert (result.code, result.json["fits"]) == (1, False)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots(meshwright: Any, fake_dry_run: Any, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    fake_dry_run(dry_run_result(count=300))
    path = tmp_path / f"memory.{suffix}"
    assert meshwright("dryrun", RECIPE, "--plot", str(path)).code == 0
    assert path.stat().st_size > 10_000


def test_a_plot_that_cannot_be_drawn_is_reported_before_the_work(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright("dryrun", RECIPE, "--plot", "memory.gif", "--json")
    assert (answer.code, answer.json["error"]["field"]) == (2, "plot")
    assert calls == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("llama3_8b_pretrain_confg",), RECIPE),
        ((RECIPE, "--gpus", "8xH10O"), "H100"),
        ((RECIPE, "layout.tpp=2"), "layout.tp"),
        ((RECIPE, "--processes", "0"), "processes"),
        (("missing.toml",), ""),
    ],
)
def test_bad_input(meshwright: Any, fake_dry_run: Any, words: tuple[str, ...], hint: str) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright("dryrun", *words, "--json")
    assert answer.code == 2
    assert hint in str(answer.json["error"])
    assert calls == []


def test_a_failing_trace_is_a_failed_run(meshwright: Any, fake_dry_run: Any) -> None:
    fake_dry_run(ValueError("a shape is wrong"))
    answer = meshwright("dryrun", RECIPE, "--json")
    assert answer.code == 3
    assert "a shape is wrong" in answer.json["error"]["message"]
    fake_dry_run(RunError("rank 3 was killed"))
    assert meshwright("dryrun", RECIPE).code == 3


def test_a_rejected_layout_exits_1_and_an_unknown_class_2(meshwright: Any, fake_dry_run: Any) -> None:
    found = api.check(RECIPE, gpus="2xH100", overrides=["layout.tp=8"]).findings
    fake_dry_run(RefusedError([one for one in found if one.severity == "error"]))
    answer = meshwright("dryrun", RECIPE, "--gpus", "2xH100", "layout.tp=8", "--json")
    assert answer.code == 1
    assert "2 GPUs are not divisible by tp × pp × cp = 8" in answer.json["error"]["message"]
    fake_dry_run(InputError("transformers has no class for it", field="model", value="x"))
    assert meshwright("dryrun", RECIPE).code == 2


def test_ctrl_c_ends_it_clearly(meshwright: Any, fake_dry_run: Any) -> None:
    fake_dry_run(KeyboardInterrupt())
    answer = meshwright("dryrun", RECIPE, "--json")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == "interrupted; no files were written\n"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_torch_the_error_has_the_install_command(
    meshwright: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    answer = meshwright("dryrun", RECIPE, "--json")
    assert answer.code == 2
    assert missing in answer.json["error"]["message"]
    assert answer.json["error"]["fix"][0].endswith('pip install "meshwright[train]"')


def test_too_little_host_memory_is_reported_before_the_work(
    meshwright: Any, fake_dry_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_dry_run(dry_run_result())
    monkeypatch.setattr(cpu_budget, "cores", lambda: 4)
    need = cpu_budget.gib_per_process(api.recipe("llama3_70b_pretrain_config"), api.cluster("64xH100"))
    monkeypatch.setattr(cpu_budget, "free_gib", lambda: 2.5 * need)
    asked = ("dryrun", "llama3_70b_pretrain_config", "--gpus", "64xH100", "layout.pp=4", "--json")
    answer = meshwright(*asked)
    assert answer.code == 2
    error = answer.json["error"]
    assert f"{2.5 * need:.1f} GiB are free" in error["message"]
    count = int(error["fix"][0].removeprefix("--processes "))
    assert calls == []
    assert meshwright(*asked, "--processes", str(count)).code == 0
    monkeypatch.setattr(cpu_budget, "free_gib", lambda: 0.1)
    assert "a machine with" in meshwright(*asked).json["error"]["fix"][0]
    monkeypatch.setattr(cpu_budget, "free_gib", lambda: None)  # nobody says: then nothing is refused
    assert meshwright(*asked).code == 0


def test_free_memory_is_the_containers_where_it_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1024**3
    files = {
        "machine": "MemTotal: 9 kB\nMemAvailable: 4194304 kB\n",
        "most": str(3 * gib),
        "now": str(2 * gib),
        "memory.stat": f"anon 7\nold {gib}\n",  # of files that were read: it can be given up
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "machine")
    monkeypatch.setattr(host_memory, "CGROUPS", ((tmp_path, "most", "now", "old"), (tmp_path / "none", "a", "b", "c")))
    assert cpu_budget.free_gib() == pytest.approx(2.0)
    (tmp_path / "most").write_text("max")
    assert cpu_budget.free_gib() == pytest.approx(4.0)


ASKED = ("recommend", "llama3-8b", "--gpus", GPUS, "--goal", "sft")


def test_recommend_dry_runs_its_pick(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright(*ASKED, "--dry-run", "--json")
    assert answer.code == 0
    plan = api.recommend("llama3-8b", GPUS, "sft")
    assert calls[0][:2] == (plan.recipe, plan.question.cluster)
    result = answer.json["dry_run"]
    assert result["memory_gib"]["total"] == pytest.approx(40.5)
    assert not any(name in holder for holder in (result, *result["ranks"]) for name in ("timeline", "placement"))
    text = meshwright(*ASKED, "--dry-run")
    assert "Run " in text.out
    assert "Dry run  40.5 of 79.6 GiB" in text.out


def test_recommend_fails_if_its_dry_run_does_not_fit(meshwright: Any, fake_dry_run: Any) -> None:
    fake_dry_run(dry_run_result(more=60.0))
    answer = meshwright(*ASKED, "--dry-run", "--json")
    assert answer.code == 1
    assert answer.json["estimate"]["fits"] is True
    assert answer.json["dry_run"]["fits"] is False
    assert "does not fit" in meshwright(*ASKED, "--dry-run").out


def test_what_cannot_be_built_is_not_dry_run(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright(*ASKED, "layout.tp=3", "--dry-run", "--json")
    assert (answer.code, answer.json["dry_run"], calls) == (1, None, [])
    assert "Dry run  no figures" in meshwright(*ASKED, "layout.tp=3", "--dry-run").out


def test_only_our_engine_can_be_dry_run(meshwright: Any, fake_dry_run: Any) -> None:
    calls = fake_dry_run(dry_run_result())
    answer = meshwright(*ASKED, "--engine", "megatron", "--dry-run", "--json")
    assert (answer.code, answer.json["error"]["field"], calls) == (2, "engine", [])


def test_help_has_examples(meshwright: Any) -> None:
    answer = meshwright("dryrun", "--help")
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert "Exit codes" in answer.out


def test_recommend_without_prove_imports_no_torch() -> None:
    code = (
        "import sys; from meshwright.cli.run import run\n"
        f"try: run({list(ASKED)!r})\n"
        "except SystemExit: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_another_engines_recipe_says_first_that_ours_was_executed_and_has_its_own_verdict(
    meshwright: Any, fake_dry_run: Any, tmp_path: Path
) -> None:
    recipe = str(tmp_path / "q3.toml")
    plan = ("recommend", "qwen3-30b-a3b", "--gpus", "16x8xH100", "--goal", "pretrain", "--engine", "megatron")
    assert meshwright(*plan, "--save", recipe).code == 0
    estimated = meshwright("estimate", recipe, "--gpus", "16x8xH100", "--json").json["estimate"]["memory_gib"]["total"]
    fake_dry_run(dry_run_result(more=60.0))  # ours does not fit
    words = ("dryrun", recipe, "--gpus", "16x8xH100")
    text, found = meshwright(*words), meshwright(*words, "--json")
    lines = text.out.splitlines()
    assert lines[1].startswith(
        "Engine   our engine was executed in place of megatron, with layout.strategy zero1 → fsdp2"
    )
    assert f"{estimated:.1f} of 79.7 GiB, an estimate: " in lines[2]
    assert "does not fit (our engine, not megatron)" in text.out
    assert "trust the dry run" not in text.out
    other = found.json["other_engine"]
    assert (other["engine"], other["fits"], found.json["fits"]) == ("megatron", True, False)
    assert other["estimate_gib"] == pytest.approx(estimated, abs=1e-3)
    assert (text.code, found.code) == (0, 0)  # Megatron's estimate fits
    assert "other_engine" not in meshwright("dryrun", RECIPE, "--gpus", GPUS, "--json").json
