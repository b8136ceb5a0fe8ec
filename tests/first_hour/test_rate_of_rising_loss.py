"""doctor on runs whose loss rises during the warm-up: the advised rate is none at which it rose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LOSSES = (1.95, 1.9, 1.85, 1.8, 1.75, 1.7, 1.65, 1.95, 2.4, 2.9, 3.4, 4.0, 4.6, 5.2, 5.8, 6.5)


def _advised(meshwright: Any, folder: Path, rates: list[float], *typed: str) -> tuple[float, str]:
    """Return the learning rate that doctor advises for a run with these rates, and why."""
    losses = LOSSES + ("nan",) * (len(rates) - len(LOSSES))
    lines = [
        f"{{'loss': {loss}, 'grad_norm': {5.0 + step}, 'learning_rate': {rate:.6g}, 'epoch': {0.01 * (step + 1):.2f}}}"
        for step, (loss, rate) in enumerate(zip(losses, rates, strict=True))
    ]
    log = folder / "train.log"
    log.write_text("\n".join(lines) + "\n")
    findings = meshwright("doctor", str(log), "--json", *typed).json["findings"]
    rising = next(one for one in findings if one["rule"] in ("loss.not-a-number", "loss.diverging"))
    lower = next(one for one in rising["remedies"] if one["try"][0].startswith("optimizer.lr="))
    return float(lower["try"][0].partition("=")[2]), lower["why"]


@pytest.mark.parametrize(
    ("steps", "typed"),
    [(20, ()), (16, ()), (20, ("--model", "qwen3-8b", "--gpus", "2xRTX4090", "--goal", "qlora", "optimizer.lr=3e-4"))],
)
def test_the_rate_before_the_rise_is_advised(
    meshwright: Any, tmp_path: Path, steps: int, typed: tuple[str, ...]
) -> None:
    rate, why = _advised(meshwright, tmp_path, [1e-5 * (step + 1) for step in range(steps)], *typed)
    assert rate == 7e-5
    assert "the loss rises from step 7" in why


def test_half_the_rate_is_advised_after_the_warmup(meshwright: Any, tmp_path: Path) -> None:
    rate, why = _advised(meshwright, tmp_path, [1e-4 * (1 - step / 40) for step in range(20)])
    assert (rate, why) == (5e-5, "smaller updates")


def test_a_rise_in_the_first_steps_of_the_warmup_is_no_tiny_rate(meshwright: Any, tmp_path: Path) -> None:
    rate, _ = _advised(meshwright, tmp_path, [1e-7] * 7 + [1e-5 * (step + 1) for step in range(10)])
    assert rate == 1e-5


def _warmup_advised(meshwright: Any, folder: Path, jump: int) -> bool:
    """Return whether doctor advises a longer warm-up for a loss that jumps at this step, after 20 of warm-up."""
    lines = [
        f"{{'loss': {(3.5 if jump <= step < jump + 5 else 2.5) + 0.01 * (step % 3)}, 'grad_norm': 1.0, "
        f"'learning_rate': {3e-4 * min(1, step / 20):.6g}, 'epoch': {step / 1000:.3f}}}"
        for step in range(1, 401)
    ]
    log = folder / "train.log"
    log.write_text("\n".join(lines) + "\n")
    found = meshwright("doctor", str(log), "--json").json["findings"]
    spike = next(one for one in found if one["rule"] == "loss.spikes")
    return any("slower warm-up" in one["why"] for one in spike["remedies"])


def test_a_longer_warmup_is_advised_only_for_trouble_that_it_can_change(meshwright: Any, tmp_path: Path) -> None:
    assert _warmup_advised(meshwright, tmp_path, 60)
    assert not _warmup_advised(meshwright, tmp_path, 350)
