"""What a run of several hosts says: whose words, whose failure, and why."""

from __future__ import annotations

import io
import os

import pytest

from assigner.errors import UsageError, WorkerError
from assigner.lab.cluster import Cluster, Host
from assigner.lab.running import _judge, _start, _writer

PAIR = Cluster((Host("left", memory_mib=100), Host("right", memory_mib=200)))


class MadeGroup:
    """A host's control group of which the kernel says this."""

    def __init__(self, *, killed, at_limit):
        self.memory_kills, self.reached_limit = (lambda: int(killed)), (lambda: at_limit)


def made_groups(*, killed=(), at_limit=()):
    return [MadeGroup(killed=n in killed, at_limit=n in at_limit) for n in range(2)]


def judged(groups, codes=(-9, 1), first=0):
    with pytest.raises(WorkerError) as caught:
        _judge(PAIR, groups, list(codes), first=first, late=[], timeout_s=None)
    return caught.value.message


def test_a_host_at_its_limit_is_out_of_memory():
    """It comes before another host that fell to the machine's want, whatever their order."""
    assert judged(made_groups(killed=(1,), at_limit=(1,))).startswith("host right was out of memory: limit 200 MiB")
    assert judged(made_groups(killed=(0, 1), at_limit=(1,))).startswith("host right was out of memory")


def test_a_kill_below_the_limit_is_the_machines():
    """A host that never was at its limit is not told to need less than it."""
    said = judged(made_groups(killed=(1,), at_limit=(0,)))
    assert said.startswith("this machine ran out of memory: the kernel killed a process of host right")


def test_other_ends_are_told_as_they_are():
    """A code, a signal, and a signal without a name."""
    assert judged(made_groups()) == "host left was killed by SIGKILL"
    assert judged(made_groups(), first=1) == "host right ended with exit code 1"
    assert judged(made_groups(), codes=(-40, 0)) == "host left was killed by signal 40"


def test_words_that_a_terminal_cannot_show_end_no_run():
    """A question mark stands for what the stream's encoding lacks; a stream of text takes everything."""
    kept = io.BytesIO()
    narrow = io.TextIOWrapper(kept, encoding="ascii")
    _writer(narrow)("[a] grün ✓\n")
    assert kept.getvalue() == b"[a] gr?n ?\n"
    text = io.StringIO()
    _writer(text)("[a] grün ✓\n")
    assert text.getvalue() == "[a] grün ✓\n"


def test_a_host_that_cannot_be_entered_is_named():
    """The host and what failed, not the name of a hook of Python's."""

    def refuse():
        raise OSError("busy")

    with pytest.raises(UsageError, match="true cannot be started on host right: it could not enter"):
        _start(["true"], dict(os.environ), refuse, "right")
    with pytest.raises(UsageError, match=r"no-such-program cannot be started on host left: .*No such file"):
        _start(["no-such-program"], dict(os.environ), lambda: None, "left")
