"""Settings that must stand before torch is imported, and what makes a run of thousands of tests faster."""

import gc
import os
import signal
from pathlib import Path

# Ranks are forked after torch is imported; a parent that started OpenMP threads would leave them deadlocked.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell starts background jobs with Ctrl-C ignored; tests that interrupt commands need the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: modules and test items stay until the end

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Machines are shared: what takes too long fails by the suite's limit. Other examples are drawn in every run.
settings.register_profile("house", deadline=None, max_examples=12)
settings.load_profile("house")


LISTED = frozenset(Path(__file__).with_name("slow.txt").read_text("utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt, before pytest leaves out what is marked so."""
    for item in items:
        if item.nodeid in LISTED or item.nodeid.partition("[")[0] in LISTED:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the garbage collector skip what was imported and collected: millions of objects that live to the end."""
    gc.freeze()
    gc.set_threshold(20_000)  # tests of the planner take 4 % less time than with Python's 700
    gc.enable()
