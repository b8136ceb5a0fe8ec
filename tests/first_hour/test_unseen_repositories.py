"""Training files of repositories that nobody has tried: forks, other people's scripts, older versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check
from meshwright.frameworks.result import CheckResult


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(name: str, text: str) -> CheckResult:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return check(name)


def errors(result: CheckResult) -> list[str]:
    return [f"{one.rule} {one.field}" for one in result.findings if one.severity == "error"]


GPT = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 32 --lr 1e-4 --data-path data --bf16 "
)


def test_query_groups_divide_the_heads() -> None:
    flags = GPT + "--train-iters 10 --kv-channels 64 --group-query-attention --num-query-groups "
    assert "megatron-lm.query-groups num_query_groups" in errors(
        checked("a.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} 5\n")
    )
    assert errors(checked("b.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} 4\n")) == []


def test_keys_of_a_vision_encoder_are_known() -> None:
    text = '[model]\ndim = 1024\n[train]\nseq_len = 512\n[vision_encoder]\ntype = "random"\n{}\n[vlm]\narch = "mot"\n'
    assert errors(checked("a.toml", text.format("feature_dim = 1024"))) == []
    assert errors(checked("b.toml", text.format("featur_dim = 1024"))) == ["key.unknown vision_encoder.featur_dim"]
    assert errors(checked("c.toml", text.format('feature_dim = "wide"'))) == [
        "value.invalid vision_encoder.feature_dim"
    ]


def test_a_method_of_a_transformers_class_is_compared() -> None:
    text = (
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n"
        "  config:\n    _target_: transformers.AutoConfig.{}\n    pretrained_model_name_or_path: Qwen/Qwen3-8B\n"
    )
    assert "automodel.target-unknown model.config._target_" in errors(checked("a.yaml", text.format("from_prterained")))
    assert "automodel.target-unknown model.config._target_" not in errors(
        checked("b.yaml", text.format("from_pretrained"))
    )


def test_a_fork_without_a_flag_is_still_read() -> None:
    """A warning on full disks suggests a flag of Megatron-LM that Megatron-DeepSpeed does not have."""
    small = "--num-layers 12 --hidden-size 768 --num-attention-heads 12"
    flags = GPT.replace(small, "--num-layers 40 --hidden-size 5120 --num-attention-heads 40")
    text = (
        f"deepspeed --num_gpus 8 pretrain_gpt.py {flags}"
        "--train-iters 100000 --save out --save-interval 100 --deepspeed --deepspeed_config ds.json "
        "--tensor-model-parallel-size 8\n"
    )
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32}')
    assert checked("a.sh", text).framework == "megatron-deepspeed"


def test_an_interval_is_a_number_even_if_nothing_is_evaluated() -> None:
    flags = f"{GPT} --train-iters 10 --eval-iters 0 --eval-interval"
    assert errors(checked("a.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} 1e\n")) == [
        "value.invalid eval_interval"
    ]
    assert errors(checked("b.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} 100\n")) == []


AUTOMODEL = """# automodel file.yaml --nproc-per-node 8{}
recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-405B
  backend:
    attn: {}
distributed:
  strategy: fsdp2
  tp_size: 8
dataset:
  _target_: nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset
  seq_length: 4096
