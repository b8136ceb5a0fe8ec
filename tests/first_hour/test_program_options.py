"""Fine-tuning programs with options, a failed run, and LLaMA-Factory files."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as library
from meshwright.cli.run import run
from meshwright.frameworks.program_values import ProgramValues
from meshwright.frameworks.types import SourcedValue

PROGRAM = """
import argparse
import torch
from trl import SFTConfig, SFTTrainer

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct")
    p.add_argument("--data", default="chats.jsonl")
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--bs", type=int, BS)
    p.add_argument("--max_length", type=int, default=4096)
    p.add_argument("--lora_r", type=int, default=16)
    args = p.parse_args()
    bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, quantization_config=bnb, attn_implementation="flash_attention_2"
    )
    ds = load_dataset("json", data_files=args.data, split="train")
    peft_config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    cfg = SFTConfig(
        output_dir="out",
        per_device_train_batch_size=args.bs,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=args.lr,
        max_length=args.max_length,
        bf16=True,
        gradient_checkpointing=False,
        assistant_only_loss=True,
    )
    SFTTrainer(model=model, args=cfg, train_dataset=ds, peft_config=peft_config).train()
"""
LOG = """trainable params: 13,631,488 || all params: 8,043,892,736 || trainable%: 0.1695
  0%|          | 0/564 [00:00<?, ?it/s]`use_cache=True` is incompatible with gradient checkpointing. Setting to False.
{'loss': 1.8123, 'grad_norm': 0.9123, 'learning_rate': 0.0001964, 'epoch': 0.05}
{'loss': 1.5231, 'grad_norm': 0.7711, 'learning_rate': 0.0001928, 'epoch': 0.11}
  4%|▍         | 21/564 [02:11<56:34,  6.25s/it]Traceback (most recent call last):
  File "/home/me/.venv/lib/python3.11/site-packages/transformers/loss/loss_utils.py", line 47, in ForCausalLMLoss
    logits = logits.float()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 0 has a total capacity of 23.55 GiB of \
which 5.12 GiB is free. Including non-PyTorch memory, this process has 18.42 GiB memory in use. Of the allocated \
memory 17.31 GiB is allocated by PyTorch, and 642.11 MiB is reserved by PyTorch but unallocated.
"""
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train_trl.py").write_text(PROGRAM.replace("BS", "default=8"))
    Path("needs_bs.py").write_text(PROGRAM.replace("BS", "required=True"))
    Path("oom.log").write_text(LOG)
    Path("chats.jsonl").write_text(CHAT * 50)
    return tmp_path


def test_defaults_of_a_programs_options_are_checked() -> None:
    found = library.check("train_trl.py", gpus="1xRTX4090")
    recipe = found.recipe
    assert (recipe.layout.micro_batch_size, recipe.data.seq_length, recipe.peft.rank) == (8, 4096, 16)
    assert any("per_device_train_batch_size=8 (--bs, line 23)" in note for note in found.notes)
    error = next(one for one in found.findings if one.rule == "memory.peak")
    assert "per_device_train_batch_size=1" in " ".join(error.fix)


@pytest.mark.parametrize("program", ["train_trl.py", "needs_bs.py"])
def test_doctor_tries_remedies_on_the_batch_that_ran(program: str) -> None:
    found = library.diagnose("oom.log", recipe=program, gpus="1xRTX4090")
    error = next(one for one in found.findings if one.id == "memory.out-of-memory")
    assert any("per_device_train_batch_size=1" in one.there for one in error.remedies)
    assert not any(one.try_ == ("layout.recompute=full",) for one in error.remedies)  # it was on
    assert any("micro_batch_size=8 is computed" in note for note in found.notes) == (program == "needs_bs.py")


def _values(code: str, given: dict[str, SourcedValue] | None = None) -> list[object]:
    tree = ast.parse(code)
    program = ProgramValues(tree, given)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == "SFTConfig"]
    found = [program.find(word.value) for call in calls for word in call.keywords]
    return [None if one is None else (one.value, *one.options) for one in found]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (
            "def parse_args():\n p.add_argument('-b', '--batch-size', type=int, default='8')\n"
            " p.add_argument('--gc', action='store_true')\n p.add_argument('--n', type=int)\n return p.parse_args()\n"
            "def main(args):\n SFTConfig(a=args.batch_size, b=args.gc, c=args.n, d=32 // args.batch_size)\n"
            "main(parse_args())",
            [(8, "--batch_size"), (False, "--gc"), None, (4, "--batch_size")],
        ),
        (
            "@dataclass\nclass S:\n bs: int = field(default=8, metadata={})\n lr: float = 1e-4\n"
            "s, t = HfArgumentParser((S, T)).parse_args_into_dataclasses()\nSFTConfig(a=s.bs, b=s.lr, c=t.other)",
            [(8, "--bs"), (1e-4, "--lr"), None],
        ),
        ("@dataclass\nclass S:\n bs: int = 8\ns = S(bs=2)\nSFTConfig(a=s.bs, b=S.bs)", [(2,), (8,)]),
        (
            "@click.command()\n@click.option('--learning-rate', 'lr', default=1e-4)\n"
            "def main(lr):\n SFTConfig(a=lr)\nmain()",
            [(1e-4, "--learning_rate")],
        ),
        ("@app.command()\ndef main(bs: int = typer.Option(8)):\n SFTConfig(a=bs)\napp()", [(8, "--bs")]),
        ("def train(bs=8, *, lr=1e-4):\n SFTConfig(a=bs, b=lr)\nfire.Fire(train)", [(8, "--bs"), (1e-4, "--lr")]),
        ("LR = 3e-4\ndef train(bs=8, lr=1e-4):\n SFTConfig(a=bs, b=lr)\ntrain(4, lr=LR)", [(4,), (3e-4,)]),
        ("p.add_argument('--bs', default=8)\nargs = p.parse_args()\nargs.bs = f()\nSFTConfig(a=args.bs)", [None]),
        ("x = 3\nx += 1\nC = {'bs': 8}\nSFTConfig(a=x, b=C['bs'], c=torch.bfloat16)", [None, (8,), ("bfloat16",)]),
    ],
)
def test_values_of_programs_are_read_without_executing_them(code: str, values: list[object]) -> None:
    assert _values(code) == values


def test_a_command_replaces_the_default() -> None:
    Path("run.sh").write_text("accelerate launch --num_processes 1 train_trl.py --bs 2 --max_length 1024\n")
    found = library.check("run.sh", gpus="1xRTX4090")
    assert (found.recipe.layout.micro_batch_size, found.recipe.data.seq_length) == (2, 1024)


def test_the_command_that_export_prints_sets_every_field_once() -> None:
    found = library.export(
        "train_trl.py",
        to="accelerate",
        gpus="1xRTX4090",
        out="exp",
        dataset="chats.jsonl",
        overrides=["max_length=4096", "r=16", "per_device_train_batch_size=1"],
    )
    [note] = [one for one in found.written.notes if "for a layout that runs" in one]
    words = shlex.split(note.removeprefix("for a layout that runs: meshwright ").partition(", then")[0])
    assert sum(one.startswith("data.dataset=") for one in words) == 1
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 0


FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
dataset: my_chats
template: llama3
cutoff_len: 2048
output_dir: saves
per_device_train_batch_size: 1
quantization_bit: 4
"""


