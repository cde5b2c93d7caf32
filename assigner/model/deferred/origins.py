"""What ranks compare of the models that their builders have made: each makes its own part, and all are of one model.

    seeds       the states of torch's generators from which a builder draws
    python      that of Python's generator, and
    numpy       of NumPy's, if it has drawn from them: nobody seeds these for it
    values      what each weight is made by: the calls, their numbers, and the draws before them; of one that was there
                before, its values; and what forwards can read of numbers in lists, sets, arrays, tensors and numbered
                dicts, and of fractions by name
    texts       in lists and dicts that forwards can read, and names of whole numbers: whether the same ones stand in
                another order
    code        of the user's own that a model and what is beside it can run, for each rank has files of its own

Other whole numbers by name, and other texts, may differ: a rank's number, a path. What a set has decided has another
order in each process.

Code is told by the text of what stands at the top of a file, a function or a class, of which comments, docstrings and
formatting do not count. What such a text makes of a rank's number or of a host's name is its own business, so values
are not looked at, and of a name that is defined in two ways both count.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import linecache
import numbers
import re
import sys
import types
import warnings
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.model.deferred.codenames import nested
from assigner.model.deferred.contents import filling_of
from assigner.model.deferred.ownership import attributes_of, is_own, users_classes
from assigner.model.deferred.reach import METHODS, MOST_ITEMS, reach
from assigner.model.deferred.recorder import is_meta
from assigner.model.deferred.replay import Call, SharedDraws, View
from assigner.model.members import named_buffers, named_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.model.deferred.vocabulary import Vocabulary

_NUMBERS = (numbers.Number, np.bool_)
_WHOLE = 1 << 20
"""Elements of a tensor or an array up to which all of them count."""
_SAMPLED = 256
_MANY = 4
"""Entries of a dict from which on texts and numbers are no place among the ranks."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LAMBDA = "<lambda>"
_CACHED = functools._lru_cache_wrapper
_TOLD = (bool, int, float, str)
_WITH_NAMES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Origins:
    """What a model was made from; numbers of 48 bits, 0: nothing."""

    seeds: int  # of torch's draws
    python: int  # of draws from Python's generator
    numpy: int
    values: dict[str, int]  # of weights by name, and of numbers by where they are
    texts: dict[str, tuple[int, int]]  # of each container of texts: of what is in it, and of how that stands there

    @property
    def numbers(self) -> list[float]:
        """What ranks compare first: seeds, Python's, NumPy's, all values together."""
        return [self.seeds, self.python, self.numpy, digest(map(str, self.placed))]

    @property
    def placed(self) -> list[int]:
        """Of each place and its values."""
        return [digest([f"{where}: {each}"]) for where, each in self.values.items()]


def origins_of(
    calls: Sequence[Call],
    model: nn.Module,
    vocabulary: Vocabulary,
    draws: SharedDraws,
    unregistered: Sequence[tuple[torch.Tensor, View]],
) -> Origins:
    """Those of a builder, by its calls, the model that it has made, and the names by which forwards read of that.

    `unregistered` are tensors beside parameters and buffers, each with what stands for it in the calls: their values
    may be what memory held before, as those of torch.empty.
    """
    seeds = [call.source.numpy().tobytes() for call in calls if isinstance(call.source, torch.Tensor)]
    known, made = _known(calls), {id(tensor): view for tensor, view in unregistered}
    found: dict[str, int] = defaultdict(int)
    texts: dict[str, tuple[int, int]] = {}
    for where, value in (*named_parameters(model), *reach({}, model.named_modules(), vocabulary=vocabulary)):
        name = without_addresses(str(where))  # objects of a set have one name, and no order
        view = made.get(id(value))
        if numbers_ := list(_numbers(value, vocabulary) if view is None else _looked_at(view, known)):
            found[name] = (found[name] + digest(numbers_)) % (1 << 48)
        if there := _texts(value):
            texts[name] = digest(there[0]), digest(there[1])
    return Origins(
        digest(seeds),
        digest(map(repr, draws.python)) if draws.python else 0,
        digest(map(repr, draws.numpy)) if draws.numpy else 0,
        {**_weights(model, known), **dict(sorted(found.items()))},
        texts,
    )


def _known(calls: Sequence[Call]) -> dict[int, int]:
    """What has made each storage: all that its values follow from."""
    known, ends = dict[int, int](), list[int]()  # by storage, what it is; by call, where its draws ended
    for call in calls:
        parts = [without_addresses(str(call.function)), *_given(call, known)]
        if call.source is not None:
            parts.append(str(ends[call.source]) if isinstance(call.source, int) else call.source.numpy().tobytes())
        ends.append(digest(parts))
        for n, leaf in enumerate(pytree.tree_leaves(call.result)):
            if isinstance(leaf, View) and leaf.storage not in known:
                known[leaf.storage] = digest([str(ends[-1]), str(n)])
        known.update(dict.fromkeys(call.writes, ends[-1]))
    return known


