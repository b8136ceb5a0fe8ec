"""Mistakes that users type, from a seed, and what applying each suggested fix leads to."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from meshwright import frameworks
from meshwright.choices import ENGINES, FRAMEWORKS
from meshwright.cli.run import run
from meshwright.recipes.overrides import native_key
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.values import bare_type

RECIPES = (
    "llama3_8b_pretrain_config",
    "llama3_8b_sft_config",
    "llama3_8b_peft_config",
    "llama3_70b_pretrain_config",
    "qwen2_500m_sft_config",
    "gemma3_vl_4b_sft_config",
    "qwen3_30b_a3b_pretrain_config",
    "qwen3_30b_a3b_peft_config",
    "qwen3_next_80b_a3b_pretrain_config",
    "deepseek_v2_lite_pretrain_config",
    "deepseek_v3_pretrain_config_32nodes",
    "nemotronh_4b_peft_config",
    "nemotron_3_nano_sft_config",
    "qwen3_vl_30b_a3b_peft_config",
    "wan_1_3B_pretrain_config",
    "flux_12b_sft_config",
    "gpt_oss_20b_pretrain_config",
)
CLUSTERS = (
    *("1xH100", "2xH100", "6xH100", "8xH100", "12xH200", "60xH100", "64xA100-80", "4x8xB200"),
    *("1xRTX4090", "2xA6000", "8xMI300X", "16xA100-40", "72xGB200", "7xH100"),
)
INTEGERS = ("0", "-1", "1", "2", "3", "5", "6", "7", "8", "13", "48", "60", "100", "4097", "1000000", "1.5", "many", "")
FLOATS = ("0", "-1", "1e-12", "1e-5", "0.5", "1", "1.5", "3", "30000", "1e9", "nan", "inf", "ten", "")


@dataclass(frozen=True)
class Answer:
    """How a command ended, its JSON and its error text."""

    code: int
    json: dict[str, Any]
    err: str
    out: str = ""

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json.get("error", {})
        return found

    @property
    def findings(self) -> list[dict[str, Any]]:
        found = self.json.get("findings")
        if found is None and self.json.get("plans"):
            found = self.json["plans"][0]["findings"]
        return list(found or ())

    @property
    def errors(self) -> set[str]:
        return {one["rule"] for one in self.findings if one["severity"] == "error"}


def call(*words: str) -> Answer:
    """Run a command in this process."""
    asks = [] if "--help" in words else ["--json"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run([*words, *asks])
        except SystemExit as ended:
            code = int(ended.code or 0)
    text = out.getvalue()
    return Answer(code, json.loads(text) if text.startswith("{") else {}, err.getvalue(), text)


@dataclass
class Result:
    """What was tried: counts, and every fix that was refused."""

    mistakes: int = 0
    fixes: int = 0
    without: int = 0
    prose: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def refuse(self, words: Sequence[str], fix: str, why: str) -> None:
        self.refused.append(f"meshwright {shlex.join(words)}\n    fix: {fix}\n    {why}")


# Applying a fix.


def own_key(word: str) -> str:
    """Return our key of an override that a user typed."""
    key = word.partition("=")[0].strip().lstrip("+~-").replace("-", "_")
    return native_key(key) or key


def with_overrides(words: Sequence[str], fixes: Sequence[str]) -> list[str]:
    """Return the command with overrides in place of those of the same field."""
    keys = {own_key(fix) for fix in fixes}
    kept = [word for word in words if word.startswith("--") or "=" not in word or own_key(word) not in keys]
    return [*kept, *fixes]


def with_option(words: Sequence[str], option: str, value: str | None) -> list[str]:
    """Return the command with an option in place of the same option."""
    kept = without_option(words, option)
    return [*kept, option] if value is None else [*kept, option, value]


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Return the command without an option and its value."""
    kept: list[str] = []
    skip = False
    for at, word in enumerate(words):
        if skip:
            skip = False
        elif word.partition("=")[0] == option:
            skip = (
                "=" not in word
                and at + 1 < len(words)
                and not words[at + 1].startswith("--")
                and ("=" not in words[at + 1])
            )
        else:
            kept.append(word)
    return kept


def is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and not word.startswith("-") and all(c.isalnum() or c in "._+-" for c in key)


