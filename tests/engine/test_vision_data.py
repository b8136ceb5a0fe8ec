"""Samples with images: positions as transformers counts them, conversations about images, and what is refused."""

from __future__ import annotations

import base64
import io
import json
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

from meshwright.engine.model.build import transformers_config
from meshwright.engine.run_spec import RunSpec
from meshwright.engine.train import train
from meshwright.engine.vision import image_groups
from meshwright.engine.vision.data import MockImages, open_images
from meshwright.engine.vision.image_loading import load_picture
from meshwright.engine.vision.image_tokens import ImageTokenSpec, axes, optics_of
from meshwright.errors import InputError
from meshwright.recipes import load, types
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
    """A tiny config whose special tokens follow those of the tiny tokenizer, in a vocabulary with room for both."""
    values = values_of(family)
    text = {**values["text_config"], "vocab_size": 320}
    tokens = {k: v + 50 for k, v in values.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    return transformers_config({**values, **tokens, "text_config": text})


def write_processor(folder: Path, config: Any, vocab: int = 256) -> Path:
    """A folder with a tokenizer that knows the model's image tokens, and an image processor of the model's sizes."""
    write_tiny_tokenizer(folder, vocab)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    optics = optics_of(config)
    names = {optics.image_token: "<|image_pad|>"}
    names |= dict.fromkeys(optics.before, "<|vision_start|>") | dict.fromkeys(optics.after, "<|vision_end|>")
    room = range(len(tokenizer), max(names) + 1)
    tokenizer.add_special_tokens({"extra_special_tokens": [names.get(i, f"<|unused_{i}|>") for i in room]})
    mark = "<|vision_start|>" if optics.extras else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", mark)
    tokenizer.save_pretrained(folder)
    if optics.extras:
        side = config.vision_config.image_size
        Gemma3ImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    else:
        size = {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return folder


def picture(width: int = 16, height: int = 8, red: int = 200) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (width, height), (red, 30, 60)).save(held, "PNG")
    return held.getvalue()


def write_data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.png").write_bytes(picture())
    (folder / "b.png").write_bytes(picture(24, 24, 10))
    path = folder / "talks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def asked(*parts: Any, answer: str = "A red box.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]}


