"""Engines compared, fixes that can be pasted, imports with errors, batches that divide."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import frameworks
from meshwright.api import comparison, export, recommend
from meshwright.planner.divisors import divided_batch
from meshwright.rules import Finding


@pytest.fixture
def h100(tmp_path: Path) -> str:
    file = tmp_path / "h100.toml"
    file.write_text('gpu = "H100"\nnodes = 4\ngpus_per_node = 8\nnetwork_gb_s = "400 Gb/s"\n')
    return str(file)


def test_compare_has_the_layout_that_recommend_gives_each_engine(meshwright: Any, h100: str) -> None:
    answer = meshwright("compare", "llama3-70b", "--gpus", h100, "--goal", "sft", "--seq", "8k", "--json").json
    layouts = {}
    for side in answer["sides"]:
        if side["ok"]:
            plan = recommend("llama3-70b", h100, "sft", seq="8k", engine=side["name"])
            layouts[side["name"]] = {name: plan.layout_dict()[name] for name in ("tp", "pp", "cp", "recompute")}
            assert layouts[side["name"]].items() <= side["layout"].items()
    assert layouts["automodel"]["cp"] == 1
    can_run = [side["ok"] for side in answer["sides"]]
    assert can_run == sorted(can_run, reverse=True)
    cannot = [side for side in answer["sides"] if not side["ok"]]
    assert {"torchtitan", "kempnerforge"} <= {side["name"] for side in cannot}
    assert all((side["estimate"], side["layout"], side["relative_speed"]) == (None, None, None) for side in cannot)
    assert " % longer than meshwright" in str(answer["sides"][-4]["reasons"])


def test_compare_lists_what_a_framework_refuses_last(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engines", "automodel,deepspeed", "--json")
    before = meshwright(*words).json["sides"]
    assert [side["name"] for side in before] == ["automodel", "deepspeed"]
    assert before[0]["contract"] == before[1]["contract"]
    error = Finding("automodel.cp-packing", "error", "packed_sequence", "refused there", ())
    monkeypatch.setattr(comparison, "framework_findings", lambda theirs, *_: [error] * (theirs.name == "automodel"))
    answer = meshwright(*words).json
    side = answer["sides"][-1]
    assert (side["name"], side["ok"], side["estimate"], side["error"]) == ("automodel", False, None, "refused there")
    assert "Cannot run it: automodel" in answer["answer"]
    assert side["findings"][0]["rule"] == "automodel.cp-packing"


MEGATRON = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear \\
  --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096 \\
  --max-position-embeddings 2048 --vocab-size 128256 --micro-batch-size 1 --global-batch-size 256 --bf16 \\
  --train-iters 100 --lr 3e-4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 5 --sequence-parallel \\
  --use-distributed-optimizer --recompute-activations --data-path data/text --tokenizer-model data/tokenizer
"""


def test_import_reports_what_check_finds(meshwright: Any, tmp_path: Path) -> None:
    script, out = tmp_path / "mega.sh", tmp_path / "mine.toml"
    script.write_text(MEGATRON)
    checked = meshwright("check", str(script), "--json").json["findings"]
    ended = meshwright("import", str(script), "--out", str(out), "--json")
    assert (ended.code, ended.json["ok"], ended.json["findings"]) == (1, False, checked)
    assert {"pipeline.even-split", "megatron-lm.position-embeddings"} <= {one["rule"] for one in checked}
    assert out.exists()
    assert "was written although" in ended.json["notes"][0]
    assert ("max_position_embeddings", 2048) in [(o["key"], int(o["value"])) for o in ended.json["not_imported"][-1:]]
    fixed = MEGATRON.replace("embeddings 2048", "embeddings 8192").replace("parallel-size 5", "parallel-size 4")
    script.write_text(fixed)
    ended = meshwright("import", str(script), "--json")
    assert (ended.code, ended.json["ok"]) == (0, True)
    assert "max_position_embeddings" not in str(ended.json["not_imported"])


@pytest.mark.parametrize(
    ("batch", "step", "divided"),
    [(512, 80, 480), (4096, 80, 3840), (256, 80, 240), (512, 64, 512), (400, 80, 400), (64, 80, 64), (100, 96, 96)],
)
def test_a_batch_that_divides(batch: int, step: int, divided: int) -> None:
    assert divided_batch(batch, step) == divided


