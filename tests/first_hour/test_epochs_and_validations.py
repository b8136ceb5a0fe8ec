"""Logs of fine-tunings of several epochs: what the drops at their edges and the validation losses say together."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

EVALS = (0.4012, 0.3471, 0.3895, 0.4622)
LEVELS = (0.42, 0.31, 0.17, 0.09)


def log(per_epoch: int = 83, evals: tuple[float, ...] = EVALS, bars: int = 1, every: int = 1) -> str:
    """Return what the Trainer prints: records and validations between bars, of which a log may keep only some."""
    noise, last = random.Random(1), 4 * per_epoch
    lines = [f"  0%|          | 0/{last} [00:00<?, ?it/s]"]
    for step in range(1, last + 1):
        loss = 1.9 * math.exp(-step / 25) + LEVELS[(step - 1) // per_epoch] + noise.uniform(-0.03, 0.03)
        if step % every == 0:
            text = f"{{'loss': {loss:.4f}, 'learning_rate': 0.0002, 'epoch': {step / per_epoch:.2f}}}"
            lines.append(text)
        if step % bars == 0:
            lines.append(f"{100 * step // last}%|███ | {step}/{last} [{step * 4 // 60:02d}:{step * 4 % 60:02d}<02:00]")
        if step % per_epoch == 0 and evals:
            lines.append(f"{{'eval_loss': {evals[step // per_epoch - 1]}, 'epoch': {step / per_epoch}}}")
    return "\n".join((*lines, "{'train_runtime': 1361.2, 'train_steps_per_second': 0.244, 'epoch': 4.0}", ""))


def diagnosed(meshwright: Any, text: str) -> dict[str, dict[str, Any]]:
    Path("run.log").write_text(text)
    return {one["rule"]: one for one in meshwright("doctor", "run.log", "--json").json["findings"]}


@pytest.mark.parametrize("bars", [1, 20])
@pytest.mark.parametrize("per_epoch", [83, 100])
def test_one_report_ends_the_training_at_one_epoch(meshwright: Any, per_epoch: int, bars: int) -> None:
    found = diagnosed(meshwright, log(per_epoch, bars=bars))
    repeated, overfitting = found["loss.repeated-data"], found["loss.overfitting"]
    assert "end after epoch 2" in str(repeated["remedies"][0])
    assert f"the checkpoint of step {2 * per_epoch}" in str(overfitting["remedies"][0])
    assert f"to 0.4622 in step {4 * per_epoch}" in overfitting["message"]
    assert "evaluate" not in str(repeated["remedies"])  # it does


@pytest.mark.parametrize(("every", "epoch"), [(1, 3), (5, 2)])
def test_an_epoch_ends_at_its_last_step(meshwright: Any, every: int, epoch: int) -> None:
    repeated = diagnosed(meshwright, log(evals=(), every=every))["loss.repeated-data"]
    assert f"where epoch {epoch} ends, at step {83 * epoch}, and at 1 more edge:" in repeated["message"]
    assert f"end after epoch {epoch}" in str(repeated["remedies"][0])


def test_epochs_after_which_the_validation_still_improves_are_no_fault(meshwright: Any) -> None:
    assert "loss.repeated-data" not in diagnosed(meshwright, log(evals=(0.4, 0.35, 0.33, 0.32)))
    best_in_third = diagnosed(meshwright, log(evals=(0.4, 0.35, 0.33, 0.39)))["loss.repeated-data"]
    assert "end after epoch 3" in str(best_in_third["remedies"][0])
