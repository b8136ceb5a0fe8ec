"""The generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@cache
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted(maker().PAGES))
def test_page_is_up_to_date(page: str) -> None:
    made = maker()
    assert (DOCS / page).read_text(encoding="utf-8") == made.written(page), "stale: run `make docs`"


def test_the_readmes_example_is_todays_answer() -> None:
    made = maker()
    assert made.README.read_text(encoding="utf-8") == made.readme_page(), "stale: run `make docs`"
    rehearsed = made.rehearsed_rows
    assert rehearsed.PAGE.read_text(encoding="utf-8") == rehearsed.page(), "stale: run `make docs`"
