"""Saves and resumes the checkpoints of one run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from meshwright.engine.checkpoint.contract import check_contract, contract_of
from meshwright.engine.checkpoint.folder import Folder
from meshwright.engine.checkpoint.load import find_latest_valid, load, load_tensors
from meshwright.engine.checkpoint.metadata import State, read_index, read_manifest, read_state
from meshwright.engine.checkpoint.save import Saver, rng_shards
from meshwright.engine.checkpoint.shards import Shard
from meshwright.engine.data.fingerprint import WEIGHTS, Fingerprint, data_fingerprints, weights_fingerprint
from meshwright.engine.evaluation import ValidationState
from meshwright.engine.hooks import hook_contract
from meshwright.engine.object_collectives import gathered
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer


class Checkpoints:
    """Saves and resumes one run."""

    def __init__(
        self,
        run: Path,
        process: Process,
        trainer: Trainer,
        config: Mapping[str, Any],
        accept_changes: bool = False,
        by_epochs: bool = False,
    ) -> None:
        self.process, self.trainer, self.accept_changes = process, trainer, accept_changes
        self.recipe: Recipe = trainer.recipe
        self.epoch_samples = trainer.samples_per_epoch if by_epochs else None
        self.contract = contract_of(self.recipe, config) | hook_contract(trainer.hooks)
        self.folder = Folder(run)
        self.saver = Saver(self.folder, trainer, process, self.recipe.checkpoint)
        self.skipped_in_a_row = 0
        found = data_fingerprints(self.recipe) if process.rank == 0 else {}
        if process.rank == 0 and not (trainer.weights and trainer.weights.is_relative_to(run)):  # --tiny writes its own
            found |= weights_fingerprint(trainer.weights)
        self.data: dict[str, Fingerprint] = gathered(found, self.saver.group)[0]
        self.validation = ValidationState()

    def resume(self) -> State | None:
        """Load the newest valid checkpoint; None if the run has no checkpoints."""
        if self.process.rank == 0:
            self.folder.clean()
        if not self.recipe.checkpoint.resume:
            if steps := self.folder.steps():
                raise InputError(
                    f"{self.folder.path} already contains checkpoints, the newest of step {steps[-1]}",
                    field="checkpoint.resume",
                    value=False,
                    fix=("another --out", "checkpoint.resume=true"),
                )
            return None
        found = find_latest_valid(self.folder, self.saver.group)
        if found is None:
            return None
        saved = read_state(found)
        warns = self.process.rank == 0
        check_contract(
            *(saved.contract, self.contract, self.accept_changes, warns, saved.data, self.data),
            run=self.folder.path.parent,
            epoch_samples=self.epoch_samples,
        )
        state = load(self.trainer, found)
        _restore_rng(found, state, self.process.rank, self.trainer.device)
        self.saver.last, self.skipped_in_a_row = state.step, state.skipped_in_a_row
        return state

    def data_changed(self, saved: State) -> bool:
        """Return whether the contents of the datasets differ from those of a checkpoint, where both are known."""
        before, now = ([one.hash for one in data.values()] for data in (saved.data, self.data))
        return bool(before and now) and before != now

    def has_same_data(self, saved: State) -> bool:
        """Return whether the contents of the datasets are known and equal to those of a checkpoint."""
        before, now = ([one.hash for name, one in data.items() if name != WEIGHTS] for data in (saved.data, self.data))
        return bool(before) and before == now

    def save(self, step: int, wait: bool = False, read_back: bool = True) -> None:
        """Save the state after `step` steps."""
        self.saver.save(self._state(step), wait, read_back)

    def path(self, step: int | None) -> str | None:
        """Return the folder of a step's checkpoint."""
        return str(self.folder.step_path(step)) if step is not None else None

    def mark_best(self, step: int) -> None:
        """Make `best` point to a checkpoint that exists already."""
        if self.process.rank == 0 and self.recipe.checkpoint.keep_best:
            self.folder.mark_best(step)

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
            data=self.data,
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
            recipe=recipe.name,
            validation=self.validation,
        )


def _restore_rng(checkpoint: Path, state: State, rank: int, device: torch.device) -> None:
    """Restore the random generators; a rank beyond the saved world size takes another rank's state."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    for current in rng_shards(rank, device):
        device_type = current.name.rpartition("/")[2]
        name = f"random/{rank % state.world}/{device_type}"
        if name not in index.tensors:
            continue  # saved on a machine without such a device
        shard = Shard(name, current.full_shape, current.offset, current.tensor.clone())
        load_tensors([shard], checkpoint, index, manifest)
        if device_type == "cpu":
            torch.set_rng_state(shard.tensor)
        else:
            torch.cuda.set_rng_state(shard.tensor, device)
