"""Run pip-installable estimators on training jobs; runs in the interpreter of their environment.

python benchmarks/peers_answers.py NAME < jobs.json

Needs the peer but not Meshwright. A job is a JSON object (from peers.py); an answer is one too:
memory_gib, optionally step_s, exact (false: the nearest job the peer supports) and a note, or why there is none.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

GIB = 1024**3
Answer = dict[str, Any]


class UnsupportedError(Exception):
    """Raised for a job that a peer does not support."""


def ask_deepspeed(job: Answer) -> Answer:
    """The ZeRO-3 estimator: model states only, 18 bytes per parameter, no activations, no tp, pp or ep."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    if job["lora_rank"]:
        raise UnsupportedError("every parameter is trained")
    model = _empty_model(job["config"])
    total = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    axes = [axis for axis in ("tp", "pp", "ep") if job[axis] > 1]
    deviations = [f"ZeRO-3 over all {job['world']} GPUs, no {'/'.join(axes)}"] if axes else []
    deviations += ["Adam in fp32"] if job["state"] != "fp32" else []
    _, gpu, _ = estimate_zero3_model_states_mem_needs(
        total,
        largest,
        num_gpus_per_node=job["gpus_per_node"],
        num_nodes=job["world"] // job["gpus_per_node"],
        cpu_offload=False,
        cpu_offload_params=False,
    )
    return {"memory_gib": gpu / GIB, "exact": not deviations, "note": "; ".join(["model states only", *deviations])}


def ask_llm_analysis(job: Answer) -> Answer:
    """LLMAnalysis.training: states, activations and logits; time from FLOPs at a stated efficiency."""
    from llm_analysis import analysis, config

    if job["lora_rank"]:
        raise UnsupportedError("every parameter is trained")
    hf, bf16 = job["config"], job["state"] == "bf16"
    # It models two MLP matrices; its own Llama files widen them by 3/2 to match the parameters of a gated MLP.
    width = hf.get("moe_intermediate_size", hf["intermediate_size"]) * 3 // 2
    model = config.ModelConfig(
        name=job["model"],
        num_layers=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"],
        hidden_dim=hf["hidden_size"],
        vocab_size=hf["vocab_size"],
        max_seq_len=hf["max_position_embeddings"],
        num_key_value_heads=hf["num_key_value_heads"],
        ffn_embed_dim=width,
        expansion_ratio=width / hf["hidden_size"],
        moe_num_experts=hf.get("num_experts", 1),
        moe_top_k=hf.get("num_experts_per_tok", 1),
    )
    gpu = config.GPUConfig("h200", 141, 4800, 450, 8e-6, 989) if "H200" in job["gpus"] else None
    dp = job["world"] // (job["tp"] * job["pp"])
    calculator = analysis.LLMAnalysis(
        model,
        gpu or config.get_gpu_config_by_name("h100-sxm-80gb"),
        parallelism_config=config.ParallelismConfig(job["tp"], job["pp"], dp, job["ep"]),
        flops_efficiency=0.5,
    )
    found = calculator.training(
        batch_size_per_gpu=job["micro_batch"],
        global_batch_size=job["global_batch"],
        seq_len=job["seq"],
        activation_recomputation=analysis.ActivationRecomputation[job["recompute"].upper()],
        ds_zero=analysis.DSZeRO(job["zero"]),
        # Pure bf16 in its terms: gradient 2 bytes, optimizer 2 + 2 bytes.
        **({"master_weights_dtype_bytes": 2, "other_op_bytes": 2} if bf16 else {}),
    )
    deviations = ["selective recompute of attention scores, not of ops"] if job["recompute"] == "selective" else []
    return {
        "memory_gib": found["(weight+op_state+grad+act)_memory_per_gpu"] / GIB,
        "step_s": found["latency_per_iter"],
        "exact": not deviations,
        "note": "; ".join([f"counts {found['num_params_total'] / 1e9:.2f}B parameters", *deviations]),
    }


