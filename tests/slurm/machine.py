"""A single-machine SLURM for the tests: controller, two node daemons and munge of its own, removed when the block ends.

    python -m tests.slurm.machine

starts one by hand, prints the SLURM_CONF to export and ends it on Ctrl-C or at the end of its input. It needs root, and
Debian's slurm-wlm and munge, which it installs if they are missing. Ports, keys, sockets and state are its own: a SLURM
that already runs on the machine is not touched.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "squeue", "scancel", "scontrol")
IN_OWN_MOUNTS = ("unshare", "--mount", "--propagation", "private")
PACKAGES = ("slurm-wlm", "munge")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
INSTALL_S, START_S, ASK_S, END_S = 240.0, 45.0, 20.0, 10.0
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]
EXPORT = "export SLURM_CONF="
LEAST_REQUEUE_S = 5  # SLURM takes no shorter cred_expire

CONFIGURATION = """\
ClusterName=meshwright
# The rendezvous port is derived from the job id: another SLURM here should not use the same.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
# A requeued job waits until its old credential has expired: 120 s by default.
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# Containers have no cgroups to write to.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
GresTypes=gpu
# Every node is this machine. SLURM accepts one host for several nodes only on one line.
# The GPUs are names only.
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} RealMemory={memory_mib} Gres=gpu:8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
GPUS = "Name=gpu File={folder}/gpu[0-7]\n"


class CannotStartError(Exception):
    """Why SLURM cannot be started here."""


@contextmanager
def running(requeue_s: int = LEAST_REQUEUE_S) -> Iterator[dict[str, str]]:
    """Start a SLURM on this machine and yield the environment in which its commands reach it."""
    provide()
    with tempfile.TemporaryDirectory(prefix="meshwright-slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        env = {**without_slurm(os.environ), "SLURM_CONF": str(folder / "slurm.conf")}
        write_configuration(folder, requeue_s)
        daemons.callback(sweep, env)  # last of all: whatever a job or a daemon left
        daemons.enter_context(_daemon("munged", munge_command(folder), folder, env))
        _wait_for(lambda: (folder / "munge.socket").exists(), folder, "munged")
        daemons.enter_context(_daemon("slurmctld", [str(program("slurmctld")), "-D", "-i"], folder, env))
        for node in nodes():
            daemons.enter_context(_daemon("slurmd", node_command(node, folder), folder, env))
        _wait_for(lambda: _idle(env) == len(nodes()), folder, "slurmctld", "slurmd")
        daemons.callback(cancel_all, env)  # first of all, while the daemons still listen
        yield env


def provide() -> None:
    """Install what is missing of SLURM and munge, or raise with the reason."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotStartError("a SLURM of one's own needs root on Linux")
    install(PROGRAMS, PACKAGES)


def install(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install Debian packages if programs are missing."""
    if not _missing(programs):
        return
    if shutil.which("apt-get") is None:
        raise CannotStartError(f"{_missing(programs)} missing, and there is no apt-get to install {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wanted = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    output = ""
    for command in (wanted, ["apt-get", "update"], wanted):
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            raise CannotStartError(f"{' '.join(command)} took longer than {INSTALL_S:g} s") from None
        output = (done.stdout + done.stderr)[-500:]
        if not _missing(programs):
            return
    raise CannotStartError(f"{_missing(programs)} missing, and apt-get did not bring it: {output}")


def _missing(programs: Sequence[str]) -> str:
    return ", ".join(name for name in programs if program(name) is None)


def program(name: str) -> str | None:
    """Return the path of a program; daemons may be outside of PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def without_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any other SLURM or job."""
    kept = {
        name: value for name, value in env.items() if not re.match(r"(SLURM|SBATCH|SRUN|SALLOC|SINFO|SQUEUE)", name)
    }
    return {**kept, "PATH": f"{kept.get('PATH', '')}:{SBIN}"}


def write_configuration(folder: Path, requeue_s: int) -> None:
    """Write the configuration for this machine, and a fresh munge key."""
    folder.chmod(0o755)  # munged refuses a socket that others could not reach
    for name in ("state", "munge", *(f"spool-{node}" for node in nodes())):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    controller_port, *ports = free_ports(1 + len(nodes()))
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=host_name(),
            controller_port=controller_port,
            first_job=random.randrange(1, 1_000_000),
            requeue_s=requeue_s,
            names=",".join(nodes()),
            ports=f"[{','.join(map(str, ports))}]",
            cpus=os.cpu_count() or 1,
            memory_mib=max(1, memory * 9 // 10),  # what slurmd finds may be a little less
        )
    )
    (folder / "gres.conf").write_text(GPUS.format(folder=folder))
    for number in range(8):
        (folder / f"gpu{number}").touch()


@cache
def nodes() -> tuple[str, ...]:
    """Return the node names: two if nodes can have a hosts file of their own, else one."""
    refused = subprocess.run([*IN_OWN_MOUNTS, "true"], capture_output=True, timeout=ASK_S).returncode
    return (host_name(),) if refused else ("node1", "node2")


def host_name() -> str:
    """Return this machine's short host name."""
    return socket.gethostname().split(".")[0]


def node_command(node: str, folder: Path) -> list[str]:
    """Return the slurmd command of one node; with two nodes, both names are in a hosts file of its own."""
    command = [str(program("slurmd")), "-D", "-N", node]
    if len(nodes()) == 1:
        return command
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(nodes())}\n")
    return [*IN_OWN_MOUNTS, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *command]


