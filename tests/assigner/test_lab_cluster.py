"""The cluster file: what it may hold, and how it says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from assigner.errors import FormatError, UsageError
from assigner.lab.cluster import Cluster, Host, Machine, RackLink, load_cluster, parse_cluster, strains

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "clusters").glob("*.toml"))
MACHINE = Machine(cores=2.0, memory_bytes=4 * 2**30, processor="test")


def test_all_fields_are_read():
    """Every field arrives, and what is left out has its default."""
    found = parse_cluster(
        """
        [[host]]
        name = "a"
        nproc = 2
        cpu = 0.5
        memory_mib = 512
        rack = "x"
        bandwidth_mbit = 100
        latency_ms = 1.5
        [[host]]
        rack = "y"
        [rack_link]
        bandwidth_mbit = 10
        """
    )
    assert found == Cluster((Host("a", 2, 0.5, 512, "x", 100, 1.5), Host("h1", rack="y")), RackLink(10, 0.0))
    assert found.racks == ("x", "y")
    assert found.has_latency


def test_latency_between_racks_counts_only_with_racks():
    """A rack link's latency is of no matter where there is one rack."""
    text = '[[host]]\n[[host]]\nrack = "{}"\n[rack_link]\nlatency_ms = 2\n'
    assert not parse_cluster(text.format("")).has_latency
    assert parse_cluster(text.format("b")).has_latency


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[host]]\ncpus = 1", "host[0].cpus: unknown", "did you mean cpu?"),
        ("[[host]]\nmemory = 1", "host[0].memory: unknown", "did you mean memory_mib?"),
        ("[[host]]\ncolour = 1", "host[0].colour: unknown", "examples/clusters/README.md"),
        ("[[hosts]]\n", "hosts: unknown", "did you mean host?"),
        ("[[host]]\n[rack_link]\nbandwidth = 3", "rack_link.bandwidth: unknown", "did you mean bandwidth_mbit?"),
        ("[[host]]\ncpu = 0", "host[0].cpu: 0 is not allowed; expected a finite number, 0.01 to 4096", None),
        ('[[host]]\ncpu = "half"', 'host[0].cpu: "half" is not allowed', None),
        ("[[host]]\nnproc = 1.5", "host[0].nproc: 1.5 is not allowed; expected a whole number", None),
        ("[[host]]\nmemory_mib = -3", "host[0].memory_mib: -3 is not allowed", None),
        ("[[host]]\nbandwidth_mbit = inf", "host[0].bandwidth_mbit: Infinity is not allowed", None),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "host[1].name: 'a' is there already", None),
        ('[[host]]\nname = "h1"\n[[host]]', "host[1].name: 'h1' is there already", None),
        ('[[host]]\nname = "a b"', "host[0].name: 'a b' is not allowed", None),
        ('[[host]]\nname = "10"', "host[0].name: '10' is not allowed", None),
        ('[[host]]\nname = "10.77.0.9"', "host[0].name: '10.77.0.9' is not allowed", None),
        ('[[host]]\nname = "Localhost"', "host[0].name: 'Localhost' is not allowed", None),
        ("rack_link = 3\n[[host]]", "rack_link: 3 is not allowed; expected an object", None),
        ("host = []", "host: 0 of them", None),
        ("host = 3", "host: 3 is not allowed; expected a list", None),
        ("", "host: missing", "[[host]]"),
        ("[[host]\n", "not TOML", None),
        ("[[host]]\n" * 251, "host: 251 of them", None),
    ],
)
def test_what_is_wrong_is_named(text, message, hint):
    """The message has place, value and what is allowed; the hint the nearest name."""
    with pytest.raises(FormatError) as caught:
        parse_cluster(text)
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_errors_start_with_the_file(tmp_path):
    """A broken file is named; one that is not there is a usage error."""
    path = tmp_path / "c.toml"
    path.write_text("[[host]]\ncpu = -1")
    with pytest.raises(FormatError, match=r"c\.toml: host"):
        load_cluster(path)
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match="not UTF-8"):
        load_cluster(path)
    with pytest.raises(UsageError, match="No such file"):
        load_cluster(tmp_path / "none.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_sound_and_fit_two_cores(path):
    """The files that users start from load, and ask no more than two cores."""
    assert not strains(load_cluster(path), Machine(2.0, 32 * 2**30, "test"))


def test_too_much_for_the_machine_is_said():
    """Shares above the cores, processes without a share and limits above the memory are each a sentence."""
    assert not strains(Cluster((Host("a", cpu=1.0, memory_mib=1024), Host("b", cpu=1.0))), MACHINE)
    (said,) = strains(Cluster((Host("a", cpu=1.5), Host("b", cpu=0.6))), MACHINE)
    assert "2.10 cores together and this machine has 2.00" in said
    (said,) = strains(Cluster((Host("a", nproc=3),)), MACHINE)
    assert "3.00 cores" in said
    (said,) = strains(Cluster((Host("a", memory_mib=3000), Host("b", memory_mib=3000))), MACHINE)
    assert "5.86 GiB together and this machine has 4.00 GiB" in said
