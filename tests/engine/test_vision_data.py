"""Samples with images: positions as in transformers, conversations with images, and rejected inputs."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.engine.tiny_tokenizer import SPECIAL, write_tiny_tokenizer
from tests.engine.vision_cases import FAMILIES, values_of
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from meshwright.clusters import cluster
from meshwright.costs.flops import image_share
from meshwright.engine.model.build import transformers_config
from meshwright.engine.run_spec import RunSpec
from meshwright.engine.train import train
from meshwright.engine.vision import image_groups
from meshwright.engine.vision.data import MockImages, open_images
from meshwright.engine.vision.image_loading import load_image
from meshwright.engine.vision.image_tokens import ImageTokenSpec, image_token_spec, position_axes
from meshwright.errors import InputError
from meshwright.planner.baseline import case_of
from meshwright.recipes import load, types
from meshwright.recipes.case import model_of
from meshwright.recipes.overrides import change
from meshwright.recipes.types import Recipe

SEQ = 96
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def config_of(family: str) -> Any:
    """Return a tiny config whose special tokens follow those of the tiny tokenizer."""
    values = values_of(family)
    text = {**values["text_config"], "vocab_size": 320}
    tokens = {k: v + 50 for k, v in values.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    return transformers_config({**values, **tokens, "text_config": text})


def write_processor(folder: Path, config: Any, vocab: int = 256) -> Path:
    """Write a tokenizer that has the model's image tokens, and an image processor of the model's sizes."""
    write_tiny_tokenizer(folder, vocab)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    spec = image_token_spec(config)
    names = {spec.image_token: "<|image_pad|>"}
    names |= dict.fromkeys(spec.before, "<|vision_start|>") | dict.fromkeys(spec.after, "<|vision_end|>")
    new_ids = range(len(tokenizer), max(names) + 1)
    tokenizer.add_special_tokens({"extra_special_tokens": [names.get(i, f"<|unused_{i}|>") for i in new_ids]})
    mark = "<|vision_start|>" if spec.whole_images else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", mark)
    tokenizer.save_pretrained(folder)
    if spec.whole_images:
        side = config.vision_config.image_size
        Gemma3ImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    else:
        size = {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return folder


def png(width: int = 16, height: int = 8, red: int = 200) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (red, 30, 60)).save(buffer, "PNG")
    return buffer.getvalue()


def write_data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.png").write_bytes(png())
    (folder / "b.png").write_bytes(png(24, 24, 10))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def chat_row(*parts: Any, answer: str = "A red box.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]}


TEXT = {"type": "text", "text": "What is it?"}
ROWS = [
    chat_row({"type": "image", "image": "a.png"}, TEXT),
    chat_row({"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}),
    chat_row({"type": "image", "image": "b.png"}, TEXT, {"type": "image", "image": "a.png"}),
    chat_row(TEXT),
]


def recipe_for(data: Path, processor: Path, **changes: Any) -> Recipe:
    given = {"dataset": str(data), "tokenizer": str(processor), "seq_length": SEQ, "images": True, **changes}
    return msgspec.structs.replace(load(FAMILIES["qwen2_5_vl"]), data=types.Data(**given))


@pytest.fixture(params=["qwen2_5_vl", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    config = config_of(request.param)
    return config, write_processor(tmp_path / "processor", config)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_positions_match_transformers(family: str) -> None:
    """Compare with transformers' own function, on the meta device: it uses only the tokens."""
    from transformers import AutoModelForImageTextToText

    config = transformers_config(values_of(family))
    spec = image_token_spec(config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    grids = np.array([[1, 4, 8], [1, 2, 6]])
    image = [spec.image_token]
    tokens = np.array([1, 2, 3, *image * 8, 4, 5, *image * 3, 6, 7, 8])
    seen = (tokens == spec.image_token).astype(int)
    expected, _ = model.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        mm_token_type_ids=torch.from_numpy(seen)[None],
        image_grid_thw=torch.from_numpy(grids),
    )
    assert np.array_equal(position_axes(tokens, grids, spec), expected[:, 0].numpy())


