"""Validates user values before they are written into scripts; errors name the field and a fix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.errors import InputError

WORD = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?)*\.?"
)
TIME = re.compile(
    r"(?:(\d{1,5})-(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}))?|(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?)", re.ASCII
)
UNIT = re.compile(
    r"(\d+(?:\.\d+)?)\s*(d(?:ays?)?|h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)(?![a-z])", re.ASCII
)
DAY_S = 86_400
UNIT_S = {"d": DAY_S, "h": 3600, "m": 60, "s": 1}
VARIABLE = r"\$(?:[A-Za-z_]\w*(?!\w)|\{[A-Za-z_]\w*\})"  # that a job's shell expands
MOUNT = (
    rf"((?:[a-z0-9]+://)?(?:[\w./@+~-]|{VARIABLE})(?:[\w./@+~ -]|{VARIABLE})*)"
    rf":((?:/|{VARIABLE})(?:[\w./@+ -]|{VARIABLE})*)(?::(\w[\w+]*))?"
)
TIMES = "90 (minutes), 90:00, 12:00:00, 2-00 (days-hours) or 2-12:00:00"


def matching(field: str, value: str, pattern: str, what: str, example: str) -> str:
    """Return a text that fully matches the pattern."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise InputError(f"is not {what}", field=field, value=value, fix=(f"{field} {example}",))
    return value


def one_line(field: str, value: str, example: str = "") -> str:
    """Return a nonempty text without line breaks or other control characters."""
    if not value.strip():
        raise InputError("is empty", field=field, value=value, fix=(f"{field} {example}",) if example else ())
    bad = next((c for c in value if not c.isprintable() and c != "\t"), None)
    if bad is not None:
        reason = f"must be one line of printable characters; it contains {bad!r}"
        raise InputError(reason, field=field, value=value, fix=(f"{field} {example}",) if example else ())
    return value


def as_int(field: str, value: int, minimum: int, maximum: int) -> int:
    """Return an integer within a range."""
    if not minimum <= value <= maximum:
        raise InputError(f"must be {minimum:,} to {maximum:,}", field=field, value=value)
    return value


def seconds(text: str, field: str = "--time") -> int:
    """Parse a SLURM time limit into seconds."""
    found = TIME.fullmatch(text.strip())
    if found is None:
        meant = format_time(_with_units(text) or DAY_S)
        raise InputError(f"is not a time; write {TIMES}", field=field, value=text, fix=(f"{field} {meant}",))
    days, hours, minutes, secs = _parts(found)
    long_form = found[1] is not None or found[7] is not None
    for name, number, maximum in (
        ("hours", hours, 23 if found[1] else None),
        ("minutes", minutes, 59),
        ("seconds", secs, 59),
    ):
        if maximum is not None and number > maximum and (long_form or name == "seconds"):
            reason = f"has {number} {name}; the maximum is {maximum}"
            raise InputError(reason, field=field, value=text, fix=(f"{field} 24:00:00",))
    total = ((days * 24 + hours) * 60 + minutes) * 60 + secs
    if total == 0:
        reason = "is zero, which SLURM takes as no limit; omit it to use the partition's limit"
        raise InputError(reason, field=field, value=text, fix=(f"{field} 24:00:00",))
    return total


def _with_units(text: str) -> int:
    """Return the seconds of a time such as 2h, 1d12h or 1.5 hours; 0 if it is none."""
    found = UNIT.findall(text.lower())
    rest = UNIT.sub("", text.lower()).strip(" ,")
    return 0 if rest else round(sum(float(number) * UNIT_S[unit[0]] for number, unit in found))


def _parts(found: re.Match[str]) -> tuple[int, int, int, int]:
    """Return days, hours, minutes and seconds; without days, numbers are M, M:S or H:M:S."""
    days, hours, minutes, secs, first, second, third = (int(one or 0) for one in found.groups())
    if found[1] is not None:
        return days, hours, minutes, secs
    return (0, first, second, third) if found[7] is not None else (0, 0, first, second)


def format_time(total: int) -> str:
    """Format seconds as days-hours:minutes:seconds."""
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{secs:02}" if days else f"{hours:02}:{minutes:02}:{secs:02}"


