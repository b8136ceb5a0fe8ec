"""Measure the CPU time of the hardest questions to the adviser, and keep their answers for a comparison.

The questions are drawn at random from groups whose search is large or fails: MoE models on small cards, long sequences,
too few GPUs, thousands of GPUs, typed layouts, budgets, other engines, and `size`. Each is asked as a command, twice:
in a forked process that has imported everything (its CPU seconds are those of the answer), and as a whole command.
With --audit the questions are those of advice_audit.py: every recipe on its own cluster, and 300 random ones.

python benchmarks/hard_questions.py [--count N] [--seed S] [--only GROUP] [--audit] [--warm] [--answers FILE]
    [--against FILE] [--out FILE] [--list N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import advice_audit

from meshwright import models
from meshwright.cli.run import run as run_command
from meshwright.recipes.types import GOALS

LIMIT_S = 0.4
SMALL_CARDS = ("A10G", "L4", "RTX4090", "RTX3090", "A5000", "A30", "T4", "RTX5090")
LARGE_CARDS = ("H100", "H200", "A100-80", "B200", "GB200", "MI300X", "H800")
ENGINES = ("megatron", "torchtitan", "deepspeed", "automodel", "kempnerforge")
LAYOUTS = (
    ("layout.tp=3",),
    ("layout.tp=2", "layout.pp=2"),
    ("layout.pp=4",),
    ("layout.micro_batch_size=4", "layout.recompute=none"),
    ("layout.tp=8", "layout.recompute=full"),
    ("layout.ep=8",),
    ("layout.cp=4",),
    ("layout.strategy=ddp",),
    ("layout.pp=3", "layout.micro_batch_size=8"),
    ("layout.vp=2", "layout.pp=2"),
    ("layout.offload=optimizer",),
    ("train.global_batch_size=24",),
)
Draw = Callable[[random.Random], list[str]]


class Asked(NamedTuple):
    """One command of a group."""

    group: str
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command as typed."""
        return " ".join(self.arguments)


def _models(moe: bool | None = None, above: float = 0.0) -> list[str]:
    """Return the models of the catalogue with more than this many billion parameters."""
    found = ((name, models.find(name)) for name in models.names())
    return [n for n, m in found if m.params.total > above * 1e9 and (moe is None or bool(m.moe) == moe)]


def _recommend(draw: random.Random, model: Sequence[str], gpus: str, *more: str) -> list[str]:
    return ["recommend", draw.choice(model), "--gpus", gpus, "--goal", draw.choice(GOALS), *more]


def moe_on_small_cards(draw: random.Random) -> list[str]:
    """Draw an MoE model above 25B on cards of up to 32 GB."""
    gpus = f"{draw.choice((1, 2, 4, 8, 16, 24, 32, 64, 128))}x{draw.choice(SMALL_CARDS)}"
    return _recommend(draw, _models(True, 25), gpus)


def long_sequences(draw: random.Random) -> list[str]:
    """Draw a model with sequences of 64k to 256k tokens."""
    gpus = f"{draw.choice((1, 4, 8, 16, 32, 64, 128, 256))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS[:3]))}"
    return _recommend(draw, _models(None, 1), gpus, "--seq", str(draw.choice((65536, 131072, 131072, 262144))))


def too_few_gpus(draw: random.Random) -> list[str]:
    """Draw a large model on one node or less."""
    gpus = f"{draw.choice((1, 2, 3, 4, 6, 8, 16))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS))}"
    return _recommend(draw, _models(None, 60), gpus)


def many_gpus(draw: random.Random) -> list[str]:
    """Draw an MoE model on 1,000 to 16,384 GPUs."""
    gpus = f"{draw.choice((1000, 1024, 1536, 2048, 3072, 4096, 8192, 16384))}x{draw.choice(LARGE_CARDS)}"
    return _recommend(draw, _models(True), gpus)


