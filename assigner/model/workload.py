"""What the user hands over: a model's builder, a batch maker, the loss and the optimizer."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.files import is_regular
from assigner.formats.fineness import Fineness
from assigner.usercode import parse_call, user_code

Batch = tuple[Any, Any]
Metric = Callable[[Any, Any], Any]
CompileOptions = bool | Mapping[str, Any] | None
StatePlace = int | str
"""Where something stands among a model's inputs or in its output: a position, or a name."""
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "reduction": ("mean", "sum"), "autocast": (None, "bfloat16", "float16"), "loss_over": ("micro_batch", "batch"),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model with all that a training step needs, none of it built yet.

    Args:
        model: Builds the model. It is called without memory behind its tensors to find the partitions, and again by
            each rank for its own part; it must build the same model each time.
        batch: `batch(rows, generator)` makes one batch of `rows` rows from the generator: (inputs, targets), each a
            tensor or a tuple, list or dict of tensors with a dimension for the rows. The model is called as
            `model(inputs)`, `model(*inputs)` for a tuple or list, `model(**inputs)` for a dict or another mapping.
        loss: `loss(outputs, targets)`: a scalar tensor, the mean over the rows (see `reduction`). A model that is used
            for its outputs alone needs none.
        optimizer: Builds a torch optimizer from the model's parameters, as
            `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`. A function whose first parameter is called
            `named_parameters` gets (name, parameter) pairs with the model's own names. Either may make param groups,
            by name, shape or position: every rank calls it with all of the model's parameters, in the model's order,
            of which those of other ranks have shape and type but no values (they lie on the meta device). A model that
            is not trained needs none.
        batch_size: Rows in a step, as `batch` counts them: of pairs, so many pairs. So do `min_rows` and plans.
        name: For tables; empty: the name of the function that made the workload.
        marks: Name patterns of the partitions (`blocks.*`), where the code marks none itself.
        seed: Of the initial weights and of every random choice in training.
        reduction: What `loss` does over the rows: "mean" or "sum".
        autocast: "bfloat16" or "float16": forward and loss run under `torch.autocast` with this type; None: they do
            not. With float16 the loss is scaled so that small gradients do not vanish (see `Pipeline`'s `scaler`).
        weight: `weight(inputs, targets)` says what a micro-batch counts for under reduction "mean", for example the
            number of its tokens that are not ignored: its loss counts by its share of the batch's weight. It must be
            what `loss` divides by; a micro-batch of weight 0 adds nothing, whatever its loss. None: its rows.
        compile: True: each partition's forward runs under `torch.compile`, in training and in the profiler; a mapping:
            with these arguments of it, as {"mode": "max-autotune-no-cudagraphs"}; None: it does not.
        loss_over: What one call of `loss` is over. "micro_batch": each micro-batch, and the losses add up by their rows
            or weights; "batch": the outputs of all micro-batches joined, and the whole targets, as a loss needs that
            mixes rows (contrastive, in-batch negatives). The plan's schedule must have all forwards before the first
            backward (gpipe, interleaved), and all outputs must have rows. That the last worker keeps them for all
            micro-batches, and their gradients, is in no prediction of its memory, nor is the loss's graph over them.
        metrics: Numbers to have of every step and evaluation beside the loss, by name: each `metric(outputs, targets)`
            gives a number (a bool, int, float or a tensor without dimension), or a pair (total, count). It is called
            where the loss is: for each micro-batch once, or once over the batch. Numbers are put together as losses
            are, by rows or `weight`, and added up under reduction "sum"; of pairs it is the sum of the totals divided
            by the sum of the counts, nan where that is 0. One of weight 0 counts for nothing, but in pairs. A metric
            sees no gradients, its draws change no others, and it must not write into outputs or targets. Its time is
            in no prediction.
        settings: The keywords of the function that made the workload, with their values: defaults, the entry's and
            those that the script gave. `load_workload` sets it; a script reads there what stands nowhere else.
        max_micro_batches: The most micro-batches of a step, as 1 for a model that takes its batch whole (a graph, a
            contrast over all rows); None: any number. Plans keep to it, and one that does not is refused.
        min_rows: The fewest rows of a micro-batch, as BatchNorm may need; None: any number. A batch of fewer rows is
            one micro-batch.
        carried: State from batch to batch: which input of the model, by position or name, is which output of its call
            for the batch before, as {1: 1} for `output, hidden = model(data, hidden)` or {"hidden": "hidden"}. It is
            detached. What a batch itself has there is the state to begin with: in the first one, and after
            `Pipeline.reset_carried`. Tensors, or tuples, lists and dicts of them; rows may be in any dimension.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    batch_size: int = 0
    name: str = ""
    marks: tuple[str, ...] = ()
    seed: int = 0
    reduction: str = "mean"
    autocast: str | None = None
    weight: Callable[[Any, Any], float | torch.Tensor] | None = None
    compile: CompileOptions = None
    loss_over: str = "micro_batch"
    metrics: Mapping[str, Metric] | None = field(default=None, hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    max_micro_batches: int | None = None
    min_rows: int | None = None
    carried: Mapping[StatePlace, StatePlace] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._check_builders()
        if self.batch_size < 1:
            raise UsageError(f"Workload.batch_size: {self.batch_size} is not allowed; expected 1 or more")
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                *others, last = map(repr, allowed)
                raise UsageError(f"Workload.{name}: {value!r} is not allowed; expected {', '.join(others)} or {last}")
        if self.weight is not None and self.reduction == "sum":
            raise UsageError(
                "Workload.weight has no meaning with reduction 'sum'", hint="summed losses add up as they are"
            )
        if self.weight is not None and self.loss_over == "batch":
            raise UsageError(
                "Workload.weight has no meaning with loss_over 'batch'", hint="the loss sees the whole batch at once"
            )
        for name in ("max_micro_batches", "min_rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"Workload.{name}: {value!r} is not allowed; expected None, or 1 or more")
        if not isinstance(self.compile, bool | Mapping | None):
            raise UsageError(
                f"Workload.compile: {self.compile!r} is not allowed",
                hint='expected True, None or arguments of torch.compile, as {"mode": "max-autotune-no-cudagraphs"}',
            )
        self._check_metrics()
        self._check_carried()
        if isinstance(self.marks, str):
            raise UsageError(f"Workload.marks: {self.marks!r} is text", hint=f"write ({self.marks!r},)")

    def _check_builders(self) -> None:
        """Refuse a model or an optimizer that is built already, in place of what builds it."""
        built = type(self.model).__name__
        if isinstance(self.model, nn.Module):
            raise UsageError(
                f"Workload.model is a module, a {built}", hint=f"give what builds it: model={built}, or a lambda"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            made = type(self.optimizer).__name__
            raise UsageError(
                f"Workload.optimizer is an optimizer, of type {made}",
                hint=f"give what builds it: optimizer=lambda parameters: torch.optim.{made}(parameters)",
            )
        for name in ("model", "batch"):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise UsageError(f"Workload.{name} is a {kind}", hint="give a function that makes it")

    def _check_metrics(self) -> None:
        if not isinstance(self.metrics, Mapping | None):
            raise UsageError(
                f"Workload.metrics is a {type(self.metrics).__name__}",
                hint='give functions by name, as {"accuracy": accuracy}',
            )
        for name, metric in (self.metrics or {}).items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"Workload.metrics has the name {name!r}", hint="a metric's name is text")
            if not callable(metric):
                raise UsageError(
                    f"Workload.metrics[{name!r}] is a {type(metric).__name__}",
                    hint="give a function of (outputs, targets)",
                )

    def _check_carried(self) -> None:
        given = {} if self.carried is None else self.carried
        places = [*given, *given.values()] if isinstance(given, Mapping) else [None]
        sound = all(type(place) in (int, str) for place in places)
        if not sound or any(isinstance(place, int) and place < 0 for place in given):
            raise UsageError(
                f"Workload.carried: {self.carried!r} is not allowed",
                hint="say which input of the model is which output of its last call, by position or name, as {1: 1} for"
                " `output, hidden = model(data, hidden)`",
            )

    @property
    def fineness(self) -> Fineness:
        """How finely its batches may be cut."""
        return Fineness(self.max_micro_batches, self.min_rows)

    def make_batch(self, rows: int, seed: int) -> Batch:
        """One batch, the same for the same seed; checked to be a pair.

        Raises:
            UsageError: `batch` gave something else than (inputs, targets).
        """
        with user_code("Workload.batch"):
            made = self.batch(rows, torch.Generator().manual_seed(seed))
        if not isinstance(made, tuple) or len(made) != 2:
            raise UsageError(
                f"Workload.batch gave {type(made).__name__}, not a pair",
                hint="return (inputs, targets)",
            )
        return given_inputs(made[0]), made[1]

    def require_loss(self) -> None:
        """Raise UsageError if there is no loss."""
        if self.loss is None:
            raise UsageError("Workload.loss is missing", hint="give the workload a loss, or ask for outputs alone")

    def compute_loss(self, outputs: Any, targets: Any) -> Any:
        """What `loss` makes of the model's outputs.

        Raises:
            UsageError: there is no loss.
        """
        self.require_loss()
        assert self.loss is not None
        return self.loss(outputs, targets)

    @property
    def names_parameters(self) -> bool:
        """Whether the optimizer's builder is given names with the parameters."""
        try:
            arguments = inspect.signature(self.optimizer).parameters if self.optimizer else {}
        except ValueError:  # some functions written in C do not tell
            return False
        return next(iter(arguments), "") == "named_parameters"

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer over parameters that are given with their names.

        Raises:
            UsageError: there is no optimizer, it failed, or gave something else.
        """
        if self.optimizer is None:
            raise UsageError(
                "Workload.optimizer is missing", hint="give the workload an optimizer, or use training=False"
            )
        pairs = list(named)
        hints = []
        if not self.names_parameters:
            hints.append(_UNNAMED)
        if any(parameter.is_meta for _, parameter in pairs):
            hints.append("parameters that other workers hold have names, shapes and types here, and no values")
        with user_code("Workload.optimizer", **({"hint": "; ".join(hints)} if hints else {})):
            made = self.optimizer(pairs if self.names_parameters else [parameter for _, parameter in pairs])
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"Workload.optimizer gave {type(made).__name__}", hint=_ONE_OPTIMIZER)
        return made


_UNNAMED = "it is given the parameters; with their names, as pairs, where its first argument is called named_parameters"
_ONE_OPTIMIZER = (
    "it must return a torch.optim.Optimizer, one: what several have is param groups of one, or an optimizer of the"
    " script's own that steps several, under a plan on one worker (assigner solve --max-workers 1)"
)

IN_CONTAINERS = (
    "have Workload.batch and the data loader give its tensors in tuples, lists or dicts, as dict(x) of a mapping or"
    " vars(x) of another object, and forward take those"
)
"""What to do about a batch with objects in it that hold tensors."""


def given_inputs(inputs: Any) -> Any:
    """A batch's inputs, where a mapping of another class is the dict that `model(**inputs)` makes of it."""
    return dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called on a batch's inputs: positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def load_workload(entry: str, **settings: Any) -> Workload:
    """Call the function that an entry names: `FILE.py:FUNCTION`, or `FILE.py:FUNCTION(width=512)`.

    Arguments are keywords with plain Python literals, so that an entry in a file can run nothing but the function.

    Args:
        entry: As a plan has it in `plan.workload.entry`.
        settings: Keywords of the function, in place of the entry's own and of defaults: `lr=3e-4`. Every rank gives the
            same. A plan holds for the model that was profiled: what makes it another one is refused by the `Pipeline`.

    Returns:
        The workload, with all keywords of the function and their values as `settings`.

    Raises:
        UsageError: no such file, function or keyword, arguments of another form, or a result that is no Workload.
    """
    function, arguments = _called(entry)
    arguments |= settings
    known = _settings(function, arguments, entry)
    with user_code(entry):
        made = function(**arguments)
    if not isinstance(made, Workload):
        write = f"; assigner init '{entry}' writes a file with one" if isinstance(made, nn.Module) else ""
        raise UsageError(f"{entry} gave {type(made).__name__}", hint=f"it must return an assigner.Workload{write}")
    return replace(made, settings=known)


def entry_settings(entry: str) -> dict[str, Any]:
    """The keywords of the function that an entry names, with the values that the entry and defaults give them.

    Raises:
        UsageError: as `load_workload`; the function is not called.
    """
    return _settings(*_called(entry), entry)


def _settings(function: Callable[..., Any], arguments: Mapping[str, Any], entry: str) -> dict[str, Any]:
    """All keywords of a function in a call with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        return dict(arguments)
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD not in kinds.values() and (strange := arguments.keys() - kinds.keys()):
        raise UsageError(
            f"{entry}: the function has no setting {min(strange)!r}",
            hint=f"it has {', '.join(kinds)}" if kinds else "it takes no arguments",
        )
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    return {**defaults, **arguments}


def _called(entry: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that an entry names, and the arguments that it gives it."""
    path_text, separator, call = entry.rpartition(".py:")
    if not separator:
        example = f"{entry if entry.endswith('.py') else 'model.py'}:workload"
        raise UsageError(f"{entry!r} names no workload", hint=f"write FILE.py:FUNCTION, for example {example}")
    path = Path(path_text + ".py")
    if not is_regular(path):
        raise UsageError(f"{path}: no such file", hint="the path of an entry is relative to the current folder")
    name, arguments = parse_call(call, entry, what="function", hint="write FUNCTION or FUNCTION(width=512)")
    with user_code(str(path)):
        module = _load_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, each in vars(module).items() if getattr(each, "__module__", None) == module.__name__]
        hint = fmt.meant(name, own, "it has") if own else "write FILE.py:FUNCTION"
        raise UsageError(f"{path} has no function {name!r}", hint=hint)
    return function, arguments


def _load_module(path: Path) -> Any:
    """Import a file by its path, once; its folder comes first on the path, as for a script."""
    name = f"assigner_workload_{path.resolve().stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
