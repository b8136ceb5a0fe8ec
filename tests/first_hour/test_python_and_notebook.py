"""The first hour in Python, a notebook and the web UI: results print readably, guessed parameters are explained."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_compare_runs import DATA, falling, write_run

import meshwright as mw
from meshwright import display
from meshwright.api.verbs import VERBS, verbs_on

RECIPE = "llama3_8b_sft_config"
QUESTION = ("llama3-8b", "8xH100", "sft")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "slow", falling(24), "optimizer.lr=1e-4", DATA, validation=[5.9, 5.3, 5.4])
    write_run(tmp_path / "fast", falling(24, end=4.0), "optimizer.lr=3e-4", DATA, validation=[5.8, 5.1, 5.2])
    return "slow", "fast"


def test_compared_runs_have_sides_ranks_and_an_answer(runs: tuple[str, str]) -> None:
    found = mw.compare("slow", ["fast"])
    assert [one.name for one in found.sides] == ["slow", "fast"]
    assert [one.name for one in found.ranked] == ["fast", "slow"]
    assert found.ranked[0].figures.best_validation_loss == 5.1
    assert "fast has the lowest validation loss" in found.answer
    for text in (str(found), repr(found), found._repr_html_()):
        assert "fast has the lowest validation loss" in text
        assert "optimizer.lr" in text
        assert "ComparedRun(" not in text
    assert "Best validation loss" in str(found.ranked[0])
    plain = mw.to_dict(found)
    assert [one["rank"] for one in plain["runs"]] == [2, 1]


def test_runs_that_cannot_be_ranked_say_why(tmp_path: Path, runs: tuple[str, str]) -> None:
    write_run(tmp_path / "other", falling(24), "data.dataset=other.jsonl")
    found = mw.compare("slow", ["other"])
    assert len(found.sides) == 2
    assert found.ranked == ()
    assert "not ranked" in str(found)


def results() -> dict[str, Any]:
    return {
        "recipe": mw.recipe(RECIPE),
        "compare": mw.compare(RECIPE, ["llama3_8b_pretrain_config"]),
        "explain": mw.explain("layout.tp"),
        "export": mw.export("llama3_8b_pretrain_config", "torchtitan"),
        "model": mw.find_model("llama3-8b"),
        "recipes": mw.find_recipes("llama3"),
        "gpus": mw.list_gpus(),
        "models": mw.list_models(),
        "rules": mw.list_rules("heads"),
        "cluster": mw.cluster("8xH100"),
        "launch": mw.launch_job(RECIPE, "slurm", gpus="2x8xH100"),
    }


def test_every_result_prints_without_raw_structs() -> None:
    for name, result in results().items():
        for text in (str(result), repr(result)):
            assert text, name
            assert "(name=" not in text, name
            assert "<function" not in text, name
            assert " object at 0x" not in text, name
        assert result._repr_html_().startswith("<table"), name
    for verb in verbs_on("cli"):
        names = str(verb.handler.handle.__annotations__["return"])
        if not names.startswith("list["):  # lists are tables, tested above
            for name in names.split(" | "):
                found = getattr(import_module(verb.handler.__module__), name, None) or verb.response
                assert issubclass(found, display.Readable), (verb.name, name)


def test_lists_are_lists_and_tables() -> None:
    found = mw.list_models("llama3")
    assert isinstance(found, list)
    assert repr(found).splitlines()[0].split()[0] == "model"
    assert len(repr(found[:2]).splitlines()) == 3
    assert repr(found[0]).startswith("<ModelSpec ")
    assert "\n" not in repr(list(found))
    assert [one["name"] for one in mw.to_dict(found)["models"]] == [one.name for one in found]


@pytest.mark.parametrize(
    ("guess", "value", "meant"),
    [
        ("seq_len", 4096, "seq=4096"),
        ("max_seq_length", 4096, "seq=4096"),
        ("num_gpus", 8, "gpus=8"),
        ("cluster", "8xH100", 'gpus="8xH100"'),
        ("task", "sft", 'goal="sft"'),
        ("lr", 1e-4, 'overrides={"optimizer.lr": 0.0001}'),
        ("tensor_parallel", 2, 'overrides={"layout.tp": 2}'),
        ("gradient_checkpointing", True, 'overrides={"layout.recompute": "full"}'),
        ("use_lora", True, 'goal="lora"'),
        ("override", ["layout.tp=2"], "overrides"),
        ("tokenz", "1B", "tokens"),
        ("cost", 2.5, "price=2.5"),
    ],
)
def test_guessed_parameters_name_the_right_one(guess: str, value: Any, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        mw.recommend(*QUESTION, **{guess: value})
    assert isinstance(caught.value, mw.InputError)
    assert meant in caught.value.fix
    assert meant in str(caught.value)


def test_guesses_for_other_functions() -> None:
    guesses = [
        (lambda: mw.train(RECIPE, lr=1e-4), 'overrides={"optimizer.lr": 0.0001}'),  # type: ignore[call-arg]
        (lambda: mw.train(RECIPE, output_dir="x"), 'out="x"'),  # type: ignore[call-arg]
        (lambda: mw.find_recipes(model="llama3"), 'query="llama3"'),  # type: ignore[call-arg]
        (lambda: mw.diagnose(log="x.log"), 'run="x.log"'),  # type: ignore[call-arg]
        (lambda: mw.launch_job(RECIPE), "scheduler='torchrun'"),  # type: ignore[call-arg]
        (lambda: mw.recommend(), "model='llama3-8b', gpus='8xH100', goal='pretrain'"),  # type: ignore[call-arg]
    ]
    for call, meant in guesses:
        with pytest.raises(TypeError) as caught:
            call()
        assert meant in caught.value.fix  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"recommend\(\) got gpus twice"):
        mw.recommend(*QUESTION, gpus="8xH100")  # type: ignore[misc]
    assert mw.list_gpus("H200")[0].name == "H200"


def test_guesses_over_http_name_the_right_argument() -> None:
    from meshwright.api.inputs import read

    arguments = {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"}
    for guess, value, meant in (("seq_len", 4096, "seq: 4096"), ("lr", 1e-4, 'overrides: ["optimizer.lr=0.0001"]')):
        with pytest.raises(mw.InputError) as caught:
            read(VERBS["recommend"].request, {**arguments, guess: value}, "http")
        assert meant in caught.value.fix


@pytest.mark.parametrize(
    ("query", "first", "without"),
    [
        ("8b", "llama3_8b", "phi4_mini_3p8b"),
        ("3b", "llama32_3b", "qwen3_30b_a3b"),
        ("1.3b", "megatron_1p3b", "llama2_13b"),
        ("0.5b", "qwen2_500m", "qwen25_1p5b"),
        ("3.8b", "phi4_mini_3p8b", "qwen3_8b"),
        ("671b", "deepseek_v3", "kimi_k2"),
        ("llama 8b", "llama3_8b", "qwen3_8b"),
        ("qwen3 a3b", "qwen3_30b_a3b", "qwen3_8b"),
    ],
)
def test_a_size_word_matches_a_size(query: str, first: str, without: str) -> None:
    found = [one.name for one in mw.list_models(query)]
    assert found[0] == first
    assert without not in found


def test_the_list_of_models_shows_kind_and_recipes(meshwright: Any) -> None:
    found = {one["name"]: one for one in meshwright("models", "llama", "--json").json["models"]}
    assert list(found)[-1] == "tinyllama_1p1b"
    assert found["llama3_8b"]["recipes"] == ["pretrain", "sft", "peft"]
    assert found["llama32_1b"]["recipes"] == []
    assert mw.to_dict(mw.list_models("qwen3_vl_30b"))["models"][0]["architecture"] == "MoE, vision"
    assert "pretrain sft peft" in meshwright("models", "llama3_8b").out


def test_a_price_has_its_unit(meshwright: Any) -> None:
    words = ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--tokens", "1B")
    assert "at 2.1 EUR per GPU-hour: cost " in meshwright(*words, "--price", "2.10EUR").out
    assert "per GPU-hour" in meshwright(*words, "--price", "cheap").err
    assert "one GPU for one hour" in meshwright("recommend", "--help").out.replace("\n", " ")


def test_several_words_of_a_search_are_quoted(meshwright: Any) -> None:
    assert "meshwright models 'llama 8b'" in meshwright("models", "llama", "8b").err
