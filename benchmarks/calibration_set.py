"""Measure our engine on one GPU in many cases, next to its estimates: the data that its profile is fitted to.

    python benchmarks/calibration_set.py --minutes 8.5 --warm 13 --workers 3 --out FILE [--only WORD]...
                                                        (on a GPU; repeat it to continue)
    python benchmarks/calibration_set.py --list        estimates of all cases on 1xH200, without a GPU
    python benchmarks/calibration_set.py --smoke --only qwen25_500m --out FILE       (on CPU, tiny models)

Every case is a `meshwright bench` command, run in a process that is forked after the imports, so that it has a memory
of its own and starts in seconds. With --workers N, N cases are built at a time and take their first steps; one that is
measured has the GPU to itself: the others are stopped (SIGSTOP) until its last step. Cases that the file has are
skipped; failed ones are run again with --again. The first cases cover every family. Models that would not fit in the
memory or time have fewer layers. With --warm N, N processes at a time first run every case with few layers, which
fills the compile cache: blocks are compiled one by one, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing as mp
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import as_typed

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

CASE_S = 150.0
LEAST_S = 20.0  # no case is started when less time is left
STEPS = 8
DRAIN_S = 1.5  # the GPU still runs what a stopped process has queued
FIRST_STEPS = 2  # compile, and do not wait for their turn
ROOM_GIB = 128.0  # for the cases that are built at a time
CONTEXT_GIB = 4.0  # of the CUDA context, and of an estimate that is too low
ONE_GPU = tuple(
    f"layout.{name}"
    for name in [
        "tp=1",
        "pp=1",
        "vp=1",
        "cp=1",
        "ep=1",
        "etp=1",
        "dp_replicate=1",
        "sp=false",
        "offload=none",
        "pp_schedule=1f1b",
        "stage_layers=",
    ]
)
# Model, goal, tokens, micro batch; then recompute (none), matmul (same), "eager" (compiled), layersN (all), xN: micro
# batches per step (1), and overrides. The first 31 cover the families.
CASES = """
llama32_1b pretrain 4096 4
qwen25_500m sft 2048 8
qwen3_4b sft 4096 2
gemma3_1b sft 8192 2
olmoe_7b pretrain 4096 2 layers8
qwen3_30b_a3b pretrain 4096 2 layers4
gpt_oss_20b lora 4096 2
deepseek_v2_lite pretrain 4096 1 layers8
moonlight_16b lora 4096 1
nemotron_nano_9b_v2 lora 4096 1
qwen3_next_80b_a3b lora 4096 1 layers8
qwen35_2b sft 4096 1
mistral_7b lora 8192 1
gemma2_9b lora 4096 1
phi4_mini_3p8b lora 4096 2
mixtral_8x7b pretrain 4096 1 layers3
glm45_air_106b pretrain 4096 1 layers2
megatron_1p3b pretrain 2048 8
llama3_8b lora 8192 1
llama3_8b qlora 4096 2
qwen3_8b sft 4096 1 full layers18
llama3_8b pretrain 4096 2 fp8_tensor layers12
nemotronh_4b pretrain 4096 1 layers26
qwen25_7b qlora 4096 4
gemma2_2b pretrain 4096 1 full
qwen3_600m pretrain 1024 16
smollm2_1p7b pretrain 2048 8 fp8_row
qwen35_9b lora 4096 1
tinyllama_1p1b sft 2048 8
qwen3_14b qlora 4096 2
qwen35_35b_a3b lora 4096 1 layers8
llama32_1b pretrain 1024 16
llama32_1b pretrain 8192 2 selective
llama32_1b pretrain 16384 1 full
llama32_1b pretrain 32768 1 full
llama32_1b pretrain 4096 4 fp8_tensor
llama32_1b pretrain 4096 4 eager
llama32_1b pretrain 4096 2 x4
qwen3_4b lora 4096 4
qwen3_4b qlora 8192 1
qwen3_4b sft 1024 8 selective
qwen3_4b sft 8192 1 full
qwen3_4b lora 4096 4 fp8_tensor
llama3_8b lora 2048 4
llama3_8b lora 16384 1 full
llama3_8b qlora 32768 1 full
llama3_8b pretrain 4096 2 layers12
llama3_8b pretrain 4096 4 full layers12
llama3_8b pretrain 4096 2 fp8_row layers12
llama3_8b lora 4096 1 eager
qwen3_30b_a3b pretrain 4096 2 fp8_tensor layers4
qwen3_30b_a3b pretrain 4096 4 full layers4
qwen3_30b_a3b lora 2048 2
qwen3_30b_a3b lora 2048 4
qwen3_30b_a3b lora 2048 16 full x2
qwen3_30b_a3b pretrain 8192 1 selective layers4
olmoe_7b pretrain 4096 4 selective layers8
olmoe_7b lora 4096 2
olmoe_7b pretrain 1024 8 layers8
gpt_oss_20b lora 8192 1
gpt_oss_20b qlora 4096 2
gpt_oss_20b pretrain 4096 1 layers4
deepseek_v2_lite lora 4096 2
deepseek_v2_lite pretrain 4096 2 full layers8
moonlight_16b pretrain 4096 1 layers6
gemma3_1b pretrain 4096 4
gemma3_1b pretrain 32768 1 full
gemma3_1b lora 2048 8
gemma2_9b qlora 8192 1 full
nemotron_nano_9b_v2 lora 8192 1
nemotron_nano_9b_v2 qlora 4096 1
nemotronh_4b sft 2048 2 full layers26
qwen3_next_80b_a3b lora 2048 2 full layers8
qwen25_500m pretrain 4096 8 fp8_tensor
qwen25_500m pretrain 32768 1 full
mistral_7b lora 32768 1 full
qwen3_14b lora 4096 1
qwen25_14b qlora 8192 1 selective
mixtral_8x7b pretrain 1024 4 layers3
megatron_1p3b pretrain 2048 8 eager
""".strip().splitlines()
RECOMPUTE = ("none", "selective", "full")
# Layers of a model, by the start of its name, that have every kind of its blocks.
WARM_LAYERS = {"gemma3": 6, "qwen3_next": 4, "qwen35": 4, "nemotron_nano": 16, "nemotronh": 26, "": 2}
MATMULS = ("fp8_tensor", "fp8_row")


def bench_words(case: str) -> list[str]:
    """Return the words of `bench` for a case."""
    model, goal, tokens, micro_batch, *more = case.split()
    settings = {"recompute": "none", "matmul": "same", "compile": "true", "count": "1", "layers": ""}
    changes = []
    for word in more:
        if word in RECOMPUTE:
            settings["recompute"] = word
        elif word in MATMULS:
            settings["matmul"] = word
        elif word == "eager":
            settings["compile"] = "false"
        elif found := re.fullmatch(r"layers(\d+)", word):
            settings["layers"] = found[1]
        elif found := re.fullmatch(r"x(\d+)", word):
            settings["count"] = found[1]
        elif "=" in word:
            changes.append(word)
        else:
            raise ValueError(f"{word!r} in {case!r}: not a setting of a case")
    return [
        *(model, "--goal", goal, *ONE_GPU),
        *(f"data.seq_length={tokens}", f"layout.micro_batch_size={micro_batch}"),
        f"train.global_batch_size={int(micro_batch) * int(settings['count'])}",
        *(f"layout.recompute={settings['recompute']}", "layout.recompute_modules=", "layout.recompute_layers=0"),
        *(f"precision.matmul={settings['matmul']}", f"kernels.compile={settings['compile']}"),
        *([f"architecture.layers={settings['layers']}"] if settings["layers"] else []),
        *changes,
        f"train.steps={STEPS}",
    ]


def model_type(case: str) -> str:
    """Return the family of a case: the model type of its config."""
    from meshwright.models import config_named

    return str(config_named(case.split()[0])["model_type"])


# --- one case, in a forked process -----------------------------------------------------------------------------------


def preload() -> None:
    """Import what every case needs, before the fork; nothing here may start CUDA, as modules of models do."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # imports that ask for GPUs do not start CUDA
    for module in (
        "torch",
        "torch._dynamo",
        "transformers",
        "meshwright.cli",
        "meshwright.api.training",
        "meshwright.engine.trainer",
    ):
        import_module(module)


