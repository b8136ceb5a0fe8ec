"""Arguments of programs built on transformers' Trainer, for configs that do not name a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import msgspec

from meshwright import similar
from meshwright.errors import InputError
from meshwright.frameworks import trainer_names
from meshwright.frameworks.adapter_defaults import adapter_defaults
from meshwright.frameworks.constructors import ARGUMENTS as REMOVED_ARGUMENTS
from meshwright.frameworks.framework import Content
from meshwright.frameworks.hf_arguments import as_parsed
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.load import content_of, open_file
from meshwright.frameworks.model_match import find_local_model, find_model, local_model_path, other_weights
from meshwright.frameworks.repository import is_in_repository
from meshwright.frameworks.script_folders import MAX_PARENTS, find_file
from meshwright.frameworks.shell.values import WrittenFile
from meshwright.frameworks.start_checks import CHOICES, TABLES, TRAINER_CHOICES, Style, broken_checks
from meshwright.frameworks.to_recipe import MODEL_ARGUMENTS
from meshwright.frameworks.trainer_fields import (
    CONCATENATES,
    LANGUAGE_MODELING,
    LISTS,
    PLAIN_TEXT,
    ROWS,
    SAMPLE_LENGTHS,
    TRAINER_DEFAULTS,
    TRL_DEFAULTS,
    TRL_LOSSES,
    UNUSED_ADAPTERS,
    WEIGHT_DTYPES,
    default_length,
    is_trainer,
    is_trl,
    read_arguments,
)
from meshwright.frameworks.trainer_files import file_arguments, own_options, parses_arguments, written_arguments
from meshwright.frameworks.trl_data import is_trl_script
from meshwright.frameworks.trl_rows import has_completions
from meshwright.frameworks.types import ProgramArguments, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import ADAPTERS, without_adapters
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps.hugging_face import refused_kernel
from meshwright.recipes.overrides import PRETRAINED
from meshwright.recipes.types import Goal
from meshwright.recipes.values import meant_number
from meshwright.rules.rule import Finding, Severity

Arguments = Mapping[str, SourcedValue]
"""Program arguments by name, with underscores; a flag without a value is True."""
MODELS = MODEL_ARGUMENTS
CONFIG = "config_name"  # the sizes of a model that starts from random weights
LENGTHS = ("max_seq_length", "model_max_length", "max_length", "cutoff_len", "block_size", "max_seq_len")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")  # read with the config
PROGRAM_ONLY = ("data.seq_length", "layout.recompute")
"""Recipe fields that only the program sets."""


UNKNOWN_FOLDER = re.compile(r"\$\{[^}]*\}/|\$\(.*\)/|\$\w+/", re.DOTALL)
TRL_SFT = re.compile(r"(?:^|[./])sft(?:\.py)?$")
PLACEHOLDER = "DATA"  # a dataset that only the program knows, as commands write it
DEFAULTS = {"optimizer.lr": 5e-5, "schedule.min_lr": 0.0, "data.dataset": PLACEHOLDER}
"""Fine-tuning values assumed if neither the config nor an argument sets them."""


class CommandArguments(msgspec.Struct, frozen=True):
    """The arguments that a started program has."""

    arguments: Arguments
    fixed_in: str = ""  # the program, if its own code sets arguments
    takes: Mapping[str, str] = {}  # argument → the program's option that sets it
    switches: tuple[str, ...] = ()  # options of it without a value
    findings: tuple[Finding, ...] = ()


BLOCKS = ("data.packing-attention",)  # texts in one block attend to each other with every kernel, as run_clm means it


class ProgramFields(msgspec.Struct, frozen=True):
    """Recipe fields from a program's arguments."""

    model: ModelSpec | None
    goal: Goal
    field_values: Mapping[str, Any]
    unknown_fields: tuple[str, ...]
    arguments: ProgramArguments
    notes: tuple[str, ...] = ()
    suppressed_rules: tuple[str, ...] = ()  # rules of ours that do not apply to the program


OPTIMIZER, BY_TRAINER = "optim", ("optimizer.supported",)
"""The Trainer constructs this optimizer and passes it to DeepSpeed or FSDP; its names have a check of their own."""
SWITCHES = (
    *("gradient_checkpointing", "bf16", "fp16", "tf32", "torch_compile", "use_liger_kernel", "group_by_length"),
    *("do_train", "do_eval", "load_best_model_at_end", "save_only_model", "overwrite_output_dir", "push_to_hub"),
    *("dataloader_drop_last", "dataloader_pin_memory", "ddp_find_unused_parameters", "bf16_full_eval"),
    *("remove_unused_columns", "include_tokens_per_second", "logging_first_step", "disable_tqdm", "greater_is_better"),
)
"""Arguments of transformers.TrainingArguments that are true or false."""
SWITCH_TEXTS = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")

