"""Bash semantics, evaluated without executing the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.frameworks.shell import Script, read_script


def shown(text: str) -> list[list[str]]:
    """Return the arguments of every `show` command."""
    script = read_script(text, "run.sh")
    return [[word.value for word in one.words[1:]] for one in script.commands if one.words[0].value == "show"]


def unresolved_lines(script: Script) -> list[tuple[str, int]]:
    return [(one.what, one.line) for one in script.unresolved]


# The right-hand sides are what bash 5.2 printed for these lines.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1; show $A \"$A\" '$A' \\$A", ["1", "1", "$A", "$A"]),
        ('A="a b  c"; show $A "$A" x$A"y"', ["a", "b", "c", "a b  c", "xa", "b", "cy"]),
        ('A=" a b "; show x${A}y', ["x", "a", "b", "y"]),
        ('A=(a "b c"); show "${A[@]}" ${A[@]}', ["a", "b c", "a", "b", "c"]),
        ('A=(a "b c"); show "${A[*]}" "x${A[@]}y" "$A"', ["a b c", "xa", "b cy", "a"]),
        ("A=(a 'b c'); show ${A[1]} ${#A[@]} ${#A} \"${A[-1]}\"", ["b", "c", "2", "1", "b c"]),
        ('A=(); show "${A[@]}" ${A[@]} ""', [""]),
        ("A+=(x); A+=(y z); show ${A[@]}", ["x", "y", "z"]),
        ('A=x; A+=" y"; show $A', ["x", "y"]),
        ('show ${U:-d e} "${U:-d e}" ${U:-"d e"} ${U:+y} z${U+q}', ["d", "e", "d e", "d e", "z"]),
        (": ${V:=5}; show $V", ["5"]),
        ('E=; show ${E:-d} x${E-d} "${E:+x}" ${E+y}', ["d", "x", "", "y"]),
        ("A=a.tar.gz; show ${A%.gz} ${A%%.*} ${A#*.} ${A##*.}", ["a.tar", "a", "tar.gz", "gz"]),
        (
            "A=abca; show ${A/a/X} ${A//a/X} ${A:1} ${A:1:2} ${A: -2} ${A^^} ${A^}",
            ["Xbca", "XbcX", "bca", "bc", "ca", "ABCA", "Abca"],
        ),
        ("A=4; B=3; show $((A*B/5)) $((A**2)) $((-7/2)) $((-7%3)) $(( (A+B) * 2 ))", ["2", "16", "-3", "-1", "14"]),
        (
            "A=4; show $((A>3?1:2)) $(($A+${A})) $((1<<4)) $((0x10)) $((10-3-2)) $((!A))",
            ["1", "8", "16", "16", "5", "0"],
        ),
        ("show $'a\\tb\\'c' a\\ b \"a\\\"b\\\\c\\$d\\e\"", ["a\tb'c", "a b", 'a"b\\c$d\\e']),
        ("show a \\\n  b \\\n  c # comment", ["a", "b", "c"]),
        ("show a#b '#c' \"#d\"", ["a#b", "#c", "#d"]),
        ("declare -A M=([a]=1 [b]=2); k=b; show ${M[a]} ${M[$k]}", ["1", "2"]),
        ("A=(a b c); A[1]=X; show ${A[@]}", ["a", "X", "c"]),
        ("N=A; A=7; show ${!N}", ["7"]),
        ("set -- p q; show $1 $2 $#", ["p", "q", "2"]),
        ("C='show \"a b\"'; eval $C", ["a b"]),
        ("C='show a b'; $C", ["a", "b"]),
        ("show 2>&1 x >/dev/null y 1>&2 &> z", ["x", "y"]),
        ("cat <<EOT > f\nshow no $(nothing\nEOT\nshow after", ["after"]),
        ("cat <<-'EOT'\n\tshow \"no\n\tEOT\nshow after", ["after"]),
        ('A=( # c\n a # d\n # "quote\n b\n); show ${A[@]}', ["a", "b"]),
        ("(A=5); A=${A:-unset}; show $A", ["unset"]),
        ("A=1; { A=2; }; show $A", ["2"]),
        ("exec >log 2>&1; show still", ["still"]),
    ],
)
def test_words_expand_as_in_bash(text: str, expected: list[str]) -> None:
    assert shown(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A=b; if [ "$A" = b ]; then show yes; else show no; fi', ["yes"]),
        ('A=b; if [ "$A" != b ]; then show yes; elif [[ $A == b* ]]; then show elif; else show no; fi', ["elif"]),
        ("A=3; if [ $A -gt 2 ] && [ $A -lt 4 ]; then show in; fi", ["in"]),
        ("A=3; if [[ ($A -eq 3 || $A -eq 4) && ! $A -eq 5 ]]; then show in; fi", ["in"]),
        ("A=3; if (( A > 2 )); then show big; fi", ["big"]),
        ('A=; [ -z "$A" ] && show empty || show full', ["empty"]),
        ('A=x; [ -z "$A" ] && show empty || show full', ["full"]),
        ("if [ 1 -eq 2 -o 2 -eq 2 ]; then show or; fi", ["or"]),
        ("if [ ! 1 -eq 2 ]; then show not; fi", ["not"]),
        ("if ! [ 1 -ge 2 ]; then show not; fi", ["not"]),
        ("case foo in f*) show f;; *) show other;; esac", ["f"]),
        ("case b in a|b) show ab;; *) show other;; esac", ["ab"]),
        ('case x in "*") show star;; ?) show one;; esac', ["one"]),
        ('[[ abc == "*b*" ]] || show noglob', ["noglob"]),
        ("while false; do show never; done; show done", ["done"]),
        ("true && show t", ["t"]),
        ("exit 0; show never", None),
        ("mkdir x || exit 1; show on", ["on"]),
        ("(exit 1); show on", ["on"]),
        ("exec python a.py; show never", None),
    ],
)
def test_branch_with_known_condition_is_taken(text: str, expected: list[str] | None) -> None:
    assert shown(text) == ([expected] if expected else [])


@pytest.mark.parametrize(
    "condition",
    ['[ "$FOO" = 1 ]', "[[ $FOO == 1 ]]", "[ -f data.bin ]", "[[ $A =~ ^a ]]", "grep -q a b", '[ "$(hostname)" = a ]'],
)
def test_branch_with_unknown_condition_is_skipped(condition: str) -> None:
    script = read_script(f"A=a\nTP=1\nif {condition}; then\n  TP=2; show a\nelse\n  show b\nfi\nshow $TP\n", "run.sh")
    (command,) = [one for one in script.commands if one.words[0].value == "show"]
    assert command.words[1].value == "$TP"
    assert command.words[1].unresolved == "TP is set under a condition on line 3 that is known only at run time"
    assert (condition, 3) in unresolved_lines(script)


def test_append_under_unknown_condition_keeps_other_arguments() -> None:
    assert shown('A=(a)\nif [ -n "$W" ]; then A+=(--w); fi\nshow "${A[@]}"') == [["a"]]


@pytest.mark.parametrize(
    "text", ['if [ -z "$TP" ]; then\nTP=4\nfi', '[[ -z "$TP" ]] && TP=4', ": ${TP:=4}", "TP=${TP-4}"]
)
def test_default_idioms_are_equivalent(text: str) -> None:
    assert read_script(text, "run.sh").variables["TP"].value == "4"


def test_exit_on_missing_argument_does_not_stop_interpretation() -> None:
    text = 'if [ -z "${1:-}" ]; then echo usage; exit 1; fi\n[ -n "${2:-}" ] || exit 1\nshow on\n'
    assert shown(text) == [["on"]]


def test_functions_have_own_arguments_and_local_variables() -> None:
    text = 'f() { local x=$1; shift; show $x "$@" $#; }\nx=9\nf a "b c"\nshow $x\n'
    text += "function g { show ${1:-none}; return; show no; }\ng\n"
    assert shown(text) == [["a", "b c", "1"], ["9"], ["none"]]


def test_recursive_call_is_not_followed() -> None:
    script = read_script("f() { show a; f; }\nf\n", "run.sh")
    assert len(script.commands) == 1
    assert ("f", 1) in unresolved_lines(script)


def test_loop_body_runs_once_with_unknown_variable() -> None:
    script = read_script("N=1\nfor lr in 1e-4 3e-4; do\n  N=$((N+1))\n  show --lr $lr\ndone\nshow $N\n", "run.sh")
    first, second = script.commands
    assert (first.words[2].value, first.words[2].line) == ("$lr", 2)
    assert first.words[2].unresolved == "the loop variable lr takes several values: 1e-4, 3e-4"
    assert second.words[1].unresolved == "N grows in a loop"
    assert shown("for i in 7; do show $i; done") == [["7"]]


@pytest.mark.parametrize(
    "text", ["$(nproc --all)", "`nproc`", "$FOO", "${FOO}", "$((FOO * 2))", "${1}", "$(seq 1 3)", "$?"]
)
def test_command_substitution_stays_as_written(text: str) -> None:
    script = read_script(f"A={text}\nshow --n=$A\n", "run.sh")
    (command,) = script.commands
    assert (command.words[1].value, command.words[1].line) == (f"--n={text}", 2)
    assert command.words[1].unresolved
    assert unresolved_lines(script) == [(text, 1)]
    assert script.variables["A"].value == text


def test_comment_in_continued_command_is_reported() -> None:
    script = read_script("torchrun a.py \\\n  --x 1 \\\n  # --y 2 \\\n  --z 3\n", "run.sh")
    assert [[word.value for word in one.words] for one in script.commands] == [
        ["torchrun", "a.py", "--x", "1"],
        ["--z", "3"],
    ]
    (one,) = script.unresolved
    assert (one.line, one.reason) == (3, "the comment ends the command; the next line is a new command")
    assert read_script("torchrun a.py \\\n  # done\n\necho\n", "run.sh").unresolved == ()


def test_whitespace_after_backslash_is_reported() -> None:
    script = read_script("torchrun a.py \\ \n  --z 3\n", "run.sh")
    assert [one.line for one in script.unresolved] == [1]
    assert "whitespace after the backslash" in script.unresolved[0].reason


def test_commands_in_lists_pipes_and_eval_are_recorded() -> None:
    script = read_script("cd x && a 1; b | c & time d\nnohup bash -c 'e; f'\nA=1\nexport B=2\n", "run.sh")
    assert [" ".join(word.value for word in one.words) for one in script.commands] == [
        *("cd x", "a 1", "b", "c", "time d", "nohup bash -c e; f", "nohup e", "nohup f")
    ]


def test_environment_has_exports_and_prefix_assignments() -> None:
    text = "A=1\nexport A B=2\nC=3\nD=4 E=$A run\nunset B\nset -a\nF=6\nset +a\nG=7\nrun\n"
    first, *_, last = read_script(text, "run.sh").commands
    assert {name: value.value for name, value in first.env.items()} == {"A": "1", "B": "2", "D": "4", "E": "1"}
    assert {name: (value.value, value.line) for name, value in last.env.items()} == {"A": ("1", 1), "F": ("6", 7)}


def test_new_shell_sees_exported_variables_only() -> None:
    script = read_script("A=1\nexport B=2\nbash -c 'show $A $B'\nbash -c \"show $A\"\n", "run.sh")
    words = [one.words[1:] for one in script.commands if one.words[0].value == "show"]
    assert [[word.value for word in each] for each in words] == [["$A", "2"], ["1"]]
    assert words[0][0].unresolved == "A is not set in the script"


def test_slurm_variables_come_from_sbatch_lines() -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=h100:8\n"
    text = head + "show $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_GPUS_ON_NODE ${SLURM_NTASKS:-1} ${SLURM_JOB_ID:-0}\n"
    (command,) = read_script(text, "run.sh").commands
    assert [(word.value, word.line) for word in command.words[1:5]] == [("4", 2), ("4", 2), ("8", 4), ("32", 3)]
    assert command.words[5].unresolved == "SLURM sets SLURM_JOB_ID when the job runs"
    assert shown("show ${SLURM_NNODES:-1}") == [["1"]]


def test_array_element_from_command_is_unknown() -> None:
    script = read_script("N=( $(scontrol show hostnames) )\nshow ${N[0]} ${N[1]} ${#N[@]}\n", "run.sh")
    words = script.commands[0].words[1:]
    assert [word.value for word in words] == ["$(scontrol show hostnames)", "${N[1]}", "${#N[@]}"]
    assert all(word.unresolved for word in words)


def test_windows_line_endings_are_reported() -> None:
    script = read_script("A=1\r\nshow $A \\\r\n  b\r\n", "run.sh")
    assert [word.value for word in script.commands[0].words] == ["show", "1", "b"]
    assert "Windows line endings" in script.unresolved[0].reason


def test_sourced_file_is_interpreted(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.sh").write_text('# model\nARGS="--num-layers 24\n--bf16"\n')
    (tmp_path / "env.sh").write_text("TP=4\n. conf/model.sh\n")
    text = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource $HERE/env.sh\nshow $ARGS $TP\n'
    (command,) = read_script(text, "jobs/run.sh", tmp_path).commands
    assert [(word.value, word.location) for word in command.words] == [
        ("show", "jobs/run.sh:3"),
        ("--num-layers", "jobs/conf/model.sh:2"),
        ("24", "jobs/conf/model.sh:2"),
        ("--bf16", "jobs/conf/model.sh:3"),
        ("4", "jobs/env.sh:1"),
    ]


def test_unreadable_sourced_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "large.sh").write_text("#" * 1_000_001)
    (tmp_path / "binary.sh").write_bytes(b"A=1\0")
    text = "source missing.sh\n. large.sh\nsource binary.sh\nsource $FOO/x.sh\nsource /dev/zero\nsource .\n"
    script = read_script(text, "run.sh", tmp_path)
    reasons = {one.line: one.reason for one in script.unresolved if one.what.startswith("source")}
    assert list(reasons) == [1, 2, 3, 4, 5, 6]
    assert "file not found" in reasons[1]
    assert "larger than" in reasons[2]
    assert "binary file" in reasons[3]
    (alone,) = read_script("source env.sh\n", "run.sh").unresolved
    assert alone.reason == "the sourced file is not read: the directory of the script is unknown"


def test_circular_source_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source b.sh\n")
    (tmp_path / "b.sh").write_text("source a.sh\n")
    with pytest.raises(InputError, match=r"a\.sh → b\.sh → a\.sh"):
        read_script((tmp_path / "a.sh").read_text(), "a.sh", tmp_path)
    for index in range(12):
        (tmp_path / f"s{index}.sh").write_text(f"source s{index + 1}.sh\n")
    with pytest.raises(InputError, match="more than 8 nested source"):
        read_script("source s0.sh\n", "run.sh", tmp_path)
