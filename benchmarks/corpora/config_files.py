"""Config files that the repositories of AutoModel, KempnerForge and the fine-tuning front ends ship."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks.corpora import Corpus, Defect, Target

Entry = Mapping[str, Any]
COMMENT = re.compile(r"^#.*(?:torchrun|automodel).*--nproc", re.MULTILINE)
NOT_KEPT = ("wandb", "mlflow", "comet", "validation_dataset", "validation_dataloader", "rng", "dist_env")
KEPT_TESTS = ("nodes", "nproc_per_node", "cluster_tag", "ep_size", "local_batch_size")


@dataclass(frozen=True)
class Files:
    """The config files of one repository."""

    folders: tuple[str, ...]
    suffixes: tuple[str, ...]
    trains: Callable[[Mapping[str, Any], str], str]  # why a file is not counted; empty: it trains
    framework: str | None = None

    def collect(self, root: Path, made: Path) -> Iterator[Target]:
        for folder in self.folders:
            for path in sorted((root / folder).rglob("*")):
                if path.suffix in self.suffixes and path.is_file():
                    name = str(path.relative_to(root))
                    text = path.read_text()
                    found = _parsed(path, text)
                    if found is None:
                        continue
                    kept: dict[str, Any] = {"config": _reduced(found)}
                    line = next((one for one in text.splitlines() if COMMENT.match(one)), "")
                    kept |= {"comment": line} if line else {}
                    skipped = self.trains(found, name)
                    yield Target(name, path, kept=kept, skipped=skipped, framework=self.framework)

    def restore(self, entry: Entry, folder: Path) -> Target:
        path = folder / Path(entry["path"]).name
        if path.suffix == ".toml":
            text = "\n".join(_toml(entry["config"]))
        else:
            text = yaml.safe_dump(entry["config"], sort_keys=False, allow_unicode=True)
        path.write_text(f"{entry['comment']}\n{text}" if "comment" in entry else text)
        return Target(entry["path"], path, framework=self.framework)


def _reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the blocks that no check reads."""
    found = {key: one for key, one in config.items() if key not in NOT_KEPT}
    tests = found.get("ci")
    if isinstance(tests, dict):
        found["ci"] = {key: one for key, one in tests.items() if key in KEPT_TESTS}
    return found


def _parsed(path: Path, text: str) -> dict[str, Any] | None:
    try:
        found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError):
        return None
    return json.loads(json.dumps(found, default=str)) if isinstance(found, dict) else None


