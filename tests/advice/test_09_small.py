"""Small items of the audit, as users type them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.advice import custom_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import meshwright as package
from meshwright import train  # the function, not a module
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.engine.hf_io import copy_tokenizer, has_tokenizer
from meshwright.engine.hooks import Hooks, hook_contract
from meshwright.engine.model.build import build_model, building
from meshwright.engine.model.config import config_for
from meshwright.engine.model.init import record_initial
from meshwright.engine.parallelize.custom_tp_plan import apply_custom_plan
from meshwright.engine.parallelize.tp_plan import tp_module_of
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.recipes.types import Recipe, Train

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SMALL = ["train.steps=3", "data.seq_length=32", "train.global_batch_size=4", "layout.micro_batch_size=2",
         "precision.compute=fp32", "train.eval_every=0", "schedule.warmup_steps=0"]  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the config of a small Llama."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


# --- custom loss, model class and tensor-parallel plan ------------------------------------------------------------


def _trained(model: Path, out: str, nproc: int | None = None, more: tuple[str, ...] = (), **hooks: Any) -> Any:
    folder = str(model.parent / out)
    overrides = [*SMALL, *more]
    return train(str(model), dataset="mock", nproc=nproc, out=folder, overrides=overrides, quiet=True, **hooks).outcome


OWN = {"loss": custom_model.focal, "model_class": custom_model.OwnLlama, "tp_plan": custom_model.PLAN}


def test_own_loss_class_and_plan_train_the_same_on_one_and_two_ranks(llama: Path) -> None:
    alone = _trained(llama, "one", **OWN)
    both = _trained(llama, "two", 2, ("layout.tp=2", "layout.sp=true"), **OWN)
    assert both.losses == pytest.approx(alone.losses, abs=2e-5)
    assert both.grad_norms == pytest.approx(alone.grad_norms, abs=2e-4)
    exported = json.loads((llama.parent / "two" / "model" / "config.json").read_text())
    assert exported["architectures"] == ["OwnLlama"]
    loaded = custom_model.OwnLlama.from_pretrained(llama.parent / "two" / "model")
    assert loaded.model.layers[1].mlp.w1.weight.abs().sum() > 0

    with pytest.raises(InputError, match=r"loss function was tests.advice.custom_model.focal and is None"):
        _trained(llama, "one", model_class=custom_model.OwnLlama)
    with pytest.raises(InputError, match="a class of the program that trained it"):
        package.convert(str(llama.parent / "one"), str(llama.parent / "converted"))


@pytest.mark.slow
def test_an_own_loss_differs_from_the_cross_entropy_in_every_layout(llama: Path) -> None:
    plain = _trained(llama, "plain")
    focal = _trained(llama, "focal", loss=custom_model.focal)
    assert abs(focal.losses[0] - plain.losses[0]) > 0.01
    for name, layout in (("pp", "layout.pp=2"), ("cp", "layout.cp=2"), ("dp", "layout.dp_shard=2")):
        assert _trained(llama, name, 2, (layout,), loss=custom_model.focal).losses == pytest.approx(
            focal.losses, abs=2e-5
        )


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"layers.*.mlp.w1": "column"}, "must be one of colwise, colwise_kv, rowwise, divide"),
        ({"layers.*.mlp.w9": "colwise"}, "no module of the model matches"),
        ({"layers.*.mlp.w1": "colwise"}, "needs layers of both kinds"),
        ({"layers.*.input_layernorm": "colwise"}, "is a LlamaRMSNorm; only linear layers"),
    ],
)
def test_wrong_plans_are_refused(plan: dict[str, str], problem: str, llama: Path) -> None:
    recipe = Recipe(name="own", model=str(llama), goal="pretrain", cluster="1xH100")
    with building(custom_model.OwnLlama):
        model = build_model(config_for(recipe), torch.float32)
    assert tp_module_of(model.model.layers[0].mlp) is None
    with pytest.raises(InputError, match=problem):
        apply_custom_plan(model, plan)
    apply_custom_plan(model, custom_model.PLAN)
    assert tp_module_of(model.model.layers[0].mlp).divided == ("inner",)


def test_wrong_hooks_are_refused(llama: Path) -> None:
    with pytest.raises(InputError, match=r"never computes all logits.*\nfix: kernels\.loss=plain"):
        _trained(llama, "none", more=("kernels.loss=chunked",), loss=custom_model.focal)
    with pytest.raises(InputError, match="must be a function"):
        _trained(llama, "none", loss="focal")
    assert hook_contract(Hooks(loss=custom_model.focal)) == {"loss function": "tests.advice.custom_model.focal"}


# --- micro_batch_size=auto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["layout.micro_batch_size", "train.micro_batch_size"])
def test_the_micro_batch_is_chosen(key: str, meshwright: Any) -> None:
    words = ("llama3_8b_pretrain_config", "--gpus", "8xH200", f"{key}=auto", "--json")
    found = meshwright("estimate", *words).json
    assert found["estimate"]["fits"]
    for size in (1, 2, 4, 8):
        other = meshwright("estimate", *words[:3], f"layout.micro_batch_size={size}", "--json").json
        if other["estimate"]["fits"] and not any("tight" in one["rule"] for one in other["findings"]):
            assert found["estimate"]["step_s"] <= other["estimate"]["step_s"] * 1.0001
    checked = meshwright("check", *words).json
    assert checked["estimate"]["memory_gib"]["total"] == found["estimate"]["memory_gib"]["total"]


@pytest.mark.parametrize("verb", ["recommend", "plan"])
def test_the_search_chooses_the_micro_batch(verb: str, meshwright: Any) -> None:
    words = (verb, "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json")
    plain, auto = meshwright(*words).json, meshwright(*words, "layout.micro_batch_size=auto").json
    first = lambda answer: answer["plans"][0] if verb == "plan" else answer  # noqa: E731
    assert first(auto)["layout"] == first(plain)["layout"]


# --- init_method_std ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["init_method_std", "model.init_method_std", "initializer_range", "train.init_std"])
def test_the_standard_deviation_of_initial_weights(key: str, llama: Path) -> None:
    recipe = package.recipe("llama3_8b_pretrain_config", [f"{key}=0.005"])
    assert recipe.train.init_std == 0.005
    own = Recipe(name="own", model=str(llama), goal="pretrain", cluster="1xH100", train=Train(init_std=0.005))
    specs = record_initial(build_model(config_for(own), torch.float32), 1)
    assert specs["model.layers.0.mlp.up_proj.weight"].b == 0.005
    assert specs["model.embed_tokens.weight"].b == 0.005


def test_the_standard_deviation_is_exported_and_checked(meshwright: Any) -> None:
    words = ("llama3_8b_pretrain_config", "--gpus", "8xH100", "init_method_std=0.005", "--json")
    files = meshwright("export", *words, "--to", "megatron-lm").json["files"]
    assert "--init-method-std 0.005" in "".join(files.values())
    found = meshwright("check", "llama3_8b_sft_config", "init_method_std=0.005", "--json").json["findings"]
    assert "weights.init-std-unused" in [one["rule"] for one in found]
    found = meshwright("check", *words).json["findings"]
    assert "weights.init-std-unused" not in [one["rule"] for one in found]


# --- tokenizers ---------------------------------------------------------------------------------------------------

TEXT = "the lazy fox jumps höher 123\n"


@pytest.fixture
def byte_pairs(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """A folder with vocab.json and merges.txt, and the tokenizer they are from."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    trained.train_from_iterator(["the quick brown fox jumps over the lazy dog "] * 20, learn)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    trained.model.save(str(folder))
    return folder, trained