@dataclass
class Running:
    """A case that runs in a forked process."""

    row: dict[str, Any]
    folder: Path
    process: Any
    pipe: Connection
    started: float
    gib: float

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, its compiler processes and ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, number)

    def end(self) -> dict[str, Any]:
        """End the process and return the row with what it measured."""
        late = self.process.is_alive()
        self.signal(signal.SIGKILL)
        self.process.join()
        wall = {"wall_s": round(monotonic() - self.started, 1)}
        if late:
            return self.row | wall | {"error": f"took longer than {CASE_S:.0f} s"}
        try:
            answer = json.loads((self.folder / "out").read_text())
            if "error" in answer:
                return self.row | wall | {"error": str(answer["error"]["message"])[-800:]}
            found = as_typed.figures(answer)
            return self.row | found | wall | {"command": _with_loss(self.row["command"], found["kernels"])}
        except (json.JSONDecodeError, FileNotFoundError):
            return (
                self.row | wall | {"error": (self.folder / "err").read_text()[-800:] or f"exit {self.process.exitcode}"}
            )


def _with_loss(command: str, kernels: dict[str, Any]) -> str:
    """Return the command with the loss kernel that was chosen, which another version may choose differently."""
    return command.replace(" train.steps=", f" kernels.loss={kernels['loss']} train.steps=")


