"""Our frameworks against the frameworks' own parsers, one framework a run: one table and one file of numbers.

PYTHONPATH=src:. python -m benchmarks.against torchtitan --site FOLDER --out benchmarks/results/NAME.json

FOLDER holds the framework's version and what it needs besides torch (pip install --target FOLDER …). Configs are those
of tests/frameworks/test_NAME.py, valid and broken, and what `meshwright export` writes for every fifth shipped recipe.
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

from benchmarks.against import MISSING, Config, Framework, Verdict
from msgspec import UNSET

from meshwright import frameworks, models, planner
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.recipes import index, key_maps

EVERY = 5
ORIGINS = ("case", "export", "draw")
PLACE = re.compile(r"(?<![\w.])/[\w./-]*(/|$)")
"""Folders of this machine in an error, which the numbers do not need."""
LATER = {"memory.": "runs out of memory, which no parser sees"}


@dataclass(frozen=True)
class Compared:
    """A config, what its framework says of it and what we say."""

    config: Config
    theirs: Verdict
    ours: tuple[str, ...]  # rules that find an error
    outcome: str
    why: str = ""  # of an outcome where the two differ


def main() -> None:
    options = _options()
    sys.path[:0] = options.site
    framework: Framework = importlib.import_module(f"benchmarks.against.{options.framework}").FRAMEWORK
    try:
        framework.prepare()
        importlib.import_module(framework.module)
    except ImportError as error:
        print(f"{options.framework}: {framework.needs} is not there ({error})")
        return
    compared = [_compare(framework, config) for config in _configs(framework, options.only)]
    keys = _keys(framework)
    _print(framework, compared, keys)
    if options.out:
        options.out.write_text(json.dumps(_report(framework, options.framework, compared, keys), indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", help="a module of benchmarks/against")
    parser.add_argument("--site", action="append", default=[], help="a folder with the framework; may be repeated")
    parser.add_argument("--only", choices=ORIGINS, help="configs of this origin alone")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    return parser.parse_args()


def _configs(framework: Framework, only: str | None) -> Iterator[Config]:
    """Every config that is in the words of this version."""
    sources = {"case": lambda: _cases(framework), "export": lambda: _exports(framework), "draw": framework.draws}
    for origin, source in sources.items():
        if only in (None, origin):
            yield from (config for config in source() if framework.takes(config))


def _cases(framework: Framework) -> Iterator[Config]:
    module = importlib.import_module(f"tests.frameworks.test_{framework.framework.replace('-', '_')}")
    for case in module.CASES:
        world = cluster(case.gpus).world if case.gpus else _asked(framework, case.text, case.path or module.PATH)
        path = case.path or module.PATH
        yield Config(case.name, "case", path, case.text, gpus=case.gpus, world=world, model=case.model)


def _asked(framework: Framework, text: str, path: str) -> int | None:
    """The GPUs that a file names itself."""
    return frameworks.framework(framework.framework).parse(frameworks.content_of(text, path)).gpu_request.count


def _exports(framework: Framework) -> Iterator[Config]:
    theirs = frameworks.framework(framework.framework)
    for name in index.names()[::EVERY]:
        recipe = planner.with_engine_strategy(index.load(name), theirs.engine)
        on = cluster(recipe.cluster)
        try:
            written = frameworks.export(theirs, recipe, models.find(recipe.model), on)
        except InputError:
            continue  # which the framework cannot write
        path = framework.exported or next(iter(written.files))
        if path in written.files:
            yield Config(
                name, "export", path, written.files[path], gpus=str(on), world=on.world, model=recipe.model,
                files=written.files, words=written.program.argv, env=written.program.env, recipe=recipe,
            )  # fmt: skip


def _compare(framework: Framework, config: Config) -> Compared:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in {**config.files, config.path: config.text}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        theirs = framework.judge(config, folder)
    ours = _errors(framework, config)
    return Compared(config, theirs, ours, *_outcome(framework, config, theirs, ours))


def _errors(framework: Framework, config: Config) -> tuple[str, ...]:
    content = frameworks.content_of(config.text, config.path)
    model = models.find(config.model) if config.model else None
    try:
        result = frameworks.check(frameworks.framework(framework.framework), content, gpus=config.gpus, model=model)
    except InputError as error:
        return (f"input: {error}",)
    return tuple(finding.rule for finding in result.findings if finding.severity == "error")


def _outcome(framework: Framework, config: Config, theirs: Verdict, ours: Sequence[str]) -> tuple[str, str]:
    if theirs.accepts is None:
        return "not asked", theirs.reason
    beyond = next((why for text, why in framework.beyond.items() if text in theirs.reason), "")
    if not theirs.accepts and beyond:
        return "not the config's", beyond
    if theirs.accepts and not ours:
        return "both accept", ""
    if not theirs.accepts:
        return ("both refuse" if ours else "only they refuse"), ""
    reasons = [_reason({**LATER, **framework.later}, rule) for rule in ours]
    explained = next((reason for reason in reasons if reason), "")
    return ("seen here only" if explained else "only we refuse"), explained


def _reason(reasons: Mapping[str, str], name: str) -> str:
    return next((why for start, why in reasons.items() if name.startswith(start)), "")


@dataclass(frozen=True)
class Keys:
    """Their keys and ours, side by side."""

    theirs: int
    ours: int
    unknown_here: tuple[str, ...] = ()  # we would call them unknown
    unknown_there: tuple[str, ...] = ()  # we would take them
    defaults: int = 0  # that both say
    other_defaults: tuple[str, ...] = ()
    explained: Mapping[str, str] | None = None


def _keys(framework: Framework) -> Keys | None:
    if framework.keys is None:
        return None
    theirs, ours = framework.keys(), frameworks.framework(framework.framework)
    table = key_maps.config_keys(ours.key_map)
    rows = {key: word for key, word in table.items() if word.status != "removed" and framework.speaks(key)}
    here = [key for key in theirs if key not in rows and not ours.is_extra_key(key)]
    there = [key for key in rows if key not in theirs]
    both = {key: (theirs[key], rows[key].default) for key in rows if key in theirs}
    known = {key: pair for key, pair in both.items() if pair[0] is not MISSING and pair[1] is not UNSET}
    differ = {key: pair for key, pair in known.items() if not _same(*pair)}
    explained = {key: why for key in (*here, *there) if (why := _reason(framework.other_keys, key))}
    explained |= {key: framework.other_defaults[key] for key in differ if key in framework.other_defaults}
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
    "both accept", "both refuse", "seen here only", "only we refuse", "only they refuse", "not the config's",
    "not asked",
)  # fmt: skip


def _print(framework: Framework, compared: Sequence[Compared], keys: Keys | None) -> None:
    print(f"{framework.needs}: {framework.asks}")
    for origin in ORIGINS:
        of_these = [one for one in compared if one.config.origin == origin]
        counts = Counter(one.outcome for one in of_these)
        print(f"  {origin}s {len(of_these)}: " + ", ".join(f"{name} {counts[name]}" for name in OUTCOMES))
    for one in compared:
        if one.outcome in ("only we refuse", "only they refuse"):
            print(f"  {one.outcome}: {one.config.origin} {one.config.name}: {one.theirs.reason or ', '.join(one.ours)}")
    if keys is not None:
        print(f"  keys: theirs {keys.theirs}, ours {keys.ours}, defaults that both say {keys.defaults}")
        for title in ("unknown_here", "unknown_there", "other_defaults"):
            for text in getattr(keys, title):
                print(f"  {title}: {text}")


def _report(framework: Framework, name: str, compared: Sequence[Compared], keys: Keys | None) -> dict[str, Any]:
    return {
        "command": f"python -m benchmarks.against {name} --site FOLDER --out benchmarks/results/…",
        "framework": framework.needs,
        "installed": _version(framework.needs.split("==")[0]),
        "asks": framework.asks,
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
                "theirs": PLACE.sub("", one.theirs.reason),
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