TEXT = {"type": "text", "text": "What is it?"}
ROWS = [
    asked({"type": "image", "image": "a.png"}, TEXT),
    asked({"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture()).decode()}}),
    asked({"type": "image", "image": "b.png"}, TEXT, {"type": "image", "image": "a.png"}),
    asked(TEXT),
]


def recipe_for(data: Path, processor: Path, **changes: Any) -> Recipe:
    given = {"dataset": str(data), "tokenizer": str(processor), "seq_length": SEQ, "images": True, **changes}
    return msgspec.structs.replace(load(FAMILIES["qwen2_5_vl"]), data=types.Data(**given))


@pytest.fixture(params=["qwen2_5_vl", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    config = config_of(request.param)
    return config, write_processor(tmp_path / "processor", config)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_positions_are_those_of_transformers(family: str) -> None:
    """transformers' own function is asked, on the meta device: it computes with the tokens alone."""
    from transformers import AutoModelForImageTextToText

    config = transformers_config(values_of(family))
    optics = optics_of(config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    grids = np.array([[1, 4, 8], [1, 2, 6]])
    image = [optics.image_token]
    tokens = np.array([1, 2, 3, *image * 8, 4, 5, *image * 3, 6, 7, 8])
    seen = (tokens == optics.image_token).astype(int)
    expected, _ = model.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        mm_token_type_ids=torch.from_numpy(seen)[None],
        image_grid_thw=torch.from_numpy(grids),
    )
    assert np.array_equal(axes(tokens, grids, optics), expected[:, 0].numpy())


def test_groups_are_those_of_transformers() -> None:
    at = torch.tensor([[-1, 0, 1, -1, 2, 3, -1], [0, 1, 2, 3, -1, -1, -1]])
    assert torch.equal(image_groups(at), get_block_sequence_ids_for_mask((at >= 0).long()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_made_up_samples_are_their_numbers(family: str, packed: bool) -> None:
    optics = optics_of(transformers_config(values_of(family)))
    source = MockImages(optics, 64, seed=3, packed=packed)
    both, alone = source.samples([4, 9]), source.samples([9])
    assert np.array_equal(both.tokens[1], alone.tokens[0])
    assert np.array_equal(both.loss_mask[1], alone.loss_mask[0])
    count = int(alone.extras["pixel_counts"][0])
    assert np.array_equal(both.extras["pixels"][1, :count], alone.extras["pixels"][0, :count])
    labels = both.tokens[:, 1:]
    assert not (both.loss_mask & (labels == optics.image_token)).any()
    assert (both.extras["image_at"].max(1) < both.extras["feature_counts"]).all()
    if packed:
        assert both.documents is not None
        assert both.documents.max() > 0
        assert not (both.loss_mask[:, :-1] & (both.documents[:, 1:] != both.documents[:, :-1])).any()


def test_conversations_about_images(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    optics = optics_of(config)
    source = open_images(recipe_for(write_data(tmp_path / "data", ROWS), processor), config)
    samples = source.samples(range(4))
    assert samples.tokens.shape == (4, SEQ + 1)
    images = (samples.tokens == optics.image_token).sum(1)
    assert np.array_equal(images, samples.extras["feature_counts"])
    assert sorted(samples.extras["pixel_counts" if optics.extras else "image_counts"]) == [0, 1, 1, 2]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(processor)
    for tokens, loss_mask in zip(samples.tokens, samples.loss_mask, strict=True):
        learnt = tokens[1:][loss_mask]
        assert tokenizer.decode(learnt) == "A red box." + SPECIAL[2]


def test_tokens_are_those_of_the_processor(tmp_path: Path) -> None:
    config = config_of("gemma3")
    folder = write_processor(tmp_path / "processor", config)
    source = open_images(recipe_for(write_data(tmp_path / "data", ROWS[:1]), folder), config)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.boi_token, tokenizer.eoi_token = "<|vision_start|>", "<|vision_end|>"
    tokenizer.image_token, tokenizer.boi_token_id = "<|image_pad|>", optics_of(config).before[0]
    theirs = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_length=4)
    messages = [
        {"role": "user", "content": [{"type": "image"}, TEXT]},
        {"role": "assistant", "content": "A red box."},
    ]
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
        begins = np.flatnonzero(np.diff(samples.documents[0])) + 1
        assert (samples.extras["axes"][0][:, begins] == 0).all()


def test_held_out_conversations_are_the_others(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    rows = [asked({"type": "image", "image": "a.png"}, {"type": "text", "text": str(i)}) for i in range(20)]
    given = recipe_for(write_data(tmp_path / "data", rows), processor, validation_part=0.4)
    held: Any = open_images(given, config, held_out=True)
    rest: Any = open_images(given, config)
    assert len(held.corpus) + len(rest.corpus) == 20
    assert 2 < len(held.corpus) < 14


def test_images_in_a_column_go_to_their_marks(case: tuple[Any, Path], tmp_path: Path) -> None:
    config, processor = case
    rows = [
        {"images": ["a.png", "b.png"], "prompt": "First <image> then <image>?", "response": "Yes."},
        {"images": ["a.png"], "prompt": "What?", "response": "A box."},
    ]
    samples = open_images(recipe_for(write_data(tmp_path / "data", rows), processor), config).samples([0, 1])
    assert sorted((samples.extras["image_at"] >= 0).sum(1) > 0) == [True, True]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (asked({"type": "image", "image": "../secret.png"}), "outside the data's folder"),
        (asked({"type": "image", "image": "/etc/hostname"}), "outside the data's folder"),
        (asked({"type": "image", "image": "https://example.com/a.png"}), "not fetched from elsewhere"),
        (asked({"type": "image", "image": "missing.png"}), "there is no image missing.png"),
        (asked({"type": "image", "image": "talks.jsonl"}), "none of PNG"),
        (asked({"type": "image", "image": "data:image/png;base64,@@"}), "no base64"),
        ({"images": ["a.png"], "prompt": "<image> <image>", "response": "no"}, "places for 2 images"),
        (asked(TEXT, answer=" "), "every answer is empty"),
    ],
)
def test_bad_rows_are_refused_by_their_place(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = config_of("qwen2_5_vl")
    processor = write_processor(tmp_path / "processor", config)
    (tmp_path / "secret.png").write_bytes(picture())
    data = write_data(tmp_path / "data", [row])
    with pytest.raises(InputError, match=said) as caught:
        open_images(recipe_for(data, processor), config).samples([0])
    assert "talks.jsonl:1" in str(caught.value)


def test_pictures_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    held = io.BytesIO()
    Image.new("1", (9000, 9000)).save(held, "PNG")
    assert len(held.getvalue()) < 1 << 20
    with pytest.raises(InputError, match="more than 64,000,000"):
        load_picture(held.getvalue(), tmp_path, "talks.jsonl:1")


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "text")
    with pytest.raises(InputError, match="no image processor") as caught:
        open_images(recipe_for(write_data(tmp_path / "data", ROWS), folder), config_of("qwen2_5_vl"))
    assert caught.value.field == "data.tokenizer"


def test_a_named_set_that_is_nowhere_says_where_it_was_sought(
    case: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, processor = case
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = recipe_for(Path("cord-v2"), processor)
    with pytest.raises(InputError, match="naver-clova-ix/cord-v2") as caught:
        open_images(given, config)
    assert any("hf download" in fix for fix in caught.value.fix)


def test_a_named_set_from_a_local_folder(
    case: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, processor = case
    write_data(tmp_path / "cord-v2", [{"image": "a.png", "ground_truth": json.dumps({"gt_parse": {"total": "7"}})}])
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    source = open_images(recipe_for(Path("cord-v2"), processor), config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(processor)
    samples = source.samples([0])
    assert tokenizer.decode(samples.tokens[0, 1:][samples.loss_mask[0]]) == '{"total": "7"}' + SPECIAL[2]


def test_samples_too_short_for_an_image_are_refused() -> None:
    optics: ImageTokenSpec = optics_of(transformers_config(values_of("gemma3")))
    with pytest.raises(InputError, match="no room for an image") as caught:
        MockImages(optics, 6, 0)
    assert caught.value.fix == ("data.seq_length=14",)


@pytest.mark.slow
def test_a_run_on_conversations_about_images(tmp_path: Path) -> None:
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
