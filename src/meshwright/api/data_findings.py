"""What is wrong with the user's own data, found before a GPU is rented: missing files and rows that train refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import extras, file_access
from meshwright.api.paths import looks_like_path, several_files_error
from meshwright.api.sample_lengths import tokenized_with
from meshwright.display import plural
from meshwright.errors import InputError, some
from meshwright.notes import no_notes
from meshwright.recipes import overrides as override
from meshwright.recipes.replacements import LINES
from meshwright.recipes.types import ENGINES, Recipe
from meshwright.rules import Finding
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.engine.data.files import Rows
    from meshwright.engine.data.row_errors import CheckedRows
    from meshwright.frameworks.result import CheckResult

DATA_MISSING, DATA_ROWS, NO_VALIDATION = "data.missing-file", "data.rows", "data.no-validation"
UNUSED_ANSWERS = "data.unused-answers"
DATASET = "dataset"  # framework of a data file that is checked by itself
CHECKED_ROWS = 20_000  # rows of a dataset that are parsed for an answer that should be instant
RENDERED_ROWS = 2_000  # rows that are also rendered with the chat template
OPEN = re.compile(r"=(?:FILE|FOLDER|COLUMN)\b")  # a setting whose value the user has to find
NO_FIX = "correct the rows"
ROW_SETTINGS = ("data.columns", "data.train_on", "data.split")
"""What a check of a data file by itself depends on."""


def dataset_names(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the datasets that a recipe trains on."""
    return tuple(recipe.data.blend or (recipe.data.dataset,))


def data_findings(recipe: Recipe, thorough: bool = False) -> tuple[Finding, ...]:
    """Return the findings for the recipe's own files of data; none for hub datasets and over HTTP.

    With `thorough`, also those that need the chat template, and warnings of rows that train drops.
    """
    if file_access.closed():
        return ()
    if several := listed_dataset(recipe):
        return (*several, *_missing_folders(recipe), *without_validation(recipe))
    names = [("data.dataset", name) for name in dataset_names(recipe)]
    names += [("data.validation", recipe.data.validation)]
    known = [(key, name) for key, name in names if names_a_file(name)]
    rows = (found for key, name in known for found in _findings(recipe, key, name, thorough))
    return (*rows, *_missing_folders(recipe), *without_validation(recipe))


def listed_dataset(recipe: Recipe) -> tuple[Finding, ...]:
    """Return the error of a dataset that lists several sources; no framework reads the list as one name."""
    several = several_files_error(recipe)
    return () if several is None else (_of_several_files(several),)


def names_a_file(name: str) -> bool:
    """Return whether a dataset's name can only be a path, or ends like a file's and is nearly that of a file here.

    chats.jsnl is chats.jsonl mistyped; a name of the hub seldom ends like a file, and never like one of this folder.
    """
    path = Path(name)
    if looks_like_path(name) or not path.suffix or "/" in name:
        return looks_like_path(name)
    return any(map(looks_like_path, file_access.neighbours(path)))


def unreadable_rows(recipe: Recipe, folder: Path | None) -> Iterator[Finding]:
    """Yield an error of rows that no trainer can read, in the JSON lines that a program in `folder` trains on."""
    from meshwright.engine.data.files import find_rows
    from meshwright.engine.data.row_errors import check_readable

    if file_access.closed() or recipe.data.blend:
        return
    name = Path(recipe.data.dataset).expanduser()
    path = next((one for one in (name, (folder or Path()) / name) if one.suffix in LINES and one.is_file()), None)
    if path is None:
        return
    try:
        with no_notes():
            check_readable(find_rows(path, "train", str(path)), CHECKED_ROWS)
    except InputError as error:
        message = f"{error.reason}: the file cannot be loaded"
        yield Finding(DATA_ROWS, "error", "data.dataset", message, (), no_fix=" | ".join(error.fix) or NO_FIX)


def without_validation(recipe: Recipe) -> Iterator[Finding]:
    """Yield a warning of validations without data to validate on, which train refuses for the user's own dataset."""
    data, every = recipe.data, recipe.train.eval_every
    if every and not data.validation and not data.validation_part and any(map(looks_like_path, dataset_names(recipe))):
        message = f"train.eval_every={every}, but no validation data is set: train refuses it; 0 turns validation off"
        yield Finding(NO_VALIDATION, "warning", "train.eval_every", message, ("data.validation_part=0.02",))


def _of_several_files(error: InputError) -> Finding:
    """Return the error as a finding: a blend is an override, a folder is made outside."""
    is_override = error.fix[0].startswith(("data.", "'data."))
    fix, other = (tuple(error.fix), "") if is_override else ((), error.fix[0])
    return Finding(DATA_ROWS, "error", "data.dataset", f"{error.value} {error.reason}", fix, no_fix=other)


