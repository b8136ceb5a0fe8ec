"""A run moves to a cluster: jobs that continue it, from any folder, on any number of ranks."""

from __future__ import annotations

import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.tiny_machine import type_in, write_base_and_chats

from meshwright.notes import print_once

RUN = (
    *("precision.compute=fp32", "schedule.warmup_steps=0", "data.seq_length=64", "train.global_batch_size=4"),
    *("train.steps=2", "checkpoint.save_every=1"),
)
SLURM = ("--scheduler", "slurm", "--gpus", "4xA100-80")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small base model, data, a LoRA run and a run of continued pretraining."""
    folder = tmp_path_factory.mktemp("machine")
    write_base_and_chats(folder)
    (folder / "text.txt").write_text("".join(f"the words of line {i} are here\n\n" for i in range(400)))
    for goal, data, out in (("lora", "chats.jsonl", "ws"), ("cpt", "text.txt", "cpt")):
        words = ("train", "./base", "--goal", goal, "--dataset", data, "--out", out, *RUN)
        type_in(folder, (*words, "layout.micro_batch_size=4"))
    return folder


@pytest.fixture
def here(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    print_once.cache_clear()
    shutil.copytree(machine, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_words(folder: str) -> list[str]:
    """Return the train command of a written SLURM job."""
    (script,) = Path(folder).glob("*.sbatch")
    line = next(one for one in script.read_text().splitlines() if one.startswith("srun "))
    words = shlex.split(line.removesuffix("&"))
    return words[words.index("train") :]


def test_a_job_of_a_run_continues_it_in_its_own_folder(meshwright: Any, here: Path) -> None:
    shown: list[str] = []
    for number, more in enumerate(((), ("--out", "ws"), ("checkpoint.folder=ws",))):
        answer = meshwright("launch", "ws", *SLURM, "--write", f"jobs/{number}", *more)
        assert answer.code == 0, answer.err
        words = job_words(f"jobs/{number}")
        shown.append(answer.err)  # a process prints a note once
        assert ("ws is a run: it continues" in answer.err) is (not more)
        assert f"{here}/ws" in words or f"checkpoint.folder={here}/ws" in words
        written = tomllib.loads(Path(f"jobs/{number}", words[1]).read_text())
        assert written["data"]["dataset"] == f"{here}/chats.jsonl"
        assert written["model"].startswith("/")
        assert written.get("layout", {}).get("micro_batch_size", 1) == 1
    note = "layout.micro_batch_size 4 → 1: global_batch_size=4 gives each of 4 data-parallel ranks 1"
    assert note in "".join(shown)
    (here / "more").mkdir()
    shutil.copy("chats.jsonl", "more/a.jsonl")
    blend = "data.blend=more/a.jsonl:1,chats.jsonl:2"
    answer = meshwright("launch", "ws", *SLURM, "--out", "new", "--write", "jobs/b", blend, "data.validation=more")
    assert answer.code == 0, answer.err
    assert job_words("jobs/b")[2:] == [
        *("--out", f"{here}/new", f"data.blend={here}/more/a.jsonl:1.0,{here}/chats.jsonl:2.0"),
        f"data.validation={here}/more",
    ]
    answer = meshwright("launch", "ws", "--scheduler", "kubernetes", "--image", "x", "--gpus", "4xA100-80")
    assert "ws is a run, but the job starts a new one with its settings" in answer.err
    refused = meshwright("launch", "ws", *SLURM, "--write", "jobs/c", "optimizer.lr=0.5")
    assert "optimizer.lr was" in refused.err
    assert "--accept-changes resumes with the new values" in refused.err
    accepted = meshwright("launch", "ws", *SLURM, "--write", "jobs/c", "optimizer.lr=0.5", "--accept-changes")
    assert accepted.code == 0, accepted.err
    assert "--accept-changes" in next(Path("jobs/c").glob("*.sbatch")).read_text()
    (here / "chats.jsonl").rename("moved.jsonl")
    assert "chats.jsonl" in meshwright("launch", "ws", *SLURM, "--write", "jobs/d").err
    assert not Path("jobs/d").exists()


def test_a_written_job_resumes_the_run(meshwright: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = meshwright("launch", "ws", *SLURM, "--write", "jobs/a")
    assert launched.code == 0, launched.err
    shutil.rmtree("ws/checkpoints/step-00000002")
    monkeypatch.chdir(here / "jobs" / "a")
    trained = meshwright(*job_words("."))
    assert trained.code == 0, trained.err
    assert "resuming after step 1" in trained.err


def test_a_run_continues_on_more_ranks(meshwright: Any, here: Path) -> None:
    shutil.rmtree("ws/checkpoints/step-00000002")
    typed = meshwright("train", "ws", "--nproc", "2", "layout.micro_batch_size=4")
    assert "is not divisible by micro_batch_size=4" in typed.err
    trained = meshwright("train", "ws", "--nproc", "2")
    assert trained.code == 0, trained.err
    assert "layout.micro_batch_size 4 → 2: " in trained.err
    assert "resumed ws/checkpoints/step-00000001" in trained.out


def test_another_goal_starts_from_the_model_that_the_run_trained(meshwright: Any, here: Path) -> None:
    refused = meshwright("train", "./cpt", "--goal", "sft", "--dataset", "chats.jsonl", "--out", "sft")
    assert "./cpt/model --goal sft: the model that the run trained" in refused.err
    assert "base" not in refused.err
    refused = meshwright("train", "./ws", "--goal", "sft", "--dataset", "chats.jsonl", "--out", "sft")
    assert "meshwright convert ./ws merged --merge, then use ./merged --goal sft" in refused.err


def test_a_refused_job_names_everything_that_it_lacks_at_once(meshwright: Any, here: Path) -> None:
    refused = meshwright("launch", "ws", *SLURM, "layout.micro_batch_size=4")
    assert "is not divisible by micro_batch_size=4" in refused.err
    assert "the job reads base_peft.toml and needs a folder for it" in refused.err
    fix = next(line for line in refused.err.splitlines() if line.startswith("fix:")).removeprefix("fix:")
    assert meshwright("launch", "ws", *SLURM, *shlex.split(fix)).code == 0


def test_epochs_of_mock_data_ask_for_data(meshwright: Any) -> None:
    refused = meshwright("train", "llama3_8b_peft_config", "--tiny", "num_train_epochs=3")
    assert "mock data is generated without end: --dataset FILE trains on data that ends" in refused.err


def test_epochs_of_few_steps_shorten_a_warmup_that_nobody_set(meshwright: Any, here: Path) -> None:
    words = ("train", "./base", "--goal", "lora", "--dataset", "chats.jsonl", "train.epochs=3", "--json")
    words = (*words, *(one for one in RUN if not one.startswith(("schedule.", "train.steps="))))
    for _ in range(2):  # the second resumes the complete run
        answer = meshwright(*words, "--out", "few")
        assert answer.code == 0, answer.err
        assert "schedule.warmup_steps 10 → 1: the recipe's were for a longer run than 9 steps" in answer.err
        assert "learning_rate.warmup-too-long" not in [one["rule"] for one in answer.json["findings"]]
    typed = meshwright(*words, "--out", "typed", "schedule.warmup_steps=50")
    assert "learning_rate.warmup-too-long" in [one["rule"] for one in typed.json["findings"]]
