"""Image names as the container tools of SLURM read them."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.job import ContainerKind

SCHEME = "docker://"
APPTAINER_FILES = (".sif", ".simg")  # images that only apptainer starts: enroot, which pyxis uses, reads SquashFS
FILES = (".sqsh", ".squashfs", ".img", *APPTAINER_FILES)  # images that are files


def kind_for(image: str, given: ContainerKind | None) -> ContainerKind:
    """Return what starts an image: pyxis, if nothing else was asked for and it can."""
    if not image.endswith(APPTAINER_FILES):
        return given or "pyxis"
    if given == "pyxis":
        suffix = Path(image).suffix
        reason = (
            f"starts SquashFS images and those of a registry, and {image} is a {suffix} file, which apptainer starts"
        )
        fix = ("--container-kind apptainer", f"--image {image.removesuffix(suffix)}.sqsh")
        raise InputError(reason, field="--container-kind", value=given, fix=fix)
    return "apptainer"


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
