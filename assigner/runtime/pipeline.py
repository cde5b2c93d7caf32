"""The plan at work: `pipeline.step(batch)` in an ordinary training loop, on every rank."""

from __future__ import annotations

import contextlib
import gc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.formats.plan import Plan, load_plan
from assigner.launch.failurereport import take_back
from assigner.launch.steptimes import StepClock
from assigner.location import rank_of
from assigner.model.deferred.modes import left_in_eval
from assigner.model.deferred.originals import keep_moved
from assigner.model.marking.casting import refuse_contexts
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.runtime.forward.lossvalues import LossValues
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.forward.remat import Rematerialisation
from assigner.runtime.installation import Installation
from assigner.runtime.keptmodel import KeptModel, MovedTensors
from assigner.runtime.messages.rendezvous import asked_backend, told_if_refused
from assigner.runtime.modelstate import ModelState
from assigner.runtime.outsidevalues import OutsideValues
from assigner.runtime.passes import of_one_batch, without_training
from assigner.runtime.plangraph import check_alike, check_workload, plan_graph
from assigner.runtime.ranks.membership import Membership, outside_inference
from assigner.runtime.ranks.process import check_world, executed, start_computing
from assigner.runtime.ranks.run import one_call
from assigner.runtime.recording.memory import held_bytes
from assigner.runtime.relocation import EarlierMemory, relocate, removals
from assigner.runtime.stages.localpartitions import UnreadState
from assigner.runtime.stages.updaters import holder_counts, shares_of
from assigner.runtime.step.results import StepResult, check_trained, shared_result
from assigner.runtime.tracing import traced
from assigner.runtime.update.optimizer import PipelineOptimizer
from assigner.runtime.update.rankoptimizer import RankOptimizer
from assigner.runtime.update.scaling import GradientScaling
from assigner.runtime.update.sparsemomentum import fit_momentum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from assigner.formats.terms import Backend, RunRemat
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Batch, Workload
    from assigner.runtime.step.batchnorm import BatchNorm
    from assigner.runtime.step.outputs import Receiver
    from assigner.runtime.update.building import Verdict


