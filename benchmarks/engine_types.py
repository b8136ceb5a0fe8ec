"""Train every decoder type that transformers builds, small, with our engine, and compare with transformers' own loop.

    python benchmarks/engine_types.py [--save] [TYPE...]

On CPUs in fp32. A small random model is saved by transformers, loaded by the engine and trained:

parity     loss and gradients of one step equal those of a plain loop over transformers' model (eager attention)
ranks      the losses of three steps on two ranks (FSDP2) equal those on one rank
stages     the same on two pipeline stages, which for types that transformers runs are whole blocks
recompute  the same with full recompute
lora       three steps of adapters: the first loss is the model's
export     the trained model, written as a folder, loads in transformers and has the trained loss
packing    whether the documents of a packed sample are kept apart; else packing is refused

Types with layers of our own (src/meshwright/recipes/engine_models.py) are compared too; a difference fails the sweep.
--save writes results/engine_types.json, from which docs/models.md is generated, after every ten types; a sweep that was
stopped goes on where it was. Rows of the same code, transformers and torch are kept.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", LOCAL_RANK="0")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29781")

import argparse
import hashlib
import json
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from decoders import NOT_DECODERS, small_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.engine import hf_io
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.model.behaviour import behaviour_of
from meshwright.engine.model.build import runs_own_layers, transformers_config
from meshwright.engine.model.config import distinct_layer_types, tiny
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.models import decode_float
from meshwright.recipes import types
from meshwright.recipes.engine_models import LACKS, UNSPLIT

RESULTS = Path(__file__).parent / "results" / "engine_types.json"
TOKENS, STEPS = 48, 3
MOST_PARAMETERS = 30_000_000
LOSS, GRADIENT = 2e-4, 5e-3  # relative differences that agree
KEPT = ("A_log", "dt_bias", ".D", "time_decay", "time_first")  # initial values with a meaning
BATCH = 10  # types between two saves: two ranks start once for all of them
CHUNKED = ("hrm_text",)  # hub files that store several tensors as one are refused; the model's own names are not
CHECKS = ("parity", "ranks", "stages", "recompute", "lora", "export")


def recipe(**changes: Any) -> types.Recipe:
    """Return a recipe of one step in fp32 that changes no weight, with other sections."""
    plain = types.Recipe(
        name="parity",
        model="llama3_8b",
        goal="pretrain",
        cluster="1xH100",
        layout=types.Layout(micro_batch_size=1),
        precision=types.Precision(compute="fp32"),
        optimizer=types.Optimizer(name="sgd", lr=0.0, beta1=0.0, weight_decay=0.0),
        train=types.Train(global_batch_size=2, steps=10),
        data=types.Data(seq_length=TOKENS),
        moe=types.Moe(aux_loss=0.0),
    )
    return msgspec.structs.replace(plain, **changes)


LEARNS = types.Optimizer(name="sgd", lr=0.05, beta1=0.0, weight_decay=0.0)
CONSTANT = types.Schedule(name="constant", warmup_steps=0, min_lr=0.0)


def values_of(name: str) -> dict[str, Any]:
    """Return a small config of a type as plain values: --tiny of its defaults, or hand-picked sizes."""
    ways = ((_tiny_defaults, True), (_small, False), (_small, True))  # some inner configs refuse their own defaults
    for make, only_changes in ways:
        try:
            config = make(name)
            values: dict[str, Any] = json.loads(config.to_json_string(use_diff=only_changes), object_hook=decode_float)
            values["model_type"] = config.model_type
            config = transformers_config(values)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if size <= MOST_PARAMETERS:
            return values
        reason = f"no small config: {size:,} parameters"
    raise InputError(reason, "model", name)


def _small(name: str) -> Any:
    text = AutoConfig.for_model(name).get_text_config().model_type
    return small_config(text if text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else name, layers=6).get_text_config()


def _tiny_defaults(name: str) -> Any:
    default = AutoConfig.for_model(name).get_text_config()
    values = json.loads(default.to_json_string(use_diff=True), object_hook=decode_float)
    config = transformers_config({**values, "model_type": default.model_type})
    if runs_own_layers(config):
        raise LookupError("their defaults are no model")
    return tiny(config, max(2, distinct_layer_types(config)))


def reference(values: dict[str, Any]) -> Any:
    """Return transformers' model with weights large enough that every part changes the loss."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(transformers_config(values), attn_implementation="eager").float()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in KEPT):
                continue
            if parameter.dim() >= 2:
                scale = 0.5 if "embed" in name or "wte" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
            else:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


