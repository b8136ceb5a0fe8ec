"""Parse values that users type: choices, sequence lengths, token budgets, times, prices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from meshwright.errors import InputError, unknown

MAX_TOKENS = 100_000_000  # of one sample
MAX_PRICE = 1e6  # of one GPU for one hour
CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "₩": "KRW"}
_SYMBOL = rf"[{''.join(CURRENCIES)}]|[A-Za-z]{{2,}}"
_PRICE = (  # compiled when a price or a number of tokens is typed
    rf"({_SYMBOL})?\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*({_SYMBOL})?"
    r"(?:\s*(?:/|per\s)\s*(?i:gpu\s*[-/]?\s*)?(?i:h(?:our|r)?))?"
)
_TOKENS = (
    r"([0-9][0-9,_]*(?:\.[0-9]*)?(?:e[+]?[0-9]+)?|\.[0-9]+)\s*"
    r"(k|m|b|g|t|thousand|million|billion|bn|trillion|tn)?(?:\s*tok(?:en)?s?)?"
)
_DAYS = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(h|d|w|hrs?|hours?|days?|wks?|weeks?|months?)"
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SCALES = {"": 1.0, "k": 1e3, "th": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def one_of(field: str, value: str, known: Sequence[Any]) -> Any:
    """Return a known choice in lower case; raise InputError with did-you-mean."""
    if str(value).lower() not in known:
        raise unknown(field, value, known)
    return value.lower()


def token_budget(tokens: float | str | None) -> float | None:
    """Return a number of tokens from 15e12, 15T, 300B, 1.5 trillion or 500,000,000."""
    if tokens is None:
        return None
    found = re.fullmatch(_TOKENS, str(tokens).strip().lower())
    count = float(found[1].replace(",", "").replace("_", "")) * _scale(found[2]) if found else 0.0
    if not 0 < count < 1e18:
        fix = ("--tokens 15T", "--tokens 300B", "--tokens 1e12")
        raise InputError("must be a number such as 15e12, 300B or 15T", field="tokens", value=tokens, fix=fix)
    return count


def exact_number(text: str) -> Fraction | None:
    """Return the value of 200B, 2e9, 0.01 or 010, which is 10; None for another text."""
    found = re.fullmatch(_TOKENS, text.strip().lower())
    return Fraction(found[1].replace(",", "").replace("_", "")) * int(_scale(found[2])) if found else None


def days_of(text: str) -> float | None:
    """Return the days of 45d, 6weeks, 6 w, 36h or 2 months (of 30 days); None for another text."""
    found = re.fullmatch(_DAYS, text.strip().lower())
    return float(found[1]) * {"h": 1 / 24, "d": 1.0, "w": 7.0, "m": 30.0}[found[2][0]] if found else None


def _scale(unit: str | None) -> float:
    unit = unit or ""
    return _SCALES["th"] if unit == "thousand" else _SCALES[unit[:1]]


def price_per_hour(price: float | str | None, currency: str | None = None) -> tuple[float, str] | None:
    """Return a price and its currency from 2.5, 2.10EUR, €2.10 or $2/h; the currency is empty if none is named."""
    if price is None:
        if currency is not None:
            reason = "needs a price per GPU-hour"
            raise InputError(reason, field="currency", value=currency, fix=("--price 2.50 --currency EUR",))
        return None
    found = re.fullmatch(_PRICE, f"{price:f}" if isinstance(price, float) else str(price).strip())
    fix = ("--price 2.50", "--price 2.10EUR")
    if not found or not 0 <= (amount := float(found[2])) <= MAX_PRICE:
        reason = f"must be a price per GPU-hour from 0 to {MAX_PRICE:,.0f}, such as 2.50, 2.10EUR or €2.10"
        decimal = re.sub(r"^([^0-9]*[0-9]+),([0-9]{1,2})(?![0-9])", r"\1.\2", str(price))
        comma = decimal != str(price) and re.fullmatch(_PRICE, decimal.strip())
        decimal = decimal.replace(" ", "")  # as one word of a shell
        raise InputError(reason, field="price", value=price, fix=(f"--price {decimal}",) if comma else fix)
    named = {_currency(text) for text in (found[1], found[3], currency) if text and text.strip()}
    if len(named) > 1:
        raise InputError(f"names {' and '.join(sorted(named))}; use one currency", field="price", value=price, fix=fix)
    return amount, next(iter(named), "")


def prices_by_gpu(price: float | str | None) -> dict[str, str]:
    """Return the prices of H100=2.5,A100=1.6 by GPU type as it is written; empty for one price."""
    if not isinstance(price, str) or "=" not in price:
        return {}
    found: dict[str, str] = {}
    for part in price.split(","):
        gpu, equals, amount = (text.strip() for text in part.partition("="))
        if not (gpu and equals and amount):
            reason = f"{part.strip() or 'an empty part'} must be GPU=PRICE"
            raise InputError(reason, field="price", value=price, fix=("--price H100=2.50,A100=1.60",))
        found[gpu] = amount
    return found


def _currency(text: str) -> str:
    """Return a currency as its three-letter code."""
    code = CURRENCIES.get(text.strip(), text.strip().upper())
    if not re.fullmatch(r"[A-Z]{3}", code):
        reason = f"must be a three-letter code or one of {' '.join(CURRENCIES)}"
        raise InputError(reason, field="currency", value=text[:40], fix=("--currency EUR",))
    return code


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


def snake_case(name: str) -> str:
    """Return a name as fields are written: maxGpus, max-gpus and "Max GPUs" are max_gpus."""
    return re.sub(r"[\s-]+", "_", _HUMP.sub("_", name)).lower()