def test_a_suggested_batch_needs_no_second_suggestion() -> None:
    gpus = "20x4xA100-80"
    plan = recommend("qwen2.5-3b", gpus, "pretrain")
    (found,) = [one for one in plan.suggestions if one.title == "scale the batch"]
    assert int(found.overrides[0].partition("=")[2]) % 80 == 0
    after = recommend("qwen2.5-3b", gpus, "pretrain", overrides=list(found.overrides))
    assert after.ok
    assert not [one for one in after.suggestions if "batch" in one.title]


def test_a_batch_for_a_budget_divides_by_the_gpus(meshwright: Any) -> None:
    words = ("recommend", "qwen2.5-3b", "--gpus", "20x4xA100-80", "--goal", "pretrain", "--tokens", "1T", "--json")
    (note,) = [one for one in meshwright(*words).json["budget"]["notes"] if "is small for" in one]
    assert int(re.findall(r"train.global_batch_size=(\d+)", note)[0]) % 80 == 0


SFT70 = """\
name = "sft70"
model = "llama3_70b"
goal = "sft"
cluster = "4x8xH100"
data = {dataset = "squad", seq_length = 8192, packing = true}
train = {global_batch_size = 8, steps = 1000, per_token_loss = true}
optimizer = {lr = 5e-06}
schedule = {min_lr = 0.0}
layout = {tp = 2, cp = 2, sp = true, recompute = "selective"}
"""


