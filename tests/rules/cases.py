"""For every rule one case that breaks it, and the smallest change of that case that does not."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.case import Case

from .helpers import (
    BIASED_MIXTURE,
    DELTA,
    DENSE,
    DIFFUSION,
    GPT,
    LARGE_MIXTURE,
    LATENT,
    MIXTURE,
    NEXT,
    ODD_WIDTH,
    OLD_GPU,
    PLAIN_MIXTURE,
    QWEN35,
    STATE_SPACE,
    TIED,
    TWO_PREDICTIONS,
    VISION_LANGUAGE,
    WINDOWED,
    WRONG_TOPK,
    case,
    cluster,
)

B200, GB200, A100 = cluster(8, "B200"), cluster(8, "GB200"), cluster(8, "A100")
MANY, TWELVE, ONE = cluster(64), cluster(12), cluster(1)


def _activations(base: float) -> Any:
    """Memory whose activations grow with the micro batch and shrink by recompute and model parallelism."""

    def memory(c: Case) -> dict[str, Any]:
        kept = {"none": 1.0, "selective": 0.6, "full": 0.1}[str(c.recompute)]
        return {"activations": base * c.micro_batch_size * kept / (c.tp * c.cp)}

    return memory


def _state(base: float) -> Any:
    """Memory whose optimizer state is cut by tensor and pipeline parallelism."""
    return lambda c: {"optimizer": base / (c.tp * c.pp)}


def _gathered(c: Case) -> dict[str, Any]:
    return {"buffers": 2.0 if c.reshard_after_forward else 6.0}


def _offloaded(c: Case) -> dict[str, Any]:
    return {"optimizer": 0.0 if c.offload == "optimizer" else 20.0}


# rule: (what breaks it, what to change so that it does not)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # batch
    "batch.divides": ({"micro_batch_size": 3, "global_batch_size": 512}, {"micro_batch_size": 4}),
    "batch.smaller-than-data-parallel": ({"on": MANY, "global_batch_size": 32}, {"global_batch_size": 64}),
    "batch.benchmark-as-production": ({"benchmark": True, "steps": 1000}, {"steps": 50}),
    "batch.one-huge-micro-batch": ({"micro_batch_size": 64}, {"micro_batch_size": 8}),
    # data
    "data.mock-fine-tuning": ({"goal": "sft", "dataset": "mock"}, {"dataset": "squad"}),
    "data.instructions-for-pretraining": ({"dataset": "squad"}, {"dataset": "corpus"}),
    "data.no-images": ({"spec": VISION_LANGUAGE, "goal": "sft"}, {"images": True}),
    "data.text-set-with-images": (
        {"spec": VISION_LANGUAGE, "goal": "sft", "images": True, "dataset": "squad"},
        {"dataset": "cord-v2"},
    ),
    "data.images-without-eyes": ({"images": True}, {"spec": VISION_LANGUAGE}),
    "data.packing-micro-batch": (
        {"engine": "megatron", "goal": "sft", "packing": True, "micro_batch_size": 2},
        {"micro_batch_size": 1},
    ),
    "data.packing-refused": ({"engine": "megatron", "spec": NEXT, "packing": True}, {"spec": DENSE}),
    "data.packing-prediction-layers": (
        {"engine": "megatron", "spec": LATENT, "packing": True, "mtp_loss": 0.1},
        {"mtp_loss": 0.0},
    ),
    "data.packing-attention": ({"packing": True, "attention": "eager"}, {"attention": "flash"}),
    "data.padding-waste": ({"goal": "sft", "dataset": "squad"}, {"packing": True}),
    "data.no-workers": ({"workers": 0, "dataset": "corpus"}, {"workers": 2}),
    # diffusion
    "diffusion.pipeline": ({"spec": DIFFUSION, "pp": 2}, {"pp": 1}),
    "diffusion.packing": ({"spec": DIFFUSION, "packing": True}, {"packing": False}),
    "diffusion.adapters": ({"spec": DIFFUSION, "goal": "peft"}, {"goal": "sft"}),
    # dispatch
    "dispatch.deepep-gpu": ({"spec": MIXTURE, "on": GB200, "ep": 8, "dispatcher": "deepep"}, {"on": B200}),
    "dispatch.hybridep-gpu": (
        {"spec": MIXTURE, "on": cluster(8, "MI300X"), "ep": 8, "dispatcher": "hybridep"},
        {"on": cluster(8)},
    ),
    "dispatch.nothing-to-send": ({"spec": MIXTURE, "dispatcher": "deepep"}, {"ep": 8}),
    "dispatch.allgather-large": ({"spec": MIXTURE, "on": MANY, "ep": 16, "dispatcher": "allgather"}, {"ep": 8}),
    "dispatch.capacity-allgather": (
        {"engine": "megatron", "spec": MIXTURE, "capacity_factor": 1.0, "dispatcher": "allgather"},
        {"dispatcher": "alltoall"},
    ),
    "dispatch.shared-overlap-nothing": ({"spec": PLAIN_MIXTURE, "shared_expert_overlap": True}, {"spec": MIXTURE}),
    "dispatch.shared-overlap-recompute": (
        {
            "spec": MIXTURE,
            "shared_expert_overlap": True,
            "recompute": "selective",
            "recompute_modules": ("shared_experts", "core_attn"),
        },
        {"recompute_modules": ("core_attn",)},
    ),
    "dispatch.grouped-gemm": ({"spec": MIXTURE, "on": OLD_GPU}, {"on": A100}),
    "dispatch.overlap-ranks": ({"engine": "megatron", "spec": MIXTURE, "ep_overlap": True}, {"ep": 8}),
    "dispatch.overlap-dispatcher": (
        {"engine": "megatron", "spec": MIXTURE, "ep_overlap": True, "ep": 8, "dispatcher": "allgather"},
        {"dispatcher": "alltoall"},
    ),
    "dispatch.overlap-interleaving": (
        {"engine": "megatron", "spec": MIXTURE, "ep_overlap": True, "ep": 4, "pp": 2, "strategy": "zero1"},
        {"vp": 2, "pp_schedule": "interleaved_1f1b"},
    ),
    "dispatch.overlap-recompute": (
        {"engine": "megatron", "spec": MIXTURE, "ep_overlap": True, "ep": 8, "recompute": "full"},
        {"recompute": "selective"},
    ),
    "dispatch.overlap-shared-experts": (
        {"engine": "megatron", "spec": MIXTURE, "ep_overlap": True, "ep": 8, "shared_expert_overlap": True},
        {"shared_expert_overlap": False},
    ),
    "dispatch.overlap-precision": (
        {"engine": "megatron", "spec": MIXTURE, "ep_overlap": True, "ep": 8, "compute": "fp32"},
        {"compute": "bf16"},
    ),
    "dispatch.overlap-prediction-layers": (
        {"engine": "megatron", "spec": TWO_PREDICTIONS, "ep_overlap": True, "ep": 8, "mtp_loss": 0.1},
        {"spec": LATENT},
    ),
    # engine
    "engine.no-tp": ({"engine": "fsdp1", "tp": 2}, {"tp": 1}),
    "engine.no-pp": ({"engine": "fsdp1", "pp": 2}, {"pp": 1}),
    "engine.no-cp": ({"engine": "kempnerforge", "cp": 2}, {"engine": "torchtitan"}),
    "engine.no-ep": ({"engine": "fsdp1", "spec": MIXTURE, "ep": 2}, {"ep": 1}),
    "engine.no-etp": ({"engine": "automodel", "spec": MIXTURE, "etp": 2}, {"engine": "megatron"}),
    "engine.no-vp": ({"engine": "deepspeed", "strategy": "zero1", "pp": 2, "vp": 2}, {"vp": 1}),
    # graphs
    "graphs.offered": ({"engine": "kempnerforge", "cuda_graphs": "local"}, {"engine": "torchtitan"}),
    "graphs.random-states": (
        {"engine": "megatron", "cuda_graphs": "transformer_engine"},
        {"te_rng_tracker": True},
    ),
    "graphs.packing": ({"cuda_graphs": "transformer_engine", "packing": True}, {"pad_to_max_length": True}),
    "graphs.full-recompute": (
        {"cuda_graphs": "transformer_engine", "recompute": "full"},
        {"cuda_graphs": "full_iteration"},
    ),
    "graphs.local-scope": (
        {"engine": "megatron", "cuda_graphs": "local", "te_rng_tracker": True, "cuda_graph_scope": ("attn",)},
        {"cuda_graph_scope": ("full_iteration",)},
    ),
    "graphs.whole-iteration-scope": (
        {"cuda_graphs": "full_iteration", "cuda_graph_scope": ("attn",)},
        {"cuda_graph_scope": ()},
    ),
    "graphs.nan-check": (
        {"engine": "megatron", "cuda_graphs": "full_iteration", "te_rng_tracker": True},
        {"check_nan": False},
    ),
    "graphs.experts-or-router": (
        {
            "spec": MIXTURE,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe", "moe_router"),
            "capacity_factor": 1.0,
        },
        {"cuda_graph_scope": ("moe_router",)},
    ),
    "graphs.preprocess-needs-router": (
        {"spec": MIXTURE, "cuda_graphs": "transformer_engine", "cuda_graph_scope": ("moe_preprocess",)},
        {"cuda_graph_scope": ("moe_router", "moe_preprocess")},
    ),
    "graphs.experts-need-capacity": (
        {"spec": MIXTURE, "cuda_graphs": "transformer_engine", "cuda_graph_scope": ("attn", "moe")},
        {"capacity_factor": 1.0},
    ),
    "graphs.modules-of-the-model": (
        {"cuda_graphs": "transformer_engine", "cuda_graph_scope": ("attn", "mamba")},
        {"cuda_graph_scope": ("attn",)},
    ),
    "graphs.scope-unused": ({"cuda_graph_scope": ("attn",)}, {"cuda_graphs": "transformer_engine"}),
    "graphs.pipeline": ({"engine": "torchtitan", "cuda_graphs": "full_iteration", "pp": 2}, {"pp": 1}),
    "graphs.syncing-dispatch": (
        {"engine": "torchtitan", "spec": MIXTURE, "ep": 8, "cuda_graphs": "full_iteration"},
        {"dispatcher": "hybridep"},
    ),
    # heads
    "heads.attention": ({"on": TWELVE, "tp": 3, "global_batch_size": 480}, {"tp": 4}),
    "heads.kv-groups": (
        {"engine": "megatron", "on": TWELVE, "tp": 12, "global_batch_size": 480},
        {"on": cluster(16), "tp": 16},
    ),
    "heads.kv-heads": ({"engine": "torchtitan", "on": cluster(16), "tp": 16}, {"tp": 8}),
    "heads.kv-copies": ({"on": cluster(16), "tp": 16, "sp": True}, {"tp": 8}),
    "heads.ffn-width": ({"engine": "megatron", "spec": ODD_WIDTH, "tp": 8}, {"tp": 1}),
    "heads.vocabulary": ({"spec": ODD_WIDTH, "tp": 2, "sp": True}, {"tp": 1}),
    "heads.mamba": ({"spec": STATE_SPACE, "on": cluster(16), "tp": 16}, {"tp": 8}),
    "heads.mamba-context": ({"spec": STATE_SPACE, "on": cluster(128), "cp": 128}, {"cp": 64}),
    "heads.gated-delta": ({"spec": DELTA, "on": cluster(32), "tp": 32}, {"tp": 16}),
    "heads.gated-delta-context": ({"spec": DELTA, "on": cluster(32), "tp": 2, "sp": True, "cp": 16}, {"cp": 8}),
    # kernels
    "kernels.attention-offered": ({"engine": "megatron", "attention": "flex"}, {"attention": "flash"}),
    "kernels.eager-attention": ({"attention": "eager"}, {"seq_length": 1024}),
    "kernels.compiled-experts": ({"engine": "kempnerforge", "spec": MIXTURE, "compile": True}, {"spec": DENSE}),
    "kernels.deterministic-loss": (
        {"engine": "megatron", "deterministic": True, "loss": "fused_linear"},
        {"loss": "vocab_parallel"},
    ),
    "kernels.loss-offered": ({"engine": "kempnerforge", "loss": "fused_linear"}, {"loss": "chunked"}),
    "kernels.whole-logits": ({"loss": "plain", "micro_batch_size": 4}, {"loss": "chunked"}),
    # learning rate
    "learning_rate.offered": ({"engine": "megatron", "schedule_name": "rex"}, {"engine": "kempnerforge"}),
    "learning_rate.warm-up-to-the-end": ({"steps": 100, "warmup_steps": 500}, {"warmup_steps": 10}),
    "learning_rate.no-warm-up": ({"warmup_steps": 0}, {"warmup_steps": 100}),
    "learning_rate.minimum-above-peak": ({"lr": 1e-5, "min_lr": 3e-5}, {"min_lr": 1e-6}),
    "learning_rate.decay-inside-warm-up": ({"decay_steps": 100, "warmup_steps": 500}, {"decay_steps": 1000}),
    "learning_rate.decay-unfinished": ({"decay_steps": 500_000}, {"decay_steps": 200_000}),
    "learning_rate.adapters": ({"goal": "peft", "lr": 5e-6, "min_lr": 0.0}, {"lr": 1e-4}),
    "learning_rate.fine-tuning": ({"goal": "sft", "lr": 3e-4}, {"lr": 1e-5, "min_lr": 0.0}),
    "learning_rate.pretraining": ({"lr": 5e-3}, {"lr": 3e-4}),
    "learning_rate.schedule-free": (
        {"optimizer_name": "schedule_free_adamw"},
        {"schedule_name": "constant"},
    ),
    # memory
    "memory.replicated-state": ({"strategy": "ddp"}, {"goal": "peft"}),
    "memory.state": ({"memory": _state(150.0)}, {"tp": 4, "sp": True}),
    "memory.peak": ({"memory": _activations(30.0), "micro_batch_size": 4}, {"micro_batch_size": 1}),
    "memory.tight": ({"memory": _activations(18.0), "micro_batch_size": 4}, {"micro_batch_size": 1}),
    "memory.recompute-not-needed": ({"memory": _activations(30.0), "recompute": "full"}, {"micro_batch_size": 4}),
    "memory.tensor-parallel-not-needed": (
        {"memory": _activations(20.0), "tp": 2, "sp": True},
        {"memory": _activations(100.0)},
    ),
    "memory.offload-not-needed": ({"memory": _offloaded, "offload": "optimizer"}, {"offload": "none"}),
    "memory.gathers-every-micro-batch": ({"memory": _gathered, "pp": 2}, {"reshard_after_forward": False}),
    "memory.underused": ({"memory": _activations(5.0)}, {"micro_batch_size": 8}),
    # experts
    "moe.ep-needs-experts": ({"ep": 2}, {"spec": MIXTURE}),
    "moe.experts-divide": ({"spec": MIXTURE, "on": TWELVE, "ep": 3, "global_batch_size": 480}, {"ep": 4}),
    "moe.topk": ({"spec": WRONG_TOPK}, {"spec": MIXTURE}),
    "moe.expert-bias": ({"engine": "megatron", "spec": BIASED_MIXTURE, "etp": 2}, {"spec": MIXTURE}),
    "moe.expert-width": ({"spec": MIXTURE, "on": TWELVE, "etp": 3, "global_batch_size": 480}, {"etp": 4}),
    "moe.ep-too-low": ({"spec": LARGE_MIXTURE, "on": MANY, "ep": 1}, {"ep": 64}),
    "moe.experts-before-tensor-parallel": ({"spec": MIXTURE, "tp": 4, "sp": True}, {"ep": 8}),
    "moe.copied-over-tensor-ranks": ({"engine": "kempnerforge", "spec": MIXTURE, "tp": 4}, {"tp": 1}),
    "moe.same-batch-on-expert-ranks": ({"engine": "kempnerforge", "spec": MIXTURE, "ep": 4}, {"ep": 1}),
    "moe.forced-balance": ({"spec": MIXTURE, "force_balance": True}, {"benchmark": True}),
    "moe.unbalanced-router": ({"spec": MIXTURE, "balancing": "none"}, {"balancing": "bias"}),
    "moe.drops-tokens": ({"spec": MIXTURE, "capacity_factor": 0.8}, {"capacity_factor": 1.25}),
    "moe.router-precision": ({"spec": MIXTURE, "router_dtype": "bf16"}, {"router_dtype": "fp32"}),
    # sequence
    "sequence.context-halves": ({"cp": 4, "seq_length": 4100}, {"seq_length": 4096}),
    "sequence.tensor-parts": ({"tp": 8, "sp": True, "seq_length": 4100}, {"seq_length": 4096}),
    "sequence.position-table": ({"spec": GPT, "seq_length": 4096}, {"seq_length": 2048}),
    "sequence.beyond-model": ({"goal": "sft", "seq_length": 262144}, {"goal": "pretrain"}),
    "sequence.long-without-context-parallel": ({"seq_length": 65536}, {"cp": 4}),
    "sequence.consider-context-parallel": ({"seq_length": 32768}, {"cp": 2}),
    "sequence.context-parallel-not-needed": ({"cp": 2}, {"seq_length": 16384}),
    "sequence.all-to-all-heads": (
        {"on": MANY, "cp": 16, "cp_comm": "a2a", "seq_length": 65536},
        {"cp": 8},
    ),
    "sequence.hierarchy": (
        {"cp": 8, "cp_comm": "a2a+ring", "cp_inner": 3, "seq_length": 65536},
        {"cp_inner": 4},
    ),
    "sequence.exchange-offered": ({"engine": "torchtitan", "cp": 2, "cp_comm": "a2a"}, {"cp_comm": "allgather"}),
    "sequence.attention-kernel": ({"cp": 2, "attention": "eager"}, {"attention": "flash"}),
    "sequence.sliding-window-ring": ({"engine": "megatron", "spec": WINDOWED, "cp": 2}, {"cp_comm": "a2a"}),
    "sequence.packing-over-context": ({"engine": "automodel", "packing": True, "cp": 2}, {"attention": "te"}),
    "sequence.loss-per-token": ({"engine": "megatron", "goal": "sft", "cp": 2}, {"per_token_loss": True}),
    # network
    "network.tensor-parallel-domain": ({"on": cluster(16), "tp": 16, "sp": True}, {"on": cluster(16, "GB200")}),
    "network.tensor-parallel-straddles": (
        {"on": cluster(48), "spec": ODD_WIDTH, "tp": 6, "sp": True, "global_batch_size": 480},
        {"tp": 8},
    ),
    "network.context-domain": ({"on": MANY, "tp": 2, "sp": True, "cp": 8, "cp_comm": "allgather"}, {"cp_comm": "ring"}),
    "network.expert-domain": ({"spec": MIXTURE, "on": MANY, "ep": 32}, {"dispatcher": "hybridep"}),
    "network.very-wide-sharding": ({"on": cluster(1024), "global_batch_size": 1024}, {"dp_replicate": 16}),
    # offload
    "offload.offered": ({"engine": "kempnerforge", "offload": "params"}, {"engine": "torchtitan"}),
    "offload.activations-pipeline": (
        {"engine": "megatron", "strategy": "zero1", "offload": "activations", "pp": 2},
        {"pp": 1},
    ),
    "offload.activations-recompute": ({"offload": "activations", "recompute": "full"}, {"recompute": "none"}),
    "offload.params-strategy": ({"offload": "params", "strategy": "megatron_fsdp"}, {"strategy": "fsdp2"}),
    "offload.optimizer-strategy": ({"engine": "megatron", "offload": "optimizer"}, {"strategy": "zero1"}),
    "offload.optimizer-fp8": (
        {
            "engine": "megatron",
            "strategy": "zero1",
            "offload": "optimizer",
            "matmul": "fp8_tensor",
            "fp8_gather": True,
        },
        {"matmul": "fp8_delayed"},
    ),
    "offload.params-slow": ({"offload": "params"}, {"on": ONE}),
    # optimizer
    "optimizer.offered": ({"engine": "torchtitan", "optimizer_name": "muon"}, {"engine": "kempnerforge"}),
    "optimizer.muon-sharded-parameters": ({"engine": "megatron", "optimizer_name": "muon"}, {"strategy": "zero1"}),
    "optimizer.muon-tensor-parallel": ({"optimizer_name": "muon", "tp": 2, "sp": True}, {"tp": 1}),
    "optimizer.no-clipping": ({"clip_grad": 0.0}, {"clip_grad": 1.0}),
    "optimizer.slow-second-moment": ({"beta2": 0.999}, {"beta2": 0.95}),
    "optimizer.no-weight-decay": ({"weight_decay": 0.0}, {"weight_decay": 0.1}),
    "optimizer.plain-sgd": ({"optimizer_name": "sgd"}, {"optimizer_name": "adamw"}),
    # overlap
    "overlap.gather-needs-sharding": ({"engine": "megatron", "strategy": "ddp"}, {"overlap_param_gather": False}),
    "overlap.gather-needs-reduction": (
        {"engine": "megatron", "strategy": "zero1", "overlap_grad_reduce": False},
        {"overlap_param_gather": False},
    ),
    "overlap.tensor-needs-sequence-parallel": ({"tp": 2, "tp_comm_overlap": True}, {"sp": True}),
    "overlap.async-tensor-parallel": (
        {"engine": "torchtitan", "tp": 2, "sp": True, "tp_comm_overlap": True},
        {"compile": True},
    ),
    "overlap.expert-gradients-on-hopper": (
        {"engine": "megatron", "spec": MIXTURE, "ep": 8, "strategy": "zero1"},
        {"on": B200},
    ),
    "overlap.reduction-exposed": (
        {"engine": "megatron", "strategy": "zero1", "overlap_grad_reduce": False, "overlap_param_gather": False},
        {"overlap_grad_reduce": True},
    ),
    # peft
    "peft.settings-unused": ({"goal": "sft", "rank": 8}, {"goal": "peft"}),
    "peft.no-targets": ({"goal": "peft", "targets": ()}, {"targets": ("qkv",)}),
    "peft.targets-of-the-model": ({"goal": "peft", "targets": ("qkv", "mamba_in")}, {"targets": ("qkv",)}),
    "peft.method-offered": ({"engine": "megatron", "goal": "peft", "method": "qlora"}, {"method": "dora"}),
    "peft.engine": ({"engine": "kempnerforge", "goal": "peft"}, {"goal": "sft"}),
    "peft.qwen3-next": ({"engine": "megatron", "spec": NEXT, "goal": "peft"}, {"goal": "sft"}),
    "peft.experts-tensor-parallel": ({"engine": "automodel", "spec": MIXTURE, "goal": "peft", "tp": 2}, {"tp": 1}),
    "peft.dora-experts": (
        {"engine": "automodel", "spec": MIXTURE, "goal": "peft", "method": "dora"},
        {"targets": ("qkv",)},
    ),
    "peft.qlora-tensor-parallel": ({"goal": "peft", "method": "qlora", "tp": 2, "sp": True}, {"tp": 1, "sp": False}),
    "peft.qlora-fp8": ({"goal": "peft", "method": "qlora", "matmul": "fp8_tensor"}, {"method": "lora"}),
    "peft.scale": ({"goal": "peft", "alpha": 512.0}, {"alpha": 64.0}),
    # pipeline
    "pipeline.more-stages-than-layers": ({"on": MANY, "pp": 64}, {"pp": 32}),
    "pipeline.even-split": ({"on": TWELVE, "pp": 3, "global_batch_size": 480}, {"pp": 2}),
    "pipeline.uneven-split": (
        {"engine": "torchtitan", "on": TWELVE, "pp": 3, "global_batch_size": 480},
        {"pp": 2},
    ),
    "pipeline.stage-count": ({"pp": 2, "stage_layers": (10, 11, 11)}, {"stage_layers": (16, 16)}),
    "pipeline.stage-sum": ({"pp": 2, "stage_layers": (16, 15)}, {"stage_layers": (16, 16)}),
    "pipeline.two-ways-to-split": (
        {"pp": 2, "stage_layers": (16, 16), "embedding_as_layer": True},
        {"embedding_as_layer": False},
    ),
    "pipeline.unbalanced": ({"pp": 2, "stage_layers": (28, 4)}, {"stage_layers": (17, 15)}),
    "pipeline.chunks-need-stages": ({"vp": 2}, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    "pipeline.tied-embeddings": ({"engine": "torchtitan", "spec": TIED, "pp": 2}, {"engine": "meshwright"}),
    "pipeline.experts": ({"engine": "kempnerforge", "spec": MIXTURE, "pp": 2}, {"spec": DENSE}),
    "pipeline.vision": ({"engine": "kempnerforge", "spec": VISION_LANGUAGE, "pp": 2}, {"spec": DENSE}),
    # precision
    "precision.fp8-gpu": ({"on": A100, "matmul": "fp8_tensor"}, {"on": cluster(8)}),
    "precision.block-scaled-gpu": ({"matmul": "mxfp8"}, {"on": B200}),
    "precision.blockwise-on-blackwell": ({"matmul": "fp8_block", "on": B200}, {"on": cluster(8)}),
    "precision.format-offered": ({"engine": "torchtitan", "matmul": "fp8_delayed"}, {"matmul": "fp8_tensor"}),
    "precision.delayed-first-last": (
        {"engine": "megatron", "matmul": "fp8_delayed", "first_last_bf16": True},
        {"matmul": "fp8_tensor"},
    ),
    "precision.delayed-recompute": (
        {
            "engine": "megatron",
            "matmul": "fp8_delayed",
            "recompute": "selective",
            "recompute_modules": ("layernorm",),
        },
        {"recompute_modules": ("mlp",)},
    ),
    "precision.gather-needs-fp8": ({"fp8_gather": True}, {"matmul": "fp8_tensor"}),
    "precision.gather-needs-sharding": (
        {"goal": "peft", "strategy": "ddp", "matmul": "fp8_tensor", "fp8_gather": True},
        {"fp8_gather": False},
    ),
    "precision.fp8-tensor-parallel": ({"engine": "kempnerforge", "matmul": "fp8_tensor", "tp": 2}, {"tp": 1}),
    "precision.fp8-widths": ({"spec": ODD_WIDTH, "matmul": "fp8_tensor"}, {"matmul": "same"}),
    "precision.fp8-without-compile": ({"matmul": "fp8_tensor"}, {"compile": True}),
    "precision.fp8-over-fp32": ({"matmul": "fp8_tensor", "compute": "fp32"}, {"compute": "bf16"}),
    "precision.fp16-fsdp2": ({"engine": "megatron", "compute": "fp16"}, {"strategy": "zero1"}),
    "precision.fp16": ({"compute": "fp16"}, {"compute": "bf16"}),
    "precision.bf16-master": ({"master": "bf16"}, {"master": "fp32"}),
    "precision.no-fp32-master": ({"engine": "kempnerforge"}, {"master": "bf16", "moments": "bf16"}),
    "precision.bf16-moments": ({"engine": "megatron", "moments": "bf16"}, {"strategy": "zero1"}),
    "precision.bf16-reduction": ({"on": cluster(256), "reduce": "bf16"}, {"on": MANY}),
    "precision.bf16-accumulation": ({"grads": "bf16"}, {"micro_batch_size": 8}),
    "precision.nvfp4-everywhere": ({"on": B200, "matmul": "nvfp4"}, {"first_last_bf16": True}),
    # recompute
    "recompute.modules-of-the-model": (
        {"recompute": "selective", "recompute_modules": ("core_attn", "moe_act")},
        {"spec": MIXTURE},
    ),
    "recompute.modules-unused": ({"recompute": "full", "recompute_modules": ("mlp",)}, {"recompute": "selective"}),
    "recompute.layers-with-selective": (
        {"engine": "megatron", "recompute": "selective", "recompute_layers": 2},
        {"recompute": "full"},
    ),
    "recompute.more-layers-than-stage": ({"recompute": "full", "recompute_layers": 40}, {"recompute_layers": 16}),
    "recompute.expert-activation": (
        {
            "engine": "megatron",
            "spec": MIXTURE,
            "recompute": "selective",
            "recompute_modules": ("moe_act",),
            "grouped_gemm": False,
        },
        {"grouped_gemm": True},
    ),
    "recompute.sharded-selective": (
        {"engine": "automodel", "strategy": "megatron_fsdp", "recompute": "selective"},
        {"strategy": "fsdp2"},
    ),
    "recompute.sharded-full": (
        {"engine": "automodel", "strategy": "megatron_fsdp", "recompute": "full"},
        {"strategy": "fsdp2"},
    ),
    "recompute.flash-attention": (
        {"engine": "megatron", "recompute": "selective"},
        {"recompute_modules": ("core_attn", "layernorm")},
    ),
    # schedule
    "schedule.one-chunk": ({"pp": 2, "vp": 2}, {"pp_schedule": "interleaved_1f1b"}),
    "schedule.several-chunks": ({"pp": 2, "pp_schedule": "interleaved_1f1b"}, {"vp": 2}),
    "schedule.v-shaped": ({"pp": 2, "vp": 4, "pp_schedule": "zbv"}, {"vp": 2}),
    "schedule.offered": (
        {"engine": "megatron", "strategy": "zero1", "pp": 2, "pp_schedule": "gpipe"},
        {"pp_schedule": "1f1b"},
    ),
    "schedule.micro-batches": ({"pp": 8, "global_batch_size": 4}, {"global_batch_size": 8}),
    "schedule.idle-stages": ({"engine": "torchtitan", "pp": 8, "global_batch_size": 4}, {"global_batch_size": 8}),
    "schedule.dualpipe-micro-batches": (
        {"pp": 4, "vp": 2, "pp_schedule": "dualpipe_v", "global_batch_size": 12},
        {"global_batch_size": 16},
    ),
    "schedule.micro-batch-groups": (
        {
            "engine": "megatron",
            "strategy": "zero1",
            "pp": 4,
            "vp": 2,
            "pp_schedule": "interleaved_1f1b",
            "global_batch_size": 12,
        },
        {"global_batch_size": 16},
    ),
    "schedule.micro-batch-rounds": (
        {"pp": 2, "vp": 2, "pp_schedule": "interleaved_1f1b", "global_batch_size": 20},
        {"global_batch_size": 32},
    ),
    "schedule.no-interleaving": ({"pp": 4, "global_batch_size": 64}, {"global_batch_size": 512}),
    "schedule.bubble": (
        {"pp": 8, "vp": 2, "pp_schedule": "interleaved_1f1b", "global_batch_size": 8},
        {"global_batch_size": 64},
    ),
    # sequence parallel
    "sequence_parallel.needs-tensor-parallel": ({"sp": True}, {"tp": 2}),
    "sequence_parallel.off": ({"tp": 2}, {"sp": True}),
    "sequence_parallel.experts-need-it": ({"engine": "megatron", "spec": MIXTURE, "tp": 2}, {"sp": True}),
    "sequence_parallel.experts-refuse-it": (
        {"engine": "automodel", "spec": MIXTURE, "tp": 2, "sp": True},
        {"sp": False},
    ),
    "sequence_parallel.state-space": (
        {"engine": "automodel", "spec": STATE_SPACE, "tp": 2, "sp": True},
        {"sp": False},
    ),
    # strategy
    "strategy.ddp-tp": ({"goal": "peft", "strategy": "ddp", "tp": 2, "sp": True}, {"engine": "megatron"}),
    "strategy.ddp-pp": ({"goal": "peft", "strategy": "ddp", "pp": 2}, {"engine": "megatron"}),
    "strategy.ddp-cp": ({"goal": "peft", "strategy": "ddp", "cp": 2}, {"engine": "megatron"}),
    "strategy.ddp-ep": ({"goal": "peft", "strategy": "ddp", "spec": MIXTURE, "ep": 2}, {"ep": 1}),
    "strategy.ddp-dp-replicate": ({"goal": "peft", "strategy": "ddp", "dp_replicate": 2}, {"dp_replicate": 1}),
    "strategy.megatron-fsdp-pp": ({"strategy": "megatron_fsdp", "pp": 2}, {"pp": 1}),
    "strategy.megatron-fsdp-ep": ({"strategy": "megatron_fsdp", "spec": MIXTURE, "ep": 8}, {"engine": "megatron"}),
    "strategy.megatron-fsdp-sp": ({"strategy": "megatron_fsdp", "tp": 2, "sp": True}, {"engine": "megatron"}),
    "strategy.megatron-fsdp-dp-replicate": ({"strategy": "megatron_fsdp", "dp_replicate": 2}, {"engine": "megatron"}),
    "strategy.fsdp2-pp": ({"engine": "megatron", "pp": 2}, {"strategy": "zero1"}),
    "strategy.fsdp2-ep": ({"engine": "megatron", "spec": MIXTURE, "ep": 8}, {"strategy": "zero1"}),
    "strategy.offered": ({"strategy": "zero1"}, {"engine": "megatron"}),
    "strategy.tied-fsdp2": ({"engine": "megatron", "spec": TIED}, {"strategy": "zero1"}),
    "strategy.deepspeed-pipeline": ({"engine": "deepspeed", "pp": 2}, {"strategy": "zero1"}),
    "strategy.fsdp-with-tensor-parallel": ({"tp": 4, "sp": True}, {"on": B200}),
    "strategy.qwen35-vl-experts": ({"spec": QWEN35, "strategy": "megatron_fsdp", "images": True}, {"on": B200}),
    # topology
    "topology.world": ({"on": TWELVE, "tp": 8, "global_batch_size": 480}, {"tp": 4}),
    "topology.world-with-experts": ({"engine": "kempnerforge", "spec": MIXTURE, "tp": 4, "ep": 4}, {"ep": 2}),
    "topology.expert-mesh": ({"spec": MIXTURE, "pp": 2, "ep": 8}, {"ep": 4}),
    "topology.expert-shard-group": ({"engine": "torchtitan", "spec": MIXTURE, "dp_replicate": 2, "ep": 8}, {"ep": 4}),
    "topology.shard-product": ({"dp_shard": 4}, {"dp_shard": 8}),
    "topology.replicas-divide": ({"dp_replicate": 3}, {"dp_replicate": 2}),
    "topology.pure-replication": ({"engine": "automodel", "dp_replicate": 8}, {"dp_replicate": 4}),
}  # fmt: skip

# Rules that no override can satisfy: another goal or another engine is the way out.
WITHOUT_FIX = {"diffusion.adapters", "peft.engine", "peft.qwen3-next"}


def broken_case(rule_id: str) -> Case:
    return case(**CASES[rule_id][0])


def sound_case(rule_id: str) -> Case:
    broken, change = CASES[rule_id]
    return case(**{**broken, **change})
