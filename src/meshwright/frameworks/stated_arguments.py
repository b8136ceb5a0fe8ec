"""Arguments of the Trainer, TRL, PEFT and Unsloth that a Python program states in its calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshwright.frameworks.adapter_defaults import LIBRARY
from meshwright.frameworks.constructor_values import REGISTERED
from meshwright.frameworks.framework import Content
from meshwright.frameworks.program_values import ProgramValues
from meshwright.frameworks.trainer_args import SAMPLE_LENGTH, WRITTEN
from meshwright.frameworks.trainer_calls import (
    ADAPTED,
    ADAPTERS,
    ANSWERS,
    COLLATOR,
    CONFIG_CLASS,
    DATASET,
    EARLY_STOP,
    HELD_OUT,
    LOADED,
    MODEL_OF,
    OF_CLASS,
    QUANTIZED,
    TOKENIZER_CLASS,
    TRAINER,
    TRAINERS,
    calls_of,
    items_of,
    load_options,
    trainer_tree,
    uses_trl,
)
from meshwright.frameworks.trainer_fields import (
    ADAPTERS_OFF,
    CONCATENATES,
    LANGUAGE_MODELING,
    LOAD_OPTIONS,
    LOADED_BY_TRL,
    LOADED_BY_UNSLOTH,
    NO_VALIDATION_DATA,
    OPEN_ARGUMENTS,
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

PASSED = "peft_config"  # the argument of TRL's trainers
STORAGE = "bnb_4bit_quant_storage"
PATIENCE = ("early_stopping_patience", "early_stopping_threshold")  # parameters of EarlyStoppingCallback, in order
DEFAULT_PATIENCE = 1
CONFIG_OF_BITS = "quantization_config"  # argument of from_pretrained
TOKENIZES = ("__call__", "encode", "encode_plus", "batch_encode_plus", "apply_chat_template")  # methods of tokenizers
TOKENIZED = "max_length"  # keyword of a tokenizer's call: the tokens of a sample
FIRST = {LOADED: "model_name_or_path", HELD_OUT: "test_size", **OF_CLASS}
"""Arguments that the first argument of a call is; from_pretrained has a keyword for it too."""
VALIDATION_SPLITS = ("validation", "valid", "val", "test", "eval")
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
POSITION_OF_VALIDATION_DATA = 5  # Trainer(model, args, data_collator, train_dataset, eval_dataset)
INSPECTS = ("locals", "globals", "vars", "exec", "eval")  # calls that may use a name without writing it
_LENGTH = re.compile(rf"^{SAMPLE_LENGTH} = (\d+)", re.MULTILINE)


def stated_arguments(content: Content, given: Mapping[str, SourcedValue] | None = None) -> dict[str, SourcedValue]:
    key = f"{content.path}\0{content.folder}\0{given}\0{content.text}"
    return dict(_of_calls(_ProgramRead(key, content, given)))


@dataclass(frozen=True)
class _ProgramRead:
    """A program and the options of its command; compared by their texts."""

    key: str
    content: Content = field(compare=False)
    given: Mapping[str, SourcedValue] | None = field(compare=False)


@lru_cache(maxsize=16)  # each step of a check asks for them, and a long program takes half a second
def _of_calls(read: _ProgramRead) -> dict[str, SourcedValue]:
    content, given = read.content, read.given
    tree = trainer_tree(content)
    if tree is None:
        return {}
    program = ProgramValues(tree, given)
    unused = {} if WRITTEN in content.text else _unused_adapters(tree)
    untaken: Mapping[ast.Call, Test] = untaken_calls(tree, program)
    if given is None:
        untaken = _when_it_trains(tree, untaken)
    found: dict[str, SourcedValue] = {}
    for call, name in calls_of(tree):
        if call in untaken:
            for word in call.keywords if name == QUANTIZED else ():
                if word.arg in BITS:
                    found.setdefault(word.arg, _off(False, call, untaken[call], content))
        elif call in unused:
            found[UNUSED_ADAPTERS] = SourcedValue(unused[call], call.lineno, content.path)
        else:
            _add_call(found, call, name, program, content)
    return _with_whole_program(found, tree, program, untaken, content) if found else {}


def _add_call(
    found: dict[str, SourcedValue], call: ast.Call, name: str, program: ProgramValues, content: Content
) -> None:
    """Add the arguments that one call states, and what it means by itself."""

    def add(name: str, node: ast.expr) -> None:
        setting = _sourced(node, program, content)
        if setting.value is not None:
            found[name] = setting

    def mark(name: str, value: Any = True) -> None:
        found[name] = SourcedValue(value, call.lineno, content.path)

    if name == QUANTIZED and {word.arg for word in call.keywords}.isdisjoint((None, STORAGE)):
        mark(STORED_IN_BYTES)
    if name in FLAGS:
        mark(FLAGS[name])
    if all(word.arg for word in call.keywords) and (library := _library_of(name, call)):
        mark(LIBRARY, library)
    for keyword in call.keywords:
        if keyword.arg in (None, LOADED_BY_TRL):
            continue
        if keyword.arg in ONLY.get(name, (keyword.arg,)):
            add(KEYWORDS.get(name, {}).get(keyword.arg, keyword.arg), keyword.value)
    if call.args and name in FIRST and (name != LOADED or FIRST[name] not in found):
        add(FIRST[name], call.args[0])
    if name == EARLY_STOP:
        if PATIENCE[0] not in found:
            mark(PATIENCE[0], DEFAULT_PATIENCE)
        for parameter, node in zip(PATIENCE, call.args, strict=False):
            add(parameter, node)
    if name == DATASET:
        _add_dataset(call, program, add)
    if name in MODEL_OF and (model := _model_of(call, program)) is not None:
        add("model_name_or_path", model)
        found[LOADED_BY_TRL] = SourcedValue(True, model.lineno, content.path)
    if name == LOADED and UNSLOTH_CLASS.match(ast.unparse(call.func)):
        mark(LOADED_BY_UNSLOTH, ast.unparse(call.func))
    if name == ANSWERS:
        mark(TRL_LOSSES[0])
    if passed := load_options(call, program.constants):
        texts = {key: f"{key!r}: {ast.unparse(node)}" if key else f"**{ast.unparse(node)}" for key, node in passed}
        mark(LOAD_OPTIONS, texts)
    for option, node in (*passed, *_bits_of(call, program)):
        if option in ONLY[LOADED]:
            add(option, node)


def _library_of(name: str, call: ast.Call) -> str:
    """Return the library whose LoRA settings apply to what a call leaves out; empty for a call that adds none."""
    if name == ADAPTED and UNSLOTH_CLASS.match(ast.unparse(call.func)):
        return "unsloth"
    return "peft" if name == ADAPTERS else ""


def _with_whole_program(
    found: dict[str, SourcedValue],
    tree: ast.Module,
    program: ProgramValues,
    untaken: Mapping[ast.Call, Test],
    content: Content,
) -> dict[str, SourcedValue]:
    """Return the arguments of all calls with what only the whole program shows."""
    if (off := _adapters_off(tree, program, untaken, content)) is not None:
        found[ADAPTERS_OFF] = off
    if (trainer := _without_validation_data(tree)) is not None:
        found[NO_VALIDATION_DATA] = SourcedValue(ast.unparse(trainer.func), trainer.lineno, content.path)
    if (open_call := _open_call(tree, program)) is not None:
        found[OPEN_ARGUMENTS] = SourcedValue(True, open_call.lineno, content.path)
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
    trains = [call for call, name in calls_of(tree) if name in TRAINERS]
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
    calls = list(calls_of(tree))
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


def _open_call(tree: ast.Module, program: ProgramValues) -> ast.Call | None:
    """Return a call that may state more arguments of the Trainer than are read: as a dictionary, or set afterwards."""
    calls = [call for call, name in calls_of(tree) if name in TRAINERS]
    owners = (program.constants.get(text.rpartition(".")[0]) for text in program.changed)
    changed = [one for one in owners if any(one is call for call in calls)]
    return next((one for one in calls if any(word.arg is None for word in one.keywords) or one in changed), None)


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


def _bits_of(call: ast.Call, program: ProgramValues) -> Iterator[tuple[str, ast.expr]]:
    """Yield the bits of a quantization_config that a call states as a dictionary."""
    passed = [*((word.arg, word.value) for word in call.keywords), *load_options(call, program.constants)]
    for name, node in passed:
        if name == CONFIG_OF_BITS:
            yield from ((key, one) for key, one in items_of(node, program.constants) if key in BITS)


def _model_of(call: ast.Call, program: ProgramValues) -> ast.expr | None:
    """Return the model that SFTTrainer gets by name."""
    found = next((word.value for word in call.keywords if word.arg == "model"), call.args[0] if call.args else None)
    return (
        found
        if found is not None and isinstance(_value(found, program)[0], str) and not _value(found, program)[1]
        else None
    )