@pytest.mark.parametrize("prefix", ["", "gpt2-"])
def test_vocab_and_merges_are_a_tokenizer(prefix: str, byte_pairs: Any, tmp_path: Path) -> None:
    folder, trained = byte_pairs
    for name in ("vocab.json", "merges.txt"):
        os.rename(folder / name, folder / f"{prefix}{name}")
    assert has_tokenizer(folder)
    for source in (folder, folder / f"{prefix}vocab.json"):
        loaded = load_tokenizer(source)
        assert loaded.encode(TEXT) == trained.encode(TEXT).ids
        assert loaded.decode(loaded.encode(TEXT)) == TEXT
        assert loaded.eos_token == "<|endoftext|>"
    (tmp_path / "model").mkdir()
    copy_tokenizer(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    assert load_tokenizer(tmp_path / "model").encode(TEXT) == trained.encode(TEXT).ids


def test_a_damaged_vocabulary_is_refused(byte_pairs: Any) -> None:
    folder, _ = byte_pairs
    (folder / "vocab.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="must map tokens to integers"):
        load_tokenizer(folder)


# --- catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name", "total"),
    [
        ("Mixtral 8x7B", "mixtral_8x7b", 46_702_792_704),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral_8x22b", 140_620_634_112),
        ("mistral-7b", "mistral_7b", 7_248_023_552),
        ("mistralai/Mistral-7B-v0.1", "mistral_7b_v01", 7_241_732_096),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral_7b_v02", 7_241_732_096),
        ("Llama-2-70b-chat", "llama2_70b", 68_976_648_192),
        ("phi-4", "phi4_14b", 14_659_507_200),
        ("microsoft/phi-4", "phi4_14b", 14_659_507_200),
        ("Phi-4-mini", "phi4_mini_3p8b", 3_836_021_760),
    ],
)
def test_the_catalogue_has_them(typed: str, name: str, total: int) -> None:
    found = find(typed)
    assert (found.name, found.params.total) == (name, total)


def test_phi_is_planned_without_tensor_parallelism_on_our_engine(meshwright: Any) -> None:
    words = ("phi-4", "--gpus", "8xH100", "--goal", "sft", "--json")
    assert meshwright("recommend", *words).json["layout"]["tp"] == 1
    refused = meshwright("estimate", *words, "layout.tp=2").json["findings"]
    assert "heads.fused-projections" in [one["rule"] for one in refused]
    other = meshwright("estimate", *words, "layout.tp=2", "--engine", "megatron").json["findings"]
    assert "heads.fused-projections" not in [one["rule"] for one in other]


# --- size: storage and prices -------------------------------------------------------------------------------------

FIXED = ("layout.pp=1", "layout.cp=1", "layout.tp=1")


def test_size_gives_the_storage_of_checkpoints(meshwright: Any) -> None:
    words = ("size", "llama3-8b", "--gpu", "H100", "--goal", "pretrain", *FIXED, "--json")
    found = meshwright(*words, "checkpoint.keep=2").json["storage"]
    assert found["checkpoint_gib"] == pytest.approx(8_030_261_248 * 12 / 2**30)
    assert (found["kept"], found["checkpoints_gib"]) == (2, pytest.approx(3 * found["checkpoint_gib"]))
    assert found["model_gib"] == pytest.approx(8_030_261_248 * 2 / 2**30)
    low = meshwright(*words, "optimizer.name=sgd", "precision.master=bf16").json["storage"]
    assert low["checkpoint_gib"] < found["checkpoint_gib"] / 2
    lora = ("size", "llama3-8b", "--gpu", "H100", "--goal", "lora", *FIXED, "--json")
    assert meshwright(*lora).json["storage"]["checkpoint_gib"] < 3
    printed = meshwright(*words[:-1]).out
    assert "89.7 GiB per checkpoint" in printed
    assert "a checkpoint takes" in printed


def test_size_compares_gpu_types_at_their_prices(meshwright: Any) -> None:
    words = ("size", "llama3-8b", "--gpu", "H100,A100", "--goal", "lora", "--tokens", "1B", *FIXED, "--json")
    found = meshwright(*words, "--price", "H100=2.5,A100=1.6").json
    assert [(one["gpu"], one["price"]) for one in found["compared"]] == [("H100", 2.5), ("A100-80", 1.6)]
    for one in found["compared"]:
        assert one["cheapest"]["cost"] == pytest.approx(one["cheapest"]["gpu_hours"] * one["price"])
    one_price = meshwright(*words, "--price", "2EUR").json["compared"]
    assert [(one["price"], one["currency"]) for one in one_price] == [(2.0, "EUR"), (2.0, "EUR")]
    own = meshwright(*words, "--price", "H100=2.5").json["compared"]  # one's own GPUs have no price
    assert [(one["price"], one["cheapest"] is None) for one in own] == [(2.5, False), (None, True)]
    wrong = meshwright(*words, "--price", "H10=2.5,A100=1").json["error"]
    assert wrong["fix"] == ["--price H100=2.5,A100=1"]
    assert meshwright(*words, "--price", "H100,A100=2").json["error"]["field"] == "price"


# --- the sequence length is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "length"), [("2k", 2048), ("", None), ("long\n1024", 1024)])
def test_recommend_asks_for_the_sequence_length(
    typed: str, length: int | None, meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    terminal = io.StringIO(f"llama3-8b\n{typed}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    answer = meshwright("recommend", "--gpus", "8xH100", "--goal", "sft", "--json")
    found = json.loads(answer.out[answer.out.index("{") :])
    default = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json").json
    assert "Which sequence length?" in answer.out
    assert found["question"]["seq_length"] == (length or default["question"]["seq_length"])
    if "long" in typed:
        assert "must be 1 to" in answer.err
