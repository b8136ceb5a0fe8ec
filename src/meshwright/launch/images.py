"""Image names as the container tools of SLURM read them."""

from __future__ import annotations

from pathlib import Path

from meshwright.launch.job import ContainerKind

SCHEME = "docker://"
FILES = (".sqsh", ".squashfs", ".sif", ".simg", ".img")  # images that are files


def for_container(image: str, kind: ContainerKind) -> str:
    """Return an image as pyxis or apptainer reads it: a file by its full path, or a name with its registry marked.

    enroot, which pyxis uses, looks for REGISTRY/NAME on Docker Hub; it reads REGISTRY#NAME. apptainer takes a name
    without docker:// for a file.
    """
    if image.startswith(("/", ".", "~")) or image.endswith(FILES):
        return str(Path(image).expanduser().resolve())
    if "://" in image and not image.startswith(SCHEME):
        return image
    name = image.removeprefix(SCHEME)
    if kind == "apptainer":
        return f"{SCHEME}{name.replace('#', '/', 1)}"
    registry, slash, rest = name.partition("/")
    has_registry = bool(slash) and ("." in registry or ":" in registry or registry == "localhost") and "#" not in name
    return f"{SCHEME if name != image else ''}{f'{registry}#{rest}' if has_registry else name}"
