"""Do all ranks make the same call with the same batch? If not, they wait for each other, or their losses mean nothing.

Before every call that they make together one rank, which has the batch's inputs, tells a hash of the call, of the
inputs and of the targets: of structure, shapes, types, plain values, and a sample of the values that lie on the CPU
(others would have to be waited for). Each rank compares what it has. So a sampler that is seeded differently on one
rank is noticed, and so is a rank that makes a step less. In what they differ is asked for only then (`inquiry`).

A rank may have no inputs or no targets (`needs`). It still needs their rows, to cut them, and what chooses the model's
graph: their structure, shapes, types and plain values, their outline. It gets that as text (JSON: nothing in it can run
code) and puts tensors without values, on the meta device, in their place:

    {"ids": int64 (8, 16), "flag": True}   ->   {"ids": ["tensor", 0], "flag": true}, ["int64", [8, 16], [16, 1]]

An outline is told once for each structure, with its shapes and plain values; all ranks remember the same ones:

    rank 0, tells    inputs a  ->  hash of a, new: outline of a     inputs b  ->  hash of b, new: outline of b
    rank 1           None      ->  takes the outline of a           b         ->  compares, keeps the outline
    next step        a: rank 0 tells its hash alone, and rank 1 knows the outline

What micro-batches count for (`Workload.weight`) comes with the hashes. Where the first rank has no targets, the one
that needs them tells of them, and the weights, in a message of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from assigner.errors import FormatError, UsageError, WorkerError
from assigner.model.plainvalues import DTYPES, dtype_name, from_json, to_json
from assigner.runtime.failures.callrecord import SETTINGS, ToldCall, TreeSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.runtime.batch.needs import Needs
    from assigner.runtime.failures.callrecord import CallRecord, CallSums
    from assigner.runtime.ranks.membership import Membership

LEAVING = "close()"
"""The call with which a rank leaves."""

_HINTS = {
    "the call": "every rank makes the same calls, in the same order",
    SETTINGS: "every rank sets the same learning rates and other settings: by what all have, as the step's number;"
    " what an optimizer's own step notes of its parameters, as a norm, goes into their state, not into the groups",
}
_BATCHES = (
    "every rank makes the same calls with the same batches: seed the sampler alike, and shard no data; a rank that"
    " needs no inputs or targets (pipeline.needs_inputs, pipeline.needs_targets) may give None"
)
_MOST_OUTLINES = 1024
_LEAVES, _HAS_TARGETS = 1, 2


class GivenBatch(NamedTuple):
    """A batch as a rank goes on with it."""

    inputs: Any  # the script's own; where it gave none, like those of other ranks, with tensors on the meta device
    targets: Any
    weights: Sequence[float] | None  # what each micro-batch counts for, and more numbers; None: nobody has told


class _CallHashes(NamedTuple):
    """What one rank tells all others before a call; hashes are numbers of 63 bits."""

    call: int  # of the calls since the last time
    inputs: int = 0  # of structure, shapes, types and values
    key: int = 0  # of structure, shapes, strides and types
    targets: int = 0
    bits: int = 0  # whether it is the end, and whether this rank has targets


class CallComparison:
    """Compares the calls of all ranks, and their batches, of so many micro-batches at most."""

    def __init__(self, member: Membership, needs: Needs, micro_batches: int) -> None:
        self._member, self._needs = member, needs
        self._weights = micro_batches if needs.weighs else 0
        self._outlines: OrderedDict[int, str] = OrderedDict()
        self._covered = False
        self._noted: list[ToldCall] = []

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """What is called in the block belongs to a call that was compared, and is not compared itself."""
        self._covered = True
        try:
            yield
        finally:
            self._covered = False

    @property
    def compares(self) -> bool:
        """Whether a call that is made now is compared, or noted for the next comparison."""
        return self._member.transport is not None and not self._covered

    def check(self, call: str, shown: str = "", *, exchanges: bool = True) -> None:
        """Every rank calls this before anything else that it does for a call without a batch, in a guarded block.

        `call` has the arguments that must be the same, `shown` others too, for people. One in which the ranks tell each
        other nothing (not `exchanges`) is compared with the next.

        Raises:
            UsageError: another rank makes another call, or this or the other one leaves alone.
        """
        if not self.compares:
            return
        if exchanges:
            self._compare(self._begin(call, shown, None, None))
        else:
            self._noted.append(ToldCall.now(call, shown))

    def given(
        self,
        call: str,
        batch: tuple[Any, Any],
        *,
        loss: bool = True,
        weigh: Callable[[tuple[Any, Any]], Sequence[float]] | None = None,
    ) -> GivenBatch:
        """As `check`, for a call with a batch, (inputs, targets); None for what this rank was not given.

        What it has to know of inputs that it has not, it gets. `weigh` says what micro-batches count for; None: for
        their rows. With `loss` the call asks for targets.

        Raises:
            UsageError: another rank makes another call or has another batch, or this one lacks what it needs.
        """
        (inputs, targets), needs, me = batch, self._needs, self._member.rank
        needs.check(inputs, targets, loss=loss)
        if self._member.transport is None:
            return GivenBatch(inputs, targets, None)
        has_targets = loss and (targets is not None or me == needs.targets_rank or needs.targets_are_none)
        mine = self._begin(
            call, "", None if inputs is None else TreeSums(inputs), TreeSums(targets) if has_targets else None
        )
        tells, weights = me == needs.inputs_rank, None
        if tells and has_targets and weigh is not None:
            weights = weigh(batch)
        key = 0 if mine.inputs is None or not tells else _digest(f"{mine.inputs.form} {mine.inputs.strides}") | 1
        told, weights = self._compare(mine, key=key, weights=weights)
        text = self._outline(told.key, inputs)
        if inputs is None:
            inputs = inputs_of(text, f"worker:{needs.inputs_rank}")
        if loss and not told.bits & _HAS_TARGETS and (weigh is not None or self._member.world > 2):
            weights = weigh((inputs, targets)) if me == needs.targets_rank and weigh is not None else None
            _, weights = self._compare(mine, root=needs.targets_rank, weights=weights)
        return GivenBatch(inputs, targets, None if weigh is None else weights)

    def _begin(self, call: str, shown: str, inputs: TreeSums | None, targets: TreeSums | None) -> CallSums:
        """A comparison, of this call and of those that were noted."""
        noted = tuple(self._noted)
        self._noted.clear()
        return self._member.begin_call((*noted, ToldCall.now(call, shown)), inputs, targets)

    def _compare(
        self, mine: CallSums, *, root: int | None = None, key: int = 0, weights: Sequence[float] | None = None
    ) -> tuple[_CallHashes, list[float]]:
        """What `root` tells (None: who has the inputs), after it was found to be this rank's own; it gives the rest."""
        root = self._needs.inputs_rank if root is None else root
        leaves = mine.calls[-1].name == LEAVING
        own = _CallHashes(
            _digest(str([each.name for each in mine.calls])),
            _digest_of(mine.inputs),
            key,
            _digest_of(mine.targets),
            leaves * _LEAVES | (mine.targets is not None) * _HAS_TARGETS,
        )
        self._member.at = "the comparison of the ranks' batches"
        message = torch.tensor([*own, *([0] * self._weights)], device="cpu")
        if weights:
            message[len(own) : len(own) + len(weights)] = torch.tensor(weights, dtype=torch.float64, device="cpu").view(
                torch.int64
            )
        message = self._member.tensors_of({root: message})[root]
        told = _CallHashes(*message[: len(own)].tolist())
        if (told.bits ^ own.bits) & _LEAVES:
            self._refuse_to_part(mine, root)
        unlike = (
            told.call != own.call,
            mine.inputs is not None and told.key and told.inputs != own.inputs,
            mine.targets is not None and told.bits & _HAS_TARGETS and told.targets != own.targets,
        )
        if any(unlike):
            self._refuse(mine, root)
        return told, message[len(own) :].view(torch.float64).tolist()

    def _outline(self, key: int, inputs: Any) -> str:
        """The outline of a key; one that was not told yet is told now, and every rank knows whether it was."""
        if key not in self._outlines:
            tells = self._member.rank == self._needs.inputs_rank
            self._outlines[key] = self._member.text_from(self._needs.inputs_rank, outline(inputs) if tells else "")
            if len(self._outlines) > _MOST_OUTLINES:
                self._outlines.popitem(last=False)
        self._outlines.move_to_end(key)
        return self._outlines[key]

    def _refuse(self, mine: CallSums, root: int) -> NoReturn:
        """This rank and another one differ: say in what, and who is alone with it."""
        me, other, own = f"worker:{self._member.rank}", f"worker:{root}", mine.record()
        found = self._asked(mine.number)
        theirs = found.pop(root, None)
        if theirs is None:
            what, told = "what they call or in its batch", f"{other} does not say what it called"
        else:
            what = own.difference(theirs, me, other) or "their batches"
            told = f"{other} calls {theirs.told}"
            for rank, record in found.items():
                alike = [name for name, one in ((me, own), (other, theirs)) if not record.difference(one, "", "")]
                told += f"; worker:{rank} is like {alike[0]}" if len(alike) == 1 else ""
        raise UsageError(
            f"{me} and {other} differ in {what}; {me} calls {own.told}; {told}",
            hint=_HINTS.get(what, _BATCHES),
        )

    def _refuse_to_part(self, mine: CallSums, root: int) -> NoReturn:
        """This rank or another one leaves the run, and the other one does not: tell it of the one that leaves."""
        me, own, theirs = self._member.rank, mine.record(), self._asked(mine.number).get(root)
        leaves = own.calls[-1].name == LEAVING
        leaver, other = (me, root) if leaves else (root, me)
        end, call = (own, theirs) if leaves else (theirs, own)
        where = "" if end is None else f", at {end.calls[-1].place},"
        error = UsageError(
            f"its pipeline was closed, or its script came to an end{where or ','} while worker:{other} went on with"
            f" {'another call' if call is None else call.told}",
            hint="every rank makes the same calls with the same batches: as many steps, then close()",
        )
        self._member.blame(leaver, error)
        raise error

    def _asked(self, number: int) -> dict[int, CallRecord]:
        """The other ranks' records of the comparison of a number, of those that have come to it."""
        answers = self._member.ask_calls(number)
        return {rank: each for rank, records in answers.items() for each in records if each.number == number}


