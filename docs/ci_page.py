"""Generate the page on CI: what `check` prints for the sample repository in examples/ci_repository today."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from meshwright.cli.run import run

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "examples" / "ci_repository"
RESULTS = ROOT / "benchmarks" / "results" / "corpora.json"
LEDGER = ROOT / "benchmarks" / "corpora" / "ledger.toml"
BASELINE = ".meshwright-baseline.json"
WORKFLOW = """\
name: training configs
on: [pull_request]
permissions:
  contents: read
jobs:
  check:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: OWNER/meshwright@main  # its action.yml
        with:
          paths: .
          gpus: 8xH100
"""
SCANNING = """\
      - uses: OWNER/meshwright@main
        with:
          sarif: meshwright.sarif
          fail-on: never
      - uses: github/codeql-action/upload-sarif@v3
        with:
          sarif_file: meshwright.sarif
"""
HOOK = """\
repos:
  - repo: https://github.com/OWNER/meshwright
    rev: main
    hooks:
      - id: meshwright
        args: [--gpus, 8xH100]
        files: ^(configs|jobs)/
"""

TEXT = """\
# Check training configs in CI

`meshwright check` reads files, folders and quoted globs (`'configs/**/*.yaml'`), starts nothing and needs no GPU. It
reads every file that one of the frameworks reads, and names those that it skips. A file of a folder that cannot be
parsed is an error if it shows a setting of a training, such as `learning_rate`; other programs' files (templates,
several documents, comments in JSON) are skipped. Many files are checked in as many processes as there are cores.

## A sample repository

[examples/ci_repository](../examples/ci_repository/README.md) has a torchtitan config, a DeepSpeed config, a Megatron-LM
job and a file of another program. A workflow for it, where OWNER has your copy of this repository:

{workflow}
The action (`action.yml`) installs Meshwright and runs `check`. Its annotations are what GitHub shows on the lines
of the pull request:

{first}
`--gpus 8xH100` checks every file on these 8 GPUs. `--gpus H100`, a type alone, checks each file on as many as it asks
for itself, in its settings or its launch. A file that names no number is then checked on one GPU; if its layout needs
several, as with tensor parallelism, only what is wrong on every usual number is reported.

## Exit codes

0: no finding of the severity that fails; 1: there is one; 2: a file could not be read, or an option is wrong.
`--fail-on warning` also fails on warnings; `--fail-on never` fails on unreadable files only.

## Formats

`--format text`, `json` (the same as `--json`, [schema](schema/check.json)), `github`, or `sarif` (2.1.0): rules,
levels, files and lines, accepted findings as suppressed results, unreadable files as notifications. For code scanning:

{scanning}
## Accept a finding

A comment accepts rules on its own line, or on the next one if it stands alone; before a shell command that continues
over several lines, on all of them. `ignore-file` is for the whole file, as some findings have no line. YAML, TOML,
shell and Python files have comments; write the reason behind the brackets:

{job}
`--ignore RULE` does the same for all files; it can be repeated, and `'saving.*'` is a pattern. Accepted findings are
counted in the summary. A comment that accepts nothing, or names an unknown rule, is a note.

## Versions of a framework

Our tables of keys are those of one commit of each framework, and a config does not name the version that reads it:

- A name that is like a known one is a typing error in every version: an error.
- Any other unknown key, class or flag, and a key that a version of the last year removed, may belong to another
  version: a warning that names ours. If the file sets both the old and the new name of a key, no version reads it: an
  error.
- A file with several old or unknown names is for an older version or a fork: they are warnings, except typing errors.
- In a checkout of the framework the version is known: what its source defines is accepted, and what it does not is an
  error.

## Start with a baseline

A baseline lists the findings that a repository has today, so that only new ones fail. A finding is known by file, rule
and field: its line and figures may change.

{written}
{known}
Once the config is fixed, its entries are stale; write the baseline again:

{fixed}
## Figures

