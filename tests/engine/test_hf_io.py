"""Hugging Face folders: loaded into any layout, saved so that transformers loads them; bad folders rejected."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine import folder_cases as cases
from tests.engine.families import ALL, FAMILIES
from tests.engine.hf_folder import tiny_model, write_shards
from tests.engine.parity import shallow
from tests.engine.ranks import run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshwright.engine import hf_io
from meshwright.engine.hf_io import shards
from meshwright.engine.hf_io.config_json import with_older_keys, write_config
from meshwright.engine.hf_io.files import SafetensorsFolder
from meshwright.engine.hf_io.tokenizer_files import export_config
from meshwright.engine.model.build import transformers_config
from meshwright.errors import InputError, OutputError
from meshwright.recipes import types

SMALL = 1e-4  # GiB: several files even of a tiny model
MTP = {"train": types.Train(global_batch_size=8, steps=100, mtp_loss=0.3)}


# Round trip of every family


def round_trip_errors(rank: int, world: int, family: str, folder: str, out: str) -> list[float]:
    """Return the error of the engine's logits against the folders it loaded and saved."""
    stages, mesh, config = cases.start(family, cases.recipe(), folder)
    assert stages[0].loaded.kept_initial == ()
    assert stages[0].loaded.config_differs == ()
    hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32, max_shard_gib=SMALL)
    found = cases.engine_logits(stages[0])
    model, issues = cases.load(out)
    assert not issues
    return [cases.differ(cases.logits(one), found) for one in (model, cases.load(folder)[0])]


@pytest.mark.parametrize("family", ALL)
def test_every_family_round_trips_with_the_same_logits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = f"{family} with a layer of each kind"
    monkeypatch.setitem(FAMILIES, small, shallow(FAMILIES[family], types.Layout()))
    folder = cases.write(tmp_path / "in", small)
    assert max(run(1, round_trip_errors, small, str(folder), str(tmp_path / "out"))[0]) <= 1e-5
    assert cases.same(folder, tmp_path / "out")  # also with hub names


# Every layout


def load_and_save(
    rank: int, world: int, family: str, layout: dict[str, Any], folder: str, out: str, options: Any
) -> Any:
    """Load a folder and save another; return the load report and the bytes of this rank's weights."""
    stages, mesh, config = cases.start(family, cases.recipe(layout, **options.get("sections", {})), folder)
    consolidated = options.get("consolidated", False)
    hf_io.save_model(
        stages, mesh, config, Path(out), dtype=torch.float32, max_shard_gib=SMALL, consolidated=consolidated
    )
    return stages[0].loaded, cases.local_bytes(stages)


LAYOUTS = [
    ("llama", 4, {"tp": 2}, {}),  # fsdp × tp: strided shards
    ("gpt2", 2, {"tp": 2}, {}),
    ("qwen3", 2, {"pp": 2}, {"consolidated": True}),  # tied
    ("mixtral", 2, {"ep": 2}, {}),
    ("gpt_oss", 2, {"etp": 2}, {}),
    ("nemotron_h", 2, {"tp": 2, "sp": True}, {}),
    *(
        pytest.param(family, world, layout, {}, marks=pytest.mark.slow)
        for family in ALL
        for world, layout in ((2, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"pp": 2, "tp": 2}))
    ),
    *(
        pytest.param(family, 4, layout, {}, marks=pytest.mark.slow)
        for family in ("mixtral", "gpt_oss", "deepseek_v3", "nemotron_h")
        for layout in ({"ep": 2, "dp_replicate": 2}, {"ep": 2, "etp": 2}, {"ep": 2, "tp": 2})
    ),
]


@pytest.mark.parametrize(("family", "world", "layout", "options"), LAYOUTS)
def test_every_layout_round_trips(
    family: str, world: int, layout: dict[str, Any], options: Any, tmp_path: Path
) -> None:
    folder = cases.write(tmp_path / "in", family, hub_names="pp" not in layout)
    out = tmp_path / "out"
    ranks = run(world, load_and_save, family, layout, str(folder), str(out), options)
    hub = cases.write(tmp_path / "hub", family)
    assert cases.same(hub, out)
    assert len(list(out.glob("*.safetensors"))) > 1 or options.get("consolidated")
    assert not list(out.glob(".*"))
    for loaded, local in ranks:
        assert loaded.bytes <= local + 4096  # each rank reads only its own part (4096: buffers)


def load_into_existing(rank: int, world: int, folder: str, out: str) -> tuple[str, ...]:
    """Load weights into initialized stages that have adapters."""
    peft = types.Peft(rank=4, targets=("qkv",))
    stages, mesh, config = cases.start("deepseek_v3", cases.recipe({"tp": 2}, peft), None)
    loaded = hf_io.load_weights(stages, Path(folder), config)
    hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32, merged=True)
    return loaded.kept_initial


