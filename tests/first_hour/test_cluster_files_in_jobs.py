"""Jobs carry the cluster file of their recipe; fixes of a file keep its global batch, or say how it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import check
from meshwright.cli.run import run
from meshwright.frameworks.applied_fixes import fixed_text

CLUSTER = 'name = "prod"\ngpu = "B200"\nnodes = 2\ngpus_per_node = 8\nnetwork_gb_s_per_node = "400 GB/s"\n'
RECIPE = """name = "mine"
model = "qwen3_600m"
goal = "pretrain"
cluster = "{cluster}"

[data]
seq_length = 4096

[train]
steps = 1000
"""


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run(list(words))
    return (int(ended.value.code or 0), *capsys.readouterr())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a recipe that names a cluster file by its full path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cl").mkdir()
    (tmp_path / "cl/b200.toml").write_text(CLUSTER)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.toml").write_text(RECIPE.format(cluster=tmp_path / "cl/b200.toml"))
    return tmp_path


def test_a_kubernetes_job_contains_the_cluster_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "launch",
        "recipes/mine.toml",
        "--scheduler",
        "kubernetes",
        "--image",
        "me/mw:1",
        "--mount",
        "pvc:/ckpt",
        "--out",
        "/ckpt/run",
    ]
    code, _, err = _run(capsys, *words, "--write", "job")
    assert code == 0, err
    config_map, *_ = yaml.safe_load_all((folder / "job/mine.yaml").read_text())
    assert set(config_map["data"]) == {"mine.toml", "cluster.toml"}
    assert config_map["data"]["cluster.toml"] == CLUSTER
    assert 'cluster = "cluster.toml"' in config_map["data"]["mine.toml"]
    assert str(folder / "cl") not in (folder / "job/mine.yaml").read_text() + err


def test_a_skypilot_job_copies_the_cluster_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "launch", "recipes/mine.toml", "--scheduler", "skypilot", "--write", "job")
    assert code == 0, err
    task = yaml.safe_load((folder / "job/mine.yaml").read_text())
    assert "./cluster.toml" in task["file_mounts"].values()
    assert (folder / "job/cluster.toml").read_text() == CLUSTER
    # The copy is checked from another folder: its cluster file is beside it.
    assert _run(capsys, "check", "job/mine.toml")[0] == 0


def test_a_slurm_container_mounts_the_folder_of_the_cluster_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "launch",
        "recipes/mine.toml",
        "--scheduler",
        "slurm",
        "--image",
        "x.sqsh",
        "--time",
        "10:00:00",
        "--write",
        "job",
    ]
    code, _, err = _run(capsys, *words)
    assert code == 0, err
    assert f"{folder / 'cl'} (the cluster file)" in err
    assert f"{folder / 'cl'}:{folder / 'cl'}" in (folder / "job/mine.sbatch").read_text()


def test_a_slurm_job_copies_a_cluster_file_with_a_relative_path(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipes/mine.toml").write_text(RECIPE.format(cluster="cl/b200.toml"))
    words = ["launch", "recipes/mine.toml", "--scheduler", "slurm", "--time", "10:00:00"]
    code, _, err = _run(capsys, *words, "--write", "job")
    assert code == 0, err
    assert (folder / "job/cluster.toml").read_text() == CLUSTER
    assert 'cluster = "cluster.toml"' in (folder / "job/mine.toml").read_text()
    assert _run(capsys, "check", "job/mine.sbatch")[0] == 0


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
dataset = "c4"
{batch}
[optimizer]
lr = 3e-4
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
enable_async_tensor_parallel = {overlaps}
[activation_checkpoint]
mode = "none"
[compile]
enable = false
"""


def _checked(capsys: pytest.CaptureFixture[str], gpus: str) -> dict[str, Any]:
    _, out, _ = _run(capsys, "check", "t8.toml", "--gpus", gpus, "--json")
    return dict(json.loads(out))


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        ("", ["training.local_batch_size = 1", "training.global_batch_size = 32"]),
        ("global_batch_size = 32", ["training.local_batch_size = 1"]),
    ],
)
def test_a_smaller_micro_batch_keeps_the_global_batch(
    folder: Path, capsys: pytest.CaptureFixture[str], batch: str, fix: list[str]
) -> None:
    (folder / "t8.toml").write_text(TITAN.format(batch=batch, tp=1, overlaps="false"))
    found = _checked(capsys, "8xH100")
    assert [one["fix"] for one in found["findings"] if one["rule"] == "memory.peak"] == [fix]
    fixed = fixed_text((folder / "t8.toml").read_text(), "t8.toml", fix)
    (folder / "t8.toml").write_text(fixed.text)
    after = _checked(capsys, "8xH100")
    assert after["ok"]
    assert not fixed.left
    assert check("t8.toml", gpus="8xH100").recipe.train.global_batch_size == 32


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_repair_keeps_the_global_batch(folder: Path, capsys: pytest.CaptureFixture[str], tp: int) -> None:
    (folder / "t8.toml").write_text(
        TITAN.format(batch="", tp=tp, overlaps="true").replace("local_batch_size = 4", "local_batch_size = 64")
    )
    before = check("t8.toml", gpus="2x8xH100").recipe.train.global_batch_size
    repair = _checked(capsys, "2x8xH100")["repair"]
    assert not repair["contract"]
    (folder / "t8.toml").write_text(fixed_text((folder / "t8.toml").read_text(), "t8.toml", repair["overrides"]).text)
    after = check("t8.toml", gpus="2x8xH100")
    assert after.ok
    assert after.recipe.train.global_batch_size == before == 64 * 16 // tp


def test_a_repair_with_another_batch_names_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    enabled = {"enabled": True}
    config = {"zero_optimization": {"stage": 3}, "bf16": enabled, "fp16": enabled, "train_batch_size": 30}
    (folder / "ds_config.json").write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": 4}))
    _, out, _ = _run(capsys, "check", "ds_config.json", "--gpus", "8xH100", "--model", "llama3-8b")
    assert "the repair changes the global batch from 30 to 32 samples" in " ".join(out.split())
