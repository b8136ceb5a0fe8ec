"""Rehearsals on a CPU: the simulated network takes its time, pipelines are composed, layers left out are added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright import clusters
from meshwright.engine.model_families import family_of
from meshwright.engine.tiny import tiny_recipe
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.rehearsal.compose import TimedRank, schedule
from meshwright.rehearsal.network import ClusterNetwork, MeasuredNetwork, load_network
from meshwright.rehearsal.rank import ALL, NONE, Measured, RankResult, RankTask
from meshwright.rehearsal.run import kernel_scale, rehearse
from meshwright.rehearsal.run_plan import Device
from meshwright.rehearsal.trace_file import chrome_trace
from meshwright.rehearsal.types import PARTS

SLOW_S = 0.01


def tiny(name: str, gpus: str, *changes: str, layers: int = 2) -> tuple[Any, Any, Any]:
    cluster = clusters.cluster(gpus)
    changes = ("data.seq_length=16", *changes)
    recipe = override.apply(index.load(name), changes)
    config = family_of(recipe).config_for(recipe)
    found, config = tiny_recipe(recipe, config, cluster.world, override.requested(recipe, changes))
    config.num_hidden_layers = layers
    return found, config, cluster


def points(seconds: float) -> list[dict[str, Any]]:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast")
    return [{"kind": kind, "ranks": 2, "bytes": size, "s": seconds} for kind in kinds for size in (1, 1 << 40)]


def test_every_collective_takes_its_time_and_shows_as_exposed() -> None:
    recipe, config, cluster = tiny("llama3_8b_pretrain_config", "2xH100", "layout.tp=1", "layout.cp=1")
    network = MeasuredNetwork(points(SLOW_S))
    found = rehearse(recipe, cluster, Device("cpu"), config=config, network=network, budget_s=0.3)
    (rank,) = found.ranks
    gathers = sum(one.count for one in rank.collectives if one.axis == "dp")
    assert gathers >= 4
    assert rank.micro_batches == 4
    assert found.parts["dp"] > 0.5 * gathers * SLOW_S
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.mfu is None
    assert found.allocated_gib is None
    assert found.fits
    spans = [event for event in chrome_trace(found)["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(rank.spans) > 0
    assert all(event["dur"] >= 0.9e6 * SLOW_S for event in spans if event["name"].startswith("dp all_gather"))


def test_a_pipeline_is_composed_from_its_stages() -> None:
    changes = ("layout.pp=2", "layout.tp=1", "layout.vp=1", "layout.cp=1", "layout.pp_schedule=1f1b")
    recipe, config, cluster = tiny("llama3_70b_pretrain_config", "2xH100", *changes, layers=8)
    found = rehearse(recipe, cluster, Device("cpu"), config=config, layers=2, budget_s=0.3)
    assert [one.pp_rank for one in found.ranks] == [0, 1]
    assert [(one.layers_run, one.layers) for one in found.ranks] == [(2, 4), (2, 4)]
    assert len(found.passes) == 2 * 2 * 4
    assert found.schedule == "1f1b"
    own = {rank: [one for one in found.passes if one.rank == rank] for rank in (0, 1)}
    assert own[1][0].start_s >= own[0][0].end_s > 0  # the second stage waits for the first one's output
    assert own[0][-1].end_s > own[1][-1].end_s
    span, busy = own[0][-1].end_s, {rank: sum(one.end_s - one.start_s for one in own[rank]) for rank in own}
    assert span - busy[1] > 0  # whatever a pass takes; the first stage may be too slow to wait
    slowest = max(busy.values())
    assert found.parts["pp_bubble"] >= span - slowest - 1e-6
    assert any("layers are added from those of the same type" in text for text in found.notes)
    names = {event["args"]["name"] for event in chrome_trace(found)["traceEvents"] if event["ph"] == "M"}
    assert {"pipeline rank 0", "pipeline rank 1"} <= names


def test_experts_are_exchanged_without_peers() -> None:
    recipe, config, cluster = tiny("qwen3_30b_a3b_pretrain_config", "4xH100", "layout.ep=2", "layout.tp=1")
    found = rehearse(recipe, cluster, Device("cpu"), config=config, budget_s=0.3)
    kinds = {(one.axis, one.kind) for one in found.ranks[0].collectives}
    assert ("ep", "all_to_all") in kinds
    assert any("the fullest expert rank has 1.2 times the mean number of tokens" in text for text in found.notes)


def timed_rank(rank: int, pp: int, forward: float, backward: float, layers: int = 1, kept: int = 1) -> TimedRank:
    recipe = override.apply(
        index.load("llama3_8b_pretrain_config"),
        (f"layout.pp={pp}", "layout.tp=1", "layout.cp=1", "layout.pp_schedule=1f1b", "train.global_batch_size=4"),
    )
    chunk = tuple(range(layers))
    task = RankTask(
        recipe, {}, pp, rank, (rank,), (chunk,), (chunk[:kept],), ("same",) * layers, MeasuredNetwork([]), "cpu", None,
        1.0, 1.0,
    )  # fmt: skip
    passes = {(kind, rank, micro): s for micro in range(4) for kind, s in (("F", forward), ("B", backward))}
    by_layer = {(kind, 0, layer): s for layer in range(kept) for kind, s in (("F", 0.1), ("B", 0.2))}
    total = 4 * (forward + backward)
    found = Measured(total + 0.5, 0.5, [] if pp > 1 else [forward + backward] * 4, passes if pp > 1 else {}, by_layer)
    result = RankResult({ALL: found, NONE: found}, layer_weights={(0, layer): 10 for layer in range(kept)}, weights=20)
    return TimedRank(task, result, 8)


def test_passes_follow_the_schedule_with_sends_between_ranks() -> None:
    ranks = {rank: timed_rank(rank, 2, 1.0, 2.0) for rank in range(2)}
    layout = ranks[0].task.recipe.layout
    passes = schedule(layout, ranks, 8, ALL, 0.25)
    assert max(one.end_s for one in passes) == pytest.approx(8 * 3 + 3 + 2 * 0.25, abs=2 * 0.25 * 8)
    alone = schedule(layout, ranks, 8, NONE, 0.25)
    assert max(one.end_s for one in alone) == pytest.approx(8 * 3 + 3)  # the bubble of 1F1B is one micro batch


def test_layers_and_micro_batches_that_did_not_run_are_added() -> None:
    one = timed_rank(0, 1, 1.0, 2.0, layers=5, kept=2)
    time = one.time(ALL)
    assert time.busy_s == pytest.approx(8 * (3.0 + 3 * 0.3))  # 8 micro batches, 3 layers more in each
    assert time.optimizer_s == pytest.approx(0.5 * (1 + 30 / 20))  # the update of 3 layers of 10 weights each


@pytest.mark.parametrize(("deferred", "factor"), [("true", 4), ("false", 1)])
def test_deferred_gradients_of_left_out_layers_count_unsharded(deferred: str, factor: int) -> None:
    """On a GPU a rank with 25 of 40 layers had 18 GiB less than the dry run of all: its gradients counted as shards."""
    from meshwright.rehearsal.rank import rehearse_rank
    from meshwright.rehearsal.run_plan import RunPlan

    words = ("layout.tp=1", "layout.cp=1", f"layout.defer_grad_sync={deferred}", "precision.reduce=fp32")
    recipe, config, cluster = tiny("llama3_8b_pretrain_config", "4xH100", *words)
    case = Case(recipe, model_of(recipe), cluster)
    plan = RunPlan(case, config, Device("cpu"), MeasuredNetwork(points(1e-6)), 1.0, [0], None, 0.1)
    found = rehearse_rank(plan.task((0, (0,)), None))
    (_, gradients), weights = found.layer_state[0, 0], found.layer_weights[0, 0]
    assert gradients == weights * factor * 4


def test_kernels_are_scaled_by_the_rates_of_both_gpus() -> None:
    recipe = index.load("llama3_8b_pretrain_config")
    case = Case(recipe, model_of(recipe), clusters.cluster("8xH100"))
    h100, h200, a100 = (clusters.gpu(name) for name in ("H100", "H200", "A100-80"))
    assert kernel_scale(case, h200, h200) == 1.0
    assert 1.0 <= kernel_scale(case, h200, h100) < 1.3
    assert kernel_scale(case, h200, a100) > 2


def test_the_cluster_network_has_the_times_of_the_cost_model() -> None:
    recipe = index.load("llama3_8b_pretrain_config")
    network = ClusterNetwork(Case(recipe, model_of(recipe), clusters.cluster("2x8xH100")))
    near, far = (network.seconds("all_gather", 1 << 30, range(count), "fsdp") for count in (8, 16))
    assert 0 < near < far
    assert network.seconds("all_reduce", 1 << 30, range(8), "fsdp") == pytest.approx(2 * near)
    assert network.seconds("all_gather", 1 << 30, (0,), "fsdp") == 0


def test_measured_collectives_are_interpolated_and_checked(tmp_path: Path) -> None:
    rows = [{"kind": "all_gather", "ranks": 8, "bytes": size, "s": s} for size, s in ((100, 1.0), (200, 3.0))]
    network = MeasuredNetwork(rows)
    assert [network.seconds("all_gather", size, range(8), "dp") for size in (1, 150, 400)] == [1.0, 2.0, 6.0]
    with pytest.raises(InputError, match="no measured all_reduce"):
        network.seconds("all_reduce", 10, range(8), "dp")
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"points": rows}))
    assert load_network(str(path)).seconds("all_gather", 150, range(8), "dp") == 2.0
    for text in ("{", "[]", '{"points": []}', json.dumps({"points": [{**rows[0], "kind": "gather"}]})):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            load_network(str(path))
        assert caught.value.field == "network"
        assert caught.value.fix


def test_a_rank_that_is_too_large_or_slow_runs_fewer_layers() -> None:
    from meshwright.rehearsal.run_plan import RunPlan

    recipe = override.apply(index.load("llama3_70b_pretrain_config"), ("layout.pp=1", "layout.vp=1"))
    config = family_of(recipe).config_for(recipe)
    case = Case(recipe, model_of(recipe), clusters.cluster("64xH100"), memory_of=None)
    h200 = Device("cuda", clusters.gpu("H200"), 139.0)

    def layers(device: Device, budget: float) -> int | None:
        plan = RunPlan(case, config, device, ClusterNetwork(case), 1.0, [0], None, budget)
        return plan.layers_in_budget(0)

    everything = case.rebuild(override.apply(recipe, ("layout.pp=4", "layout.pp_schedule=gpipe")))
    plan = RunPlan(everything, config, h200, ClusterNetwork(everything), 1.0, [0], None, 1e6)
    assert plan.run_batches == plan.micro_batches > 8  # GPipe holds the activations of all
    assert layers(h200, 1e6) is None
    assert 2 <= (layers(h200, 20.0) or 0) < 80
    assert 2 <= (layers(msgspec.structs.replace(h200, memory_gib=24.0), 1e6) or 0) < 80


@pytest.mark.slow
def test_a_spawned_rank_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.rehearsal import run

    monkeypatch.setitem(run.START, "cpu", "spawn")  # as on a GPU: a forked process cannot use it
    recipe, config, cluster = tiny("llama3_8b_pretrain_config", "4xH100", "layout.tp=2")
    found = rehearse(recipe, cluster, Device("cpu"), config=config, budget_s=0.3)
    assert {one.axis for one in found.ranks[0].collectives} == {"tp", "dp", "control"}
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
