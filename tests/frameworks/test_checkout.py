"""A file in a checkout of its framework is checked with the keys of that checkout, newer or older than our tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check
from meshwright.frameworks import CheckResult, checkout

AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, max_steps: 100, print_every: 5}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
  backend: {_target_: nemo_automodel.components.models.common.BackendConfig, attn: upipe, expert_cache: true}
distributed: {strategy: fsdp2, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.llm.parquet.PackedParquet
  path: data
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""
SOURCE = {
    "nemo_automodel/__init__.py": "",
    "nemo_automodel/components/__init__.py": "",
    "nemo_automodel/components/datasets/llm/parquet.py": "class PackedParquet:\n    def __init__(self, path): ...\n",
    "nemo_automodel/components/models/common.py": (
        'class BackendConfig:\n    attn: Literal["te", "upipe"] = "te"\n    expert_cache: bool = False\n'
    ),
    "nemo_automodel/recipes/train.py": 'every = cfg.get("step_scheduler.print_every", 5)\n',
}
MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --train-iters 100 --lr 3e-4 --bf16 \\
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --varlen-budget 4 --use-legacy-models
"""
ARGUMENTS = "group.add_argument('--varlen-budget', type=int)\ngroup.add_argument('--use-legacy-models')\n"


def checked(
    text: str, name: str, source: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CheckResult:
    for path, content in source.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return check(f"examples/{name}")


def errors(found: CheckResult) -> set[tuple[str, str]]:
    return {(one.rule, one.field) for one in found.findings if one.severity == "error"}


def warnings(found: CheckResult) -> set[tuple[str, str]]:
    return {(one.rule, one.field) for one in found.findings if one.severity == "warning"}


def test_keys_values_and_classes_of_an_automodel_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(AUTOMODEL, "sft.yaml", SOURCE, tmp_path, monkeypatch)
    assert errors(found) == set()
    (note,) = (one for one in found.notes if one.startswith("not checked, as only the checkout"))
    names = ("dataset._target_", "model.backend.expert_cache", "model.backend.attn", "step_scheduler.print_every")
    assert all(name in note for name in names)


def test_without_a_checkout_they_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = checked(AUTOMODEL, "sft.yaml", {}, tmp_path, monkeypatch)
    found = warnings(result)  # another version may have them
    assert errors(result) == set()
    assert {("automodel.target-unknown", "dataset._target_"), ("value.invalid", "model.backend.attn")} <= found


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("expert_cache", "expert_cahce"),
        ("upipe", "upipee"),
        ("PackedParquet", "PackedParquett"),
        ("max_steps", "max_stepss"),
        ("print_every: 5", "attn: te"),  # a key of another section
    ],
)
def test_typing_errors_in_a_checkout_are_found(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert errors(checked(AUTOMODEL.replace(right, wrong), "sft.yaml", SOURCE, tmp_path, monkeypatch))


def test_flags_of_a_megatron_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"megatron/training/arguments.py": ARGUMENTS}
    assert errors(checked(MEGATRON, "train.sh", source, tmp_path, monkeypatch)) == set()


