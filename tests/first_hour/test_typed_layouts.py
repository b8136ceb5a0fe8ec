"""Layout values that a user types, node shapes and superchips."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3, 4, 8, 16, 32),
    "pp": (1, 2, 3, 4, 5, 8, 64),
    "cp": (1, 2, 3, 4, 16, 32),
    "ep": (1, 2, 3, 8, 64),
    "etp": (1, 2, 3),
    "dp_shard": (1, 2, 3, 4, 16, 32),
    "dp_replicate": (1, 2, 3, 4),
    "micro_batch_size": (1, 2, 3, 5, 12, 16, 64),
    "vp": (1, 2, 3, 9),
    "sp": ("true", "false"),
    "strategy": ("fsdp2", "ddp", "zero1"),
    "pp_schedule": ("1f1b", "zbv", "interleaved_1f1b"),
}
MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "llama3.2-1b")
CLUSTERS = ("8xH100", "4x8xH100", "32x4xGH200", "8x8xB200", "2x8xA10G", "8x4xGB200", "12xH200", "1xH100")


def _typed(overrides: list[str]) -> dict[str, str]:
    return dict(text.removeprefix("layout.").split("=") for text in overrides)


def _errors(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found = [one for one in answer["findings"] if one["severity"] == "error"]
    return [one for one in found if not one["rule"].startswith("memory.")]


def _assumed(answer: dict[str, Any], field: str) -> list[str]:
    return [one["message"] for one in answer["question"]["assumed"] if one["field"] == field]


@pytest.mark.parametrize(
    ("model", "gpus", "tp", "slow"),
    [
        ("llama3-8b", "32x4xGH200", 4, False),
        ("llama3-8b", "32x4xGH200", 16, True),
        ("llama3-70b", "8x8xB200", 16, True),
    ],
)
def test_a_typed_tensor_parallel_size_is_searched_around(
    meshwright: Any, model: str, gpus: str, tp: int, slow: bool
) -> None:
    words = (model, "--gpus", gpus, "--goal", "pretrain", f"layout.tp={tp}", "--json")
    plans = meshwright("plan", *words).json
    assert plans["searched"] > 100
    assert {one["layout"]["tp"] for one in plans["plans"]} == {tp}
    answer = meshwright("recommend", *words).json
    warned = {one["rule"] for one in answer["findings"]}
    assert answer["layout"]["tp"] == tp
    assert ("network.tensor-parallel-domain" in warned) == slow
    assert answer["estimate"]["step_s"] <= 1.05 * plans["plans"][0]["estimate"]["step_s"]


@pytest.mark.parametrize(
    ("gpus", "override", "field", "value"),
    [
        ("32x4xGH200", "layout.dp_shard=4", "dp_shard", 4),
        ("4x8xH100", "layout.dp_shard=8", "dp_shard", 8),
        ("8xH100", "layout.sp=false", "sp", False),
        ("4x8xH100", "layout.cp=16", "cp", 16),
        ("4x8xH100", "layout.micro_batch_size=32", "micro_batch_size", 32),
    ],
)
def test_typed_values_that_the_search_leaves_out_are_kept(
    meshwright: Any, gpus: str, override: str, field: str, value: Any
) -> None:
    words = ("llama3-8b", "--gpus", gpus, "--goal", "pretrain", override, "layout.tp=2", "--json")
    answer = meshwright("recommend", *words).json
    assert answer["layout"][field] == value
    assert answer["layout"]["tp"] == 2
    assert not _errors(answer)


@pytest.mark.parametrize(("seed", "draws"), [(17, 3), pytest.param(9, 40, marks=pytest.mark.slow)])
def test_random_typed_layouts_are_kept_or_refused_for_a_reason_that_a_repair_removes(
    meshwright: Any, seed: int, draws: int
) -> None:
    draw = random.Random(seed)
    for _ in range(draws):
        names = draw.sample(list(VALUES), draw.choice((1, 1, 2)))
        overrides = [f"layout.{name}={draw.choice(VALUES[name])}" for name in names]
        words = [draw.choice(MODELS), "--gpus", draw.choice(CLUSTERS), "--goal", draw.choice(("pretrain", "sft"))]
        answer = meshwright("recommend", *words, *overrides, "--json").json
        for name, value in _typed(overrides).items():
            kept = str(answer["layout"][name]).lower()
            assert kept == value or (name == "dp_shard" and _errors(answer)), (words, overrides, answer["layout"])
        errors = _errors(answer)
        if not errors:
            continue
        named = any(name in one["message"] for name in _typed(overrides) for one in errors)
        assert named or any("strategy" in one["rule"] for one in errors) or "not divisible" in errors[0]["message"]
        if "repair" in answer:
            fixed = {**_typed(overrides), **_typed([x for x in answer["repair"]["overrides"] if x[:7] == "layout."])}
            rest = [x for x in answer["repair"]["overrides"] if x[:7] != "layout."]
            again = [f"layout.{name}={value}" for name, value in fixed.items()]
            assert not _errors(meshwright("recommend", *words, *again, *rest, "--json").json), (words, overrides)


@pytest.mark.parametrize(
    ("gpus", "override", "unsupported"),
    [
        ("8xH100", "layout.tp=2", "tp=2"),
        ("16xH100", "layout.pp=2", "pp=2"),
        pytest.param("64xH100", "layout.cp=2", "cp=2", marks=pytest.mark.slow),
    ],
)
def test_ddp_with_model_parallelism_is_refused_for_the_true_cause(
    meshwright: Any, gpus: str, override: str, unsupported: str
) -> None:
    words = ("llama3-8b", "--gpus", gpus, "--goal", "sft")
    answer = meshwright("recommend", *words, "layout.strategy=ddp", override, "--json").json
    assert any(one["message"].endswith(f"does not support {unsupported}") for one in _errors(answer))
    assert "layout.strategy=fsdp2" in answer["repair"]["overrides"]
    assert "smallest_that_fits" not in answer  # not the number of GPUs is wrong
    assert meshwright("recommend", *words, override, *answer["repair"]["overrides"], "--json").code == 0
    assert "no layout divides" not in meshwright("plan", *words, "layout.strategy=ddp", override).out


def test_a_recommended_pipeline_does_not_warn_about_itself(meshwright: Any) -> None:
    words = ("--gpus", "4x8xA100-40", "--goal", "sft", "--json")
    answer = meshwright("recommend", "mixtral-8x22b", *words).json
    assert answer["layout"]["pp"] > 1
    assert not [one for one in answer["findings"] if one["rule"].startswith("engine.ignores")]
    typed = meshwright("recommend", "mixtral-8x22b", *words, "layout.defer_grad_sync=false", "layout.pp=4").json
    assert "engine.ignores-defer-grad-sync" in {one["rule"] for one in typed["findings"]}


@pytest.mark.parametrize(
    ("shape", "node", "domain"),
    [("4xGH200", 4, "4"), ("2x4xGH200", 4, "4"), ("8xGH200", 4, "4"), ("2xGH200-144", 2, "2"), ("GH200", 1, "")],
)
def test_a_node_shape_of_superchips_is_a_node(meshwright: Any, shape: str, node: int, domain: str) -> None:
    answer = meshwright("size", "llama3-8b", "--gpu", shape, "--goal", "sft", "--max-gpus", "8", "--json").json
    assert answer["node"] == node
    assert [one["value"] for one in answer["assumed"] if one["field"] == "links"] == ([domain] if domain else [])


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ("32x4xGH200", "NVLink connects the 4 GPUs of a node"),
        ("8x4xGB200", "NVLink connects all 32 GPUs: one rack"),
        ("2x8xA10G", "no NVLink: PCIe connects the 8 GPUs of a node"),
        ("8xH100-PCIe", "NVLink connects 2 of the 8 GPUs of a node"),
    ],
)
def test_assumed_links_are_printed_with_the_key_that_sets_others(meshwright: Any, gpus: str, text: str) -> None:
    (line,) = _assumed(meshwright("recommend", "llama3-8b", "--gpus", gpus, "--goal", "peft", "--json").json, "links")
    assert line.startswith(text)
    assert "nvlink_domain" in line


def test_bridges_of_pcie_cards_are_assumed_and_printed(meshwright: Any, tmp_path: Path) -> None:
    words = ("recommend", "qwen2.5-7b", "--goal", "sft", "--gpus")
    (line,) = _assumed(meshwright(*words, "2xA100-PCIe-80", "--json").json, "links")
    assert line.startswith("NVLink bridges connect the 2 GPUs of a node (300 GB/s per GPU)")
    assert not _assumed(meshwright(*words, "1xA100-PCIe-80", "--json").json, "links")
    assert not _assumed(meshwright(*words, "2xA100-80", "--json").json, "links")
    file = tmp_path / "pc.toml"
    file.write_text('gpu = "A100-PCIe-80"\ngpus_per_node = 2\nnvlink_domain = 1\n')
    assert "nvlink_domain = 1" in line  # what the line names is accepted, and tp=2 costs more
    times = [meshwright(*words, one, "layout.tp=2", "--json").json for one in ("2xA100-PCIe-80", str(file))]
    assert times[0]["estimate"]["step_s"] < times[1]["estimate"]["step_s"]


def test_gpus_of_a_node_that_nvlink_does_not_connect_communicate_over_pcie(meshwright: Any, tmp_path: Path) -> None:
    words = ("--goal", "lora", "layout.strategy=fsdp2", "layout.tp=1", "layout.cp=1", "--json")

    def step(*lines: str) -> tuple[float, dict[str, Any]]:
        file = tmp_path / "clinic.toml"
        file.write_text("\n".join(('gpu = "A6000"', *lines)))
        answer = meshwright("estimate", "qwen3-14b", "--gpus", str(file), *words).json
        return answer["estimate"]["step_s"], answer

    none, answer = step("nvlink_domain = 1")
    assert not _assumed(answer, "network")  # one node has none
    assert step("nvlink_domain = 1", 'network_gb_s = "800 Gb/s"')[0] == none
    assert step("nvlink_domain = 4", 'link = "pcie"', "nvlink_gb_s = 31.5")[0] == none
    pairs, _ = step()
    assert pairs < none  # both members of a pair carry the traffic to the other pair
    two = ("nvlink_domain = 1", "nodes = 2")
    words = (*words, "layout.dp_shard=8", "layout.dp_replicate=1")
    assert step(*two, "network_gb_s = 0.5")[0] > 1.5 * step(*two)[0]  # between nodes it is the network
    (line,) = _assumed(meshwright("estimate", "qwen3-14b", "--gpus", "4xA6000", *words).json, "links")
    assert "2 of the 4 GPUs of a node (56.25 GB/s per GPU), PCIe the others (31.5 GB/s)" in line


def test_a_cluster_file_sets_the_links_of_superchips(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "alps.toml"
    steps = {}
    for domain in (1, 4):
        file.write_text(f'gpu = "GH200"\nnodes = 32\ngpus_per_node = 4\nnvlink_domain = {domain}\n')
        words = ("llama3-8b", "--gpus", str(file), "--goal", "pretrain", "layout.tp=4", "--json")
        answer = meshwright("recommend", *words).json
        steps[domain] = answer["estimate"]["step_s"]
        assert answer["question"]["gpus"] == "32x4xGH200"
    typed = meshwright("recommend", "llama3-8b", "--gpus", "32x4xGH200", "--goal", "pretrain", "layout.tp=4", "--json")
    assert steps[1] > 1.5 * steps[4]
    assert steps[4] == pytest.approx(typed.json["estimate"]["step_s"])


def test_replicas_that_hold_everything_shard_nothing(meshwright: Any) -> None:
    words = ("recommend", "qwen3-0.6b", "--gpus", "4xA100-80", "--goal", "lora", "--explain", "layout.strategy=")
    assert "per model replica; no state is sharded" in meshwright(*words[:-1], f"{words[-1]}ddp").out
    assert "the state is sharded over 4 ranks" in meshwright(*words[:-1], f"{words[-1]}fsdp2").out


def test_one_gpu_is_singular(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "1xH100", "--goal", "peft", "layout.tp=2", "--json").json
    assert _errors(answer)[0]["message"] == "1 GPU is not divisible by tp × pp × cp = 2"