TRANSFORMERS_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
RENAMED = {"evaluation_strategy": "eval_strategy"}  # arguments that TrainingArguments had
WRITTEN_OUT = {"evaluation_steps": "eval_steps"}  # a name that never existed, whose misspellings mean the argument
SHORTEST_TYPO = 8  # letters: short names of a program's own arguments are near too many others
LAUNCHER_ARGUMENTS = ("local_rank",)  # that launchers add
TRL_KEYS = Path(__file__).with_name("front_ends") / "trl.tsv"
NUMBERS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "learning_rate", "weight_decay", "warmup_ratio", "max_grad_norm", "adam_beta1",
    "adam_beta2", "adam_epsilon", "save_total_limit", "seed", *LENGTHS)  # fmt: skip
"""Arguments of transformers.TrainingArguments, and of usual programs, that are numbers."""
WORD = re.compile(
    r"(?!(?i:inf|nan|none)$)[A-Za-z]+|[\d.]+(e-?)?\d*[A-Za-z]+|[\d.]+e[+-]{2,}\d+"
)  # 2e-5e and sixteen; no placeholder
PLAIN_NAME = re.compile(r"[A-Za-z]\w*")


def parse_arguments(argv: Sequence[SourcedValue]) -> dict[str, SourcedValue]:
    """Parse `--name value`, `--name=value` and `--name`."""
    found: dict[str, SourcedValue] = {}
    name = several = ""
    for setting in argv:
        text = str(setting.value)
        if text.startswith("--"):
            name, equals, value = text[2:].replace("-", "_", text[2:].partition("=")[0].count("-")).partition("=")
            found[name] = msgspec.structs.replace(setting, value=value if equals else True)
            several = name if name in LISTS or _takes_several(name) else ""
            name = "" if equals else name
        elif name:
            found[name] = setting
            name = ""
        elif several:
            found[several] = msgspec.structs.replace(setting, value=f"{found[several].value},{text}")
    return as_parsed({key: _typed(setting) for key, setting in found.items()}, read_table(TRL_KEYS))


def _takes_several(name: str) -> bool:
    """Return whether an argument is a list, whose items follow it."""
    key = read_table(TRL_KEYS).find("", name)
    return key is not None and "list" in key.types and "str" not in key.types


def _typed(setting: SourcedValue) -> SourcedValue:
    texts = {"true": True, "false": False}
    value = texts.get(str(setting.value).lower(), setting.value) if not setting.unresolved else setting.value
    return msgspec.structs.replace(setting, value=value)


def refused_arguments(framework: str, args: Arguments, own: Content | None) -> Iterator[Finding]:
    """Yield a finding for each value on a command line that the parser of transformers' arguments refuses.

    `own` is the program, if it is here: one with a parser of its own may accept other values.
    """
    if not is_trainer(args) or not _parses_as_transformers(own):
        return
    for name, setting in args.items():
        text, choices = str(setting.value), CHOICES.get(name, ())
        if name in NUMBERS and not setting.unresolved and WORD.fullmatch(text):
            yield _not_a_number(framework, name, setting)
        is_switch = name in SWITCHES
        if setting.unresolved or not (is_switch or choices) or (is_switch and setting.value in (True, False)):
            continue
        if text.lower() in SWITCH_TEXTS if is_switch else text in choices:
            continue
        kind = "a switch: True or False" if is_switch else f"one of {', '.join(choices)}"
        fixed = "True" if is_switch else next(iter(similar.closest(text, choices)), choices[0])
        yield Finding(
            f"{framework}.argument-refused",
            "error",
            name,
            f"--{name} {text} is refused by the program's parser: it is {kind}",
            (f"--{name} {fixed}",),
            file=setting.file,
            line=setting.line,
        )


def _not_a_number(framework: str, name: str, setting: SourcedValue) -> Finding:
    given = f"--{name}" if setting.value is True else f"--{name} {setting.value}"
    reason = f"{given} is refused by the program's parser: it is a number"
    meant = meant_number(str(setting.value), name)
    fix = () if meant is None else (f"--{name} {meant}",)
    return Finding(f"{framework}.argument-refused", "error", name, reason, fix, setting.file, setting.line)