def test_weights_are_loaded_into_an_existing_model(tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "deepseek_v3")
    for kept in run(2, load_into_existing, str(folder), str(tmp_path / "out")):
        assert kept
        assert all("lora_" in name for name in kept)
    assert cases.same(folder, tmp_path / "out")  # adapters start at zero: merging them changes nothing


@pytest.mark.parametrize(
    ("family", "layout"), [("deepseek_v3", {"pp": 2}), pytest.param("qwen3_next", {"tp": 2}, marks=pytest.mark.slow)]
)
def test_multi_token_prediction_uses_hub_names(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", family)
    options = {"sections": MTP}
    ranks = run(2, load_and_save, family, layout, str(folder), str(tmp_path / "out"), options)
    kept = {name for loaded, _ in ranks for name in loaded.kept_initial}
    assert kept
    assert all(name.startswith("mtp.") for name in kept)  # the folder has none: randomly initialized
    again, _ = run(1, load_and_save, family, {}, str(tmp_path / "out"), str(tmp_path / "again"), options)[0]
    assert again.kept_initial == ()
    assert cases.same(tmp_path / "out", tmp_path / "again")
    names = set(cases.tensors(tmp_path / "out")) - set(cases.tensors(folder))
    wanted = "model.layers.4.eh_proj.weight" if family == "deepseek_v3" else "mtp.fc.weight"
    assert wanted in names


def composite(rank: int, world: int, folder: str, prefix: str) -> None:
    """Turn a text model's folder into that of a vision-language model around it."""
    path = Path(folder)
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in cases.tensors(path).items()}
    tensors["vision_tower.patch.weight"] = torch.ones(4)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    for file in path.glob("model*"):
        file.unlink()
    write_shards(path, tensors, 1)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_model_inside_a_multimodal_checkpoint_is_found(prefix: str, tmp_path: Path) -> None:
    folder, plain = cases.write(tmp_path / "in", "gemma3_text"), cases.write(tmp_path / "plain", "gemma3_text")
    run(1, composite, str(folder), prefix)
    loaded, _ = run(1, load_and_save, "gemma3_text", {}, str(folder), str(tmp_path / "out"), {})[0]
    assert loaded.ignored == ("vision_tower.patch.weight",)
    assert cases.same(plain, tmp_path / "out")


def save_in_bf16(rank: int, world: int, folder: str, out: str) -> dict[str, str]:
    precision = types.Precision(compute="bf16", master="bf16")
    stages, mesh, config = cases.start("deepseek_v3", cases.recipe(precision=precision), folder)
    hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.bfloat16)
    read = cases.tensors(folder)
    written = cases.tensors(out)
    assert all(torch.equal(read[name].to(written[name].dtype), written[name]) for name in read)
    return {name: str(tensor.dtype) for name, tensor in written.items()}


def test_dtypes_are_converted_except_router_biases(tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "deepseek_v3")
    formats = run(1, save_in_bf16, str(folder), str(tmp_path / "out"))[0]
    wide = {name for name, kind in formats.items() if kind == "torch.float32"}
    assert wide == {name for name in formats if name.endswith("e_score_correction_bias")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def stored_tensors(rank: int, world: int, family: str, folder: str, out: str) -> None:
    """Save a folder without a mesh, from tensors as stored in a checkpoint."""
    stages, _, config = cases.start(family, cases.recipe(), folder)
    stored = {**dict(stages[0].named_parameters()), **dict(stages[0].named_buffers())}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    hf_io.write_folder(shapes, stored.__getitem__, config, Path(out), dtype=torch.float32, max_shard_gib=SMALL)


@pytest.mark.parametrize("family", ["gpt2", "nemotron_h", "mixtral"])
def test_folder_is_saved_from_checkpoint_tensors(family: str, tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", family)
    run(1, stored_tensors, family, str(folder), str(tmp_path / "out"))
    assert cases.same(folder, tmp_path / "out")


def test_tokenizer_and_special_tokens_are_copied(tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "llama")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "pytorch_model.bin").write_text("not this")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": 7}))
    run(1, with_tokenizer, str(folder), str(tmp_path / "out"))
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (out / "pytorch_model.bin").exists()
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == 7
    assert (out / "generation_config.json").read_text() == (folder / "generation_config.json").read_text()


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (None, (1, 2)),  # a folder of a tokenizer only: its tokens
        ({}, (1, 2)),  # a model's folder whose config names no tokens
        ({"eos_token_id": 3}, (1, 3)),
        ({"text_config": {"eos_token_id": 3}, "bos_token_id": 0}, (0, [2, 5])),
    ],
)
def test_the_exported_model_stops_at_the_token_that_ended_its_documents(
    beside: dict[str, Any] | None, expected: tuple[int, Any], tmp_path: Path
) -> None:
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "a": 3}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    if beside is not None:
        (tmp_path / "config.json").write_text(json.dumps({**beside, "model_type": "llama"}))
    ends = [2, 5] if beside and "text_config" in beside else 7
    built = transformers_config({**FAMILIES["llama"], "eos_token_id": ends})
    found = export_config(hf_io.build_name_map(built), torch.float32, tmp_path)
    assert (found.bos_token_id, found.eos_token_id) == expected
    assert found.pad_token_id is None
    several = transformers_config({**FAMILIES["llama"], "eos_token_id": [7, 2]})
    kept = export_config(hf_io.build_name_map(several), torch.float32, tmp_path).eos_token_id
    assert kept == (3 if beside == {"eos_token_id": 3} else [7, 2])  # a chat model ends with any of its tokens