class Engine:
    """Trainers of one saved model on the ranks of a process group."""

    def __init__(self, values: dict[str, Any], folder: Path, ranks: int) -> None:
        self.values, self.folder, self.ranks = values, folder, ranks

    def trainer(self, given: types.Recipe) -> tuple[Trainer, Mesh]:
        config = transformers_config(self.values)
        source = Mock(config.get_text_config().vocab_size, TOKENS, 0)
        mesh = build_mesh(given.layout, "cpu")
        return Trainer(given, config, mesh, torch.device("cpu"), source, self.folder), mesh

    def losses(self, steps: int = STEPS, **changes: Any) -> list[float]:
        trainer, _ = self.trainer(recipe(**changes))
        found = [trainer.step(i).loss for i in range(steps)]
        trainer.close()
        return found


def parity(engine: Engine, theirs: Any) -> str:
    """Return the differences of loss and gradients to a plain loop."""
    trainer, _ = engine.trainer(recipe())
    batch = trainer.loader.batch(0)
    found = float(trainer.forward_backward(batch)[0])
    ours = {n: p.grad for n, p in trainer.stages[0].named_parameters() if p.grad is not None}
    norm = float(trainer.finish_gradients())
    trainer.close()
    tokens = torch.as_tensor(np.asarray(trainer.loader.source.samples([0, 1]).tokens)).long()
    logits = theirs(input_ids=tokens[:, :TOKENS], use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TOKENS + 1].flatten())
    loss.backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    expected = float(torch.sqrt(sum((g**2).sum() for g in gradients.values())))
    apart = [abs(found / loss.item() - 1) / LOSS, abs(norm / expected - 1) / GRADIENT]
    if not runs_own_layers(transformers_config(engine.values)):  # the same names
        if set(ours) != set(gradients):
            return f"gradients of other parameters: {sorted(set(ours) ^ set(gradients))[:3]}"
        apart += [float((ours[n] - g).norm()) / expected / GRADIENT for n, g in gradients.items()]
    if max(apart) < 1:
        return ""
    return f"loss {found:.5f} and {loss.item():.5f}, gradient norm {norm:.4f} and {expected:.4f}"


def close(found: list[float], expected: list[float]) -> str:
    """Return the losses if they differ."""
    far = any(abs(a / b - 1) > LOSS for a, b in zip(found, expected, strict=True))
    return f"{_rounded(found)} and {_rounded(expected)}" if far else ""


def _rounded(losses: list[float]) -> str:
    return ", ".join(f"{one:.5f}" for one in losses)


def lora(engine: Engine, first: float) -> str:
    """Train adapters on all linear layers."""
    peft = types.Peft(rank=4, alpha=8.0)
    slow = msgspec.structs.replace(LEARNS, lr=1e-3)
    found = engine.losses(goal="peft", peft=peft, optimizer=slow, schedule=CONSTANT)
    if abs(found[0] / first - 1) > LOSS or not np.isfinite(found).all():
        return f"losses {_rounded(found)}, of the model {first:.5f}"
    return ""


