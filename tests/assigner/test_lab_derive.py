"""Cluster files from profiles: shares, wires, racks and memory, and where each number comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_profile, worker_name

from assigner.errors import FormatError, UsageError
from assigner.formats.profile import LinkPoint
from assigner.lab.cluster import Machine, cluster_text, parse_cluster
from assigner.lab.derive import START_UP_BYTES, derive, find_wires, split_share

GIB = 2**30
HERE = Machine(cores=4.0, memory_bytes=64 * GIB, processor="kind0")
"""A machine with the processor of `make_profile`'s first worker: one second there is one second of a core here."""


def with_rates(profile, rate, latency=lambda _u, _v: 1e-4):
    """The profile with `rate(u, v)` bytes/s and `latency(u, v)` seconds on its links."""
    ranks = {worker_name(n): n for n in range(len(profile.workers))}

    def points(link):
        u, v = ranks[link.source], ranks[link.target]
        return tuple(LinkPoint(size, latency(u, v) + size / rate(u, v), 5, 0.01) for size in (1.0, 1e6, 1e7))

    return replace(profile, links=tuple(replace(link, points=points(link)) for link in profile.links))


def parsed(derived):
    return parse_cluster(cluster_text(derived, "test"))


def test_shares_are_in_proportion_to_speed():
    """4 : 2 : 1 in speed is 4 : 2 : 1 in shares; the fastest gets 0.85 of a core where the machine has room."""
    found = parsed(derive(make_profile(work=[1e-3] * 3, slowness=[1, 2, 4]), HERE))
    assert [host.name for host in found.host] == ["host0", "host1", "host2"]
    assert [host.cpu for host in found.host] == pytest.approx([0.85, 0.425, 0.2125], rel=5e-3)


def test_shares_leave_the_machine_some_room():
    """Four equal workers on two cores share 0.85 of them, and the scale says what that costs."""
    derived = derive(make_profile(work=[1e-3] * 3, slowness=[1] * 4), replace(HERE, cores=2.0))
    assert sum(host.cpu for host in parsed(derived).host) == pytest.approx(1.7)
    assert derived.scale == pytest.approx(1 / 0.425)
    assert "1 s of the profile is 2.35 s here" in cluster_text(derived, "test")


def test_wires_are_slowed_down_with_compute():
    """A wire's rate is divided by the scale, so that a transfer takes as many computes as it did."""
    profile = with_rates(make_profile(work=[1e-3] * 3, slowness=[1, 1]), lambda *_: 1e8)
    fast = derive(profile, HERE)
    slow = derive(profile, replace(HERE, cores=0.5))
    assert fast.scale == pytest.approx(1 / 0.85)
    assert parsed(fast).host[0].bandwidth_mbit == pytest.approx(800 * 1514 / 1448 * 0.85, rel=0.01)
    assert parsed(slow).host[0].bandwidth_mbit == pytest.approx(800 * 1514 / 1448 / slow.scale, rel=0.01)
    assert slow.scale == pytest.approx(1 / (0.85 * 0.5 / 2))


def test_a_profile_measured_here_tells_how_fast_this_machine_is():
    """--here: work that takes 3 s there and 6 s on half a core here is 3 s on a core."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1, 1])
    other = replace(HERE, processor="another")
    here = make_profile(work=[1e-3] * 3, slowness=[6])
    here = replace(here, workers=(replace(here.workers[0], kind="another (0.50 cores)"),))
    derived = derive(profile, other, here=here)
    assert derived.scale == pytest.approx(3.0 / 0.85)
    assert "as measured on this machine" in cluster_text(derived, "test")


def test_an_unknown_processor_is_not_guessed():
    """Without a common processor or --here nothing is written, and the hint has the command."""
    profile = make_profile(work=[1e-3], slowness=[1, 1])
    with pytest.raises(UsageError, match="nothing tells how fast") as caught:
        derive(profile, replace(HERE, processor="another"))
    assert "assigner profile tiny.py:workload -o here.json" in (caught.value.hint or "")


def test_another_workload_is_refused_as_a_measure():
    """--here must be of the same partitions."""
    with pytest.raises(FormatError, match="different workloads"):
        derive(make_profile(work=[1] * 3, slowness=[1]), HERE, here=make_profile(work=[1] * 2, slowness=[1]))


def test_workers_of_a_host_become_its_processes():
    """nproc counts them, and their shares and memory add up; ranks that do not stand host by host are said."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1, 1, 2])
    hosts = ("a", "a", "b")
    profile = replace(
        profile, workers=tuple(replace(w, host=name) for w, name in zip(profile.workers, hosts, strict=True))
    )
    found = parsed(derive(profile, HERE))
    assert [(host.name, host.nproc) for host in found.host] == [("a", 2), ("b", 1)]
    assert [host.cpu for host in found.host] == pytest.approx([1.7, 0.425])
    mixed = tuple(replace(w, host=name) for w, name in zip(profile.workers, "aba", strict=True))
    text = cluster_text(derive(replace(profile, workers=mixed), HERE), "test")
    assert "ranks of a run on these hosts are counted anew" in text


