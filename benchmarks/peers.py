"""Compare memory and step time estimates of Meshwright and of pip-installable estimators for the same jobs: one table.

python benchmarks/peers.py --python PEERS_ENV/bin/python

The peers are in their own environment (benchmarks/peers_requirements.txt); each runs in a process of that
interpreter (peers_answers.py); one that cannot be imported is shown as not installed. Writes
benchmarks/results/peers.json and docs/peers.md; `--page` regenerates the page from the JSON alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from peers_answers import PEERS, Answer

HERE = Path(__file__).parent
RESULT = HERE / "results" / "peers.json"
PAGE = HERE.parent / "docs" / "peers.md"


@dataclass(frozen=True)
class Measured:
    """A published figure for the job."""

    gib: float
    kind: str  # which counter of torch: allocated or reserved
    source: str
    step_s: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job in terms that every peer supports."""

    name: str
    model: str
    gpus: str
    seq: int
    micro_batch: int
    global_batch: int
    zero: int  # 0: nothing sharded, 1: optimizer state, 3: weights too (FSDP)
    recompute: str
    engine: str = "meshwright"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    state: str = "fp32"  # dtype of Adam's weights and moments; bf16 means pure bf16 training
    lora_rank: int = 0
    more: tuple[str, ...] = ()  # Meshwright overrides that no peer supports
    measured: Measured | None = None


KEMPNER = "KempnerForge benchmarks/mfu_scaling, 2026-04"
KEMPNER_RUN = {"seq": 4096, "recompute": "full", "engine": "kempnerforge", "state": "bf16"}
JOBS = (
    Job(
        name="Llama-3-8B, 8xH100, FSDP",
        model="llama3-8b",
        gpus="8xH100",
        seq=8192,
        micro_batch=1,
        global_batch=8,
        zero=3,
        recompute="none",
    ),
    Job(
        name="Llama-3-8B, 8xH100, FSDP, torchtitan",
        model="llama3-8b",
        gpus="8xH100",
        seq=8192,
        micro_batch=2,
        global_batch=16,
        zero=3,
        recompute="selective",
        engine="torchtitan",
        measured=Measured(
            gib=82.4,
            kind="reserved",
            source="torchtitan benchmarks/llama3_h100_202412, table 1",
            step_s=2.84,
            note="H100 of 96 GB HBM2e at 500 W; with torch.compile 77.0 GiB and 2.46 s",
        ),
    ),
    Job(
        name="Llama-3-8B, 1xH100",
        model="llama3-8b",
        gpus="1xH100",
        seq=4096,
        micro_batch=1,
        global_batch=1,
        zero=0,
        recompute="none",
    ),
    Job(
        name="Llama-3-8B shape, 1xH200, pure bf16",
        model="llama3-8b",
        gpus="1xH200",
        micro_batch=2,
        global_batch=8,
        zero=3,
        more=("kernels.compile=true",),
        measured=Measured(
            gib=80.7,
            kind="allocated",
            source=KEMPNER,
            step_s=3.13,
            note="Micro batch 2 as in its launch script (report: 4); ran without FSDP, priced as FSDP of one rank",
        ),
        **KEMPNER_RUN,
    ),
    Job(
        name="Llama-3-8B shape, 4xH200, FSDP, pure bf16",
        model="llama3-8b",
        gpus="4xH200",
        micro_batch=4,
        global_batch=32,
        zero=3,
        more=("kernels.compile=true",),
        measured=Measured(gib=61.1, kind="allocated", source=KEMPNER, step_s=3.36),
        **KEMPNER_RUN,
    ),
    Job(
        name="Llama-3-70B, 64xH100, TP4 PP4 ZeRO-1",
        model="llama3-70b",
        gpus="64xH100",
        seq=8192,
        micro_batch=1,
        global_batch=128,
        zero=1,
        recompute="none",
        engine="megatron",
        tp=4,
        pp=4,
    ),
    Job(
        name="Llama-3-70B shape, 32xH200, TP4 FSDP8, pure bf16",
        model="llama3-70b",
        gpus="8x4xH200",
        micro_batch=2,
        global_batch=64,
        zero=3,
        tp=4,
        more=("kernels.compile=true",),
        measured=Measured(gib=93.2, kind="allocated", source=KEMPNER, step_s=14.85),
        **KEMPNER_RUN,
    ),
    Job(
        name="Qwen3-30B-A3B, 16xH100, EP16 ZeRO-1",
        model="qwen3-30b-a3b",
        gpus="16xH100",
        seq=4096,
        micro_batch=1,
        global_batch=1024,
        zero=1,
        recompute="none",
        engine="megatron",
        ep=16,
        more=("moe.force_balance=true", "moe.ep_overlap=true", "moe.dispatcher=hybridep"),
        measured=Measured(
            gib=62.17,
            kind="allocated",
            source="Megatron-Bridge skills/nemo-mbridge-perf-moe-comm-overlap/card.yaml, 2026-07",
            step_s=20.99,
            note="Rank 0, balanced routing, EP overlap; recompute not stated, none assumed",
        ),
    ),
    Job(
        name="Llama-3.1-8B LoRA, rank 16 on attention, 1xA6000",
        model="llama3-8b",
        gpus="1xA6000",
        seq=2048,
        micro_batch=1,
        global_batch=1,
        zero=0,
        recompute="full",
        state="bf16",
        lora_rank=16,
        more=('peft.targets=["qkv","proj"]',),
        measured=Measured(
            gib=19.14, kind="allocated", source="README of vramcalc 0.1.2 (20.55 GB), transformers and peft"
        ),
    ),
)
# Other names, tried with `pip download --no-deps` on 2026-11-15.
LEFT_OUT = {
    "not found by pip": "simumax, vram-calculator, gpu-mem-estimator, gpu-memory-estimator, llm-memory-estimator, "
    "vram-estimator, llm-vram-calculator, transformer-math, llmcompass, astra-sim, megatron-memory-estimator",
    "inference only": "hf-mem, llm-mem, whichllm, canirun, llmfit, aiconfigurator, genz-llm, vidur",
    "FLOPs only": "flops-profiler, calflops",
    "another project under that name": "calculon, llmem, paleo, llm-optimizer",
    "no estimator in the package": "torchtitan, torchtune",
}