def host(field: str, text: str) -> str:
    """Return a host name or address; IPv6 without brackets."""
    plain = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in plain or plain.replace(".", "").isdigit():
        try:
            return str(ipaddress.ip_address(plain))
        except ValueError:
            fix = (f"{field} node01 --port 29500",)
            raise InputError("is neither a host name nor an IP address", field=field, value=text, fix=fix) from None
    if not HOST.fullmatch(plain) or plain != text:
        raise InputError("is neither a host name nor an IP address", field=field, value=text, fix=(f"{field} node01",))
    return plain.lower()


def endpoint(address: str, port: int) -> str:
    """Format host and port for torchrun's rendezvous."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def distinct(field: str, hosts: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts; refuse duplicates."""
    names = tuple(hosts)
    duplicates = [one for i, one in enumerate(names) if one in names[:i]]
    if duplicates:
        reason = f"names {duplicates[0]} twice; every node needs its own host"
        raise InputError(reason, field=field, value=",".join(names))
    return names


def variables(field: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts into environment variables; refuse duplicates."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise InputError("is not NAME=VALUE", field=field, value=text, fix=(f"{field} NCCL_DEBUG=INFO",))
        if name in found:
            raise InputError(f"sets {name} twice", field=field, value=text)
        found[name] = value
    check_variables(field, found)
    return found


def check_variables(field: str, values: Mapping[str, str]) -> None:
    """Refuse invalid variable names and multi-line values."""
    for name, value in values.items():
        matching(field, name, r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable", "NCCL_DEBUG=INFO")
        if value:
            one_line(field, value, "NCCL_DEBUG=INFO")


def shell_line(field: str, text: str) -> str:
    """Return a self-contained shell line: no open quote, here-document or continuation."""
    import shlex

    one_line(field, text, "'module load cuda'")
    try:
        shlex.split(text, comments=True)
    except ValueError as error:
        reason = f"has an open quote or escape ({str(error).lower()})"
        raise InputError(reason, field=field, value=text, fix=(f"{field} 'module load cuda'",)) from None
    if "<<" in text or text.rstrip().endswith("\\"):
        reason = "continues on the next line, which is not allowed in a setup line"
        raise InputError(reason, field=field, value=text, fix=(f"{field} 'source my_setup.sh'",))
    return text


class Mount(NamedTuple):
    """A volume, folder or bucket mounted into the nodes or containers of a job."""

    source: str
    path: str
    options: str


def mount(text: str) -> Mount:
    """Parse SOURCE:/PATH or SOURCE:/PATH:OPTIONS."""
    found = re.fullmatch(MOUNT, text, re.ASCII)
    if found is None:
        reason = "is not SOURCE:/PATH or SOURCE:/PATH:ro"
        path = text if re.fullmatch(r"/[\w./@+-]*", text, re.ASCII) else "/data"
        raise InputError(reason, field="--mount", value=text, fix=(f"--mount {path}:{path}",))
    return Mount(found[1], found[2], found[3] or "")


def plain_mount(text: str) -> Mount:
    """Parse a mount for a scheduler whose job has no shell that would expand variables."""
    found = mount(text)
    if "$" in text:
        path = found.path if "$" not in found.path else "/data"
        reason = "has a variable, which only a SLURM job expands"
        raise InputError(reason, field="--mount", value=text, fix=(f"--mount SOURCE:{path}",))
    return found


def dns_name(field: str, text: str, maximum: int, user_chosen: bool) -> str:
    """Return a valid Kubernetes name; one that the user did not choose is converted."""
    clean = re.sub(r"[^a-z0-9]+", "-", text.lower())[:maximum].strip("-")
    if not clean or not clean[0].isalpha():
        clean = f"run-{clean}"[:maximum].strip("-")
    if user_chosen and clean != text:
        reason = f"is not a valid Kubernetes name (at most {maximum} of a-z, 0-9 and -, starting with a letter)"
        raise InputError(reason, field=field, value=text, fix=(f"{field} {clean}",))
    return clean