def test_image_groups_match_transformers() -> None:
    at = torch.tensor([[-1, 0, 1, -1, 2, 3, -1], [0, 1, 2, 3, -1, -1, -1]])
    assert torch.equal(image_groups(at), get_block_sequence_ids_for_mask((at >= 0).long()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_mock_samples_depend_only_on_their_number(family: str, packed: bool) -> None:
    spec = image_token_spec(transformers_config(values_of(family)))
    source = MockImages(spec, 64, seed=3, packed=packed)
    both, alone = source.samples([4, 9]), source.samples([9])
    assert np.array_equal(both.tokens[1], alone.tokens[0])
    assert np.array_equal(both.loss_mask[1], alone.loss_mask[0])
    count = int(alone.extras["pixel_counts"][0])
    assert np.array_equal(both.extras["pixels"][1, :count], alone.extras["pixels"][0, :count])
    labels = both.tokens[:, 1:]
    assert not (both.loss_mask & (labels == spec.image_token)).any()
    assert (both.extras["image_at"].max(1) < both.extras["feature_counts"]).all()
    if packed:
        assert both.documents is not None
        assert both.documents.max() > 0
        assert not (both.loss_mask[:, :-1] & (both.documents[:, 1:] != both.documents[:, :-1])).any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_mock_images_have_the_share_of_tokens_that_estimates_count(family: str, packed: bool) -> None:
    """`bench` prints an estimate and an MFU beside a run on mock images."""
    given = change(load(FAMILIES[family]), {"data.packing": packed, "data.seq_length": 4096})[0]
    counted = image_share(case_of(given, model_of(given), cluster("1xH100")))
    spec = replace(image_token_spec(transformers_config(values_of(family))), tokens=256 if family == "gemma3" else 0)
    mock = MockImages(spec, 4096, 0, packed).samples(range(8)).tokens == spec.image_token
    assert mock.mean() == pytest.approx(counted, rel=0.2)


def test_conversations_with_images(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    spec = image_token_spec(config)
    source = open_images(recipe_for(write_data(tmp_path / "data", ROWS), processor), config)
    samples = source.samples(range(4))
    assert samples.tokens.shape == (4, SEQ + 1)
    images = (samples.tokens == spec.image_token).sum(1)
    assert np.array_equal(images, samples.extras["feature_counts"])
    assert sorted(samples.extras["pixel_counts" if spec.whole_images else "image_counts"]) == [0, 1, 1, 2]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(processor)
    for tokens, loss_mask in zip(samples.tokens, samples.loss_mask, strict=True):
        targets = tokens[1:][loss_mask]
        assert tokenizer.decode(targets) == "A red box." + SPECIAL[2]


def test_tokens_match_the_transformers_processor(tmp_path: Path) -> None:
    config = config_of("gemma3")
    folder = write_processor(tmp_path / "processor", config)
    source = open_images(recipe_for(write_data(tmp_path / "data", ROWS[:1]), folder), config)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.boi_token, tokenizer.eoi_token = "<|vision_start|>", "<|vision_end|>"
    tokenizer.image_token, tokenizer.boi_token_id = "<|image_pad|>", image_token_spec(config).before[0]
    theirs = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_length=4)
    messages = [{"role": "user", "content": [{"type": "image"}, TEXT]}, {"role": "assistant", "content": "A red box."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    seen = theirs.image_processor([Image.open(tmp_path / "data" / "a.png").convert("RGB")], return_tensors="pt")
    expanded = text.replace("<|vision_start|>", theirs.replace_image_token(seen, 0))
    expected = tokenizer(expanded, add_special_tokens=False)["input_ids"]
    found = source.samples([0])
    assert found.tokens[0, : len(expected)].tolist() == expected
    assert np.allclose(found.extras["pixels"][0, 0], seen["pixel_values"][0].numpy())


def test_packed_conversations_fill_samples(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    data = write_data(tmp_path / "data", ROWS * 3)
    source = open_images(recipe_for(data, processor, packing=True, seq_length=160), config)
    samples = source.samples(range(4))
    assert samples.documents is not None
    assert samples.documents.max() >= 2
    if "axes" in samples.extras:
        starts = np.flatnonzero(np.diff(samples.documents[0])) + 1
        assert (samples.extras["axes"][0][:, starts] == 0).all()


def test_held_out_conversations_are_the_complement(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    rows = [chat_row({"type": "image", "image": "a.png"}, {"type": "text", "text": str(i)}) for i in range(20)]
    given = recipe_for(write_data(tmp_path / "data", rows), processor, validation_part=0.4)
    buffer: Any = open_images(given, config, held_out=True)
    rest: Any = open_images(given, config)
    assert len(buffer.corpus) + len(rest.corpus) == 20
    assert 2 < len(buffer.corpus) < 14


def test_images_in_a_column_go_to_their_marks(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    rows = [
        {"images": ["a.png", "b.png"], "prompt": "First <image> then <image>?", "response": "Yes."},
        {"images": ["a.png"], "prompt": "What?", "response": "A box."},
    ]
    samples = open_images(recipe_for(write_data(tmp_path / "data", rows), processor), config).samples([0, 1])
    assert sorted((samples.extras["image_at"] >= 0).sum(1) > 0) == [True, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat_row({"type": "image", "image": "../secret.png"}), "outside the dataset folder"),
        (chat_row({"type": "image", "image": "/etc/hostname"}), "outside the dataset folder"),
        (chat_row({"type": "image", "image": "https://example.com/a.png"}), "images are not downloaded"),
        (chat_row({"type": "image", "image": "missing.png"}), "no image missing.png"),
        (chat_row({"type": "image", "image": "chats.jsonl"}), "not one of PNG"),
        (chat_row({"type": "image", "image": "data:image/png;base64,@@"}), "not valid base64"),
        ({"images": ["a.png"], "prompt": "<image> <image>", "response": "no"}, "2 image placeholders"),
        (chat_row(TEXT, answer=" "), "every assistant message is empty"),
    ],
)
def test_bad_rows_are_reported_with_their_location(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of("qwen2_5_vl")
    processor = write_processor(tmp_path / "processor", config)
    (tmp_path / "secret.png").write_bytes(png())
    data = write_data(tmp_path / "data", [row])
    with pytest.raises(InputError, match=message) as caught:
        open_images(recipe_for(data, processor), config).samples([0])
    assert "chats.jsonl:1" in str(caught.value)


def test_images_that_would_fill_memory_are_rejected(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 1 << 20
    with pytest.raises(InputError, match="more than 64,000,000"):
        load_image(buffer.getvalue(), tmp_path, "chats.jsonl:1")


def test_folder_without_an_image_processor_is_rejected(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "text")
    with pytest.raises(InputError, match="no readable image processor") as caught:
        open_images(recipe_for(write_data(tmp_path / "data", ROWS), folder), config_of("qwen2_5_vl"))
    assert caught.value.field == "data.tokenizer"


def test_missing_registered_dataset_reports_where_was_searched(
    case: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, processor = case
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = recipe_for(Path("cord-v2"), processor)
    with pytest.raises(InputError, match="naver-clova-ix/cord-v2") as caught:
        open_images(given, config)
    assert any("hf download" in fix for fix in caught.value.fix)


def test_registered_dataset_from_a_local_folder(
    case: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, processor = case
    write_data(tmp_path / "cord-v2", [{"image": "a.png", "ground_truth": json.dumps({"gt_parse": {"total": "7"}})}])
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    source = open_images(recipe_for(Path("cord-v2"), processor), config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(processor)
    samples = source.samples([0])
    assert tokenizer.decode(samples.tokens[0, 1:][samples.loss_mask[0]]) == '{"total": "7"}' + SPECIAL[2]


def test_samples_too_short_for_an_image_are_rejected() -> None:
    spec: ImageTokenSpec = image_token_spec(transformers_config(values_of("gemma3")))
    with pytest.raises(InputError, match="too short for an image") as caught:
        MockImages(spec, 6, 0)
    assert caught.value.fix == ("data.seq_length=14",)


@pytest.mark.slow
def test_training_on_conversations_with_images(tmp_path: Path) -> None:
    name = FAMILIES["qwen2_5_vl"]
    processor = write_processor(tmp_path / "processor", transformers_config(values_of("qwen2_5_vl")), vocab=128)
    pinned = {
        "train.steps": 4,
        "data.dataset": str(write_data(tmp_path / "data", ROWS * 4)),
        "data.tokenizer": str(processor),
        "data.seq_length": SEQ,
    }
    done = train(change(load(name), pinned)[0], RunSpec(nproc=2, tiny=True, quiet=True), pinned)
    assert done.recipe.data.packing
    assert done.outcome is not None
    assert done.outcome.losses[-1] < done.outcome.losses[0]
