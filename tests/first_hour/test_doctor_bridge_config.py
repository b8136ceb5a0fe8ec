"""A log of Megatron-Bridge has the config that its runner prints, or its degrees: they are those of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.frameworks.test_megatron_bridge import SAVED

STEP = (
    "Step Time : {s:.2f}s GPU utilization: 474.3MODEL_TFLOP/s/GPU\n [2026-11-12 09:08:13] iteration {i:8d}/   47684 |"
    " consumed samples: {n:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.5E-07 |"
    " global batch size:   512 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.400 |\n"
)
DEGREES = "> initialized tensor model parallel with size 4\n> initialized pipeline model parallel with size 2\n"
BUILT = "time to initialize megatron (seconds): 18.2\n > number of parameters on (tensor, pipeline) (0, 0): 88\n"
MODEL = {
    "hf_model_id": "meta-llama/Meta-Llama-3.1-70B",
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 8,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "num_layers": 80,
    "hidden_size": 8192,
    "seq_length": 8192,
    "recompute_granularity": None,
}


def printed(**model: Any) -> str:
    """Return the config of a 70B as yaml.safe_dump prints it."""
    config = yaml.safe_load(SAVED)
    kept = ("_target_", "attention_backend", "cuda_graph_impl", "cuda_graph_scope")
    config["model"] = {key: config["model"][key] for key in kept} | MODEL | model
    overlap = "megatron.bridge.training.comm_overlap.CommOverlapConfig"
    config["comm_overlap"] = {"_target_": overlap, "tp_comm_overlap": True}
    config["dataset"] |= {"seq_length": 8192}
    config["train"] |= {"global_batch_size": 512, "train_iters": 47684}
    return yaml.safe_dump(config, default_flow_style=False) + "\n"


def log(config: str = "", degrees: str = DEGREES, seconds: float = 31.05) -> str:
    head = f"INFO:__main__:Final configuration:\n{config}" if config else ""
    steps = (
        STEP.format(s=seconds, ms=1000 * seconds, i=one, n=512 * one, loss=2 - one / 1e3) for one in range(10, 310, 10)
    )
    return (
        head + degrees + BUILT + "[before the start of training step] datetime: 2026-11-12 09:03:03\n" + "".join(steps)
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def figures(meshwright: Any, text: str, *more: str) -> dict[str, Any]:
    Path("train.log").write_text(text)
    found: dict[str, Any] = meshwright("doctor", "train.log", "--gpus", "16x8xH200", *more, "--json").json
    return found | {one["name"]: one for one in found["figures"]}


def labelled(config: str) -> str:
    """Return a config as srun --label and another rank between its lines print it."""
    first, rest = config[:200].rpartition("\n")[0], config[:200].rpartition("\n")[2] + config[200:]
    lines = [*first.split("\n"), "\0", *rest.split("\n")]
    return "".join("17: WARNING: slow import\n" if one == "\0" else f"0: {one}\n" for one in lines)


@pytest.mark.parametrize("written", [str, labelled])
def test_the_printed_config_is_what_ran(meshwright: Any, written: Any) -> None:
    found = figures(meshwright, log(written(printed())))
    assert (found["model"], found["engine"], found["gpus"]) == ("llama31_70b", "megatron", "16x8xH200")
    assert found["step time"]["estimate"] == pytest.approx(31.03, abs=0.3)
    assert not any("assumes" in one or "no estimate" in one for one in found["notes"])


def test_the_config_of_the_last_start_counts(meshwright: Any) -> None:
    other = printed(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    slower = figures(meshwright, log(printed()) + log(other))["step time"]["estimate"]
    assert slower > 35


@pytest.mark.parametrize("cut", [0.3, 0.6])
def test_a_part_of_a_config_is_not_read(meshwright: Any, cut: float) -> None:
    config = printed()
    found = figures(meshwright, log(config[: int(cut * len(config))] + "\n"))
    assert any("the log does not name the model" in one for one in found["notes"])


def test_the_degrees_of_a_script_without_the_runner_are_the_runs(meshwright: Any) -> None:
    """The estimate was of the recipe's tp 8 and pp 4."""
    for named in (("--recipe", "llama31_70b"), ("--model", "llama31_70b"), ("--recipe", "llama3_70b_pretrain_config")):
        found = figures(meshwright, log(), *named, "layout.vp=8", "layout.recompute=none")
        assert found["step time"]["estimate"] == pytest.approx(31.03, abs=0.3)
        assert not any("does not state the layout" in one for one in found["notes"])
    found = figures(meshwright, log(), "--recipe", "llama31_70b")
    assert any("does not state layout.cp=1 layout.micro_batch_size=1 layout.vp=1" in one for one in found["notes"])


