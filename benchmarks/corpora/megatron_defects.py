"""Defects for kept files of Megatron-LM and Megatron-Bridge: what people get wrong in a flag, a value or a layout."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.corpora import Defect, Target

Restore = Callable[[Mapping[str, Any], Path], Target]
REQUIRED = ("--micro-batch-size", "--seq-length", "--hidden-size", "--lr", "--train-iters", "--num-attention-heads")
NUMBERS = ("--train-iters", "--seq-length", "--lr", "--global-batch-size", "--eval-interval", "--clip-grad", "--seed")
CHOICES = {
    "--lr-decay-style": "cosin",
    "--tokenizer-type": "HFTokenizer",
    "--position-embedding-type": "ropes",
    "--transformer-impl": "te",
    "--attention-backend": "flash-attn",
    "--ckpt-format": "torch-dist",
    "--recompute-granularity": "all",
    "--moe-token-dispatcher-type": "all2all",
}
OVERRIDE = re.compile(r"(?<=\s)([a-z_]+(?:\.[a-z_0-9]+)+)=(\S+)")
RECIPE = re.compile(r"--recipe[ =](\w+)")


def megatron_lm_defects(
    restore: Restore, entry: Mapping[str, Any], folder: Path, draw: random.Random
) -> Iterator[Defect]:
    """Yield one defect of each kind that fits a run of Megatron-LM."""
    args = dict(entry["args"])
    if not entry.get("gpus_per_node") or not all(key in args for key in ("--num-layers", "--num-attention-heads")):
        return

    def changed(kind: str, change: str, new: Mapping[str, str]) -> Defect:
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        return Defect(kind, change, restore({**entry, "args": dict(new)}, place))

    flag = draw.choice([one for one in args if len(one) > 8])
    typo = misspelled(flag, draw)
    yield changed("misspelled flag", f"{flag} → {typo}", {typo if key == flag else key: args[key] for key in args})
    flag = draw.choice([one for one in (*NUMBERS, *CHOICES) if one in args])
    value = CHOICES.get(flag, draw.choice(["abc", "1e", "10k"]))
    yield changed("bad value", f"{flag} {value}", {**args, flag: value})
    world = int(entry["nodes"]) * int(entry["gpus_per_node"])
    axis = draw.choice(["--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"])
    yield changed("impossible layout", f"{axis} 3 on {world} GPUs", {**args, axis: "3"})
    if args.get("--global-batch-size", "").isdigit():
        batch = str(int(args["--global-batch-size"]) + 1)
        if int(args.get("--micro-batch-size", "1")) > 1:
            yield changed("wrong divisibility", f"--global-batch-size {batch}", {**args, "--global-batch-size": batch})
        else:
            heads = str(int(args["--num-attention-heads"]) + 1)
            new = {**args, "--num-attention-heads": heads}
            yield changed("wrong divisibility", f"--num-attention-heads {heads}", new)
    required = [one for one in REQUIRED if one in args]
    flag = draw.choice([*required, *(["--data-path"] if "--data-path" in args else [])])
    yield changed("missing setting", f"without {flag}", {key: args[key] for key in args if key != flag})


def bridge_defects(restore: Restore, entry: Mapping[str, Any], folder: Path, draw: random.Random) -> Iterator[Defect]:
    """Yield one defect of each kind that fits a command of Megatron-Bridge's runner."""
    command = entry["command"]

    def changed(kind: str, change: str, new: str) -> Defect:
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        return Defect(kind, change, restore({**entry, "command": new}, place))

    keys = [found for found in OVERRIDE.finditer(command) if not found[1].startswith(("tokenizer.", "env_vars."))]
    if keys:
        found = draw.choice(keys)
        typo = misspelled(found[1], draw)
        text = f"{command[: found.start(1)]}{typo}{command[found.end(1) :]}"
        yield changed("misspelled key", f"{found[1]} → {typo}", text)
    numbers = [found for found in keys if found[2].isdigit()]
    if numbers:
        found = draw.choice(numbers)
        text = f"{command[: found.start(2)]}many{command[found.end(2) :]}"
        yield changed("bad value", f"{found[1]}=many", text)
    recipe = RECIPE.search(command)
    if recipe:
        typo = misspelled(recipe[1], draw)
        text = f"{command[: recipe.start(1)]}{typo}{command[recipe.end(1) :]}"
        yield changed("misspelled recipe", f"{recipe[1]} → {typo}", text)
        yield changed("impossible layout", "tp 3", f"{command.rstrip()} model.tensor_model_parallel_size=3")
        batch = "train.global_batch_size=17 train.micro_batch_size=2"  # wrong on any number of ranks
        yield changed("wrong divisibility", batch, f"{command.rstrip()} {batch}")


def launch_defects(restore: Restore, entry: Mapping[str, Any], folder: Path, draw: random.Random) -> Iterator[Defect]:
    """Yield one defect of each kind that fits the first command of a script."""
    words = entry["launches"][0]["args"]

    def changed(kind: str, at: int, new: str) -> Defect:
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        first = {**entry["launches"][0], "args": [*words[:at], new, *words[at + 1 :]]}
        return Defect(
            kind, f"{words[at]} → {new}", restore({**entry, "launches": [first, *entry["launches"][1:]]}, place)
        )

    flags = [at for at, word in enumerate(words) if re.fullmatch(r"--[a-z-]{7,}", word)]
    if flags:
        at = draw.choice(flags)
        yield changed("misspelled flag", at, misspelled(words[at], draw))
    values = [at + 1 for at in flags if words[at] in NUMBERS and words[at + 1][:1].isdigit()]
    if values:
        yield changed("bad value", draw.choice(values), draw.choice(["abc", "1e", "10k"]))
    keys = [at for at, word in enumerate(words) if re.match(r"(model|train|optimizer|scheduler)\.[a-z_]{5,}=", word)]
    if keys:
        at = draw.choice(keys)
        key, _, value = words[at].partition("=")
        yield changed("misspelled key", at, f"{misspelled(key, draw)}={value}")


def snippet_defects(restore: Restore, entry: Mapping[str, Any], folder: Path, draw: random.Random) -> Iterator[Defect]:
    """Yield one defect of each kind that fits a Python file of Megatron-Bridge."""

    def changed(kind: str, change: str, new: Mapping[str, Any]) -> Defect:
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        return Defect(kind, change, restore({**entry, **new}, place))

    settings = entry["settings"]
    keys = [key for key in settings if re.fullmatch(r"(model|train|optimizer|scheduler|checkpoint)\.[a-z_]{5,}", key)]
    if keys:
        key = draw.choice(keys)
        typo = misspelled(key, draw)
        new = {typo if one == key else one: value for one, value in settings.items()}
        yield changed("misspelled key", f"{key} → {typo}", {"settings": new})
    typo = misspelled(entry["recipe"], draw)
    yield changed("misspelled recipe", f"{entry['recipe']} → {typo}", {"recipe": typo})
    layout = {**settings, "model.tensor_model_parallel_size": 3}
    yield changed("impossible layout", "tp 3", {"settings": layout})


def misspelled(name: str, draw: random.Random) -> str:
    """Return a name with one letter left out, doubled or swapped with the next."""
    at = draw.randrange(4, len(name) - 1)
    while not (name[at].isalpha() and name[at + 1].isalpha() and name[at] != name[at + 1]):
        at = draw.randrange(3, len(name) - 1)
    return draw.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ]
    )
