"""The config.json of hub models that an HTTP request names, read by the server that was started with --hub.

The process that answers may open no file and reach no host, so the server sends the text with the request.
"""

from __future__ import annotations

from contextlib import suppress

from meshwright import hub, models
from meshwright.api.inputs import Request, fields_of
from meshwright.errors import InputError


def hub_texts(request: Request) -> dict[str, str]:
    """Return the config.json of every hub model outside the catalogue that a request names, by the name of its text."""
    found: dict[str, str] = {}
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        if field.input.complete not in ("models", "targets") or not isinstance(value, str):
            continue
        model_id = models.without_hub_url(value.strip())
        with suppress(InputError, OSError, ValueError):  # the answer says that it is unknown
            path = models.hub_config(model_id)
            if path is not None and path.stat().st_size <= models.MAX_CONFIG_BYTES:
                found[hub.text_name(model_id)] = path.read_text("utf-8-sig")
    return found
