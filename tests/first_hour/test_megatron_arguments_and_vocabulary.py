"""A Megatron-LM job with its own tokenizer: what is taken from the file and from its log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.doctor.formats.megatron import _argument
from meshwright.frameworks.model_match import tokenizer_vocabulary

CLUSTER = """name = "lab"
gpu = "H200"
nodes = 24
gpus_per_node = 8
network_gb_s_per_node = "3200 Gb/s"
"""
JOB = """#!/bin/bash
#SBATCH --nodes=24
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS={connections}
export NCCL_IB_HCA=mlx5_0,mlx5_1
torchrun --nproc_per_node 8 --nnodes 24 --rdzv_backend c10d --rdzv_endpoint $HEAD:6000 pretrain_gpt.py \\
  --num-layers 56 --hidden-size 7168 --ffn-hidden-size 20480 --num-attention-heads 56 --group-query-attention \\
  --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 \\
  --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --norm-epsilon 1e-5 \\
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \\
  --attention-backend flash --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \\
  --num-layers-per-virtual-pipeline-stage 7 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \\
  --overlap-param-gather --tp-comm-overlap --micro-batch-size 1 --global-batch-size 576 --train-samples 183105468 \\
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-samples 1152000 --weight-decay 0.1 --adam-beta2 0.95 \\
  --clip-grad 1.0 --bf16 --recompute-activations --manual-gc --distributed-timeout-minutes 30 \\
  --data-path /lustre/data/lab_text_document --tokenizer-type HuggingFaceTokenizer \\
  --tokenizer-model {tokenizer} --split 999,1,0 --save /lustre/ckpt --load /lustre/ckpt --save-interval 5000 \\
  --ckpt-format torch_dist --exit-duration-in-mins 4300 --log-throughput --tensorboard-dir /lustre/ckpt/tb
"""
DUMP = {
    "attention_backend": "AttnBackend.flash", "bf16": True, "data_parallel_size": 6, "ffn_hidden_size": 20480,
    "global_batch_size": 576, "group_query_attention": True, "hidden_size": 7168, "micro_batch_size": 1,
    "num_attention_heads": 56, "num_layers": 56, "num_layers_per_virtual_pipeline_stage": 7, "num_query_groups": 8,
    "padded_vocab_size": 129024, "pipeline_model_parallel_size": 4, "recompute_granularity": "selective",
    "seq_length": 8192, "sequence_parallel": True, "swiglu": True, "tensor_model_parallel_size": 8,
    "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True, "world_size": 192,
}  # fmt: skip
"""An excerpt of Megatron-LM's arguments, as a user keeps it: without what the file sets for communication."""


def job(connections: int = 1, tokenizer: str = "/lustre/tokenizers/lab") -> str:
    return JOB.format(connections=connections, tokenizer=tokenizer)


def log(backend: str) -> str:
    arguments = {**DUMP, "attention_backend": backend}
    lines = [
        "using world size: 192, data-parallel size: 6, context-parallel size: 1, tensor-model-parallel size: 8, "
        "pipeline-model-parallel size: 4",
        "------------------------ arguments ------------------------",
        *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()),
        "-------------------- end of arguments ---------------------",
    ]
    for step in range(10, 410, 10):
        lines.append(
            f" [2026-11-10 08:02:59.123456] iteration {step:8d}/  317891 | consumed samples: {step * 576:12d} | "
            f"elapsed time per iteration (ms): {17800 + step % 70:.1f} | learning rate: 3.0E-04 | global batch size: "
            f"  576 | lm loss: {2.5 + 8 / step:.6E} | loss scale: 1.0 | grad norm: 0.400 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("lab.toml").write_text(CLUSTER)
    Path("fixed.sbatch").write_text(job())
    return tmp_path


@pytest.mark.parametrize("backend", ["AttnBackend.flash", "<AttnBackend.flash: 1>", "flash"])
def test_an_excerpt_of_the_arguments_does_not_contradict_the_file(lab: Path, meshwright: Any, backend: str) -> None:
    Path("slow.log").write_text(log(backend))
    typed = ("slow.log", "--recipe", "fixed.sbatch", "--gpus", "lab.toml")
    rules = [one["rule"] for one in meshwright("doctor", *typed, "--json").json["findings"]]
    assert "run.differs-from-file" not in rules
    assert meshwright("calibrate", *typed, "--out", "c.toml").code == 0
    assert Path("c.toml").is_file()


def test_what_the_log_states_otherwise_is_still_a_contradiction(lab: Path, meshwright: Any) -> None:
    Path("slow.log").write_text(log("AttnBackend.unfused"))
    typed = ("slow.log", "--recipe", "fixed.sbatch", "--gpus", "lab.toml", "--json")
    found = [one for one in meshwright("doctor", *typed).json["findings"] if one["rule"] == "run.differs-from-file"]
    assert len(found) == 1
    assert "attention=eager in the log, attention=flash in fixed.sbatch" in found[0]["message"]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("AttnBackend.flash", "flash"),
        ("<AttnBackend.flash: 1>", "flash"),
        ("<AttnBackend.flash: 'flash'>", "flash"),
        ("flash", "flash"),
    ],
)
def test_members_of_enums_in_an_arguments_dump_are_their_flag_values(value: str, plain: str) -> None:
    assert _argument(f"  attention_backend {'.' * 31} {value}") == ("attention_backend", plain)


def test_dtypes_and_lists_in_an_arguments_dump_are_their_flag_values() -> None:
    assert _argument(f"  main_grads_dtype {'.' * 32} torch.bfloat16") == ("main_grads_dtype", "bf16")
    assert _argument(f"  cuda_graph_scope {'.' * 32} [<CudaGraphScope.attn: 3>, <CudaGraphScope.mlp: 4>]") == (
        "cuda_graph_scope",
        "attn mlp",
    )
    assert _argument(f"  tokenizer_model {'.' * 33} Lab.model") == ("tokenizer_model", "Lab.model")