def with_tokenizer(rank: int, world: int, folder: str, out: str) -> None:
    stages, mesh, config = cases.start("llama", cases.recipe(), folder)
    hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32, tokenizer=Path(folder))
    with pytest.raises(InputError, match="already contains a model"):
        hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32)
    hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32, tokenizer=Path(folder), overwrite=True)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPE_OF_VERSION_4: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6},
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "glm4": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
    "phi3": {"rope_theta": 1e4, "rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "gpt2": {},
}


@pytest.mark.parametrize("family", ROPE_OF_VERSION_4)
def test_exported_config_has_the_rotary_positions_that_transformers_4_and_vllm_read(
    family: str, tmp_path: Path
) -> None:
    rope = ROPE_OF_VERSION_4[family]
    base = {"model_type": family, "num_hidden_layers": 2, "head_dim": 8, "hidden_size": 32, "num_attention_heads": 4}
    config = transformers_config(copy.deepcopy({**base, **rope}))
    write_config(tmp_path, config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: one for key, one in written.items() if key in rope} == rope
    assert rope or not any("rope" in key for key in written)
    assert transformers_config(written).to_dict().get("rope_parameters") == config.to_dict().get("rope_parameters")


def test_exported_config_has_older_keys_in_the_section_of_the_language_model() -> None:
    text = {"model_type": "qwen3_vl_text", "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    found = with_older_keys({"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 2}})
    assert found["text_config"] == {**text, "rope_theta": 5e6}
    assert found["vision_config"] == {"depth": 2}
    assert "rope_theta" not in found


def test_exported_config_has_the_number_of_experts_that_transformers_4_and_vllm_read() -> None:
    config = transformers_config({"model_type": "qwen3_moe", "num_experts": 6, "num_hidden_layers": 2})
    found = with_older_keys(json.loads(config.to_json_string()))
    assert (found["num_experts"], found["num_local_experts"]) == (6, 6)
    assert transformers_config(found).to_dict() == config.to_dict()


# Memory


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_besides_weights(rank: int, world: int, folder: str, config: dict[str, Any]) -> tuple[int, int]:
    """Return the peak memory of loading besides the weights, and the bytes of the weights."""
    peak = 0
    original_read = SafetensorsFolder.read

    def reading(self: SafetensorsFolder, name: str, box: Any = ()) -> torch.Tensor:
        nonlocal peak
        found = original_read(self, name, box)
        peak = max(peak, anonymous())
        return found

    SafetensorsFolder.read = reading  # type: ignore[method-assign]  # in this rank's process
    FAMILIES["large"] = config
    before = anonymous()
    stages, _, _ = cases.start("large", cases.recipe({"tp": world}), folder)
    local = cases.local_bytes(stages)
    return peak - before - local, local


