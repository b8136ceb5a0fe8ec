"""What is wrong with the user's own data, found before a GPU is rented: missing files and rows that train refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright import file_access
from meshwright.api.paths import looks_like_path
from meshwright.errors import InputError
from meshwright.frameworks import CheckResult
from meshwright.notes import no_notes
from meshwright.recipes.types import ENGINES, Recipe
from meshwright.rules import Finding
from meshwright.version import VERSION

DATA_MISSING, DATA_ROWS = "data.missing-file", "data.rows"
DATASET = "dataset"  # framework of a data file that is checked by itself
CHECKED_ROWS = 20_000  # rows of a dataset that are parsed for an answer that should be instant
DATA_FILES = (".jsonl", ".jsonl.gz", ".ndjson", ".csv", ".tsv", ".parquet")  # that are no config of any framework
NO_FIX = "correct the rows"


def data_findings(recipe: Recipe) -> tuple[Finding, ...]:
    """Return the findings for the recipe's own files of data; none for hub datasets and over HTTP."""
    if file_access.closed():
        return ()
    names = [("data.dataset", name) for name in recipe.data.blend or (recipe.data.dataset,)]
    names += [("data.validation", recipe.data.validation)]
    return tuple(found for key, name in names if looks_like_path(name) for found in _findings(recipe, key, name))


def _findings(recipe: Recipe, key: str, name: str) -> Iterator[Finding]:
    path = Path(name).expanduser()
    if not any(Path(f"{path}{end}").exists() for end in ("", ".bin", ".idx")):
        near = [one for one in file_access.neighbours(path) if not recipe.data.blend]
        meant = f"; did you mean {key}={near[0]}?" if near else ""
        message = f"{name} is not on this machine: it was not counted, and train needs it where it runs{meant}"
        fix, other = (f"{key}={near[0]}",) if near else (), "copy it to where the run starts"
        yield Finding(DATA_MISSING, "warning", key, message, fix, no_fix="" if fix else other)
    elif recipe.goal != "pretrain" and not recipe.data.images:
        error = _refused(recipe, key, name)
        if error is not None:
            field = error.field or key
            overrides = tuple(one for one in error.fix if one.startswith(("data.", "'data.")))[:1]
            other = "" if overrides else " | ".join(error.fix) or NO_FIX
            yield Finding(DATA_ROWS, "error", field, error.reason, overrides, no_fix=other)


def _refused(recipe: Recipe, key: str, name: str) -> InputError | None:
    """Return why train would refuse a dataset; None if it would not, or if that needs a package that is not here."""
    from meshwright.engine.data.dataset_registry import dataset_columns
    from meshwright.engine.data.files import find_rows
    from meshwright.engine.data.row_errors import check_rows
    from meshwright.extras import MissingPackageError

    data = recipe.data
    single = Path(name).expanduser().is_file()
    try:
        with no_notes():
            rows = find_rows(Path(name).expanduser(), "train" if key != "data.dataset" and single else data.split, name)
            check_rows(rows, dataset_columns(name, data.columns), data.train_on, CHECKED_ROWS)
    except MissingPackageError:
        return None
    except InputError as error:
        return error
    return None


def is_data(target: object) -> bool:
    """Return whether a target of check is a file of data, not a config."""
    if not isinstance(target, str) or file_access.closed():
        return False
    return target.lower().endswith(DATA_FILES) and Path(target).expanduser().is_file()


def check_data(target: str) -> CheckResult:
    """Return the findings for the rows of a data file."""
    from meshwright.engine.data.conversations import REQUIRED
    from meshwright.engine.data.files import find_rows
    from meshwright.engine.data.row_errors import check_rows

    rows = find_rows(Path(target).expanduser(), "train", target)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = (f"a recipe on this data: meshwright check RECIPE --gpus 1xH100 data.dataset={target}",)
    try:
        found = check_rows(rows, {}, "answers", CHECKED_ROWS)
    except InputError as error:
        findings = (Finding(DATA_ROWS, "error", error.field or "", error.reason, (), no_fix=" | ".join(error.fix)),)
    else:
        parts = ", ".join(f"{part} from {name}" for part, name in found.columns.items() if part in REQUIRED)
        counted = f"{found.rows:,} conversations" + ("" if found.complete else ", the first of the file")
        unused = f"; not used: {', '.join(found.unused)}" if found.unused else ""
        notes = (f"{counted} ({parts}){unused}", *notes)
    notes = (*filter(None, (rows.delimiters,)), *notes)
    recipe = Recipe(name=target, model="", goal="sft", cluster="")
    return CheckResult(DATASET, VERSION, ENGINES[0], target, recipe, None, None, findings, None, notes=notes)