def test_two_levels_of_links_become_racks():
    """Pairs far below what their wires could do lie in different racks, and the wire between those is theirs."""
    profile = with_rates(make_profile(work=[1e-3], slowness=[1] * 4), lambda u, v: 1e8 if u % 2 == v % 2 else 5e6)
    found = parsed(derive(profile, HERE))
    assert [host.rack for host in found.host] == ["host0", "host1", "host0", "host1"]
    assert found.rack_link.bandwidth_mbit == pytest.approx(40 * 1514 / 1448 * 0.85, rel=0.02)
    assert found.host[0].bandwidth_mbit == pytest.approx(800 * 1514 / 1448 * 0.85, rel=0.02)


def test_thin_wires_are_no_racks():
    """A host on a thin wire is slow to everybody: that is its wire, not a rack."""
    wires = [1e8, 5e7, 1e7]
    profile = with_rates(make_profile(work=[1e-3], slowness=[1] * 3), lambda u, v: min(wires[u], wires[v]))
    found = find_wires(profile)
    assert found.rack_rate is None
    assert found.rate == pytest.approx({"host0": 5e7, "host1": 5e7, "host2": 1e7})  # min(rate) of any pair is as it was
    assert set(found.rack.values()) == {"host0"}


def test_a_thin_wire_does_not_make_two_racks_one():
    """Near to everybody, a host on a thin wire is in one rack, and the wire between the racks stays what it is."""
    wires, rack = [2e8, 2e8, 2e8, 2e8, 1.5e7], "xxyyy"
    rate = lambda u, v: min(wires[u], wires[v], 2e8 if rack[u] == rack[v] else 1e7)  # noqa: E731
    found = find_wires(with_rates(make_profile(work=[1e-3], slowness=[1] * 5), rate))
    assert list(found.rack.values()) == ["host0", "host0", "host2", "host2", "host2"]
    assert found.rack_rate == pytest.approx(1e7)
    assert found.worst is not None
    assert found.worst.measured == pytest.approx(found.worst.explained)


def test_the_pair_that_wires_explain_worst_is_noted():
    """A link at 0.6 of its two wires is no wire between racks: the file says what is lost."""
    rate = lambda u, v: 6e7 if {u, v} == {1, 2} else 1e8  # noqa: E731
    derived = derive(with_rates(make_profile(work=[1e-3], slowness=[1] * 3), rate), HERE)
    assert derived.notes[-1] == (
        "Between host1 and host2 these wires are furthest from the links: 60.0 MB/s measured, 100 MB/s explained."
    )


def test_latency_above_the_labs_own_is_kept_where_there_is_netem():
    """What this machine has by itself is taken off; without netem a comment says what was left out."""
    profile = with_rates(make_profile(work=[1e-3], slowness=[1, 1]), lambda *_: 1e8, lambda *_: 2.15e-3 * 0.85)
    assert parsed(derive(profile, HERE)).host[0].latency_ms == pytest.approx(2.0, rel=0.01)
    derived = derive(profile, HERE, netem=False)
    assert parsed(derived).host[0].latency_ms == 0
    assert "# latency_ms: a small message takes 1.83 ms there; 2 ms left out" in cluster_text(derived, "test")


def test_latency_between_racks_is_what_they_have_more():
    """The racks' wire gets the difference to the links within a rack."""
    near = lambda u, v: u % 2 == v % 2  # noqa: E731
    profile = with_rates(
        make_profile(work=[1e-3], slowness=[1] * 4),
        lambda u, v: 1e8 if near(u, v) else 5e6,
        lambda u, v: 1e-4 if near(u, v) else 1e-4 + 3e-3 * 0.85,
    )
    found = parsed(derive(profile, HERE))
    assert found.rack_link.latency_ms == pytest.approx(3.0, rel=0.01)
    assert {host.latency_ms for host in found.host} == {0.0}


