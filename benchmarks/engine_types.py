"""Compare our engine's loss and gradients with transformers' own forward pass, for every decoder type that we read.

    python benchmarks/engine_types.py [TYPE...]

One process on a CPU: a small model with random weights of ordinary size is saved, loaded by the engine and trained for
one step; transformers computes the loss of the same tokens with its eager attention and experts. The types that agree
are the table in src/meshwright/recipes/engine_models.py. Multipliers that are 1 by default do not show here.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29781")

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from decoders import small_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.trainer import Trainer
from meshwright.models import decode_float, known_architectures
from meshwright.recipes import types
from meshwright.recipes.engine_models import TRAINED

TOKENS = 48
MOST_PARAMETERS = 30_000_000
LOSS, GRADIENT = 2e-4, 5e-3  # relative differences that agree
KEPT = ("A_log", "dt_bias", ".D")  # initial values with a meaning


def recipe() -> types.Recipe:
    """Return a recipe of one step in fp32 that changes no weight."""
    return types.Recipe(
        name="parity",
        model="llama3_8b",
        goal="pretrain",
        cluster="1xH100",
        layout=types.Layout(micro_batch_size=1),
        precision=types.Precision(compute="fp32"),
        optimizer=types.Optimizer(name="sgd", lr=0.0, beta1=0.0, weight_decay=0.0),
        train=types.Train(global_batch_size=1, steps=10),
        data=types.Data(seq_length=TOKENS),
        moe=types.Moe(aux_loss=0.0),
    )


def reference(values: dict[str, Any]) -> Any:
    """Return transformers' model with weights large enough that every part changes the loss."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(transformers_config(values), attn_implementation="eager").float()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if "embed" in name or "wte" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
            elif not any(word in name for word in KEPT):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def compare(name: str) -> tuple[str, str]:
    """Return whether a type agrees, and the numbers."""
    values = json.loads(small_config(name, layers=4).to_json_string(use_diff=False), object_hook=decode_float)
    values["model_type"] = name
    config = transformers_config(values)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        return "too large", f"{size:,} parameters"
    given, theirs = recipe(), reference(values)
    source = Mock(config.get_text_config().vocab_size, TOKENS, 0)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        mesh = build_mesh(given.layout, "cpu")
        found = Trainer(given, transformers_config(values), mesh, torch.device("cpu"), source, Path(folder)).step(0)
    tokens = torch.as_tensor(np.asarray(source.samples([0]).tokens)).long()
    logits = theirs(input_ids=tokens[:, :TOKENS], use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TOKENS + 1].flatten())
    loss.backward()
    norm = float(torch.sqrt(sum((p.grad**2).sum() for p in theirs.parameters() if p.grad is not None)))
    close = abs(found.loss / loss.item() - 1) < LOSS and abs(found.grad_norm / norm - 1) < GRADIENT
    numbers = f"loss {found.loss:.5f} and {loss.item():.5f}, gradient norm {found.grad_norm:.4f} and {norm:.4f}"
    return "agrees" if close else "differs", numbers


def main() -> int:
    """Print one line for each type; fail if a type of the table does not agree."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", rank=0, world_size=1)
    wrong = []
    for name in sys.argv[1:] or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(known_architectures())):
        try:
            result, numbers = compare(name)
        except Exception as error:
            result, numbers = "fails", f"{type(error).__name__}: {error}"[:150]
        print(f"{name:24} {result:9} {numbers}", flush=True)
        if result == "differs" and name in TRAINED:
            wrong.append(name)
    print(f"of the table {', '.join(wrong)} differ" if wrong else "no type of the table differs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
