"""Every override example people paste, in every spelling, on the command line's JSON."""

from __future__ import annotations

from typing import Any

import pytest


def resolved(meshwright: Any, name: str, *overrides: str) -> dict[str, Any]:
    answer = meshwright("recipe", name, *overrides, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = answer.json["recipe"]
    return found


def test_override_any_field(meshwright: Any) -> None:
    found = resolved(
        meshwright, "llama3_8b_pretrain_config", "model.tensor_model_parallel_size=2", "training.global_batch_size=64"
    )
    assert found["layout"]["tp"] == 2
    assert found["train"]["global_batch_size"] == 64


def test_scale_8b_from_two_to_eight_gpus(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--json")
    layout = answer.json["layout"]
    assert layout["dp_shard"] * layout["dp_replicate"] * layout["tp"] * layout["pp"] * layout["cp"] == 8


def test_fewer_expert_ranks_for_four_gpus(meshwright: Any) -> None:
    answer = meshwright(
        *("check", "qwen3_30b_a3b_sft_config", "--gpus", "4xH200", "model.expert_model_parallel_size=4", "--json")
    )
    assert not [
        f for f in answer.json["findings"] if f["rule"].startswith(("topology.", "moe.")) and f["severity"] == "error"
    ]


def test_long_context(meshwright: Any) -> None:
    found = resolved(meshwright, "llama3_8b_pretrain_config", "model.seq_length=32768", "model.context_parallel_size=4")
    assert found["data"]["seq_length"] == 32768  # it does not silently revert
    assert found["layout"]["cp"] == 4


def test_cuda_graphs(meshwright: Any) -> None:
    graphs = ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_scope=[attn,moe_router,moe_preprocess]")
    trackers = ("model.use_te_rng_tracker=True", "rng.te_rng_tracker=True")
    found = resolved(meshwright, "qwen3_30b_a3b_pretrain_config", *graphs, *trackers)
    assert found["kernels"]["cuda_graphs"] == "transformer_engine"
    assert found["kernels"]["cuda_graph_scope"] == ["attn", "moe_router", "moe_preprocess"]
    assert found["kernels"]["te_rng_tracker"] is True
    without = meshwright("check", "qwen3_30b_a3b_pretrain_config", *graphs, "--engine=megatron", "--json")
    assert without.code == 1
    assert any("kernels.te_rng_tracker=true" in f["fix"] for f in without.json["findings"])


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("layout.tp=4", "layout", "tp", 4),
        ("tp=4", "layout", "tp", 4),
        ("model.tensor_model_parallel_size=4", "layout", "tp", 4),
        ("distributed.tp_size=4", "layout", "tp", 4),
        ("distributed.tp=4", "layout", "tp", 4),
        ("model.pipeline_model_parallel_size=2", "layout", "pp", 2),
        ("distributed.pp_size=2", "layout", "pp", 2),
        ("distributed.pp=2", "layout", "pp", 2),
        ("model.context_parallel_size=2", "layout", "cp", 2),
        ("distributed.cp_size=2", "layout", "cp", 2),
        ("model.expert_model_parallel_size=2", "layout", "ep", 2),
        ("distributed.ep_size=2", "layout", "ep", 2),
        ("distributed.ep=2", "layout", "ep", 2),
        ("distributed.dp_replicate_size=2", "layout", "dp_replicate", 2),
        ("distributed.dp_shard=-1", "layout", "dp_shard", -1),
        ("distributed.sequence_parallel=true", "layout", "sp", True),
        ("model.sequence_parallel=False", "layout", "sp", False),
        ("distributed.activation_checkpointing=full", "layout", "recompute", "full"),
        ("training.global_batch_size=64", "train", "global_batch_size", 64),
        ("train.global_batch_size=64", "train", "global_batch_size", 64),
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),
    ],
)
def test_other_frameworks_keys(meshwright: Any, override: str, section: str, field: str, value: object) -> None:
    assert resolved(meshwright, "llama3_70b_pretrain_config", override)[section][field] == value
