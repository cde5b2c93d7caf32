"""The plan at work: `pipeline.step(batch)` in an ordinary training loop, on every rank."""

from __future__ import annotations

import contextlib
import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError, UsageError
from assigner.plan import Plan, load_plan
from assigner.runtime.checkpoint import Checkpoint, Progress, Saving
from assigner.runtime.graph import plan_graph
from assigner.runtime.inference import without_training
from assigner.runtime.installation import Installation
from assigner.runtime.membership import Membership
from assigner.runtime.memory import held_bytes
from assigner.runtime.optimizer import PipelineOptimizer
from assigner.runtime.process import check_world
from assigner.runtime.randomness import kept_generators
from assigner.runtime.relocation import relocate, removals
from assigner.runtime.remat import Remat, Rematerialisation
from assigner.runtime.room import check_room
from assigner.runtime.sameness import LEAVING
from assigner.runtime.scaling import GradientScaling
from assigner.runtime.separability import shares_of
from assigner.runtime.tracing import TraceSettings, traced
from assigner.steptimes import StepClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from assigner.marking import PartitionGraph
    from assigner.runtime.batchnorm import BatchNorm
    from assigner.runtime.rendezvous import Backend
    from assigner.workload import Batch, Workload


class Pipeline:
    """This rank's share of a model under a plan.

    Every rank of the run makes one, with the same arguments, and calls the same methods in the same order. A plan on
    one worker needs no launcher.

    Args:
        workload: The model, loss and optimizer; the plan must have been solved for it.
        plan: A plan or the path of one.
        remat: "plan": as the plan says; "always": rematerialise every partition; "except_last": every partition, in
            all micro-batches of a step but its last one; "never": none.
        batch_norm: "deferred": a step moves running statistics once, by those of the whole batch; "micro_batch": every
            micro-batch moves them, as torch does.
        timeout_s: A wait for another rank that takes longer ends with an error.
        backend: What carries messages. None: NCCL between GPUs that a rank has for itself, gloo otherwise; "nccl": so,
            and every worker has such a GPU; "gloo": gloo alone; "mpi": MPI alone, where this torch has it.
        graph: The model's partitions, where the caller has found them for another plan already: it takes seconds.
        check_memory: Refuse a plan whose predicted peak is more than a worker has.
        training: False: for `evaluate` and `forward` alone: no gradients and no optimizer, and the workload needs none.
        scaler: Scales the loss so that float16 gradients do not vanish; an update that overflows on any rank is skipped
            on all. None: torch's GradScaler with its defaults where the workload's autocast is float16, else none.

    Attributes:
        optimizer: One handle on every rank for the user's optimizer, see `PipelineOptimizer`.
        scaler: The scaler; disabled where there is none.
        steps: How many optimizer updates were made; one that was skipped does not count.

    Raises:
        FormatError: the plan is for another model.
        UsageError: fewer ranks than the plan needs, or a device that this rank has not.
        InfeasibleError: the plan does not fit into a worker's memory; every rank raises it.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan | Path | str,
        *,
        remat: Remat = "plan",
        batch_norm: BatchNorm = "deferred",
        timeout_s: float = 600.0,
        backend: Backend | None = None,
        graph: PartitionGraph | None = None,
        check_memory: bool = True,
        training: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.workload, self._trains = workload, training
        self._remat, self._batch_norm, self._checks_memory = remat, batch_norm, check_memory
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        remat_of_plan = Rematerialisation(remat, self.plan)
        self.graph = plan_graph(workload, self.plan, graph)
        self._member = Membership(self.plan, timeout_s=timeout_s, backend=backend)
        self._check_room(remat_of_plan)
        self._base_bytes = held_bytes(self._member.device) or 0
        self.steps = self._batches = 0
        with self._member.guarded("the building of the partitions"):
            if not training:
                workload = without_training(workload)
            self._scaling = GradientScaling(scaler, workload.autocast, self._member)
            self.scaler = self._scaling.scaler
            self._installed = self._install(remat_of_plan)
            model = self.graph.deferred.model.named_parameters()
            self.optimizer = PipelineOptimizer(
                workload, model, self._installed.trained, apply=self._update, shares=shares_of(self.graph, self.plan)
            )

    def _check_room(self, remat: Rematerialisation, *, given_back: int = 0) -> None:
        if self._checks_memory and self._trains and remat.takes_planned_memory:
            with self._member.guarded("the check of the memory"):
                check_room(self.plan, self.worker, self._member.device, given_back=given_back)

    def _install(self, remat: Rematerialisation) -> Installation:
        """Build this rank's part of the plan and what executes it."""
        self._trace_settings = TraceSettings(self.plan, self.worker, remat.choice, self._base_bytes)
        self._clock = StepClock(self.plan, remat.choice)
        self._updated, self._waiting = True, False
        return Installation(
            self.workload, self.plan, self.graph, self._member,
            remat=remat, batch_norm=self._batch_norm, trains=self._trains, scaling=self._scaling,
        )  # fmt: skip

    def move(self, plan: Plan | Path | str) -> None:
        """Go on under another plan for the same model from the next step on; every rank calls this.

        Weights, buffers and optimizer state go to the workers that hold their partitions from then on; the optimizer's
        handle, and a scheduler on it, stay. The plan may use more of the run's processes or fewer, and have another
        schedule and other micro-batches. While it moves, a rank holds its old and its new partitions.

        Args:
            plan: A plan or the path of one.

        Raises:
            FormatError: the plan is for another model.
            UsageError: it needs more ranks than the run has or another device for a rank, gradients wait for their
                update, or a trace is being made. The pipeline goes on under its old plan, on every rank.
            InfeasibleError: the plan does not fit into a worker's memory. The pipeline has left the run.
            WorkerError: another rank failed; the message has its error.
        """
        old, new = self.plan, plan if isinstance(plan, Plan) else load_plan(Path(plan))
        plan_graph(self.workload, new, self.graph)
        check_world(new)
        if self._installed.executor.recorder is not None:
            raise UsageError("a trace is being made, of one plan", hint="leave its block first")
        self._member.agree("the move to another plan", lambda: self._check_move(new))
        remat = Rematerialisation(self._remat, new)
        self._member.take_place(new)
        self.plan = new
        self._check_room(remat, given_back=(held_bytes(self._member.device) or 0) - self._base_bytes)
        with self._member.guarded("the move to another plan"):
            luggage = relocate(
                old, new, self._installed.share, self.optimizer, rank=self.rank, transport=self._member.transport
            )
            self._installed.gradients.drop()
            self._installed = self._install(remat)
            self.optimizer.move(self._installed.trained)
            for partition, each in luggage.items():
                each.unpack(partition, self._installed.share, self.optimizer)
        gc.collect()  # modules are in cycles with themselves: the old ones would stay for long

    def _check_move(self, plan: Plan) -> None:
        self._member.place(plan)
        leaving = {partition for partition, source, _ in removals(self.plan, plan) if source == self.rank}
        self._installed.share.check_leaving(leaving)
        if self._waiting and self._installed.gradients.named():
            raise UsageError("gradients wait for their update", hint="apply or drop them before the move")
        self.optimizer.check(shares_of(self.graph, plan))

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

    def step(self, batch: Batch, *, update: bool = True, scale: float = 1.0, max_norm: float | None = None) -> float:
        """Train on one batch: all micro-batches forward and backward, then one optimizer update.

        The gradients stay until the next step begins, which drops them. With `update=False` the rest is the caller's,
        as in a plain loop, and gradients add up until they are dropped:

            pipeline.step(batch, update=False)
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()

        Args:
            batch: (inputs, targets), the same on every rank, with any number of rows.
            update: False: only add to the gradients; a later step, or `pipeline.optimizer.step()`, applies them.
            scale: The loss's gradient, not the loss, is multiplied by this: 1 / 4 for the mean over four batches.
            max_norm: Clip the gradients to this norm over all ranks before the update.

        Returns:
            The loss over the batch, on every rank.

        Raises:
            UsageError: `max_norm` without an update, a batch that cannot be used, or `training=False`.
            WorkerError: another rank failed; the message has its error.
        """
        if max_norm is not None and not update:
            raise UsageError("max_norm without an update", hint="call pipeline.clip_grad_norm_ before the update")
        self._require_training()
        recorder = self._installed.executor.recorder
        self._clock.begin_step()
        if recorder is not None:
            recorder.begin_step()
        with self._member.guarded("the start of a step"), kept_generators(self._member.device):
            call = f"step(update={update}, scale={scale}, max_norm={max_norm})"
            program, micro_batches = self._installed.begin(call, batch)
            if self._updated:
                self._installed.gradients.drop()
            self._installed.gradients.begin()
            factor = scale * self._scaling.factor
            losses = self._installed.training.run(program, micro_batches, self._batches, loss_factor=factor)
            self._installed.gradients.end(program, self._installed.executor, self._batches)
            self._batches += 1
            self._updated, self._waiting = update, True
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        if update:
            self.optimizer.step()
        with self._member.guarded("the end of the step"):
            loss = sum(self._member.number_from(rank, mine) for rank, mine in losses.items())
        whole = update and self._installed.ran_as_planned(program)
        self._clock.end_step(whole=whole)
        if recorder is not None:
            recorder.end_step(whole=whole)
        return loss

    def evaluate(self, batch: Batch) -> float:
        """The loss over a batch in eval mode, on every rank: no gradients, running statistics as they are.

        Args:
            batch: (inputs, targets), the same on every rank, with any number of rows and of any shape.

        Raises:
            UsageError: the workload has no loss, or a batch that cannot be used.
            WorkerError: another rank failed; the message has its error.
        """
        self.workload.require_loss()
        with self._member.guarded("the start of an evaluation"), kept_generators(self._member.device):
            return self._installed.inference.evaluate(batch, self._batches)

    def forward(self, inputs: Any, *, to: int | None = 0) -> Any:
        """The model's output for a batch's inputs, in eval mode and in the structure that the model gives it.

        Micro-batches are joined along the rows, in order. What has no rows (a scalar) must be the same for all of them.

        Args:
            inputs: As a batch has them, the same on every rank, with any number of rows and of any shape.
            to: The rank that gets the output, on its own device; None: every rank.

        Returns:
            The output on rank `to`; None on the others.

        Raises:
            UsageError: an output without rows differs between micro-batches, or there is no such rank.
            WorkerError: another rank failed; the message has its error.
        """
        self._member.check_rank(to)
        with self._member.guarded("the start of a forward"), kept_generators(self._member.device):
            return self._installed.inference.forward(inputs, self._batches, to)

    def _require_training(self) -> None:
        if not self._trains:
            raise UsageError("this pipeline was made with training=False", hint="make one that trains")

    def _update(self) -> None:
        """What the optimizer's handle does on every rank."""
        self._require_training()
        with self._member.guarded("an update"):
            good = self._installed.gradients.ready()
            self._waiting = False
            self._installed.executor.update(self.optimizer.local if good else None)
            self.steps += good

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients as torch.nn.utils.clip_grad_norm_ does on the whole model; all ranks call it together.

        Args:
            max_norm: Gradients with a larger norm are multiplied so that they have this one.
            norm_type: The p of the p-norm: a positive number or math.inf.
            error_if_nonfinite: Refuse a norm that is not finite; nothing was changed then.

        Returns:
            The norm of the whole model's gradients before, the same number on every rank.

        Raises:
            UsageError: `norm_type` is not positive; or the norm is not finite, with `error_if_nonfinite`.
        """
        if not norm_type > 0:
            raise UsageError(f"norm_type={norm_type}: expected a positive number or math.inf")
        with self._member.guarded("the clipping of gradients"):
            norm = self._installed.gradients.norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise UsageError(f"the norm of the gradients is {norm}", hint="error_if_nonfinite=False clips nevertheless")
        self._installed.gradients.shrink(norm, max_norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Cut every element of the gradients to within plus or minus `clip_value`; all ranks call it together."""
        with self._member.guarded("the clipping of gradients"):
            self._installed.gradients.clamp(clip_value)

    @contextlib.contextmanager
    def trace(self, path: Path | str, *, last: int = 20, force: bool = False) -> Iterator[None]:
        """Write what every rank does in the steps of the block, action by action and on rank 0's clock.

            with pipeline.trace("trace.json"):
                for batch in batches:
                    pipeline.step(batch)

        Every rank enters the block, also one that holds no stage; rank 0 writes the file when all have left it. An
        exception in the block leaves no file. Steps that are not one whole program of the plan are not kept: those
        whose batch has another number of rows, and those with `update=False`.

        Args:
            path: The trace's file.
            last: So many steps are kept, the last ones.
            force: Replace an existing file.

        Raises:
            UsageError: rank 0 cannot write `path`, a trace is being made already, or the block made no whole step.
            WorkerError: another rank failed; the message has its error.
        """
        with traced(Path(path), self._trace_settings, self._member, self._installed.executor, last=last, force=force):
            yield

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names; a shared one once, by its first name."""
        yield from self._installed.share.parameters.items()

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by parameter name; a parameter that got none is not there.

        That of a parameter which several ranks hold is the sum over them, after every step. A scaler's factor is taken
        out here; it is still in the parameters' `.grad` until they are clipped or applied.
        """
        return self._installed.gradients.named()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the model's own names; a shared parameter by its first name."""
        return self._installed.share.state()

    def save(self, folder: Path | str, state: Any = None, *, force: bool = False) -> None:
        """Write a checkpoint: every rank its own part, weights and optimizer state, keyed by the model's names.

        Under its name the folder is complete, the old one or the new one, whenever a process is killed. It must lie on
        a file system that all ranks share. Any plan for the same model can load it, on any number of ranks. The
        scaler's state and the counts of batches and updates are in it: randomness is seeded by these, and needs nothing
        else. Gradients are not.

        Args:
            folder: Where to.
            state: What the script needs to go on, as {"scheduler": scheduler.state_dict()}: plain values of rank 0.
            force: Replace an existing checkpoint, once the new one is whole.

        Raises:
            UsageError: the folder exists, or holds files of others; `state` holds a value that is not plain; a weight
                is NaN; or the disk is full. What stood there stays, and training can go on.
        """
        progress = Progress(self.steps, self._batches, self.scaler.state_dict(), state if self.rank == 0 else None)
        saving = Saving(
            Path(folder), self.rank, graph=self.graph, share=self._installed.share, optimizer=self.optimizer,
            progress=progress, force=force,
        )  # fmt: skip
        try:
            for stage in saving.stages:
                self._member.agree(f"saving to {folder}", stage)
        except UsageError:
            saving.abandon()
            raise

    def load(self, folder: Path | str) -> Any:
        """Read this rank's part of a checkpoint, written under this or another plan. Gradients are dropped.

        All ranks read and check all of it first: what is refused on one is refused on all, and nothing has changed.

        Returns:
            The `state` that was saved with it; None where there was none.

        Raises:
            UsageError: the folder is not there.
            FormatError: it is broken, of another model or another optimizer; the message says which file, and where.
        """
        share, trains = self._installed.share, self.optimizer if self._trains else None
        found = self._member.agree(
            f"loading {folder}", lambda: Checkpoint.read(Path(folder), self.graph.fingerprint, share, trains)
        )
        with self._member.guarded(f"loading {folder}"):
            marks = self._member.numbers(float(found.mark))
        if len(set(marks)) > 1:
            raise FormatError(f"{folder} is not the same on all ranks", hint="load it again, from a folder they share")
        with self._member.guarded(f"loading {folder}"):
            found.put(share, trains)
            self.steps, self._batches = found.progress.steps, found.progress.batches
            self._installed.gradients.drop()
            self._scaling.load(found.progress.scaler)
        return found.progress.state

    def close(self) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone. A `with` block does it."""
        if self.rank == 0:
            self._clock.hand_over()
        self._member.close(check=lambda: self._installed.same.check(LEAVING, ()))

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._member.fail("the training script", error)
        self.close()
