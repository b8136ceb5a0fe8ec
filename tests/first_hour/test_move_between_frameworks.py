"""Plans for a cluster: V-shaped schedules, what Megatron scripts leave out, and files that move between frameworks."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_plan_for_another_engine import OUR_MOE

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 64000,
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path / "config.json")


def test_a_v_has_the_head_on_the_first_rank(meshwright: Any, small: str) -> None:
    """Dry runs of these layouts: 7.42 GiB (zbv) and 7.66 GiB (dualpipe_v), of which the head's logits are 0.74 GiB."""
    words = (small, "--goal", "pretrain", "--gpus", "4xH100", "layout.tp=1", "layout.cp=1", "data.seq_length=4096")
    words = (*words, "layout.pp=4", "layout.vp=2", "train.micro_batch_size=1", "train.global_batch_size=16", "--json")
    for schedule, dry in (("zbv", 7.42), ("dualpipe_v", 7.66)):
        stages = meshwright("estimate", *words, f"layout.pp_schedule={schedule}").json
        first, *_, last = stages["memory_by_stage_gib"].values()
        assert first["total"] == pytest.approx(dry, rel=0.08)
        assert first["logits"] == pytest.approx(0.74, rel=0.02)
        assert last["logits"] == 0
        assert last["weights"] < first["weights"] / 3  # neither embedding nor head


SCRIPT = """torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 32 \\
 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
 --seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 256 --train-iters 10000 \\
 --lr 3e-4 --lr-warmup-iters 100 --lr-decay-style cosine --min-lr 3e-5 --bf16 --swiglu --normalization RMSNorm \\
 --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 \\
 --data-path /data/x --save /ckpt --save-interval 1000 --overlap-grad-reduce
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "run.sh").write_text(SCRIPT)
    return str(tmp_path / "run.sh")


def test_a_script_without_the_distributed_optimizer_gets_it_suggested(meshwright: Any, script: str) -> None:
    plan = meshwright("recommend", script, "--gpus", "4x8xH200", "--json").json
    (found,) = [one for one in plan["suggestions"] if one["title"] == "shard the optimizer state"]
    assert found["overrides"] == ["layout.strategy=zero1"]
    moved = meshwright("recommend", script, "--gpus", "4x8xH200", *found["overrides"], "--json").json
    gain = round(100 * (1 - moved["estimate"]["step_s"] / plan["estimate"]["step_s"]))
    totals = [round(one["estimate"]["memory_gib"]["total"]) for one in (moved, plan)]
    assert f"estimated {gain}% less step time, {totals[0]} GiB per GPU instead of {totals[1]}" in found["why"]
    assert all(one["title"] != found["title"] for one in moved["suggestions"])
    assert "meshwright train run" not in meshwright("recommend", script, "--gpus", "4x8xH200").out  # no recipe's name


def test_what_a_script_leaves_to_megatron_is_named(meshwright: Any, tmp_path: Path, script: str) -> None:
    def found(text: str) -> dict[str, Any]:
        (tmp_path / "run.sh").write_text(text)
        answer: dict[str, Any] = meshwright("check", script, "--gpus", "2x8xH100", "--json").json
        return answer

    rule = "megatron-lm.no-tokenizer-type"
    (one,) = [finding for finding in found(SCRIPT)["findings"] if finding["rule"] == rule]
    assert "uses GPT2BPETokenizer and ignores --vocab-size 128256" in one["message"]
    fixed = found(SCRIPT.replace("--bf16", f"--bf16 {one['fix'][0]}"))
    assert rule not in [finding["rule"] for finding in fixed["findings"]]
    bare = found(SCRIPT.replace("--vocab-size 128256", ""))
    assert any("--tokenizer-type is not set" in note and "50257" in note for note in bare["notes"])


def test_hugging_face_names_in_a_bridge_file_are_unknown(meshwright: Any, tmp_path: Path) -> None:
    lines = (
        "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config",
        "from megatron.bridge.training.pretrain import pretrain",
        "cfg = llama3_8b_pretrain_config()",
        "cfg.model.num_hidden_layers = 16",
        "cfg.model.num_key_value_heads = 4",
        "pretrain(cfg, None)",
    )
    path = tmp_path / "bridge.py"
    path.write_text("\n".join(lines))
    findings = meshwright("check", str(path), "--gpus", "2x8xH100", "--json").json["findings"]
    unknown = {one["line"]: one["fix"] for one in findings if one["rule"] == "key.unknown"}
    assert unknown == {4: ["model.num_layers=16"], 5: ["model.num_query_groups=4"]}


def test_export_and_launch_write_data_that_automodel_finds(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 3
    )
    (tmp_path / "alpaca.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 3)
    words = ("llama3-8b", "--goal", "lora", "--to", "automodel", "--gpus", "8xH100")

    def dataset(folder: str) -> str:
        (written,) = (tmp_path / folder).glob("*.yaml")
        (line,) = [one for one in written.read_text().splitlines() if "path_or_dataset_id" in one]
        return line.split(": ")[1]

    assert "the full path" in meshwright("export", *words, "data.dataset=chat.jsonl", "--out", "plain").out
    assert dataset("plain") == str(tmp_path / "chat.jsonl")
    assert meshwright("export", *words, "data.dataset=alpaca.jsonl", "--out", "converted").code == 0
    job = ("launch", *words, "--dataset", "alpaca.jsonl", "--scheduler", "torchrun")
    refused = meshwright(*job)
    assert (refused.code, "fix:   --write FOLDER" in refused.err) == (1, True)
    assert "alpaca.messages.jsonl: the rows of" in meshwright(*job, "--write", "job").err
    assert dataset("job") == str(tmp_path / "job" / "alpaca.messages.jsonl")
    rows = [(tmp_path / one / "alpaca.messages.jsonl").read_text() for one in ("converted", "job")]
    assert rows[0] == rows[1]


def test_an_export_to_deepspeed_has_the_arguments_that_the_trainer_compares(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer stops where its arguments, or their defaults, differ from the JSON file."""
    monkeypatch.chdir(tmp_path)
    answer = meshwright("export", "llama3-8b", "--goal", "sft", "--to", "deepspeed", "--gpus", "8xH100", "--out", "ds")
    assert "which passes what llama3_8b_sft_args.py has to its Trainer" in " ".join(answer.out.split())
    config = json.loads((tmp_path / "ds" / "ds_config.json").read_text())
    (call,) = (node for node in ast.walk(ast.parse((tmp_path / "ds" / "llama3_8b_sft_args.py").read_text()))
               if isinstance(node, ast.Call))  # fmt: skip
    args = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    adam, warmup = config["optimizer"]["params"], config["scheduler"]["params"]["warmup_num_steps"]
    assert [args["adam_beta1"], args["adam_beta2"]] == adam["betas"]
    assert (args["learning_rate"], args["weight_decay"]) == (adam["lr"], adam["weight_decay"])
    assert (args["max_grad_norm"], args["warmup_steps"]) == (config["gradient_clipping"], warmup)
    assert (args["lr_scheduler_type"], args["bf16"], args["deepspeed"]) == ("cosine", True, "ds_config.json")
    batch = args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] * 8
    assert batch == config["train_batch_size"]


