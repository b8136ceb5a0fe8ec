"""Patches of other libraries' modules: named mixins that show in `repr(model)` and in tracebacks.

A patch is a subclass of `Patch` with a short tag. `apply(module, TensorParallel)` puts the patch in front of the
module's class, which becomes for example `LlamaAttention[LoRA, TP]` (first applied first). Combined classes are cached:
all layers share one class, so that torch.compile builds one graph per type of layer, and no call goes through a wrapper
module or a hook. `isinstance` with the original class or with a patch works as usual, `fully_shard` puts its own class
on top, and `patches(model)` lists what was applied where.

`symbol` returns what we use of another library's internals, and fails loudly when an upgrade has removed it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.errors import MeshwrightError
from meshwright.extras import not_installed

PARTS = "patched_parts"  # attribute of a combined class: (base class, patches)
# The oldest version of each library that we support, as in pyproject.toml; the symbols below exist in these.
SUPPORTED = {"transformers": "5.17", "diffusers": "0.42"}

if TYPE_CHECKING:
    from torch import nn

    _Module = nn.Module  # so that `super().forward` has a type
else:
    _Module = object  # a mixin: the module's own class brings nn.Module


Parts = tuple[Any, tuple[type["Patch"], ...]]


class Patch(_Module):
    """Base class of all patches: overrides methods of the modules it is applied to and reaches theirs by `super()`."""

    tag: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        # Tracebacks show a code object's name: "in TensorParallel.forward" instead of one more "in forward".
        for function in vars(cls).values():
            if isinstance(function, FunctionType):
                function.__code__ = function.__code__.replace(co_name=function.__qualname__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the parts of the class: a combined class cannot be imported by its name."""
        parts = vars(type(self)).get(PARTS)
        if parts is None:  # fully_shard put another class on top
            return super().__reduce_ex__(protocol)
        return _new, parts, self.__getstate__()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def apply(module: nn.Module, patch: type[Patch], under: type[Patch] | None = None) -> None:
    """Put a patch in front of the module's class; below another patch if the module has that one."""
    base, applied = _parts(type(module))
    if patch in applied:
        raise ValueError(f"{type(module).__name__} already has the patch {patch.tag}")
    at = next((i for i, other in enumerate(applied) if under is not None and issubclass(other, under)), len(applied))
    module.__class__ = _combined(base, (*applied[:at], patch, *applied[at:]))


def patches(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the tags of the patches of every patched module by its path, first applied first."""
    found = ((path, tuple(patch.tag for patch in _applied(type(module)))) for path, module in model.named_modules())
    return {path: tags for path, tags in found if tags}


def base_class(module: nn.Module) -> type[nn.Module]:
    """Return the class a module had before it was patched."""
    cls = type(module)
    while (parts := getattr(cls, PARTS, None)) is not None:
        cls = parts[0]
    return cls


def symbol(module: str, name: str) -> Any:
    """Return an attribute of a module of another library; raise an error that names both if it is gone."""
    library = module.partition(".")[0]
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise not_installed(f"the {library} library", "model", library) from None
        oldest = SUPPORTED[library]
        raise MeshwrightError(
            f"{library} {version(library)} has no {module}.{name}, which the engine patches or calls; "
            f"the engine is written for {library} {oldest}",
            field=library,
            value=version(library),
            fix=(f'pip install "{library}=={oldest}.*"',),
        ) from error


def _parts(cls: type[nn.Module]) -> Parts:
    parts: Parts = vars(cls).get(PARTS, (cls, ()))
    return parts


def _applied(cls: type[nn.Module]) -> list[type[Patch]]:
    """All patches of a class, also those below a class that FSDP put on top."""
    return [patch for one in reversed(cls.__mro__) for patch in vars(one).get(PARTS, (None, ()))[1]]


@cache
def _combined(base: Any, applied: tuple[type[Patch], ...]) -> Any:
    tags = ", ".join(patch.tag for patch in applied)
    members = {
        "__module__": base.__module__,  # torch.compile guards modules of torch.nn by it
        "__qualname__": f"{base.__qualname__}[{tags}]",
        "__doc__": base.__doc__,
        PARTS: (base, applied),
    }
    return type(f"{base.__name__}[{tags}]", (*reversed(applied), base), members)


def _new(base: Any, applied: tuple[type[Patch], ...]) -> nn.Module:
    cls = _combined(base, applied)
    module: nn.Module = cls.__new__(cls)
    return module
