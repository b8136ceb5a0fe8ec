"""AutoModel's classes, functions, recipes and blocks (targets.tsv, written from its source), and rules on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import closest
from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.key_table import KeyTable, near_name, read_table
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps.hugging_face import refused_kernel
from meshwright.similar import misspelled

PACKAGE = "nemo_automodel"
ALIASES = {"nemo_automodel.models": "nemo_automodel.components.models"}
TORCH_OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
OUTSIDE = {
    "torch.optim": TORCH_OPTIMIZERS,
    "torch.utils.data": ("DataLoader", "Dataset", "IterableDataset", "DistributedSampler"),
    "torchdata.stateful_dataloader": ("StatefulDataLoader",),
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy", "FSDPModule"),
    "transformers": (),
}
"""Modules of other packages that targets often name, with their classes; empty: not compared."""
LIBRARIES = (PACKAGE, "torch", "torchdata", "transformers", "transformer_engine", "torchao", "dion")
METHODS = ("from_pretrained", "from_config", "from_dict", "from_kwargs", "build")  # of classes that targets name
RUNTIME = {
    "dataset": ("tokenizer", "processor"),
    "vlm": ("tokenizer", "processor", "chat_template", "packing", "pretokenize", "truncate", "inject_fake_images",
        "max_length"),
}  # fmt: skip
"""Keys of a dataset that the recipes take out before the class is built."""
SECTIONS = re.compile(
    r"(dataset|validation_dataset\w*|loss_fn|kd_loss_fn|peft|qat|model\.backend|model\.backend\.te_fp8"
    r"|(validation_)?dataloader\.collate_fn|ema)"
)
"""Sections whose keys are passed to their target."""
BLOCKS = {
    "fp8": "nemo_automodel.components.quantization.fp8.FP8Config",
    "mlflow": "nemo_automodel.components.loggers.loggers.MLflowConfig",
    "comet": "nemo_automodel.components.loggers.loggers.CometConfig",
    "peft": "nemo_automodel.components._peft.lora.PeftConfig",
    "model.backend": "nemo_automodel.components.models.common.utils.BackendConfig",
}
"""Classes that are built from sections without a target."""
NOT_ENFORCED = ("model.backend.",)  # sections with choices that their class does not compare
_PATH = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")


def table() -> KeyTable:
    """Return the table of AutoModel's names."""
    return read_table(Path(__file__).with_name("targets.tsv"))


def recipe_names() -> tuple[str, ...]:
    """Return the recipe classes."""
    return tuple(table().owners["recipes"])


def has_own_model(hf_class: str) -> bool:
    """Return whether AutoModel has its own model of an architecture; others are those of transformers."""
    return hf_class in table().owners["models"]


def read_blocks() -> frozenset[str]:
    """Return the top-level keys that any recipe reads."""
    return frozenset(table().owners["blocks"])


def resolve(path: str) -> tuple[str, str]:
    """Return the class or function that a dotted path names, and what is wrong with the path; each may be empty."""
    for alias, real in ALIASES.items():
        path = real + path.removeprefix(alias) if path.startswith(f"{alias}.") else path
    owners, parts = table().owners, path.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in owners), "")
    rest = path.removeprefix(module).strip(".").split(".")
    if not module:
        return "", ""
    if rest == [""]:
        return "", f"{path} is a module, not a class or function"
    names = owners[module]
    if rest[0] not in names:
        near = near_name(rest[0], tuple(names))
        return "", f"{module} has no {rest[0]}" + (f"; did you mean {near}?" if near else "")
    near = near_name(rest[1], METHODS) if len(rest) == 2 and rest[1] not in METHODS else ""
    if near:
        return "", f"{rest[0]} has no {rest[1]}; did you mean {near}?"
    origin = _origin(module, rest[0])
    return ".".join((origin, *rest[1:])), ""


def _origin(module: str, name: str) -> str:
    """Return where a name is defined that a package imports."""
    for _ in range(6):
        key = table().find(module, name)
        if key is None or not key.choices:
            return f"{module}.{name}"
        module, _, name = key.choices[0].rpartition(".")
    return f"{module}.{name}"


def _problem_of(path: str) -> str:
    """Return what is wrong with a dotted path; empty if nothing is known to be."""
    first = path.split(".")[0]
    if first == PACKAGE:
        return resolve(path)[1]
    module, _, name = path.rpartition(".")
    if module in OUTSIDE and OUTSIDE[module] and name not in OUTSIDE[module] and name[:1].isupper():
        near = near_name(name, OUTSIDE[module])
        return f"{module} has no {name}" + (f"; did you mean {near}?" if near else "")
    owner = module.rpartition(".")[2]
    if owner[:1].isupper() and name not in METHODS and near_name(name, METHODS):  # a method of a class elsewhere
        return f"{owner} has no {name}; did you mean {near_name(name, METHODS)}?"
    libraries = closest(first, LIBRARIES, 1)
    if first not in LIBRARIES and libraries and near_name(first, LIBRARIES):
        return f"there is no package {first}; did you mean {libraries[0]}?"
    return ""