def write_large(rank: int, world: int, folder: str, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file as save

    path = Path(folder)
    path.mkdir()
    shapes = hf_io.build_name_map(transformers_config(config)).shapes
    save({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_loading_needs_one_slice_of_memory_besides_the_weights(tmp_path: Path) -> None:
    config = {**FAMILIES["llama"], "hidden_size": 512, "vocab_size": 120_000, "num_hidden_layers": 2, "head_dim": 128}
    run(1, write_large, str(tmp_path / "in"), config)
    for extra, local in run(2, peak_besides_weights, str(tmp_path / "in"), config):
        assert local > 230 << 20
        assert extra < SafetensorsFolder.slice_bytes + (32 << 20)


# Rejected folders


def refusal(rank: int, world: int, folder: str, family: str, changes: dict[str, Any]) -> str:
    FAMILIES["changed"] = {**FAMILIES[family], **changes}
    with pytest.raises(InputError) as error:
        cases.start("changed", cases.recipe(), folder)
    assert error.value.fix
    return f"{error.value} | {error.value.fix}"


def _index(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return found


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _rename_in_index(folder: Path, file: str) -> None:
    index = _index(folder)
    index["weight_map"]["lm_head.weight"] = file
    _write_index(folder, index)


def _drop_from_index(folder: Path) -> None:
    index = _index(folder)
    del index["weight_map"]["model.norm.weight"]
    _write_index(folder, index)


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def _only_pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _quantize(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "gptq"}}))


SECOND = "model-00002-of-00002.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], Any], dict[str, Any], tuple[str, ...]]] = {
    "vocabulary": (lambda _: None, {"vocab_size": 80}, ("embed_tokens", "64×32", "80×32", "architecture.vocab=64")),
    "width": (lambda _: None, {"intermediate_size": 48}, ("gate_proj.weight", "64×32", "48×32")),
    "missing": (_drop_from_index, {}, ("model.norm.weight", "model_type=llama")),
    "unexpected": (lambda _: None, {"num_hidden_layers": 3}, ("model.layers.3.",)),
    "another family": (lambda _: None, {"model_type": "qwen3"}, ("q_norm", "qwen3", "llama")),
    "truncated": (_truncate, {}, (SECOND, "truncated", "again")),
    "header": (lambda f: (f / SECOND).write_bytes(b"\xff" * 64), {}, (SECOND, "corrupt")),
    "outside": (lambda f: _rename_in_index(f, "../other.safetensors"), {}, ("../other.safetensors", "outside")),
    "absent": (lambda f: _rename_in_index(f, "gone.safetensors"), {}, ("gone.safetensors", "missing")),
    "wrong file": (lambda f: _rename_in_index(f, SECOND), {}, ("lm_head.weight", SECOND)),
    "pickled": (_only_pickled, {}, ("pytorch_model.bin", "safetensors")),
    "quantized": (_quantize, {}, ("gptq", "bf16")),
    "no weights": (lambda f: [x.unlink() for x in f.glob("model*")], {}, ("neither model.safetensors",)),
    "no config": (lambda f: (f / "config.json").write_text("{"), {}, ("config.json",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unreadable_folder_is_rejected_with_a_fix(name: str, tmp_path: Path) -> None:
    corrupt, changes, expected = BROKEN[name]
    folder = cases.write(tmp_path / "in", "llama")
    corrupt(folder)
    message = run(1, refusal, str(folder), "llama", changes)[0]
    for part in expected:
        assert part in message


def test_tied_lm_head_is_reported(tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "qwen3")
    assert "tie_word_embeddings=true" in run(1, refusal, str(folder), "qwen3", {"tie_word_embeddings": False})[0]


def missing_expert(rank: int, world: int, folder: str) -> str:
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file)
    return refusal(rank, world, folder, "qwen3_moe", {})


def test_missing_expert_is_detected(tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "qwen3_moe", shards=1)
    assert "15 tensors of model.layers.1.mlp.experts.gate_up_proj" in run(1, missing_expert, str(folder))[0]


def test_folders_are_found_by_path_and_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert hf_io.find_folder(str(snapshot)) == snapshot
    assert hf_io.find_folder("org/tiny") == snapshot
    with pytest.raises(InputError) as error:
        hf_io.find_folder("org/other")
    assert "hf download org/other" in error.value.fix
    with pytest.raises(InputError, match="no such folder"):
        hf_io.find_folder("./nowhere")
    with pytest.raises(InputError, match=r"no config\.json"):
        hf_io.find_folder(str(tmp_path))


# Full disks


def full_disk(rank: int, world: int, folder: str, out: str, layout: dict[str, Any]) -> str:
    """Return the error on this rank when rank 0's disk is full."""
    stages, mesh, config = cases.start("llama", cases.recipe(layout), folder)
    left = 60_000 if rank == 0 else 1 << 40
    write = os.pwrite

    def until_full(descriptor: int, data: Any, at: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    os.pwrite = until_full  # in this rank's process
    with pytest.raises(OutputError) as error:
        hf_io.save_model(stages, mesh, config, Path(out), dtype=torch.float32, max_shard_gib=SMALL)
    return str(error.value)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_full_disk_is_reported_on_every_rank_and_leaves_no_partial_file(layout: dict[str, Any], tmp_path: Path) -> None:
    folder = cases.write(tmp_path / "in", "llama")
    out = tmp_path / "out"
    for message in run(2, full_disk, str(folder), str(out), layout):
        assert "No space left" in message
        assert str(out) in message
        assert "bytes" in message
    assert not (out / "config.json").exists()
    assert not list(out.glob(".*"))
    for file in out.glob("*.safetensors"):
        load_file(file)  # complete


def test_too_small_disk_is_detected_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(OutputError, match="1,000 bytes"):
        shards.require_space(tmp_path, 1000)


def same_start(rank: int, world: int) -> bool:
    """Return whether tiny_model is deterministic, which other tests rely on."""
    one, other = (tiny_model("llama").state_dict() for _ in range(2))
    return all(torch.equal(one[name], other[name]) for name in one)


def test_tiny_model_is_deterministic() -> None:
    assert run(1, same_start)[0]
