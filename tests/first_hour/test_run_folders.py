"""Scripts that train and evaluate, folders that move, recipes read back from a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.tiny_machine import type_in, write_base_and_chats

RATE, LENGTH, BATCH = "0.03", "64", "4"
SETTINGS = ("precision.compute=fp32", "schedule.warmup_steps=0", f"optimizer.lr={RATE}", f"data.seq_length={LENGTH}")
TRAIN = (
    *("train", "./base", "--goal", "lora", "--dataset", "chats.jsonl", "--out", "run", *SETTINGS),
    *(f"train.global_batch_size={BATCH}", "train.steps=2", "checkpoint.save_every=1", "checkpoint.keep=2"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small base model, a dataset and a LoRA run on them."""
    folder = tmp_path_factory.mktemp("machine1")
    write_base_and_chats(folder)
    type_in(folder, TRAIN)
    return folder


def test_a_run_resumes_where_its_folders_were_copied_and_not_on_other_weights(
    meshwright: Any, trained: Path, here: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(trained, here, dirs_exist_ok=True)
    shutil.rmtree("run/checkpoints/step-00000002")
    shutil.copytree("run", "kept")
    resumed = meshwright(*TRAIN)
    assert resumed.code == 0, resumed.err
    assert "resuming after step 1" in resumed.err
    shutil.rmtree("run")
    shutil.copytree("kept", "run")
    weights = load_file("base/model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, "base/model.safetensors", {"format": "pt"})
    refused = meshwright(*TRAIN)
    assert refused.code == 2
    assert "the content of the initial weights was" in refused.err
    assert meshwright(*TRAIN, "--accept-changes").code == 0


SCRIPT = """
print("script starts", flush=True)
from meshwright.engine.data.workers import map_in_order, worker_pool
from meshwright.engine.spawned import spawn_context

def loss(logits, labels):
    return logits

with worker_pool(1) as pool:
    print(list(map_in_order(pool, len, ["four"], 1)))
spawn_context(("work", {"loss": loss}))
"""


def test_a_script_without_a_main_guard_runs_once() -> None:
    Path("script.py").write_text(SCRIPT)
    paths = os.pathsep.join(sys.path[1:])
    words, env = [sys.executable, "script.py"], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "script starts\n[('four', 4)]\n"
    assert "InputError: loss: is defined in the script" in done.stderr
    assert "move loss to a module and import it" in done.stderr
    guarded = SCRIPT.replace("with worker_pool", 'if __name__ == "__main__":\n  with worker_pool').replace(
        "spawn_context((", "  spawn_context(("
    )
    Path("script.py").write_text(guarded)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "script starts\n[('four', 4)]\n")


def test_a_run_is_a_recipe_wherever_a_recipe_file_is(meshwright: Any, trained: Path, here: Path) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    shown = meshwright("recipe", "run").out
    for line in (f"lr = {RATE}", f"seq_length = {LENGTH}", f"global_batch_size = {BATCH}", 'dataset = "chats.jsonl"'):
        assert line in shown
    assert "run on 1xH100" in meshwright("check", "run").out
    assert f"{LENGTH} tokens × {BATCH} per step" in meshwright("estimate", "./run").out
    exported = meshwright("export", "run", "--to", "trl").out
    for line in (f"learning_rate={RATE}", f"max_length={LENGTH}", f"per_device_train_batch_size={BATCH}"):
        assert line in exported
    assert "fix:   meshwright recipe run" in meshwright("import", "run").err
    launched = meshwright("launch", "run", "--scheduler", "slurm", "--write", "job")
    assert launched.code == 0, launched.err
    assert f"lr = {RATE}" in next(Path("job").glob("*.toml")).read_text()
    shutil.rmtree("run/checkpoints/step-00000002")
    resumed = meshwright("train", "run")
    assert resumed.code == 0, resumed.err
    assert "run is a run: it continues with its settings" in launched.err  # printed once per process
    assert "resuming after step 1" in resumed.err


OOM = """  0%|          | 0/300 [00:00<?, ?it/s]
Traceback (most recent call last):
  File "/opt/conda/lib/python3.11/site-packages/transformers/trainer.py", line 2245, in train
    return inner_training_loop(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 44.40 GiB \
of which 3.25 GiB is free. Including non-PyTorch memory, this process has 41.14 GiB memory in use. \
Of the allocated memory 38.61 GiB is allocated by PyTorch, and 2.02 GiB is reserved by PyTorch but unallocated.
"""


def test_the_doctor_assumes_a_layout_that_the_gpus_can_hold(meshwright: Any) -> None:
    Path("oom.log").write_text(OOM)
    shown = meshwright("doctor", "oom.log", "--recipe", "qwen3_4b_sft_config", "--gpus", "1xL40S").out
    assert "the estimate assumes data parallelism over 1 GPU" in shown  # the recipe has tp=2
    assert "should fit" not in shown
    for degree in ("layout.tp=", "layout.pp=", "layout.cp="):
        assert degree not in shown


def test_a_job_of_another_trainer_has_all_files_of_its_export(meshwright: Any) -> None:
    for to in ("deepspeed", "accelerate"):
        words = ("qwen3_4b_peft_config", "--to", to, "--gpus", "2xH100")
        exported = set(meshwright("export", *words, "--json").json["files"])
        launched = meshwright("launch", *words, "--scheduler", "slurm", "--write", to)
        assert launched.code == 0, launched.err
        assert exported < {one.name for one in Path(to).iterdir()}, to
        assert "passes what qwen3_4b_peft_config_args.py has to its Trainer" in launched.err


def test_names_that_nobody_typed_and_words_of_other_trainers_are_accepted(meshwright: Any) -> None:
    words = ("launch", "qwen3-4b", "--goal", "lora", "--scheduler", "k8s", "--gpus", "1xH100", "--image", "x")
    launched = meshwright(*words)
    assert launched.code == 0, launched.err
    assert "qwen3-4b-peft" in launched.out
    words = ("recommend", "qwen3-4b", "--goal", "lora", "--gpus", "1xL40S")
    assert meshwright(*words, "lora_target=all").code == 0
