"""What a model takes and gives: guessed from its first layer and tried with fake tensors, where nothing is computed.

first layer          tried, beside the rows
nn.Embedding         tokens: 64, 16, 256
nn.Conv2d            images: the channels and 224, 64, 32, ... pixels a side
nn.ConvTranspose2d   the channels of 1, 4 or 8 pixels a side, as a generator's noise
nn.Linear, a norm    its features; a sequence of 16 of them
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from assigner.init.text import DraftInput, DraftOutput
from assigner.model.deferred.mutation import storage_of
from assigner.model.marking.exportable import fake_tensors
from assigner.model.marking.fakeforward import decided
from assigner.model.marking.silence import unlogged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_ROWS = 5  # unlike all other sizes
_LENGTHS = (64, 16, 256)
_SIDES = (224, 64, 32, 28, 256, 299)
_SMALL_SIDES = (1, 4, 8)
_STEPS = 16
_STATES = 6
"""Hidden states of different sizes that are tried beside tokens."""
_MOST = 150
"""Combinations of unlike arguments that are tried."""

_Kind = tuple[tuple[int, ...], int | None]
"""A shape without rows, and for tokens how many there are."""


@dataclass(frozen=True)
class Trial:
    """Inputs that a forward took, what it gave, and the modules that it called; empty: it takes none of those tried.

    Args:
        takes: The inputs.
        keywords: They are given by name.
        gives: The tensor for a loss; None: there is none.
        called: Names of modules, each with those of the modules whose results lie behind what it was given.
        others: What else it gave that a loss could be computed from.
    """

    takes: tuple[DraftInput, ...] = ()
    keywords: bool = False
    gives: DraftOutput | None = None
    called: dict[str, frozenset[str]] | None = None
    others: tuple[DraftOutput, ...] = ()


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which modules' results are behind a tensor, by its memory, which is kept: a number may be given again."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._behind: dict[int, tuple[torch.UntypedStorage, frozenset[str]]] = {}

    def behind(self, *values: Any) -> frozenset[str]:
        """Those behind any tensor of some values."""
        found = (self._behind.get(storage_of(each)) for each in pytree.tree_leaves(values) if torch.is_tensor(each))
        return frozenset().union(*(each[1] for each in found if each is not None))

    def add(self, values: Any, names: frozenset[str]) -> None:
        """These are behind all tensors of a value, too."""
        for each in pytree.tree_leaves(values) if names else ():
            if torch.is_tensor(each):
                self._behind[storage_of(each)] = each.untyped_storage(), names | self.behind(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.add(made, self.behind(args, kwargs))
        return made


def try_inputs(model: nn.Module) -> Trial:
    """Inputs under which a model on the meta device runs."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), mode, fake_tensors(model, mode), unlogged():
        for names, keywords in _arguments(model):
            for kinds in _kinds(model, len(names)):
                takes = tuple(DraftInput(name, *kind) for name, kind in zip(names, kinds, strict=True))
                try:
                    with _Flow() as flow, _called(model, flow) as called:
                        run = partial(_call, model, takes, keywords=keywords)
                        outputs = decided(run, itemgetter(0), mode.shape_env, lambda: None)
                except Exception:  # noqa: BLE001, S112 - the next guess may be the right one
                    continue
                found = [each for each in _outputs(outputs) if each is not None]
                return Trial(takes, keywords, found[0] if found else None, called, tuple(found[1:]))
    return Trial()


@contextlib.contextmanager
def _called(model: nn.Module, flow: _Flow) -> Iterator[dict[str, frozenset[str]]]:
    """The names of the modules whose forward runs within the block, each with those behind what it is given."""
    called: dict[str, frozenset[str]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], words: dict[str, Any], name: str) -> None:
        if isinstance(module, nn.Embedding) and given and given[0].is_floating_point():
            raise TypeError("an embedding takes whole numbers")  # fake tensors let it pass
        called[name] = called.get(name, frozenset()) | flow.behind(given, words)

    def made(module: nn.Module, given: tuple[Any, ...], words: dict[str, Any], output: Any, name: str) -> None:
        del module
        flow.add(output, flow.behind(given, words) | {name})

    hooks = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(partial(note, name=name), with_kwargs=True),
            module.register_forward_hook(partial(made, name=name), with_kwargs=True),
        )
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _call(model: nn.Module, takes: Sequence[DraftInput], *, keywords: bool) -> Any:
    made = {
        each.name: torch.zeros(_ROWS, *each.shape, dtype=torch.float32 if each.tokens is None else torch.int64)
        for each in takes
    }
    return model(**made) if keywords else model(*made.values())


