"""Train what a `meshwright bench` command trains with a plain transformers loop: one JSON line per try.

    python -m benchmarks.plain_loop RECIPE [--model M] [KEY=VALUE ...] --tries 4,2,4c [--wait] [--tiny]

The loop: AutoModelForCausalLM with SDPA (flex attention where the model has no SDPA), grouped experts, torch.compile of
each block, the loss in checkpointed chunks, clip_grad_norm_, fused AdamW; adapters from peft; torchao for fp8. Model,
layers, sequence length, sequences per step, trained part and formats of the states are those of the recipe.
A try is a micro batch; `c` recomputes activations, `a` runs under bf16 autocast. After a try that fits, a smaller micro
batch is not tried, nor the same with `c`. `--wait` waits for a line on stdin after the imports.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
from benchmarks.engine_h200 import DEVICE, figures, plain_step

from meshwright.api.targets import job_for
from meshwright.engine.model.config import config_for, distinct_layer_types, tiny
from meshwright.recipes import overrides
from meshwright.recipes.adapter_targets import is_target
from meshwright.recipes.types import Recipe

WARM, TIMED = 2, 4


class Try(msgspec.Struct, frozen=True):
    """One setting of the loop."""

    micro_batch: int
    recompute: bool = False
    autocast: bool = False

    @classmethod
    def parse(cls, text: str) -> Try:
        """Return the try that a word such as `4ac` means."""
        number = text.rstrip("ac")
        return cls(int(number), "c" in text, "a" in text)

    def needed_after(self, fitted: list[Try]) -> bool:
        """Return whether this can be faster than the tries that fitted."""
        return not any(
            done.micro_batch > self.micro_batch or (done.micro_batch == self.micro_batch and self.recompute)
            for done in fitted
        )


def recipe_from(name: str, model: str | None, changes: list[str]) -> Recipe:
    """Return the recipe that `bench` trains for these words."""
    found = job_for(name, None, "1xH200", changes, model=model).runnable()
    return overrides.apply(found, changes)


def build(recipe: Recipe, small: bool) -> tuple[Any, list[torch.nn.Parameter]]:
    """Return the model and its trainable parameters."""
    from transformers import AutoModelForCausalLM

    config = config_for(recipe)
    if small:
        config = tiny(config, max(2, distinct_layer_types(config)))
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[attr-defined]
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager" if small else "flex_attention"
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        config._experts_implementation = "grouped_mm"
    frozen = recipe.goal == "peft"
    bf16 = not small and (frozen or recipe.precision.master == "bf16")
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if bf16 else torch.float32).train()
    if recipe.precision.matmul.startswith("fp8") and DEVICE.type == "cuda":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    if frozen:
        add_adapters(model, recipe)
    if not small:
        for layer in model.base_model.layers:
            layer.compile()
    return model, [p for p in model.parameters() if p.requires_grad]


def add_adapters(model: Any, recipe: Recipe) -> None:
    """Add peft's adapters in place, to what the recipe names; stacked experts are parameters, not modules."""
    from peft import LoraConfig, get_peft_model

    targets = recipe.peft.targets
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and is_target(name, targets)]
    stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and is_target(name, targets)]
    settings = LoraConfig(
        r=recipe.peft.rank, lora_alpha=recipe.peft.alpha, target_modules=linears, target_parameters=stacked or None
    )
    get_peft_model(model, settings, autocast_adapter_dtype=recipe.precision.master == "fp32").to(DEVICE).train()


def measure(recipe: Recipe, setting: Try, model: Any, trainable: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Return speed and memory of one try, or its error."""
    layout = msgspec.structs.replace(recipe.layout, micro_batch_size=setting.micro_batch)
    recipe = msgspec.structs.replace(recipe, layout=layout)
    row = msgspec.to_builtins(setting) | {
        "attention": model.config._attn_implementation,
        "trainable": sum(p.numel() for p in trainable),
        "seq_length": recipe.data.seq_length,
        "global_batch_size": recipe.train.global_batch_size,
    }
    if setting.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return row | figures(
            lambda: plain_step(model, trainable, recipe, setting.autocast, use_cache=False), recipe, WARM, TIMED
        )
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return row | {"error": f"{type(error).__name__}: {lines[0]}"[:400]}
    finally:
        model.gradient_checkpointing_disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--nproc")  # bench's; this loop has one rank
    parser.add_argument("--tries", required=True)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_intermixed_args()
    recipe = recipe_from(options.recipe, options.model, options.changes)
    import transformers  # noqa: F401

    if options.wait:
        sys.stdin.readline()
    if options.tiny:
        recipe = msgspec.structs.replace(
            recipe,
            data=msgspec.structs.replace(recipe.data, seq_length=32),
            train=msgspec.structs.replace(recipe.train, global_batch_size=2),
        )
    model, trainable = build(recipe, options.tiny)
    fitted: list[Try] = []
    for setting in map(Try.parse, options.tries.split(",")):
        if not setting.needed_after(fitted):
            continue
        row = measure(recipe, setting, model, trainable)
        print(json.dumps(row), flush=True)
        if "tokens_per_s" in row:
            fitted.append(setting)
        for parameter in trainable:
            parameter.grad = None
        gc.collect()
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