def fixed_command(words: Sequence[str], fix: str, error: dict[str, Any]) -> list[str] | None:
    """Return the command with the fix applied as a user would; None if the fix is prose."""
    try:
        parts = shlex.split(fix)
    except ValueError:
        return None
    if parts[:1] == ["meshwright"]:
        return None if any("…" in one or one.isupper() for one in parts) else parts[1:]
    if len(parts) == 2 and parts[0] in ("remove", "without") and parts[1].startswith("--"):
        return without_option(words, parts[1])
    if len(parts) == 2 and parts[0] == "remove":
        return [word for word in words if word != parts[1]]
    if parts and parts[0].startswith("--"):
        found = [word for word in words if error.get("field") != "argument" or word != error["value"]]
        if str(error.get("field")).startswith("--"):  # the fix replaces the option that the error names
            found = without_option(found, str(error["field"]))
        at = 0
        while at < len(parts):
            has_value = at + 1 < len(parts) and not parts[at + 1].startswith("--")
            option, equals, value = parts[at].partition("=")
            if not option.startswith("--"):
                return None
            if found_typo(words, option, error):
                found = [renamed(word, error["value"], option) for word in found]
            else:
                found = with_option(found, option, value if equals else parts[at + 1] if has_value else None)
            at += 2 if has_value and not equals else 1
        return found
    if parts and all(is_override(one) for one in parts):
        field_ = str(error.get("field") or "")
        kept = [word for word in words if not (is_override(word) and own_key(word) == own_key(field_))]
        return with_overrides(kept, parts)
    if len(parts) == 1:
        return replaced(words, str(error.get("value")), parts[0])
    return None


def found_typo(words: Sequence[str], option: str, error: dict[str, Any]) -> bool:
    value = str(error.get("value"))
    return value.startswith("-") and any(word.partition("=")[0] == value for word in words)


def renamed(word: str, option: str, other: str) -> str:
    return other + word[len(option) :] if word.partition("=")[0] == option else word


def replaced(words: Sequence[str], value: str, other: str) -> list[str] | None:
    """Return the command with a name in place of the wrong one, wherever it was typed."""
    found = []
    hit = False
    for word in words:
        key, equals, text = word.partition("=")
        if word == value:
            word, hit = other, True
        elif equals and text == value:
            word, hit = f"{key}={other}", True
        elif equals and key == value:
            word, hit = f"{other}={text}", True
        found.append(word)
    return found if hit else None


# Trying a mistake.


def try_mistake(words: Sequence[str], result: Result) -> None:
    """Run a mistake, apply every fix of its answer, and record those that are refused."""
    result.mistakes += 1
    answer = call(*words)
    if answer.code == 2:
        _try_input_error(words, answer, result)
    elif answer.code in (0, 1):
        _try_findings(words, answer, result)
        _try_together(words, answer, result)
    else:
        result.refuse(words, "", f"exit {answer.code}: {answer.err[-300:]}")


def _try_input_error(words: Sequence[str], answer: Answer, result: Result) -> None:
    error = answer.error
    result.without += not error["fix"]
    for fix in error["fix"]:
        other = fixed_command(words, fix, error)
        if other is None:
            result.prose.append(f"{fix}   <- meshwright {shlex.join(words)}")
            continue
        result.fixes += 1
        then = _until_accepted(other, error, result)
        if then.code not in (0, 1):
            result.refuse(words, fix, f"{answer.err.splitlines()[0]}\n    then {shlex.join(other)}: {then.err.strip()}")


def _until_accepted(words: Sequence[str], error: dict[str, Any], result: Result) -> Answer:
    """Run a command with a fix; a mistake in another word is reported next, and fixed by its own first fix."""
    fixed = {error["field"], own_key(str(error["field"]))}
    answer = call(*words)
    for _ in range(ROUNDS):
        error = answer.error
        if answer.code != 2 or error["field"] in fixed or not error["fix"]:
            return answer
        other = fixed_command(words, error["fix"][0], error)
        if other is None:
            return answer
        words, answer = other, call(*other)
        fixed |= {error["field"]}
        result.fixes += 1
    return answer


def _try_findings(words: Sequence[str], answer: Answer, result: Result) -> None:
    for finding in answer.findings:
        if not finding["fix"] or any(is_open(one) for one in finding["fix"]):
            result.without += 1
            continue
        result.fixes += 1
        then = call(*with_overrides(words, finding["fix"]))
        fix = f"{' '.join(finding['fix'])} ({finding['severity']} {finding['rule']}: {finding['message']})"
        if then.code not in (0, 1):
            result.refuse(words, fix, then.err.strip())
        elif finding["rule"] in {one["rule"] for one in then.findings}:
            result.refuse(words, fix, "the finding remains")
        elif new := _new_errors(answer, then):
            result.refuse(words, fix, f"a new error: {new[0]['rule']}: {new[0]['message']}")


