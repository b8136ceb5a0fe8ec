"""How the training is cut over the GPUs."""

from __future__ import annotations

from typing import Any

from ..helpers import (
    BIASED_MIXTURE,
    DELTA,
    DENSE,
    GPT,
    LARGE_MIXTURE,
    LATENT,
    MIXTURE,
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
    cluster,
)
from .places import A100, B200, GB200, MANY, TWELVE

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # topology
    "topology.world": ({"on": TWELVE, "tp": 8, "global_batch_size": 480}, {"tp": 4}),
    "topology.world-with-experts": ({"engine": "kempnerforge", "spec": MIXTURE, "tp": 4, "ep": 4}, {"ep": 2}),
    "topology.expert-mesh": ({"spec": MIXTURE, "pp": 2, "ep": 8}, {"ep": 4}),
    "topology.expert-shard-group": ({"engine": "torchtitan", "spec": MIXTURE, "dp_replicate": 2, "ep": 8}, {"ep": 4}),
    "topology.shard-product": ({"dp_shard": 4}, {"dp_shard": 8}),
    "topology.replicas-divide": ({"dp_replicate": 3}, {"dp_replicate": 2}),
    "topology.pure-replication": ({"engine": "automodel", "dp_replicate": 8}, {"dp_replicate": 4}),
    # heads
    "heads.attention": ({"on": TWELVE, "tp": 3, "global_batch_size": 480}, {"tp": 4}),
    "heads.kv-groups": (
        {"engine": "megatron", "on": TWELVE, "tp": 12, "global_batch_size": 480},
        {"on": cluster(16), "tp": 16},
    ),
    "heads.kv-heads": ({"engine": "torchtitan", "on": cluster(16), "tp": 16}, {"tp": 8}),
    "heads.kv-copies": ({"on": cluster(16), "tp": 16, "sp": True}, {"tp": 8}),
    "heads.ffn-width": ({"engine": "megatron", "spec": ODD_WIDTH, "tp": 8}, {"tp": 1}),
    "heads.vocabulary": ({"engine": "megatron", "spec": ODD_WIDTH, "tp": 2, "sp": True}, {"tp": 1}),
    "heads.vocabulary-parts": ({"spec": ODD_WIDTH, "tp": 2, "sp": True}, {"tp": 1}),
    "heads.mamba": ({"spec": STATE_SPACE, "on": cluster(16), "tp": 16}, {"tp": 8}),
    "heads.mamba-context": ({"spec": STATE_SPACE, "on": cluster(128), "cp": 128}, {"cp": 64}),
    "heads.gated-delta": ({"spec": DELTA, "on": cluster(32), "tp": 32}, {"tp": 16}),
    "heads.gated-delta-context": ({"spec": DELTA, "on": cluster(32), "tp": 2, "sp": True, "cp": 16}, {"cp": 8}),
    # pipeline
    "pipeline.more-stages-than-layers": ({"on": MANY, "pp": 64}, {"pp": 32}),
    "pipeline.even-split": ({"on": TWELVE, "pp": 3, "global_batch_size": 480}, {"pp": 2}),
    "pipeline.uneven-split": ({"engine": "torchtitan", "on": TWELVE, "pp": 3, "global_batch_size": 480}, {"pp": 2}),
    "pipeline.stage-count": ({"pp": 2, "stage_layers": (10, 11, 11)}, {"stage_layers": (16, 16)}),
    "pipeline.stage-sum": ({"pp": 2, "stage_layers": (16, 15)}, {"stage_layers": (16, 16)}),
    "pipeline.conflicting-splits": (
        {"pp": 2, "stage_layers": (16, 16), "embedding_as_layer": True},
        {"embedding_as_layer": False},
    ),
    "pipeline.unbalanced": ({"pp": 2, "stage_layers": (28, 4)}, {"stage_layers": (17, 15)}),
    "pipeline.chunks-need-stages": ({"vp": 2}, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    "pipeline.tied-embeddings": ({"engine": "torchtitan", "spec": TIED, "pp": 2}, {"engine": "meshwright"}),
    "pipeline.experts": ({"engine": "kempnerforge", "spec": MIXTURE, "pp": 2}, {"spec": DENSE}),
    "pipeline.vision": ({"engine": "kempnerforge", "spec": VISION_LANGUAGE, "pp": 2}, {"spec": DENSE}),
    # schedule
    "schedule.one-chunk": ({"pp": 2, "vp": 2}, {"pp_schedule": "interleaved_1f1b"}),
    "schedule.several-chunks": ({"pp": 2, "pp_schedule": "interleaved_1f1b"}, {"vp": 2}),
    "schedule.v-shaped": ({"pp": 2, "vp": 4, "pp_schedule": "zbv"}, {"vp": 2}),
    "schedule.supported": (
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
        {"pp": 8, "vp": 2, "pp_schedule": "interleaved_1f1b", "global_batch_size": 16},
        {"global_batch_size": 64},
    ),
    "schedule.idle-pipeline": (
        {"pp": 8, "vp": 2, "pp_schedule": "interleaved_1f1b", "global_batch_size": 8},
        {"global_batch_size": 64},
    ),
    # batch
    "batch.divides": ({"micro_batch_size": 3, "global_batch_size": 512}, {"micro_batch_size": 4}),
    "batch.smaller-than-data-parallel": ({"on": MANY, "global_batch_size": 32}, {"global_batch_size": 64}),
    "batch.too-few-tokens": ({"on": MANY, "global_batch_size": 64, "seq_length": 512}, {"seq_length": 1024}),
    "batch.benchmark-as-production": ({"benchmark": True, "steps": 1000}, {"steps": 50}),
    "batch.one-huge-micro-batch": ({"micro_batch_size": 64}, {"micro_batch_size": 8}),
    # sequence
    "sequence.context-chunks": ({"cp": 4, "seq_length": 4100}, {"seq_length": 4096}),
    "sequence.tensor-parts": ({"tp": 8, "sp": True, "seq_length": 4100}, {"seq_length": 4096}),
    "sequence.position-table": ({"spec": GPT, "seq_length": 4096}, {"seq_length": 2048}),
    "sequence.beyond-model": ({"goal": "sft", "seq_length": 262144}, {"goal": "pretrain"}),
    "sequence.long-without-context-parallel": ({"seq_length": 65536}, {"cp": 4}),
    "sequence.consider-context-parallel": ({"seq_length": 32768}, {"cp": 2}),
    "sequence.context-parallel-not-needed": ({"cp": 2}, {"seq_length": 16384}),
    "sequence.all-to-all-heads": ({"on": MANY, "cp": 16, "cp_comm": "a2a", "seq_length": 65536}, {"cp": 8}),
    "sequence.hierarchy": ({"cp": 8, "cp_comm": "a2a+ring", "cp_inner": 3, "seq_length": 65536}, {"cp_inner": 4}),
    "sequence.exchange-supported": ({"engine": "torchtitan", "cp": 2, "cp_comm": "a2a"}, {"cp_comm": "allgather"}),
    "sequence.attention-kernel": ({"cp": 2, "attention": "eager"}, {"attention": "flash"}),
    "sequence.sliding-window-ring": ({"engine": "megatron", "spec": WINDOWED, "cp": 2}, {"cp_comm": "a2a"}),
    "sequence.packing-over-context": ({"engine": "automodel", "packing": True, "cp": 2}, {"attention": "te"}),
    "sequence.loss-per-token": ({"engine": "megatron", "goal": "sft", "cp": 2}, {"per_token_loss": True}),
    # sequence parallel
    "sequence_parallel.needs-tensor-parallel": ({"sp": True}, {"tp": 2}),
    "sequence_parallel.off": ({"tp": 2}, {"sp": True}),
    "sequence_parallel.required-by-moe": ({"engine": "megatron", "spec": MIXTURE, "tp": 2}, {"sp": True}),
    "sequence_parallel.unsupported-by-moe": (
        {"engine": "automodel", "spec": MIXTURE, "tp": 2, "sp": True},
        {"sp": False},
    ),
    "sequence_parallel.state-space": ({"engine": "automodel", "spec": STATE_SPACE, "tp": 2, "sp": True}, {"sp": False}),
    # strategy
    "strategy.ddp-tp": ({"goal": "peft", "strategy": "ddp", "tp": 2, "sp": True}, {"engine": "megatron"}),
    "strategy.ddp-pp": ({"goal": "peft", "strategy": "ddp", "pp": 2}, {"engine": "megatron"}),
    "strategy.ddp-cp": ({"goal": "peft", "strategy": "ddp", "cp": 2}, {"engine": "megatron"}),
    "strategy.ddp-ep": ({"goal": "peft", "strategy": "ddp", "spec": MIXTURE, "ep": 2}, {"ep": 1}),
    "strategy.ddp-dp-replicate": ({"goal": "peft", "strategy": "ddp", "dp_replicate": 2}, {"dp_replicate": 1}),
    "strategy.megatron-fsdp-pp": ({"strategy": "megatron_fsdp", "pp": 2}, {"pp": 1}),
    "strategy.megatron-fsdp-ep": ({"strategy": "megatron_fsdp", "spec": MIXTURE, "ep": 8}, {"engine": "megatron"}),
    "strategy.megatron-fsdp-sp": ({"strategy": "megatron_fsdp", "tp": 2, "sp": True}, {"engine": "megatron"}),
    "strategy.megatron-fsdp-dp-replicate": (
        {"engine": "automodel", "strategy": "megatron_fsdp", "dp_replicate": 2},
        {"engine": "meshwright"},
    ),
    "strategy.megatron-fsdp-compile": ({"strategy": "megatron_fsdp", "compile": True}, {"compile": False}),
    "strategy.megatron-fsdp-muon": ({"strategy": "megatron_fsdp", "optimizer_name": "muon"}, {"strategy": "fsdp2"}),
    "strategy.megatron-fsdp-adamw8bit": (
        {"strategy": "megatron_fsdp", "optimizer_name": "adamw8bit"},
        {"strategy": "fsdp2"},
    ),
    "strategy.megatron-fsdp-offload": ({"strategy": "megatron_fsdp", "offload": "optimizer"}, {"strategy": "fsdp2"}),
    "strategy.megatron-fsdp-peft": ({"strategy": "megatron_fsdp", "goal": "peft"}, {"goal": "sft"}),
    "strategy.fsdp2-pp": ({"engine": "megatron", "pp": 2}, {"strategy": "zero1"}),
    "strategy.fsdp2-ep": ({"engine": "megatron", "spec": MIXTURE, "ep": 8}, {"strategy": "zero1"}),
    "strategy.supported": ({"strategy": "zero1"}, {"engine": "megatron"}),
    "strategy.tied-fsdp2": ({"engine": "megatron", "spec": TIED}, {"strategy": "zero1"}),
    "strategy.deepspeed-pipeline": ({"engine": "deepspeed", "pp": 2}, {"strategy": "zero1"}),
    "strategy.fsdp-with-tensor-parallel": ({"tp": 4, "sp": True}, {"on": B200}),
    "strategy.qwen35-vl-experts": ({"spec": QWEN35, "strategy": "megatron_fsdp", "images": True}, {"on": B200}),
    # engine
    "engine.no-tp": ({"engine": "fsdp1", "tp": 2}, {"tp": 1}),
    "engine.no-pp": ({"engine": "fsdp1", "pp": 2}, {"pp": 1}),
    "engine.no-cp": ({"engine": "kempnerforge", "cp": 2}, {"engine": "torchtitan"}),
    "engine.no-ep": ({"engine": "fsdp1", "spec": MIXTURE, "ep": 2}, {"ep": 1}),
    "engine.no-etp": ({"engine": "automodel", "spec": MIXTURE, "etp": 2}, {"engine": "megatron"}),
    "engine.no-vp": ({"engine": "deepspeed", "strategy": "zero1", "pp": 2, "vp": 2}, {"vp": 1}),
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
    "moe.no-capacity": ({"spec": MIXTURE, "capacity_factor": 1.25}, {"capacity_factor": 0.0}),
    "moe.bias-balancing": ({"spec": MIXTURE, "balancing": "bias"}, {"balancing": "aux_loss"}),
    "moe.drops-tokens": ({"spec": MIXTURE, "capacity_factor": 0.8}, {"capacity_factor": 1.25}),
    "moe.router-precision": ({"spec": MIXTURE, "router_dtype": "bf16"}, {"router_dtype": "fp32"}),
    # dispatch
    "dispatch.deepep-gpu": (
        {"engine": "megatron", "strategy": "zero1", "spec": MIXTURE, "on": GB200, "ep": 8, "dispatcher": "deepep"},
        {"on": B200},
    ),
    "dispatch.hybridep-gpu": (
        {
            "engine": "megatron",
            "strategy": "zero1",
            "spec": MIXTURE,
            "on": cluster(8, "MI300X"),
            "ep": 8,
            "dispatcher": "hybridep",
        },
        {"on": cluster(8)},
    ),
    "dispatch.nothing-to-send": (
        {"engine": "megatron", "strategy": "zero1", "spec": MIXTURE, "dispatcher": "deepep"},
        {"ep": 8},
    ),
    "dispatch.allgather-large": (
        {"engine": "megatron", "strategy": "zero1", "spec": MIXTURE, "on": MANY, "ep": 16, "dispatcher": "allgather"},
        {"ep": 8},
    ),
    "dispatch.capacity-allgather": (
        {"engine": "megatron", "spec": MIXTURE, "capacity_factor": 1.0, "dispatcher": "allgather"},
        {"dispatcher": "alltoall"},
    ),
    "dispatch.shared-overlap-nothing": (
        {"engine": "megatron", "strategy": "zero1", "spec": PLAIN_MIXTURE, "shared_expert_overlap": True},
        {"spec": MIXTURE},
    ),
    "dispatch.shared-overlap-recompute": (
        {
            "engine": "megatron",
            "strategy": "zero1",
            "spec": MIXTURE,
            "shared_expert_overlap": True,
            "recompute": "selective",
            "recompute_modules": ("shared_experts", "core_attn"),
        },
        {"recompute_modules": ("core_attn",)},
    ),
    "dispatch.grouped-gemm": (
        {"engine": "megatron", "strategy": "zero1", "spec": MIXTURE, "on": OLD_GPU},
        {"on": A100},
    ),
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
    # network
    "network.tensor-parallel-domain": ({"on": cluster(16), "tp": 16, "sp": True}, {"on": cluster(16, "GB200")}),
    "network.tensor-parallel-straddles": (
        {"on": cluster(48), "spec": ODD_WIDTH, "tp": 6, "sp": True, "global_batch_size": 480},
        {"tp": 8},
    ),
    "network.context-domain": ({"on": MANY, "tp": 2, "sp": True, "cp": 8, "cp_comm": "allgather"}, {"cp_comm": "ring"}),
    "network.expert-domain": ({"spec": MIXTURE, "on": MANY, "ep": 32}, {"dispatcher": "hybridep"}),
    "network.very-wide-sharding": ({"on": cluster(1024), "global_batch_size": 1024}, {"dp_replicate": 16}),
}
