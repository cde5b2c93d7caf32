from dataclasses import replace

import pytest
from builders import make_profile, worker_name

from assigner.formats.profile import Measurement
from assigner.report.links import message_bytes
from assigner.report.partitions import ROW_LIMIT, groups
from assigner.report.profile import KIND_LIMIT, profile_data, profile_report
from assigner.report.sheet import Line, Sheet


def sheets(profile):
    return [part for part in profile_report(profile) if isinstance(part, Sheet)]


def test_partitions_of_a_kind_are_one_group():
    """Partitions that share their kind and measurements are one row per worker, named as a range."""
    profile = make_profile(work=[1e-3] * 5, slowness=[1, 2])
    alike = replace(
        profile,
        partitions=tuple(replace(part, kind="block") for part in profile.partitions),
        measurements=tuple(each for each in profile.measurements if each.partition == "p0"),
    )
    (group,) = groups(alike)
    assert group.partitions == ("p0", "p1", "p2", "p3", "p4")
    assert [row.workers for row in group.rows] == [("worker:0/cpu",), ("worker:1/cpu",)]
    assert sheets(alike)[1].rows[0][0] == "p0-4 (5)"


def test_workers_of_a_kind_are_one_row():
    """Workers that share a measurement are named by their kind and number."""
    profile = make_profile(work=[1e-3], slowness=[1, 1, 2])
    workers = tuple(replace(each, kind="small") if each.rank < 2 else each for each in profile.workers)
    measured = tuple(each for each in profile.measurements if each.worker != "worker:1/cpu")
    rows = sheets(replace(profile, workers=workers, measurements=measured))[1].rows
    assert [row[2] for row in rows] == ["small (x2)", "worker:2/cpu"]


def test_out_of_memory_and_unmeasured_are_said():
    """A pair that ran out of memory shows that, and one never measured shows that."""
    profile = make_profile(work=[1e-3], slowness=[1, 2, 3])
    kept = [each for each in profile.measurements if each.worker == "worker:0/cpu"]
    kept.append(Measurement("p0", "worker:1/cpu", 1, infeasible="out of memory"))
    rows = sheets(replace(profile, measurements=tuple(kept)))[1].rows
    assert rows[1][-1] == "out of memory"
    assert rows[2][-1] == "not measured"


def test_message_size_is_the_median_output():
    """Links are compared at the median output of the largest measured micro-batch."""
    assert message_bytes(make_profile(work=[1e-3] * 3, slowness=[1], edge_bytes=1e5)) == 4e5
    assert message_bytes(make_profile(work=[1e-3], slowness=[1])) > 0


def test_missing_link_and_no_links():
    """A pair that cannot talk is a dash; no links at all is a warning."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1, 2])
    one_way = sheets(replace(profile, links=profile.links[:1]))[2]
    assert one_way.rows[1] == ("worker:1/cpu", "-", "-")
    none = profile_report(make_profile(work=[1e-3] * 2, slowness=[1, 2], links=False))
    assert any(isinstance(part, Line) and "no links" in part.text for part in none)


def test_large_profile_stays_on_a_screen():
    """Of a large profile the heaviest partitions are listed, and the title says that it is a part."""
    profile = make_profile(work=[1e-3 * (n + 1) for n in range(30)], slowness=[1, 2, 3, 4])
    sheet = sheets(profile)[1]
    assert len(sheet.rows) <= ROW_LIMIT
    assert sheet.rows[0][0] == "p24"
    assert "6 of 30 kinds" in sheet.title
    assert "35.5 % of all" in sheet.title
    assert len(profile_data(profile)["partitions"]) == 30


def test_what_is_left_out_is_told_by_each_workers_own_time():
    """Workers that share most measurements have other totals where one has its own: none has more than all of them."""
    profile = make_profile(work=[1e-3 * (n + 1) for n in range(30)], slowness=[1, 1])
    workers = tuple(replace(each, kind="small") for each in profile.workers)
    own = [each for each in profile.measurements if each.worker == "worker:1/cpu" and each.partition == "p29"]
    slow = [replace(each, forward_s=10 * each.forward_s, backward_s=10 * each.backward_s) for each in own]
    shared = [each for each in profile.measurements if each.worker == "worker:0/cpu"]
    title = sheets(replace(profile, workers=workers, measurements=(*shared, *slow)))[1].title
    assert "23 of 30 kinds" in title
    assert "96.2 % of all" in title


def test_room_for_tensors_is_shown():
    """What the allocator takes of a worker's capacity is not room for tensors, in the table and for --json."""
    profile = make_profile(work=[1e-3], slowness=[1, 2], capacity=6 * 2**30)
    first = replace(profile.workers[0], allocator_share=0.25, reserve_bytes=2**30)
    profile = replace(profile, workers=(first, profile.workers[1]))
    sheet = sheets(profile)[0]
    assert sheet.columns[-1].header == "for tensors GiB"
    assert sheet.columns[-1].rank == 0
    assert [row[-2:] for row in sheet.rows] == [("5.00", "4.00"), ("6.00", "6.00")]
    assert [(each["allocator_share"], each["tensor_bytes"]) for each in profile_data(profile)["workers"]] == [
        (0.25, 4 * 2**30), (0.0, 6 * 2**30),
    ]  # fmt: skip


