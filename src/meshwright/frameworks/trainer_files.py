"""Python files that construct a Trainer's arguments: those that export writes, and a user's program with literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.constructor_values import REGISTERED
from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file, program_path
from meshwright.frameworks.program_values import ProgramValues
from meshwright.frameworks.trainer_args import PROGRAM, SAMPLE_LENGTH, WRITTEN, file_of
from meshwright.frameworks.trainer_fields import (
    ADAPTERS_OFF,
    CONCATENATES,
    LANGUAGE_MODELING,
    LOADED_BY_TRL,
    LOADED_BY_UNSLOTH,
    NO_VALIDATION_DATA,
    PLAIN_TEXT,
    SAMPLE_LENGTHS,
    STORED_IN_BYTES,
    TRL_LOSSES,
    UNUSED_ADAPTERS,
    WEIGHT_DTYPES,
)
from meshwright.frameworks.types import SourcedValue
from meshwright.frameworks.untaken_branches import Test, skipping, untaken_calls
from meshwright.frameworks.unused_adapters import BITS
from meshwright.recipes.key_maps.hugging_face import is_attention_kernel

TRAINER = "Trainer"
TRAINERS = ("TrainingArguments", "SFTConfig", "SFTTrainer")
FINE_TUNES = "SFTConfig"
ADAPTERS = "LoraConfig"
PASSED = "peft_config"  # the argument of TRL's trainers
QUANTIZED = "BitsAndBytesConfig"
STORAGE = "bnb_4bit_quant_storage"
LOADED, ADAPTED, DATASET, COLLATOR, HELD_OUT, EARLY_STOP = (
    "from_pretrained",
    "get_peft_model",
    "load_dataset",
    "DataCollatorForLanguageModeling",
    "train_test_split",
    "EarlyStoppingCallback",
)
PATIENCE = ("early_stopping_patience", "early_stopping_threshold")  # parameters of EarlyStoppingCallback, in order
DEFAULT_PATIENCE = 1
TOKENIZES = ("__call__", "encode", "encode_plus", "batch_encode_plus", "apply_chat_template")  # methods of tokenizers
TOKENIZED = "max_length"  # keyword of a tokenizer's call: the tokens of a sample
MODEL_CLASSES = ("Model", "ForCausalLM")  # of from_pretrained: processors have one too
TOKENIZER_CLASS, CONFIG_CLASS = "Tokenizer", "AutoConfig"
OF_CLASS = {TOKENIZER_CLASS: "tokenizer_name_or_path", CONFIG_CLASS: "config_name"}
"""Arguments of commands that the first argument of from_pretrained is, by its class."""
VALIDATION_SPLITS = ("validation", "valid", "val", "test", "eval")
MODEL_OF = ("SFTTrainer",)
ANSWERS = "train_on_responses_only"  # Unsloth's function that masks everything but the answers
UNSLOTH_CLASS = re.compile(r"Fast\w*Model\.")
FLAGS = {ADAPTERS: "use_peft", COLLATOR: LANGUAGE_MODELING}
"""What a call means by itself."""
ONLY = {
    QUANTIZED: ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"),
    LOADED: (
        "model_name",
        "pretrained_model_name_or_path",
        "attn_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "max_seq_length",
        "device_map",
        *WEIGHT_DTYPES,
    ),
    ADAPTED: ("r", "target_modules", "lora_alpha", "lora_dropout", "use_rslora", "use_gradient_checkpointing"),
    DATASET: ("split",),
    COLLATOR: (),
    HELD_OUT: ("test_size",),
    EARLY_STOP: PATIENCE,
    ANSWERS: (),
    **dict.fromkeys(MODEL_OF, ("max_seq_length", "packing", "dataset_text_field")),
}
"""Keywords that are settings of the training; of other calls all are."""
KEYWORDS = {
    LOADED: {"model_name": "model_name_or_path", "pretrained_model_name_or_path": "model_name_or_path"},
    ADAPTED: {"use_gradient_checkpointing": "gradient_checkpointing"},
    DATASET: {"split": "train_split"},
}
KNOWN_CALLS = (*TRAINERS, ADAPTERS, QUANTIZED, *OF_CLASS, *MODEL_OF)
KNOWN_CALLS += (ANSWERS, LOADED, ADAPTED, DATASET, COLLATOR, HELD_OUT, EARLY_STOP)
POSITION_OF_VALIDATION_DATA = 5  # Trainer(model, args, data_collator, train_dataset, eval_dataset)
INSPECTS = ("locals", "globals", "vars", "exec", "eval")  # calls that may use a name without writing it
SUFFIX = "_args.py"
_LENGTH = re.compile(rf"^{SAMPLE_LENGTH} = (\d+)", re.MULTILINE)


def file_arguments(content: Content, given: Mapping[str, SourcedValue] | None = None) -> dict[str, SourcedValue]:
    """Return the arguments of the Trainer, TRL, PEFT and Unsloth that a Python file states, by the names of commands.

    Literals, constants and defaults of the program's options are read; everything else is listed as computed by the
    program. `given` are the options of the command that starts it. An export writes two files, the program and its
    arguments: they are read together.
    """
    found = _own_arguments(content, given)
    other = _other_half(content)
    found = found if other is None else {**_own_arguments(other, given), **found}
    return _with_assigned(found, content) if content.assigned else found


def _with_assigned(found: Mapping[str, SourcedValue], content: Content) -> dict[str, SourcedValue]:
    """Return the arguments with those that fixes set or remove."""
    changed = {name: one for name, one in found.items() if content.assigned.get(name, "") is not None}
    for name, text in content.assigned.items():
        if text is not None:
            line = found[name].line if name in found else 0
            changed[name] = SourcedValue(_literal(text), line, content.path)
    return changed


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a string without its quotes


def _other_half(content: Content) -> Content | None:
    """Return the program of an exported file of arguments, or the arguments that an exported program imports."""
    if content.folder is None or WRITTEN not in content.text:
        return None
    name = Path(content.path).name
    if name == PROGRAM:
        imported = re.search(r"^from (\w+_args) import", content.text, re.MULTILINE)
        path = content.folder / f"{imported[1]}.py" if imported else None
        return open_file(path) if path is not None and path.is_file() else None
    program = content.folder / PROGRAM
    if not name.endswith(SUFFIX) or not program.is_file():
        return None
    found = open_file(program)
    return found if WRITTEN in found.text and f"from {Path(name).stem} import" in found.text else None


def written_arguments(content: Content) -> Content | None:
    """Return the file of arguments of an export: itself, or that which an exported program imports."""
    if WRITTEN in content.text and content.path.endswith(SUFFIX):
        return content
    return _other_half(content) if Path(content.path).name == PROGRAM else None


def _own_arguments(content: Content, given: Mapping[str, SourcedValue] | None = None) -> dict[str, SourcedValue]:
    key = f"{content.path}\0{content.folder}\0{given}\0{content.text}"
    return dict(_stated_arguments(_ProgramRead(key, content, given)))


@dataclass(frozen=True)
class _ProgramRead:
    """A program and the options of its command; compared by their texts."""

    key: str
    content: Content = field(compare=False)
    given: Mapping[str, SourcedValue] | None = field(compare=False)


@lru_cache(maxsize=16)  # each step of a check asks for them, and a long program takes half a second
def _stated_arguments(read: _ProgramRead) -> dict[str, SourcedValue]:
    content, given = read.content, read.given
    tree = _tree(content)
    if tree is None:
        return {}
    program = ProgramValues(tree, given)
    found: dict[str, SourcedValue] = {}

    def add(name: str, node: ast.expr) -> None:
        setting = _sourced(node, program, content)
        if setting.value is not None:
            found[name] = setting

    unused = {} if WRITTEN in content.text else _unused_adapters(tree)
    untaken: Mapping[ast.Call, Test] = untaken_calls(tree, program)
    if given is None:
        untaken = _when_it_trains(tree, untaken)
    for call, name in _calls(tree):
        if call in untaken:
            for word in call.keywords if name == QUANTIZED else ():
                if word.arg in BITS:
                    found.setdefault(word.arg, _off(False, call, untaken[call], content))
            continue
        if call in unused:
            found[UNUSED_ADAPTERS] = SourcedValue(unused[call], call.lineno, content.path)
            continue
        if name == QUANTIZED and {word.arg for word in call.keywords}.isdisjoint((None, STORAGE)):
            found[STORED_IN_BYTES] = SourcedValue(True, call.lineno, content.path)
        flag = FLAGS.get(name)
        if flag:
            found[flag] = SourcedValue(True, call.lineno, content.path)
        for keyword in call.keywords:
            if keyword.arg in (None, LOADED_BY_TRL):
                continue
            if keyword.arg in ONLY.get(name, (keyword.arg,)):
                add(KEYWORDS.get(name, {}).get(keyword.arg, keyword.arg), keyword.value)
        if name == LOADED and call.args and "model_name_or_path" not in found:
            add("model_name_or_path", call.args[0])
        if name in OF_CLASS and call.args:
            add(OF_CLASS[name], call.args[0])
        if name == HELD_OUT and call.args:
            add("test_size", call.args[0])
        if name == EARLY_STOP:
            found.setdefault(PATIENCE[0], SourcedValue(DEFAULT_PATIENCE, call.lineno, content.path))
            for parameter, node in zip(PATIENCE, call.args, strict=False):
                add(parameter, node)
        if name == DATASET:
            _add_dataset(call, program, add)
        if name in MODEL_OF and (model := _model_of(call, program)) is not None:
            add("model_name_or_path", model)
            found[LOADED_BY_TRL] = SourcedValue(True, model.lineno, content.path)
        if name == LOADED and UNSLOTH_CLASS.match(ast.unparse(call.func)):
            found[LOADED_BY_UNSLOTH] = SourcedValue(ast.unparse(call.func), call.lineno, content.path)
        if name == ANSWERS:
            found[TRL_LOSSES[0]] = SourcedValue(True, call.lineno, content.path)
        for option, node in _load_options(call, program):
            add(option, node)
    if found and (off := _adapters_off(tree, program, untaken, content)) is not None:
        found[ADAPTERS_OFF] = off
    if found and (trainer := _without_validation_data(tree)) is not None:
        found[NO_VALIDATION_DATA] = SourcedValue(ast.unparse(trainer.func), trainer.lineno, content.path)
    kernel = found.get("attn_implementation")
    if kernel is not None and REGISTERED.search(content.text) and not is_attention_kernel(str(kernel.value)):
        del found["attn_implementation"]  # a kernel of the program
    if found and _counts_every_token(tree, content):
        found.setdefault(LANGUAGE_MODELING, SourcedValue(True, 1, content.path))
    if found and any(isinstance(node, ast.FunctionDef) and node.name == CONCATENATES for node in ast.walk(tree)):
        found.setdefault(CONCATENATES, SourcedValue(True, 1, content.path))
    if found:
        found = {**_tokenized_length(tree, program, content), **found}
    tokenizer, weights = (found.get(name) for name in (OF_CLASS[TOKENIZER_CLASS], "model_name_or_path"))
    if tokenizer is not None and (tokenizer.unresolved or (weights is not None and weights.value == tokenizer.value)):
        del found[OF_CLASS[TOKENIZER_CLASS]]  # the model's own
    if OF_CLASS[CONFIG_CLASS] in found and weights is not None:
        del found[OF_CLASS[CONFIG_CLASS]]  # the weights say which model it is
    length = _LENGTH.search(content.text) if found else None
    if length:
        line = content.text[: length.start()].count("\n") + 1
        found[SAMPLE_LENGTH] = SourcedValue(int(length[1]), line, content.path)
        if WRITTEN in content.text:
            found[PLAIN_TEXT] = SourcedValue(True, line, content.path)
    return found


def _when_it_trains(tree: ast.Module, untaken: Mapping[ast.Call, Test]) -> Mapping[ast.Call, Test]:
    """Return the calls that a program does not make if it trains, which only a switch such as --train starts."""
    trains = [call for call, name in _calls(tree) if name in TRAINERS]
    if not trains or any(call not in untaken for call in trains):
        return untaken
    tests = {untaken[call].text for call in trains}
    return {call: test for call, test in untaken.items() if test.text not in tests}


def _off(value: Any, node: ast.expr, test: Test, content: Content) -> SourcedValue:
    return SourcedValue(value, node.lineno, content.path, default_of=", ".join(test.options))


def _adapters_off(
    tree: ast.Module, program: ProgramValues, untaken: Mapping[ast.Call, Test], content: Content
) -> SourcedValue | None:
    """Return why a program that can add adapters adds none with the options it is started with; None if it does."""
    calls = list(_calls(tree))
    made = [call for call, name in calls if name == ADAPTERS]
    used = [call for call, name in calls if name == ADAPTED]
    passed = [word.value for call, _ in calls if call not in untaken for word in call.keywords if word.arg == PASSED]
    tests = {call: untaken[call] for call in (*made, *used) if call in untaken}
    for node in passed:
        known = program.find(node)
        if known is not None and known.value is None and isinstance(node, ast.IfExp):
            tests |= {call: skipping(node, known.options) for call in made}
            passed = [one for one in passed if one is not node]
    is_off = bool(made or used) and (
        (bool(made) and all(call in tests for call in made))
        or (bool(used) and all(call in tests for call in used) and not passed)
    )
    if not is_off:
        return None
    call, test = next((call, tests[call]) for call in (*made, *used) if call in tests)
    return _off(f"none without {test.switch or test.text}", call, test, content)


def _counts_every_token(tree: ast.Module, content: Content) -> bool:
    """Return whether a user's program has transformers' Trainer, and masks no label (-100): every token is a target."""
    own = any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == TRAINER for node in ast.walk(tree))
    return own and WRITTEN not in content.text and "-100" not in content.text and not uses_trl(content)


def _without_validation_data(tree: ast.Module) -> ast.Call | None:
    """Return the trainer of a program if it certainly gets no eval_dataset; None if it does, or may.

    A class of the program's own, or one that gets **options, may bring its data itself.
    """
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = [(node, ast.unparse(node.func).rpartition(".")[2]) for node in calls]
    trainers = [node for node, name in named if name.endswith(TRAINER)]
    plain = all(name in (TRAINER, *MODEL_OF) and name not in own for _, name in named if name.endswith(TRAINER))
    if not trainers or not plain:
        return None
    for call in trainers:
        given = {word.arg: word.value for word in call.keywords}
        data = given.get("eval_dataset")
        is_open = None in given or any(isinstance(one, ast.Starred) for one in call.args)
        if is_open or len(call.args) >= POSITION_OF_VALIDATION_DATA:
            return None
        if data is not None and not (isinstance(data, ast.Constant) and data.value is None):
            return None
    return trainers[0]


def _unused_adapters(tree: ast.Module) -> dict[ast.Call, str]:
    """Return the LoraConfigs that a program with a trainer passes to nothing, with the change that uses each.

    Printing one, or reading or setting an attribute of it, is no use.
    """
    nodes = list(ast.walk(tree))
    calls = [(node, ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call)]
    if not any(name.endswith(TRAINER) for _, name in calls) or any(name in INSPECTS for _, name in calls):
        return {}
    shown = {id(one) for call, name in calls if name == "print" for one in ast.walk(call)}
    shown |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used = {node.id for node in loads if id(node) not in shown}
    by_trl = any(name.rpartition(".")[2] in MODEL_OF for _, name in calls)
    found: dict[ast.Call, str] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.value, ast.Call):
            continue
        target, made = node.targets[0], ast.unparse(node.value.func).rpartition(".")[2]
        if made == ADAPTERS and isinstance(target, ast.Name) and target.id not in used:
            found[node.value] = f"peft_config={target.id}" if by_trl else f"model = {ADAPTED}(model, {target.id})"
    return found


def started_program(content: Content, program: SourcedValue) -> Content | None:
    """Return the Python file that a script starts, if it is beside the script and constructs arguments of a Trainer."""
    named = path = program_path(content, program)
    if path is None or named is None:
        return None
    if path.name == PROGRAM and not path.is_file():  # an export without a program: its arguments are beside the job
        path = _arguments_beside(content) or path
    try:
        found = open_file(path) if path.is_file() else None
    except (InputError, OSError):
        return None
    if found is None or (path != named and WRITTEN not in found.text):
        return None
    return found if file_arguments(found) else None


def _arguments_beside(content: Content) -> Path | None:
    """Return the exported file of arguments beside a job: the one of the job's name, else the first."""
    own = file_of(Path(content.path).stem)
    found = [one for one in sorted(Path(content.folder or ".").glob(f"*{SUFFIX}")) if one.is_file()]
    return next((one for one in found if one.name == own), found[0] if found else None)


