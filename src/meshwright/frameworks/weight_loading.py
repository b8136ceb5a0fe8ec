"""In how many bits a Python program loads frozen weights: what it states, and the arguments that change it.

transformers 5.0 removed load_in_4bit and load_in_8bit from from_pretrained, to which TRL passes model_init_kwargs; no
release of SFTConfig or TrainingArguments has them. All releases accept quantization_config.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.frameworks.framework import Content
from meshwright.frameworks.other_versions import OLDER_ACCEPT
from meshwright.frameworks.program_values import constants
from meshwright.frameworks.stated_arguments import CONFIG_OF_BITS as CONFIG
from meshwright.frameworks.stated_arguments import stated_arguments
from meshwright.frameworks.trainer_args import quantization_options
from meshwright.frameworks.trainer_calls import LOADED, MODEL_CLASSES, QUANTIZED, load_options
from meshwright.frameworks.trainer_fields import LOAD_OPTIONS, LOADED_BY_TRL, LOADED_BY_UNSLOTH, WEIGHT_DTYPES
from meshwright.frameworks.types import ProgramArguments, Settings
from meshwright.frameworks.unused_adapters import BITS
from meshwright.rules.rule import Finding, Severity

IMPORT = f"from transformers import {QUANTIZED}"
LOADED_BITS = BITS[0]
METHODS = {"load_in_4bit": "qlora", "load_in_8bit": "lora8bit"}
OF_QUANTIZATION = ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
    "bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_skip_modules")  # fmt: skip
"""Further keywords of BitsAndBytesConfig."""
REMOVED = "5.0"  # release of transformers


def is_loaded_in_code(program: ProgramArguments) -> bool:
    """Return whether a program's code loads the weights, and states no number of bits whose value could change."""
    in_code = not program.argv or bool(program.place_in_code(LOADED_BITS))
    takes = any(name in program.given or name in program.takes for name in BITS)
    return in_code and not takes and not program.is_front_end and LOADED_BY_UNSLOTH not in program.given


def quantizing_argument(given: Settings, method: str, dtype: str, sharded: bool = False) -> str:
    """Return the import and the argument that load frozen weights in the bits of an adapter method.

    It is an argument of from_pretrained, or part of model_init_kwargs if TRL loads a model by its name.
    """
    options = quantization_options(method, f'"{dtype}"', sharded)
    config = f"{QUANTIZED}({', '.join(options)})"
    if LOADED_BY_TRL not in given:
        return f"{IMPORT}; {CONFIG}={config}"
    stated = getattr(given.get(LOAD_OPTIONS), "value", {})
    kept = [text for name, text in stated.items() if name not in (*BITS, CONFIG)]
    kept += [] if any(name in stated for name in (*WEIGHT_DTYPES, "")) else [f"'dtype': {dtype!r}"]
    return f"{IMPORT}; {LOADED_BY_TRL}={{{', '.join([*kept, f'{CONFIG!r}: {config}'])}}}"


def misplaced(name: str, word: ast.keyword, content: Content) -> Finding | None:
    """Return the finding of a keyword of BitsAndBytesConfig that another constructor gets; None for other keywords."""
    keyword = word.arg or ""
    if keyword not in (*BITS, *OF_QUANTIZATION):
        return None
    value = ast.unparse(word.value)
    message = f"{name} has no {keyword}: TypeError at start; it is an option of {QUANTIZED}"
    fix: tuple[str, ...] = (f"{QUANTIZED}({keyword}={value})",)
    if keyword in BITS:
        is_on = value != "False"
        message += f", which {LOADED} gets as {CONFIG}" if is_on else ""
        instead = (quantizing_argument(stated_arguments(content), METHODS[keyword], "bfloat16"),) if is_on else ()
        fix = (*instead, f"without {keyword}")
    return Finding("key.unknown", "error", keyword, message, fix, content.path, word.value.lineno)


def removed_switches(tree: ast.Module, content: Content, guarded: set[int]) -> Iterator[Finding]:
    """Yield the switches that from_pretrained gets, directly or by TRL: transformers 5.0 has none of them.

    It is an error if another argument shows that the program is for such a release.
    """
    named, severity = constants(list(ast.walk(tree))), _severity(tree)
    classes = {one.asname or one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "transformers" for one in node.names}  # fmt: skip
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or id(call) in guarded:
            continue
        owner, _, method = ast.unparse(call.func).rpartition(".")
        is_model = owner in classes and any(one in owner for one in MODEL_CLASSES)
        pairs = [(one.arg, one.value) for one in call.keywords] if method == LOADED and is_model else []
        pairs += [(name, one) for name, one in load_options(call, named) if name]
        for name, node in pairs:
            if name in BITS:
                yield _removed(name, node, severity, content)


def _removed(name: str, node: ast.expr, severity: Severity, content: Content) -> Finding:
    now = f"; {CONFIG} replaces it" if (is_on := ast.unparse(node) != "False") else ""
    message = f"{LOADED} has no {name} since transformers {REMOVED}{now}: TypeError at start"
    message += f"; {OLDER_ACCEPT} it" if severity == "warning" else ""
    instead = quantizing_argument(stated_arguments(content), METHODS[name], "bfloat16")
    fix = instead if is_on else f"without {name}"
    return Finding("key.removed", severity, name, message, (fix,), content.path, node.lineno)


def _severity(tree: ast.Module) -> Severity:
    """Return error for a program with an argument that releases before 5.0 do not have: warmup_steps as a share."""
    words = [word for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords]
    is_new = any(word.arg == "train_sampling_strategy" or (word.arg == "warmup_steps" and _is_share(word.value))
        for word in words)  # fmt: skip
    return "error" if is_new else "warning"


def _is_share(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1
