"""Logs of Megatron-LM and Megatron-Bridge: one line per log interval, timers below it, arguments above."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

import msgspec

from meshwright.doctor.formats.printed_config import PrintedConfig, printed_config
from meshwright.doctor.formats.rank_times import RankTimes
from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, has_any, number, of_one_rank, positive
from meshwright.doctor.run import Run, RunHeader
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_choices import flags_by_argument, parser_flags

LOOKED_FOR = "`iteration 10/ 100 | … | elapsed time per iteration (ms): … |` of Megatron-LM and Megatron-Bridge"
HINTS = ("elapsed time per iteration",)
MARKS = re.compile(r"megatron[./](core|training|bridge)|MODEL_TFLOP/s/GPU|tensor_model_parallel_size \.\.\.")
STEP = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|.*elapsed time per iteration \(ms\)")

FIELDS = {
    "seconds": re.compile(rf"elapsed time per iteration \(ms\):\s*({NUMBER})"),
    "tflops": re.compile(rf"throughput per GPU \(TFLOP/s/GPU\):\s*({NUMBER})"),
    "tokens_per_s": re.compile(rf"tokens(?: per|/)s(?:ec(?:ond)?)?(?: per |/)GPU[^:|]*:\s*({NUMBER})", re.IGNORECASE),
    "lr": re.compile(rf"learning rate:\s*({NUMBER})"),
    "samples": re.compile(rf"global batch size:\s*({NUMBER})"),
    "loss": re.compile(rf"\| lm loss:\s*({NUMBER})", re.IGNORECASE),
    "loss_scale": re.compile(rf"loss scale:\s*({NUMBER})"),
    "grad_norm": re.compile(rf"\| grad norm:\s*({NUMBER})", re.IGNORECASE),
    "skipped": re.compile(rf"number of skipped iterations:\s*({NUMBER})"),
    "bad": re.compile(rf"number of nan iterations:\s*({NUMBER})"),
}
BRIDGE = re.compile(rf"Step Time :\s*({NUMBER})s GPU utilization:\s*({NUMBER})\s*MODEL_TFLOP/s/GPU")
MEMORY_MB = re.compile(rf"memory \(MB\).*max allocated:\s*({NUMBER})")
MEMORY_GB = re.compile(rf"mem-max-allocated-gigabytes:\s*({NUMBER})")
RETRIES = re.compile(r"mem-alloc-retires:\s*(\d+)")
TIMER = re.compile(rf"(?:^|\s)([a-z][\w/-]+) \.\.+:\s*\(({NUMBER}), ({NUMBER})\)")
MAX_TIMER = re.compile(rf"(?:^|\s)([a-z][\w/-]+) \.\.+:\s*({NUMBER})\s*$")  # --timing-log-option max
SAVE_TIMER = "save-checkpoint"
STRAGGLER = re.compile(rf"MnRtt/Rnk: *({NUMBER})ms/ *(\d+) \| MxRtt/Rnk: *({NUMBER})ms/ *(\d+)")  # --log-straggler
SAVE = re.compile(rf"{SAVE_TIMER} \.+:\s*(?:\({NUMBER}, ({NUMBER})\)|({NUMBER}))")
VALIDATION = re.compile(
    rf"validation(?:-(\S+))? loss at iteration\s+(\d+)\b([^|]*)\|.*?\blm loss value:\s*({NUMBER})", re.IGNORECASE
)
START = re.compile(r"\[before the start of training step\]")
ARGUMENT = re.compile(r"(^\s{2,}|^|\s)([a-z]\w*) (\.{2,}) (.*?)\s*$")
ARGUMENT_WIDTH = 48  # of a name and its dots; what follows a prefix is an argument only if it has this width
ENUM_MEMBER = re.compile(r"<?[A-Z]\w*\.([A-Za-z_]\w*)(?:: [^<>]*>)?")  # AttnBackend.flash, <AttnBackend.flash: 1>
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
GPU = re.compile(r"NVIDIA (?:DGX )?((?:GB|[ABHL])\d{2,3}S?)\b")
LAYOUT_LINE = "using world size:"
DEGREES = {
    "world_size": re.compile(r"world size: (\d+)"),
    "context_parallel_size": re.compile(r"context-parallel size: (\d+)"),
    "tensor_model_parallel_size": re.compile(r"(?<!encoder-)tensor-model-parallel size: (\d+)"),
    "pipeline_model_parallel_size": re.compile(r"(?<!encoder-)pipeline-model-parallel size: (\d+)"),
}
"""Values of the line that Megatron prints before its arguments; in some versions nothing separates two of them."""
INITIALIZED = re.compile(r"> initialized (tensor|pipeline) model parallel with size (\d+)")
"""What Megatron-Bridge prints of its layout without its runner, which prints the whole config."""
LAYOUT_FIELDS = {
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
}

IS_BRIDGE = re.compile(r"megatron[./]bridge|GPU utilization: \S+MODEL_TFLOP/s/GPU|Task Configuration -")
"""What only Megatron-Bridge prints: its module, its line of each step, the head of its config."""
RELEVANT = (
    LAYOUT_LINE, "> initialized ", "before the start", "validation", "memory (", "Step Time", " ..", "NVIDIA",
    "MnRtt/Rnk",
)  # fmt: skip
"""Every other line that is parsed contains one of these."""

PARTS = {
    "batch-generator": "data",
    "forward-backward": "forward_backward",
    "optimizer": "optimizer",
    "all-grads-sync": "collectives",
    "params-all-gather": "collectives",
    "grads-reduce-scatter": "collectives",
    "layernorm-grads-all-reduce": "collectives",
    "embedding-grads-all-reduce": "collectives",
}
"""Timers that are parts of a step; the others are nested in these."""
BETWEEN_STAGES = ("embedding-grads-all-reduce",)
"""Collectives of the first and last pipeline stage: the last one always waits for the first."""
BETWEEN_RANKS = ("forward-compute", "backward-compute")
"""Work without communication: if it differs between ranks, some are slow or have more to do."""
MIB_OF_MB = 1 / 1024  # Megatron's MB are MiB
GIB_OF_GB = 1e9 / 1024**3
OPPOSITE = {"True": "False", "False": "True"}
UNSET = ("None", "False", "[]", "{}", "")


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of Megatron."""
    steps = Steps()
    arguments: dict[str, str] = {}
    layout: dict[str, str] = {}
    total, retries, retry_line, gpu, bridge_tflops = None, 0, 0, "", None
    table = RankTimes(lambda name, times: _time_ranks(steps, name, times))
    for line, found in of_one_rank(lines, STEP, HINTS):
        text = line.text
        if found is not None:
            table.end()
            total = int(found[2])
            steps.add(int(found[1]), line.number, **_figures(text, layout | arguments, bridge_tflops))
            bridge_tflops = None
        elif table.takes(text) or not has_any(text, RELEVANT):
            continue
        elif LAYOUT_LINE in text:
            layout = {name: degree[1] for name, regex in DEGREES.items() if (degree := regex.search(text))}
        elif degree := INITIALIZED.search(text):
            layout[f"{degree[1]}_model_parallel_size"] = degree[2]
        elif START.search(text):
            steps.start()
        elif done := VALIDATION.search(text):
            if "test set" not in done[3]:
                steps.validated(int(done[2]), number(done[4]), line.number, done[1] or "")
        elif memory := MEMORY_MB.search(text):
            _raise_memory(steps, (number(memory[1]) or 0.0) * MIB_OF_MB)
        elif memory := MEMORY_GB.search(text):
            _raise_memory(steps, (number(memory[1]) or 0.0) * GIB_OF_GB)
            retried = RETRIES.search(text)
            if retried and int(retried[1]) > retries:
                retries, retry_line = int(retried[1]), line.number
        elif bridge := BRIDGE.search(text):
            bridge_tflops = positive(bridge[2])
        elif save := SAVE.search(text):
            steps.block((number(save[1] or save[2]) or 0.0) / 1e3)
        elif timer := TIMER.search(text):
            _time(steps, timer[1], (number(timer[2]) or 0.0) / 1e3, (number(timer[3]) or 0.0) / 1e3)
        elif timer := MAX_TIMER.search(text):
            _time_slowest(steps, timer[1], (number(timer[2]) or 0.0) / 1e3)
        elif straggler := STRAGGLER.search(text):
            _time_stragglers(steps, straggler)
        elif argument := _argument(text):
            arguments[argument[0]] = argument[1]
        if not gpu and (gpu_name := GPU.search(text)):
            gpu = gpu_name[1]
    table.end()
    rows = steps.all()
    header = _run_header(arguments, layout, total, gpu, rows[-1].samples if rows else None)
    if not arguments and any(IS_BRIDGE.search(line.text) for line in lines):
        header = _with_config(header, printed_config(lines, path), rows[-1].samples if rows else None)
    return Run(
        kind="megatron",
        path=path,
        file=path,
        steps=rows,
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=header,
        retries=retries,
        retry_line=retry_line,
    )


