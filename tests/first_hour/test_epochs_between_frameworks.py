"""Other frameworks' files: epochs, tool calls, ways out, what an engine cannot do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.api.engine_configs import CONFIGS, exported_for
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.recipes import index
from meshwright.recipes.capabilities import FRAMEWORK_GOALS
from meshwright.recipes.case import model_of

H100 = ("--gpus", "1xH100")
CHATS = 2000


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of short chats in the current folder."""
    monkeypatch.chdir(tmp_path)
    row = {
        "messages": [{"role": "user", "content": "What is it? " * 40}, {"role": "assistant", "content": "It. " * 99}]
    }
    (tmp_path / "val.jsonl").write_text(f"{json.dumps(row)}\n" * CHATS)
    return "val.jsonl"


def test_epochs_survive_a_round_trip_and_are_counted(meshwright: Any, chats: str) -> None:
    asked = (*H100, f"data.dataset={chats}", "train.epochs=3")
    for framework, key, name in (
        ("automodel", "num_epochs: 3", "qwen3_4b_peft_config.yaml"),
        ("megatron-bridge", "cfg.train.train_iters = None\ncfg.train.num_epochs = 3", "override.py"),
        ("trl", "num_train_epochs=3.0", ""),
    ):
        written = meshwright("export", "qwen3_4b_peft_config", "--to", framework, *asked, "--out", framework)
        assert written.code == 0, framework
        texts = [path.read_text() for path in Path(framework).iterdir()]
        assert any(key in text for text in texts), framework
        assert not any("max_steps" in text for text in texts), framework
        if not name:
            continue
        path = f"{framework}/{name}"
        for verb in ("estimate", "recommend"):
            budget = meshwright(verb, path, *H100, "--price", "2", "--json").json["budget"]
            assert (budget["steps"] < 300, budget["tokens_from"][:8]) == (True, "3 epochs"), (framework, verb)
        imported = meshwright("import", path, *H100)
        assert "epochs = 3.0" in imported.out
        assert "num_epochs" not in imported.err
        assert meshwright("check", path, *H100).code == 0
        for other in ("automodel", "megatron-bridge"):
            assert "300000" not in meshwright("export", path, "--to", other, *H100).out
    steps = meshwright("export", "qwen3_4b_sft_config", "--to", "megatron-lm", *asked[2:], "--gpus", "8xH100")
    assert steps.code == 2
    assert "fix:   train.steps=" in steps.err
    assert "train.steps=N" not in steps.err


def test_a_file_without_a_length_has_no_budget_and_is_not_exported_with_one(meshwright: Any, chats: str) -> None:
    meshwright("export", "qwen3_4b_peft_config", "--to", "trl", *H100, "--out", "trl")
    Path("trl/qwen3_4b_peft_config_args.py").unlink()  # it has the length
    asked = ("trl/qwen3_4b_peft_config.yaml", "--model", "qwen3_4b", "--goal", "peft", *H100)
    for verb in ("estimate", "recommend"):
        found = meshwright(verb, *asked, "--price", "2", "--json").json
        assert (found["budget"], found["contract"]["steps"]) == (None, None)
        assert "no figures: nothing says how long it trains" in meshwright(verb, *asked, "--price", "2").out
        known = meshwright(verb, *asked, "--price", "2", "train.steps=500", "--json").json
        assert known["budget"]["steps"] == 500
    refused = meshwright("export", *asked, "--to", "automodel")
    assert refused.code == 2
    assert "does not say how long it trains" in refused.err
    assert "max_steps: 1000" in meshwright("export", *asked, "--to", "automodel", "train.steps=1000").out


def test_the_way_out_of_an_export_that_does_not_fit_keeps_what_was_asked(meshwright: Any, chats: str) -> None:
    asked = ("peft.method=qlora", f"data.dataset={chats}", "train.epochs=3", "peft.rank=16", "peft.alpha=64")
    job = ("llama3_8b_peft_config", "--model", "llama31_8b", "--to", "trl", "--gpus", "1xRTX4090")
    out = meshwright("export", *job, *asked, "layout.recompute=none", "--out", "ex").out
    words = shlex.split(out.partition("for a layout that runs: meshwright ")[2].partition(", then")[0])
    assert set(asked) < set(words)
    assert "layout.recompute=none" not in words
    assert meshwright(*words).code == 0
    sized = Path("sized.toml").read_text()
    for line in ('method = "qlora"', "rank = 16", 'dataset = "val.jsonl"', "epochs = 3.0"):
        assert line in sized
    assert meshwright("export", "sized.toml", "--to", "trl", "--out", "sized").code == 0