def _missing_folders(recipe: Recipe) -> Iterator[Finding]:
    """Yield a warning for a tokenizer or weights that are not on this machine, which train refuses."""
    for key, name in (
        ("data.tokenizer", recipe.data.tokenizer),
        ("checkpoint.pretrained", recipe.checkpoint.pretrained),
    ):
        if looks_like_path(name) and not Path(name).expanduser().exists():
            near = file_access.neighbours(Path(name).expanduser())
            meant = f"; did you mean {key}={near[0]}?" if near else ""
            message = f"{name} is not on this machine: train needs it where it runs{meant}"
            fix, other = (f"{key}={near[0]}",) if near else (), "copy it to where the run starts"
            yield Finding(DATA_MISSING, "warning", key, message, fix, no_fix="" if fix else other)


def _findings(recipe: Recipe, key: str, name: str, thorough: bool) -> Iterator[Finding]:
    path = Path(name).expanduser()
    if file_access.is_address(name) and recipe.engine == ENGINES[0]:
        message = f"{name} is an address, not a file or folder: {file_access.FETCH}"
        yield Finding(DATA_MISSING, "error", key, message, (), no_fix=f"{key}=/PATH")
    elif not any(Path(f"{path}{end}").exists() for end in ("", ".bin", ".idx")):
        near = [one for one in file_access.neighbours(path) if not recipe.data.blend]
        meant = f"; did you mean {key}={near[0]}?" if near else ""
        message = f"{name} is not on this machine: it was not counted, and train needs it where it runs{meant}"
        fix, other = (f"{key}={near[0]}",) if near else (), "copy it to where the run starts"
        yield Finding(DATA_MISSING, "warning", key, message, fix, no_fix="" if fix else other)
    elif not recipe.data.images:
        from meshwright.extras import MissingPackageError

        try:
            if recipe.goal != "pretrain":
                found = _checked(recipe, key, name, thorough)
                yield from _unused_answers(recipe, found) if key == "data.dataset" else ()
                yield from _dropped(found, key) if thorough else ()
            elif recipe.engine == ENGINES[0]:
                _check_text(recipe, key, path)
        except MissingPackageError:
            return
        except InputError as error:
            yield _refused(error, key)


def _refused(error: InputError, key: str) -> Finding:
    """Return the finding of rows that train refuses."""
    overrides = tuple(one for one in error.fix if one.startswith(("data.", "'data.")) and not OPEN.search(one))
    other = "" if overrides else " | ".join(error.fix) or NO_FIX
    return Finding(DATA_ROWS, "error", error.field or key, error.reason, overrides[:1], no_fix=other)


def _check_text(recipe: Recipe, key: str, path: Path) -> None:
    """Raise InputError if a pretraining would refuse one of a dataset's first lines."""
    from meshwright.engine.data.text_errors import bad_lines, bad_lines_error, is_text_to_tokenize

    if is_text_to_tokenize(path) and (lines := bad_lines(path, recipe.data)):
        raise bad_lines_error(lines, path, recipe.data, key)


def _refused_in_pretraining(recipe: Recipe, name: str) -> Iterator[Finding]:
    """Yield a warning of rows of texts that a pretraining refuses, where a fine-tuning drops them."""
    try:
        _check_text(recipe, "data.dataset", Path(name).expanduser())
    except InputError as error:
        refused = _refused(error, "data.dataset")
        message = f"train with --goal pretrain refuses it: {refused.message}"
        yield msgspec.structs.replace(refused, severity="warning", message=message)


def _dropped(found: CheckedRows, field: str) -> Iterator[Finding]:
    """Yield a warning of rows that train drops."""
    from meshwright.engine.data.row_errors import SHOWN_ERRORS, without_rows

    if found.untrainable:
        rows = plural(found.rows, "row") if found.complete else f"the first {found.rows:,} rows"
        count = f"{len(found.untrainable):,} of {rows} will be dropped"
        message = f"{count}: {some(found.untrainable, SHOWN_ERRORS, '; ')}"
        other = " | ".join(without_rows(found.untrainable)) or NO_FIX
        yield Finding(DATA_ROWS, "warning", field, message, (), no_fix=other)


def _unused_answers(recipe: Recipe, found: CheckedRows) -> Iterator[Finding]:
    """Yield a warning of a column of labels or answers that a fine-tuning on texts does not use."""
    from meshwright.engine.data.unused_answers import unused_answers

    answers = unused_answers(recipe.data.columns, found.columns, found.unused)
    if answers is not None:
        message = f"{answers.reason}; {shlex.quote(answers.keeps)} means the texts alone"
        fix = answers.fix
        if answers.column in found.numeric:  # an answer is text
            message = f"{answers.reason}, as it contains numbers: a column with their names as text can be the answer"
            fix = (answers.keeps,)
        yield Finding(UNUSED_ANSWERS, "warning", "data.columns", message, fix)


