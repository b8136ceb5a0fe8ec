"""A newcomer's fine-tuning walk: short logs, programs that parse no arguments, pasted fixes, paths inside recipes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORD = "{{'loss': {loss:.4f}, 'grad_norm': 0.5, 'learning_rate': {rate:g}, 'epoch': {epoch:.2f}}}\n"


def _log(lines: int, loss: Callable[[int], float], epochs: float = 2.0, rate: float = 1e-4) -> str:
    return "".join(RECORD.format(loss=loss(n), rate=rate, epoch=epochs * (n + 1) / lines) for n in range(lines))


def _with_bars(text: str, every: int = 10) -> str:
    records = text.splitlines(keepends=True)
    total = every * len(records)
    bars = [f"  1%|#         | {every * n}/{total} [{n}:00<10:00,  6.1s/it]\n" for n in range(1, len(records) + 1)]
    return "".join(bar + record for bar, record in zip(bars, records, strict=True))


def _noisy(seed: int, of: Callable[[int], float], noise: float) -> Callable[[int], float]:
    chance = random.Random(seed)
    return lambda n: of(n) * (1 + chance.gauss(0, noise))


FLAT = {
    "const20": _log(20, lambda _: 2.31),
    "const30": _log(30, lambda _: 2.31),
    "const59": _log(59, lambda _: 2.31),
    "const99": _log(99, lambda _: 2.31),
    "noisy": _log(59, _noisy(1, lambda _: 2.31, 0.007)),
    "with a bar": _with_bars(_log(75, _noisy(2, lambda _: 2.31, 0.01))),
}
HEALTHY = {
    "converged": _log(75, _noisy(3, lambda n: 1.1 + 1.2 * 0.85**n, 0.02)),
    "slow": _log(60, _noisy(4, lambda n: 1.4 - 0.0012 * n, 0.01)),
    "noisy": _log(40, _noisy(5, lambda n: 1.4 - 0.001 * n, 0.04)),
    "with a bar": _with_bars(_log(37, _noisy(6, lambda n: 0.9 + 0.6 * 0.9**n, 0.03))),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FLAT)
def test_a_loss_that_does_not_move_is_reported_from_twenty_lines(name: str, meshwright: Any) -> None:
    Path("train.log").write_text(FLAT[name])
    shown = meshwright("doctor", "train.log").out
    assert "warning loss.flat" in shown
    assert "step 751" not in shown


@pytest.mark.parametrize("name", HEALTHY)
def test_a_fine_tuning_that_learns_or_is_too_noisy_to_tell_has_no_finding(name: str, meshwright: Any) -> None:
    Path("train.log").write_text(HEALTHY[name])
    shown = meshwright("doctor", "train.log").out
    assert "no findings" in shown
    assert ("not checked: loss.flat (needs about" in shown) is (name == "noisy")


def test_too_few_steps_are_listed_as_not_checked(meshwright: Any) -> None:
    Path("train.log").write_text(_log(40, lambda _: 2.31, epochs=0.1))
    needed = "not checked: loss.flat (needs 100 steps, or half an epoch after the warm-up: the log has 40 lines"
    assert needed in meshwright("doctor", "train.log").out


def test_a_bar_before_each_record_is_the_step_of_that_record(meshwright: Any) -> None:
    Path("train.log").write_text(_with_bars(_log(75, lambda n: 2.31 - 0.01 * n)))
    assert "step 750 of 750" in meshwright("doctor", "train.log").out
