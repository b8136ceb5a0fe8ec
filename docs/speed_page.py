"""The page docs/speed.md: the engine's speed on one GPU, from the result files of the benchmarks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tables import table

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


def page() -> str:
    """Our engine and a plain loop on one GPU, and the gain of each optimization."""
    found = json.loads((RESULTS / "engine_h200_2026-11-15.json").read_text())
    ladder = json.loads((RESULTS / "engine_ladder_h200_2026-11-15.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    text = f"""# Speed on one GPU

{found["device"]}, {versions}, {found["date"]}. {found["convention"]}.
Command: `{found["command"]}`. The plain loop is transformers with per-block compile, SDPA, fused AdamW and the loss in
checkpointed chunks. Ratios are within one call; the machine's own speed varied by 2 % between calls.

"""
    text += table(
        ("case", "micro batch", "tokens/s", "over the plain loop", "peak GiB"),
        [
            (
                row["name"],
                row["micro_batch"],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['ratio']:.3f}" if "ratio" in row else "1",
                f"{row['peak_allocated_gib']:.1f}",
            )
            for row in found["rows"]
        ],
    )
    text += """
## Gain of each optimization

Llama-3-8B shape unless stated otherwise; each call is compared with its own plain loop. The GPU runs at its 700 W limit
throughout (about 1.5 of 1.98 GHz), so energy per token is what counts (mJ, last column).

"""
    rows = [(i, row) for i, call in enumerate(ladder["calls"], 1) for row in call]
    text += table(
        ("call", "case", "tokens/s", "ratio", "peak GiB", "mJ/token"),
        [
            (
                i,
                row["case"],
                f"{row['tokens_per_s']:,.0f}",
                "" if row["ratio"] is None else f"{row['ratio']:.3f}",
                f"{row['peak_gib']:.1f}",
                f"{row['mj_per_token']:.1f}",
            )
            for i, row in rows
        ],
    )
    return (
        text
        + _as_typed()
        + _beside_peers()
        + _least_time()
        + _compared_steps()
        + _compared_ranks()
        + _calibration_set()
    )


def _as_typed() -> str:
    """What users type, measured: `recommend` and the command that it prints."""
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("as_typed_h200_*.json"))]
    text = f"""
## As typed

{runs[0]["hardware"]}; `{runs[0]["made_by"]}`: what `recommend` prints, run as `bench` for 8 steps.
Estimates are those of `bench`, as a difference from what was measured; memory is what the allocator reserved.

"""
    return text + table(
        ("date", "asked or typed", "tokens/s", "MFU", "estimate", "allocated GiB", "reserved GiB", "estimate"),
        [
            (
                found["date"],
                f"`{row['case']}`",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['mfu']:.0%}",
                f"{row['estimate']['step_s'] / row['step_s'] - 1:+.0%} time",
                f"{row['memory_gib']['peak']:.1f}",
                f"{row['memory_gib']['reserved']:.1f}",
                f"{row['estimate']['memory_gib'] / row['memory_gib']['reserved'] - 1:+.0%}",
            )
            for found in runs
            for row in found["rows"]
        ],
    )


def _beside_peers() -> str:
    """Speed beside torchtitan and a plain loop; empty until measured."""
    path = RESULTS / "peer_speed.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    text = f"""
## Beside torchtitan and a plain loop

{found["device"]}, {versions}, {found["date"]}; `{found["made_by"]}`. Ours is the command that `recommend` prints.
All train the same model, sequence length, sequences per step and trained part, with states in the same formats, each at
its best micro batch of a short list. The plain loop is transformers with per-block compile, and peft for adapters.
Ratios are our speed over theirs; memory is what the allocator reserved. Commands and all tries are in
`benchmarks/results/peer_speed.json`.

"""
    return text + table(
        ("case", "states", "ours", "torchtitan", "ratio", "plain loop", "ratio"),
        [
            (
                row["name"],
                row["states"],
                _peer_cell(row, "ours"),
                *(cell for kind in ("torchtitan", "plain") for cell in (_peer_cell(row, kind), _peer_ratio(row, kind))),
            )
            for row in found["rows"]
        ],
    )


def _peer_cell(row: Mapping[str, Any], kind: str) -> str:
    tries, found = row["tries"].get(kind, []), _best_try(row, kind)
    if found is None:
        return tries[-1]["error"][:80].replace("|", "/") if tries else ""
    memory = found.get("peak_reserved_gib")
    return f"{found['tokens_per_s']:,.0f} tokens/s" + (f", {memory:.0f} GiB" if memory else "")


def _best_try(row: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the fastest try that ran; None if none did."""
    ran = [one for one in row["tries"].get(kind, []) if "tokens_per_s" in one]
    return max(ran, key=lambda one: one["tokens_per_s"], default=None)


def _peer_ratio(row: Mapping[str, Any], kind: str) -> str:
    return f"{row['ratios'][kind]:.2f}" if kind in row.get("ratios", {}) else ""


