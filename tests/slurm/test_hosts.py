"""`meshwright launch --scheduler hosts` with two hosts in network namespaces with addresses of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.jobs import LIMIT_S, RECIPE, TRAINING, environment, launch_command, losses
from tests.slurm.machine import CannotStartError
from tests.slurm.namespaces import INTERFACE, Host, two_hosts

pytestmark = pytest.mark.slurm

STEPS = 5


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts, gone with the test."""
    try:
        with two_hosts() as made:
            yield made
    except CannotStartError as error:
        pytest.skip(f"no network namespaces here: {error}")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert not any(host.name in left for host in made)


def test_two_hosts_train_as_two_ranks_of_one(hosts: list[Host], tmp_path: Path) -> None:
    env, out = environment(os.environ), tmp_path / "run"
    options = (
        "--scheduler",
        "hosts",
        "--hosts",
        ",".join(host.address for host in hosts),
        "--gpus",
        "2x1xH100",
        "--cpu",
    )
    options += ("--python", sys.executable, "--env", f"GLOO_SOCKET_IFNAME={INTERFACE}", "--out", str(out), "--json")
    launched = subprocess.run(
        launch_command(*options, steps=STEPS), env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    answer = json.loads(launched.stdout)
    assert answer["hosts"] == [host.address for host in hosts]
    logs = [tmp_path / f"{host.name}.log" for host in hosts]
    started = [host.start(line, log, env) for host, line, log in zip(hosts, answer["commands"], logs, strict=True)]
    codes = [process.wait(LIMIT_S) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    single = tmp_path / "single"
    train = [sys.executable, "-m", "meshwright", "train", RECIPE, *TRAINING, f"train.steps={STEPS}"]
    train += ["--tiny", "--dataset", "mock", "--nproc", "2", "--out", str(single)]
    subprocess.run(train, env=env, capture_output=True, timeout=LIMIT_S, check=True)
    assert list(losses(out)) == list(range(1, STEPS + 1))
    assert losses(out) == losses(single)
