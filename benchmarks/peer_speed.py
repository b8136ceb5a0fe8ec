"""Compare on one GPU the command that `recommend` prints with torchtitan and with a plain transformers loop.

    python benchmarks/peer_speed.py OUT.json [--minutes M] [--only WORD] [--again] [--tiny]
    python benchmarks/peer_speed.py --list [--only WORD] [--tiny]

Ours is what a user gets: the training command that `meshwright recommend` prints, run as `bench` (as_typed.py). The
plain loop (plain_loop.py) trains the same recipe; torchtitan (torchtitan_one_gpu.py) the same model, sequence length,
sequences per step and formats. Each is measured at its best micro batch of a short list. Every measurement is a process
of its own, so an error costs one cell, which then holds its last line. Cells are written as they come; those that the
file already has are kept, those with an error are measured again with `--again`. `--tiny` runs small models on CPU.
`--list` prints the commands of all cells and measures nothing: it needs neither GPU nor torchtitan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.as_typed import MESHWRIGHT, answered, figures, recommended_words  # noqa: E402

OURS, TORCHTITAN, PLAIN = "ours", "torchtitan", "plain"
LIMIT_S = {OURS: 120.0, TORCHTITAN: 110.0, PLAIN: 110.0}
BF16 = "precision.master=bf16 precision.moments=bf16 precision.grads=bf16 precision.reduce=bf16"
ALL_BF16 = "weights, gradients and AdamW states in bf16"
FP32_ADAPTERS = "base weights in bf16; adapters, their gradients and AdamW states in fp32"
# Logged every 4 steps and at the first. The step after the last log measures allocated memory, which logging resets.
TITAN_STEPS, TITAN_LOG = 9, 4
TITAN = (
    f"--training.steps={TITAN_STEPS} --metrics.log_freq={TITAN_LOG} --metrics.disable_color_printing "
    "--training.dtype=bfloat16 --lr_scheduler.warmup_steps=2"
)
TITAN_FP8 = "--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns=output"


class Case(NamedTuple):
    """One row: what is asked of `recommend`, and how the others train the same."""

    name: str
    asked: str
    states: str
    plain: str  # tries of plain_loop.py
    titan: str = ""  # torchtitan's model
    titan_tries: tuple[tuple[int, str], ...] = ()  # micro batch, activation checkpoint mode; until one fits
    goals: tuple[tuple[str, float], ...] = ()  # ratio wanted over each


SIZE = "train.global_batch_size=4 data.seq_length=4096"
LLAMA = "--model.name=llama3 --model.flavor=8B"
CASES = (
    Case(
        "Llama-3-8B pretrain",
        f"recommend llama3-8b --gpus 1xH200 --goal pretrain {SIZE} {BF16}",
        ALL_BF16,
        "4,2",
        LLAMA,
        ((4, "none"), (2, "none"), (4, "full")),
        ((TORCHTITAN, 1.10), (PLAIN, 1.10)),
    ),
    Case(
        "Llama-3-8B pretrain, fp8",
        f"recommend llama3-8b --gpus 1xH200 --goal pretrain {SIZE} {BF16} precision.matmul=fp8_tensor",
        f"{ALL_BF16}; fp8 matmul scaled per tensor",
        "4,2",
        f"{LLAMA} {TITAN_FP8}",
        ((4, "none"), (2, "none"), (4, "full")),
        ((TORCHTITAN, 1.20), (PLAIN, 1.10)),
    ),
    Case(
        "Qwen3-30B-A3B pretrain, 8 layers",
        f"recommend qwen3-30b-a3b --gpus 1xH200 --goal pretrain {SIZE} {BF16} architecture.layers=8",
        ALL_BF16,
        "4,2",
        "--layers 8 --model.name=qwen3 --model.flavor=30B-A3B",
        ((4, "none"), (2, "none")),
        ((TORCHTITAN, 1.40), (PLAIN, 1.40)),
    ),
    Case(
        "Llama-3-8B LoRA",
        "recommend llama3-8b --gpus 1xH200 --goal peft train.global_batch_size=4",
        FP32_ADAPTERS,
        "4a,4,2a",
        goals=((PLAIN, 1.3),),
    ),
    Case(
        "Qwen3-30B-A3B LoRA",
        "recommend qwen3-30b-a3b --gpus 1xH200 --goal peft train.global_batch_size=4",
        FP32_ADAPTERS,
        "4a,2a,4ac",
        goals=((PLAIN, 1.3),),
    ),
    Case(
        "gpt-oss-20b LoRA",
        "recommend gpt-oss-20b --gpus 1xH200 --goal peft train.global_batch_size=8",
        FP32_ADAPTERS,
        "4a,2a,4ac,1ac",
        goals=((PLAIN, 1.3),),
    ),
    Case(
        "Nemotron-Nano-9B-v2 LoRA",
        "recommend nemotron-nano-9b-v2 --gpus 1xH200 --goal peft train.global_batch_size=4",
        FP32_ADAPTERS,
        "2a,1a,1ac",
        goals=((PLAIN, 1.3),),
    ),
    Case(
        "OLMoE-7B pretrain",
        f"recommend olmoe-7b --gpus 1xH200 --goal pretrain train.global_batch_size=4 {BF16}",
        ALL_BF16,
        "4,2",
        goals=((PLAIN, 1.4),),
    ),
    Case(
        "Qwen3-4B sft",
        f"recommend qwen3-4b --gpus 1xH200 --goal sft train.global_batch_size=8 {BF16}",
        ALL_BF16,
        "8,4,2",
        goals=((PLAIN, 1.1),),
    ),
    Case(
        "Qwen3-Next-80B-A3B pretrain, 4 layers",
        f"recommend qwen3-next-80b-a3b --gpus 1xH200 --goal pretrain {SIZE} {BF16} architecture.layers=4",
        ALL_BF16,
        "4,2,1",
        goals=((PLAIN, 1.4),),
    ),
)


class Child:
    """A process of one measurement, in its own group; it may wait for its turn after its imports."""

    def __init__(self, words: list[str], folder: Path, waits: bool) -> None:
        self.out = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115  closed with the process's last use
        self.err = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        pipe = subprocess.PIPE if waits else subprocess.DEVNULL
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=self.out, stderr=self.err, text=True, env=env, cwd=folder, start_new_session=True
        )

    def finish(self, limit_s: float) -> tuple[str, str, str]:
        """Let it run and return its output, its errors, and why it failed, if it did."""
        if self.process.stdin:
            with suppress(BrokenPipeError):  # it failed in its imports
                self.process.stdin.write("start\n")
                self.process.stdin.close()
        problem = ""
        try:
            if self.process.wait(limit_s):
                problem = f"exit {self.process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
        self.end()
        self.out.seek(0)
        self.err.seek(0)
        out, errors = self.out.read(), self.err.read()
        return out, errors, problem and f"{problem}: {last_error(errors)}"

    def end(self) -> None:
        """End it and what it started."""
        for how, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)


def last_error(text: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\[rank0\]: ?)?[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1][:600]


def titan_figures(log: str) -> dict[str, Any]:
    """Return what torchtitan's log lines report; the first window holds compilation and is left out."""
    steps = re.findall(r"step:\s*(\d+)\s+loss:\s*(\S+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", log)
    timed = [float(tps.replace(",", "")) for step, _, _, tps in steps if int(step) > TITAN_LOG]
    if not timed:
        return {}
    allocated = re.search(r"peak allocated: ([\d.]+)GiB", log)
    return {
        "tokens_per_s": len(timed) / sum(1 / tps for tps in timed),
        "losses": [float(loss) for _, loss, _, _ in steps],
        "peak_allocated_gib": float(allocated[1]) if allocated else None,
        "peak_reserved_gib": max(float(memory) for _, _, memory, _ in steps),
    }


