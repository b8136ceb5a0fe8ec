"""Files of Megatron-LM and Megatron-Bridge: functional tests, example scripts, verified runs, recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from benchmarks.corpora import Corpus, Target
from benchmarks.corpora.megatron_defects import bridge_defects, launch_defects, megatron_lm_defects, snippet_defects

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file
from meshwright.frameworks.megatron_bridge import snippet

CASES = "tests/functional_tests/test_cases"
PLATFORMS = {"dgx_h100": "H100", "dgx_a100": "A100", "dgx_gb200": "GB200"}
TRAINING_SCRIPT = re.compile(r"TRAINING_SCRIPT_PATH=([\w./-]+)")
PROGRAMS = {
    "bert": "examples/bert/pretrain_bert.py",
    "t5": "examples/t5/pretrain_t5.py",
    "hybrid": "pretrain_hybrid.py",
    "nemotron": "pretrain_hybrid.py",
    "multimodal-llava": "pretrain_vlm.py",
    "mimo": "examples/mimo/train.py",
}
"""Training program of a folder of test cases, for cases that no CI recipe lists; else pretrain_gpt.py."""
TRAINS = re.compile(r"\b(pretrain_\w+|train\w*|finetune\w*|sft\w*|\w*finetune)\.py\b|\brun_recipe\b|-m \S*\bpretrain_")
PYTHON_TRAINS = re.compile(r"\b(pretrain|finetune)\(")
RUN_KEYS = re.compile(r"MODEL_ARGS(_\d+)?")
CARD_GOALS = ("pretrain", "sft", "peft", "pretrain_performance", "sft_long_context", "checkpoint_resume")
LAUNCHER = "uv run --no-sync python -m torch.distributed.run"


# Megatron-LM's functional tests: a YAML file has the arguments and the environment, a CI recipe the program and GPUs.


def functional_tests(root: Path, folder: Path) -> Iterator[Target]:
    """Yield every run of every functional test, as the script that its CI makes of it."""
    listed = _ci_recipes(root)
    for number, file in enumerate(sorted((root / CASES).glob("*/*/model_config.yaml"))):
        suite, case = file.parts[-3:-1]
        path = str(file.relative_to(root))
        config = yaml.safe_load(file.read_text())
        runs = listed.get((suite, case)) or [(PROGRAMS.get(suite, "pretrain_gpt.py"), 0, 0, "")]
        if config.get("MODE") == "inference" or "inference" in runs[0][0]:
            yield Target(path, file, skipped="inference")
            continue
        if not config["MODEL_ARGS"]:
            yield Target(path, file, skipped="no arguments")
            continue
        if suite.endswith("nemo"):
            yield Target(path, file, skipped="arguments of NeMo")
            continue
        for program, nodes, per_node, gpu in runs:
            for key in filter(RUN_KEYS.fullmatch, config):
                env = config.get("ENV_VARS") or {}
                per_node = config.get("MODEL_ENV_VARS", {}).get(key, {}).get("GPUS_PER_NODE", per_node)
                kept = {
                    "program": program,
                    "nodes": nodes,
                    "gpus_per_node": per_node,
                    "gpu": gpu,
                    "env": {name: str(value) for name, value in env.items()},
                    "args": dict(_arguments(config[key] or {})),
                }
                tail = "".join([f"#{gpu}" if gpu else "", key.removeprefix("MODEL_ARGS")])
                made = restore_script({"path": f"{path}{tail}", **kept}, _new(folder / f"{number}{tail}"))
                yield made


def _ci_recipes(root: Path) -> dict[tuple[str, str], list[tuple[str, int, int, str]]]:
    """Return the program, nodes, GPUs per node and GPU type of each test case that a CI recipe runs."""
    found: dict[tuple[str, str], list[tuple[str, int, int, str]]] = {}
    for file in sorted(root.glob("tests/test_utils/recipes/*/*.yaml"), reverse=True):  # h100 first
        recipe = yaml.safe_load(file.read_text())
        spec = recipe.get("spec", {})
        program = TRAINING_SCRIPT.search(spec.get("script", ""))
        if program is None or not isinstance(recipe.get("products"), list):
            continue
        gpu, per_node = ("GB200", 4) if file.parent.name == "gb200" else ("H100", 8)
        for product in recipe["products"]:
            for case in product["test_case"]:
                runs = found.setdefault((spec["model"], case), [])
                if all(gpu != one[3] for one in runs):
                    runs.append((program[1].removeprefix("./"), spec["nodes"], per_node, gpu))
    return found


def _arguments(args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its values as CI writes them on the command line."""
    for flag, value in args.items():
        if value is True or value == "":
            yield flag, ""
            continue
        text = " ".join(shlex.split(str(value).lower() if value is False else str(value).replace("\n", " ")))
        if re.fullmatch(r"\[[^]]+\]", text):
            yield flag, text[1:-1]
        elif re.search(r"[ |()]", text):
            yield flag, f'"{text}"'
        else:
            yield flag, text


