"""Any layout loads the checkpoints of any other: the state is preserved bit for bit, and training continues.

A chain starts in one process with a few steps of training. Then every layout in turn loads the checkpoint of the
previous one, saves it again, and takes a step. It must save the same bits as the first one, and its step must have the
same loss. A layout that put shards at wrong offsets would fail the second check.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import recipe, shallow
from tests.engine.ranks import run

from meshwright.engine.checkpoint.load import load_tensors
from meshwright.engine.checkpoint.manager import Checkpoints
from meshwright.engine.checkpoint.metadata import read_index, read_manifest, read_state
from meshwright.engine.checkpoint.shards import Shard
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.rank_env import Process
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

STEPS = 2
ONE: tuple[int, dict[str, Any]] = (1, {})
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": ONE,
    "fsdp2": (2, {}),
    "tp-sp": (2, {"tp": 2, "sp": True}),
    "tp4": (4, {"tp": 4, "sp": True}),
    "tp-fsdp2": (4, {"tp": 2, "sp": True, "dp_shard": 2}),
    "pp": (2, {"pp": 2}),
    "zbv": (2, {"pp": 2, "vp": 2, "pp_schedule": "zbv"}),
    "ep": (2, {"ep": 2}),
    "ep-etp": (4, {"ep": 2, "etp": 2, "micro_batch_size": 1}),
    "cp": (2, {"cp": 2}),
    "hsdp": (4, {"dp_replicate": 2, "micro_batch_size": 1}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp3": (3, {"micro_batch_size": 1}),
}
DENSE = ("fsdp2", "tp-sp", "pp", "cp", "hsdp", "ddp", "tp4", "zbv", "fsdp3", "tp-fsdp2", "one")
SPARSE = ("ep", "fsdp2", "pp", "tp-sp", "cp", "ep-etp", "hsdp", "ddp", "fsdp3", "tp-fsdp2", "one")
MTP = types.Train(steps=100, mtp_loss=0.3)
BIAS = types.Moe(balancing="bias", aux_loss=0.0)

CHAINS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "tied": ("qwen3", DENSE, {}),
    "untied-lion": ("llama", DENSE, {"optimizer": types.Optimizer(name="lion", lr=1e-3)}),
    "experts-muon": ("qwen3_moe", SPARSE, {"optimizer": types.Optimizer(name="muon", lr=1e-3)}),
    "state-space-segments": ("nemotron_h", SPARSE, {"moe": BIAS}),
    "latent-mtp-bias": ("deepseek_v3", SPARSE, {"train": MTP, "moe": BIAS}),
    "tied-mtp-schedule-free": (
        "qwen3_5",
        DENSE,
        {"train": MTP, "optimizer": types.Optimizer(name="schedule_free_adamw", lr=1e-3)},
    ),
    "adapters": ("llama", DENSE, {"goal": "peft", "peft": types.Peft(rank=4)}),
    "adapters-dora": ("qwen3", DENSE, {"goal": "peft", "peft": types.Peft(method="dora", rank=4)}),
    "adapters-of-experts": ("qwen3_moe", SPARSE, {"goal": "peft", "peft": types.Peft(rank=4)}),
}
BATCH, LARGE_BATCH = 4, 12  # the large one is divisible by three ranks
QUICK = {
    "tied": ("pp",),
    "experts-muon": ("ep",),
    "state-space-segments": ("tp-sp",),
    "latent-mtp-bias": ("pp",),
    "adapters": ("hsdp",),
}


def built(rank: int, world: int, family: str, layout: dict[str, Any], sections: dict[str, Any], folder: str) -> Any:
    """Return a trainer and its checkpoints on one rank."""
    goal = sections.get("goal", "pretrain")
    given = recipe(
        types.Layout(**{"micro_batch_size": 2, **layout}),
        **{
            "optimizer": types.Optimizer(lr=1e-3),
            "train": types.Train(global_batch_size=BATCH, steps=100),
            **{key: value for key, value in sections.items() if key != "goal"},
        },
    )
    given = msgspec.structs.replace(given, goal=goal)
    config = transformers_config(FAMILIES[family])
    source = Mock(config.vocab_size, given.data.seq_length, given.train.seed)
    trainer = Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)
    return trainer, Checkpoints(Path(folder), Process(rank, world), trainer, FAMILIES[family])


def full_state(checkpoint: Path) -> dict[str, str]:
    """Return a digest of every full tensor of a checkpoint, and of its numbers."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    found = {}
    formats = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    for name, meta in index.tensors.items():
        if name.startswith("random/"):
            continue
        tensor = torch.zeros(meta.shape, dtype=formats[meta.format])
        load_tensors([Shard(name, meta.shape, (0,) * len(meta.shape), tensor)], checkpoint, index, manifest)
        found[name] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found | {"groups": str(sorted(read_state(checkpoint).groups.items()))}


def link(
    rank: int, world: int, family: str, layout: dict[str, Any], sections: dict[str, Any], before: str, after: str
) -> Any:
    """Load the previous layout's checkpoint, or train if there is none; save; return the state and the next loss."""
    trainer, checkpoints = built(rank, world, family, layout, sections, after)
    if before:
        source = Checkpoints(Path(before), Process(rank, world), trainer, FAMILIES[family])
        state = source.resume()
        assert state is not None
        assert state.step == STEPS
    else:
        for number in range(STEPS):
            trainer.step(number)
    checkpoints.save(STEPS, wait=True)
    digests = full_state(checkpoints.folder.step_path(STEPS)) if rank == 0 else {}
    return digests, trainer.step(STEPS).loss


def follow(family: str, chain: tuple[str, ...], sections: dict[str, Any], folder: Path, batch: int) -> None:
    train = msgspec.structs.replace(sections.get("train", types.Train(steps=100)), global_batch_size=batch)
    sections = {**sections, "train": train}
    world, layout = ONE
    before = str(folder / "0")
    expected, loss = run(world, link, family, layout, sections, "", before)[0]
    assert any(name.startswith("optimizer/") for name in expected)
    for number, name in enumerate(chain, 1):
        world, layout = LAYOUTS[name]
        after = str(folder / str(number))
        ranks = run(world, link, family, layout, sections, before, after)
        digests = ranks[0][0]
        assert digests.keys() == expected.keys(), name
        assert [key for key in expected if digests[key] != expected[key]] == [], name
        assert [found[1] for found in ranks] == pytest.approx([loss] * world, rel=1e-5), name
        before = after


@pytest.mark.parametrize("case", QUICK)
def test_a_checkpoint_passes_through_other_layouts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, _, sections = CHAINS[case]
    monkeypatch.setitem(FAMILIES, family, shallow(FAMILIES[family], types.Layout()))
    follow(family, QUICK[case], sections, tmp_path, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHAINS)
def test_a_checkpoint_passes_through_every_layout(case: str, tmp_path: Path) -> None:
    family, chain, sections = CHAINS[case]
    follow(family, chain, sections, tmp_path, LARGE_BATCH)
