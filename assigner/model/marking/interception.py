"""What the root's code does that an exported graph cannot hold, caught while it runs.

    autograd.Function.apply       an opaque call: its own backward runs where its forward does
    torch.utils.checkpoint        the function itself: what a partition keeps is the plan's decision
    tensor.requires_grad          as it is; where that is True, a node that sees to it that it stays so
    tensor.register_hook          a node that registers the hook where the tensor is made
    tensor.requires_grad_         a node that has it require one, where none lies behind it
    nn.TransformerEncoder         looks whether a mask is causal, for speed: the mask is used as it is
    tensor.data                   a view without gradient; `.data =` writes to it
    torch.inference_mode          torch.no_grad, which has the same gradients
    torch.distributed             one process: the workers of a plan are not copies of the model
    torch.cond                    Python's own decision, of a size; of a tensor refused
    a decision that only checks   a node that raises as the code does (see `checks`)
    autograd.grad, backward, .grad        refused
    Python's and NumPy's random, seeds, counters, flags      refused: the graph would have the first call's for ever

Only code of the model that is outside every opaque call is looked at: what is inside runs as it is.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import numpy.random  # noqa: F401 - loaded before a forward is watched: what it holds is compared
import torch
import torch._dynamo
from torch import fx, nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.variable import VariableMeta
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from assigner.errors import MarkingError
from assigner.machine.generators import GeneratorStates
from assigner.model.deferred.caches import clear_caches, kept_tensors, that_made
from assigner.model.deferred.memento import Memento, StateChange, placed
from assigner.model.deferred.mutation import branched, variable
from assigner.model.marking.changedarguments import Arguments, Changed, register_dataclasses
from assigner.model.marking.checks import stating
from assigner.model.marking.exportable import unmoved
from assigner.model.marking.fakeforward import NODE_HOOKS
from assigner.model.marking.leftovers import FirstReads
from assigner.model.marking.modules import check_hooks, listed_parameters
from assigner.model.marking.observation import DecidedError
from assigner.model.marking.opaque import OpaqueCalls, refusal, within_call
from assigner.model.marking.writing import hooked, still_required, wanted
from assigner.model.members import named_parameters
from assigner.model.singleprocess import as_single_process
from assigner.usercode import is_asked_by_user, running_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.marking.checks import Checks

_library = torch.library.Library("assigner", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("hook(int number, Tensor(a!) tensor) -> ()")  # type: ignore[no-untyped-call]
torch.library.register_fake("assigner::hook", lambda *_, **__: None, lib=_library)
ASSIGNED = torch.ops.aten.alias.default
"""A view of what `.data =` writes to, by which such a write is known: what has saved a view keeps its memory."""
_LIBRARIES = ("torch", "transformers")
_SEEDS = "seeds or sets a generator (torch does where it compiles, as for while_loop)"
_LARGER = "mark a module that contains this line: what is inside a partition runs as it is"


def is_hook(node: torch.fx.Node) -> bool:
    """True if a node registers a hook."""
    return node.op == "call_function" and node.target is torch.ops.assigner.hook.default


class Interceptions:
    """What happens in the root's code while one forward is captured.

    Args:
        model: Whose forward; still with its own parameters, which may have attributes hung on them, as muP does.
        opaque: Makes the opaque calls.
        checks: Answers decisions on values.
        varying: In which dimension each input has a number of rows that may not become a plain one; None: in none.

    Attributes:
        hooks: What is done to tensors, by its number in the graph; what was removed again is not there.
        changes: Python state that the last forward left changed.
        made: The cached functions that have made objects in it, of which nobody knows what it then did to them.
        kept: The tensors that cached functions keep of what its code has made, and no call's, each with a name.
        outside: Likewise those that it leaves in Python where no module leads to.
        flags: The parameters that it has asked for `requires_grad`, and what they said.
        reads: What it reads of modules.
        replaced: The buffers and parameters in whose places the last forward has put tensors of other shapes.
        changes_inputs: It has changed a list or dict among its inputs.
    """

    def __init__(
        self, model: nn.Module, opaque: OpaqueCalls, checks: Checks, varying: Sequence[int | None] = ()
    ) -> None:
        self.model, self.opaque, self.checks, self._varying = model, opaque, checks, varying
        self._rows = set[Any]()
        self.hooks = OrderedDict[int, Callable[[torch.Tensor], torch.Tensor]]()
        self.changes: list[StateChange] = []
        self.made: list[str] = []
        self.kept: list[tuple[str, torch.Tensor]] = []
        self.outside: list[tuple[str, torch.Tensor]] = []
        self.flags: dict[str, bool] = {}
        self.replaced: list[StateChange] = []
        self.changes_inputs = False
        self.reads = FirstReads(model.modules())
        parameters = named_parameters(model, remove_duplicate=False)
        self._hung = {name: {**vars(each)} for name, each in parameters if vars(each)}
        self._listed = listed_parameters(model)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Catch what the model's forward does, each time that it is called in the block."""
        check_hooks(self.model, self.opaque.names)
        original: Any = self.model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if within_call():
                return original(*args, **kwargs)
            for name, attributes in self._hung.items():  # export has put tensors of its own in the parameters' places
                vars(self.model.get_parameter(name)).update(attributes)
            given = zip(pytree.tree_leaves((args, kwargs)), self._varying, strict=False)
            rows = [each.shape[dim] for each, dim in given if dim is not None]
            self._rows = {each.node.expr for each in rows if isinstance(each, torch.SymInt)}
            inputs = Arguments(args, kwargs)
            with self._in_lists():
                before = clear_caches(self.model)
                self.opaque.begin()
                watched, answered = self._watched(), self.checks.answered((args, kwargs))
                with watched, self._caught(), as_single_process(), answered, self._stored(), self.reads.noted():
                    output = original(*args, **kwargs)
                self.opaque.check_ended()
                self.made = that_made(self.model, before)
                self.kept += filter(_is_traced, kept_tensors(self.model))
            self.changes_inputs = isinstance(inputs.beside(None), Changed)
            register_dataclasses(output)
            return output

        values = Memento(self.model.named_modules(), parameters=True, top="whole")
        kept = clear_caches(self.model)
        try:
            with placed([(self.model.__dict__, "_call_impl", call)]):
                yield
        finally:
            clear_caches(self.model, kept)
            values.restore()

    @contextlib.contextmanager
    def _in_lists(self) -> Iterator[None]:
        """The tensors that export has put in the parameters' places stand wherever else modules hold these, too."""
        if not self._listed:
            yield
            return
        now = dict(named_parameters(self.model, remove_duplicate=False))
        pairs = [(each, now[name]) for name, each in self._listed.items()]
        Memento(self.model.named_modules()).exchange({id(own): there for own, there in pairs})
        try:
            yield
        finally:
            Memento(self.model.named_modules()).exchange({id(there): own for own, there in pairs})

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """What the forward puts in a buffer's place is written to that at its end; export does so of the root alone."""
        before = [
            (f"{name}.{key}".lstrip("."), space, key, each)
            for name, module in self.model.named_modules()
            for space in (module._parameters, module._buffers)
            for key, each in space.items()
        ]
        yield
        found = [(name, space, key, old) for name, space, key, old in before if space.get(key) is not old]
        self.replaced = [
            StateChange(name, space, key, None, space.get(key), is_beyond=False)
            for name, space, key, old in found
            if not _is_alike(old, space.get(key))
        ]
        with torch.no_grad():
            new = {name: value.clone() for name, space, key, _ in found if (value := space.get(key)) is not None}
            for name, space, key, old in found:
                space[key] = old.copy_(new[name]) if old is not None and _is_alike(old, space.get(key)) else old

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Python state around the forward: it draws by torch alone, and changes no `requires_grad`."""
        values = Memento(self.model.named_modules(), parameters=True, top="whole")
        trained = {name: each.requires_grad for name, each in named_parameters(self.model)}
        draws, seed = GeneratorStates.now(), torch.default_generator.initial_seed()
        yield
        self.changes = values.changes()
        self.outside += filter(_is_traced, values.left_outside())
        drawn = _drawn(draws) or ("torch.manual_seed" if torch.default_generator.initial_seed() != seed else "")
        draws.put_back()
        name = type(self.model).__name__
        if drawn:
            raise MarkingError(
                f"the forward of {name} uses {drawn} outside its partitions: a captured graph would do the same for"
                " ever",
                hint="draw with torch's default generator and tensor operations (torch.rand, torch.where), or mark a"
                " larger module that contains the line",
            )
        for each, parameter in named_parameters(self.model):
            if parameter.requires_grad != trained[each]:
                raise MarkingError(
                    f"the forward of {name} changes requires_grad of {each!r}",
                    hint="decide in the model's builder what is trained; another choice is another pipeline",
                )

    def _caught(self) -> contextlib.AbstractContextManager[None]:
        tensor: Any = torch.Tensor
        function: Any = torch.autograd.Function
        autograd: Any = torch.autograd
        set_requires = self._require(_TRUE["requires_grad"].__set__)
        return placed((
            (function, "apply", classmethod(self._apply(vars(function)["apply"]))),
            (tensor, "register_hook", self._hook(tensor.register_hook)),
            (tensor, "register_post_accumulate_grad_hook",
             _refused(tensor.register_post_accumulate_grad_hook, "registers a hook on the gradient of a tensor")),
            (*NODE_HOOKS, staticmethod(_refused(
                getattr(*NODE_HOOKS), "registers a hook on a node of autograd's graph",
                allowed=lambda *_: not is_asked_by_user(),
            ))),
            (tensor, "retain_grad", _ignored(tensor.retain_grad)),
            (nn.RNNBase, "flatten_parameters", _ignored(nn.RNNBase.flatten_parameters)),  # by each worker
            (nn.Module, "_apply", unmoved(nn.Module._apply)),
            (autograd, "_engine_run_backward", _refused(autograd._engine_run_backward, "computes gradients")),
            (torch.autograd.graph.saved_tensors_hooks, "__enter__",
             _refused(torch.autograd.graph.saved_tensors_hooks.__enter__, "changes what autograd saves",
                      allowed=_saves_alone)),
            (FakeTensor, "requires_grad_", self._require(tensor.requires_grad_)),
            (FakeTensor, "requires_grad", property(self._requires_grad, set_requires)),
            (FakeTensor, "data", property(_data, _set_data)),
            (FakeTensor, "grad_fn", property(_refused(
                _TRUE["grad_fn"].__get__, "looks at a tensor's grad_fn", allowed=_asked_by_library,
            ))),
            (FakeTensor, "is_leaf", property(_refused(
                _is_leaf, "asks whether a tensor is a leaf (is_leaf)",
                allowed=lambda each: _asked_by_library() or not each.requires_grad or isinstance(each, nn.Parameter),
            ))),
            (FakeTensor, "grad", property(*(  # type: ignore[arg-type]
                _refused(
                    getattr(_TRUE["grad"], way), "looks at the gradient (.grad) of a tensor",  # which backwards leave
                    allowed=lambda each, *_: _asked_by_library() or not _TRUE["requires_grad"].__get__(each),
                ) for way in ("__get__", "__set__", "__delete__")
            ))),
            (transformer, "_detect_is_causal_mask", lambda _, is_causal=None, *__: is_causal is True),
            (VariableMeta, "__call__", variable),
            (FakeTensor, "numpy", _failing(tensor.numpy, "makes a NumPy array of a tensor")),
            (fx.Tracer, "call_module", _left(fx.Tracer.call_module)),
            (decompositions, "one_layer_lstm", _flat(decompositions.one_layer_lstm)),
            *((holder, name, _refused(getattr(holder, name), _SEEDS))
              for holder in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
            (torch, "cond", _refused(branched, "has a value decide what runs, by torch.cond,",
                                     allowed=lambda pred, *_: not torch.is_tensor(pred))),
            (torch.compiler, "is_exporting", _asked_by_user(torch.compiler.is_exporting)),
            *((holder, "is_compiling", _asked_by_user(holder.is_compiling))
              for holder in (torch.compiler, torch._dynamo, torch._utils)),
            (ShapeEnv, "_set_replacement", self._replacement(ShapeEnv._set_replacement)),
            (torch._C, "_InferenceMode", _without_gradient(torch._C._InferenceMode)),
            *stating(),
        ))  # fmt: skip

    def _apply(self, original: Any) -> Callable[..., Any]:
        """In the place of a class method: Python's, or of torch 2.14 on one that is written in C."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction and not within_call():
                return self._checkpointed(args[0], args[2:])
            if within_call() or cls.__module__.partition(".")[0] in ("torch", "assigner"):
                return original.__get__(None, cls)(*args, **kwargs)

            def called(*args: Any, **kwargs: Any) -> Any:
                return cls.apply(*args, **kwargs)

            called.__name__ = called.__qualname__ = cls.__qualname__.replace("<locals>.", "")
            with self.opaque.noticed_errors(called.__name__):
                return self.opaque.call("", called, args, kwargs)

        return apply

    def _hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if within_call():
                return original(tensor, hook)
            if not tensor.requires_grad:
                raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
            if isinstance(tensor, nn.Parameter):
                raise refusal(
                    f"a hook is registered on a parameter in every forward, at {running_line()}",
                    hint="register it once, in the model's builder",
                )
            held = _held_by(hook)
            if held:
                raise refusal(
                    f"the hook that is registered at {running_line()} holds {held}, which may be another worker's",
                    hint=f"write the hook as a function of the gradient and plain numbers; or {_LARGER}",
                )
            return self._do(hooked(hook), tensor)

        return register_hook

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Take down where a size that may vary is taken for a number; that of the rows may end the capture."""

        def replace(environment: ShapeEnv, symbol: Any, size: Any, *args: Any, **kwargs: Any) -> None:
            if size.is_number and not within_call():
                self.opaque.dependence.line = self.opaque.dependence.line or running_line()
            original(environment, symbol, size, *args, **kwargs)
            if size.is_number and symbol in self._rows:
                raise DecidedError("the forward takes the number of rows for a plain number")

        return replace

    def _do(self, what: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> RemovableHandle:
        """Have the graph do something to a tensor, once it is made, unless the handle takes that back."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = what
        torch.ops.assigner.hook(handle.id, tensor)
        return handle

    def _require(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
            before = tensor.requires_grad
            original(tensor, requires_grad)
            if not within_call() and not isinstance(tensor, nn.Parameter):
                if requires_grad and not before:
                    self._do(wanted, tensor)
                elif before and not requires_grad:
                    raise refusal(
                        f"the forward has a tensor require no gradient any more, at {running_line()}",
                        hint=f"go on with tensor.detach(), which is another one; or {_LARGER}",
                    )
            return tensor

        return requires_grad_

    def _checkpointed(self, function: Callable[..., Any], args: Any) -> Any:
        """A reentrant checkpoint: without an input that wants a gradient nothing in it gets one."""
        wanting = [each for each in args if torch.is_tensor(each) and each.requires_grad]
        for each in wanting:
            self._look_at(each)
        if wanting or not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():
            return function(*args)

    def _look_at(self, tensor: torch.Tensor) -> None:
        """The graph goes on as for a tensor that requires a gradient: later forwards are checked."""
        if torch.is_grad_enabled() and not isinstance(tensor, nn.Parameter):
            self._do(still_required, tensor)

    def _requires_grad(self, tensor: torch.Tensor) -> bool:
        requires = bool(_TRUE["requires_grad"].__get__(tensor))
        if not within_call() and is_asked_by_user():
            if isinstance(tensor, nn.Parameter):
                names = (name for name, each in named_parameters(self.model) if each is tensor)
                self.flags.update(dict.fromkeys(names, requires))
            elif requires:
                self._look_at(tensor)
        return requires


def _is_traced(named: tuple[str, torch.Tensor]) -> bool:
    """Whether export has seen how a tensor was made: what a call makes within has no place in a graph."""
    mode = get_proxy_mode()
    return mode is not None and get_proxy_slot(named[1], mode.tracer, None) is not None


def _is_alike(buffer: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether another tensor may stand in the place of a buffer: of its type, and of its shape for any sizes."""
    if buffer is None or other is None or isinstance(buffer, nn.Parameter) or buffer.dtype != other.dtype:
        return False
    return [*map(str, buffer.shape)] == [*map(str, other.shape)]


def _refused(
    original: Callable[..., Any], what: str, *, allowed: Callable[..., bool] = lambda *_: False
) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if within_call() or allowed(*args):
            return original(*args, **kwargs)
        raise refusal(f"the forward {what} between partitions, at {running_line()}", hint=_LARGER)

    return refuse


def _failing(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    """What fails for want of values counts also where that is caught."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception:
            if not within_call():
                refusal(f"the forward {what} between partitions, at {running_line()}", hint=_LARGER)
            raise

    return run


def _left(original: Callable[..., Any]) -> Callable[..., Any]:
    """Export keeps a stack of the modules that run: one that raises is no more on it."""

    def call_module(tracer: Any, *args: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return original(tracer, *args)
        except Exception:
            while len(tracer.module_stack) > depth:
                tracer.module_stack.popitem()
            raise

    return call_module


def _saves_alone(hooks: Any) -> bool:
    """Hooks that save a tensor somewhere and give back the same values."""
    of = getattr(hooks, "pack_hook", None)
    return getattr(of, "__module__", "").split(".")[0] == "torch"


def _ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    def ignore(subject: Any) -> None:
        if within_call():
            original(subject)

    return ignore


def _flat(lstm: Callable[..., Any]) -> Callable[..., Any]:
    """An exported LSTM layer, whose states have a dimension too many up to torch 2.11, that of the layer."""

    def layer(*args: Any, **kwargs: Any) -> Any:
        output, states = lstm(*args, **kwargs)
        return output, tuple(each.squeeze(0) if each.dim() == output.dim() else each for each in states)

    return layer


def _without_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Inference mode between partitions: export knows torch.no_grad() alone, which has the same gradients."""
    return lambda mode=True: original(mode) if within_call() or not mode else torch.no_grad()


@contextlib.contextmanager
def masks_as_captured() -> Iterator[list[bool]]:
    """What transformers makes masks with does in the block as in a capture, where no value says that none is needed.

    It yields a list that is filled once it has done so.
    """
    asked: list[bool] = []

    def compiles() -> bool:
        outside = not within_call()
        asked.extend([True] * outside)
        return outside

    told = _asked_by_user(compiles, ("transformers",))
    with placed((torch.compiler, name, told) for name in ("is_compiling", "is_exporting")):
        yield asked


def _asked_by_user(original: Callable[..., Any], libraries: Sequence[str] = _LIBRARIES) -> Callable[..., Any]:
    """The code of models asks whether it is compiled: in a pipeline it is not.

    Torch's own has to know, and what transformers makes masks and caches with.
    """

    def ask() -> bool:
        names = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_stack(sys._getframe(1)))
        name = next((each for each in names if each != _ASKS_FOR_OTHERS), "")
        return name.partition(".")[0] in libraries and not name.startswith(_MODELS) and bool(original())

    return ask


def _is_leaf(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or bool(_TRUE["is_leaf"].__get__(tensor))


def _asked_by_library(*_: Any) -> bool:
    """Whether the code that asks this module is torch's own, or transformers'."""
    asked = sys._getframe().f_code.co_filename
    asks = next(frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_filename != asked)
    return str(asks.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


_MODELS, _ASKS_FOR_OTHERS = "transformers.models.", "transformers.utils.import_utils"


def _data(tensor: torch.Tensor) -> torch.Tensor:
    if within_call():
        return _TRUE["data"].__get__(tensor)  # type: ignore[no-any-return]
    return tensor.detach()


def _set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if within_call():
        _TRUE["data"].__set__(tensor, values)
    elif tuple(values.shape) != tuple(tensor.shape) or values.dtype != tensor.dtype:
        raise refusal(f"the forward gives a tensor another shape or type by .data, at {running_line()}", hint=_LARGER)
    else:
        with torch.no_grad():
            ASSIGNED(tensor.detach()).copy_(values)


_TRUE: Any = vars(torch._C.TensorBase)
"""Attributes as torch has them."""


def _held_by(hook: Callable[..., Any]) -> str:
    """What a hook holds that is no plain value; empty: nothing."""
    if isinstance(hook, types.MethodType):
        return f"a {type(hook.__self__).__name__}"
    values = values_of(hook)
    plain = (bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    strange = [leaf for leaf in pytree.tree_leaves(values) if not isinstance(leaf, plain)]
    mutable = [each for each in values if isinstance(each, list | dict | set)]
    found = [*strange, *mutable]
    return f"a {type(found[0]).__name__}" if found else ""


def values_of(function: Any) -> list[Any]:
    """What a function has beside the arguments of a call."""
    inner = getattr(function, "func", function)
    values = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    values += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    named = getattr(inner, "__kwdefaults__", None) or {}
    return [*values, *(getattr(inner, "__defaults__", None) or ()), *named.values()]


def in_words(function: Any, *around: Any) -> str:
    """What a function runs, and has: the same words for what one line makes twice of the same values.

    `around` are the functions that have it.
    """
    if not isinstance(function, types.FunctionType | partial) or function in around:
        return repr(function)
    inner, values = getattr(function, "func", function), values_of(function)
    return f"{getattr(inner, '__code__', inner)} {[in_words(each, function, *around) for each in values]}"


def _drawn(before: GeneratorStates) -> str:
    """Which generator beside torch's has moved; empty: none."""
    now = GeneratorStates.now()
    return "Python's random" if now.python != before.python else "NumPy's random" if now != before else ""