def _weights(model: nn.Module, known: Mapping[int, int]) -> dict[str, int]:
    """What has made each parameter and buffer that has no values yet."""
    tensors = {name: each for name, each in (*named_parameters(model), *named_buffers(model)) if is_meta(each)}
    return {name: digest(_looked_at(View.of(each), known)) for name, each in tensors.items()}


def _given(call: Call, known: Mapping[int, int]) -> Iterator[str | bytes]:
    """The arguments of a call; not where memory lies."""
    named = {name: each for name, each in call.kwargs.items() if name not in ("pin_memory", "device")}
    for leaf in pytree.tree_leaves((call.args, named)):
        if isinstance(leaf, View):
            yield from _looked_at(leaf, known)
        elif isinstance(leaf, torch.Tensor):
            yield from _elements(leaf)
        elif isinstance(leaf, _NUMBERS):
            yield repr(leaf)


def _looked_at(view: View, known: Mapping[int, int]) -> Iterator[str]:
    yield f"{known.get(view.storage)} {view.dtype} {tuple(view.size)} {view.stride} {view.offset}"


def _texts(value: Any) -> tuple[list[str], list[str]] | None:
    """What texts a list has, a dict among its keys or values, or a module as names of whole numbers; how they stand.

    None: it has none, or they may tell of a place among the ranks, as {"row": 0, "column": 1}. A few that were numbered
    by going over a set are told from that by their numbers, which come in the same turn in every process.
    """
    if isinstance(value, list | tuple | deque) and len(value) > 1 and all(isinstance(each, str) for each in value):
        return sorted(value), [*value]
    named, are_few = value if isinstance(value, dict) else {}, isinstance(value, nn.Module)
    kind: type = type(value)
    if isinstance(value, nn.Module) and users_classes(kind):
        named = {name: each for name, each in attributes_of(value, plain=True).items() if type(each) is int}
    if len(named) < 2 or not _is_plain(named.keys(), str) or not _is_plain(named.values(), str):
        return None
    are_few |= len(named) < _MANY
    texts = sorted(repr(each) for pair in named.items() for each in pair if isinstance(each, str))
    in_turn = [repr(each) for pair in named.items() for each in pair if not isinstance(each, str)]
    if are_few and not (texts and in_turn):
        return None
    return texts + (in_turn if are_few else sorted(in_turn)), sorted(map(repr, named.items()))


