"""The trainer of diffusion models: the engine's step on another model and other samples."""

from __future__ import annotations

from typing import Any

from meshwright.engine.diffusion.loader import LatentLoader
from meshwright.engine.diffusion.parallelize import parallelize
from meshwright.engine.trainer import Trainer


class DiffusionTrainer(Trainer):
    """A diffusion transformer, its optimizer and its latents, on one rank of a mesh.

    A step's loss is the mean squared error of velocities; its tokens are those of the latents.
    """

    def _make_stages(self) -> list[Any]:
        return [parallelize(self.config, self.recipe, self.mesh, self.device, self.weights)]

    def _make_loader(self, source: Any) -> LatentLoader:
        return LatentLoader(source, self.config, self.recipe, self.mesh, self.device)
