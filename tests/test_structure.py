"""The structure of the source: no import cycle, and the architecture page names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "meshwright"


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or indirectly: modules left when leaves are removed."""
    left = {module: set(targets) & set(imports) for module, targets in imports.items()}
    importers = {module: {m for m, targets in left.items() if module in targets} for module in left}
    while True:
        ends = [m for m in left if not left[m] or not importers[m]]
        if not ends:
            return [sorted(left)] if left else []
        for module in ends:
            for importer in importers.pop(module):
                if importer in left:
                    left[importer].discard(module)
            for target in left.pop(module):
                if target in importers:
                    importers[target].discard(module)


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("meshwright")
    assert cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_a_cycle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_the_architecture_page_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Where is")[1].split("## Packages")[0]
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", table)
    assert len(named) >= 9
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    tree = text.split("```")[1]
    listed = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(listed) == packages


def test_names_are_compared_in_one_place() -> None:
    found = [path for path in (ROOT / "src").rglob("*.py") if "difflib" in path.read_text()]
    assert found == []  # similar.py knows that numbers and words differ


def test_every_listed_slow_test_exists() -> None:
    lines = (ROOT / "tests" / "slow.txt").read_text("utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("# ")]
    for line in listed:
        path, _, name = line.partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text("utf-8"), line
    assert len(listed) == len(set(listed))
