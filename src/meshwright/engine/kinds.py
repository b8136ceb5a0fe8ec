"""What differs between kinds of models, in one table: language models of transformers, diffusion models of diffusers.

Everything else of a run is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.loop import Trainer


@dataclass(frozen=True)
class Kind:
    """How models of a kind are described, made small, fed and trained."""

    config_for: Callable[[Recipe], Any]
    read_config: Callable[[Mapping[str, Any]], Any]  # from a config.json
    spec_of: Callable[[Recipe, Any], ModelSpec]
    tiny: Callable[[Any, int], Any]  # a config with this many layers
    kinds_of_layers: Callable[[Any], int]
    open_source: Callable[[Recipe, Any, bool], Any]  # with the config, and whether the samples are those held out
    trainer: Callable[[], type[Trainer]]
    modules: Callable[[Any], tuple[str, ...]]  # worth importing before ranks are forked


def kind_of(recipe: Recipe) -> Kind:
    """The kind of the model that a recipe trains."""
    from meshwright.engine.diffusion.config import is_diffusion

    return _diffusion() if is_diffusion(recipe) else _language()


def _language() -> Kind:
    from meshwright.engine.model import config
    from meshwright.engine.model.build import transformers_config

    return Kind(
        config_for=config.config_for,
        read_config=transformers_config,
        spec_of=config.spec_of,
        tiny=config.tiny,
        kinds_of_layers=config.kinds_of_layers,
        open_source=_open_tokens,
        trainer=_language_trainer,
        modules=_transformers_modules,
    )


def _open_tokens(recipe: Recipe, config: Any, held_out: bool) -> Any:
    from meshwright.engine.data import open_source

    return open_source(recipe, config.get_text_config().vocab_size, held_out)


def _language_trainer() -> type[Trainer]:
    from meshwright.engine.loop import Trainer

    return Trainer


def _transformers_modules(config: Any) -> tuple[str, ...]:
    module = str(config.model_type).removesuffix("_text")  # the text part of a model has no module of its own
    return ("transformers", f"transformers.models.{module}.modeling_{module}")


def _diffusion() -> Kind:
    from meshwright.engine.diffusion import config
    from meshwright.engine.diffusion.data import open_latents

    return Kind(
        config_for=config.config_for,
        read_config=config.denoiser_config,
        spec_of=config.spec_of,
        tiny=config.tiny,
        kinds_of_layers=config.kinds_of_layers,
        open_source=open_latents,
        trainer=_diffusion_trainer,
        modules=_diffusers_modules,
    )


def _diffusion_trainer() -> type[Trainer]:
    from meshwright.engine.diffusion.trainer import DiffusionTrainer

    return DiffusionTrainer


def _diffusers_modules(config: Any) -> tuple[str, ...]:
    return (f"diffusers.models.transformers.transformer_{config.model_type}", "meshwright.engine.diffusion.trainer")