"""


def test_the_gpus_of_a_command_in_a_comment_are_not_certain() -> None:
    assert not any(one.startswith("memory") for one in errors(checked("a.yaml", AUTOMODEL.format("", "te"))))
    assert any(one.startswith("memory") for one in errors(checked("b.yaml", AUTOMODEL.format(" --nnodes 1", "te"))))


def test_a_kernel_of_a_newer_version_is_a_warning() -> None:
    assert "value.invalid model.backend.attn" not in errors(checked("a.yaml", AUTOMODEL.format("", "upipe")))
    assert "value.invalid model.backend.attn" in errors(checked("b.yaml", AUTOMODEL.format("", "sdap")))


def test_tasks_train_for_epochs_and_retro_reads_its_project() -> None:
    task = f"torchrun --nproc_per_node 8 tasks/main.py --task MNLI --epochs 5 {GPT}\n"
    assert not any("no-length" in one for one in errors(checked("a.sh", task)))
    retro = GPT.replace("--seq-length 1024 --max-position-embeddings 1024", "--retro-project-dir /retro")
    found = errors(checked("b.sh", f"torchrun --nproc_per_node 8 pretrain_retro.py {retro}\n"))
    assert not any("missing" in one or "no-length" in one for one in found)


def test_words_in_capitals_are_a_placeholder() -> None:
    command = f"torchrun pretrain_gpt.py {GPT} --train-iters 9 --tokenizer-model $TOKENIZER"
    text = f'TOKENIZER="PATH OR NAME OF A TOKENIZER"\n{command}\n'
    assert errors(checked("a.sh", text)) == []
    stray = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} --train-iters 9 again\n"
    assert any(one.startswith("value.stray") for one in errors(checked("b.sh", stray)))


TITAN = '[model]\nname = "llama3"\nflavor = "{}"\n{}\n[training]\nbatch_size = 1\nseq_len = 2048\ndataset = "{}"\n'


def test_a_checkout_of_torchtitan_with_an_argument_parser_knows_its_own_keys() -> None:
    old = TITAN.format("3B", 'norm_type = "rmsnorm"', "pile")
    # Several old names in one file are warnings: it is of an older release.
    outside = errors(checked("a.toml", old.replace("batch_size", "local_batch_size")))
    assert {"key.removed model.norm_type", "torchtitan.model-name model.flavor"} <= set(outside)
    source = Path("fork/torchtitan/config_manager.py")
    source.parent.mkdir(parents=True)
    flags = ("model.norm_type", "training.batch_size", "training.dataset", "model.flavor")
    source.write_text("".join(f'parser.add_argument(\n    "--{one}")\n' for one in flags))
    Path("fork/torchtitan/models.py").write_text('FLAVORS = {"3B": 1}\nDATASETS = {"pile": 2}\n')
    assert errors(checked("fork/train_configs/a.toml", old)) == []
    assert "key.removed model.tokenizer_path" not in outside
    other = old.replace('norm_type = "rmsnorm"', 'norm_typ = "rmsnorm"')
    assert errors(checked("fork/train_configs/b.toml", other)) != []


def test_a_flag_of_the_checkout_s_own_runner_is_accepted() -> None:
    command = (
        "torchrun --nproc_per_node 8 scripts/training/run_recipe.py --recipe llama3_8b_sft_config {} "
        "checkpoint.pretrained_checkpoint=/model\n"
    )
    Path("src/megatron/bridge/training").mkdir(parents=True)
    Path("src/megatron/bridge/training/config.py").write_text("step = 1\n")
    Path("scripts/training").mkdir(parents=True)
    Path("scripts/training/run_recipe.py").write_text('parser.add_argument("--peft_scheme")\n')
    assert "megatron-bridge.unknown-flag --peft_scheme" not in errors(
        checked("a.sh", command.format("--peft_scheme lora"))
    )
    assert "megatron-bridge.unknown-flag --step" in errors(checked("b.sh", command.format("--step gpt_step")))


def test_a_file_of_another_program_is_not_one_of_trl() -> None:
    own = "mixer_list: [a, 1.0]\nwith_tracking: true\nadd_bos: true\nexp_name: x\n"
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 1\nnum_epochs: 2\nlearning_rate: 1e-6\n"
    assert errors(checked("a.yaml", own + text)) == []
    assert errors(checked("b.yaml", text)) == ["key.unknown num_epochs"]
    slipped = own + text.replace("learning_rate", "learnig_rate")
    assert errors(checked("c.yaml", slipped)) == ["key.unknown learnig_rate"]


def test_keys_of_older_front_ends_are_warnings() -> None:
    factory = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: lora\ndataset: x\ntemplate: qwen\n"
    ray = factory + "resources_per_worker:\n  GPU: 1\n"
    result = checked("a.yaml", ray)
    assert errors(result) == []
    assert any(one.rule == "key.removed" and "0.9.5" in one.message for one in result.findings)
    axolotl = (
        "base_model: Qwen/Qwen2.5-7B\ndatasets:\n- path: a/b\n  type: alpaca\nlearning_rate: 1e-5\n"
        "micro_batch_size: 1\ngradient_accumulation_steps: 1\nsequence_len: 2048\neval_table_max_new_tokens: 8\n"
    )
    result = checked("b.yaml", axolotl)
    assert errors(result) == []
    assert any("eval_max_new_tokens" in one.message for one in result.findings if one.rule == "key.removed")
    optimizer = '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-4}}}'
    assert errors(checked("c.json", optimizer)) == []


def test_a_key_that_a_yaml_file_sets_twice() -> None:
    """PyYAML uses the last value; OmegaConf, which LLaMA-Factory uses, refuses the file."""
    trl = "model_name_or_path: Qwen/Qwen2.5-7B\ndataset_name: a/b\nlearning_rate: 1e-6\nlearning_rate: 2e-6\n"
    result = checked("a.yaml", trl)
    assert [(one.severity, one.line) for one in result.findings if one.rule == "key.repeated"] == [("warning", 4)]
    assert result.recipe.optimizer.lr == 2e-6
    factory = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: lora\ndataset: x\ndataset: y\n"
    assert errors(checked("b.yaml", factory)) == ["key.repeated dataset"]


ACCELERATE = (
    "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
    "fsdp_config:\n  fsdp_activation_checkpointing: true\n"
)
SCRIPT = (
    'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'
    "accelerate launch --config_file ${HERE}/config.yaml $HERE/train.py --model_name_or_path Qwen/Qwen2.5-7B "
    "--per_device_train_batch_size 1 --gradient_checkpointing true\n"
)


def test_a_config_in_the_folder_of_its_script_is_found() -> None:
    Path("job").mkdir()
    Path("job/config.yaml").write_text(ACCELERATE)
    found = checked("job/a.sh", SCRIPT)
    assert found.framework == "accelerate"
    assert "accelerate.double-checkpointing fsdp_config.fsdp_activation_checkpointing" in errors(found)
    Path("job/train.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    assert errors(check("job/a.sh")) == []  # a loop of its own, without transformers' check


def test_a_program_submits_a_command() -> None:
    text = (
        "python mason.py --cluster a --num_nodes 4 --gpus 8 -- accelerate launch --mixed_precision bf16 "
        "--num_machines 4 --num_processes 32 open_instruct/finetune.py --model_name_or_path Qwen/Qwen2.5-7B "
        "--per_device_train_batch_size 1 --learning_rate 1e-5\n"
    )
    result = checked("a.sh", text)
    assert (result.framework, errors(result)) == ("accelerate", [])


def test_a_module_of_one_model_trains_with_torchtitan() -> None:
    Path("debug.toml").write_text('[model]\nname = "flux"\nflavor = "flux-debug"\n[training]\nlocal_batch_size = 4\n')
    text = "torchrun --nproc_per_node 8 -m torchtitan.models.flux.train --job.config_file debug.toml\n"
    assert checked("a.sh", text).framework == "torchtitan"
