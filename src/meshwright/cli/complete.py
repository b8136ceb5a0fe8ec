"""What the shell offers when the user presses tab."""

from __future__ import annotations


def models(incomplete: str) -> list[str]:
    """Catalogue names."""
    from meshwright import api

    return [m for m in api.model_names() if m.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Recipe names."""
    from meshwright import api

    return [r for r in api.recipe_names() if r.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """One usual node of every GPU type."""
    from meshwright import api

    return [text for g in api.gpu_catalogue() if (text := f"{g.gpus_per_node}x{g.name}").startswith(incomplete)]


def goals(incomplete: str) -> list[str]:
    """The three goals."""
    from meshwright import api

    return [g for g in api.GOALS if g.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """The engines a plan can be made for."""
    from meshwright import api

    return [e for e in api.ENGINES if e.startswith(incomplete)]