def _digest_of(sums: TreeSums | None) -> int:
    return 0 if sums is None else _digest(f"{sums.form} {sums.sums}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()) >> 1


def outline(inputs: Any) -> str:
    """A batch's inputs as text; those that cannot be told are text too, which says why."""
    tensors: list[torch.Tensor] = []
    try:
        plain = to_json(inputs, "inputs", tensors)
        return json.dumps({"inputs": plain, "tensors": [_layout_of(each) for each in tensors]})
    except UsageError as error:
        return json.dumps({"refused": error.message})


def inputs_of(text: str, worker: str) -> Any:
    """The inputs that an outline, as a worker has told it, is of, with tensors that have no values.

    Raises:
        UsageError: they are of a kind that cannot be told.
        WorkerError: this is no outline.
    """
    try:
        found = json.loads(text)
        if "refused" in found:
            raise UsageError(
                f"this rank was given no inputs, and {worker} cannot tell it what they are: {found['refused']}",
                hint="give every rank the inputs, or such values in plain tensors, numbers and text, in tuples, lists"
                " and dicts",
            )
        tensors = [
            torch.empty_strided(sizes, strides, dtype=DTYPES[dtype], device="meta")
            for dtype, sizes, strides in found["tensors"]
        ]
        return from_json(found["inputs"], tensors)
    except UsageError:
        raise
    except (FormatError, ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise WorkerError(
            f"{worker} has told something else than inputs ({type(error).__name__})",
            hint="all hosts run one release of assigner",
        ) from error


def _layout_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise UsageError(f"one of the inputs is {'nested' if tensor.is_nested else f'of layout {tensor.layout}'}")
    return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()
