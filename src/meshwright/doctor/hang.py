"""Which rank a collective timed out for, and on which host: from torch's watchdog, its launcher, srun and NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshwright.display import plural
from meshwright.doctor.finding import Evidence
from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.run import CollectiveReport, RankHosts

HINTS = ("WorkNCCL(", "ast enqueued", "collective #", "lagging ranks", "monitoredBarrier", "missing ranks", "Culprit")
TIMED_OUT = re.compile(r"WorkNCCL\((?:SeqNum=(\d+), )?OpType=(\w+)")
STATUS = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)")
GROUP = re.compile(r"\[PG (?:ID )?(\w+)(?: PG GUID (\S+?))? Rank (\d+)\]")
GROUP_RANK = re.compile(r"\[Rank (\d+)\]")
GLOBAL_RANK = re.compile(r"\[rank(\d+)\]")
LAGGING = re.compile(
    r"\[([\d, ]+)\] (?:joined but didn't finish collective|finished collective #\d+, but didn't join)"
    r"|ranks \[([\d, ]+)\] are the lagging ranks|Ranks? ([\d, ]+) failed to pass monitoredBarrier"
    r"|missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)\b"  # torch's flight recorder
)
DEFAULT_GROUP = ("0", "default_pg")

HOST_HINTS = ("[rank", "host ", "rank ", "srun: error", "NCCL", "Root Cause")
BEFORE_RANK = re.compile(r"^\s*\[?([A-Za-z][\w.-]*\w)(?::\d+)*\]?:?\s+\[rank(\d+)\]")
NOT_HOSTS = re.compile(r"^(?:E|W|I|F)?\d|^(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|stderr|stdout|WARN|root)$")
ROOT_CAUSE = "Root Cause (first observed failure)"
TABLE_HOST = re.compile(r"^\s*host\s+: (\S+)\s*$")
TABLE_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: \d+\)")
SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): ")
NCCL_INIT = re.compile(r"(?:^|\s)([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO .*\brank (\d+) nranks (\d+)\b")
ADDRESS = re.compile(r"(?:^|\s)([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO .*(?:Bootstrap ?: Using|OOB) [\w.-]+:([\w.:]+)<\d+>")
MOST_MISSING = 0.25  # share of the ranks that report nothing; beyond it, the log has only some ranks' lines
MOST_NAMED = 8


def reports(lines: Iterable[Line], file: str) -> Iterator[CollectiveReport]:
    """Yield what every rank reports about the collective that it stopped in."""
    for line in lines:
        if not has_any(line.text, HINTS):
            continue
        lagging = LAGGING.search(line.text)
        if lagging is not None:
            ranks = next(part for part in lagging.groups() if part)
            yield from (
                CollectiveReport(rank=int(one), line=line.number, file=file, lagging=True)
                for one in ranks.replace(",", " ").split()
            )
            continue
        timed_out, status = TIMED_OUT.search(line.text), STATUS.search(line.text)
        rank = global_rank(line)
        if rank is None or not (timed_out or status):
            continue
        group = GROUP.search(line.text)
        yield CollectiveReport(
            rank=rank,
            line=line.number,
            file=file,
            group="" if group is None else group[2] or group[1],
            operation=timed_out[2] if timed_out else "",
            timed_out=int(timed_out[1]) if timed_out and timed_out[1] else None,
            enqueued=int(status[1]) if status else None,
            completed=int(status[2]) if status else None,
        )


def global_rank(line: Line) -> int | None:
    """Return the global rank that wrote a line; None if it names only a rank of a process group or of a node."""
    if line.prefix.startswith("[rank"):
        return int(line.rank)
    if named := GLOBAL_RANK.search(line.text):
        return int(named[1])
    group = GROUP.search(line.text)
    if group is not None:
        name = group[2] or group[1]
        if name.partition("(")[0] in DEFAULT_GROUP or "default_pg" in name:
            return int(group[3])
    elif alone := GROUP_RANK.search(line.text):
        return int(alone[1])
    return int(line.rank) if line.rank and not line.prefix.startswith("[default") else None


def hosts(lines: Sequence[Line]) -> RankHosts:
    """Return the host of every rank that a log shows, by rank."""
    found: dict[int, str] = {}
    tasks: dict[int, str] = {}
    addresses: dict[str, str] = {}
    of_world: dict[int, dict[int, str]] = {}
    host, is_root, first_failed = "", False, None
    for line in lines:
        text = line.text
        if not has_any(text, HOST_HINTS):
            continue
        if named := BEFORE_RANK.search(text):
            if not NOT_HOSTS.search(named[1]):
                found[int(named[2])] = named[1]
        elif ROOT_CAUSE in text:
            is_root = True
        elif table := TABLE_HOST.search(text):
            host = table[1]
        elif (table := TABLE_RANK.search(text)) and host:
            found[int(table[1])] = host
            first_failed = int(table[1]) if is_root and first_failed is None else first_failed
            host, is_root = "", False
        elif ended := SRUN.search(text):
            tasks |= dict.fromkeys(_numbers(ended[2]), ended[1])
        elif address := ADDRESS.search(text):
            addresses[address[2]] = address[1]
        elif started := NCCL_INIT.search(text):
            of_world.setdefault(int(started[3]), {})[int(started[2])] = started[1]
    largest = of_world[max(of_world)] if of_world else {}
    return RankHosts({**largest, **found}, tasks, first_failed, addresses)


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as 0,3,8-15."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


class Behind(NamedTuple):
    """The ranks that others waited for, as a sentence, with the evidence; none if no rank is behind."""

    ranks: tuple[int, ...]
    text: str
    evidence: tuple[Evidence, ...] = ()
    none_is_behind: bool = False  # all that report it are in the same collective


def behind(found: Sequence[CollectiveReport], names: RankNames, world: int | None) -> Behind | None:
    """Return which ranks are behind by what all ranks report; None if too little is reported."""
    lagging = tuple(dict.fromkeys(one.rank for one in found if one.lagging))
    timed_out = [one for one in found if not one.lagging]
    if lagging:
        return Behind(lagging, f"{names.of(lagging)} did not join the collective that the others wait in")
    groups = dict.fromkeys(one.group for one in timed_out if one.enqueued is not None)
    for group in groups:
        enqueued = {one.rank: one.enqueued for one in timed_out if one.group == group and one.enqueued is not None}
        if len({*enqueued.values()}) > 1:
            return _lowest(enqueued, names, "had enqueued collective {} last, the others up to {}")
    silent = _silent({one.rank for one in timed_out}, world)
    if silent:
        waited = f"the other {(world or 0) - len(silent)} timed out"
        text = f"{names.of(silent)} {_verb(silent, 'reports', 'report')} no timeout while {waited}: dead, or busy "
        return Behind(silent, f"{text}outside collectives")
    numbers: dict[int, int] = {}
    for one in timed_out:
        if one.timed_out is not None:
            numbers[one.rank] = min(one.timed_out, numbers.get(one.rank, one.timed_out))
    if len({*numbers.values()}) > 1 and len({one.operation for one in timed_out if one.operation}) == 1:
        return _lowest(numbers, names, "stopped in collective {}, the others in up to {}")
    ranks = tuple(dict.fromkeys(one.rank for one in timed_out))
    if not ranks:
        return None
    where = next((f" ({one.operation}{_number(one.timed_out)})" for one in timed_out if one.operation), "")
    if len(ranks) == 1:
        return Behind(
            (),
            f"Only {names.of(ranks, lower=True)} reports it{where}: the logs of the other ranks show which is behind",
        )
    every = f"All {len(ranks)} ranks that report it stopped in the same collective{where}"
    quiet = tuple(rank for rank in range(world or max(ranks) + 1) if rank not in ranks)
    if quiet:
        return _partly_silent(every, ranks, quiet, names, "" if world else "at least ")
    return Behind((), f"{every}: none is behind", none_is_behind=True)


def _partly_silent(
    every: str, reporting: Sequence[int], quiet: tuple[int, ...], names: RankNames, bound: str
) -> Behind:
    """Return the suspects of a log with the lines of only some ranks: first those whose neighbours report."""
    each = names.gpus_per_node
    nodes = {rank // each for rank in reporting} if each else set()
    near = tuple(rank for rank in quiet if (rank // each in nodes if each else rank < max(reporting)))
    total = len(reporting) + len(quiet)
    text = f"{every}; {len(quiet)} of {bound}{total} ranks report nothing, and the one behind is probably among them: "
    others = tuple(rank for rank in quiet if rank not in near)
    if not near or (not others and not each):
        return Behind((), f"{text}{names.of(quiet, lower=True)}; their logs show which")
    it, its = _verb(near, "it", "them"), _verb(near, "its node", "their nodes")
    where = f"other ranks of {its} do report" if each else f"ranks before and after {it} do report"
    more = f"; then {names.of(others, lower=True)}, whose logs may be in other files" if others else ""
    return Behind(near, f"{text}{names.of(near, lower=True)} first, as {where}{more}")


def _number(sequence: int | None) -> str:
    return "" if sequence is None else f" {sequence}"


def _lowest(values: dict[int, int], names: RankNames, text: str) -> Behind:
    """Return the ranks with the lowest value as those behind."""
    least, most = min(values.values()), max(values.values())
    late = tuple(sorted(rank for rank, value in values.items() if value == least))
    waiting = tuple(sorted(set(values) - {*late}))
    sentence = f"{names.of(late)} {_verb(late, 'is', 'are')} behind: {_verb(late, 'it', 'they')} "
    return Behind(
        late,
        sentence + text.format(f"{least:,}", f"{most:,}") + f"; {names.of(waiting, lower=True)} waited",
        (Evidence("last collective of the rank behind", float(least), "", float(most), "of the others"),),
    )


def joined(hosts_of_files: Iterable[RankHosts]) -> RankHosts:
    """Return the hosts that several files name."""
    found = RankHosts()
    for one in hosts_of_files:
        first = one.first_failed if found.first_failed is None else found.first_failed
        found = RankHosts({**found.ranks, **one.ranks}, {**found.tasks, **one.tasks}, first)
    return found


def _silent(reporting: set[int], world: int | None) -> tuple[int, ...]:
    """Return the ranks without a report, if nearly all others have one."""
    if not world or not reporting:
        return ()
    missing = tuple(rank for rank in range(world) if rank not in reporting)
    return missing if len(reporting) >= 2 and len(missing) <= max(1, MOST_MISSING * world) else ()


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


class RankNames(NamedTuple):
    """Names ranks with their hosts, or with the node by the number of GPUs per node."""

    hosts: RankHosts
    gpus_per_node: int = 0

    def host(self, rank: int) -> str:
        """Return the host of a rank, or its node; empty if unknown."""
        found, tasks = self.hosts.ranks.get(rank), self.hosts.tasks
        each = self.gpus_per_node
        if found is None and len(tasks) > len({*tasks.values()}):  # several tasks per host: a task is a rank
            found = tasks.get(rank)
        elif found is None and each:
            found = tasks.get(rank // each)
        if found is None and each:
            local = [host for other, host in self.hosts.ranks.items() if other // each == rank // each]
            found = local[0] if local else f"GPU {rank % each} of node {rank // each}"
        return found or ""

    def of(self, ranks: Sequence[int], lower: bool = False) -> str:
        """Return some ranks with their hosts: rank 7 (node012), or ranks 0-5, 8 on node012."""
        word = "rank" if lower else "Rank"
        if len(ranks) == 1:
            host = self.host(ranks[0])
            return f"{word} {ranks[0]}" + (f" ({host})" if host else "")
        known = {rank: host for rank in ranks if (host := self.host(rank)) and not host.startswith("GPU ")}
        hosts = dict.fromkeys(known.values())
        more = f" and {plural(len(hosts) - MOST_NAMED, 'other')}" if len(hosts) > MOST_NAMED else ""
        some = "" if len(known) == len(ranks) else f"{_ranges([*known])} on "
        where = f" ({some}{', '.join([*hosts][:MOST_NAMED])}{more})" if hosts else ""
        return f"{word}s {_ranges(ranks)}{where}"


def _ranges(ranks: Sequence[int]) -> str:
    """Return numbers with ranges: 0-5, 8."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in parts)
