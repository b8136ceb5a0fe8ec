"""Check every training file of a framework's own repository, and print what is read and which errors are false.

PYTHONPATH=src:. python -m benchmarks.corpora --corpus megatron-lm-tests --root CHECKOUT --write

Without --root, the kept entries in benchmarks/data/corpora are checked. --write keeps the entries and the figures
(benchmarks/results/corpora.json). --inject N puts N defects into kept entries and counts those that are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
from pathlib import Path

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
    for name in options.corpus or MODULES:
        corpus = corpus_named(name)
        commit, kept = options.commit, None
        if options.root is not None:
            commit = commit or _commit(options.root)
            result, kept = corpora.run_checkout(corpus, options.root, commit)
        else:
            entries = corpora.kept_entries(name)
            commit = json.loads((corpora.KEPT / f"{name}.json").read_text())["commit"]
            result = corpora.summarize(corpus, commit, corpora.run_kept(corpus, entries))
        if options.inject:
            defects = corpora.inject(corpus, kept or corpora.kept_entries(name), options.inject)
            result = dataclasses.replace(result, defects=defects)
        _print(result)
        if options.write:
            if kept is not None:
                corpora.write_kept(corpus, commit, kept)
            corpora.write_result(result)


def corpus_named(name: str) -> Corpus:
    """Return a corpus of MODULES."""
    found: dict[str, Corpus] = importlib.import_module(f"benchmarks.corpora.{MODULES[name]}").CORPORA
    return found[name]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="append", choices=MODULES, help="repeatable; all if left out")
    parser.add_argument("--root", type=Path, help="checkout of the repository")
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