def unknown_arguments(args: Arguments, own: Content | None) -> Iterator[Finding]:
    """Yield a finding for each argument of a command that TrainingArguments had, or that is one of them mistyped.

    `own` is the program, if it is here: one with a parser of its own, or with such an argument, may accept it.
    """
    if not is_trainer(args) or not _parses_as_transformers(own):
        return
    known = [*(name for name in read_table(TRL_KEYS).owners[""] if name not in RENAMED), *WRITTEN_OUT]
    for name, setting in args.items():
        is_short = any(one.startswith(name) for one in known)  # argparse accepts the start of a name
        if is_short or len(name) < SHORTEST_TYPO or (own is not None and name in own.text):
            continue
        near = [] if name in RENAMED else similar.misspelled(name, known)
        right = RENAMED.get(name) or next((WRITTEN_OUT.get(one, one) for one in near), "")
        if not right:
            continue
        message = f"transformers has no --{name}; did you mean --{right}?"
        if name in RENAMED:
            message = f"transformers has no --{name} since version {REMOVED_ARGUMENTS[name][0]}, which has --{right}"
        fix = f"without --{name}" if right in args else f"--{right} {setting.value}"
        rule = "key.removed" if name in RENAMED else "key.unknown"
        is_error = own is not None and name not in RENAMED and not is_in_repository(own.folder, name)
        severity: Severity = "error" if is_error else "warning"
        yield Finding(rule, severity, name, message, (fix,), file=setting.file, line=setting.line)


def _parses_as_transformers(own: Content | None) -> bool:
    """Return whether a program, if it is here, reads its arguments with transformers' parser or a derived one."""
    return own is None or any(parser in own.text for parser in TRANSFORMERS_PARSERS)


def command_arguments(
    framework: str, own: Content | None, given: Arguments, assigned: Mapping[str, str | None]
) -> CommandArguments:
    """Return the arguments of a program: its own, then those of the command if it parses them.

    `own` is the program, if it is here, and `assigned` are changes of its code, None for an argument to remove.
    """
    if own is None:
        return CommandArguments(given)
    parses = parses_arguments(own)
    stated = file_arguments(own, given) if parses else file_arguments(own)
    changed = {name: SourcedValue(_python(text), 0, own.path) for name, text in assigned.items() if text is not None}
    stated = {name: one for name, one in {**stated, **changed}.items() if assigned.get(name, "") is not None}
    if parses:
        options = own_options(own)
        takes = {name: name for name in options}
        takes |= {name: flag for name, one in stated.items() if (flag := one.default_of.removeprefix("--")) in options}
        switches = tuple(name for name, is_switch in options.items() if is_switch)
        return CommandArguments({**stated, **given}, _place(own) if options else "", takes, switches)
    findings = tuple(_ignored(framework, own, stated, given))
    return CommandArguments(stated, fixed_in=_place(own), findings=findings)


def _place(own: Content) -> str:
    """Return the file that sets a program's arguments: itself, or the one that an exported program imports."""
    written = written_arguments(own)
    return (own if written is None else written).path


def _ignored(framework: str, own: Content, stated: Arguments, given: Arguments) -> Iterator[Finding]:
    """Yield a finding for the arguments of a command that its program does not read."""
    names = [name for name in given if name not in LAUNCHER_ARGUMENTS]
    if not names:
        return
    names = [name for name in names if name not in stated or str(stated[name].value) != str(given[name].value)]
    if not names:  # the code sets the same values
        return
    typed = ", ".join(f"--{name}" for name in names)
    known = [name for name in names if name in stated or name in ROWS]
    place = _place(own)
    fix = [f"{place}: {name}={_python(given[name].value)!r}" for name in known if not given[name].unresolved]
    yield Finding(
        f"{framework}.arguments-ignored",
        "warning",
        names[0],
        f"{own.path} parses no arguments (no HfArgumentParser, argparse or sys.argv): {typed} "
        f"{'is' if len(names) == 1 else 'are'} ignored, and the values in {place} count",
        tuple(fix),
        file=given[names[0]].file,
        line=given[names[0]].line,
    )


