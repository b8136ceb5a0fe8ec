"""plan and recommend agree, values keep their notation, and no fix is the opposite of what was typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.clusters import cluster
from meshwright.clusters.parse import assumptions
from meshwright.errors import InputError
from meshwright.similar import closest

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 3072,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 100352,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
COMPARED = [
    ("moe", "32x8xH100", "pretrain", "megatron"),
    ("moe", "36x4xGB200", "pretrain", "megatron"),
    ("moe", "8x8xH100", "pretrain", "torchtitan"),
    ("llama3-8b", "2xH100", "pretrain", "meshwright"),
    ("llama3-8b", "7xH100", "pretrain", "automodel"),
    ("qwen3-30b-a3b", "8xH100", "pretrain", "meshwright"),
    ("qwen3-8b", "1xH100", "sft", "meshwright"),
    ("gemma3-27b", "8xA100-40", "peft", "meshwright"),
    ("llama3-70b", "8xH100", "pretrain", "meshwright"),  # does not fit
]


@pytest.fixture
def moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moe").mkdir()
    Path("moe/config.json").write_text(json.dumps(MOE))


@pytest.mark.parametrize(("model", "gpus", "goal", "engine"), COMPARED)
def test_the_first_plan_is_the_recommended_one(
    moe: None, meshwright: Any, model: str, gpus: str, goal: str, engine: str
) -> None:
    words = (model, "--gpus", gpus, "--goal", goal, "--engine", engine, "--json")
    chosen = meshwright("recommend", *words).json
    first = meshwright("plan", *words).json["plans"][0]
    assert first["layout"] == chosen["layout"]
    assert first["estimate"] == chosen["estimate"]
    assert first["changes"] == chosen["changes"]


@pytest.mark.parametrize("value", ["layout.tp=3", "layout.pp=7", "layout.ep=24"])
@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "meshwright"])
def test_plan_repairs_a_value_that_no_layout_has(moe: None, meshwright: Any, value: str, engine: str) -> None:
    words = ("moe", "--gpus", "32x8xH100", "--goal", "pretrain", value, "--engine", engine)
    ran = meshwright("plan", *words)
    assert ran.code == 1
    assert f"changes your {value.split('=')[0]}" in ran.out
    assert "0 legal layouts" in ran.out
    assert not ran.err


def test_plan_refuses_a_count_that_no_layout_divides(moe: None, meshwright: Any) -> None:
    ran = meshwright("plan", "moe", "--gpus", "53xH100", "--goal", "pretrain", "--engine", "megatron")
    assert ran.code == 2
    assert "no layout divides 53 GPUs" in ran.err
    assert "fix:" in ran.err


BROKEN_SCRIPT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 \\
  --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 \\
  --global-batch-size 12 --train-iters 10 \\
  --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --bf16
"""


def test_check_of_a_model_folder_checks_its_training_files_too(moe: None, meshwright: Any) -> None:
    Path("moe/train.sbatch").write_text(BROKEN_SCRIPT)
    Path("moe/tokenizer_config.json").write_text('{"model_max_length": 8192}')
    Path("moe/trainer_state.json").write_text('{"train_batch_size": 2, "global_step": 10, "log_history": []}')
    ran = meshwright("check", "moe", "--gpus", "32x8xH100")
    assert ran.code == 1
    assert "moe/train.sbatch on 32x8xH100 with megatron-lm: cannot start" in ran.out
    assert "moe_pretrain on 32x8xH100" in ran.out
    assert "2 files checked" in ran.out
    assert "file=moe/train.sbatch" in meshwright("check", "moe", "--gpus", "32x8xH100", "--format", "github").out


def test_check_of_a_model_folder_alone_is_one_answer(moe: None, meshwright: Any) -> None:
    Path("moe/tokenizer_config.json").write_text('{"model_max_length": 8192}')
    ran = meshwright("check", "moe", "--gpus", "32x8xH100", "--json")
    assert ran.json["recipe"] == "moe_pretrain"


def test_check_in_python_refuses_a_model_folder_with_training_files(moe: None) -> None:
    Path("moe/train.sbatch").write_text(BROKEN_SCRIPT)
    with pytest.raises(InputError, match="also has files which train"):
        meshwright.check("moe", gpus="32x8xH100")
    meshwright.check("moe/config.json", gpus="32x8xH100")


