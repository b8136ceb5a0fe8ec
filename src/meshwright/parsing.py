"""What users type as values: a word of a few, a sequence length, a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, unknown

LONGEST = 100_000_000  # tokens in one sample


def one_of(field: str, value: str, known: Sequence[Any]) -> Any:
    """A word of a few that are known, in any case."""
    if str(value).lower() not in known:
        raise unknown(field, value, known)
    return value.lower()


def token_budget(tokens: float | str | None) -> float | None:
    """A number of tokens: 15e12, 15T and 300B alike."""
    if tokens is None:
        return None
    text = str(tokens).strip().lower()
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:], 1.0)
    try:
        count = float(text.rstrip("mbt")) * scale
    except ValueError:
        count = 0.0
    if not 0 < count < 1e18:
        raise InputError("a token budget is a number such as 15e12, 300B or 15T", field="tokens", value=tokens)
    return count


def sequence_length(seq: int | str | None) -> int | None:
    """A sequence length as a number: 8192 and 8K alike, and 1M."""
    if seq is None:
        return None
    text = str(seq).strip().lower()
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    whole = digits.isascii() and digits.isdigit() and len(digits) <= 9
    if not whole or not 0 < int(digits) * scale <= LONGEST:
        raise InputError(
            f"a sequence is 1 to {LONGEST:,} whole tokens, e.g. 8192, 8k or 1M", field="seq", value=text[:40]
        )
    return int(digits) * scale
