"""Megatron's argument dump names the argument that a flag sets: fp8 for --fp8-format, add_bias_linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import doctor
from meshwright.recipes.key_maps.megatron_lm_choices import flags_by_argument, parser_flags

ARGUMENTS = {
    "bf16": "True",
    "context_parallel_size": "1",
    "ffn_hidden_size": "14336",
    "global_batch_size": "128",
    "group_query_attention": "True",
    "hidden_size": "4096",
    "max_position_embeddings": "8192",
    "micro_batch_size": "1",
    "normalization": "RMSNorm",
    "num_attention_heads": "32",
    "num_layers": "32",
    "num_query_groups": "8",
    "padded_vocab_size": "128256",
    "pipeline_model_parallel_size": "1",
    "seq_length": "8192",
    "swiglu": "True",
    "tensor_model_parallel_size": "1",
    "train_iters": "1000",
    "untie_embeddings_and_output_weights": "True",
    "use_distributed_optimizer": "True",
    "world_size": "8",
}
FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed"}
SCRIPT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu \\
  --max-position-embeddings 8192 --normalization RMSNorm --untie-embeddings-and-output-weights \\
  --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --bf16 --fp8-format hybrid --fp8-recipe delayed \\
  --use-distributed-optimizer --vocab-size 128256
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_log(folder: Path, more: dict[str, str]) -> str:
    dump = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted({**ARGUMENTS, **more}.items())]
    steps = [
        f" [2026-11-17 10:00:{step:02}] iteration {step:8}/    1000 | consumed samples: {step * 128:12} | "
        f"elapsed time per iteration (ms): {11500 + step}.0 | throughput per GPU (TFLOP/s/GPU): 600.0 | "
        f"learning rate: 1.0E-05 | global batch size:   128 | lm loss: {11 - step / 10:.6E} | loss scale: 1.0 | "
        "grad norm: 1.200 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for step in range(1, 31)
    ]
    lines = ["---- arguments ----", *dump, "---- end of arguments ----", *steps]
    (folder / "mlm.log").write_text("\n".join(lines) + "\n")
    return "mlm.log"


@pytest.mark.parametrize(
    ("more", "peak"),
    [
        (FP8, "dense fp8"),
        ({"fp8": "e4m3", "fp8_recipe": "Fp8Recipe.blockwise"}, "dense fp8"),
        ({"fp8": "None", "fp8_recipe": "delayed"}, "dense bf16"),
    ],
)
def test_the_doctor_reads_fp8_from_the_argument_dump(
    meshwright: Any, folder: Path, more: dict[str, str], peak: str
) -> None:
    result = meshwright("doctor", write_log(folder, more), "--gpus", "8xH100")
    assert peak in result.out
    assert ("speed.low-mfu" in result.out) == (more == FP8)  # blockwise scaling is slower


def test_an_fp8_log_is_calibrated_with_its_own_script(meshwright: Any, folder: Path) -> None:
    (folder / "train.sh").write_text(SCRIPT)
    result = meshwright("calibrate", write_log(folder, FP8), "--gpus", "8xH100", "--recipe", "train.sh")
    assert result.code == 0, result.err
    assert "contradicts" not in result.out + result.err


def test_a_bf16_log_contradicts_an_fp8_script(meshwright: Any, folder: Path) -> None:
    (folder / "train.sh").write_text(SCRIPT)
    log = write_log(folder, {"fp8": "None", "fp8_recipe": "delayed"})
    result = meshwright("calibrate", log, "--gpus", "8xH100", "--recipe", "train.sh")
    assert result.code == 2
    assert "matmul=same in the log" in result.err


@pytest.mark.parametrize(
    ("argument", "value", "flag"),
    [
        ("fp4", "e2m1", "--fp4-format e2m1"),
        ("layernorm_epsilon", "1e-06", "--norm-epsilon 1e-06"),
        ("layernorm_zero_centered_gamma", "True", "--apply-layernorm-1p"),
        ("add_bias_linear", "False", "--disable-bias-linear"),
        ("check_for_nan_in_loss_and_grad", "False", "--no-check-for-nan-in-loss-and-grad"),
        ("apply_rope_fusion", "False", "--no-rope-fusion"),
        ("torch_fsdp2_reshard_after_forward", "False", "--torch-fsdp2-no-reshard-after-forward"),
        ("save_interval", "200", "--save-interval 200"),
    ],
)
def test_an_argument_is_read_as_the_flag_that_sets_it(folder: Path, argument: str, value: str, flag: str) -> None:
    header = doctor.read(write_log(folder, {argument: value})).header
    assert flag in header.arguments
    header = doctor.read(write_log(folder, {argument: {"False": "True"}.get(value, "None")})).header
    assert flag.split()[0].lstrip("-").replace("-", "_") in header.off_arguments


def test_every_flag_of_the_table_names_its_argument() -> None:
    assert {one.argument for one in parser_flags().values()} == {*flags_by_argument()}
    assert all(not one.turns_off or one.name != one.argument for one in parser_flags().values())