GOOD_SCRIPT = BROKEN_SCRIPT.replace("--global-batch-size 12", "--global-batch-size 16")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--seq-length 1k", "--seq-length 1024"),
        ("--seq-length 1024.0", "--seq-length 1024"),
        ("--seq-length 1,024", "--seq-length 1024"),
        ("--train-iters 10k", "--train-iters 10000"),
        ("--train-iters 1e4", "--train-iters 10000"),
        ("--global-batch-size 1k", "--global-batch-size 1024"),
    ],
)
def test_a_number_in_another_notation_keeps_its_meaning(moe: None, meshwright: Any, typed: str, meant: str) -> None:
    flag = typed.split()[0]
    Path("train.sh").write_text(re.sub(rf"{flag} \S+", typed, GOOD_SCRIPT))
    answer = meshwright("check", "train.sh", "--gpus", "8xH100", "--json").json
    assert [one["fix"] for one in answer["findings"] if one["rule"] == "value.invalid"] == [[meant]]
    Path("train.sh").write_text(re.sub(rf"{flag} \S+", meant, GOOD_SCRIPT))
    assert meshwright("check", "train.sh", "--gpus", "8xH100").code == 0


def test_a_value_that_cannot_be_read_is_not_replaced(moe: None, meshwright: Any) -> None:
    Path("train.sh").write_text(GOOD_SCRIPT.replace("--seq-length 1024", "--seq-length long"))
    answer = meshwright("check", "train.sh", "--gpus", "8xH100", "--json").json
    assert not answer["ok"]
    assert not answer.get("repair")
    assert all(not one.get("fix") for one in answer["findings"] if one["rule"] == "value.invalid")


@pytest.mark.parametrize("written", ['"8k"', "8192.0", '"8,192"'])
def test_torchtitan_lengths_in_another_notation(moe: None, meshwright: Any, written: str) -> None:
    Path("t.toml").write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = {written}\nsteps = 10\n'
    )
    answer = meshwright("check", "t.toml", "--gpus", "8xH100", "--json").json
    assert [one["fix"] for one in answer["findings"] if one["rule"] == "value.invalid"] == [["training.seq_len = 8192"]]


@pytest.mark.parametrize("flag", ["--check-for-nan-in-loss-and-grad", "--masked-softmax-fusion", "--no-swiglu"])
def test_the_fix_of_an_unknown_switch_is_never_its_opposite(moe: None, meshwright: Any, flag: str) -> None:
    Path("train.sh").write_text(GOOD_SCRIPT.rstrip() + f" {flag}\n")
    found = meshwright("check", "train.sh", "--gpus", "8xH100", "--json").json["findings"]
    unknown = [one for one in found if one["rule"] == "key.unknown"]
    assert [one["fix"] for one in unknown] == [[f"without {flag}"]]
    assert "that is the default" in unknown[0]["message"]


def test_a_switch_never_resembles_its_opposite() -> None:
    assert closest("check_nan_in_loss", ["no_check_nan_in_loss"]) == []
    assert closest("enable_compile", ["disable_compile"]) == []
    assert closest("no_chek_nan", ["no_check_nan", "check_nan"]) == ["no_check_nan"]


RAMP = GOOD_SCRIPT.replace("--train-iters 10", "--train-samples 160000 --rampup-batch-size 8 8 1600 --save c")
RAMP = RAMP.replace("--global-batch-size 16", "--global-batch-size 64").replace(
    "--save c", "--save c --save-interval 10"
)


@pytest.mark.parametrize(
    ("old", "new", "reason", "fix"),
    [
        ("8 8 1600", "12 8 1600", "is not divisible by micro batch × dp = 8", "--rampup-batch-size 16 8 1600"),
        ("8 8 1600", "8 24 1600", "64 - 8 = 56 is not divisible by the increment 24", "--rampup-batch-size 8 8 1600"),
        ("8 8 1600", "8 7 1600", "the increment 7 is not divisible", "--rampup-batch-size 8 8 1600"),
        ("8 8 1600", "128 8 1600", "the start 128 is not below the global batch 64", "without --rampup-batch-size"),
        ("8 8 1600", "64 8 1600", "the start 64 is not below the global batch 64", "without --rampup-batch-size"),
        ("--train-samples 160000", "--train-iters 2500", "cannot be combined with --train-iters", "--train-samples"),
        ("8 8 1600", "8 8", "expected three integers", ""),
    ],
)
def test_a_batch_that_cannot_grow_as_stated(
    moe: None, meshwright: Any, old: str, new: str, reason: str, fix: str
) -> None:
    Path("train.sh").write_text(RAMP)
    assert meshwright("check", "train.sh", "--gpus", "8xH100").code == 0
    Path("train.sh").write_text(RAMP.replace(old, new))
    found = meshwright("check", "train.sh", "--gpus", "8xH100", "--json").json["findings"]
    ramps = [one for one in found if one["rule"] == "megatron-lm.batch-ramp-up"]
    assert len(ramps) == 1
    assert reason in ramps[0]["message"]
    assert fix in " ".join(ramps[0]["fix"])


