"""Short logs, programs that parse no arguments, pasted fixes, paths inside recipes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.checkpoint.contract import STATE

RECORD = "{{'loss': {loss:.4f}, 'grad_norm': 0.5, 'learning_rate': {rate:g}, 'epoch': {epoch:.2f}}}\n"


def _log(lines: int, loss: Callable[[int], float], epochs: float = 2.0, rate: float = 1e-4) -> str:
    return "".join(RECORD.format(loss=loss(n), rate=rate, epoch=epochs * (n + 1) / lines) for n in range(lines))


def _with_bars(text: str, every: int = 10) -> str:
    records = text.splitlines(keepends=True)
    total = every * len(records)
    bars = [f"  1%|#         | {every * n}/{total} [{n}:00<10:00,  6.1s/it]\n" for n in range(1, len(records) + 1)]
    return "".join(bar + record for bar, record in zip(bars, records, strict=True))


def _noisy(seed: int, of: Callable[[int], float], noise: float) -> Callable[[int], float]:
    chance = random.Random(seed)
    return lambda n: of(n) * (1 + chance.gauss(0, noise))


FLAT = {
    "const20": _log(20, lambda _: 2.31),
    "const30": _log(30, lambda _: 2.31),
    "const59": _log(59, lambda _: 2.31),
    "const99": _log(99, lambda _: 2.31),
    "noisy": _log(59, _noisy(1, lambda _: 2.31, 0.007)),
    "with a bar": _with_bars(_log(75, _noisy(2, lambda _: 2.31, 0.01))),
}
HEALTHY = {
    "converged": _log(75, _noisy(3, lambda n: 1.1 + 1.2 * 0.85**n, 0.02)),
    "slow": _log(60, _noisy(4, lambda n: 1.4 - 0.0012 * n, 0.01)),
    "noisy": _log(40, _noisy(5, lambda n: 1.4 - 0.001 * n, 0.04)),
    "with a bar": _with_bars(_log(37, _noisy(6, lambda n: 0.9 + 0.6 * 0.9**n, 0.03))),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FLAT)
def test_a_loss_that_does_not_move_is_reported_from_twenty_lines(name: str, meshwright: Any) -> None:
    Path("train.log").write_text(FLAT[name])
    shown = meshwright("doctor", "train.log").out
    assert "warning loss.flat" in shown
    assert "step 751" not in shown


@pytest.mark.parametrize("name", HEALTHY)
def test_a_fine_tuning_that_learns_or_is_too_noisy_to_tell_has_no_finding(name: str, meshwright: Any) -> None:
    Path("train.log").write_text(HEALTHY[name])
    shown = meshwright("doctor", "train.log").out
    assert "no findings" in shown
    needed = meshwright("doctor", "train.log", "--json").json["not_examined"].get("loss.flat", "")
    assert needed.startswith("about") is (name == "noisy")


def test_too_few_steps_are_listed_as_not_checked(meshwright: Any) -> None:
    Path("train.log").write_text(_log(40, lambda _: 2.31, epochs=0.1))
    needed = "100 steps, or half an epoch after the warm-up: the log has 40 lines"
    assert meshwright("doctor", "train.log", "--json").json["not_examined"]["loss.flat"].startswith(needed)
    (line,) = (one for one in meshwright("doctor", "train.log").out.splitlines() if one.startswith("not checked"))
    assert "loss.flat" in line


def test_a_bar_before_each_record_is_the_step_of_that_record(meshwright: Any) -> None:
    Path("train.log").write_text(_with_bars(_log(75, lambda n: 2.31 - 0.01 * n)))
    assert "step 750 of 750" in meshwright("doctor", "train.log").out


PROGRAM = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-3B")
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-3B")
ds = ds.map(lambda rows: tok(rows["text"], truncation=True, max_length=8192))
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=1e-5,
    bf16=True,
    gradient_checkpointing=False,
)
Trainer(model=model, args=args, train_dataset=ds).train()
"""
SHARDED = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
COMMAND = "accelerate launch --config_file fsdp.yaml train.py"
SMALL = "per_device_train_batch_size=1, gradient_accumulation_steps=16, gradient_checkpointing=True"
FLAGS = " --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --gradient_checkpointing True"


