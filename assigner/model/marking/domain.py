"""For which inputs a captured forward holds: what torch.export decided on its way, as conditions on the inputs.

A capture follows one path through the model's Python code. It holds for other inputs where every decision on a size
comes out the same, and where structure, types and plain values are those it was made with:

    forward                              inputs           what it holds for
    x + positions[: x.shape[1]]          x: (4, 5)        x: (2.., 2..6), for there are 6 positions
    a if x.shape[0] > 3 else b           x: (4, 8)        x: (4.., 8)
    y if flag else -y                    flag: True       flag is True

A size of 1 is another path (it broadcasts), so symbolic sizes are 2 or more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.formatting import Unquoted, printable
from assigner.model.plainvalues import dtype_name
from assigner.model.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.export import ExportedProgram

_NOTED = 1000
_OTHERS: tuple[tuple[Callable[[int], int], ...], ...] = (
    (lambda n: n + min(n, 64), lambda n: n + 1),
    (lambda n: n - min(n // 2, 64), lambda n: n - 1),
)
"""Larger sizes, and smaller ones; a mask by two of them takes not much more memory than its own."""


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
        fixed: (leaf, dimension) of the sizes that are numbers in it.
        symbols: The other sizes: symbol -> (leaf, "size" or "stride", dimension).
        bounds: Least and greatest value of each symbol.
        guards: Conditions on the symbols, as sympy expressions.
    """

    example: InputKey
    fixed: tuple[tuple[int, int], ...]
    symbols: Mapping[Any, tuple[int, str, int]]
    bounds: Mapping[Any, tuple[float, float]]
    guards: tuple[Any, ...]

    def admits(self, key: InputKey) -> bool:
        """True if the capture holds for inputs with this key."""
        if not key.is_like(self.example):
            return False
        if any(_sizes(key, leaf)[dim] != _sizes(self.example, leaf)[dim] for leaf, dim in self.fixed):
            return False
        values = self.numbers(key)
        if any(not low <= values[symbol] <= high for symbol, (low, high) in self.bounds.items()):
            return False
        return all(guard.subs(values) == True for guard in self.guards)  # noqa: E712 - sympy's true is no Python bool

    def numbers(self, key: InputKey) -> dict[Any, int]:
        """What the symbols are for inputs with this key, which is like the example's."""
        return {symbol: _number(key, place) for symbol, place in self.symbols.items()}

    def beside(self) -> list[tuple[InputKey | None, InputKey | None]]:
        """The example's inputs with one other size each, or several where these hang together.

        Returns:
            Of each size that may vary: with a larger one, and with a smaller one. None: the capture does not hold for
            these.
        """
        sizes = (symbol for symbol, (_, what, _) in self.symbols.items() if what == "size")
        tied = dict.fromkeys(frozenset(self._tied(each)) for each in sizes)
        changed = ([[self._changed(each, way) for way in ways] for ways in _OTHERS] for each in tied)
        return [(next(filter(self.admits, up), None), next(filter(self.admits, down), None)) for up, down in changed]

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


def _sizes(key: InputKey, leaf: int) -> tuple[int, ...]:
    found = key.leaves[leaf]
    assert isinstance(found, TensorKey)
    return found.sizes


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
    fixed: list[tuple[int, int]] = []
    symbols: dict[Any, tuple[int, str, int]] = {}
    for leaf, fake in zip(tensors, fakes, strict=True):
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                symbols.setdefault(size.node._expr, (leaf, "size", dim))  # as it was before anything was decided
            else:
                fixed.append((leaf, dim))
        for dim, stride in enumerate(fake.stride()):
            if isinstance(stride, torch.SymInt) and stride.node._expr.is_symbol:
                symbols.setdefault(stride.node._expr, (leaf, "stride", dim))
    ranges = {symbol: environment.var_to_range[symbol] for symbol in symbols if symbol in environment.var_to_range}
    bounds = {symbol: (_bound(each.lower, -math.inf), _bound(each.upper, math.inf)) for symbol, each in ranges.items()}
    return Domain(example, tuple(fixed), symbols, bounds, tuple(dict.fromkeys(g.expr for g in environment.guards)))


def _bound(number: Any, otherwise: float) -> float:
    return int(number) if number.is_Integer else otherwise