def export(engine: Engine, folder: Path) -> str:
    """Train two steps, write the model and compare transformers' loss with the engine's next one."""
    trainer, mesh = engine.trainer(recipe(optimizer=LEARNS, schedule=CONSTANT))
    trainer.step(0)
    hf_io.save_model(trainer.stages, mesh, trainer.config, folder, dtype=torch.float32)
    expected = trainer.step(1).loss
    trainer.close()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    tokens = torch.as_tensor(np.asarray(trainer.loader.source.samples([2, 3]).tokens)).long()
    with torch.no_grad():
        logits = loaded(input_ids=tokens[:, :TOKENS], use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TOKENS + 1].flatten())
    return close([float(loss)], [expected])


def outcome(check: Callable[[], str]) -> str:
    """Return "yes", or why a check failed."""
    try:
        return check() or "yes"
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines)}"[:240]


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Return the row of a type on one rank; the folder keeps what two ranks need."""
    row: dict[str, Any] = {"type": name}
    try:
        values = values_of(name)
        theirs = reference(values)
        config = transformers_config(values)
        row["way"] = "layers" if runs_own_layers(config) else "transformers"
        if row["way"] == "transformers":
            row["packing"] = behaviour_of(config).isolates
        theirs.save_pretrained(folder / "model", save_original_format=name not in CHUNKED)
    except Exception as error:
        return {**row, "way": "none", "reason": " ".join(str(error).split())[:240] or type(error).__name__}
    engine = Engine(values, folder / "model", 1)
    row["parity"] = outcome(lambda: parity(engine, theirs))
    if row["parity"] != "yes":
        return row
    plain = engine.losses(optimizer=LEARNS, schedule=CONSTANT)
    (folder / "job.json").write_text(json.dumps({"values": values, "losses": plain}))
    again = types.Layout(micro_batch_size=1, recompute="full")
    same = {"optimizer": LEARNS, "schedule": CONSTANT}
    row["recompute"] = outcome(lambda: close(engine.losses(layout=again, **same), plain))
    row["lora"] = outcome(lambda: lora(engine, plain[0]))
    row["export"] = outcome(lambda: export(engine, folder / "trained"))
    return row


def _on_two_ranks(rank: int, jobs: list[tuple[str, str]], out: str, port: int) -> None:
    _quiet()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found = {}
    for name, folder in jobs:
        job = json.loads((Path(folder) / "job.json").read_text())
        engine = Engine(job["values"], Path(folder) / "model", 2)
        found[name] = {"ranks": outcome(partial(_same_losses, engine, job["losses"]))}
        if (why := _unsplit(job["values"])) is None:
            layout = types.Layout(micro_batch_size=1, pp=2)
            found[name]["stages"] = outcome(partial(_same_losses, engine, job["losses"], layout=layout))
        else:
            found[name]["unsplit"] = why
        if rank == 0:  # renamed when it is whole: a crash of the other rank ends this one in the middle of a write
            written = Path(f"{out}.new")
            written.write_text(json.dumps(found))
            written.replace(out)
    dist.destroy_process_group()


def _unsplit(values: dict[str, Any]) -> str | None:
    """Return why a config's type has no pipeline stages."""
    config = transformers_config(values)
    return None if runs_own_layers(config) else UNSPLIT.get(config.model_type)


def _same_losses(engine: Engine, expected: list[float], **changes: Any) -> str:
    return close(engine.losses(optimizer=LEARNS, schedule=CONSTANT, **changes), expected)


