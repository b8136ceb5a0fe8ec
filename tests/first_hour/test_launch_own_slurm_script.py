"""Jobs from a user's own SLURM script keep its data, exports and container, or say what they do not keep."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.clusters import assumptions, cluster
from meshwright.errors import InputError

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
export NCCL_IB_HCA=mlx5_0
MODEL=(--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --swiglu
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
  --seq-length 4096 --max-position-embeddings 4096)
ARGS=(--tensor-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512
  --train-iters 100000 --lr 3e-4 --bf16 --save /lustre/ckpt --load /lustre/ckpt --save-interval 500
  DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model /lustre/tok --vocab-size 100352)
"""
LAUNCH = """srun --container-image=/lustre/i.sqsh --container-mounts=/lustre:/lustre,/home:/home \\
  torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HOST:29500 \\
  /opt/Megatron-LM/pretrain_gpt.py "${MODEL[@]}" "${ARGS[@]}"
"""
CLUSTER = "4x8xH100"
ARGS_FILE = "--data-args-path /lustre/blend.txt"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.sbatch"
    path.write_text((SCRIPT + LAUNCH).replace("DATA", ARGS_FILE))
    return path


def job(path: Path, *overrides: str, **options: object) -> tuple[str, str]:
    found = meshwright.launch_job(str(path), scheduler="slurm", gpus=CLUSTER, overrides=overrides, **options)
    return "\n".join(found.launch.files.values()), "\n".join(found.launch.notes)


def test_a_file_of_data_paths_is_data(script: Path) -> None:
    text, notes = job(script)
    assert ARGS_FILE in text
    assert "random tokens" not in notes
    text, _ = job(script, dataset="/lustre/x_text_document")
    assert "--data-path /lustre/x_text_document" in text
    assert "--data-args-path" not in text
    script.write_text(script.read_text().replace(ARGS_FILE, f"{ARGS_FILE} --data-path /lustre/x"))
    found = meshwright.check(str(script), gpus=CLUSTER)
    assert any("--data-path and --data-args-path are exclusive" in one.message for one in found.findings)


def test_a_container_is_named_with_the_options_that_keep_it(script: Path) -> None:
    _, notes = job(script)
    kept = "--image /lustre/i.sqsh --container-kind pyxis --mount /lustre:/lustre --mount /home:/home"
    assert "not kept: srun --container-image=/lustre/i.sqsh" in notes
    assert f"{kept} keeps the container" in notes
    _, notes = job(script, image="/lustre/i.sqsh", container_kind="pyxis", mounts=("/lustre:/lustre",))
    assert "srun --container-image" not in notes


def test_a_container_of_apptainer_is_named_with_the_options_that_keep_it(script: Path) -> None:
    pyxis = "--container-image=/lustre/i.sqsh --container-mounts=/lustre:/lustre,/home:/home"
    apptainer = "apptainer exec --nv -B /lustre --bind /home:/h /lustre/i.sif"
    other = "singularity exec /lustre/tools.sif python prepare.py\n"
    script.write_text(script.read_text().replace("srun", f"{other}srun").replace(pyxis, apptainer))
    _, notes = job(script)
    kept = "--image /lustre/i.sif --container-kind apptainer --mount /lustre:/lustre --mount /home:/h"
    assert f"not kept: apptainer exec --bind /lustre,/home:/h /lustre/i.sif of {script}" in notes
    assert f"{kept} keeps the container" in notes
    mounts = ("/lustre:/lustre", "/home:/h")
    text, notes = job(script, image="/lustre/i.sif", mounts=mounts)
    assert "apptainer exec --nv --bind /lustre:/lustre --bind /home:/h" in text
    assert "not kept: apptainer" not in notes
    script.write_text(script.read_text().replace(apptainer, "podman-hpc run --gpu nvcr.io/nvidia/nemo:26.08"))
    assert "; --image nvcr.io/nvidia/nemo:26.08 keeps the container" in job(script)[1]


def test_exports_are_kept_without_a_launch_command(script: Path) -> None:
    lines = SCRIPT.replace("DATA", ARGS_FILE) + 'srun ./run.sh "$1"\n'
    script.write_text(lines)
    text, _ = job(script)
    assert "export NCCL_IB_HCA=mlx5_0" in text


def test_a_short_pretraining_says_so() -> None:
    found = meshwright.export("llama32_1b", to="megatron-lm", gpus="8xH100",
                              goal="pretrain", overrides=("data.dataset=/d/x", "train.steps=100"))  # fmt: skip
    assert any(note.startswith("the training ends after 100 steps") for note in found.written.notes)
    found = meshwright.export("llama32_1b", to="megatron-lm", gpus="8xH100",
                              goal="pretrain", overrides=("data.dataset=/d/x", "train.steps=100000"))  # fmt: skip
    assert not any("the training ends" in note for note in found.written.notes)


@pytest.mark.parametrize(
    ("typed", "shape"), [("2x72xGB200", (36, 4)), ("1x72xGB300", (18, 4)), ("18x4xGB200", (18, 4))]
)
def test_racks_are_nodes_of_four(typed: str, shape: tuple[int, int]) -> None:
    found = cluster(typed)
    assert (found.nodes, found.gpus_per_node) == shape
    assert any("of 72 GPUs" in one.message for one in assumptions(typed)) == ("72" in typed)


TITAN = """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/FOLDER"
[training]
seq_len = 8192
local_batch_size = 1
"""


@pytest.mark.parametrize(("folder", "kept"), [("own-bpe", "./assets/hf/own-bpe"), ("Llama-3.1-8B", "")])
def test_a_tokenizer_of_ones_own_is_imported(folder: str, kept: str, tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(TITAN.replace("FOLDER", folder))
    assert meshwright.import_file(str(path), gpus="8xH100").recipe.data.tokenizer == kept


def test_a_number_that_is_lost_names_ways_that_keep_it(script: Path) -> None:
    script.write_text(script.read_text().replace("--seq-length", "--rotary-base 700000 --seq-length"))
    with pytest.raises(InputError, match=r"model=FOLDER, with the config\.json of this model, keeps it") as refused:
        meshwright.export(str(script), to="automodel", gpus=CLUSTER)
    for fix in refused.value.fix:
        meshwright.export(str(script), to=fix.removeprefix('to="').rstrip('"'), gpus=CLUSTER)


def test_the_folder_of_the_started_program_is_the_checkout(script: Path) -> None:
    plain = LAUNCH.replace("--container-image=/lustre/i.sqsh --container-mounts=/lustre:/lustre,/home:/home ", "")
    script.write_text((SCRIPT + plain).replace("DATA", ARGS_FILE))
    text, notes = job(script)
    assert "/opt/Megatron-LM/pretrain_gpt.py --num-layers 40" in text
    assert "--framework-dir /opt/Megatron-LM: " in notes
    assert "SLURM_SUBMIT_DIR" not in text
    script.write_text((SCRIPT + plain.replace("torchrun", "apptainer exec /i.sif torchrun")).replace("DATA", ARGS_FILE))
    _, notes = job(script)  # a path of the container's is not one of the nodes'
    assert "--framework-dir /opt" not in notes
    script.write_text((SCRIPT + plain).replace("DATA", ARGS_FILE))
    assert "/shared/megatron/pretrain_gpt.py" in job(script, framework_dir="/shared/megatron")[0]
