"""Training commands that the repositories of ms-swift and TRL ship: example scripts, and commands in their docs."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.corpora import Corpus, Defect, Target
from benchmarks.corpora.config_files import misspelled

from meshwright import frameworks
from meshwright.errors import InputError

Entry = Mapping[str, Any]
SWIFT = re.compile(r"(?:^|[\s;&])(?:swift|megatron)\s+(?:sft|pt|rlhf)\b|swift/cli/(?:sft|pt|rlhf)\.py", re.MULTILINE)
ENV = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
TRL = re.compile(r"^\s*(?:trl (?:sft|dpo|grpo|kto|reward|rloo)|accelerate launch)\b(?:.*\\\n)*.*", re.MULTILINE)
CHANGED = ("learning_rate", "gradient_accumulation_steps", "max_length", "num_train_epochs", "lora_rank", "lora_alpha",
    "per_device_train_batch_size", "save_steps", "logging_steps", "eval_steps", "warmup_ratio", "target_modules",
    "lr_scheduler_type", "model_name_or_path", "dataset_name", "micro_batch_size", "global_batch_size", "max_epochs",
    "recompute_granularity", "tensor_model_parallel_size")  # fmt: skip
NUMBERS = re.compile(r"\w*(size|steps|rank|alpha|length|rate|epochs)")


def _swift_targets(root: Path, made: Path) -> Iterator[Target]:
    for path in sorted((root / "examples").rglob("*.sh")):
        name, text = str(path.relative_to(root)), path.read_text()
        if not SWIFT.search(re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)):
            yield Target(name, path, skipped="does not train")
            continue
        kept = None
        try:
            launches = frameworks.open_file(str(path)).launches
        except InputError:
            launches = ()
        for launch in launches:
            words = [str(one.value) for one in launch.args]
            if (
                launch.launcher == "front-end"
                and SWIFT.search(str(launch.program.value))
                and words
                and not any(one.unresolved for one in launch.args)
            ):
                env = {key: str(one.value) for key, one in launch.env.items() if key in ENV and not one.unresolved}
                kept = {"command": [*str(launch.program.value).split(" "), *words], "env": env}
                break
        yield Target(name, path, kept=kept)


def _trl_targets(root: Path, made: Path) -> Iterator[Target]:
    """Yield the commands of TRL's docs and of the docstrings of its scripts."""
    places = [
        *(root / "docs" / "source").rglob("*.md"),
        *(root / "examples").rglob("*.py"),
        *(root / "trl").rglob("*.py"),
    ]
    for path in sorted(places):
        for number, found in enumerate(TRL.findall(path.read_text()), 1):
            command = found.strip().strip("`")
            if "…" in command or "..." in command or "trl" not in command or "$" in command:
                continue
            try:
                words = shlex.split(command.replace("\\\n", " "), comments=True)
            except ValueError:
                continue
            if len(words) > 4 and any(one.startswith("--") for one in words):
                entry = {"path": f"{path.relative_to(root)}#{number}", "command": words}
                folder = made / f"trl{len(list(made.iterdir()))}"
                folder.mkdir()
                yield Target(entry["path"], _write(entry, folder), kept={"command": words}, skipped=_not_sft(words))


def _not_sft(words: list[str]) -> str:
    if words[:1] == ["trl"]:
        return ""
    program = next((one for one in words if one.endswith(".py")), "")
    return "" if "trl/scripts/" in program else "a program with arguments of its own"


def _write(entry: Entry, folder: Path) -> Path:
    path = folder / "train.sh"
    env = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in entry.get("env", {}).items())
    path.write_text(f"#!/bin/bash\n{env}{shlex.join(entry['command'])}\n")
    return path


def _restore(entry: Entry, folder: Path) -> Target:
    return Target(entry["path"], _write(entry, folder))


def _defects(entry: Entry, folder: Path, draw: random.Random) -> Iterator[Defect]:
    words = list(entry["command"])
    places = [n for n, one in enumerate(words[:-1]) if one.startswith("--") and one[2:].replace("-", "_") in CHANGED]
    if not places:
        return
    place = draw.choice(places)
    name, value = words[place], words[place + 1]
    if NUMBERS.fullmatch(name[2:].replace("-", "_")) and draw.random() < 0.5:
        words[place + 1], kind, change = "many", "wrong type", f"{name} {value} → many"
    else:
        words[place], kind = f"--{misspelled(name[2:], draw)}", "misspelled argument"
        change = f"{name} → {words[place]}"
    place_of = folder / "defect"
    place_of.mkdir()
    yield Defect(kind, change, _restore({**entry, "command": words}, place_of))


CORPORA: Mapping[str, Corpus] = {
    "ms-swift": Corpus(
        "ms-swift", "modelscope/ms-swift", "ms-swift, example scripts that train", _swift_targets, _restore, _defects
    ),
    "trl": Corpus("trl", "huggingface/trl", "TRL, commands of its docs", _trl_targets, _restore, _defects),
}
"""The corpora of this module, by name."""
