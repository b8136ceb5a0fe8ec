"""TRL and Trainer scripts: what they state is what is estimated, exported and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright import InputError, check, cluster, evaluate, find_model, generate, import_file, recommend
from meshwright.engine.epochs import with_epoch_intervals

ROWS = [
    {"messages": [{"role": "user", "content": f"Where is order {n}?"}, {"role": "assistant", "content": "There. " * n}]}
    for n in range(1, 81)
]
TRL = """import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "Qwen/Qwen3-8B"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=bnb)
ds = load_dataset("json", data_files="chats.jsonl", split="train")
peft_config = LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj", "v_proj"])
args = SFTConfig(
    output_dir="out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    bf16=True,
    max_length=4096,
    packing=True,
    assistant_only_loss=True,
)
SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=peft_config).train()
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
GPUS = "2xRTX6000Ada"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def trl(*lines: str, name: str = "train.py", without: str = "") -> str:
    """Write the TRL script with more arguments; return its name."""
    text = "".join(line for line in TRL.splitlines(True) if not without or without not in line)
    Path(name).write_text(
        text.replace("    output_dir=", "".join(f"    {one},\n" for one in lines) + "    output_dir=")
    )
    return name


@pytest.mark.parametrize("line", ["use_liger_kernel=True", "use_liger=True"])
def test_fused_loss_of_liger_materializes_no_full_logits(line: str) -> None:
    plain = check(trl(name="plain.py"), gpus=GPUS).estimate.memory
    fused = check(trl(line), gpus=GPUS).estimate.memory
    assert plain.logits > 25
    assert fused.total < 20


def test_liger_without_its_fused_loss_has_full_logits() -> None:
    script = trl("use_liger_kernel=True", 'liger_kernel_config={"fused_linear_cross_entropy": False}')
    assert check(script, gpus=GPUS).estimate.memory.logits > 25


def test_liger_survives_import_and_export(meshwright: Any) -> None:
    script = trl("use_liger_kernel=True")
    assert 'loss = "fused_linear"' in meshwright("import", script, "--gpus", GPUS).out
    exported = meshwright("export", script, "--to", "accelerate", "--gpus", GPUS, "--out", "acc")
    assert "use_liger_kernel" not in exported.out
    assert "use_liger_kernel=True" in Path("acc/train_args.py").read_text()


def test_reason_why_an_argument_is_not_carried_is_a_whole_sentence(meshwright: Any) -> None:
    script = trl("max_train_samples=20", 'report_to="wandb"')
    errors = meshwright("import", script, "--gpus", GPUS).err
    assert "write data.split=train[:20]" in errors
    assert "write --wandb" in errors