def _python(value: Any) -> Any:
    """Return a value of a command as Python writes it."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def unknown_names(framework: str, args: Arguments) -> Iterator[Finding]:
    """Yield a finding for an optimizer, a schedule or an attention kernel that transformers does not have."""
    if not is_trainer(args):
        return
    kernel = args.get("attn_implementation")
    is_stated = kernel is not None and isinstance(kernel.value, str) and not kernel.unresolved
    if kernel is not None and (refused := refused_kernel(kernel.value) if is_stated else None):
        reason, near = refused
        yield Finding(
            f"{framework}.argument-refused",
            "error",
            "attn_implementation",
            f"transformers has no attn_implementation {kernel.value}; {reason}",
            (_argument("attn_implementation", near, kernel),) if near else (),
            file=kernel.file,
            line=kernel.line,
        )
    for name in trainer_names.ARGUMENTS:
        setting = args.get(name)
        if setting is None or setting.unresolved or not PLAIN_NAME.fullmatch(str(setting.value)):
            continue
        refused_name = trainer_names.refused_name(name, setting.value)
        if refused_name is None:
            continue
        severity: Severity = "warning" if refused_name.removed else "error"
        yield Finding(
            f"{framework}.argument-refused",
            severity,
            name,
            refused_name.message("transformers", name, setting.value),
            (_argument(name, refused_name.meant, setting),) if refused_name.meant else (),
            file=setting.file,
            line=setting.line,
        )


def _argument(name: str, value: str, setting: SourcedValue) -> str:
    """Return an argument as it is written where this setting is: a keyword in Python, or a flag."""
    return f'{name}="{value}"' if setting.file.endswith(".py") else f"--{name} {value}"


def start_findings(args: Arguments, model: ModelSpec | None, script: str = "") -> Iterator[Finding]:
    """Yield the checks of the Trainer, and of TRL's own script, that refuse the arguments of a program at start."""
    by_trl = is_trl_script([script]) and TRL_SFT.search(script) is not None
    if not is_trainer(args) and not by_trl:
        return
    style: Style = "python" if all(one.file.endswith(".py") for one in args.values()) else "command"
    choices = (TRAINER_CHOICES,) if style == "python" else ()  # a parser of the program's own may have other choices
    program = "trl" if by_trl else "trl-program" if is_trl(args, script) else "trainer"
    yield from broken_checks((*TABLES[program], *choices), args, style, model)
    if (unused := args.get(UNUSED_ADAPTERS)) is not None:
        yield Finding(
            "key.unused",
            "warning",
            "peft_config",
            "this LoraConfig is passed neither to the trainer (peft_config=) nor to get_peft_model: there are no "
            "adapters, and all weights are trained",
            (str(unused.value),),
            file=unused.file,
            line=unused.line,
        )


def is_on(args: Arguments, *names: str) -> bool:
    """Return whether one of these flags is on."""
    return any(name in args and args[name].value not in (False, "no", "none") for name in names)


TO_MODEL_AND_GOAL = (
    *(*MODELS, CONFIG, PLAIN_TEXT, *LENGTHS, *BATCH, *WEIGHT_DTYPES),
    *("use_peft", "use_lora", "lora_enable", "peft", "finetuning_type"),
)
"""Arguments that say what is trained and how long samples and batches are: no field has one of them alone."""