class Pipeline(ModelState):
    """This rank's share of a model under a plan.

    Every rank makes one, with the same arguments, and calls the same methods in turn, one thread at a time. One worker
    needs no launcher. Several may be open at once: all ranks make, call and close them in the same order.

    Args:
        workload: The model, loss and optimizer; the plan must have been solved for it.
        plan: A plan or the path of one.
        remat: "plan": as the plan says; "always": rematerialise every partition; "except_last": every partition, in all
            micro-batches of a step but its last one; "never": none.
        batch_norm: "deferred": a step moves running statistics once, by those of the whole batch; "micro_batch": every
            micro-batch moves them, as torch does.
        timeout_s: A wait for another rank that takes longer ends with an error.
        backend: What carries messages: "nccl": every worker needs a GPU for itself; "gloo"; "mpi": MPI, by mpi4py,
            in ranks that MPI's launcher has started. None: ASSIGNER_BACKEND, or NCCL between such GPUs and gloo else.
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
        UsageError: too few ranks; ranks with unlike plans, arguments, workloads or code; or a device that is not there.
        InfeasibleError: the plan does not fit into a worker's memory; every rank raises it.
        WorkerError: another rank failed, here or in a method; the message has its error.
    """

    @outside_inference()
    @one_call()
    def __init__(
        self,
        workload: Workload,
        plan: Plan | Path | str,
        *,
        remat: RunRemat = "plan",
        batch_norm: BatchNorm = "deferred",
        timeout_s: float = 600.0,
        backend: Backend | None = None,
        graph: PartitionGraph | None = None,
        check_memory: bool = True,
        training: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        take_back()  # an error of before, which the script has caught
        check_workload(workload)
        self.workload, self._trains = workload, training
        self._remat, self._batch_norm, self._checks_memory = remat, batch_norm, check_memory
        self.plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        remat_of_plan = Rematerialisation(remat, self.plan)
        with told_if_refused():
            self.graph = plan_graph(workload, self.plan, graph)
        self._member = Membership(self.plan, timeout_s=timeout_s, backend=backend or asked_backend())
        with self._member.taking_part():
            if training and self.rank == 0 and (said := left_in_eval(self.graph.deferred)) is not None:
                warnings.warn(said, stacklevel=4)  # the script's line: this is decorated twice
            if self._member.device.type == "cuda":
                start_computing(self._member.device)
            with self._member.guarded("the comparison of the ranks"):
                given = {"remat": remat, "batch_norm": batch_norm, "check_memory": check_memory, "training": training}
                check_alike(workload, self.graph, self._member, given)
            self._check_room(self.plan, remat_of_plan)
            self._base_bytes = held_bytes(self._member.device) or 0
            self.steps = self._batches = 0
            self._unread = UnreadState(self.graph, self.rank)
            self._outside = OutsideValues(self.graph)
            self._loss_values = LossValues(workload)
            self._kept = KeptModel(self.graph, self._member.device)
            self._moved = MovedTensors(self.graph, self._loss_values.tensors)
            with self._member.guarded("the building of the partitions"):
                workload = workload if training else without_training(workload)
                self._scaling = GradientScaling(scaler, workload.autocast, self._member)
                self.scaler = self._scaling.scaler
                self._installed = self._install(remat_of_plan)
                self._moved.note_held(self._installed.share.held())
                self._rank_optimizer = RankOptimizer(
                    workload, self.graph.deferred.model.named_parameters(), self._installed.updated,
                    shares=shares_of(self.graph, self.plan), beside=self._installed.updated_elsewhere,
                    holders=holder_counts(self.graph, self.plan), ranks=self._member.world,
                )  # fmt: skip
                self._rank_optimizer.agree(self._member.numbers)
                self._scaling.applied = self._rank_optimizer.gradients
                self._optimizer = PipelineOptimizer(
                    self._rank_optimizer, apply=self._update, note=self._note, called=self._note_called
                )

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer of all ranks together; a scheduler can be made of it.

        Raises:
            UsageError: another one is put in its place.
        """
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        raise UsageError(
            f"pipeline.optimizer cannot be another one ({type(optimizer).__name__}): it has its part on every rank",
            hint="Workload(optimizer=...) says what makes it; its param_groups may change while it trains",
        )

    def _check_room(self, plan: Plan, remat: Rematerialisation, *, given_back: int = 0) -> None:
        if self._checks_memory and self._trains and remat.takes_planned_memory:
            self._member.check_memory(plan, given_back=given_back)

    def _install(self, remat: Rematerialisation) -> Installation:
        self._clock = StepClock(self.plan, self._remat)
        self._updated: bool | None = None  # as the last step had it; there is none: gradients are the script's own
        self._waiting = False
        return Installation(
            self.workload, self.plan, self.graph, self._member,
            remat=remat, batch_norm=self._batch_norm, trains=self._trains, scaling=self._scaling,
            unread=self._unread,
        )  # fmt: skip

    @outside_inference()
    @one_call()
    def move(self, plan: Plan | Path | str) -> None:
        """Go on under another plan for the same model from the next step on; every rank calls this.

        Weights, buffers, optimizer state and carried state go to the workers that hold their partitions from then on,
        and so do gradients to which the next step adds; the optimizer's handle, and a scheduler on it, stay. The plan
        may use more of the run's processes or fewer, and have another schedule and other micro-batches. While it moves,
        a rank holds its old and its new partitions. Parameters and buffers are other tensors from then on: the script
        takes them from `named_parameters` and `state_dict` anew, and what it does with the old ones is refused. A
        warning names what it holds of their memory otherwise, as a view, a gradient or a moment of the optimizer's.

        Args:
            plan: A plan or the path of one.

        Raises:
            FormatError: the plan is for another model.
            UsageError: it needs more ranks than the run has or another device for a rank, gradients wait for their
                update, or a trace is being made.
            InfeasibleError: the plan does not fit into a worker's memory. The pipeline goes on under its old plan, on
                every rank, as behind the other two.
        """
        at = "the move to another plan"
        new = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        plan_graph(self.workload, new, self.graph)
        check_world(new)
        if self._installed.executor.recorder is not None:
            raise UsageError("a trace is being made, of one plan", hint="leave its block first")
        what = "a plan" if isinstance(plan, Plan) else repr(str(plan))
        self._compare(f"move({executed(new)})", at, shown=f"move({what} on {', '.join(new.workers)})")
        with self._member.guarded(at):
            mine = [self._loss_values.digest(), *self._outside.digests()]
            told = self._member.numbers_of_all(mine)
        self._rank_optimizer.memory.share(self._member, at, is_idle=self._rank_optimizer.is_idle)
        verdict = self._member.agree(at, lambda: self._check_move(new, told))
        remat = Rematerialisation(self._remat, new)
        self._check_room(new, remat, given_back=(held_bytes(self._member.device) or 0) - self._base_bytes)
        with self._member.guarded(at):
            self._member.take_place(new)
        self.plan = new
        with self._member.guarded(at):
            earlier, attributes = self._relocate(remat, verdict)
        self._member.settle()
        gc.collect()  # modules are in cycles with themselves: the old ones would stay for long
        earlier.warn(self._installed.share, self._rank_optimizer, but=attributes)

    def _relocate(self, remat: Rematerialisation, verdict: Verdict) -> tuple[EarlierMemory, list[dict[str, Any]]]:
        """Have this rank's part of the plan in the place of that of an old one.

        Returns:
            What the old one had, and the attributes that go on, once the caller has dropped all else of it.
        """
        if self._updated and not self._keeps_gradients:
            self._installed.gradients.drop()
        before, updated = self._installed, self._updated
        earlier = EarlierMemory(before.share, self._rank_optimizer)
        found, moments = relocate(self.plan, before.share, self._rank_optimizer, self._member)
        self._installed = self._install(remat)
        self._updated = updated
        self._installed.go_on_from(before)
        self._rank_optimizer.move(self._installed.updated, self._installed.updated_elsewhere, verdict)
        for partition, state in found.items():
            state.unpack(partition, self._installed.share)
        for of_parameters in moments:
            of_parameters.add(self._installed.share.updated, self._rank_optimizer)
        for parameter in before.share.parameters.values():
            parameter.grad = None
        self._moved.note_held(self._installed.share.held())
        attributes = [each.attributes for each in found.values()]
        keep_moved(before.share.built(), but=attributes)
        return earlier, attributes

    @property
    def _keeps_gradients(self) -> bool:
        """The next step drops gradients by a method that may leave something of them."""
        return self._rank_optimizer.keeps_gradients or "zero_grad" in vars(self._optimizer)

    def _check_move(self, plan: Plan, told: Sequence[Sequence[float]]) -> Verdict:
        """Refuse a move that would lose something; what is known of the optimizer under the new plan."""
        self._member.place(plan)
        self._kept.check(self.state_dict, training=False)
        self._outside.check_moved(self.plan, plan, [outside for _, *outside in told])
        last = self.graph.last.name
        ends = [rank_of(worker) for worker in (*self.plan.holders[last], *plan.holders[last])]
        is_leaving = self.plan.holders[last] != plan.holders[last]
        if is_leaving and self._loss_values.remembers([told[rank][0] for rank in ends]):
            raise UsageError(
                f"Workload.loss keeps something from call to call, or was trained, and {last!r} goes to"
                f" {plan.holders[last][0]}: what the loss has kept would stay behind",
                hint=f"a plan that leaves {last!r} where it is, or a loss without a memory and parameters of its own",
            )
        self._installed.share.check_hung()
        self._installed.share.check_rebuilt()
        leaving = {partition for partition, source, _ in removals(self.plan, plan) if source == self.rank}
        self._installed.share.check_leaving(leaving, gradients=not self._updated or self._keeps_gradients)
        self._installed.watch.copies.compare()
        if not self._updated or self._keeps_gradients:
            self._installed.gradients.check_whole()
        if self._waiting and self._installed.gradients.named():
            raise UsageError("gradients wait for their update", hint="apply or drop them before the move")
        self._rank_optimizer.memory.check_moved(ranks=self._rank_optimizer.ranks)
        OptimizerState.of(self._installed.share.updated, self._rank_optimizer)
        return self._rank_optimizer.check(shares_of(self.graph, plan), holder_counts(self.graph, plan))

    @of_one_batch
    @one_call()
    def step(
        self,
        batch: Batch | None,
        *,
        update: bool = True,
        scale: float = 1.0,
        max_norm: float | None = None,
        outputs_to: Receiver | None = None,
    ) -> StepResult:
        """Train on one batch: all micro-batches forward and backward, then one optimizer update.

        An optimizer that needs a closure (LBFGS) runs the batch as often as it asks for. The gradients stay until the
        next step begins. With `update=False` the rest is the caller's, and gradients add up until they are dropped:

            pipeline.step(batch, update=False)
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()

        Args:
            batch: (inputs, targets), the same on every rank, with any number of rows. None in the place of inputs,
                of targets or of both where this rank does not need them (`needs_inputs`, `needs_targets`).
            update: False: only add to the gradients; a later step, or `pipeline.optimizer.step()`, applies them.
            scale: The loss's gradient, not the loss, is multiplied by this: 1 / 4 for the mean over four batches.
            max_norm: Clip the gradients to this norm over all ranks before the update.
            outputs_to: The rank that gets the model's output, or "all", as `forward` gives it; here that of training.

        Returns:
            The loss over the batch: a float, with the workload's metrics, the same on every rank.

        Raises:
            UsageError: `max_norm` without an update, a batch that cannot be used, or `training=False`; a metric fails;
                or an output cannot be put together.
        """
        if max_norm is not None and not update:
            raise UsageError("max_norm without an update", hint="call pipeline.clip_grad_norm_ before the update")
        self._require_training()
        self._check_receiver(outputs_to)
        self._check_place()
        if update and self._rank_optimizer.needs_closure:
            return self._searched(batch, scale, max_norm, outputs_to)
        recorder = self._installed.executor.recorder
        self._clock.begin_step(None if update else self._weights_figure)
        if recorder is not None:
            recorder.begin_step()
        with self._member.guarded("the start of a step"), kept_generators(self._member.device):
            self._kept.check(self.state_dict, training=True)
            call = f"step(update={update}, scale={scale}, max_norm={max_norm}{self._asked(outputs_to)})"
            if update and self._member.transport is not None:
                call = f"{call} with {self._rank_optimizer.groups.settings}"
            call += self._loss_values.begin()
            program, micro_batches = self._installed.begin(call, batch)
            if self._updated or (update and self._updated is None):
                self._rank_optimizer.drop(self._installed.trained, vars(self._optimizer).get("zero_grad"))
            self._installed.gradients.factor.begin()
            self._installed.gradients.begin()
            factor = scale * self._scaling.factor
            found, outputs = self._installed.training.run(
                micro_batches, self._batches, loss_factor=factor, outputs_to=outputs_to,
                reduction=self._installed.gradients.reduction,
            )  # fmt: skip
            if [*found] == [self.rank]:  # else the end of the step, where the others' are known, has to say so
                check_trained(found[self.rank])
            self._installed.check_read_elsewhere()
            self._installed.gradients.end(program, self._installed.executor, self._batches)
            if not update:
                self._installed.gradients.factor.note()
            self._loss_values.end()
            self._batches += 1
            self._updated, self._waiting = update, True
        with self._installed.comparison.covered():
            if max_norm is not None:
                self.clip_grad_norm_(max_norm)
            if update:
                self.optimizer.step()
        with self._member.guarded("the end of the step"):
            result = shared_result(found, self.workload, self._member, training=True)
            self._moved.note_moved(self._installed.share.held(), self._installed.written, self._member)
        whole = update and self._installed.ran_as_planned(micro_batches)
        self._clock.end_step(whole=whole, gathers=not update)
        if recorder is not None:
            recorder.end_step(whole=whole)
        if outputs is not None:
            with self._member.guarded("the step's outputs"):
                result.outputs = outputs.carry(self._member)
        return result

    def _searched(
        self, batch: Batch | None, scale: float, max_norm: float | None, outputs_to: Receiver | None
    ) -> StepResult:
        """A step of an optimizer that needs a closure: the result before the update, of the first forward."""
        results: list[StepResult] = []

        def closure() -> float:
            self.optimizer.zero_grad()
            result = self.step(batch, update=False, scale=scale, outputs_to=None if results else outputs_to)
            results.append(result)
            if max_norm is not None:
                self.clip_grad_norm_(max_norm)
            return result

        self.optimizer.step(closure)
        return results[0]

    @of_one_batch
    @one_call()
    def evaluate(self, batch: Batch | None, *, outputs_to: Receiver | None = None) -> StepResult:
        """The loss over a batch in eval mode, on every rank: no gradients, running statistics as they are.

        Args:
            batch: (inputs, targets), the same on every rank, with any number of rows and of any shape; None for what
                this rank does not need, as in `step`.
            outputs_to: The rank that gets the model's output, or "all": what `forward` gives.

        Returns:
            The loss over the batch: a float, with the workload's metrics, the same on every rank. Those of several
            batches are put together by `StepResult.over`.

        Raises:
            UsageError: the workload has no loss, a batch that cannot be used, a metric fails, or an output cannot be
                put together.
        """
        self.workload.require_loss()
        self._check_receiver(outputs_to)
        self._check_place()
        call = f"evaluate({self._asked(outputs_to).removeprefix(', ')})"
        with self._member.guarded("the start of an evaluation"), kept_generators(self._member.device):
            self._kept.check(self.state_dict, training=False)
            call += self._loss_values.begin()
            result = self._installed.evaluate(call, batch, self._batches, outputs_to)
            self._loss_values.end()
        return result

    def _check_place(self) -> None:
        """Refuse a call in the middle of a batch, or in a context that partitions would not see."""
        self._installed.check_idle()
        refuse_contexts(self.workload.autocast, self._member.device.type)

    def _check_receiver(self, outputs_to: Receiver | None) -> None:
        if isinstance(outputs_to, bool | str) and outputs_to != "all":
            raise UsageError(f"outputs_to={outputs_to!r} is not allowed", hint='give a rank, or "all" for every rank')
        self._member.check_rank(None if outputs_to == "all" else outputs_to)

    def _asked(self, outputs_to: Receiver | None) -> str:
        """What a call asks for beside the loss; its ranks must ask alike, for messages have as many numbers."""
        names = f", metrics={sorted(self.workload.metrics)}" if self.workload.metrics else ""
        return names if outputs_to is None else f", outputs_to={outputs_to!r}{names}"

    @of_one_batch
    @one_call()
    def forward(self, inputs: Any, *, to: int | None = 0) -> Any:
        """The model's output for a batch's inputs, in eval mode and in the structure that the model gives it.

        Micro-batches are joined along the rows, in order. What has no rows must be the same for all of them, but for
        floating numbers: these count as the loss does, as means over the rows.

        Args:
            inputs: As a batch has them, the same on every rank, with any number of rows and of any shape; None where
                this rank does not need them.
            to: The rank that gets the output, on its own device; None: every rank.

        Returns:
            The output on rank `to`; None on the others.

        Raises:
            UsageError: there is no such rank; or an output without rows differs between micro-batches, and is no
                floating number, or the workload has a `weight`, which asks for targets (see `evaluate`), or sums.
        """
        self._member.check_rank(to)
        self._check_place()
        with self._member.guarded("the start of a forward"), kept_generators(self._member.device):
            self._kept.check(self.state_dict, training=False)
            return self._installed.forward(inputs, self._batches, to)

    def _note(self, call: str) -> None:
        """A call that has every rank for itself is compared with the next one that has them all."""
        self._installed.comparison.check(call, exchanges=False)

    def _note_called(self, call: str) -> None:
        """A script calls a method of its optimizer's own on the only rank, which may do what an update does.

        Raises:
            UsageError: the gradients are multiplied by the loss's scale.
        """
        self._require_training()
        if self._scaling.scaled:
            raise UsageError(
                f"{call} would find gradients that are multiplied by the loss's scale",
                hint="pipeline.clip_grad_norm_ before it takes the scale out of them; or autocast in bfloat16",
            )
        self._note(call)
        self._moved.note_trained()

    def _require_training(self) -> None:
        if not self._trains:
            raise UsageError("this pipeline was made with training=False", hint="make one that trains")

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """What the optimizer's handle does on every rank; what a closure gave first."""
        self._require_training()
        if closure is not None:
            found = self._update_by(closure)
            self._moved.note_trained()
            return found
        with self._member.guarded("an update"):
            is_by_hand = not self._updated  # behind a step's backwards: the script may have changed the gradients
            is_again = bool(self._updated) and not self._waiting
            if self._installed.comparison.compares:
                call = f"optimizer.step() with {self._rank_optimizer.groups.settings}"
                self._installed.comparison.check(call, exchanges=is_by_hand or is_again or self.scaler.is_enabled())
            self._rank_optimizer.check_tried(self._member.numbers)
            if is_by_hand or is_again:
                self._installed.gradients.factor.check([each["params"] for each in self._rank_optimizer.param_groups])
            self._scaling.check_by(self._optimizer)
            good = self._installed.gradients.ready(again=is_again)
            self._installed.watch.copies.note_gradients()
            self._waiting = False
            self._clock.note_update()
            self._installed.update(self._rank_optimizer, self.steps, good=good)
            if self._installed.gradients.factor.is_watched:
                self._installed.gradients.factor.note()
            self.steps += good
            self._moved.note_trained()
        return None

    def _update_by(self, closure: Callable[[], Any]) -> Any:
        """An update that asks for losses and gradients as often as it likes, on the worker with the parameters.

        That worker tells the others each time, for they have a part in the forward, or none at all, as the plan says.
        """
        if self.scaler.is_enabled():
            raise UsageError(
                "a loss scale cannot go with a closure: the gradients that it makes are scaled",
                hint="autocast in bfloat16, or no scaler",
            )
        holder = next(iter(self._installed.updating), 0)
        with self._member.guarded("an update with a closure"):
            found = list[Any]()
            carried = self._installed.training.carried
            begun = carried.parts

            def evaluated() -> Any:
                carried.parts = begun  # all evaluations are of one function of the weights
                found.append(closure())
                fit_momentum(self._rank_optimizer.local)
                return found[-1]

            def evaluation() -> Any:
                self._member.number_from(holder, 1.0)
                return evaluated()

            with self._rank_optimizer.hooked(runs=self.rank == holder):
                if self.rank == holder:
                    self._rank_optimizer.local.step(evaluation)
                    self._member.number_from(holder, 0.0)
                else:
                    while self._member.number_from(holder, 0.0):
                        evaluated()
            self._rank_optimizer.share_settings(self._member, self._installed.updating)
            self._waiting, self._updated = False, True
            self._clock.note_update()
            self.steps += 1
        return found[0] if found else None

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
        """
        installed, base = self._installed, self._base_bytes
        with traced(Path(path), installed, remat=self._remat, base_bytes=base, last=last, force=force):
            yield
