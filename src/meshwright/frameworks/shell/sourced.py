"""Files that a script sources."""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path

from meshwright.errors import some
from meshwright.frameworks.script_folders import find_file, find_fitting, is_file
from meshwright.frameworks.shell.values import MAX_FILE_BYTES, MAX_TOTAL_BYTES, Field, script_error

MAX_DEPTH = 8
MACHINE = ("/proc", "/sys", "/dev")  # reading these may block or never end
# $(dirname "$0") and $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd): the script's own directory.
OWN_FOLDER = re.compile(
    r"\$\( *(?:cd (?:-P |-- )?\"?\$\( *)?dirname (?:-- )?\"?(?:\$\( *(?:readlink -f|realpath) \"?)?"
    r"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)(?::-\$0)?\}?\"?\)?\"?\)?\"? *(?:(?:&>|>) */dev/null(?: 2>&1)?)? *"
    r"(?:&& pwd(?: -P)?)? *\)?"
)


class Unreadable(Exception):  # noqa: N818  control flow, not a user error: the sourced file is reported as unresolved
    """A sourced file cannot be read; the message says why."""


class Sourced:
    """The stack of open sourced files and the number of bytes read."""

    def __init__(self, where: str, folder: Path | None, read: int) -> None:
        self.folder, self.read = folder, read
        self.texts: list[str] = []  # of the files that were read
        self.choices: list[str] = []  # files that a name with an unknown part fits
        self.chain: list[tuple[str, Path | None]] = [(where, None if folder is None else folder / Path(where).name)]

    def path(self, name: Field) -> Path:
        """Return the path of a sourced file."""
        if self.folder is None:
            raise Unreadable("the directory of the script is unknown")
        if not name.unresolved:
            return find_file(self.folder, name.text)
        first, current = name.pieces[0], self.chain[-1][1]
        is_own = current is not None and bool(OWN_FOLDER.fullmatch(first.text))
        beside = current.parent if current is not None and is_own else self.folder
        pattern = "".join("*" if one.unresolved else escape(one.text) for one in name.pieces)
        parts = re.sub(r"\*+", "*", pattern).strip("/").split("/")
        if parts[0] == "*" and len(parts) > 1:  # a folder that only the job knows is taken for the script's own
            found = sorted(path for path in beside.glob("/".join(parts[1:])) if is_file(path))
        else:
            found = find_fitting(self.folder, parts)
        if len(found) > 1:
            self.choices += [str(path) for path in found if str(path) not in self.choices]
            listed = some([path.name for path in found], 3)
            raise Unreadable(f"its name is unknown: {name.unresolved}; it may be {listed}")
        if not found:
            raise Unreadable(f"its name is unknown: {name.unresolved}")
        return found[0]

    def open(self, name: Field, line: int, file: str) -> tuple[str, str]:
        """Return the text of a sourced file and its display name; call close() afterwards."""
        path = self.path(name)
        try:
            real = path.resolve()
            if not real.is_file() or str(real).startswith(MACHINE):
                raise Unreadable("file not found")
            with real.open("rb") as opened:
                content = opened.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError, RuntimeError) as error:
            raise Unreadable("it cannot be opened") from error
        if len(content) > MAX_FILE_BYTES:
            raise Unreadable(f"it is larger than {MAX_FILE_BYTES} bytes")
        shown = self._shown(path)
        self._check_cycle(real, shown, line, file)
        self.read += len(content)
        if self.read > MAX_TOTAL_BYTES:
            raise script_error(file, line, f"the script and its sourced files exceed {MAX_TOTAL_BYTES} bytes")
        if b"\0" in content:
            raise Unreadable("it is a binary file")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Unreadable("it is not valid UTF-8") from error
        self.chain.append((shown, real))
        self.texts.append(text)
        return text, shown

    def _shown(self, path: Path) -> str:
        beside = Path(self.chain[0][0]).parent
        if self.folder is not None and path.is_relative_to(self.folder):
            return str(beside / path.relative_to(self.folder))
        return str(path)

    def _check_cycle(self, real: Path, shown: str, line: int, file: str) -> None:
        names = [name for name, _ in self.chain]
        open_now = [None if path is None else path.resolve() for _, path in self.chain]
        if real in open_now:
            raise script_error(file, line, f"circular source: {' → '.join([*names, shown])}")
        if len(self.chain) > MAX_DEPTH:
            raise script_error(
                file, line, f"more than {MAX_DEPTH} nested source commands: {' → '.join([*names, shown])}"
            )

    def is_beside(self) -> bool:
        """Return whether the current file is in the script's directory, not elsewhere on the machine."""
        path = self.chain[-1][1]
        return path is not None and self.folder is not None and path.is_relative_to(self.folder.resolve())

    def close(self) -> None:
        self.chain.pop()
