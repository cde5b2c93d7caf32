"""What torch writes while it looks at a model is kept off the screen, and nothing else is."""

from __future__ import annotations

import contextlib
import io
import logging
import pdb
import sys
import threading
from typing import TYPE_CHECKING, NoReturn, TextIO

from assigner.errors import MarkingError
from assigner.model.deferred.memento import placed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what torch.export prints and logs on its way to an error off the screen: it comes out as a MarkingError.

    What other threads print has nothing to do with it: one of them may tell why the run fails
    (`runtime.failures.failure`). No debugger opens, which would wait in silence: ways are tried that no values go.

    Raises:
        MarkingError: the block calls `breakpoint()` or `pdb.set_trace()`, on the only way that there is.
    """
    out, err = _MutedHere(sys.stdout), _MutedHere(sys.stderr)
    openers = placed([(sys, "breakpointhook", _refuse), (pdb, "set_trace", _refuse)])
    with unlogged(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), openers:
        yield


def _refuse(*_: object, **__: object) -> NoReturn:
    raise MarkingError(
        "the forward opens a debugger, and is looked at without values",
        hint="open it in the training loop, or in a hook of one",
    )


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch's log of operations that refuse their arguments off the screen; the caller says what came of it.

    Its trace loses its handlers for so long: while it has one, torch takes a stack for every record, written or not.
    """
    before, trace = logging.root.manager.disable, logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        trace.handlers = handlers


class _MutedHere(io.TextIOBase):
    """A stream of which nothing comes out that the thread writes which has made this; all else goes to `stream`."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if self._stream is None or threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None and threading.get_ident() != self._thread:
            self._stream.flush()
