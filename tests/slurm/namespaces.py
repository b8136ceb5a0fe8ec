"""Two hosts with a network of their own on one machine: network namespaces joined by a veth pair."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.machine import ASK_S, END_S, CannotStartError, install

INTERFACE = "mw0"  # the same on both hosts, as it is on most clusters


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str

    def start(self, command: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run a shell line on the host; its output goes into the log."""
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "bash", "-c", command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def two_hosts(addresses: Sequence[str] = ("10.77.0.1", "10.77.0.2")) -> Iterator[list[Host]]:
    """Yield two hosts that reach each other and nothing else."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotStartError("network namespaces need root on Linux")
    install(["ip"], ["iproute2"])
    hosts = [Host(f"meshwright-{os.getpid()}-{number}", address) for number, address in enumerate(addresses)]
    with ExitStack() as made:
        for host in hosts:
            made.callback(_remove, host)
            _ip("netns", "add", host.name)
        one, other = hosts
        cable = ("type", "veth", "peer", "name", INTERFACE, "netns", other.name)
        _ip("link", "add", INTERFACE, "netns", one.name, *cable)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=ASK_S)
    if done.returncode != 0:
        raise CannotStartError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _remove(host: Host) -> None:
    """End what still runs on a host, then remove it; its end of the veth pair is removed with it."""
    with suppress(CannotStartError):  # it was never created
        until = time.monotonic() + END_S
        while (left := _ip("netns", "pids", host.name).split()) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        _ip("netns", "delete", host.name)
