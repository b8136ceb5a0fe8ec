"""Keys that are gone or that cannot be one override, with the reason and what to write instead."""

from __future__ import annotations

from meshwright.recipes.key_maps.key import Gone

RETIRED: dict[str, Gone] = {
    "train.grad_accum_steps": (
        "accumulation follows from the batch and the GPUs: set the samples per step",
        "train.global_batch_size=…",
    ),
    "scheduler.min_lr_ratio": ("is a ratio to the peak: set the final learning rate itself", "schedule.min_lr=…"),
    "lr_scheduler.min_lr_factor": ("is a ratio to the peak: set the final learning rate itself", "schedule.min_lr=…"),
    "model.pipeline_model_parallel_layout": (
        "is a drawing of the stages: list their layers",
        "layout.stage_layers=[…]",
    ),
    "model.num_layers_in_first_pipeline_stage": ("list the layers of every stage", "layout.stage_layers=[…]"),
    "model.num_layers_in_last_pipeline_stage": ("list the layers of every stage", "layout.stage_layers=[…]"),
    "model.hierarchical_context_parallel_sizes": (
        "set the inner all-to-all group; the ring takes the rest of cp",
        "layout.cp_inner=…",
    ),
    "model.fp8_hybrid": ("was removed upstream: name the number format", "precision.matmul=fp8_delayed"),
    "model.fp8_e4m3": ("was removed upstream: name the number format", "precision.matmul=fp8_delayed"),
    "model.fp8": ("name the number format and its scaling", "precision.matmul=fp8_tensor"),
    "model.fp8_recipe": ("name the number format and its scaling", "precision.matmul=mxfp8"),
    "model.enable_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=local"),
    "model.external_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=transformer_engine"),
    "compile.enabled": ("is read by nothing under fsdp2: compile is a kernel setting", "kernels.compile=true"),
    "train.ce_chunk_size": ("chunks are sized by the engine", "kernels.loss=chunked"),
    "trainer.num_nodes": ("the GPUs belong to the question, not to the recipe", "--gpus 4x8xH100"),
    "trainer.devices": ("the GPUs belong to the question, not to the recipe", "--gpus 8xH100"),
    "cluster": ("the GPUs belong to the question, not to the recipe", "--gpus {value}"),
    "gpus": ("the GPUs belong to the question, not to the recipe", "--gpus {value}"),
    "goal": ("is chosen with the recipe", "--goal sft"),
    "model": ("is chosen with the recipe; its shape is changed in the architecture section", "architecture.layers=…"),
    "dp": ("follows from the GPUs and the other degrees; set how many ranks share one copy", "layout.dp_shard=…"),
}
