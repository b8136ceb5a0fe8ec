"""What is saved, priced and advised is what other commands print."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import meshwright as package

SFT = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 128, local_batch_size: 2, ckpt_every_steps: 200, max_steps: 1000}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
distributed: {strategy: fsdp2, tp_size: 1, cp_size: 1, pp_size: 1, ep_size: 16, activation_checkpointing: true}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: /data/chats.jsonl
  split: train
  seq_length: 4096
optimizer: {_target_: torch.optim.AdamW, lr: LR, betas: [0.9, 0.95], weight_decay: 0.0}
lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 50, min_lr: 1.0e-6}
"""
LOADER = "dataloader: {_target_: torchdata.stateful_dataloader.StatefulDataLoader, num_workers: 300}\n"
MANY_WORKERS = SFT + LOADER  # a second warning: one repair for both
STEP = (
    "2026-11-17 09:00:00 | INFO | nemo_automodel.recipes.llm.train_ft | step {step} | epoch 0 | loss {loss} | "
    "grad_norm {norm} | lr {lr} | mem 43.20 GiB | tps 60357.74(1886.18/gpu) | num_label_tokens 311021\n"
)
TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
global_batch_size = 512
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1
[activation_checkpoint]
mode = "none"
"""
TITAN_STEP = (
    "[rank0]:[titan] 2026-11-17 09:00:00,101 - root - INFO - step: {step}  loss:  9.9  grad_norm:  1.2  "
    "memory: 88.31GiB(63.17%)  tps: 976  tflops: 437.25  mfu: 44.19%\n"
)
OOM = (
    "[rank3]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 has a total capacity of "
    "139.81 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 138.60 GiB memory in use. "
    "Of the allocated memory 120.22 GiB is allocated by PyTorch, and 12.41 GiB is reserved by PyTorch but unallocated."
    "\n"
)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_saved_repair_is_named_with_its_fields(meshwright: Any) -> None:
    Path("moe_sft.yaml").write_text(MANY_WORKERS.replace("lr: LR, ", ""))  # AutoModel's default rate, not the user's
    words = ("recommend", "moe_sft.yaml", "--gpus", "4x8xH200", "--engine", "megatron")
    found = meshwright(*words, "--save", "sized3.toml")
    assert "lr 0.001" in found.out
    rate = tomllib.loads(Path("sized3.toml").read_text())["optimizer"]["lr"]
    assert "note: wrote sized3.toml: what the commands of this answer run, with the repair" in found.err
    assert f"optimizer.lr={rate} in place of 0.001" in found.err
    assert f"optimizer.lr={rate}" in found.out.partition("\nRun ")[2], "the file and the commands agree"
    plain = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--save", "unchanged25.toml")
    assert plain.err.splitlines()[-1] == "note: wrote unchanged25.toml: the recipe of this plan"


def test_a_warning_does_not_replace_the_rate_of_the_file(meshwright: Any) -> None:
    Path("moe_sft.yaml").write_text(MANY_WORKERS.replace("LR", "1.0e-3"))
    words = ("recommend", "moe_sft.yaml", "--gpus", "4x8xH200", "--engine", "megatron")
    found = meshwright(*words, "--save", "sized3.toml")
    assert tomllib.loads(Path("sized3.toml").read_text())["optimizer"]["lr"] == 0.001
    assert "note: wrote sized3.toml: the recipe of this plan; the repair is not in it: " in found.err
    assert "optimizer.lr=1e-05" in found.err
    commands = found.out.partition("\nRun ")[2]
    assert "without the repair, which would change your optimizer.lr" in commands
    assert "optimizer.lr=" not in commands, "the file and the commands agree"


@pytest.mark.parametrize("rate", ["1.0e-3", "1.5e-4"])
@pytest.mark.parametrize("fine", [150, 40])
def test_doctor_advises_no_rate_that_check_finds_too_high(meshwright: Any, rate: str, fine: int) -> None:
    Path("sft.yaml").write_text(SFT.replace("LR", rate))
    steps = [STEP.format(step=n, loss=1.5 - n / 400, norm=0.9, lr=rate) for n in range(fine)]
    steps += [STEP.format(step=n, loss="nan", norm="nan", lr=rate) for n in range(fine, fine + 40)]
    Path("run.log").write_text("| train_ft | World size: 32\n" + "".join(steps))
    on = ("--gpus", "4x8xA100-80GB", "--json")
    checked = meshwright("check", "sft.yaml", *on).json["findings"]
    fix = next(one["fix"] for one in checked if one["rule"] == "learning_rate.fine-tuning")
    found = meshwright("doctor", "run.log", "--recipe", "sft.yaml", *on).json["findings"]
    remedies = next(one["remedies"] for one in found if one["rule"] == "loss.not-a-number")
    assert "optimizer.lr=1e-05" in remedies[0]["try"], remedies
    assert list(remedies[0]["there"]) == list(fix)


def test_every_remedy_of_a_run_out_of_memory_counts_what_it_needed(meshwright: Any) -> None:
    Path("titan.toml").write_text(TITAN)
    lines = "".join(TITAN_STEP.format(step=n) for n in range(10, 610, 10))
    Path("titan.log").write_text(lines + OOM)
    answer = meshwright("doctor", "titan.log", "--gpus", "16x8xH200", "--recipe", "titan.toml", "--json").json
    found = {one["rule"]: one for one in answer["findings"]}
    needed = {one["name"]: one["value"] for one in found["memory.out-of-memory"]["evidence"]}
    offset = needed["needed by this run"] - needed["estimate"]
    assert offset > 50
    tried = [
        (one["rule"], remedy) for one in answer["findings"] for remedy in one["remedies"] if remedy.get("peak_gib")
    ]
    assert "memory.out-of-memory" in {id for id, _ in tried}
    assert len(tried) >= 4
    for id, remedy in tried:
        assert remedy["peak_gib"] > offset, (id, remedy)
        assert remedy["fits"], (id, remedy)
        assert not any("layout.pp=2" in one for one in remedy["try"]), "61.8 GiB by its estimate alone"


def test_size_says_where_its_length_is_from(meshwright: Any) -> None:
    words = ("llama3.1-70b", "--gpus", "H200", "--goal", "pretrain", "--tokens", "120B", "--max-gpus", "16", "--json")
    (length,) = [one for one in meshwright("size", *words).json["assumed"] if one["field"] == "data.seq_length"]
    plan = meshwright("recommend", "llama3.1-70b", "--gpus", "2x8xH200", "--goal", "pretrain", "--json").json
    assert length["value"] == str(plan["contract"]["seq_length"])
    (change,) = [one for one in plan["changes"] if one["field"] == "data.seq_length"]
    assert change["why"].partition(";")[0] in length["message"]
    assert f"whose length is {change['from']:,}" in length["message"]


def test_the_plans_of_python_have_the_requested_budget() -> None:
    found = package.plan("llama3-8b", "8xH200", "pretrain", tokens="120B", price=3.2, top=2)
    for one, listed in zip(found.plans, package.to_dict(found)["plans"], strict=True):
        assert one.budget is not None
        assert one.budget.days == pytest.approx(listed["budget"]["days"])
        assert one.budget.cost == pytest.approx(listed["budget"]["cost"])
    assert package.plan("llama3-8b", "8xH200", "pretrain", top=1).plans[0].budget is None


@pytest.mark.parametrize(("option", "typed", "meant"), [("--seq", "8k", 8192), ("--seq-len", "16K", 16384)])
def test_the_fix_of_a_length_is_in_digits(meshwright: Any, option: str, typed: str, meant: int) -> None:
    words = ("export", "llama3-8b", "--to", "torchtitan", "--gpus", "8xH200", "--goal", "pretrain")
    refused = meshwright(*words, option, typed)
    assert f"fix:   data.seq_length={meant}" in refused.err
    assert meshwright(*words, f"data.seq_length={meant}").code == 0


@pytest.mark.parametrize("call", ["ibv_create_qp", "ibv_reg_mr"])
def test_infiniband_without_memory_is_the_limit_of_locked_memory(meshwright: Any, call: str) -> None:
    text = f"node3:811:902 [2] misc/ibvwrap.cc:246 NCCL WARN Call to {call} failed with error Cannot allocate memory"
    first = meshwright("explain", text, "--json").json["matches"][0]
    assert first["fix"][0].startswith("ulimit -l unlimited")
    other = meshwright("explain", f"NCCL WARN Call to {call} failed with error Invalid argument", "--json").json
    assert not other["matches"][0]["fix"][0].startswith("ulimit -l")


def test_a_length_in_thousands_is_accepted_as_an_override_too(meshwright: Any) -> None:
    words = ("estimate", "llama3_8b_pretrain_config", "--gpus", "8xH200")
    for typed in ("data.seq_length=4k", "seq_length=4K"):
        assert meshwright(*words, typed, "--json").json["contract"]["seq_length"] == 4096, typed
    refused = meshwright(*words, "train.steps=4k")  # in thousands, not in 1,024
    assert (refused.code, "fix:   train.steps=4000" in refused.err) == (2, True), refused


def test_one_value_of_the_wrong_type_is_one_error(meshwright: Any) -> None:
    """The name of the key, the signature of its class and our field each reported 12k."""
    words = ("export", "llama3_8b_pretrain_config", "--to", "automodel", "--gpus", "8xH100")
    written = meshwright(*words, "--out", "am", "data.dataset=/data/text_document")
    (path,) = Path("am").glob("*.yaml")
    text = path.read_text()
    assert written.code == 0, written
    assert "seq_length: 8192" in text
    path.write_text(text.replace("seq_length: 8192", "seq_length: 12k"))
    found = meshwright("check", str(path), "--gpus", "8xH100", "--json").json["findings"]
    assert [one["rule"] for one in found if "12k" in one["message"]] == ["value.invalid"]


LISTED = """name = "listed"
model = "qwen3_600m"
goal = "pretrain"
cluster = "8xH100"
engine = "ENGINE"

