"""Verbs as Python functions: `verb` makes one from a request and its handler."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from meshwright import extras, notes
from meshwright.api.inputs import Field, Request, fields_of, range_of, validated
from meshwright.errors import InputError, MeshwrightError

P = ParamSpec("P")
R = TypeVar("R", bound="Request")
T = TypeVar("T")
_ANSWERING: ContextVar[bool] = ContextVar("answering", default=False)
"""Whether a handler runs: verbs that it calls speak its caller's words, which are options for a command."""
HAS_COUNT = re.compile(r"\s*\d+\s*[xX*]")  # 8xH100: not 3090, which is a type


def _type_label(field: Field) -> str:
    """Return the type of a parameter as people write it."""
    label = (
        "Mapping[str, object] | " * (field.name == "overrides") + "Sequence[str]"
        if field.repeated
        else " | ".join(one.__name__ for one in field.types) + " | list[dict]" * field.input.objects or "object"
    )
    return label if field.required or field.repeated or field.python_default is not None else f"{label} | None"


def _limits(field: Field) -> str:
    limits = range_of(field.input)
    choice_list = f" One of {', '.join(map(repr, field.input.choices))}." if field.input.choices else ""
    examples = f" E.g. {', '.join(map(repr, field.input.examples))}." if field.input.examples else ""
    return (f" ({limits})" if limits else "") + choice_list + examples


