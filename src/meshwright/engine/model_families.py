"""What differs between model families in a run: language models (transformers) and diffusion models (diffusers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer


@dataclass(frozen=True)
class ModelFamily:
    """The functions of a run that depend on the model family."""

    config_for: Callable[[Recipe], Any]
    read_config: Callable[[Mapping[str, Any]], Any]  # from a config.json
    spec_of: Callable[[Recipe, Any], ModelSpec]
    tiny: Callable[[Any, int], Any]  # a config with this many layers
    layer_types: Callable[[Any], int]  # number of distinct layer types
    open_source: Callable[
        [Recipe, Any, bool, Path | None], Any
    ]  # recipe, config, whether held-out data, initial weights
    trainer: Callable[[], type[Trainer]]
    modules: Callable[[Any], tuple[str, ...]]  # to import before ranks are forked
    write_random: Callable[[Any, Path, int], Path]  # writes a folder of random weights for --tiny
    export: Callable[[Trainer, Path, bool], None]  # writes the trained model; True: in one file


def family_of(recipe: Recipe) -> ModelFamily:
    """Return the family of the recipe's model."""
    from meshwright.engine.diffusion.config import is_diffusion

    return _diffusion() if is_diffusion(recipe) else _language()


def _language() -> ModelFamily:
    from meshwright.engine.model import config
    from meshwright.engine.model.build import transformers_config

    return ModelFamily(
        config_for=config.config_for,
        read_config=transformers_config,
        spec_of=config.spec_of,
        tiny=config.tiny,
        layer_types=config.distinct_layer_types,
        open_source=_open_tokens,
        trainer=_language_trainer,
        modules=_transformers_modules,
        write_random=_write_transformers,
        export=_export_transformers,
    )


def _open_tokens(recipe: Recipe, config: Any, held_out: bool, start: Path | None) -> Any:
    from meshwright.engine.data import open_source

    if getattr(config, "vision_config", None) is not None:
        from meshwright.engine.vision.data import open_images

        return open_images(recipe, config, held_out, start)
    return open_source(recipe, config.get_text_config().vocab_size, held_out, start)


def _language_trainer() -> type[Trainer]:
    from meshwright.engine.trainer import Trainer

    return Trainer


def _transformers_modules(config: Any) -> tuple[str, ...]:
    module = str(config.model_type).removesuffix("_text")  # the text part of a model shares its module
    return ("transformers", f"transformers.models.{module}.modeling_{module}")


def _write_transformers(config: Any, folder: Path, seed: int) -> Path:
    from meshwright.engine.tiny_folder import write_tiny_folder

    return write_tiny_folder(config, folder, seed)


def _export_transformers(trainer: Trainer, folder: Path, consolidated: bool) -> None:
    from meshwright.engine import hf_io
    from meshwright.engine.parallelize.fsdp import DTYPES

    recipe, start = trainer.recipe, trainer.weights
    tokenizer = tokenizer_folder(recipe, start, trainer.config)
    adapted = recipe.goal == "peft"
    if adapted and _export_adapters(trainer, folder, tokenizer):
        return
    hf_io.save_model(
        trainer.stages,
        trainer.mesh,
        trainer.config,
        folder,
        dtype=DTYPES[recipe.precision.compute],
        consolidated=consolidated,
        tokenizer=tokenizer,
        merged=adapted,
        overwrite=True,
    )


def _export_adapters(trainer: Trainer, folder: Path, tokenizer: Path | None) -> bool:
    """Write adapters in PEFT's format; warn and return False if the format cannot represent them."""
    from meshwright.engine import hf_io
    from meshwright.engine.metrics.jsonl import warn

    base = str(trainer.weights) if trainer.weights is not None else trainer.recipe.model
    first = trainer.mesh.world.rank == 0
    try:
        hf_io.save_adapters(trainer.stages, trainer.mesh, trainer.recipe.peft, folder, base)
    except InputError as error:  # the same on every rank
        if first:
            warn(f"{error.reason}: {folder} gets the model with merged adapters instead")
        return False
    if tokenizer is not None and first:
        hf_io.copy_tokenizer(tokenizer, folder)
    return True