def _check(meshwright: Any, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(meshwright("check", *words, "--gpus", "8xA100-40", "--json").out)
    return found


def _rules(found: dict[str, Any], severity: str) -> dict[str, dict[str, Any]]:
    return {one["rule"]: one for one in found["findings"] if one["severity"] == severity}


def _write(command: str, program: str = PROGRAM) -> None:
    Path("fsdp.yaml").write_text(SHARDED)
    Path("train.py").write_text(program)
    Path("run.sh").write_text(f"{command}\n")


def test_the_fix_of_a_program_without_a_parser_is_in_its_own_code(meshwright: Any) -> None:
    _write(COMMAND)
    errors = _rules(_check(meshwright, "run.sh"), "error")
    assert errors["memory.peak"]["fix"] == [f"train.py: {SMALL}"]
    changed = PROGRAM.replace("batch_size=4", "batch_size=1").replace("steps=4", "steps=16").replace("False", "True")
    Path("train.py").write_text(changed)
    assert not _rules(_check(meshwright, "run.sh"), "error")


@pytest.mark.parametrize("launcher", [COMMAND, "torchrun --nproc_per_node 8 train.py"])
def test_flags_of_a_program_without_a_parser_are_ignored_and_reported(launcher: str, meshwright: Any) -> None:
    _write(launcher + FLAGS)
    found = _check(meshwright, "run.sh")
    assert {"memory.peak", "memory.state"} & _rules(found, "error").keys()
    ignored = _rules(found, "warning")["accelerate.arguments-ignored"]
    assert "train.py parses no arguments" in ignored["message"]
    assert ignored["fix"] == [f"train.py: {SMALL}"]


def test_flags_that_repeat_the_code_of_a_program_without_a_parser_are_no_finding(meshwright: Any) -> None:
    flags = " --per_device_train_batch_size 4 --gradient_accumulation_steps 4"
    _write(COMMAND + flags)
    assert "accelerate.arguments-ignored" not in _rules(_check(meshwright, "run.sh"), "warning")
    _write(f"{COMMAND}{flags} --gradient_checkpointing True")
    ignored = _rules(_check(meshwright, "run.sh"), "warning")["accelerate.arguments-ignored"]
    assert ignored["fix"] == ["train.py: gradient_checkpointing=True"]


@pytest.mark.parametrize(
    "line",
    [
        "from transformers import HfArgumentParser",
        "import argparse",
        "import sys; print(sys.argv)",
        "from settings import options",
    ],
)
def test_flags_of_a_program_with_a_parser_count(line: str, meshwright: Any) -> None:
    _write(COMMAND + FLAGS, f"{line}\n{PROGRAM}")
    Path("settings.py").write_text("import click\n\noptions = click.command()\n")
    found = _check(meshwright, "run.sh")
    assert not _rules(found, "error")
    assert "accelerate.arguments-ignored" not in _rules(found, "warning")


def test_ignored_flags_of_a_command_with_a_deepspeed_config_are_reported(meshwright: Any) -> None:
    _write("deepspeed --num_gpus 8 train.py --deepspeed ds.json" + FLAGS)
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}))  # fmt: skip
    found = _check(meshwright, "run.sh")
    assert "deepspeed.arguments-ignored" in _rules(found, "warning")
    assert _rules(found, "error")["memory.peak"]["fix"] == [f"train.py: {SMALL}"]


MORE = ("data.seq_length=1024", "layout.recompute=full")  # what the replicated program does not set


def _write_replicated() -> None:
    text = PROGRAM.replace(", max_length=8192", "").replace("batch_size=4", "batch_size=1")
    _write("accelerate launch --num_processes 8 train.py", text.replace("gradient_checkpointing=False,", ""))


def test_sharding_of_a_command_is_options_that_pass_when_typed(meshwright: Any) -> None:
    _write_replicated()
    (fix,) = _rules(_check(meshwright, "run.sh"), "error")["memory.state"]["fix"]
    assert fix.startswith("accelerate launch --use_fsdp ")
    Path("typed.sh").write_text(f"{fix} --num_processes 8 --mixed_precision bf16 train.py\n")
    assert not _rules(_check(meshwright, "typed.sh", *MORE), "error")


def test_the_settings_of_one_section_are_one_block_that_passes_when_pasted(meshwright: Any) -> None:
    _write_replicated()
    fix = _rules(_check(meshwright, "train.py"), "error")["memory.state"]["fix"]
    lines = [one for one in fix if ": " in one and ".py: " not in one]
    assert [one.partition(":")[0] for one in lines] == ["distributed_type", "fsdp_config"]
    Path("pasted.yaml").write_text("\n".join(["num_processes: 8", "mixed_precision: bf16", *lines]) + "\n")
    Path("pasted.sh").write_text("accelerate launch --config_file pasted.yaml train.py\n")
    assert not _rules(_check(meshwright, "pasted.sh", *MORE), "error")


CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]})
RECIPE = """name = "g"
model = "qwen3_600m"
goal = "sft"
cluster = "4xL40S"

[data]
dataset = "data/chat.jsonl"
validation = "data/held_out.jsonl"
tokenizer = "tokenizer"
chat_template = "template.jinja"

[train]
steps = 20

[checkpoint]
pretrained = "base"
"""
IN_FILE = {
    "data.dataset": "data/chat.jsonl",
    "data.validation": "data/held_out.jsonl",
    "data.tokenizer": "tokenizer",
    "data.chat_template": "template.jinja",
    "checkpoint.pretrained": "base",
}


