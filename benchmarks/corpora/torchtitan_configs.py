"""The config functions of torchtitan's main: Python files that are read from their syntax."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.corpora import Corpus, Defect, Target
from benchmarks.corpora.config_files import misspelled

from meshwright.frameworks.load import open_file
from meshwright.frameworks.torchtitan.python_config import LEARNING_RATE, config_functions

Entry = Mapping[str, Any]
RECOMPUTE = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}


def _collect(root: Path, made: Path) -> Iterator[Target]:
    """Yield every registry as it is; its first config is kept."""
    for path in sorted((root / "torchtitan").rglob("config_registry.py")):
        found = list(config_functions(open_file(str(path))).values())
        kept = None
        if found:
            one = found[0]
            flavor = None if one.flavor is None or one.flavor.unresolved else one.flavor.value
            values = {key: value.value for key, value in one.settings.items() if not value.unresolved}
            kept = {"module": path.parent.name, "flavor": flavor, "function": one.name, "settings": values}
        yield Target(str(path.relative_to(root)), path, kept=kept)


def _restore(entry: Entry, folder: Path) -> Target:
    place = folder / entry["module"]
    place.mkdir(exist_ok=True)
    path = place / "config_registry.py"
    sections: dict[str, list[str]] = {}
    lines = [f"        model_spec=model_registry({entry['flavor']!r}),"]
    for key, value in entry["settings"].items():
        section, _, name = key.partition(".")
        if key == LEARNING_RATE:
            lines.append(f"        optimizer=default_adamw(lr={value!r}),")
        elif section == "activation_checkpoint":
            lines.append(f"        activation_checkpoint={RECOMPUTE[value]},")
        else:
            sections.setdefault(section, []).append(f"{name}={value!r}")
    lines += [f"        {name}={name.title()}Config({', '.join(values)})," for name, values in sections.items()]
    text = "\n".join(
        (f"def {entry['function']}() -> Trainer.Config:", "    return Trainer.Config(", *lines, "    )", "")
    )
    path.write_text(text)
    return Target(entry["path"], path)


def _defects(entry: Entry, folder: Path, draw: random.Random) -> Iterator[Defect]:
    settings = dict(entry["settings"])
    names = [key for key in settings if key.split(".")[0] in ("training", "parallelism", "lr_scheduler")]
    if not names:
        return
    key = draw.choice(names)
    section, _, name = key.partition(".")
    number = isinstance(settings[key], int | float) and not isinstance(settings[key], bool)
    if number and draw.random() < 0.5:
        kind, change, settings[key] = "wrong type", f"{key}: many", "many"
    else:
        wrong = f"{section}.{misspelled(name, draw)}"
        kind, change = "misspelled key", f"{key} → {wrong}"
        settings = {wrong if one == key else one: value for one, value in settings.items()}
    place = folder / "defect"
    place.mkdir()
    yield Defect(kind, change, _restore({**entry, "settings": settings}, place))


CORPORA: Mapping[str, Corpus] = {
    "torchtitan": Corpus(
        "torchtitan", "pytorch/torchtitan", "torchtitan main, config functions", _collect, _restore, _defects
    )
}
"""The corpus of this module, by name."""
