"""What a measurement row leaves open and its benchmark, its own numbers or common practice decide."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from meshwright.costs.measurements_knobs import as_int, number
from meshwright.models import ModelSpec, MoE

Row = Mapping[str, str]

USUAL_CHUNK = 2  # layers per chunk of an interleaved pipeline whose row does not say how many chunks it has
USUAL_ROUNDS = 8  # micro batches per pipeline stage of a row that does not say how many there are
COARSE_EXPERTS = 16  # up to so many experts per layer, each is as wide as a dense block
BEST_LAYOUT = re.compile(r"best [\w-]+ configuration")
_INTERLEAVED = re.compile(r"interleaved|\bVP\b[^;]* not stated")
_SCHEDULE = re.compile(r"pipeline schedule ([\w-]+)|\b(DualPipe)\b", re.IGNORECASE)
# V-Half has about half the bubble of 1F1B and V-Min about all of it (arXiv:2405.15362).
_SCHEDULES = {
    "zbb": "interleaved_zero_bubble",
    "zero-bubble": "interleaved_zero_bubble",
    "zbv": "zbv",
    "zbv-formatted": "zbv",
    "v-half": "interleaved_1f1b",
    "v-min": "1f1b",
    "dualpipe": "dualpipe_v",
}


class Benchmark(msgspec.Struct, frozen=True):
    """What a benchmark's definition fixes for a model; 0: nothing."""

    framework: str  # part of its name
    model: str  # start of the row's model
    seq_length: int
    micro_batch_size: int = 0
    rounds: int = 0  # micro batches per step
    vp: int = 0  # chunks per pipeline stage


# MLPerf's FLUX.1: 256 tokens of an image of 256 x 256, and 256 of text. Primus: AMD's examples/megatron/configs. NeMo:
# scripts/performance/recommended_model_configs.
BENCHMARKS = (
    Benchmark("MLPerf", "flux.1", 512),
    Benchmark("NeMo/Megatron-Core", "nemotron4_340b", 4096, vp=12),
    Benchmark("Primus", "llama2_7b", 4096, 4, 64),
    Benchmark("Primus", "qwen3_235b_a22b", 4096, 4, 32),
    Benchmark("Primus", "mixtral_8x22b", 8192, 2, 4),
)


def with_benchmark(row: dict[str, str]) -> dict[str, str]:
    """Return the row with the length, micro batches and chunks that its benchmark defines, where it states none.

    If the benchmark defines no length, it is the mean number of tokens per sample.
    """
    found = next((b for b in BENCHMARKS if b.framework in row["framework"] and row["model"].startswith(b.model)), None)
    known: dict[str, int] = {}
    alone = not row.get("dp_strategy") and all(row.get(name) == "1" for name in ("tp", "pp", "cp"))
    if alone and not (row["n_gpus"] or row.get("dp_shard") or row.get("dp_replicate")):
        known["n_gpus"] = 1  # nothing is distributed
    if as_int(row, "seq_len", 0) <= 0:
        known["seq_len"] = found.seq_length if found else _mean_length(row)
    if found and as_int(row, "pp") > 1 and not row.get("vp"):
        known["vp"] = found.vp
    if found and not (row["gbs"] or row.get("grad_accum")):
        known["grad_accum"] = found.rounds
        known["mbs"] = 0 if row["mbs"] else found.micro_batch_size
    return {**row, **{name: str(value) for name, value in known.items() if value}}


def _mean_length(row: Row) -> int:
    tokens = number(row, "step_time_s") * number(row, "tokens_per_s_per_gpu") * as_int(row, "n_gpus", 0)
    batch = as_int(row, "gbs", 0)
    return round(tokens / batch) if batch else 0


def usual_vp(notes: str, layers: int, pp: int, chunk: int) -> int:
    """Return the chunks per stage of a row that states none: `chunk` layers each, or two if its notes say interleaved.

    Embedding and head count as two layers if only that divides.
    """
    size = chunk or (USUAL_CHUNK if _INTERLEAVED.search(notes) else 0)
    if pp == 1 or not size:
        return 1
    tried = ((count, one) for one in (size, size - 1) if one for count in (layers, layers + 2))
    return next((count // (pp * one) for count, one in tried if count % (pp * one) == 0), 1)


def usual_etp(default: str, model: ModelSpec, tp: int) -> int:
    """Return the ranks that share an expert if a row does not say: fine-grained experts are not cut."""
    fine = any(isinstance(layer.ffn, MoE) and layer.ffn.experts > COARSE_EXPERTS for layer in model.layers)
    return 1 if default == "one" or (default == "one if fine" and fine) else tp


def schedule_of(notes: str, vp: int) -> str:
    """Return the pipeline schedule that the notes name, else interleaved or plain 1F1B."""
    found = _SCHEDULE.search(notes)
    named = _SCHEDULES.get((found[1] or found[2]).lower(), "") if found else ""
    return named or ("interleaved_1f1b" if vp > 1 else "1f1b")
