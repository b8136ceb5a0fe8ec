"""The global batch of a Trainer's script: overrides of the layout keep it, other GPUs change it with a word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
AUTO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2}, "gradient_clipping": "auto",
}  # fmt: skip
SCRIPT = (
    "deepspeed --num_gpus 8 --num_nodes 8 --hostfile hosts run_clm.py --config_name model --tokenizer_name model "
    "--train_file corpus.txt --block_size 4096 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 "
    "--max_steps 120000 --learning_rate 3e-4 --bf16 --do_train --output_dir out --gradient_checkpointing "
    "--deepspeed ds.json\n"
)
GPUS = ("--gpus", "8x8xH100")


@pytest.fixture
def script(here: Path) -> str:
    (here / "model").mkdir()
    (here / "model/config.json").write_text(json.dumps(LLAMA))
    (here / "corpus.txt").write_text("text\n")
    (here / "ds.json").write_text(json.dumps(AUTO))
    (here / "train.sh").write_text(SCRIPT)
    return "train.sh"


def _argument(text: str, name: str) -> int:
    found = re.search(rf"--{name} (\d+)", text)
    assert found, text
    return int(found[1])


def test_a_typed_layout_keeps_the_samples_of_a_step(meshwright: Any, script: str) -> None:
    for layout in ("layout.tp=8", "layout.tp=2", "layout.micro_batch_size=2"):
        for verb in ("estimate", "recommend"):
            found = meshwright(verb, script, *GPUS, layout, "--json").json
            assert found["contract"]["global_batch_size"] == 1024, (verb, layout)
    (plan,) = meshwright("plan", script, *GPUS, "layout.tp=2", "--top", "1", "--json").json["plans"]
    assert plan["contract"]["global_batch_size"] == 1024
    job = meshwright("launch", script, "--scheduler", "torchrun", "--head", "node01", *GPUS, "layout.tp=8").out
    assert _argument(job, "per_device_train_batch_size") * _argument(job, "gradient_accumulation_steps") * 8 == 1024


@pytest.mark.parametrize("batch", ["train.global_batch_size=120", "train.global_batch_size=1000"])
def test_a_job_has_the_batch_that_was_typed_also_if_the_file_contradicts_itself(
    meshwright: Any, script: str, batch: str
) -> None:
    Path("ds.json").write_text(json.dumps(AUTO | {"train_batch_size": 1000}))  # not 4 × 4 × 64
    words = ("launch", script, "--scheduler", "torchrun", "--head", "node01", *GPUS)
    job = meshwright(*words, "layout.tp=8", "layout.micro_batch_size=5", batch).out
    samples = 5 * _argument(job, "gradient_accumulation_steps") * 8
    assert (_argument(job, "per_device_train_batch_size"), samples) == (5, int(batch.partition("=")[2]))


def test_other_gpus_than_the_scripts_say_which_batch_they_have(meshwright: Any, script: str) -> None:
    found = meshwright("recommend", script, "--gpus", "4x8xH100", "--json").json
    assert found["contract"]["global_batch_size"] == 512
    (note,) = (one["message"] for one in found["question"]["assumed"] if one["field"] == "train.global_batch_size")
    assert "1,024 on its 64 GPUs; train.global_batch_size=1024 keeps that" in note
    words = ("launch", script, "--scheduler", "torchrun", "--head", "node01", "--gpus", "4x8xH100")
    assert "train.global_batch_size=1024 keeps that" in (short := meshwright(*words)).out + short.err
    job = meshwright(*words, "train.global_batch_size=1024")
    assert _argument(job.out, "gradient_accumulation_steps") == 8
    assert "keeps that" not in job.out + job.err
