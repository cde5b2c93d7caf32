"""The plan at work: `pipeline.step(batch)` in an ordinary training loop, on every rank."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from assigner.document import refuse_existing
from assigner.errors import UsageError
from assigner.location import Location
from assigner.plan import Plan, load_plan
from assigner.runtime.checkpoint import load_checkpoint, save_checkpoint
from assigner.runtime.executor import Executor
from assigner.runtime.failure import FailureWatch
from assigner.runtime.graph import plan_graph
from assigner.runtime.memory import held_bytes
from assigner.runtime.microbatch import row_count, split_batch
from assigner.runtime.partition import PartitionRunner
from assigner.runtime.process import join_run, set_threads, worker_device
from assigner.runtime.randomness import kept_generators
from assigner.runtime.room import check_room
from assigner.runtime.tracing import TraceSettings, Tracing
from assigner.runtime.transport import LostConnectionError, Transport
from assigner.schedule import Program, build_program
from assigner.trace import save_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.marking import PartitionGraph
    from assigner.workload import Batch, Workload


_count = itertools.count()  # the n-th pipeline of every rank is the same one


class Pipeline:
    """This rank's share of a model under a plan.

    Every rank of the run makes one, with the same arguments, and calls the same methods in the same order. A plan on
    one worker needs no launcher.

    Args:
        workload: The model, loss and optimizer; the plan must have been solved for it.
        plan: A plan or the path of one.
        remat: None: as the plan says; True: rematerialise every partition; False: none.
        timeout_s: A wait for another rank that takes longer ends with an error.
        graph: The model's partitions, where the caller has found them for another plan already: it takes seconds.
        check_memory: Refuse a plan whose predicted peak is more than a worker has.

    Attributes:
        rank: This process's rank.
        worker: This rank's worker, `worker:1/cpu`; None: the plan leaves this rank out.
        partitions: Names of the partitions that this rank holds.
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
        remat: bool | None = None,
        timeout_s: float = 600.0,
        graph: PartitionGraph | None = None,
        check_memory: bool = True,
    ) -> None:
        self.workload = workload
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        self.graph = plan_graph(workload, self.plan, graph)
        self._owns_group = join_run(self.plan, timeout_s)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        mine = [worker for worker in self.plan.workers if Location.parse(worker).rank == self.rank]
        self.worker = mine[0] if mine else None
        self.device = worker_device(self.worker)
        set_threads(self.plan, self.worker)
        if check_memory and remat is not True:  # with everything rematerialised it takes less than was predicted
            check_room(self.plan, self.worker, self.device)
        stages = [stage for stage in self.plan.stages if stage.worker == self.worker]
        self.partitions = tuple(name for stage in stages for name in stage.partitions)
        self._trace_settings = TraceSettings(self.plan, self.worker, remat, held_bytes(self.device) or 0)
        self._modules = self.graph.build(self.partitions, self.device)
        self._parameters, self._buffers = self._named_tensors()
        self.steps = self._batches = 0
        self._programs: dict[int, Program] = {}
        self._updated = True
        self._transport = self._watch = None
        self._left = False
        if dist.is_initialized():
            program = self._program(self.plan.workload.batch_size)
            numbers = {route: n for n, route in enumerate(program.routes)}
            self._transport = Transport(numbers, device=self.device, timeout_s=timeout_s)
            store = dist.distributed_c10d._get_default_store()
            own = dist.PrefixStore(f"pipeline {next(_count)}", store.clone())  # type: ignore[attr-defined]
            self._watch = FailureWatch(own, self.worker or f"worker:{self.rank}")
        again = {name for stage in stages for name in stage.rematerialise}
        runners = {
            name: self._runner(name, rematerialise=name in again if remat is None else remat)
            for name in self.partitions
        }
        self._executor = Executor(self.graph, runners, self._transport, device=self.device, seed=workload.seed)
        parameters = list(self._parameters.values())
        self.optimizer = workload.optimizer(parameters) if parameters else None

    def _named_tensors(self) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
        """This rank's parameters and persistent buffers, each once, by the first of its names in the model."""
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, torch.Tensor] = {}
        for name in self.partitions:
            piece, module = self.graph.piece[name], self._modules[name]
            parameters.update({self.graph.canonical[each]: module.get_parameter(each) for each in piece.parameters})
            buffers.update({each: module.get_buffer(each) for each in piece.buffers if each in self.graph.persistent})
        return parameters, buffers

    def _runner(self, name: str, *, rematerialise: bool) -> PartitionRunner:
        piece = self.graph.piece[name]
        is_last = piece is self.graph.last
        return PartitionRunner(
            piece,
            self._modules[name],
            self.device,
            rematerialise,
            gradients=self.graph.output_gradients(piece),
            finish=(lambda outputs, m: self._executor.last_loss(outputs, m, self.workload.loss)) if is_last else None,
        )

    def _program(self, rows: int) -> Program:
        """The program for a batch of so many rows: as many micro-batches as planned, or fewer where rows are few."""
        if rows not in self._programs:
            size = -(-rows // self.plan.micro_batches)
            plan = replace(
                self.plan,
                workload=replace(self.plan.workload, batch_size=rows),
                micro_batch_size=size,
                micro_batches=-(-rows // size),
            )
            self._programs[rows] = build_program(plan, self.graph.edges, self.graph.ties)
        return self._programs[rows]

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
        with self._guarded("the start of a step"), kept_generators(self.device):
            program = self._program(row_count(batch))
            micro_batches = split_batch(batch, program.plan.micro_batch_size, reduction=self.workload.reduction)
            if self._updated:
                self.zero_grad()
                self._updated = False
            loss = self._executor.run(program, self.worker or "", micro_batches, self._batches)
            self._batches += 1
            if update:
                self._update(program)
            self._executor.at = "the end of the step"
            loss = self._from_rank(Location.parse(self.plan.placement[self.graph.last.name]).rank, loss)
        if recorder is not None:
            recorder.end_step(whole=update and row_count(batch) == self.plan.workload.batch_size)
        return loss

    def update(self) -> None:
        """Apply the gradients that steps with `update=False` have added up."""
        with self._guarded("an update"):
            self._update(self._program(self.plan.workload.batch_size))

    def _update(self, program: Program) -> None:
        self._sum_ties(program)
        self._executor.update(self.optimizer)
        self.steps += 1
        self._updated = True

    def _sum_ties(self, program: Program) -> None:
        """A shared parameter's gradient is the sum over its holders, in one order on all of them."""
        ties = {
            n: self._parameters[tie.parameter]
            for n, tie in enumerate(self.graph.ties)
            if tie.parameter in self._parameters
        }
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ties.items()}
        for n, parts in self._executor.exchange_ties(program, self.worker or "", gradients).items():
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
        with self._guarded("the start of a trace"):
            tracing = Tracing(self._trace_settings, self._transport, device=self.device, last=last)
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
        with self._guarded("the end of a trace"):
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
        with self._guarded("the start of a trace"):
            refused = self._from_rank(0, float(refusal is not None))
        if refused:
            raise refusal or UsageError(f"rank 0 cannot write a trace to {path}", hint="see what it says")

    def zero_grad(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names; a shared one once, by its first name."""
        yield from self._parameters.items()

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by parameter name, as the last step left them."""
        return {name: each.grad for name, each in self._parameters.items() if each.grad is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under the model's own names; a shared parameter by its first name."""
        return {**self._parameters, **self._buffers}

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint: every rank its own part, weights and optimizer state, keyed by the model's names.

        The folder is complete or absent; it must lie on a file system that all ranks share. Any plan for the same
        model can load it, on any number of ranks.

        Raises:
            UsageError: the folder exists.
        """
        with self._guarded(f"saving to {folder}"):
            taken = self._from_rank(0, float(Path(folder).exists()))
        if taken:
            raise UsageError(f"{folder} exists", hint="save to a new folder, or remove it")
        with self._guarded(f"saving to {folder}"):
            save_checkpoint(
                Path(folder), self.rank, state=self.state_dict(), parameters=self._parameters, optimizer=self.optimizer,
                facts={"fingerprint": self.graph.fingerprint, "steps": self.steps, "batches": self._batches},
                meet=self._meet,
            )  # fmt: skip

    def load(self, folder: Path | str) -> None:
        """Read this rank's part of a checkpoint, written under this or another plan.

        Raises:
            UsageError: the folder is not there.
            FormatError: it is broken, or of another model.
        """
        with self._guarded(f"loading {folder}"):
            facts = load_checkpoint(
                Path(folder), self.graph.fingerprint, state=self.state_dict(), parameters=self._parameters,
                optimizer=self.optimizer,
            )  # fmt: skip
            self.steps, self._batches = facts["steps"], facts["batches"]

    def close(self) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone. `with Pipeline(...)` does it.

        Raises:
            WorkerError: another rank failed before it came here.
        """
        if self._owns_group:
            with self._guarded("the end of the run"):
                self._meet()  # the rank that hosts the job's store must not be gone before the others are done
        self._leave()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not self._left:
            self._fail("the training script", error)
        self.close()

    def _from_rank(self, rank: int, number: float) -> float:
        """One rank's number, on every rank; what this one has sent has left when it returns."""
        if self._transport is None:
            return number
        shared = self._transport.share(torch.tensor(number, dtype=torch.float64), rank)
        self._transport.flush()
        return float(shared)

    def _meet(self) -> None:
        if self._transport is not None:
            self._transport.meet()

    @contextlib.contextmanager
    def _guarded(self, at: str) -> Iterator[None]:
        """Tell every rank of a failure in the block, and learn of theirs."""
        if self._left:
            raise UsageError("this pipeline has left its run: it was closed, or it failed", hint="make a new one")
        self._executor.at = at
        try:
            yield
        except LostConnectionError as error:
            assert self._watch is not None
            failure = self._watch.lost(error.peer, self._executor.at, error)
            self._leave()
            raise failure.to_error(traced=not self._watch.printed) from error
        except BaseException as error:
            self._fail(self._executor.at, error)
            raise

    def _fail(self, at: str, error: BaseException) -> None:
        """This rank failed: tell the others, and leave the run."""
        error.add_note(f"in {at} on {self.worker or f'worker:{self.rank}'}")
        if self._watch is not None:
            self._watch.report(at, error)
        self._leave()

    def _leave(self) -> None:
        """Drop an unfinished step, leave the process group if this pipeline joined it, and stop the threads.

        In this order: a thread that waits for a message wakes up when the group's connections are closed.
        """
        self._executor.forget()
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        if self._transport is not None:
            self._left = True
            self._transport.close()
        if self._watch is not None:
            self._watch.close()
