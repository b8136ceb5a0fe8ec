"""Questions put to a coding agent, the calls that a language model makes of them, and what must come back.

Read by docs/agents_page.py, which writes the table, and by tests/mcp/test_agent_questions.py, which sends every call
through `meshwright mcp` and compares the answer with the Python API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
SCRIPT = (
    "torchrun --nproc-per-node=8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--tensor-model-parallel-size 3 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--global-batch-size 128\n"
)
LOG = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of "
    "79.11 GiB\n"
)


class Question(NamedTuple):
    """A question, the call made of it, and the call of the Python API with the same answer.

    `path` is where the figure is in the structured answer; `python` an expression over `mw`, the package. A refused
    call has `fix` instead: the form that the error must name.
    """

    text: str
    tool: str
    arguments: Mapping[str, Any]
    path: str = ""
    python: str = ""
    fix: str = ""


QUESTIONS = (
    Question(
        "Can I fully fine-tune Llama 3 8B on eight H100s, and how much memory does it take?",
        "recommend",
        {"model": "Llama 3 8B", "gpus": "8", "gpu": "H100", "goal": "sft"},
        "estimate.memory_gib.total",
        'mw.recommend("llama3-8b", "8xH100", "sft").estimate.memory.total',
    ),
    Question(
        "How fast is one step of that with a sequence length of 4k?",
        "recommend",
        {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft", "seq": "4k", "tokens": None, "price": None},
        "estimate.step_s",
        'mw.recommend("llama3-8b", "8xH100", "sft", seq=4096).estimate.step_s',
    ),
    Question(
        "I have 2 nodes with 8 A100-80 each. Which layout is fastest for pretraining Llama 3 8B?",
        "plan",
        {"model": "llama3-8b", "gpus": {"type": "A100-80", "count": 16, "nodes": 2}, "goal": "pretrain", "top": "3"},
        "plans.0.step_s",
        'mw.plan("llama3-8b", "2x8xA100-80", goal="pretrain", top=3).plans[0].estimate.step_s',
    ),
    Question(
        "Same, but keep tensor parallelism at 4.",
        "plan",
        {"target": "llama3-8b", "gpus": "2x8xA100-80", "goal": "pretrain", "overrides": "layout.tp=4"},
        "plans.0.step_s",
        'mw.plan("llama3-8b", "2x8xA100-80", goal="pretrain", overrides=["layout.tp=4"]).plans[0].estimate.step_s',
    ),
    Question(
        "What would tp=2 and full recompute do to the Llama 3 8B pretraining recipe on 8 H100?",
        "estimate",
        {
            "recipe": "llama3_8b_pretrain_config",
            "gpus": "8xH100",
            "overrides": {"layout": {"tp": 2, "recompute": "full"}},
        },
        "estimate.memory_gib.total",
        'mw.estimate("llama3_8b_pretrain_config", "8xH100", overrides=["layout.tp=2", "layout.recompute=full"])'
        ".estimate.memory.total",
    ),
    Question(
        "And with a global batch of 256?",
        "estimate",
        {
            "target": "llama3_8b_pretrain_config",
            "gpus": "8xH100",
            "overrides": [{"key": "train.global_batch_size", "value": 256}],
        },
        "estimate.step_s",
        'mw.estimate("llama3_8b_pretrain_config", "8xH100", overrides=["train.global_batch_size=256"]).estimate.step_s',
    ),
    Question(
        "How many H100s do I need at least to pretrain Llama 3 8B?",
        "size",
        {"model": "llama3-8b", "goal": "pretrain", "gpuType": "H100", "maxGpus": "64"},
        "smallest",
        'mw.size("llama3-8b", "pretrain", "H100", max_gpus=64).smallest.gpus',
    ),
    Question(
        "What do 100B tokens cost at 2.50 $ per GPU-hour on the most efficient count?",
        "size",
        {"model": "llama3-8b", "goal": "pretrain", "gpu": "H100", "tokens": "100B", "price": "2.5", "max_gpus": 64},
        "sizes.-most_efficient.cost",
        'mw.size("llama3-8b", "pretrain", "H100", tokens="100B", price=2.5, max_gpus=64).most_efficient.cost',
    ),
    Question(
        "Can my 24 GB RTX 4090 fine-tune Qwen3 8B with QLoRA?",
        "recommend",
        {"model": "Qwen/Qwen3-8B", "gpus": "1xRTX 4090", "goal": "QLoRA"},
        "estimate.fits",
        'mw.recommend("Qwen/Qwen3-8B", "1xRTX4090", "qlora").estimate.fits',
    ),
    Question(
        "I want to train unsloth's 4-bit Llama 3.1 8B with LoRA on one A100.",
        "recommend",
        {"model": "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "gpus": ["1xA100-80"], "goal": "lora"},
        "estimate.step_s",
        'mw.recommend("llama31-8b", "1xA100-80", "lora").estimate.step_s',
    ),
    Question(
        "Here is my own config.json. Does it fit on 4 H100s for pretraining?",
        "recommend",
        {"config": CONFIG, "gpus": "4xH100", "goal": "pretrain"},
        "estimate.fits",
        'mw.recommend(config, "4xH100", "pretrain").estimate.fits',
    ),
    Question(
        "Is anything wrong with this Megatron script?",
        "check",
        {"text": SCRIPT, "name": "train.sh"},
        "ok",
        "mw.check(script).ok",
    ),
    Question(
        "The script is in train.sh in my folder. Is it fine on 8 H100s?",
        "check",
        {"target": "train.sh", "gpus": "8xH100"},
        "ok",
        'mw.check(script, gpus="8xH100").ok',
    ),
    Question(
        "Does the Llama 3 70B recipe run on 16 A100s?",
        "check",
        {"target": "llama3_70b_pretrain_config", "gpus": "16xA100-80", "engine": "", "model": "null"},
        "ok",
        'mw.check("llama3_70b_pretrain_config", gpus="16xA100-80").ok',
    ),
    Question(
        "My run died with this error. Why?",
        "doctor",
        {"log": LOG, "recipe": "llama3_8b_pretrain_config", "gpus": "8xH100"},
        "findings.0.rule",
        'mw.diagnose(log, recipe="llama3_8b_pretrain_config", gpus="8xH100").findings[0].id',
    ),
    Question(
        "What does layout.recompute do?",
        "explain",
        {"about": "layout.recompute"},
        "field.key",
        'mw.explain("layout.recompute").field.key',
    ),
    Question(
        "How many parameters does Qwen3-30B-A3B have, and how many are active?",
        "inspect",
        {"model": "https://huggingface.co/Qwen/Qwen3-30B-A3B"},
        "parameters.active",
        'mw.inspect("qwen3-30b-a3b").model.params.active',
    ),
    Question(
        "Which mixture-of-experts models of Qwen 3 are there?",
        "models",
        {"query": "Qwen 3 MoE"},
        "models.0.name",
        'mw.list_models("qwen3 moe")[0].name',
    ),
    Question(
        "How much memory has a p5.48xlarge per GPU?",
        "gpus",
        {"query": "p5.48xlarge"},
        "gpus.0.memory_gib",
        'mw.list_gpus("H100")[0].memory_gib',
    ),
    Question(
        "Should I use Megatron or torchtitan to pretrain Llama 3 8B on 8 H100s?",
        "compare",
        {"target": "llama3-8b", "gpus": "8xH100", "goal": "pretrain", "engines": ["megatron", "torchtitan"]},
        "sides.0.name",
        'mw.compare("llama3-8b", gpus="8xH100", goal="pretrain", engines="megatron,torchtitan").sides[0].name',
    ),
    Question(
        "Which recipes are there for fine-tuning Llama 3?",
        "recipes",
        {"query": "llama3", "goal": "fine-tune"},
        "recipes.0.name",
        'mw.find_recipes("llama3", goal="sft", benchmark=False)[0].name',
    ),
    Question(
        "Write the Llama 3 8B recipe as a torchtitan config.",
        "export",
        {"recipe": "llama3_8b_pretrain_config", "framework": "torchtitan", "gpus": "8xH100"},
        "framework",
        'mw.export("llama3_8b_pretrain_config", "torchtitan", gpus="8xH100").written.framework',
    ),
    Question(
        "Fine-tune Llama 3 8B on an H100.",
        "recommend",
        {"model": "llama3-8b", "gpu": "H100", "goal": "sft"},
        "question.gpus",
        'str(mw.recommend("llama3-8b", "H100", "sft").question.cluster)',
    ),
    Question(
        "Fine-tune Llama 3 8B with 4k tokens and tp 2 on 8 H100s.",
        "recommend",
        {"modelName": "llama3-8b", "gpus": "8xH100", "goal": "sft", "sequenceLength": 4096, "tensor_parallel": 2},
        fix='model: "llama3-8b", seq: 4096, overrides: ["layout.tp=2"]',
    ),
    Question(
        "How long does Llama 3 8B take on 64 H100s?",
        "size",
        {"model": "llama3-8b", "goal": "pretrain", "gpu": "H100", "gpus": 64},
        fix="max_gpus: 64",
    ),
    Question(
        "Plan Llama 3 8B on eight A100s.",
        "recommend",
        {"model": "llama3-8b", "gpus": "8xH100", "gpu": "A100-80", "goal": "sft"},
        fix='gpus: "8xA100-80"',
    ),
    Question(
        "Compare Llama 3 8B and Qwen3 8B.", "inspect", {"model": ["llama3-8b", "qwen3-8b"]}, fix='model: "llama3-8b"'
    ),
    Question(
        "Set tp to 4 in the estimate.",
        "estimate",
        {"target": "llama3_8b_pretrain_config", "gpus": "8xH100", "overrides": 4},
        fix='overrides: ["layout.tp=4", "train.global_batch_size=256"]',
    ),
    Question(
        "What is the error CUDA out of memory?",
        "explain",
        {"error": "CUDA out of memory"},
        fix='about: "CUDA out of memory"',
    ),
)