@pytest.mark.parametrize(("batch", "ramp"), [("32", "--rampup-batch-size 8 8 800"), ("8", ""), ("64", "8 8 1600")])
def test_an_export_with_another_batch_changes_the_ramp_up(moe: None, meshwright: Any, batch: str, ramp: str) -> None:
    Path("train.sh").write_text(RAMP)
    words = ("train.sh", f"train.global_batch_size={batch}", "--to", "megatron-lm", "--gpus", "8xH100", "--out", "o")
    ran = meshwright("export", *words)
    assert ran.code == 0, ran.out + ran.err
    lines = next(Path("o").glob("*.sh")).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("# not in this file"))
    assert ramp in text
    assert ("--rampup-batch-size" in text) == bool(ramp)
    assert ("is now" in ran.out) == (batch != "64")
    assert meshwright("check", str(next(Path("o").glob("*.sh"))), "--gpus", "8xH100").code == 0


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("2xGB200-NVL72", "36x4xGB200"),
        ("2x GB200 NVL72", "36x4xGB200"),
        ("2 racks of GB300-NVL72", "36x4xGB300"),
        ("2 GB200 racks", "36x4xGB200"),
        ("72xGB200-NVL72", "18x4xGB200"),
        ("2xGB200", "2xGB200"),
    ],
)
def test_racks_are_counted_as_racks(text: str, gpus: str) -> None:
    assert str(cluster(text)) == gpus
    assert ("GPUs, " in " ".join(one.message for one in assumptions(text))) == (text != gpus)


def test_a_rack_without_a_gpu_names_those_that_are_in_racks() -> None:
    with pytest.raises(InputError) as error:
        cluster("2xNVL72")
    assert "2xGB200-NVL72" in error.value.fix


JOB = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
ARGS="
    --num-layers 4 --hidden-size 512 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 1 --global-batch-size 64
    --train-samples 64000 --lr-warmup-samples 640 --lr-decay-samples 64000
    --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --bf16
"
srun python pretrain_gpt.py $ARGS
"""


def test_a_gpu_type_alone_has_the_count_of_the_job(moe: None, meshwright: Any) -> None:
    Path("job.sbatch").write_text(JOB.replace("srun", "srun --container-image=nemo.sqsh"))  # whose hook sets RANK
    answer = meshwright("check", "job.sbatch", "--gpus", "H100", "--json")
    assert answer.code == 0
    assert answer.json["gpus"] == "4x8xH100"


def test_the_fix_of_too_many_nodes_is_one_of_the_job(moe: None, meshwright: Any) -> None:
    Path("job.sbatch").write_text(JOB)
    found = meshwright("check", "job.sbatch", "--gpus", "2x8xH100", "--json").json["findings"]
    launch = [one for one in found if one["rule"] == "launch.gpus"]
    assert [(one["fix"], one["line"]) for one in launch] == [(["#SBATCH --nodes=2"], 2)]


def test_lengths_in_samples_are_imported(moe: None, meshwright: Any) -> None:
    Path("job.sbatch").write_text(JOB)
    out = meshwright("import", "job.sbatch", "--gpus", "4x8xH100").out
    assert "samples" not in out
    assert "steps = 1000" in out


def test_findings_name_the_line_of_a_flag_inside_a_variable(moe: None, meshwright: Any) -> None:
    text = JOB.replace("    --lr 1e-4", "    --foo-bar 3 \\\n    --lr 1e-4").replace(
        "srun python pretrain_gpt.py $ARGS", 'run_cmd="python -u $X/pretrain_gpt.py $ARGS"\nsrun sh -c "${run_cmd}"'
    )
    Path("job.sbatch").write_text(text)
    found = meshwright("check", "job.sbatch", "--gpus", "4x8xH100", "--json").json["findings"]
    unused = [one for one in found if one["rule"] == "key.unused"]  # no launch command is found: which program is open
    assert [text.splitlines()[one["line"] - 1].split()[0] for one in unused] == ["--foo-bar"]
    assert "the program must add it" in unused[0]["message"]


def test_a_misspelled_flag_inside_a_variable_is_unknown(moe: None, meshwright: Any) -> None:
    text = JOB.replace("    --lr 1e-4", "    --lr-decay-stile cosine\n    --lr 1e-4").replace(
        "srun python pretrain_gpt.py $ARGS", 'run_cmd="python -u $X/pretrain_gpt.py $ARGS"\nsrun sh -c "${run_cmd}"'
    )
    Path("job.sbatch").write_text(text)
    found = meshwright("check", "job.sbatch", "--gpus", "4x8xH100", "--json").json["findings"]
    unknown = [one for one in found if one["rule"] == "key.unknown"]
    assert [text.splitlines()[one["line"] - 1].split()[0] for one in unknown] == ["--lr-decay-stile"]


TITAN = """[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]

