"""Scripts of Megatron-DeepSpeed: the flags, and the DeepSpeed config that the script names, writes or fills in."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright

CONFIG = """{
  "train_batch_size": GBS,
  "train_micro_batch_size_per_gpu": MBS,
  "zero_optimization": {"stage": STAGE},
  "bf16": {"enabled": true}
}
"""
SED = 'sed "s/GBS/$GBS/" template.json | sed -e "s/MBS/$MBS/" -e "s#STAGE#${ZERO}#" > $CONFIG_JSON\n'
HERE = (
    "cat <<EOT > $CONFIG_JSON\n"
    + CONFIG.replace("GBS", "$GBS").replace("MBS", "$MBS").replace("STAGE", "$ZERO")
    + "EOT\n"
)
SCRIPT = """#!/bin/bash
TP=2
PP=2
GBS=64
MBS=2
ZERO=1
CONFIG_JSON=ds_config_gbs${GBS}_$(date +%F).json
@WRITTEN
ds_args="--deepspeed --deepspeed_config ${CONFIG_JSON} --zero-stage $ZERO"
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-key-value-heads 8 \\
    --ffn-hidden-size 11008 --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size $MBS --global-batch-size $GBS --train-samples 1000000 --train-tokens 1000000000 \\
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-tokens 100000000 \\
    --data-path data/pile_text_document --data-impl mmap --vocab-file vocab.json --merge-file merges.txt \\
    --split 949,50,1 --save ckpt --save-interval 100 --bf16 --checkpoint-activations --swiglu \\
    --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear \\
    --deepspeed-activation-checkpointing --untie-embeddings-and-output-weights $ds_args
