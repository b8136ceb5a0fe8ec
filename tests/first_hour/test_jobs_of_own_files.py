"""Jobs from the user's own files: requeued after a planned exit, paths found from another folder, retention kept."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import fakes

from meshwright.doctor.examine import DIAGNOSES

MEGATRON = """torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py --use-mcore-models --num-layers 16 \\
  --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
  --kv-channels 64 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 --swiglu \\
  --disable-bias-linear --normalization RMSNorm --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 \\
  --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --bf16 --data-path /data/web_text_document \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.2-1B --use-distributed-optimizer \\
  --save ckpt --load ckpt --save-interval 100 {more}
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
  max_steps: 1000
  ckpt_every_steps: {every}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
distributed:
  strategy: fsdp2
checkpoint:
  enabled: true
  checkpoint_dir: ckpt/
  model_save_format: safetensors
{more}dataset:
  _target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset
  seq_len: 4096
optimizer:
  _target_: torch.optim.AdamW
  lr: 1e-5
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[job]
dump_folder = "./outputs"

[optimizer]
name = "AdamW"
lr = 2e-5

[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 4096
steps = 2400
dataset = "c4"

[checkpoint]
enable = true
initial_load_path = "./assets/hf/Llama-3.1-8B"
initial_load_in_hf = true
interval = 10
"""
SLURM = ("--scheduler", "slurm", "--gpus", "2x4xA100-80", "--time", "24:00:00", "--write", "jobs")


def _job(meshwright: Any, more: str) -> tuple[str, str]:
    Path("run.sh").write_text(MEGATRON.format(more=more))
    Path("checkout").mkdir()
    Path("checkout/pretrain_gpt.py").write_text("")
    found = meshwright("launch", "run.sh", *SLURM, "--framework-dir", "checkout")
    assert found.code == 0, found.err
    return Path("jobs/run.sbatch").read_text(), found.out + found.err


def _run(text: str, folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a job with fake tools of SLURM; return its end and its requeues."""
    fake = folder / "fake"
    fake.mkdir()
    slurm = fakes(fake)
    return slurm.run(text, **environment), slurm.requeues()


@pytest.mark.parametrize(("planned", "requeues"), [("0", ["requeue 30007"]), ("85200", [])])
def test_a_run_that_ends_after_its_planned_time_is_requeued(
    meshwright: Any, tmp_path: Path, planned: str, requeues: list[str]
) -> None:
    """Megatron exits with 0 after --exit-duration-in-mins, before SLURM's signal: the training stopped after a day."""
    text, said = _job(meshwright, "--exit-duration-in-mins 1420")
    assert "--exit-duration-in-mins 1420 saves and ends each run after 23.7 h: the job is requeued then" in said
    assert "-ge 85200 ]" in text
    done, found = _run(text.replace("-ge 85200", f"-ge {planned}"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert found == requeues
    assert ("the planned time of the run is over; requeue number 1" in done.stderr) == bool(requeues)


def test_a_failed_run_of_that_length_is_not_requeued(meshwright: Any, tmp_path: Path) -> None:
    text, _ = _job(meshwright, "--exit-duration-in-mins=1420")
    _, requeues = _run(text.replace("-ge 85200", "-ge 0"), tmp_path, SRUN_CODE="1")
    assert requeues == []


def test_an_exit_after_steps_is_announced(meshwright: Any) -> None:
    text, said = _job(meshwright, "--exit-interval 5000")
    assert "--exit-interval 5000 ends the run with exit code 0, after which it is not requeued" in said
    assert "SECONDS" not in text


@pytest.mark.parametrize("every", [20, 1000])
def test_an_automodel_file_that_keeps_all_checkpoints_keeps_them(meshwright: Any, every: int) -> None:
    """Launch added max_recent_checkpoints: 3, with which the job deletes checkpoints."""
    Path("mine.yaml").write_text(AUTOMODEL.format(every=every, more=""))
    found = meshwright("launch", "mine.yaml", *SLURM)
    assert found.code == 0, found.err
    assert "max_recent_checkpoints" not in Path("jobs/mine.yaml").read_text()


def test_an_automodel_file_keeps_its_number_of_checkpoints(meshwright: Any) -> None:
    Path("mine.yaml").write_text(AUTOMODEL.format(every=20, more="  max_recent_checkpoints: 7\n"))
    found = meshwright("launch", "mine.yaml", *SLURM)
    assert found.code == 0, found.err
    assert "max_recent_checkpoints: 7" in Path("jobs/mine.yaml").read_text()
    again = meshwright("launch", "mine.yaml", *SLURM, "--overwrite", "checkpoint.keep=2")
    assert again.code == 0, again.err
    assert "max_recent_checkpoints: 2" in Path("jobs/mine.yaml").read_text()


IMAGE = ("--image", "titan.sif", "--container-kind", "apptainer", "--framework-dir", "/opt/torchtitan")


def test_all_paths_of_a_torchtitan_file_are_found_from_the_folder_of_the_job(meshwright: Any, here: Path) -> None:
    """hf_assets_path stayed relative, and the job changes to another folder."""
    Path("titan.toml").write_text(TITAN)
    assets = here / "assets" / "hf" / "Llama-3.1-8B"
    assets.mkdir(parents=True)
    (here / "outputs").mkdir()
    found = meshwright("launch", "titan.toml", *SLURM, *IMAGE)
    assert found.code == 0, found.err
    text = Path("jobs/config.toml").read_text()
    assert f'hf_assets_path = "{assets}"' in text
    assert f'initial_load_path = "{assets}"' in text
    assert 'dump_folder = "./outputs"' in text
    assert f"--bind {assets}:{assets}" in Path("jobs/titan.sbatch").read_text()


def test_a_path_that_is_not_on_this_machine_is_announced(meshwright: Any, here: Path) -> None:
    Path("titan.toml").write_text(TITAN)
    found = meshwright("launch", "titan.toml", *SLURM, *IMAGE)
    assert found.code == 0, found.err
    keys = "model.hf_assets_path and checkpoint.initial_load_path: ./assets/hf/Llama-3.1-8B is not on this machine"
    assert f"{keys}, and the job looks for it in {here / 'jobs'}: write its full path" in found.out + found.err
    assert "outputs is not" not in found.out + found.err


def test_only_the_assets_have_to_be_mounted_without_initial_weights(meshwright: Any, here: Path) -> None:
    Path("titan.toml").write_text("".join(line for line in TITAN.splitlines(True) if "initial_load" not in line))
    assets = here / "assets" / "hf" / "Llama-3.1-8B"
    assets.mkdir(parents=True)
    found = meshwright("launch", "titan.toml", *SLURM, *IMAGE)
    assert found.code == 0, found.err
    assert f"--bind {assets}:{assets}" in Path("jobs/titan.sbatch").read_text()


def test_files_that_megatron_arguments_name_are_found_from_the_folder_of_the_job(meshwright: Any, here: Path) -> None:
    Path("tok").mkdir()
    Path("tok/vocab.json").write_text("{}")
    text, said = _job(meshwright, "--vocab-file tok/vocab.json --merge-file ./tok/merges.txt --tensorboard-dir ./tb")
    assert f"--vocab-file {here / 'tok' / 'vocab.json'}" in text
    assert "--merge-file: ./tok/merges.txt is not on this machine" in said
    assert "./tb" in text
    assert "./tb is not" not in said


BRIDGE = """\
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.gpt_step import forward_step

cfg = qwen3_30b_a3b_pretrain_config()
cfg.model.expert_model_parallel_size = 8
cfg.train.exit_signal_handler = True
cfg.logger.log_progress = True
pretrain(cfg, forward_step)
"""


def test_a_setting_that_the_job_sets_itself_is_not_called_lost(meshwright: Any, here: Path) -> None:
    Path("train.py").write_text(BRIDGE)
    words = ("--scheduler", "slurm", "--gpus", "2x8xH100", "--time", "12:00:00", "--write", "jobs")
    found = meshwright("launch", "train.py", *words)
    assert found.code == 0, found.err
    (text,) = (path.read_text() for path in Path("jobs").glob("*.sbatch"))
    assert " train.exit_signal_handler=true " in text
    said = found.out + found.err + text
    assert "train.exit_signal_handler=True: no field" not in said
    assert "logger.log_progress=True: no field" in said


LINE = (
    " [2026-11-17 10:00:00] iteration {step:8d}/  476837 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 165.0 | learning rate: 3.0E-04 | global batch "
    "size:   512 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.400 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)


def test_a_period_of_a_log_of_means_is_one_of_its_lines(meshwright: Any) -> None:
    """A log with a line every 10 steps named every 30th step, though a line is the mean of 10."""
    rows = [(step, 8000.0 if step % 30 == 0 else 4200.0 + step % 7) for step in range(10, 1210, 10)]
    text = "".join(LINE.format(step=step, samples=512 * step, ms=ms, loss=8 - step / 400) for step, ms in rows)
    Path("mlm.log").write_text(text)
    found = meshwright("doctor", "mlm.log", "--model", "llama3-8b", "--gpus", "8x8xH100")
    assert "every 3rd log line (every 30 steps, a line is the mean of 10) takes 1.9 times as long" in found.out


def test_a_slow_rank_is_named_before_the_low_mfu_that_it_explains() -> None:
    order = [one.id for one in DIAGNOSES]
    assert order.index("speed.stragglers") < order.index("speed.low-mfu")
    assert order.index("speed.sustained-slowdown") < order.index("speed.low-mfu")


def test_an_sbatch_file_is_checked_with_the_script_that_it_runs(meshwright: Any) -> None:
    Path("run.sh").write_text(MEGATRON.format(more="--tensor-model-parallel-size 3"))
    Path("train.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\n# not other.sh\nsrun bash run.sh llama3b\n")
    found = meshwright("check", "train.sbatch", "--gpus", "2x4xA100-80")
    assert found.code == 1
    assert "run.sh" in found.out
    assert "other.sh" not in found.out + found.err
    assert "tensor-model-parallel-size" in found.out
