"""Complete runs: a recipe trains with falling losses, and every way in which a run can end."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright import api, costs
from meshwright.engine import tiny as engine_tiny
from meshwright.engine.faults import RunError
from meshwright.engine.model_families import family_of
from meshwright.engine.run_spec import RankSpec, RunSpec
from meshwright.engine.validate import validate
from meshwright.errors import InputError
from meshwright.recipes.index import load
from meshwright.rules import RefusedError


@pytest.fixture(autouse=True)
def few_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the micro batches of --tiny: gradients still accumulate, and pipelines of two stages fill."""
    monkeypatch.setattr(engine_tiny, "MICRO_BATCHES", 2)


@cache
def trained(name: str) -> dict[str, Any]:
    """Return the result of four steps on two ranks."""
    return tiny(name, steps=4)


def tiny(name: str, nproc: int = 2, **options: object) -> dict[str, object]:
    """Return the JSON result of a short --tiny run."""
    steps = options.pop("steps", 6)
    overrides = [f"train.steps={steps}", *options.pop("overrides", [])]  # type: ignore[misc]
    done = api.train(name, tiny=True, nproc=nproc, quiet=True, overrides=overrides, **options)  # type: ignore[arg-type]
    return api.to_json(api.train_response(done))


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("llama3_8b_pretrain_config", "tp"),
        ("qwen3_30b_a3b_pretrain_config", "ep"),
        ("deepseek_v2_pretrain_config", "pp"),
        pytest.param("nemotronh_8b_sft_config", "tp", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_trains_in_its_own_layout(name: str, axis: str) -> None:
    answer = trained(name)
    losses = answer["losses"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert answer["layout"][axis] == 2
    assert answer["schema"] == "meshwright/2"
    assert answer["mfu"] is None  # a CPU has no known peak


def test_a_run_leaves_metrics_behind(tmp_path: Path) -> None:
    tiny("llama3_8b_pretrain_config", nproc=1, out=str(tmp_path), steps=3, overrides=["train.eval_every=2"])
    header, *lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert header["kind"] == "header"
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [2, 3]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["loss"] > 0 and step["tokens"] > 0 for step in steps)


def test_evaluation_is_on_other_samples() -> None:
    answer = tiny("llama3_8b_pretrain_config", nproc=1, steps=4, overrides=["train.eval_every=2", "train.eval_steps=2"])
    assert set(answer["eval_losses"]) == {"2", "4"}  # type: ignore[call-overload]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_run_twice_is_the_same(nproc: int) -> None:
    one, other = (tiny("llama3_8b_pretrain_config", nproc, steps=4)["losses"] for _ in range(2))
    assert one == other


def test_adapters_train_and_the_rest_stays() -> None:
    answer = tiny("llama3_8b_peft_config", nproc=1)
    assert answer["goal"] == "peft"
    assert answer["memory_gib"]["optimizer"] < answer["memory_gib"]["weights"]  # type: ignore[index]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not finite|nan|inf") as stopped:
        tiny("llama3_8b_pretrain_config", out=str(tmp_path), overrides=["train.z_loss=1e300"])
    assert stopped.value.exit_code == 3
    assert json.loads((tmp_path / "bad_batches.jsonl").read_text().splitlines()[0])["samples"]


def test_bench_stops_at_a_loss_that_is_not_finite_and_names_what_to_try() -> None:
    endless = ["train.z_loss=1e300", "train.steps=3"]
    with pytest.raises(RunError, match=r"loss is (nan|inf) in step 1") as stopped:
        api.bench("llama3_8b_pretrain_config", tiny=True, nproc=1, quiet=True, overrides=endless)
    assert stopped.value.exit_code == 3
    assert "optimizer.lr" not in str(stopped.value.fix)  # nothing was updated before the first step
    assert "samples" in str(stopped.value.fix)
    done = api.bench(
        "llama3_8b_pretrain_config", tiny=True, nproc=1, quiet=True, overrides=[*endless, "train.check_nan=false"]
    )
    assert len(api.to_json(api.train_response(done))["losses"]) == 3


def test_a_step_whose_loss_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="skipped steps in a row"):
        tiny(
            "llama3_8b_pretrain_config",
            nproc=1,
            out=str(tmp_path),
            steps=20,
            on_nan="skip",
            overrides=["train.z_loss=1e300", "train.global_batch_size=2", "layout.micro_batch_size=1"],
        )


def test_rules_refuse_a_layout_before_anything_starts() -> None:
    with pytest.raises(RefusedError) as refused:
        tiny(
            "llama3_8b_pretrain_config",
            overrides=["layout.tp=1", "layout.pp=2", "layout.micro_batch_size=8", "train.global_batch_size=8"],
        )
    assert refused.value.exit_code == 1
    assert refused.value.findings
    assert refused.value.to_dict()["findings"][0]["rule"] == refused.value.findings[0].rule  # type: ignore[index]


def test_a_world_that_the_layout_does_not_divide_is_refused() -> None:
    with pytest.raises((RefusedError, InputError), match="2"):
        tiny("llama3_8b_pretrain_config", nproc=3, overrides=["layout.tp=2"])


def test_a_data_set_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InputError, match="nowhere"):
        api.train("llama3_8b_pretrain_config", tiny=True, nproc=1, quiet=True, overrides=["data.dataset=nowhere"])


def test_the_largest_micro_batch_is_found_and_tried() -> None:
    answer = tiny(
        "llama3_8b_pretrain_config",
        steps=2,
        overrides=["layout.micro_batch_size=auto", "layout.tp=1", "layout.sp=false"],
    )
    assert answer["layout"]["micro_batch_size"] == answer["global_batch_size"] // 2  # type: ignore[index,operator]


def test_bench_reports_throughput() -> None:
    done = api.bench("llama3_8b_pretrain_config", tiny=True, nproc=1, quiet=True, overrides=["train.steps=3"])
    assert api.to_json(api.train_response(done))["tokens_per_s_per_gpu"] > 0


def test_a_rank_spec_reaches_spawned_ranks() -> None:
    recipe = load("llama3_8b_pretrain_config")
    config = family_of(recipe).config_for(recipe)
    spec = RankSpec(recipe, config.to_dict(), validate(recipe, config, None, 8), "folder", RunSpec(nproc=8, quiet=True))
    copy = pickle.loads(pickle.dumps(spec))
    assert (copy.recipe, copy.run, copy.folder) == (spec.recipe, spec.run, spec.folder)
    assert costs.estimate(copy.case).step_s == costs.estimate(spec.case).step_s
