"""A newcomer's runs: scripts that train and evaluate, folders that move, recipes read back from a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SCRIPT = """
print("script starts", flush=True)
from meshwright.engine.data.workers import map_in_order, worker_pool
from meshwright.engine.spawned import spawn_context

def loss(logits, labels):
    return logits

with worker_pool(1) as pool:
    print(list(map_in_order(pool, len, ["four"], 1)))
spawn_context(("work", {"loss": loss}))
"""


def test_a_script_without_a_main_guard_runs_once() -> None:
    Path("script.py").write_text(SCRIPT)
    paths = os.pathsep.join(sys.path[1:])
    words, env = [sys.executable, "script.py"], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "script starts\n[('four', 4)]\n"
    assert "InputError: loss: is defined in the script" in done.stderr
    assert "move loss to a module and import it" in done.stderr
    guarded = SCRIPT.replace("with worker_pool", 'if __name__ == "__main__":\n  with worker_pool').replace(
        "spawn_context((", "  spawn_context(("
    )
    Path("script.py").write_text(guarded)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "script starts\n[('four', 4)]\n")