def start(case: str, smoke: bool, folder: Path, gib: float) -> Running:
    """Start a case in a forked process."""
    words = ["bench", *bench_words(case), "--json"]
    if smoke:
        tiny = ("kernels.compile", "data.seq_length", "train.steps")
        words = [word for word in words if not word.startswith(tiny)]
        words += ["--tiny", "kernels.compile=false", "data.seq_length=64", f"train.steps={STEPS}"]
    row = {
        "case": case,
        "family": model_type(case),
        "command": "meshwright " + shlex.join(word for word in words if word != "--json"),
    }
    preload()
    folder.mkdir()
    pipe, other = mp.Pipe()
    process = mp.get_context("fork").Process(target=_run, args=(words, folder, other))
    process.start()
    other.close()
    return Running(row, folder, process, pipe, monotonic(), gib)


def measured(cases: list[str], workers: int, smoke: bool, end: float) -> Iterator[dict[str, Any]]:
    """Run the cases, several at a time, and yield their rows; the one whose steps are measured runs alone."""
    waiting = list(cases)
    running: list[Running] = []
    ready: list[Running] = []
    alone: Running | None = None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        ends.callback(lambda: [one.signal(signal.SIGKILL) for one in running])
        while running or (waiting and end - monotonic() >= LEAST_S):
            while waiting and len(running) < workers and alone is None and end - monotonic() >= LEAST_S:
                gib = next(estimates([waiting[0]])).get("gib", 0.0) + CONTEXT_GIB
                if running and sum(one.gib for one in running) + gib > ROOM_GIB:
                    break
                case = waiting.pop(0)
                running.append(start(case, smoke, Path(folder) / str(len(waiting)), gib))
            for pipe in wait([one.pipe for one in running], timeout=0.1):
                sender = next(one for one in running if one.pipe is pipe)
                try:
                    word = sender.pipe.recv()
                except EOFError:  # it ended
                    sender.process.join(10.0)
                    word = "ended"
                if word == "ready":
                    ready.append(sender)
                    continue
                if alone is sender:
                    alone = None
                    for one in running:
                        one.signal(signal.SIGCONT)
                if word == "ended":
                    running.remove(sender)
                    ready = [one for one in ready if one is not sender]
                    yield sender.end()
            if alone is None and ready:
                alone = ready.pop(0)
                for one in running:
                    if one is not alone:
                        one.signal(signal.SIGSTOP)
                sleep(DRAIN_S if len(running) > 1 else 0.0)
                alone.pipe.send("go")
            for one in [one for one in running if monotonic() > min(one.started + CASE_S * workers, end + LEAST_S)]:
                running.remove(one)
                ready = [other for other in ready if other is not one]
                if alone is one:
                    alone = None
                    for other in running:
                        other.signal(signal.SIGCONT)
                yield one.end()
    for case in waiting:
        print(f"  not run  {case}", flush=True)


def _run(words: list[str], folder: Path, pipe: Connection | None = None) -> None:
    """Run a meshwright command in this process, its output to files; with a pipe, its steps wait for their turn."""
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o600), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.chdir(folder)
    sys.argv = ["meshwright", *words]
    from meshwright.cli import main

    if pipe is not None:
        _take_turns(pipe)
    main()


def _take_turns(pipe: Connection) -> None:
    """Have the steps after the first ones wait until no other case uses the GPU, and say when they are done."""
    import torch

    from meshwright.engine import worker

    step = worker._Run.step

    def in_turn(self: Any, number: int) -> None:
        if number == FIRST_STEPS:
            pipe.send("ready")
            pipe.recv()
        step(self, number)
        if number == STEPS - 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            pipe.send("measured")

    worker._Run.step = in_turn  # type: ignore[method-assign]


