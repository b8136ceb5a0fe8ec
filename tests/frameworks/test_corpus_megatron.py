"""The files that Megatron-LM's and Megatron-Bridge's owners run get no error, but those of the ledger."""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

import pytest
from benchmarks import corpora
from benchmarks.corpora.megatron import CORPORA

from meshwright import check
from meshwright.recipes.key_maps import megatron_lm_choices

EVERY = {"megatron-lm-tests": 24}
"""A default run checks every so many kept entries of a corpus."""
UNCONFIRMED = {
    "megatron-bridge-recipes": [
        "src/megatron/bridge/recipes/glm_vl/h100/glm_45v.py#glm_45v_peft_32gpu_h100_bf16_config: memory.peak: "
        "the estimated peak is 205.7 GiB of 78.1 GiB usable"
    ]
}
"""Errors that no run and no bound confirms or refutes."""
KEPT = [name for name in CORPORA if (corpora.KEPT / f"{name}.json").exists()]


def false_errors(name: str, entries: list[dict[str, object]]) -> list[str]:
    outcomes = corpora.run_kept(CORPORA[name], entries)
    assert [one.path for one in outcomes if one.unread] == []
    return [f"{one.path}: {error.rule}: {error.message}" for one in outcomes for error in one.false_errors]


@pytest.mark.parametrize("name", KEPT)
def test_sample_of_kept_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert false_errors(name, corpora.kept_entries(name)[:: EVERY.get(name, 12)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_all_kept_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert false_errors(name, corpora.kept_entries(name)) == UNCONFIRMED.get(name, [])


def test_every_exception_has_a_reason_and_a_corpus() -> None:
    mine = [one for one in corpora.ledger() if one["corpus"] in CORPORA]
    assert mine
    assert all(one["reason"] and one["path"] and one["rule"] for one in mine)


def test_every_exception_is_an_error_of_the_last_run() -> None:
    results = json.loads(corpora.RESULTS.read_text())
    for one in corpora.ledger():
        explained = results[one["corpus"]]["explained_errors"]
        reported = [text for path, texts in explained.items() if fnmatch.fnmatch(path, one["path"]) for text in texts]
        assert any(text.startswith(f"{one['rule']}: ") for text in reported), one


def test_kept_entries_have_no_local_paths() -> None:
    for name in KEPT:
        text = (corpora.KEPT / f"{name}.json").read_text()
        assert os.path.expanduser("~") + "/" not in text


MODEL = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \\
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 3e-4 \\
    --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"""
RECIPE = "run_recipe.py --recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=3"


def errors(text: str, tmp_path: Path, name: str = "run.sh", gpus: str = "8xH100") -> list[str]:
    (tmp_path / name).write_text(text)
    found = check(str(tmp_path / name), gpus=gpus).findings
    return [one.rule for one in found if one.severity == "error"]


def script(flags: str, program: str = "pretrain_gpt.py", head: str = "") -> str:
    return f"#!/bin/bash\n{head}\ntorchrun --nproc-per-node 8 {program} {MODEL} {flags}\n"


ACCEPTED = {
    "sinkhorn with one expert": "--num-experts 2 --use-distributed-optimizer --moe-router-topk 1 "
    "--moe-router-load-balancing-type sinkhorn",
    "expert tensor parallelism without experts": "--expert-tensor-parallel-size 2",
    "a flag of modelopt": "--export-te-mcore-model",
    "a schedule of batches": "--step-batch-size-schedule '0:64 1B:128'",
    "layer graphs": "--cuda-graph-impl local --te-rng-tracker",
    "graphs of rollouts, off while it trains": "--num-experts 8 --use-distributed-optimizer --moe-router-topk 2 "
    "--moe-grouped-gemm --perform-rl-step --cuda-graph-impl local --te-rng-tracker",
    "flags of the newest commit": "--ckpt-drop-redundant-extra-state --moe-combine-bwd-dtype bf16",
}


@pytest.mark.parametrize("flags", ACCEPTED.values(), ids=ACCEPTED)
def test_flags_that_megatron_lm_accepts(flags: str, tmp_path: Path) -> None:
    text = script(flags)
    text = text.replace("--global-batch-size 64 ", "") if "schedule" in flags else text
    assert errors(text, tmp_path) == []


def test_programs_add_flags(tmp_path: Path) -> None:
    assert errors(script("--freeze-LM --use-packed-sequence", "pretrain_vlm.py"), tmp_path) == []
    assert errors(script("--model-provider llava_vlm", "examples/mimo/train.py"), tmp_path) == []
    assert errors(script("--freeze-LM"), tmp_path) == ["key.unknown"]
    assert errors(script("--our-own-flag 3", "our_training.py"), tmp_path) == []
    assert errors(script("--tensor-model-paralel-size 3", "our_training.py"), tmp_path) == ["key.unknown"]
    (tmp_path / "pretrain_ours.py").write_text("group.add_argument('--micro-batch-siz', type=int)\n")
    assert errors(script("--micro-batch-siz 3", "pretrain_ours.py"), tmp_path) == []


START = f"torchrun --nproc-per-node 8 {RECIPE}"
SCRIPTS = {
    "both branches": f'if [ "$1" = "-d" ]; then\n  echo debug\nelse\n  {START}\nfi',
    "a guard of the input": f'IMAGE=""\nif [ -z "$IMAGE" ]; then\n  echo "set IMAGE"\n  exit 1\nfi\n{START}',
    "bash -c": f'CMD="uv run python -m torch.distributed.run --nproc-per-node 8 {RECIPE}"\nsrun bash -c "$CMD"',
    "a command built in a loop": f'for C in 1 2; do\n  CMD="env"\n  CMD="$CMD {START}"\n  $CMD\ndone',
    "echo in a command": f'A="\n{RECIPE}\n"\nC="torchrun --nproc-per-node 8 $(echo "$A" | tr \'\\n\' \' \')"\n$C',
    "a here-document": f"srun bash <<'EOF'\n{START}\nEOF",
    "a here-document in a variable": f"read -r -d '' A <<'EOF' || true\n{START}\nEOF\nbash -c \"$A\"",
    "a case": f'case "$1" in\n  big) {START} ;;\n  *) echo usage ;;\nesac',
    "a loop without values": f'NONE=""\nC="env"\nfor X in $NONE; do C="$C $X"; done\n$C {START}',
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_that_are_read(text: str, tmp_path: Path) -> None:
    assert "heads.attention" in errors(f"{text}\n", tmp_path)


def test_options_of_a_python_script_have_their_defaults(tmp_path: Path) -> None:
    text = """\
import argparse
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=3)
parser.add_argument("--length", type=int)
args = parser.parse_args()
cfg = llama3_8b_pretrain_config()
cfg.model.tensor_model_parallel_size = args.tp
cfg.model.seq_length = args.length
pretrain(cfg)
"""
    for start in ("args = parser.parse_args()", "args, rest = parse()"):  # of a function in the file
        helper = "def parse():\n    args, rest = parser.parse_known_args()\n    return args, rest\n"
        changed = text.replace("args = parser.parse_args()", f"{helper if 'rest' in start else ''}{start}")
        found = errors(changed, tmp_path, "train.py")
        assert "heads.attention" in found
        assert "value.invalid" not in found


def test_configs_of_other_modules_are_no_unknown_recipes(tmp_path: Path) -> None:
    text = """\
from megatron.bridge.training.pretrain import pretrain
def create_config():
    return ConfigContainer(train=TrainingConfig(train_iters=10))
cfg = create_config()
cfg.train.micro_batch_size = 1
pretrain(cfg)
"""
    assert errors(text, tmp_path, "train.py") == []


def test_keys_below_a_map_are_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b_pretrain_config "
        "+tokenizer.hf_tokenizer_kwargs.revision=main +dataset.offline_packing_specs.pad_seq_to_mult=4\n"
    )
    rules = [one.rule for one in check(str(tmp_path / "run.sh"), gpus="8xH100").findings]
    assert "megatron-bridge.dropped-key" not in rules


def test_the_flag_table_has_its_commit() -> None:
    head = (Path(megatron_lm_choices.__file__).parent / megatron_lm_choices.TABLE).read_text().splitlines()[0]
    assert "NVIDIA/Megatron-LM" in head
    assert len(megatron_lm_choices.parser_flags()) > 800
    assert megatron_lm_choices.parser_flags()["manual_gc_interval"].type == "int"


def test_a_recipe_with_two_lengths_trains_with_the_datasets(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python scripts/training/run_recipe.py --recipe nemotron_nano_9b_v2_pretrain_config\n"
    )
    result = check(str(tmp_path / "run.sh"), gpus="8xH100")
    assert result.recipe.data.seq_length == 8192
    (found,) = [one for one in result.findings if one.rule == "megatron-bridge.length-replaced"]
    assert found.severity == "warning"
    assert found.fix == ("dataset.seq_length=131072",)


def memory(recipe: str, tmp_path: Path, overrides: str = "") -> list[tuple[str, str]]:
    (tmp_path / "run.sh").write_text(f"python run_recipe.py --recipe {recipe} {overrides}\n")
    found = check(str(tmp_path / "run.sh")).findings
    return [(one.severity, one.message) for one in found if one.rule == "memory.peak"]


def test_memory_is_that_of_the_vocabulary_of_a_null_tokenizer(tmp_path: Path) -> None:
    recipe = "gemma3_1b_pretrain_1gpu_h100_bf16_config"
    assert "error" not in dict(memory(recipe, tmp_path))
    assert "error" in dict(memory(recipe, tmp_path, "tokenizer.use_tokenizer_vocab_size=false"))


def test_no_error_rests_on_the_longest_sample_that_a_recipe_allows(tmp_path: Path) -> None:
    recipe = "qwen35_vl_4b_peft_1gpu_h100_bf16_config"
    ((severity, message),) = memory(recipe, tmp_path)
    assert severity == "warning"
    assert "data.seq_length=4096 assumed" in message
    assert "error" in dict(memory(recipe, tmp_path, "dataset.pad_to_max_length=true"))


def test_no_split_of_layers_is_invented(tmp_path: Path) -> None:
    recipe = "qwen35_vl_397b_a17b_pretrain_64gpu_gb200_bf16_config"
    assert "pipeline.even-split" in errors(f"python run_recipe.py --recipe {recipe}\n", tmp_path, gpus="8x8xGB200")
