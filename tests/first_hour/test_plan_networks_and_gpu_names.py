"""Planning for 24 nodes of 4 A100: what an engine exports, which network is assumed, and whose GPUs and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.clusters import assumptions, cluster
from meshwright.errors import InputError
from meshwright.frameworks import export, framework
from meshwright.planner import Plan

CLUSTER = '{network}\ngpu = "A100-80"\nnodes = 24\ngpus_per_node = 4\n'


def cluster_file(folder: Path, network: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(CLUSTER.format(network=network))
    return str(path)


def recommended(model: str, gpus: str, engine: str, *overrides: str) -> Plan:
    from meshwright import recommend

    plan: Plan = recommend(model, gpus, "pretrain", engine=engine, overrides=list(overrides))
    return plan


@pytest.mark.parametrize(
    ("model", "engine", "to"),
    [
        ("qwen3-14b", "torchtitan", "torchtitan"),
        ("gpt-oss-20b", "torchtitan", "torchtitan"),
        ("qwen3-30b-a3b", "torchtitan", "torchtitan"),
        ("llama3.1-70b", "deepspeed", "deepspeed"),
    ],
)
def test_a_plan_for_an_engine_can_be_exported(model: str, engine: str, to: str) -> None:
    plan = recommended(model, "24x4xA100-80", engine, "train.global_batch_size=384")
    assert plan.ok
    assert export(framework(to), plan.recipe, plan.case.model, plan.question.cluster).files


def test_a_pipeline_that_torchtitan_lacks_is_an_error_with_a_fix(meshwright: Any) -> None:
    words = ("check", "qwen3_14b_pretrain_config", "--gpus", "8xH100", "layout.tp=4", "layout.pp=2")
    answer = meshwright(*words, "--engine", "torchtitan", "--json").json
    assert "pipeline.torchtitan-models" in [one["rule"] for one in answer["findings"]]
    answer = meshwright(*words, "--json").json
    assert "pipeline.torchtitan-models" not in [one["rule"] for one in answer["findings"]]


def test_later_torchtitan_pipelines_these_models(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    flags = "--parallelism.pipeline_parallel_degree 2"
    script.write_text(f"torchrun --nproc_per_node 8 -m torchtitan.train --module qwen3 --config qwen3_14b {flags}\n")
    answer = meshwright("check", str(script), "--gpus", "8xH100", "--json").json
    assert "torchtitan-models" not in str(answer["findings"])


def test_the_assumed_network_is_said(meshwright: Any) -> None:
    answer = meshwright("estimate", "qwen3-8b", "--gpus", "24x4xA100-80", "--goal", "sft", "--json").json
    (network,) = [one for one in answer["question"]["assumed"] if one["field"] == "network"]
    assert network["value"] == "200 Gb/s per GPU"
    assert "network_gb_s_per_node" in network["message"]
    assert not assumptions("8xH100")  # one node needs no network
    assert "network" not in [one.field for one in assumptions("GB200-NVL72")]  # one rack neither


@pytest.mark.parametrize(
    ("network", "gb_s"),
    [
        ('network_gb_s_per_node = "200 Gb/s"', 6.25),
        ("network_gb_s_per_node = 25", 6.25),
        ('network_gb_s = "200 Gb/s per node"', 6.25),
        ('network_gb_s = "200 Gb/s per GPU"', 25.0),
        ('network_gb_s = "50 Gb/s"', 6.25),
        ('network_gb_s = "0.4 Gb/s"', 0.05),
        ('network_gb_s = "50 Gb/s"\nname = "alex"', 6.25),
    ],
)
def test_networks_of_a_node_or_of_a_gpu(tmp_path: Path, network: str, gb_s: float) -> None:
    path = cluster_file(tmp_path, network)
    found = cluster(path)
    assert (str(found), found.gpu.network_gb_s) == ("24x4xA100-80", pytest.approx(gb_s))
    (printed,) = assumptions(path)  # no other network is assumed
    assert f", from {path}" in printed.message


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ("network_gb_s = 200", "write the unit"),
        ("network_gb_s = 0.05", "write the unit"),
        ("network_gb_s_per_node = 200", "write the unit"),
        ("network_gb_s_per_node = 0.1", "write the unit"),
        ('network_gb_s = "50 Gb/s"\nnetwork_gb_s_per_node = "200 Gb/s"', "write one of both"),
        ('network_gb_s_per_node = "200 Gb/s per GPU"', "for one GPU"),
        ("num_nodes = 24", "did you mean nodes?"),
        ("nnodes = 24", "did you mean nodes?"),
        ("interconnect = 200", "did you mean network_gb_s_per_node"),
    ],
)
def test_a_doubtful_network_or_key_is_questioned(tmp_path: Path, network: str, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("?", r"\?")):
        cluster(cluster_file(tmp_path, network))


def test_a_name_of_another_gpu_stays_its_own(tmp_path: Path) -> None:
    assert str(cluster(cluster_file(tmp_path, 'name = "A100-96"\nmemory_gib = 96.0'))) == "24x4xA100-96"
    assert [one.field for one in assumptions(cluster_file(tmp_path, 'name = "alex"'))] == ["network"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--tp 4", "layout.tp=4"),
        ("--tp=4", "layout.tp=4"),
        ("--tp-size 4", "layout.tp=4"),
        ("--tensor-model-parallel-size 4", "layout.tp=4"),
        ("--gbs 384", "train.global_batch_size=384"),
        ("--mbs 2", "layout.micro_batch_size=2"),
        ("--nodes 24", "without --nodes"),
        ("--nnodes 12", "--gpus 12x4xA100-80"),
        ("--gpus-per-node 8", "--gpus 24x8xA100-80"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "recommend"])
def test_options_of_other_tools_keep_what_was_typed(meshwright: Any, verb: str, words: str, fix: str) -> None:
    ended = meshwright(verb, "qwen3-14b", "--gpus", "24x4xA100-80", *words.split(), "--json")
    assert (ended.code, ended.json["error"]["fix"]) == (2, [fix])


@pytest.mark.parametrize("gpus", ["8xH100", "9x4xA100-80", "24x4xA100-80"])
def test_a_batch_that_keeps_the_tokens_keeps_them(gpus: str) -> None:
    from meshwright import recommend

    found = recommend("qwen3-14b", gpus, "pretrain", seq="8k").suggestions
    kept = [one.overrides for one in found if one.title == "keep the tokens per step"]
    assert kept == [("train.global_batch_size=16",)]
    typed = recommend("qwen3-14b", gpus, "pretrain", seq="8k", overrides=["train.global_batch_size=144"]).suggestions
    assert not [one for one in typed if one.title in ("keep the tokens per step", "scale the batch")]


def test_a_suggested_batch_gives_what_it_promises() -> None:
    from meshwright import recommend

    plan = recommend("qwen3-14b", "24x4xA100-80", "pretrain")
    (found,) = [one for one in plan.suggestions if one.title == "fit the batch to the GPUs"]
    then = recommend("qwen3-14b", "24x4xA100-80", "pretrain", overrides=list(found.overrides))
    batches = [one.recipe.train.global_batch_size for one in (plan, then)]
    gain = 1 - (then.estimate.step_s / batches[1]) / (plan.estimate.step_s / batches[0])
    promised = int(found.why.partition("%")[0].rpartition(" ")[2]) / 100
    assert gain == pytest.approx(promised, abs=0.02)
    (scaled,) = [one for one in plan.suggestions if one.title == "scale the batch"]
    assert "the recipe's 0.0003 at batch 32" in scaled.why


def test_models_are_compared_as_recommended(meshwright: Any) -> None:
    from meshwright import recommend

    words = ("compare", "llama3.1-8b", "qwen3-14b", "--gpus", "24x4xA100-80", "--goal", "pretrain", "--json")
    sides = {one["name"]: one for one in meshwright(*words).json["sides"]}
    assert all(one["ok"] and one["sized"] for one in sides.values())
    plan = recommend("qwen3-14b", "24x4xA100-80", "pretrain")
    assert sides["qwen3-14b"]["estimate"]["step_s"] == pytest.approx(float(plan.estimate.step_s))
    words = ("compare", "qwen3_14b_pretrain_config", "qwen3-14b", "--gpus", "24x4xA100-80", "--goal", "pretrain")
    ended = meshwright(*words, "--json").json["sides"]
    assert [(one["sized"], one["ok"]) for one in ended] == [(True, True), (False, False)]
    assert " over" not in meshwright(*words).out


def test_fewer_nodes_that_are_faster_are_named(meshwright: Any) -> None:
    words = ("recommend", "qwen3-14b", "--goal", "pretrain", "--gpus", "23x4xA100-80", "train.global_batch_size=384")
    answer = meshwright(*words, "--tokens", "10B", "--days", "30", "--json").json
    (found,) = [one for one in answer["suggestions"] if one["title"] == "fewer nodes are faster"]
    gpus = found["why"].split()[1].rstrip(":")
    assert cluster(gpus).nodes < 23
    fewer = meshwright(*(gpus if word == "23x4xA100-80" else word for word in words), "--json").json
    assert fewer["estimate"]["step_s"] < answer["estimate"]["step_s"]
    assert "--days 30 is met" in answer["budget"]["notes"][0]


def test_a_typed_lr_takes_the_minimum_along(meshwright: Any) -> None:
    words = ("recommend", "qwen3-14b", "--goal", "cpt", "--gpus", "8xH100", "optimizer.lr=1e-5", "--json")
    answer = meshwright(*words).json
    assert answer["contract"]["min_lr"] == pytest.approx(1e-6)
    assert "follows lr" in next(one["why"] for one in answer["changes"] if one["field"] == "schedule.min_lr")
    typed = meshwright(*words, "schedule.min_lr=2e-5").json  # what was typed stays
    assert "learning_rate.minimum-above-peak" in [one["rule"] for one in typed["findings"]]


def test_prices_in_the_order_of_the_types(meshwright: Any) -> None:
    words = ("size", "qwen3-8b", "--goal", "sft", "--gpu", "A100-80,H100", "--tokens", "1B", "--max-gpus", "8")
    for price in ("1.2,2.8", "A100-80=1.2,H100=2.8"):
        types = meshwright(*words, "--price", price, "--json").json["compared"]
        assert [one["price"] for one in types] == [1.2, 2.8]
    ended = meshwright(*words, "--price", "1.2,2.8,4.5", "--json")
    assert ended.json["error"]["fix"] == ["--price A100-80=PRICE,H100=PRICE"]
