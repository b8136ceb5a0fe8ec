"""Steps of mixtures of experts: launches, formats, windows of attention, and settings that a row leaves open."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.costs.compute import layer_time
from meshwright.costs.gemm import expert_rows, fuses_experts
from meshwright.costs.measurements_knobs import framework_of
from meshwright.costs.open_knobs import knob_ranges
from meshwright.costs.speeds import speeds
from meshwright.costs.time import step_time
from meshwright.models import Attention, find
from meshwright.recipes.capabilities import fp8_experts
from meshwright.recipes.case import Case

from .helpers import case, published

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def _case(name: str, gpus: str, **names: Any) -> Case:
    usual = {"force_balance": True, "dispatcher": "hybridep", "cuda_graphs": "transformer_engine"}
    return case(find(name), gpus, engine="megatron", **{**usual, **names})


def test_more_experts_on_a_rank_take_longer_to_launch() -> None:
    """Nemotron 3 Super: 9,856 tokens/s per GB300 with 8 experts per rank, 7,296 per B300 with 64."""
    many, few = (_case("nemotron_3_super", "64xGB300", ep=ep) for ep in (8, 64))
    assert step_time(many).other > 2 * step_time(few).other


def test_a_graph_of_the_whole_iteration_has_no_launches_left() -> None:
    run = _case("qwen3_30b_a3b", "8xGB300", ep=8)
    steps = [step_time(run.replace(cuda_graphs=g)).step_s for g in ("full_iteration", "transformer_engine", "none")]
    assert steps[0] < steps[1] < steps[2]


def test_recipes_that_capture_everything_fuse_activations_into_grouped_matmuls() -> None:
    """Qwen3 30B-A3B on 8 GB300 in MXFP8: 5.9 s per step, where graphs of parts take 8.3 s."""
    run = _case("qwen3_30b_a3b", "8xGB300", ep=8, matmul="mxfp8")
    parts, everything = (step_time(run.replace(cuda_graphs=g)) for g in ("transformer_engine", "full_iteration"))
    assert 0.8 < everything.compute / parts.compute < 0.98
    assert fuses_experts(run.replace(cuda_graphs="full_iteration"))
    assert not fuses_experts(run.replace(cuda_graphs="full_iteration", matmul="same"))


def test_experts_gain_nothing_from_nvfp4_over_mxfp8() -> None:
    """9,900 tokens/s instead of 9,856 for Nemotron 3 Super on 64 GB300."""
    run = _case("nemotron_3_super", "64xGB300", ep=64)
    eight, four = (step_time(run.replace(matmul=matmul)).compute for matmul in ("mxfp8", "nvfp4"))
    assert 0.8 < four / eight < 1.05


def test_a_window_of_attention_costs_whole_blocks() -> None:
    """128 keys of 16,384 take 8 % of the time of full attention on an H100, five times their share of the scores."""
    run = _case("gpt_oss_20b", "8xH100", seq_length=16384)
    core = {
        bool(layer.mixer.window): float(layer_time(run, speeds(run), layer).core)
        for layer in run.model.layers
        if isinstance(layer.mixer, Attention)
    }
    assert 0.05 < core[True] / core[False] < 0.15


def test_an_untrained_router_fills_the_ranks_of_its_favourite_experts() -> None:
    """4 B200, 16 experts, top 1: experts in MXFP8 save 0.38 s of 1.33 s, four times what balanced experts would."""
    run = _case("llama4_scout", "8xB200", ep=8, dispatcher="alltoall")
    moe = run.model.moe
    assert moe is not None
    balanced, trained, untrained = (
        expert_rows(one, speeds(one), moe)
        for one in (run, run.replace(force_balance=False), run.replace(force_balance=False, untrained_router=True))
    )
    assert balanced == 1 < trained < 2 < untrained <= run.ep


def test_an_engine_that_pads_gives_every_expert_the_rows_of_the_fullest() -> None:
    """KempnerForge on 8 H200, 20 steps from scratch: 2.57 s with 8 experts, 3.55 s with 16, top 2 of both."""
    run = case(find("qwen3_30b_a3b"), "8xH200", engine="kempnerforge", untrained_router=True)
    moe = run.model.moe
    assert moe is not None
    share = speeds(run).shared.untrained_share
    assert expert_rows(run, speeds(run), moe) == pytest.approx(share * moe.experts / moe.topk)
    assert expert_rows(run.replace(force_balance=True), speeds(run), moe) == 1


def test_rows_say_which_routers_are_untrained_and_what_is_quantized() -> None:
    rows = {row.row_id: row.case for row in published() if row.source == "torchao_titan"}
    eight = rows["cab81aac12"]
    assert eight is not None
    assert eight.untrained_router
    assert not fp8_experts(eight)


def test_automodels_balanced_gate_chooses_experts_of_few_ranks() -> None:
    """It gives a token eight experts in a row: two ranks of 64 with four experts each, and one node of eight."""
    run = case(find("deepseek_v3"), "256xH100", engine="automodel", dispatcher="deepep", ep=64)
    gate, router = (float(step_time(run.replace(force_balance=forced)).ep) for forced in (True, False))
    assert gate < router / 3
    alone = run.replace(force_balance=True, ep=np.array([8, 64]), dispatcher=np.array(["deepep", "deepep"]))
    assert step_time(alone).ep[1] == pytest.approx(gate)


@pytest.mark.parametrize(
    ("version", "graphs"),
    [("NeMo container 25.09", "none"), ("NeMo container 25.11", "transformer_engine"), ("2026", "transformer_engine")],
)
def test_defaults_follow_the_month_of_a_container(version: str, graphs: str) -> None:
    entry = framework_of("Megatron-Bridge/Megatron-Core", version)
    assert entry is not None
    assert entry.defaults.get("cuda_graphs", "none") == graphs


def test_what_a_known_recipe_does_not_set_is_off() -> None:
    rows = {row.row_id: row for row in published()}
    with (DATA / "measurements.csv").open(encoding="utf-8", newline="") as file:
        noted = [row for row in csv.DictReader(file) if "QWEN3_235B_A22B_PRETRAIN_CONFIG_H100_FP8_CS" in row["notes"]]
    assert noted
    for row in noted:
        run = rows[row["row_id"]].case
        assert run is not None
        assert run.cuda_graphs == "none"
        assert run.dispatcher == ("deepep" if "deepep" in row["notes"] else "alltoall")


def test_the_range_of_an_open_setting_is_that_of_its_usual_values() -> None:
    rows = [row for row in published("measurements_added") if row.source == "ms_swift_examples"]
    found = {knob.name: knob for knob in knob_ranges(rows)}
    assert found["vp"].rows == 1
    assert 3 < found["vp"].median_pct < 20


def test_sources_that_we_added_are_in_no_fit() -> None:
    added = {row.source for row in published("measurements_added")}
    assert not added & {row.source for row in published()}
    assert all(row.case is not None for row in published("measurements_added"))
