"""Check every training file of a framework's own repository, and print what is read and which errors are false.

PYTHONPATH=src:. python -m benchmarks.corpora --checkouts FOLDER --inject 120 --write        # all of them: make corpora
PYTHONPATH=src:. python -m benchmarks.corpora --corpus megatron-lm-tests --root CHECKOUT --write

FOLDER has a checkout of each repository under its name (Megatron-LM, Automodel, …); those that are missing are named,
and the exit code is then 1. Without checkouts, the kept entries in benchmarks/data/corpora are checked. --write keeps
the entries and the figures (benchmarks/results/corpora.json). --inject N puts N defects into kept entries and counts
those that are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import corpora
from benchmarks.corpora import Corpus, Result

MODULES = {
    "megatron-lm-tests": "megatron",
    "megatron-lm-examples": "megatron",
    "megatron-deepspeed": "megatron",
    "megatron-bridge-scripts": "megatron",
    "megatron-bridge-python": "megatron",
    "megatron-bridge-runs": "megatron",
    "megatron-bridge-recipes": "megatron",
    "automodel": "config_files",
    "kempnerforge": "config_files",
    "axolotl": "config_files",
    "llama-factory": "config_files",
    "torchtitan": "torchtitan_configs",
    "ms-swift": "commands",
    "trl": "commands",
}
"""Module of benchmarks/corpora that has a corpus, by the name of the corpus."""


def main() -> None:
    options = _options()
    missing = []
    for name in options.corpus or MODULES:
        corpus = corpus_named(name)
        root = options.checkouts / checkout_name(corpus) if options.checkouts else options.root
        if options.checkouts and not root.is_dir():
            missing.append(corpus)
            continue
        result, kept = _run(corpus, root, options.commit)
        if options.inject:
            defects = corpora.inject(corpus, kept or corpora.kept_entries(name), options.inject)
            result = dataclasses.replace(result, defects=defects)
        _print(result)
        if options.write:
            if kept is not None:
                corpora.write_kept(corpus, result.commit, kept)
            corpora.write_result(result)
    if missing:
        sys.exit("\n".join(["not checked, because their checkouts are missing:", *map(clone_command, missing)]))


def checkout_name(corpus: Corpus) -> str:
    """Return the name of a corpus's checkout in the folder of --checkouts."""
    return corpus.repository.rpartition("/")[2]


def clone_command(corpus: Corpus) -> str:
    """Return what makes the checkout of a corpus at the commit of its figures."""
    commit = corpora.recorded_commit(corpus.name) or "HEAD"
    name = checkout_name(corpus)
    return (
        f"  {corpus.name}: git clone https://github.com/{corpus.repository} {name} && git -C {name} checkout {commit}"
    )


def _run(corpus: Corpus, root: Path | None, commit: str) -> tuple[Result, list[dict[str, Any]] | None]:
    """Return the figures of a corpus and, if they are those of a checkout, the entries to keep."""
    if root is not None:
        return corpora.run_checkout(corpus, root, commit or _commit(root))
    outcomes = corpora.run_kept(corpus, corpora.kept_entries(corpus.name))
    return corpora.summarize(corpus, corpora.recorded_commit(corpus.name), outcomes), None


def corpus_named(name: str) -> Corpus:
    """Return a corpus of MODULES."""
    found: dict[str, Corpus] = importlib.import_module(f"benchmarks.corpora.{MODULES[name]}").CORPORA
    return found[name]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="append", choices=MODULES, help="repeatable; all if left out")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--root", type=Path, help="checkout of the repository")
    places.add_argument("--checkouts", type=Path, metavar="FOLDER", help="folder with a checkout of each repository")
    parser.add_argument("--commit", default="", help="commit of the checkout, if it has no .git")
    parser.add_argument("--inject", type=int, default=0, metavar="N", help="put N defects into kept entries")
    parser.add_argument("--write", action="store_true", help="keep the entries and write the figures")
    return parser.parse_args()


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _print(result: Result) -> None:
    false = result.files_with_false_errors
    print(
        f"{result.corpus} {result.commit[:7]}: {result.files} files, {result.read} read, "
        f"{result.files_with_errors} with errors, {false} with false errors"
    )
    for path, reason in result.unread.items():
        print(f"  unread {path}: {reason}")
    for path, errors in result.false_errors.items():
        for error in errors:
            print(f"  false {path}: {error}")
    for rule, count in result.errors_by_rule.items():
        print(f"  {count} {rule}")
    for kind, one in result.defects.items():
        print(f"  {kind}: {one['caught']} of {one['injected']} caught")
        for missed in one["missed"]:
            print(f"    missed {missed}")


if __name__ == "__main__":
    main()