[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 4096
steps = 1000

[parallelism]
tensor_parallel_degree = 2

[compile]
enable = true
"""
MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 \\
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \\
  --global-batch-size 64 --train-samples 640000 --lr 3e-4 --lr-warmup-iters 100 --bf16 --swiglu \\
  --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
"""
OLD_WORD = 'titan.toml:4 model.converters = ["float8"]: allowed: quantize.linear.float8'


def test_plan_and_compare_report_settings_that_could_not_be_read(meshwright: Any) -> None:
    """They ranked a bf16 training without a word, and the file that cannot start "runs and fits"."""
    Path("titan.toml").write_text(TITAN)
    planned = meshwright("plan", "titan.toml", "--gpus", "8xH100", "--top", "1")
    assert (planned.code, OLD_WORD in planned.out) == (1, True), planned
    assert "fix: model.converters" in planned.out.replace("  ", " ")
    read = meshwright("plan", "titan.toml", "--gpus", "8xH100", "--top", "1", "--json").json
    assert [one["rule"] for one in read["findings"]] == ["value.invalid"]
    compared = meshwright("compare", "titan.toml", "--gpus", "8xH100", "--engines", "torchtitan,megatron")
    assert compared.code == 1, compared
    assert OLD_WORD in compared.out
    assert "runs and fits" not in compared.out
    Path("titan.toml").write_text(TITAN.replace("float8", "quantize.linear.float8"))
    assert meshwright("plan", "titan.toml", "--gpus", "8xH100", "--top", "1").code == 0
    assert meshwright("compare", "titan.toml", "--gpus", "8xH100", "--engines", "torchtitan").code == 0


def test_plan_reports_what_the_framework_refuses_in_every_layout(meshwright: Any) -> None:
    Path("train.sh").write_text(MEGATRON)
    planned = meshwright("plan", "train.sh", "--gpus", "8xH100", "--top", "1")
    assert planned.code == 1, planned
    assert "train.sh:3 --lr-warmup-iters cannot be combined with --train-samples" in planned.out
    assert "runs and fits" not in meshwright("compare", "train.sh", "--gpus", "8xH100", "--engines", "megatron").out
    Path("train.sh").write_text(MEGATRON.replace("--lr-warmup-iters 100", "--lr-warmup-samples 6400"))
    assert meshwright("plan", "train.sh", "--gpus", "8xH100", "--top", "1").code == 0


def test_launch_refuses_settings_that_could_not_be_read(meshwright: Any) -> None:
    """The job of a file with an FP8 converter under an old name trained in bf16."""
    Path("titan.toml").write_text(TITAN)
    job = ("launch", "titan.toml", "--gpus", "8xH100", "--scheduler", "slurm", "--write", "job")
    refused = meshwright(*job)
    assert refused.code == 1, refused
    assert 'model.converters = ["float8"]: allowed' in refused.err
    fix = refused.err.partition("fix:")[2].split("\n")[0].split()
    assert fix[0] == "precision.matmul=fp8_tensor"
    assert meshwright(*job, *fix).code == 0
    assert "float8" in Path("job/config.toml").read_text()
    assert "not in this file: titan.toml:4" not in Path("job/config.toml").read_text()


OWN_3B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 24,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip


def test_advice_on_the_memory_of_a_file_is_the_cheapest_fix_as_in_a_plan(meshwright: Any, tmp_path: Path) -> None:
    """A smaller micro batch gathers weights more often, which a slow network makes dear."""
    config = tmp_path / "own" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(OWN_3B))
    cluster = tmp_path / "a100.toml"
    cluster.write_text('gpu = "A100-80"\nnodes = 6\ngpus_per_node = 8\nnetwork_gb_s_per_node = "200 Gb/s"\n')
    layout = ("train.global_batch_size=480", "layout.micro_batch_size=5", "layout.recompute=none", "layout.tp=1")
    words = ("--goal", "pretrain", "--gpus", str(cluster), *layout, "kernels.compile=true")
    out = tmp_path / "titan"
    meshwright("export", str(config), "--to", "torchtitan", *words, "--out", str(out))
    found = meshwright("check", str(out / "config.toml"), "--gpus", str(cluster), "--advice", "--json").json
    (memory,) = (one for one in found["findings"] if one["rule"].startswith("memory."))
    assert memory["fix"] == ['activation_checkpoint.mode = "selective"'], memory
    assert "longer per step" in memory["message"]
