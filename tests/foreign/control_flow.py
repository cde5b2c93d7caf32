"""Code between marked layers that branches, indexes, casts, and switches modes."""

from __future__ import annotations

import math

import torch
from foreign.calls import MARKS, Net, middle
from foreign.case import case
from torch import nn
from workloads import WIDTH


@middle("a branch on the number of rows", inherent=True, refusal="rows|traced")
def _(net, h):
    return net.second(h * 2 if h.size(0) > 4 else h)


@middle("a branch on a tensor's value at the root", inherent=True, refusal="value")
def _(net, h):
    return net.second(h) if h.sum() > 0 else net.second(-h)


@middle("divides by the number of rows", inherent=True)
def _(net, h):
    return net.second(h) / h.shape[0]


@middle("the number of rows as a float, and its root", inherent=True)
def _(net, h):
    return net.second(h) * (h.shape[0] * 1.0) / h.shape[0] ** 0.5


@middle("float() of the number of rows", inherent=True, refusal=r"x.shape\[0\] \* 1.0 for float\(x.shape\[0\]\)")
def _(net, h):
    return net.second(h) / float(h.shape[0])


@middle("math.sqrt() of the number of rows", inherent=True, refusal=r"x.shape\[0\] \*\* 0.5 for math.sqrt")
def _(net, h):
    return net.second(h) / math.sqrt(h.shape[0])


@middle("positions from the number of rows", inherent=True, refusal="rows")
def _(net, h):
    return net.second(h + torch.arange(h.size(0), dtype=h.dtype).unsqueeze(1) / 10)


@middle("the mean over the batch is taken off", inherent=True)
def _(net, h):
    return net.second(h - h.mean(0))


@middle(".item() at the root", inherent=True, refusal="value|item")
def _(net, h):
    return net.second(h * h.detach().abs().max().item())


@middle("a boolean mask picks rows, put back by index_put", inherent=True)
def _(net, h):
    chosen = h.sum(1) > 0
    y = torch.zeros_like(h)
    y[chosen] = net.second(h[chosen])
    return y


@middle("sort, gather and unsort")
def _(net, h):
    values, order = h.sort(1)
    return net.second(values).gather(1, order.argsort(1))


@middle("an autocast region switched off")
def _(net, h):
    with torch.autocast("cpu", enabled=False):
        return net.second(h.double())


@middle("fft, complex values and back")
def _(net, h):
    return net.second(torch.fft.irfft(torch.fft.rfft(h) * 0.5, n=WIDTH))


@middle("torch.cond at the root", inherent=True, refusal="value decide what runs, by torch.cond")
def _(net, h):
    return net.second(torch.cond(h.sum() > 0, lambda y: y * 2, lambda y: y * 3, (h,)))


@middle("torch.cond of a size at the root")
def _(net, h):
    return net.second(torch.cond(h.size(0) > 0, lambda y: y * 2, lambda y: y * 3, (h,)))


@middle("try and except around a marked call")
def _(net, h):
    try:
        return net.second(h)
    except ValueError:
        return h


@middle("an assert on a value")
def _(net, h):
    assert torch.isfinite(h).all(), "not finite"
    return net.second(h)


@middle("torch._assert on values")
def _(net, h):
    torch._assert((h.abs() <= 1).all(), "tanh is within one")
    return net.second(h)


@middle("distributions of torch between marks, whose arguments are checked")
def _(net, h):
    spread = torch.distributions.Normal(h, torch.exp(h))
    return net.second(spread.log_prob(torch.zeros_like(h)))


@middle("a check of values whose error the root catches", inherent=True, refusal="value decides")
def _(net, h):
    try:
        if h.max() > 0.5:
            raise ValueError
        return net.second(h)
    except ValueError:
        return net.second(h / 2)


@case("global state switched in forward: deterministic algorithms", *MARKS, refusal="determin")
class Switched(Net):
    def middle(self, h):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return self.second(h)
        finally:
            torch.use_deterministic_algorithms(before)