def tokenizer_folder(recipe: Recipe, start: Path | None, config: Any) -> Path | None:
    """Return the folder of the training's tokenizer, which the export copies; None without one."""
    from meshwright.engine.data.tokenizers import local_folder, tokenizer_name
    from meshwright.engine.hf_io import has_tokenizer

    name = tokenizer_name(recipe, start)
    folder = local_folder(name) if name else None
    if folder is None or not has_tokenizer(folder):
        return None
    chosen = recipe.data.tokenizer or start is not None
    return folder if chosen or _read_the_data(folder, recipe, config) else None


def missing_tokenizer(recipe: Recipe, start: Path | None, config: Any) -> str:
    """Return that the export has no tokenizer although the data names the one that wrote it; empty otherwise."""
    from meshwright.engine.data.byte_level import NAME
    from meshwright.engine.data.shards import is_shard_folder, open_shards

    data = Path(recipe.data.dataset).expanduser()
    shards = recipe.goal == "pretrain" and not recipe.data.blend and is_shard_folder(data)
    if not shards or tokenizer_folder(recipe, start, config) is not None:
        return ""
    wrote = open_shards(data)[1].tokenizer
    named = NAME if wrote == NAME else f"FOLDER of {wrote}"
    return f"the exported model will have no tokenizer: data.tokenizer={named}, which wrote {data}, adds it"


def _read_the_data(tokenizer: Path, recipe: Recipe, config: Any) -> bool:
    """Return whether the tokens of a pretraining from random weights are those of the model's tokenizer."""
    from meshwright.engine.data.open_dataset import MOCK_NAMES
    from meshwright.engine.data.shards import is_shard_folder, open_shards
    from meshwright.engine.data.tokenize import serialize_tokenizer
    from meshwright.engine.data.tokenizers import highest_id, load_tokenizer

    names = [Path(name).expanduser() for name in recipe.data.blend or (recipe.data.dataset,) if name not in MOCK_NAMES]
    try:
        loaded = load_tokenizer(tokenizer)
        if not names or highest_id(loaded) >= config.get_text_config().vocab_size:
            return False
        tokenized = [path for path in names if is_shard_folder(path)]
        sha256 = serialize_tokenizer(loaded, str(tokenizer), append_eos=False).sha256 if tokenized else ""
        return all(open_shards(path)[1].tokenizer_sha256 == sha256 for path in tokenized)
    except InputError:  # the trained model is exported in any case
        return False


def _diffusion() -> ModelFamily:
    from meshwright.engine.diffusion import config
    from meshwright.engine.diffusion.data import open_latents

    return ModelFamily(
        config_for=config.config_for,
        read_config=config.denoiser_config,
        spec_of=config.spec_of,
        tiny=config.tiny,
        layer_types=config.layer_types,
        open_source=lambda recipe, config, held_out, start: open_latents(recipe, config, held_out),
        trainer=_diffusion_trainer,
        modules=_diffusers_modules,
        write_random=_write_diffusers,
        export=_export_diffusers,
    )


def _diffusion_trainer() -> type[Trainer]:
    from meshwright.engine.diffusion.trainer import DiffusionTrainer

    return DiffusionTrainer


def _diffusers_modules(config: Any) -> tuple[str, ...]:
    return (f"diffusers.models.transformers.transformer_{config.model_type}", "meshwright.engine.diffusion.trainer")


def _write_diffusers(config: Any, folder: Path, seed: int) -> Path:
    import torch

    from meshwright.engine.diffusion.build import diffusers_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        diffusers_model(config).save_pretrained(folder)
    return folder


def _export_diffusers(trainer: Trainer, folder: Path, consolidated: bool) -> None:
    from meshwright.engine.diffusion import hf_io
    from meshwright.engine.parallelize.fsdp import DTYPES

    model: Any = trainer.stages[0]
    most = float("inf") if consolidated else hf_io.FILE_BYTES
    hf_io.save_model(model, folder, trainer.mesh, DTYPES[trainer.recipe.precision.compute], most)