class Cell(NamedTuple):
    """One process to run: `kind` is ours, torchtitan or the plain loop."""

    case: Case
    kind: str
    words: list[str]
    setting: dict[str, Any]

    def command(self) -> str:
        """Return the command line from the repository root."""
        return shlex.join(["python", *self.words[1:]]).replace(f"{ROOT}/", "")

    def start(self, folder: Path) -> Child:
        """Start the process; peers wait for their turn, ours runs at once."""
        waits = self.kind != OURS
        return Child([*self.words, *(["--wait"] if waits else [])], folder, waits)

    def read(self, out: str, errors: str, problem: str) -> list[dict[str, Any]]:
        """Return the measurements in the output: one, or one per try of the plain loop; else the error."""
        failed = [self.setting | {"error": problem or last_error(errors)}]
        if self.kind == TORCHTITAN:
            found = titan_figures(out + errors)
            return [self.setting | found] if found else failed
        if self.kind == PLAIN:
            rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            return rows + (failed if problem or not rows else [])
        try:
            answer = json.loads(out)
        except json.JSONDecodeError:
            return failed
        if "error" in answer:
            return [self.setting | {"error": answer["error"]["message"][-600:]}]
        found = figures(answer)
        memory = found.pop("memory_gib") or {}
        memory = {"peak_allocated_gib": memory.get("peak"), "peak_reserved_gib": memory.get("reserved")}
        return [self.setting | found | memory]


