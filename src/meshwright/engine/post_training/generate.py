"""A prompt and what a trained model makes of it: the quickest check that a checkpoint is alive."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from meshwright.errors import InputError


class Asking(msgspec.Struct, frozen=True):
    """How a model is asked."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0 takes the likeliest token each time
    top_p: float = 1.0
    seed: int = 0
    chat: bool | None = None  # the prompt as a user's turn; None: where the tokenizer has a chat template


class Generated(msgspec.Struct, frozen=True):
    """What a model said."""

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    chat: bool
    device: str


def generate(path: str, prompt: str, asking: Asking) -> Generated:
    """Loads a checkpoint, a run, a model folder or adapters and lets the model go on from a prompt."""
    import torch

    from meshwright.engine.data.tokenizers import load_tokenizer
    from meshwright.engine.post_training.convert import as_model_folder
    from meshwright.engine.post_training.open_checkpoint import load_model, tokenizer_of

    if not prompt:
        raise InputError("a model needs something to go on from", field="prompt", value="")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with as_model_folder(path) as folder:
        tokenizer = load_tokenizer(tokenizer_of(folder))
        model = load_model(folder).to(device)
    ids, chat = _prompt_ids(tokenizer, prompt, asking.chat)
    torch.manual_seed(asking.seed)
    began = time.monotonic()
    with torch.no_grad():
        out = model.generate(torch.tensor([ids], device=device), **_settings(asking, tokenizer))
    new = out[0, len(ids) :].tolist()
    return Generated(
        tokenizer.decode(new, skip_special_tokens=True), len(ids), len(new), time.monotonic() - began, chat, str(device)
    )


def _prompt_ids(tokenizer: Any, prompt: str, chat: bool | None) -> tuple[list[int], bool]:
    """The tokens of a prompt, as a user's turn where that is wanted and possible."""
    template = bool(tokenizer.chat_template)
    if chat and not template:
        raise InputError("this tokenizer has no chat template", field="chat", value=True, fix=("--raw",))
    if chat if chat is not None else template:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"], True
    return tokenizer(prompt)["input_ids"], False


def _settings(asking: Asking, tokenizer: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": asking.max_tokens, "pad_token_id": _padding(tokenizer)}
    if asking.temperature == 0:
        return {**settings, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {**settings, "do_sample": True, "temperature": asking.temperature, "top_p": asking.top_p, "top_k": 0}


def _padding(tokenizer: Any) -> int | None:
    found: int | None = tokenizer.pad_token_id
    return found if found is not None else tokenizer.eos_token_id
