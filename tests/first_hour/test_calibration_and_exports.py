"""A team checks its configs and calibrates the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import meshwright as mw
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.key_maps import override_composite_keys

ESTIMATE = ("estimate", "llama3_8b_sft_config", "--gpus", "8xH100")
PROFILE = 'gpu = "H100"\nsource = "fitted to 6 runs of own.csv"\nclock = 0.76\nengines = ["torchtitan"]\nruns = 6\n'
SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \\
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 \\
  --max-position-embeddings 8192 --position-embedding-type rope --swiglu --normalization RMSNorm \\
  --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 512 \\
  --train-iters 10000 --lr 1.5e-4 --lr-warmup-iters 500 --bf16 --use-distributed-optimizer {recompute} \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-70B --data-path /data/c4
"""
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 10\n'


def test_four_bits_need_adapters(meshwright: Any) -> None:
    pasted = meshwright(*ESTIMATE, "quantization.load_in_4bit=true")
    assert pasted.code == 2
    assert "needs a peft recipe" in pasted.err
    assert "write --goal qlora" in meshwright(*ESTIMATE, "load_in_4bit=true").err
    assert "fix:   --goal sft | llama3_8b --goal qlora:" in meshwright(*ESTIMATE, "--goal", "qlora").err
    assert meshwright("estimate", "llama3_8b", "--goal", "qlora", *ESTIMATE[2:]).code == 0
    adapters = meshwright(
        ESTIMATE[0], "llama3_8b_peft_config", *ESTIMATE[2:], "quantization.load_in_4bit=true", "--json"
    )
    assert adapters.json["contract"]["peft"]["method"] == "qlora"
    assert meshwright(*ESTIMATE, "quantization.load_in_4bit=false").code == 0


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_config", "llama3_8b_sft_config", "qwen3_30b_a3b_pretrain_config"])
def test_an_accepted_key_of_another_framework_sets_something(name: str) -> None:
    recipe, silent = index.load(name), []
    for key in override_composite_keys():
        for value in ("true", "2", "7", "full", "selective", "fp8", "some/path"):
            try:
                set_fields = override.requested(recipe, [f"{key}={value}"])
            except InputError:
                continue
            if not set_fields:
                silent.append(f"{key}={value}")
    assert silent == []


def test_a_fix_names_the_flag_that_the_script_has(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.format(recompute="--recompute-activations"))
    asked = ("check", str(script), "--gpus", "4x8xH100", "--advice", "--json")
    fixes = {one["rule"]: one["fix"] for one in meshwright(*asked).json["findings"]}
    assert "recompute.flash-attention" not in fixes  # less recompute would undo the fix of memory.tight
    assert "without --recompute-activations" in fixes["memory.tight"]
    assert "--recompute-granularity full" in fixes["memory.tight"]
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    script.write_text(SCRIPT.format(recompute=f"--recompute-activations {full}"))
    both = meshwright(*asked)
    assert both.code == 1
    found = {one["rule"]: one["fix"] for one in both.json["findings"]}
    assert found["megatron-lm.recompute"] == ["without --recompute-activations"]
    script.write_text(SCRIPT.format(recompute=full))
    assert meshwright(*asked).code == 0


@pytest.mark.parametrize(
    ("gpus", "engine", "said"),
    [
        ("8xH100", "torchtitan", "applied"),
        ("8xH100", "megatron", "applied; the runs are of torchtitan, so megatron may differ"),
        ("8xH200", "torchtitan", "does not apply to H200; the shipped profile is used"),
        ("8xA100-80", "torchtitan", "does not apply to A100-80; the shipped profile is used"),
        ("8xB200", "torchtitan", "does not apply to B200; the shipped profile is used"),
    ],
)
def test_a_calibration_says_whether_it_applies(
    gpus: str, engine: str, said: str, meshwright: Any, tmp_path: Path
) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(PROFILE)
    asked = ("estimate", "llama3_8b_pretrain_config", "--gpus", gpus, "--engine", engine, "--json")
    plain, own = meshwright(*asked).json, meshwright(*asked, "--calibration", str(profile)).json
    assert own["notes"] == [f"calibration of H100 (fitted to 6 runs of own.csv): {said}"]
    assert (own["estimate"]["step_s"] != plain["estimate"]["step_s"]) == said.startswith("applied")


def test_check_and_size_take_a_calibration(meshwright: Any, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(PROFILE)
    sized = meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "B200", "--calibration", str(profile)).out
    assert "calibration of H100 (fitted to 6 runs of own.csv): does not apply to B200" in sized
    asked = ("check", "llama3_8b_sft_config", "--gpus", "8xH100", "--json")
    plain, own = meshwright(*asked).json, meshwright(*asked, "--calibration", str(profile)).json
    assert own["estimate"]["step_s"] > plain["estimate"]["step_s"]
    assert any("calibration of H100" in note for note in own["notes"])