class Sizes(NamedTuple):
    """What every peer trains with: taken from the plan, since its command prints only what differs from the recipe."""

    seq_length: int
    global_batch_size: int


def cells(case: Case, words: list[str], sizes: Sizes, tiny: bool, folder: Path) -> list[Cell]:
    """Return the processes of a row in order: ours, torchtitan, the plain loop."""
    small = ["--tiny"] if tiny else []
    changes = dict(word.split("=", 1) for word in words if "=" in word)
    if tiny:
        sizes = Sizes(64, 2)
        shrunk = {"data.seq_length": "64", "train.global_batch_size": "2", "layout.micro_batch_size": "2"}
        changed = changes | shrunk | {"kernels.compile": "false"}
        words = [*(word for word in words if "=" not in word), *(f"{key}={value}" for key, value in changed.items())]
    found = [Cell(case, OURS, [*MESHWRIGHT, "bench", *words, *small, "--json"], {})]
    titan = case.titan
    if tiny:
        flavor = "debugmodel_moe" if "qwen3" in titan else "debugmodel"
        titan = re.sub(r"flavor=\S+", f"flavor={flavor} --layers 2", titan.replace("--layers 8", ""))
    for micro, mode in case.titan_tries[: 1 if tiny else None]:
        batch = (
            f"--training.local_batch_size={min(micro, sizes.global_batch_size)} "
            f"--training.global_batch_size={sizes.global_batch_size} --training.seq_len={sizes.seq_length} "
            f"--activation_checkpoint.mode={mode} --job.dump_folder={folder}"
        )
        compiled = [] if tiny else ["--compile.enable"]
        driver = [sys.executable, str(ROOT / "benchmarks" / "torchtitan_one_gpu.py")]
        arguments = [*driver, *shlex.split(f"{titan} {TITAN} {batch}"), *compiled]
        found.append(Cell(case, TORCHTITAN, arguments, {"micro_batch": micro, "activation_checkpoint": mode}))
    tries = "2" if tiny else case.plain
    plain = [sys.executable, "-m", "benchmarks.plain_loop", *words, "--tries", tries, *small]
    return [*found, Cell(case, PLAIN, plain, {})]