def _recipe() -> None:
    for name in ("data/chat.jsonl", "data/held_out.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"{CHAT}\n" * 400)
    for name in ("tokenizer", "base"):
        Path(name).mkdir()
    Path("template.jinja").write_text("{{ messages }}")
    Path("g.toml").write_text(RECIPE)


@pytest.mark.parametrize(
    "options",
    [
        ("kubernetes", "--image", "bank/meshwright:1", "--mount", "claim:/data", "--out", "/runs/g"),
        ("skypilot",),
        ("slurm",),
        ("slurm", "--image", "x.sqsh"),
        ("torchrun",),
    ],
)
def test_a_job_has_the_full_paths_of_what_its_recipe_file_names(options: tuple[str, ...], meshwright: Any) -> None:
    _recipe()
    done = meshwright("launch", "g.toml", "--gpus", "4xL40S", "--scheduler", *options)
    assert done.code == 0, done.err
    for key, name in IN_FILE.items():
        assert f"{key}={Path(name).resolve()}" in done.out


def test_a_typed_path_counts_before_that_of_the_recipe_file(meshwright: Any) -> None:
    _recipe()
    done = meshwright("launch", "g.toml", "--gpus", "4xL40S", "--scheduler", "slurm", "data.validation=data/chat.jsonl")
    assert done.out.count("data.validation=") == 1
    assert "held_out" not in done.out


def test_the_blend_and_the_model_folder_of_a_recipe_file_have_full_paths(meshwright: Any) -> None:
    Path("data").mkdir()
    for end in (".bin", ".idx"):
        Path(f"data/web{end}").write_bytes(b"")
    text = 'name = "b"\nmodel = "qwen3_600m"\ngoal = "pretrain"\ncluster = "4xL40S"\n\n[data.blend]\n"data/web" = 1.0\n'
    Path("b.toml").write_text(f"{text}\n[train]\nsteps = 20\n")
    done = meshwright("launch", "b.toml", "--gpus", "4xL40S", "--scheduler", "kubernetes", "--image", "x")
    assert str(Path("data/web").resolve()) in done.out, done.err


def test_a_job_of_another_framework_elsewhere_has_the_full_paths_of_the_recipe_file(meshwright: Any) -> None:
    _recipe()
    Path("g.toml").write_text(RECIPE.partition("validation")[0] + "\n[train]\nsteps = 20\n")
    done = meshwright("launch", "g.toml", "--to", "automodel", "--gpus", "8xH100", "--scheduler", "kubernetes",
        "--image", "x", "--framework-dir", "/opt/am", "--mount", "claim:/data", "schedule.warmup_steps=2")  # fmt: skip
    assert str(Path("data/chat.jsonl").resolve()) in done.out, done.err


OUT_OF_MEMORY = """{'loss': 1.9321, 'grad_norm': 1.21, 'learning_rate': 4.1e-06, 'epoch': 0.01}
[rank2]:   File "/home/ml/LLaMA-Factory/src/llamafactory/launcher.py", line 23, in <module>
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 2 has a total capacity of 22.05 GiB
"""


def test_the_log_of_a_front_end_is_a_fine_tuning(meshwright: Any) -> None:
    Path("oom.log").write_text(OUT_OF_MEMORY)
    shown = meshwright("doctor", "oom.log", "--model", "gemma3-27b", "--gpus", "4xL4")
    assert "error memory.out-of-memory" in shown.out, shown.err
    assert "adapters are assumed, --goal peft" in shown.out  # the step did not fit all weights
    assert "goal=pretrain" not in shown.err
    assert "--goal sft is assumed" in meshwright("doctor", "oom.log", "--model", "qwen3-0.6b", "--gpus", "4xL4").out


def test_the_doctor_of_a_front_end_config_has_the_typed_gpus(meshwright: Any) -> None:
    Path("oom.log").write_text(OUT_OF_MEMORY)
    Path("lf.yaml").write_text("model_name_or_path: google/gemma-3-27b-it\nstage: sft\nfinetuning_type: lora\n"
        "dataset: dialogs\ntemplate: gemma3\ncutoff_len: 4096\n")  # fmt: skip
    answer = meshwright("doctor", "oom.log", "--recipe", "lf.yaml", "--gpus", "4xL4")
    assert answer.code == 1
    assert "4xL4" in answer.out
    assert "1xH100" not in answer.out + answer.err


def test_a_refused_resume_of_a_tiny_run_names_every_field_that_differs(meshwright: Any) -> None:
    words = ("train", "qwen3-0.6b", "--goal", "pretrain", "--tiny", "--out", "o", "train.steps=6")
    step = Path("o/checkpoints/step-00000004")
    step.mkdir(parents=True)
    contract = {"goal": "pretrain", "train.steps": 4, "train.global_batch_size": 16}
    (step / STATE).write_text(json.dumps({"contract": contract}))
    refused = meshwright(*words, "--nproc", "1").err
    assert "train.global_batch_size was 16 and is 8; train.steps was 4 and is 6" in refused