def test_doctor_takes_a_calibration(meshwright: Any, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(PROFILE)
    log = Path(__file__).parents[2] / "examples" / "logs" / "torchtitan_slow.log"
    asked = ("doctor", str(log), "--recipe", "llama3-8b", "--goal", "pretrain", "--gpus", "8xH100", "--json")
    assert any(
        "calibration of H100" in note for note in meshwright(*asked, "--calibration", str(profile)).json["notes"]
    )


@pytest.mark.parametrize(
    ("verb", "call", "words"),
    [
        ("recommend", lambda: mw.recommend("llama3-8b", "8xH100", "sft"), "llama3-8b --gpus 8xH100 --goal sft"),
        (
            "recommend",
            lambda: mw.recommend("llama3-8b", "16xH100", "sft", tokens="1B", explain=True),
            "llama3-8b --gpus 16xH100 --goal sft --tokens 1B --explain",
        ),
        ("plan", lambda: mw.plan("llama3-8b", "8xH100", "sft", top=2), "llama3-8b --gpus 8xH100 --goal sft --top 2"),
        ("estimate", lambda: mw.estimate("llama3_8b_sft_config", "8xH100"), "llama3_8b_sft_config --gpus 8xH100"),
        ("check", lambda: mw.check("llama3_8b_sft_config", gpus="16xH100"), "llama3_8b_sft_config --gpus 16xH100"),
        (
            "export",
            lambda: mw.export("llama3_8b_pretrain_config", "torchtitan", gpus="16xH100"),
            "llama3_8b_pretrain_config --to torchtitan --gpus 16xH100",
        ),
    ],
)
def test_a_result_as_values_is_what_the_command_prints(verb: str, call: Any, words: str, meshwright: Any) -> None:
    values = mw.to_dict(call())
    jsonschema.validate(values, mw.schema(verb))
    assert values == json.loads(meshwright(verb, *words.split(), "--json").out)


@pytest.mark.parametrize(
    ("typed", "fix"), [("1450ms", "1.45"), ("2 min", "120"), ("1.5h", "5400"), ("3s", "3"), ("1min 30s", "90")]
)
def test_a_step_time_with_its_unit_is_converted(typed: str, fix: str, meshwright: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    columns = "name,framework,model,goal,gpus,seq_length,micro_batch_size,global_batch_size,tp,step_time_s"
    runs.write_text(f"{columns}\na,torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,{typed}\n")
    ended = meshwright("accuracy", str(runs))
    assert ended.code == 2
    assert f"fix:   {fix}\n" in f"{ended.err}\n"


def test_zero_2_keeps_the_weights_whole(meshwright: Any, tmp_path: Path) -> None:
    parts = {}
    for stage in (1, 2, 3):
        file = tmp_path / f"z{stage}.json"
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        file.write_text(json.dumps(config))
        known = ("data.seq_length=4096", "layout.recompute=none")
        asked = ("check", str(file), "--model", "llama3-8b", "--gpus", "8xH100", *known, "--json")
        parts[stage] = meshwright(*asked).json["estimate"]["memory_gib"]
    assert parts[2]["weights"] == pytest.approx(parts[1]["weights"])
    assert parts[2]["gradients"] == pytest.approx(parts[3]["gradients"])
    assert parts[2]["buffers"] < 1
    assert parts[3]["total"] < parts[2]["total"] < parts[1]["total"]


@pytest.mark.parametrize("framework", ["accelerate", "deepspeed"])
def test_an_export_has_the_findings_of_its_file(framework: str, meshwright: Any, tmp_path: Path) -> None:
    asked = ("export", "llama3_8b_pretrain_config", "--to", framework, "--gpus", "8xH100", "--out", str(tmp_path))
    asked = (*asked, "layout.recompute=full")  # neither has selective recompute
    written = meshwright(*asked, "--json").json
    path, *_ = written["written"]
    checked = meshwright("check", path, "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
    assert written["ok"] == checked["ok"]
    theirs = f"{framework}."
    found = [{one["rule"] for one in each["findings"] if one["rule"].startswith(theirs)} for each in (written, checked)]
    assert found[0] == found[1]


def test_export_to_a_folder_says_what_it_wrote(meshwright: Any, tmp_path: Path) -> None:
    asked = ("export", "llama3_8b_pretrain_config", "--to", "megatron-lm", "--gpus", "8xH100")
    shown = meshwright(*asked, "--out", str(tmp_path / "out"))
    assert f"Wrote    {tmp_path}/out/llama3_8b_pretrain_config.sh" in shown.out
    assert "#!/bin/bash" not in shown.out
    refused = meshwright(*asked[:-1], "1xH100", "layout.tp=1", "layout.sp=false", "--out", str(tmp_path / "wrong"))
    assert refused.code == 1
    assert "nothing was written" in refused.out
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("named", ["hf", "deepspeed", "megatron-lm", "kempnerforge"])
def test_a_file_of_another_framework_is_refused(named: str, meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text(TITAN)
    ended = meshwright("check", str(file), "--framework", named)
    assert ended.code == 2
    assert "it is a file of torchtitan" in ended.err
    assert "--framework torchtitan" in ended.err
    assert meshwright("check", str(file), "--framework", "torchtitan").code != 2
