"""Values that a Python program passes to constructors of peft and transformers, which no version accepts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from meshwright import similar
from meshwright.recipes.key_maps.hugging_face import refused_kernel
from meshwright.rules.rule import Finding

CHOICES: Mapping[tuple[str, str], tuple[str, ...]] = {
    **{(f"{name}Config", "task_type"): (
        "CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION",
    ) for name in ("Lora", "PromptTuning", "PrefixTuning", "PromptEncoder", "IA3", "AdaLora", "LoHa", "LoKr", "OFT",
        "Vera", "BOFT", "Bone", "MultitaskPromptTuning", "AdaptionPrompt")},
    ("LoraConfig", "bias"): ("none", "all", "lora_only"),
    ("BitsAndBytesConfig", "bnb_4bit_quant_type"): ("nf4", "fp4"),
}  # fmt: skip
"""Texts that a keyword of a constructor may be."""
LOADS, KERNEL = "from_pretrained", "attn_implementation"
REGISTERED = re.compile(r"\bAttentionInterface\b|\bALL_ATTENTION_FUNCTIONS\b")  # where programs add their own kernels


def value_findings(tree: ast.Module, path: str, guarded: set[int]) -> Iterator[Finding]:
    """Yield the texts that constructors and from_pretrained refuse; classes of the program's own are not compared."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    registers = REGISTERED.search(ast.unparse(tree)) is not None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or id(call) in guarded:
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        for word in () if name in own else call.keywords:
            is_own = word.arg == KERNEL and registers
            if isinstance(word.value, ast.Constant) and isinstance(word.value.value, str) and not is_own:
                yield from _refused(name, word.arg or "", word.value.value, path, word.value.lineno)


def _refused(name: str, keyword: str, value: str, path: str, line: int) -> Iterator[Finding]:
    choices = CHOICES.get((name, keyword), ())
    if choices and value not in choices:
        near = next(iter(similar.closest(value, choices)), choices[0])
        message = f"{keyword}={value!r} of {name} is none of {', '.join(choices)}: refused at start"
        yield Finding("value.invalid", "error", keyword, message, (f'{keyword}="{near}"',), path, line)
    if name == LOADS and keyword == KERNEL and (refused := refused_kernel(value)):
        reason, near = refused
        message = f"transformers has no {KERNEL} {value}; {reason}"
        yield Finding("value.invalid", "error", keyword, message, (f'{keyword}="{near}"',), path, line)
