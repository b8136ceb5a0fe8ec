"""Checkpoints of a training: written by any layout, read by any other, found good or not used.

torch's own distributed checkpoints keep their index in a pickle, which runs code when it is read. Here it is JSON
beside one safetensors file per rank.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from meshwright.engine.checkpoint.contents import State, read_index, read_manifest, read_state
from meshwright.engine.checkpoint.contract import check_contract, contract_of
from meshwright.engine.checkpoint.folder import Folder, Lock
from meshwright.engine.checkpoint.load import load, load_tensors, newest_good
from meshwright.engine.checkpoint.parts import Part
from meshwright.engine.checkpoint.save import SaveError, Saver, random_parts
from meshwright.engine.checkpoint.stopping import StopRequest
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer

__all__ = ["Checkpoints", "Folder", "Lock", "SaveError", "StopRequest"]


class Checkpoints:
    """The checkpoints of one run, as its loop uses them."""

    def __init__(
        self, run: Path, process: Process, trainer: Trainer, config: Mapping[str, Any], accept_changes: bool = False
    ) -> None:
        self.process, self.trainer, self.accept_changes = process, trainer, accept_changes
        self.recipe: Recipe = trainer.recipe
        self.contract = contract_of(self.recipe, config)
        self.folder = Folder(run)
        self.saver = Saver(self.folder, trainer, process, self.recipe.checkpoint)
        self.skipped_in_a_row = 0

    def resume(self) -> State | None:
        """Goes on from the newest good checkpoint; None where there is none."""
        if self.process.rank == 0:
            self.folder.clean()
        if not self.recipe.checkpoint.resume:
            if steps := self.folder.steps():
                raise InputError(
                    f"{self.folder.path} holds checkpoints, the newest of step {steps[-1]}",
                    field="checkpoint.resume",
                    value=False,
                    fix=("another --out", "checkpoint.resume=true"),
                )
            return None
        found = newest_good(self.folder, self.saver.group)
        if found is None:
            return None
        check_contract(read_state(found).contract, self.contract, self.accept_changes, self.process.rank == 0)
        state = load(self.trainer, found)
        _restore_random(found, state, self.process.rank, self.trainer.device)
        self.saver.last, self.skipped_in_a_row = state.step, state.skipped_in_a_row
        return state

    def save(self, step: int, wait: bool = False, read_back: bool = True) -> None:
        """Saves the state after `step` steps."""
        self.saver.save(self._state(step), wait, read_back)

    def path(self, step: int | None) -> str | None:
        """The folder of a step's checkpoint."""
        return str(self.folder.of(step)) if step is not None else None

    def _state(self, step: int) -> State:
        recipe, scale = self.recipe, self.trainer.scale
        base = {"pretrained": recipe.checkpoint.pretrained, "model": recipe.model, "seed": recipe.train.seed}
        return State(
            step=step,
            samples=step * recipe.train.global_batch_size,
            world=self.process.world,
            layout=msgspec.to_builtins(recipe.layout),
            contract=self.contract,
            base=base if recipe.goal == "peft" else None,
            groups={},
            loss_scale=scale.state_dict() if scale is not None else None,
            skipped_in_a_row=self.skipped_in_a_row,
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
            recipe=recipe.name,
        )


def _restore_random(checkpoint: Path, state: State, rank: int, device: torch.device) -> None:
    """Random generators go on from where they were; a rank that did not exist then takes another one's state."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    for fresh in random_parts(rank, device):
        kind = fresh.name.rpartition("/")[2]
        name = f"random/{rank % state.world}/{kind}"
        if name not in index.tensors:
            continue  # it was written where there was no such device
        part = Part(name, fresh.whole, fresh.offset, fresh.tensor.clone())
        load_tensors([part], checkpoint, index, manifest)
        if kind == "cpu":
            torch.set_rng_state(part.tensor)
        else:
            torch.cuda.set_rng_state(part.tensor, device)
