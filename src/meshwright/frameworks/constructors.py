"""Keywords that a Python program passes to constructors of transformers, TRL and peft, which do not accept them.

Each one is a TypeError when the program starts. The accepted keywords are those of one release of each package
(constructors.tsv): a keyword of an older release is a warning with the release that removed it, a misspelled one an
error, and any other a warning, because a newer release may have it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright import similar
from meshwright.frameworks import weight_loading
from meshwright.frameworks.config_calls import CONFIGS, config_findings
from meshwright.frameworks.constructor_values import value_findings
from meshwright.frameworks.framework import Content
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.other_versions import MAY_ACCEPT, OLDER_ACCEPT
from meshwright.frameworks.trainer_calls import uses_unsloth
from meshwright.rules.rule import Finding

TABLE = Path(__file__).with_name("constructors.tsv")
Removed = Mapping[str, tuple[str, str]]
"""Keywords with the release that has none of this name, and the keyword now; empty if there is none."""
TITLES = {"transformers": "transformers", "trl": "TRL", "peft": "PEFT"}
ARGUMENTS: Removed = {
    "xpu_backend": ("4.32", "ddp_backend"), "sharded_ddp": ("4.35", ""),
    "evaluation_strategy": ("4.51", "eval_strategy"), "dispatch_batches": ("4.51", ""),
    "split_batches": ("4.51", ""), "tp_size": ("4.52", ""), "use_ipex": ("4.57", ""),
    "per_gpu_train_batch_size": ("5.0", "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": ("5.0", "per_device_eval_batch_size"), "no_cuda": ("5.0", "use_cpu"),
    "push_to_hub_model_id": ("5.0", "hub_model_id"), "push_to_hub_token": ("5.0", "hub_token"),
    **dict.fromkeys((
        "overwrite_output_dir", "jit_mode_eval", "fp16_opt_level", "half_precision_backend", "tpu_num_cores",
        "tpu_metrics_debug", "past_index", "fsdp_min_num_params", "adafactor", "use_legacy_prediction_loop",
        "include_inputs_for_metrics", "fp16_backend", "push_to_hub_organization", "mp_parameters", "torchdynamo",
        "ray_scope", "fsdp_transformer_layer_cls_to_wrap", "use_mps_device", "save_safetensors",
        "include_tokens_per_second"), ("5.0", "")),
    "group_by_length": ("5.2", ""), "warmup_ratio": ("5.15", "warmup_steps"), "logging_dir": ("5.15", ""),
}  # fmt: skip
"""Fields of TrainingArguments, by the releases of transformers since 4.20."""
OF_CONFIG = (
    *("dataset_text_field", "packing", "dataset_num_proc", "neftune_noise_alpha", "model_init_kwargs"),
    *("dataset_kwargs", "eval_packing"),
)
SFT_TRAINER: Removed = {
    **dict.fromkeys(OF_CONFIG, ("0.13", "SFTConfig")),
    "max_seq_length": ("0.13", "SFTConfig"),
    **dict.fromkeys(("infinite", "num_of_sequences", "chars_per_token", "dataset_batch_size"), ("0.13", "")),
    "model_init": ("0.15", ""),
    "tokenizer": ("0.16", "processing_class"),
}
"""Keywords of SFTTrainer, by the releases of TRL since 0.5; SFTConfig instead of a keyword: it has the keyword."""
TRAINER: Removed = {"tokenizer": ("5.0", "processing_class")}
CONFIG, LENGTH, LENGTH_NOW = "SFTConfig", "max_seq_length", "max_length"
OTHER_VALUE = {
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "adafactor": "optim='adafactor'",
    "include_inputs_for_metrics": "include_for_metrics=['inputs']",
}
"""Arguments instead of switches that are on."""
OF_TRL = "trl."
OTHER_TRAINER = "trl.…Trainer"  # one without a table: TRL changes most of its keywords from release to release
COMMON = ("model", "args", "train_dataset", "eval_dataset", "processing_class", "tokenizer", "data_collator",
    "callbacks", "optimizers", "peft_config", "ref_model", "reward_funcs", "reward_model", "value_model",
    "reward_processing_classes", "compute_metrics", "models", "policy")  # fmt: skip
"""Keywords of TRL's trainers, past and present."""
MEANT = "did you mean"  # in the finding of a misspelled keyword
CAUGHT = ("TypeError", "Exception", "BaseException", "")  # a program with them has a second way


