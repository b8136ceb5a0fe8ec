"""An export or a job for the same framework is the user's file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.advice import test_06_every_file as every_file
from tests.first_hour import test_repaired_files_pass
from tests.frameworks import test_accelerate, test_deepspeed, test_kempnerforge, test_megatron_lm, test_torchtitan
from tests.frameworks.test_shell_megatron import ARRAYS, STRINGS

from meshwright import frameworks

AUTOMODEL = Path(__file__).parent.parent / "frameworks" / "automodel"
TITAN = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 70B"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"  # our copy

[optimizer]
name = "AdamW"
lr = 1.5e-4

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 8
seq_len = 8192
steps = 1000
dataset = "c4"
global_batch_size = 512

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 500

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
MEGATRON = """\
#!/bin/bash
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_SL=1
TP=4
torchrun --nproc_per_node 8 --nnodes 16 --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:6000 pretrain_gpt.py \\
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 --seq-length 4096 \\
    --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm \\
    --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \\
    --attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 2 --global-batch-size 1024 --train-iters 476837 \\
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 \\
    --init-method-std 0.02 --bf16 --use-distributed-optimizer --recompute-activations --sequence-parallel \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 \\
    --data-path 0.7 /lustre/data/c4_text_document 0.3 /lustre/data/code_text_document \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model /lustre/tok/tokenizer.model --split 990,8,2 \\
    --save-interval 500 --eval-interval 1000 --eval-iters 10 --save /lustre/ckpt/a --load /lustre/ckpt/a \\
    --tensorboard-dir /lustre/ckpt/a/tb --log-interval 10
"""
FILLED = {"batch": 64, "ep": 8, "seq": 4096, "built": "from_config"}
MEGATRON_GPUS = ("--gpus", "8x8xB200")


def _settings(text: str, name: str, framework: str) -> dict[str, Any]:
    found = frameworks.framework(framework).parse(frameworks.content_of(text, name)).settings
    return {key: one.value for key, one in found.items() if not one.unresolved}


FIXTURES = {
    "megatron-lm": [
        (f"m{number}.sh", text, "16x8xH100")
        for number, text in enumerate((
            test_megatron_lm.DENSE, test_megatron_lm.EXPERTS, test_megatron_lm.LLAMA, ARRAYS, STRINGS,
            every_file.MEGATRON, MEGATRON,
        ))
    ],
    "torchtitan": [
        ("a.toml", TITAN, "16x8xH100"), ("b.toml", every_file.TORCHTITAN, "8xH100"),
        ("c.toml", test_torchtitan.DENSE, "8x8xH100"),
    ],
    "automodel": [(one.name, one.read_text(), "8xH100") for one in sorted(AUTOMODEL.glob("*.yaml"))]
    + [("d.yaml", test_repaired_files_pass.AUTOMODEL.format(**FILLED), "8xH100")],
    "kempnerforge": [
        (f"k{number}.toml", text, "4x8xH100")
        for number, text in enumerate((
            test_kempnerforge.VALID, every_file.KEMPNERFORGE,
        ))
    ],
    "deepspeed": [("ds.json", test_deepspeed.VALID, "8xH100"), ("auto.json", test_deepspeed.AUTO, "8xH100")],
    "accelerate": [("x.yaml", every_file.ACCELERATE, "8xH100"), ("z.yaml", test_accelerate.ZERO, "8xH100")],
}  # fmt: skip
"""Files of the frameworks' tests, by framework."""


@pytest.mark.parametrize("framework", FIXTURES)
def test_a_file_exported_for_its_own_framework_keeps_its_settings(
    meshwright: Any, tmp_path: Path, framework: str
) -> None:
    for name, text, gpus in FIXTURES[framework]:
        (tmp_path / name).write_text(text)
        words = [str(tmp_path / name), "--framework", framework, "--to", framework, "--gpus", gpus]
        answer = meshwright("export", *words, "--json")
        for field, more in (("model", ("--model", "llama3-8b")), ("train.steps", ("train.steps=1000",))):
            if answer.code == 2 and answer.json["error"]["field"] == field:  # of the program, in no config
                words += more
                answer = meshwright("export", *words, "--json")
        assert answer.code != 2, answer.err
        written = next(iter(answer.json["files"].values()))
        lost = {one["key"] for one in answer.json["not_imported"]}
        before = {key: value for key, value in _settings(text, name, framework).items() if key not in lost}
        after = _settings(written, name, framework)
        if "train.steps=1000" in words:  # the length, and the schedule that ends with it
            after = {key: one for key, one in after.items() if key != "train_iters" and "scheduler." not in key}
        assert after == before, name
        assert written == text or framework == "megatron-lm" or "train.steps=1000" in words, name