def _least_time() -> str:
    """How fast steps of the peers' table can be: their matrix products and attention alone."""
    found = json.loads((RESULTS / "step_floor.json").read_text())
    peers = {row["name"]: row for row in json.loads((RESULTS / "peer_speed.json").read_text())["rows"]}
    text = f"""
## The least time of a step

{found["device"]}, torch {found["torch"]}, {found["date"]}; `{found["made_by"]}`: the matrix products
and the attention of a step alone, one after the other until power and clock have settled (685 to 693 of 700 W, 1.44 to
1.49 of 1.98 GHz). Norms, activations, casts to fp8, loss, optimizer and data are not in it, so a step with these
kernels is slower than this. The last column is the speed that the aimed-at ratios over the peers above need, as a share
of this limit.

"""
    return text + table(
        ("case", "matrix products", "limit", "ours", "of the limit", "aimed at, of the limit"),
        [_least_time_row(row, peers[row["name"]]) for row in found["rows"]],
    )


def _least_time_row(row: Mapping[str, Any], peers: Mapping[str, Any]) -> tuple[str, ...]:
    best = {kind: found["tokens_per_s"] for kind in peers["tries"] if (found := _best_try(peers, kind)) is not None}
    limit, ours = row["tokens_per_s"], best["ours"]
    goals = (
        f"{ratio:.2f} × {kind}: {best[kind] * ratio / limit:.0%}"
        for kind, ratio in peers["goals"].items()
        if kind in best
    )
    products = f"{row['products_tflops']:,.0f} TFLOP/s"
    return (
        row["name"],
        products,
        f"{limit:,.0f} tokens/s",
        f"{ours:,.0f} tokens/s",
        f"{ours / limit:.0%}",
        "; ".join(goals),
    )


def _compared_steps() -> str:
    """How many training steps of each family equal an fp32 step on the GPU."""
    found = json.loads((RESULTS / "gpu_parity.json").read_text())
    text = f"""
## Right on the GPU

{found["device"]}, torch {found["torch"]}, transformers {found["transformers"]}, {found["date"]};
`python benchmarks/gpu_parity.py`: one training step of a small model of every family against an fp32 step in eager mode
on the same GPU, loss and the gradient of every tensor. The cases cover every pair of {{eager, compiled}},
{{unpacked, packed}}, micro batch, goal, recompute, precision and loss. Refused combinations end with an error before
training: by a rule (the wrong one too since it was found), or where transformers has no text-only class of a model or
does not keep packed documents apart.

"""
    by_family = _statuses(found["rows"], lambda row: str(row["case"]).split()[0])
    return text + table(("family", "right", "refused", "wrong"), by_family)


def _compared_ranks() -> str:
    """How many steps of ranks that share the GPU equal those of one rank, by layout."""
    found = json.loads((RESULTS / "gpu_ranks.json").read_text())
    text = f"""
Ranks that share this GPU over gloo, {found["date"]}; `python benchmarks/gpu_ranks.py`: two training steps of 2 or 4
ranks against one rank, in fp32, bf16 and fp8, eager and compiled, for eight families.

"""
    by_layout = _statuses(found["rows"], lambda row: str(row["case"]).split()[2])
    return text + table(("layout", "right", "refused", "wrong"), by_layout)


def _statuses(rows: Iterable[Mapping[str, Any]], name_of: Callable[[Mapping[str, Any]], str]) -> list[tuple[str, ...]]:
    """Return the number of rows of each status by name, and those of all rows."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (name_of(row), "all"):
            counts.setdefault(name, Counter())[row["status"]] += 1
    names = [*sorted(name for name in counts if name != "all"), "all"]
    return [(name, *(str(counts[name][status] or "") for status in ("ok", "refused", "wrong"))) for name in names]


def _calibration_set() -> str:
    """The cases that our engine's rates are fitted to."""
    found = json.loads((RESULTS / "calibration_set.json").read_text())
    text = f"""
## Calibration set

{found["hardware"]}, {found["date"]}; `{found["made_by"]}`: {len(found["rows"])} cases of `bench`,
8 steps each, which the engine's rates are fitted to (`python benchmarks/fit_costs.py --engine`). A case is a model, a
goal, tokens per sample and the micro batch; then recompute, an fp8 format, `eager`, the number of layers if it is not
the model's, and `xN` micro batches per step. Cases with * were measured before the engine became faster; they are not
fitted.

"""
    return text + table(
        ("case", "date", "tokens/s", "MFU", "step s", "allocated GiB", "reserved GiB"),
        [
            (
                row["case"] + (" *" if "superseded" in row else ""),
                row["date"],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['mfu']:.0%}",
                f"{row['step_s']:.3f}",
                f"{row['memory_gib']['peak']:.1f}",
                f"{row['memory_gib']['reserved']:.1f}",
            )
            for row in sorted(found["rows"], key=lambda row: str(row["case"]))
        ],
    )
