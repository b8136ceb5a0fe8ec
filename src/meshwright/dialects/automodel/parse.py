"""Reading NeMo AutoModel's YAML, and the commands that start one with settings on top."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.dialects.automodel.known import SHORT_SETS, SPOKEN, STRATEGIES, TOP
from meshwright.dialects.contents import open_file
from meshwright.dialects.dialect import Asked, Content, Look, Parsed
from meshwright.dialects.shapes import from_sizes, named
from meshwright.dialects.types import Said, Settings
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.recipes.foreign import joints, words
from meshwright.recipes.foreign.automodel import SIZES
from meshwright.recipes.types import Goal, Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.dialects.shell import Launched

TABLE = "automodel"
MARKS = ("step_scheduler", "dist_env", "loss_fn", "packed_sequence", "distributed", "lr_scheduler", "recipe")
TRANSLATED = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}
VARIABLE = re.compile(r"\$\{(?:oc\.env:)?([A-Za-z_]\w*)(?:,([^}]*))?\}")
MATTERS = (
    "distributed.", "step_scheduler.", "optimizer.", "lr_scheduler.", "packed_sequence.", "peft.", "fp8.", "seed",
    "model.", "dataset.seq_len", "dataset.max_length", "clip_grad_norm.", "quantization.",
)  # fmt: skip
"""Keys whose open values are told."""
LONGEST_LITERAL = 1000  # characters; longer text stays text there
LANGUAGE = ("NextTokenPrediction", "train_ft", "benchmark", "Benchmark")
ADAPTED = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "q_a_proj", "q_b_proj", "kv_b_proj"),
    "proj": ("o_proj", "dense", "out_proj"),
    "fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "gate_and_up_projs"),
    "fc2": ("down_proj", "fc2", "down_projs"),
    "mamba_in": ("in_proj",),
    "mamba_out": ("mixer.out_proj",),
}
USUAL = ("qkv", "proj", "fc1", "fc2")


def recognises(content: Content) -> int:
    """How surely a file is AutoModel's."""
    if content.format == "yaml":
        return _surely(content)
    return 3 if any(_config_of(one) is not None for one in content.launched) else 0


def _surely(content: Content) -> int:
    targets = [str(said.value) for key, said in content.settings.items() if key.rpartition(".")[2] == "_target_"]
    if any(text.startswith("nemo_automodel") for text in targets):
        return 4
    marks = content.top() & set(MARKS)
    return 3 if len(marks) >= 3 or ("step_scheduler" in marks and "distributed" in marks) else 0


def _config_of(one: Launched) -> Said | None:
    """The YAML that a command trains by; None when it is no command of AutoModel's."""
    if one.launcher == "automodel":
        return next((said for said in one.args if str(said.value).endswith((".yaml", ".yml"))), None)
    name = str(one.program.value)
    ours = "nemo_automodel" in name or re.search(r"(finetune|pretrain|train_ft|benchmark)\.py$", name)
    if not ours:
        return None
    for at, said in enumerate(one.args):
        text = str(said.value)
        if text in ("--config", "-c") and at + 1 < len(one.args):
            return one.args[at + 1]
        if text.startswith("--config="):
            return msgspec.structs.replace(said, value=text.partition("=")[2])
        if "nemo_automodel.cli" in name and text.endswith((".yaml", ".yml")):
            return said
    return None


def parse(content: Content) -> Parsed:
    """What a file or script says."""
    if content.format == "yaml":
        return _parsed(content.settings, content, _asked_in(content.settings))
    one = next(one for one in content.launched if _config_of(one) is not None)
    named_file = _config_of(one) or one.program
    path = (content.folder or Path()) / str(named_file.value)
    if named_file.unresolved or content.folder is None or not path.is_file():
        raise InputError("the config that the script starts is not there", field="file", value=str(named_file.value))
    found = open_file(path)
    said = {**found.settings, **dict(_arguments(one, named_file))}
    found_in = _parsed(said, content, _asked(one), one.env, Path(named_file.value).stem)
    wrong = tuple(_command(one, found_in)) if one.launcher == "automodel" else ()
    return msgspec.structs.replace(found_in, findings=(*wrong, *found_in.findings))


