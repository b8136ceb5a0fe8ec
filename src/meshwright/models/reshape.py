"""Other sizes of a known architecture: for overrides on the command line and for tiny models in tests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError

from .readers.decoder import grouped
from .readers.fields import MAX_LAYERS, MAX_SIZE
from .spec import MLA, Attention, Dense, Ffn, Layer, Mixer, ModelSpec


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
    """The same architecture in other sizes; what is not given stays, and what would be a guess is an error.

    layers    keeps the leading layers that differ and cuts or repeats the pattern after them; a pattern that does not
              repeat can be cut, not extended.
    hidden    is the model width. Where heads × head_dim was the width, head_dim follows it; elsewhere it stays.
    ffn       is the width of the dense blocks or, in a model that has none, of the routed experts.
    heads, kv_heads, head_dim  are those of the softmax attention; Mamba and linear-attention heads stay.
    """
    given = {
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
    asked = {key: value for key, value in given.items() if value is not None}
    if not asked:
        return spec
    _check(spec, asked)
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
        source=f"{spec.name} with " + ", ".join(f"{key}={value}" for key, value in asked.items()),
    )


def _check(spec: ModelSpec, asked: dict[str, int]) -> None:
    for key, value in asked.items():
        most = MAX_LAYERS if key == "layers" else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(f"must be a whole number from 1 to {most}", field=key, value=value)
    mixers = [group.layer.mixer for group in spec.groups]
    if spec.kind == "diffusion":
        _only(asked, ("layers",), "in a diffusion model the other sizes follow from each other and from its embedders")
        if len(spec.groups) > 1:
            raise InputError(f"{spec.name} has two kinds of layers; which of them is meant?", "layers", asked["layers"])
    if spec.vision and "hidden" in asked:
        raise InputError("the vision tower is built for the width it has", field="hidden", value=asked["hidden"])
    if spec.learned_positions and "head_dim" in asked:
        raise InputError("follows from hidden and heads in this architecture", "head_dim", asked["head_dim"])
    for key in ("experts", "topk"):
        if key in asked and spec.moe is None:
            raise InputError(f"{spec.name} has no experts", field=key, value=asked[key])
    for key in ("kv_heads", "head_dim"):
        if key in asked and not any(isinstance(mixer, Attention) for mixer in mixers):
            raise InputError(f"{spec.name} has no attention of that kind", field=key, value=asked[key])


def _only(asked: dict[str, int], allowed: tuple[str, ...], reason: str) -> None:
    for key, value in asked.items():
        if key not in allowed:
            raise InputError(reason, field=key, value=value)


def _depth(layers: tuple[Layer, ...], count: int) -> tuple[Layer, ...]:
    """The first layers and then the repeating pattern, to the asked number of layers."""
    lead, period = _pattern(layers)
    if period is None:
        if count > len(layers):
            raise InputError(
                f"the {len(layers)} layers follow no repeating pattern to extend", field="layers", value=count
            )
        return layers[:count]
    if count <= lead:
        raise InputError(f"the first {lead} layers differ from the rest: at least {lead + 1}", "layers", count)
    repeated = layers[lead : lead + period]
    return layers[:lead] + tuple(repeated[place % period] for place in range(count - lead))


def _pattern(layers: Sequence[Layer]) -> tuple[int, int | None]:
    """The shortest lead and period that explain all layers, the period being seen at least twice."""
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
        raise InputError(f"heads={heads} is not divisible by kv_heads={kv_heads}", field="kv_heads", value=kv_heads)
    head_dim = change.head_dim or mixer.head_dim
    if change.head_dim is None and mixer.q_width == old_hidden:
        if hidden % heads:
            raise InputError(f"hidden={hidden} is not divisible by heads={heads}", field="heads", value=heads)
        head_dim = hidden // heads
    return msgspec.structs.replace(mixer, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def _ffn(ffn: Ffn, change: _Change) -> Ffn:
    if isinstance(ffn, Dense):
        return msgspec.structs.replace(ffn, width=change.ffn or ffn.width)
    experts, topk = change.experts or ffn.experts, change.topk or ffn.topk
    if topk > experts:
        raise InputError(f"each token cannot use {topk} of {experts} experts", field="topk", value=topk)
    width = change.ffn if change.ffn and change.ffn_is_expert_width else ffn.width
    return msgspec.structs.replace(ffn, experts=experts, topk=topk, width=width)