def program_fields(
    content: Content, args: Arguments, fine_tuning: bool = False, script: str = "", trl: bool = False
) -> ProgramFields:
    """Return the model, goal and recipe fields that a program's arguments set, which a file (`content`) passes.

    `fine_tuning`: the program fine-tunes though no argument names a model. `script` is its name. `trl`: it constructs
    TRL's arguments.
    """
    args = without_adapters(args)
    model = next((_model_named(str(args[name].value), content) for name in (*MODELS, CONFIG) if name in args), None)
    tuned = is_on(args, *ADAPTERS) or str(getattr(args.get("finetuning_type"), "value", "")) == "lora"
    plain = is_on(args, PLAIN_TEXT) and not tuned
    starts = not plain and (fine_tuning or any(name in args for name in MODELS[:1]))
    goal: Goal = "peft" if tuned else "sft" if starts else "pretrain"
    read = read_arguments({name: setting for name, setting in args.items() if name not in TO_MODEL_AND_GOAL}, goal)
    values, sources = dict(read.values), dict(read.sources)
    length = next(((name, size) for name in LENGTHS if (size := as_int(args.get(name)))), None)
    if length:
        values["data.seq_length"], sources["data.seq_length"] = length[1], length[0]
    is_open = not length and any(name in args and args[name].unresolved for name in LENGTHS)
    open_fields = (*read.open_fields, *(("data.seq_length",) if is_open else ()))
    named = next((name for name in MODELS if name in args and not args[name].unresolved), "")
    weights = _weights_named(str(args[named].value), plain, content) if named else ""
    if weights and (goal != "pretrain" or plain):
        values[PRETRAINED], sources[PRETRAINED] = weights, named
    if "optimizer.lr" in values:
        values.setdefault("schedule.min_lr", 0.0)
    defaults: dict[str, Any] = {} if goal == "pretrain" else dict(DEFAULTS)
    is_example = Path(script).name.startswith(LANGUAGE_MODELING)
    if is_example or LANGUAGE_MODELING in args:
        defaults["data.train_on"] = "all"
    if is_example and is_trainer(args) and "layout.recompute" not in read.open_fields:
        defaults["layout.recompute"] = "none"  # other programs may call gradient_checkpointing_enable themselves
    in_blocks = goal != "pretrain" and (is_example or is_on(args, CONCATENATES))
    if in_blocks:
        defaults["data.packing"] = True  # its group_texts concatenates all texts and cuts them into blocks
    trl = goal != "pretrain" and (trl or is_trl(args, script))
    if is_trainer(args):
        own = {**TRAINER_DEFAULTS, **(TRL_DEFAULTS if trl else {})}
        defaults |= {key: value for key, value in own.items() if key not in open_fields}
        defaults |= dict(default_length(values, read.open_fields))
    elif trl:
        defaults |= {key: value for key, value in TRL_DEFAULTS.items() if key not in open_fields}
    if goal == "peft":
        own = dict(adapter_defaults(args, values, model))
        defaults |= {key: value for key, value in own.items() if key not in open_fields}
    if trl and "data.train_on" not in read.open_fields:
        found = _tokens_in_trl_loss(args, values)
        (values if any(name in args for name in TRL_LOSSES) else defaults)["data.train_on"] = found
    unknown = tuple(key for key in PROGRAM_ONLY if key not in values and key not in defaults)
    read = msgspec.structs.replace(read, given=args, sources=sources)
    several = args.get(SAMPLE_LENGTHS) if length and length[0] == "max_length" else None
    notes = (*_option_notes(args), *_notes(defaults, values, goal, several), *(_trl_notes(defaults) if trl else ()))
    not_theirs = (*(BLOCKS if in_blocks else ()), *(BY_TRAINER if OPTIMIZER in args else ()))
    return ProgramFields(model, goal, {**defaults, **values}, unknown, read, notes, not_theirs)


def _model_named(text: str, content: Content) -> ModelSpec | None:
    """Return the model of a hub id, or of a folder or config.json on this machine."""
    return find_model(text) or find_local_model(text, content)[0]


def _weights_named(text: str, plain: bool, content: Content) -> str:
    """Return the weights that a program starts from, if its model does not say so: another hub id, or a folder here.

    Training on plain text starts from random weights unless the program names some.
    """
    path = "" if find_model(text) is not None else local_model_path(text, content)
    local = bool(path) and find_local_model(path)[0] is not None and Path(path).expanduser().is_dir()
    return text if plain or local else other_weights(text)


def _tokens_in_trl_loss(args: Arguments, values: Mapping[str, Any]) -> str:
    """Return data.train_on as TRL has it: of prompts with completions the completions, of other data every token."""
    if is_on(args, "assistant_only_loss"):
        return "answers"
    if "completion_only_loss" in args and args["completion_only_loss"].value in (True, False):
        return "answers" if args["completion_only_loss"].value else "all"
    return "answers" if has_completions(str(values.get("data.dataset", ""))) else "all"


def _option_notes(args: Arguments) -> Iterator[str]:
    """Yield the values that are defaults of the program's own options."""
    found = [f"{name}={one.value} ({one.default_of}, line {one.line})" for name, one in args.items() if one.default_of]
    if found:
        yield (
            f"defaults of the program's options: {', '.join(found)}; a command that passes another value changes it, "
            "and so does an override here"
        )


def _trl_notes(defaults: Mapping[str, Any]) -> Iterator[str]:
    if defaults.get("data.train_on") == "all":
        yield (
            "TRL's loss counts every token of a conversation unless assistant_only_loss is set: data.train_on=all; "
            "of a dataset with prompt and completion it counts the completions: write data.train_on=answers for one"
        )


def _notes(
    defaults: Mapping[str, Any], values: Mapping[str, Any], goal: Goal, lengths: SourcedValue | None = None
) -> Iterator[str]:
    if lengths is not None:
        yield (
            f"the program tokenizes with several lengths: {lengths.value}; data.seq_length="
            f"{values['data.seq_length']}, the longest, is assumed: write data.seq_length=N for another"
        )
    if "train.epochs" in defaults:
        epochs = defaults["train.epochs"]
        yield f"the command names no length: {epochs:g} epochs, the Trainer's default; write train.epochs=N for another"
    if goal != "pretrain" and "data.dataset" not in values:
        yield f"the program names its data: {PLACEHOLDER} is a placeholder; write data.dataset=FILE or --dataset FILE"


