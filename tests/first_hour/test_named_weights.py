"""The weights that a file names stay those of the training: an -Instruct model never becomes the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright as library
from meshwright.choices import FRAMEWORKS
from meshwright.cli.run import run
from meshwright.errors import InputError
from meshwright.recipes.files import from_file

from .mistakes import call

INSTRUCT = "mistralai/Mistral-7B-Instruct-v0.3"
FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nmixed_precision: bf16\nnum_processes: 2\n"
FLAGS = """ --model_name_or_path MODEL --dataset_name rows.jsonl \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 2048 --max_steps 20 \\
  --use_peft --lora_r 16 --lora_alpha 32 --learning_rate 2.0e-4 --bf16 --dtype bfloat16 --output_dir out
"""
LAUNCHERS = {
    "accelerate": "accelerate launch --config_file fsdp.yaml trl/scripts/sft.py",
    "torchrun": "torchrun --nproc-per-node 2 train.py",
    "deepspeed": "deepspeed --num_gpus 2 train.py --deepspeed ds.json",
}
AXOLOTL = """base_model: Qwen/Qwen2.5-7B-Instruct
load_in_4bit: true
adapter: qlora
lora_r: 32
sequence_len: 2048
micro_batch_size: 2
"""
LLAMA_FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
lora_alpha: 16
quantization_bit: BITS
quantization_method: bnb
cutoff_len: 1024
per_device_train_batch_size: 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}'
    )
    return tmp_path


def script(start: str, model: str = INSTRUCT, name: str = "run.sh") -> str:
    Path(name).write_text("#!/bin/bash\n" + start + FLAGS.replace("MODEL", model))
    return name


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_weights_of_a_script_are_those_it_names(launcher: str) -> None:
    assert call("import", script(LAUNCHERS[launcher]), "--gpus", "2xRTX4090", "--out", "own.toml").code == 0
    found = from_file("own.toml")
    assert (found.model, found.checkpoint.pretrained) == ("mistral_7b", INSTRUCT)


def test_the_catalogues_own_weights_need_no_name() -> None:
    name = script(LAUNCHERS["accelerate"], "mistralai/Mistral-7B-v0.3")
    assert call("import", name, "--gpus", "2xRTX4090", "--out", "own.toml").code == 0
    assert from_file("own.toml").checkpoint.pretrained == ""


def test_weights_in_4_bits_are_those_of_the_model_that_they_quantize() -> None:
    name = script(LAUNCHERS["accelerate"], "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit")
    assert call("import", name, "--gpus", "2xRTX4090", "--out", "own.toml").code == 0
    assert from_file("own.toml").checkpoint.pretrained == "unsloth/Meta-Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(("model", "kept"), [("mistral-7b", INSTRUCT), ("llama3-8b", "")])
def test_another_model_replaces_the_weights_too(model: str, kept: str) -> None:
    name = script(LAUNCHERS["accelerate"])
    assert call("import", name, "--gpus", "2xRTX4090", "--model", model, "--out", "own.toml").code == 0
    assert from_file("own.toml").checkpoint.pretrained == kept


def test_a_file_that_names_a_model_gets_another_with_a_warning() -> None:
    name = script(LAUNCHERS["accelerate"])
    found = call("check", name, "--gpus", "2xRTX4090", "--model", "llama3-8b")
    assert found.code == 0
    (one,) = (one for one in found.json["findings"] if one["rule"].startswith("model."))
    assert (one["rule"], one["severity"]) == ("model.differs", "warning")
    assert "the file trains 7.25 B parameters, the figures here are of llama3_8b with 8.03 B" in one["message"]


def test_recommend_names_the_weights_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["recommend", script(LAUNCHERS["accelerate"]), "--gpus", "2xRTX4090"])
    assert f"hf download {INSTRUCT}" in capsys.readouterr().out


def test_an_export_has_the_weights_of_the_script() -> None:
    name = script(LAUNCHERS["accelerate"])
    assert call("export", name, "--to", "automodel", "--gpus", "2xRTX4090", "--out", "out").code == 0
    texts = [path.read_text() for path in Path("out").iterdir()]
    assert any(f"pretrained_model_name_or_path: {INSTRUCT}" in text for text in texts)


def test_the_fix_for_axolotl_has_the_typed_model() -> None:
    Path("axolotl.yml").write_text(AXOLOTL)
    with pytest.raises(InputError) as caught:
        library.import_file("axolotl.yml", gpus="1xL4")
    assert caught.value.fix[0].startswith("meshwright recommend Qwen/Qwen2.5-7B-Instruct --goal peft")
    assert "peft.method=qlora" in caught.value.fix[0]


@pytest.mark.parametrize(("bits", "method"), [("4", "qlora"), ("8", "lora")])
def test_the_fix_for_llama_factory_has_the_typed_model_and_its_bits(
    bits: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lf.yaml").write_text(LLAMA_FACTORY.replace("BITS", bits))
    with pytest.raises(InputError) as caught:
        library.import_file("lf.yaml", gpus="1xRTX3090")
    assert caught.value.fix[0].startswith("meshwright recommend Qwen/Qwen2.5-7B-Instruct --goal peft")
    assert f"peft.method={method} " in caught.value.fix[0]
    assert ("quantization_bit=8" in caught.value.reason) == (bits == "8")
    assert "quantization_bit=4" not in caught.value.reason
    assert "alpha/rank" not in capsys.readouterr().err


def test_trl_sft_is_read_without_a_config() -> None:
    Path("run.sh").write_text(
        "trl sft" + FLAGS.replace("MODEL", INSTRUCT).replace("--use_peft", "--use_peft --load_in_4bit")
    )
    found = library.check("run.sh", gpus="1xRTX4090")
    recipe = found.recipe
    assert (found.framework, found.ok) == ("accelerate", True)
    assert found.model is not None
    assert (found.model.name, recipe.goal, recipe.peft.method, recipe.peft.rank) == ("mistral_7b", "peft", "qlora", 16)
    assert (recipe.layout.micro_batch_size, recipe.train.global_batch_size, recipe.data.seq_length) == (2, 4, 2048)
    assert recipe.checkpoint.pretrained == INSTRUCT


STARTS = {
    "trl sft --accelerate_config fsdp.yaml": "fsdp2",
    "trl sft --accelerate_config=fsdp2 --num_processes 2": "fsdp2",
    "trl sft --accelerate_config zero2 --num_processes 2": "fsdp2",
    "trl sft --num_processes 2": "ddp",
    "python -m trl sft": "ddp",
    "python3 -m trl.cli sft": "ddp",
    "accelerate launch --num_processes 2 -m trl.scripts.sft": "ddp",
    "python -m trl.scripts.sft": "ddp",
    "CUDA_VISIBLE_DEVICES=0,1 uv run trl sft": "ddp",
}


@pytest.mark.parametrize("start", STARTS)
def test_the_commands_of_trl_are_read(start: str) -> None:
    found = library.check(
        script(start), gpus="1xRTX4090" if "trl.scripts.sft" in start and "-m" in start[:10] else "2xRTX4090"
    )
    assert (found.framework, found.ok) == ("accelerate", True)
    assert (found.recipe.layout.strategy, found.recipe.data.train_on) == (STARTS[start], "all")
    assert found.recipe.checkpoint.pretrained == INSTRUCT


def test_the_arguments_of_trl_may_be_in_a_file() -> None:
    Path("sft.yaml").write_text(
        f"model_name_or_path: {INSTRUCT}\ndataset_name: rows.jsonl\naccelerate_config: fsdp.yaml\nuse_peft: true\n"
        "lora_r: 8\nlora_target_modules: [q_proj, v_proj]\nlearning_rate: 1.0e-4\nmax_steps: 20\nmax_length: 1024\n"
        "per_device_train_batch_size: 4\n"
    )
    Path("run.sh").write_text("trl sft --config sft.yaml --lora_r 16\n")
    recipe = library.check("run.sh", gpus="2xRTX4090").recipe
    assert (recipe.layout.strategy, recipe.peft.rank, recipe.peft.targets) == ("fsdp2", 16, ("q_proj", "v_proj"))
    assert (recipe.optimizer.lr, recipe.data.seq_length, recipe.layout.micro_batch_size) == (1e-4, 1024, 4)
    assert (recipe.train.steps, recipe.checkpoint.pretrained) == (20, INSTRUCT)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_script_without_a_command_of_the_framework_is_never_ok(framework: str) -> None:
    Path("own.sh").write_text("ARGS=(--output_dir o)\nmytrainer tune --model_name_or_path x/y ${ARGS[@]}\n")
    with pytest.raises(InputError, match=r"contains no|starts no"):
        library.check("own.sh", gpus="1xRTX4090", framework=framework)
    with pytest.raises(InputError, match="matches no supported framework") as caught:
        library.check("own.sh", gpus="1xRTX4090")
    assert not caught.value.fix


def test_early_stopping_without_validations_gets_a_fix_that_keeps_it() -> None:
    words = ("recommend", "Qwen2.5-7B", "--gpus", "1xL4", "--goal", "qlora", "data.validation_part=0.05")
    stopping = ("train.early_stop_patience=3", "train.epochs=3")
    assert not [one for one in call(*words, *stopping).findings if one["rule"] == "unused.early-stop-patience"]
    found = call(*words, *stopping, "train.eval_every=0")
    [one] = [one for one in found.findings if one["rule"] == "unused.early-stop-patience"]
    assert one["fix"][0] == "train.eval_every=50"
    again = call(*words, *stopping, one["fix"][0])
    assert not [one for one in again.findings if one["rule"] == "unused.early-stop-patience"]


@pytest.mark.parametrize(
    ("typed", "is_found"), [((), True), (("data.validation_part=0.02",), False), (("train.eval_every=0",), False)]
)
def test_validations_without_data_are_found_before_the_run(typed: tuple[str, ...], is_found: bool) -> None:
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    Path("rows.jsonl").write_text(row * 200)
    name = script(LAUNCHERS["accelerate"])
    Path(name).write_text(Path(name).read_text().replace("--bf16", "--eval_strategy steps --eval_steps 5 --bf16"))
    Path(name).write_text(Path(name).read_text().replace("rows.jsonl", "./rows.jsonl"))
    found = call("recommend", name, "--gpus", "2xRTX4090", *typed)
    assert ("data.no-validation" in {one["rule"] for one in found.findings}) == is_found


TITAN = """[model]
name = "llama3"
flavor = "70B"
[training]
steps = 1000
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "selective"
[checkpoint]
enable = true
initial_load_path = "{folder}"
"""
BRIDGE = """from megatron.bridge.recipes.llama import llama31_70b_sft_config
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