def _command(one: Launched, parsed: Parsed) -> Iterator[Finding]:
    """What is wrong with the automodel command itself."""
    from meshwright.dialects.automodel.rules import NO_RECIPE, OLD_COMMAND, noticed

    look = Look(_dialect(), parsed, Recipe(name="", model="", goal=parsed.goal, cluster=""), None, None)
    yield from noticed(NO_RECIPE, look)
    first = one.args[0]
    if (
        not first.unresolved
        and not str(first.value).startswith("-")
        and not str(first.value).endswith((".yaml", ".yml"))
    ):
        for finding in noticed(OLD_COMMAND, look):
            yield msgspec.structs.replace(finding, file=first.file, line=first.line)


def _arguments(one: Launched, config: Said) -> Iterator[tuple[str, Said]]:
    """`--a.b value`, `--a.b=value`, or `--a.b` alone for true; the config's own words are left out."""
    args = [said for said in one.args if said is not config and not str(said.value).startswith("--config=")]
    at = 0
    while at < len(args):
        said, text = args[at], str(args[at].value)
        at += 1
        if text in ("--config", "-c") or not text.startswith("--"):
            continue
        key, equals, value = text[2:].partition("=")
        if equals:
            yield key, msgspec.structs.replace(said, value=value)
        elif at < len(args) and not str(args[at].value).startswith("--"):
            follows = args[at]
            yield key, Said(follows.value, said.line, said.file, follows.unresolved)
            at += 1
        else:
            yield key, msgspec.structs.replace(said, value=True)


def _asked(one: Launched) -> Asked:
    nodes, per_node = (_number(said) for said in (one.nodes, one.gpus_per_node))
    if one.launcher == "automodel" and nodes is None:
        nodes = 1  # the command starts ranks on its own machine only
    return Asked(nodes=nodes, gpus_per_node=per_node, gpu=one.gpu, said=one.gpus_per_node)


def _asked_in(settings: Settings) -> Asked:
    """The GPUs that a block for SkyPilot asks for, such as H100:8."""
    said = settings.get("skypilot.accelerators")
    nodes = _number(settings.get("skypilot.num_nodes")) or 1
    if said is None:
        return Asked()
    gpu, _, count = str(said.value).partition(":")
    return Asked(nodes=nodes, gpus_per_node=int(count) if count.isdigit() else 1, gpu=_gpu(gpu), said=said)


def _gpu(text: str) -> str:
    """A GPU that we know by SkyPilot's name for it; empty for others."""
    from meshwright.clusters import cluster

    name = text.upper().removesuffix("-SXM").removesuffix("-80GB") + ("-80" if text.upper() == "A100-80GB" else "")
    try:
        cluster(f"1x{name}")
    except InputError:
        return ""
    return name


