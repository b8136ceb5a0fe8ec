"""Pipeline stages of whole blocks, with every other technique of models that run transformers' own forward pass.

One rank is the reference: losses and gradient norms of some steps, the bits of a checkpoint, the loss of an exported
folder. The types are of different kinds: parallel residuals with rotary tables, ALiBi with a norm of the embedding, a
scan, and a head that shares the embedding's weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.ranks import run
from tests.engine.test_any_model import TOKENS, plain_loop, recipe, small
from tests.engine.test_checkpoint_layouts import full_state

from meshwright.engine import hf_io
from meshwright.engine.checkpoint.manager import Checkpoints
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.model.block_split import UnsplitError, trace_blocks
from meshwright.engine.rank_env import Process
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types
from meshwright.recipes.engine_models import UNSPLIT

BATCH, STEPS, LAYERS = 8, 2, 4
TRAIN = types.Train(global_batch_size=BATCH, steps=4)
ADAM = types.Optimizer(name="adamw", lr=1e-3)
Tried = tuple[int, dict[str, Any], dict[str, Any]]  # ranks, layout, other sections
STAGES: dict[str, Tried] = {
    "micro-batches": (2, {"pp": 2}, {}),
    "gpipe": (2, {"pp": 2, "pp_schedule": "gpipe"}, {}),
    "interleaved": (2, {"pp": 2, "vp": 2, "pp_schedule": "interleaved_1f1b"}, {}),
    "zero-bubble": (2, {"pp": 2, "vp": 2, "pp_schedule": "zbv"}, {}),
    "uneven": (2, {"pp": 2, "stage_layers": (3, 1)}, {}),
    "recompute": (2, {"pp": 2, "recompute": "full"}, {}),
    "recompute-ops": (2, {"pp": 2, "recompute": "selective", "recompute_modules": ("ops",)}, {}),
    "offload": (2, {"pp": 2, "offload": "params"}, {}),
    "fsdp2": (4, {"pp": 2}, {}),
    "ddp": (4, {"pp": 2, "strategy": "ddp"}, {}),
    "hsdp": (8, {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1}, {}),
    "lora": (2, {"pp": 2}, {"goal": "peft", "peft": types.Peft(rank=4)}),
    "lora-fsdp2-recompute": (4, {"pp": 2, "recompute": "full"}, {"goal": "peft", "peft": types.Peft(rank=4)}),
    "dora": (2, {"pp": 2}, {"goal": "peft", "peft": types.Peft(method="dora", rank=4)}),
    "compile": (2, {"pp": 2}, {"kernels": types.Kernels(compile=True)}),
    "compile-recompute": (2, {"pp": 2, "recompute": "full"}, {"kernels": types.Kernels(compile=True)}),
}
TIED = ("micro-batches", "zero-bubble", "recompute", "fsdp2", "hsdp", "lora")


def built(config: Any, layout: Mapping[str, Any], sections: Mapping[str, Any], folder: str) -> tuple[Trainer, Mesh]:
    """Return a trainer of a saved model, and its mesh."""
    given = recipe(**{"layout": types.Layout(**{"micro_batch_size": 2, **layout}), "train": TRAIN, **sections})
    mesh = build_mesh(given.layout, "cpu")
    source = Mock(config.vocab_size, TOKENS, 0)
    return Trainer(given, config, mesh, torch.device("cpu"), source, Path(folder)), mesh


def _losses(rank: int, world: int, kind: str, changes: Any, layout: Any, sections: Any, folder: str) -> Any:
    config = small(kind, LAYERS, **changes)
    if not (Path(folder) / "config.json").is_file():
        plain_loop(config, folder, steps=0)
    trainer, _ = built(config, layout, sections, folder)
    done = [trainer.step(i) for i in range(STEPS)]
    trainer.close()
    return [(one.loss, one.grad_norm) for one in done]


def _compare(kind: str, changes: Mapping[str, Any], name: str, folder: str) -> None:
    world, layout, sections = STAGES[name]
    alone = {key: value for key, value in sections.items() if key != "kernels"}
    expected = run(1, _losses, kind, changes, {}, alone, folder)[0]
    found = run(world, _losses, kind, changes, layout, sections, folder)[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-5)
        assert norm == pytest.approx(expected_norm, rel=2e-4)


def _cases(names: Iterable[str], kinds: tuple[str, ...], quick: tuple[str, str]) -> list[Any]:
    slow = pytest.mark.slow
    every = itertools.product(names, kinds)
    # Inductor needs minutes for the scan of mamba2 in Python.
    return [
        pytest.param(name, kind, marks=() if (name, kind) == quick else slow)
        for name, kind in every
        if "compile" not in name or kind == "gpt_neox"
    ]


@pytest.mark.parametrize(("name", "kind"), _cases(STAGES, ("gpt_neox", "mamba2", "olmo3"), ("lora", "gpt_neox")))
def test_stages_equal_one_rank(name: str, kind: str, tmp_path: Path) -> None:
    _compare(kind, {"tie_word_embeddings": False}, name, str(tmp_path / "model"))


@pytest.mark.parametrize(("name", "kind"), _cases(TIED, ("bloom", "cohere2", "falcon_h1"), ("micro-batches", "bloom")))
def test_a_weight_of_both_ends_is_trained_as_one(name: str, kind: str, tmp_path: Path) -> None:
    """The first stage has it as the embedding, the last one as the head: their gradients are summed."""
    _compare(kind, {"tie_word_embeddings": True}, name, str(tmp_path / "model"))


def _saved(rank: int, world: int, kind: str, tied: bool, layout: Any, sections: Any, folder: str, at: int) -> Any:
    """Resume the checkpoint of the layout before this one, or train; save; return the bits and the next step."""
    config = small(kind, LAYERS, tie_word_embeddings=tied)
    model, values = f"{folder}/model", config.to_dict()
    if at == 0:
        plain_loop(config, model, steps=0)
    trainer, _ = built(config, layout, sections, model)
    if at:
        assert Checkpoints(Path(f"{folder}/{at - 1}"), Process(rank, world), trainer, values).resume() is not None
    else:
        for number in range(STEPS):
            trainer.step(number)
    checkpoints = Checkpoints(Path(f"{folder}/{at}"), Process(rank, world), trainer, values)
    checkpoints.save(STEPS, wait=True)
    digests = full_state(checkpoints.folder.step_path(STEPS)) if rank == 0 else {}
    done = trainer.step(STEPS)
    trainer.close()
    return digests, done.loss, done.grad_norm


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("goal", ["pretrain", "peft"])
def test_stages_resume_the_checkpoint_of_any_layout(goal: str, tied: bool, tmp_path: Path) -> None:
    """One rank, two stages, FSDP2, two stages of two ranks, one rank: the same bits and the same next step."""
    sections = {"optimizer": ADAM, **({"goal": "peft", "peft": types.Peft(rank=4)} if goal == "peft" else {})}
    chain: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"pp": 2}), (2, {}), (4, {"pp": 2}), (1, {})]
    found = [
        run(world, _saved, "bloom", tied, layout, sections, str(tmp_path), at)[0]
        for at, (world, layout) in enumerate(chain)
    ]
    for digests, loss, norm in found[1:]:
        assert digests == found[0][0]
        assert loss == pytest.approx(found[0][1], rel=2e-5)
        assert norm == pytest.approx(found[0][2], rel=2e-4)


def _exported(rank: int, world: int, kind: str, tied: bool, sections: Any, folder: str) -> Any:
    """Train a step on two stages and write the model; return its next loss, and transformers' of the folder."""
    config = small(kind, LAYERS, tie_word_embeddings=tied)
    if rank == 0:
        plain_loop(config, f"{folder}/model", steps=0)
    torch.distributed.barrier()
    trainer, mesh = built(config, {"pp": 2}, sections, f"{folder}/model")
    trainer.step(0)
    written = Path(folder) / "trained"
    merged = trainer.recipe.goal == "peft"
    hf_io.save_model(trainer.stages, mesh, trainer.config, written, dtype=torch.float32, merged=merged)
    expected = trainer.step(1).loss
    trainer.close()
    if rank > 0:
        return None
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    tokens = torch.from_numpy(Mock(config.vocab_size, TOKENS, 0).samples([*range(BATCH, 2 * BATCH)]).tokens).long()
    with torch.no_grad():
        logits = loaded(input_ids=tokens[:, :TOKENS], use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TOKENS + 1].flatten())
    return expected, float(loss)


