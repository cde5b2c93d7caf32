"""What `ip` and `tc` are asked for: namespaces before what is put into them, and queues in an order that lasts."""

from __future__ import annotations

import pytest

from assigner.errors import UsageError
from assigner.lab import network
from assigner.lab.cluster import Cluster, Host, RackLink
from assigner.lab.network import build_network, remove_network


@pytest.fixture
def calls(monkeypatch):
    """The commands, which all succeed."""
    found: list[str] = []
    monkeypatch.setattr(network, "call", lambda *words: found.append(" ".join(words)) or "")
    return found


def queues(calls, *hosts, rack_link=None):
    """The commands that make queues for a cluster."""
    calls.clear()
    build_network(Cluster(hosts, rack_link or RackLink()), "lab")
    return [command for command in calls if "qdisc" in command]


def number(command, word):
    words = command.split()
    return int(words[words.index(word) + 1])


def test_latency_is_the_inner_queue(calls):
    """netem around a tbf that splits packets stops for good on older kernels (CVE-2024-56770)."""
    outer = "root handle 1: tbf rate 100000000bit burst 16384 limit 5016384"
    assert queues(calls, Host("a", bandwidth_mbit=100, latency_ms=2.5), Host("b")) == [
        f"tc -n lab.0 qdisc add dev eth0 {outer}",
        "tc -n lab.0 qdisc add dev eth0 parent 1:1 handle 10: netem delay 2.5ms limit 3366",  # 400 + 2.5 ms of the wire
        f"tc -n lab.switch0 qdisc add dev p0 {outer}",
    ]


def test_latency_alone_is_the_only_queue(calls):
    """Without a rate netem stands by itself, where the host sends."""
    assert queues(calls, Host("a", latency_ms=2), Host("b")) == [
        "tc -n lab.0 qdisc add dev eth0 root handle 1: netem delay 2ms limit 100000"
    ]


def test_the_wire_between_racks_is_shaped_at_both_ends(calls):
    """Each way has its rate; the latency is added once, on the way up."""
    found = queues(calls, Host("a", rack="x"), Host("b", rack="y"), rack_link=RackLink(10, 3))
    places = [(words[2], words[6], words[-6 if "netem" in words else -7]) for words in map(str.split, found)]
    assert places == [
        ("lab.switch0", "uplink", "tbf"), ("lab.switch0", "uplink", "10:"), ("lab.core", "down0", "tbf"),
        ("lab.switch1", "uplink", "tbf"), ("lab.switch1", "uplink", "10:"), ("lab.core", "down1", "tbf"),
    ]  # fmt: skip


@pytest.mark.parametrize(("mbit", "latency_ms"), [(0.1, 0), (0.1, 1), (1, 1), (1e6, 0), (1e6, 10_000)])
def test_queues_hold_some_packets_and_are_counted_in_32_bits(calls, mbit, latency_ms):
    """A thin wire still takes packets of 64 KiB; a thick one's queue is no number that `tc` wraps around."""
    for command in queues(calls, Host("a", bandwidth_mbit=mbit, latency_ms=latency_ms)):
        if "netem" in command:
            assert 4 * 65536 / 1500 <= number(command, "limit") <= 100_000
        else:
            assert 4 * 65536 <= number(command, "limit") < 1 << 32
            assert 16 * 1024 <= number(command, "burst") <= number(command, "limit")


def test_nothing_is_used_before_it_is_made(calls):
    """Every namespace that a command enters was added by one before it."""
    queues(calls, *(Host(name, rack=name, bandwidth_mbit=10, latency_ms=1) for name in "abc"), rack_link=RackLink(1, 1))
    made = set()
    for words in map(str.split, calls):
        if words[:3] == ["ip", "netns", "add"]:
            made.add(words[3])
        used = {words[n + 1] for n, word in enumerate(words) if word in ("-n", "netns") and words[n + 1] != "add"}
        assert used <= made
    assert made == {"lab.0", "lab.1", "lab.2", "lab.switch0", "lab.switch1", "lab.switch2", "lab.core"}


def test_one_namespace_that_stays_keeps_no_other(monkeypatch, tmp_path):
    """All are tried, and what the kernel said of the first that stays is told."""
    asked = []

    def call(*words):
        asked.append(words[-1])
        if words[-1] == "lab.0":
            raise UsageError("lab.0 is busy")
        return ""

    monkeypatch.setattr(network, "NAMESPACES", tmp_path)
    monkeypatch.setattr(network, "call", call)
    for name in ("lab.0", "lab.1", "lab.core", "other.0"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"lab\.0 is busy"):
        remove_network("lab")
    assert asked == ["lab.0", "lab.1", "lab.core"]