class VerbFunction(Generic[P, R, T]):
    """A verb as a Python function: called with the request's fields, or with a validated request."""

    def __init__(self, request: Callable[P, R], handle: Callable[[R], T], name: str = "") -> None:
        self.request, self.handle, self.name = request, handle, name or handle.__name__
        self.__name__, self.__module__ = handle.__name__, handle.__module__

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        returned = self.handle.__annotations__.get("return", inspect.Signature.empty)
        parameters = [
            inspect.Parameter(
                field.name,
                kind,
                annotation=_type_label(field),
                default=inspect.Parameter.empty if field.required else field.python_default,
            )
            for field in self._fields
        ]
        # A keyword-only field of a base class may be required after one with a default.
        parameters.sort(key=lambda one: one.default is not inspect.Parameter.empty)
        return inspect.Signature(parameters, return_annotation=returned)

    @property
    def _fields(self) -> list[Field]:
        found: Any = self.request
        return [field for field in fields_of(found) if field.name != "notes"]

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # written when it is read: resolving types takes milliseconds
        """Return summary, description, and every parameter with its meaning."""
        about = inspect.cleandoc(self.handle.__doc__ or "")
        more = inspect.cleandoc(self.request.__doc__ or "").partition("\n")[2].strip()
        lines = [f"    {field.name}: {field.input.help}{_limits(field)}" for field in self._fields]
        arguments = "\n".join(["Args:", *lines]) if lines else ""
        raises = (
            "Raises:\n    MeshwrightError: with field, value, reason and fix, if the input is wrong or a run fails."
        )
        return "\n\n".join(filter(None, (about, more, arguments, raises)))

    def __repr__(self) -> str:
        return f"<function meshwright.{self.name}{self.__signature__}>"

    def _request(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the request of a call; a call that does not fit the signature says what does."""
        try:
            return self.request(*args, **kwargs)
        except TypeError:
            from meshwright.api.argument_names import ArgumentError, missing_argument, unknown_parameters

            fields = {field.name: field for field in self._fields}
            unknown = {name: value for name, value in kwargs.items() if name not in fields}
            if unknown:
                flags = {one.name: one.flag.partition("/")[0] for one in fields.values()}
                raise unknown_parameters(self.name, unknown, flags) from None
            placed = list(inspect.signature(self).parameters)[: len(args)]
            if len(args) > len(fields) or any(name in kwargs for name in placed):
                twice = [name for name in placed if name in kwargs]
                reason = (
                    f"{self.name}() got {twice[0]} twice"
                    if twice
                    else f"takes {len(fields) or 'no'} values, not {len(args)}"
                )
                raise ArgumentError(reason, field=twice[0] if twice else self.name) from None
            given = {*placed, *kwargs}
            missing = [one for one in fields.values() if one.required and one.name not in given]
            if not missing:
                raise
            examples = {one.name: next(iter(one.input.examples or one.input.choices), None) for one in missing}
            raise missing_argument(self.name, list(examples), examples) from None

    def _split_targets(self, args: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return a call with a list of targets, as compare([a, b]), as a call with the first and more of them."""
        fields = [field.name for field in self._fields]
        if fields[1:2] != ["more"] or "more" in named or len(args) > 1:
            return args, named
        first = args[0] if args else named.get(fields[0])
        if not isinstance(first, list | tuple) or not first:
            return args, named
        rest = {key: value for key, value in named.items() if key != fields[0]}
        return [first[0], list(first[1:])], rest

    def _refuse_file_name(self, request: R) -> None:
        """Raise for the file name of a text: texts are sent over HTTP, a Python call gives the file's path."""
        for field in self._fields:
            given = getattr(request, field.name) if field.input.file_name else None
            if given is None:
                continue
            from meshwright.api.argument_names import ArgumentError
            from meshwright.clusters import cluster

            reason = "the file name of a text sent over HTTP; it has no effect in Python"
            fix = f"without {field.name}"
            with suppress(InputError):  # not a cluster
                cluster(given)
                fix = f'gpus="{given}"'
            raise ArgumentError(reason, field=field.name, value=given, fix=(fix,))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Validate the fields and run the verb."""
        if _ANSWERING.get():
            return self._answer(*args, **kwargs)
        try:
            with notes.rewritten(self._reworded):
                return self._answer(*args, **kwargs)
        except MeshwrightError as error:
            from meshwright.api.python_words import reword

            reword(error, self._fields)
            raise

    def _answer(self, *args: P.args, **kwargs: P.kwargs) -> T:
        texts: Any = self._split_targets(list(_as_text(args)), _as_text(kwargs))
        request = validated(self._request(*texts[0], **texts[1]))
        self._refuse_file_name(request)
        result = self.handle(request)
        _remember(result, request)
        return result

    def _reworded(self, text: str) -> str:
        """Return a note with parameters in place of options."""
        from meshwright.api.python_words import rewritten

        return rewritten(text, self._fields) if "--" in text else text


def _as_text(value: Any) -> Any:
    """Return a value with paths (pathlib) and clusters as text, also inside lists and mappings."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, msgspec.Struct):
        return _cluster_as_text(value)
    if type(value) in (list, tuple):
        return type(value)(_as_text(one) for one in value)
    return {key: _as_text(one) for key, one in value.items()} if type(value) is dict else value


def _cluster_as_text(value: msgspec.Struct) -> Any:
    """Return what is typed for a cluster; other results stay.

    Raise InputError for a cluster that was changed after it was read: no text has its links, memory and price.
    """
    from meshwright.clusters import Cluster, cluster

    if not isinstance(value, Cluster):
        return value
    if cluster(value.argument) == value:
        return value.argument
    reason = f"its counts, links, memory or price are not those of {value.argument}: write them to a TOML file"
    raise InputError(reason, field="gpus", value=str(value), fix=('gpus="cluster.toml"', f'gpus="{value.argument}"'))


REMEMBERED = 64  # latest results of Python callers whose requests are kept
_requests: dict[int, tuple[object, object]] = {}


def _remember(result: object, request: object) -> None:
    """Keep the request of a result: its JSON repeats some of it. The result is kept too, so that its id stays its."""
    _requests.pop(id(result), None)
    _requests[id(result)] = (result, request)
    while len(_requests) > REMEMBERED:
        del _requests[next(iter(_requests))]


def request_of(result: object) -> Any:
    """Return the request that a recent result answers; None if it is not known."""
    found = _requests.get(id(result))
    return found[1] if found is not None and found[0] is result else None


def verb(
    request: Callable[P, R], needs: Sequence[str] = (), name: str = "", counts_gpus: bool = True
) -> Callable[[Callable[[R], T]], VerbFunction[P, R, T]]:
    """Turn a function of a request into one that takes the request's fields.

    `needs` are optional packages; `name` is the function's name in the package, if it is another. A GPU type alone gets
    the count that the target states, unless the function does that itself: `counts_gpus`.
    """
    return lambda handle: VerbFunction(request, _with_packages(handle, needs, counts_gpus), name)


def with_gpu_count(request: R) -> R:
    """Return a request that types a GPU without a count on as many as its file states."""
    gpus = getattr(request, "gpus", None)
    if not isinstance(gpus, str) or HAS_COUNT.match(gpus):
        return request
    positional = (getattr(request, field.name) for field in fields_of(type(request)) if field.input.positional)
    target = next((one for one in positional if isinstance(one, str)), "")
    if not target:
        return request
    from meshwright.api.counted_gpus import with_stated_count  # for the few requests that need it

    return with_stated_count(request, target)


def _with_packages(handle: Callable[[R], T], needs: Sequence[str], counts_gpus: bool) -> Callable[[R], T]:
    """Return the function with an error in one line, not a traceback, if an optional package is missing."""

    @wraps(handle)
    def checked(request: R) -> T:
        extras.require(handle.__name__, *needs)
        before = _ANSWERING.set(True)
        try:
            return handle(with_gpu_count(request) if counts_gpus else request)
        except ImportError as error:
            explained = extras.explain(error, handle.__name__)
            if explained is None:
                raise
            raise explained from error
        finally:
            _ANSWERING.reset(before)

    return checked
