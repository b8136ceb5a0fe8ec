"""Every suggested fix of a seeded set of mistakes is applied: the next answer must accept it."""

from __future__ import annotations

import pytest

from .mistakes import Result, call, generated, try_mistake

SEED = 14


def report(result: Result) -> str:
    return f"{len(result.refused)} of {result.fixes} fixes are refused:\n" + "\n".join(result.refused[:20])


@pytest.mark.parametrize(("kind", "count"), [("typing", 60), ("fields", 60)])
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
        (("recommend", "llama3-8b", "--gpus", "1xRTX3080", "--goal", "peft"), "4090"),
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
