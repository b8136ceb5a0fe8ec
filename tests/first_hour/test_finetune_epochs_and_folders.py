"""The last step of epochs, folders with tokenizers, words of other trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError

PRETRAIN = "qwen3_600m_pretrain_config"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with five documents, 30 samples of 64 bytes."""
    rows = [{"text": " ".join(f"word {i} {j}" for j in range(40))} for i in range(5)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_last_step_of_pretraining_epochs_is_averaged_over_its_real_samples(here: Path, meshwright: Any) -> None:
    """The 30 samples have the same mean loss in one step of 32, two of them padding, as in 30 / 5 steps."""
    words = ("train", PRETRAIN, "--tiny", "--dataset", "texts.jsonl", "train.epochs=1", "optimizer.lr=1e-9", "--json")
    sizes = ("layout.micro_batch_size=1", "train.global_batch_size={}")
    padded, full = (meshwright(*words, *(one.format(batch) for one in sizes)).json for batch in (32, 5))
    assert (len(padded["losses"]), len(full["losses"])) == (1, 6)
    assert padded["losses"][0] == pytest.approx(sum(full["losses"]) / 6, rel=1e-4)
    assert padded["grad_norms"][0] == pytest.approx(max(full["grad_norms"]), rel=0.1)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def model(here: Path) -> Path:
    """A small model folder with weights and a tokenizer."""
    from meshwright.engine.model.build import transformers_config
    from meshwright.engine.tiny_folder import write_tiny_folder

    return write_tiny_folder(transformers_config(LLAMA), here / "mymodel", 0)


def test_a_pretrained_model_has_the_tokenizer_of_its_data(here: Path, model: Path, meshwright: Any) -> None:
    sizes = ("train.steps=2", "train.global_batch_size=4", "data.seq_length=64", "precision.compute=fp32")
    trained = meshwright("train", "mymodel", "--goal", "pretrain", "--dataset", "texts.jsonl", *sizes, "--out", "run")
    assert trained.code == 0, trained.err
    files = {"tokenizer.json", "tokenizer_config.json"}
    assert files <= {path.name for path in (here / "run" / "model").iterdir()}
    for path in ("run", "run/model"):
        answer = meshwright("evaluate", path, "--dataset", "texts.jsonl", "--samples", "4", "--json")
        assert answer.json["samples"] == 4, answer.err
    assert meshwright("generate", "run", "word", "--max-tokens", "2", "--json").json["prompt_tokens"] > 0
    # Of a folder without tokenizer files, transformers makes an empty tokenizer for some model types.
    for name in (*files, "chat_template.jinja"):
        (here / "run" / "model" / name).unlink()
    config = here / "run" / "model" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"qwen2"').replace("LlamaFor", "Qwen2For"))
    for words in (("generate", "run/model", "word"), ("evaluate", "run/model", "--dataset", "texts.jsonl")):
        refused = meshwright(*words)
        assert refused.code == 2
        assert "error: source=run/model: the model has no tokenizer" in refused.err
        assert len(refused.err.splitlines()) <= 3


def test_a_path_inside_a_run_means_the_run(here: Path, model: Path, meshwright: Any) -> None:
    saved = here / "sft3" / "checkpoints" / "step-00000002"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (saved.parent / "latest").write_text("step-00000002")
    words = ("train", "mymodel", "--goal", "pretrain", "--dataset", "texts.jsonl")
    for option in ("--resume_from_checkpoint", "--resume-from-checkpoint", "--resume", "--checkpoint-dir"):
        for path in ("sft3/checkpoints/latest", "sft3/checkpoints/step-00000002/", "sft3/checkpoints", "sft3"):
            refused = meshwright(*words, option, path)
            assert "--out sft3." in refused.err, refused.err
            assert "note:" not in refused.err  # of a plan that nobody asked for
    for path in ("sft3/checkpoints/latest", "sft3/checkpoints/step-00000002", "sft3/checkpoints"):
        for command in (words, ("launch", PRETRAIN, "--scheduler", "slurm")):
            refused = meshwright(*command, "--out", path)
            assert refused.code == 2
            assert f"error: --out={path}: is inside the run sft3; train resumes from the latest" in refused.err
            assert "fix:   --out sft3 | --out NEW_FOLDER" in refused.err
    assert not (saved / "checkpoints").exists()


def test_a_run_on_the_cpu_says_so(model: Path, meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.engine import train
    from meshwright.notes import print_once

    def ended(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    print_once.cache_clear()
    monkeypatch.setattr(train, "train", ended)
    monkeypatch.setattr("meshwright.api.training._has_gpu", lambda: False)
    printed = meshwright("train", "mymodel", "--goal", "sft", "--dataset", "mock").err
    assert "--gpus" not in printed  # train has no such option
    assert "(settings for this GPU; this machine has none, so the run is on its CPU)" in printed


def test_continued_pretraining_starts_from_the_weights(here: Path, model: Path, meshwright: Any) -> None:
    for goal in ("cpt", "continued-pretraining"):
        answer = meshwright("recommend", "mymodel", "--gpus", "1xH100", "--goal", goal, "--json").json
        command = answer["commands"]["meshwright"]
        assert f"checkpoint.pretrained={model}" in command
        assert "--dataset DATA " in command  # random data would spoil the weights
        found = {one["rule"]: one["fix"] for one in answer["findings"]}
        assert "optimizer.lr=3e-05" in str(found["learning_rate.continued-pretraining"])
    words = (
        "recommend",
        "qwen3-0.6b",
        "--gpus",
        "1xH100",
        "--goal",
        "cpt",
        "--dataset",
        "texts.jsonl",
        "optimizer.lr=1e-5",
    )
    answer = meshwright(*words, "--json").json
    assert "checkpoint.pretrained=Qwen/Qwen3-0.6B" in answer["commands"]["meshwright"]
    assert "--dataset texts.jsonl " in answer["commands"]["meshwright"]
    assert not any(one["rule"].startswith("learning_rate.") for one in answer["findings"])
    other = meshwright(*words, "checkpoint.pretrained=./mine", "--json").json
    assert "checkpoint.pretrained=./mine" in other["commands"]["meshwright"]
    sizes = ("train.steps=1", "train.global_batch_size=2", "data.seq_length=64", "precision.compute=fp32")
    run = meshwright("train", "mymodel", "--goal", "cpt", "--dataset", "texts.jsonl", *sizes, "--out", "run")
    assert f"loading the weights: {model}" in run.err
    assert "random weights" not in run.err
    (here / "bare").mkdir()
    (here / "bare" / "config.json").write_text((model / "config.json").read_text())
    refused = meshwright("recommend", "./bare", "--gpus", "1xH100", "--goal", "cpt")
    assert refused.code == 2
    assert "bare has no weights to start from" in refused.err


def test_unused_columns_and_truncated_rows_are_named(here: Path, model: Path, meshwright: Any) -> None:
    from meshwright.notes import print_once

    rows = [{"question": f"what is {i}?", "answer": "it is " * 12, "reasoning": "so", "id": i} for i in range(8)]
    (here / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("train", "mymodel", "--goal", "sft", "--dataset", "qa.jsonl", "train.steps=1", "train.global_batch_size=2")
    unused = "note: qa.jsonl: columns id, reasoning are not used"
    for more in ((), ("data.streaming=true", "data.packing=false")):
        print_once.cache_clear()
        answer = meshwright(*words, "--tiny", *more)
        assert answer.code == 0, answer.err
        assert answer.err.count(unused) == 1
        cut = "warning: qa.jsonl: of 8 conversations 8 are truncated: they are longer than data.seq_length=64"
        assert (f"{cut}; data.seq_length=128 fits all" in answer.err) == (not more)
    answer = meshwright(*words, "--tiny", "data.seq_length=128")
    assert "truncated" not in answer.err


def test_compiling_on_a_cpu_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.engine import cpu_speed
    from meshwright.recipes import load, overrides

    compiled, eager = (overrides.apply(load(PRETRAIN), [f"kernels.compile={value}"]) for value in ("true", "false"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "faster: kernels.compile=false" in cpu_speed.compile_warning(compiled)
    assert cpu_speed.compile_warning(eager) == ""
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        cpu_speed.compile_warning(compiled)


def test_a_run_of_seconds_shows_its_checkpoint_not_its_goodput(meshwright: Any) -> None:
    words = ("recommend", "qwen3-8b", "--gpus", "8xH100", "--goal", "sft")
    short = meshwright(*words, "--tokens", "2M").out
    assert "goodput" not in short
    assert "of it for the checkpoint at the end" in short
    assert "goodput 9" in meshwright(*words, "--tokens", "2B").out


@pytest.mark.parametrize(("step_s", "reported"), [(0.1, False), (10.0, True)])
def test_jitter_of_short_steps_is_no_slowdown(meshwright: Any, tmp_path: Path, step_s: float, reported: bool) -> None:
    """60 steps, of which the last 30 take 30 % longer: 1 second lost on a CPU, or 90."""
    times = [step_s * (1.3 if i > 30 else 1) * (1 + i % 3 / 100) for i in range(1, 61)]
    lines = [
        f"step {i}/60  loss {6 - i / 100:.4f}  lr 1.00e-03  grad norm 1.0  tokens/s/rank {30_000 / one:,.0f}  "
        f"step time {one:.4g} s  memory 0.4 GiB"
        for i, one in enumerate(times, 1)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    answer = meshwright("doctor", str(tmp_path / "train.log"), "--json").json
    assert any(one["rule"].startswith("speed.s") for one in answer["findings"]) == reported


def test_words_that_repeat_the_goal_are_accepted(meshwright: Any) -> None:
    from meshwright.notes import print_once

    print_once.cache_clear()
    words = ("recommend", "llama3.2-1b", "--gpus", "1xRTX4090", "--goal", "qlora")
    answer = meshwright(*words, "load_in_4bit=true")
    assert answer.code == 0, answer.err
    assert "note: load_in_4bit=true is what --goal qlora means" in answer.err
    option = meshwright(*words, "--load_in_4bit")
    assert "--goal qlora says it already" in option.err
    assert "write --goal qlora" in meshwright(*words[:-1], "lora", "load_in_4bit=true").err


def test_python_lists_all_wrong_parameters() -> None:
    import meshwright as package

    with pytest.raises(InputError) as raised:
        package.recommend("qwen3-0.6b", gpus="1xH100", goal="sft", lr=1e-4, seq_len=128, micro_batch_size=2)  # type: ignore[call-arg]
    error = raised.value
    assert all(name in str(error) for name in ("lr=0.0001", "seq_len", "micro_batch_size"))
    assert list(error.fix) == ['seq=128, overrides={"optimizer.lr": 0.0001, "layout.micro_batch_size": 2}']
    with pytest.raises(InputError, match="nor num_epochs"):
        package.train("qwen3_600m_sft_config", learning_rate=1e-4, num_epochs=3)  # type: ignore[call-arg]


def test_shares_of_an_epoch_follow_from_the_rows(here: Path, model: Path, meshwright: Any) -> None:
    rows = [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(80)]
    (here / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ("--dataset", "qa.jsonl", "train.epochs=3", "data.packing=false", "train.global_batch_size=8")
    for target in (("mymodel", "--goal", "sft"), ("qwen3_600m_sft_config",)):
        for typed, fix in (
            ("eval_strategy=epoch", "train.eval_every=9 data.validation_part=0.1"),
            ("evals_per_epoch=3", "train.eval_every=3 data.validation_part=0.1"),
            ("save_strategy=epoch", "checkpoint.save_every=10"),
            ("warmup_ratio=0.1", "schedule.warmup_steps=3"),
        ):
            refused = meshwright("train", *target, *more, typed)
            assert f"use {fix}" in refused.err.replace("fix:   ", "use "), refused.err
    packed = (*more[:3], "data.packing=true", "data.seq_length=64", "train.global_batch_size=2")
    steps = 3 * math.ceil((here / "qa.jsonl").stat().st_size / 4 / 64) / 2
    about = meshwright("recommend", "qwen3_600m_sft_config", "--gpus", "1xRTX4090", *packed, "warmup_ratio=0.1")
    assert f"(0.1 of about {math.ceil(steps)} steps of train.epochs=3)" in about.err
    assert f"fix:   schedule.warmup_steps={round(0.1 * math.ceil(steps))}\n" in about.err  # not the recipe's own 50
    unknown = meshwright("check", "qwen3_600m_sft_config", "--gpus", "1xH100", "eval_strategy=epoch")
    assert "the steps of an epoch follow from the data" in unknown.err