PARSERS = frozenset(
    (
        *("absl", "argparse", "chz", "click", "cyclopts", "defopt", "docopt", "draccus", "fire", "getopt", "hydra"),
        *(
            "jsonargparse",
            "optparse",
            "plac",
            "pydantic_settings",
            "pyrallis",
            "simple_parsing",
            "tap",
            "typer",
            "tyro",
        ),
    )
)
"""Modules that parse the arguments of a command."""
PARSES = frozenset(
    (
        *("ArgumentParser", "HfArgumentParser", "LightningCLI", "TrlParser", "argv", "orig_argv", "from_cli"),
        *("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args"),
        *("exec", "eval", "runpy"),  # other code, which may parse them
    )
)
"""Names with which a program reads the arguments of its command."""


def parses_arguments(content: Content) -> bool:
    """Return whether a program may read the arguments of its command: by itself, or in a module beside it.

    A program that cannot be parsed, or that executes or starts other code, may.
    """
    pending, seen = [content], {content.path}
    while pending:
        one = pending.pop()
        try:
            tree = ast.parse(one.text)
        except (SyntaxError, ValueError, RecursionError):
            return True
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = set(_imports(tree))
        named |= {name.rpartition(".")[2] for name in imported}
        if (
            named & PARSES
            or named & {"exec", "eval", "runpy"}
            or {name.partition(".")[0] for name in imported} & PARSERS
        ):
            return True
        for path in _modules_beside(one, imported):
            if str(path) not in seen:
                seen.add(str(path))
                try:
                    pending.append(open_file(path))
                except (InputError, OSError):
                    return True
    return False


