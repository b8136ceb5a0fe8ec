"""Shared by folder tests: a model loaded from a folder, its logits, and the tensors of a folder."""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors.torch import load_file
from tests.engine import parity
from tests.engine.families import FAMILIES
from tests.engine.hf_folder import write_tiny_folder
from tests.engine.ranks import run
from torch.distributed.tensor import DTensor

from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize import parallelize
from meshwright.recipes import types

TOKENS = 32


def write(path: Path, family: str, **options: Any) -> Path:
    """Return a private copy of a tiny folder."""
    return Path(shutil.copytree(_cached_folder(family, tuple(options.items())).name, path))


@lru_cache(maxsize=64)
def _cached_folder(family: str, options: tuple[tuple[str, Any], ...]) -> tempfile.TemporaryDirectory[str]:
    """Write the folder once, in a separate process: the parent of forked ranks must not run torch."""
    folder = tempfile.TemporaryDirectory()
    run(1, _write, folder.name, family, dict(options))
    return folder


def _write(rank: int, world: int, path: str, family: str, options: dict[str, Any]) -> str:
    return str(write_tiny_folder(Path(path), family, **options))


def recipe(layout: dict[str, Any] | None = None, peft: types.Peft | None = None, **sections: Any) -> types.Recipe:
    given = parity.recipe(types.Layout(**{"micro_batch_size": 2, **(layout or {})}), **sections)
    return given if peft is None else msgspec.structs.replace(given, goal="peft", peft=peft)


def start(family: str, given: types.Recipe, folder: str | None) -> tuple[list[Any], Mesh, Any]:
    """Return this rank's stages, with weights from a folder."""
    config = transformers_config(FAMILIES[family])
    mesh = build_mesh(given.layout, "cpu")
    where = Path(folder) if folder is not None else None
    return parallelize(config, given, mesh, torch.device("cpu"), where), mesh, config


def tokens() -> torch.Tensor:
    return (torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7) % 61


@torch.no_grad()
def engine_logits(stage: Any) -> torch.Tensor:
    """Return the logits of a single-stage model."""
    hidden: list[torch.Tensor] = []
    hook = stage.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    stage.eval()
    ids = tokens()
    positions = torch.arange(TOKENS).expand(2, -1)
    stage(ids, positions, labels=ids, weights=torch.ones_like(ids, dtype=torch.float32))
    hook.remove()
    logits = torch.nn.functional.linear(hidden[0], stage.lm_head.weight, stage.lm_head.bias)
    cap = getattr(stage.body.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(tokens(), use_cache=False).logits
    return found


def load(folder: Path | str) -> tuple[Any, dict[str, Any]]:
    """Return the model loaded by transformers, and its nonempty loading issues."""
    model, options = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",  # others leave out Gemma 2's softcap
    )
    return model, {what: names for what, names in options.items() if names}


def differ(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def tensors(folder: Path | str, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """Return all tensors in a folder's files."""
    return {name: tensor for file in Path(folder).glob(pattern) for name, tensor in load_file(file).items()}


def same(one: Path | str, other: Path | str) -> bool:
    """Return whether two folders have bitwise equal tensors."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def local_bytes(stages: list[Any]) -> int:
    """Return the bytes of a rank's weights."""
    parameters = [p for stage in stages for p in stage.parameters()]
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
