"""Write the table of Megatron-DeepSpeed's flags from the argument parsers of its two repositories.

PYTHONPATH=src:. python -m benchmarks.megatron_deepspeed_flags --microsoft CHECKOUT --bigscience CHECKOUT

Nothing of a checkout is imported or run. --microsoft-commit and --bigscience-commit name a commit without .git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.megatron_flags import Source, flags_added

TABLE = Path(__file__).parents[1] / "src/meshwright/frameworks/megatron_deepspeed/flags.tsv"
REPOSITORIES = {"microsoft": "deepspeedai/Megatron-DeepSpeed", "bigscience": "bigscience-workshop/Megatron-DeepSpeed"}
ARGUMENTS = "megatron/arguments.py"
PROGRAMS = ("pretrain_*.py", "finetune_*.py")
OF_DEEPSPEED = (("deepspeed", "flag", ""), ("deepspeed_config", "str", ""), ("deepscale", "flag", ""),
                ("deepscale_config", "str", ""))  # fmt: skip
"""Flags that deepspeed.add_config_arguments adds, listed by hand from deepspeed/__init__.py."""
Row = tuple[str, str, str]


def rows(root: Path) -> Iterator[Row]:
    """Yield flag as it is written, type and choices of every argument that a checkout's training programs accept."""
    source = Source(root)
    files = [ARGUMENTS, *(str(one.relative_to(root)) for each in PROGRAMS for one in sorted(root.glob(each)))]
    for path in files:
        for node in ast.walk(source.module(path)):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
                continue
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            written = [one for one in names if isinstance(one, str) and one.startswith("--")]
            for name, flag in zip(written, flags_added(source, node), strict=True):
                yield name[2:], flag.type, " ".join(flag.choices)


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, repository in REPOSITORIES.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"checkout of {repository}")
        parser.add_argument(f"--{name}-commit", default="", help="its commit, if it has no .git")
    options = vars(parser.parse_args(argv))
    found: dict[Row, list[str]] = {row: [*REPOSITORIES] for row in OF_DEEPSPEED}
    commits = []
    for name, repository in REPOSITORIES.items():
        commits.append(f"{repository} {options[f'{name}_commit'] or _commit(options[name])}")
        for row in rows(options[name]):
            places = found.setdefault(row, [])
            if name not in places:
                places.append(name)
    lines = [f"# {', '.join(commits)}, by benchmarks/megatron_deepspeed_flags.py", "flag\ttype\tchoices\trepositories"]
    lines += ["\t".join((*row, " ".join(places))) for row, places in sorted(found.items())]
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 2} rows in {TABLE.name}")


if __name__ == "__main__":
    main()
