"""Files for another version of a framework than that of our tables: only what is wrong in every version is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.frameworks import framework

FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: identity
template: llama3
cutoff_len: 2048
output_dir: saves/llama3
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, max_steps: 100}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
  backend: {attn: te}
distributed: {strategy: fsdp2, dp_size: 8}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5}
dataset:
  _target_: nemo_automodel.components.datasets.llm.hellaswag.HellaSwag
  path_or_dataset: rowan/hellaswag
"""


def _found(folder: Path, name: str, text: str) -> dict[str, str]:
    (folder / name).write_text(text)
    result = meshwright.check(str(folder / name), gpus="8xH100")
    return {one.field: one.severity for one in result.findings}


def test_keys_of_an_older_llama_factory_are_no_errors(tmp_path: Path) -> None:
    found = _found(tmp_path, "sft.yaml", f"{FACTORY}kt_optimize_rule: rule.yaml\ncpu_infer: 32\n")
    assert found["kt_optimize_rule"] == found["cpu_infer"] == "warning"
    assert "error" not in found.values()


def test_a_value_named_like_a_later_variant_is_no_error(tmp_path: Path) -> None:
    assert _found(tmp_path, "sft.yaml", f"{FACTORY}flash_attn: fa4\n")["flash_attn"] == "warning"
    assert _found(tmp_path, "sft.yaml", f"{FACTORY}flash_attn: fast\n")["flash_attn"] == "error"


def test_a_typing_error_is_one_in_every_version(tmp_path: Path) -> None:
    assert _found(tmp_path, "sft.yaml", FACTORY.replace("lora_rank", "lora_rnak"))["lora_rnak"] == "error"
    found = _found(tmp_path, "ft.yaml", AUTOMODEL.replace("HellaSwag\n", "HelaSwag\n"))
    assert found["dataset._target_"] == "error"


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        (
            "{attn: te}",
            "{attn: te, partial_cuda_graph_moe_router: true}",
            "model.backend.partial_cuda_graph_moe_router",
        ),
        ("llm.hellaswag.HellaSwag", "llm.packed_parquet_dataset.PackedParquet", "dataset._target_"),
        ("{attn: te}", "{attn: te_ops}", "model.backend.attn"),
    ],
)
def test_names_of_a_newer_automodel_are_no_errors(tmp_path: Path, before: str, after: str, field: str) -> None:
    found = _found(tmp_path, "ft.yaml", AUTOMODEL.replace(before, after))
    assert found[field] == "warning"
    assert "error" not in found.values()


def test_the_warning_names_the_version_of_our_table(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(f"{FACTORY}attention_rule: rule.yaml\n")
    (finding,) = (one for one in meshwright.check(str(tmp_path / "sft.yaml")).findings if one.field == "attention_rule")
    assert "LLaMA-Factory at commit" in finding.message
    assert finding.message.endswith("another version may accept it")


TITAN = """from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000MORE),
    )
"""


def test_keys_that_torchtitan_renamed_lately(tmp_path: Path) -> None:
    old = _found(tmp_path, "config_registry.py", TITAN.replace("MORE", ""))
    assert old["training.seq_len"] == "warning"


@pytest.mark.parametrize("key", ["checkpoint.looad=x", "logger.svae_config_filepath=x", "dataset.sseed=1"])
def test_a_misspelled_key_of_megatron_bridge_is_an_error(tmp_path: Path, key: str) -> None:
    command = "uv run torchrun --nproc_per_node 8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config"
    found = _found(tmp_path, "train.sh", f"#!/bin/bash\n{command} {key}\n")
    assert found[key.partition("=")[0]] == "error"


def _strategy(folder: Path, options: str, head: str = "") -> dict[str, str]:
    return _found(folder, "ft.yaml", head + AUTOMODEL.replace("dp_size: 8", f"tp_size: 2, {options}"))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "tensor_model_parallel_size", "tp_degree"])
def test_a_degree_under_the_name_of_another_framework_is_an_error(tmp_path: Path, name: str) -> None:
    assert _strategy(tmp_path, f"{name}: 8")[f"distributed.{name}"] == "error"
    result = meshwright.check(str(tmp_path / "ft.yaml"), gpus="8xH100")
    about = next(one for one in result.findings if one.field == f"distributed.{name}")
    assert "did you mean distributed.tp_size? It is already set to 2" in about.message
    assert tuple(about.fix) == (f"without distributed.{name}",)


def test_unknown_options_are_errors_in_a_file_that_export_wrote_for_the_version_of_our_tables(tmp_path: Path) -> None:
    assert _strategy(tmp_path, "not_yet: 1")["distributed.not_yet"] == "warning"
    version = framework("automodel").version
    head = f"# mine (adapters) for NeMo AutoModel ({version}), written by meshwright export\n"
    assert _strategy(tmp_path, "not_yet: 1", head)["distributed.not_yet"] == "error"
