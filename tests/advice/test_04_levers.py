"""A training that does not fit as asked gets a plan that does, with its price; typed on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import costs, recipe
from meshwright.clusters import cluster
from meshwright.planner import case_of
from meshwright.recipes.case import model_of

KEYS = {"title", "kind", "overrides", "goal", "fits", "fit", "total_gib", "host_gib", "step_s", "slowdown", "cost"} | {
    "command"
}


def changed(answer: dict[str, Any]) -> dict[str, Any]:
    return {one["field"]: one["to"] for one in answer["changes"]}


def pasted(meshwright: Any, option: dict[str, Any]) -> Any:
    """The answer to an option's command."""
    words = shlex.split(option["command"])
    assert words[0] == "meshwright"
    return meshwright(*words[1:], "--json")


@pytest.mark.parametrize(
    ("model", "gpus", "goal", "lever"),
    [
        ("llama3-8b", "1xH100", "sft", ("layout.offload", "optimizer")),
        ("qwen3-30b-a3b", "4xH100", "sft", ("layout.offload", "optimizer")),
        ("llama3.1-405b", "64xH100", "sft", ("layout.offload", "optimizer")),
        ("llama3-8b", "1xRTX4090", "peft", ("kernels.loss", "fused_linear")),
        ("llama3-70b", "1xH100", "peft", ("layout.offload", "params")),
    ],
)
def test_a_lever_that_keeps_the_weights_is_the_plan(
    meshwright: Any, model: str, gpus: str, goal: str, lever: tuple[str, str]
) -> None:
    found = meshwright("recommend", model, "--gpus", gpus, "--goal", goal, "--json")
    assert found.code == 0
    answer = found.json
    assert answer["estimate"]["fits"]
    assert changed(answer)[lever[0]] == lever[1]
    assert {one["kind"] for one in answer["changes"]} == {"layout"}
    reason = next(one["why"] for one in answer["changes"] if one["field"] == lever[0])
    assert "GiB" in reason
    first = answer["options"][0]
    assert set(first) == KEYS
    assert first["kind"] == "layout"
    assert first["total_gib"] == pytest.approx(answer["estimate"]["memory_gib"]["total"])
    assert first["step_s"] == pytest.approx(answer["estimate"]["step_s"])
    assert first["slowdown"] > 1
    assert "meshwright" in answer["commands"]


def test_every_option_works_when_pasted(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "1xH100", "--goal", "sft", "--json").json
    assert [one["kind"] for one in answer["options"]] == ["layout", "contract", "contract"]
    assert answer["options"][-1]["goal"] == "peft"
    for option in answer["options"]:
        again = pasted(meshwright, option)
        assert again.code == 0, option["command"]
        assert again.json["estimate"]["memory_gib"]["total"] == pytest.approx(option["total_gib"], rel=1e-6)
        assert again.json["estimate"]["step_s"] == pytest.approx(option["step_s"], rel=1e-6)


def test_only_contract_changes_fit(meshwright: Any) -> None:
    found = meshwright("recommend", "llama3-70b", "--gpus", "8xA100-40", "--goal", "sft", "--json")
    assert found.code == 1
    answer = found.json
    assert not answer["estimate"]["fits"]
    assert answer["options"]
    assert {one["kind"] for one in answer["options"]} == {"contract"}
    assert all(one["fits"] and one["cost"] for one in answer["options"])
    assert pasted(meshwright, answer["options"][0]).code == 0


def test_what_the_user_typed_stays_in_the_command(meshwright: Any) -> None:
    words = (
        "recommend",
        "llama3-8b",
        "--gpus",
        "1xRTX4090",
        "--goal",
        "sft",
        "--seq",
        "4096",
        "train.global_batch_size=4",
    )
    found = meshwright(*words, "--json")
    assert found.code == 1
    for option in found.json["options"]:
        assert "train.global_batch_size=4" in option["command"]
        assert "--seq 4096" in option["command"]
        assert pasted(meshwright, option).code == 0


