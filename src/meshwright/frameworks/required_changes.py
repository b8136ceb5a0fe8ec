"""Settings that a file needs next to a change of it: the fixes of the errors that the change alone leads to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import InputError
from meshwright.frameworks.check_file import findings_without_fixes
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.our_fixes import changed_content
from meshwright.frameworks.to_recipe import import_recipe
from meshwright.frameworks.trainer_fields import is_trainer
from meshwright.frameworks.translated_fixes import their_fix
from meshwright.models import ModelSpec
from meshwright.rules import Finding

ROUNDS = 3  # of settings that need others


class ChangedFile:
    """A file whose changes are checked: each with the settings that it needs besides."""

    def __init__(self, framework: Framework, content: Content, gpus: str | None, model: ModelSpec | None) -> None:
        self._framework, self._content, self._gpus, self._model = framework, content, gpus, model
        self._known = {_place(one) for one in self._errors(content)}

    def in_program(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Return overrides as check writes them where a program of the Trainer has its arguments; else nothing."""
        try:
            imported = import_recipe(self._framework, self._content, self._model)
            given = imported.parsed.program.given
            in_code = any(one.file.endswith(".py") for one in given.values())
            return their_fix(imported, imported.recipe, overrides) if in_code and is_trainer(given) else ()
        except InputError:  # a variable, or a remedy in words
            return ()

    def with_required(self, change: Sequence[str]) -> tuple[str, ...] | None:
        """Return a change with the settings that it needs; None if it leads to an error without a fix.

        A change that is not written as settings of the file is returned as it is.
        """
        texts, written = list(change), list(change)
        for _ in range(ROUNDS):
            change_of_file = Finding("", "error", "", "", tuple(written))
            try:
                changed = changed_content(self._content, change_of_file)
                new = [] if changed is None else [e for e in self._errors(changed) if _place(e) not in self._known]
            except InputError:
                return None
            here, elsewhere = self._split(new)
            more = [text for one in here for text in one.fix]
            if not more or not all(one.fix for one in new):
                others = [f"{Path(one.file).name}: {' '.join(one.fix)}" for one in elsewhere]
                return None if here or not all(one.fix for one in new) else (*texts, *dict.fromkeys(others))
            if {*more} <= {*written}:
                return None
            texts, written = [*texts, *(one for one in more if one not in texts)], [*written, *more]
        return None

    def _split(self, errors: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Return the errors that a setting of this file resolves, and those of a program next to it."""
        elsewhere = [one for one in errors if one.file and Path(one.file).name != Path(self._content.path).name]
        return [one for one in errors if one not in elsewhere], elsewhere

    def _errors(self, content: Content) -> list[Finding]:
        found = findings_without_fixes(self._framework, content, self._gpus, self._model)
        return [one for one in found if one.severity == "error" and not one.rule.startswith("memory.")]


def _place(finding: Finding) -> tuple[str, str]:
    return finding.rule, finding.field
