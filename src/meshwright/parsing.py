"""Parse values that users type: choices, sequence lengths, token budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, unknown

MAX_TOKENS = 100_000_000  # of one sample


def one_of(field: str, value: str, known: Sequence[Any]) -> Any:
    """Return a known choice in lower case; raise InputError with did-you-mean."""
    if str(value).lower() not in known:
        raise unknown(field, value, known)
    return value.lower()


def token_budget(tokens: float | str | None) -> float | None:
    """Return a number of tokens from 15e12, 15T or 300B."""
    if tokens is None:
        return None
    text = str(tokens).strip().lower()
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:], 1.0)
    try:
        count = float(text.rstrip("mbt")) * scale
    except ValueError:
        count = 0.0
    if not 0 < count < 1e18:
        raise InputError("must be a number such as 15e12, 300B or 15T", field="tokens", value=tokens)
    return count


def sequence_length(seq: int | str | None) -> int | None:
    """Return a sequence length from 8192, 8k or 1M."""
    if seq is None:
        return None
    text = str(seq).strip().lower()
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    is_integer = digits.isascii() and digits.isdigit() and len(digits) <= 9
    if not is_integer or not 0 < int(digits) * scale <= MAX_TOKENS:
        raise InputError(f"must be 1 to {MAX_TOKENS:,} tokens, e.g. 8192, 8k or 1M", field="seq", value=text[:40])
    return int(digits) * scale
