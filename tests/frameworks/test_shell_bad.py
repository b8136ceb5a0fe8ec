"""Invalid scripts are rejected with their line; none is executed or hangs."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.frameworks.test_shell_megatron import ARRAYS, SLURM, STRINGS, TORCHTITAN

from meshwright.errors import InputError
from meshwright.frameworks.shell import find_launches, read_script


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\necho 'x\n", "line 2: the quote ' opened here is never closed"),
        ('a\n\necho "x\n', 'line 3: the quote " opened here is never closed'),
        ("echo `x\n", "line 1: the quote ` opened here is never closed"),
        ("echo $'x\n", "line 1: the quote $' opened here is never closed"),
        ("A=1\nARGS=(\n --x 1\n", "line 2: the array ARGS=( opened here is never closed"),
        ("A=1\nif [ a ]; then\n b\n", "line 2: the if opened here has no fi"),
        ("if [ a ]; b; fi\n", "line 1: unexpected 'fi'"),
        ("b\nfi\n", "line 2: unexpected 'fi'"),
        ("for i in a; do b\n", "line 1: the for opened here has no done"),
        ("case a in b) c;;\n", "line 1: the case opened here has no esac"),
        ("x\ny $(foo\n", "line 2: the parenthesis ( opened here is never closed"),
        ("x ${foo\n", "line 1: the ${ opened here is never closed"),
        ("f() {\n a\n", "line 1: the { opened here has no }"),
        ("a )\n", "line 1: unexpected ')'"),
        ("[[ a == b\n", "line 1: the [[ opened here has no ]]"),
    ],
)
def test_syntax_error_is_reported_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        read_script(text, "run.sh")
    assert (error.value.reason, error.value.field, error.value.value) == (reason, "file", "run.sh")


GROWS = {
    "text": "A=x\n" + 'A="$A$A"\n' * 40,
    "lines": "A='x\ny\n'\n" + 'A="$A$A"\n' * 40,
    "array": "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "functions": "f0() { a; }\n" + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 25)) + "f24\n",
    "words": "a " + "b " * 20_001,
    "braces": "A=" + "${A:-" * 51 + "}" * 51,
    "blocks": "if true; then " * 60 + "a\n" + "fi\n" * 60,
    "parentheses": "( " * 5000 + "a" + " )" * 5000,
    "commands": "a\n" * 20_001,
}


@pytest.mark.parametrize("text", GROWS.values(), ids=GROWS)
def test_unbounded_growth_is_rejected(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(InputError):
        read_script(text, "run.sh")
    assert time.process_time() - begun < 2


STAYS = {
    "eval": 'X=\'eval "$X"; eval "$X"\'\neval "$X"\n',
    "arithmetic": "A=A" + "+A" * 400 + "\necho $((A))\n",
    "patterns": "case " + "a" * 900 + " in " + "*a" * 400 + "b) x;; esac\n",
    "tests": "[[ " + "( " * 1000 + "]]\n",
    "nots": "! " * 20_000 + "a\n",
    "division": "echo $((1/0)) $((2**99)) $((9999999999999999999999)) $((1<<99))\n",
}


@pytest.mark.parametrize("text", STAYS.values(), ids=STAYS)
def test_blocking_constructs_stay_unresolved(text: str) -> None:
    begun = time.process_time()
    read_script(text, "run.sh")
    assert time.process_time() - begun < 1


def read_within_a_second(text: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(InputError):
        find_launches(read_script(text, "run.sh"))
    assert time.process_time() - begun < 1


SIGNS = ["${", "}", "$(", ")", "((", "))", "[[", "]]", "if ", "then\n", "fi\n", "case ", "esac\n", " in ", ";;", "'"]
SIGNS += ['"', "`", "\\\n", "#", "<<E\n", "A+=(", 'A="$A$A"\n', "$A", "${A:-", "${A[@]}", "do ", "done\n", "while "]
SIGNS += ["for i ", "{ ", "f() ", "f\n", "eval ", "bash -c '", "|", "&&", "||", "&", "!", "\x0b", "\u2003", "\r", "é"]
SIGNS += ["$((A+A))", "A=A+A\n", "exit\n", "source x\n", "[ ", "] ", "-z ", "=", "*", "=~", "srun ", "torchrun "]


@settings(max_examples=75)
@given(st.text(max_size=400) | st.lists(st.sampled_from(SIGNS), max_size=60).map("".join))
@example("A[0")
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    read_within_a_second(text)


@st.composite
def broken_scripts(draw: st.DrawFn) -> str:
    """A real script with random deletions, duplications and replacements."""
    text = draw(st.sampled_from([ARRAYS, STRINGS, SLURM, TORCHTITAN]))
    for _ in range(draw(st.integers(1, 6))):
        at, other = draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))
        change = draw(st.sampled_from(["cut", "copy", "spoil", "swap"]))
        if change == "cut":
            text = text[:at] + text[at + draw(st.integers(1, 30)) :]
        elif change == "copy":
            text = text[:at] + text[other : other + 80] + text[at:]
        elif change == "spoil":
            text = text[:at] + draw(st.sampled_from(SIGNS)) + text[at:]
        else:
            text = text[other:] + text[:other]
    return text


@settings(max_examples=75)
@given(broken_scripts())
def test_mutated_script_is_parsed_or_rejected(text: str) -> None:
    read_within_a_second(text)
