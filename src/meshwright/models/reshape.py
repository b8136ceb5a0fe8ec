"""Resize a known architecture, for overrides on the command line and tiny models in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.errors import InputError

from .readers.decoder import grouped
from .readers.fields import MAX_LAYERS, MAX_SIZE
from .spec import MLA, Attention, Dense, Ffn, Layer, LinearMixer, Mixer, ModelSpec


class _Change(msgspec.Struct, frozen=True):
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    experts: int | None
    topk: int | None
    ffn_is_expert_width: bool


def reshape(
    spec: ModelSpec,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    ffn: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | None = None,
    experts: int | None = None,
    topk: int | None = None,
) -> ModelSpec:
    """Return the same architecture in other sizes; ambiguous changes are errors.

    layers    keeps the leading layers that differ and truncates or repeats the pattern after them; a pattern that
              does not repeat can be truncated, not extended.
    hidden    is the model width. If heads × head_dim was the width, head_dim follows it; otherwise it stays.
    ffn       is the width of the dense blocks or, in a model without them, of the routed experts.
    heads, kv_heads, head_dim  are those of the softmax attention; Mamba and linear-attention heads stay.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "experts": experts,
        "topk": topk,
    }
    requested = {key: value for key, value in sizes.items() if value is not None}
    if not requested:
        return spec
    _check(spec, requested)
    has_dense = any(isinstance(group.layer.ffn, Dense) for group in spec.groups)
    change = _Change(hidden, ffn, heads, kv_heads, head_dim, experts, topk, ffn_is_expert_width=not has_dense)
    chosen = _depth(spec.layers, layers) if layers else spec.layers
    width = hidden or spec.hidden
    return msgspec.structs.replace(
        spec,
        hidden=width,
        groups=grouped(_layer(layer, spec.hidden, change) for layer in chosen),
        vocab=vocab or spec.vocab,
        final_norm_params=spec.final_norm_params // spec.hidden * width,
        mtp_layer=_layer(spec.mtp_layer, spec.hidden, change) if spec.mtp_layer else None,
        published_total=None,
        published_active=None,
        source=f"{spec.name} with " + ", ".join(f"{key}={value}" for key, value in requested.items()),
    )


def _check(spec: ModelSpec, requested: dict[str, int]) -> None:
    for key, value in requested.items():
        most = MAX_LAYERS if key == "layers" else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(f"must be an integer from 1 to {most}", field=key, value=value)
    mixers = [group.layer.mixer for group in spec.groups]
    if spec.kind == "diffusion":
        _only(
            requested, ("layers",), "only layers can change in a diffusion model; its other sizes depend on each other"
        )
        if len(spec.groups) > 1:
            raise InputError(
                f"{spec.name} has two types of layers, so layers={requested['layers']} is ambiguous",
                "layers",
                requested["layers"],
            )
    if spec.vision and "hidden" in requested:
        raise InputError("the vision encoder needs the original width", field="hidden", value=requested["hidden"])
    if spec.learned_positions and "head_dim" in requested:
        raise InputError(
            "head_dim is hidden / heads in this architecture; change those", "head_dim", requested["head_dim"]
        )
    if "hidden" in requested and any(isinstance(mixer, LinearMixer) for mixer in mixers):
        reason = f"the linear mixers of {spec.name} depend on the width; change hidden_size in config.json instead"
        raise InputError(reason, field="hidden", value=requested["hidden"])
    for key in ("experts", "topk"):
        if key in requested and spec.moe is None:
            raise InputError(f"{spec.name} has no experts", field=key, value=requested[key])
    for key in ("kv_heads", "head_dim"):
        if key in requested and not any(isinstance(mixer, Attention) for mixer in mixers):
            raise InputError(f"{spec.name} has no softmax attention", field=key, value=requested[key])


def _only(requested: dict[str, int], allowed: tuple[str, ...], reason: str) -> None:
    for key, value in requested.items():
        if key not in allowed:
            raise InputError(reason, field=key, value=value)


