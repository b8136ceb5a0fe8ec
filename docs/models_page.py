"""Generate the page of models, and of the types of models that are read and trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tables import table

from meshwright import models
from meshwright.models.readers.architectures import TYPES_WITHOUT_CLASS, WITHOUT_CLASS
from meshwright.recipes.engine_models import UNSPLIT

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def page() -> str:
    rows = []
    for m in models.all_specs():
        p = m.params
        published = f"{m.published_total / 1e9:g}" if m.published_total else ""
        rows.append(
            (
                f"`{m.name}`",
                m.hf_id,
                m.family,
                m.num_layers,
                m.hidden,
                f"{p.total / 1e9:.3f}",
                f"{p.active / 1e9:.3f}",
                published,
                m.source,
            )
        )
    headers = ("model", "Hugging Face id", "family", "layers", "hidden", "total B", "active B", "published B", "source")
    return (
        f"# Models\n\n{len(rows)} models; counts are exact by construction, without multi-token-prediction modules.\n\n"
        + table(headers, rows)
        + _architectures()
        + _trained_types()
    )


def _trained_types() -> str:
    """Return which decoder types our engine trains and how, from the last sweep."""
    found = json.loads((RESULTS / "engine_types.json").read_text(encoding="utf-8"))
    trained = [row for row in found["rows"] if row.get("parity") == "yes"]
    refused = [row for row in found["rows"] if row not in trained]
    ways = {way: [row for row in trained if row["way"] == way] for way in _WAYS}
    counts = [
        (name, *(sum(row.get(check) == "yes" for row in rows) for check in _CHECKS), ", ".join(_types(rows)))
        for (way, rows), name in zip(ways.items(), _WAYS.values(), strict=True)
    ]
    headers = ("the engine runs", *_CHECKS.values(), "model_type")
    packs = _types(row for row in ways["transformers"] if row["packing"])
    whole = [f"`{name}` ({why})" for name, why in UNSPLIT.items()]
    failed = [
        f"- `{row['type']}`, {what}: {row[check]}"
        for row in trained
        for check, what in _CHECKS.items()
        if row.get(check, "yes") != "yes"
    ]
    alone = _types(row for row in trained if "ranks" not in row)
    unstaged = _types(row for row in trained if not {"stages", "unsplit"} & {*row})
    reasons = [f"- `{row['type']}`: {row.get('reason') or row.get('parity')}" for row in refused]
    return (
        f"\n## Trained types\n\n`make engine-types` trains a small model of every decoder type of transformers "
        f"{found['transformers']} on CPUs, in fp32: {len(trained)} of {len(found['rows'])}. Loss and gradients of a "
        "step equal those of a plain loop over transformers' model; two ranks (FSDP2), two pipeline stages and full "
        "recompute equal one rank; adapters start at the model's loss; the exported folder has the trained loss in "
        "transformers.\n\n"
        f"{table(headers, counts)}\nTypes that transformers runs have data parallelism (DDP, FSDP2, HSDP), recompute, "
        "compile and adapters; TP, CP and EP are refused. Pipeline stages are whole blocks that run one after the "
        f"other on hidden states alone; not of {', '.join(whole)}. Packed samples keep documents "
        f"apart in {len(packs)} of them ({', '.join(packs)}); "
        "in the others `data.packing` is turned off with a note.\n\n"
        + (f"Not run on two ranks: {', '.join(alone)}.\n\n" if alone else "")
        + (f"Not run on two stages since the column exists: {', '.join(unstaged)}.\n\n" if unstaged else "")
        + "\n".join([*failed, "Refused, because the engine lacks", "", *reasons])
        + "\n"
    )


_WAYS = {"layers": "layers of its own", "transformers": "transformers' forward pass"}
_CHECKS = {
    "parity": "1 rank",
    "ranks": "2 ranks",
    "stages": "2 stages",
    "recompute": "recompute",
    "lora": "LoRA",
    "export": "export",
}


def _types(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"`{row['type']}`" for row in rows]


def _architectures() -> str:
    """Return which decoder types of transformers a config.json may have, from the last sweep."""
    found = json.loads((RESULTS / "decoders.json").read_text(encoding="utf-8"))
    types = {row["type"]: row for row in found["rows"] if row["decoder"]}
    by_result = {word: [f"`{n}`" for n, row in types.items() if row["result"] == word] for word in _MEANINGS}
    rows = [(meaning, len(by_result[word]), ", ".join(by_result[word])) for word, meaning in _MEANINGS.items()]
    without = ", ".join(f"`{name}`" for name in dict.fromkeys((*WITHOUT_CLASS, *TYPES_WITHOUT_CLASS)))
    return (
        "\n## Architectures\n\nAny other model is planned from its config.json: by path, or by its hub id. The "
        "config.json of a hub id outside the catalogue is read from the local hub cache, else downloaded if "
        "`huggingface_hub` is installed and the hub answers (`--offline` or `HF_HUB_OFFLINE=1` prevents it; "
        "`meshwright web` needs `--hub`). Nothing else is downloaded, and a repository's code is never run.\n\n"
        "`benchmarks/decoders.py` builds every "
        f"decoder type of transformers {found['transformers']} without data and compares parameter counts; a wrong one "
        f"fails it.\n\n{table(('from config.json', 'types', 'model_type'), rows)}\nAlso read, without a class in "
        f"transformers: {without}. Inspected types need transformers: it builds the model without weights, the "
        "parameters are counted, FLOPs follow from the linears, and the answer states what was assumed.\n"
    )


_MEANINGS = {
    "exact": "read, exact",
    "inspected": "inspected, exact",
    "wrong": "wrong",
    "refused": "refused with the reason",
    "not built": "transformers does not build its default config",
}
