"""What is trained, in which formats, with which kernels, and whether it fits."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.recipes.case import Case

from ..helpers import (
    DENSE,
    DIFFUSION,
    GEMMA3,
    GPTQ,
    JAMBA,
    LATENT,
    MIMO,
    MIXTURE,
    NEXT,
    ODD_WIDTH,
    QWEN3_VL,
    SMALL,
    STATE_SPACE,
    TWO_PREDICTIONS,
    VISION_LANGUAGE,
    VISION_MIXTURE,
    WITHOUT_BF16,
    cluster,
)
from .places import A100, B200, MANY, ONE


def _activations(base: float, band_pct: float = 0.0) -> Any:
    """Memory whose activations grow with the micro batch and shrink by recompute and model parallelism."""

    def memory(c: Case) -> dict[str, Any]:
        kept = {"none": 1.0, "selective": 0.6, "full": 0.1}[str(c.recompute)]
        return {"activations": base * c.micro_batch_size * kept / (c.tp * c.cp), "band_pct": band_pct}

    return memory


def _state(base: float) -> Any:
    """Memory whose optimizer state is cut by tensor and pipeline parallelism."""
    return lambda c: {"optimizer": base / (c.tp * c.pp)}


def _offloaded(c: Case) -> dict[str, Any]:
    return {"optimizer": 0.0 if c.offload == "optimizer" else 20.0}


def _on_host(gib: float) -> Any:
    """So much optimizer state over the GPUs that cut the model, which an offload of it takes to the host."""

    def memory(c: Any) -> dict[str, Any]:
        part, offloaded = gib / (c.tp * c.pp), c.offload in ("optimizer", "params")
        return {"optimizer": 0.0 if offloaded else part, "host": part if offloaded else 0.0}

    return memory


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # data
    "data.mock-fine-tuning": ({"goal": "sft", "dataset": "mock"}, {"dataset": "squad"}),
    "data.instructions-for-pretraining": ({"dataset": "squad"}, {"dataset": "corpus"}),
    "data.no-images": ({"spec": VISION_LANGUAGE, "goal": "sft"}, {"images": True}),
    "data.text-set-with-images": (
        {"spec": VISION_LANGUAGE, "goal": "sft", "images": True, "dataset": "squad"},
        {"dataset": "cord-v2"},
    ),
    "data.images-without-vision": ({"images": True}, {"spec": VISION_LANGUAGE}),
    "data.packing-micro-batch": (
        {"engine": "megatron", "goal": "sft", "packing": True, "micro_batch_size": 2},
        {"micro_batch_size": 1},
    ),
    "data.packing-unsupported": ({"engine": "megatron", "spec": NEXT, "packing": True}, {"spec": DENSE}),
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
    "diffusion.strategy": ({"spec": DIFFUSION, "strategy": "megatron_fsdp"}, {"strategy": "fsdp2"}),
    "diffusion.low-precision": ({"spec": DIFFUSION, "matmul": "fp8_tensor"}, {"matmul": "same"}),
    "diffusion.recompute-modules": (
        {"spec": DIFFUSION, "recompute": "selective", "recompute_modules": ("core_attn",)},
        {"recompute_modules": ("ops",)},
    ),
    "diffusion.z-loss": ({"spec": DIFFUSION, "z_loss": 1e-4}, {"z_loss": 0.0}),
    # vision
    "vision.context": ({"spec": GEMMA3, "images": True, "cp": 2}, {"cp": 1}),
    "vision.deep-stack": (
        {"spec": QWEN3_VL, "images": True, "pp": 8, "vp": 2, "pp_schedule": "interleaved_1f1b"},
        {"vp": 1, "pp_schedule": "1f1b"},
    ),
    "vision.strategy": ({"spec": VISION_LANGUAGE, "images": True, "strategy": "megatron_fsdp"}, {"strategy": "fsdp2"}),
    "vision.fp8-per-tensor": (
        {"spec": VISION_MIXTURE, "images": True, "compile": True, "matmul": "fp8_tensor"},
        {"matmul": "fp8_row"},
    ),
    "vision.freeze-without-images": ({"freeze": ("vision",)}, {"freeze": ()}),
    "vision.nothing-trained": (
        {"spec": VISION_LANGUAGE, "images": True, "freeze": ("language", "vision", "projector")},
        {"freeze": ("vision",)},
    ),
    # graphs
    "graphs.supported": ({"engine": "kempnerforge", "cuda_graphs": "full_iteration"}, {"engine": "torchtitan"}),
    "graphs.random-states": ({"engine": "megatron", "cuda_graphs": "transformer_engine"}, {"te_rng_tracker": True}),
    "graphs.packing": (
        {"engine": "megatron", "te_rng_tracker": True, "cuda_graphs": "transformer_engine", "packing": True},
        {"pad_to_max_length": True},
    ),
    "graphs.full-recompute": (
        {"engine": "megatron", "te_rng_tracker": True, "cuda_graphs": "transformer_engine", "recompute": "full"},
        {"cuda_graphs": "full_iteration"},
    ),
    "graphs.local-scope": (
        {"engine": "megatron", "cuda_graphs": "local", "te_rng_tracker": True, "cuda_graph_scope": ("attn",)},
        {"cuda_graph_scope": ("full_iteration",)},
    ),
    "graphs.full-iteration-scope": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "check_nan": False,
            "cuda_graphs": "full_iteration",
            "cuda_graph_scope": ("attn",),
        },
        {"cuda_graph_scope": ()},
    ),
    "graphs.nan-check": (
        {"engine": "megatron", "cuda_graphs": "full_iteration", "te_rng_tracker": True},
        {"check_nan": False},
    ),
    "graphs.experts-or-router": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "spec": MIXTURE,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe", "moe_router"),
            "capacity_factor": 1.0,
        },
        {"cuda_graph_scope": ("moe_router",)},
    ),
    "graphs.preprocess-needs-router": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "spec": MIXTURE,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_preprocess",),
        },
        {"cuda_graph_scope": ("moe_router", "moe_preprocess")},
    ),
    "graphs.experts-need-capacity": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "spec": MIXTURE,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("attn", "moe"),
        },
        {"capacity_factor": 1.0},
    ),
    "graphs.router-recompute": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "spec": MIXTURE,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("attn", "moe_router"),
            "recompute": "selective",
            "recompute_modules": ("moe",),
        },
        {"cuda_graph_scope": ("attn",)},
    ),
    "graphs.modules-of-the-model": (
        {
            "engine": "megatron",
            "te_rng_tracker": True,
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("attn", "mamba"),
        },
        {"cuda_graph_scope": ("attn",)},
    ),
    "graphs.scope-unused": ({"cuda_graph_scope": ("attn",)}, {"cuda_graphs": "transformer_engine"}),
    "graphs.pipeline": ({"engine": "torchtitan", "cuda_graphs": "full_iteration", "pp": 2}, {"pp": 1}),
    "graphs.syncing-dispatch": (
        {"engine": "torchtitan", "spec": MIXTURE, "ep": 8, "cuda_graphs": "full_iteration"},
        {"dispatcher": "hybridep"},
    ),
    # kernels
    "kernels.attention-supported": ({"engine": "megatron", "attention": "flex"}, {"attention": "flash"}),
    "kernels.attention-gpu": ({"attention": "flash", "on": WITHOUT_BF16, "compute": "fp16"}, {"attention": "sdpa"}),
    "kernels.eager-attention": ({"attention": "eager"}, {"seq_length": 1024}),
    "kernels.compiled-experts": ({"engine": "kempnerforge", "spec": MIXTURE, "compile": True}, {"spec": DENSE}),
    "kernels.deterministic-loss": (
        {"engine": "megatron", "deterministic": True, "loss": "fused_linear"},
        {"loss": "vocab_parallel"},
    ),
    "kernels.deterministic-scan": ({"spec": STATE_SPACE, "deterministic": True, "scan": "fla"}, {"scan": "torch"}),
    "kernels.loss-supported": ({"engine": "kempnerforge", "loss": "fused_linear"}, {"loss": "chunked"}),
    "kernels.full-logits": ({"loss": "plain", "micro_batch_size": 4}, {"loss": "chunked"}),
    # epochs
    "data.epochs-of-mock-data": ({"epochs": 3.0, "dataset": "mock"}, {"dataset": "corpus"}),
    "data.epochs-of-stream": ({"epochs": 3.0, "dataset": "corpus", "streaming": True}, {"streaming": False}),
    "data.grouping-packed": (
        {"goal": "sft", "dataset": "corpus", "group_by_length": True, "packing": True},
        {"packing": False},
    ),
    "data.grouping-parallel": (
        {"goal": "sft", "dataset": "corpus", "group_by_length": True, "packing": False, "cp": 2},
        {"cp": 1},
    ),
    "data.stream-lengths": (
        {"goal": "sft", "dataset": "corpus", "streaming": True, "packing": True},
        {"packing": False},
    ),
    "data.epochs-of-blend": ({"epochs": 3.0, "blend": {"a": 1.0, "b": 2.0}}, {"blend": {}, "dataset": "corpus"}),
    "data.few-steps": ({"epochs": 2.0, "dataset": "corpus", "samples": 173}, {"samples": 50_000}),
    # learning rate
    "learning_rate.supported": ({"engine": "megatron", "schedule_name": "rex"}, {"engine": "kempnerforge"}),
    "learning_rate.warmup-too-long": ({"steps": 100, "warmup_steps": 500}, {"warmup_steps": 10}),
    "learning_rate.no-warmup": ({"warmup_steps": 0}, {"warmup_steps": 100}),
    "learning_rate.minimum-above-peak": ({"lr": 1e-5, "min_lr": 3e-5}, {"min_lr": 1e-6}),
    "learning_rate.no-decay": ({"lr": 3e-5, "min_lr": 3e-5}, {"min_lr": 3e-6}),
    "learning_rate.decay-inside-warmup": ({"decay_steps": 100, "warmup_steps": 500}, {"decay_steps": 1000}),
    "learning_rate.decay-ends-early": (
        {"steps": 100_000, "warmup_steps": 100, "decay_steps": 20_000, "min_lr": 1e-6},
        {"decay_steps": 60_000},
    ),
    "learning_rate.decay-unfinished": ({"decay_steps": 500_000}, {"decay_steps": 200_000}),
    "learning_rate.wsd-decay-too-long": (
        {"schedule_name": "wsd", "wsd_decay_steps": 400_000},
        {"wsd_decay_steps": 100_000},
    ),
    "learning_rate.adapters": ({"goal": "peft", "lr": 5e-6, "min_lr": 0.0}, {"lr": 1e-4}),
    "learning_rate.adapters-too-high": ({"goal": "peft", "lr": 5e-3, "min_lr": 0.0}, {"lr": 1e-4}),
    "learning_rate.fine-tuning": ({"goal": "sft", "lr": 3e-4}, {"lr": 1e-5, "min_lr": 0.0}),
    "learning_rate.continued-pretraining": ({"pretrained": "base", "lr": 3e-4}, {"lr": 3e-5, "min_lr": 0.0}),
    "learning_rate.pretraining": ({"spec": SMALL, "lr": 5e-3}, {"lr": 3e-4}),
    "learning_rate.too-high-for-size": ({"lr": 5e-3}, {"lr": 3e-4}),
    "learning_rate.far-too-high": ({"lr": 0.5}, {"lr": 3e-4}),
    "learning_rate.diverges": ({"lr": 30_000.0}, {"lr": 3e-4}),
    "learning_rate.too-small": ({"lr": 1e-12, "min_lr": 0.0}, {"lr": 3e-4}),
    # ranges
    "ranges.eps": ({"eps": 1.0}, {"eps": 1e-8}),
    "ranges.clip-grad-high": ({"clip_grad": 1e9}, {"clip_grad": 1.0}),
    "ranges.clip-grad-low": ({"clip_grad": 1e-12}, {"clip_grad": 1.0}),
    "ranges.beta1": ({"beta1": 0.99999}, {"beta1": 0.9}),
    "ranges.beta2": ({"beta2": 0.1}, {"beta2": 0.95}),
    "ranges.z-loss": ({"z_loss": 3.0}, {"z_loss": 1e-4}),
    "ranges.mtp-loss": ({"mtp_loss": 30.0}, {"mtp_loss": 0.1}),
    "ranges.aux-loss": ({"spec": MIXTURE, "aux_loss": 30.0}, {"aux_loss": 1e-3}),
    "ranges.router-z-loss": ({"spec": MIXTURE, "router_z_loss": 30.0}, {"router_z_loss": 0.0}),
    "ranges.capacity": (
        {"spec": MIXTURE, "engine": "megatron", "strategy": "zero1", "capacity_factor": 1000.0},
        {"capacity_factor": 0.0},
    ),
    "ranges.temperature": ({"temperature": 1e9}, {"temperature": 1.0}),
    "ranges.short-samples": ({"seq_length": 7}, {"seq_length": 2048}),
    "ranges.adapter-dropout": ({"goal": "peft", "dropout": 0.9}, {"dropout": 0.05}),
    "ranges.validation-part": ({"validation_part": 0.9}, {"validation_part": 0.01}),
    "ranges.workers": ({"workers": 1_000_000}, {"workers": 4}),
    "ranges.prefetch": ({"prefetch": 1_000_000}, {"prefetch": 2}),
    "ranges.newton-schulz": ({"muon_ns_steps": 100}, {"muon_ns_steps": 5}),
    "ranges.weight-decay": ({"weight_decay": 30.0}, {"weight_decay": 0.1}),
    "ranges.weight-decay-diverges": ({"weight_decay": 1e9}, {"weight_decay": 0.1}),
    "ranges.adapter-rank": ({"goal": "peft", "rank": 1_000_000}, {"rank": 32}),
    "ranges.adapter-scale": ({"goal": "peft", "alpha": 1e9}, {"alpha": 32.0}),
    "ranges.huge-batch": ({"global_batch_size": 500_000}, {"global_batch_size": 512}),
    "ranges.batch-in-tokens": ({"global_batch_size": 100_000_000}, {"global_batch_size": 512}),
    "ranges.steps-in-tokens": ({"steps": 15_000_000_000_000}, {"steps": 300_000}),
    "ranges.anneal": ({"anneal_steps": 10_000_000}, {"anneal_steps": 100}),
    "learning_rate.schedule-free": ({"optimizer_name": "schedule_free_adamw"}, {"schedule_name": "constant"}),
    # memory
    "memory.replicated-state": ({"strategy": "ddp"}, {"goal": "peft"}),
    "memory.state": ({"memory": _state(150.0)}, {"tp": 4, "sp": True}),
    "memory.host": ({"memory": _on_host(500.0), "offload": "params"}, {"tp": 4, "sp": True}),
    "memory.peak": ({"memory": _activations(30.0), "micro_batch_size": 4}, {"micro_batch_size": 1}),
    "memory.uncertain": ({"memory": _activations(16.0, band_pct=25.0), "micro_batch_size": 4}, {"micro_batch_size": 1}),
    "memory.tight": ({"memory": _activations(18.0), "micro_batch_size": 4}, {"micro_batch_size": 1}),
    "memory.recompute-not-needed": ({"memory": _activations(30.0), "recompute": "full"}, {"micro_batch_size": 4}),
    "memory.tensor-parallel-not-needed": (
        {"memory": _activations(20.0), "tp": 2, "sp": True},
        {"memory": _activations(100.0)},
    ),
    "memory.offload-not-needed": ({"memory": _offloaded, "offload": "optimizer"}, {"offload": "none"}),
    "memory.underused": ({"memory": _activations(5.0)}, {"micro_batch_size": 8}),
    # weights
    "weights.init-std-unused": (
        {"init_std": 0.01, "goal": "sft", "dataset": "squad"},
        {"goal": "pretrain", "dataset": "mock"},
    ),
    "weights.quantized": ({"spec": GPTQ, "goal": "sft", "dataset": "squad"}, {"goal": "pretrain", "dataset": "mock"}),
    "engine.model-not-trained": ({"spec": MIMO}, {"engine": "automodel"}),
    "engine.whole-tp": ({"spec": JAMBA, "tp": 2, "sp": True}, {"tp": 1, "sp": False}),
    "engine.whole-cp": ({"spec": JAMBA, "cp": 2}, {"cp": 1}),
    "engine.whole-ep": ({"spec": JAMBA, "ep": 2}, {"ep": 1}),
    "engine.whole-etp": ({"spec": JAMBA, "etp": 2}, {"etp": 1}),
    "engine.whole-pp": ({"spec": msgspec.structs.replace(JAMBA, model_type="zamba2"), "pp": 2}, {"pp": 1}),
    "engine.whole-balancing": (
        {"spec": msgspec.structs.replace(MIXTURE, model_type="granitemoe"), "pp": 2, "aux_loss": 0.01},
        {"aux_loss": 0.0},
    ),
    "engine.whole-sp": ({"spec": JAMBA, "tp": 2, "sp": True}, {"tp": 1, "sp": False}),
    "engine.whole-matmul": ({"spec": JAMBA, "matmul": "fp8_tensor"}, {"matmul": "same"}),
    "engine.whole-mtp-loss": ({"spec": JAMBA, "mtp_loss": 0.1}, {"mtp_loss": 0.0}),
    "engine.whole-method": ({"spec": JAMBA, "goal": "peft", "method": "qlora"}, {"method": "lora"}),
    "engine.whole-dropout": ({"spec": JAMBA, "goal": "peft", "dropout": 0.1}, {"dropout": 0.0}),
    "engine.whole-attention": ({"spec": JAMBA, "attention": "flex"}, {"attention": "auto"}),
    "engine.whole-router-z-loss": ({"spec": JAMBA, "router_z_loss": 0.1}, {"router_z_loss": 0.0}),
    "engine.whole-capacity-factor": ({"spec": JAMBA, "capacity_factor": 1.0}, {"capacity_factor": 0.0}),
    "engine.whole-force-balance": ({"spec": JAMBA, "force_balance": True}, {"force_balance": False}),
    # offload
    "offload.supported": ({"engine": "kempnerforge", "offload": "params"}, {"engine": "torchtitan"}),
    "offload.activations-pipeline": (
        {"engine": "megatron", "strategy": "zero1", "offload": "activations", "pp": 2},
        {"pp": 1},
    ),
    "offload.activations-recompute": ({"offload": "activations", "recompute": "full"}, {"recompute": "none"}),
    "offload.params-strategy": ({"offload": "params", "strategy": "megatron_fsdp"}, {"strategy": "fsdp2"}),
    "offload.params-stage-3": (
        {"engine": "deepspeed", "offload": "params", "reshard_after_forward": False},
        {"reshard_after_forward": True},
    ),
    "offload.optimizer-strategy": ({"engine": "megatron", "offload": "optimizer"}, {"strategy": "zero1"}),
    "offload.optimizer-fp8": (
        {"engine": "megatron", "strategy": "zero1", "offload": "optimizer", "matmul": "fp8_tensor", "fp8_gather": True},
        {"matmul": "fp8_delayed"},
    ),
    "offload.params-slow": ({"offload": "params"}, {"on": ONE}),
    # optimizer
    "optimizer.supported": ({"engine": "torchtitan", "optimizer_name": "muon"}, {"engine": "kempnerforge"}),
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
    "overlap.tensor-needs-sequence-parallel": (
        {"engine": "megatron", "strategy": "zero1", "tp": 2, "tp_comm_overlap": True},
        {"sp": True},
    ),
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
    "peft.method-supported": ({"engine": "megatron", "goal": "peft", "method": "qlora"}, {"method": "dora"}),
    "peft.engine": ({"engine": "kempnerforge", "goal": "peft"}, {"goal": "sft"}),
    "peft.qwen3-next": ({"engine": "megatron", "spec": NEXT, "goal": "peft"}, {"goal": "sft"}),
    "peft.experts-tensor-parallel": ({"engine": "automodel", "spec": MIXTURE, "goal": "peft", "tp": 2}, {"tp": 1}),
    "peft.dora-experts": (
        {"engine": "automodel", "spec": MIXTURE, "goal": "peft", "method": "dora"},
        {"targets": ("qkv",)},
    ),
    "peft.dropout": ({"spec": MIXTURE, "goal": "peft", "dropout": 0.1}, {"targets": ("qkv", "proj")}),
    "peft.dropout-recompute": (
        {"goal": "peft", "dropout": 0.1, "pp": 2, "recompute": "selective", "recompute_modules": ("mlp",)},
        {"recompute_modules": ("ops",)},
    ),
    "peft.qlora-tensor-parallel": (
        {"engine": "automodel", "goal": "peft", "method": "qlora", "tp": 2, "sp": True},
        {"engine": "meshwright"},
    ),
    "peft.qlora-blocks": (
        {"spec": ODD_WIDTH, "goal": "peft", "method": "qlora", "tp": 2, "sp": True},
        {"tp": 1, "sp": False},
    ),
    "peft.qlora-strategy": ({"goal": "peft", "method": "qlora", "strategy": "megatron_fsdp"}, {"strategy": "fsdp2"}),
    "peft.qlora-fp8": ({"goal": "peft", "method": "qlora", "matmul": "fp8_tensor"}, {"method": "lora"}),
    "peft.scale": ({"goal": "peft", "alpha": 512.0}, {"alpha": 64.0}),
    # precision
    "precision.bf16-gpu": ({"on": WITHOUT_BF16}, {"compute": "fp16"}),
    "precision.fp8-gpu": ({"on": A100, "matmul": "fp8_tensor"}, {"on": cluster(8)}),
    "precision.block-scaled-gpu": ({"matmul": "mxfp8"}, {"on": B200}),
    "precision.blockwise-on-blackwell": ({"matmul": "fp8_block", "on": B200}, {"on": cluster(8)}),
    "precision.format-supported": ({"engine": "torchtitan", "matmul": "fp8_delayed"}, {"matmul": "fp8_tensor"}),
    "precision.format-published": ({"matmul": "nvfp4", "benchmark": True, "on": B200}, {"matmul": "mxfp8"}),
    "precision.mxfp8-untested": ({"matmul": "mxfp8", "on": B200}, {"benchmark": True}),
    "precision.fp8-tokens": (
        {"matmul": "fp8_tensor", "seq_length": 4104, "micro_batch_size": 1},
        {"micro_batch_size": 2},
    ),
    "precision.gather-ineffective": ({"matmul": "fp8_row", "fp8_gather": True}, {"matmul": "fp8_tensor"}),
    "precision.delayed-first-last": (
        {"engine": "megatron", "matmul": "fp8_delayed", "first_last_bf16": True},
        {"matmul": "fp8_tensor"},
    ),
    "precision.delayed-recompute": (
        {"engine": "megatron", "matmul": "fp8_delayed", "recompute": "selective", "recompute_modules": ("layernorm",)},
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
    "precision.fp16-overflow": ({"spec": GEMMA3, "compute": "fp16"}, {"compute": "bf16"}),
    "precision.fp16": ({"compute": "fp16"}, {"compute": "bf16"}),
    "precision.bf16-master": ({"master": "bf16"}, {"master": "fp32"}),
    "precision.master-supported": ({"engine": "megatron", "strategy": "zero1", "master": "bf16"}, {"master": "fp32"}),
    "precision.no-fp32-master": ({"engine": "kempnerforge"}, {"master": "bf16", "moments": "bf16"}),
    "precision.bf16-moments": ({"engine": "megatron", "moments": "bf16"}, {"strategy": "zero1"}),
    "precision.bf16-reduction": ({"on": cluster(256), "reduce": "bf16"}, {"on": MANY}),
    "precision.bf16-accumulation": ({"grads": "bf16", "reduce": "bf16"}, {"micro_batch_size": 8}),
    "precision.nvfp4-everywhere": ({"on": B200, "matmul": "nvfp4"}, {"first_last_bf16": True}),
    # prediction
    "prediction.no-modules": ({"spec": DENSE, "mtp_loss": 0.1}, {"spec": LATENT}),
    "prediction.one-module": ({"spec": TWO_PREDICTIONS, "mtp_loss": 0.1}, {"spec": LATENT}),
    # recompute
    "recompute.modules-of-the-model": (
        {"recompute": "selective", "recompute_modules": ("core_attn", "moe_act")},
        {"spec": MIXTURE},
    ),
    "recompute.supported": ({"engine": "deepspeed", "recompute": "selective"}, {"recompute": "full"}),
    "recompute.ops-supported": (
        {"engine": "megatron", "recompute": "selective", "recompute_modules": ("ops",)},
        {"engine": "torchtitan"},
    ),
    "recompute.ops-zero-bubble": (
        {"pp": 2, "vp": 2, "pp_schedule": "zbv", "recompute": "selective"},
        {"recompute_modules": ("layernorm",)},
    ),
    "recompute.compiled-core-attention": (
        {
            "tp": 2,
            "sp": True,
            "compile": True,
            "recompute": "selective",
            "recompute_modules": ("core_attn", "layernorm"),
        },
        {"recompute_modules": ("layernorm",)},
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
}
