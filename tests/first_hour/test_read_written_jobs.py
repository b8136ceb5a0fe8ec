"""Jobs that `launch` wrote for SLURM: check, estimate and export read them."""

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


MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 --swiglu "
    "--max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --use-distributed-optimizer "
    "--vocab-size 128256 --micro-batch-size 1 --global-batch-size 256 --train-iters 500 --lr 3e-4 --bf16 "
    "--mock-data --save-interval 100 "
)
BRIDGE = "torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config "


@pytest.mark.parametrize(
    ("command", "to", "lost"),
    [
        (MEGATRON + "--save /scratch/ckpt", "megatron-lm", {}),
        (MEGATRON + "--save /scratch/ckpt", "automodel", {"save": "/scratch/ckpt"}),
        (MEGATRON + "--save /scratch/a --load /scratch/a", "automodel", {"save": "/scratch/a", "load": "/scratch/a"}),
        (MEGATRON + "--save /scratch/b --load /scratch/a", "megatron-lm", {}),
        (MEGATRON + "--save /scratch/b --load /weights --finetune", "megatron-lm", {}),
        (MEGATRON + "--save checkpoints/job --load checkpoints/job", "automodel", {}),
        (BRIDGE + "checkpoint.save=/scratch/ckpt", "megatron-lm", {"checkpoint.save": "/scratch/ckpt"}),
    ],
)
def test_export_says_that_the_folder_of_checkpoints_is_another(
    meshwright: Any, tmp_path: Path, command: str, to: str, lost: dict[str, str]
) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{command}\n")
    answer = meshwright("export", str(tmp_path / "job.sh"), "--to", to, "--json").json
    named = [one for one in answer["not_imported"] if one["key"].split(".")[-1] in ("save", "load", "finetune")]
    assert {one["key"]: one["value"] for one in named} == lost


@pytest.mark.parametrize(
    ("framework", "where"),
    [
        ("torchtitan", 'folder = "/scratch/run" under [checkpoint]'),
        ("megatron-lm", "--save /scratch/run and --load /scratch/run"),
        ("automodel", "checkpoint_dir: /scratch/run"),
        ("accelerate", "to your program as its argument"),
    ],
)
def test_out_for_another_framework_says_where_its_checkpoints_are_set(
    meshwright: Any, tmp_path: Path, framework: str, where: str
) -> None:
    words = ("launch", "llama3_8b_pretrain_config", *NODES, "--to", framework, "--out", "/scratch/run", "--json")
    error = meshwright(*words, "--write", str(tmp_path / "jobs"))
    assert error.code == 2
    assert [fix for fix in error.json["error"]["fix"] if where in fix] == error.json["error"]["fix"]
    assert "--write" not in error.json["error"]["fix"][0]
    assert not (tmp_path / "jobs").exists()
    fixes = meshwright(*words).json["error"]["fix"]
    assert any(fix.startswith("--write /scratch/run") for fix in fixes) == (framework != "accelerate")


def test_check_and_estimate_read_a_job_of_our_engine(meshwright: Any, written: Any) -> None:
    changes = ("train.global_batch_size=240", "layout.tp=2", "--dataset", "/data/tok", "--out", "/scratch/run")
    job = written("llama3_8b_pretrain_config", *changes)
    for words in ((), ("--framework", "meshwright")):
        checked = meshwright("check", job, *words, "--json").json
        assert (checked["framework"], checked["gpus"], checked["file"]) == ("meshwright", "3x4xA100-80", job)
    plan = meshwright("estimate", job, "--json").json
    assert plan["question"]["gpus"] == "3x4xA100-80"
    assert plan["layout"]["tp"] == 2
    shown = meshwright("recipe", job).out
    assert "global_batch_size = 240" in shown
    assert 'dataset = "/data/tok"' in shown
    broken = meshwright("check", job, "layout.tp=3", "--json")
    assert broken.code == 1
    wrong = meshwright("check", job, "--framework", "torchtitan", "--json").json["error"]
    assert wrong["fix"] == ["--framework meshwright"]


def test_a_job_names_the_lines_of_its_recipe_file(meshwright: Any, written: Any) -> None:
    text = 'base = "llama3_8b_pretrain_config"\n[train]\nglobal_batch_size = 240\n[layout]\nmicro_batch_size = 1\n'
    Path("mine.toml").write_text(text)
    job = written("mine.toml")
    Path("mine.toml").write_text(text.replace("240", "241"))
    answer = meshwright("check", job, "--json").json
    place = {(Path(one["file"]).name, one["line"]) for one in answer["findings"] if one["severity"] == "error"}
    assert ("mine.toml", 3) in place or ("mine.toml", 5) in place
    assert (
        meshwright("launch", job, "--scheduler", "slurm", "--write", "again", "train.global_batch_size=240").code == 0
    )
    Path("mine.toml").unlink()
    assert "mine.toml" in meshwright("check", job, "--json").json["error"]["value"]


TRAIN = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("srun meshwright train llama3_8b_pretrain_config --timeout 900", "2x8xH100"),
        ("srun --nodes=1 python -m meshwright train --wandb llama3_8b_pretrain_config", "8xH100"),
        ("torchrun --nnodes 4 --nproc-per-node 4 -m meshwright train llama3_8b_pretrain_config", "4x4xH100"),
        ("meshwright train llama3_8b_pretrain_config --nproc 4", "4xH100"),
    ],
)
def test_a_job_written_by_hand_is_checked_on_its_gpus(meshwright: Any, tmp_path: Path, command: str, gpus: str) -> None:
    (tmp_path / "job.sh").write_text(f"{TRAIN}{command}\n")
    assert meshwright("check", str(tmp_path / "job.sh"), "--json").json["gpus"] == gpus


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("meshwright train llama3_8b_pretrain_config --tiny", "meshwright check llama3_8b_pretrain_config"),
        ("meshwright train $RECIPE", "meshwright check RECIPE KEY=VALUE"),
    ],
)
def test_a_job_that_cannot_be_checked_says_what_to_check(
    meshwright: Any, tmp_path: Path, command: str, fix: str
) -> None:
    (tmp_path / "job.sh").write_text(f"{TRAIN}srun {command}\n")
    answer = meshwright("check", str(tmp_path / "job.sh"), "--json")
    assert answer.code == 2
    assert answer.json["error"]["fix"] == [fix]


def test_a_script_without_a_training_of_ours_is_not_read_as_one(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{MEGATRON}\n")
    error = meshwright("check", str(tmp_path / "job.sh"), "--framework", "meshwright", "--json").json["error"]
    assert error["fix"] == ["--framework megatron-lm"]
    (tmp_path / "other.sh").write_text("#!/bin/bash\npython tokenize_data.py\n")
    error = meshwright("check", str(tmp_path / "other.sh"), "--json").json["error"]
    assert "--framework meshwright" not in error["fix"]
    assert "--framework torchtitan" not in error["fix"]  # it would find no command of its own


def test_a_job_of_torchrun_is_read_like_the_config_beside_it(meshwright: Any, written: Any) -> None:
    job = written("llama3_8b_pretrain_config", "--to", "accelerate", "train.global_batch_size=240")
    assert meshwright("check", job, "--json").json["framework"] == "accelerate"
    assert meshwright("check", "jobs/llama3_8b_pretrain_config.yaml", "--json").code == 0
