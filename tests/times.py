"""A pytest plugin that lists the slowest test files and tests: `make test-times`.

Wall time includes waiting; CPU time includes that of processes which a test started and waited for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SHOWN = 40
_wall: Counter[str] = Counter()
_cpu: Counter[str] = Counter()
_last = 0.0


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it waited for."""
    return sum(os.times()[:4])


def pytest_runtest_logstart() -> None:
    global _last
    _last = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Attach the CPU seconds since the last report: of the setup, of the test, of the teardown."""
    global _last
    report = yield
    now = _cpu_s()
    report.cpu_s, _last = now - _last, now
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the times; with workers, this runs in the process that started them."""
    for name in (report.nodeid.partition("::")[0], report.nodeid):
        _wall[name] += report.duration
        _cpu[name] += report.cpu_s


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest files, then the slowest tests."""
    files = {name for name in _wall if "::" not in name}
    terminalreporter.section(
        f"{sum(_wall[name] for name in files):.0f} s in tests, {sum(_cpu[name] for name in files):.0f} s of CPU"
    )
    for names in (files, _wall.keys() - files):
        terminalreporter.write_line("  wall s   cpu s")
        for name in sorted(names, key=_wall.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{_wall[name]:8.1f}{_cpu[name]:8.1f}  {name}")