def _idle(env: Mapping[str, str]) -> int:
    return query(["sinfo", "-h", "-N", "-p", "usual", "-o", "%T"], env).split().count("idle")


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def munge_command(folder: Path) -> list[str]:
    """Return a munged command with key, socket and log in the folder."""
    own = folder / "munge"
    files = {"key-file": own / "key", "log-file": own / "log", "pid-file": own / "pid", "seed-file": own / "seed"}
    files["socket"] = folder / "munge.socket"
    # --force: munged refuses a parent folder that everyone may write to, such as that of temporary folders.
    return [str(program("munged")), "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]


@contextmanager
def _daemon(name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run a daemon in the foreground with its log in the folder; it never outlives this process."""
    with (folder / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us: jobs are cancelled before their daemons end
            preexec_fn=_end_with_parent,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for(there: Callable[[], bool], folder: Path, *daemons: str) -> None:
    until = time.monotonic() + START_S
    while not there():
        if time.monotonic() > until:
            output = "; ".join(f"{name}: {(folder / f'{name}.log').read_text()[-800:]}" for name in daemons)
            raise CannotStartError(f"not ready within {START_S:g} s: {output}")
        time.sleep(0.2)


def query(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the output of a SLURM command; empty if it fails or times out."""
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def cancel_all(env: Mapping[str, str]) -> None:
    """Cancel every remaining job immediately."""
    for flags in (("--signal=KILL", "--full"), ()):
        jobs = query(["squeue", "-h", "-o", "%i"], env).split()
        if jobs:
            query(["scancel", *flags, *jobs], env)
    until = time.monotonic() + END_S
    while query(["squeue", "-h", "-o", "%i"], env).strip() and time.monotonic() < until:
        time.sleep(0.2)


def left_behind(env: Mapping[str, str]) -> list[int]:
    """Return the processes of this SLURM: daemons, steps, and what jobs started."""
    return processes_with(f"SLURM_CONF={env['SLURM_CONF']}")


def processes_with(*settings: str) -> list[int]:
    """Return the other processes whose environment contains all of these settings."""
    marks = {text.encode() for text in settings}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marks <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def sweep(env: Mapping[str, str]) -> None:
    """Kill what is left of this SLURM after a grace period."""
    until = time.monotonic() + END_S
    while (left := left_behind(env)) and time.monotonic() < until:
        time.sleep(0.2)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """As `running`, in a process of its own that cleans up even if this one is killed."""
    command = [sys.executable, "-m", "tests.slurm.machine"]
    guard = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,  # EOF tells the guard that this process has ended
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output = guard.stdout.readline() if guard.stdout else ""
        if not output.startswith(EXPORT):
            raise CannotStartError((guard.stderr.read() if guard.stderr else "").strip())
        yield {**without_slurm(os.environ), "SLURM_CONF": output.removeprefix(EXPORT).strip()}
    finally:
        guard.communicate(timeout=5 * END_S)


def main() -> int:
    """Keep a SLURM running until Ctrl-C or the end of the input."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running() as env:
            print(f"{EXPORT}{env['SLURM_CONF']}", flush=True)
            sys.stdin.read()
    except CannotStartError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