OPEN_PARSERS = ("HfArgumentParser", "TrlParser", "parse_known_args", "add_argument_group", "argv", "exec", "eval")
"""Names of a program whose parser may take more than the options that its own file adds."""


def own_options(content: Content) -> dict[str, bool]:
    """Return the options of a program whose argparse parser takes no others, and whether each has no value.

    A program whose parser may take more options has none here.
    """
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    closed = "ArgumentParser" in named and "parse_args" in named and not named & {*OPEN_PARSERS}
    if not closed or any(_modules_beside(content, set(_imports(tree)))):
        return {}
    return {one.name: one.is_switch for several in ProgramValues(tree).options.values() for one in several}


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{one.name}".strip(".") for one in node.names)


def _modules_beside(content: Content, imported: Iterable[str]) -> Iterator[Path]:
    """Yield the files of modules that lie in a program's own folder, or in packages of it."""
    for name in imported if content.folder is not None else ():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = Path(content.folder or ".").joinpath(*parts[:count])
            yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())


def names_deepspeed(content: Content) -> bool:
    """Return whether a file passes the path of a DeepSpeed config to the Trainer."""
    path = file_arguments(content).get("deepspeed")
    return path is not None and isinstance(path.value, str) and not path.unresolved


UNSLOTH = re.compile(r"^\s*(?:from|import) unsloth\b", re.MULTILINE)


