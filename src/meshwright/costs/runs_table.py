"""A table of your own runs: the few columns that matter, checked cell by cell, and its template.

The wide table of published measurements is read leniently, because nobody can correct what was published. Rows of your
own can be corrected, so every cell that cannot be used is an error that names its row, column, value and fix.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from meshwright.clusters import Cluster, cluster
from meshwright.costs.table_cells import CellError, choice, count, lookup, measure
from meshwright.display import plural
from meshwright.errors import InputError, closest
from meshwright.models import ModelSpec, find
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.types import GOALS, Recipe

FRAMEWORKS = {
    "meshwright": "meshwright",
    "megatron-lm": "Megatron-LM",
    "megatron": "Megatron-LM",
    "megatron-bridge": "Megatron-Bridge",
    "torchtitan": "torchtitan",
    "automodel": "AutoModel",
    "nemo-automodel": "AutoModel",
    "kempnerforge": "KempnerForge",
    "deepspeed": "DeepSpeed",
    "fsdp": "FSDP",
    "accelerate": "FSDP",
    "torchtune": "torchtune",
    "nanotron": "nanotron",
}
"""Names of frameworks -> the name in the table of frameworks."""
STRATEGIES = {"fsdp2": "zero3_fsdp", "fsdp": "zero3_fsdp", "zero3": "zero3_fsdp", "hsdp": "hsdp", "zero1": "zero1",
              "zero2": "zero2", "ddp": "ddp", "megatron_fsdp": "megatron_fsdp"}  # fmt: skip
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8-cs", "fp8_tensor": "fp8-cs", "fp8_block": "fp8-block",
              "mxfp8": "fp8-mx", "nvfp4": "nvfp4"}  # fmt: skip
MATMULS = {"fp8": "fp8_tensor", "bf16": "same", "fp16": "same"}
GRAPHS = ("none", "transformer_engine", "full_iteration")
DISPATCHERS = ("alltoall", "deepep", "hybridep")
RECOMPUTE = ("none", "selective", "full")
STATUSES = ("ok", "oom")
LISTED = 10  # wrong cells of a table
SWITCHES = {"true": True, "false": False, "on": True, "off": False, "yes": True, "no": False, "1": True, "0": False}
SHARDED = ("meshwright", "torchtitan", "AutoModel", "KempnerForge", "FSDP", "torchtune", "DeepSpeed")


class Column(NamedTuple):
    """One column: its name, what it holds, what a blank cell means, and other names for it."""

    name: str
    help: str
    blank: str = ""  # empty: the cell is required
    also: tuple[str, ...] = ()


COLUMNS = (
    Column("name", "what you call the run; errors are grouped by it", "the file's name", ("source", "run", "run_id")),
    Column("framework", f"what trained: {', '.join(FRAMEWORKS)}", "meshwright", ("engine",)),
    Column("model", "a model name, a Hugging Face id, or the path of a config.json", "", ("hf_id_or_dims", "model_id")),
    Column("goal", "pretrain, sft or peft", "pretrain", ("mode",)),
    Column("gpus", "the cluster, e.g. 8xH100, 4x8xH100 (nodes x GPUs) or a cluster file", "", ("cluster",)),
    Column("seq_length", "tokens per sample", "", ("seq_len", "sequence_length", "seq")),
    Column("micro_batch_size", "samples per GPU and forward pass", "1", ("mbs", "local_batch_size")),
    Column("global_batch_size", "samples per step, over all GPUs", "", ("gbs", "batch_size")),
    Column("precision", f"{', '.join(PRECISIONS)}", "bf16", ()),
    Column("tp", "tensor parallelism", "1", ("tensor_parallel",)),
    Column("pp", "pipeline parallelism", "1", ("pipeline_parallel",)),
    Column("vp", "chunks of layers per pipeline stage (interleaving)", "the framework's default",
           ("virtual_pipeline",)),
    Column("cp", "context parallelism", "1", ("context_parallel",)),
    Column("ep", "expert parallelism", "1", ("expert_parallel",)),
    Column("sp", f"sequence parallelism: {', '.join(SWITCHES)}", "on with tp above 1", ("sequence_parallel",)),
    Column("strategy", f"data parallelism: {', '.join(STRATEGIES)}", "the framework's default", ("dp_strategy",)),
    Column("recompute", f"{', '.join(RECOMPUTE)} (activation checkpointing)", "the framework's default", ()),
    Column("cuda_graphs", f"Megatron only: {', '.join(GRAPHS)}", "the framework's default", ("cuda_graph_impl",)),
    Column("dispatcher", f"Megatron only, of tokens to experts: {', '.join(DISPATCHERS)}", "the framework's default",
           ()),
    Column("ep_overlap", f"Megatron only, experts' communication behind compute: {', '.join(SWITCHES)}",
           "the framework's default", ("overlap_moe_expert_parallel_comm",)),
    Column("step_time_s", "measured seconds per step; the median after warm-up", "not measured", ("step_s",)),
    Column("tokens_per_s_per_gpu", "measured, in place of step_time_s", "not measured", ("tps", "tok_s")),
    Column("peak_memory_gib", "measured torch.cuda.max_memory_allocated of the fullest GPU, in GiB", "not measured",
           ("peak_mem_gib_allocated", "memory_gib", "peak_gib")),
    Column("status", "ok, or oom if the run ran out of memory (then nothing need be measured)", "ok", ()),
)  # fmt: skip
REQUIRED = tuple(column.name for column in COLUMNS if not column.blank)
CHOICES: dict[str, Sequence[str] | Mapping[str, Any]] = {
    "status": STATUSES, "framework": FRAMEWORKS, "goal": GOALS, "sp": SWITCHES, "strategy": STRATEGIES,
    "precision": PRECISIONS, "recompute": RECOMPUTE, "cuda_graphs": GRAPHS, "dispatcher": DISPATCHERS,
    "ep_overlap": SWITCHES,
}  # fmt: skip
COUNTS = {
    "seq_length": None, "global_batch_size": None, "vp": 0,
    **dict.fromkeys(("tp", "pp", "cp", "ep", "micro_batch_size"), 1),
}  # fmt: skip
"""Columns with integers, and what a blank cell means; None if it may not be blank."""
MEASURES = ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_gib")
WIDE_ONLY = ("precision_class", "recompute_class", "dp_class")
OPTIONAL_WIDE = ("gpu", "n_gpus", "gpus_per_node")  # of the wide table, in place of gpus
EXAMPLES = (
    {
        "name": "titan-8b", "framework": "torchtitan", "model": "llama3-8b", "goal": "pretrain", "gpus": "8xH100",
        "seq_length": "8192", "micro_batch_size": "1", "global_batch_size": "8", "precision": "bf16", "tp": "1",
        "strategy": "fsdp2", "recompute": "selective", "step_time_s": "1.332",
    },
    {
        "name": "lora-8b", "framework": "automodel", "model": "llama3.1-8b", "goal": "peft", "gpus": "1xH100",
        "seq_length": "4096", "micro_batch_size": "2", "global_batch_size": "32", "precision": "bf16",
        "recompute": "none", "tokens_per_s_per_gpu": "12473",
    },
)  # fmt: skip
"""Two runs as a user would write them, on one GPU type, as `calibrate --out` needs; both were measured (torchao's
documentation, and AutoModel's)."""


def template() -> str:
    """Return a table that `accuracy` and `calibrate` accept as it is: explanations, header and two example rows."""
    lines = [
        "# Your runs, one row each: replace the two examples. Lines that start with # are ignored.",
        "# meshwright accuracy runs.csv: how wrong are the estimates?",
        "# meshwright calibrate runs.csv --out mine.toml: fits a profile for --calibration.",
        "#",
    ]
    width = max(len(column.name) for column in COLUMNS)
    for column in COLUMNS:
        blank = f"blank: {column.blank}" if column.blank else "required"
        lines.append(f"# {column.name:<{width}}  {column.help}; {blank}")
    lines.append("# A row needs step_time_s, tokens_per_s_per_gpu, peak_memory_gib or status oom.")
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(EXAMPLES)
    return "\n".join(lines) + "\n" + text.getvalue()


class Row(NamedTuple):
    """A row of the wide table, the case if the row determines it by itself, its cluster, and the line it is from."""

    line: int
    wide: dict[str, str]
    case: Case | None
    cluster: Cluster  # with what a cluster file says of its links and memory, for which the table has no columns


class _Wrong(NamedTuple):
    """A wrong cell, with the number of its row and its line."""

    number: int
    line: int
    error: CellError


def read_cells(text: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the header and the rows of a CSV with their line numbers; comments and blank lines are left out.

    Commas, semicolons or tabs separate cells, whichever the header has.
    """
    kept = [(n, line) for n, line in enumerate(text.lstrip("\ufeff").splitlines(), 1) if line.strip(" ,;\t\r")]
    kept = [(n, line) for n, line in kept if not line.lstrip().lstrip('"').startswith("#")]
    if not kept:
        return [], []
    head = kept[0][1]
    separator = max(",;\t", key=head.count)
    reader = csv.reader((line for _, line in kept), delimiter=separator)
    header = [cell.strip() for cell in next(reader)]
    rows = []
    for cells in reader:
        values = {name: cell.strip() for name, cell in zip(header, cells, strict=False) if name}
        if len(cells) > len(header):
            values["__extra__"] = separator.join(cells[len(header) :])
        rows.append((kept[reader.line_num - 1][0], values))
    return header, rows


def is_wide(header: Sequence[str], wide: Sequence[str], path: str) -> bool:
    """Return whether a header is that of the published measurements, which has classes of free texts."""
    if not any(name in header for name in WIDE_ONLY):
        return False
    missing = [name for name in wide if name not in header]
    if missing:
        fix = ("meshwright accuracy --template > runs.csv shows a shorter table",)
        raise InputError(f"lacks the columns {', '.join(missing)}", field="file", value=path, fix=fix)
    return True


def parse(header: Sequence[str], rows: Sequence[tuple[int, dict[str, str]]], path: str) -> tuple[list[Row], list[str]]:
    """Return every row in the form of the wide table, and notes; raise InputError for the first cell that is wrong."""
    names, notes = _names(header, path)
    found, errors = [], list[_Wrong]()
    for number, (line, cells) in enumerate(rows, start=1):
        ours = {names[key]: cell for key, cell in cells.items() if key in names}
        try:
            found.append(_row(number, line, ours, cells))
        except CellError as error:
            every = _wrong_cells(ours)
            listed = every if any(one.column == error.column for one in every) else [error, *every]
            errors += [_Wrong(number, line, one) for one in listed]
    if errors:
        raise _table_error(errors, path)
    return found, notes


def _table_error(errors: Sequence[_Wrong], path: str) -> InputError:
    """Return the error for the first wrong cell of a table, which lists the next ones with their fixes."""
    first, *others = errors
    lines = [
        f"\n  line {one.line}, column {one.error.column} = {one.error.value or 'blank'}: {one.error}"
        + (f" (fix: {' | '.join(one.error.fix)})" if one.error.fix else "")
        for one in others[: LISTED - 1]
    ]
    more = len(others) - len(lines)
    if more:
        lines.append(f"\n  and {plural(more, 'more wrong cell')}")
    also = f"; also wrong:{''.join(lines)}" if lines else ""
    where = f"row {first.number} (line {first.line}) of {path}, column {first.error.column}"
    return InputError(f"{first.error}{also}", field=where, value=first.error.value, fix=tuple(first.error.fix))


def _wrong_cells(cells: Mapping[str, str]) -> list[CellError]:
    """Return the errors of the cells of a row, each by itself, in the order of the columns."""
    readers: dict[str, Callable[[], object]] = {
        "model": lambda: _model(cells.get("model", "")),
        "gpus": lambda: _cluster(cells),
        **{name: partial(choice, cells, name, known, "") for name, known in CHOICES.items()},
        **{name: partial(count, cells, name, blank) for name, blank in COUNTS.items()},
        **{name: partial(measure, cells, name) for name in MEASURES},
    }
    found = []
    for name in sorted(readers, key=[column.name for column in COLUMNS].index):
        try:
            readers[name]()
        except CellError as error:
            found.append(error)
    return found


def _names(header: Sequence[str], path: str) -> tuple[dict[str, str], list[str]]:
    """Return our name of every column in a header; columns without one are noted, or errors if they look misspelled."""
    known = {name: column.name for column in COLUMNS for name in (column.name, *column.also)}
    known |= {name: name for name in (*OPTIONAL_WIDE, "peak_mem_gib_reserved", "recipe")}
    names, ignored = {}, []
    for title in header:
        plain = title.lower().replace(" ", "_").replace("-", "_")
        if plain in known:
            names[title] = known[plain]
        elif title:
            ignored.append(title)
    twice = [name for name in set(names.values()) if list(names.values()).count(name) > 1]
    if twice:
        same = [title for title, name in names.items() if name == twice[0]]
        raise InputError(f"the columns {' and '.join(same)} mean the same", field="file", value=path, fix=("keep one",))
    missing = [name for name in REQUIRED if name not in names.values()]
    if "gpus" in missing and "gpu" in names.values() and "n_gpus" in names.values():
        missing.remove("gpus")
    if missing:
        others = [column.name for column in COLUMNS if column.name not in (*names.values(), *missing)]
        near = _renamed(ignored, missing, others)
        unknown = f"; unknown column{'s' * (len(ignored) > 1)} {', '.join(ignored)}" if ignored else ""
        raise InputError(
            f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}{unknown}",
            field="file",
            value=path,
            fix=(*near, "meshwright accuracy --template > runs.csv shows every column"),
        )
    for title in ignored:
        optional = [column.name for column in COLUMNS if column.name not in names.values()]
        if near := _near(title, optional):
            raise InputError(
                f"unknown column; did you mean {near[0]}?", field=f"column of {path}", value=title,
                fix=(f"rename it to {near[0]}{_in_seconds(title, near[0])}", "delete it"),
            )  # fmt: skip
    return names, [f"ignored columns: {', '.join(ignored)}"] if ignored else []


def _renamed(ignored: Sequence[str], missing: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return how to rename unknown columns: to the missing ones that they may mean, else to optional ones."""
    meant = {one[0]: name for name in missing if (one := closest(name, ignored, 1))}
    for title in ignored:
        if title not in meant and (one := closest(title, missing, 1) or _near(title, others)):
            meant[title] = one[0]
    return [f"rename {title} to {name}{_in_seconds(title, name)}" for title, name in meant.items()]


def _in_seconds(title: str, name: str) -> str:
    """Return what a column of milliseconds needs besides another name."""
    is_ms = name == "step_time_s" and re.search(r"(_|\b)(ms|millis\w*)\b", title.lower())
    return ", and divide its values by 1,000 (milliseconds)" if is_ms else ""


def _near(title: str, names: Sequence[str]) -> list[str]:
    """Return the column that an unknown one may mean: a similar name, or the measured time of a step."""
    is_step = title.lower().startswith("step") and "step_time_s" in names
    return closest(title, names, 1) or (["step_time_s"] if is_step else [])


def _row(number: int, line: int, cells: Mapping[str, str], raw: Mapping[str, str]) -> Row:
    if "__extra__" in raw:
        raise CellError("(after the last)", raw["__extra__"], "the row has more cells than the header",
                         ('quote a cell that contains the separator: "1,024"',))  # fmt: skip
    status = choice(cells, "status", STATUSES, "ok")
    framework = choice(cells, "framework", FRAMEWORKS, "meshwright")
    goal = choice(cells, "goal", GOALS, "pretrain")
    model = _model(cells.get("model", ""))
    place = _cluster(cells)
    counts = {name: count(cells, name) for name in ("tp", "pp", "cp", "ep", "micro_batch_size")}
    length, batch = count(cells, "seq_length", None), count(cells, "global_batch_size", None)
    measured = {name: measure(cells, name) for name in ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_gib",
                                                        "peak_mem_gib_reserved")}  # fmt: skip
    if status == "ok" and not any(measured.values()):
        reason = "nothing was measured: step_time_s, tokens_per_s_per_gpu and peak_memory_gib are blank"
        raise CellError("step_time_s", "", reason, ("fill one of them", "status oom if it ran out of memory"))
    _check_layout(counts, place.world, batch)
    switch = choice(cells, "sp", SWITCHES, "")
    sequence_parallel = SWITCHES[switch] if switch else counts["tp"] > 1
    if sequence_parallel and counts["tp"] == 1:
        raise CellError("sp", cells["sp"], "sequence parallelism needs tp above 1", ("sp false", "tp 2"))
    strategy = choice(cells, "strategy", STRATEGIES, "")
    precision = choice(cells, "precision", PRECISIONS, "bf16")
    recompute = choice(cells, "recompute", RECOMPUTE, "")
    theirs = FRAMEWORKS[framework]
    chunks = _chunks(cells, counts["pp"])
    dp_class = STRATEGIES[strategy or ("fsdp2" if theirs in SHARDED else "zero1")]
    wide = {
        "row_id": str(number), "source": cells.get("name") or "", "framework": theirs, "framework_version": "",
        "model": cells["model"], "hf_id_or_dims": cells["model"], "mode": goal, "gpu": place.gpu.name,
        "gpus_per_node": str(place.gpus_per_node), "n_gpus": str(place.world), "seq_len": str(length),
        "mbs": str(counts["micro_batch_size"]), "gbs": str(batch), "precision": precision.replace("_", "-"),
        **{name: str(counts[name]) for name in ("tp", "pp", "cp", "ep")}, "vp": str(chunks or ""),
        **_megatron_cells(cells, theirs),
        "sp": str(sequence_parallel).lower() if switch else "",
        "dp_strategy": strategy.replace("_", "-"), "recompute": recompute, "status": status,
        "precision_class": PRECISIONS[precision], "recompute_class": recompute, "dp_class": dp_class,
        **{name: str(value or "") for name, value in measured.items() if name != "peak_memory_gib"},
        "peak_mem_gib_allocated": str(measured["peak_memory_gib"] or ""),
    }  # fmt: skip
    if theirs != "meshwright":
        return Row(line, wide, None, place)
    settings = {
        **{f"layout.{name}": value for name, value in counts.items()},
        "layout.sp": sequence_parallel, "layout.vp": chunks or 1, "layout.stage_layers": (),
        "layout.pp_schedule": "interleaved_1f1b" if (chunks or 1) > 1 else "1f1b",
        "layout.dp_shard": -1, "layout.dp_replicate": 1, "layout.etp": 1, "data.seq_length": length,
        "train.global_batch_size": batch, "precision.matmul": MATMULS.get(precision, precision),
        **({"layout.recompute": recompute, "layout.recompute_modules": ()} if recompute else {}),
        **({"layout.strategy": {"fsdp": "fsdp2", "zero3": "fsdp2", "hsdp": "fsdp2"}.get(strategy, strategy)}
           if strategy else {}),
    }  # fmt: skip
    return Row(line, wide, _own_case(cells, model, place, goal, settings), place)


def _chunks(cells: Mapping[str, str], pp: int) -> int:
    """Return the chunks per stage; 0 if the row does not say."""
    found = count(cells, "vp", 0)
    if found > 1 and pp == 1:
        raise CellError("vp", cells["vp"], "chunks of a pipeline need pp above 1", ("vp 1", "pp 2"))
    return found


def _megatron_cells(cells: Mapping[str, str], framework: str) -> dict[str, str]:
    """Return the settings that only Megatron has, as the wide table states them."""
    graphs, dispatcher = choice(cells, "cuda_graphs", GRAPHS, ""), choice(cells, "dispatcher", DISPATCHERS, "")
    overlap = choice(cells, "ep_overlap", SWITCHES, "")
    named = next((name for name in ("cuda_graphs", "dispatcher", "ep_overlap") if cells.get(name)), "")
    if named and not framework.startswith("Megatron"):
        reason = f"only Megatron-LM and Megatron-Bridge have this setting; the row's framework is {framework}"
        raise CellError(named, cells[named], reason, ("leave the cell blank", "framework megatron-lm"))
    notes = [f"dispatcher {dispatcher}"] if dispatcher else []
    notes += [f"ep overlap {'on' if SWITCHES[overlap] else 'off'}"] if overlap else []
    return {"compile_cudagraph": f"cudagraph_impl={graphs}" if graphs else "", "notes": "; ".join(notes)}


def _own_case(cells: Mapping[str, str], model: ModelSpec, place: Cluster, goal: str, settings: dict[str, Any]) -> Case:
    """Return a run of our engine: the model's recipe, as `estimate` uses it, with the row's layout and batch."""
    name = cells.get("recipe") or f"{model.name}_{goal}_config"
    if index.is_known(name):
        recipe = index.load(name)
    elif cells.get("recipe"):
        near = closest(name, index.names())
        raise CellError("recipe", name, f"unknown recipe; did you mean {' or '.join(near)}?", near)
    else:
        recipe = Recipe(name="measured", model=model.name, goal=goal, cluster=str(place))  # type: ignore[arg-type]
    try:
        changed, _ = override.change(recipe, settings)
    except (InputError, msgspec.ValidationError) as error:
        reason = error.message if isinstance(error, InputError) else str(error)
        raise CellError("framework", "meshwright", reason) from None
    return Case(changed, model, place)


def _model(text: str) -> ModelSpec:
    return lookup("model", text, "llama3-8b", find)


def _cluster(cells: Mapping[str, str]) -> Cluster:
    text = cells.get("gpus", "")
    if not text and cells.get("gpu"):
        world, size = count(cells, "n_gpus", None), count(cells, "gpus_per_node", 0)
        full_nodes = size and world % size == 0 and world > size
        text = f"{world // size}x{size}x{cells['gpu']}" if full_nodes else f"{world}x{cells['gpu']}"
    return lookup("gpus", text, "8xH100", cluster)


def _check_layout(counts: Mapping[str, int], world: int, batch: int) -> None:
    ranks = counts["tp"] * counts["pp"] * counts["cp"]
    if world % ranks:
        shown = " × ".join(f"{name} {counts[name]}" for name in ("tp", "pp", "cp"))
        raise CellError("tp", str(counts["tp"]), f"{shown} = {ranks} does not divide the {world} GPUs",
                         ("correct tp, pp, cp or gpus",))  # fmt: skip
    per_pass = counts["micro_batch_size"] * (world // ranks)
    if batch % per_pass:
        raise CellError("global_batch_size", str(batch), f"is not a multiple of micro_batch_size "
                         f"{counts['micro_batch_size']} × {world // ranks} data-parallel ranks = {per_pass}",
                         (str(max(1, round(batch / per_pass)) * per_pass),))  # fmt: skip