def restore_script(entry: Mapping[str, Any], folder: Path) -> Target:
    """Return a script that starts a program with the kept environment and arguments."""
    lines = ["#!/bin/bash", *(f"export {name}={shlex.quote(value)}" for name, value in entry["env"].items())]
    options = []
    if entry.get("gpus_per_node"):
        options = [f"--nproc_per_node {entry['gpus_per_node']}", f"--nnodes {entry['nodes']}"]
    args = [f"{flag} {value}".strip() for flag, value in entry["args"].items()]
    lines.append(" \\\n    ".join([LAUNCHER, *options, entry["program"], *args]))
    file = folder / "run.sh"
    file.write_text("\n".join(lines) + "\n")
    count = f"{entry['nodes']}x{entry['gpus_per_node']}x{entry['gpu']}" if entry.get("gpus_per_node") else None
    return Target(entry["path"], file, gpus=count, kept={key: entry[key] for key in entry if key != "path"})


# Shell scripts of a repository: kept as the commands that start a training, as the interpreter finds them.


def _scripts(root: Path, folders: Sequence[str]) -> Iterator[Path]:
    for name in folders:
        yield from sorted((root / name).rglob("*.sh"))


def _script_targets(root: Path, folders: Sequence[str]) -> Iterator[Target]:
    for file in _scripts(root, folders):
        path, text = str(file.relative_to(root)), file.read_text(errors="replace")
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        if not TRAINS.search(code):
            yield Target(path, file, skipped="starts no training")
            continue
        yield Target(path, file, kept=_kept_launches(file))


def _kept_launches(file: Path) -> dict[str, Any] | None:
    try:
        content = open_file(file)
    except InputError:
        return None
    found = [one for one in (_kept_launch(content, number) for number in range(len(content.launches))) if one]
    possible = sorted(content.script.possible_flags) if content.script else []
    made = content.script.written if content.script else {}
    written = {name: one.text.lstrip() for name, one in made.items() if "$" not in f"{name}{one.text}"}
    kept = {"launches": found, "possible": possible, **({"written": written} if written else {})}
    return kept if found else None


def _kept_launch(content: Content, number: int) -> dict[str, Any]:
    launch = content.launches[number]
    words = [_word(one.value, one.unresolved) for one in launch.args]
    return {
        "launcher": launch.launcher,
        "program": _word(launch.program.value, launch.program.unresolved),
        "module": launch.is_module,
        "options": {name: _word(one.value, one.unresolved) for name, one in launch.launcher_args.items()},
        "env": {name: _word(one.value, one.unresolved) for name, one in launch.env.items()},
        "args": words,
        "job": {name: _word(one.value, one.unresolved) for name, one in launch.job.items()},
    }


