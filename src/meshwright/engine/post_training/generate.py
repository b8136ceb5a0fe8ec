"""Generates text from a prompt: the quickest check of a checkpoint."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import suppress
from typing import Any

import msgspec

from meshwright.engine.data.conversations import Conversation
from meshwright.engine.data.system_messages import with_merged_system
from meshwright.errors import InputError
from meshwright.notes import note

SENT_AS_TURN = "the prompt is sent as a user turn, with the tokenizer's chat template; --raw sends it as plain text"
SENT_PLAIN = "the prompt is sent as plain text, as the run was pretrained on; --chat sends it as a user turn"


class GenerateOptions(msgspec.Struct, frozen=True):
    """Sampling options."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    chat: bool | None = None  # as a user turn; None: if the tokenizer has a template and the run did not pretrain
    system: str | None = None  # message before the prompt


class GenerateResult(msgspec.Struct, frozen=True):
    """Generated text and timing."""

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    chat: bool
    device: str
    step: int | None = None  # of a run's checkpoint
    best_step: int | None = None  # of a run's checkpoint with a lower validation loss than the one used


def generate(path: str, prompt: str, options: GenerateOptions, which: str | None = None) -> GenerateResult:
    """Generate text from a prompt with a checkpoint, a run (`which` of its checkpoints), a model folder or adapters."""
    import torch

    from meshwright.engine.data.tokenizers import load_tokenizer
    from meshwright.engine.post_training.convert import as_model_folder
    from meshwright.engine.post_training.open_checkpoint import (
        find_checkpoint,
        is_pretrained_only,
        load_model,
        require_tokenizer,
    )

    if not prompt:
        raise InputError("the prompt is empty", field="prompt", value="")
    turns = _turns(prompt, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = find_checkpoint(path, which)
    with as_model_folder(str(found.path)) as folder:
        tokenizer = load_tokenizer(require_tokenizer(folder, path))
        model = load_model(folder).to(device)
    wanted = options.chat
    if wanted is None and not turns and tokenizer.chat_template:
        wanted = not is_pretrained_only(found)
        note(SENT_AS_TURN if wanted else SENT_PLAIN)
    ids, chat = _prompt_ids(tokenizer, turns or prompt, wanted)
    if not ids:
        raise InputError("the tokenizer makes no tokens of this prompt", field="prompt", value=prompt)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    with torch.no_grad():
        out = model.generate(torch.tensor([ids], device=device), **_generate_kwargs(options, tokenizer))
    new = out[0, len(ids) :].tolist()
    return GenerateResult(
        tokenizer.decode(new, skip_special_tokens=True),
        len(ids),
        len(new),
        time.monotonic() - started,
        chat,
        str(device),
        found.step,
        found.best_step,
    )


def _turns(prompt: str, options: GenerateOptions) -> list[dict[str, Any]]:
    """Return the messages of a conversation: a JSON list of them, or a prompt with a system message; else none."""
    messages = [] if options.chat is False else _messages(prompt)
    if options.system is None:
        return messages
    if options.chat is False:
        raise InputError("a plain prompt has no system message", field="system", value=options.system, fix=("--chat",))
    if messages and messages[0]["role"] == "system":
        reason = "the messages of the prompt start with a system message already"
        raise InputError(reason, field="system", value=options.system, fix=("without --system",))
    return [{"role": "system", "content": options.system}, *(messages or [{"role": "user", "content": prompt}])]


def _messages(prompt: str) -> list[dict[str, Any]]:
    """Return the messages that a JSON text lists; none for any other text."""
    try:
        found = json.loads(prompt) if prompt.lstrip().startswith("[") else None
    except ValueError:
        return []
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) and "role" in one for one in found):
        return []
    wrong = next((one for one in found if not isinstance(one.get("content"), str)), None)
    if wrong is not None:
        fix = ('[{"role": "user", "content": "Hi"}]',)
        raise InputError("a message has no text as its content", field="prompt", value=json.dumps(wrong), fix=fix)
    return found


def _prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]], chat: bool | None) -> tuple[list[int], bool]:
    """Return the tokens of a prompt, with the chat template if requested or available, and whether it was used."""
    template = bool(tokenizer.chat_template)
    if (chat or not isinstance(prompt, str)) and not template:
        raise InputError("this tokenizer has no chat template", field="chat", value=True, fix=("--raw",))
    if chat if chat is not None else template:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = _rendered(tokenizer, turns)
        return tokenizer(text, add_special_tokens=False)["input_ids"], True
    return tokenizer(prompt)["input_ids"], False


def _rendered(tokenizer: Any, turns: list[dict[str, Any]]) -> str:
    """Return the text of a prompt's messages; raise with the prompt to type if the template has no system messages."""

    def render(messages: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    try:
        return render(turns)
    except Exception as error:  # templates raise anything
        reason, fix = f"the chat template rejects the messages: {error}", list[str]()
    with suppress(Exception):
        merged = with_merged_system(Conversation(turns), "the prompt").messages
        if merged != turns and render(merged):
            reason = reason.replace("the messages", "the system message", 1)
            text = str(merged[0]["content"]) if len(merged) == 1 else json.dumps(merged, ensure_ascii=False)
            fix = [f"{shlex.quote(text)} as the prompt, without a system message"]
    raise InputError(reason, field="prompt", value=json.dumps(turns, ensure_ascii=False), fix=fix)


def _generate_kwargs(options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": options.max_tokens, "pad_token_id": _pad_token(tokenizer)}
    if options.temperature == 0:
        return {**settings, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {**settings, "do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}


def _pad_token(tokenizer: Any) -> int | None:
    found: int | None = tokenizer.pad_token_id
    return found if found is not None else tokenizer.eos_token_id