@case("inference_mode around a frozen marked teacher", "teacher", "first", "second", "last", refusal="inference")
class InferenceTeacher(Net):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        with torch.inference_mode():
            wanted = self.teacher(x)
        return super().forward(x + wanted.clone())


@case("no_grad as a decorator of a marked module's forward", *MARKS)
class Decorated(Net):
    class Layer(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        return self.second(h) + h


class Asking(nn.Linear):
    """A marked layer whose forward asks for values."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)


def inside(name, **words):
    """A model whose second layer has the forward `f(layer, h)`: it asks for values that a capture has not."""

    def add(f):
        layer = type("Layer", (Asking,), {"forward": f, "__module__": f.__module__})
        made = type("Inside", (Net,), {"make": lambda _: layer(), "__module__": f.__module__})
        return case(f"inside a partition: {name}", *MARKS, inherent=True, **words)(made)

    return add


@inside("NumPy there and back, and a formatted print")
def _(layer, h):
    kept = h.detach().numpy()
    assert f"{h.mean():.3f}" != "nan"
    return nn.functional.linear(h, layer.weight) * torch.from_numpy((kept > kept.mean()).astype(kept.dtype))


@inside("torch.cond, which compiles both ways")
def _(layer, h):
    def much(y, weight):
        return nn.functional.linear(y, weight)

    def little(y, weight):
        return nn.functional.linear(y, weight) * 2

    return torch.cond(h.sum() > 0, much, little, (h, layer.weight))


@inside("tolist and a loop over the rows")
def _(layer, h):
    lengths = (h > 0).sum(1).clamp(min=1).tolist()
    rows = [nn.functional.linear(row, layer.weight)[:n].mean() for row, n in zip(h, lengths, strict=True)]
    return h + torch.stack(rows).unsqueeze(1)


@inside("a number of columns that a value decides, padded again")
def _(layer, h):
    columns = 1 + int(h.abs().sum()) % (WIDTH - 1)
    kept = nn.functional.linear(h, layer.weight)[:, :columns]
    return nn.functional.pad(kept, (0, WIDTH - columns))


@inside("steps until all rows have halted (ACT)")
def _(layer, h):
    halting = h.new_zeros(len(h))
    while (halting < 1).any():
        h = torch.tanh(nn.functional.linear(h, layer.weight, layer.bias))
        halting = halting + 0.3 + 0.1 * torch.sigmoid(h.detach().mean(1))
    return h


class Columns(Asking):
    def forward(self, h):
        return nn.functional.linear(h, self.weight)[:, : 1 + int(h.detach().numpy().sum() * 10) % (WIDTH - 1)]


@case("inside a partition: a shape that a value decides, read by another partition", *MARKS, inherent=True)
class Narrowed(Net):
    def make(self):
        return Columns()

    def middle(self, h):
        return h + self.second(h).sum(1, keepdim=True)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(1, WIDTH, batch_first=True)

    def forward(self, h):
        lengths = (h > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(h.unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
        out, (last, _) = self.recurrent(packed)
        return last[-1] + nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1)


@case("inside a partition: a packed LSTM", *MARKS)
class PackedInside(Net):
    def make(self):
        return Packed()


class Both(Asking):
    def forward(self, h):
        made = nn.functional.linear(h, self.weight)
        return (made, made * 2) if h.sum() > 0 else (made, None)


@case("inside a partition: a value decides what is returned", *MARKS, refusal="decides what 'second' returns")
class Either(Net):
    def make(self):
        return Both()

    def middle(self, h):
        return self.second(h)[0]


class Number(Asking):
    def forward(self, h):
        return nn.functional.linear(h, self.weight), h.detach().numpy().sum().item()


@case("inside a partition: a number that depends on values is returned", *MARKS, refusal="depends on its input")
class Numbered(Net):
    def make(self):
        return Number()

    def middle(self, h):
        made, number = self.second(h)
        return made * number


class Checked(Asking):
    """Ends where a value is no number, as routers of experts do."""

    def forward(self, h):
        made = nn.functional.linear(h, self.weight)
        if made.isnan().any():
            raise ValueError("no number")
        return made


@case("inside a partition: a submodule raises at a value", *MARKS)
class Raises(Net):
    def make(self):
        return nn.Sequential(nn.Sequential(Checked()), nn.Tanh())

    def middle(self, h):
        return self.second(h)


class Plain(nn.Linear):
    """Takes a tensor alone."""

    def forward(self, x):
        return super().forward(x)


class ByLength(Net):
    """SpeechBrain's ECAPA-TDNN."""

    layer = Plain

    def make(self):
        return self.layer(WIDTH, WIDTH)

    def middle(self, h):
        try:
            return self.second(h, lengths=h[:, 0])
        except TypeError:
            return self.second(h)


case("a call with a keyword that a marked module has not, and one without (SpeechBrain)", *MARKS)(ByLength)
case("a call with a keyword that an unmarked module has not, and one without", "first", "last")(ByLength)


@case("a call with a keyword that a marked module has not, whose forward needs values", *MARKS, inherent=True)
class ByLengthAndValue(ByLength):
    class layer(Plain):  # noqa: N801 - as the one above
        def forward(self, x):
            return super().forward(x) * float(x.detach().numpy().max())


def catching(name, forward, error, **words):
    """A case whose root catches an error of the marked `second`, which runs `forward`."""
    kind = type("Failing", (nn.Linear,), {"forward": forward})

    def middle(net, h):
        try:
            made = net.second(h, strict=True)
            return made[0] if isinstance(made, tuple) else made
        except error:
            return net.second(h * 2)

    members = {"make": lambda _: kind(WIDTH, WIDTH), "middle": middle, "__module__": __name__}
    case(name, *MARKS, **words)(type("Catching", (Net,), members))


def strict_by_shape(linear, x, *, strict=False):
    if strict and x.shape[1] == WIDTH:
        raise ValueError("too wide")
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def needs_values(linear, x, *, strict=False):
    scale = float(x.detach().numpy().max()) if strict else 5.0
    return torch.nn.functional.linear(x, linear.weight, linear.bias) * scale


def fails_by_value(linear, x, *, strict=False):
    if strict and float(x.detach().numpy().max()) > 0:
        raise ValueError("positive")
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def keeps_strange(linear, x, *, strict=False):
    made = torch.nn.functional.linear(x, linear.weight, linear.bias)
    return (made, linear.extra_repr) if strict else made


CATCHES = "catches an error"
catching(
    "the root catches an error that a marked module raises by a shape", strict_by_shape, ValueError, refusal=CATCHES
)
catching("the root catches any error of a marked module that needs values", needs_values, Exception, inherent=True)
catching("the root catches an error that values raise in a marked module", fails_by_value, ValueError, refusal=CATCHES)
catching(
    "the root catches the refusal of what a marked module returns", keeps_strange, Exception,
    refusal="neither a tensor nor a plain value",
)  # fmt: skip


@middle("the root makes a number of a value, or another where that fails", refusal="value decides|cannot be traced")
def _(net, h):
    try:
        factor = 1 + int(h.abs().sum())
    except Exception:  # noqa: BLE001 - as such code has it
        factor = 3
    return net.second(h * factor)


@middle("the root asks whether a tensor is a leaf, or does without", refusal="is a leaf")
def _(net, h):
    try:
        factor = 2 if h.is_leaf else 3
    except Exception:  # noqa: BLE001 - as such code has it
        factor = 5
    return net.second(h * factor)


@middle("the root makes a NumPy array of a tensor, or does without", refusal="makes a NumPy array")
def _(net, h):
    try:
        factor = float(h.detach().numpy().max())
    except Exception:  # noqa: BLE001 - as such code has it
        factor = 2.0
    return net.second(h * factor)