def typed_layouts(draw: random.Random) -> list[str]:
    """Draw a question with one or two typed values."""
    gpus = f"{draw.choice((4, 7, 8, 12, 16, 32, 64, 96, 256, 1024))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS[:3]))}"
    return _recommend(draw, _models(None, 5), gpus, *draw.choice(LAYOUTS))


def budgets(draw: random.Random) -> list[str]:
    """Draw a question with tokens or days."""
    gpus = f"{draw.choice((8, 16, 64, 128, 512, 1024))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS[:3]))}"
    more = draw.choice((("--days", "7"), ("--days", "30"), ("--tokens", "1T"), ("--tokens", "2B", "--price", "2.5")))
    return _recommend(draw, _models(None, 5), gpus, *more)


def own_data(draw: random.Random) -> list[str]:
    """Draw a fine-tuning on a local dataset."""
    gpus = f"{draw.choice((1, 2, 4, 8, 16))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS))}"
    asked = ["recommend", draw.choice(_models(None, 5)), "--gpus", gpus, "--goal", draw.choice(("sft", "peft"))]
    return [*asked, "data.dataset=DATASET", *draw.choice(((), ("train.epochs=3",), ("--days", "1")))]


def other_engines(draw: random.Random) -> list[str]:
    """Draw a question for another engine."""
    gpus = f"{draw.choice((8, 16, 32, 64, 256, 1024))}x{draw.choice((*LARGE_CARDS, *SMALL_CARDS[:3]))}"
    return _recommend(draw, _models(None, 5), gpus, "--engine", draw.choice(ENGINES))


def sizes(draw: random.Random) -> list[str]:
    """Draw `size` over the counts up to 1,024 GPUs, or all of them."""
    asked = ["size", draw.choice(_models(None, 5)), "--gpu", draw.choice((*LARGE_CARDS, *SMALL_CARDS[:3]))]
    return [*asked, "--goal", draw.choice(GOALS), *draw.choice(((), ("--max-gpus", "1024"), ("--tokens", "1T")))]


GROUPS: tuple[Draw, ...] = (
    moe_on_small_cards,
    long_sequences,
    too_few_gpus,
    many_gpus,
    typed_layouts,
    budgets,
    own_data,
    other_engines,
    sizes,
)
"""Groups in turn; each has as many questions as the others."""


def questions(count: int, seed: int, only: str = "") -> list[Asked]:
    """Return this many questions of all groups, or of one."""
    draw, groups = random.Random(seed), [group for group in GROUPS if only in ("", group.__name__)]
    drawn = (groups[i % len(groups)] for i in range(count))
    return [Asked(group.__name__, tuple(group(draw))) for group in drawn]


def audited(seed: int) -> list[Asked]:
    """Return the questions of advice_audit.py as commands."""
    found = []
    for one in (*advice_audit.recipe_questions(None), *advice_audit.random_questions(300, seed)):
        asked = one.question
        words = ["recommend", asked.model_ref, "--gpus", str(asked.cluster), "--goal", asked.goal]
        length = () if asked.seq_length is None else ("--seq", str(asked.seq_length))
        found.append(Asked("audited", (*words, *length)))
    return found


class Measured(NamedTuple):
    """CPU seconds, exit code and answer of one command."""

    cpu_s: float
    code: int
    answer: Any


def in_process(arguments: Sequence[str]) -> Measured:
    """Answer a command in a fork of this process; its CPU seconds have neither start nor imports."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os._exit(_exit_code(arguments))
        _, status, usage = os.wait4(child, 0)
        out.seek(0)
        text = out.read()
    return Measured(usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status), json.loads(text or "null"))


def _exit_code(arguments: Sequence[str]) -> int:
    sys.argv = ["meshwright", *arguments, "--json"]
    try:
        run_command()
    except SystemExit as ended:
        sys.stdout.flush()
        return ended.code if isinstance(ended.code, int) else 1
    sys.stdout.flush()
    return 0


def whole_command(arguments: Sequence[str]) -> float:
    """Return the CPU seconds of a command with its start and imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "meshwright", *arguments, "--json"]
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, env=cached, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def dataset(folder: str) -> str:
    """Write a small file of conversations and return its path."""
    path = Path(folder) / "talks.jsonl"
    turns = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4. " * 40}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(600)))
    return str(path)