cfg = llama31_70b_sft_config()
cfg.model.pipeline_model_parallel_size = 1
cfg.train.global_batch_size = 128
cfg.checkpoint.save = "{save}"
cfg.checkpoint.load = "{load}"
finetune(config=cfg, forward_step_func=forward_step)
"""


def weights_findings(meshwright: Any, name: str, text: str) -> list[tuple[str, str, list[str]]]:
    Path(name).write_text(text)
    found = meshwright("check", name, "--gpus", "16x8xH200", "--json").json["findings"]
    rules = ("torchtitan.weights-format", "megatron-bridge.no-checkpoint")
    return [(one["rule"], one["severity"], one["fix"]) for one in found if one["rule"] in rules]


def test_a_hugging_face_folder_is_no_checkpoint_of_torchtitan(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    Path("hf/model-00001-of-00002.safetensors").touch()
    text = TITAN.format(folder=tmp_path / "hf")
    error = ("torchtitan.weights-format", "error", ["checkpoint.initial_load_in_hf = true"])
    assert weights_findings(meshwright, "a.toml", text) == [error]
    assert weights_findings(meshwright, "a.toml", f"{text}initial_load_in_hf = true\n") == []
    Path("dcp").mkdir()
    Path("dcp/.metadata").touch()
    for other in (tmp_path / "dcp", "/lustre/hf/Llama-3.1-70B"):
        assert weights_findings(meshwright, "a.toml", TITAN.format(folder=other)) == []


def test_the_folder_that_a_run_saves_to_has_no_initial_weights(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(tmp_path / "run")
    ((rule, severity, _),) = weights_findings(meshwright, "sft.py", BRIDGE.format(save=run, load=run))
    assert (rule, severity) == ("megatron-bridge.no-checkpoint", "warning")
    assert weights_findings(meshwright, "sft.py", BRIDGE.format(save=run, load="/ckpt/70b")) == []
    Path("run").mkdir()
    Path("run/latest_train_state.pt").touch()  # it resumes
    assert weights_findings(meshwright, "sft.py", BRIDGE.format(save=run, load=run)) == []


@pytest.mark.parametrize(
    ("goal", "named"), [("sft", ()), ("pretrain", ("checkpoint.pretrained=/ckpt/70b",)), ("pretrain", ())]
)
def test_an_export_says_where_another_phase_would_be_resumed(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goal: str, named: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("export", f"llama3_70b_{goal}_config", "--to", "megatron-bridge", "--gpus", "4x8xH200", *named)
    notes = " ".join(meshwright(*words, "--json").json["notes"])
    assert ("nemo_experiments/default/checkpoints" in notes) == (goal == "sft" or bool(named))
    notes = " ".join(meshwright(*words, "checkpoint.folder=/runs/a", "--json").json["notes"])
    assert "nemo_experiments" not in notes


def test_an_exported_file_with_weights_of_a_run_is_checked_with_its_model(meshwright: Any, tmp_path: Path) -> None:
    words = ("llama3_8b_sft_config", "--to", "automodel", "--gpus", "8xH200", "checkpoint.pretrained=./run/hf")
    assert meshwright("export", *words, "--out", "job").code == 0
    file = tmp_path / "job" / "llama3_8b_sft_config.yaml"
    answer = meshwright("check", str(file), "--gpus", "8xH200", "--json").json
    assert (answer["ok"], answer["model"]) == (True, "llama3_8b")
    assert answer["estimate"]
    assert any("it has weights of llama3_8b, as a comment of the file says" in one for one in answer["notes"])
