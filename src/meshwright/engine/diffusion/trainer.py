"""The trainer of diffusion models: the engine's training step with a denoiser and latents."""

from __future__ import annotations

from typing import Any

from meshwright.engine.diffusion.loader import LatentLoader
from meshwright.engine.diffusion.parallelize import parallelize
from meshwright.engine.trainer import Trainer


class DiffusionTrainer(Trainer):
    """A diffusion transformer, its optimizer and its data on one rank of a mesh.

    The loss is the mean squared error of velocities; tokens are latent tokens.
    """

    def _make_stages(self) -> list[Any]:
        return [parallelize(self.config, self.recipe, self.mesh, self.device, self.weights)]

    def _make_loader(self, source: Any) -> LatentLoader:
        return LatentLoader(source, self.config, self.recipe, self.mesh, self.device)
