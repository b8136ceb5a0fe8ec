"""Judging one case and many."""

from __future__ import annotations

import numpy as np

from meshwright.rules import judge, legal

from .helpers import case


def test_a_sound_case_has_no_errors() -> None:
    assert not [f for f in judge(case()) if f.severity == "error"]


def test_columns_are_masked_like_single_cases() -> None:
    tp = np.array([1, 2, 3, 4, 8])
    assert legal(case().replace(tp=tp)).tolist() == [bool(legal(case().replace(tp=int(t)))) for t in tp]
