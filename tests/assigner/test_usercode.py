"""Errors in the user's code name the user's line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import sysconfig
import traceback

import pytest
import torch
from torch import nn

from assigner.errors import UsageError
from assigner.usercode import user_code, user_line, user_place, user_trace

INSTALLED = "/home/u/venv/lib/python3.11/site-packages/transformers/auto.py"


def test_the_innermost_place_of_the_users_counts():
    """Files of Python, of torch, of this package and of installed ones lie further in, and are passed over."""
    places = [("/home/u/net.py", 7), (INSTALLED, 3), (contextlib.__file__, 4), (nn.__file__, 5), ("<string>", 1)]
    assert user_place(places) == ("/home/u/net.py", 7)
    assert user_place([places[0], ("/home/u/layers.py", 9), *places[1:]]) == ("/home/u/layers.py", 9)


def test_a_package_is_named_where_nothing_else_can_be():
    """A model that is named on the line has no file of the user's."""
    assert user_place([(user_code.__globals__["__file__"], 1), (INSTALLED, 3), (torch.__file__, 4)]) == (INSTALLED, 3)
    assert user_place([(torch.__file__, 4)]) is None


def test_a_console_script_is_none_of_the_users(tmp_path):
    """Whoever starts one has not written it, nor has who starts it by a link; a script beside it is the user's."""
    script = f"{sysconfig.get_path('scripts')}/assigner"
    link = tmp_path / "assigner"
    link.symlink_to(script)
    assert user_place([(script, 8)]) is user_place([(str(link), 8)]) is None
    assert user_place([(f"{script}.py", 8)]) == (f"{script}.py", 8)
    assert user_place([(INSTALLED, 3), (script, 8)]) == (INSTALLED, 3)


def test_an_error_raised_in_the_standard_library_is_the_callers():
    """As one raised in torch is."""
    with pytest.raises(TypeError) as caught:
        contextlib.ExitStack().enter_context(3)
    assert user_line(caught.value).startswith(f"{__file__}:")
    with pytest.raises(RuntimeError) as failed:
        nn.Linear(2, 2)(torch.zeros(3))
    assert user_line(failed.value).startswith(f"{__file__}:")


def test_the_message_has_subject_line_and_reason():
    """And the next step, where the caller knows a better one than the traceback."""
    with pytest.raises(UsageError) as caught, user_code("Net(...)", hint="it is Net(width)"):
        raise ValueError("no luck\nat all")
    assert caught.value.message.startswith(f"Net(...) failed at {__file__}:")
    assert caught.value.message.endswith("ValueError: no luck")
    assert caught.value.hint == "it is Net(width)"
    assert user_line(ValueError("never raised")) == "an unknown line"


def test_it_imports_no_torch():
    """The command line loads it before any command."""
    use = "from assigner.usercode import user_place; user_place([('a.py', 1)])"
    code = f"import sys; {use}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _fail() -> None:
    nn.Linear(2, 2)(torch.zeros(3))


def test_a_traceback_has_the_users_frames_alone():
    """Those of torch and of this package are left out; an error of this package's own has none."""
    with pytest.raises(UsageError) as caught, user_code("Workload.model"):
        _fail()
    shown = user_trace("".join(traceback.format_exception(caught.value)))
    assert shown.startswith("Traceback")
    assert shown.count("Traceback") == 1
    assert [line for line in shown.splitlines() if line.startswith("  File")] == [
        line for line in shown.splitlines() if f'File "{__file__}"' in line
    ]
    assert "nn.Linear(2, 2)(torch.zeros(3))" in shown
    assert shown.splitlines()[-1].startswith("RuntimeError: ")
    assert user_trace(caught.value.trace) == shown
    with pytest.raises(UsageError) as refused, user_code("Workload.model"):
        raise UsageError("this is refused")
    assert user_trace("".join(traceback.format_exception(refused.value))) == ""


def test_a_traceback_of_an_endless_recursion_has_an_end():
    """Twenty frames of it are shown."""
    frames = "".join(f'  File "/home/u/net.py", line {n}, in f\n    f()\n' for n in range(900))
    shown = user_trace(f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")
    assert shown.count("  File") == 20
    assert "... 880 more" in shown
