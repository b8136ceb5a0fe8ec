"""A job keeps the initial weights and the paths that a file takes from the environment, or is refused."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest

from meshwright.cli.run import run

RUN = ("train.steps=300", "schedule.warmup_steps=20", "data.tokenizer=/tok/mine", "data.dataset=/data/pre_text")
WEIGHTS = "checkpoint.pretrained=meta-llama/Meta-Llama-3-8B"
SLURM = ("--gpus", "8xH100", "--scheduler", "slurm")


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


def exported(to: str, weights: str = WEIGHTS) -> Path:
    words = ("export", "llama3-8b", "--goal", "pretrain", "--to", to, "--gpus", "8xH100", "--out", "exp")
    code, printed = call(*words, weights, *RUN)
    assert code == 0, printed
    return Path("exp")


def job_of(file: str, *words: str) -> str:
    code, printed = call("launch", file, *SLURM, "--write", "job", *words)
    assert code == 0, printed
    assert "checkpoint.pretrained= is assumed" not in printed
    return "\n".join(one.read_text() for one in Path("job").iterdir())


@pytest.mark.parametrize("name", ["run.sh", "override.py"])
def test_the_job_of_an_exported_bridge_file_starts_from_its_weights(name: str) -> None:
    job = job_of(str(exported("megatron-bridge") / name))
    assert 'checkpoint.pretrained_checkpoint="${CONVERTED_CHECKPOINT:?' in job
    assert "dataset.data_path=/data/pre_text" in job
    assert "tokenizer.tokenizer_model=/tok/mine" in job


def test_env_gives_the_weights_of_the_job() -> None:
    job = job_of(str(exported("megatron-bridge") / "run.sh"), "--env", "CONVERTED_CHECKPOINT=/ckpt/llama3")
    assert "checkpoint.pretrained_checkpoint=/ckpt/llama3" in job


def test_a_container_needs_the_variable() -> None:
    file = str(exported("megatron-bridge") / "run.sh")
    where = ("--gpus", "8xH100", "--scheduler", "kubernetes", "--image", "x/y:1")
    code, printed = call("launch", file, *where)
    assert code
    assert "--env CONVERTED_CHECKPOINT=" in printed
    code, printed = call("launch", file, *where, "--env", "CONVERTED_CHECKPOINT=/ckpt/llama3")
    assert code == 0
    assert "checkpoint.pretrained_checkpoint=/ckpt/llama3" in printed


def test_an_export_of_the_export_keeps_the_variable() -> None:
    file = str(exported("megatron-bridge") / "override.py")
    code, printed = call("export", file, "--to", "megatron-bridge", "--gpus", "8xH100", "--out", "again")
    assert code == 0, printed
    assert '"checkpoint.pretrained_checkpoint=$CONVERTED_CHECKPOINT"' in Path("again/run.sh").read_text()
    assert 'pretrained_checkpoint = os.environ["CONVERTED_CHECKPOINT"]' in Path("again/override.py").read_text()


def test_the_job_of_an_exported_megatron_script_starts_from_its_weights() -> None:
    script = next(exported("megatron-lm").iterdir())
    assert '--pretrained-checkpoint "${PRETRAINED_CHECKPOINT:?' in job_of(str(script))


def test_load_and_finetune_of_variables_are_kept() -> None:
    text = next(exported("megatron-lm").iterdir()).read_text()
    lines = [line for line in text.splitlines() if "--pretrained-checkpoint" not in line]
    lines = ['    --load "$BASE/iter" --finetune' if "    --load " in line else line for line in lines]
    lines = ['    --save "$RUN_DIR"' if "    --save " in line else line for line in lines]
    Path("own.sh").write_text("\n".join(lines) + "\n")
    job = job_of("own.sh")
    assert '--pretrained-checkpoint "${BASE:?' in job
    assert '--save "${RUN_DIR:?' in job
    assert "not in this file" not in job


@pytest.mark.parametrize(("to", "weights"), [("torchtitan", "checkpoint.pretrained=/ckpt/hf"), ("automodel", WEIGHTS)])
def test_a_config_names_its_weights_in_the_job(to: str, weights: str) -> None:
    file = next(one for one in exported(to, weights).iterdir() if one.suffix in (".toml", ".yaml"))
    assert weights.partition("=")[2] in job_of(str(file))


def test_data_and_tokenizer_of_variables_are_kept() -> None:
    text = (exported("megatron-bridge") / "run.sh").read_text()
    text = text.replace("data_path=/data/pre_text", "data_path=$DATA/pre").replace("model=/tok/mine", "model=$TOK")
    Path("own.sh").write_text(text)
    job = job_of("own.sh")
    assert "${DATA:?" in job
    assert "${TOK:?" in job
    assert "--dataset mock" not in job


@pytest.mark.parametrize("value", ['"checkpoint.pretrained_checkpoint=$(ls -d /c/*)"', "TO"])
def test_weights_that_no_job_can_name_are_refused(value: str) -> None:
    """A job that started from random weights instead would be another training."""
    text = (exported("megatron-bridge") / "run.sh").read_text()
    to = () if value != "TO" else ("--to", "meshwright")
    Path("own.sh").write_text(text.replace('"checkpoint.pretrained_checkpoint=$CONVERTED_CHECKPOINT"', value, not to))
    code, printed = call("launch", "own.sh", *SLURM, *to)
    assert code
    assert "names the initial weights" in printed
    assert "checkpoint.pretrained=FOLDER" in printed
    code, printed = call("launch", "own.sh", *SLURM, *to, "checkpoint.pretrained=", "--write", "job")
    assert code == 0, printed


ENGINES = ("meshwright", "megatron", "torchtitan", "automodel", "deepspeed", "kempnerforge")


@pytest.mark.parametrize("goal", ["pretrain", "cpt", "sft", "lora"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_run_line_of_a_plan_works_as_printed(engine: str, goal: str) -> None:
    length = ("--tokens", "60B") if goal in ("pretrain", "cpt") else ()
    words = ("recommend", "llama3.1-8b", "--gpus", "8xH200", "--goal", goal, *length, "--engine", engine)
    code, printed = call(*words, "--save", "plan.toml", "--json")
    if code:  # the engine has no such training, and says so
        assert "error" in printed, printed
        return
    start = printed.index("{")
    commands = json.JSONDecoder().raw_decode(printed[start:])[0]["commands"]
    lines = [shlex.split(line) for line in commands.values()]
    assert lines, printed
    exports = [line[1:] for line in lines if line[1] == "export"]
    for line in exports:
        code, printed = call(*line)
        assert code == 0, (line, printed)
    frameworks = {line[line.index("--to") + 1] for line in exports}
    for to in frameworks:
        code, printed = call("export", "plan.toml", "--to", to, "--out", f"again-{to}")
        assert code == 0, printed
        code, printed = call("launch", "plan.toml", "--to", to, "--scheduler", "slurm", "--write", f"job-{to}")
        assert code == 0, printed