def ask_meshwright(job: Job) -> Answer:
    """Return Meshwright's estimate of exactly this layout."""
    from meshwright import api

    overrides = [
        f"data.seq_length={job.seq}",
        f"train.global_batch_size={job.global_batch}",
        f"layout.micro_batch_size={job.micro_batch}",
        f"layout.strategy={ {0: 'ddp', 1: 'zero1', 3: 'fsdp2'}[job.zero] }",
        f"layout.tp={job.tp}",
        f"layout.pp={job.pp}",
        f"layout.ep={job.ep}",
        f"layout.sp={str(job.tp > 1).lower()}",
        f"layout.recompute={job.recompute}",
        f"kernels.loss={'vocab_parallel' if job.engine == 'megatron' else 'plain'}",
        *("layout.vp=1", "layout.cp=1", "layout.etp=1", "layout.dp_shard=-1", "layout.dp_replicate=1"),
        *("layout.recompute_modules=[]", "layout.pp_schedule=1f1b", "layout.stage_layers=[]", "layout.offload=none"),
        *((f"peft.rank={job.lora_rank}",) if job.lora_rank else ()),
        *job.more,
    ]
    goal = "peft" if job.lora_rank else "pretrain"
    found = api.estimate(job.model, gpus=job.gpus, goal=goal, engine=job.engine, overrides=overrides).estimate
    return {
        "memory_gib": round(float(found.memory.total), 2),
        "allocated_gib": round(float(found.memory.allocated), 2),
        "step_s": round(float(found.step_s), 3),
        "band_pct": {"memory": found.band.memory_pct, "step": found.band.step_pct},
        "exact": True,
        "note": "with CUDA context, communicators and allocator loss",
    }