def uses_trl(content: Content) -> bool:
    """Return whether a file constructs TRL's SFTTrainer or its arguments."""
    halves = (content, _other_half(content))
    trees = [_tree(one) for one in halves if one is not None]
    return any(name in (FINE_TUNES, *MODEL_OF) for tree in trees if tree is not None for _, name in _calls(tree))


def uses_unsloth(content: Content) -> bool:
    """Return whether a Python file imports Unsloth, which replaces layers and checkpointing by its own."""
    return UNSLOTH.search(content.text) is not None


def _tree(content: Content) -> ast.Module | None:
    """Return the syntax of a file that constructs arguments of a Trainer; None for others."""
    if not any(f"{name}(" in content.text for name in (*TRAINERS, TRAINER)):
        return None
    try:
        return ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that state arguments, in the order of the file, with the name that says what they are."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name == LOADED:
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if not any(word in owner for word in MODEL_CLASSES):
                name = next((one for one in OF_CLASS if one in owner), "")
        if name in KNOWN_CALLS:
            yield node, name


def _value(node: ast.expr, program: ProgramValues) -> tuple[Any, str]:
    """Return a value and why it is unknown; the value is then its text."""
    found = program.find(node)
    return (ast.unparse(node), "it is computed by the program") if found is None else (found.value, "")


