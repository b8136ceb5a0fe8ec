"""The price of a GPU-hour: the requested one, one by GPU type, or that of the cluster file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from meshwright import clusters, planner
from meshwright.api import requests
from meshwright.api.questions import Asked
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.parsing import price_per_hour, prices_by_gpu
from meshwright.planner import Question

DEAR = 16.0
"""The price of one GPU for one hour that no cloud asked in 2026: on demand, a B200 was 14."""
DEAR_IN = ("", "USD", "EUR", "GBP", "CHF")


def price_for(request: Asked | requests.Size, question: Question) -> planner.Price | None:
    """Return the requested price, or that of the cluster file."""
    on = question.cluster
    given = price_per_hour(
        _price_of(request.price, on.gpu.name), request.currency if request.price is not None else None
    )
    if given is not None:
        _note_price_of_node(given, question)
    if given is None and on.price is not None:
        given = price_per_hour(on.price, request.currency or on.currency or None)
    elif given is not None and not given[1]:  # a bare number is in the currency of the cluster file
        given = (given[0], on.currency)
    if given is None and request.currency is not None:
        price_per_hour(None, request.currency)
    return None if given is None else planner.Price(*given)


def _note_price_of_node(given: tuple[float, str], question: Question) -> None:
    """Say that a price is that of one GPU if it is as high as that of a whole instance or node."""
    (price, currency), each = given, question.cluster.gpus_per_node
    is_instance = any(one.field == "instance" for one in question.assumed)
    if each > 1 and price >= DEAR and currency in DEAR_IN:
        node = f"{'an instance' if is_instance else 'a node'} of {each} GPUs"
        own = f"--price {price / each:.4g}{currency}"
        note(f"--price {price:g} is the price of one GPU for one hour; if it is that of {node}, write {own}")


def _price_of(price: float | str | None, gpu: str) -> float | str | None:
    """Return the price of a GPU type: the only one, or that of its own among H100=2.5,A100=1.6."""
    by_type = _by_type(price)
    if not by_type:
        return price
    if gpu not in by_type:
        raise _no_price(price, [gpu])
    return by_type[gpu]


def _by_type(price: float | str | None) -> dict[str, str]:
    """Return the prices of H100=2.5,A100=1.6 by the name of the GPU type; empty for one price."""
    named = prices_by_gpu(price)
    try:
        return {clusters.gpu(name).name: amount for name, amount in named.items()} if named else {}
    except InputError as error:
        fixes = tuple(f"--price {str(price).replace(str(error.value), fix)}" for fix in error.fix)
        raise InputError(error.reason, field="price", value=price, fix=fixes) from None


def _no_price(price: float | str | None, gpus: Sequence[str]) -> InputError:
    fix = f"--price {','.join(f'{name}=PRICE' for name in gpus)}"
    return InputError(f"has no price for {', '.join(gpus)}", field="price", value=price, fix=(fix, "without --price"))


def _in_order(price: float | str | None, gpus: Sequence[str]) -> float | str | None:
    """Return prices listed in the order of several GPU types as H100=2.5,A100=1.6; 1,60 may be a decimal comma."""
    if not isinstance(price, str) or "," not in price or "=" in price or len(gpus) < 2:
        return price
    amounts = [one.strip() for one in price.split(",")]
    if len(amounts) == 2 and not any("." in one for one in amounts):
        return price
    if len(amounts) != len(gpus):
        reason = f"has {len(amounts)} prices for {len(gpus)} GPU types ({', '.join(gpus)})"
        fix = f"--price {','.join(f'{name}=PRICE' for name in gpus)}"
        raise InputError(reason, field="price", value=price, fix=(fix,))
    return ",".join(f"{name}={amount}" for name, amount in zip(gpus, amounts, strict=True))


def prices_for(request: requests.Size, questions: Sequence[Question]) -> tuple[list[planner.Price | None], list[str]]:
    """Return the price of every type, None without one, and a note for those; raise if a price is for none of them."""
    names = [one.cluster.gpu.name for one in questions]
    request = msgspec.structs.replace(request, price=_in_order(request.price, names))
    named = _by_type(request.price)
    priced = msgspec.structs.replace(request, currency=request.currency or _one_currency(request.price, named))
    missing = [name for name in names if named and name not in named]
    if len(missing) == len(names):
        raise _no_price(request.price, missing)
    found = [
        price_for(_without_price(request, one) if name in missing else priced, one)
        for name, one in zip(names, questions, strict=True)
    ]
    unpriced = [name for name, price in zip(names, found, strict=True) if price is None and name in missing]
    fix = ",".join(f"{name}=PRICE" for name in unpriced)
    note = f"--price has none for {', '.join(unpriced)}: without cost; {fix} adds it"
    return found, [note] if unpriced else []


def _one_currency(price: float | str | None, named: Mapping[str, str]) -> str | None:
    """Return the currency of prices by GPU type, which the bare ones among them have too; raise for several."""
    stated = {found[1] for amount in named.values() if (found := price_per_hour(amount)) is not None} - {""}
    if len(stated) > 1:
        reason = f"names {' and '.join(sorted(stated))}: costs are compared in one currency; convert the others"
        listed = ",".join(f"{gpu}=PRICE" for gpu in named)
        raise InputError(reason, field="price", value=price, fix=(f"--price {listed} --currency {min(stated)}",))
    return next(iter(stated), None)


def _without_price(request: requests.Size, question: Question) -> requests.Size:
    """Return the request for a type that --price does not name: the currency then is that of a cluster file's price."""
    currency = None if question.cluster.price is None else request.currency
    return msgspec.structs.replace(request, price=None, currency=currency)
