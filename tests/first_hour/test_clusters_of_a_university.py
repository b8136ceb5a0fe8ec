"""A university's A100 cluster: files of own models, logs of several jobs, slow file systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CLUSTER = """gpu = "A100-40"
nodes = 32
gpus_per_node = 4
nvlink_domain = 4
network_gb_s_per_node = "200 Gb/s"
host_gib = 256
"""
OWN_FLAVOR = """[model]
name = "llama3"
flavor = "3B_mine"
[training]
local_batch_size = 4
global_batch_size = {batch}
seq_len = 4096
steps = 1000
[parallelism]
data_parallel_shard_degree = {shard}
tensor_parallel_degree = 4
pipeline_parallel_degree = {pp}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uni.toml").write_text(CLUSTER)


@pytest.mark.parametrize(
    ("shard", "pp", "batch", "found", "fix"),
    [
        (16, 3, 128, "128 GPUs are not divisible by tp × pp × cp = 12", ""),
        (16, 4, 128, "dp_shard × dp_replicate = 16 × 1, but the other axes leave 8", "data_parallel_shard_degree = -1"),
        (8, 4, 100, "global_batch_size=100 is not divisible by micro_batch_size=1 × dp=8", "global_batch_size = 96"),
        (-1, 4, 128, "", ""),
    ],
)
def test_degrees_and_batch_of_an_unknown_flavor_are_compared_with_the_gpus(
    meshwright: Any, shard: int, pp: int, batch: int, found: str, fix: str
) -> None:
    Path("own.toml").write_text(OWN_FLAVOR.format(shard=shard, pp=pp, batch=batch))
    findings = meshwright("check", "own.toml", "--gpus", "uni.toml", "--json").json["findings"]
    others = [one for one in findings if one["rule"] != "torchtitan.model-name"]
    assert len(others) == bool(found)
    for one in others:
        assert one["severity"] == "error"
        assert found in one["message"]
        assert fix in " ".join(one["fix"])
        assert one["fix"] or "the model is unknown" in one["no_fix"]