def warm(wanted: list[str], jobs: int, end: float) -> None:
    """Compile the blocks of every case, several cases at a time; one that fails is compiled when it is measured."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each process has its core
    with tempfile.TemporaryDirectory() as folder:
        running: dict[Any, tuple[str, float]] = {}
        waiting = [case for case in wanted if "eager" not in case.split()]
        for number, case in enumerate(waiting):
            preload()
            while len(running) >= jobs:
                _reap(running, end)
            layers = next(count for start, count in WARM_LAYERS.items() if case.startswith(start))
            words = [word for word in bench_words(case) if not word.startswith(("architecture.layers", "train.steps"))]
            words += [f"architecture.layers={layers}", "train.steps=2"]
            output = Path(folder) / str(number)
            output.mkdir()
            process = mp.get_context("fork").Process(target=_run, args=(["bench", *words, "--json"], output))
            process.start()
            running[process] = (case, monotonic())
        while running:
            _reap(running, end)
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def _reap(running: dict[Any, tuple[str, float]], end: float) -> None:
    """Wait a moment; forget processes that ended, and end those that are late."""
    for process, (case, started) in list(running.items()):
        process.join(0.05)
        late = monotonic() > min(end, started + CASE_S)
        if process.is_alive() and not late:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        print(f"warm {monotonic() - started:5.1f} s exit {process.exitcode} {case}", flush=True)
        del running[process]


# --- the set ---------------------------------------------------------------------------------------------------------


def estimates(wanted: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the estimate of every case on 1xH200, and whether it fits."""
    from meshwright.cli.run import run

    for case in wanted:
        words = [word for word in bench_words(case) if not word.startswith("train.steps")]
        output = io.StringIO()
        sys.argv = ["meshwright", "estimate", *words, "--gpus", "1xH200", "--json"]
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            run()
        answer = json.loads(output.getvalue())
        row: dict[str, Any] = {"case": case, "family": model_type(case)}
        if "error" in answer:
            yield row | {"error": answer["error"]["message"]}
            continue
        found = answer["estimate"]
        refused = [one["message"] for one in answer["findings"] if one["severity"] == "error"]
        yield row | {"step_s": found["step_s"], "gib": found["memory_gib"]["total"], "error": "; ".join(refused)}


def is_current(row: dict[str, Any]) -> bool:
    """Whether a case was measured, with an engine as fast as today's."""
    return "error" not in row and "superseded" not in row


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the median and worst errors of the estimates."""
    fine = [row for row in rows if is_current(row) and row["estimate"]["step_s"]]
    if not fine:
        return "nothing measured yet"
    times = [abs(row["estimate"]["step_s"] / row["step_s"] - 1) for row in fine]
    memory = [abs(row["estimate"]["memory_gib"] / row["memory_gib"]["reserved"] - 1) for row in fine]
    return (
        f"{len(fine)} measured, {len({row['family'] for row in fine})} families; step time off by {median(times):.1%} "
        f"median, {max(times):.0%} worst; reserved memory off by {median(memory):.1%} median, {max(memory):.0%} worst"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "calibration_set.json")
    parser.add_argument("--only", action="append", default=[], help="only cases that have this word")
    parser.add_argument("--again", action="store_true", help="run failed cases of the file again")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="first fill the compile cache, N at a time")
    parser.add_argument("--workers", type=int, default=1, help="cases that are built at a time; each is measured alone")
    parser.add_argument("--smoke", action="store_true", help="tiny models on CPU")
    parser.add_argument("--list", action="store_true", help="print the estimates of all cases on 1xH200")
    args = parser.parse_args()
    wanted = [case for case in CASES if all(word in case.split() for word in args.only)]
    if args.list:
        total = 0.0
        for row in estimates(wanted):
            total += row.get("step_s") or 0.0
            shown = f"{row['step_s']:7.2f} s {row['gib']:6.1f} GiB" if "step_s" in row else " " * 20
            print(f"{shown}  {row['family']:<12} {row['case']}  {row['error']}", flush=True)
        kinds = {model_type(case) for case in wanted}
        print(f"{len(wanted)} cases, {len(kinds)} families, {STEPS * total:.0f} s of steps")
        return 0
    rows: dict[str, Any] = {}
    if args.out.exists():
        rows = {row["case"]: row for row in json.loads(args.out.read_text())["rows"]}
    end = monotonic() + 60 * args.minutes
    if args.warm:
        warm([case for case in wanted if case not in rows], args.warm, end)
    print(" tokens/s   MFU  est/s |  alloc reserv   est. |  wall  case", flush=True)
    old = {case for case, row in rows.items() if "superseded" in row or (args.again and "error" in row)}
    left = [case for case in wanted if case not in rows or case in old]
    for row in measured(left, args.workers, args.smoke, end):
        rows[row["case"]] = {**row, "date": date.today().isoformat()}
        print(as_typed.line(row), flush=True)
        _write(args.out, list(rows.values()))
    print(summary(list(rows.values())))
    return 0


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    from importlib.metadata import version

    from meshwright.clusters import cluster
    from meshwright.errors import InputError

    gpu = "CPU"
    with contextlib.suppress(InputError):
        gpu = cluster("auto").gpu.name
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{gpu}, torch {version('torch')}, transformers {version('transformers')}",
        "made_by": "python benchmarks/calibration_set.py --minutes 8.5 --warm 13 --workers 3 --out FILE",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