def ask_accelerate(job: Answer) -> Answer:
    """The arithmetic of `accelerate estimate-memory`: the largest of four stages of one step on one GPU."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if job["lora_rank"]:
        raise UnsupportedError("every parameter is trained")
    size, _ = calculate_maximum_sizes(_empty_model(job["config"]))
    memory = max(estimate_training_usage(size, "float16").values()) / GIB
    if job["world"] > 1:
        raise UnsupportedError(f"one GPU only; {memory:.1f} GiB for the whole model")
    pure = job["state"] != "fp32"
    return {"memory_gib": memory, "exact": not pure, "note": "no activations" + ("; Adam in fp32" if pure else "")}


def ask_vramcalc(job: Answer) -> Answer:
    """vramcalc.estimate: one GPU, Hugging Face Trainer style training, full or LoRA."""
    from vramcalc import estimate

    if job["world"] > 1:
        raise UnsupportedError("one GPU only")
    found = estimate(
        job["config"],
        mode="train",
        batch=job["micro_batch"],
        seq_len=job["seq"],
        lora_rank=job["lora_rank"] or None,
        grad_checkpoint=job["recompute"] == "full",
        precision="pure" if job["state"] == "bf16" else "amp",
    )
    return {"memory_gib": found.total / GIB, "exact": True, "note": "without CUDA context"}


def ask_hf_vram_calc(job: Answer) -> Answer:
    """hf-vram-calc: bf16 weights x 4 x 1.3, divided by tp, pp and ep; LoRA by a share of the weights."""
    from hf_vram_calc.calculator import VRAMCalculator
    from hf_vram_calc.config import ConfigManager
    from hf_vram_calc.parallel import ParallelizationCalculator

    if job["zero"] == 3 and job["world"] > 1:
        raise UnsupportedError("data parallelism shards nothing")
    calculator = VRAMCalculator(ConfigManager())
    params = sum(p.numel() for p in _empty_model(job["config"]).parameters())
    weights = calculator.calculate_model_memory(params, "bf16")
    if job["lora_rank"]:
        memory = calculator.calculate_lora_memory(weights, params, job["lora_rank"])
        return {"memory_gib": memory, "exact": True, "note": "a flat 20 % for activations and the rest"}
    memory = ParallelizationCalculator.calculate_combined_parallel(
        calculator.calculate_training_memory(weights), job["tp"], job["pp"], job["ep"]
    )
    deviations = (["no ZeRO-1"] if job["zero"] == 1 else []) + (["Adam in bf16"] if job["state"] == "fp32" else [])
    return {
        "memory_gib": memory,
        "exact": not deviations,
        "note": "; ".join(["a flat 30 % for activations and the rest", *deviations]),
    }


def _empty_model(config: Answer) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


@dataclass(frozen=True)
class Peer:
    """An estimator: its function, its PyPI name and what it covers."""

    ask: Callable[[Answer], Answer]
    package: str
    counts: str  # in its memory
    layouts: str  # it can express
    time: str = "no"


PEERS = {
    "DeepSpeed": Peer(ask_deepspeed, "deepspeed", "weights, gradients, Adam, largest layer", "ZeRO-2, ZeRO-3, offload"),
    "llm-analysis": Peer(
        ask_llm_analysis,
        "llm-analysis",
        counts="weights, gradients, Adam, activations, logits",
        layouts="ZeRO-1 to 3, tp, pp, sp, ep",
        time="FLOPs at an efficiency the user states",
    ),
    "accelerate": Peer(ask_accelerate, "accelerate", "the largest of weights, gradients and Adam", "one GPU"),
    "vramcalc": Peer(
        ask_vramcalc,
        "vramcalc",
        counts="weights, gradients, Adam, activations, logits",
        layouts="one GPU; dense models; LoRA",
    ),
    "hf-vram-calc": Peer(ask_hf_vram_calc, "hf-vram-calc", "bf16 weights times 4, plus 30 %", "tp, pp, ep; LoRA"),
}


def answer(peer: Peer, job: Answer) -> Answer:
    """Return a peer's answer; an error is an answer too."""
    try:
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in peer.ask(job).items()}
    except ImportError as error:
        return {"unsupported": f"not installed ({error})"}
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except Exception as error:
        return {"unsupported": f"{type(error).__name__}: {error}"[:200]}


def main(name: str) -> None:
    """Read jobs as JSON from stdin, print the peer's version and answers as JSON; the peer's own output is dropped."""
    peer, jobs = PEERS[name], json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        answers = [answer(peer, job) for job in jobs]
    try:
        number = version(peer.package)
    except PackageNotFoundError:
        number = None
    print(json.dumps({"version": number, "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1])