def test_a_log_with_its_config_calibrates(meshwright: Any) -> None:
    Path("train.log").write_text(log(printed(), seconds=34.1))
    answer = meshwright("calibrate", "train.log", "--gpus", "16x8xH200", "--out", "mine.toml")
    assert answer.code == 0
    assert float(answer.out.split("H200: ")[1].split()[0]) == pytest.approx(31.03 / 34.1, rel=0.02)
    plan = ("recommend", "llama3.1-70b", "--gpus", "16x8xH200", "--goal", "pretrain", "--seq", "8k")
    like = meshwright(*plan, "--engine", "megatron", "--like", "train.log", "--json").json
    assert like["estimate"]["step_s"] == pytest.approx(34.1, rel=0.02)


def test_no_note_about_a_rate_that_nobody_typed(meshwright: Any) -> None:
    Path("train.log").write_text(log())
    answer = meshwright("doctor", "train.log", "--gpus", "16x8xH200", "--model", "llama31_70b")
    assert "schedule.min_lr" not in answer.err


def test_continued_pretraining_is_no_fine_tuning(meshwright: Any) -> None:
    config = printed().replace("  save_interval", "  pretrained_checkpoint: /ckpt/70b\n  save_interval")
    Path("run_config.yaml").write_text(config)
    assert 'goal = "pretrain"' in meshwright("import", "run_config.yaml", "--gpus", "16x8xH200", "--json").json["text"]


def report(slow: tuple[int, ...], node: str = "node06", score: float = 0.69) -> str:
    """Return a report of nvidia-resiliency-ext's straggler detector as Megatron-Bridge prints it."""
    named = ", ".join(f"StragglerId(rank={rank}, node='{node}')" for rank in slow)
    title = "WARNING:nvrx:STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: "
    scores = "".join(f"  Rank={rank} Node={node} Score={score:.2f}\n" for rank in slow or (3,))
    worst = f"INFO:nvrx:GPU relative performance:\n Worst performing 5/128 ranks:\n{scores}"
    return (
        f"{title}{{{named}}}\n" if slow else ""
    ) + f"{worst} Best performing 5/128 ranks:\n  Rank=17 Node=n3 Score=1.00\n"


def with_reports(text: str, after: dict[int, tuple[int, ...]]) -> str:
    """Return a log with a report after some of its lines of steps."""
    lines = text.splitlines(keepends=True)
    for number, slow in sorted(after.items(), reverse=True):
        at = next(place for place, line in enumerate(lines) if f"iteration {number:8d}/" in line)
        lines.insert(at + 1, report(slow) if slow else report((), score=0.97))
    return "".join(lines)


SLOW = tuple(range(40, 48))


@pytest.mark.parametrize("config", [True, False])
def test_ranks_that_the_straggler_detector_names_are_found(meshwright: Any, config: bool) -> None:
    """The report was not read: no findings, or a low MFU and a profiler trace."""
    text = log(printed() if config else "", seconds=40.7)
    found = figures(meshwright, with_reports(text, {50: SLOW, 150: SLOW, 250: SLOW}))
    assert [one["rule"] for one in found["findings"]] == ["speed.stragglers"]
    message = found["findings"][0]["message"]
    assert "ranks 40-47 (node06) as slow in all of its reports, from step 50 on, at 0.69" in message
    assert ["exclude node06"] in [one["try"] for one in found["findings"][0]["remedies"]]


@pytest.mark.parametrize("reports", [{50: SLOW, 150: (), 250: ()}, {50: (), 250: ()}, {250: tuple(range(128))}])
def test_ranks_that_have_recovered_and_slowness_of_all_ranks_are_no_stragglers(meshwright: Any, reports: Any) -> None:
    found = figures(meshwright, with_reports(log(printed()), reports))
    assert found["findings"] == []


def test_a_slowdown_is_that_of_the_named_ranks(meshwright: Any) -> None:
    before, after = log(printed()), log(seconds=40.7)
    for number in range(300, 0, -10):
        after = after.replace(f"iteration {number:8d}/", f"iteration {300 + number:8d}/")
    text = before + after[after.index("Step Time") :]
    found = figures(meshwright, with_reports(text, {150: (), 350: SLOW, 450: SLOW, 550: SLOW}))
    speed = [one for one in found["findings"] if one["rule"].startswith("speed.")]
    assert [one["rule"] for one in speed] == ["speed.stragglers", "speed.sustained-slowdown"]
    assert "straggler detector begins to name slow ranks" in speed[1]["message"]


def test_calibrate_says_where_settings_come_from(meshwright: Any) -> None:
    Path("train.log").write_text(log())
    answer = meshwright("calibrate", "train.log", "--recipe", "llama31_70b", "--gpus", "16x8xH200", "layout.vp=8")
    assert answer.code == 2
    assert "takes runs and no settings" in answer.err
    assert "--recipe FILE" in answer.err
