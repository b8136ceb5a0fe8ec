"""Quantized folders as they are published: mxfp4 and fp8 are read as bf16, others are refused with a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine import folder_cases, quantized_cases
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from tests.engine.saved_folders import SEED, SEQ, import_models
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from meshwright.engine.data.mock import Mock
from meshwright.engine.hf_io.quantized import open_folder
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize import parallelize
from meshwright.engine.post_training.convert import convert

MIB = 1 << 20
DEEPSEEK = {**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 0, "hidden_size": 40}  # blocks do not divide it


def words(folder: Path, out: Path, *more: str) -> list[str]:
    """Return the command line of two training steps from a folder."""
    return [
        *(
            "train",
            "llama3_8b_pretrain_config",
            "--model",
            str(folder),
            "--dataset",
            "mock",
            "--json",
            "--out",
            str(out),
        ),
        *(f"checkpoint.pretrained={folder}", f"train.seed={SEED}", "train.steps=2"),
        *(
            "train.global_batch_size=2",
            f"data.seq_length={SEQ}",
            "layout.micro_batch_size=1",
            "layout.tp=1",
            "layout.cp=1",
        ),
        *("moe.balancing=none", "moe.aux_loss=0", *more),
    ]


def write(rank: int, world: int, path: str, what: str, settings: Any = None) -> float:
    """Write a quantized folder; return the loss of transformers' own dequantized model on the mock samples."""
    folder = Path(path)
    if what == "mxfp4":
        quantized_cases.write_mxfp4(folder)
    else:
        quantized_cases.write_fp8(folder, settings, (16, 16), compressed=what == "compressed")
    if what == "compressed":
        return 0.0
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    tokens = torch.from_numpy(Mock(model.config.vocab_size, SEQ, SEED).samples([0, 1]).tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_train_from_an_mxfp4_folder_and_save_bf16(meshwright: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "run"
    import_models("gpt_oss")
    expected = run(1, write, str(folder), "mxfp4")[0]
    answer = meshwright(*words(folder, out, "optimizer.lr=1e-12", "schedule.min_lr=0", "layout.ep=2", "--nproc", "2"))
    assert answer.code == 0, answer.out + answer.err
    assert answer.json["losses"][0] == pytest.approx(expected, rel=2e-3)  # computed in bf16
    saved = json.loads((out / "model" / "config.json").read_text())
    assert "quantization_config" not in saved
    assert saved["dtype"] == "bfloat16"
    plain = folder_cases.tensors(out / "model")
    assert not [name for name in plain if name.endswith(("_blocks", "_scales"))]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    files = folder_cases.tensors(folder)
    wanted = run(1, dequantized, files[f"{name}_blocks"].numpy(), files[f"{name}_scales"].numpy())[0]
    assert torch.allclose(plain[name].float(), torch.from_numpy(wanted), atol=1e-6)  # the learning rate is tiny


def dequantized(rank: int, world: int, blocks: Any, scales: Any) -> Any:
    return convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()


def read_slices(rank: int, world: int, path: str, settings: Any) -> list[bool]:
    """Compare full tensors and slices with transformers' dequantization, bit by bit in bf16."""
    mxfp4 = quantized_cases.write_mxfp4(Path(path) / "mxfp4")
    files, opened = folder_cases.tensors(mxfp4), open_folder(mxfp4)
    equal = []
    for name in (n.removesuffix("_blocks") for n in files if n.endswith("_blocks")):
        wanted = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
        part = (slice(1, 3), slice(5, 31), slice(7, 19))
        equal += [torch.equal(opened.read(name), wanted), torch.equal(opened.read(name, part), wanted[part])]
    fp8 = quantized_cases.write_fp8(Path(path) / "fp8", settings, (16, 16))
    files, opened = folder_cases.tensors(fp8), open_folder(fp8)
    scaled = [n.removesuffix("_scale_inv") for n in files if n.endswith("_scale_inv")]
    for name in scaled:
        wanted = Fp8Dequantize(None)._dequantize_one(files[name], files[f"{name}_scale_inv"], torch.bfloat16)
        part = (slice(3, 13), slice(9, 30))
        equal += [torch.equal(opened.read(name), wanted), torch.equal(opened.read(name, part), wanted[part])]
    assert not [name for name in opened.file_of if "scale" in name]
    rows = quantized_cases.write_fp8(Path(path) / "rows", settings, (16, 16), compressed=True)
    files, opened = folder_cases.tensors(rows), open_folder(rows)
    for name in scaled:
        wanted = files[name].bfloat16() * files[f"{name}_scale"]
        equal += [torch.equal(opened.read(name), wanted), torch.equal(opened.read(name, part), wanted[part])]
    return equal


def test_slices_equal_transformers_dequantization_bit_by_bit(tmp_path: Path) -> None:
    equal = run(1, read_slices, str(tmp_path), FAMILIES["qwen3"])[0]
    assert len(equal) > 100
    assert all(equal)


def uneven_blocks(rank: int, world: int, path: str) -> float:
    """Return the largest error of blocks that do not divide the matrix, relative to fp8's half step."""
    torch.manual_seed(0)
    weight = torch.randn(40, 72)
    codes, scales = quantized_cases.to_fp8(weight, (16, 16))
    folder = Path(path)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}})
    )
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, folder / "model.safetensors")
    found = open_folder(folder).read("a.weight", (slice(30, 40), slice(60, 72)))
    return float(((found.float() - weight[30:40, 60:72]) / weight.abs().max()).abs().max())