def _numbers(value: Any, vocabulary: Vocabulary) -> Iterator[str | bytes]:
    """Those in a container, an array or a tensor with values; of a module and of a dict with names, fractions."""
    if isinstance(value, torch.Tensor):
        yield from _elements(value)
    elif isinstance(value, nn.Module):
        yield from _fractions(attributes_of(value, plain=True), vocabulary)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        items = [repr(each) for each in value if isinstance(each, _NUMBERS)]
        yield from sorted(items) if isinstance(value, set | frozenset) else items
        if len(value) > MOST_ITEMS:  # the walk does not enter it
            yield from (repr(each) for each in value if isinstance(each, list | tuple) and _is_plain(each))
    elif isinstance(value, dict) and all(isinstance(key, int) for key in value):
        yield from sorted(f"{key!r}: {each!r}" for key, each in value.items() if isinstance(each, _NUMBERS))
    elif isinstance(value, dict):
        yield from _fractions(value, vocabulary)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}"
        yield (value if value.size <= _WHOLE else value.flat[:: -(-value.size // _SAMPLED)]).tobytes()


def _fractions(named: Mapping[Any, Any], vocabulary: Vocabulary) -> Iterator[str]:
    """Those among numbers by name that forwards can read; where code makes the names by which it asks, none."""
    names = vocabulary.names or ()
    real = ((name, each) for name, each in named.items() if name in names and isinstance(each, numbers.Real))
    found = [(name, float(each)) for name, each in real if not isinstance(each, numbers.Integral)]
    yield from sorted(f"{name}: {each!r}" for name, each in found if each % 1)


def _is_plain(values: Iterable[Any], *kinds: type) -> bool:
    return all(isinstance(each, (*_NUMBERS, *kinds)) for each in values)


def digest(parts: Iterable[str | bytes]) -> int:
    """One number of 48 bits, which a float holds, for all of these in turn."""
    found = hashlib.blake2b(digest_size=6)
    for each in parts:
        found.update(each if isinstance(each, bytes) else f"{each};".encode())
    return int.from_bytes(found.digest(), "big")


def without_addresses(text: str) -> str:
    """What stands for an object, as every process has it: Python shows functions and objects by where they lie."""
    return _ADDRESS.sub("", text)


def _elements(tensor: torch.Tensor) -> Iterator[str | bytes]:
    """Its values; of many some."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    some = flat if len(flat) <= _WHOLE else flat[:: -(-len(flat) // _SAMPLED)]
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def own_code(functions: Iterable[Any], model: nn.Module) -> dict[str, list[int]]:
    """What functions, as the loss, and a model's forwards can run of the user's own files; of an object its class's.

    By name and file, as `loss (model.py)`, numbers of 48 bits, in order: one for each definition.
    """
    found: dict[str, set[int]] = defaultdict(set)
    waiting: list[Any] = [*functions, *(type(each) for each in model.modules())]
    known: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known[id(value)] = value  # an id stays that of one object
        with contextlib.suppress(Exception):  # what an object of odd classes cannot tell is no reason to end a run
            for function in _functions_of(value):
                module = function.__globals__.get("__name__")
                if isinstance(module, str) and is_own(module):
                    code = function.__code__
                    name = code.co_qualname.partition(".")[0]
                    found[f"{name} ({_place(function)})"].update(_definitions(code.co_filename).get(name, ()))
                    waiting += _named(function)
    return {name: sorted(each) for name, each in sorted(found.items()) if each}


def python_release() -> int:
    """What has read the text: a number that is the same where one text is the same to it."""
    return digest([sys.implementation.name, str(sys.version_info[:2])])


def _place(function: types.FunctionType) -> str:
    """Its file, in its package: the folder of that is another one on every host."""
    package, _, _ = str(function.__globals__["__name__"]).rpartition(".")
    return f"{package}{'/' if package else ''}{Path(function.__code__.co_filename).name}"


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """What is run where a function is called, or an object of a class; nothing of the object itself is asked."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
        yield from _functions_of(vars(value).get("__wrapped__"))
    elif kind in (types.MethodType, functools.partial, _CACHED):
        name = {types.MethodType: "__func__", functools.partial: "func"}.get(kind, "__wrapped__")
        yield from _functions_of(getattr(value, name))
    elif issubclass(kind, type):
        for each in users_classes(value):
            for member in [*vars(each).values()]:
                for inner in METHODS.get(type(member), lambda member: (member,))(member):
                    if type(inner) in (types.FunctionType, _CACHED):
                        yield from _functions_of(inner)
    elif kind not in (type(None), types.BuiltinFunctionType):
        yield from _functions_of(kind)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """The functions, classes and partials that a function's code has names for, at the top of files or around it."""
    names = dict.fromkeys(name for each in nested(function.__code__) for name in each.co_names)
    space = function.__globals__
    for value in [space.get(name) for name in names]:
        if type(value) is types.ModuleType:
            yield from filter(_is_code, [vars(value).get(name) for name in names])
        elif _is_code(value):
            yield value
    for cell in function.__closure__ or ():
        yield from filter(_is_code, filling_of(cell))


def _is_code(value: Any) -> bool:
    return issubclass(type(value), (types.FunctionType, type, functools.partial, _CACHED))


@functools.cache
def _definitions(file: str) -> Mapping[str, list[int]]:
    """What stands at the top of a file, by name; nothing where there is no text."""
    found: dict[str, list[int]] = defaultdict(list)
    if not Path(file).is_absolute():
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, which has had the file before
            tree = ast.parse("".join(linecache.getlines(file)))
        for name, node in _outermost(tree):
            found[name].append(digest([ast.dump(_without_docstrings(node))]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # changed since, or nested too deeply for this
        return {}
    return found


def _outermost(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _NAMED):
            yield node.name, node
        elif isinstance(node, ast.Lambda):
            yield _LAMBDA, node
        else:
            yield from _outermost(node)


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, _NAMED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def named(value: Any) -> str:
    """What is given as a loss or the like, in words that are the same where it is: its name, and settings of torch's.

    Nothing else of an object is asked: it may know a rank or a host.
    """
    value = _compiled_of(value)
    if issubclass(type(value), functools.partial):
        func, given = value.func, ""
        if str(getattr(func, "__module__", "")).startswith("torch."):
            given = str(sorted((name, each) for name, each in value.keywords.items() if type(each) in _TOLD))
        return f"a partial of {named(func)} {given}"
    if issubclass(type(value), _WITH_NAMES):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    kind = type(value)
    names = kind.__dict__.get("__constants__", ()) if str(kind.__module__).startswith("torch.nn.modules.") else ()
    settings = {name: each for name in names if type(each := vars(value).get(name)) in _TOLD}
    return f"{kind.__qualname__} {settings or ''}"


def _compiled_of(value: Any) -> Any:
    """What torch.compile was given, of what that has made: a rank may compile, and another one not."""
    kind = type(value)
    if str(kind.__module__).startswith("torch._dynamo") and issubclass(kind, nn.Module):
        return value._orig_mod
    return vars(value).get("_torchdynamo_orig_callable", value) if kind is types.FunctionType else value