def _depth(layers: tuple[Layer, ...], count: int) -> tuple[Layer, ...]:
    """Return the leading layers and then the repeating pattern, up to the requested count."""
    lead, period = _pattern(layers)
    if period is None:
        if count > len(layers):
            raise InputError(
                f"the {len(layers)} layers have no repeating pattern, so they cannot be extended",
                field="layers",
                value=count,
            )
        return layers[:count]
    if count <= lead:
        raise InputError(
            f"the first {lead} layers differ from the rest, so at least {lead + 1} are needed", "layers", count
        )
    repeated = layers[lead : lead + period]
    return layers[:lead] + tuple(repeated[place % period] for place in range(count - lead))


def _pattern(layers: Sequence[Layer]) -> tuple[int, int | None]:
    """Return the shortest lead and period that reproduce all layers, with at least two periods."""
    total = len(layers)
    for size in range(1, total // 2 + 1):
        for period in range(size, 0, -1):
            lead = size - period
            if total - lead >= 2 * period and _repeats(layers, lead, period):
                return lead, period
    return (0, 1) if total == 1 else (0, None)


def _repeats(layers: Sequence[Layer], lead: int, period: int) -> bool:
    return all(layers[place] == layers[place - period] for place in range(lead + period, len(layers)))


def _layer(layer: Layer, old_hidden: int, change: _Change) -> Layer:
    width = change.hidden or old_hidden
    return msgspec.structs.replace(
        layer,
        mixer=_mixer(layer.mixer, old_hidden, change) if layer.mixer else None,
        ffn=_ffn(layer.ffn, change) if layer.ffn else None,
        norm_params=layer.norm_params // old_hidden * width,
    )


def _mixer(mixer: Mixer, old_hidden: int, change: _Change) -> Mixer:
    if isinstance(mixer, MLA):
        return msgspec.structs.replace(mixer, heads=change.heads or mixer.heads)
    if not isinstance(mixer, Attention):
        return mixer
    hidden, heads = change.hidden or old_hidden, change.heads or mixer.heads
    kv_heads = change.kv_heads or (heads if mixer.kv_heads == mixer.heads else mixer.kv_heads)
    if heads % kv_heads:
        works = {"heads": _multiple(heads, kv_heads), "kv_heads": _divisor(kv_heads, heads)}
        reason = f"heads={heads} is not divisible by kv_heads={kv_heads}"
        raise InputError(reason, field="kv_heads", value=kv_heads, fix=_typed_fixes(change, works))
    head_dim = change.head_dim or mixer.head_dim
    if change.head_dim is None and mixer.q_width == old_hidden:
        if hidden % heads:
            works = {"hidden": _multiple(hidden, 2 * heads), "heads": _divisor(heads, hidden)}
            reason = f"hidden={hidden} is not divisible by heads={heads}"
            raise InputError(reason, field="heads", value=heads, fix=_typed_fixes(change, works))
        head_dim = hidden // heads
    return msgspec.structs.replace(mixer, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def _multiple(size: int, of: int) -> int:
    return max(1, round(size / of)) * of


def _divisor(size: int, of: int) -> int:
    return next(one for one in range(min(size, of), 0, -1) if of % one == 0)


def _typed_fixes(change: _Change, works: Mapping[str, int]) -> tuple[str, ...]:
    """Return the sizes that work as overrides, of those that were typed."""
    return tuple(f"architecture.{name}={size}" for name, size in works.items() if getattr(change, name) is not None)


def _ffn(ffn: Ffn, change: _Change) -> Ffn:
    if isinstance(ffn, Dense):
        return msgspec.structs.replace(ffn, width=change.ffn or ffn.width)
    experts, topk = change.experts or ffn.experts, change.topk or ffn.topk
    if topk > experts:
        raise InputError(f"topk={topk} is larger than the {experts} experts", field="topk", value=topk)
    width = change.ffn if change.ffn and change.ffn_is_expert_width else ffn.width
    return msgspec.structs.replace(ffn, experts=experts, topk=topk, width=width)