def two_ranks(jobs: list[tuple[str, str]], out: Path) -> dict[str, dict[str, str]]:
    """Return whether two ranks and two stages agree with one rank, by type; a crash of one type leaves the others."""
    found: dict[str, dict[str, str]] = {}
    left = list(jobs)
    while left:
        out.unlink(missing_ok=True)
        try:
            mp.spawn(_on_two_ranks, args=(left, str(out), free_port()), nprocs=2)
            crashed = ""
        except Exception as error:
            crashed = (str(error).strip().splitlines() or ["?"])[-1][:200]
        found |= json.loads(out.read_text()) if out.is_file() else {}
        left = [job for job in left if job[0] not in found]
        if left and crashed:
            found[left[0][0]] = {"ranks": f"a rank failed: {crashed}"}
            left = left[1:]
    return found


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> int:
    """Print one line for each type and the sums; fail if a type that trains does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--one-rank", action="store_true", help="leave out the comparison on two ranks")
    given = parser.parse_args()
    _quiet()
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}")
    names = given.types or [n for n in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if n not in NOT_DECODERS]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "code": _code()}
    rows = {row["type"]: row for row in _saved_rows(versions) if given.save and row["type"] in names}
    left = [name for name in names if name not in rows]
    print(f"{len(names)} types, {len(rows)} of them have a saved row of this code", flush=True)
    for first in range(0, len(left), BATCH):
        found = batch(left[first : first + BATCH], given.one_rank)
        rows |= {row["type"]: row for row in found}
        if given.save and not given.one_rank:
            _save(found, versions, every=not given.types and first + BATCH >= len(left))
    dist.destroy_process_group()
    return _finish(list(rows.values()))


def batch(names: list[str], one_rank: bool) -> list[dict[str, Any]]:
    """Return the rows of some types: first all of them on one rank, then all on two."""
    rows, jobs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            started, folder = time.monotonic(), Path(scratch) / name
            folder.mkdir()
            row = {"type": name, "way": "none", "reason": LACKS[name]} if name in LACKS else examine(name, folder)
            if (folder / "job.json").is_file():
                jobs.append((name, str(folder)))
            rows.append(row)
            _show(row, time.monotonic() - started)
        ranks = {} if one_rank else two_ranks(jobs, Path(scratch) / "ranks.json")
    for row in rows:
        row |= ranks.get(row["type"], {})
        for check in ranks.get(row["type"], {}):
            if row[check] != "yes":
                print(f"{row['type']:26} {check}: {row[check]}")
    return rows


def _code() -> str:
    """Return a digest of the engine's source files and of this one: rows of other code are made again."""
    files = sorted((Path(__file__).parents[1] / "src" / "meshwright" / "engine").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (*files, Path(__file__)))).hexdigest()[:12]


def _saved_rows(versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the saved rows that this code made with these versions."""
    if not RESULTS.is_file():
        return []
    found = json.loads(RESULTS.read_text())
    same = all(found[key] == versions[key] for key in ("transformers", "torch"))
    return [row for row in found["rows"] if same and row.get("code") == versions["code"]]


def _save(rows: list[dict[str, Any]], versions: Mapping[str, str], every: bool) -> None:
    """Replace the rows of some types; after the last ones of all types, drop types that are no more."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    kept = [row for row in kept if not every or row.get("code") == versions["code"]]
    done = {row["type"]: {**row, "code": versions["code"]} for row in rows}
    merged = sorted({**{row["type"]: row for row in kept}, **done}.values(), key=lambda row: row["type"])
    head = {key: versions[key] for key in ("transformers", "torch")}
    RESULTS.write_text(json.dumps({**head, "rows": merged}, indent=1) + "\n")


def _show(row: dict[str, Any], seconds: float) -> None:
    failed = [f"{check}: {row[check]}" for check in CHECKS if row.get(check, "yes") != "yes"]
    what = row.get("reason") or "; ".join(failed) or "ok"
    packing = {True: "packs", False: "no packing"}.get(row.get("packing"), "")
    print(f"{row['type']:26} {row['way']:13} {packing:11} {what[:300]} {seconds:.1f}s", flush=True)


def _finish(rows: list[dict[str, Any]]) -> int:
    for check in CHECKS:
        counted = Counter(row["way"] for row in rows if row.get(check) == "yes")
        print(f"{check:10} {counted['layers']} with layers of our own, {counted['transformers']} run by transformers")
    print(f"of {len(rows)} types, {sum(row['way'] == 'none' for row in rows)} are refused or not built")
    return 1 if any(row.get("parity", "yes") != "yes" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