def _toml(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if not isinstance(value, dict):
            yield f"{key} = {_inline(value)}"
    for key, value in config.items():
        if isinstance(value, dict):
            yield f"[{prefix}{key}]"
            yield from _toml(value, f"{prefix}{key}.")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(_inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def leaves(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values of nested tables and lists with their paths."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from leaves(value, (*path, key))
    elif isinstance(config, list) and any(isinstance(one, dict) for one in config):
        for place, value in enumerate(config):
            yield from leaves(value, (*path, place))
    else:
        yield path, config


def _changed(config: Any, path: tuple[Any, ...], key: Any, value: Any) -> Any:
    """Return a copy with one key renamed and its value replaced."""
    copy = json.loads(json.dumps(config))
    place = copy
    for part in path[:-1]:
        place = place[part]
    if isinstance(place, dict):
        items = [(key, value) if name == path[-1] else (name, one) for name, one in place.items()]
        place.clear()
        place.update(items)
        if path[-1] not in dict(items) and key not in place:
            place[key] = value
    return copy


def misspelled(name: str, draw: random.Random) -> str:
    """Return a name with one typing error: two letters swapped, one left out or one doubled."""
    place = draw.randrange(1, len(name) - 1)
    kind = draw.randrange(3)
    if kind == 0 and name[place] != name[place + 1]:
        return name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    return name[:place] + name[place + 1 :] if kind == 1 else name[:place] + name[place] + name[place:]


@dataclass(frozen=True)
class Changes:
    """What is put into files of a corpus."""

    keys: re.Pattern[str]  # dotted keys that are misspelled
    numbers: re.Pattern[str]  # keys that get text instead of a number
    names: Mapping[str, str] = None  # type: ignore[assignment]  # keys whose value is misspelled: kind of the defect
    layouts: Callable[[Any], Iterator[tuple[str, Any]]] | None = None  # impossible combinations

    def defects(self, files: Files, entry: Entry, folder: Path, draw: random.Random) -> Iterator[Defect]:
        config = entry["config"]
        found = [(".".join(map(str, path)), path, value) for path, value in leaves(config)]
        options: list[tuple[str, str, Any]] = []
        keys = [one for one in found if self.keys.fullmatch(one[0]) and len(str(one[1][-1])) > 4]
        if keys:
            name, path, value = draw.choice(keys)
            wrong = misspelled(str(path[-1]), draw)
            options.append(("misspelled key", f"{name} → {wrong}", _changed(config, path, wrong, value)))
        numbers = [one for one in found if self.numbers.fullmatch(one[0]) and isinstance(one[2], int | float)]
        if numbers:
            name, path, _ = draw.choice(numbers)
            options.append(("wrong type", f"{name}: many", _changed(config, path, path[-1], "many")))
        names = [one for one in found if isinstance(one[2], str) and one[0].split(".")[-1] in (self.names or {})]
        if names:
            name, path, value = draw.choice(names)
            head, dot, last = value.rpartition(".")
            wrong = head + dot + misspelled(last, draw) if len(last) > 4 else f"{value}x"
            kind = (self.names or {})[str(path[-1])]
            options.append((kind, f"{name}: {wrong}", _changed(config, path, path[-1], wrong)))
        if self.layouts is not None:
            layouts = [("impossible layout", change, copy) for change, copy in self.layouts(config)]
            options += [draw.choice(layouts)] if layouts else []
        draw.shuffle(options)
        for number, (kind, change, copy) in enumerate(options[:1]):
            place = folder / f"defect{number}"
            place.mkdir()
            yield Defect(kind, change, files.restore({**entry, "config": copy}, place))


def corpus(name: str, repository: str, title: str, files: Files, changes: Changes | None = None) -> Corpus:
    """Return a corpus of config files."""
    defects = None
    if changes is not None:

        def defects(entry: Entry, folder: Path, draw: random.Random) -> Iterator[Defect]:
            return changes.defects(files, entry, folder, draw)

    return Corpus(name, repository, title, files.collect, files.restore, defects)


def _trains_automodel(config: Mapping[str, Any], path: str) -> str:
    if "inference" in config or "/generate/" in path or "_generate/" in path:
        return "generates"
    return "" if {"model", "recipe_args", "recipe", "step_scheduler"} & config.keys() else "not a training config"


def _automodel_layouts(config: Any) -> Iterator[tuple[str, Any]]:
    distributed = config.get("distributed")
    if isinstance(distributed, dict) and str(distributed.get("strategy", "fsdp2")) == "fsdp2":
        without = {key: one for key, one in distributed.items() if key != "pipeline"}
        yield "pp_size 2 without a pipeline block", {**config, "distributed": {**without, "pp_size": 2}}
        yield "ddp with tp_size 2", {**config, "distributed": {**without, "strategy": "ddp", "tp_size": 2}}
    batch = config.get("step_scheduler", {})
    if isinstance(batch, dict) and isinstance(batch.get("local_batch_size"), int):
        wrong = {
            **batch,
            "global_batch_size": 3 * batch["local_batch_size"] + 1,
            "local_batch_size": 2 * batch["local_batch_size"],
        }
        yield "a batch that does not divide", {**config, "step_scheduler": wrong}


AUTOMODEL = Files(("examples",), (".yaml", ".yml"), _trains_automodel, "automodel")
AUTOMODEL_CHANGES = Changes(
    re.compile(r"(peft|fp8|model\.backend|dataset|distributed|step_scheduler|lr_scheduler|optimizer|checkpoint)\.\w+"),
    re.compile(r"(peft\.(dim|alpha)|step_scheduler\.\w+_(size|steps)|distributed\.\w+_size|optimizer\.lr)"),
    {"_target_": "wrong target", "recipe": "misspelled recipe", "collate_fn": "wrong target"},
    _automodel_layouts,
)

KEMPNER = Files(
    ("configs",), (".toml",), lambda config, path: "" if "train" in config or "training" in config else "a model"
)
KEMPNER_CHANGES = Changes(
    re.compile(r"\w+\.\w+"), re.compile(r"(train|model|optimizer|distributed)\.\w*(dim|n_|steps|size|lr|tp|seq)\w*")
)


def _trains_axolotl(config: Mapping[str, Any], path: str) -> str:
    return "" if "base_model" in config else "not a training config"


def _trains_factory(config: Mapping[str, Any], path: str) -> str:
    if {"infer_backend", "export_dir"} & config.keys():
        return "exports or generates"
    trains = {"stage", "finetuning_type", "dist_config", "train_dataset"} & config.keys()
    return "" if trains else "not a training config"


TRAINER_KEYS = (
    r"(learning_rate|gradient_accumulation_steps|lora_\w+|weight_decay|warmup_ratio|optimizer|lr_scheduler\w*"
)
TRAINER_NUMBERS = r"(learning_rate|gradient_accumulation_steps|lora_(r|rank|alpha)|micro_batch_size|logging_steps"
AXOLOTL = Files(("examples",), (".yaml", ".yml"), _trains_axolotl)
AXOLOTL_CHANGES = Changes(
    re.compile(
        TRAINER_KEYS
        + r"|sequence_len|sample_packing|micro_batch_size|num_epochs|datasets\.0\.\w+|special_tokens|adapter)"
    ),
    re.compile(TRAINER_NUMBERS.replace("learning_rate|", "") + r"|sequence_len|num_epochs)"),  # its rate may be text
    {"attn_implementation": "wrong value", "lr_scheduler": "wrong value", "optimizer": "wrong value"},
)
FACTORY = Files(("examples",), (".yaml", ".yml"), _trains_factory)
FACTORY_CHANGES = Changes(
    re.compile(
        TRAINER_KEYS + r"|cutoff_len|template|finetuning_type|per_device_train_batch_size|preprocessing_num_workers)"
    ),
    re.compile(TRAINER_NUMBERS + r"|cutoff_len|per_device_train_batch_size|max_samples)"),
    {"finetuning_type": "wrong value", "stage": "wrong value", "flash_attn": "wrong value"},
)

CORPORA: Mapping[str, Corpus] = {
    "automodel": corpus(
        "automodel", "NVIDIA-NeMo/Automodel", "AutoModel, example configs", AUTOMODEL, AUTOMODEL_CHANGES
    ),
    "kempnerforge": corpus(
        "kempnerforge", "KempnerInstitute/KempnerForge", "KempnerForge, configs", KEMPNER, KEMPNER_CHANGES
    ),
    "axolotl": corpus("axolotl", "axolotl-ai-cloud/axolotl", "Axolotl, examples", AXOLOTL, AXOLOTL_CHANGES),
    "llama-factory": corpus(
        "llama-factory", "hiyouga/LLaMA-Factory", "LLaMA-Factory, example YAML files", FACTORY, FACTORY_CHANGES
    ),
}
"""The corpora of this module, by name."""
