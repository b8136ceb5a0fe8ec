"""Framework keys that cannot be used as an override, with the reason and the replacement."""

from __future__ import annotations

from meshwright.recipes.key_maps import hugging_face_removed
from meshwright.recipes.key_maps.key import RemovedKey

_FP8 = (
    "is the format of matmuls in linear layers here: fp8_tensor (one scale per tensor), fp8_row, fp8_block, "
    "fp8_delayed (Transformer Engine's), mxfp8",
    "precision.matmul=fp8_tensor",
)
_FP8_WORDS = ("fp8", "float8", "enable_fp8", "enable_float8", "use_fp8", "use_float8", "fp8_training", "te_fp8")
_GPUS = "GPUs are not part of the recipe; pass them on the command line"

REMOVED_KEYS: dict[str, RemovedKey] = {
    **hugging_face_removed.REMOVED,
    "train.grad_accum_steps": (
        "is derived from the batch size and the GPU count; set the global batch size",
        "train.global_batch_size={value}",
    ),
    "scheduler.min_lr_ratio": ("is a ratio to the peak; set the final learning rate", "schedule.min_lr={value}"),
    "lr_scheduler.min_lr_factor": ("is a ratio to the peak; set the final learning rate", "schedule.min_lr={value}"),
    "model.num_layers_in_first_pipeline_stage": (
        "is not supported; list the layers of every stage",
        "meshwright explain layout.stage_layers",
    ),
    "model.num_layers_in_last_pipeline_stage": (
        "is not supported; list the layers of every stage",
        "meshwright explain layout.stage_layers",
    ),
    "model.hierarchical_context_parallel_sizes": (
        "is not supported; set the inner all-to-all group size, the ring takes the rest of cp",
        "layout.cp_inner={value}",
    ),
    **dict.fromkeys((*_FP8_WORDS, "model.converters.float8", "transformer_engine.fp8"), _FP8),
    "model.fp8_hybrid": ("was removed upstream; set the matmul dtype", "precision.matmul=fp8_delayed"),
    "model.fp8_e4m3": ("was removed upstream; set the matmul dtype", "precision.matmul=fp8_delayed"),
    "model.fp8": ("is not supported; set the matmul dtype with its scaling", "precision.matmul=fp8_tensor"),
    "model.fp8_recipe": ("is not supported; set the matmul dtype with its scaling", "precision.matmul=mxfp8"),
    "model.enable_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=local"),
    "model.external_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=transformer_engine"),
    "compile.enabled": ("is ignored under fsdp2; compile is a kernel setting", "kernels.compile=true"),
    "train.ce_chunk_size": ("is not supported; the engine chooses the chunk size", "kernels.loss=chunked"),
    "trainer.num_nodes": (_GPUS, "--gpus {value}x8xH100", "meshwright launch --help"),
    "trainer.devices": (_GPUS, "--gpus {value}xH100", "--nproc {ranks}"),
    "cluster": (_GPUS, "--gpus {value}", "--nproc {ranks}"),
    "gpus": (_GPUS, "--gpus {value}", "--nproc {ranks}"),
    "goal": ("is part of the recipe name; choose another recipe", "meshwright recipes --goal {value}"),
    "model": ("is part of the recipe name; choose another recipe", "meshwright recipes {value}"),
    "dp": ("is derived from the GPUs and the other degrees; set the shard size", "layout.dp_shard={value}"),
}
