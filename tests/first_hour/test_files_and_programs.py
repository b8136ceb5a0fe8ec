"""Users' files taken to other frameworks and back: jobs are read with the program that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.file_to_file import CASES, prepare, swept
from tests.cli.conftest import meshwright

from meshwright.api.targets import job_for

__all__ = ["meshwright"]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a case's folder the current one."""

    def enter(name: str) -> Path:
        prepare(next(one for one in CASES if one.case == name), tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return enter


def _launch(meshwright: Any, file: str, to: str, gpus: str, *changes: str) -> Any:
    words = ["launch", file, "--to", to, "--scheduler", "slurm", "--gpus", gpus, "--time", "24:00:00", "--write", "job"]
    found = meshwright(*words, *changes)
    assert found.code == 0, found
    return found


@pytest.mark.parametrize("to", ["accelerate", "deepspeed"])
def test_a_job_for_the_users_own_program_is_read_with_its_arguments(to: str, meshwright: Any, case: Any) -> None:
    """The program is in $checkout, known only when the job runs; its arguments are in the file beside the job."""
    case("mlm_dense")
    _launch(meshwright, "pretrain_3b.sh", to, "4x8xH100")
    assert '"$checkout"/train.py' in Path("job/pretrain_3b.sbatch").read_text()
    back = job_for("job/pretrain_3b.sbatch", None, "4x8xH100", [], model="llama3.2-3b").recipe
    assert (back.train.steps, back.train.seed, back.optimizer.lr) == (47683, 1234, 0.0003)
    assert (back.schedule.name, back.schedule.warmup_steps, back.schedule.min_lr) == ("cosine", 2000, 3e-05)


def test_a_job_reads_the_arguments_of_its_own_name(meshwright: Any, case: Any) -> None:
    case("mlm_dense")
    _launch(meshwright, "pretrain_3b.sh", "accelerate", "4x8xH100")
    text = Path("job/pretrain_3b_args.py").read_text()
    Path("job/a_args.py").write_text(text.replace("max_steps=47683", "max_steps=5"))
    assert job_for("job/pretrain_3b.sbatch", None, "4x8xH100", [], model="llama3.2-3b").recipe.train.steps == 47683


def test_a_program_in_the_folder_of_the_submission_is_read(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.py").write_text(
        "from trl import SFTConfig, SFTTrainer\n"
        'SFTTrainer(model="meta-llama/Llama-3.2-1B", args=SFTConfig(learning_rate=3e-5, max_steps=77))\n'
    )
    Path("run.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=8\n"
        "srun torchrun --nproc-per-node=8 $SLURM_SUBMIT_DIR/sft.py\n"
    )
    found = job_for("run.sbatch", None, "8xH100", [])
    assert (found.recipe.train.steps, found.recipe.optimizer.lr) == (77, 3e-5)
    assert (
        "the arguments of the program are read from sft.py" in meshwright("check", "run.sbatch", "--gpus", "H100").out
    )


@pytest.mark.parametrize("name", ["mlm_moe", "trl_qlora"])
def test_a_job_of_megatron_bridge_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert swept([name], ["megatron-bridge"], ["launch"]).problems == []


BRIDGE = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain
{overrides}
cfg = llama3_8b_pretrain_config()
cfg.train.train_iters = 500
pretrain(cfg, forward_step)
"""


def test_a_script_that_starts_a_program_of_megatron_bridge(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides are read where the program applies them; other arguments are listed."""
    monkeypatch.chdir(tmp_path)
    applied = "from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides"
    Path("run.sh").write_text("torchrun --nproc-per-node=8 pre.py train.train_iters=900 --fast\n")
    Path("pre.py").write_text(BRIDGE.format(overrides=applied))
    assert job_for("run.sh", None, "8xH100", []).recipe.train.steps == 900
    found = meshwright("check", "run.sh", "--gpus", "8xH100").out
    assert "only pre.py knows its arguments: --fast" in found
    Path("pre.py").write_text(BRIDGE.format(overrides=""))
    assert job_for("run.sh", None, "8xH100", []).recipe.train.steps == 500
    found = meshwright("check", "run.sh", "--gpus", "8xH100").out
    assert "only pre.py knows its arguments: train.train_iters=900 --fast" in found


def test_fine_tuning_reads_the_lines_of_a_text_file(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .txt file was an unsupported file type, without a fix."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("one line\n\nanother line\r\nthe last one")
    from meshwright.engine.data.files import find_rows

    rows = find_rows(Path("corpus.txt"), "train")
    assert [row["text"] for _, row in rows] == ["one line", "another line", "the last one"]
    assert [where for where, _ in rows.read(1)] == ["corpus.txt:3", "corpus.txt:4"]
    found = meshwright("recommend", "llama3.2-1b", "--goal", "sft", "--dataset", "corpus.txt", "--gpus", "4xH100")
    assert found.code == 0
    assert "corpus.txt: each line is a sample; --goal continued-pretraining trains on it as one text" in found.out


def test_a_text_file_beside_rows_is_no_data(tmp_path: Path) -> None:
    from meshwright.engine.data.files import find_rows

    (tmp_path / "README.txt").write_text("about this data")
    assert [row for _, row in find_rows(tmp_path, "train")] == [{"text": "about this data"}]
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert [row for _, row in find_rows(tmp_path, "train")] == [{"text": "x"}]


def test_automodel_has_no_dataset_of_plain_text(meshwright: Any, case: Any) -> None:
    case("hf_py")
    words = ("export", "train.py", "--gpus", "4xH100", "--out", "out")
    found = meshwright(*words, "--to", "automodel")
    assert found.code == 2
    assert "AutoModel has no dataset class for plain text" in found.err
    assert "fix:   --to accelerate | --to deepspeed" in found.err
    assert meshwright(*words, "--to", "accelerate", "layout.micro_batch_size=4").code == 0


def test_an_export_to_the_files_own_framework_drops_what_the_framework_rejects(meshwright: Any, case: Any) -> None:
    """The command of recommend's Run line was refused: the file's rejected value was kept."""
    case("mlm_70b_fp8")
    changes = ("layout.vp=1", "layout.cp=2", "layout.pp_schedule=1f1b")
    found = meshwright("export", "run70b.sh", "--to", "megatron-lm", "--gpus", "8x8xH100", "--out", "out", *changes)
    assert found.code == 0, found
    assert "run70b.sh:11 cross_entropy_fusion_impl=te: --cross-entropy-fusion-impl te is rejected" in found.out
    written = Path("out/run70b.sh").read_text()
    assert "\n    --cross-entropy-fusion-impl" not in written
    assert "# not in this file: run70b.sh:11 cross_entropy_fusion_impl=te" in written


def test_a_file_that_its_framework_rejects_has_no_run_command_before_it_is_corrected(
    meshwright: Any, case: Any
) -> None:
    case("titan_cpt")
    found = meshwright("recommend", "cpt.toml", "--gpus", "8xH200")
    reason = "cpt.toml:19 training.seed was removed (until 0.2.0); correct the file first: debug.seed = 7"
    assert f"not torchtitan: {reason}" in found.out
    assert f"not meshwright: {reason}" in found.out
    assert "meshwright export cpt.toml" not in found.out
    text = Path("cpt.toml").read_text().replace("seed = 7\n", "")
    Path("cpt.toml").write_text(f"{text}\n[debug]\nseed = 7\n")
    assert "meshwright export cpt.toml --to torchtitan" in meshwright("recommend", "cpt.toml", "--gpus", "8xH200").out


def test_the_files_of_gpt2s_tokenizer_are_the_tokenizer_of_every_export(meshwright: Any, case: Any) -> None:
    """An export had the tokenizer of the model whose sizes are nearest, with another vocabulary."""
    case("mlm_gpt2_bpe")
    assert job_for("run.sh", None, "8xH100", []).recipe.data.tokenizer == "tok"
    words = ("export", "run.sh", "--gpus", "8xH100", "--out", "out")
    assert meshwright(*words, "--to", "megatron-lm").code == 0
    assert "--tokenizer-type GPT2BPETokenizer" in Path("out/run.sh").read_text()
    found = meshwright(*words, "--to", "deepspeed")
    assert "TinyLlama/TinyLlama" not in "".join(one.read_text() for one in Path("out").glob("*.py")), found


def test_a_job_that_saves_although_the_file_does_not_says_so(meshwright: Any, case: Any) -> None:
    case("mlm_70b_fp8")
    _launch(meshwright, "run70b.sh", "megatron-bridge", "8x8xH100", "layout.cp=2")
    assert "(checkpoint.save_every), the file names no interval" in Path("job/run70b.sbatch").read_text()


SBATCH = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --gpus-per-node={size}
srun torchrun --nnodes {nodes} --nproc_per_node {size} pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \\
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --swiglu --disable-bias-linear \\
  --normalization RMSNorm --untie-embeddings-and-output-weights --vocab-size 128256 --tokenizer-type NullTokenizer \\
  --mock-data --micro-batch-size 1 --global-batch-size 128 --train-iters 100 --lr 1e-4 --bf16
"""


@pytest.mark.parametrize(
    "verb", [("recommend",), ("plan",), ("estimate",), ("import",), ("export", "--to", "torchtitan")]
)
def test_a_gpu_type_alone_has_the_count_of_the_files_job(
    verb: tuple[str, ...], meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sbatch").write_text(SBATCH.format(nodes=2, size=8))
    found = meshwright(verb[0], "run.sbatch", "--gpus", "H200", *verb[1:])
    assert "the number of GPUs is missing" not in found.err, found
    assert "2x8xH200" in found.out + found.err or verb[0] in ("plan", "export"), found
    if verb[0] == "plan":
        assert found.out == meshwright("plan", "run.sbatch", "--gpus", "2x8xH200").out


def test_the_suggested_gpus_are_those_of_the_file(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sbatch").write_text(SBATCH.format(nodes=2, size=4))
    assert "(--gpus 2x4xH100)" in meshwright("check", "run.sbatch").out
    Path("one.sbatch").write_text(SBATCH.format(nodes=1, size=1))
    found = meshwright("recommend", "one.sbatch")
    assert "1x1x" not in found.out + found.err
    assert "--gpus 1xTYPE" in found.out + found.err
    Path("dpo.sbatch").write_text(
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nnodes 2 --nproc_per_node 4 dpo.py "
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct # trl\n"
    )
    assert "--gpus 2x4xH100" in meshwright("recommend", "dpo.sbatch").err
    assert "--gpus 2x4xH200" in meshwright("recommend", "dpo.sbatch", "--gpus", "H200").err


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("train.epochs=three", "train.epochs=3"),
        ("train.epochs=abc", "train.epochs=3"),
        ("train.steps=thousand", "train.steps=1000"),
        ("train.eval_every=often", "train.eval_every=100"),
    ],
)
def test_a_word_for_a_number_has_a_fix_that_is_meant(typed: str, fix: str, meshwright: Any) -> None:
    found = meshwright("recommend", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", typed)
    assert found.code == 2
    assert found.err.endswith(f"fix:   {fix}\n"), found


def test_a_number_that_a_torchtitan_file_writes_as_a_text(meshwright: Any, case: Any) -> None:
    """torchtitan 0.2 puts TOML values into its config as they are; tyro only warns."""
    case("titan_8b")
    text = Path("train.toml").read_text()
    text = text.replace("max_norm = 1.0", 'max_norm = "1.0"').replace(
        "enable = true\nfolder", 'enable = "false"\nfolder'
    )
    Path("train.toml").write_text(text)
    found = meshwright("check", "train.toml", "--gpus", "4x8xH100")
    assert found.code == 1
    assert 'training.max_norm = "1.0" is a text: it is not converted to a number (torchtitan.text-value)' in found.out
    assert 'checkpoint.enable = "false" is a text: any text counts as true (torchtitan.text-value)' in found.out
    assert "training.max_norm = 1.0\n" in found.out
    assert "checkpoint.enable = false  removes" in found.out
    assert 'selective_ac_option = "op"' in text
    assert "selective_ac_option" not in found.out


@pytest.mark.parametrize(
    ("model", "theta", "eps"),
    [
        ("mixtral_8x22b", "1000000", "1e-05"),
        ("mistral_7b_v02", "1000000", "1e-05"),
        ("mistral_7b", "1000000", "1e-05"),
        ("phi4_14b", "250000", "1e-05"),
        ("gemma2_9b", "10000", "1e-06"),
        ("gemma3_1b", "1000000", "1e-06"),
    ],
)
def test_a_stated_number_that_is_the_models_own_is_accepted(model: str, theta: str, eps: str, meshwright: Any) -> None:
    """A published value that the catalogue lacked was refused: the model "has its own"."""
    own = (f"architecture.rope_theta={theta}", f"architecture.norm_eps={eps}")
    words = ("export", model, "--goal", "peft", "--to", "automodel", "--gpus", "8xH200")
    found = meshwright(*words, *own)
    assert "architecture." not in found.err, found
    other = meshwright(*words, "architecture.rope_theta=123456")
    assert other.code == 2
    assert f"has {float(theta)}" in other.err, other


def test_a_norm_epsilon_of_ones_own_in_a_plan_that_is_repaired(meshwright: Any) -> None:
    """The repair of a plan that does not fit ended with AttributeError."""
    words = ("recommend", "mixtral-8x22b", "--goal", "sft", "--gpus", "8xH100", "architecture.norm_eps=1e-4")
    assert meshwright(*words).code in (0, 1)


def test_what_a_recipe_does_not_have_of_a_qlora_is_listed(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paged optimizer states and double quantization were lost without a word."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)\n"
        'model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-Instruct-v0.3", quantization_config=bnb)\n'
        'args = SFTConfig(output_dir="o", optim="paged_adamw_8bit", max_steps=10, max_length=1024, bf16=True)\n'
        "SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=16)).train()\n"
    )
    found = meshwright("import", "train.py", "--gpus", "1xRTX4090")
    assert 'name = "adamw8bit"' in found.out
    assert "train.py:5 --optim=paged_adamw_8bit: paged optimizer states have no field" in found.err
    assert "train.py:3 --bnb_4bit_use_double_quant=True: double quantization has no field" in found.err
    Path("a.yml").write_text(
        "base_model: meta-llama/Llama-3.2-3B-Instruct\nload_in_4bit: true\nadapter: qlora\nsequence_len: 2048\n"
        "datasets:\n  - path: data.jsonl\n    type: alpaca\nmicro_batch_size: 2\noptimizer: paged_adamw_8bit\n"
        "bnb_config_kwargs:\n  bnb_4bit_use_double_quant: true\n"
    )
    refused = meshwright("recommend", "a.yml", "--gpus", "1xRTX4090").err
    assert "bnb_4bit_use_double_quant=true" in refused
    assert "optimizer=paged_adamw_8bit (paged optimizer states have no field" in refused


Z3 = '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}'
AUTO_LR = """{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 3},
"train_micro_batch_size_per_gpu": "auto"}"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
num_machines: 16
num_processes: 128
"""
CHECKED = ("--model", "meta-llama/Llama-3.1-70B", "--gpus", "16x8xH200")


@pytest.mark.parametrize(("name", "text"), [("ds.json", Z3), ("auto.json", AUTO_LR), ("acc.yaml", ACCELERATE)])
@pytest.mark.parametrize("goal", ["sft", "peft"])
def test_what_only_the_program_sets_is_no_finding(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, goal: str
) -> None:
    """With --goal sft, the rate and the data that we assume were warned about in every such file."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert meshwright("check", name, *CHECKED, "--goal", goal, "--json").json["findings"] == []
    given = ("data.seq_length=8192", "layout.micro_batch_size=1", "layout.recompute=full")
    for more in (("optimizer.lr=5e-6",), ("optimizer.lr=5e-6", "schedule.warmup_steps=100", "train.epochs=2")):
        found = meshwright("check", name, *CHECKED, "--goal", goal, *given, *more, "--json")
        assert (found.code, found.json["findings"]) == (0, [])  # it made up an optimizer section without a type
    typed = meshwright("check", name, *CHECKED, "--goal", "sft", "optimizer.lr=5e-4", "--json").json["findings"]
    assert [one["rule"] for one in typed] == ["learning_rate.fine-tuning"]


@pytest.mark.parametrize("more", [(), ("--gpus", "16x8xH200")])
def test_processes_of_one_machine_are_multiplied(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("acc.yaml").write_text(ACCELERATE.replace("128", "8"))
    found = meshwright("check", "acc.yaml", "--model", "llama3-8b", *more, "--json").json["findings"]
    assert {tuple(one["fix"]) for one in found if one["rule"].startswith("accelerate.")} == {("num_processes: 128",)}