def job_for_peers(job: Job) -> Answer:
    """Return the job for the peers, with the model's Hugging Face config and the cluster shape."""
    from meshwright import api

    spec, cluster = api.find_model(job.model), api.cluster(job.gpus)
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    config = {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "intermediate_size": ffn.width,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_seq_length,
        "tie_word_embeddings": spec.tied,
    }
    if hasattr(ffn, "experts"):
        config |= {"moe_intermediate_size": ffn.width, "num_experts": ffn.experts, "num_experts_per_tok": ffn.topk}
    shape = {"world": cluster.world, "gpus_per_node": min(cluster.world, cluster.gpus_per_node)}
    return asdict(job) | shape | {"config": config, "params": spec.params.total}


def ask_peer(python: str, name: str, jobs: Sequence[Answer]) -> Answer:
    """Return a peer's version and answers, from a process of the peers' interpreter."""
    command = [python, str(HERE / "peers_answers.py"), name]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=600)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        error = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        return {"version": None, "answers": [{"unsupported": f"failed: {error}"} for _ in jobs]}


def compare(python: str) -> Answer:
    """Estimate every job with Meshwright and all peers."""
    args = [job_for_peers(job) for job in JOBS]
    peers = {name: ask_peer(python, name, args) for name in PEERS}
    if not any(p["version"] for p in peers.values()):
        raise SystemExit("none of the peers is installed there (benchmarks/peers_requirements.txt); nothing written")
    rows = []
    for i, job in enumerate(JOBS):
        answers = {"Meshwright": ask_meshwright(job)} | {name: p["answers"][i] for name, p in peers.items()}
        rows.append({"job": asdict(job), "answers": answers})
    return {
        "date": date.today().isoformat(),
        "command": "python benchmarks/peers.py --python PEERS_ENV/bin/python",
        "versions": {PEERS[name].package: p["version"] or "not installed" for name, p in peers.items()},
        "rows": rows,
    }


def main_table(rows: Sequence[Answer]) -> tuple[list[str], list[list[str]]]:
    """Return the table of GiB per GPU of all estimators, and seconds per step of those that have them."""
    timed = ["Meshwright", *(name for name, peer in PEERS.items() if peer.time != "no")]
    headers = ["#", "job", "measured", "Meshwright", *PEERS, "s: measured", *(f"s: {name}" for name in timed)]
    table = []
    for number, row in enumerate(rows, 1):
        job, answers, measured = row["job"], row["answers"], row["job"]["measured"]
        text = f"{job['name']}; seq {job['seq']}, micro batch {job['micro_batch']}, recompute {job['recompute']}"
        published = f"{measured['gib']:.1f} {measured['kind']}" if measured else "–"
        memory = [_gib(answers[name]) for name in ("Meshwright", *PEERS)]
        seconds = [_seconds(measured or {}), *(_seconds(answers[name]) for name in timed)]
        table.append([str(number), text, published, *memory, *seconds])
    return headers, table


def _gib(answer: Answer) -> str:
    if "unsupported" in answer:
        return "not installed" if answer["unsupported"].startswith("not installed") else "–"
    text = f"{'' if answer['exact'] else '~'}{answer['memory_gib']:.1f}"
    return f"{text} ({answer['allocated_gib']:.1f})" if "allocated_gib" in answer else text


def _seconds(answer: Answer) -> str:
    return f"{answer['step_s']:.2f}" if answer.get("step_s") else "–"


def error_table(rows: Sequence[Answer]) -> list[list[str]]:
    """Return percentage errors from the measured figure, for exact answers."""
    table = []
    for number, row in enumerate(rows, 1):
        measured, answers = row["job"]["measured"], row["answers"]
        if measured is None:
            continue
        gib = {name: a["memory_gib"] for name, a in answers.items() if a.get("exact")}
        if measured["kind"] == "allocated":
            gib["Meshwright"] = answers["Meshwright"]["allocated_gib"]
        errors = {name: round(100 * (value / measured["gib"] - 1)) for name, value in gib.items()}
        cells = [f"{errors[name]:+d} %" if name in errors else "–" for name in ("Meshwright", *PEERS)]
        table.append([f"{number} {row['job']['name']}", *cells])
    return table