def best(tries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest try."""
    return max((t for t in tries if "tokens_per_s" in t), key=lambda t: float(t["tokens_per_s"]), default=None)


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with our speed over that of each peer."""
    ours = best(row["tries"].get(OURS, []))
    peers = {kind: best(row["tries"].get(kind, [])) for kind in (TORCHTITAN, PLAIN)}
    ratios = {kind: ours["tokens_per_s"] / peer["tokens_per_s"] for kind, peer in peers.items() if ours and peer}
    return row | {"ratios": ratios}


def line(row: dict[str, Any]) -> str:
    """Return the row as one line of the table."""
    text = f"{row['name']:<38}"
    for kind in (OURS, TORCHTITAN, PLAIN):
        tries = row["tries"].get(kind, [])
        found = best(tries)
        ratio = row["ratios"].get(kind)
        shown = f"{found['tokens_per_s']:,.0f}" if found else tries[-1]["error"][:90] if tries else "-"
        memory = f" {found['peak_reserved_gib']:.0f} GiB" if found and found.get("peak_reserved_gib") else ""
        text += f" | {kind} {shown}{memory}" + (f" ({ratio:.2f}x)" if ratio else "")
    return text


def versions() -> dict[str, str]:
    """Return the versions of what is compared."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "peft", "torchao", "torchtitan"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def gpu_name() -> str:
    """Return the GPU's name without a CUDA context, which would take memory from what is measured."""
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "CPU"


def is_wanted(cell: Cell, tries: list[dict[str, Any]]) -> bool:
    """Return whether a cell is still to be measured: not if it has been, nor after a torchtitan try that fits."""
    if cell.kind == TORCHTITAN:
        same = [one for one in tries if cell.setting.items() <= one.items()]
        return best(tries) is None and not same
    return not tries


def planned(options: argparse.Namespace, folder: Path) -> list[Cell]:
    """Return all processes in order; `recommend` is asked for all cases at once."""
    chosen = [case for case in CASES if options.only.lower() in case.name.lower()]

    def cells_of(case: Case) -> list[Cell]:
        steps = "train.steps=2" if options.tiny else "train.steps=8"
        try:
            answer = answered([*shlex.split(case.asked), steps, "--json"], 60)
            words = recommended_words(answer)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"not run: {case.name}: {error}", flush=True)
            return []
        contract = answer["contract"]
        sizes = Sizes(contract["seq_length"], contract["global_batch_size"])
        return cells(case, words, sizes, options.tiny, folder)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [cell for found in pool.map(cells_of, chosen) for cell in found]


def main() -> None:
    """Measure within the time given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.list:
        for cell in planned(options, Path("FOLDER")):
            print(f"{cell.case.name} | {cell.kind} | {cell.command()}")
        return
    if options.out is None:
        parser.error("OUT.json is needed to measure; --list prints the commands without it")
    end = monotonic() + 60 * options.minutes
    out = options.out.resolve()
    known = json.loads(out.read_text())["rows"] if out.exists() else []
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in known}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        todo = planned(options, folder)
        if options.again:  # errors are measured again, figures are kept
            for row in rows.values():
                row["tries"] = {kind: [t for t in tries if "error" not in t] for kind, tries in row["tries"].items()}
        measure_all(todo, rows, folder, end, out)


def measure_all(todo: list[Cell], rows: dict[str, dict[str, Any]], folder: Path, end: float, out: Path) -> None:
    """Run the processes one after the other; the next one imports while one runs."""
    ahead: tuple[Cell, Child] | None = None
    for place, cell in enumerate(todo):
        row = rows.setdefault(cell.case.name, new_row(cell.case))
        tries = row["tries"].setdefault(cell.kind, [])
        child = ahead[1] if ahead and ahead[0] is cell else None
        left = end - monotonic()
        if not is_wanted(cell, tries) or left < 20:
            if child:
                child.end()
                ahead = None
            if left < 20 and is_wanted(cell, tries):
                print(f"not run, no time left: {cell.case.name}, {cell.kind}", flush=True)
            continue
        child = child or cell.start(folder)
        following = next((c for c in todo[place + 1 :] if wanted_later(c, rows)), None)
        ahead = (following, following.start(folder)) if following and following.kind != OURS else None
        started = monotonic()
        found = cell.read(*child.finish(min(LIMIT_S[cell.kind], left)))
        tries += [one | {"wall_s": round(monotonic() - started, 1)} for one in found]
        row["commands"][cell.kind] = cell.command()
        rows[cell.case.name] = with_ratios(row)
        save(out, list(rows.values()))
        print(f"{line(rows[cell.case.name])}  [{monotonic() - started:.0f} s]", flush=True)


def wanted_later(cell: Cell, rows: dict[str, dict[str, Any]]) -> bool:
    """Return whether a later cell has not been measured yet."""
    row = rows.get(cell.case.name)
    return row is None or is_wanted(cell, row["tries"].get(cell.kind, []))


def new_row(case: Case) -> dict[str, Any]:
    """Return the empty row of a case."""
    goals = dict(case.goals)
    return {"name": case.name, "asked": case.asked, "states": case.states, "goals": goals, "tries": {}, "commands": {}}


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the measurements so far."""
    order = [case.name for case in CASES]
    result = {
        "made_by": "python benchmarks/peer_speed.py " + shlex.join(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": gpu_name(),
        "versions": versions(),
        "rows": sorted(rows, key=lambda row: order.index(row["name"])),
    }
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
