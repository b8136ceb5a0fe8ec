"""Two newcomers' walks: fine-tuning on a few cards, and a cluster of 24 nodes whose logs they ask about."""

from __future__ import annotations

import pytest

from meshwright.doctor import reading


def trainer_log(total: int, every: int, seconds: float, *, first: bool = False) -> str:
    """Return a log of the Trainer without a progress bar."""
    epochs, rate = 3.0, round(total / seconds, 3)
    steps = [*([1] if first else []), *range(every, total + 1, every)]
    lines = [
        f"{{'loss': {2 - step / total:.4f}, 'grad_norm': 0.5, 'epoch': {round(epochs * step / total, 2)}}}"
        for step in steps
    ]
    end = f"{{'train_runtime': {seconds}, 'train_steps_per_second': {rate}, 'train_loss': 1.1, 'epoch': {epochs}}}"
    return "\n".join([*lines, end])


@pytest.mark.parametrize("seconds", [3605.2, 3598.1])
@pytest.mark.parametrize("first", [False, True])
def test_the_trainers_rounded_rate_gives_whole_steps_per_record(seconds: float, first: bool) -> None:
    run = reading.read_text(trainer_log(1000, 10, seconds, first=first), "hf2.log")
    found = [step.step for step in run.steps]
    assert found == [*([1] if first else []), *range(10, 1001, 10)]
    assert run.header.total_steps == 1000
    assert any("10 steps per record" in note for note in run.notes)


def test_steps_that_are_approximate_are_called_so() -> None:
    run = reading.read_text(trainer_log(70, 7, 30011.0), "slow.log")
    assert any("approximate" in note for note in run.notes)


def test_an_unfinished_run_takes_its_steps_from_the_examples_and_the_batch() -> None:
    head = (
        "***** Running training *****\n  Num examples = 8,000\n  Num Epochs = 3\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 24\n  Total optimization steps = 1,002\n"
    )
    lines = [f"{{'loss': 1.5, 'grad_norm': 0.5, 'epoch': {round(step / 334, 2)}}}" for step in range(10, 401, 10)]
    run = reading.read_text(head + "\n".join(lines), "unfinished.log")
    assert [step.step for step in run.steps] == list(range(10, 401, 10))
    assert run.header.total_steps == 1002
