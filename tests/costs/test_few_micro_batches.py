"""Interleaved stages with fewer micro batches than stages: chunks cannot overlap what is not there."""

from __future__ import annotations

import pytest

import meshwright

WORDS = ("layout.micro_batch_size=1", "layout.tp=1", "layout.pp=4")


def seconds(micro_batches: int, vp: int) -> float:
    schedule = "interleaved_1f1b" if vp > 1 else "1f1b"
    more = (f"train.global_batch_size={micro_batches}", f"layout.vp={vp}", f"layout.pp_schedule={schedule}")
    found = meshwright.estimate("llama3-8b", "4xH200", goal="pretrain", engine="torchtitan", overrides=(*WORDS, *more))
    return float(found.estimate.step_s)


def test_one_micro_batch_gains_nothing_from_chunks() -> None:
    assert seconds(1, 8) == pytest.approx(seconds(1, 1), rel=0.02)


def test_the_gain_grows_with_the_micro_batches_up_to_the_stages() -> None:
    saved = [seconds(number, 1) - seconds(number, 8) for number in (1, 2, 3, 4, 8)]
    assert saved[:4] == sorted(saved[:4])
    assert saved[3] == pytest.approx(saved[4], rel=0.05)