def _word(value: Any, unresolved: str) -> str:
    """Return a word as a script has it: one that is known only at run time stays a variable."""
    text = str(value)
    if not unresolved:
        return shlex.quote(text)
    text = text if "$" in text or "`" in text else f"${{OPEN}}{text}"
    return f'"{text}"' if re.search(r"[\s<>|&;]", text) and '"' not in text else text


def lm_examples(root: Path, folder: Path) -> Iterable[Target]:
    """Yield the example scripts of Megatron-LM."""
    return _script_targets(root, ("examples",))


def deepspeed_examples(root: Path, folder: Path) -> Iterable[Target]:
    """Yield the example scripts of Megatron-DeepSpeed that use DeepSpeed."""
    return _script_targets(root, ("examples_deepspeed",))


def bridge_scripts(root: Path, folder: Path) -> Iterable[Target]:
    """Yield the example scripts of Megatron-Bridge."""
    return _script_targets(root, ("examples", "scripts", "tutorials"))


def restore_launches(entry: Mapping[str, Any], folder: Path) -> Target:
    """Return a script with the kept commands."""
    lines = ["#!/bin/bash"]
    first = entry["launches"][0]
    lines += [f"#SBATCH --{name}={value}" for name, value in first["job"].items()]
    if entry["possible"]:
        lines.append(f'if [ -n "$1" ]; then POSSIBLE="{" ".join(entry["possible"])}"; fi')
    for name, text in entry.get("written", {}).items():
        lines += [f"cat <<'WRITTEN' > {shlex.quote(name)}", text.rstrip(), "WRITTEN"]
    for one in entry["launches"]:
        lines += [f"export {name}={value}" for name, value in one["env"].items()]
        start = {"torchrun": "torchrun", "srun": "srun python"}.get(one["launcher"], "python")
        options = [] if start != "torchrun" else [f"--{name}={value}" for name, value in one["options"].items()]
        lines.append(" ".join([start, *options, *(["-m"] if one["module"] else []), one["program"], *one["args"]]))
    file = folder / Path(entry["path"]).name
    file.write_text("\n".join(lines) + "\n")
    return Target(entry["path"], file, kept=entry)


# Megatron-Bridge's Python examples, verified runs and recipes.


def bridge_python(root: Path, folder: Path) -> Iterator[Target]:
    """Yield the Python examples of Megatron-Bridge that train."""
    for name in ("examples", "tutorials"):
        for file in sorted((root / name).rglob("*.py")):
            path, text = str(file.relative_to(root)), file.read_text()
            trains = PYTHON_TRAINS.search(text) and ("ConfigContainer" in text or "_config(" in text)
            kept = _kept_snippet(file) if trains else None
            yield Target(path, file, kept=kept, skipped="" if trains else "trains nothing")


def _kept_snippet(file: Path) -> dict[str, Any] | None:
    try:
        run = snippet.read(open_file(file))
    except InputError:
        return None
    known = {key: one.value for key, one in run.settings.items() if not one.unresolved and "._target_" not in key}
    recipe = run.recipe.value if run.recipe and not run.recipe.unresolved else ""
    settings = {key: value for key, value in known.items() if key not in ("recipe", "--mode")}
    unknown = [key for key, one in run.settings.items() if one.unresolved and key not in ("recipe", "--mode")]
    return {"recipe": recipe, "goal": run.goal, "settings": settings, "open": unknown} if recipe else None


def restore_snippet(entry: Mapping[str, Any], folder: Path) -> Target:
    """Return a Python file that sets the kept fields of a recipe and trains."""
    train = "pretrain" if entry["goal"] == "pretrain" else "finetune"
    lines = [
        f"from megatron.bridge.recipes import {entry['recipe']}",
        f"from megatron.bridge.training.{train} import {train}",
        f"cfg = {entry['recipe']}()",
        *(f"cfg.{key} = {value!r}" for key, value in entry["settings"].items()),
        *(f"cfg.{key} = value" for key in entry["open"]),
        f"{train}(cfg)",
    ]
    file = folder / Path(entry["path"]).name
    file.write_text("\n".join(lines) + "\n")
    return Target(entry["path"], file, kept=entry)


