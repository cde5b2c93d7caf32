"""The plan at work: `pipeline.step(batch)` in an ordinary training loop, on every rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch

from assigner.document import refuse_existing
from assigner.errors import UsageError
from assigner.location import Location
from assigner.plan import Plan, load_plan
from assigner.runtime.checkpoint import load_checkpoint, save_checkpoint
from assigner.runtime.executor import Executor
from assigner.runtime.graph import plan_graph
from assigner.runtime.membership import Membership
from assigner.runtime.memory import held_bytes
from assigner.runtime.microbatch import row_count, split_batch
from assigner.runtime.programs import Programs
from assigner.runtime.randomness import kept_generators
from assigner.runtime.room import check_room
from assigner.runtime.share import Share
from assigner.runtime.tracing import TraceSettings, Tracing
from assigner.trace import save_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from assigner.marking import PartitionGraph
    from assigner.schedule import Program
    from assigner.workload import Batch, Workload


Remat = Literal["plan", "always", "never"]


class Pipeline:
    """This rank's share of a model under a plan.

    Every rank of the run makes one, with the same arguments, and calls the same methods in the same order. A plan on
    one worker needs no launcher.

    Args:
        workload: The model, loss and optimizer; the plan must have been solved for it.
        plan: A plan or the path of one.
        remat: "plan": as the plan says; "always": rematerialise every partition; "never": none.
        timeout_s: A wait for another rank that takes longer ends with an error.
        graph: The model's partitions, where the caller has found them for another plan already: it takes seconds.
        check_memory: Refuse a plan whose predicted peak is more than a worker has.

    Attributes:
        optimizer: The user's optimizer over this rank's parameters; None where there are none.
        steps: How many optimizer updates were made.

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
        timeout_s: float = 600.0,
        graph: PartitionGraph | None = None,
        check_memory: bool = True,
    ) -> None:
        if remat not in get_args(Remat):
            raise UsageError(f"remat={remat!r} is not allowed", hint=f"one of {', '.join(get_args(Remat))}")
        self.workload = workload
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        self.graph = plan_graph(workload, self.plan, graph)
        self._member = Membership(self.plan, timeout_s=timeout_s)
        if check_memory and remat != "always":  # with everything rematerialised it takes less than was predicted
            check_room(self.plan, self.worker, self._member.device)
        base_bytes = held_bytes(self._member.device) or 0
        self._trace_settings = TraceSettings(self.plan, self.worker, remat, base_bytes)
        self.steps = self._batches = 0
        self._updated = True
        with self._member.guarded("the building of the partitions"):
            self._share = Share(self.graph, self.plan, self.worker, self._member.device)
            self._programs = Programs(self.plan, self.graph, self._member.transport)
            again = {"plan": self._share.rematerialise, "always": self.partitions, "never": ()}[remat]
            self._executor = Executor(self.graph, self._share.modules, self._member, workload, rematerialise=again)
            self._member.on_leaving = self._executor.forget
            parameters = list(self._share.parameters.values())
            self.optimizer = workload.optimizer(parameters) if parameters else None

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
        return self._share.partitions

    def step(self, batch: Batch, *, update: bool = True) -> float:
        """Train on one batch: all micro-batches forward and backward, then one optimizer update.

        Args:
            batch: (inputs, targets), the same on every rank, with any number of rows.
            update: False: only add to the gradients; a later step, or `update()`, applies them.

        Returns:
            The loss over the batch, on every rank.

        Raises:
            WorkerError: another rank failed; the message has its error.
        """
        recorder = self._executor.recorder
        if recorder is not None:
            recorder.begin_step()
        with self._member.guarded("the start of a step"), kept_generators(self._member.device):
            program = self._programs.training(row_count(batch))
            micro_batches = split_batch(batch, program.plan.micro_batch_size, reduction=self.workload.reduction)
            if self._updated:
                self.zero_grad()
                self._updated = False
            loss = self._executor.run(program, micro_batches, self._batches)
            self._batches += 1
            if update:
                self._update(program)
            self._member.at = "the end of the step"
            loss = self._member.number_from(Location.parse(self.plan.placement[self.graph.last.name]).rank, loss)
        if recorder is not None:
            recorder.end_step(whole=update and row_count(batch) == self.plan.workload.batch_size)
        return loss

    def update(self) -> None:
        """Apply the gradients that steps with `update=False` have added up."""
        with self._member.guarded("an update"):
            self._update(self._programs.training(self.plan.workload.batch_size))

    def _update(self, program: Program) -> None:
        self._sum_ties(program)
        self._executor.update(self.optimizer)
        self.steps += 1
        self._updated = True

    def _sum_ties(self, program: Program) -> None:
        """A shared parameter's gradient is the sum over its holders, in one order on all of them."""
        ties = {
            n: self._share.parameters[tie.parameter]
            for n, tie in enumerate(self.graph.ties)
            if tie.parameter in self._share.parameters
        }
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ties.items()}
        for n, parts in self._executor.exchange_ties(program, gradients).items():
            total = parts[0][1]
            for _, part in parts[1:]:
                total = total + part
            ties[n].grad = total

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
        if last < 1:
            raise UsageError(f"last={last}: a trace has one step or more")
        if self._executor.recorder is not None:
            raise UsageError("a trace is being made already", hint="leave its block first")
        self._check_trace_path(Path(path), force=force)
        with self._member.guarded("the start of a trace"):
            tracing = Tracing(self._trace_settings, self._member.transport, device=self._member.device, last=last)
        self._executor.recorder = tracing.recorder
        try:
            yield
        finally:
            self._executor.recorder = None
            tracing.stop()
        if not tracing.recorder.steps:
            raise UsageError(
                f"{path}: no step to write: none had {self.plan.workload.batch_size} rows and an update",
                hint="make steps of the plan's batch size in the block",
            )
        with self._member.guarded("the end of a trace"):
            trace = tracing.collect()
            if trace is not None:
                save_trace(trace, path, force=force)

    def _check_trace_path(self, path: Path, *, force: bool) -> None:
        """Raise UsageError on every rank if rank 0 cannot write there."""
        refusal = None
        if self.rank == 0:
            try:
                refuse_existing(path, force=force)
            except UsageError as error:
                refusal = error
        with self._member.guarded("the start of a trace"):
            refused = self._member.number_from(0, float(refusal is not None))
        if refused:
            raise refusal or UsageError(f"rank 0 cannot write a trace to {path}", hint="see what it says")

    def zero_grad(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for parameter in self._share.parameters.values():
            parameter.grad = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names; a shared one once, by its first name."""
        yield from self._share.parameters.items()

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by parameter name, as the last step left them."""
        return {name: each.grad for name, each in self._share.parameters.items() if each.grad is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the model's own names; a shared parameter by its first name."""
        return self._share.state()

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint: every rank its own part, weights and optimizer state, keyed by the model's names.

        The folder is complete or absent; it must lie on a file system that all ranks share. Any plan for the same
        model can load it, on any number of ranks.

        Raises:
            UsageError: the folder exists.
        """
        with self._member.guarded(f"saving to {folder}"):
            taken = self._member.number_from(0, float(Path(folder).exists()))
        if taken:
            raise UsageError(f"{folder} exists", hint="save to a new folder, or remove it")
        with self._member.guarded(f"saving to {folder}"):
            save_checkpoint(
                Path(folder), self.rank, state=self._share.state(), parameters=self._share.parameters,
                optimizer=self.optimizer,
                facts={"fingerprint": self.graph.fingerprint, "steps": self.steps, "batches": self._batches},
                meet=self._member.meet,
            )  # fmt: skip

    def load(self, folder: Path | str) -> None:
        """Read this rank's part of a checkpoint, written under this or another plan.

        Raises:
            UsageError: the folder is not there.
            FormatError: it is broken, or of another model.
        """
        with self._member.guarded(f"loading {folder}"):
            facts = load_checkpoint(
                Path(folder), self.graph.fingerprint, state=self._share.state(), parameters=self._share.parameters,
                optimizer=self.optimizer,
            )  # fmt: skip
            self.steps, self._batches = facts["steps"], facts["batches"]

    def close(self) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone. `with Pipeline(...)` does it.

        Raises:
            WorkerError: another rank failed before it came here.
        """
        self._member.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._member.fail("the training script", error)
        self.close()
