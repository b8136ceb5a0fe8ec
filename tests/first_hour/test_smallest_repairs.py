"""Repairs are the smallest ones; stored checkpoints have one answer; paths, verbs and models that people type work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

import pytest

from meshwright import check, export, find_model, inspect
from meshwright.cli.run import run
from meshwright.errors import InputError

TITAN = """
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
converters = ["{converter}"]

[training]
local_batch_size = 8
seq_len = 8192
steps = 1000
dataset = "c4"

[lr_scheduler]
warmup_steps = 100

[parallelism]
tensor_parallel_degree = 8
enable_async_tensor_parallel = true

[compile]
enable = false

[activation_checkpoint]
mode = "none"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
"""
BRIDGE = """from megatron.bridge.recipes.llama import llama3_70b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

cfg = llama3_70b_pretrain_config()
cfg.model.tensor_model_parallel_size = 4
cfg.model.pipeline_model_parallel_size = 3
cfg.model.virtual_pipeline_model_parallel_size = 5
cfg.model.context_parallel_size = 1
cfg.model.sequence_parallel = True
cfg.train.global_batch_size = 512
cfg.train.micro_batch_size = 1
cfg.model.seq_length = 8192
cfg.dataset.seq_length = 4096
pretrain(config=cfg, forward_step_func=forward_step)
"""
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 256 "
    "--train-iters 400000 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2000 --bf16 "
    "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel "
    "--data-path 1.0 /data/corpus_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tok "
    "--vocab-size 128000 --save /ckpt/run --load /ckpt/run --save-interval 200\n"
)
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
  ckpt_every_steps: 500
  num_epochs: 2
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-8B
checkpoint:
  enabled: true
  checkpoint_dir: checkpoints/
distributed:
  strategy: fsdp2
  tp_size: 1
  cp_size: 1
dataset:
  _target_: nemo_automodel.components.datasets.llm.hellaswag.HellaSwag
  path_or_dataset: rowan/hellaswag
  split: train
packed_sequence:
  packed_sequence_size: 4096
optimizer:
  _target_: torch.optim.Adam
  lr: 1.0e-5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which a test types its commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run(list(words))
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_a_repair_of_torchtitan_keeps_the_layout_where_compiling_suffices(folder: Path) -> None:
    (folder / "titan.toml").write_text(TITAN.format(converter="float8"))
    (folder / "spelled.toml").write_text(TITAN.format(converter="quantize.linear.float8"))
    first, second = (check(name, gpus="32x8xB200") for name in ("titan.toml", "spelled.toml"))
    assert first.repair
    assert second.repair
    assert [*first.repair.overrides] == ['model.converters = ["quantize.linear.float8"]', "compile.enable = true"]
    assert [*second.repair.overrides] == ["compile.enable = true"]
    assert not any("context_parallel_degree" in one for one in second.notes)  # the file has one sequence per rank


def test_a_repair_of_megatron_bridge_keeps_the_micro_batch(folder: Path) -> None:
    (folder / "pretrain.py").write_text(BRIDGE)
    found = check("pretrain.py", gpus="32x8xB200").repair
    assert found
    assert [*found.overrides] == ["model.pipeline_model_parallel_size=2", "dataset.seq_length=8192"]


def test_check_reports_checkpoints_of_a_blend_that_fill_the_disk(folder: Path) -> None:
    (folder / "train.sh").write_text(MEGATRON)
    found = [one for one in check("train.sh", gpus="8xH100").findings if one.rule == "saving.fills-disk"]
    assert [[*one.fix] for one in found] == [["--save-retain-interval 20000"]]
    (folder / "train.sh").write_text(MEGATRON.replace("--data-path 1.0 /data/corpus_text_document", "--mock-data"))
    assert "saving.fills-disk" not in {one.rule for one in check("train.sh", gpus="8xH100").findings}


def test_a_job_of_epochs_has_no_invented_total_of_storage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sft.yaml").write_text(AUTOMODEL)
    words = ("launch", "sft.yaml", "--scheduler", "slurm", "--gpus", "8xH100", "--time", "12:00:00", "--write", "job")
    _, out, err = _run(capsys, *words)
    text = out + err
    assert "GiB per checkpoint, all kept (checkpoint.keep); no total: the samples of an epoch are not known" in text
    assert "TiB" not in text
    _, out, err = _run(capsys, *words, "--overwrite", "train.steps=2000")
    assert "with the one being written" in out + err


LORA = """name = "q4b"
model = "qwen3_4b"
goal = "peft"
cluster = "4xA10G"

[data]
dataset = "chats.jsonl"
seq_length = 2048
packing = true

[train]
global_batch_size = 8
epochs = 3.0

[layout]
dp_replicate = 4