def test_flags_that_no_checkout_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = checked(MEGATRON, "train.sh", {}, tmp_path, monkeypatch)
    found = warnings(result)
    assert errors(result) == set()
    assert found >= {("key.unknown", "varlen_budget"), ("key.removed", "use_legacy_models")}


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[data]
dataset_path = "org/cells"
[training]
local_batch_size = 1
seq_len = 2048
steps = 100
[freezing]
percentile = 80
[checkpoint]
enable_checkpoint = true
"""
BUILDS = (
    "class JobConfig:\n    def parse(self):\n        for k, v in args.items():\n            type(k.title(), (), v)\n"
)
LOADS = "class ConfigManager:\n    def _dict_to_dataclass(self, cls, data):\n        {}\n"
TITAN_LOADERS = {
    "argparse": {"torchtitan/config_manager.py": f'{BUILDS}parser.add_argument("--data.dataset_path", type=str)\n'},
    "dataclasses": {
        "torchtitan/train.py": "",
        "torchtitan/config/manager.py": LOADS.format("return cls(**{one: data.get(one) for one in fields})"),
    },
}


@pytest.mark.parametrize("name", TITAN_LOADERS)
def test_keys_that_the_loader_of_a_checkout_ignores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(TITAN, "a.toml", TITAN_LOADERS[name], tmp_path, monkeypatch)
    ignored = [one for one in found.findings if "this checkout ignores keys" in one.message]
    assert not errors(found)
    assert {one.field for one in ignored} >= {"freezing.percentile", "checkpoint.enable_checkpoint"}
    assert ("data.dataset_path" in {one.field for one in ignored}) == (name == "dataclasses")  # the parser has it


def test_unknown_keys_that_the_loader_of_a_checkout_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejects = LOADS.format("if invalid_fields := set(data) - names:\n            raise ValueError(invalid_fields)")
    source = {"torchtitan/train.py": "", "torchtitan/config/manager.py": rejects}
    found = checked(TITAN, "a.toml", source, tmp_path, monkeypatch)
    assert {("key.unknown", "data.dataset_path"), ("key.unknown", "freezing.percentile")} <= errors(found)


def test_a_misspelled_key_that_the_loader_ignores_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TITAN.replace("local_batch_size", "local_batch_sise")
    found = checked(text, "a.toml", TITAN_LOADERS["argparse"], tmp_path, monkeypatch)
    assert ("key.unknown", "training.local_batch_sise") in errors(found)


def test_a_model_of_a_checkout_named_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {**TITAN_LOADERS["argparse"], "torchtitan/models/vlm.py": 'SPEC = TrainSpec(name="org/vlm-7b")\n'}
    found = checked(TITAN.replace('"llama3"', '"org/vlm-7b"'), "a.toml", source, tmp_path, monkeypatch)
    assert not errors(found)


def test_a_script_that_starts_another_copy_is_not_checked_with_the_flags_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"megatron/training/arguments.py": ARGUMENTS}
    flags = MEGATRON.replace("--varlen-budget 4", "--xielu --ademamix-alpha 4").replace("--use-legacy-models", "")
    elsewhere = flags.replace("pretrain_gpt.py", "/scratch/$USER/Megatron/pretrain_gpt.py")
    found = checked(elsewhere, "a.sh", source, tmp_path, monkeypatch)
    assert not errors(found)
    assert {("key.unknown", "xielu"), ("key.unknown", "ademamix_alpha")} <= warnings(found)
    (tmp_path / "examples" / "b.sh").write_text(flags)
    assert ("key.unknown", "xielu") in errors(check("examples/b.sh"))


def test_a_key_of_the_checkout_with_wrong_letters_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dict(TITAN_LOADERS["argparse"])
    source["torchtitan/config_manager.py"] += 'parser.add_argument("--freezing.percentile", type=int)\n'
    found = checked(TITAN.replace("percentile", "precentile"), "a.toml", source, tmp_path, monkeypatch)
    assert errors(found) == {("key.unknown", "freezing.precentile")}


def test_a_module_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"torchtitan/train.py": "", "torchtitan/models/rnn_vl/__init__.py": ""}
    run = "torchrun --nproc_per_node 8 -m torchtitan.train --module {} --config rnn_7b --training.steps 10\n"
    found = checked(run.format("rnn_vl"), "a.sh", source, tmp_path, monkeypatch)
    assert not errors(found)
    (tmp_path / "examples" / "b.sh").write_text(run.format("rnn_vx"))
    assert errors(check("examples/b.sh")) == {("torchtitan.preset", "module")}


def test_a_key_of_the_checkout_that_selects_its_data_needs_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TITAN.replace('[data]\ndataset_path = "org/cells"\n', "")
    text = text.replace("[training]", '[training]\ndataset = ""\ndataloader = "mixtures"')
    source = dict(TITAN_LOADERS["argparse"])
    assert ("torchtitan.dataset-name", "training.dataset") in errors(
        checked(text.replace('dataloader = "mixtures"\n', ""), "a.toml", source, tmp_path, monkeypatch)
    )
    own = Path("torchtitan/config_manager.py")
    own.write_text(f"{own.read_text()}parser.add_argument('--training.dataloader', type=str)\n")
    Path("examples/b.toml").write_text(text)
    checkout.names_of.cache_clear()
    assert errors(check("examples/b.toml")) == set()


AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 1e-5
optimizer: adamw_bnb_8bit
fsdp_version: 2
fsdp_config: {reshard_after_forward: true}
"""


def test_values_that_fail_together_are_errors_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"src/axolotl/__init__.py": "", "src/axolotl/schema.py": 'optimizers = ["adamw_bnb_8bit", "newton"]\n'}
    assert errors(checked(AXOLOTL, "a.yml", source, tmp_path, monkeypatch)) == {("value.invalid", "optimizer")}
    (tmp_path / "examples" / "b.yml").write_text(AXOLOTL.replace("adamw_bnb_8bit", "newton"))
    assert not errors(check("examples/b.yml"))