OWN = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 1, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-4B
  torch_dtype: bfloat16
distributed: {strategy: fsdp2}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: tools.jsonl
  split: train
  seq_length: 2048
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8, alpha: 16}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""


def _call(name: str, **more: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"city": "Bern"}}, **more}


def test_tool_messages_without_ids_get_those_of_the_calls(meshwright: Any, chats: str) -> None:
    rows = [
        {"messages": [
            {"role": "user", "content": "Weather and time?"},
            {"role": "assistant", "content": "", "tool_calls": [_call("weather"), _call("time", id="t7")]},
            {"role": "tool", "content": "rain"}, {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "Rain at noon.", "tool_calls": None},
            {"role": "user", "content": "Again."},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]},
            {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Sun."},
        ]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<tool_call>f()</tool_call>"},
            {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}]},
    ]  # fmt: skip
    Path("tools.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 50))
    Path("own.yaml").write_text(OWN)
    found = {one["rule"]: one for one in meshwright("check", "own.yaml", *H100, "--json").json["findings"]}
    (fix,) = found["automodel.dataset-rows"]["fix"]
    assert meshwright(*shlex.split(fix.replace("FOLDER", "fixed"))[1:]).code == 0
    lines = [json.loads(line) for line in Path("fixed/tools.messages.jsonl").read_text().splitlines()]
    assert [one.get("tool_call_id") for one in lines[0]["messages"] if one["role"] == "tool"] == [
        "call_0", "t7", "call_0",
    ]  # fmt: skip
    assert [call["id"] for one in lines[0]["messages"] for call in one.get("tool_calls", ())] == [
        "call_0", "t7", "call_0",
    ]  # fmt: skip
    assert lines[1]["messages"][2]["tool_call_id"] == "call_0"
    assert "automodel.dataset-rows" not in meshwright("check", "fixed/own.yaml", *H100).out


PLANS = (
    ("llama3_70b", "8x8xH100", "pretrain", 8192),
    ("llama31_8b", "8xA100-40", "pretrain", 16384),
    ("llama31_8b", "8xH100", "sft", 32768),
    ("llama31_70b", "2x8xH100", "peft", 4096),
)


def test_a_plan_for_an_engine_has_only_what_its_files_can_say(meshwright: Any, chats: str) -> None:
    """Every engine, with every field of the layout that a plan may set."""
    for engine, framework in CONFIGS.items():
        for model, gpus, goal, length in PLANS:
            if goal not in FRAMEWORK_GOALS.get(framework, (goal,)):
                continue
            try:
                plan = api.recommend(model, gpus=gpus, goal=goal, seq=length, engine=engine)
            except InputError:  # the batch of the recipe does not divide
                continue
            if plan.exists:
                written = exported_for(engine, plan.recipe, find(model), plan.question.cluster)
                lost = {one.field for one in written.unmapped if one.field.startswith(("layout.", "kernels."))}
                assert lost == set(), (engine, model, goal)
    asked = ("--gpus", "8x8xH100", "--engine", "deepspeed")
    planned = meshwright("recommend", "llama3-70b", *asked, "--goal", "pretrain", "--seq", "8192", "--save", "l.toml")
    assert planned.code == 0
    assert "sp = true" not in Path("l.toml").read_text()
    out = meshwright("export", "l.toml", "--to", "deepspeed", "--out", "ds").out
    assert "layout.sp" not in out
    ignored = meshwright("check", "l.toml", *asked, "layout.tp=8", "layout.sp=true").out
    assert "deepspeed ignores sp=True and runs sp=False" in ignored


def test_routers_with_a_bias_are_balanced_by_it(meshwright: Any, chats: str) -> None:
    for name in index.names():  # the table of models in recipes/build.py has those of the catalogue
        recipe = index.load(name)
        moe = model_of(recipe).moe if recipe.goal == "pretrain" else None
        assert moe is None or (recipe.moe.balancing == "bias") == moe.balance_bias, name
    v3 = ("export", "deepseek_v3_pretrain_config_32nodes", "--to")
    assert "--moe-router-enable-expert-bias" in meshwright(*v3, "megatron-lm").out
    for framework in ("megatron-bridge", "automodel", "torchtitan"):
        assert "moe.balancing" not in meshwright(*v3, framework).out, framework
    off = meshwright(*v3, "megatron-bridge", "moe.balancing=aux_loss").out
    assert "model.moe_router_enable_expert_bias=false" in off
    own = {
        "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 8192, "moe_intermediate_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8,
        "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "vocab_size": 128000, "tie_word_embeddings": False,
    }  # fmt: skip
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(own))
    gpus = ("--gpus", "4x8xH100")
    planned = meshwright("recommend", "./own", "--goal", "pretrain", *gpus, "--json").json
    assert {"field": "moe.balancing", "to": "bias"}.items() <= next(
        one for one in planned["changes"] if one["field"] == "moe.balancing"
    ).items()
    meshwright("export", "./own", "--goal", "pretrain", "--to", "megatron-lm", *gpus, "--out", "mlm")
    script = Path("mlm/own_pretrain.sh")
    assert "groups-without-bias" not in meshwright("check", str(script), *gpus).out
    lines = [line for line in script.read_text().splitlines() if "enable-expert-bias" not in line]
    script.write_text("\n".join(lines))
    for model in ((), ("--model", "./own")):
        lacking = meshwright("check", str(script), *model, *gpus).out
        assert "(megatron-lm.groups-without-bias)  fix: --moe-router-enable-expert-bias" in lacking
        assert "balanced-without-bias" not in lacking
    assert "moe.balanced-without-bias" in meshwright("check", v3[1], "moe.balancing=aux_loss").out