def spread_table(rows: Sequence[Answer]) -> list[list[str]]:
    """Return the smallest and largest exact answer to each job."""
    table = []
    for number, row in enumerate(rows, 1):
        found = sorted((a["memory_gib"], name) for name, a in row["answers"].items() if a.get("exact"))
        (low, lowest), (high, highest) = found[0], found[-1]
        if len(found) > 1:
            ends = [f"{low:.1f} ({lowest})", f"{high:.1f} ({highest})", f"{high / low:.1f}x"]
            table.append([f"{number} {row['job']['name']}", str(len(found)), *ends])
    return table


def gap_table(rows: Sequence[Answer]) -> list[list[str]]:
    """Return peer, reason and the jobs without an exact answer."""
    gaps: dict[tuple[str, str], list[str]] = {}
    for number, row in enumerate(rows, 1):
        for name, a in row["answers"].items():
            if not a.get("exact"):
                reason = a.get("unsupported") or f"~ {a['note']}"
                gaps.setdefault((name, reason), []).append(str(number))
    return [[name, reason, ", ".join(jobs)] for (name, reason), jobs in sorted(gaps.items())]


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (headers, ["---"] * len(headers), *rows))


PAGE_TEXT = """<!-- generated by benchmarks/peers.py; do not edit -->
# The same jobs in other estimators

Run on {date}: {versions}.
`{command}`, with
the packages of `benchmarks/peers_requirements.txt`; every answer with its note is in
`benchmarks/results/peers.json`.

GiB per GPU, then seconds per step. bf16 compute with fp32 Adam unless the job says pure bf16. Meshwright: the total,
and in brackets the part torch counts as allocated. `~`: the peer cannot express the job, this is the nearest it can.
`–`: no answer.

{main}
## Compared with measurements

Exact answers only. Meshwright's allocated part is compared with allocated figures and its total with the reserved one;
peers' answers are taken as they are. Meshwright's constants were fitted to published runs, including those of
torchtitan, KempnerForge and Megatron-Bridge, so these are not errors on unseen runs, except for LoRA.
vramcalc was adjusted on the LoRA run it published; the other peers are fixed formulas.

{errors}
{sources}

## Spread of the answers

Including Meshwright. Part of the spread is due to what is counted: DeepSpeed and accelerate count no activations,
hf-vram-calc a flat share.

{spread}
## Who covers what

{covers}
llm-analysis is run with a FLOPs efficiency of 0.5, the value its README gives for training, and with MLP widths times
3/2, as in its own Llama files. It counts one embedding for input and output, and uses hidden size / heads as the head
size.

Jobs for which a peer has no answer, or only a similar one (`~`):

{gaps}
Other packages considered:

{left_out}
"""


def page(result: Answer) -> str:
    """Return docs/peers.md."""
    rows = result["rows"]
    measured = [(n, row["job"]["measured"]) for n, row in enumerate(rows, 1) if row["job"]["measured"]]
    everyone = ["Meshwright", *PEERS]
    return PAGE_TEXT.format(
        date=result["date"],
        command=result["command"],
        versions=", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        main=markdown(*main_table(rows)),
        errors=markdown(["job", *everyone], error_table(rows)),
        sources="\n".join(f"- {n}: {m['source']}.{' ' + m['note'] + '.' if m['note'] else ''}" for n, m in measured),
        spread=markdown(["job", "answers", "smallest", "largest", "ratio"], spread_table(rows)),
        covers=markdown(
            ["peer", "memory counts", "layouts", "time"],
            [[name, peer.counts, peer.layouts, peer.time] for name, peer in PEERS.items()],
        ),
        gaps=markdown(["peer", "why", "jobs"], gap_table(rows)),
        left_out="\n".join(f"- {reason}: {names}." for reason, names in LEFT_OUT.items()),
    )


def main() -> None:
    """Run all estimators, print the table, write the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment with the peers")
    parser.add_argument("--page", action="store_true", help="only write docs/peers.md from the JSON")
    args = parser.parse_args()
    if shutil.which(args.python) is None:
        parser.error(f"no interpreter at {args.python}")
    if not args.page:
        RESULT.write_text(json.dumps(compare(args.python), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    headers, rows = main_table(result["rows"])
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for cells in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    PAGE.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
