"""Jobs to write, and fake SLURM tools that record their calls."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.clusters import cluster
from meshwright.frameworks.types import Program
from meshwright.launch.job import Job

TRAIN = ("-m", "meshwright", "train", "llama3_8b_pretrain_config", "--out", "runs/a b")


def job(gpus: str = "2x8xH100", words: tuple[str, ...] = TRAIN, **changes: Any) -> Job:
    """Return a job of our own engine."""
    defaults: dict[str, Any] = {"name": "try_it", "finds_ranks": True}
    return Job(**{**defaults, "cluster": cluster(gpus), "program": Program(argv=words), **changes})


SRUN = r"""
printf '%s\0' "$@" > "$RECORDS/srun"
env -0 > "$RECORDS/environment"
if [ -n "${HOLD:-}" ]; then
  trap 'echo USR1 >> "$RECORDS/signals"; kill $sleeper; exit 75' USR1
  trap 'echo TERM >> "$RECORDS/signals"; kill $sleeper; exit 143' TERM
  echo $$ > "$RECORDS/pid"
  sleep 30 & sleeper=$!
  echo up > "$RECORDS/fifo"
  wait $sleeper
fi
exit "${SRUN_CODE:-0}"
"""
SCONTROL = r"""
case "$1 $2" in
  "show hostnames") printf 'node01\nnode02\n' ;;
  "show job") cat "$RECORDS/job" 2>/dev/null || { echo "error: Invalid job id specified" >&2; exit 1; } ;;
  *) echo "$@" >> "$RECORDS/scontrol"; exit "${SCONTROL_CODE:-0}" ;;
esac
"""
TOOLS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "scancel": 'kill -s "${1#--signal=}" "$(cat "$RECORDS/pid")"',
    "squeue": 'echo "${STATE-RUNNING}"',
    "sbatch": 'cat > "$RECORDS/script"; printf "%s\\0" "$@" > "$RECORDS/sbatch"; echo "${SBATCH_SAYS-4711}"; '
    '[ -z "${SBATCH_FAILS:-}" ] || { echo "$SBATCH_FAILS" >&2; exit 1; }',
    "sacct": 'cat "$RECORDS/accounting" 2>/dev/null || { echo "Slurm accounting storage is disabled" >&2; exit 1; }',
}


@dataclass(frozen=True)
class FakeSlurm:
    """Fake tools on a PATH of their own, and their records."""

    folder: Path

    @property
    def records(self) -> Path:
        return self.folder / "records"

    def environment(self, **more: str) -> dict[str, str]:
        tools = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "30007", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_CPUS_PER_TASK": "8"}
        return {"PATH": tools, "RECORDS": str(self.records), "HOME": str(self.folder), **slurm, **more}

    def recorded(self, tool: str) -> list[str]:
        path = self.records / tool
        return path.read_text().split("\0")[:-1] if path.exists() else []

    def variables(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.recorded("environment"))

    def requeues(self) -> list[str]:
        path = self.records / "scontrol"
        return path.read_text().splitlines() if path.exists() else []

    def run(self, script: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash"], input=script, env=self.environment(**more), cwd=self.folder, capture_output=True, text=True,
            timeout=20, check=False,
        )  # fmt: skip


def fakes(folder: Path) -> FakeSlurm:
    """Write the fake tools into a folder."""
    (folder / "bin").mkdir()
    (folder / "records").mkdir()
    os.mkfifo(folder / "records" / "fifo")
    for name, text in TOOLS.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return FakeSlurm(folder)


def parses(script: str) -> bool:
    """Return whether bash can parse a script."""
    return subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).returncode == 0