def _new_errors(before: Answer, after: Answer) -> list[dict[str, Any]]:
    """Return the errors that a fix leads to; the same error by a framework's own rule is none."""
    return [
        one
        for one in after.findings
        if one["rule"] in after.errors - before.errors and not MORE_PRECISE.get(one["rule"], set()) & before.errors
    ]


MORE_PRECISE = {one.id: set(one.supersedes) for name in FRAMEWORKS for one in frameworks.framework(name).rules}
"""Our rules by the framework's rule that reports the same."""


ROUNDS = 4


def _try_together(words: Sequence[str], answer: Answer, result: Result) -> None:
    """Type the fixes of all errors at once, until none is left; an error without a fix may remain."""
    before, trail = answer.errors, [list(words)]
    for _ in range(ROUNDS):
        fixes = _fixes_of_errors(answer)
        if not fixes:
            break
        trail.append(with_overrides(trail[-1], fixes))
        answer = call(*trail[-1])
        if answer.code not in (0, 1):
            return result.refuse(words, "all: " + " ".join(fixes), answer.err.strip())
    left = _fixes_of_errors(answer)
    if left:
        steps = " → ".join(" ".join(one[len(words) - 1 :]) for one in trail)
        result.refuse(words, "all fixes of errors, again and again", f"{steps}: still {left}")
    elif answer.errors - before:
        result.refuse(words, "all fixes of errors", f"ends with new errors {sorted(answer.errors - before)}")
    return None


def _fixes_of_errors(answer: Answer) -> list[str]:
    """Return the fixes of all errors; of two for one field, the last, as a user who edits one after the other."""
    fixes = {own_key(fix): fix for one in answer.findings if one["severity"] == "error" for fix in one["fix"]}
    return [fix for fix in fixes.values() if not is_open(fix)]


def is_open(fix: str) -> bool:
    """Return whether a fix has a value that only the user knows: train.steps=N."""
    return fix.partition("=")[2].isupper()


# Mistakes.


def bad_values(key: str) -> Sequence[str]:
    """Return values for a field, most of them wrong somewhere."""
    type_, _ = bare_type(recipe_fields()[key].type)
    if get_origin(type_) is tuple:
        names = get_args(get_args(type_)[0]) or ("2", "3", "30")
        return (f"[{names[0]},{names[-1]}]", names[0], names[-1], "nonsense", "[]", f"[{names[0]},nonsense]")
    if get_origin(type_) is Literal:
        return (*get_args(type_), "nonsense", typo(str(get_args(type_)[-1]), random.Random(key)))
    if get_origin(type_) is dict:
        return ("a:0.5,b:0.5", "prompt:question", "nonsense", "")
    return {int: INTEGERS, float: FLOATS, bool: ("true", "false", "yes"), str: ("mock", "squad", "")}[type_]


SKIPPED = ("checkpoint.pretrained", "data.tokenizer", "data.chat_template", "data.validation", "data.dataset")
WEIGHTED = ("layout.", "layout.", "layout.", "train.", "kernels.", "precision.", "moe.", "data.", "optimizer.")


def fields() -> list[str]:
    """Return the fields of mistakes, those of the layout more often."""
    keys = [key for key in recipe_fields() if key not in SKIPPED]
    return [*keys, *(key for prefix in WEIGHTED for key in keys if key.startswith(prefix))]


def field_mistake(rng: random.Random) -> list[str]:
    """Return a command with one to three wrong values."""
    keys = rng.sample(fields(), rng.choice((1, 1, 2, 3)))
    words = [f"{key}={rng.choice(bad_values(key))}" for key in dict.fromkeys(keys)]
    command = rng.choice(("check",) * 8 + ("estimate", "export"))
    recipe, gpus = rng.choice(RECIPES), rng.choice(CLUSTERS)
    if command == "export":
        return [command, recipe, "--gpus", gpus, "--to", rng.choice(FRAMEWORKS), *words]
    engine = rng.choice(("meshwright", "meshwright", *ENGINES))
    return [command, recipe, "--gpus", gpus, "--engine", engine, *words]


def plan_mistake(rng: random.Random) -> list[str]:
    """Return a question with wrong values around which the rest is sized."""
    keys = rng.sample(fields(), rng.choice((1, 1, 2)))
    words = [f"{key}={rng.choice(bad_values(key))}" for key in keys]
    model = rng.choice(("llama3-8b", "qwen3-30b-a3b", "gemma3_1b", "nemotronh-4b", "llama3-70b", "flux_12b"))
    goal = rng.choice(("pretrain", "sft", "peft"))
    engine = rng.choice(("meshwright", "meshwright", *ENGINES))
    return ["recommend", model, "--gpus", rng.choice(CLUSTERS), "--goal", goal, "--engine", engine, *words]


