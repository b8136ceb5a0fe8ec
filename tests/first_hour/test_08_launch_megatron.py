"""Jobs of other frameworks: run from their checkout, the published model, a checkpoint before a requeue."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Answer

SCRIPTS = {
    "megatron-lm": "pretrain_gpt.py",
    "megatron-bridge": "scripts/training/run_recipe.py",
    "kempnerforge": "scripts/train.py",
    "torchtitan": "torchtitan/train.py",
    "automodel": "nemo_automodel/cli/app.py",
}


@pytest.fixture
def job(meshwright: Any, tmp_path: Path) -> Any:
    """A function that launches a recipe with another framework for SLURM, and returns the answer and the script."""

    def call(framework: str, *words: str, recipe: str = "llama3_8b_pretrain_config") -> tuple[Answer, str]:
        folder = tmp_path / "job"
        asked = ("launch", recipe, "--to", framework, "--scheduler", "slurm", "--write", str(folder), "--overwrite")
        answer = meshwright(*asked, *words)
        scripts = list(folder.glob("*.sbatch"))
        return answer, scripts[0].read_text() if scripts else ""

    return call


def checkout(folder: Path, framework: str) -> Path:
    script = folder / SCRIPTS[framework]
    script.parent.mkdir(parents=True)
    script.write_text("")
    return folder


@pytest.mark.parametrize("framework", SCRIPTS)
def test_the_program_is_run_from_the_checkout(job: Any, tmp_path: Path, framework: str) -> None:
    root = checkout(tmp_path / "their code", framework)
    answer, script = job(framework, "--gpus", "8xH100", "--framework-dir", str(root), "--time", "8:00:00")
    assert answer.code == 0, answer.err
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert re.search(r"^cd .*/job", script, re.MULTILINE)  # configs and checkpoints stay with the job
    assert f"export PYTHONPATH='{root}" in script
    assert '"${PYTHONPATH:+:$PYTHONPATH}"' in script
    if framework in ("torchtitan", "automodel"):
        assert " -m " in script
    else:
        assert f"'{root}/{SCRIPTS[framework]}'" in script


def test_a_job_without_its_checkout_says_so_before_it_waits_for_gpus(job: Any, tmp_path: Path) -> None:
    answer, script = job("megatron-lm", "--gpus", "8xH100")
    assert answer.code == 0
    assert "add --framework-dir PATH" in answer.err
    ended = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert ended.returncode == 2
    assert "--framework-dir" in ended.stderr
    wrong = tmp_path / "empty"
    wrong.mkdir()
    answer, _ = job("megatron-lm", "--gpus", "8xH100", "--framework-dir", str(wrong))
    assert answer.code == 2
    assert "has no pretrain_gpt.py" in answer.err
    answer, _ = job("megatron-lm", "--gpus", "8xH100", "--framework-dir", "/on/the/nodes/Megatron-LM")
    assert answer.code == 0
    assert "not on this machine" in answer.err


def test_a_framework_dir_without_a_framework_is_an_error(meshwright: Any) -> None:
    asked = ("launch", "llama3_8b_pretrain_config", "--scheduler", "torchrun", "--gpus", "8xH100")
    answer = meshwright(*asked, "--framework-dir", "/opt/megatron")
    assert answer.code == 2
    assert "--to megatron-lm" in answer.err


def test_a_requeued_job_saves_on_the_signal_and_every_half_hour(job: Any) -> None:
    answer, script = job("megatron-lm", "--gpus", "8xH100")
    assert "--exit-signal-handler" in script
    found = re.search(r"about (\d+) min at the estimated speed", answer.err)
    assert found is not None
    assert 25 <= int(found[1]) <= 35
    (every,) = set(re.findall(r"--save-interval (\d+)", script))
    assert int(every) < 1000  # the recipe's, hours at this speed
    _, sooner = job("megatron-lm", "--gpus", "8xH100", "--save-minutes", "10")
    (often,) = set(re.findall(r"--save-interval (\d+)", sooner))
    assert int(often) == pytest.approx(int(every) / 3, abs=1)
    _, own = job("megatron-lm", "--gpus", "8xH100", "checkpoint.save_every=77")
    assert set(re.findall(r"--save-interval (\d+)", own)) == {"77"}
    ahead = re.search(r"--signal=B:TERM@(\d+)", script)
    assert ahead is not None
    assert int(ahead[1]) > 200  # a step of this recipe takes a minute on 8 GPUs, and saving follows it
    _, once = job("megatron-lm", "--gpus", "8xH100", "--no-requeue")
    assert set(re.findall(r"--save-interval (\d+)", once)) == {"1000"}


def test_what_each_framework_does_on_the_signal_is_said(job: Any) -> None:
    answer, script = job("megatron-bridge", "--gpus", "8xH100")
    assert "train.exit_signal_handler=true" in script
    answer, _ = job("torchtitan", "--gpus", "8xH100")
    assert "torchtitan does not save on SIGTERM" in answer.err
    answer, _ = job("automodel", "--gpus", "8xH100")
    assert "preemption_signal" in answer.err
    answer, _ = job("kempnerforge", "--gpus", "8xH100")
    assert "saves a checkpoint on SIGTERM by itself" in answer.err


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("llama3_8b_pretrain_config", ["--rotary-base 500000", "--norm-epsilon 1e-05", "--num-query-groups 8"]),
        ("llama31_405b_pretrain_config", ["--rotary-base 500000", "--use-rope-scaling", "--rope-scaling-factor 8.0"]),
        ("qwen3_8b_pretrain_config", ["--rotary-base 1000000", "--norm-epsilon 1e-06", "--qk-layernorm"]),
        ("qwen3_30b_a3b_pretrain_config", ["--rotary-base 1000000", "--kv-channels 128", "--moe-router-topk 8"]),
        (
            "deepseek_v3_pretrain_config",
            [
                "--rotary-scaling-factor 40.0", "--mscale 1.0", "--mscale-all-dim 1.0", "--norm-epsilon 1e-06",
                "--moe-router-score-function sigmoid", "--moe-router-topk-scaling-factor 2.5",
                "--moe-router-num-groups 8", "--moe-router-group-topk 4",
            ],
        ),
        ("moonlight_16b_pretrain_config", ["--rotary-base 50000", "--rope-type rope", "--norm-epsilon 1e-05"]),
    ],
)  # fmt: skip
def test_the_file_trains_the_published_model(meshwright: Any, recipe: str, flags: list[str]) -> None:
    answer = meshwright("export", recipe, "--to", "megatron-lm", "--json")
    (text,) = answer.json["files"].values()
    assert [flag for flag in flags if flag not in text] == []
    assert not any("RoPE base" in note for note in answer.json["notes"])


def test_a_value_that_is_not_known_is_named_not_assumed(meshwright: Any) -> None:
    answer = meshwright("export", "qwen25_14b_pretrain_config", "--to", "megatron-lm", "--json").json
    (text,) = answer["files"].values()
    assert "--norm-epsilon" not in text
    assert any("--norm-epsilon" in note for note in answer["notes"])


def test_the_vocabulary_is_not_padded_where_tp_divides_it(meshwright: Any) -> None:
    asked = ("export", "llama3_8b_pretrain_config", "--to", "megatron-lm", "--gpus", "8xH100", "--json")
    (text,) = meshwright(*asked, "layout.tp=8").json["files"].values()
    assert "--make-vocab-size-divisible-by 32" in text  # 128256 = 501 × 8 × 32


def test_values_of_an_own_config_json_are_used(tmp_path: Path) -> None:
    from meshwright.models.numerics import from_config, numerics_of

    assert (numerics_of("llama32-1b").rope_scaling or {})["factor"] == 32
    found = from_config(
        {"rope_parameters": {"rope_theta": 7e5, "rope_type": "yarn", "factor": 4.0}, "rms_norm_eps": 3e-6}
    )
    assert (found.rope_theta, found.scaling_type, found.norm_eps) == (7e5, "yarn", 3e-6)
    old = from_config({"rope_theta": 10000, "rope_scaling": None, "layer_norm_epsilon": 1e-5})
    assert (old.rope_theta, old.scaling_type, old.norm_eps) == (10000.0, "", 1e-5)


@pytest.mark.slow
def test_a_generated_job_builds_the_model_in_megatron(tmp_path: Path) -> None:
    """`make megatron MEGATRON_LM=… SITE=…`: the job runs under bash up to the model, whose parameters are ours."""
    root, site = os.environ.get("MEGATRON_LM"), os.environ.get("MEGATRON_SITE")
    if not root or not site:
        pytest.skip("set MEGATRON_LM to a checkout and MEGATRON_SITE to a folder with its dependencies")
    from benchmarks.against.megatron_model import JOBS, run_job

    for recipe, gpus, overrides in JOBS:
        found = run_job(Path(root), [site], recipe, gpus, overrides)
        assert found["built"] == found["ours"], found["error"]