def measure(asked: Sequence[Asked], whole: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row per question, and the answers by command."""
    in_process(("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft"))
    _import_everything()
    rows, answers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = dataset(folder)
        for one in asked:
            arguments = [text.replace("DATASET", path) for text in one.arguments]
            found = in_process(arguments)
            row = {"group": one.group, "command": one.text, "code": found.code, "cpu_s": round(found.cpu_s, 3)}
            rows.append(row | ({"whole_s": round(whole_command(arguments), 3)} if whole else {}))
            answers[one.text] = json.loads(json.dumps(found.answer).replace(path, "DATASET"))
    return rows, answers


def _import_everything() -> None:
    """Import what the commands import when they are used."""
    for arguments in (
        ("recommend", "llama31-405b", "--gpus", "8xH100", "--goal", "sft"),
        ("size", "llama3-8b", "--gpu", "H100", "--goal", "sft", "--max-gpus", "8"),
    ):
        sys.argv = ["meshwright", *arguments, "--json"]
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  # closed with the process
        try:
            run_command()
        except SystemExit:
            pass
        finally:
            sys.stdout = stdout


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, 95th percentile, greatest value and the number above the limit."""
    ordered = sorted(seconds)
    place = min(int(0.95 * len(ordered)), len(ordered) - 1)
    worst = {"median": round(median(ordered), 3), "p95": round(ordered[place], 3), "max": round(ordered[-1], 3)}
    return worst | {f"above {LIMIT_S}": sum(s > LIMIT_S for s in ordered)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of CPU seconds of all questions and of each group."""
    groups = {"all": rows} | {g.__name__: [r for r in rows if r["group"] == g.__name__] for g in GROUPS}
    kinds = [kind for kind in ("cpu_s", "whole_s") if kind in rows[0]]
    return {
        name: {"questions": len(some)} | {kind: spread([r[kind] for r in some]) for kind in kinds}
        for name, some in groups.items()
        if some
    }


def differing(answers: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Return the commands whose answer differs from the kept one."""
    return [command for command in answers if command in kept and answers[command] != kept[command]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the CPU seconds, save rows and answers; return 1 if an answer differs from a kept one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=270, help="questions")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--only", default="", choices=["", *(g.__name__ for g in GROUPS)], help="one group")
    parser.add_argument("--audit", action="store_true", help="the questions of advice_audit.py instead")
    parser.add_argument("--warm", action="store_true", help="leave out the whole commands")
    parser.add_argument("--answers", type=Path, help="JSON file for the answers")
    parser.add_argument("--against", type=Path, help="answers of another version to compare with")
    parser.add_argument("--out", type=Path, help="JSON file for the counts and rows")
    parser.add_argument("--list", type=int, default=0, help="list this many of the slowest questions")
    options = parser.parse_args(arguments)
    asked = audited(options.seed) if options.audit else questions(options.count, options.seed, options.only)
    rows, answers = measure(asked, not options.warm)
    counts = summary(rows)
    print(json.dumps(counts, indent=1))
    for row in sorted(rows, key=lambda r: -r.get("whole_s", r["cpu_s"]))[: options.list]:
        print(f"{row['cpu_s']:.3f} {row.get('whole_s', '')} {row['code']} {row['command']}")
    if options.answers:
        options.answers.write_text(json.dumps(answers))
    if options.out:
        words = sys.argv[1:] if arguments is None else arguments
        head = {"date": date.today().isoformat(), "command": f"python benchmarks/hard_questions.py {' '.join(words)}"}
        head["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        options.out.write_text(json.dumps({**head, "counts": counts, "rows": rows}, indent=1) + "\n")
    other = differing(answers, json.loads(options.against.read_text())) if options.against else []
    for command in other:
        print(f"differs: {command}")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