def typo(word: str, rng: random.Random) -> str:
    """Return the word with one letter dropped, doubled, swapped or replaced."""
    at = rng.randrange(len(word))
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz")
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[: max(at - 1, 0)] + word[max(at - 1, 0) : at + 1][::-1] + word[at + 1 :],
            word[:at] + letter + word[at + 1 :],
            word + letter,
        )
    )


TYPED: tuple[tuple[str, ...], ...] = (
    ("recommend", "~llama3-8b", "--gpus", "8xH100", "--goal", "sft"),
    ("recommend", "~qwen3-30b-a3b", "--gpus", "8xH100", "--goal", "pretrain"),
    ("recommend", "llama3-8b", "--gpus", "8x~H100", "--goal", "sft"),
    ("recommend", "llama3-8b", "--gpus", "8x~MI300X", "--goal", "sft"),
    ("recommend", "llama3-8b", "--gpus", "8x~RTX4090", "--goal", "peft"),
    ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "~pretrain"),
    ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engine", "~torchtitan"),
    ("recommend", "llama3-8b", "~--gpus", "8xH100", "--goal", "sft"),
    ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "~--explain"),
    ("~recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft"),
    ("~estimate", "llama3_8b_pretrain_config"),
    ("estimate", "~llama3_8b_pretrain_config"),
    ("estimate", "llama3_8b_pretrain_config", "~layout.recompute", "=full"),
    ("check", "~llama3_8b_sft_config"),
    ("check", "~qwen3_30b_a3b_peft_config"),
    ("check", "llama3_8b_sft_config", "~layout.tp", "=2"),
    ("check", "llama3_8b_sft_config", "~optimizer.weight_decay", "=0.1"),
    ("check", "llama3_8b_sft_config", "~model.tensor_model_parallel_size", "=2"),
    ("check", "llama3_8b_sft_config", "~train.global_batch_size", "=64"),
    ("check", "llama3_8b_sft_config", "~data.seq_length", "=2048"),
    ("check", "llama3_8b_sft_config", "layout.recompute=", "~selective"),
    ("check", "llama3_8b_sft_config", "kernels.attention=", "~flash"),
    ("check", "llama3_8b_peft_config", "peft.method=", "~qlora"),
    ("check", "llama3_8b_peft_config", "optimizer.name=", "~schedule_free_adamw"),
    ("check", "llama3_8b_sft_config", "--engine", "~megatron"),
    ("export", "llama3_8b_sft_config", "--to", "~megatron-bridge"),
    ("export", "llama3_8b_pretrain_config", "~--to", "torchtitan"),
    ("size", "~llama3-70b", "--goal", "sft", "--gpu", "H100"),
    ("size", "llama3-8b", "--goal", "sft", "--gpu", "~H200"),
    ("recipe", "~llama3_70b_sft_config"),
    ("recipe", "llama3_8b_sft_config", "--format", "~yaml"),
    ("launch", "llama3_8b_sft_config", "--scheduler", "~slurm"),
    ("launch", "~llama3_8b_sft_config", "--scheduler", "torchrun"),
    ("explain", "~layout.recompute"),
    ("explain", "~heads.attention"),
    ("models", "~llama3_8b"),
)
"""Commands; the word after ~ is mistyped. A word that starts with = or follows one that ends with = is joined."""


def typing_mistake(rng: random.Random) -> list[str]:
    """Return a command with one mistyped word."""
    words: list[str] = []
    for word in rng.choice(TYPED):
        before, mark, name = word.partition("~")
        dashes = name[: len(name) - len(name.lstrip("-"))]
        text = before + dashes + typo(name[len(dashes) :], rng) if mark else word
        if words and (word.startswith("=") or words[-1].endswith("=")):
            words[-1] += text
        else:
            words.append(text)
    return words


GENERATORS: dict[str, Callable[[random.Random], list[str]]] = {
    "fields": field_mistake,
    "plans": plan_mistake,
    "typing": typing_mistake,
}


def generated(kind: str, count: int, seed: int) -> Iterator[list[str]]:
    """Yield different mistakes of a kind; the same for the same seed."""
    rng = random.Random(f"{kind}-{seed}")
    seen: set[tuple[str, ...]] = set()
    while len(seen) < count:
        words = GENERATORS[kind](rng)
        if tuple(words) not in seen:
            seen.add(tuple(words))
            yield words


def try_mistakes(mistakes: Sequence[Sequence[str]] | Iterator[list[str]]) -> Result:
    """Try every mistake."""
    result = Result()
    for words in mistakes:
        try_mistake(words, result)
    return result