def constructor_findings(content: Content | None) -> Iterator[Finding]:
    """Yield the keywords and values of a program that the constructors of its packages do not accept.

    Not compared are classes of the program's own, and calls that are tried or depend on a version. Of programs with
    Unsloth, which replaces TRL's classes, only arguments of a training that are misspelled, or that transformers
    removed, are.
    """
    tree = None if content is None else _parsed(content.text)
    if tree is None or content is None:
        return
    guarded = _guarded(tree)
    yield from value_findings(tree, content.path, guarded)
    replaced = uses_unsloth(content)
    yield from () if replaced else weight_loading.removed_switches(tree, content, guarded)
    found = _keyword_findings(content, tree, guarded)
    yield from (one for one in found if not replaced or _is_of_unsloth(one))


def _is_of_unsloth(finding: Finding) -> bool:
    """Return whether a finding holds for the classes that Unsloth puts in the place of TRL's."""
    is_of_trainer = finding.message.partition(" has no ")[0].endswith("Trainer")
    removed = f" since {TITLES['transformers']} " in finding.message
    return finding.rule == "value.invalid" or (not is_of_trainer and (removed or MEANT in finding.message))


def _keyword_findings(content: Content, tree: ast.Module, guarded: set[int]) -> Iterator[Finding]:
    names = _imported(tree)
    for call in ast.walk(tree):
        owner = names.get(ast.unparse(call.func)) if isinstance(call, ast.Call) and id(call) not in guarded else None
        if owner is None or not isinstance(call, ast.Call):
            continue
        if (config := owner.removeprefix(OF_TRL)) in CONFIGS:
            fields = read_table(TABLE).owners["transformers.TrainingArguments"]
            yield from config_findings(call, config, fields, content)
            continue
        if owner == OTHER_TRAINER:
            yield from _misspelled_common(call, content.path)
            continue
        known = read_table(TABLE).owners[owner]
        for word in call.keywords:
            if word.arg is not None and word.arg not in known:
                found = weight_loading.misplaced(owner.partition(".")[2], word, content)
                yield found or _finding(owner, call, word, content.path)


def _misspelled_common(call: ast.Call, path: str) -> Iterator[Finding]:
    """Yield the misspelled ones of the keywords that every trainer of TRL has: its others differ by release."""
    given = {one.arg for one in call.keywords}
    for word in call.keywords:
        near = [] if word.arg is None or word.arg in COMMON else similar.misspelled(word.arg, COMMON)
        if not near or near[0] in given:
            continue
        message = f"{ast.unparse(call.func)} has no {word.arg}: TypeError at start; did you mean {near[0]}?"
        fix = (f"{near[0]}={ast.unparse(word.value)}",)
        yield Finding("key.unknown", "error", str(word.arg), message, fix, path, word.value.lineno)


def _parsed(text: str) -> ast.Module | None:
    names = (owner.partition(".")[2] for owner in read_table(TABLE).owners)
    if not any(f"{name}(" in text for name in names) and not ("trl" in text and "Trainer(" in text):
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the constructors of our table by the names that the program has for them."""
    owners = tuple(read_table(TABLE).owners)
    found: dict[str, str] = {}
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            package = (node.module or "").partition(".")[0]
            for one in node.names:
                owner = f"{package}.{one.name}"
                is_trainer = one.name.endswith("Trainer")
                other = f"{OF_TRL}{one.name}" if one.name in CONFIGS else OTHER_TRAINER if is_trainer else ""
                if owner in owners or (package == "trl" and other):
                    found[one.asname or one.name] = owner if owner in owners else other
                else:
                    own.add(one.asname or one.name)
        elif isinstance(node, ast.Import):
            for one in node.names:
                found |= {f"{one.asname or one.name}.{last}": owner for owner in owners
                    if (last := owner.partition(".")[2]) and owner == f"{one.name}.{last}"}  # fmt: skip
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(ast.unparse(node))
    return {name: owner for name, owner in found.items() if name not in own}


def _guarded(tree: ast.Module) -> set[int]:
    """Return the nodes that only some versions execute: tried ones whose error is caught, and those under a version."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {name for one in node.handlers for name in _caught(one)}
            if caught & {*CAUGHT}:
                found |= {id(inner) for one in (*node.body, *node.handlers) for inner in ast.walk(one)}
        elif isinstance(node, ast.If | ast.IfExp) and "version" in ast.unparse(node.test).lower():
            found |= {id(inner) for inner in ast.walk(node)}
    return found