def _findings(text: str, rule: str) -> list[tuple[int, tuple[str, ...]]]:
    Path("lf.yaml").write_text(FACTORY + text)
    found = library.check("lf.yaml", gpus="1xRTX4090", advice=True)
    return [(one.line, one.fix) for one in found.findings if one.rule == rule]


def test_fp16_of_a_front_end_is_reported_at_its_line_with_bf16() -> None:
    assert _findings("fp16: true\n", "precision.fp16") == [(11, ("without fp16", "bf16: true"))]
    assert not _findings("bf16: true\n", "precision.fp16")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("quantization_method: bnb\n", None),
        ("export_quantization_bit: 5\n", ("export_quantization_bit: 4",)),
        ("quantization_method: eetq\n", ("quantization_bit: 8",)),
        ("val_size: 0.1\neval_strategy: stepss\n", ("eval_strategy: steps",)),
        ("save_strategy: every\n", ("without save_strategy",)),
        ("eval_strategy: no\n", None),
        ("log_level: warn\n", ("log_level: warning",)),
        ("hub_strategy: every-save\n", ("hub_strategy: every_save",)),
    ],
)
def test_values_of_fixed_choices_are_checked(text: str, fix: tuple[str, ...] | None) -> None:
    assert [one[1] for one in _findings(f"bf16: true\n{text}", "value.invalid")] == ([fix] if fix else [])


@pytest.mark.parametrize(("method", "bits", "refused"), [("bnb", 5, True), ("hqq", 5, False), ("hqq", 7, True)])
def test_bits_that_a_quantization_method_does_not_have(method: str, bits: int, refused: bool) -> None:
    text = FACTORY.replace(
        "quantization_bit: 4", f"quantization_bit: {bits}\nquantization_method: {method}\nbf16: true"
    )
    Path("lf.yaml").write_text(text)
    found = [one for one in library.check("lf.yaml", gpus="1xRTX4090").findings if one.rule == "value.invalid"]
    assert [(one.line, one.fix) for one in found] == ([(10, ("quantization_bit: 4",))] if refused else [])


def test_continued_pretraining_on_texts_names_no_other_goal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    Path("texts/one.txt").write_text("A sentence of a manual.\n" * 200)
    note = "texts: each line is a sample; --goal continued-pretraining trains on it as one text"
    for goal, is_noted in (("continued-pretraining", False), ("qlora", True)):
        with pytest.raises(SystemExit):
            run(["recommend", "llama-3.1-8b-instruct", "--gpus", "4090", "--goal", goal, "--dataset", "texts"])
        assert (note in " ".join(capsys.readouterr().out.split())) is is_noted


def test_a_tiny_run_that_continues_by_its_folder_stays_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = library.recipe("llama3_8b_pretrain_config")
    scaled = msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, seq_length=64))
    header = {"kind": "header", "settings": msgspec.to_builtins(scaled), "tiny": True}
    Path("run1/checkpoints").mkdir(parents=True)
    Path("run1/metrics.jsonl").write_bytes(msgspec.json.encode(header) + b"\n")
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr("meshwright.engine.train.train", lambda *args: started.append(args))
    library.train("./run1", nproc=2, overrides=["layout.pp=2", "train.steps=6"], accept_changes=True)
    [(_, spec, pinned)] = started
    assert (spec.tiny, spec.out) == (True, "./run1")
    assert (pinned["layout.pp"], pinned["train.steps"], pinned["data.seq_length"]) == (2, 6, 64)
    assert "checkpoint.pretrained" not in pinned


def test_the_fix_of_a_mistyped_target_keeps_the_others() -> None:
    Path("lf.yaml").write_text(f"{FACTORY}lora_target: q_proj,v_projj\n")
    (found,) = library.check("lf.yaml", gpus="1xRTX4090").findings
    assert (found.severity, found.fix) == ("warning", ("lora_target: q_proj,v_proj",))
