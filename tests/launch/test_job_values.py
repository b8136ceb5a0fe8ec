"""User values of a job: parsed correctly, or rejected with field, value and fix."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.jobs import job

from meshwright.errors import InputError
from meshwright.launch import values
from meshwright.launch.job import find_scheduler, refuse_unused, sbatch_option


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("1:2:3", 3723),
        ("12:00:00", 12 * 3600),
        ("48:00:00", 48 * 3600),
        ("2-00", 2 * 86400),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("1-00:00:01", 86401),
    ],
)
def test_time_limits_are_parsed_like_slurm(text: str, seconds: int) -> None:
    assert values.seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "1h",
        "-5",
        "0",
        "00:00",
        "1:60",
        "1:60:00",
        "1-24",
        "1-00:60",
        "1:2:3:4",
        "1-",
        "١٢",
        "1.5",
        "9" * 30,
    ],
)
def test_invalid_time_limits_are_rejected(text: str) -> None:
    with pytest.raises(InputError) as refused:
        values.seconds(text)
    assert refused.value.field == "--time"
    assert refused.value.fix


@given(st.integers(min_value=1, max_value=10**8))
def test_time_limits_round_trip(seconds: int) -> None:
    assert values.seconds(values.format_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "address", "endpoint"),
    [
        ("node01", "node01", "node01:29500"),
        ("GPU-1.cluster.local", "gpu-1.cluster.local", "gpu-1.cluster.local:29500"),
        ("10.0.0.7", "10.0.0.7", "10.0.0.7:29500"),
        ("fe80::1", "fe80::1", "[fe80::1]:29500"),
        ("[2001:db8::2]", "2001:db8::2", "[2001:db8::2]:29500"),
    ],
)
def test_hosts(text: str, address: str, endpoint: str) -> None:
    assert values.host("--head", text) == address
    assert values.endpoint(address, 29500) == endpoint


@pytest.mark.parametrize(
    "text", ["", "-a", "a b", "a;b", "node01:29500", "10.0.0.999", "[node01]", "a_b", "x" * 300, "$(id)"]
)
def test_invalid_hosts_are_rejected(text: str) -> None:
    with pytest.raises(InputError):
        values.host("--hosts", text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a b"), ("name", ""), ("name", "../x"), ("name", "a\n#SBATCH --x"), ("partition", "gpu --x"),
        ("partition", "gpu\n#SBATCH --uid=0"), ("account", "a,b"), ("qos", "$(id)"), ("constraint", "a b"),
        ("constraint", "-a"), ("reservation", "r;x"), ("image", "a b"), ("image", "-x"), ("image", "a\nb"),
        ("logs", "a b"), ("logs", "%j/x"), ("python", "a\nb"), ("port", 0), ("port", 65536), ("max_requeues", -1),
        ("signal_ahead_s", 0), ("cpus_per_rank", 0), ("max_restarts", -1), ("time", "1"), ("mounts", ("/a:b",)),
        ("mounts", ("/a",)), ("mounts", ("/a:/b,/c:/d",)), ("mounts", ("/a:/b:ro:x",)), ("env", {"A B": "1"}),
        ("env", {"A": "x\ny"}), ("env", {"1A": "x"}), ("setup", ("echo 'open",)), ("setup", ("cat <<EOF",)),
        ("setup", ("echo \\",)), ("setup", ("a\nb",)), ("setup", ("done",)), ("setup", ("if true; then",)),
        ("setup", ("}",)), ("setup", ("",)), ("head", "a b"),
    ],
)  # fmt: skip
def test_invalid_fields_are_rejected(field: str, value: object) -> None:
    with pytest.raises(InputError) as refused:
        job(**{field: value})
    assert refused.value.field.startswith("--")
    assert refused.value.reason


def test_setup_lines_may_belong_together() -> None:
    lines = ("if [ -f env.sh ]; then", "  source env.sh", "fi", 'echo "it\'s $HOME"  # fine')
    assert job(setup=lines).setup == lines


@pytest.mark.parametrize(
    "text",
    ["mem 0", "mem=0 --x", "mem=0\n#SBATCH --uid=0", "comment=it's", 'comment="a"', "comment=a#b", "Mem=0", "=1", "",
     "-m=1", "nodes=4", "array=1-4", "wrap=ls", "signal=KILL", "output=x", "partition=a"],
)  # fmt: skip
def test_rejected_sbatch_options(text: str) -> None:
    with pytest.raises(InputError) as refused:
        sbatch_option(text)
    assert refused.value.field == "--sbatch"


def test_accepted_sbatch_options() -> None:
    assert sbatch_option("mem=0") == ("mem", "0")
    assert sbatch_option("--exclusive") == ("exclusive", "")
    assert sbatch_option("mail-user=me@site.org") == ("mail-user", "me@site.org")


def test_an_unused_option_is_rejected() -> None:
    with pytest.raises(InputError, match="only by slurm") as refused:
        refuse_unused("kubernetes", {"partition": "gpu"})
    assert refused.value.field == "--partition"


def test_an_unknown_scheduler_suggests_the_closest_name() -> None:
    assert find_scheduler("SLURM") == "slurm"
    with pytest.raises(InputError, match="did you mean slurm"):
        find_scheduler("slrum")


@given(st.text(max_size=60))
def test_generated_names_are_dns_labels(text: str) -> None:
    made = values.dns_name("--name", text, 40, user_chosen=False)
    values.matching("name", made, r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "a label", "a")
    assert values.dns_name("--name", made, 40, user_chosen=True) == made


def test_a_user_chosen_name_is_not_changed_silently() -> None:
    with pytest.raises(InputError) as refused:
        values.dns_name("--name", "My_Run", 40, user_chosen=True)
    assert refused.value.fix == ("--name my-run",)


def test_hosts_are_distinct() -> None:
    with pytest.raises(InputError, match="twice"):
        values.distinct("--hosts", ("a", "b", "a"))


@given(st.lists(st.text(max_size=20), max_size=4))
def test_variables_are_parsed_or_rejected(texts: list[str]) -> None:
    found: dict[str, str] = {}
    with suppress(InputError):
        found = values.variables("--env", texts)
    assert [f"{name}={value}" for name, value in found.items()] in ([], texts)
