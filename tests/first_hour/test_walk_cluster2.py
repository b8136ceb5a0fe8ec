"""What an engineer does next with the jobs that `launch` wrote for a SLURM cluster: check, estimate and export them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NODES = ("--gpus", "3x4xA100-80", "--scheduler", "slurm")


@pytest.fixture
def written(meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes the job of a recipe and returns the path of its batch script."""
    monkeypatch.chdir(tmp_path)

    def write(*words: str) -> str:
        result = meshwright("launch", *words, *NODES, "--write", "jobs", "--json")
        assert result.code == 0, result.out
        return str(next(Path("jobs").glob("*.sbatch")))

    return write


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan", "automodel"])
def test_check_and_estimate_read_the_job_that_launch_wrote(meshwright: Any, written: Any, framework: str) -> None:
    job = written("llama3_8b_pretrain_config", "--to", framework, "train.global_batch_size=240")
    checked = meshwright("check", job, "--json").json
    assert (checked["framework"], checked["ok"]) == (framework, True)
    assert any("the type of the 12 GPUs is unknown" in note for note in checked["notes"])
    assert meshwright("check", job, "--framework", framework, "--json").code == 0
    estimated = meshwright("estimate", job, "--json").json
    assert "starts 12 GPUs" in estimated["question"]["assumed"][0]["message"]
    assert estimated["question"]["gpus"] == "3x4xH100"


def test_a_shell_that_starts_its_arguments_is_read(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\nGPUS=8\n"
        'srun bash -c \'exec "$0" "$@"\' torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$GPUS pretrain_gpt.py '
        f"{model} --max-position-embeddings 4096 --micro-batch-size 1 --tensor-model-parallel-size 2 --bf16\n"
    )
    notes = meshwright("check", str(script), "--json").json["notes"]
    assert any("16 GPUs" in note for note in notes)