ZERO3 = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
    "train_micro_batch_size_per_gpu": "auto",
}
TRAINER = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
ds = load_dataset("json", data_files="chats.jsonl")["train"]
args = TrainingArguments(
    output_dir="./out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_train_epochs=3,
    learning_rate=1e-5,
    deepspeed="ds.json",
)
Trainer(model=model, args=args, train_dataset=ds).train()
"""


def trainer(*lines: str, config: object = ZERO3) -> str:
    """Write a script of the Trainer with more arguments and its DeepSpeed config; return its name."""
    Path("ds.json").write_text(json.dumps(config))
    more = "".join(f"    {one},\n" for one in lines)
    Path("hf.py").write_text(TRAINER.replace("    output_dir=", f"{more}    output_dir="))
    return "hf.py"


@pytest.mark.parametrize(
    ("line", "compute"), [("fp16=True", "fp16"), ("bf16=True", "bf16"), ("bf16=False", "fp32"), ("seed=1", "fp32")]
)
def test_the_script_decides_an_auto_of_deepspeed(line: str, compute: str) -> None:
    checked = check(trainer(line, "max_grad_norm=0.3"), gpus="8xH100")
    assert checked.recipe.precision.compute == compute
    assert checked.recipe.optimizer.clip_grad == 0.3
    assert not checked.unresolved  # bucket sizes follow from the model


def test_switches_that_contradict_the_script_are_errors() -> None:
    found = check(trainer("fp16=True", config={**ZERO3, "fp16": {"enabled": False}}), gpus="8xH100").findings
    [mismatch] = [one for one in found if one.rule == "deepspeed.argument-mismatch"]
    assert mismatch.fix == ('"fp16": {"enabled": "auto"}',)


@pytest.mark.parametrize(
    ("setting", "line", "fix"),
    [
        ({"bf16": {"enabled": True}}, "seed=1", ("bf16=True",)),
        ({"bf16": {"enabled": True}}, "fp16=True", ('"bf16": {"enabled": "auto"}',)),
        ({"gradient_clipping": 0.5}, "bf16=True", ("max_grad_norm=0.5",)),
    ],
)
def test_defaults_of_the_script_must_agree_with_the_config_too(
    setting: dict[str, Any], line: str, fix: tuple[str, ...]
) -> None:
    found = check(trainer(line, config={**ZERO3, **setting}), gpus="8xH100").findings
    [mismatch] = [one for one in found if one.rule == "deepspeed.argument-mismatch"]
    assert mismatch.fix == fix
    assert (Path(mismatch.file).name, "ds.json" in mismatch.message) == ("hf.py", True)


def test_a_job_whose_program_names_the_config_has_one_repair() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    trainer("bf16=True", config={**ZERO3, **sizes})
    Path("run.sh").write_text("deepspeed --num_gpus 2 hf.py\n")
    found = check("run.sh", gpus="2xA100-80")
    rules = ("deepspeed.batch-arithmetic", "deepspeed.argument-mismatch")
    assert {one.rule for one in found.findings if one.severity == "error"} >= {*rules}
    assert found.repair is not None
    assert {*found.repair.removes} >= {*rules}
    assert {*found.repair.overrides} == {
        '"gradient_accumulation_steps": 16', "hf.py: gradient_accumulation_steps=16"
    }  # fmt: skip
    for one in found.findings:  # no fix of one finding undoes that of another
        assert one.rule not in rules or {*one.fix} <= {*found.repair.overrides}


@pytest.mark.parametrize("framework", [(), ("--framework", "deepspeed")])
def test_a_notebook_is_refused_with_the_command_that_makes_a_program(
    meshwright: Any, framework: tuple[str, ...]
) -> None:
    cells = [{"cell_type": "code", "source": ["args = SFTConfig()"], "metadata": {}, "outputs": []}]
    Path("unsloth.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    refused = meshwright("check", "unsloth.ipynb", *framework)
    assert refused.code == 2
    assert "fix:   jupyter nbconvert --to script unsloth.ipynb | unsloth.py" in refused.err


def test_a_fix_of_code_is_printed_as_code(meshwright: Any) -> None:
    trainer("bf16=True")
    code = (
        Path("hf.py").read_text().replace("TrainingArguments(", "SFTConfig(").replace('    deepspeed="ds.json",\n', "")
    )
    code = code.replace("Trainer, TrainingArguments", "Trainer\nfrom trl import SFTConfig, SFTTrainer")
    Path("old.py").write_text(
        code.replace("Trainer(model=model,", "SFTTrainer(model=model, dataset_text_field='text',")
    )
    assert "fix: SFTConfig(dataset_text_field='text')" in meshwright("check", "old.py", "--gpus", "8xH100").out


def test_data_of_a_job_in_another_folder_is_counted_and_named_from_here(meshwright: Any) -> None:
    row = {"messages": [{"role": "user", "content": "hello " * 40}, {"role": "assistant", "content": "hi " * 20}]}
    Path("chats.jsonl").write_text(f"{json.dumps(row)}\n" * 400)
    trainer("bf16=True")
    job = Path("job")
    job.mkdir()
    for name in ("hf.py", "ds.json"):
        (job / name).write_text(Path(name).read_text().replace("chats.jsonl", "../chats.jsonl"))
    (job / "run.sh").write_text("deepspeed --num_gpus 2 hf.py\n")
    found = meshwright("recommend", "job/run.sh", "--gpus", "2xH100", "--json")
    assert found.json["budget"]["steps"] == 3 * 25, found.err
    assert "--dataset chats.jsonl" in json.dumps(found.json)
    assert "data.dataset" not in json.dumps(found.json["changes"])


FSDP_RECOMPUTES = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"


@pytest.mark.parametrize(
    ("line", "is_error"),
    [("gradient_checkpointing=True", True), ("seed=1", True), ("gradient_checkpointing=False", False)],
)
def test_programs_of_trl_turn_their_own_recompute_off_where_fsdp_has_one(line: str, is_error: bool) -> None:
    trainer(line)
    code = Path("hf.py").read_text().replace("TrainingArguments", "SFTConfig").replace("Trainer(", "SFTTrainer(")
    code = code.replace("Trainer, SFTConfig", "AutoTokenizer\nfrom trl import SFTConfig, SFTTrainer")
    Path("hf.py").write_text(code.replace('    deepspeed="ds.json",\n', ""))
    Path("acc.yaml").write_text(FSDP_RECOMPUTES)
    Path("run.sh").write_text("accelerate launch --config_file acc.yaml hf.py\n")
    found = [one for one in check("run.sh").findings if one.rule == "accelerate.double-checkpointing"]
    assert [one.fix for one in found] == [("hf.py: gradient_checkpointing=False",)] * is_error


@pytest.mark.parametrize("steps", [100, 400])
def test_fix_of_a_warmup_is_the_argument_of_the_script(steps: int) -> None:
    line = f"warmup_steps={steps}"
    for script in (trainer("bf16=True", line), trl(line)):
        [finding] = [one for one in check(script, gpus=GPUS).findings if one.rule == "learning_rate.warmup-too-long"]
        assert finding.file == script
        assert len(finding.fix) == 1
        assert finding.fix[0].startswith("warmup_steps=")


def _tokens(meshwright: Any, script: str, *words: str) -> float:
    return float(
        meshwright("recommend", script, "--gpus", "1xH200", "--price", "3", "--json", *words).json["budget"]["tokens"]
    )


def test_unpacked_rows_are_padded_to_the_longest_of_a_micro_batch(meshwright: Any) -> None:
    script = trl(name="unpacked.py", without="packing=True")
    rows = sum(len(json.dumps(row)) + 1 for row in ROWS) / 4  # bytes per token
    alone = _tokens(meshwright, script, "layout.micro_batch_size=1")
    assert alone == pytest.approx(3 * rows, rel=0.25)  # the last step is counted as a whole one
    assert alone < _tokens(meshwright, script, "layout.micro_batch_size=4") < 80 * 4096
    shown = meshwright("recommend", script, "--gpus", "1xH200", "layout.micro_batch_size=1").out
    assert "not padded in micro batches of one sample" in shown
    assert "pack the samples" not in shown  # nothing is padded


def test_saves_validation_and_test_split_of_a_script_are_carried(meshwright: Any) -> None:
    script = trl('save_strategy="epoch"', 'eval_strategy="epoch"', without="packing=True")
    text = (
        Path(script).read_text().replace('split="train")', 'split="train").train_test_split(test_size=0.05, seed=42)')
    )
    Path(script).write_text(text)
    shown = meshwright("import", script, "--gpus", GPUS)
    assert "validation_part = 0.05" in shown.out
    assert "save_every = 3" in shown.out  # 76 rows in steps of 32
    assert "eval_every = 3" in shown.out
    assert "checkpoint.save_every=3, the steps of an epoch" in shown.err
    typed = meshwright("import", script, "--gpus", GPUS, "checkpoint.save_every=2").out
    assert "save_every = 2" in typed


def test_saves_per_epoch_of_unknown_data_are_named(meshwright: Any) -> None:
    script = trl('save_strategy="epoch"')
    Path("chats.jsonl").unlink()
    assert "save_strategy at the end of every epoch is not carried" in meshwright("import", script, "--gpus", GPUS).err


def test_a_run_saves_at_the_end_of_each_counted_epoch() -> None:
    recipe = check(trl(), gpus=GPUS).recipe
    counted = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, steps=193, epochs=0.0))
    assert with_epoch_intervals(counted, 3.0, ("checkpoint.save_every",), shown=False).checkpoint.save_every == 65


def test_a_plan_of_another_engine_uses_the_micro_batch_that_its_memory_allows(meshwright: Any) -> None:
    config = {**ZERO3, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    words = ("recommend", trainer("bf16=True", config=config), "data.seq_length=8192", "kernels.loss=vocab_parallel")
    on = ("--gpus", "1xH200", "--engine", "fsdp1", "--json")
    chosen = meshwright(*words, *on).json
    size = chosen["layout"]["micro_batch_size"]
    assert size > 1
    for other in (1, 2, 4, 8):
        rival = meshwright(*words, *on, f"layout.micro_batch_size={other}").json
        if rival["estimate"]["fits"]:
            assert chosen["estimate"]["step_s"] < 1.05 * rival["estimate"]["step_s"]


def test_paths_of_pathlib_are_accepted() -> None:
    script, config = Path(trl()), Path("model/config.json")
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    assert check(script, gpus=GPUS).recipe.model
    assert import_file(script, gpus=GPUS).recipe.peft.rank == 64
    for model in (config, config.parent):
        assert recommend(model, "1xH200", "lora", dataset=Path("chats.jsonl")).recipe.data.dataset == "chats.jsonl"


@pytest.mark.parametrize("value", [3, 1.5, object(), ["a"], b"train.py"])
@pytest.mark.parametrize("function", [check, recommend, import_file, find_model, evaluate, cluster])
def test_wrong_types_are_errors_of_ours(function: Any, value: Any) -> None:
    if (function, value) == (cluster, 3):
        return  # a count of GPUs
    given = {"gpus": "1xH200", "goal": "sft"} if function is recommend else {}
    with pytest.raises(InputError):
        function(value, **given)


@pytest.mark.parametrize(
    ("function", "values"),
    [(evaluate, {"samples": "4"}), (generate, {"max_tokens": "5"}), (generate, {"temperature": "hot"})],
)
def test_wrong_types_of_options_are_errors_with_the_field(function: Any, values: dict[str, str]) -> None:
    prompt = {"prompt": "hello"} if function is generate else {}
    with pytest.raises(InputError, match=next(iter(values))):
        function("run", **prompt, **values)


@pytest.mark.parametrize("placement", ["auto", "balanced"])
def test_a_model_spread_over_the_gpus_cannot_be_trained_by_ranks(placement: str) -> None:
    script = trl()
    text = (
        Path(script)
        .read_text()
        .replace("quantization_config=bnb)", f'quantization_config=bnb, device_map="{placement}")')
    )
    Path(script).write_text(text)
    [finding] = [one for one in check(script, gpus=GPUS).findings if one.rule == "accelerate.device-map"]
    assert finding.severity == "error"
    assert finding.line == 9
    assert finding.fix == ('device_map={"": PartialState().process_index}',)
    assert check(script, gpus="1xH200").ok
    Path(script).write_text(text.replace(f'"{placement}"', '{"": 0}'))
    assert check(script, gpus=GPUS).ok


def test_a_model_spread_over_the_gpus_cannot_be_trained_by_deepspeed() -> None:
    script = Path(trainer("bf16=True"))
    script.write_text(script.read_text().replace('Qwen3-8B")', 'Qwen3-8B", device_map="auto")'))
    [finding] = [one for one in check(script, gpus="8xH100").findings if one.rule == "deepspeed.device-map"]
    assert finding.fix == ("without device_map",)


def test_the_loss_of_a_trainer_is_averaged_over_target_tokens(meshwright: Any) -> None:
    script = trl()
    assert check(script, gpus=GPUS).recipe.train.per_token_loss
    assert "per_token_loss" not in meshwright("export", script, "--to", "accelerate", "--gpus", GPUS, "--out", "x").out


def test_the_fix_of_another_trainers_file_names_a_model_that_can_be_read(meshwright: Any) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "../chats.jsonl"}}))
    lines = ["finetuning_type: lora", "lora_rank: 16", "dataset: mine", "cutoff_len: 4096", "stage: sft"]
    hub = "mistralai/Mistral-Small-24B-Instruct-2501"
    Path("lf.yaml").write_text("\n".join([f"model_name_or_path: {hub}", *lines]))
    shown = meshwright("recommend", "lf.yaml", "--gpus", "1xH200").err
    assert f"hf download {hub} config.json --local-dir Mistral-Small-24B-Instruct-2501 && meshwright" in shown
    assert "recommend Mistral-Small-24B-Instruct-2501/config.json --goal peft" in shown
    assert "--dataset chats.jsonl" in shown
    Path("lf.yaml").write_text("\n".join(["model_name_or_path: Qwen/Qwen3-8B", *lines]))
    assert "meshwright recommend qwen3_8b" in meshwright("recommend", "lf.yaml", "--gpus", "1xH200").err


@pytest.mark.parametrize("call", ["os.environ.get", "os.getenv"])
def test_the_default_of_an_environment_variable_is_read(call: str) -> None:
    script = Path(trl())
    script.write_text(
        script.read_text().replace('MODEL = "Qwen/Qwen3-8B"', f'MODEL = {call}("MODEL", "Qwen/Qwen3-8B")')
    )
    assert check(script, gpus=GPUS).recipe.model == "qwen3_8b"