def _target_paths(ctx: RuleContext) -> Iterator[tuple[str, str]]:
    for key, setting in ctx.parsed.settings.items():
        last = key.rpartition(".")[2]
        if last == "_target_" or (last.endswith("_fn") and not last.startswith("_")):
            value = setting.value
            if isinstance(value, str) and not setting.unresolved and _PATH.fullmatch(value):
                yield key, value


def _target_unknown(ctx: RuleContext) -> Iterator[Problem]:
    for key, path in _target_paths(ctx):
        problem = _problem_of(path)
        if problem:
            near = re.search(r"did you mean (\S+)\?", problem)
            yield Problem(problem, (format_setting(key, _replaced(path, near[1])),) if near else (), key=key)


def _replaced(path: str, near: str) -> str:
    """Return a path with the name that is likely meant: the one with the most characters in common."""
    from rapidfuzz.fuzz import ratio

    parts = path.split(".")
    place = max(range(len(parts)), key=lambda index: ratio(parts[index], near))
    return ".".join((*parts[:place], near, *parts[place + 1 :]))


def _recipe_unknown(ctx: RuleContext) -> Problem | None:
    key = next((one for one in ("recipe", "recipe._target_") if ctx.is_set(one)), "")
    name = ctx.get(key) if key else None
    if not isinstance(name, str) or "." in name or not name.strip():
        return None
    if name in recipe_names():
        return None
    near = closest(name, recipe_names(), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = (format_setting(key, near[0]),) if near else ()
    return Problem(f"AutoModel has no recipe {name}{hint}", fix, key=key)


def _section_class(ctx: RuleContext, section: str) -> str:
    """Return the class or function that a section is passed to, as the table names it; empty if it is unknown."""
    path = ctx.get(f"{section}._target_")
    if isinstance(path, str):
        return resolve(path)[0] if path.startswith(PACKAGE) else ""
    own = "NeMoAutoModelFor" in str(ctx.get("model._target_")) or not section.startswith("model.")
    return BLOCKS.get(section, "") if path is None and own else ""


SWITCHES = re.compile(
    r"freeze_\w+|(\w+_)?enabled?|enable_\w+|use_\w+|patch_\w+|trust_remote_code|shuffle|foreach|drop_last|pin_memory|truncate"
)
"""Names of keys that are on or off, whatever class gets them."""
NUMBERS = re.compile(
    r"num_epochs|(\w+_)?batch_size|seq_len(gth)?|max_length|(\w+_)?steps|num_nodes|\w*num_hidden_layers"
)
POSITIVE = re.compile(r"num_epochs|(\w+_)?batch_size|seq_len(gth)?|max_length")
"""Names of keys that are numbers, and of those that are above 0."""
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "0", "1", "none", "null", "")
NOT_A_KERNEL = ("none", "null", "", "te", "ffpa", "magi")  # the last three are AutoModel's own
OF_OTHER_LIBRARIES = {
    **dict.fromkeys(("peft.r", "peft.rank", "peft.lora_r", "peft.lora_rank"), "dim"),
    "peft.lora_alpha": "alpha",
    "peft.lora_dropout": "dropout",
}
"""Keys that PEFT and front ends have -> AutoModel's."""
SPECIAL = ("_target_", "_partial_", "_args_")
MODEL_KEYWORDS = (
    "trust_remote_code", "torch_dtype", "attn_implementation", "pretrained_model_name_or_path", "use_liger_kernel",
    "use_sdpa_patching", "load_base_model", "force_hf", "use_cache", "output_hidden_states", "quantization_config",
)  # fmt: skip
"""Keywords of from_pretrained and from_config, which also take all others and pass them on."""


def _passed_on(ctx: RuleContext) -> Iterator[Problem]:
    """Yield what no signature refuses: switches with other values, and misspelled keys that are passed on."""
    for key, setting in ctx.parsed.settings.items():
        section, _, name = key.replace('"', "").rpartition(".")
        if not section or section.partition(".")[0] == "ci":  # its own tests read that block
            continue
        text = str(setting.value).strip().lower()
        if SWITCHES.fullmatch(name) and not setting.unresolved and text not in BOOLEANS and "$" not in text:
            yield Problem(f"{key}: {setting.value}: expected true or false", (format_setting(key, False),), key=key)
        if (problem := _number_problem(key, setting)) is not None:
            yield Problem(f"{key}: {problem}", key=key)
        if name == "attn_implementation" and not setting.unresolved and text not in NOT_A_KERNEL and "$" not in text:
            reason, kernel = refused_kernel(text) or ("", "")
            fixes = (format_setting(key, kernel),) if kernel else ()
            yield from [Problem(f"{key}: {setting.value} does not exist; {reason}", fixes, key=key)] if reason else []
        known = SPECIAL if name.startswith("_") else MODEL_KEYWORDS if section in ("model", "teacher_model") else ()
        near = misspelled(name, known) if name not in (*known, "dtype") else []
        if near:
            fix = format_setting(f"{section}.{near[0]}", ctx.get(key))
            yield Problem(f"{key} is passed on as it is; did you mean {near[0]}?", (fix,), key=key)