def _number(said: Said | None) -> int | None:
    if said is None or said.unresolved:
        return None
    value = _literal(said.value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _parsed(settings: Settings, content: Content, asked: Asked, env: Settings | None = None, stem: str = "") -> Parsed:
    from meshwright.dialects.automodel.rules import BEFORE, noticed

    said = _normalised(settings)
    recipe = _text(said, "recipe") or _text(said, "recipe._target_")
    notes: list[str] = []
    if recipe and not any(part in recipe for part in (*LANGUAGE, "VLM")):
        notes.append(f"{recipe.rpartition('.')[2]} trains in another way: only what all recipes share was checked")
        said = {key: one for key, one in said.items() if key.split(".")[0] in SPOKEN}
    elif not any(key.startswith("recipe") for key in said):
        notes.append("the file names no recipe, as the automodel command wants: it was read as one for language models")
    files = tuple(dict.fromkeys([content.path, *(one.file for one in settings.values())]))
    model = _model(said, notes)
    goal = _goal(said, recipe)
    raw = Parsed(settings=said, name=stem or Path(content.path).stem, model=model, goal=goal, files=files)
    look = Look(_dialect(), raw, Recipe(name="", model="", goal=goal, cluster=""), None, None)
    findings = tuple(finding for rule in BEFORE for finding in noticed(rule, look))
    kept = _kept(said)
    notes += _assumptions(kept)
    return msgspec.structs.replace(
        raw,
        settings=kept,
        asked=asked,
        env=env or {},
        findings=findings,
        notes=tuple(notes),
        own=_follows(kept, model, goal, recipe),
    )


def _dialect() -> Any:
    from meshwright.dialects.automodel import DIALECT

    return DIALECT


def _normalised(settings: Settings) -> dict[str, Said]:
    """Values as their loader hands them on: YAML 1.1, variables with their defaults, literals out of text."""
    found = {key: _resolved(said) for key, said in settings.items()}
    return {key: said if key.startswith(MATTERS) else _as_text(said) for key, said in found.items()}


def _as_text(said: Said) -> Said:
    """A value that makes no difference to what is judged, such as a folder or a token."""
    return msgspec.structs.replace(said, unresolved="")


def _resolved(said: Said) -> Said:
    value = said.value if said.pyyaml is msgspec.UNSET else said.pyyaml
    if not isinstance(value, str) or said.unresolved:
        return msgspec.structs.replace(said, value=value)
    missing: list[str] = []

    def default(found: re.Match[str]) -> str:
        if found[2] is None:
            missing.append(found[1])
            return found[0]
        return found[2]

    text = VARIABLE.sub(default, value)
    if missing:
        return msgspec.structs.replace(said, unresolved=f"the variable {missing[0]} is set when the job starts")
    return msgspec.structs.replace(said, value=_literal(text))


def _literal(value: Any) -> Any:
    """Text that spells a number, truth, list or nothing, as that."""
    if not isinstance(value, str):
        return value
    if value in TRANSLATED:
        return TRANSLATED[value]
    if not value or len(value) > LONGEST_LITERAL or value[0] not in "0123456789.+-[({'\"":
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value
    return list(found) if isinstance(found, tuple) else found if isinstance(found, int | float | list | str) else value


def _text(settings: Settings, key: str) -> str:
    said = settings.get(key)
    return str(said.value) if said is not None and isinstance(said.value, str) and not said.unresolved else ""


def size_of(settings: Settings, name: str) -> int:
    """One of their sizes as it holds: unset, nothing and whatever is below 1 count as 1."""
    said = settings.get(f"distributed.{name}_size")
    value = None if said is None or said.unresolved else said.value
    return max(1, value) if isinstance(value, int) and not isinstance(value, bool) else 1


def strategy_of(settings: Settings) -> str:
    """The strategy by its first name; empty when the file names one that there is not."""
    said = settings.get("distributed.strategy")
    if said is None or said.value is None:
        return "fsdp2"
    return STRATEGIES.get(str(said.value).lower(), "")


def _kept(settings: Settings) -> dict[str, Said]:
    """What is left of the settings once all that AutoModel itself drops or puts right is gone."""
    table = words(TABLE)
    joined = {key for joint in joints(TABLE) for key in joint.keys}
    dropped = tuple(_dropped(settings))
    kept: dict[str, Said] = {}
    for key, said in settings.items():
        word = table.get(key)
        if key.startswith(dropped) or _is_unread_block(key):
            continue
        if said.value is None and not said.unresolved and word and "null" not in word.values and key not in joined:
            continue  # nothing said is as good as not saying it
        kept[key] = _put_right(key, said)
    return kept


def _dropped(settings: Settings) -> Iterator[str]:
    yield "rng"
    yield "compile"
    if size_of(settings, "pp") == 1:
        yield "distributed.pipeline"
    if size_of(settings, "ep") == 1:
        yield "distributed.moe"
    if not strategy_of(settings):
        yield "distributed.strategy"
    enabled = settings.get("fp8.enabled")
    if enabled is None or enabled.value is not True:
        yield "fp8."
    if not _schedule_is_known(settings):
        yield "distributed.pipeline.pp_schedule"


def _schedule_is_known(settings: Settings) -> bool:
    from meshwright.dialects.automodel.known import SCHEDULES
    from meshwright.recipes.foreign.values import SCHEDULES as OURS

    said = settings.get("distributed.pipeline.pp_schedule")
    if said is None or said.unresolved:
        return True
    name = str(said.value).lower()
    return name in SCHEDULES and name in {their.lower() for their in OURS}


def _is_unread_block(key: str) -> bool:
    top = key.split(".")[0].split("[")[0]
    return top not in TOP and not top.startswith("validation_dataset")


def _put_right(key: str, said: Said) -> Said:
    value = said.value
    if key == "distributed.strategy" and isinstance(value, str):
        return msgspec.structs.replace(said, value=value.lower())
    below = isinstance(value, int) and not isinstance(value, bool) and value < 1
    if below and key in {*(f"distributed.{name}_size" for name in SIZES), "distributed.dp_replicate_size"}:
        return msgspec.structs.replace(said, value=1)
    if below and key == "distributed.dp_size":
        return msgspec.structs.replace(said, value=None)
    return said


def model_name(settings: Settings) -> str:
    """The Hugging Face id or folder of the model, from wherever it is said."""
    places = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
    return next((text for text in (_text(settings, place) for place in places) if text), "")


def _model(settings: Settings, notes: list[str]) -> ModelSpec | None:
    name = model_name(settings)
    if name:
        found = named(name)
        if found is None:
            notes.append(f"{name} is not in the catalogue: its sizes are not known")
        return found
    sizes = {
        key.removeprefix("model.config."): said.value
        for key, said in settings.items()
        if key.startswith("model.config.") and key.count(".") == 2 and not said.unresolved
    }
    kind = str(sizes.pop("_target_", "")).rpartition(".")[2].removesuffix("Config")
    if not kind or len(sizes) < 4:
        return None
    try:
        return from_sizes(_model_type(kind), **sizes)
    except (InputError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, KeyError):
        return None


def _model_type(name: str) -> str:
    """The model type of a config class: Qwen3Moe is qwen3_moe."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def _goal(settings: Settings, recipe: str) -> Goal:
    if any(key == "peft" or key.startswith("peft.") for key in settings):
        return "peft"
    dataset, built = _text(settings, "dataset._target_").lower(), _text(settings, "model._target_")
    loads = settings.get("model.load_base_model")
    fresh = built.endswith("from_config") and not (loads is not None and loads.value is True)
    tokens = any(
        part in dataset for part in ("megatron_dataset", "nanogpt", "mock_iterable", "pretrain", "bin_dataset")
    )
    return "pretrain" if fresh or tokens or "retrain" in recipe or "Benchmark" in recipe else "sft"


def is_benchmark(settings: Settings) -> bool:
    """Whether a file only measures speed: its recipe says so, or a block that only such recipes carry."""
    recipe = _text(settings, "recipe") or _text(settings, "recipe._target_")
    mock = "mock" in _text(settings, "dataset._target_").lower()
    return "enchmark" in recipe or (mock and any(key.startswith("benchmark.") for key in settings))


def _assumptions(settings: Settings) -> Iterator[str]:
    if not _says_length(settings):
        yield f"no length of a sample is said: {_usual_length(settings)} tokens were assumed"
    if "dataloader.dynamic_batching.max_tokens_per_batch" in settings:
        yield "batches are filled by tokens: local_batch_size is not what a rank holds"
    if "step_scheduler.max_steps" not in settings:
        yield "the number of steps follows from the data: it is not judged"


def _says_length(settings: Settings) -> bool:
    lengths = ("dataset.seq_len", "dataset.seq_length", "dataset.max_length")
    sizes = (settings.get(f"packed_sequence.{name}") for name in ("packed_sequence_size", "pack_size"))
    packed = any(said is not None and (said.unresolved or said.value) for said in sizes)
    return packed or any(key in settings for key in lengths)


def _usual_length(settings: Settings) -> int:
    dataset = _text(settings, "dataset._target_").lower()
    return 512 if any(name in dataset for name in SHORT_SETS) else 2048


def _follows(settings: Settings, model: ModelSpec | None, goal: Goal, recipe: str) -> Mapping[str, Any]:
    """Fields of ours that no single key says."""
    own: dict[str, Any] = {}
    if not _says_length(settings):
        own["data.seq_length"] = _usual_length(settings)
    elif (longest := _longest(settings)) is not None:
        own["data.seq_length"] = longest
    if "VLM" in recipe:
        own["data.images"] = True
    if model is not None and model_name(settings) == model.hf_id:
        own["checkpoint.pretrained"] = ""
    if size_of(settings, "pp") > 1 and "distributed.pipeline.pp_microbatch_size" not in settings:
        own["layout.micro_batch_size"] = 1
    if isinstance(budget := _value(settings, "dataloader.dynamic_batching.max_tokens_per_batch"), int):
        own["layout.micro_batch_size"] = max(1, budget // _length(settings))
    if size_of(settings, "ep") > 1 and _value(settings, "distributed.reshard_after_forward") is None:
        own["layout.reshard_after_forward"] = _value(settings, "distributed.moe.reshard_after_forward") is True
    if any(key.startswith("distributed.offload_policy") for key in settings):
        policy = settings.get("distributed.offload_policy")
        own["layout.offload"] = "none" if policy is not None and policy.value is None else "params"
    own |= _learning(settings)
    if goal == "peft":
        own["peft.targets"] = _targets(settings, model)
    if validation := _validation(settings):
        own["data.validation"] = validation
    return own


def _length(settings: Settings) -> int:
    said = (_value(settings, f"dataset.{name}") for name in ("seq_length", "seq_len", "max_length"))
    return next((value for value in said if isinstance(value, int) and value > 0), _usual_length(settings))


def _longest(settings: Settings) -> int | None:
    """The longest sample of a vision-language set, where it is not packed into something longer."""
    said = _value(settings, "dataset.max_length")
    other = "dataset.seq_length" in settings or _value(settings, "packed_sequence.pack_size")
    return said if isinstance(said, int) and said > 0 and not other else None


def _value(settings: Settings, key: str) -> Any:
    said = settings.get(key)
    return None if said is None or said.unresolved else said.value


def _learning(settings: Settings) -> Iterator[tuple[str, Any]] | dict[str, Any]:
    """The learning rate over time, where it follows from the rest."""
    own: dict[str, Any] = {}
    optimizer = _text(settings, "optimizer._target_")
    if optimizer.endswith("optim.Adam") and "optimizer.weight_decay" not in settings:
        own["optimizer.weight_decay"] = 0.0
    if not any(key.startswith("lr_scheduler.") for key in settings):
        return {**own, "schedule.name": "constant", "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    steps = _value(settings, "step_scheduler.max_steps")
    if "lr_scheduler.lr_warmup_steps" not in settings:
        own["schedule.warmup_steps"] = min(1000, steps // 10) if isinstance(steps, int) and steps > 0 else 1000
    peak = _value(settings, "optimizer.lr")
    if "lr_scheduler.min_lr" not in settings:
        own["schedule.min_lr"] = 0.01 * peak if isinstance(peak, float) and peak > 0 else 1e-5
    return own


def _targets(settings: Settings, model: ModelSpec | None) -> tuple[str, ...]:
    """Which of our groups of linears get adapters; names with wildcards reach every linear that they match."""
    mamba = ("mamba_in", "mamba_out") if model is not None and any(_is_mamba(model)) else ()
    wanted = _value(settings, "peft.target_modules")
    if _value(settings, "peft.match_all_linear") is True or not wanted:
        return (*USUAL, *mamba)
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted])]
    patterns = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in names]

    def reached(name: str) -> bool:
        return any(pattern.fullmatch(text) for pattern in patterns for text in (name, f"model.layers.0.x.{name}"))

    groups = tuple(group for group, linears in ADAPTED.items() if any(reached(name) for name in linears))
    found = tuple(group for group in groups if group in (*USUAL, *mamba))
    return found or USUAL


def _is_mamba(model: ModelSpec) -> Iterator[bool]:
    from meshwright.models import Mamba2

    return (isinstance(layer.mixer, Mamba2) for layer in model.layers)


def _validation(settings: Settings) -> str:
    """The set or split that is only evaluated on."""
    for name in ("path_or_dataset_id", "path_or_dataset", "dataset_name"):
        if text := _text(settings, f"validation_dataset.{name}"):
            same = text == _text(settings, f"dataset.{name}")
            return _text(settings, "validation_dataset.split") if same else text
    return ""