def test_memory_is_as_it_was_if_this_machine_has_it():
    """What a profile calls memory is what Python and torch leave: their share is added."""
    found = parsed(derive(make_profile(work=[1], slowness=[1, 1], capacity=[GIB, 3 * GIB]), HERE))
    start = START_UP_BYTES / 2**20
    assert [host.memory_mib for host in found.host] == [1024 + start, 3072 + start]


def test_memory_is_scaled_where_it_is_too_much_and_says_so():
    """All hosts at once stay within nine tenths of what is free, in the profile's proportions."""
    derived = derive(make_profile(work=[1], slowness=[1, 1], capacity=[100 * GIB, 300 * GIB]), HERE)
    sizes = [host.memory_mib * 2**20 for host in parsed(derived).host]
    assert sum(sizes) == pytest.approx(0.9 * 64 * GIB, rel=1e-3)
    assert (sizes[1] - START_UP_BYTES) == pytest.approx(3 * (sizes[0] - START_UP_BYTES), rel=1e-3)
    assert "scaled by 0.142 to what this machine has" in cluster_text(derived, "test")


def test_a_machine_without_room_for_torch_is_refused():
    """Hosts that could not even import it are not written."""
    with pytest.raises(UsageError, match="Python and torch of 2 ranks take 800 MiB, and 461 MiB of this machine"):
        derive(make_profile(work=[1], slowness=[1, 1]), replace(HERE, memory_bytes=GIB / 2))


def test_wires_faster_than_can_be_shaped_are_left_out():
    """A wire of 80 Gbit/s is unshaped here, with a comment."""
    derived = derive(with_rates(make_profile(work=[1], slowness=[1, 1]), lambda *_: 1e10), HERE)
    assert parsed(derived).host[0].bandwidth_mbit is None
    assert "# bandwidth_mbit: its fastest link: 10.0 GB/s there" in cluster_text(derived, "test")


def test_hosts_without_links_are_unshaped():
    """A profile of workers that cannot talk still has its shares."""
    found = parsed(derive(make_profile(work=[1], slowness=[1, 2], links=False), HERE))
    assert [host.bandwidth_mbit for host in found.host] == [None, None]


def test_a_host_with_next_to_nothing_is_refused():
    """One worker two hundred times as slow as the other would never import torch."""
    with pytest.raises(UsageError, match=r"host1 would get 0\.0042 of a core"):
        derive(make_profile(work=[1], slowness=[1, 200]), HERE)


def test_a_kind_says_how_much_of_a_processor_it_had():
    """`(0.40 cores)` behind a kind is a share; other brackets are part of the name."""
    assert split_share("AMD EPYC (0.40 cores)") == ("AMD EPYC", 0.4)
    assert split_share("Intel(R) Xeon(R)") == ("Intel(R) Xeon(R)", None)


def test_the_whole_text_can_be_read_again(root):
    """Every sample profile of processors gives a file that loads, whose every line is short."""
    from assigner.formats.profile import load_profile

    for path in sorted((root / "profiles").glob("*/profile.json")):
        profile = load_profile(path)
        if any(not worker.name.endswith("/cpu") for worker in profile.workers):
            continue
        processor = split_share(profile.workers[0].kind)[0]
        text = cluster_text(derive(profile, replace(HERE, processor=processor)), "test")
        assert [host.name for host in parse_cluster(text).host] == list(dict.fromkeys(w.host for w in profile.workers))
        assert max(map(len, text.splitlines())) < 140


def test_a_cluster_file_is_text_whatever_the_command_line_was():
    """A line break, or a byte that is not UTF-8, in a path stays in the comment, as text."""
    made = derive(make_profile(work=[1e-3] * 3, slowness=[1, 2]), HERE)
    text = cluster_text(made, "assigner lab --from 'a\nb\udcff.json'")
    assert parse_cluster(text) == parse_cluster(cluster_text(made, "test"))
    assert text.encode().decode().splitlines()[0] == r"# Made by: assigner lab --from 'a\nb\udcff.json'"
