"""For which inputs a captured forward holds: what torch.export decided on its way, as conditions on the inputs.

A capture follows one path through the model's Python code. It holds for other inputs where every decision on a size
comes out the same, and where structure, types and plain values are those it was made with:

    forward                              inputs           what it holds for
    x + positions[: x.shape[1]]          x: (4, 5)        x: (2.., 2..6), for there are 6 positions
    a if x.shape[0] > 3 else b           x: (4, 8)        x: (4.., 8)
    y if flag else -y                    flag: True       flag is True

A size of 1 is another path (it broadcasts), so symbolic sizes are 2 or more. What they are in numbers, and which
of them are rows, `Symbols` says.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.formatting import Unquoted, printable
from assigner.model.plainvalues import dtype_name
from assigner.model.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch.export import ExportedProgram

    from assigner.model.marking.capture import Capture

MANY_ROWS = 120
"""So many tell a size that grows with the rows from one that does not: parts of them are whole numbers, and a rounded
one is another number."""
_NOTED = 1000
_OTHERS: tuple[tuple[Callable[[int], int], bool], ...] = (
    (lambda n: n + min(n, 64), True),
    (lambda n: n + 1, True),
    (lambda n: n - min(n // 2, 64), False),
    (lambda n: n - 1, False),
)
"""Other sizes, and whether they are larger; a mask by two of them takes not much more memory than its own."""


@dataclass(frozen=True)
class TensorKey:
    """What a capture sees of a tensor; a contiguous one's strides are None."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.sizes)}"

    def made(self) -> torch.Tensor:
        """A tensor with this key, of whatever values."""
        if self.strides is None:
            return torch.empty(self.sizes, dtype=self.dtype, device="cpu")
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Constant:
    """A plain value among the inputs; 1, 1.0 and True are three of them."""

    kind: type
    value: Any

    def __str__(self) -> str:
        return repr(self.value)

    def made(self) -> Any:
        """The value; of a float its words are kept."""
        return float(self.value) if self.kind is float else self.value

    def is_as(self, other: TensorKey | Constant) -> bool:
        """Both are numbers of one type."""
        return self.kind in (int, float) and isinstance(other, Constant) and other.kind is self.kind


@dataclass(frozen=True)
class InputKey:
    """What a capture sees of a micro-batch's inputs, the flattened (args, kwargs); equal keys take equal paths."""

    structure: pytree.TreeSpec
    leaves: tuple[TensorKey | Constant, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))

    def signature(self) -> str:
        """The inputs as the model's forward is called with them, by keyword where a batch's inputs are a dict."""
        args, kwargs = pytree.tree_unflatten([Unquoted(str(leaf)) for leaf in self.leaves], self.structure)
        return ", ".join([*map(repr, args), *(f"{name}={word!r}" for name, word in kwargs.items())])

    def inputs(self) -> Any:
        """Inputs with this key, as a batch has them; of tensors without values."""
        args, kwargs = pytree.tree_unflatten([each.made() for each in self.leaves], self.structure)
        return kwargs or args

    @property
    def noted(self) -> str:
        """The signature as a file has it: of many inputs its beginning."""
        return printable(self.signature(), most=_NOTED)

    def is_like(self, other: InputKey) -> bool:
        """True if structure, types, numbers of dimensions and plain values are the same; sizes may differ."""
        return self.structure == other.structure and all(map(_alike, self.leaves, other.leaves))

    def differs_in_rows(self, other: InputKey, carriers: Sequence[int | None]) -> bool:
        """True if all else is the same as there; of each leaf's dimensions one may carry rows, or none (None)."""
        pairs = zip(self.leaves, other.leaves, carriers, strict=False)
        return self.is_like(other) and all(
            one.sizes[dim] == two.sizes[dim]
            for one, two, carrier in pairs
            if isinstance(one, TensorKey) and isinstance(two, TensorKey)
            for dim in range(len(one.sizes))
            if dim != carrier
        )

    def numbers_beside(self, other: InputKey) -> list[Any]:
        """The plain numbers here in whose places others stand there, if nothing else makes the two unlike; or none."""
        pairs = [pair for pair in zip(self.leaves, other.leaves, strict=False) if not _alike(*pair)]
        numbers = [one for one, two in pairs if isinstance(one, Constant) and one.is_as(two)]
        return (
            [each.value for each in numbers] if self.structure == other.structure and len(numbers) == len(pairs) else []
        )


def check_arguments(name: str, forward: Callable[..., Any], inputs: Any) -> None:
    """See that a batch's inputs are what a model's forward takes.

    Raises:
        MarkingError: they are others, or another number of them.
    """
    args, kwargs = call_arguments(inputs)
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # it is not Python's own: the capture says so
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        kind = type(inputs).__name__
        is_spread = isinstance(inputs, list | tuple | dict)
        given = f"a {kind} of {len(inputs)}, which is taken for as many" if is_spread else f"one {kind}, which is one"
        names = [*signature.parameters]
        whole = (
            f"; a tuple around it, ({names[0] if names else 'inputs'},), gives the {kind} as one argument"
            if is_spread
            else ""
        )
        raise MarkingError(
            f"the inputs of {name} are {given} argument{'s' * is_spread} of its forward({', '.join(names)}): {error}",
            hint=f"give a tuple or a list of its arguments, or a dict of them by name{whole}",
        ) from error


