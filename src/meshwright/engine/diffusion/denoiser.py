"""A diffusion transformer as one stage: latents and noise in, loss out. Module names are those of diffusers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.attention import Tables
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.diffusion.tensor import ActivationSharding


class Denoiser(nn.Module):
    """A diffusers transformer that takes tokens and returns the loss of its micro batch.

    Tokens are this rank's [samples, tokens, width], with sp and cp a part of the sample. `positions` are the positions
    (frame, row, column) of the tokens of all tp ranks.
    """

    first = last = True  # there is no pipeline
    embedding_on_last_stage = False
    head_is_tied = False
    mtp = None
    block_lists: tuple[str, ...] = ()  # attribute names of the block lists, in execution order

    def __init__(self, model: nn.Module, config: DenoiserConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self.sharding = ActivationSharding()
        self.partial_grads: frozenset[str] = frozenset()  # parameters whose gradients the step sums over tp
        self.losses: list[
            torch.Tensor
        ] = []  # per micro batch: the loss, and zeros for the other terms of language models
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The blocks by their index in the model."""
        blocks = [block for name in self.block_lists for block in getattr(self, name)]
        return dict(enumerate(blocks))

    @property
    def body(self) -> Denoiser:
        """The model itself, which has the config."""
        return self

    def shared_name(self, name: str) -> str:
        """Return the name of a parameter: there is one stage."""
        return name

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
        noisy = flow.add_noise(latents, noise, times).to(self.compute)
        pooled = None if pooled is None else pooled.to(self.compute)
        predicted = self.velocity(noisy, times, text.to(self.compute), positions[0], pooled)
        loss: torch.Tensor = flow.loss(predicted, self.to_output_order(noise - latents), weights)
        # With sp each tp rank has the loss of its own tokens, and the step averages over tp ranks.
        reported = loss.detach() * (self.sharding.tp.size if self.sharding.sp else 1)
        self.losses.append(torch.stack((reported, torch.zeros_like(reported), torch.zeros_like(reported))))
        return loss.reshape(1)

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the predicted velocity of every token, [samples, tokens, width]."""
        raise NotImplementedError

    def to_output_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reorder the values of tokens to the order of the model's output."""
        return tokens


class WanDenoiser(Denoiser):
    """Wan: self-attention over a video's tokens, then cross-attention to the text."""

    block_lists = ("blocks",)

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        model: Any = self
        patch = model.patch_embedding  # a convolution over non-overlapping patches is a matrix product
        hidden = F.linear(noisy, patch.weight.flatten(1), patch.bias)
        time, modulation, text, _ = model.condition_embedder(times * flow.TIME_SCALE, text)
        modulation = modulation.unflatten(1, (6, -1))
        tables = self._tables(positions)
        for block in model.blocks:
            hidden = block(hidden, text, modulation, tables)
        shift, scale = (model.scale_shift_table + time.unsqueeze(1)).chunk(2, 1)
        hidden = (model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        out: torch.Tensor = model.proj_out(hidden)
        return out

    def _tables(self, positions: torch.Tensor) -> Tables:
        """Return the rotary tables of the tokens: parts of every head rotate by frame, row and column."""
        rope: Any = self.rope
        widths = (rope.t_dim, rope.h_dim, rope.w_dim)
        cos, sin = (
            torch.cat([part[at] for part, at in zip(table.split(widths, 1), positions.unbind(1), strict=True)], 1)
            for table in (rope.freqs_cos, rope.freqs_sin)
        )
        return cos, sin

    def to_output_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """Wan's input patches are channel-major, its output patches position-major."""
        return torch.unflatten(tokens, -1, (self.config.channels, -1)).transpose(-1, -2).flatten(-2)


class FluxDenoiser(Denoiser):
    """FLUX: blocks with separate image and text weights, then blocks on one joint sequence."""

    block_lists = ("transformer_blocks", "single_transformer_blocks")

    def velocity(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        pooled: torch.Tensor | None,
    ) -> torch.Tensor:
        model: Any = self
        hidden = model.x_embedder(noisy)
        conditions = [times * flow.TIME_SCALE]
        if self.config.values["guidance_embeds"]:
            conditions.append(torch.full_like(times, flow.GUIDANCE * flow.TIME_SCALE))
        time = model.time_text_embed(*conditions, pooled)
        text = model.context_embedder(text)
        joint, single = self._tables(positions, text.shape[1])
        for block in model.transformer_blocks:
            text, hidden = block(hidden, text, time, joint)
        both = torch.cat((text, hidden), 1)
        for block in model.single_transformer_blocks:
            both = block(both, time, single)
        out: torch.Tensor = model.proj_out(model.norm_out(both[:, text.shape[1] :], time))
        return out

    def _tables(self, positions: torch.Tensor, text_tokens: int) -> tuple[Tables, Tables]:
        """Return rotary tables for joint blocks (text before image) and for single blocks (with sp, rank by rank)."""
        embed: Any = self.pos_embed
        parts = self.sharding.tp.size if self.sharding.sp else 1
        texts = positions.new_zeros((text_tokens * parts, positions.shape[1]))
        joint: Tables = embed(torch.cat((texts, positions)))
        if parts == 1:
            return joint, joint
        pairs = zip(texts.chunk(parts), positions.chunk(parts), strict=True)
        return joint, embed(torch.cat([part for pair in pairs for part in pair]))


DENOISERS: dict[str, type[Denoiser]] = {"wan": WanDenoiser, "flux": FluxDenoiser}
