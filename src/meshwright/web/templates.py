"""Templates, and how they format numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meshwright.api.inputs import TEXT_BYTES
from meshwright.api.terms import meanings
from meshwright.choices import ENGINES, FORMATS, GOALS
from meshwright.display import amount, duration, gpu_hours
from meshwright.web import presenters
from meshwright.web.assets import asset_url
from meshwright.web.explained_terms import explained, term_link

GLOSSARY = "glossary.html"
NUMBER = Markup('<data value="{}" data-of="{}">{}</data>')


@cache
def environment() -> Environment:
    """Return the environment: every value is escaped, and an unknown name is an error."""
    loaded = Environment(
        loader=PackageLoader("meshwright.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loaded.filters.update(short=presenters.shortened, seconds=presenters.seconds, pct=percent, gib=gib)
    loaded.filters.update(duration=duration, amount=amount, gpu_hours=gpu_hours)
    loaded.globals.update(asset=asset_url, num=number, step_labels=presenters.STEP_PARTS, text_bytes=TEXT_BYTES)
    loaded.globals.update(tiles_of=presenters.tiles, meanings=meanings(), term=term_link)
    loaded.globals.update(goals=GOALS, engines=ENGINES, formats=FORMATS, severities=presenters.SEVERITIES)
    loaded.tests["number"] = lambda value: isinstance(value, int | float)
    return loaded


def render(template: str, **shown: Any) -> str:
    """Return a page as text; its terms are explained where they stand."""
    text = environment().get_template(template).render(**shown)
    return text if template == GLOSSARY else explained(text)


def number(value: float, text: str, of: str) -> Markup:
    """Return a number as shown, with its exact value and its field in the response."""
    return NUMBER.format(repr(value), of, text)


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent."""
    return f"{100 * share:.{digits}f} %"


def gib(value: float) -> str:
    """Return memory as shown."""
    return f"{value:.1f}"