def test_the_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    assert run(1, uneven_blocks, str(tmp_path))[0] < 0.07


def load_experts(rank: int, world: int, folder: str) -> tuple[int, int]:
    """Return the bytes this rank read and the bytes of all expert codes."""
    config = transformers_config(json.loads((Path(folder) / "config.json").read_text()))
    given = folder_cases.recipe({"ep": 2})
    stages = parallelize(config, given, build_mesh(given.layout, "cpu"), torch.device("cpu"), Path(folder))
    assert stages[0].loaded.kept_initial == ()
    codes = sum(t.nbytes for name, t in folder_cases.tensors(folder).items() if name.endswith("_blocks"))
    return stages[0].loaded.bytes, codes


def test_expert_parallel_ranks_read_their_own_experts(tmp_path: Path) -> None:
    run(1, write, str(tmp_path / "in"), "mxfp4")
    files = sum(f.stat().st_size for f in (tmp_path / "in").glob("*.safetensors"))
    for read, codes in run(2, load_experts, str(tmp_path / "in")):
        assert read < files - 0.4 * codes


class LivePeak(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive; what an allocator keeps of freed ones does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def convert_large(rank: int, world: int, path: str, layers: int) -> tuple[float, float, float]:
    """Convert a folder; return MiB: the peak of live tensors, the size written, and the largest tensor."""
    source, out = Path(path) / "in", Path(path) / "out"
    source.mkdir(parents=True)
    config = {
        **quantized_cases.GPT_OSS,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 16,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (source / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers_config(config), dtype=torch.bfloat16)
    tensors, largest = {}, max(tensor.nbytes for tensor in model.state_dict().values())
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:-1], 120).byte()}
        else:
            tensors[name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    with LivePeak() as memory:
        result = convert(str(source), str(out))
    name = f"model.layers.{layers - 1}.mlp.experts.down_proj"
    wanted = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(load_file(out / "model.safetensors")[name], wanted)
    return memory.peak / MIB, result.bytes / MIB, largest / MIB


def test_converting_needs_memory_for_a_tensor_not_for_the_model(tmp_path: Path) -> None:
    import_models("gpt_oss")
    small, few, largest = run(1, convert_large, str(tmp_path / "small"), 3)[0]
    large, many, _ = run(1, convert_large, str(tmp_path / "large"), 12)[0]
    assert many > 3.8 * few > 3.8 * 4 * largest
    assert largest < small < 10 * largest  # one tensor with the temporaries of its dequantization
    assert large == pytest.approx(small, rel=0.01)


@pytest.mark.parametrize(("method", "reason"), [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes")])
def test_other_quantizations_are_refused_with_a_way_out(
    method: str, reason: str, meshwright: Any, tmp_path: Path
) -> None:
    config = {**quantized_cases.GPT_OSS, "quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    refused = meshwright(*words(tmp_path, tmp_path / "run"))
    assert refused.code == 2
    error = refused.json["error"]
    assert reason in error["message"]
    assert any("bf16" in fix for fix in error["fix"])
    assert any("qlora" in fix for fix in error["fix"])