def _sourced(node: ast.expr, program: ProgramValues, content: Content) -> SourcedValue:
    value, unresolved = _value(node, program)
    found = program.find(node)
    options = () if found is None else found.options
    return SourcedValue(value, node.lineno, content.path, unresolved, default_of=", ".join(options))


def _tokenized_length(tree: ast.Module, program: ProgramValues, content: Content) -> dict[str, SourcedValue]:
    """Return max_length of the calls of tokenizers, the sample length of a program without TRL; empty without any.

    Of several lengths it is the longest, and all of them are listed.
    """
    found: list[SourcedValue] = []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_tokenizer(node, program)]
    lengths = [word.value for call in calls for word in call.keywords if word.arg == TOKENIZED]
    for node in sorted(lengths, key=lambda one: (one.lineno, one.col_offset)):
        setting = _sourced(node, program, content)
        if setting.value is not None:
            found.append(setting)
    if not found:
        return {}
    if len({str(one.value) for one in found}) == 1:
        return {TOKENIZED: found[0]}
    listed = ", ".join(f"{one.value} (line {one.line})" for one in found)
    numbers = [one for one in found if isinstance(one.value, int)]
    if len(numbers) < len(found):
        return {TOKENIZED: next(one for one in found if one not in numbers)}
    longest = max(numbers, key=lambda one: int(one.value))
    return {TOKENIZED: longest, SAMPLE_LENGTHS: SourcedValue(listed, longest.line, content.path)}