def open_referenced_file(content: Content, setting: SourcedValue) -> Content:
    """Open the file that a script references, relative to its directory or a parent directory."""
    if not setting.unresolved and (text := content.beside.get(str(setting.value))) is not None:
        return content_of(text, str(setting.value), beside=content.beside)
    if content.script is not None and (made := content.script.written.get(str(setting.value))) is not None:
        return _written(made, str(setting.value))
    folder = content.folder
    folders = [folder, *list(folder.resolve().parents)[:MAX_PARENTS]] if folder is not None else []
    found = next((path for parent in folders if _is_file(path := parent / str(setting.value))), None)
    if setting.unresolved:
        found = _beside(folder, str(setting.value)) if folder is not None else None
    if found is None and folder is not None and str(setting.value).startswith("/"):
        path = Path(str(setting.value))  # another machine has the repository in another folder, or a container its own
        found = next((one for one in (find_file(folder, str(path)), folder / path.name) if _is_file(one)), None)
    if found is None:
        reason = setting.unresolved or "file not found"
        name = str(setting.value)
        raise MissingConfigError(
            f"the config referenced at {setting.location} cannot be read: {reason}", field="file", value=name
        )
    return open_file(found)


def open_deepspeed_config(content: Content, setting: SourcedValue) -> Content:
    """Open the DeepSpeed config that a file references: it is parsed as JSON, whatever its suffix."""
    found = open_referenced_file(content, setting)
    if found.format == "json" or not found.text.lstrip().startswith("{"):
        return found
    return content_of(found.text, found.path, "json", found.folder)


MOST_FILES = 1000  # of a folder that are compared with the name of a missing one


class MissingConfigError(InputError):
    """The file that a script references is not on this machine."""


def missing_config(content: Content, flag: str, setting: SourcedValue) -> Finding:
    """Return the finding on a referenced file that is not here: an error if its folder, or a file like it, is."""
    name = str(setting.value)
    near = None if setting.unresolved or name.startswith(("/", "~", "..")) else _like_missing(content, PurePath(name))
    message = f"{flag} {name} was not found and is not checked ({setting.unresolved or 'file not found'})"
    severity: Literal["error", "warning"] = "warning" if near is None else "error"
    fix = tuple(f"{flag} {one}" for one in near or ())
    no_fix = "" if fix else "name a file of this checkout, or add it"
    key = flag.lstrip("-")
    return Finding(
        "launch.missing-config", severity, key, message, fix, file=setting.file, line=setting.line, no_fix=no_fix
    )


def _like_missing(content: Content, name: PurePath) -> list[str] | None:
    """Return the files that the name of a missing one may mean; None if the job may start in another folder."""
    commands = content.script.commands if content.script is not None else ()
    if content.folder is None or any(str(one.words[0].value) in ("cd", "pushd") for one in commands if one.words):
        return None
    above = list(content.folder.resolve().parents)[:MAX_PARENTS] if len(name.parts) > 1 else []
    place = next((one for one in (content.folder, *above) if (one / name.parent).is_dir()), None)
    if place is None:
        return None
    files = (one.name for one in sorted((place / name.parent).glob(f"*{name.suffix}"))[:MOST_FILES])
    found = [str(name.parent / one) for one in similar.closest(name.name, files)]
    return found if found or len(name.parts) > 1 else None  # a bare name may be that of a file to be written


def _beside(folder: Path, value: str) -> Path | None:
    """Return the file whose folder is known only when the job runs, such as $(cd … && pwd): that of the script."""
    tail = UNKNOWN_FOLDER.split(value)[-1]
    path = folder / tail
    return path if tail != value and not re.search(r"[$`]", tail) and _is_file(path) else None


def _written(made: WrittenFile, name: str) -> Content:
    """Return the content of a file that a script writes, with the lines of the text it is written from."""
    found = content_of(made.text, name)
    settings = {}
    for key, one in found.settings.items():
        unknown = one.value if isinstance(one.value, str) and "$" in one.value else ""
        reason = f"{unknown} is known only when the script runs" if unknown else ""
        settings[key] = msgspec.structs.replace(one, file=made.file, unresolved=reason)
    return msgspec.structs.replace(found, settings=settings)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, the name is too long
        return False