def _with_config(header: RunHeader, found: PrintedConfig | None, samples: int | None) -> RunHeader:
    """Return the header of a log of Megatron-Bridge, with the config in it."""
    header = msgspec.structs.replace(header, program="megatron-bridge")
    if found is None:
        return header
    tokens = found.length * samples if found.length and samples else None
    return msgspec.structs.replace(header, config=found.text, seq_length=found.length, tokens_per_step=tokens)


def _argument(text: str) -> tuple[str, str] | None:
    """Return the flag and value of a line of the argument dump, also after a prefix such as a time."""
    found = ARGUMENT.search(text)
    if found is None or not (len(found[1]) > 1 or len(found[2]) + len(found[3]) == ARGUMENT_WIDTH):
        return None
    return _as_flag(found[2], found[4])


def _as_flag(argument: str, printed: str) -> tuple[str, str]:
    """Return the flag that sets an argument, and its value: --fp8-format sets fp8, --no-rope-fusion turns one off."""
    flag = flags_by_argument().get(argument)
    name = argument if flag is None else flag.name
    value = _plain(name, printed.strip())
    return name, OPPOSITE.get(value, value) if flag is not None and flag.turns_off else value


def _plain(name: str, value: str) -> str:
    """Return the value of an argument as its flag takes it: members of enums and dtypes are printed as in Python."""
    if name.endswith("dtype") and value in DTYPES:
        return DTYPES[value]
    listed = value[1:-1].split(", ") if value[:1] == "[" and value[-1:] == "]" else [value]
    members = [found[1] for one in listed if (found := ENUM_MEMBER.fullmatch(one))]
    key = config_keys("megatron_lm").get(name)
    is_enum = value[:1] in "<[" or (key is not None and {*members} <= {*key.choices})  # not a name such as Lab.model
    return " ".join(members) if is_enum and len(members) == len(listed) else value