def _checked(recipe: Recipe, key: str, name: str, thorough: bool) -> CheckedRows:
    """Return what the first rows of a dataset are; raise InputError if train would refuse it."""
    from meshwright.engine.data.dataset_registry import dataset_columns
    from meshwright.engine.data.files import find_rows
    from meshwright.engine.data.row_errors import check_rows

    data = recipe.data
    single = Path(name).expanduser().is_file()
    with no_notes():
        rows = find_rows(Path(name).expanduser(), "train" if key != "data.dataset" and single else data.split, name)
        columns = dataset_columns(name, data.columns)
        found = _parsed(rows, msgspec.json.encode(columns), data.train_on, msgspec.json.encode(rows.state()))
        rendered = key == "data.dataset" and tokenized_with(recipe)  # all of its rows
        if thorough and not rendered and (render := _template(recipe)) is not None:
            check_rows(rows, columns, data.train_on, RENDERED_ROWS, render)
    return found


@lru_cache(maxsize=8)
def _parsed(rows: Rows, columns: bytes, train_on: str, state: bytes) -> CheckedRows:
    """Return what the first rows of a dataset are: a plan asks several times for those of one state of its files."""
    from meshwright.engine.data.row_errors import check_rows

    del state  # part of the cache key
    return check_rows(rows, msgspec.json.decode(columns), train_on, CHECKED_ROWS)


def _template(recipe: Recipe) -> Callable[[Any, str], object] | None:
    """Return what renders a conversation with the chat template of a recipe; None if that is not on this machine."""
    if any(map(extras.missing, ("transformers", "jinja2"))):
        return None
    from meshwright.engine.data.byte_level import NAME
    from meshwright.engine.data.templates import ChatTemplate
    from meshwright.engine.data.tokenizers import load_tokenizer, tokenizer_name

    file, tokenizer = recipe.data.chat_template, None
    with suppress(InputError):  # train reports a tokenizer that is not complete
        name = tokenizer_name(recipe) or ""
        if name == NAME or (looks_like_path(name) and Path(name).expanduser().exists()):
            tokenizer = load_tokenizer(name)
    if tokenizer is None and not file:
        return None
    # Only the text matters here: for a template of its own file, any tokenizer does.
    return ChatTemplate(
        tokenizer or load_tokenizer(NAME), file, recipe.data.train_on, recipe.data.merge_system
    ).render_masked


def check_data(target: str, overrides: Sequence[str] = ()) -> CheckResult:
    """Return the findings for the rows of a data file, read with the data.* overrides."""
    from meshwright.engine.data.conversations import REQUIRED
    from meshwright.engine.data.files import FILE, find_rows
    from meshwright.engine.data.row_errors import check_rows
    from meshwright.frameworks.result import CheckResult

    recipe, changes = override.apply_with_log(Recipe(name=target, model="", goal="sft", cluster=""), overrides)
    whole = shlex.join(["meshwright", "check", "RECIPE", "--gpus", "1xH100", f"data.dataset={target}", *overrides])
    other = next((one for one in changes if one.key not in ROW_SETTINGS), None)
    if other is not None:
        reason = f"{target} is a dataset, whose check uses {', '.join(ROW_SETTINGS)} only"
        raise InputError(reason, field=other.key, value=other.new, fix=(whole,))
    rows = find_rows(Path(target).expanduser(), recipe.data.split, target)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = (f"a recipe on this data: {whole}",)
    try:
        found = check_rows(rows, recipe.data.columns, recipe.data.train_on, CHECKED_ROWS)
    except InputError as error:
        if error.field == FILE:
            raise
        findings = (Finding(DATA_ROWS, "error", error.field or "", error.reason, (), no_fix=" | ".join(error.fix)),)
    else:
        parts = ", ".join(f"{part} from {name}" for part, name in found.columns.items() if part in REQUIRED)
        is_text = "text" in found.columns
        refused = _refused_in_pretraining(recipe, target) if is_text else ()
        findings = (*refused, *_unused_answers(recipe, found), *_dropped(found, "data.dataset"))
        counted = plural(found.rows, "text" if is_text else "conversation") + (
            "" if found.complete else ", the first of the file"
        )
        unused = f"; not used: {', '.join(found.unused)}" if found.unused else ""
        repeated = (
            f"{plural(len(found.duplicates), 'repeated row')}: {some(found.duplicates, 3)}; "
            "data.validation_part keeps equal conversations on one side"
        )
        notes = (f"{counted} ({parts}){unused}", *([repeated] if found.duplicates else []), *notes)
    notes = (*filter(None, (rows.format_note,)), *notes)
    return CheckResult(DATASET, VERSION, ENGINES[0], target, recipe, None, None, findings, None, notes=notes)