def _arguments(model: nn.Module) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Which arguments of the forward are tensors: those without a default; where all have one, those that are first."""
    main = getattr(model, "main_input_name", None)
    parameters = [
        each
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if isinstance(main, str):  # transformers
        yield (main,), True
        if any(each.name == f"decoder_{main}" for each in parameters):
            yield (main, f"decoder_{main}"), True
        return
    needed = [each.name for each in parameters if each.default is each.empty]
    if needed:
        yield tuple(needed), len(needed) > 1
    for count in range(max(1, len(needed) + 1), min(3, len(parameters)) + 1):
        yield tuple(each.name for each in parameters[:count]), count > 1
    if not parameters:  # forward(*inputs)
        yield ("inputs",), False


def _kinds(model: nn.Module, count: int) -> Iterator[tuple[_Kind, ...]]:
    """What several arguments may be: all alike, then each by itself, as tokens beside a hidden state."""
    told = (shapes for each in model.modules() if (shapes := _of_layer(each, model)) is not None)
    kinds = list(dict.fromkeys([*((shape, None) for shape in next(told, ())), *_of_embedding(model)]))
    yield from ((kind,) * count for kind in kinds)
    if count > 1:
        states = dict.fromkeys((features, None) for features in map(_features, model.modules()) if features is not None)
        yield from islice(product(dict.fromkeys([*kinds, *islice(states, _STATES)]), repeat=count), _MOST)


def _of_embedding(model: nn.Module) -> Iterator[_Kind]:
    """Tokens of the first embedding, wherever it is registered."""
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            yield from (((length,), layer.num_embeddings) for length in _LENGTHS)
            yield (), layer.num_embeddings
            return


def _of_layer(layer: nn.Module, model: nn.Module) -> Sequence[tuple[int, ...]] | None:
    """Shapes without rows that suit a layer, images of the model's side first; None: it does not say what it takes."""
    if isinstance(layer, nn.Embedding):
        return ()  # its tokens are `_of_embedding`'s
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sides = (_config_side(model), *_SIDES) if isinstance(layer, nn.Conv2d) else _LENGTHS[1::-1]
        return [(layer.in_channels, *(each,) * len(layer.kernel_size)) for each in sides if each is not None]
    if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return [(layer.in_channels, *(each,) * len(layer.kernel_size)) for each in _SMALL_SIDES]
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return [(_STEPS, layer.input_size if isinstance(layer, nn.RNNBase) else layer.embed_dim)]
    features = _features(layer)
    return None if features is None else (features, (_STEPS, *features))


def _config_side(model: nn.Module) -> int | None:
    """The side of its images, where a transformers model's config says it."""
    side = getattr(getattr(model, "config", None), "image_size", None)
    return side if isinstance(side, int) else None


def _features(layer: nn.Module) -> tuple[int, ...] | None:
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    if isinstance(layer, nn.LayerNorm):
        return tuple(layer.normalized_shape)
    if isinstance(layer, nn.BatchNorm1d):
        return (layer.num_features,)
    if isinstance(layer, nn.RNNCellBase):
        return (layer.hidden_size,)
    return None


def _outputs(outputs: Any) -> Iterator[DraftOutput | None]:
    """The tensors for a loss: the one that is there; of a named output first the scores or the hidden state."""
    found: Iterable[tuple[str, Any]] = ()
    if isinstance(outputs, torch.Tensor):
        found = [("", outputs)]
    elif isinstance(outputs, dict):
        first = [name for name in ("logits", "last_hidden_state") if name in outputs]
        names = dict.fromkeys([*first, *outputs])
        found = [
            (f".{name}" if name in first and hasattr(outputs, name) else f'["{name}"]', outputs[name]) for name in names
        ]
    elif isinstance(outputs, tuple | list):
        found = ((f"[{n}]", value) for n, value in enumerate(outputs))
    yield from (_described(access, value) for access, value in found if isinstance(value, torch.Tensor))


def _described(access: str, tensor: torch.Tensor) -> DraftOutput | None:
    sizes = [size for size in tensor.shape if isinstance(size, int)]  # others depend on values
    if not tensor.is_floating_point() or len(sizes) < tensor.dim() or sizes[:1] != [_ROWS]:
        return None
    return DraftOutput(access, tuple(sizes[1:]))
