"""Rows that contradict themselves; narrow heads, groups of experts and V-shaped pipelines."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from tests.costs.helpers import case, llama, published

from meshwright.clusters import cluster
from meshwright.costs.communication import _places
from meshwright.costs.measurements import read
from meshwright.costs.measurements_defaults import usual_vp
from meshwright.costs.speeds import speeds
from meshwright.models import find

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


@pytest.fixture
def table(meshwright: Any, tmp_path: Path) -> Path:
    """The printed template with tokens/s that contradict the step time of its first example."""
    text = meshwright("accuracy", "--template").out
    path = tmp_path / "runs.csv"
    path.write_text(text.replace(",1.332,,", ",1.332,20000,"))
    assert path.read_text() != text
    return path


@pytest.mark.parametrize("verb", [("accuracy",), ("calibrate",)])
def test_a_row_that_contradicts_itself_is_reported_and_left_out(meshwright: Any, table: Path, verb: Any) -> None:
    found = meshwright(*verb, str(table))
    assert found.code == 0
    assert "left out: row 1" in found.out
    assert "the row contradicts itself: tokens/s and step time" in found.out
    assert "take 0.41 s, but step_time_s is 1.332" in found.out
    assert "titan-8b " not in found.out  # nothing is said about its error
    answer = meshwright(*verb, str(table), "--json").json
    if verb == ("accuracy",):
        assert answer["rows"] == 1
        assert any("contradicts itself" in note for note in answer["notes"])
    else:
        assert [one["runs"] for one in answer["profiles"]] == [1]


def test_a_published_row_that_contradicts_itself_is_counted_as_left_out(meshwright: Any, tmp_path: Path) -> None:
    with (DATA / "measurements.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "llm_foundry" and row["step_time_s"]][:3]
    rows[0]["tokens_per_s_per_gpu"] = str(3 * float(rows[0]["tokens_per_s_per_gpu"]))
    path = tmp_path / "published.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    answer = meshwright("accuracy", str(path), "--json").json
    assert answer["unsupported"] == {"the row contradicts itself: tokens/s and step time": 1}
    assert (answer["rows"], answer["predicted"]) == (3, 2)
    fitted = meshwright("calibrate", str(path))
    assert fitted.code == 0
    assert "fitted to 2 runs" in fitted.out


def test_a_row_runs_on_the_cluster_of_its_file(tmp_path: Path) -> None:
    facts = 'gpu = "A100-80"\nnodes = 40\ngpus_per_node = 4\nmemory_gib = 64\nnetwork_gb_s_per_node = "400 Gb/s"\n'
    (tmp_path / "site.toml").write_text(facts)
    header = "framework,model,gpus,seq_length,micro_batch_size,global_batch_size,tp,step_time_s\n"
    rows = (f"{name},llama3.1-8b,{tmp_path}/site.toml,8192,1,480,1,7.3\n" for name in ("torchtitan", "meshwright"))
    (tmp_path / "runs.csv").write_text(header + "".join(rows))
    for row in read(tmp_path / "runs.csv"):
        assert row.case is not None
        assert (row.case.cluster.gpu.network_gb_s, row.case.capacity_gib) == (12.5, 64)
        assert row.case.cluster == cluster(str(tmp_path / "site.toml"))


def test_a_dualpipe_rank_has_both_ends_of_the_v() -> None:
    (row,) = (one for one in published() if one.source == "paper_deepseek_v3")
    assert row.case is not None
    assert (row.case.pp_schedule, row.case.vp) == ("dualpipe_v", 2)


def test_an_interleaved_pipeline_that_two_layers_do_not_divide_has_chunks_of_one() -> None:
    assert usual_vp("mbs, VP, recompute not stated", 92, 4, 0) == 23
    assert usual_vp("mbs, VP, recompute not stated", 96, 8, 0) == 6
    assert usual_vp("", 92, 4, 0) == 1


def test_tokens_of_deepseek_v3_go_to_at_most_four_groups_of_experts() -> None:
    deepseek, kimi = (case(find(name), "8x8xH100") for name in ("deepseek_v3", "kimi_k2"))
    moe, other = deepseek.model.moe, kimi.model.moe
    assert moe is not None
    assert other is not None
    assert _places(deepseek, moe, 8) < 4 < _places(kimi, other, 8) < 8
    assert _places(deepseek, moe, 1) == 1
    assert 2 < _places(deepseek, moe, 4) < 4
    assert _places(deepseek, moe, 64) < _places(kimi, other, 64)


def test_narrow_heads_cost_most_where_matmuls_outgrew_exponentials() -> None:
    found = {name: speeds(case(llama(), f"8x{name}")).softmax for name in ("A100-80", "H100", "GB300", "B200")}
    assert found["H100"] == found["GB300"] == 2 * found["A100-80"]
    assert found["B200"] == 4 * found["A100-80"]