def test_a_file_moves_to_our_engine_and_commands_keep_what_was_typed(
    meshwright: Any, tmp_path: Path, script: str
) -> None:
    on = ("--gpus", "4x8xH200")
    job = ("launch", script, "--to", "meshwright", *on, "--scheduler", "slurm", "--out", "/ckpt/x")
    moved = meshwright(*job, "--write", str(tmp_path / "job"))
    assert moved.code == 0
    assert "layout.strategy ddp → fsdp2: meshwright runs ddp with a full model on every GPU only" in moved.err
    commands = meshwright("recommend", script, *on, "layout.strategy=zero1", "optimizer.lr=1e-4", "--json").json
    commands = commands["commands"]
    assert "layout.strategy=zero1 optimizer.lr=1e-4" in commands["megatron-lm"]
    assert "optimizer.lr=1e-4" in commands["meshwright"]
    assert "layout.strategy=fsdp2" in commands["meshwright"]
    (text,) = (
        meshwright(*commands["megatron-lm"].replace("--out megatron-lm", "--json").split()[1:]).json["files"].values()
    )
    assert "--use-distributed-optimizer" in text
    assert "--lr 0.0001" in text


def test_storage_is_what_each_engine_saves() -> None:
    """Sizes per trained parameter; those of our engine are measured on checkpoints of tiny runs."""
    from meshwright.clusters import cluster
    from meshwright.planner import case_of
    from meshwright.planner.storage import storage_of
    from meshwright.recipes import index, overrides
    from meshwright.recipes.case import model_of

    def bytes_each(name: str, engine: str, *changes: str) -> tuple[float, float, int]:
        recipe = overrides.apply(index.load(name), changes)
        found = storage_of(case_of(recipe, model_of(recipe), cluster("8xH100"), engine))
        params = 2**30 * storage_of(case_of(index.load(name), model_of(recipe), cluster("8xH100"))).checkpoint_gib / 12
        return round(found.checkpoint_gib * 2**30 / params), round(found.model_gib * 2**30 / params), found.kept

    low = ("precision.master=bf16", "precision.moments=bf16")
    assert bytes_each("llama3_8b_peft_config", "meshwright")[:2] == (12, 4)
    assert bytes_each("llama3_8b_peft_config", "meshwright", *low)[:2] == (6, 2)
    assert bytes_each("llama3_8b_pretrain_config", "meshwright", low[0])[0] == 10
    validated = ("train.eval_every=10", "train.steps=10000")
    ours, theirs = (bytes_each("llama3_8b_pretrain_config", one, *validated) for one in ("meshwright", "megatron"))
    assert (ours[0], theirs[0]) == (12, 14)  # Megatron-LM also saves the bf16 weights
    assert ours[2] == theirs[2] + 1  # and no best checkpoint


def test_check_names_the_batch_that_divides_in_the_keys_of_a_script(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "ourmoe").mkdir()
    (tmp_path / "ourmoe" / "config.json").write_text(json.dumps(OUR_MOE))
    saved, folder = str(tmp_path / "moe.toml"), str(tmp_path / "megatron")
    words = ("--engine", "megatron", "--goal", "pretrain", "train.steps=30", "--save", saved)
    meshwright("recommend", str(tmp_path / "ourmoe" / "config.json"), "--gpus", "16x8xH100", *words)
    checked = meshwright("check", saved, "--json").json  # the recipe's 40 steps of warmup are repaired
    assert "learning_rate.warmup-too-long" not in [one["rule"] for one in checked["findings"]]
    words = ("--to", "megatron-lm", "--gpus", "16x8xH100", "schedule.warmup_steps=3", "train.global_batch_size=1024")
    assert meshwright("export", saved, *words, "--out", folder).code == 0
    (path,) = (tmp_path / "megatron").glob("*.sh")
    notes = meshwright("check", str(path), "--gpus", "15x8xH100", "--json").json["notes"]
    (note,) = (one for one in notes if "× the time per token of --" in one)
    assert "--global-batch-size 960" in note
    assert "1024 divides into few layouts of 120 GPUs" in note
