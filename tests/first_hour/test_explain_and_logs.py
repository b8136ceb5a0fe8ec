"""Megatron and torchtitan: names in other frameworks' keys, and logs of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MEGATRON = (
    " [2026-11-10 10:27:{second:02d}] iteration {step:8d}/   10000 | consumed samples: 5120 | elapsed time per "
    "iteration (ms): 16605{digit}.0 | throughput per GPU (TFLOP/s/GPU): 354.6 | learning rate: 1.500000E-04 | "
    "global batch size:   512 | lm loss: {loss} | loss scale: 1.0 | grad norm: {norm} | "
    "number of skipped iterations:   0 |\n"
)
DUMP = (
    "num_layers 80|hidden_size 8192|ffn_hidden_size 28672|num_attention_heads 64|num_query_groups 8|"
    "group_query_attention True|seq_length 8192|micro_batch_size 1|global_batch_size 512|tensor_model_parallel_size 8|"
    "pipeline_model_parallel_size 2|sequence_parallel True|world_size 32|bf16 True|use_distributed_optimizer True|"
    "lr 0.00015|min_lr 1.5e-05|lr_warmup_iters 500|padded_vocab_size 128256|swiglu True"
)


@pytest.mark.parametrize(
    ("typed", "kind", "words"),
    [
        ("MFU", "term", "utilization"),
        ("fsdp2", "term", "layout.strategy"),
        ("ZeRO", "term", "stage 3"),
        ("probably fits", "term", "70 to 90 %"),
        ("data_parallel_shard_degree", "field", "layout.dp_shard"),
        ("parallelism.data_parallel_shard_degree", "field", "layout.dp_shard"),
        ("zero_optimization.stage", "key", "layout.reshard_after_forward"),
        ("fsdp_reshard_after_forward", "field", "layout.reshard_after_forward"),
        ("precision", "section", "precision.matmul"),
        ("train", "section", "train.eval_every"),
        ("data", "section", "data.seq_length"),
        ("peft", "section", "peft.rank"),
        ("layout", "section", "layout.recompute"),
        ("early stopping", "field", "train.early_stop_patience"),
        ("sft", "term", "--goal sft"),
        ("deepspeed", "term", "export RECIPE --to deepspeed"),
        ("LoRA alpha", "field", "alpha / rank"),
        ("cosine", "term", "half a cosine"),
        ("dpo", "term", "TRL, Axolotl, LLaMA-Factory and verl"),
        ("zbv", "term", "layout.pp_schedule"),
    ],
)
def test_explain_what_a_newcomer_types(meshwright: Any, typed: str, kind: str, words: str) -> None:
    answer = meshwright("explain", typed, "--json")
    assert answer.code == 0
    assert answer.json["kind"] == kind
    assert words in meshwright("explain", typed).out


COMMON = (
    "lora", "qlora", "dora", "rslora", "nf4", "int8", "4-bit", "8bit adam", "bitsandbytes", "lora rank", "lora alpha",
    "merge lora", "awq", "gptq", "gguf", "llama.cpp", "Ollama", "vLLM", "SGLang", "kv cache", "safetensors",
    "perplexity", "lm_eval", "chat template", "eos token", "prompt masking", "loss mask", "sharegpt", "alpaca",
    "sample packing", "flash attention", "rope scaling", "yarn", "grad accumulation", "gradient checkpointing",
    "early stopping", "neftune", "ema", "galore", "muon", "cpu offload", "offload", "vram", "liger", "unsloth",
    "deepspeed", "accelerate", "trl", "axolotl", "llama-factory", "ms-swift", "transformers", "torchrun", "slurm",
    "node_rank", "local_rank", "world size", "nccl", "all-reduce", "infiniband", "pcie", "nvlink", "zero-3", "fsdp2",
    "hsdp", "tp", "pp", "cp", "ep", "vp", "mfu", "bf16", "fp8", "mxfp8", "nvfp4", "cosine", "sft", "fine-tuning",
)  # fmt: skip


def test_explain_has_a_sentence_on_every_common_word(meshwright: Any) -> None:
    from meshwright.api.explanations import explain

    found = {word: explain(word) for word in COMMON}
    unknown = [word for word, one in found.items() if one.kind == "words" or not one.meaning]
    assert not unknown
    assert "llama.cpp's convert_hf_to_gguf.py" in found["Ollama"].meaning
    assert len(meshwright("explain", "node_rank").out.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [("--tensor-model-parallel-size",), ("--tensor-model-parallel-size=8",), ("--tensor-model-parallel-size", "8")],
)
def test_explain_an_option_of_another_tool(meshwright: Any, words: tuple[str, ...]) -> None:
    assert meshwright("explain", *words, "--json").json["about"] == "layout.tp"
    assert "--json" in meshwright("explain", "tp", "--jsn").err  # a mistyped option of our own stays one


def _titan(header: str = "", steps: int = 60, every: float = 1.46) -> str:
    """Return a torchtitan log whose lines are 1.46 s apart: 8 samples of 8,192 tokens on 8 GPUs."""
    line = "[rank0]:[titan] 2026-11-10 10:{:02d}:{:06.3f} - root - INFO - {}\n"
    rows = [line.format(0, 2.0, text).replace(".", ",", 1) for text in header.splitlines()]
    for step in range(1, steps + 1):
        minute, second = divmod(8.7 + every * step, 60)
        text = f"step: {step}  loss: {4 + 8 / step:.4f}  grad_norm: 1.2000  memory: 52.30GiB(66.11%)  tps: 5,610"
        rows.append(line.format(int(minute), second, text).replace(".", ",", 1))
    return "".join(rows)


MODEL = (
    "Model llama3 8B size: 8,030,261,248 total parameters\nCUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory"
)


def test_step_times_come_from_the_logs_timestamps(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "titan.log"
    log.write_text(_titan(MODEL))
    answer = meshwright("doctor", str(log), "--recipe", "llama3-8b", "--gpus", "8xH100", "--json").json
    step = next(one for one in answer["figures"] if one["name"] == "step time")
    assert step["measured"] == pytest.approx(1.46, rel=0.01)
    assert step["estimate"] == pytest.approx(1.46, rel=0.5)
    assert any("does not state the layout" in note and "tp=" in note for note in answer["notes"])
    assert any("8 is assumed, computed from tokens per second" in note for note in answer["notes"])
    (note,) = meshwright("doctor", str(log), "--json").json["notes"]
    assert "H100" in note
    assert "not how many" in note


def test_the_mesh_of_older_versions_is_read(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "titan.log"
    log.write_text(_titan(f"Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]\n{MODEL}"))
    answer = meshwright("doctor", str(log), "--json").json
    assert answer["gpus"] == "8xH100"
    log.write_text(_titan(f"Building 1-D device mesh with ['dp_shard'], [8]\n{MODEL}"))
    named = meshwright("doctor", str(log), "--model", "llama3-8b", "--json").json
    assert named["gpus"] == "8xH100"
    assert not any("does not state the layout" in note for note in named["notes"])
    remedies = [text for finding in named["findings"] for one in finding["remedies"] for text in one["try"]]
    assert "layout.tp=1" not in remedies  # it is 1 already


def test_model_and_recipe_exclude_each_other(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "titan.log"
    log.write_text(_titan(MODEL))
    answer = meshwright(
        "doctor", str(log), "--model", "llama3-8b", "--recipe", "llama3-8b", "--gpus", "8xH100", "--json"
    )
    assert (answer.code, answer.json["error"]["field"]) == (2, "model")


def _megatron(without: str = "") -> str:
    rows = [row.split(" ", 1) for row in DUMP.split("|") if not without or not row.startswith(without)]
    text = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in rows)
    for place in range(1, 61):
        bad = place > 50
        loss = "NAN" if bad else f"{11 - place / 10:.6E}"
        text += MEGATRON.format(
            second=place % 60, step=10 * place, digit=place % 7, loss=loss, norm="nan" if bad else 1.1
        )
    return text


@pytest.mark.parametrize("without", ["", "lr "])
def test_what_the_log_states_wins_over_the_recipe(meshwright: Any, tmp_path: Path, without: str) -> None:
    log = tmp_path / "meg.log"
    log.write_text(_megatron(without))
    answer = meshwright("doctor", str(log), "--recipe", "llama3-70b", "--gpus", "4x8xH100", "--json").json
    assert answer["recipe"] == "llama3_70b_pretrain_config"
    remedies = {text for finding in answer["findings"] for one in finding["remedies"] for text in one["try"]}
    assert "optimizer.lr=7.5e-05" in remedies  # half of the log's, from its arguments or its step lines
    assert not remedies & {"optimizer.lr=0.00015", "layout.pp=2", "layout.tp=8"}
    alone = meshwright("doctor", str(log), "--gpus", "4x8xH100", "--json").json
    assert "optimizer.lr=7.5e-05" in {t for f in alone["findings"] for one in f["remedies"] for t in one["try"]}