def test_json_has_all_that_was_measured():
    """Recomputing, None where it was not measured, and the update's spread are there beside the other figures."""
    profile = make_profile(work=[1e-3], slowness=[1])
    points = tuple(replace(each, recompute_s=2e-3, update_spread=0.07) for each in profile.measurements)
    for found, recompute_s, spread in ((replace(profile, measurements=points), 2e-3, 0.07), (profile, None, 0.0)):
        (timing,) = profile_data(found)["partitions"][0]["timings"]
        assert (timing["recompute_s"], timing["update_spread"]) == (recompute_s, spread)


def test_share_of_the_model():
    """What all partitions of a kind take is a share of their worker's time for the whole model."""
    profile = make_profile(work=[1e-3, 3e-3], slowness=[1, 2])
    assert [row[8] for row in sheets(profile)[1].rows] == ["25.0", "25.0", "75.0", "75.0"]
    assert profile_data(profile)["partitions"][1]["timings"][0]["share"] == pytest.approx(0.75)


def test_many_workers_are_rows_by_host_and_kind():
    """Above the limit workers of a host and kind are one row with the least memory; -v lists each."""
    profile = make_profile(work=[1e-3], slowness=[1] * 20, capacity=[2**30 * (1 + n) for n in range(20)])
    workers = tuple(replace(each, kind="a", host=f"host{each.rank // 10}") for each in profile.workers)
    profile = replace(profile, workers=workers)
    assert [row[:5] for row in sheets(profile)[0].rows] == [
        ("worker:0-9 (10)", "a", "host0", "1", "1.00"), ("worker:10-19 (10)", "a", "host1", "1", "11.0"),
    ]  # fmt: skip
    assert len(profile_report(profile, everything=True)[1].rows) == 20


def test_warnings_are_shown():
    """The profile's own warnings are the last lines."""
    profile = replace(make_profile(work=[1e-3], slowness=[1]), warnings=("the wire is shared",))
    assert profile_report(profile)[-1] == Line("warning: the wire is shared", "warning")


def test_bars_compare_one_sample():
    """Where a worker could not be measured at the largest size, its bar is as long as its time a sample says."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1, 1])
    failed = tuple(
        replace(each, infeasible="out of memory") if (each.worker, each.micro_batch) == ("worker:0/cpu", 4) else each
        for each in profile.measurements
    )
    sheet = sheets(replace(profile, measurements=failed))[1]
    bars = [row[-1] for row in sheet.rows]
    assert len(bars) >= 2
    assert len(set(bars)) == 1
    assert "bars of one sample" in sheet.title


def test_thousands_of_workers_are_a_few_rows():
    """Of each partition the slowest workers, of kinds the first, of ranks the first and the last; titles say so."""
    count = KIND_LIMIT + 8
    wide = make_profile(work=[1e-3], slowness=[1 + n / count for n in range(count)], links=False)
    workers, times = sheets(wide)
    assert len(workers.rows) == KIND_LIMIT
    assert workers.title.endswith(f"; {KIND_LIMIT} of {count} kinds")
    assert [row[2] for row in times.rows] == [worker_name(n) for n in range(count - ROW_LIMIT, count)]
    assert times.title.endswith(f"; rows of the slowest workers, {count - ROW_LIMIT} more with -v")
    whole = [part for part in profile_report(wide, everything=True) if isinstance(part, Sheet)]
    assert [len(part.rows) for part in whole] == [count, count]
    two = tuple(replace(each, kind=f"kind{each.rank % 2}") for each in wide.workers)
    rows = sheets(replace(wide, workers=two))[0].rows
    assert [row[0] for row in rows] == [f"worker:{n} ... {count - 2 + n} ({count // 2})" for n in (0, 1)]
