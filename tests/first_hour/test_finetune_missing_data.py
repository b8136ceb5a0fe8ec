"""Data that is missing, mistyped or ignored, and messages that say why."""

from __future__ import annotations

import bz2
import json
import lzma
import random
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

import meshwright as library
from meshwright.cli import progress
from meshwright.dryrun.ranks import run_parallel

OWN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MOE_RUN = (
    *("train", "qwen3_30b_a3b_pretrain_config", "--tiny", "--dataset", "text.txt", "data.tokenizer=bytes", "--json"),
    *("train.epochs=1", "moe.balancing=aux_loss", "moe.aux_loss=0.5", "moe.router_z_loss=0.5"),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_pretraining_without_data_says_that_its_data_is_mock(here: Path, meshwright: Any) -> None:
    (here / "own").mkdir()
    (here / "own" / "config.json").write_text(json.dumps(OWN))
    words = ("train", "own", "train.steps=1", "train.global_batch_size=1", "seq_length=64")
    answer = meshwright(*words, "compute=fp32", "--goal", "pretrain", "--json", "--out", "run")
    [found] = [one for one in answer.json["findings"] if one["field"] == "data.dataset"]
    assert (found["severity"], found["fix"]) == ("warning", ["--dataset FILE_OR_FOLDER"])
    assert "this run trains on mock data (random tokens), from which the model learns nothing" in found["message"]
    assert answer.err.index("trains on mock data") < answer.err.index("step 1")
    typed = meshwright(*words, "compute=fp32", "--goal", "pretrain", "--dataset", "mock", "--out", "other")
    assert "trains on mock data" not in typed.err
    again = meshwright(*words, "compute=fp32", "--goal", "cpt", "checkpoint.pretrained=run/model", "--out", "cpt")
    assert "from which the weights of run/model get worse" in again.err, again.err


def test_balancing_losses_leave_out_the_padding_of_the_last_step_of_epochs(here: Path, meshwright: Any) -> None:
    (here / "text.txt").write_text("".join(chr(97 + (i * i * 7 + i // 3) % 26) for i in range(3 * 64 + 1)))
    norms = []
    for batch in (3, 4):  # of three samples: one of four is padding
        answer = meshwright(*MOE_RUN, f"train.global_batch_size={batch}", f"micro_batch_size={batch}")
        norms += answer.json["grad_norms"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_dry_run_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("meshwright.dryrun.ranks.TICK_S", 0.05)
    monkeypatch.setattr(progress, "LOG_FIRST_S", 0.1)

    def traced(rank: int) -> int:
        time.sleep(0.4)
        return rank

    for tasks, line in (
        ((0,), "0 s: tracing rank 0\n"),
        ((0, 1), "0 s: tracing rank 0, rank 1 (0 of 2 kinds of ranks done)\n"),
    ):
        with progress.progress_line() as show:
            assert show is not None
            assert run_parallel(traced, tasks, 2, show, lambda rank: f"rank {rank}") == list(tasks)
        written = capsys.readouterr()
        assert line in written.err
        assert written.out == ""


def test_python_names_a_checkpoint_as_the_command_line_does(here: Path, meshwright: Any) -> None:
    (here / "run" / "checkpoints").mkdir(parents=True)
    calls = {
        "generate": lambda: library.generate("run", "hi", checkpoint="best"),
        "evaluate": lambda: library.evaluate(source="run", checkpoint="best"),
        "convert": lambda: library.convert(source="run", out="out", checkpoint="best"),
    }
    for name, call in calls.items():
        with pytest.raises(library.MeshwrightError) as in_python:
            call()
        words = {"generate": ("hi",), "evaluate": (), "convert": ("out",)}[name]
        typed = meshwright(name, "run", *words, "--checkpoint", "best").err
        assert str(in_python.value).splitlines()[0] in typed
        assert f"{name} [OPTIONS] SOURCE" in meshwright(name, "--help").out


SFT, PEFT = "qwen3_600m_sft_config", "llama3_8b_peft_config"


def test_a_mistyped_setting_is_answered_with_the_one_that_works(here: Path, meshwright: Any) -> None:
    cases = {
        ("--val", "0.1"): "data.validation_part=0.1",
        ("--val-split", "10%"): "data.validation_part=0.1",
        ("val=0.2",): "data.validation_part=0.2",
        ("data.validation=0.1",): "data.validation_part=0.1",
        ("--val", "held.jsonl"): "data.validation=held.jsonl",
        ("precision=fp8",): "precision.matmul=fp8_tensor",
        ("precision=fp16",): "precision.compute=fp16",
    }
    for words, wanted in cases.items():
        refused = meshwright("train", SFT, "--tiny", *words)
        assert refused.code == 2, words
        fix = refused.err.partition("fix:   ")[2].split(" | ")[0].strip()
        assert fix == wanted
        assert meshwright("check", SFT, "--gpus", "1xH100", fix).code == 0


def test_a_rank_without_its_alpha_says_that_the_scale_changes(meshwright: Any) -> None:
    words = ("check", PEFT, "--gpus", "1xH200")
    for typed, wanted in (
        ("lora_r=64", "alpha/rank, the scale of the adapters, from 2 to 0.25; peft.alpha=128 keeps"),
        (
            "peft.rank=32 peft.method=rslora",
            "alpha/√rank, the scale of the adapters, from 5.66 to 2.83; peft.alpha=32 keeps",
        ),
    ):
        assert wanted in meshwright(*words, *typed.split()).err
    assert "the scale of the adapters" not in meshwright(*words, "peft.rank=128", "peft.alpha=64").err


def test_a_dataset_names_its_own_columns_and_the_files_next_to_it(here: Path, meshwright: Any) -> None:
    rows = [{"id": f"{i}", "antwort": f"es ist {i}", "frage, kurz": f"was ist {i}"} for i in range(8)]
    (here / "daten.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = ("train", SFT, "--tiny", "train.steps=1", "--dataset", "daten.jsonl")
    refused = meshwright(*train)
    fix = refused.err.partition("fix:   ")[2].strip()
    assert fix == "'data.columns.prompt=frage, kurz' data.columns.response=antwort"
    assert meshwright(*train, *shlex.split(fix)).code == 0
    one = meshwright(*train, "data.columns.response=antwort").err
    assert "fix:   'data.columns.prompt=frage, kurz'" in one
    checked = meshwright("check", SFT, "--gpus", "1xH100", "data.dataset=date.jsonl")
    assert "date.jsonl is not on this machine" in checked.out
    assert "did you mean data.dataset=daten.jsonl?" in checked.out
    assert "not on this machine" not in meshwright("check", SFT, "--gpus", "1xH100", "data.dataset=daten.jsonl").out


def own_logger(steps: int = 60, better: float = 0.0) -> str:
    """Write the log of a training loop of one's own: a loss that falls, with noise that a seed decides."""
    noise = random.Random(better).gauss
    rows = [
        {"train/step": i, "train/loss": 3 - 0.01 * i - better + noise(0, 0.03), "train/lr": 1e-4, "step_time_ms": 500}
        for i in range(1, steps + 1)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


def test_logs_of_ones_own_and_compressed_ones_are_read(here: Path, meshwright: Any) -> None:
    text = own_logger() + json.dumps({"step": 60, "eval_loss": 2.5})
    (here / "log.jsonl").write_text(text)
    (here / "log.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (here / "log.jsonl.bz2").write_bytes(bz2.compress(text.encode()))
    (here / "log.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd") + b"frames")
    for name in ("log.jsonl", "log.jsonl.xz", "log.jsonl.bz2"):
        answer = meshwright("doctor", name, "--json").json
        assert (answer["kind"], answer["steps"], answer["last_step"]) == ("json", 60, 60)
        figures = {one["name"]: one["measured"] for one in answer["figures"]}
        assert (figures["step time"], figures["best validation loss, step 60"]) == (0.5, 2.5)
        assert "at least 3 steps, and the log has 1" in answer["not_examined"]["loss.overfitting"]
    assert "fix:   zstd -dc log.jsonl.zst | meshwright doctor -\n" in meshwright("doctor", "log.jsonl.zst").err
    for recipe in ("nosuch", "llama3_8b_sft_confg"):
        refused = meshwright("doctor", "log.jsonl", "--recipe", recipe)
        assert f"error: --recipe={recipe}: unknown model" in refused.err
    assert "fix:   --recipe llama3_8b_sft_config" in refused.err
    rows = [{"step": i, "loss": 3.0, "mem": 40.0, "tps": 8e3, "tps_per_gpu": 1e3, "mfu": 41.0} for i in range(30)]
    (here / "training.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answer = meshwright("doctor", "training.jsonl", "--json").json
    assert answer["kind"] == "automodel"
    assert {one["name"]: one["measured"] for one in answer["figures"]}["MFU"] == pytest.approx(0.41)


def test_runs_that_differ_within_noise_are_said_to(here: Path, meshwright: Any) -> None:
    for name, better in (("a", 0.0), ("b", 0.001), ("c", 0.8)):
        (here / f"{name}.jsonl").write_text(own_logger(better=better))
    assert "They differ within noise: by" in meshwright("compare", "a.jsonl", "b.jsonl").out.replace("\n", " ")
    assert "within noise" not in meshwright("compare", "a.jsonl", "c.jsonl").out
    for name, best in (("d", 2.0), ("e", 2.005), ("f", 2.1)):
        rows = [
            {"kind": "header", "recipe": "r", "validation": {"dataset": "v", "samples": 9}},
            *({"kind": "step", "step": i, "loss": 2.0 + 0.1 * (i % 3)} for i in range(1, 9)),
            *({"kind": "validation", "step": i, "loss": best + 4 - i} for i in (2, 4)),
        ]
        (here / name).mkdir()
        (here / name / "metrics.jsonl").write_text("\n".join(json.dumps(row, separators=(",", ":")) for row in rows))
    assert "by less than 0.5%" in meshwright("compare", "d", "e", "--json").json["answer"]
    assert "within noise" not in meshwright("compare", "d", "f", "--json").json["answer"]


def test_counts_and_options_are_written_as_the_command_takes_them(here: Path, meshwright: Any) -> None:
    (here / "text.txt").write_text("one line")
    (here / "empty").mkdir()
    for name in ("empty", "Qwen/Qwen3-nosuch"):
        refused = meshwright("tokenize", "text.txt", "--tokenizer", name, "--out", "tokens").err
        assert f"error: --tokenizer={name}: " in refused
        assert "--tokenizer FOLDER with tokenizer.json" in refused
        assert "data.tokenizer" not in refused
    tokenized = meshwright("tokenize", "text.txt", "--tokenizer", "bytes", "--out", "tokens").out
    assert "tokens of 1 document\n" in tokenized
    assert "1 shard of" in tokenized
    (here / "chats.jsonl").write_text(json.dumps({"prompt": "hi", "response": "hello"}))
    trained = meshwright(
        "train", SFT, "--tiny", "--dataset", "chats.jsonl", "train.epochs=1", "train.global_batch_size=1"
    )
    assert "train.epochs=1: 1 sample per epoch, 1 sample in 1 step of 1" in trained.err
    assert "1 step on 1 × CPU" in trained.out


def test_a_mistyped_ending_of_a_file_here_is_no_name_of_the_hub(here: Path, meshwright: Any) -> None:
    (here / "chats.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 8)
    words = ("recommend", "qwen3-0.6b", "--goal", "sft", "--gpus", "1xH100", "--dataset")
    assert "did you mean data.dataset=chats.jsonl?" in " ".join(meshwright(*words, "chats.jsnl").out.split())
    for name in ("squad", "org/chats.jsnl", "dolly-15k.v2"):
        assert "not on this machine" not in meshwright(*words, name).out, name
