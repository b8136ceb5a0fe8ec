"""The estimates of all recipes and of their variations, the schedules and the calibrations are the kept ones."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests import kept

from . import kept_estimates, kept_schedules


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("module", [kept_estimates, kept_schedules], ids=["estimates", "schedules"])
def test_estimates_are_the_kept_ones(module: ModuleType) -> None:
    changed = kept.first_difference(module.FILE, module.answers())
    assert not changed, "a change of the cost model: python -m tests.kept writes the new values"