[kernels]
compile = true
loss = "fused_linear"
"""


def test_an_export_to_accelerate_is_priced_as_the_files_it_writes(folder: Path) -> None:
    (folder / "q4b.toml").write_text(LORA)
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    written = export("q4b.toml", to="accelerate", out="acc")
    read = check("acc/q4b.yaml", gpus="4xA10G")
    assert read.estimate
    assert read.estimate.memory.total < 20
    assert written.checked.estimate
    assert written.checked.estimate.memory.total == pytest.approx(read.estimate.memory.total, rel=1e-3)
    assert "memory.tight" not in {one.rule for one in written.checked.findings}


@pytest.mark.parametrize("path", ["/scratch/$USER/run", "$SCRATCH/run", "${SCRATCH}/run"])
def test_variables_of_the_cluster_expand_in_a_job(capsys: pytest.CaptureFixture[str], path: str) -> None:
    words = ("launch", "qwen3_600m_sft_config", "--scheduler", "slurm", "--gpus", "8xH100", "--time", "2:00:00")
    _, out, _ = _run(capsys, *words, "--out", path, "--dataset", f"{path}/chats.jsonl")
    line = next(one for one in out.splitlines() if "--out" in one and one.startswith("srun"))
    words_of_line = bash_words(line.partition("meshwright train")[2].rstrip(" &"))
    assert f"{Template(path).substitute(USER='me', SCRATCH='/big')}" in words_of_line


def test_variables_of_the_cluster_are_in_an_exported_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("export", "llama3-8b", "--goal", "pretrain", "--gpus", "2x8xH100", "train.steps=10000")
    _, out, _ = _run(
        capsys, *words, "--to", "megatron-lm", "--out", "ex", "data.dataset=$DATA/c4", "checkpoint.folder=${SCRATCH}/ck"
    )
    assert "would use" not in out
    script = next((folder / "ex").glob("*.sh")).read_text()
    assert '--data-path "$DATA"/c4' in script
    assert '--save "${SCRATCH:?part of a path of this job}"/ck' in script


def bash_words(line: str) -> list[str]:
    """Return the words of a line as a shell of the cluster passes them."""
    command = ["bash", "-c", f"printf '%s\\n' {line}"]
    done = subprocess.run(command, env={"USER": "me", "SCRATCH": "/big"}, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("allenai/OLMo-2-1124-13B-Instruct", 13_716_198_400),
        ("olmo2-32b", 32_234_279_936),
        ("OLMo-2-0425-1B", 1_484_916_736),
    ],
)
def test_olmo_2_is_in_the_catalogue(name: str, parameters: int) -> None:
    assert find_model(name).params.total == parameters


class Config:
    """A config as transformers has it."""

    model_type = "llama"

    def save_pretrained(self, folder: str) -> None:
        """Write nothing."""


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"model_type": "llama", "hidden_size": 64}, 'json.dump(config, open("config.json", "w"))'),
        (Config(), 'config.save_pretrained("my_model")'),
    ],
)
@pytest.mark.parametrize("function", [find_model, inspect])
def test_a_config_in_place_of_a_name_says_how_to_write_it(function: Any, given: Any, fix: str) -> None:
    with pytest.raises(InputError) as refused:
        function(given)
    assert refused.value.value == "llama"
    assert refused.value.fix[0] == fix


def test_a_call_of_a_package_names_the_function_of_its_command() -> None:
    code = "from meshwright import doctor\ndoctor('x.log')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the function of `meshwright doctor` is meshwright.diagnose" in done.stderr


def _chats(folder: Path) -> None:
    text = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 90}]})
    (folder / "chats.jsonl").write_text(f"{text}\n" * 40)


def test_epochs_are_an_option_of_recommend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _chats(folder)
    words = ("recommend", "qwen3-0.6b", "--goal", "sft", "--gpus", "1xH100", "--dataset", "chats.jsonl")
    _, out, _ = _run(capsys, *words, "--epochs", "2")
    assert "train.epochs 0.0 → 2.0" in out
    code, _, err = _run(capsys, *words, "--epochs", "many")
    assert code == 2
    assert "train.epochs" in err
    code, _, err = _run(capsys, *words, "--epochs", "2", "train.epochs=3")
    assert "contradicts --epochs 2" in err
    _, out, _ = _run(capsys, *words)
    few = "train.epochs=3 train.global_batch_size=1 layout.micro_batch_size=1 is usual: 6 steps"
    assert few in " ".join(out.split())
    assert "or train.steps=" not in out


def test_a_bare_network_speed_is_one_short_remark(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "b200.toml").write_text('gpu = "B200"\nnodes = 2\ngpus_per_node = 8\nnetwork_gb_s_per_node = 400\n')
    _, out, err = _run(capsys, "check", "llama3_8b_pretrain_config", "--gpus", "b200.toml")
    assert '400 is read as GB/s, "400 Gb/s" would be Gb/s' in " ".join((out + err).split())


def test_every_key_of_a_quantize_table_without_its_converter_is_reported(folder: Path) -> None:
    text = TITAN.replace('converters = ["{converter}"]\n', "") + 'filter_fqns = ["output"]\n'
    (folder / "titan.toml").write_text(text)
    found = [one.field for one in check("titan.toml", gpus="32x8xB200").findings if "quantize-ignored" in one.rule]
    assert "quantize.linear.float8.filter_fqns" in found
    assert len(found) == 3


def test_a_meaning_ends_before_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "explain", "vp")
    assert "shrinks the bubble. Executed by" in " ".join(out.split())


def test_the_folder_of_a_conversion_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--out", "hf1"), ("--out=hf1",)):
        code, _, err = _run(capsys, "convert", "nothere", *words)
        assert code == 2
        assert "source=nothere" in err


def test_an_export_starts_in_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "q4b.toml").write_text(LORA)
    _chats(folder)
    _, out, _ = _run(capsys, "export", "q4b.toml", "--to", "accelerate", "--out", "acc4")
    assert "cd acc4 && torchrun --nproc-per-node=4 train.py" in out


def test_samples_of_a_dataset_need_only_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _chats(folder)
    code, _, err = _run(capsys, "samples", "chats.jsonl")
    assert code == 2
    assert "fix:   meshwright samples chats.jsonl --model qwen3-0.6b" in err