def _caught(handler: ast.ExceptHandler) -> list[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return ["" if one is None else ast.unparse(one) for one in kinds]


def _finding(owner: str, call: ast.Call, word: ast.keyword, path: str) -> Finding:
    """Return the finding of a keyword that a constructor does not accept."""
    package, _, name = owner.partition(".")
    keyword, given = word.arg or "", {one.arg for one in call.keywords}
    version, right = _removed(owner).get(keyword, ("", ""))
    value = ast.unparse(word.value)
    if version:
        title = TITLES["transformers" if keyword in ARGUMENTS and name.endswith(("Arguments", CONFIG)) else package]
        fix, named = _instead(keyword, right, value, given)
        message = f"{name} has no {keyword} since {title} {version}{named}: TypeError at start; {OLDER_ACCEPT} it"
        return Finding("key.removed", "warning", keyword, message, fix, path, word.value.lineno)
    known = read_table(TABLE).owners
    near = _meant(owner, keyword)
    if near:
        is_set = f"; {near} is set too" if near in given else ""
        fix = (f"{near}={value}",) if near not in given else (f"without {keyword}",)
        message = f"{name} has no {keyword}: TypeError at start; did you mean {near}?{is_set}"
        return Finding("key.unknown", "error", keyword, message, fix, path, word.value.lineno)
    others = (one for one in known if keyword in known[one] and keyword not in ("model", "args"))
    other = next((one.partition(".")[2] for one in others), "")
    if other:
        message = f"{name} has no {keyword}: TypeError at start; it is a keyword of {other}"
        return Finding(
            "key.unknown", "error", keyword, message, (f"{other}({keyword}={value})",), path, word.value.lineno
        )
    message = f"{name} has no {keyword}: TypeError at start; {MAY_ACCEPT}"
    return Finding("key.unknown", "warning", keyword, message, (f"without {keyword}",), path, word.value.lineno)


def _meant(owner: str, keyword: str) -> str:
    """Return the keyword that a misspelled one, or another package's name for it, means; empty if there is none."""
    from meshwright.frameworks.front_ends.synonyms import synonym

    table = read_table(TABLE)
    near = similar.misspelled(keyword, table.owners[owner])
    return near[0] if near else similar.cut_short(keyword, table.owners[owner]) or synonym(table, owner, keyword)


def _removed(owner: str) -> Removed:
    """Return the keywords that older releases of a constructor have."""
    from meshwright.frameworks.front_ends import older_keys

    if owner == "trl.SFTConfig":
        return {**ARGUMENTS, **older_keys.TRL}
    if owner == "trl.SFTTrainer":
        return SFT_TRAINER
    if owner.endswith("TrainingArguments"):
        return ARGUMENTS
    return TRAINER if owner.endswith("Trainer") else {}


def _instead(keyword: str, right: str, value: str, given: set[str | None]) -> tuple[tuple[str, ...], str]:
    """Return the fix of a removed keyword, and what the message says of its new name."""
    if right == CONFIG:
        now = LENGTH_NOW if keyword == LENGTH else keyword
        return (f"{CONFIG}({now}={value})",), f", use {now} of {CONFIG}"
    if keyword in OTHER_VALUE and value == "True":
        return (OTHER_VALUE[keyword],), f", use {OTHER_VALUE[keyword]}"
    if right and right not in given:
        return (f"{right}={value}",), f", use {right}"
    return (f"without {keyword}",), f", use {right}, which is set too" if right else ""
