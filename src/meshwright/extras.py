"""Optional dependencies: the extra that has a package, and the error if it is missing or too old."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from meshwright.errors import InputError, first_line

NAME = "meshwright"
# As in pyproject.toml (a test compares them): reading the metadata would cost milliseconds in every command.
EXTRAS = {
    "train": (
        *("torch>=2.11", "transformers>=5.17", "peft>=0.18", "safetensors>=0.5", "datasets>=4.0", "torchao>=0.14"),
        *("pillow>=10", "tensorboard>=2.18"),
    ),
    "diffusion": ("diffusers>=0.42",),
    "megatron_fsdp": ("megatron-fsdp>=0.6",),
    "kernels": ("fla-core>=0.6",),
    "web": ("fastapi>=0.115", "uvicorn>=0.32", "jinja2>=3.1"),
    "mcp": ("mcp>=2.3,<3", "uvicorn>=0.32"),
    "plot": ("matplotlib>=3.9",),
    "track": ("wandb>=0.19", "mlflow-skinny>=3.0"),
}
MODULES = {
    "pillow": "PIL",
    "megatron-fsdp": "megatron_fsdp",
    "fla-core": "fla",
    "mlflow-skinny": "mlflow",
}  # where the import differs from the package
PARTS = {"tokenizers": "transformers", "huggingface_hub": "transformers", "pyarrow": "datasets", "mcp_types": "mcp"}
"""Packages that another one brings along."""
ENGINE = ("torch", "transformers", "safetensors")
"""What every command of the engine imports."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)(.*)")


class MissingPackageError(InputError):
    """A feature needs a package that is not installed, or a newer version of it."""


def require(feature: str, *packages: str) -> None:
    """Raise MissingPackageError, with the install command, unless every package is there and new enough."""
    found = {package: _problem(package) for package in packages}
    missing = [package for package, problem in found.items() if problem == MISSING]
    problems = [problem for problem in found.values() if problem and problem != MISSING]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        problems.insert(0, f"{_joined(missing)}, which {verb} not installed")
    if problems:
        raise _error(feature, "; ".join(problems), [name for name, problem in found.items() if problem])


def missing(package: str) -> str:
    """Return what is wrong with a package that could be used, and the install command; empty if nothing is."""
    problem = _problem(package)
    reason = f"{package} is not installed" if problem == MISSING else f"it needs {problem}"
    return f"{reason}; run: {install_command(package)}" if problem else ""


def not_installed(what: str, field: str, package: str) -> MissingPackageError:
    """Return the error for one package that is missing, in the words of the feature that needs it."""
    return _error(field, f"{what}, which is not installed", [PARTS.get(package, package)])


def explain(error: ImportError, feature: str) -> MissingPackageError | None:
    """Return the error for an import that failed; None if it is not about an optional dependency."""
    top = (error.name or "").partition(".")[0]
    modules = {MODULES.get(package, package): package for package in _specifiers()}
    package = modules.get(PARTS.get(top, top))
    if package is None:
        return None
    problem = _problem(package)
    if problem == MISSING or not _importable(top):
        problem = f"{top if top in PARTS else package}, which is not installed"
    elif not problem:
        problem = f"{package}, which is installed but cannot be imported: {first_line(error)}"
    return _error(feature, problem, [package])


def install_command(*packages: str) -> str:
    """Return the command that installs the extras of these packages into this environment."""
    extras = [extra for extra, requirements in EXTRAS.items() if any(_name(r) in packages for r in requirements)]
    wanted = f"[{','.join(_fewest(extras, packages))}]"
    root = Path(__file__).parents[2]
    from importlib import metadata  # 15 ms, needed only if something is missing

    try:
        metadata.distribution(NAME)
        target = f'"{NAME}{wanted}"'  # pip takes the installed distribution and adds what is missing
    except metadata.PackageNotFoundError:
        if not (root / "pyproject.toml").is_file():
            return _pip() + " ".join(f'"{name}{_specifiers()[name]}"' for name in packages)
        target = f'-e "{root}{wanted}"'
    if not _importable("pip"):  # an environment made by uv, which resolves from the index only
        return f"uv pip install --python {sys.executable} " + " ".join(f'"{n}{_specifiers()[n]}"' for n in packages)
    return _pip() + target


MISSING = "missing"


def _problem(package: str) -> str:
    """Return what is wrong with a package; empty if it can be used."""
    if not _importable(MODULES.get(package, package)):
        return MISSING
    version, specifier = _installed_version(package), _specifiers()[package]
    if not version or _satisfies(version, specifier):
        return ""
    return f"{package}{specifier}; {version} is installed"


@cache
def _installed_version(package: str) -> str:
    """Return the version of a package; empty if it was built from source. Its metadata takes milliseconds to read."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or sys.modules has None
        return False


def _satisfies(version: str, specifier: str) -> bool:
    """Return whether a version is within >= and < limits."""
    have = version_numbers(version)
    for limit in filter(None, specifier.split(",")):
        bound = version_numbers(limit.lstrip("<>="))
        if (have < bound) if limit.startswith(">=") else (have >= bound):
            return False
    return True


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (3, 7, 1) of "3.7.1+git"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _error(feature: str, problem: str, packages: Sequence[str]) -> MissingPackageError:
    command = install_command(*packages)
    return MissingPackageError(f"needs {problem}; run: {command}", field=feature, fix=(command,))


def _pip() -> str:
    """Return pip of this environment: `pip` if that is the one the shell finds."""
    from shutil import which

    found = which("pip")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip install " if here else f"{sys.executable} -m pip install "


def _fewest(extras: Sequence[str], packages: Sequence[str]) -> list[str]:
    """Return the extras without those whose packages another one has too (uvicorn is in web and in mcp)."""
    needed = {extra: {_name(r) for r in EXTRAS[extra]} & set(packages) for extra in extras}
    return [e for e in extras if not any(needed[e] < needed[o] for o in extras)]


def _specifiers() -> dict[str, str]:
    return {_name(r): _matched(r)[2] for requirements in EXTRAS.values() for r in requirements}


def _name(requirement: str) -> str:
    return _matched(requirement)[1]


def _matched(requirement: str) -> re.Match[str]:
    found = _REQUIREMENT.fullmatch(requirement)
    assert found is not None, requirement
    return found


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
