"""Published measurements parsed into cases, each with what was measured or the reason it cannot be used.

A row states a model, GPUs, a layout and what was measured. Blank cells take documented defaults: degrees of parallelism
1, the micro batch that the global batch implies, no recompute, and the framework's usual settings
(measurements_frameworks.toml). Nothing depends on which table a row comes from. A row that names one of our recipes
means that recipe on its reference cluster, and its other cells are informative. A row that contradicts itself is left
out, and says so. Its time is the step time, else follows from tokens/s, else from model TFLOP/s and their convention.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.clusters import Cluster, Gpu, cluster, gpu
from meshwright.costs.flops import flops_per_token
from meshwright.costs.measurements_defaults import (
    BEST_LAYOUT,
    USUAL_ROUNDS,
    schedule_of,
    usual_etp,
    usual_vp,
    with_benchmark,
)
from meshwright.costs.measurements_knobs import (
    Framework,
    as_int,
    flops_convention,
    framework_of,
    kernels_of,
    network_gb_s,
    number,
    open_knobs,
    precision_of,
    recompute_of,
    routing_of,
    strategy_of,
    usual_graphs,
)
from meshwright.costs.measurements_models import UnknownModelError, model_of_row
from meshwright.costs.memory import Where, memory
from meshwright.costs.runs_table import Row, is_wide, parse, read_cells
from meshwright.costs.time import step_time
from meshwright.errors import InputError, MeshwrightError, closest
from meshwright.models import MLA, ModelSpec
from meshwright.models.spec import is_scan
from meshwright.recipes import index
from meshwright.recipes.capabilities import V_SHAPED
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import GOALS, Recipe

REQUIRED = (
    "source", "framework", "model", "hf_id_or_dims", "mode", "gpu", "gpus_per_node", "n_gpus", "seq_len", "mbs", "gbs",
    "precision", "tp", "pp", "cp", "dp_strategy", "recompute", "step_time_s", "tokens_per_s_per_gpu", "status",
    "precision_class", "recompute_class", "dp_class",
)  # fmt: skip
# Values that may differ between the rows of one batch; all others must be equal.
COLUMNS = (
    "tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "sp", "micro_batch_size", "recompute", "strategy",
    "pp_schedule", "world", "nvlink_domain", "gpus_per_node", "global_batch_size", "seq_length", "embedding_as_layer",
    "head_as_layer",
)  # fmt: skip
USUAL_TOKENS = 16384
CONTRADICTION = "the row contradicts itself"
RATES = f"{CONTRADICTION}: tokens/s and step time"
SAME_RATE = 0.1  # relative difference of tokens/s and step time that rounding and warm-up explain
SAME_FLOPS = 0.05  # relative difference of the two FLOPs conventions below which it does not matter which was used
BY_STEP, BY_TOKENS, BY_TFLOPS = "step time", "tokens/s", "TFLOP/s"
_CHECKOUT = re.compile(r"\bbridge [0-9a-f]{7}\b")  # library recipes of Megatron-Bridge: without graphs, plain dispatch
_META_HOST = re.compile(r"Meta dev host")


class Measurement(msgspec.Struct, frozen=True):
    """One row: its case or why there is none, and what was measured."""

    row_id: str
    source: str
    tier: str
    mem_tier: str
    gpu: str
    case: Case | None
    unsupported: str  # why there is no case; empty if there is one
    step_s: float  # 0 if not measured
    allocated_gib: float  # 0 if not measured
    reserved_gib: float
    oom: bool
    tiny: bool  # a test model whose step is launch-bound
    stage: Where  # pipeline stage whose memory was measured
    values: dict[str, Any]  # every value the case replaces
    key: tuple[Any, ...]  # rows with equal keys can be estimated as one batch
    model: ModelSpec | None = None
    timed_by: str = ""  # what step_s is from: step time, tokens/s or TFLOP/s
    open_knobs: tuple[str, ...] = ()  # settings that the row does not state
    doubt: str = ""  # why its speed may not be that of sound GPUs


class _UnusableError(ValueError):
    """Why a row has no case."""


def read(path: str | Path) -> list[Measurement]:
    """Read every row of a CSV: a table of published measurements, or one of your own runs (`runs_table`)."""
    return read_with_notes(path)[0]


def read_with_notes(path: str | Path) -> tuple[list[Measurement], list[str]]:
    """Read every row of a CSV, and what was ignored in it."""
    text = _text(Path(path))
    try:
        if is_wide(next(csv.reader(text.splitlines()[:1]), []), REQUIRED, str(path)):
            wide = [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(text.splitlines(keepends=True))]
            if not wide:
                raise _no_rows(path)
            return [_measured(row, i) for i, row in enumerate(wide)], []
        header, cells = read_cells(text)
    except csv.Error as error:
        raise InputError(f"cannot be read as CSV: {error}", field="file", value=str(path)) from None
    if not header:
        raise _no_rows(path)
    rows, notes = parse(header, cells, str(path))
    if not rows:
        raise _no_rows(path)
    usable, contradictions = [], []
    for row in rows:
        if (contradiction := _rate_contradiction(row)) is not None:
            contradictions.append(contradiction)
        else:
            usable.append(_own_measurement(row, Path(path)))
    if not usable:  # nothing is left to compare
        raise InputError("; ".join(contradictions), field="file", value=str(path), fix=("correct the rows",))
    return usable, [*notes, *(f"left out: {contradiction}" for contradiction in contradictions)]


def _rate_contradiction(row: Row) -> str | None:
    """Return what is wrong with a row of your own runs whose tokens/s and step time contradict each other."""
    if row.case is not None:
        samples, length, world = row.case.global_batch_size, row.case.seq_length, int(row.case.cluster.world)
    else:
        samples, length, world = (as_int(row.wide, name, 0) for name in ("gbs", "seq_len", "n_gpus"))
    if not _rates_differ(row.wide, float(samples * length), world):
        return None
    rate, step = number(row.wide, "tokens_per_s_per_gpu"), number(row.wide, "step_time_s")
    return (
        f"row {row.wide['row_id']} (line {row.line}), {row.wide['model']}: {RATES}: {samples} samples of {length:,}"
        f" tokens on {world} GPUs at {rate:g} tokens_per_s_per_gpu take {samples * length / (world * rate):.3g} s, but"
        f" step_time_s is {step:g}"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        near = closest(path.name, [one.name for one in path.parent.glob("*.csv")], 2)
        fix = tuple(str(path.parent / name) for name in near) or ("meshwright accuracy --template > runs.csv",)
        raise InputError(f"cannot be read: {error.strerror}", field="file", value=str(path), fix=fix) from None
    except UnicodeDecodeError:
        reason = "is not UTF-8 text; a spreadsheet has to be saved as CSV (UTF-8)"
        raise InputError(reason, field="file", value=str(path), fix=("save it as CSV UTF-8",)) from None


def _no_rows(path: str | Path) -> InputError:
    fix = ("meshwright accuracy --template > runs.csv",)
    return InputError("has no rows", field="file", value=str(path), fix=fix)


def _own_measurement(row: Row, path: Path) -> Measurement:
    """Return a row of your own runs as a measurement; a row that cannot be predicted is an error."""
    wide = {**row.wide, "source": row.wide["source"] or path.stem}
    where = f"row {wide['row_id']} (line {row.line}) of {path}"
    if row.case is not None:
        return of_case(row.case, wide)
    found = _measured(wide, int(wide["row_id"]) - 1, row.cluster)
    if found.case is None:
        raise InputError(found.unsupported, field=where, value=wide["model"], fix=("correct or delete the row",))
    return found


def of_case(case: Case, wide: dict[str, str]) -> Measurement:
    """Return what was measured for a case that is known exactly."""
    values = {column: getattr(case, column) for column in COLUMNS}
    return Measurement(
        row_id=wide["row_id"],
        source=wide["source"],
        tier="A",
        mem_tier="A",
        gpu=case.cluster.gpu.name,
        case=case,
        unsupported="",
        step_s=_step_s(wide, case),
        allocated_gib=number(wide, "peak_mem_gib_allocated"),
        reserved_gib=number(wide, "peak_mem_gib_reserved"),
        oom=wide.get("status", "").upper() == "OOM",
        tiny=False,
        stage="worst",
        values=values,
        key=("own", wide["source"], wide["row_id"]),
        model=case.model,
    )


def _measured(row: dict[str, str], place: int, on: Cluster | None = None) -> Measurement:
    """Return a row as a measurement; `on` is its cluster if that is more than the columns of a row state."""
    reason, case, model, step_s = "", None, None, number(row, "step_time_s")
    values: dict[str, Any] = {}
    key: tuple[Any, ...] = ()
    row = with_benchmark(row)
    try:
        case, values, key, model = (_best if BEST_LAYOUT.search(row.get("notes", "")) else _roomy)(row, on)
        step_s = _step_s(row, case)
    except (_UnusableError, UnknownModelError) as error:
        reason, case = str(error), None
    return Measurement(
        row_id=row.get("row_id") or str(place + 1),
        source=row["source"],
        tier=row.get("tier", "A"),
        mem_tier=row.get("mem_tier", "A"),
        gpu=row["gpu"],
        case=case,
        unsupported=reason,
        step_s=step_s,
        allocated_gib=number(row, "peak_mem_gib_allocated"),
        reserved_gib=number(row, "peak_mem_gib_reserved"),
        oom=row["status"].upper() == "OOM",
        tiny="tiny_model" in row.get("flag", ""),
        stage=_stage(row.get("notes", ""), values.get("memory_stage", "worst")),
        values=values,
        key=key,
        model=model,
        timed_by=_timed_by(row),
        open_knobs=open_knobs(row, values, kernels_of(row) | routing_of(row)) if case and not row.get("recipe") else (),
    )


def _stage(notes: str, usual: Where) -> Where:
    """Return the pipeline stage whose memory was measured: as noted, else where the framework logs it."""
    if "LAST rank" in notes:
        return "last"
    return "first" if re.search(r"rank-0 peak|allocated rank0", notes) else usual


def _timed_by(row: dict[str, str]) -> str:
    """Return the column that the time of a row follows from; empty if it states none."""
    columns = {"step_time_s": BY_STEP, "tokens_per_s_per_gpu": BY_TOKENS, "tflops_per_gpu_model": BY_TFLOPS}
    return next((by for column, by in columns.items() if number(row, column)), "")


def _step_s(row: dict[str, str], case: Case) -> float:
    """Return the measured seconds per step; 0 if the row has no time."""
    timed_by = _timed_by(row)
    if timed_by == BY_STEP:
        return number(row, "step_time_s")
    tokens = float(case.global_batch_size * case.seq_length) / int(case.world)
    if timed_by == BY_TOKENS:
        return tokens / number(row, "tokens_per_s_per_gpu")
    if not timed_by:
        return 0.0
    convention, causal, full = flops_convention(row), flops_per_token(case), flops_per_token(case, "full")
    if convention is None and full > (1 + SAME_FLOPS) * causal:
        raise _UnusableError("TFLOP/s without their FLOPs convention")
    return float(tokens * (full if convention == "full" else causal) / (1e12 * number(row, "tflops_per_gpu_model")))


def _case(row: dict[str, str], on: Cluster | None) -> tuple[Case, dict[str, Any], tuple[Any, ...], ModelSpec]:
    if row.get("recipe"):
        return _case_of_recipe(row["recipe"])
    entry = framework_of(row["framework"], row.get("framework_version", ""))
    if entry is None:
        raise _UnusableError(f"no profile for framework {row['framework']}")
    if entry.unsupported:
        raise _UnusableError(entry.unsupported)
    _refuse_unusable(row)
    model = model_of_row(row["model"], row["hf_id_or_dims"], number(row, "n_params_b"))
    if heads := set(re.findall(r"MTP-(\d)", row.get("notes", ""))):
        model = msgspec.structs.replace(model, mtp_layers=len(heads))
    place = on or _cluster(row)
    values = _values(row, entry, model, place)
    if row["mode"] not in GOALS:
        raise _UnusableError(f"unknown mode {row['mode']}")
    recipe = _recipe(row["mode"])
    fixed = {name: value for name, value in values.items() if name not in COLUMNS}
    links = (place.gpu.network_gb_s, place.own_links)
    key = (model, place.gpu, *links, entry.engine, row["mode"], tuple(sorted(fixed.items())))
    case = Case(recipe, model, place, entry.engine, values)  # type: ignore[arg-type]  # from our own table
    return case, values, key, model


def _roomy(row: dict[str, str], on: Cluster | None) -> tuple[Case, dict[str, Any], tuple[Any, ...], ModelSpec]:
    """Return the case of a row; if it states no batch at all, with the largest usual micro batch that fits."""
    found = _case(row, on)
    while not (row["mbs"] or row["gbs"]) and (micro := int(found[0].micro_batch_size)) > 1:
        if memory(found[0]).fits:
            break
        found = _case({**row, "mbs": str(micro // 2), "gbs": ""}, on)
    return found


def _best(row: dict[str, str], on: Cluster | None) -> tuple[Case, dict[str, Any], tuple[Any, ...], ModelSpec]:
    """Return the fastest case that fits, for a row that says that its layout is the best one, but not which it is."""
    found: list[tuple[bool, float, int, tuple[Case, dict[str, Any], tuple[Any, ...], ModelSpec]]] = []
    for tp, pp in product((1, 2, 4, 8), (1, 2, 4, 8)):
        try:
            given = {**row, "tp": row["tp"] or str(tp), "pp": row["pp"] or str(pp), "recompute_class": "none"}
            built = _case(given, on)
        except _UnusableError:
            continue
        found.append((not memory(built[0]).fits, float(step_time(built[0]).step_s), len(found), built))
    if not found:
        return _case(row, on)
    return min(found)[-1]


def _case_of_recipe(name: str) -> tuple[Case, dict[str, Any], tuple[Any, ...], ModelSpec]:
    """Return a shipped recipe on its reference cluster, as the dry run executed it: with balanced experts."""
    try:
        recipe = index.load(name)
    except MeshwrightError:
        raise _UnusableError("the recipe is no longer shipped") from None
    model = model_of(recipe)
    case = Case(recipe, model, cluster(recipe.cluster)).replace(force_balance=True)
    return case, {column: getattr(case, column) for column in COLUMNS}, ("recipe", name), model


@lru_cache(maxsize=8)
def _recipe(goal: str) -> Recipe:
    return Recipe(name="measured", model="measured", goal=goal, cluster="")  # type: ignore[arg-type]  # checked


def _refuse_unusable(row: dict[str, str]) -> None:
    flag = row.get("flag", "")
    if as_int(row, "n_gpus", 0) < 1:
        raise _UnusableError("number of GPUs not stated")
    if as_int(row, "seq_len", 0) < 1:
        raise _UnusableError("sequence length not stated")
    _refuse_contradiction(row)
    if "not stated: use ratios only" in flag:
        raise _UnusableError("batch and sequence not stated")
    if "counts real tokens only" in flag:
        raise _UnusableError("padded tokens are not counted")
    if not row["tp"] and not row["pp"] and as_int(row, "n_gpus") > 8:
        raise _UnusableError("parallelism not stated")


def _refuse_contradiction(row: dict[str, str]) -> None:
    """Refuse a row whose own numbers disagree."""
    flag, world = row.get("flag", ""), as_int(row, "n_gpus")
    if _rates_differ(row, as_int(row, "gbs", 0) * as_int(row, "seq_len", 0), world):
        raise _UnusableError(RATES)
    shards, copies = (as_int(row, name, 0) for name in ("dp_shard", "dp_replicate"))
    known = bool(shards and copies) or (bool(shards or copies) and row["dp_class"] != "hsdp")
    ranks = max(shards, 1) * max(copies, 1) * math.prod(max(as_int(row, name), 1) for name in ("tp", "pp", "cp"))
    if known and world not in (ranks, ranks * max(as_int(row, "ep"), 1)):  # experts may have ranks of their own
        raise _UnusableError(f"{CONTRADICTION}: GPUs and dp x tp x pp x cp")
    if any(mark in flag for mark in ("INCONSISTENT", "!= #GPUs", "rows print the same")):  # of those, one is a misprint
        raise _UnusableError(f"{CONTRADICTION}, as its source notes")


def _rates_differ(row: dict[str, str], tokens: float, world: int) -> bool:
    """Return whether tokens/s and step time are both stated and contradict each other; `tokens` are those of a step."""
    step, rate = number(row, "step_time_s"), number(row, "tokens_per_s_per_gpu")
    return bool(step and rate and tokens) and abs(tokens / (step * world * rate) - 1) > SAME_RATE


def _cluster(row: dict[str, str]) -> Cluster:
    world, size = as_int(row, "n_gpus"), as_int(row, "gpus_per_node", 8)
    size = min(size, world)
    if world % size:
        raise _UnusableError("the GPUs do not fill the nodes evenly")
    name = row["gpu"]
    if name == "H100-SXM" and _META_HOST.search(row.get("notes", "") + row.get("interconnect", "")):
        name = "H100-96"  # Meta's development hosts run their H100 at 500 W; Llama 3 had 700 W
    return Cluster(_gpu(name, row.get("interconnect", ""), as_int(row, "gpus_per_node", 8)), world // size, size)


@lru_cache(maxsize=512)
def _gpu(name: str, interconnect: str, gpus_per_node: int) -> Gpu:
    try:
        known = gpu(name)
    except MeshwrightError:
        raise _UnusableError(f"unknown GPU {name}") from None
    rate = network_gb_s(interconnect, gpus_per_node)
    return msgspec.structs.replace(known, network_gb_s=rate) if rate else known


def _values(row: dict[str, str], entry: Framework, model: ModelSpec, place: Cluster) -> dict[str, Any]:
    """Return every value of the case that the row, the framework's defaults or the model determine."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.defaults.items()}
    stated = kernels_of(row) | routing_of(row)
    values |= precision_of(row) | recompute_of(row, entry.defaults, entry.engine)
    if "cuda_graphs" in entry.defaults:
        values |= usual_graphs(row, bool(model.moe), _scans(model), values["matmul"])
    values |= stated
    values |= _layout(row, entry, values, place, model)
    values.setdefault("speed_profile", entry.profile or entry.engine)
    values["mtp_loss"] = 0.1 if values.pop("mtp", False) and model.mtp_layer else 0.0
    values.pop("etp_default", None)
    if values.pop("split_by_cost", False) and values["pp"] > 1:
        values["stage_layers"] = split_by_cost(model, values["pp"])
    if entry.engine == "megatron" and _has_mla(model) and entry.defaults.get("mtp"):
        values["moments"] = "bf16"  # NVIDIA's recipes of these models keep the moments in bf16
    if "bridge@" in row.get("framework_version", ""):
        values |= {"grads": "fp32", "reduce": "fp32"}  # library recipes of a checkout; performance containers: bf16
    if _CHECKOUT.search(row.get("framework_version", "")) and not row.get("compile_cudagraph"):
        values |= {"cuda_graphs": "none", "dispatcher": values["dispatcher"] if "dispatcher" in stated else "alltoall"}
        values["speed_profile"] = "megatron_untuned"  # without the pinning and garbage collection of tuned runs
    if "muon" in row.get("optimizer", "").lower():
        values["optimizer_name"] = "muon"
    if "nf4" in row["precision"]:
        values["method"] = "qlora"
    if "mp=PURE" in row["dp_strategy"]:
        values["reduce"] = "bf16"
    return {**values, "as_run": tuple(sorted(values))}


