"""Arguments of the trainings that a script starts: with a launcher, or with a script of the framework (train.sh)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.frameworks.framework import Content
from meshwright.frameworks.types import SourcedValue

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import Command

Arguments = tuple[SourcedValue, ...]


def argument_lists(content: Content) -> Iterator[Arguments]:
    """Yield the arguments of every training program, and of every script that is started."""
    yield from (one.args for one in content.launches)
    for command in content.script.commands if content.script else ():
        at = _after_script(command)
        if at is not None:
            yield command.words[at:]


def with_arguments(content: Content, change: Callable[[Arguments], Arguments]) -> Content:
    """Return the file with other arguments of its trainings."""
    launches = tuple(msgspec.structs.replace(one, args=change(one.args)) for one in content.launches)
    content = msgspec.structs.replace(content, launches=launches)
    if content.script is None:
        return content
    commands = []
    for command in content.script.commands:
        at = _after_script(command)
        words = command.words if at is None else (*command.words[:at], *change(command.words[at:]))
        commands.append(msgspec.structs.replace(command, words=words))
    return msgspec.structs.replace(content, script=msgspec.structs.replace(content.script, commands=tuple(commands)))


def with_variable(content: Content, name: str, value: SourcedValue) -> Content:
    """Return the file with an exported variable."""
    launches = tuple(msgspec.structs.replace(one, env={**one.env, name: value}) for one in content.launches)
    content = msgspec.structs.replace(content, launches=launches)
    if content.script is None:
        return content
    commands = tuple(msgspec.structs.replace(one, env={**one.env, name: value}) for one in content.script.commands)
    return msgspec.structs.replace(content, script=msgspec.structs.replace(content.script, commands=commands))


def _after_script(command: Command) -> int | None:
    """Return where the arguments of a started script begin: `./train.sh …` or `bash train.sh …`."""
    named = (at for at, word in enumerate(command.words[:2]) if str(word.value).endswith(".sh"))
    at = next(named, None)
    return None if at is None else at + 1