def test_the_run_line_of_a_job_with_a_wrong_variable_works_as_printed(lab: Path, meshwright: Any) -> None:
    Path("train.sbatch").write_text(job(connections=8))
    plan = meshwright("recommend", "train.sbatch", "--gpus", "lab.toml", "--json").json
    typed = shlex.split(plan["commands"]["megatron-lm"])
    assert typed[:3] == ["meshwright", "export", "train.sbatch"]
    answer = meshwright(*typed[1:], "--json")
    assert answer.code == 0
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 of the file is now 1" in " ".join(answer.json["notes"])
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in Path("megatron-lm/train.sh").read_text()
    script = meshwright("launch", "train.sbatch", "--scheduler", "slurm", "--gpus", "lab.toml").out
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script


def test_fsdp_does_not_keep_the_one_connection_of_a_file(lab: Path, meshwright: Any) -> None:
    changes = ("layout.strategy=megatron_fsdp", "layout.tp=2", "layout.pp=1", "layout.vp=1", "tp_comm_overlap=false")
    answer = meshwright("export", "fixed.sbatch", "--to", "megatron-lm", "--gpus", "lab.toml", *changes, "--json").json
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in answer["env"]
    assert not [one for one in answer["findings"] if one["rule"] == "megatron-lm.max-connections"]


@pytest.mark.parametrize("verb", ["recommend", "estimate", "compare", "export"])
def test_an_assumed_vocabulary_is_said_once_and_refuses_nothing(lab: Path, meshwright: Any, verb: str) -> None:
    to = ("--to", "megatron-lm") if verb == "export" else ()
    text = meshwright(verb, "fixed.sbatch", "--gpus", "lab.toml", *to).out
    assert text.count("assumed 50,304, GPT-2's with padding") == 1
    assert "not meshwright: the vocabulary" not in text
    assert "pads the vocabulary" not in text


def test_a_stated_vocabulary_is_not_assumed(lab: Path, meshwright: Any) -> None:
    answer = meshwright("estimate", "fixed.sbatch", "--gpus", "lab.toml", "vocab_size=128256").out
    assert "33.08 B" in answer
    assert "the vocabulary size" not in answer


def test_the_vocabulary_is_that_of_a_tokenizer_on_this_machine(lab: Path, meshwright: Any) -> None:
    Path("own").mkdir()
    tokens = {f"t{number}": number for number in range(1000)}
    added = [{"id": 1000, "content": "<s>"}, {"id": 0, "content": "t0"}]
    Path("own/tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": added}))
    assert tokenizer_vocabulary("own") == 1001
    Path("here.sbatch").write_text(job(tokenizer="./own"))
    assert "assumed" not in meshwright("check", "here.sbatch", "--gpus", "24x8xH200").out
    pairs = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}
    Path("own/tokenizer.json").write_text(json.dumps(pairs))
    assert tokenizer_vocabulary(str(lab / "own")) == 2
    Path("own/tokenizer.json").write_text("{")
    assert tokenizer_vocabulary("own") is None


def test_a_saved_recipe_says_what_it_lacks_and_never_states_the_assumed_vocabulary(lab: Path, meshwright: Any) -> None:
    saved = meshwright(
        "recommend", "fixed.sbatch", "--gpus", "lab.toml", "--engine", "megatron", "--save", "sized.toml"
    )
    lost = (
        "--manual-gc, --distributed-timeout-minutes 30, --ckpt-format torch_dist, --exit-duration-in-mins 4300, "
        "--log-throughput, --tensorboard-dir /lustre/ckpt/tb, NCCL_IB_HCA=mlx5_0,mlx5_1"
    )
    assert f"not in sized.toml, as a recipe has no field for them: {lost}; exporting or launching" in saved.err
    text = Path("sized.toml").read_text()
    assert "# not in this recipe, of fixed.sbatch: --manual-gc\n" in text
    assert "# assumed: the vocabulary size depends on the tokenizer" in text
    answer = meshwright("export", "sized.toml", "--to", "megatron-lm", "--out", "sizedout", "--json").json
    script = Path("sizedout/sized.sh").read_text()
    assert "--tokenizer-model /lustre/tokenizers/lab" in script
    assert "vocab" not in script
    assert "Megatron-LM takes the vocabulary from the tokenizer /lustre/tokenizers/lab" in " ".join(answer["notes"])


def test_a_saved_recipe_of_a_model_has_no_such_comments(lab: Path, meshwright: Any) -> None:
    meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--save", "plain.toml")
    assert Path("plain.toml").read_text().startswith("name = ")


SHAPE_OF_LLAMA_3_8B = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --bf16 \\
  --position-embedding-type rope {base} --disable-bias-linear --untie-embeddings-and-output-weights \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 1024 --lr 3e-4 \\
  --train-iters 1000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/tokenizer
"""


@pytest.mark.parametrize(
    ("base", "model", "vocab"),
    [
        ("--rotary-base 500000", "llama3_8b", 128256),
        ("--rotary-base 1000000", "mistral_7b", 32768),
        ("--rotary-base 123", "mistral_7b", 32768),  # nobody's: the first of this shape
        ("", "mistral_7b", 32768),
    ],
)
def test_the_rope_base_tells_models_of_one_shape_apart(
    tmp_path: Path, meshwright: Any, base: str, model: str, vocab: int
) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SHAPE_OF_LLAMA_3_8B.format(base=base))
    answer = meshwright("check", str(path), "--gpus", "16x8xH100", "--json").json
    assert answer["model"] == model
    assert any(f"assumed {vocab:,}, as in {model}" in note for note in answer["notes"])
