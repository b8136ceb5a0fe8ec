"""The command line as a newcomer types it, in an empty folder."""

from pathlib import Path

import pytest
from tests.cli.conftest import meshwright

__all__ = ["meshwright"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: files that a test types stay out of the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
