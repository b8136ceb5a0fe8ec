"""Every suggested fix of a seeded set of mistakes is applied: the next answer must accept it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .mistakes import Result, call, generated, try_mistake, with_overrides

SEED = 14


def report(result: Result) -> str:
    return f"{len(result.refused)} of {result.fixes} fixes are refused:\n" + "\n".join(result.refused[:20])


@pytest.mark.parametrize(("kind", "count"), [("typing", 4), ("typing", 12), ("fields", 3), ("fields", 12)])
def test_the_next_answer_accepts_every_fix(kind: str, count: int) -> None:
    result = Result()
    for words in generated(kind, count, SEED):
        try_mistake(words, result)
    assert result.mistakes == count
    assert result.fixes >= count // 2
    assert not result.refused, report(result)
    assert not result.prose


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("kind", "count"), [("typing", 500), ("fields", 1500), ("plans", 300)])
def test_the_next_answer_accepts_every_fix_of_the_large_set(kind: str, count: int, seed: int) -> None:
    result = Result()
    for words in generated(kind, count, seed):
        try_mistake(words, result)
    assert not result.refused, report(result)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("check", "llama3_8b_peft_config", "peft.targets=qkw"), "peft.targets=qkv"),
        (("check", "llama3_8b_peft_config", "peft.targets=nonsense"), "peft.targets=all-linear"),
        (("recommend", "llama3-8b", "--gpus", "8xH10O", "--goal", "sft"), "8xH100"),
        (("recommend", "lama3-8b", "--gpus", "8xH100", "--goal", "sft"), "llama3_8b"),
        (("check", "llama3_8b_sft_confg"), "llama3_8b_sft_config"),
        (("check", "llama3_8b_sft_config", "train.lr=1e-5"), "optimizer.lr=1e-5"),
        (("check", "llama3_8b_sft_config", "data.colums.prompt=a"), "data.columns.prompt=a"),
        (("reccomend", "llama3-8b"), "recommend"),
        (("recommend", "llama3-8b", "--gppus", "8xH100"), "--gpus"),
        (("recommend", "llama3-8b", "8xH100", "--goal", "sft"), "--gpus 8xH100"),
        (("recommend", "llama3-8b", "--gpus", "8xH100", "sft"), "--goal sft"),
    ],
)
def test_a_mistyped_word_is_recognized(words: tuple[str, ...], meant: str) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert answer.error["fix"] == [meant]


@pytest.mark.parametrize(
    ("words", "not_meant"),
    [
        (("recommend", "llama3-8b", "--gpus", "1xRTX6090", "--goal", "peft"), "4090"),
        (("recommend", "llama3-9b", "--gpus", "8xH100", "--goal", "sft"), "llama3_8b"),
        (("check", "llama3_7b_sft_config"), "llama3_8b_sft_config"),
        (("check", "mixtral_8x7b_pretrain"), "llama3_8b"),
        (("check", "llama3_8b_peft_config", "peft.targets=x_proj"), "did you mean proj"),
    ],
)
def test_another_product_is_not_suggested(words: tuple[str, ...], not_meant: str) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert not_meant not in answer.error["message"].partition("known:")[0]
    assert not_meant not in " ".join(answer.error["fix"])


def test_experts_get_a_degree_that_the_ranks_have() -> None:
    answer = call("check", "qwen3_30b_a3b_pretrain_config", "--gpus", "2xH100", "layout.ep=6")
    fixes = {fix for finding in answer.findings for fix in finding["fix"] if fix.startswith("layout.ep=")}
    assert fixes == {"layout.ep=2"}


@pytest.mark.parametrize(
    ("override", "rule", "severity"),
    [
        ("optimizer.lr=30000", "learning_rate.diverges", "error"),
        ("optimizer.lr=0.5", "learning_rate.far-too-high", "warning"),
        ("optimizer.weight_decay=1e9", "ranges.weight-decay-diverges", "error"),
        ("data.seq_length=7", "ranges.short-samples", "warning"),
        ("data.temperature=1e9", "ranges.temperature", "warning"),
        ("optimizer.clip_grad=1e9", "ranges.clip-grad-high", "warning"),
    ],
)
def test_nonsense_is_more_than_advice(override: str, rule: str, severity: str) -> None:
    answer = call("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", override)
    assert {one["rule"]: one["severity"] for one in answer.findings}[rule] == severity


@pytest.mark.parametrize("override", ["schedule.warmup_steps=-1", "train.global_batch_size=0", "optimizer.beta2=1.5"])
def test_values_outside_their_range_are_errors_with_a_fix(override: str) -> None:
    answer = call("check", "llama3_8b_pretrain_config", override)
    assert answer.code == 2
    assert answer.error["fix"][0].partition("=")[0] == override.partition("=")[0]


def test_options_of_our_engine_do_not_suggest_to_drop_the_framework(tmp_path: Path) -> None:
    words = ["launch", "llama3_8b_pretrain_config", "--to", "megatron-lm", "--scheduler", "slurm", "--gpus", "8xH100"]
    answer = call(*words, "--out", str(tmp_path))
    assert answer.error["field"] == "--out"
    assert "own folder" in answer.error["message"]
    assert f"--write {tmp_path}" in " ".join(answer.error["fix"])
    assert f"--save {tmp_path}" in " ".join(answer.error["fix"])
    assert call(*words, *answer.error["fix"][0].split()).code == 0


def test_an_error_without_a_fix_says_why_and_what_else_helps() -> None:
    answer = call("check", "llama3_70b_pretrain_config", "--gpus", "1xRTX4090")
    missing = [one for one in answer.findings if one["severity"] == "error" and not one["fix"]]
    assert missing
    for one in missing:
        command = one["no_fix"].partition("(meshwright ")[2].partition(" gives")[0]
        assert call(*command.split()).json["smallest"]["gpus"] > 1


def test_sixty_gpus_get_counts_and_a_batch_that_work() -> None:
    words = ("recommend", "llama3-8b", "--goal", "sft")
    answer = call(*words, "--gpus", "60xH100")
    assert answer.code == 2
    for fix in answer.error["fix"]:
        option, _, value = fix.partition(" ")
        fixed = [option, value] if value else ["--gpus", "60xH100", fix]
        assert call(*words, *fixed).code == 0, fix


def _merge(config: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def test_a_fix_in_another_frameworks_keys_works_in_its_file(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_com": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}},
    }
    file = tmp_path / "ds_config.json"
    words = ("check", str(file), "--model", "llama3-8b", "--gpus", "8xH100")
    file.write_text(json.dumps(config, indent=1))
    before = call(*words)
    fixable = [one for one in before.findings if one["fix"]]
    assert len(fixable) >= 3
    for finding in fixable:
        changed = json.loads(json.dumps(config))
        for fix in finding["fix"]:
            _merge(changed, json.loads(f"{{{fix}}}"))
        if finding["rule"] == "key.unknown":
            del changed["zero_optimization"]["overlap_com"]
        file.write_text(json.dumps(changed, indent=1))
        after = call(*words)
        assert finding["rule"] not in {one["rule"] for one in after.findings}, finding
        assert after.errors <= before.errors, finding


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        (
            ("estimate", "llama3_8b_sft_config", "--gpus", "2xH100", "architecture.hidden=100"),
            ["architecture.hidden=128"],
        ),
        (("estimate", "llama3_8b_sft_config", "--gpus", "2xH100", "architecture.heads=7"), ["architecture.heads=8"]),
        (("check", "llama3_8b_peft_config", "peft.targets=[qkw,nonsense,fc3]"), ["peft.targets=qkv"]),
        (("check", "llama3_8b_sft_config", "data.validation_part=ten"), []),
    ],
)
def test_fixes_correct_every_wrong_part_of_a_value(words: tuple[str, ...], fixes: list[str]) -> None:
    """10 of a hundred samples is a share that no field accepts; a name like none is left out."""
    answer = call(*words)
    assert answer.code == 2
    assert [one for one in answer.error["fix"] if one != "data.validation_part=0.0"] == fixes
    for fix in fixes:
        assert call(*words[:-1], fix).code in (0, 1)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "llama3_8b_sft_config", "kernels.attention=flash"),
        ("check", "llama3_8b_sft_config", "--engine", "automodel", "kernels.overlap_param_gather=false", "layout.tp=3"),
        ("estimate", "llama3_70b_pretrain_config", "--gpus", "1xRTX4090", "architecture.head_dim=64"),
    ],
)
def test_values_that_an_engine_replaces_in_some_layouts_are_answered(words: tuple[str, ...]) -> None:
    answer = call(*words)
    assert answer.code in (0, 1)
    assert answer.findings


def test_a_model_that_a_framework_cannot_split_is_one_error_and_the_repair_resolves_it() -> None:
    words = ("check", "gpt_oss_20b_pretrain_config", "--gpus", "60xH100", "--engine", "torchtitan", "layout.cp=2")
    answer = call(*words)
    assert {"pipeline.torchtitan-models", "sequence.torchtitan-models"} <= answer.errors
    assert "engine.no-config" not in answer.errors
    assert not call(*with_overrides(words, answer.json["repair"]["overrides"])).errors


def test_a_config_that_only_the_repair_has_is_no_error_of_its_own() -> None:
    words = (
        "check",
        "nemotron_3_nano_sft_config",
        "--gpus",
        "6xH100",
        "--engine",
        "deepspeed",
        "layout.strategy=fsdp2",
    )
    assert call(*words).errors == {"batch.divides", "memory.peak", "topology.expert-mesh"}
    words = ("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--engine", "torchtitan", "train.epochs=2")
    assert "engine.no-config" in call(*words).errors


def test_an_exports_fix_that_leads_to_another_error_is_the_repair_of_all() -> None:
    words = ("export", "deepseek_v3_pretrain_config_32nodes", "--gpus", "72xGB200", "--to", "automodel")
    plan = next(one for one in call(*words).findings if one["rule"] == "automodel.expert-plan")
    assert not call(*with_overrides(words, plan["fix"])).errors


@pytest.mark.parametrize(
    "words",
    [
        ("llama3-70b", "--gpus", "8xH100", "--goal", "peft"),
        ("gemma3_1b", "--gpus", "1xRTX4090", "--goal", "pretrain", "--engine", "automodel"),
        ("nemotronh-4b", "--gpus", "2xA6000", "--goal", "pretrain", "precision.fp8_gather=false"),
        ("qwen3-30b-a3b", "--gpus", "1xH100", "--goal", "peft", "layout.defer_grad_sync=true"),
    ],
)
def test_advice_on_memory_holds_what_the_next_search_would_change(words: tuple[str, ...]) -> None:
    result = Result()
    try_mistake(["recommend", *words], result)
    assert result.fixes
    assert not result.refused, report(result)


@pytest.mark.parametrize(
    "words",
    [
        ("gemma3_1b", "--gpus", "2xH100", "--goal", "peft", "--engine", "kempnerforge", "layout.micro_batch_size=100"),
        ("gemma3_1b", "--gpus", "8xMI300X", "--goal", "pretrain", "schedule.decay_steps=1", "layout.tp=4097"),
        ("flux_12b", "--gpus", "1xH100", "--goal", "pretrain", "layout.cp=8", "train.z_loss=30000"),
    ],
)
def test_a_typed_layout_is_named_also_beside_another_mistake(words: tuple[str, ...]) -> None:
    answer = call("recommend", *words)
    assert answer.code == 1
    assert answer.errors & {"batch.divides", "topology.world"}
