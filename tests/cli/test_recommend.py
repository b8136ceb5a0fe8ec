"""The main question, as JSON: contract, decision branches, the quick reference."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.clusters import cluster
from meshwright.planner.quick_reference import SITUATIONS

PLAN_KEYS = {"schema", "question", "recipe", "contract", "layout", "estimate", "changes", "findings", "commands"}
LAYOUT_KEYS = {
    *("strategy", "tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "sp", "micro_batch_size"),
    *("gradient_accumulation", "recompute"),
}
MEMORY_KEYS = {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "total", "capacity"}
STEP_KEYS = {"compute", "tp", "cp", "ep", "pp_bubble", "dp", "optimizer", "other"}


def ask(meshwright: Any, *words: str, code: int = 0) -> dict[str, Any]:
    answer = meshwright("recommend", *words, "--json")
    assert answer.code == code, answer.err + answer.out
    return answer.json


def test_the_answer_has_the_shape_of_the_contract(meshwright: Any) -> None:
    plan = ask(meshwright, "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert set(plan) >= PLAN_KEYS
    assert set(plan["question"]) >= {"model", "gpus", "goal", "seq_length"}
    assert set(plan["layout"]) >= LAYOUT_KEYS
    assert plan["recipe"]["name"] == "llama3_8b_sft_config"
    assert plan["recipe"]["match"] == "resized"
    estimate = plan["estimate"]
    assert set(estimate["memory_gib"]) == MEMORY_KEYS
    assert set(estimate["step_parts_s"]) == STEP_KEYS
    assert sum(estimate["step_parts_s"].values()) == pytest.approx(estimate["step_s"], rel=1e-6)
    parts = sum(v for k, v in estimate["memory_gib"].items() if k not in ("total", "capacity"))
    assert parts == pytest.approx(estimate["memory_gib"]["total"], rel=1e-6)
    assert estimate["fits"] is True
    assert set(estimate["band"]) >= {"step_pct", "memory_pct", "step_low_s", "step_high_s"}
    assert estimate["mfu_convention"]
    for change in plan["changes"]:
        assert set(change) >= {"field", "from", "to", "kind", "why"}
        assert change["why"]
    for finding in plan["findings"]:
        assert set(finding) >= {"rule", "severity", "field", "message", "fix"}
    assert plan["commands"]["meshwright"].startswith("meshwright train llama3_8b_sft_config")


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: f"{s.want}: {s.model}")
def test_quick_reference(meshwright: Any, situation: Any) -> None:
    words = [situation.model, "--gpus", situation.gpus, "--goal", situation.goal]
    words += ["--seq", str(situation.seq)] if situation.seq else []
    words += ["--benchmark"] if situation.benchmark else []
    plan = ask(meshwright, *words)
    assert plan["recipe"]["name"] == situation.recipe
    assert plan["recipe"]["benchmark"] is situation.benchmark
    assert plan["estimate"]["fits"] is True
    assert not [f for f in plan["findings"] if f["severity"] == "error"]


def test_the_quick_reference_has_ten_rows() -> None:
    assert len({s.want for s in SITUATIONS}) == 10


class TestDecisionBranches:
    """The decision tree, branch by branch."""

    def test_exact_match_is_used_directly(self, meshwright: Any) -> None:
        own = meshwright("recipe", "llama3_8b_peft_config", "--json").json["recipe"]["cluster"]
        plan = ask(meshwright, "llama3-8b", "--gpus", own, "--goal", "peft")
        assert plan["recipe"]["match"] == "exact"
        assert plan["recipe"]["approach"] == "use the recipe directly"
        assert [one["field"] for one in plan["changes"]] == ["kernels.compile"]  # the planner chooses the kernels

    def test_other_gpu_count_changes_layout_fields_only(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3-70b", "--gpus", "128xH100", "--goal", "pretrain")
        assert plan["recipe"]["match"] == "resized"
        assert {c["kind"] for c in plan["changes"]} <= {"layout"}

    def test_no_recipe_for_the_model_takes_the_closest_size(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3.2-1b", "--gpus", "8xH100", "--goal", "sft")
        assert plan["recipe"]["match"] == "closest"
        assert plan["recipe"]["goal"] == "sft"
        assert "another architecture" in plan["recipe"]["approach"]
        assert "--model llama32_1b" in plan["commands"]["meshwright"]

    @pytest.mark.parametrize(
        ("goal", "suffix"), [("pretrain", "_pretrain_config"), ("sft", "_sft_config"), ("peft", "_peft_config")]
    )
    def test_the_goal_picks_the_kind_of_recipe(self, meshwright: Any, goal: str, suffix: str) -> None:
        plan = ask(meshwright, "qwen3-8b", "--gpus", "8xH100", "--goal", goal)
        assert plan["recipe"]["name"].endswith(suffix)

    def test_one_gpu_does_lora_on_8b(self, meshwright: Any) -> None:
        assert ask(meshwright, "llama3-8b", "--gpus", "1xH100", "--goal", "peft")["estimate"]["fits"] is True

    def test_one_gpu_fine_tunes_8b_in_full_only_with_offload(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3-8b", "--gpus", "1xH100", "--goal", "sft")
        assert plan["layout"]["offload"] == "optimizer"
        assert plan["smallest_that_fits"] == 1
        assert plan["smallest_without_offload"] in ("2xH100", "4xH100")
        pinned = ask(meshwright, "llama3-8b", "--gpus", "1xH100", "--goal", "sft", "layout.offload=none", code=1)
        assert pinned["estimate"]["fits"] is False

    def test_one_gpu_does_train_a_small_model_in_full(self, meshwright: Any) -> None:
        assert ask(meshwright, "qwen3-0.6b", "--gpus", "1xH100", "--goal", "sft")["estimate"]["fits"] is True

    def test_large_moe_needs_hundreds(self, meshwright: Any) -> None:
        assert ask(meshwright, "deepseek-v3", "--gpus", "1024xH100", "--goal", "pretrain")["estimate"]["fits"] is True
        offloaded = ask(meshwright, "deepseek-v3", "--gpus", "64xH100", "--goal", "pretrain")
        assert offloaded["layout"]["offload"] == "optimizer"
        assert offloaded["smallest_that_fits"] == 48
        assert cluster(offloaded["smallest_without_offload"]).world >= 128
        ask(meshwright, "deepseek-v3", "--gpus", "32xH100", "--goal", "pretrain", code=1)

    def test_benchmark_recipes_are_named_as_such(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3-70b", "--gpus", "64xB200", "--goal", "pretrain", "--benchmark")
        assert plan["recipe"]["benchmark"] is True
        assert "b200" in plan["recipe"]["name"]
        assert plan["contract"]["steps"] == 50
        assert plan["contract"]["dataset"] == "mock"

    @pytest.mark.parametrize(
        ("seq", "name"),
        [
            ("16k", "llama3_8b_16k_pretrain_config"),
            ("64k", "llama3_8b_64k_pretrain_config"),
            ("8k", "llama3_8b_pretrain_config"),
        ],
    )
    def test_long_context_takes_the_variant(self, meshwright: Any, seq: str, name: str) -> None:
        assert (
            ask(meshwright, "llama3-8b", "--gpus", "32xH100", "--goal", "pretrain", "--seq", seq)["recipe"]["name"]
            == name
        )

    def test_a_length_without_variant_is_a_new_experiment(self, meshwright: Any) -> None:
        plan = ask(meshwright, "qwen3-8b", "--gpus", "32xH100", "--goal", "pretrain", "--seq", "32768")
        changed = {c["field"]: c for c in plan["changes"]}
        assert changed["data.seq_length"]["kind"] == "contract"
        assert "new experiment" in plan["recipe"]["approach"]
        assert any("tokens per step" in o["title"] for o in plan["suggestions"])

    def test_other_engine_other_state(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engine", "megatron")
        assert plan["layout"]["strategy"] == "zero1"

    def test_a_pinned_number_is_kept(self, meshwright: Any) -> None:
        plan = ask(meshwright, "llama3-8b", "layout.tp=4", "--gpus", "8xH100", "--goal", "sft")
        assert plan["layout"]["tp"] == 4

    def test_a_gpu_count_no_layout_divides_offers_those_that_work(self, meshwright: Any) -> None:
        answer = meshwright("recommend", "llama3-8b", "--gpus", "37xH100", "--goal", "pretrain", "--json")
        assert answer.code == 2
        error = answer.json["error"]
        assert error["field"] == "gpus"
        assert "Traceback" not in answer.err
        assert len(error["fix"]) == 4
        for offered in error["fix"][:3]:
            ask(meshwright, "llama3-8b", *offered.split(), "--goal", "pretrain")
        assert error["fix"][3].startswith("train.global_batch_size=")
        ask(meshwright, "llama3-8b", error["fix"][3], "--gpus", "37xH100", "--goal", "pretrain")


def test_explain_gives_a_reason_for_every_number(meshwright: Any) -> None:
    plan = ask(meshwright, "qwen3-30b-a3b", "--gpus", "16xH100", "--goal", "pretrain", "--explain")
    reasons = {r["field"]: r["why"] for r in plan["reasons"]}
    assert set(reasons) >= {
        "strategy",
        "tp",
        "pp",
        "cp",
        "ep",
        "micro_batch_size",
        "recompute",
        "dp",
        "gradient_accumulation",
    }
    assert all(reasons.values())


def test_text_output_has_a_memory_bar_and_no_colour_in_a_pipe(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert answer.code == 0
    assert "│" in answer.out
    assert "\x1b[" not in answer.out
    assert "GiB" in answer.out
