"""Paths that a job mounts, prices with epochs, days with a unit, signals and failures of jobs, equal engines."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from meshwright.cli.run import run
from meshwright.engine.epochs import repeat_warning
from meshwright.recipes import load
from meshwright.recipes.overrides import change
from meshwright.rules.repeated_data import usual_epochs

CHECKOUT = "/shared/checkout"
ENGINES = ("megatron-lm", "megatron-bridge", "torchtitan", "automodel", "kempnerforge", "accelerate", "deepspeed")
CONTAINERS = {
    "pyxis": ("slurm", "--container-kind", "pyxis", "--mount", "/lake:/lake"),
    "apptainer": ("slurm", "--container-kind", "apptainer", "--mount", "/lake:/lake"),
    "kubernetes": ("kubernetes", "--mount", "claim:/lake"),
    "skypilot": ("skypilot", "--mount", "s3://lab:/lake"),
}
READ = ("data.dataset=/lake/pre_text", "data.tokenizer=/tok/mine", "checkpoint.pretrained=/weights/base")


def call(*words: str) -> tuple[int, str]:
    """Return the exit code of a command and all that it printed."""
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue()


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def full_paths(text: str) -> set[str]:
    """Return the full paths in a written job: words, values of a config and parts of a search path."""
    found = re.findall(r"(?:^|(?<=[\s=:,'\"\[]))/[A-Za-z][\w.-]*(?:/[\w.-]+)*", text, re.MULTILINE)
    return {one for one in found if not one.startswith(("/bin/", "/dev/", "/usr/"))}


def is_below(path: str, folders: set[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(one) for one in folders)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_path_of_a_job_is_mounted_or_named(engine: str, kind: str) -> None:
    words = ("launch", "llama3-8b", "--goal", "pretrain", "--gpus", "2x8xH100", "--to", engine, "--image", "lab/img:1")
    at = ("--framework-dir", CHECKOUT, "--write", "job", "--scheduler", *CONTAINERS[kind])
    code, printed = call(*words, *at, *READ, "train.steps=300", "schedule.warmup_steps=20")
    assert code == 0, printed
    advised = set(re.findall(r"--mount [^:\s]+:(\S+)", printed))
    texts = {path.name: path.read_text() for path in Path("job").iterdir()}
    mounted = {"/lake", str(Path("job").resolve()), *advised}
    mounted |= {one for text in texts.values() for one in re.findall(r"mountPath: (\S+)", text)}  # of a manifest
    read = {path for text in texts.values() for path in full_paths(re.sub(r"(?m)^\s*#.*$", "", text))}
    assert {path for path in read if not is_below(path, mounted)} == set(), printed
    if any(CHECKOUT in text for text in texts.values()):
        assert CHECKOUT in advised


def test_the_whole_checkout_is_advised_and_then_nothing_is_missing() -> None:
    words = ("launch", "llama3-70b", "--goal", "pretrain", "--gpus", "16x8xH100", "--to", "megatron-bridge", "--image",
             "nvcr.io/nvidia/nemo:26.08", "--container-kind", "pyxis", "--mount", "/data:/data", "--scheduler", "slurm",
             "--framework-dir", "/shared/Megatron-Bridge")  # fmt: skip
    _, printed = call(*words, "--write", "one")
    mount = "/shared/Megatron-Bridge:/shared/Megatron-Bridge"
    assert f"add --mount {mount}\n" in printed
    _, printed = call(*words, "--mount", mount, "--write", "two")
    assert "the container needs" not in printed


def rows(count: int) -> str:
    messages = [{"role": "user", "content": "where is my order? " * 8}, {"role": "assistant", "content": "soon " * 40}]
    return f"{json.dumps({'messages': messages})}\n" * count


def test_a_price_without_epochs_states_the_share_of_the_data_and_epochs() -> None:
    Path("chats.jsonl").write_text(rows(3000))
    words = ("recommend", "qwen3-8b", "--gpus", "rtx4090", "--goal", "qlora", "--dataset", "chats.jsonl")
    words = (*words, "--price", "2", "train.global_batch_size=8")
    _, printed = call(*words)
    share = r"100 steps are ([\d.]+ epochs|\d+%) of chats.jsonl"
    found = re.search(rf"{share} \(.*\): --epochs 1 \(.*\) is (\d+) steps of 8", printed)
    assert found is not None, printed
    _, whole = call(*words, "--epochs", "1")
    assert f"in {found[2]} steps" in whole
    assert "--epochs 1 (" not in whole


@pytest.mark.parametrize("verb", ["plan", "estimate", "size"])
def test_verbs_that_plan_take_epochs(verb: str) -> None:
    Path("chats.jsonl").write_text(rows(300))
    target = "qwen3_8b_peft_config" if verb == "estimate" else "qwen3-8b"
    goal = () if verb == "estimate" else ("--goal", "lora")
    code, printed = call(verb, target, *goal, "--gpus", "1xH100", "--epochs", "2", "data.dataset=chats.jsonl")
    assert (code, "2 epochs of chats.jsonl" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("tokens", "more", "is_long"),
    [
        ("100B", ("checkpoint.pretrained=meta-llama/Meta-Llama-3.1-70B",), True),
        ("100B", (), True),
        ("200B", (), False),
        ("100B", ("schedule.warmup_steps=300",), False),
    ],
)
def test_a_warmup_that_is_a_third_of_a_long_run_is_found(tokens: str, more: tuple[str, ...], is_long: bool) -> None:
    words = ("recommend", "llama3.1-70b", "--goal", "pretrain", "--seq", "32k", "--gpus", "16x8xH100")
    _, printed = call(*words, "--tokens", tokens, *more)
    assert ("learning_rate.warmup-too-long" in printed) == is_long, printed


def test_a_pretraining_on_mock_data_says_so_next_to_its_command() -> None:
    words = ("recommend", "llama3-8b", "--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "2T")
    note = "data: mock is random tokens"
    assert note in call(*words)[1]
    Path("books.txt").write_text("once upon a time\n" * 100)
    assert note not in call(*words, "--dataset", "books.txt")[1]
    assert note not in call(*words, "checkpoint.pretrained=/weights/base")[1]  # the command has DATA to replace


@pytest.mark.parametrize(
    ("typed", "days"),
    [("6weeks", "42"), ("6w", "42"), ("6 weeks", "42"), ("45d", "45"), ("1month", "30"), ("48h", "2")],
)
def test_days_may_have_a_unit(typed: str, days: str) -> None:
    words = ("recommend", "llama3-8b", "--gpus", "16x8xH100", "--goal", "pretrain", "--json", "--days")
    assert json.loads(call(*words, typed)[1])["budget"] == json.loads(call(*words, days)[1])["budget"]


def test_days_with_an_unknown_unit_are_refused_with_what_is_understood() -> None:
    code, printed = call("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--days", "5m")
    assert (code, "days=5m: must be a number of days, or a time such as 45d, 6weeks or 36h" in printed) == (2, True)


def test_goodput_has_the_condition_that_size_has() -> None:
    _, printed = call("recommend", "llama3-8b", "--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "2T")
    assert re.search(
        r"goodput 99\.9% if a failed node is replaced at once, 96\.\d% if it is missed for 24 hours", printed
    )
    _, one_node = call("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--tokens", "20B")
    assert re.search(r"goodput 99\.9%: ", one_node)


SLURM = ("--goal", "pretrain", "--gpus", "2x8xH100", "--scheduler", "slurm", "--time", "8:00:00", "--write", "job")


@pytest.mark.parametrize(
    ("engine", "ended"),
    [
        ("torchtitan", "have ended: torchtitan does not save on SIGTERM."),
        ("megatron-lm", "have saved."),
        ("automodel", "have saved."),
        ("accelerate", "have ended: your program has to save on SIGTERM itself."),
    ],
)
def test_a_slurm_job_says_what_its_engine_does_on_a_signal_and_after_a_failure(engine: str, ended: str) -> None:
    code, printed = call("launch", "llama3-8b", "--to", engine, *SLURM)
    assert code == 0, printed
    assert "ends and is not requeued: sbatch it again" in printed
    [job] = Path("job").glob("*.sbatch")
    assert ended in job.read_text()


def test_our_own_job_says_that_a_failure_is_not_requeued_unless_nothing_is() -> None:
    assert "is not requeued: sbatch it again" in call("launch", "llama3_8b_pretrain_config", *SLURM)[1]
    more = (*SLURM, "--no-requeue", "--overwrite")
    assert "is not requeued: sbatch it again" not in call("launch", "llama3_8b_pretrain_config", *more)[1]


def test_engines_within_the_uncertainty_are_equal_and_something_else_decides() -> None:
    words = ("compare", "llama3-8b", "--gpus", "16x8xH100", "--goal", "pretrain", "--engines", "meshwright,torchtitan")
    answer = json.loads(call(*words, "--json")[1])["answer"]
    assert answer.startswith("Equal within the uncertainty: ")
    assert "What else decides: " in answer
    assert "never run on several GPUs" in answer


def test_files_of_the_same_speed_are_as_fast_as_each_other() -> None:
    for name, every in (("a", 100), ("b", 200)):
        call("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--save", f"{name}.toml",
             f"checkpoint.save_every={every}")  # fmt: skip
    _, printed = call("compare", "a.toml", "b.toml", "--gpus", "8xH100")
    assert "b.toml: is as fast as a.toml" in printed
    assert "What else decides: the fields that differ (checkpoint.save_every)" in printed
    assert "0 %" not in printed


def test_the_budget_says_how_long_validation_takes(meshwright: Any, tmp_path: Path) -> None:
    row = json.dumps({"prompt": "why is it late? " * 20, "response": "it ships soon. " * 40}) + "\n"
    (data := tmp_path / "chats.jsonl").write_text(row * 2000)
    (held_out := tmp_path / "held_out.jsonl").write_text(row * 1000)
    words = ("recommend", "qwen3-8b", "--gpus", "1xA100-80", "--goal", "lora", "--dataset", str(data), "--epochs", "2")
    shown = meshwright(*words, f"data.validation={held_out}", "train.eval_every=4", "--json").json["budget"]["notes"]
    (note,) = [one for one in shown if one.startswith("validation adds about")]
    assert "which is not in these figures" in note
    few = meshwright(*words, f"data.validation={held_out}", "train.eval_every=4", "train.eval_steps=1", "--json").json
    (less,) = [one for one in few["budget"]["notes"] if one.startswith("validation adds about")]
    assert "of a batch" in less
    assert not [one for one in meshwright(*words, "--json").json["budget"]["notes"] if "validation" in one]


def test_only_one_interval_between_checkpoints_is_advised(meshwright: Any) -> None:
    words = ("recommend", "llama3-70b", "--gpus", "8xA100-80", "--goal", "lora", "train.global_batch_size=1024")
    shown = meshwright(*words, "--tokens", "1B", "data.seq_length=8192", "checkpoint.save_every=100", "--json").json
    assert [one["fix"] for one in shown["findings"] if one["rule"] == "saving.rarely"] == [["checkpoint.save_every=2"]]
    assert not [one for one in shown["budget"]["notes"] if "checkpoint.save_every" in one]


@pytest.mark.parametrize(("samples", "micro", "dp"), [(93, 16, 1), (93, 2, 4), (40, 1, 8), (3, 1, 1), (100_000, 1, 8)])
def test_the_usual_epochs_have_enough_steps(samples: int, micro: int, dp: int) -> None:
    fields, steps = usual_epochs(samples, 2048, micro, dp)
    batch = fields.get("train.global_batch_size", 2048)
    assert batch % (fields.get("layout.micro_batch_size", micro) * dp) == 0
    assert steps == -(-3 * samples // batch)
    assert steps >= min(10, 3 * samples // dp)


def test_a_repeated_text_of_few_samples_names_the_batch() -> None:
    changes = {"train.steps": 500_000, "train.global_batch_size": 2048, "layout.micro_batch_size": 16}
    recipe, _ = change(load("llama3_8b_pretrain_config"), changes)
    assert repeat_warning(recipe, 93, 1).endswith("fix: train.epochs=3 train.global_batch_size=16, 18 steps")
    assert repeat_warning(recipe, 4096, 1).endswith("fix: train.epochs=3 or train.steps=6")
