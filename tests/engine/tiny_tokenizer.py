"""A byte-level tokenizer made on the spot, with the special tokens and chat templates that real ones have."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNKNOWN, START = "<|bos|>", "<|im_end|>", "<|pad|>", "<|unk|>", "<|im_start|>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, START)
ASCII = [*range(32, 127), *b"\n\t"]
NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that UTF-8 does not use
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it")

BODY = "{{ message['content'] + '<|im_end|>' }}"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}BODY{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = TEMPLATE.replace("BODY", BODY)
MARKED = TEMPLATE.replace(
    "BODY",
    "{% if message['role'] == 'assistant' %}{% generation %}BODY{% endgeneration %}{% else %}BODY{% endif %}",
).replace("BODY", BODY)


def write_tiny_tokenizer(folder: Path, vocab: int = 256, chat_template: bool = True, markers: bool = True) -> Path:
    """A tokenizer folder with ids below `vocab`; its ChatML-like template says which part is the answer or does not.

    From 256 on every text can be written; smaller ones (at least 102) know the letters of ASCII only.
    """
    names = pre_tokenizers.ByteLevel.alphabet()
    letters = [_letter(byte) for byte in (ASCII if vocab < 256 else range(256)) if byte not in NEVER]
    if len(SPECIAL) + len(letters) > vocab or not set(letters) <= set(names):
        raise ValueError(f"a vocabulary of {vocab} is too small")
    pairs = PAIRS[: vocab - len(SPECIAL) - len(letters)] if vocab >= 256 else ()
    entries = {token: number for number, token in enumerate((*SPECIAL, *letters, *pairs))}
    tokenizer = Tokenizer(models.BPE(entries, [(pair[0], pair[1]) for pair in pairs], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )
    if chat_template:
        fast.chat_template = MARKED if markers else PLAIN
    fast.save_pretrained(folder)
    return Path(folder)


def _letter(byte: int) -> str:
    """The printable letter that byte-level tokenizers write for a byte (those of GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in shown else chr(256 + sum(1 for other in range(byte) if other not in shown))