[data]
dataset = "0.3 /data/a 0.7 /data/b"
seq_length = 2048

[train]
global_batch_size = 64
steps = 100000
"""
TO = ("--to", "megatron-lm")


@pytest.mark.parametrize("engine", ["meshwright", "megatron"])
@pytest.mark.parametrize(
    "words", [("check",), ("launch", "--scheduler", "slurm", "--write", "jobs"), ("export", *TO), ("launch", *TO)]
)
def test_every_command_refuses_a_dataset_that_lists_several(
    meshwright: Any, engine: str, words: tuple[str, ...]
) -> None:
    Path("listed.toml").write_text(LISTED.replace("ENGINE", engine))
    words = (*words, "--scheduler", "torchrun") if words == ("launch", *TO) else words
    answer = meshwright(words[0], "listed.toml", *words[1:])
    assert answer.code in (1, 2), answer.out
    text = answer.out + answer.err
    assert "names several datasets with their weights; write them as a blend" in text
    assert "data.blend=/data/a:0.3,/data/b:0.7" in text
    assert "for a layout that runs" not in text
    assert not Path("jobs").exists()
    fixed = meshwright(words[0], "listed.toml", *words[1:], "data.blend=/data/a:0.3,/data/b:0.7")
    assert fixed.code == 0, fixed.err


def test_a_blend_is_no_mock_data(meshwright: Any) -> None:
    for name in "ab":
        Path(f"{name}.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    blend = 'blend = {"a.jsonl" = 0.3, "b.jsonl" = 0.7}'
    recipe = LISTED.replace('dataset = "0.3 /data/a 0.7 /data/b"', blend).replace("ENGINE", "meshwright")
    Path("blend.toml").write_text(recipe.replace("pretrain", "sft"))
    found = meshwright("check", "blend.toml", "--json").json["findings"]
    assert "data.mock-fine-tuning" not in {one["rule"] for one in found}