EXPORTED = [
    ("gpt_neox", False, "peft"),
    pytest.param("gpt_neox", False, "pretrain", marks=pytest.mark.slow),
    *(pytest.param("bloom", True, goal, marks=pytest.mark.slow) for goal in ("pretrain", "peft")),
    *(pytest.param("mamba2", False, goal, marks=pytest.mark.slow) for goal in ("pretrain", "peft")),
]


@pytest.mark.parametrize(("kind", "tied", "goal"), EXPORTED)
def test_the_folder_that_stages_write_has_the_trained_loss(kind: str, tied: bool, goal: str, tmp_path: Path) -> None:
    sections = {"goal": "peft", "peft": types.Peft(rank=4)} if goal == "peft" else {}
    expected, loss = run(2, _exported, kind, tied, sections, str(tmp_path))[0]
    assert loss == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("kind", [kind for kind in UNSPLIT if not kind.startswith("qwen4_exp")])  # no --tiny sizes
def test_types_listed_without_stages_have_none(kind: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(small(kind, LAYERS)).eval()
    with pytest.raises(UnsplitError):
        trace_blocks(model)


def test_stages_exchange_hidden_states_of_the_models_width() -> None:
    model = transformers.AutoModelForCausalLM.from_config(small("gpt_neox", LAYERS)).eval()
    width = model.config.hidden_size
    trace_blocks(model)
    model.config.hidden_size = width // 4  # as if layers had four streams side by side
    with pytest.raises(UnsplitError, match=f"receive {width} values per token, hidden_size={width // 4}"):
        trace_blocks(model)
