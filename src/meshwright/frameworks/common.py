"""What several frameworks do alike: GPUs of a launcher, values with their defaults, ranges, TOML spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from msgspec import UNSET

from meshwright.clusters import Cluster
from meshwright.frameworks.framework import FrameworkRule, GpuRequest, Problem, RuleContext
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import config_keys

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

INFINITE = float("inf")


def gpu_request_of(one: LaunchCommand) -> GpuRequest:
    """The GPUs that a launcher asks for."""
    return GpuRequest(
        nodes=as_int(one.nodes),
        gpus_per_node=as_int(one.gpus_per_node),
        gpu=one.gpu,
        source=one.gpus_per_node or one.nodes,
    )


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, which Python's truths are too."""
    return isinstance(value, int) and not isinstance(value, bool)


def torchrun(on: Cluster, head: str = "HEAD_NODE") -> list[str]:
    """torchrun with its options for a cluster, up to the program."""
    words = ["torchrun", f"--nproc-per-node={on.gpus_per_node}"]
    if on.nodes > 1:
        words += [f"--nnodes={on.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500"]
    return words


def as_int(said: SourcedValue | None) -> int | None:
    """The whole number that was said, when it is one and is known."""
    if said is None or said.unresolved or isinstance(said.value, bool):
        return None
    text = str(said.value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


def value_or_default(table: str, settings: Settings, key: str) -> Any:
    """The value of a key, or their default where it is unsaid, open or of another kind."""
    word = config_keys(table).get(key)
    default = None if word is None or word.default is UNSET else word.default
    said = settings.get(key)
    if said is None or said.unresolved:
        return default
    if isinstance(default, bool):
        return said.value if isinstance(said.value, bool) else default
    if isinstance(default, int | float):
        return said.value if isinstance(said.value, int | float) and not isinstance(said.value, bool) else default
    return said.value


def format_toml(key: str, value: Any) -> str:
    """One setting as a line of TOML."""
    if value is None:
        return f"without {key}"
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    if isinstance(value, tuple | list):
        return f"{key} = [{', '.join(_toml_text(one) for one in value)}]"
    return f"{key} = {_toml_text(value)}"


def _toml_text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


Ranges = Mapping[str, tuple[float, float, bool]]
"""By their key: least, most, and whether the least itself is refused."""


def range_rule(framework: str, ranges: Ranges, spell: Callable[[str, Any], str], symptom: str) -> FrameworkRule:
    """The rule that numbers lie where the framework's own sections accept them."""

    def broken(ctx: RuleContext) -> Iterator[Problem]:
        for key, (least, most, above) in ranges.items():
            found = ctx.get(key)
            if not ctx.is_set(key) or isinstance(found, bool) or not isinstance(found, int | float):
                continue
            if not least <= found <= most or (above and found == least):
                wanted = f"above {least:g}" if above else f"at least {least:g}"
                wanted += f" and at most {most:g}" if most != INFINITE else ""
                word = config_keys(ctx.framework.key_map)[key]
                fix = () if word.default in (UNSET, None) else (spell(key, word.default),)
                yield Problem(f"{key}={found} must be {wanted}", fix, key=key)

    return FrameworkRule(
        f"{framework}.out-of-range",
        "error",
        tuple(ranges),
        broken,
        symptom=symptom,
        cause="each section checks its own numbers while it is read",
    )