def _layout(
    row: dict[str, str], entry: Framework, values: dict[str, Any], place: Cluster, model: ModelSpec
) -> dict[str, Any]:
    tp, pp, vp, cp, ep = (max(as_int(row, name), 1) for name in ("tp", "pp", "vp", "cp", "ep"))
    world, strategy, chunk = place.world, strategy_of(row, place.world), values.pop("chunk_layers", 0)
    vp = vp if row.get("vp") else usual_vp(row.get("notes", ""), model.num_layers, pp, chunk)
    schedule = schedule_of(row.get("notes", ""), vp)
    if schedule in V_SHAPED and pp > 1:
        vp = 2  # a rank has the two ends of the V: one chunk on the way down, one on the way up
    ranks = tp * pp * cp * (ep if entry.engine == "kempnerforge" else 1)
    if ranks > world or world % ranks:
        raise _UnusableError("tp x pp x cp does not divide the GPUs")
    dp = world // ranks
    micro, batch = _batches(row, dp, pp)
    stated = {"true": True, "false": False}.get(row.get("sp", "").split("(")[0].lower())
    sp = (values.get("sp", False) if stated is None else stated) and tp > 1
    if entry.engine == "kempnerforge":  # it uses sequence parallelism only for dense models without a pipeline
        sp = sp and pp == 1 and not model.moe
    etp = as_int(row, "etp", usual_etp(values.pop("etp", ""), model, tp))
    etp = etp if model.moe and etp * ep <= world // pp else 1
    ends = _ends_as_layers(model.num_layers, pp * vp)
    given = _chunks_with_mtp(model, pp * vp) if values.get("mtp") and pp > 1 and model.mtp_layer else ()
    shard = re.search(r"zero1 group=(\d+)", row["dp_strategy"])
    group = int(shard[1]) if shard else as_int(row, "dp_shard", 0) if row["dp_class"] == "hsdp" else 0
    group = group if group and dp % group == 0 else dp
    return {
        "tp": tp, "pp": pp, "vp": vp, "cp": cp, "ep": ep, "etp": etp, "sp": sp, "strategy": strategy, "world": world,
        "nvlink_domain": place.nvlink_domain, "gpus_per_node": place.gpus_per_node,
        "micro_batch_size": micro, "global_batch_size": batch,
        "seq_length": as_int(row, "seq_len"), "pp_schedule": schedule,
        "stage_layers": given,
        "dp_shard": group, "dp_replicate": dp // group, "embedding_as_layer": ends[0], "head_as_layer": ends[1],
        "tp_comm_overlap": bool(values.get("tp_comm_overlap", False)) and not model.moe,
    }  # fmt: skip