def _number_problem(key: str, setting: SourcedValue) -> str | None:
    """Return what is wrong with a key that is a number by its name; None if it is none, or right."""
    *above, name = key.split(".")
    if above and NUMBERS.fullmatch(above[-1]):
        return f"{above[-1]} has keys below it; expected a number"
    value = setting.value
    if not NUMBERS.fullmatch(name) or setting.unresolved or value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None if "$" in str(value) else f"{value}: expected a number"
    return f"{value}: must be above 0" if number <= 0 and POSITIVE.fullmatch(name) else None


def _keywords(ctx: RuleContext) -> Iterator[Problem]:
    passed_on = list(_passed_on(ctx))
    yield from passed_on
    names, is_vlm = table(), "VLM" in str(ctx.get("recipe") or ctx.get("recipe._target_"))
    reported = {problem.key for problem in passed_on if ": expected" in problem.message}
    for key in ctx.parsed.settings:
        section, name = _section_of(key)
        owner = f"{_section_class(ctx, section)}()" if section else ""
        if not owner or owner == "()" or owner not in names.owners or f"{section}.{name}" in reported:
            continue
        runtime = RUNTIME["vlm" if is_vlm else "dataset"] if "dataset" in section else ()
        if name == "_target_" or name in runtime or names.accepts_any(owner):
            continue
        found = names.find(owner, name)
        if found is None:
            reported.add(f"{section}.{name}")
            near = OF_OTHER_LIBRARIES.get(f"{section}.{name}", "") or names.near(owner, name)
            short = owner.removesuffix("()").rpartition(".")[2]
            ignored = section == "fp8"
            what = f"the {section} section ignores {name}" if ignored else f"{short} does not accept {name}"
            fix = format_setting(f"{section}.{near}", ctx.get(key)) if near else f"remove {section}.{name}"
            message = f"{what}; {names.hint(owner, near)}"
            yield Problem(message, (fix,), key=key, severity="warning" if ignored and not near else None)
        elif key == f"{section}.{name}" and not ctx.parsed.settings[key].unresolved:
            value = ctx.parsed.settings[key].value
            problem = "" if found.choices and key.startswith(NOT_ENFORCED) else found.problem(value)
            if problem:
                meant = found.meant(value) if found.choices else ""
                fixes = (format_setting(key, meant),) if meant else ()
                yield Problem(f"{key}={value}: {problem}", fixes, key=key)


def _draft_keys(ctx: RuleContext) -> Iterator[Problem]:
    """Yield typing errors in sections that recipes of draft models read key by key."""
    known = tuple(sorted(read_blocks()))
    for key in ctx.parsed.settings:
        section, _, name = key.partition(".")
        section_is_read = section == "recipe_args" or (section == "optimizer" and not ctx.is_set("optimizer._target_"))
        near = near_name(name, known) if section_is_read and name and name not in read_blocks() else ""
        if near and "." not in name and "[" not in name:
            fix = (format_setting(f"{section}.{near}", ctx.get(key)),)
            yield Problem(f"{key} is ignored; did you mean {section}.{near}?", fix, key=key)


def _section_of(key: str) -> tuple[str, str]:
    """Return the section that is passed to a target and the key in it; empty if the key is in none."""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        section = ".".join(parts[:length])
        if SECTIONS.fullmatch(section) or section in BLOCKS:
            return section, parts[length].split("[")[0]
    return "", ""


TARGET_RULES = (
    FrameworkRule("automodel.target-unknown", "error", (), _target_unknown,
        symptom="ImportError while the file is read, on every rank",
        cause="each _target_ and function is imported by its dotted path when the config is loaded"),
    FrameworkRule("automodel.recipe-unknown", "error", ("recipe", "recipe._target_"), _recipe_unknown,
        symptom="ValueError: unknown recipe class, with a list of the classes",
        cause="the command finds recipe classes by their name"),
    FrameworkRule("automodel.target-keyword", "error", (), _keywords,
        symptom="TypeError: unexpected keyword argument, after the model is loaded",
        cause="a section is passed to its target unchanged"),
    FrameworkRule("automodel.key-ignored", "error", (), _draft_keys,
        symptom="none: the recipe uses its default", cause="recipes of draft models read their keys one by one"),
)  # fmt: skip
"""Rules that run on the file as written: names are imported even in sections that no recipe reads."""