OWN_MODEL = {
    "torchtitan/train.py": "",
    "torchtitan/models/rnn.py": 'register_train_spec(TrainSpec(name="rnn_vl"))\nSIZES = {"tiny": 1, "large": 2}\n',
    "torchtitan/args.py": "class Args:\n    prefetch_depth: int = 2\n",
}
OWN_TITAN = """
[model]
name = "rnn_vl"
flavor = "large"
[job]
custom_config_module = "torchtitan.args"
[training]
local_batch_size = 2
seq_len = 2048
prefetch_depth = 3
[parallelism]
data_parallel_shard_degree = -1
"""


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("rnn_vl", "rnn_vll", "torchtitan.model-name"),
        ("large", "lagre", "torchtitan.model-name"),
        ("local_batch_size", "local_batch_sise", ""),  # a letter replaced: perhaps another key of the module
        ("local_batch_size", "local_bacth_size", "key.unknown"),
        ("[training]", "[trianing]", "key.unknown"),
        ("degree = -1", "degree = 0", "value.invalid"),
        ("seq_len = 2048", "seq_len = 0", "value.invalid"),
    ],
)
def test_slips_in_a_file_of_a_fork_with_models_and_keys_of_its_own(
    right: str, wrong: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert errors(checked(OWN_TITAN, "a.toml", OWN_MODEL, tmp_path, monkeypatch)) == set()
    Path("examples/b.toml").write_text(OWN_TITAN.replace(right, wrong))
    Path("torchtitan/numbers.py").write_text('ZERO = "0"\n')  # a text of the source is no reason to accept a number
    checkout.names_of.cache_clear()
    assert {one for one, _ in errors(check("examples/b.toml"))} == ({rule} if rule else set())


REGISTRY = """from torchtitan.fault_tolerance import SteadyTrainer
from . import model_registry


def rnn_tiny() -> SteadyTrainer.Config:
    return SteadyTrainer.Config(
        model_spec=model_registry("tiny"),
        lr_scheduler=Schedule.Config(warmup_steps=2),
        metrics=Metrics.Config(log_freq=1),
        training=TrainingConfig(local_batch_size=8, seq_len=2048, steps=10),
    )
"""


def test_keywords_of_a_forks_config_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "class Config:\n    warmup_steps: int = 2\n    log_freq: int = 1\n    local_batch_size: int = 8\n"
    source = {"torchtitan/train.py": "", "torchtitan/parts.py": f"{fields}    seq_len: int = 1\n    steps: int = 1\n"}
    assert errors(checked(REGISTRY, "config_registry.py", source, tmp_path, monkeypatch)) == set()
    Path("examples/b.py").write_text(REGISTRY.replace("log_freq", "log_ferq").replace("warmup", "warump"))
    assert errors(check("examples/b.py")) == {("key.unknown", "log_ferq"), ("key.unknown", "warump_steps")}


def test_values_of_keys_by_the_names_of_a_checkouts_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "".join(f'parser.add_argument("--training.{one}", type=int)\n' for one in ("batch_size", "warmup_steps"))
    source = {"torchtitan/config_manager.py": f"{BUILDS}{flags}"}
    text = TITAN.replace("local_batch_size = 1", "batch_size = 1\nwarmup_steps = 10")
    assert errors(checked(text, "a.toml", source, tmp_path, monkeypatch)) == set()
    Path("examples/b.toml").write_text(text.replace("batch_size = 1", "batch_size = -1"))
    assert errors(check("examples/b.toml")) == {("value.invalid", "training.batch_size")}


def test_words_that_a_checkout_accepts_for_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {
        "megatron/training/arguments.py": f"{ARGUMENTS}group.add_argument('--num-workers', choices=['auto', '0'])\n"
    }
    text = MEGATRON.replace("--varlen-budget 4", "--varlen-budget 4 --num-workers auto")
    assert errors(checked(text, "a.sh", source, tmp_path, monkeypatch)) == set()
    Path("examples/b.sh").write_text(text.replace("--num-workers auto", "--num-layers 0"))
    assert ("value.invalid", "num_layers") in errors(check("examples/b.sh"))
    (tmp_path / "megatron/training/arguments.py").write_text(ARGUMENTS)
    checkout.names_of.cache_clear()
    assert errors(check("examples/a.sh")) == {("value.invalid", "num_workers")}
