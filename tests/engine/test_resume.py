"""Runs that are interrupted and resume: after kills, signals and elastic restarts, and on other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine.children import child, children
from tests.engine.test_checkpoint import faults_soak

from meshwright import api
from meshwright.engine.checkpoint.folder import Folder, Lock
from meshwright.engine.data.sampler import Loader
from meshwright.engine.faults import StoppedError
from meshwright.engine.rank_env import Process
from meshwright.engine.train import _default_folder
from meshwright.errors import InputError
from meshwright.recipes.index import load as load_recipe

RECIPE = "llama3_8b_pretrain_config"
STEPS = 6


def train(out: Path, *overrides: str, nproc: int = 1, **options: Any) -> dict[str, Any]:
    """Return the JSON result of a short run, with one global batch size for any number of ranks."""
    given = {"layout.tp": "1", "layout.sp": "false", "train.global_batch_size": "8", "train.steps": str(STEPS)}
    given |= {"checkpoint.save_every": "2", "layout.micro_batch_size": "4"}
    given |= dict(text.split("=") for text in overrides)
    if out.name == "none":
        options["out"] = None
    done = api.train(
        RECIPE,
        tiny=True,
        nproc=nproc,
        quiet=True,
        **{"out": str(out), **options},
        overrides=[f"{key}={value}" for key, value in given.items()],
    )
    return (
        api.to_json(api.train_response(done)) if done.outcome is not None else {}
    )  # ranks other than 0 have no metrics


def forget(out: Path, *steps: int) -> None:
    """Remove the checkpoints of these steps, as if the run had ended before them."""
    for step in steps:
        Folder(out)._remove(Folder(out).step_path(step))


def test_a_run_resumes_on_other_ranks_and_in_another_layout(tmp_path: Path) -> None:
    full = train(tmp_path)
    assert full["first_step"] == 1
    assert full["checkpoint"] == str(tmp_path / "checkpoints" / "step-00000006")
    forget(tmp_path, 6)
    rest = train(tmp_path, "layout.tp=2", "layout.sp=true", nproc=2)
    assert (rest["first_step"], rest["resumed_from"]) == (5, str(tmp_path / "checkpoints" / "step-00000004"))
    assert rest["losses"] == pytest.approx(full["losses"][4:], rel=1e-5)
    forget(tmp_path, 6)
    assert train(tmp_path)["losses"] == full["losses"][4:]  # bit for bit in its own layout
    logged = faults_soak.losses_of(tmp_path)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    done = train(tmp_path)
    assert (done["losses"], done["first_step"]) == ([], 7)


def test_a_changed_contract_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    train(tmp_path, "train.steps=2")
    with pytest.raises(InputError, match=r"train\.steps was 2 and is 3; optimizer\.lr was 0\.003 and is 0\.01") as no:
        train(tmp_path, "train.steps=3", "optimizer.lr=0.01")
    assert "accept_changes=True resumes" in " ".join(no.value.fix)
    more = train(tmp_path, "train.steps=3", "optimizer.lr=0.01", accept_changes=True)
    assert more["first_step"] == 3
    with pytest.raises(InputError, match="already contains checkpoints"):
        train(tmp_path, "train.steps=3", "checkpoint.resume=false")


def _trains_beside(out: Path) -> str:
    try:
        train(out)
    except InputError as error:
        return str(error)
    return ""


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    assert "another run is writing to this folder" in child(tmp_path, partial(_trains_beside, tmp_path))
    lock.release()


def test_a_tiny_run_without_a_folder_and_a_benchmark_keep_no_checkpoints(tmp_path: Path) -> None:
    assert train(Path("none"), "train.steps=2")["checkpoint"] is None
    done = api.bench(RECIPE, tiny=True, nproc=1, quiet=True, out=str(tmp_path), overrides=["train.steps=2"])
    assert done.outcome is not None
    assert done.outcome.checkpoint is None
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_restarted_by_its_scheduler_finds_its_folder() -> None:
    recipe = load_recipe(RECIPE)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    assert _default_folder(recipe, Process(how="slurm"), slurm) == f"runs/{RECIPE}-17-0"
    assert (
        _default_folder(recipe, Process(how="torchrun"), {"TORCHELASTIC_RUN_ID": "a/../b"}) == f"runs/{RECIPE}-a_.._b"
    )
    assert _default_folder(recipe, None, slurm) != f"runs/{RECIPE}-17-0"


# Signals and kills; all phases and many kills are behind `make faults`.


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("flush", signal.SIGTERM, marks=pytest.mark.slow),  # a single process is preempted below
        pytest.param("step", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_preempted_run_saves_and_resumes(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    assert faults_soak.signalled(tmp_path, phase, number) == []


@pytest.mark.slow  # a killed rank is in the elastic restart below
def test_a_killed_run_resumes_with_the_same_losses(tmp_path: Path) -> None:
    found = faults_soak.soak(tmp_path, kills=2, seed=1, steps=12)
    assert found["kills"] >= 2
    assert found["faults"] == []


def _preempted_alone(out: Path) -> int:
    Loader.batch = _preempting(Loader.batch)  # type: ignore[method-assign]
    try:
        train(out)
    except StoppedError as error:
        return error.exit_code
    return 0


def _preempting(inner: Any) -> Any:
    def batch(self: Any, step: int) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, step)

    return batch


def test_a_run_in_a_single_process_can_be_preempted(tmp_path: Path) -> None:
    assert child(tmp_path, partial(_preempted_alone, tmp_path), timeout=60.0) == 75
    assert Folder(tmp_path).steps()[-1] in (3, 4)


# Elastic restarts


def _dying(inner: Any) -> Any:
    def batch(self: Any, step: int) -> Any:
        if step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, step)

    return batch


def _elastic_rank(out: Path) -> None:
    Loader.batch = _dying(Loader.batch)  # type: ignore[method-assign]
    train(out, nproc=None)  # type: ignore[arg-type]  # torchrun sets the number


def _elastic(out: Path) -> bool:
    """Do what torchrun does, with ranks forked from this process instead of spawned."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _elastic_rank)(out)
    return True


@pytest.mark.slow  # three launches of torch's elastic agent; other restarts are in the default run
def test_an_elastic_restart_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    full = train(tmp_path / "uninterrupted", nproc=2)
    (ended,) = children(tmp_path, partial(_elastic, tmp_path / "run"), timeout=60)
    assert ended.result is True, ended.stderr[-3000:]
    logged = faults_soak.losses_of(tmp_path / "run")
    assert {step: {loss} for step, loss in enumerate(full["losses"], 1)} == logged
    headers = [line for line in faults_soak.read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "header"]
    assert [header["first_step"] for header in headers] == [1, headers[1]["first_step"]]
    assert headers[1]["first_step"] in (3, 5)


@pytest.mark.slow  # imports torch five times
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.engine.test_resume import _elastic_rank\n"
        f"_elastic_rank(Path({str(tmp_path / 'run')!r}))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(faults_soak.losses_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert Folder(tmp_path / "run").latest() == STEPS