The frameworks' owners run the files of these repositories, so an error on one of them is false unless the ledger
below explains it. `make corpora CHECKOUTS=FOLDER` makes both tables, and names the checkouts that the folder lacks;
only keys and values of the files are kept (`benchmarks/data/corpora`), and tests check them again. The readers and
rules were corrected on these files, so the table shows that nothing regressed, not what to expect on unseen files.
{unconfirmed}
{figures}
{defects}Ledger: errors that are right, on files of the corpora.

{ledger}
## pre-commit

The hook gets the names of changed files; `--skip-unknown` skips those that no framework reads:

{hook}"""


def page() -> str:
    """Return the page."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(shutil.copytree(SAMPLE, Path(folder, "repository")))
        first = shown(here, ".", "--gpus", "8xH100", "--format", "github")
        written = shown(here, ".", "--gpus", "8xH100", "--format", "github", "--write-baseline", BASELINE)
        known = shown(here, ".", "--gpus", "8xH100", "--format", "github", "--baseline", BASELINE)
        config = here / "configs" / "llama3_8b.toml"
        config.write_text(config.read_text().replace("tensor_parallel_degree = 3", "tensor_parallel_degree = 4"))
        fixed = shown(here, ".", "--gpus", "8xH100", "--format", "github", "--baseline", BASELINE)
    job = (SAMPLE / "jobs" / "pretrain_8b.sh").read_text().splitlines()[:3]
    return TEXT.format(
        workflow=block("yaml", WORKFLOW),
        first=block("", first),
        scanning=block("yaml", SCANNING),
        job=block("bash", "\n".join((*job, "…"))),
        written=block("", written),
        known=block("", known),
        fixed=block("", fixed),
        hook=block("yaml", HOOK),
        figures=figures(),
        unconfirmed=unconfirmed(),
        defects=defects(),
        ledger=ledger(),
    )


def _results() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def figures() -> str:
    """Return the table of what is read and which errors are false, one row per corpus."""
    head = ["corpus", "commit", "files", "read", "with errors", "of them explained", "false errors"]
    rows = [
        [
            one["title"],
            one["commit"][:7],
            str(one["files"]),
            f"{one['read']} ({one['read'] / max(1, one['files']):.0%})",
            str(one["files_with_errors"]),
            str(one["files_with_errors"] - one["files_with_false_errors"]),
            str(one["files_with_false_errors"]),
        ]
        for one in _results().values()
    ]
    return table(head, rows)


def defects() -> str:
    """Return the table of injected defects; empty if none were injected."""
    rows = [
        [one["title"], kind, str(found["injected"]), str(found["caught"])]
        for one in _results().values()
        for kind, found in one["defects"].items()
    ]
    text = "Defects put into kept files, by kind; a defect is caught if `check` reports an error or refuses the file:"
    return f"{text}\n\n{table(['corpus', 'defect', 'injected', 'caught'], rows)}\n" if rows else ""


def unconfirmed() -> str:
    """Return a sentence on errors that neither the ledger nor a run of the owners settles; empty if there are none."""
    errors = [pair for one in _results().values() for pair in one["false_errors"].items()]
    named = "; ".join(f"`{path.rpartition('#')[2]}` ({'; '.join(texts)})" for path, texts in errors)
    return f"Not settled, and counted as false: {named}.\n" if errors else ""


def ledger() -> str:
    """Return the table of errors that are right, with the reason."""
    titles = {name: one["title"] for name, one in _results().items()}
    entries = tomllib.loads(LEDGER.read_text())["exception"]
    rows = [
        [titles.get(one["corpus"], one["corpus"]), f"`{one['path']}`", one["rule"], one["reason"]] for one in entries
    ]
    return table(["corpus", "file", "rule", "why the error is right"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(one)} |" for one in lines) + "\n"


def shown(folder: Path, *words: str) -> str:
    """Return a check command, its output and its exit code, as a terminal shows them."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(["check", *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    lines = [f"$ meshwright check {' '.join(words)}", *out.getvalue().splitlines(), *err.getvalue().splitlines()]
    return "\n".join([*lines, f"exit code {code}"])


def block(language: str, text: str) -> str:
    """Return text as a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"