def _figures(text: str, arguments: dict[str, str], bridge_tflops: float | None) -> dict[str, Any]:
    found = {name: number(match[1]) for name, regex in FIELDS.items() if (match := regex.search(text))}
    figures: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    for name in ("samples", "skipped", "bad"):
        if name in figures:
            figures[name] = int(figures[name])
    seconds = figures.pop("seconds", 0.0) / 1e3
    if seconds > 0:
        figures["seconds"] = seconds
    if bridge_tflops is not None:
        figures.setdefault("tflops", bridge_tflops)
    world, length = _as_int(arguments, "world_size"), _as_int(arguments, "seq_length")
    if seconds > 0 and world and length and figures.get("samples"):
        figures.setdefault("tokens_per_s", figures["samples"] * length / seconds / world)
    return figures


def _raise_memory(steps: Steps, gib: float) -> None:
    """Record the memory of the fullest rank; every pipeline rank logs its own."""
    if gib > 0:
        rows = steps.memory
        steps.amend(memory_gib=max(gib, rows))


def _time(steps: Steps, name: str, fastest: float, slowest: float) -> None:
    part = PARTS.get(name)
    if part == "collectives":  # the rank that arrives last does not wait: its time is that of the network
        steps.add_part(part, fastest)
        if name not in BETWEEN_STAGES:
            steps.add_part("waiting", slowest - fastest)
    elif part is not None:
        steps.add_part(part, slowest)
    if part == "data":  # measured inside forward-backward
        steps.add_part("forward_backward", -slowest)
    if name in BETWEEN_RANKS:
        steps.amend(ranks_s={name: (fastest, slowest)})


