"""Item 21: the field's words are understood, errors in options lead on, and our terms are explained."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as package
from meshwright.api.terms import LEGEND, TERMS
from meshwright.choices import ENGINES, FRAMEWORKS, GOALS, SCHEDULERS, SYNONYMS, UNSUPPORTED, simplified

ON_ONE = ("recommend", "llama3-8b", "--gpus", "1xH100")


@pytest.mark.parametrize(
    ("typed", "goal", "method"),
    [
        ("lora", "peft", "lora"),
        ("QLoRA", "peft", "qlora"),
        ("dora", "peft", "dora"),
        ("adapters", "peft", "lora"),
        ("full", "sft", None),
        ("fine-tune", "sft", None),
        ("finetune", "sft", None),
        ("Fine Tuning", "sft", None),
        ("full_finetune", "sft", None),
        ("instruction tuning", "sft", None),
        ("continued pretraining", "pretrain", None),
        ("cpt", "pretrain", None),
        ("pre-training", "pretrain", None),
    ],
)
def test_goals_in_the_words_of_the_field(meshwright: Any, typed: str, goal: str, method: str | None) -> None:
    command = ON_ONE if typed == "dora" else ("estimate", *ON_ONE[1:])  # which searches nothing
    answer = meshwright(*command, "--goal", typed, "--json").json
    assert answer["question"]["goal"] == goal
    assert (answer["contract"]["peft"] or {}).get("method") == method
    assert answer["notes"][0].startswith(f"--goal {typed} means {goal}: ")


def test_our_own_words_need_no_note(meshwright: Any) -> None:
    for goal in ("sft", "SFT", "pre-train"):
        assert "notes" not in meshwright(*ON_ONE, "--goal", goal, "--json").json


def test_qlora_is_planned_priced_and_written_as_such(meshwright: Any) -> None:
    lora, qlora = (meshwright(*ON_ONE, "--goal", goal, "--json").json for goal in ("lora", "qlora"))
    weights = [answer["estimate"]["memory_gib"]["weights"] for answer in (lora, qlora)]
    assert 2.5 < weights[0] / weights[1] < 4  # 4 bits and scales instead of 16, but for the embeddings
    assert "peft.method=qlora" in qlora["commands"]["meshwright"].split()
    assert "peft.method" not in lora["commands"]["meshwright"]
    shown = meshwright(*ON_ONE, "--goal", "qlora").out
    assert "Note     --goal qlora means peft: train LoRA adapters on frozen weights stored in 4 bits (NF4)" in shown
    assert "peft: qlora, rank " in shown
    assert "(NF4)" in shown.split("Train")[1].splitlines()[0]
    for command in (
        ("size", "llama3-8b", "--gpu", "RTX4090"),
        ("plan", "llama3-8b", "--gpus", "1xRTX4090"),
        ("estimate", "llama3-8b", "--gpus", "1xRTX4090", "layout.recompute=full"),
    ):
        answer = meshwright(*command, "--goal", "qlora", "--json")
        assert answer.code == 0, answer.err  # lora needs more than its 24 GiB
        assert "qlora" in answer.json["notes"][0]


def test_an_override_that_contradicts_the_goal_is_an_error(meshwright: Any) -> None:
    answer = meshwright(*ON_ONE, "--goal", "qlora", "peft.method=dora")
    assert answer.code == 2
    assert "contradicts --goal qlora" in answer.err
    assert meshwright(*ON_ONE, "--goal", "qlora", "peft.method=qlora").code == 0


@pytest.mark.parametrize("typed", ["dpo", "GRPO", "rlhf", "distillation"])
def test_goals_that_we_do_not_train_are_refused_with_the_reason(meshwright: Any, typed: str) -> None:
    answer = meshwright(*ON_ONE, "--goal", typed)
    assert answer.code == 2
    assert "next-token or denoising losses only" in answer.err


@pytest.mark.parametrize(
    ("words", "meant", "fix"),
    [
        (("--goal", "loar"), "lora", "--goal lora"),
        (("--goal", "qlroa"), "qlora", "--goal qlora"),
        (("--goal", "cptt"), "cpt", "--goal cpt"),
        (("--goal", "stf"), "sft", "--goal sft"),
        (("--goal", "pretrian"), "pretrain", "--goal pretrain"),
        (("--goal", "dop"), "dpo", "--goal sft | --goal peft"),  # which nothing here trains
        (("--goal", "sft", "--engine", "acelerate"), "accelerate", "--engine accelerate"),
        (("--goal", "sft", "--engine", "fdsp"), "fsdp", "--engine meshwright | --engine fsdp1"),
    ],
)
def test_a_mistyped_word_of_the_field_is_suggested(
    meshwright: Any, words: tuple[str, ...], meant: str, fix: str
) -> None:
    answer = meshwright(*ON_ONE, *words)
    assert answer.code == 2
    assert f"did you mean {meant}?" in answer.err
    assert f"fix:   {fix}" in answer.err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("check", "fsdp.yaml", "--framework", "hugginface"), "--framework huggingface"),
        (("launch", "llama3_8b_sft_config", "--scheduler", "sbtach"), "--scheduler sbatch"),
        (("compare", "llama3_8b_sft_config", "--engines", "titan,acelerate"), "--engines titan,accelerate"),
    ],
)
def test_every_choice_suggests_its_other_words(meshwright: Any, words: tuple[str, ...], fix: str) -> None:
    assert f"fix:   {fix}" in meshwright(*words).err


@pytest.mark.parametrize(
    ("typed", "engine"),
    [
        ("megatron-bridge", "megatron"),
        ("Megatron-LM", "megatron"),
        ("mcore", "megatron"),
        ("hf", "fsdp1"),
        ("accelerate", "fsdp1"),
        ("titan", "torchtitan"),
        ("zero3", "deepspeed"),
        ("nemo_automodel", "automodel"),
    ],
)
def test_engines_in_the_words_of_the_field(meshwright: Any, typed: str, engine: str) -> None:
    asked = ("llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engine", typed, "--json")
    answer = meshwright("recommend" if typed == "mcore" else "estimate", *asked).json
    assert answer["question"]["engine"] == engine
    assert answer["notes"][0].startswith(f"--engine {typed} means {engine}: ")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("recommend", "llama3-8b", "--gpus=8", "--goal=sft", "--engine=nemo"), ("megatron", "automodel")),
        (("recommend", "llama3-8b", "--gpus=8", "--goal=sft", "--engine=fsdp"), ("meshwright", "fsdp1")),
        (("export", "llama3_8b_sft_config", "--to=nemo"), ("megatron-bridge", "automodel")),
        (("export", "llama3_8b_sft_config", "--to=megatron"), ("megatron-lm", "megatron-bridge")),
        (("check", "llama3_8b_sft_config", "--framework=megatron"), ("megatron-lm", "megatron-bridge")),
        (("export", "llama3_8b_sft_config", "--to=torchtitn"), ("torchtitan",)),
    ],
)
def test_ambiguous_and_misspelled_words_have_did_you_mean(meshwright: Any, words: Any, near: Any) -> None:
    answer = meshwright(*words, "--json")
    assert answer.code == 2
    option = words[-1].partition("=")[0]
    assert {f"{option} {one}" for one in near} <= set(answer.json["error"]["fix"])
    assert "unknown to " not in answer.err


def test_schedulers_and_frameworks(meshwright: Any) -> None:
    job = meshwright("launch", "llama3_8b_sft_config", "--scheduler", "sbatch", "--gpus", "8xH100", "--json").json
    assert job["scheduler"] == "slurm"
    assert "--scheduler sbatch means slurm: a SLURM batch script" in job["notes"]
    answer = meshwright("export", "llama3_8b_sft_config", "--to", "hf", "--gpus", "8xH100", "--json").json
    assert answer["framework"] == "accelerate"


def test_every_synonym_names_a_choice_and_none_hides_one() -> None:
    known = {
        "goal": GOALS,
        "engine": ENGINES,
        "framework": FRAMEWORKS,
        "scheduler": SCHEDULERS,
        "dtype": ("bf16", "fp16", "fp32"),
    }
    for kind, words in SYNONYMS.items():
        assert {one.value for one in words.values()} <= set(known[kind])
        assert not {simplified(word) for word in words} & {simplified(one) for one in known[kind]}
        assert not {simplified(word) for word in words} & {simplified(one) for one in UNSUPPORTED.get(kind, ())}
        for _, instead in UNSUPPORTED.get(kind, {}).values():
            assert set(instead) <= set(known[kind])


def test_python_understands_the_same_words() -> None:
    plan = package.recommend("llama3-8b", "1xRTX4090", "qlora")
    assert (plan.question.goal, plan.recipe.peft.method) == ("peft", "qlora")


def test_a_model_may_be_typed_as_an_option(meshwright: Any) -> None:
    typed = ("--gpus", "8xH100", "--goal", "sft", "--json")
    assert (
        meshwright("recommend", "--model", "llama3-8b", *typed).json
        == meshwright("recommend", "llama3-8b", *typed).json
    )


@pytest.mark.parametrize(
    ("words", "near", "own_help"),
    [
        (("train", "r", "--dataste", "x"), "--dataset", "meshwright train --help"),
        (("recommend", "llama3-8b", "--gpu", "8xH100"), "--gpus 8xH100", "meshwright recommend --help"),
        (("train", "r", "--nproc"), "", "meshwright train --help"),
        (("web", "--prot", "80"), "--port", "meshwright web --help"),
        (("train", "r", "--lr", "1e-4"), "optimizer.lr=1e-4", "meshwright train --help"),
        (("bench", "r", "--steps=7"), "train.steps=7", "meshwright bench --help"),
        (("train", "r", "--tensor-model-parallel-size", "2"), "layout.tp=2", "meshwright train --help"),
        (("trian", "r"), "train", "meshwright --help"),
        (("finetune", "r"), "train", "meshwright --help"),
        (("frobnicate",), "", "meshwright --help"),
        (("--frob",), "", "meshwright --help"),
    ],
)
def test_option_errors_name_the_own_help_and_what_was_meant(
    meshwright: Any, words: Any, near: str, own_help: str
) -> None:
    answer = meshwright(*words)
    assert answer.code == 2
    assert f"Try '{own_help}'." in answer.err
    assert near in answer.err
    error = meshwright(*words, "--json").json["error"]
    assert error["fix"][0] == (near or own_help)


def test_a_wrong_value_names_the_own_help(meshwright: Any) -> None:
    assert "meshwright train --help" in meshwright("train", "r", "--nproc", "abc").err
    assert "meshwright train --help" in meshwright("train").err


def test_terms_are_explained_where_they_appear(meshwright: Any) -> None:
    shown = meshwright("recommend", "llama3-8b", "--gpus", "1xRTX4090", "--goal", "qlora").out
    (line,) = [one for one in shown.splitlines() if one.startswith("Terms")]
    for term in ("resized", "contract", "layout", "buffers", "overhead"):
        assert f"{term}: {LEGEND[term]}" in line
    direct = meshwright("recommend", "llama3-8b", "--gpus", "1xH100", "--goal", "lora").out
    assert "contract:" not in direct  # a term that does not appear is not explained
    step = meshwright("estimate", "qwen3_600m_pretrain_config").out
    assert ("other " in step.split("Step ")[1].splitlines()[0]) == ("other: " in step)


@pytest.mark.parametrize("term", ["contract", "derived", "other", "buffers", "overhead", "resized", "closest"])
def test_explain_knows_the_terms(meshwright: Any, term: str) -> None:
    answer = meshwright("explain", term, "--json").json
    assert (answer["kind"], answer["meaning"]) == ("term", TERMS[term])
    assert TERMS[term] in meshwright("explain", term).out


def test_explain_tells_the_kinds_of_recompute(meshwright: Any) -> None:
    shown = meshwright("explain", "recompute").out
    assert "selective (" in shown
    assert "full (" in shown