def test_a_file_whose_batch_cannot_be_divided_keeps_all_but_the_correction(meshwright: Any, tmp_path: Path) -> None:
    more = "\nwandb:\n  project: chats\n"
    text = (AUTOMODEL / "sft.yaml").read_text().replace("tp_size: 1", "tp_size: 3") + more
    text = text.replace("batch_size: 64", "batch_size: 60").replace("local_batch_size: 1", "local_batch_size: 4")
    (tmp_path / "chats.yaml").write_text(text)
    fixes = ("step_scheduler.local_batch_size=3", "distributed.tp_size=2")
    words = ("export", str(tmp_path / "chats.yaml"), "--to", "automodel", "--gpus", "8xH200", *fixes, "--json")
    answer = meshwright(*words).json
    corrected = text.replace("local_batch_size: 4", "local_batch_size: 3").replace("tp_size: 3", "tp_size: 2")
    assert next(iter(answer["files"].values())) == corrected


def test_a_job_of_a_torchtitan_file_changes_only_what_it_must(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(TITAN)
    words = (str(path), "--gpus", "16x8xH100", "--json")
    job = meshwright("launch", *words, "--scheduler", "slurm", "--write", str(tmp_path / "jobs"))
    assert job.code == 0, job.err
    lines = (tmp_path / "jobs" / "config.toml").read_text().splitlines()
    different = [(old, new) for old, new in zip(TITAN.splitlines(), lines, strict=True) if old != new]
    assert [old for old, _ in different] == ["interval = 500"]  # saved before a requeue, which the job says
    files = meshwright("export", *words, "--to", "torchtitan", "training.steps=2000", "train.eval_every=100").json[
        "files"
    ]
    assert "--hf_assets_path=./assets/hf/Llama-3.1-70B" in files["run.sh"]
    wanted = tomllib.loads(TITAN.replace("steps = 1000", "steps = 2000"))
    wanted["validation"] = {"enable": True, "freq": 100}
    assert tomllib.loads(files["config.toml"]) == wanted
    assert "# our copy" in files["config.toml"]


def test_a_script_of_megatron_keeps_its_flags_and_environment(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "pretrain_13b.sh"
    path.write_text(MEGATRON)
    words = ("export", str(path), "--to", "megatron-lm", *MEGATRON_GPUS, "--json")
    answer = meshwright(*words).json
    assert (answer["unmapped"], answer["not_imported"]) == ([], [])
    text = answer["files"]["pretrain_13b.sh"]
    assert "export NCCL_IB_SL=1\n" in text
    assert "--nnodes 8\n" in text
    changed = meshwright(*words, "layout.vp=2", "train.steps=5000", "checkpoint.folder=/scratch/x").json
    before = _settings(MEGATRON, "a.sh", "megatron-lm")
    after = _settings(changed["files"]["pretrain_13b.sh"], "a.sh", "megatron-lm")
    expected = {"num_virtual_stages_per_pipeline_rank": "2", "train_iters": "5000", "save": "/scratch/x"}
    assert after == {
        **{key: value for key, value in before.items() if key != "num_layers_per_virtual_pipeline_stage"},
        **expected,
        "load": "/scratch/x",
    }
    job = ("launch", str(path), "--scheduler", "slurm", *MEGATRON_GPUS, "--write", str(tmp_path / "jobs"), "--json")
    assert not [one for one in meshwright(*job).json["notes"] if one.startswith("not ")]
    written = (tmp_path / "jobs" / "pretrain_13b.sbatch").read_text()
    assert "export NCCL_IB_SL=1\n" in written
    assert "--tokenizer-type Llama2Tokenizer --tokenizer-model /lustre/tok/tokenizer.model --split 990,8,2" in (
        " ".join(written.replace("\\\n", " ").split())
    )


def test_a_sentencepiece_file_is_no_hugging_face_tokenizer(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON.replace("Llama2Tokenizer", "HuggingFaceTokenizer"))
    (found,) = [
        one
        for one in meshwright("check", str(path), *MEGATRON_GPUS, "--json").json["findings"]
        if one["rule"] == "megatron-lm.tokenizer-format"
    ]
    assert (found["severity"], found["fix"]) == ("error", ["--tokenizer-type Llama2Tokenizer"])
    path.write_text(MEGATRON)
    saved = str(tmp_path / "own.toml")
    assert meshwright("import", str(path), "--gpus", "16x8xB200", "--out", saved).code == 0
    text = json.dumps(meshwright("export", saved, "--to", "megatron-lm", "--json").json["files"])
    assert "--tokenizer-type Llama2Tokenizer" in text


def test_numbers_equal_to_the_published_ones_are_no_override(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "pretrain_13b.sh"
    path.write_text(MEGATRON)
    for to in ("torchtitan", "automodel"):
        answer = meshwright("export", str(path), "--to", to, *MEGATRON_GPUS, "--json")
        assert answer.code != 2, answer.err
        assert not [one for one in answer.json["unmapped"] if "architecture" in one["field"]]
    path.write_text(MEGATRON.replace("--rotary-base 10000", "--rotary-base 500000"))
    refused = meshwright("export", str(path), "--to", "automodel", *MEGATRON_GPUS, "--json")
    assert (refused.code, refused.json["error"]["field"]) == (2, "architecture.rope_theta")


def test_a_blend_is_written_for_megatron_bridge(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "pretrain_13b.sh"
    path.write_text(MEGATRON)
    words = ("export", str(path), "--to", "megatron-bridge", *MEGATRON_GPUS, "--json")
    answer = meshwright(*words).json
    assert not [one for one in answer["unmapped"] if one["field"].startswith("data.")]
    assert not [one for one in answer["notes"] if "random tokens" in one]
    text = answer["files"]["train.py"]
    blend = "0.7 /lustre/data/c4_text_document 0.3 /lustre/data/code_text_document"
    assert f'cfg.dataset.data_path = "{blend}"\n' in text
    assert 'cfg.dataset.split = "99.2,0.8,0"\n' in text
    assert 'cfg.tokenizer.tokenizer_type = "Llama2Tokenizer"\n' in text
    words = ("export", "llama3_8b_pretrain_config", "--to", "megatron-bridge", "--gpus", "8xH100", "--json")
    files = meshwright(*words, "data.blend=/a:0.7,/b:0.3", "data.validation_part=0.01").json["files"]
    assert "--dataset megatron-indexed" in files["run.sh"]
    assert "'dataset.data_path=\"0.7 /a 0.3 /b\"'" in files["run.sh"]
    assert 'dataset.split="99,1,0"' in files["run.sh"]


def test_a_bridge_export_starts_from_the_plain_recipe(meshwright: Any, tmp_path: Path) -> None:
    saved, folder = str(tmp_path / "q3.toml"), tmp_path / "bridge"
    words = ("qwen3-30b-a3b", "--gpus", "16x8xH100", "--goal", "pretrain", "--seq", "8k", "--engine", "megatron")
    assert meshwright("recommend", *words, "--save", saved).code == 0
    words = ("export", saved, "--to", "megatron-bridge", "--gpus", "16x8xH100", "--out", str(folder), "--json")
    answer = meshwright(*words)
    assert answer.code == 0, answer.err
    assert "--recipe qwen3_30b_a3b_pretrain_config " in " ".join((folder / "run.sh").read_text().split())
    totals = [
        meshwright("check", str(folder / name), "--gpus", "16x8xH100", "--json").json["estimate"]["memory_gib"]["total"]
        for name in ("run.sh", "override.py")
    ]
    assert totals[0] == totals[1]