def _batches(row: dict[str, str], dp: int, pp: int) -> tuple[int, int]:
    """Return micro and global batch size; each follows from the other and the accumulation if it is blank.

    If neither is stated, a pipeline is assumed to run single samples, and anything else about 16,000 tokens at a time.
    """
    micro, batch, rounds = (as_int(row, name, 0) for name in ("mbs", "gbs", "grad_accum"))
    if pp > 1 and micro and not (batch or rounds or number(row, "step_time_s")) and number(row, "tokens_per_s_per_gpu"):
        rounds = USUAL_ROUNDS * pp
    if not batch and number(row, "step_time_s") and number(row, "tokens_per_s_per_gpu"):
        tokens = number(row, "step_time_s") * number(row, "tokens_per_s_per_gpu") * as_int(row, "n_gpus")
        batch = round(tokens / as_int(row, "seq_len"))
    if not micro:
        usual = 1 if pp > 1 else max(USUAL_TOKENS // as_int(row, "seq_len"), 1)
        micro = max(batch // (dp * rounds), 1) if batch and rounds else gcd(batch // dp, usual)
    return micro, batch or micro * dp * max(rounds, 1)


def _ends_as_layers(layers: int, chunks: int) -> tuple[bool, bool]:
    """Return whether embedding and head count as layers: the split of 126 layers into 128 chunks implies it."""
    if layers % chunks == 0:
        return False, False
    if (layers + 2) % chunks == 0:
        return True, True
    return False, (layers + 1) % chunks == 0


def split_by_cost(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Return layers per stage if the head counts as the layers that have as many parameters (nanotron)."""
    layer = sum(group.count * group.layer.params(model.hidden) for group in model.groups) / model.num_layers
    total = model.num_layers + model.vocab * model.hidden / layer
    ends = [min(math.ceil(total * (i + 1) / stages - 1e-9), model.num_layers) for i in range(stages)]
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _chunks_with_mtp(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Return layers per chunk as in NVIDIA's recipes of DeepSeek-V3: MTP modules and loss count as layers at the end.

    61 layers in 16 chunks are 15 of 4 and one of 1, which also has the module and the loss.
    """
    size = -(-(model.num_layers + model.mtp_layers + 1) // chunks)
    full_chunks, rest = divmod(model.num_layers, size)
    return (*[size] * full_chunks, rest, *[0] * chunks)[:chunks] if full_chunks < chunks else ()


def _has_mla(model: ModelSpec) -> bool:
    return bool(model.mixers(MLA))


def _scans(model: ModelSpec) -> bool:
    return any(is_scan(group.layer.mixer) for group in model.groups if group.layer.mixer is not None)


def batches(rows: Sequence[Measurement]) -> Iterator[tuple[Case, list[int]]]:
    """Group rows that differ only in columns: one case with numpy columns, and the indices of its rows."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.case is not None:
            groups[row.key].append(place)
    for places in groups.values():
        first = rows[places[0]].case
        assert first is not None
        columns = {name: np.array([rows[p].values[name] for p in places]) for name in COLUMNS}
        yield first.replace(**columns), places