def _is_tokenizer(call: ast.Call, program: ProgramValues) -> bool:
    """Return whether a call tokenizes: of a name that is loaded as a tokenizer or named as one, or of its methods."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in TOKENIZES else call.func
    if isinstance(call.func, ast.Name) and call.func.id == "partial" and call.args:
        owner = call.args[0]
    loaded = program.constants.get(owner.id) if isinstance(owner, ast.Name) else None
    if isinstance(loaded, ast.Call):
        return TOKENIZER_CLASS in ast.unparse(loaded.func) or "Processor" in ast.unparse(loaded.func)
    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    return name.lower().startswith("tok") or name.lower().endswith("tokenizer")


def _add_dataset(call: ast.Call, program: ProgramValues, add: Callable[[str, ast.expr], None]) -> None:
    """Add the data of load_dataset: files for its builders such as json, else a dataset by name."""
    named = next((word.value for word in call.keywords if word.arg == "path"), call.args[0] if call.args else None)
    files = next((word.value for word in call.keywords if word.arg == "data_files"), None)
    if isinstance(files, ast.Name):
        files = program.constants.get(files.id, files)
    if isinstance(files, ast.Dict) and len(files.values) > 1:
        for key, one in zip(files.keys, files.values, strict=True):
            split = _value(key, program)[0] if key is not None else ""
            if split == "train" or split in VALIDATION_SPLITS:
                add("train_file" if split == "train" else "validation_file", one)
    elif files is not None:
        value = _value(files, program)[0]
        inner = files.values[0] if isinstance(files, ast.Dict) and len(files.values) == 1 else files
        one = inner.elts[0] if isinstance(inner, ast.List | ast.Tuple) and len(inner.elts) == 1 else inner
        add("train_file", one if value is not None else files)
    elif named is not None:
        add("dataset_name", named)


def _load_options(call: ast.Call, program: ProgramValues) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of from_pretrained that TRL's config passes on for a model that is given by name."""
    node = next((word.value for word in call.keywords if word.arg == LOADED_BY_TRL), None)
    if isinstance(node, ast.Name):
        node = program.constants.get(node.id, node)
    pairs: list[tuple[Any, ast.expr]] = []
    if isinstance(node, ast.Dict):
        pairs = [(getattr(key, "value", None), one) for key, one in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        pairs = [(word.arg, word.value) for word in node.keywords]
    yield from ((str(name), one) for name, one in pairs if name in ONLY[LOADED])


def _model_of(call: ast.Call, program: ProgramValues) -> ast.expr | None:
    """Return the model that SFTTrainer gets by name."""
    found = next((word.value for word in call.keywords if word.arg == "model"), call.args[0] if call.args else None)
    return (
        found
        if found is not None and isinstance(_value(found, program)[0], str) and not _value(found, program)[1]
        else None
    )


def written_beside(content: Content) -> Content | None:
    """Return the arguments file that an export wrote with this config; None if there is none."""
    if content.folder is None:
        return None
    name, own = Path(content.path).name, module_name(Path(content.path).stem)
    for path in sorted(content.folder.glob(f"*{SUFFIX}")):
        found = open_file(path)
        if WRITTEN in found.text and (path.name == own or f'deepspeed="{name}"' in found.text):
            return found
    return None


def config_beside(content: Content) -> Path | None:
    """Return the YAML file that an export wrote with this arguments file."""
    if content.folder is None or WRITTEN not in content.text:
        return None
    arguments = written_arguments(content)
    own = Path((content if arguments is None else arguments).path).name
    return next((path for path in sorted(content.folder.glob("*.yaml")) if module_name(path.stem) == own), None)


def module_name(stem: str) -> str:
    """Return the name of the arguments file of a recipe, which is that of a module."""
    return f"{stem.replace('-', '_').replace('.', '_')}{SUFFIX}"
