"""Compare our checks with a framework's own parser: one table and one JSON file per framework.

PYTHONPATH=src:. python -m benchmarks.against torchtitan --site FOLDER --out benchmarks/results/NAME.json

FOLDER contains the framework and its dependencies except torch (pip install --target FOLDER …). Configs are the valid
and invalid ones of tests/frameworks/test_NAME.py, and exports of every fifth shipped recipe.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.against import MISSING, Config, ReferenceParser, Verdict
from msgspec import UNSET

from meshwright import frameworks, models, planner
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks import other_versions
from meshwright.recipes import index, key_maps
from meshwright.rules.rule import Finding

EVERY = 5
ORIGINS = ("case", "export", "draw")
LOCAL_PATH = re.compile(r"(?<![\w.])/[\w./-]*(/|$)")
"""Local directories in error messages, removed from the report."""
LATER = {"memory.": "out of memory, which no parser detects"}


@dataclass(frozen=True)
class Compared:
    """A config with the framework's result and ours."""

    config: Config
    theirs: Verdict
    ours: tuple[str, ...]  # rules by whose findings the version of our tables rejects it
    outcome: str
    why: str = ""  # explains a difference


def main() -> None:
    options = _options()
    sys.path[:0] = options.site
    reference: ReferenceParser = importlib.import_module(f"benchmarks.against.{options.framework}").REFERENCE
    try:
        reference.prepare()
        importlib.import_module(reference.module)
    except ImportError as error:
        print(f"{options.framework}: {reference.needs} is not installed ({error})")
        return
    compared = [_compare(reference, config) for config in _configs(reference, options.only)]
    keys = _keys(reference)
    _print(reference, compared, keys)
    if options.out:
        options.out.write_text(json.dumps(_report(reference, options.framework, compared, keys), indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", help="module in benchmarks/against")
    parser.add_argument("--site", action="append", default=[], help="folder with the installed framework; repeatable")
    parser.add_argument("--only", choices=ORIGINS, help="only configs of this origin")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    return parser.parse_args()


def _configs(reference: ReferenceParser, only: str | None) -> Iterator[Config]:
    """Yield every config for this framework version."""
    sources = {
        "case": lambda: _cases(reference),
        "export": lambda: _exports(reference),
        "draw": reference.random_configs,
    }
    for origin, source in sources.items():
        if only in (None, origin):
            yield from (config for config in source() if reference.accepts_config(config))


def _cases(reference: ReferenceParser) -> Iterator[Config]:
    module = importlib.import_module(f"tests.frameworks.test_{reference.framework.replace('-', '_')}")
    for case in module.CASES:
        world = cluster(case.gpus).world if case.gpus else _gpu_count(reference, case.text, case.path or module.PATH)
        path = case.path or module.PATH
        yield Config(case.name, "case", path, case.text, gpus=case.gpus, world=world, model=case.model)


def _gpu_count(reference: ReferenceParser, text: str, path: str) -> int | None:
    """Return the number of GPUs that a file requests."""
    return frameworks.framework(reference.framework).parse(frameworks.content_of(text, path)).gpu_request.count


def _exports(reference: ReferenceParser) -> Iterator[Config]:
    theirs = frameworks.framework(reference.framework)
    for name in index.names()[::EVERY]:
        recipe = planner.with_engine_strategy(index.load(name), theirs.engine)
        on = cluster(recipe.cluster)
        try:
            written = frameworks.export(theirs, recipe, models.find(recipe.model), on)
        except InputError:
            continue  # not supported by the framework
        path = reference.exported or next(iter(written.files))
        if path in written.files:
            yield Config(
                name, "export", path, written.files[path], gpus=str(on), world=on.world, model=recipe.model,
                files=written.files, argv=written.program.argv, env=written.program.env, recipe=recipe,
            )  # fmt: skip


def _compare(reference: ReferenceParser, config: Config) -> Compared:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in {**config.files, config.path: config.text}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        theirs = reference.evaluate(config, folder)
    ours = _errors(reference, config)
    return Compared(config, theirs, ours, *_outcome(reference, config, theirs, ours))


def _errors(reference: ReferenceParser, config: Config) -> tuple[str, ...]:
    content = frameworks.content_of(config.text, config.path)
    model = models.find(config.model) if config.model else None
    try:
        result = frameworks.check(frameworks.framework(reference.framework), content, gpus=config.gpus, model=model)
    except InputError as error:
        return (f"input: {error}",)
    return tuple(finding.rule for finding in result.findings if _rejects(finding))


def _rejects(finding: Finding) -> bool:
    """Return whether the version that is compared rejects a setting, whatever others accept."""
    return other_versions.is_rejected(finding) or other_versions.OLDER_ACCEPT in finding.message


def _outcome(reference: ReferenceParser, config: Config, theirs: Verdict, ours: Sequence[str]) -> tuple[str, str]:
    if theirs.accepts is None:
        return "not run", theirs.reason
    not_config_errors = next((why for text, why in reference.not_config_errors.items() if text in theirs.reason), "")
    if not theirs.accepts and not_config_errors:
        return "not a config error", not_config_errors
    if theirs.accepts and not ours:
        return "both accept", ""
    if not theirs.accepts:
        return ("both reject" if ours else "only they reject"), ""
    reasons = [_reason({**LATER, **reference.detected_later}, rule) for rule in ours]
    explained = next((reason for reason in reasons if reason), "")
    return ("found here only" if explained else "only we reject"), explained


def _reason(reasons: Mapping[str, str], name: str) -> str:
    return next((why for start, why in reasons.items() if name.startswith(start)), "")


@dataclass(frozen=True)
class Keys:
    """Comparison of the framework's keys with our key map."""

    theirs: int
    ours: int
    unknown_here: tuple[str, ...] = ()  # we would report them as unknown
    unknown_there: tuple[str, ...] = ()  # we would accept them
    defaults: int = 0  # known on both sides
    other_defaults: tuple[str, ...] = ()
    explained: Mapping[str, str] | None = None


def _keys(reference: ReferenceParser) -> Keys | None:
    if reference.keys is None:
        return None
    theirs, ours = reference.keys(), frameworks.framework(reference.framework)
    table = key_maps.config_keys(ours.key_map)
    rows = {key: word for key, word in table.items() if word.status != "removed" and reference.covers_key(key)}
    here = [key for key in theirs if key not in rows and not ours.is_extra_key(key)]
    there = [key for key in rows if key not in theirs]
    both = {key: (theirs[key], rows[key].default) for key in rows if key in theirs}
    known = {key: pair for key, pair in both.items() if pair[0] is not MISSING and pair[1] is not UNSET}
    differ = {key: pair for key, pair in known.items() if not _same(*pair)}
    explained = {key: why for key in (*here, *there) if (why := _reason(reference.other_keys, key))}
    explained |= {key: reference.other_defaults[key] for key in differ if key in reference.other_defaults}
    return Keys(
        len(theirs), len(rows), _left(here, explained), _left(there, explained), len(known),
        tuple(f"{key}: theirs {theirs!r}, ours {ours!r}" for key, (theirs, ours) in differ.items()
              if key not in explained), explained,
    )  # fmt: skip


def _left(keys: Sequence[str], explained: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in explained)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other)


OUTCOMES = (
    "both accept", "both reject", "found here only", "only we reject", "only they reject", "not a config error",
    "not run",
)  # fmt: skip


def _print(reference: ReferenceParser, compared: Sequence[Compared], keys: Keys | None) -> None:
    print(f"{reference.needs}: {reference.runs_code}")
    for origin in ORIGINS:
        of_these = [one for one in compared if one.config.origin == origin]
        counts = Counter(one.outcome for one in of_these)
        print(f"  {origin}s {len(of_these)}: " + ", ".join(f"{name} {counts[name]}" for name in OUTCOMES))
    for one in compared:
        if one.outcome in ("only we reject", "only they reject"):
            print(f"  {one.outcome}: {one.config.origin} {one.config.name}: {one.theirs.reason or ', '.join(one.ours)}")
    if keys is not None:
        print(f"  keys: theirs {keys.theirs}, ours {keys.ours}, common defaults {keys.defaults}")
        for title in ("unknown_here", "unknown_there", "other_defaults"):
            for text in getattr(keys, title):
                print(f"  {title}: {text}")


def _report(reference: ReferenceParser, name: str, compared: Sequence[Compared], keys: Keys | None) -> dict[str, Any]:
    return {
        "command": f"python -m benchmarks.against {name} --site FOLDER --out benchmarks/results/…",
        "framework": reference.needs,
        "installed": _version(reference.needs.split("==")[0]),
        "runs": reference.runs_code,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "counts": {
            origin: dict(Counter(one.outcome for one in compared if one.config.origin == origin)) for origin in ORIGINS
        },
        "keys": None if keys is None else vars(keys),
        "configs": [
            {
                "name": one.config.name,
                "origin": one.config.origin,
                "outcome": one.outcome,
                "theirs": LOCAL_PATH.sub("", one.theirs.reason),
                "ours": list(one.ours),
                **({"why": one.why} if one.why else {}),
            }
            for one in compared
        ],
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