def _time_slowest(steps: Steps, name: str, seconds: float) -> None:
    """Record a timer of the slowest rank only; a collective's also has the wait for other ranks and is left out."""
    if PARTS.get(name) not in (None, "collectives"):
        _time(steps, name, seconds, seconds)


FORWARD = "the forward pass"  # what the straggler detector times


def _time_stragglers(steps: Steps, found: re.Match[str]) -> None:
    """Record the fastest and slowest rank that Megatron's straggler detector names."""
    fast, slow = ((number(found[place]) or 0.0) / 1e3 for place in (1, 3))
    steps.amend(ranks_s={FORWARD: (fast, slow)}, by_rank_s={FORWARD: {int(found[2]): fast, int(found[4]): slow}})


def _time_ranks(steps: Steps, name: str, times: dict[int, float]) -> None:
    """Record a timer of which the log has the seconds of every rank."""
    if name == SAVE_TIMER:
        steps.block(max(times.values()))
        return
    _time(steps, name, min(times.values()), max(times.values()))
    if name in BETWEEN_RANKS:
        steps.amend(by_rank_s={name: times})


def _as_int(arguments: dict[str, str], name: str) -> int | None:
    value = arguments.get(name, "")
    return int(value) if value.isdigit() else None


def _shell_words(name: str, value: str) -> str:
    """Return a printed value as words of a shell command: Python prints a flag of several values as a list.

    A list of any other flag is one value, as that of --moe-layer-freq, which Megatron evaluates before it prints it.
    """
    flag = parser_flags().get(name)
    if flag is None or flag.type != "list":
        return quote(value)
    found: Any = None
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        found = ast.literal_eval(value)
    return " ".join(quote(str(one)) for one in (found if isinstance(found, list | tuple) else value.split()))


def _run_header(
    arguments: dict[str, str], layout: dict[str, str], total: int | None, gpu: str, samples: int | None
) -> RunHeader:
    """Return what the arguments state; without them, the layout of the line that is printed before them."""
    degrees = {field: int(layout[name]) for name, field in LAYOUT_FIELDS.items() if name in layout}
    degrees = {} if arguments else degrees
    arguments = layout | arguments if arguments else arguments
    flags = tuple(
        f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {_shell_words(name, value)}")
        for name, value in arguments.items()
        if value not in UNSET
    )
    length, batch = _as_int(arguments, "seq_length"), _as_int(arguments, "global_batch_size")
    return RunHeader(
        gpu=gpu,
        world=_as_int(layout | arguments, "world_size"),
        seq_length=length,
        tokens_per_step=length * batch if length and batch else None,
        total_steps=total,
        overrides=degrees | ({"train.global_batch_size": samples} if samples else {}),
        states_layout=bool(degrees),
        arguments=flags,
        off_arguments=tuple(name for name, value in arguments.items() if value in UNSET),
        mock_data=arguments.get("mock_data") == "True",
        mfu_convention="TFLOP/s as Megatron counts them",
    )