def test_a_qlora_run_of_trl_has_its_quantization_and_what_the_program_must_do(meshwright: Any, chats: str) -> None:
    job = ("export", "llama3_8b_peft_config", "--model", "llama31_8b", "--to")
    asked = ("peft.method=qlora", f"data.dataset={chats}", "train.steps=100", "layout.recompute=full")
    for framework, gpus, sharded in (
        ("trl", "1xRTX4090", False),
        ("trl", "2xH100", True),
        ("deepspeed", "2xH100", True),
    ):
        out = meshwright(*job, framework, "--gpus", gpus, *asked).out
        assert "bnb_4bit_compute_dtype=torch.bfloat16" in out
        assert ("bnb_4bit_quant_storage=torch.bfloat16" in out) == sharded, (framework, gpus)
        assert ("distributed_type: 'NO'" in out) == (gpus == "1xRTX4090")
        assert ("fsdp_config" in out) == (sharded and framework == "trl")
        assert "Unmapped data.dataset" not in out, "the written program has it"
        program = ("quantization_config=quantization_config", 'attn_implementation="flash_attention_2"', str(chats))
        for need in (*program, "{% generation %}"):
            assert need in out, (framework, need)
    page = Path(__file__).parents[2] / "docs/frameworks/accelerate.md"
    kept, _, lost = page.read_text().partition("## Recipe fields in the arguments")[2].partition("fields without a key")
    for field in ("train.epochs", "peft.rank", "optimizer.lr"):
        assert f"`{field}`" in kept
        assert f"`{field}`" not in lost


def test_exported_scripts_of_several_nodes_say_what_they_need(meshwright: Any, chats: str) -> None:
    stray = meshwright("export", "llama3_8b_pretrain_config", "automodel").err
    assert "did you mean --to automodel?" in stray
    assert "--framework" not in stray
    nodes = ("--gpus", "4x8xH100")
    for framework, recipe, name in (
        ("megatron-lm", "llama3_70b_pretrain_config", "llama3_70b_pretrain_config.sh"),
        ("torchtitan", "llama3_8b_pretrain_config", "run.sh"),
    ):
        meshwright("export", recipe, "--to", framework, *nodes, "--out", framework)
        assert "${HEAD_NODE:?" in Path(framework, name).read_text()
        checked = meshwright("check", str(Path(framework, name)), *nodes)
        assert "launch." not in checked.out, checked.out
    for framework in ("megatron-lm", "megatron-bridge", "automodel"):
        written = meshwright("export", "llama31_8b", "--goal", "cpt", "--to", framework, "--gpus", "8xH100").out
        assert "the run trains on random tokens" in written, framework
