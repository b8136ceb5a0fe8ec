"""The transformer of a diffusion model as one stage: latents and noise in, the loss out. Names are diffusers' own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.attention import Tables
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.diffusion.tensor import Spread


class Denoiser(nn.Module):
    """A diffusers transformer that is given tokens and returns the loss of its micro batch.

    Tokens are [samples, tokens, width]: those of this rank, with sp and cp a part of the sample's. `positions` are
    the places (frame, row, column) of all tokens of the tp ranks together.
    """

    first = last = True  # there is no pipeline
    embedding_at_end = False
    mtp = None
    blocks_in: tuple[str, ...] = ()  # names of the lists of blocks, in the order in which they run

    def __init__(self, model: nn.Module, config: DenoiserConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self.spread = Spread()
        self.partial_grads: frozenset[str] = frozenset()  # parameters whose gradients the step sums over tp
        self.losses: list[torch.Tensor] = []  # of each micro batch: the loss, and zeros where language models have more
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The blocks by their place in the model."""
        blocks = [block for name in self.blocks_in for block in getattr(self, name)]
        return dict(enumerate(blocks))

    @property
    def body(self) -> Denoiser:
        """The model without its head: here there is none that could share weights with an embedding."""
        return self

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        weights: torch.Tensor,
        pooled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        noisy = flow.mixed(latents, noise, times).to(self.compute)
        pooled = None if pooled is None else pooled.to(self.compute)
        found = self.velocity(noisy, times, text.to(self.compute), positions[0], pooled)
        loss: torch.Tensor = flow.loss(found, self.as_output(noise - latents), weights)
        # With sp each tp rank has the loss of its own tokens; the step takes the mean over tp ranks.
        told = loss.detach() * (self.spread.tp.size if self.spread.sp else 1)
        self.losses.append(torch.stack((told, torch.zeros_like(told), torch.zeros_like(told))))
        return loss.reshape(1)

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        """The velocity that the model finds for every token, [samples, tokens, width]."""
        raise NotImplementedError

    def as_output(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens with their numbers in the order in which the model gives them."""
        return tokens


class WanDenoiser(Denoiser):
    """Wan: a video's tokens see each other, then the text."""

    blocks_in = ("blocks",)

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        whole: Any = self
        patch = whole.patch_embedding  # a convolution over patches that do not overlap is a product with each of them
        hidden = F.linear(noisy, patch.weight.flatten(1), patch.bias)
        time, modulation, text, _ = whole.condition_embedder(times * flow.TIMES, text)
        modulation = modulation.unflatten(1, (6, -1))
        tables = self._tables(positions)
        for block in whole.blocks:
            hidden = block(hidden, text, modulation, tables)
        shift, scale = (whole.scale_shift_table + time.unsqueeze(1)).chunk(2, 1)
        hidden = (whole.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        out: torch.Tensor = whole.proj_out(hidden)
        return out

    def _tables(self, positions: torch.Tensor) -> Tables:
        """Cosines and sines of the tokens: a part of every head turns with the frame, one with row and column each."""
        rope: Any = self.rope
        widths = (rope.t_dim, rope.h_dim, rope.w_dim)
        cos, sin = (
            torch.cat([part[at] for part, at in zip(table.split(widths, 1), positions.unbind(1), strict=True)], 1)
            for table in (rope.freqs_cos, rope.freqs_sin)
        )
        return cos, sin

    def as_output(self, tokens: torch.Tensor) -> torch.Tensor:
        """Wan takes a patch channel by channel and gives it place by place."""
        return torch.unflatten(tokens, -1, (self.config.channels, -1)).transpose(-1, -2).flatten(-2)


class FluxDenoiser(Denoiser):
    """FLUX: image and text with weights of their own, then as one sequence."""

    blocks_in = ("transformer_blocks", "single_transformer_blocks")

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        whole: Any = self
        hidden = whole.x_embedder(noisy)
        told = [times * flow.TIMES]
        if self.config.values["guidance_embeds"]:
            told.append(torch.full_like(times, flow.GUIDANCE * flow.TIMES))
        time = whole.time_text_embed(*told, pooled)
        text = whole.context_embedder(text)
        joint, single = self._tables(positions, text.shape[1])
        for block in whole.transformer_blocks:
            text, hidden = block(hidden, text, time, joint)
        both = torch.cat((text, hidden), 1)
        for block in whole.single_transformer_blocks:
            both = block(both, time, single)
        out: torch.Tensor = whole.proj_out(whole.norm_out(both[:, text.shape[1] :], time))
        return out

    def _tables(self, positions: torch.Tensor, text_tokens: int) -> tuple[Tables, Tables]:
        """Cosines and sines for blocks that see text before image, and for single blocks: with sp rank by rank."""
        embed: Any = self.pos_embed
        parts = self.spread.tp.size if self.spread.sp else 1
        texts = positions.new_zeros((text_tokens * parts, positions.shape[1]))
        joint: Tables = embed(torch.cat((texts, positions)))
        if parts == 1:
            return joint, joint
        pairs = zip(texts.chunk(parts), positions.chunk(parts), strict=True)
        return joint, embed(torch.cat([part for pair in pairs for part in pair]))


DENOISERS: dict[str, type[Denoiser]] = {"wan": WanDenoiser, "flux": FluxDenoiser}