def test_a_pinned_field_is_not_a_lever(meshwright: Any) -> None:
    found = meshwright("recommend", "llama3-8b", "--gpus", "1xH100", "--goal", "sft", "layout.offload=none", "--json")
    assert found.code == 1
    assert found.json["layout"]["offload"] == "none"
    assert all("layout.offload=none" in one["command"] for one in found.json["options"])


def test_a_training_that_fits_has_no_options(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json").json
    assert "options" not in answer
    assert answer["layout"]["offload"] == "none"


def test_nothing_helps(meshwright: Any) -> None:
    found = meshwright("recommend", "llama3.1-405b", "--gpus", "1xRTX4090", "--goal", "pretrain", "--json")
    assert found.code == 1
    assert not found.json.get("options")
    assert found.json["smallest_that_fits"]


def test_estimate_and_check_name_the_cheapest_lever(meshwright: Any) -> None:
    words = ("llama3_8b_sft_config", "--gpus", "1xH100", "layout.tp=1", "layout.sp=false")
    for verb in ("estimate", "check"):
        found = meshwright(verb, *words, "--json")
        assert found.code == 1
        first = found.json["options"][0]
        assert first["kind"] == "layout"
        assert "layout.offload=optimizer" in first["overrides"]
        assert "estimate llama3_8b_sft_config" in first["command"]
        assert pasted(meshwright, first).code == 0


def test_plan_ranks_layouts_with_levers(meshwright: Any) -> None:
    found = meshwright("plan", "llama3-8b", "--gpus", "1xH100", "--goal", "sft", "--json")
    assert found.code == 0
    answer = found.json
    assert all(plan["layout"]["offload"] == "optimizer" for plan in answer["plans"])
    assert answer["plans"][0]["options"][0]["kind"] == "layout"
    assert any("does not fit" in one["reason"] for one in answer["dropped"])


def test_host_memory_limits_offload(meshwright: Any) -> None:
    found = meshwright("recommend", "llama3-8b", "--gpus", "1xRTX4090", "--goal", "sft", "--json")
    assert found.code == 1  # 132 GiB of state, 64 GiB of host memory
    assert all(one["host_gib"] <= 64 for one in found.json["options"])


def case(name: str, gpus: str, *overrides: str) -> Any:
    wanted = recipe(name, list(overrides))
    return case_of(wanted, model_of(wanted), cluster(gpus))


def test_levers_have_a_price() -> None:
    base = ("layout.tp=1", "layout.sp=false", "layout.recompute=selective")
    plain = costs.estimate(case("llama3_8b_sft_config", "8xH100", *base))
    for lever in ("layout.offload=optimizer", "layout.offload=activations", "optimizer.name=adamw8bit"):
        priced = costs.estimate(case("llama3_8b_sft_config", "8xH100", *base, lever))
        assert priced.step_s > plain.step_s, lever
        assert priced.memory.total < plain.memory.total, lever


def test_weights_are_copied_for_every_micro_batch() -> None:
    base = ("layout.tp=1", "layout.sp=false", "layout.recompute=full", "layout.offload=optimizer")
    few = costs.step_time(case("llama3_8b_sft_config", "1xRTX4090", *base, "train.global_batch_size=2"))
    many = costs.step_time(case("llama3_8b_sft_config", "1xRTX4090", *base, "train.global_batch_size=8"))
    assert many.other >= few.other
    assert many.optimizer == pytest.approx(few.optimizer)  # one update per step


def test_host_memory_counts_weights_gradients_and_moments() -> None:
    one = case("llama3_8b_sft_config", "1xH100", "layout.tp=1", "layout.sp=false", "layout.offload=optimizer")
    state = 16 * model_of(one.recipe).params.total / 2**30
    assert costs.memory(one).host == pytest.approx(1.1 * state, rel=0.01)
    deferred = one.replace(defer_grad_sync=False)
    assert costs.memory(deferred).host == costs.memory(one).host
    frozen = case("llama3_70b_peft_config", "1xH100", "layout.tp=1", "layout.sp=false", "layout.offload=params")
    assert costs.memory(frozen).host > 2 * model_of(frozen.recipe).params.total / 2**30


def faster(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in answer["suggestions"] if one["title"] == "a faster step")
    return found


def test_a_faster_step_is_suggested_for_a_named_recipe_and_is_faster(meshwright: Any) -> None:
    words = ("recommend", "llama3_8b_pretrain_config", "--gpus", "8xH100")
    answer = meshwright(*words, "--json").json
    found = faster(answer)
    assert found["kind"] == "layout"
    assert "kernels.compile=true" in found["overrides"]
    again = meshwright(*words, *found["overrides"], *pins(answer), "--json")
    assert again.code == 0
    gain = 1 - again.json["estimate"]["step_s"] / answer["estimate"]["step_s"]
    assert f"{gain:.0%} less" in found["why"]
    assert gain >= 0.03


@pytest.mark.parametrize("words", [("llama3-8b", "8xH100", "pretrain"), ("qwen3-30b-a3b", "1xH200", "peft")])
def test_the_recommended_command_is_the_fast_one(meshwright: Any, words: tuple[str, str, str]) -> None:
    model, gpus, goal = words
    asked = ("recommend", model, "--gpus", gpus, "--goal", goal, "--json")
    answer, eager = meshwright(*asked).json, meshwright(*asked, "kernels.compile=false").json
    change = next(one for one in answer["changes"] if one["field"] == "kernels.compile")
    assert (change["to"], change["kind"]) == (True, "layout")
    assert "step time" in change["why"]
    assert "kernels.compile=true" in answer["commands"]["meshwright"].split()
    assert answer["estimate"]["step_s"] < 0.95 * eager["estimate"]["step_s"]
    assert not any(one["field"] == "kernels.compile" for one in eager["changes"])


def test_the_published_layout_keeps_its_kernels(meshwright: Any) -> None:
    asked = ("recommend", "llama3-8b", "--gpus", "2xH100", "--goal", "pretrain", "--json")
    answer = meshwright(*asked).json
    assert answer["recipe"]["match"] == "exact"
    published = answer["published"]
    assert "kernels.compile=false" in published["overrides"]
    as_it_was = meshwright("estimate", "llama3_8b_pretrain_config", "--gpus", "2xH100", "--json").json
    assert published["step_s"] == pytest.approx(as_it_was["estimate"]["step_s"])
    assert published["step_s"] > answer["estimate"]["step_s"]


def test_other_engines_keep_the_kernels_of_the_recipe(meshwright: Any) -> None:
    asked = ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--engine", "megatron", "--json")
    assert not any(one["field"] == "kernels.compile" for one in meshwright(*asked).json["changes"])


def pins(answer: dict[str, Any]) -> list[str]:
    """The degrees of a plan as overrides."""
    return [f"layout.{name}={answer['layout'][name]}" for name in ("tp", "pp", "cp", "ep", "micro_batch_size")]


def test_what_the_user_set_is_not_in_the_faster_step(meshwright: Any) -> None:
    words = ("recommend", "llama3_8b_pretrain_config", "--gpus", "8xH100", "kernels.compile=false", "--json")
    found = [one for one in meshwright(*words).json["suggestions"] if one["title"] == "a faster step"]
    assert not any("kernels.compile" in text for one in found for text in one["overrides"])


def test_fp8_gains_little_where_experts_stay_in_bf16(meshwright: Any) -> None:
    def gain(name: str, gpus: str) -> float:
        words = (
            "estimate",
            name,
            "--gpus",
            gpus,
            "--json",
            "kernels.compile=true",
            *("layout.ep=1", "layout.tp=1", "layout.sp=false"),
        )
        plain, narrow = (meshwright(*words, *more).json["estimate"] for more in ((), ("precision.matmul=fp8_tensor",)))
        return float(1 - narrow["step_s"] / plain["step_s"])

    assert abs(gain("qwen3_30b_a3b_pretrain_config", "64xH100")) < 0.1  # 58,547 against 57,829 tokens/s on an H200
    assert gain("llama3_8b_pretrain_config", "8xH100") > 0.2  # 252 against 327 ms for 12 layers on an H200


def test_the_options_of_a_file_name_the_file(meshwright: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('base = "llama3_8b_sft_config"\ncluster = "1xH100"\n[layout]\ntp = 1\nsp = false\n')
    for verb in ("estimate", "check"):
        first = meshwright(verb, str(own), "--json").json["options"][0]
        assert f"estimate {own}" in first["command"]
        assert pasted(meshwright, first).code == 0


def test_size_uses_the_levers_of_recommend(meshwright: Any) -> None:
    words = ("mistral-7b", "--goal", "sft", "layout.tp=1", "layout.pp=1", "layout.cp=1")  # few layouts: a quick search
    plan = meshwright("recommend", *words, "--gpus", "1xL40S", "--json").json
    answer = meshwright("size", *words, "--gpu", "L40S", "--json").json
    first = answer["sizes"][0]
    assert first == answer["smallest"]
    levers = ["layout.offload=optimizer", "kernels.loss=fused_linear"]
    assert all(lever in plan["commands"]["meshwright"] for lever in levers)
    assert (first["gpus"], first["fits"], first["levers"]) == (1, True, levers)
    assert "offload optimizer" in first["layout"]
    assert first["step_s"] == pytest.approx(plan["estimate"]["step_s"])
    assert first["total_gib"] == pytest.approx(plan["estimate"]["memory_gib"]["total"])
    assert first["host_gib"] == pytest.approx(plan["options"][0]["host_gib"])
    assert plan["smallest_that_fits"] == 1
    plain = next(one for one in answer["sizes"] if one["fits"] and "layout.offload=optimizer" not in one["levers"])
    assert plan["smallest_without_offload"] == f"{plain['gpus']}xL40S"
    assert any(f"the smallest planned without is {plain['gpus']} GPUs" in note for note in answer["notes"])
    assert plan["options"][0]["slowdown"] >= 1


def test_needs_of_what_does_not_fit_counts_offload(meshwright: Any) -> None:
    words = ("llama-3.1-8b", "--goal", "sft")
    plan = meshwright("recommend", *words, "--gpus", "1xL40S", "--json").json
    assert (plan["smallest_that_fits"], plan["smallest_cluster"]) == (2, "2xL40S")
    again = meshwright("recommend", *words, "--gpus", plan["smallest_cluster"], "--json")
    assert again.code == 0
    assert again.json["layout"]["offload"] == "optimizer"
    shown = meshwright("recommend", *words, "--gpus", "1xL40S").out
    assert f"--gpus {plan['smallest_cluster']} would fit with offload" in " ".join(shown.split())


def test_host_memory_that_would_be_enough_is_named(meshwright: Any, tmp_path: Path) -> None:
    words = ("recommend", "llama-3.1-8b", "--goal", "sft", "--json")
    why = meshwright(*words, "--gpus", "1xL40S").json["findings"][0]["no_fix"]
    needed = int(why.split("layout.offload=optimizer with ")[1].split()[0])
    assert "128 GiB are assumed" in why
    own = tmp_path / "own.toml"
    for gib, code in ((needed - 1, 1), (needed, 0)):
        own.write_text(f'gpu = "L40S"\ngpus_per_node = 1\nhost_gib = {gib}\n')
        assert meshwright(*words, "--gpus", str(own)).code == code
    assert "host_gib" in meshwright("explain", "memory.host").out


def test_more_host_memory_is_not_promised_where_it_does_not_help(meshwright: Any) -> None:
    found = meshwright("recommend", "llama3.1-405b", "--gpus", "1xRTX4090", "--goal", "pretrain", "--json")
    assert not any("host_gib" in one.get("no_fix", "") for one in found.json["findings"])


def test_a_recipe_that_offloads_names_the_host_memory_it_needs(meshwright: Any) -> None:
    answer = meshwright("recommend", "flux-12b", "--gpus", "1xRTX4090", "--goal", "sft", "--json").json
    short = next(one for one in answer["findings"] if one["rule"] == "memory.host")
    assert "host_gib" in short["no_fix"]
    fewest = answer["smallest_cluster"]
    assert meshwright("recommend", "flux-12b", "--gpus", fewest, "--goal", "sft", "--json").json["estimate"]["fits"]