def verified_runs(root: Path, folder: Path) -> Iterator[Target]:
    """Yield the commands of training runs that Megatron-Bridge's verification cards call verified."""
    for number, file in enumerate(sorted((root / "examples/model_verification_cards").glob("*/card.yaml"))):
        items = yaml.safe_load(file.read_text()).get("items") or {}
        for goal in CARD_GOALS:
            for name, one in (items.get(goal) or {}).items():
                if not isinstance(one, dict) or one.get("status") != "verified":
                    continue
                for at, command in enumerate(one.get("commands") or [one.get("command")]):
                    if not command:
                        continue
                    path = f"{file.relative_to(root)}#{goal}.{name}{at or ''}"
                    yield restore_command(
                        {"path": path, "command": command}, _new(folder / f"{number}{goal}{name}{at}")
                    )


def restore_command(entry: Mapping[str, Any], folder: Path) -> Target:
    """Return a script with one command."""
    file = folder / "run.sh"
    file.write_text(f"#!/bin/bash\n{entry['command']}\n")
    return Target(entry["path"], file, kept={"command": entry["command"]})


def bridge_recipes(root: Path, folder: Path) -> Iterator[Target]:
    """Yield every recipe function of Megatron-Bridge, started by its runner."""
    folder = _new(folder / "runs")
    for file in sorted((root / "src/megatron/bridge/recipes").rglob("*.py")):
        if "utils" in file.parts:  # functions that recipes call
            continue
        for name in re.findall(r"^def (\w+_config)\(", file.read_text(), re.M):
            if name.startswith("_") or not re.search(r"pretrain|sft|peft|finetune", name):
                continue
            path = f"{file.relative_to(root)}#{name}"
            command = f"python scripts/training/run_recipe.py --recipe {name}"
            if "pretrain" not in name:
                command += " checkpoint.pretrained_checkpoint=/checkpoints/model"
            yield restore_command({"path": path, "command": command}, _new(folder / name))


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _script_corpus(name: str, repository: str, title: str, collect: Callable[[Path, Path], Iterable[Target]]) -> Corpus:
    return Corpus(name, repository, title, collect, restore_launches, partial(launch_defects, restore_launches))


LM, BRIDGE = "NVIDIA/Megatron-LM", "NVIDIA-NeMo/Megatron-Bridge"
DEEPSPEED = "deepspeedai/Megatron-DeepSpeed"
CORPORA = {
    one.name: one
    for one in (
        Corpus(
            "megatron-lm-tests",
            LM,
            "Megatron-LM, functional tests",
            functional_tests,
            restore_script,
            partial(megatron_lm_defects, restore_script),
        ),
        _script_corpus("megatron-lm-examples", LM, "Megatron-LM, example scripts", lm_examples),
        _script_corpus("megatron-deepspeed", DEEPSPEED, "Megatron-DeepSpeed, scripts", deepspeed_examples),
        _script_corpus("megatron-bridge-scripts", BRIDGE, "Megatron-Bridge, scripts", bridge_scripts),
        Corpus(
            "megatron-bridge-python",
            BRIDGE,
            "Megatron-Bridge, Python examples",
            bridge_python,
            restore_snippet,
            partial(snippet_defects, restore_snippet),
        ),
        Corpus(
            "megatron-bridge-runs",
            BRIDGE,
            "Megatron-Bridge, verified runs",
            verified_runs,
            restore_command,
            partial(bridge_defects, restore_command),
        ),
        Corpus(
            "megatron-bridge-recipes",
            BRIDGE,
            "Megatron-Bridge, recipes",
            bridge_recipes,
            restore_command,
            partial(bridge_defects, restore_command),
        ),
    )
}
