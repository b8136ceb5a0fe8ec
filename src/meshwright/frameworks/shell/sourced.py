"""The files that a script sources."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.frameworks.shell.values import LARGEST_FILE, LARGEST_TOTAL, Field, bad

DEEPEST = 8
MACHINE = ("/proc", "/sys", "/dev")  # reading there may block or never end
# $(dirname "$0") and $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd): the folder of the script itself.
OWN_FOLDER = re.compile(
    r"\$\( *(?:cd (?:-P |-- )?\"?\$\( *)?dirname (?:-- )?\"?(?:\$\( *(?:readlink -f|realpath) \"?)?"
    r"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)(?::-\$0)?\}?\"?\)?\"?\)?\"? *(?:(?:&>|>) */dev/null(?: 2>&1)?)? *"
    r"(?:&& pwd(?: -P)?)? *\)?"
)


class Unreadable(Exception):  # noqa: N818  not a user's error: the sourced file is said to be unresolved
    """Why a sourced file is not read."""


class Sourced:
    """Which files are being read inside each other, and how much was read."""

    def __init__(self, where: str, folder: Path | None, read: int) -> None:
        self.folder, self.read = folder, read
        self.chain: list[tuple[str, Path | None]] = [(where, None if folder is None else folder / Path(where).name)]

    def path(self, name: Field) -> Path:
        """The path that the word behind source means."""
        if self.folder is None:
            raise Unreadable("the folder of the script is not known")
        text = name.text
        if name.why:
            first = name.pieces[0]
            own = self.chain[-1][1]
            known_rest = first.why and not any(piece.why for piece in name.pieces[1:])
            if not known_rest or own is None or not OWN_FOLDER.fullmatch(first.text):
                raise Unreadable(f"its name is not known: {name.why}")
            return Path(str(own.parent) + text[len(first.text) :])
        return self.folder / text

    def open(self, name: Field, line: int, file: str) -> tuple[str, str]:
        """The text of a sourced file and the name a user has for it; close() must follow."""
        path = self.path(name)
        try:
            real = path.resolve()
            if not real.is_file() or str(real).startswith(MACHINE):
                raise Unreadable("there is no such file")
            with real.open("rb") as opened:
                content = opened.read(LARGEST_FILE + 1)
        except (OSError, ValueError, RuntimeError) as error:
            raise Unreadable("it cannot be opened") from error
        if len(content) > LARGEST_FILE:
            raise Unreadable(f"it is larger than {LARGEST_FILE} bytes")
        shown = self._shown(path)
        self._refuse_cycle(real, shown, line, file)
        self.read += len(content)
        if self.read > LARGEST_TOTAL:
            raise bad(file, line, f"the script and what it sources are larger than {LARGEST_TOTAL} bytes")
        if b"\0" in content:
            raise Unreadable("it is no text")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Unreadable("it is no UTF-8 text") from error
        self.chain.append((shown, real))
        return text, shown

    def _shown(self, path: Path) -> str:
        beside = Path(self.chain[0][0]).parent
        if self.folder is not None and path.is_relative_to(self.folder):
            return str(beside / path.relative_to(self.folder))
        return str(path)

    def _refuse_cycle(self, real: Path, shown: str, line: int, file: str) -> None:
        names = [name for name, _ in self.chain]
        open_now = [None if path is None else path.resolve() for _, path in self.chain]
        if real in open_now:
            raise bad(file, line, f"files source each other: {' → '.join([*names, shown])}")
        if len(self.chain) > DEEPEST:
            raise bad(file, line, f"more than {DEEPEST} files source each other: {' → '.join([*names, shown])}")

    def is_beside(self) -> bool:
        """Whether the file being read belongs to the script, rather than to the machine."""
        path = self.chain[-1][1]
        return path is not None and self.folder is not None and path.is_relative_to(self.folder.resolve())

    def close(self) -> None:
        self.chain.pop()