def test_the_fix_of_a_refused_job_can_be_pasted(meshwright: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "sft70.toml"
    recipe.write_text(SFT70)
    words = ("launch", str(recipe), "--to", "automodel", "--scheduler", "slurm", "--overwrite")
    refused = meshwright(*words, "--write", str(tmp_path / "job"), "--json")
    assert refused.code == 1
    assert [one["rule"] for one in refused.json["error"]["findings"] if one["severity"] == "error"] == [
        "automodel.cp-packing"
    ]
    (fix,) = refused.json["error"]["fix"]
    assert all("=" in word and ":" not in word for word in fix.split())
    for change in (fix, "data.packing=false"):
        given = meshwright(*words, "--write", str(tmp_path / "job"), *change.split(), "--json")
        assert given.code == 0, given.err
        changed = "changed: data.packing True → False (contract): a new experiment" in given.json["notes"]
        assert changed == (change == "data.packing=false")


@pytest.mark.parametrize(
    ("to", "fix", "ours"),
    [
        ("automodel", "packed_sequence.packed_sequence_size: 0", "data.packing=false"),
        ("megatron-lm", "--global-batch-size 512", "train.global_batch_size=512"),
        ("megatron-lm", "remove --sequence-parallel", "layout.sp=false"),
        ("megatron-lm", "export CUDA_DEVICE_MAX_CONNECTIONS=1", ""),
    ],
)
def test_a_fix_of_a_framework_in_our_keys(to: str, fix: str, ours: str, tmp_path: Path) -> None:
    recipe = tmp_path / "sft70.toml"
    recipe.write_text(SFT70)
    exported = export(str(recipe), to, overrides=["layout.cp=1", "layout.pp=2"])
    checked, (name, text) = exported.checked, next(iter(exported.written.files.items()))
    finding = Finding("any.rule", "error", "any", "a message", (fix,))
    theirs = frameworks.framework(to)
    found = frameworks.in_our_keys(theirs, frameworks.content_of(text, name), finding, checked.model, checked.cluster)
    assert found.fix[-1:] == ((ours,) if ours else ())
    assert (fix in found.no_fix) == (not ours)


@pytest.mark.parametrize("priced", [True, False])
def test_engines_are_compared_by_cost_where_the_cluster_has_a_price(meshwright: Any, h100: str, priced: bool) -> None:
    if priced:
        Path(h100).write_text(Path(h100).read_text() + 'price = 2.1\ncurrency = "USD"\n')
    words = ("llama3-8b", "--gpus", h100, "--goal", "pretrain", "train.steps=5000")
    answer = meshwright("compare", *words, "--engines", "megatron,torchtitan", "--json").json
    for side in answer["sides"]:
        plan = meshwright("recommend", *words, "--engine", side["engine"], "--price", "2.1USD", "--json")
        cost = f"cost {plan.json['budget']['cost']:,.0f} USD"
        assert any(cost in one for one in side["reasons"]) == priced


def test_models_on_a_cluster_with_a_price_are_compared_by_cost(meshwright: Any, h100: str) -> None:
    words = ("compare", "llama3-8b", "qwen3-14b", "--gpus", h100, "--goal", "pretrain", "train.steps=5000", "--json")
    assert not any("take" in text for side in meshwright(*words).json["sides"] for text in side["reasons"])
    Path(h100).write_text(Path(h100).read_text() + 'price = 2.1\ncurrency = "USD"\n')
    for side in meshwright(*words).json["sides"]:
        size = side["contract"]["global_batch_size"] * side["contract"]["seq_length"]
        text = next(text for text in side["reasons"] if "USD" in text)
        assert text.startswith(f"5,000 steps of {size:,} tokens take ")


def test_tokens_of_models_with_other_batches_are_planned_one_by_one(meshwright: Any, h100: str) -> None:
    words = ("--gpus", h100, "--goal", "pretrain")
    one = meshwright("compare", "llama3-8b", *words, "--tokens", "120B")
    assert "fix:   train.steps=" in one.err
    found = meshwright("compare", "llama3-8b", "qwen3-14b", *words, "--tokens", "120B")
    assert "fix:   train.steps=" not in found.err
    fix = found.err.partition("fix:   ")[2].splitlines()[0].split(" | ")
    assert [line.split()[:3] for line in fix] == [["meshwright", "recommend", m] for m in ("llama3-8b", "qwen3-14b")]
    assert meshwright(*shlex.split(fix[1])[1:]).code == 0


ARGUMENTS = """\
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --micro-batch-size 1
--global-batch-size 128 --train-iters 1000 --lr 3e-4 --bf16 --use-distributed-optimizer --vocab-size 128256
--tokenizer-type NullTokenizer --save /ckpt --save-interval 100
"""


def test_differences_name_what_the_training_uses(meshwright: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "a.sh", tmp_path / "b.sh"
    first.write_text(ARGUMENTS + "--data-path 0.7 /d/web 0.3 /d/code\n")
    second.write_text(ARGUMENTS + "--data-path /d/web --save-retain-interval 500\n")
    answer = meshwright("compare", str(first), str(second), "--gpus", "8xH100", "--json").json
    found = {one["field"]: one["values"] for one in answer["differences"]}
    assert found["data.dataset"] == ["the blend", "/d/web"]
    assert found["checkpoint.keep"] == ["all", 1]


def test_a_plan_for_an_engine_without_the_model_says_so_first(meshwright: Any) -> None:
    typed = ("recommend", "qwen2.5-32b", "--gpus", "16xH100", "--goal", "pretrain", "--engine")
    first = meshwright(*typed, "torchtitan", "--json").json["notes"][0]
    assert first.startswith("the plan is for torchtitan, but there is no command for it: torchtitan has no model of")
    assert "notes" not in meshwright(*typed, "megatron", "--json").json


def test_targets_on_other_numbers_of_gpus_are_compared_by_the_speed_of_all(meshwright: Any, tmp_path: Path) -> None:
    """The answer named the slower GPUs as faster, by the tokens of one GPU."""
    paths = [tmp_path / "many.toml", tmp_path / "few.toml"]
    for path, gpus in zip(paths, ("8x8xH100", "2x8xB200"), strict=True):
        path.write_text(f'model = "llama2_7b"\ngoal = "pretrain"\ncluster = "{gpus}"\n[train]\nsteps = 1000\n')
    found = meshwright("compare", *map(str, paths), "--json").json
    many, few = (side["estimate"]["tokens_per_s_per_gpu"] for side in found["sides"])
    assert few > many
    assert re.search(rf"{many * 64:,.0f} tokens/s on 64 GPUs, {many:,.0f} each, \d+% faster than", found["answer"])
    assert f"({few * 16:,.0f} tokens/s on 16 GPUs, {few:,.0f} each)" in found["answer"]