"""


def _check(folder: Path, *changes: tuple[str, str], written: str = HERE) -> meshwright.CheckResult:
    text = SCRIPT.replace("@WRITTEN\n", written)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "template.json").write_text(CONFIG)
    (folder / "train.sh").write_text(text)
    return meshwright.check(str(folder / "train.sh"), gpus="2x8xA100-80")


def _errors(result: meshwright.CheckResult) -> list[str]:
    return [one.rule for one in result.findings if one.severity == "error"]


@pytest.mark.parametrize("written", [HERE, SED])
def test_both_halves_are_read(tmp_path: Path, written: str) -> None:
    result = _check(tmp_path, written=written)
    assert result.framework == "megatron-deepspeed"
    assert _errors(result) == []
    assert result.model is not None
    assert result.model.num_layers == 32
    recipe = result.recipe
    assert (recipe.layout.strategy, recipe.layout.tp, recipe.layout.pp, recipe.layout.recompute) == (
        "zero1", 2, 2, "full",
    )  # fmt: skip
    assert recipe.train.steps == 1_000_000_000 // (64 * 2048)
    assert recipe.schedule.warmup_steps == 100_000_000 // (64 * 2048)
    assert result.estimate is not None


DEFECTS = {
    "megatron-deepspeed.sharded-pipeline": (("ZERO=1", "ZERO=2"),),
    "megatron-deepspeed.stages-without-pipeline": (("--bf16", "--bf16 --no-pipeline-parallel"),),
    "megatron-deepspeed.batch-arithmetic": (("GBS=64", "GBS=62"),),
    "megatron-deepspeed.batch-sizes": (("--micro-batch-size $MBS", "--micro-batch-size 4"),),
    "megatron-deepspeed.precision": (('"bf16": {"enabled": true}', '"bf16": {"enabled": false}'),),
    "megatron-deepspeed.no-config": (("--deepspeed_config ${CONFIG_JSON}", ""),),
    "megatron-deepspeed.config": (('"stage": $ZERO}', '"stage": $ZERO'),),
    "megatron-deepspeed.missing": (("--seq-length 2048", ""),),
    "megatron-deepspeed.learning-rates": (("--min-lr 3e-5", "--min-lr 3e-3"),),
    "key.unknown": (("--zero-stage", "--zero-stagee"),),
    "value.invalid": (("--normalization rmsnorm", "--normalization RMSNorm"),),
}


@pytest.mark.parametrize("rule", DEFECTS)
def test_a_defect_is_found(tmp_path: Path, rule: str) -> None:
    assert rule in _errors(_check(tmp_path, *DEFECTS[rule]))


def test_heads_must_divide_and_layers_need_not(tmp_path: Path) -> None:
    assert _errors(_check(tmp_path, ("TP=2", "TP=3")))
    assert not _errors(_check(tmp_path, ("--num-layers 32", "--num-layers 33")))  # DeepSpeed balances the stages


def test_a_dash_for_an_underscore_is_named(tmp_path: Path) -> None:
    found = _check(tmp_path, ("--deepspeed_config", "--deepspeed-config")).findings
    assert any("it is written --deepspeed_config" in one.message for one in found)


def test_one_stage_needs_the_flag_with_zero_2(tmp_path: Path) -> None:
    changes = (("PP=2", "PP=1"), ("ZERO=1", "ZERO=2"))
    found = [one for one in _check(tmp_path, *changes).findings if one.severity == "error"]
    assert [one.rule for one in found] == ["megatron-deepspeed.sharded-pipeline"]
    assert found[0].fix == ("--no-pipeline-parallel",)
    assert _errors(_check(tmp_path, *changes, ("--bf16", "--bf16 --no-pipeline-parallel"))) == []


def test_the_flag_and_the_config_have_one_stage(tmp_path: Path) -> None:
    found = _check(tmp_path, ("--zero-stage $ZERO", "--zero-stage 0")).findings
    assert any(one.rule == "megatron-deepspeed.zero-stage" and one.severity == "warning" for one in found)


def test_experts_are_a_list(tmp_path: Path) -> None:
    moe = "--num-experts 64 --expert-interval 2 --moe-expert-parallel-size 4 --topk 1 --bf16"
    small = ("--hidden-size 4096", "--hidden-size 1024"), ("--ffn-hidden-size 11008", "--ffn-hidden-size 2816")
    changes = (("PP=2", "PP=1"), ("TP=2", "TP=1"), ("GBS=64", "GBS=256"), ("--bf16", moe), *small)
    result = _check(tmp_path, *changes)
    assert _errors(result) == []
    assert result.model is not None
    assert result.model.moe is not None
    pyramid = _check(tmp_path, *changes, ("--num-experts 64", "--num-experts 32 64"))
    assert "megatron-deepspeed.expert-list" in _errors(pyramid)


def test_a_placeholder_is_read(tmp_path: Path) -> None:
    result = _check(
        tmp_path, ("PP=2\n", "PP=2\nDATA=<Specify path and file prefix>_text\n"), ("data/pile_text_document", "$DATA")
    )
    assert _errors(result) == []


def test_a_value_known_at_run_time_is_no_error(tmp_path: Path) -> None:
    result = _check(tmp_path, ("MBS=2", "MBS=$(pick_micro_batch)"))
    assert _errors(result) == []


@pytest.mark.parametrize("name", ["deepspeed", "megatron-lm", "megatron-deepspeed"])
def test_one_half_is_not_read_alone(tmp_path: Path, name: str) -> None:
    _check(tmp_path, ("ZERO=1", "ZERO=2"))
    result = meshwright.check(str(tmp_path / "train.sh"), framework=name)
    assert result.framework == "megatron-deepspeed"
    assert _errors(result) == ["megatron-deepspeed.sharded-pipeline"]


def test_one_finding_on_a_batch_that_flags_and_config_share(tmp_path: Path) -> None:
    found = [one for one in _check(tmp_path, ("GBS=64", "GBS=60")).findings if one.severity == "error"]
    assert [one.rule for one in found] == ["megatron-deepspeed.batch-arithmetic"]
    assert found[0].fix == ("--global-batch-size 56", '"train_batch_size": 56')
