"""What `Pipeline` offers beside steps: the rank in its run, and the state of the model, in memory and in files."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from assigner.errors import FormatError, Otherwise, UsageError
from assigner.launch.stopping import GRACE_S, SIGNALS
from assigner.model.marking.marks import matches
from assigner.model.members import named_buffers
from assigner.runtime.batch.callcomparison import LEAVING
from assigner.runtime.checkpoints.checkpoint import Checkpoint, TrainingProgress
from assigner.runtime.checkpoints.saving import Saving
from assigner.runtime.checkpoints.wholestate import WholeState
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.ranks.membership import outside_inference
from assigner.runtime.ranks.packedvalues import PackedValue, broadcast
from assigner.runtime.ranks.run import one_call
from assigner.runtime.step.results import exact_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.nn.modules.module import _IncompatibleKeys

    from assigner.formats.plan import Plan
    from assigner.launch.steptimes import StepClock
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.runtime.installation import Installation
    from assigner.runtime.keptmodel import KeptModel
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.update.rankoptimizer import RankOptimizer
    from assigner.runtime.update.scaling import GradientScaling


_MODES = "leave it out: step trains, evaluate and forward run in eval mode"
_TYPES = "Workload(autocast=...) computes in another type; or have the model's builder convert the model"
_WHOLE = (
    "this rank's parameters and buffers are pipeline.named_parameters() and pipeline.state_dict(); a plain model of the"
    " whole: model = workload.model(), and model.load_state_dict(weights) where pipeline.full_state_dict() gives them"
)
_PLACES = "leave it out: the plan says where partitions are, and each rank moves what it reads of a batch"


class ModelState:
    """What `Pipeline` offers of the run itself, and of parameters, buffers, gradients and checkpoints."""

    workload: Workload
    plan: Plan
    graph: PartitionGraph
    scaler: torch.amp.GradScaler
    steps: int
    _member: Membership
    _installed: Installation
    _clock: StepClock
    _batches: int
    _trains: bool
    _kept: KeptModel
    _rank_optimizer: RankOptimizer
    _scaling: GradientScaling

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._member.rank

    @property
    def worker(self) -> str | None:
        """This rank's worker, `worker:1/cpu`; None: the plan leaves this rank out."""
        return self._member.worker

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions that this rank holds."""
        return self._installed.share.partitions

    @property
    def needs_inputs(self) -> bool:
        """This rank has to hand in the inputs of batches: its partitions read some of them.

        What holds is said for the plan's graph and for those that were captured since, as for `evaluate`: ask again
        after `move`, and after a batch of another kind.
        """
        with one_call(asks=True), kept_generators(self._member.device):
            return self._installed.needs.inputs

    @property
    def needs_targets(self) -> bool:
        """This rank has to hand in the targets of batches: it makes the model's output, and so the loss."""
        with one_call(asks=True), kept_generators(self._member.device):
            return self._installed.needs.targets

    def _compare(self, call: str, at: str, *, shown: str = "") -> None:
        """All ranks make this call, or every one of them is told which does not; see `CallComparison.check`."""
        with self._member.guarded(at):
            self._installed.comparison.check(call, shown)

    @one_call()
    def share(self, value: Any = None, source: int = 0) -> Any:
        """A value of one rank, on every rank: what only that one knows decides what all of them do.

            if pipeline.share(clock.left() < 60 if pipeline.rank == 0 else None):
                break

        Args:
            value: On rank `source` plain values, tensors, or lists, tuples and dicts of these; ignored on the others.
            source: The rank whose value it is.

        Returns:
            The value of rank `source`, a copy on every rank; tensors are on the CPU.

        Raises:
            UsageError: it holds something else, on every rank alike; or there is no such rank.
        """
        self._member.check_rank(source)
        at = f"sharing a value of worker:{source}"
        self._compare(f"share(source={source})", at)
        packed = self._member.agree(at, lambda: PackedValue.of(value, "value") if self.rank == source else None)
        with self._member.guarded(at):
            return broadcast(self._member, source, packed)

    @one_call()
    def sum_over_parameters(self, numbers: Mapping[str, float | torch.Tensor]) -> float:
        """The sum of a number of each parameter of the model, over all ranks; all ranks call it together.

            squares = {name: each.detach().square().sum() for name, each in pipeline.named_parameters()}
            norm = pipeline.sum_over_parameters(squares) ** 0.5

        Args:
            numbers: Or tensors of one element, by names of `named_parameters`, of all or some. That of a parameter that
                several workers hold counts once.

        Returns:
            The sum, the same number on every rank, and under every plan as exact as a float can be.

        Raises:
            UsageError: a name is of no parameter of its rank's, or a tensor has more elements, or fewer.
        """
        at = "a sum over parameters"
        self._compare("sum_over_parameters()", at)
        mine = self._member.agree(at, lambda: self._summed(numbers))
        with self._member.guarded(at):
            told = self._member.numbers_of_all(mine)
        return exact_sum(itertools.chain(*told))

    def _summed(self, numbers: Mapping[str, float | torch.Tensor]) -> tuple[float, float]:
        """The sum of those that this rank counts, and what rounding took from it."""
        for name, each in numbers.items():
            if name not in self._installed.share.parameters:
                raise UsageError(
                    f"{name!r} is no parameter of this rank's",
                    hint="give numbers by names of pipeline.named_parameters(), each rank of its own",
                )
            if isinstance(each, torch.Tensor) and (each.numel() != 1 or each.is_complex()):
                raise UsageError(
                    f"for {name} there is a tensor of shape {tuple(each.shape)}, {each.dtype}, not a number",
                    hint="give its sum, as (weight * weight.grad).sum()",
                )
        counted = [each for name, each in numbers.items() if self._installed.gradients.counts(name)]
        found = [float(each.detach() if isinstance(each, torch.Tensor) else each) for each in counted]
        total = exact_sum(found)
        return total, exact_sum([*found, -total]) if math.isfinite(total) else 0.0

    @one_call()
    def stop_requested(self, *, signals: Sequence[str] = SIGNALS, grace_s: float = GRACE_S) -> bool:
        """Whether a signal has asked any rank to stop: the same answer on every rank, at the same step.

            for batch in batches:
                pipeline.step(batch)
                if pipeline.stop_requested():
                    break

        From the first call on, until the pipeline is closed, a first signal is noted instead of ending the process.
        The same one again, more than 2 s later, ends it as usual. What the script has made of a signal itself is called
        too; one that is ignored stays ignored. `assigner run` passes signals on and waits for its ranks to end.

        Args:
            signals: Their names; the same in every call.
            grace_s: How long `assigner run` waits for the ranks to end after a signal, in seconds.

        Raises:
            UsageError: there is no such signal; other arguments than in the first call; or the first call is not made
                in the main thread.
        """
        signals = (signals,) if isinstance(signals, str) else tuple(signals)
        self._compare(f"stop_requested(signals={signals}, grace_s={grace_s})", "the question whether to stop")
        return self._member.stop_requested(signals, grace_s)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names; a shared one once, by its first name.

        They are for what is done to each by itself. torch.nn.utils.clip_grad_norm_ over them clips by the norm of this
        rank's gradients alone, another one on every rank, and the update that follows is refused; the pipeline's own
        `clip_grad_norm_` takes that of all.
        """
        yield from self._installed.share.parameters.items()

    parameters = Otherwise(
        "a pipeline",
        "clip by pipeline.clip_grad_norm_ or step(batch, max_norm=...); the optimizer is pipeline.optimizer; this"
        " rank's parameters, for what is done to each by itself, are pipeline.named_parameters()",
        "every rank holds its own part of the model, and a norm, a count or an optimizer over that would be another one"
        " on every rank",
    )
    train = Otherwise("a pipeline", _MODES)
    eval = Otherwise("a pipeline", _MODES)
    to = Otherwise("a pipeline", _PLACES)
    cuda = Otherwise("a pipeline", _PLACES)
    half = Otherwise("a pipeline", _TYPES)
    bfloat16 = Otherwise("a pipeline", _TYPES)
    model = Otherwise("a pipeline", _WHOLE, "the model is nowhere whole", called=False)
    module = Otherwise("a pipeline", _WHOLE, "the model is nowhere whole", called=False)
    zero_grad = Otherwise(
        "a pipeline", "step drops gradients by itself; behind update=False, pipeline.optimizer.zero_grad()"
    )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as `Otherwise` refuses names.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a pipeline is not called as a model is: its forwards run micro-batch by micro-batch, on several workers",
            hint="pipeline.step(batch) trains, pipeline.evaluate(batch) gives the loss, pipeline.forward(inputs) the"
            " output; torch.compile(pipeline) compiles nothing: Workload(compile=True) does, each partition",
        )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refused: what `copy` and `pickle` ask for.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a pipeline is neither copied nor pickled (copy.deepcopy, AveragedModel, torch.save): it is one rank's part"
            " of a run",
            hint="pipeline.save(folder) writes a checkpoint, torch.save(pipeline.full_state_dict(), path) the weights"
            " on rank 0; an average of the weights is a tensor for each of pipeline.named_parameters()",
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by parameter name; a parameter that got none is not there.

        That of a parameter which several ranks hold is the sum over them, after every step. A scaler's factor is taken
        out here; it is still in the parameters' `.grad` until they are clipped or applied.
        """
        return self._installed.gradients.named()

    @one_call()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        names: Iterable[str] | str | None = None,
        error_if_nonfinite: bool = False,
    ) -> float:
        """Clip the gradients as torch.nn.utils.clip_grad_norm_ does on the whole model; all ranks call it together.

        Args:
            max_norm: Gradients with a larger norm are multiplied so that they have this one.
            norm_type: The p of the p-norm: a positive number or math.inf.
            names: Of parameters, of modules for all in them, or patterns: the norm is of these, and they are clipped.
            error_if_nonfinite: Refuse a norm that is not finite; nothing was changed then.

        Returns:
            The norm of these gradients before, the same number on every rank.

        Raises:
            UsageError: `norm_type` is not positive, a name is of none, or the norm is not finite and shall be.
        """
        if not (norm_type := float(norm_type)) > 0:
            raise UsageError(f"norm_type={norm_type}: expected a positive number or math.inf")
        names = sorted({names} if isinstance(names, str) else {*names}) if names is not None else None
        left_out = self._installed.gradients.left_out(names)
        given = f"{max_norm}, norm_type={norm_type}, names={names}, error_if_nonfinite={error_if_nonfinite}"
        self._compare(f"clip_grad_norm_({given})", "the clipping of gradients")
        with self._member.guarded("the clipping of gradients"):
            norm = self._installed.gradients.norm(norm_type, left_out)
        if error_if_nonfinite and not math.isfinite(norm):
            raise UsageError(f"the norm of the gradients is {norm}", hint="error_if_nonfinite=False clips nevertheless")
        self._installed.gradients.shrink(norm, max_norm, left_out)
        return norm

    @one_call()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Cut every element of the gradients to within plus or minus `clip_value`; all ranks call it together."""
        with self._member.guarded("the clipping of gradients"):
            self._installed.comparison.check(f"clip_grad_value_({clip_value})", exchanges=self.scaler.is_enabled())
            self._installed.gradients.clamp(clip_value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the model's own names; a shared parameter by its first name.

        The names are those of `named_parameters`; where the plain model's own state_dict has other keys (wrappers and
        parametrizations change them), `full_state_dict` has these.

        Raises:
            UsageError: a forward has registered a parameter, or put another one in the place of one that is trained.
        """
        self._installed.share.check_parameters()
        return self._installed.share.state()

    @outside_inference()
    @one_call()
    def full_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """The state_dict of the whole model, as the plain model has it: `load_state_dict(strict=True)` takes it.

            weights = pipeline.full_state_dict()
            if weights is not None:
                torch.save(weights, "best.pt")

        Every rank calls it, at any time between two steps. Tensors go one by one to the ranks that want them: no other
        rank holds more than its own part and one tensor. A weight with several names stands under each of them, and
        the model's own state_dict code (hooks, extra state) has run.

        Args:
            to: The rank that gets it; None: every rank.

        Returns:
            Copies on the CPU, by the plain model's own keys, on rank `to`; None on the others.

        Raises:
            UsageError: a tensor, or a module's extra state, cannot go to another rank; or there is no such rank; or
                the copies of a weight have come apart.
        """
        self._member.check_rank(to)
        self._compare(f"full_state_dict(to={to})", "gathering the model's state")
        self._compare_copies("gathering the model's state")
        return self._whole.gather(to)

    @outside_inference()
    @one_call()
    def load_state_dict(self, state_dict: Mapping[str, Any] | None, *, strict: bool = True) -> _IncompatibleKeys:
        """Take over the weights and buffers of a plain model, as pretrained ones; optimizer and counts stay.

            pipeline.load_state_dict(torch.load("best.pt", weights_only=True) if pipeline.rank == 0 else None)

        Every rank calls it; at least one gives the state_dict, and it goes tensor by tensor to those ranks alone that
        hold the parameter. The model's own loading code runs, and all ranks check shapes and types before anything is
        changed. Of a weight with several names, one is enough, and several must agree. Values are cast to the model's
        types as torch does it.

        Args:
            state_dict: By the plain model's own keys; None: another rank gives it.
            strict: False: keys too few or too many are no error, and what is missing stays as it is.

        Returns:
            `missing_keys` and `unexpected_keys`, the same on every rank.

        Raises:
            UsageError: it does not fit the model, ranks have given different ones, or none has given one. On every
                rank, and nothing has changed.
        """
        self._compare(f"load_state_dict(strict={strict})", "loading a state_dict")
        found = self._whole.hand_out(state_dict, strict=strict)
        self._kept.is_outdated = False
        return found

    def _compare_copies(self, at: str) -> None:
        """Of what several workers hold one worker's copy is taken: refuse, on all ranks, copies that are not alike."""
        if self.plan.is_replicated:
            self._member.agree(at, self._installed.watch.copies.compare)

    @property
    def _whole(self) -> WholeState:
        return WholeState(self._installed.share, self._member)

    @contextlib.contextmanager
    def kept_buffers(self, *patterns: str) -> Iterator[None]:
        """Have buffers be after the block what they were before it: what its forwards do to them is taken back.

            with pipeline.kept_buffers("generator.**"):
                pipeline.step(batch)  # a second forward of the generator does not move its running statistics

        It is local to this rank. Attributes that forwards change in Python are not kept.

        Args:
            patterns: Of the buffers' names in the model, as of marks: `*` stops at dots, `**` goes on over them.

        Raises:
            UsageError: a pattern matches no buffer of the model, or the pipeline moved to another plan in the block.
        """
        names = [name for name, _ in named_buffers(self.graph.deferred.model, remove_duplicate=False)]
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                raise UsageError(
                    f"kept_buffers({pattern!r}): the model has no such buffer",
                    hint=f"its buffers are {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
                    if names
                    else "it has none",
                )
        share = self._installed.share
        with share.keeping(patterns):
            yield
        if share is not self._installed.share:
            raise UsageError("the pipeline moved to another plan among kept buffers", hint="move outside of the block")

    @one_call()
    def reset_carried(self, *, training: bool = True, evaluation: bool = True) -> None:
        """Have state that goes from batch to batch begin anew; every rank calls this.

        The next batch then begins with the state that stands in its own inputs, as the first one did. Training has a
        state of its own; evaluations and forwards have another one together.

        Args:
            training: That of `step`.
            evaluation: That of `evaluate` and `forward`.

        Raises:
            UsageError: the workload carries no state.
        """
        if not self.workload.carried:
            raise UsageError(
                "the workload carries no state from batch to batch",
                hint="Workload.carried says which input of the model is which output of its call before",
            )
        call = f"reset_carried(training={training}, evaluation={evaluation})"
        self._compare(call, "the reset of the carried state")
        if training:
            self._installed.training.carried.put(None)
        if evaluation:
            self._installed.inference.carried.put(None)

    @one_call()
    def save(self, folder: Path | str, state: Any = None, *, force: bool = False) -> None:
        """Write a checkpoint: every rank its own part, weights and optimizer state, keyed by the model's names.

        Under its name the folder is complete, the old one or the new one, whenever a process is killed. It must lie on
        a file system that all ranks share. Any plan for the same model can load it, on any number of ranks. The
        scaler's state and the counts of batches and updates are in it: randomness is seeded by these, and needs nothing
        else. So is the state that training carries from batch to batch. Gradients are not.

        Args:
            folder: Where to; its last name is the same on every rank, whatever lies before it.
            state: What the script needs to go on, as {"scheduler": scheduler.state_dict()}: plain values of rank 0.
            force: Replace an existing checkpoint, once the new one is whole.

        Raises:
            UsageError: the folder exists, or holds files of others; another run is saving there; `state` holds a value
                that is not plain; a weight is NaN; or the disk is full. What stood there stays, and training can go on.
        """
        # the folder may be mounted elsewhere on each host; its own name is one
        self._compare(f"save({Path(folder).name!r})", f"saving to {folder}", shown=f"save({str(folder)!r})")
        progress = TrainingProgress(
            self.steps, self._batches, self.scaler.state_dict(), state if self.rank == 0 else None
        )
        carried = self._installed.training.carried
        with self._member.guarded("the gathering of the carried state"):
            carried.gather()
        self._compare_copies(f"saving to {folder}")
        Saving(
            folder, self._installed.share, self._rank_optimizer, self._member,
            carried=carried, progress=progress, force=force,
        ).run()  # fmt: skip

    @outside_inference()
    @one_call()
    def load(self, folder: Path | str) -> Any:
        """Read this rank's part of a checkpoint, written under this or another plan. Gradients are dropped.

        Training goes on from the state that was carried from batch to batch then; evaluations begin anew.

        All ranks read and check all of it first: what is refused on one is refused on all, and nothing has changed.

        Returns:
            The `state` that was saved with it; None where there was none.

        Raises:
            UsageError: the folder is not there.
            FormatError: it is broken, of another model or another optimizer; the message says which file, and where.
        """
        self._compare("load()", f"loading {folder}", shown=f"load({str(folder)!r})")
        share, trains = self._installed.share, self._rank_optimizer if self._trains else None
        found = self._member.agree(
            f"loading {folder}",
            lambda: Checkpoint.read(Path(folder), share, trains, places=self.workload.carried or {}),
        )
        with self._member.guarded(f"loading {folder}"):
            marks = self._member.numbers(float(found.mark))
        if len(set(marks)) > 1:
            raise FormatError(f"{folder} is not the same on all ranks", hint="load it again, from a folder they share")
        with self._member.guarded(f"loading {folder}"):
            found.put(share, trains)
            self._installed.training.carried.put(found.carried)
            self._installed.inference.carried.put(None)
            self.steps, self._batches = found.progress.steps, found.progress.batches
            self._installed.gradients.drop()
            self._scaling.load(found.progress.scaler)
        self._kept.is_outdated = False
        return found.progress.state

    @one_call()
    def close(self) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone. A `with` block does it.

        Other pipelines that are open stay in it.
        """
        try:
            if self.rank == 0:
                self._clock.hand_over(self._weights_figure)
        finally:
            self._member.close(check=lambda: self._installed.comparison.check(LEAVING))

    def _weights_figure(self) -> float | None:
        """The sum of all weights of this rank that are trained, to see whether any has changed; None: it has none."""
        trained = [each.detach() for each in self._installed.share.parameters.values() if each.requires_grad]
        real = [torch.view_as_real(each) if each.is_complex() else each for each in trained]
        return sum(float(each.sum(dtype=torch.float64)) for each in real) if real else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._member.fail("the training script", error)
        self.close()