def input_key(structure: pytree.TreeSpec, leaves: Sequence[Any]) -> InputKey:
    """The key of a micro-batch's flattened inputs.

    Raises:
        UsageError: one of them is neither a tensor nor a plain value.
    """
    return InputKey(structure, tuple([_leaf_key(leaf) for leaf in leaves]))


def _leaf_key(leaf: Any) -> TensorKey | Constant:
    if isinstance(leaf, torch.Tensor):
        return TensorKey(leaf.dtype, tuple(leaf.shape), None if leaf.is_contiguous() else leaf.stride())
    try:
        hash(leaf)
    except TypeError as error:
        raise UsageError(
            f"the batch's inputs hold a {type(leaf).__name__}",
            hint="inputs are tensors and plain values, in tuples, lists and dicts",
        ) from error
    return Constant(type(leaf), repr(leaf) if isinstance(leaf, float) else leaf)


@dataclass(frozen=True)
class Domain:
    """The inputs that a capture holds for.

    Args:
        example: The key of the inputs that it was made with.
        fixed: The sizes that are numbers in it, by their places: (leaf, "size", dimension).
        symbols: The other sizes: symbol -> (leaf, "size" or "stride", dimension).
        bounds: Least and greatest value of each symbol.
        guards: Conditions on the symbols, as sympy expressions.
    """

    example: InputKey
    fixed: tuple[tuple[int, str, int], ...]
    symbols: Mapping[Any, tuple[int, str, int]]
    bounds: Mapping[Any, tuple[float, float]]
    guards: tuple[Any, ...]

    def admits(self, key: InputKey) -> bool:
        """True if the capture holds for inputs with this key."""
        if not key.is_like(self.example):
            return False
        if any(_number(key, place) != _number(self.example, place) for place in self.fixed):
            return False
        values = self.numbers(key)
        if any(not low <= values[symbol] <= high for symbol, (low, high) in self.bounds.items()):
            return False
        return all(guard.subs(values) == True for guard in self.guards)  # noqa: E712 - sympy's true is no Python bool

    def numbers(self, key: InputKey) -> dict[Any, int]:
        """What the symbols are for inputs with this key, which is like the example's."""
        return {symbol: _number(key, place) for symbol, place in self.symbols.items()}

    def beside(self) -> Iterator[tuple[InputKey, bool]]:
        """The example's inputs with one other size each, or several where these hang together.

        Yields:
            Of each size that may vary the first inputs that the capture holds for, and whether they are larger: smaller
            ones are tried where it holds for no larger ones.
        """
        sizes = (symbol for symbol, (_, what, _) in self.symbols.items() if what == "size")
        for each in dict.fromkeys(frozenset(self._tied(symbol)) for symbol in sizes):
            changed = ((self._changed(each, change), is_larger) for change, is_larger in _OTHERS)
            yield from itertools.islice((pair for pair in changed if self.admits(pair[0])), 1)

    def _tied(self, symbol: Any) -> set[Any]:
        """The symbols that are in equations with one."""
        found, before = {symbol}, 0
        while len(found) > before:
            before = len(found)
            for each in self.guards:
                if isinstance(each, sympy.Eq) and each.free_symbols & found:
                    found |= each.free_symbols & self.symbols.keys()
        return found

    def _changed(self, symbols: Collection[Any], change: Callable[[int], int]) -> InputKey:
        places = {(leaf, dim) for leaf, what, dim in map(self.symbols.__getitem__, symbols) if what == "size"}
        leaves = [
            replace(each, sizes=tuple(change(n) if (leaf, dim) in places else n for dim, n in enumerate(each.sizes)))
            if isinstance(each, TensorKey) and each.strides is None
            else each
            for leaf, each in enumerate(self.example.leaves)
        ]
        return InputKey(self.example.structure, tuple(leaves))


def _alike(one: TensorKey | Constant, other: TensorKey | Constant) -> bool:
    if isinstance(one, TensorKey) and isinstance(other, TensorKey):
        return one.dtype == other.dtype and len(one.sizes) == len(other.sizes)
    return one == other


def _number(key: InputKey, place: tuple[int, str, int]) -> int:
    leaf, what, dim = place
    found = key.leaves[leaf]
    assert isinstance(found, TensorKey)
    if what == "size":
        return found.sizes[dim]
    return math.prod(found.sizes[dim + 1 :]) if found.strides is None else found.strides[dim]


def find_domain(program: ExportedProgram, example: InputKey) -> Domain:
    """What a fresh export holds for: its sizes' symbols, their bounds, and the guards that tracing left."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    assert mode is not None
    assert mode.shape_env is not None
    environment: Any = mode.shape_env
    tensors = [n for n, leaf in enumerate(example.leaves) if isinstance(leaf, TensorKey)]
    fakes = [tracked.fake for tracked in environment.tracked_fakes if isinstance(tracked.fake, torch.Tensor)]
    fixed: list[tuple[int, str, int]] = []
    symbols: dict[Any, tuple[int, str, int]] = {}
    for leaf, fake in zip(tensors, fakes, strict=True):
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                symbols.setdefault(size.node._expr, (leaf, "size", dim))  # as it was before anything was decided
            else:
                fixed.append((leaf, "size", dim))
        for dim, stride in enumerate(fake.stride()):
            if isinstance(stride, torch.SymInt) and stride.node._expr.is_symbol:
                symbols.setdefault(stride.node._expr, (leaf, "stride", dim))
    ranges = {symbol: environment.var_to_range[symbol] for symbol in symbols if symbol in environment.var_to_range}
    bounds = {symbol: (_bound(each.lower, -math.inf), _bound(each.upper, math.inf)) for symbol, each in ranges.items()}
    return Domain(example, tuple(fixed), symbols, bounds, tuple(dict.fromkeys(g.expr for g in environment.guards)))


def _bound(number: Any, otherwise: float) -> float:
    return int(number) if number.is_Integer else otherwise


@dataclass(frozen=True)
class Size:
    """A number that the glue works out from the shapes of the model's inputs."""

    expression: Any
    symbols: Mapping[Any, tuple[int, int]]
    _known: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def evaluate(self, inputs: Sequence[Any]) -> Any:
        """The number for these input tensors (the flattened inputs of one micro-batch)."""
        sizes = tuple([inputs[leaf].size(dim) for leaf, dim in self.symbols.values()])
        if sizes not in self._known:  # substitution takes 0.1 ms, and shapes are few
            number = self.expression.subs(dict(zip(self.symbols, sizes, strict=True)))
            self._known[sizes] = (
                bool(number) if number.is_Boolean else int(number) if number.is_integer else float(number)
            )
        return self._known[sizes]


class Symbols:
    """The symbolic sizes of a capture: as numbers, which of them are rows, and as `Size` descriptions."""

    def __init__(self, captured: Capture) -> None:
        self.places: dict[Any, tuple[int, int]] = {}
        self.example: dict[Any, int] = {}
        self.rows: set[Any] = set()
        for leaf, value in enumerate(captured.given):
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    self.places.setdefault(size.node.expr, (leaf, dim))
                    self.example.setdefault(size.node.expr, captured.inputs[leaf].size(dim))
                    if dim == captured.carriers[leaf]:
                        self.rows.add(size.node.expr)
        self.example_rows = captured.rows
        self._several: dict[Any, float | None] = {}

    def number(self, size: Any, rows: int | None = None) -> int:
        """A size for the example batch, or for another number of rows; one that depends on data counts as the rows."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        values = dict(self.example)
        if rows is not None:
            values.update(dict.fromkeys(self.rows, rows))
        values.update(dict.fromkeys(free_unbacked_symbols(size), rows or self.example_rows or 1))
        return int(size.node.expr.subs(values))

    def bytes(self, tensor: torch.Tensor, rows: int | None = None) -> int:
        """Those of a tensor, likewise."""
        return math.prod(self.number(size, rows) for size in tensor.shape) * tensor.element_size()

    def many(self, size: Any) -> int:
        """A size for `MANY_ROWS` rows."""
        return self.number(size, MANY_ROWS)

    def several(self, size: Any) -> float | None:
        """How many entries for each row a dimension has; None: its size is none of rows, NaN: in no ratio.

        One of rows grows with them, which one like 2 * rows // rows does not; or it depends on data: what was chosen of
        each micro-batch, in order.
        """
        if not isinstance(size, torch.SymInt):
            return None
        expression = size.node.expr
        if expression not in self._several:
            one, two = (self.number(size, times * MANY_ROWS) for times in (1, 2))
            ratio = one / MANY_ROWS if two == 2 * one else math.nan
            has_rows = free_unbacked_symbols(size) or (self.rows & expression.free_symbols and one != two)
            self._several[expression] = ratio if has_rows else None
        return self._several[expression]

    def dimensions(self, shape: Sequence[Any]) -> list[int]:
        """Those that have rows."""
        return [dim for dim, size in enumerate(shape) if self.several(size) is not None]

    def depends_on_data(self, shape: Sequence[Any]) -> bool:
        """Whether a size of a tensor does."""
        return any(free_unbacked_symbols(size) for size in shape if isinstance(size, torch.SymInt))

    def names(self, shape: Sequence[Any]) -> tuple[str, ...]:
        """A shape in words that do not depend on torch's names for its symbols."""
        words = {symbol: sympy.Symbol(f"input{leaf}_{dim}") for symbol, (leaf, dim) in self.places.items()}
        return tuple(str(size.node.expr.subs(words)) if isinstance(size, torch.SymInt) else str(size) for size in shape)

    def describe(self, value: Any) -> Size:
        """How a rank works a symbolic size out from its inputs' shapes."""
        expression = value.node.expr
        return Size(expression, {symbol: self.places[symbol] for symbol in expression.free_symbols})
