# ruff: noqa: ARG004 - what a Function is given and does not read
"""Views, writes, custom Functions and gradient modes, between marked layers or inside of one."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from workloads import WIDTH, workload


class Glue(nn.Module):
    """Something done to hidden values, with a scale and a table of its own."""

    def __init__(self, work) -> None:
        super().__init__()
        self.work = work
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, x):
        return self.work(self, h, x)


class Between(Glue):
    """Three marked layers, the work at the root between the first two."""

    def __init__(self, work) -> None:
        super().__init__(work)
        self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.work(self, self.stem(x), x)
        return self.head(torch.tanh(self.body(h)))


class Within(nn.Module):
    """The same, the work inside of a marked module."""

    def __init__(self, work) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), Glue(work), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.stem(x), x)))


def glue(name, *, within=False, **words):
    """Add a case over work(net, h, x)."""

    def add(work):
        kind = Within if within else Between

        def made():
            return workload(functools.partial(kind, work), "stem", "body", "head")

        made.__module__ = __name__
        case(f"{name}{', in a marked module' if within else ''}", **words)(made)
        return work

    return add


@glue("blind: a recurrence in place over column slices")
def _(net, h, x):
    out = h * 1
    for n in range(1, WIDTH):
        out[:, n] = h[:, n].sigmoid() * out[:, n - 1].clone()
    return out * net.scale


@glue("blind: a batched diagonal view added to")
def _(net, h, x):
    y = torch.einsum("bi,bj->bij", h, h)
    y.diagonal(dim1=-2, dim2=-1).add_(net.scale)
    y.mT[:, 0] = 0.5
    return y.sum(-1)


@glue("blind: real and imag views written")
def _(net, h, x):
    z = torch.complex(h[:, :4], h[:, 4:])
    z.real.mul_(2)
    z.imag[:, 1:] = z.real[:, :-1]
    return torch.view_as_real(z * z.conj().roll(1, 1)).flatten(1) * net.scale


@glue("blind: view_as_complex of hidden pairs, rotated and written through view_as_real")
def _(net, h, x):
    z = torch.view_as_complex(h.reshape(-1, 4, 2).contiguous())
    z = z * torch.polar(torch.ones_like(net.table[:4]), net.table[:4])
    v = torch.view_as_real(z)
    v[..., 0] += 1
    return torch.cat([z.abs(), z.angle()], 1)


@glue("blind: low bits of the input cleared through an integer view")
def _(net, h, x):
    y = x.clone()
    y.view(torch.int64).bitwise_and_(-4096)
    return h + y + (x.view(torch.int64) & 1).to(h.dtype)


@glue("blind: overlapping windows by as_strided")
def _(net, h, x):
    h = h.contiguous()
    w = h.as_strided((h.shape[0], 3, 4), (WIDTH, 2, 1))
    return torch.cat([w.amax(-1), w.mean(1), h[:, :1]], 1)


@glue("blind: unfold's windows multiplied in place")
def _(net, h, x):
    y = h * 1
    y.unfold(1, 2, 2).mul_(net.scale[:2])
    return y


@glue("blind: masked_scatter_ of selected hidden values")
def _(net, h, x):
    mask = x > 0
    return (h * 1).masked_scatter_(mask, (h * net.scale)[mask])


@glue("blind: scatter_reduce_ and index_reduce_ over columns")
def _(net, h, x):
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3], device=h.device)
    y = torch.zeros_like(h).scatter_reduce_(1, index.expand_as(h), h, "amax", include_self=False)
    return y.clone().index_reduce_(1, index, h.sigmoid(), "amax")


@glue("blind: rolled by slices of itself, flipped and cumsum_")
def _(net, h, x):
    y = h.clone()
    y[:, 1:] = h[:, :-1]
    y[:, 0] = h[:, -1]
    y = y.flip(1).cumsum_(1)
    return torch.cat([y[:, ::2] * 1, y[:, 1::2]], 1)


@glue("blind: even and odd columns swapped by tuple assignment")
def _(net, h, x):
    y = h * net.scale
    y[..., ::2], y[..., 1::2] = -y[..., 1::2], y[..., ::2].clone()
    y[:, [0, 3]] += y[:, [1, 2]]
    return y


@glue("blind: an additive margin on one column of each row (arange, labels)")
def _(net, h, x):
    labels = x.argmax(1)
    y = F.normalize(h, dim=1)
    y[torch.arange(y.size(0), device=y.device), labels] -= 0.35
    return y * 4


@glue("blind: out= into an empty tensor that is resized")
def _(net, h, x):
    buffer = x.new_empty(0)
    torch.mul(x, 2, out=buffer)
    return h + buffer


@glue("blind: -inf put in by masked_fill_, taken out by nan_to_num_")
def _(net, h, x):
    y = h * 1
    y[x < -0.5] = float("-inf")
    return h + torch.nan_to_num_(y.softmax(1) * 1, 0.0)


@glue("blind: a loop over the rows of the batch", inherent=True)
def _(net, h, x):
    return torch.stack([row * net.scale if n % 2 == 0 else row for n, row in enumerate(h.unbind(0))])


@glue("blind: a loop over the rows, each by itself", within=True)
def _(net, h, x):
    return torch.cat([net.inner(row[None]) for row in h])


@glue("blind: flat indices over the whole batch (take and put_)")
def _(net, h, x):
    index = torch.arange(h.size(0), device=h.device) * WIDTH + x.argmin(1)
    y = (h * 1).contiguous()
    y.put_(index, torch.take(h, index))
    return y


@glue("blind: torch._foreach_ operations on hidden values")
def _(net, h, x):
    parts = [h * 1, x * 1]
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_add_(parts, [net.scale, net.table])
    return sum(torch._foreach_tanh(parts))


@glue("blind: renorm_ and index_fill_ of rows and columns")
def _(net, h, x):
    y = (h * net.scale).renorm_(2, 0, 1.5)
    return y.index_fill_(1, torch.tensor([2, 5]), 0.25)


@glue("blind: set_grad_enabled by a flag (fine-tuning), around an unmarked layer")
def _(net, h, x):
    with torch.set_grad_enabled(False):
        a = net.inner(h)
        with torch.enable_grad():
            b = a * net.scale
    return h + b


@glue("blind: enable_grad inside a no_grad helper, in a marked module's way", within=True)
def _(net, h, x):
    with torch.no_grad():
        g = h.softmax(1)
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            (net.inner(leaf).square().sum() * 0.5).backward()
            step = leaf.grad
    return h - 0.1 * step + g


@glue("blind: inference_mode for a statistic, its clone used")
def _(net, h, x):
    with torch.inference_mode():
        gate = net.inner(x).sigmoid()
    return h * gate.clone()


@glue("blind: an autocast island in bfloat16", within=True, tolerance=0.02)
def _(net, h, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(h.float(), net.inner.weight.float())
    return h + y.double()


@glue("blind: an autocast island in bfloat16 at the root", tolerance=0.02)
def _(net, h, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(h.float(), net.inner.weight.float())
    return h + y.to(h.dtype)


class Skips(Function):
    """Asks which inputs need gradients and does not fill in zeros."""

    @staticmethod
    def forward(ctx, a, b, factor, name="none"):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        return a * b * factor, (a - b).abs()

    @staticmethod
    def backward(ctx, one, two):
        a, b = ctx.saved_tensors
        made = [None, None]
        if one is not None:
            made = [one * b * ctx.factor if ctx.needs_input_grad[0] else None, one * a * ctx.factor]
        if two is not None:
            made = [two if each is None else each + two for each in made]
        return made[0], made[1] if ctx.needs_input_grad[1] else None, None, None


@glue("blind: a Function that asks needs_input_grad and takes None for gradients")
def _(net, h, x):
    one, two = Skips.apply(h, net.scale, 0.5)
    three, _ = Skips.apply(x, h, 2.0, "more")
    return one + three.tanh() + two.detach()


class Counts(Function):
    @staticmethod
    def forward(ctx, h, holder):
        ctx.holder = holder
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        ctx.holder.table.mul_(0.9).add_(grad.detach().sum(0), alpha=0.1)
        return grad * 0.5, None


@glue("blind: a Function whose backward moves a buffer", inherent=True)
def _(net, h, x):
    return Counts.apply(h, net) * net.table.clone()


@glue("blind: a Function whose backward moves a buffer", within=True, inherent=True)
def _(net, h, x):
    return Counts.apply(h, net) * net.table.clone()


class Fused(Function):
    """Adds to the weight's gradient by itself, as a fused accumulation does it."""

    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h)
        ctx.weight = weight
        return h @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        made = grad.T @ h
        if ctx.weight.grad is None:
            ctx.weight.grad = made
        else:
            ctx.weight.grad.add_(made)
        return grad @ ctx.weight, None


@glue("blind: a Function that adds to weight.grad in its backward", within=True)
def _(net, h, x):
    return Fused.apply(h, net.inner.weight)


@glue("blind: a Function that adds to weight.grad in its backward, at the root")
def _(net, h, x):
    return Fused.apply(h, net.inner.weight)


class Reversible(Function):
    """Keeps its output alone and inverts itself; runs the module again with gradients."""

    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer = layer
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            y = torch.cat([a, b + layer(a)], 1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            a = y[:, :4].detach().requires_grad_()
            made = ctx.layer(a)
            found = torch.autograd.grad(made, [a, *ctx.layer.parameters()], grad[:, 4:])
        return torch.cat([grad[:, :4] + found[0], grad[:, 4:]], 1), None, *found[1:]


class Reverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x):
        return Reversible.apply(x, self.net, *self.net.parameters())


@case("blind: a reversible block (RevNet) as one Function, marked", "blocks.*", "head")
class RevNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Reverse() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).roll(4, 1)
        return self.head(x)


@case("blind: a reversible block (RevNet) as one Function, unmarked", "blocks.1", "head")
class RevNetLoose(RevNet):
    pass


class Vmapped(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp(-0.5, 0.5), x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad, _):
        return grad * (ctx.saved_tensors[0].abs() < 1)


@glue("blind: a Function with a vmap rule, inside vmap")
def _(net, h, x):
    clipped, signs = torch.vmap(Vmapped.apply)(h)
    return clipped + signs * net.scale


@glue("blind: a tensor hook that closes over another hidden value")
def _(net, h, x):
    gate = (x > 0).to(h.dtype)
    if net.training:
        h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * gate)
    return h * net.scale


@glue("blind: hooks made in a loop, the last index bound late", within=True)
def _(net, h, x):
    for n in range(3):
        h = torch.sin(h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (n + 1))  # noqa: B023 - the habit
    return h


@glue("blind: a hook on the input made to require gradients")
def _(net, h, x):
    x = x.detach().clone().requires_grad_(True)
    x.register_hook(lambda grad: grad * 0)
    return h + net.inner(x)


@glue("blind: detach_ on a hidden value half-way")
def _(net, h, x):
    y = net.inner(h)
    z = y * 2
    z.detach_()
    return h + z * net.scale


@glue("blind: attention weights from .data, a tenth of the gradient through")
def _(net, h, x):
    w = h.data.softmax(1)
    return 0.1 * h + 0.9 * h.detach() + w * net.scale


@glue("blind: nested checkpoints, of a closure over the module", within=True)
def _(net, h, x):
    def inner(y):
        return torch.tanh(net.inner(y)) * net.scale

    def outer(y, z):
        return checkpoint(inner, y, use_reentrant=False) + z

    return checkpoint(outer, h, x, use_reentrant=False, determinism_check="none")


def _policy():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def choose(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


@glue("blind: selective checkpoint by a policy", within=True)
def _(net, h, x):
    return checkpoint(lambda y: net.inner(torch.sin(y)).tanh(), h, use_reentrant=False, context_fn=_policy)


@glue("blind: selective checkpoint by a policy, at the root")
def _(net, h, x):
    return checkpoint(lambda y: net.inner(torch.sin(y)).tanh(), h, use_reentrant=False, context_fn=_policy)


@glue("blind: torch.func.jvp of an unmarked layer, at the root")
def _(net, h, x):
    made, tangent = torch.func.jvp(lambda y: torch.tanh(net.inner(y)), (h,), (x,))
    return made + tangent


@glue("blind: torch.func.jvp", within=True)
def _(net, h, x):
    made, tangent = torch.func.jvp(lambda y: torch.tanh(net.inner(y)), (h,), (x,))
    return made + tangent


@glue("blind: vmap of jacrev at the root")
def _(net, h, x):
    jacobian = torch.vmap(torch.func.jacrev(lambda y: torch.tanh(y * net.scale)))(h)
    return h + jacobian.diagonal(dim1=1, dim2=2)


@glue("blind: Hutchinson's trace by autograd.grad with create_graph (FFJORD)", within=True)
def _(net, h, x):
    with torch.enable_grad():
        y = h if h.requires_grad else h.detach().requires_grad_()
        f = torch.tanh(net.inner(y))
        (vjp,) = torch.autograd.grad(f, y, x, create_graph=True)
    return h + f * 0.1 + (vjp * x).sum(1, keepdim=True)


@glue("blind: forward-mode dual numbers", within=True)
def _(net, h, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(h, x)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(net.inner(dual).tanh())
    return primal + tangent


@glue("blind: a table from numpy made in forward")
def _(net, h, x):
    table = torch.from_numpy(np.linspace(0, 1, WIDTH)).to(h)
    return h * table + torch.as_tensor(np.float64(0.3)) + torch.tensor([0.1] * WIDTH, dtype=h.dtype)


@glue("blind: sizes of zero: an empty slice through a layer and back by cat")
def _(net, h, x):
    none = h[:, :0]
    rows = F.linear(none, net.inner.weight[:, :0])
    return torch.cat([none, h, none.relu()], 1) + rows


@glue("blind: linalg: Cholesky, a triangular solve and slogdet of each row", within=True)
def _(net, h, x):
    a = h[:, :4, None] * h[:, None, :4] + 2 * torch.eye(4, dtype=h.dtype)
    low = torch.linalg.cholesky(a)
    y = torch.linalg.solve_triangular(low, x[:, 4:, None], upper=False)[..., 0]
    return torch.cat([y, torch.linalg.slogdet(a)[1][:, None], torch.linalg.eigvalsh(a)[:, 1:]], 1)


@glue("blind: a nested tensor of ragged rows", within=True, inherent=True)
def _(net, h, x):
    rows = [row[: 2 + n % 3] for n, row in enumerate(h.unbind(0))]
    padded = torch.nested.nested_tensor(rows, layout=torch.strided).to_padded_tensor(0.0)
    made = torch.nested.as_nested_tensor(rows).to_padded_tensor(0.0, (h.size(0), WIDTH))
    return h + padded.sum() * 0 + made


@glue("blind: a product with a sparse matrix made in forward", inherent=False)
def _(net, h, x):
    index = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])
    ring = torch.sparse_coo_tensor(index, net.scale, (WIDTH, WIDTH))
    return h + torch.sparse.mm(ring, h.T).T


@glue("blind: a tensor hook that moves a buffer (gradient statistics)", within=True, inherent=True)
def _(net, h, x):
    if h.requires_grad:
        h.register_hook(functools.partial(_moved, net))
    return h * net.table.clone()


def _moved(net, grad):
    net.table.mul_(0.9).add_(grad.detach().sum(0), alpha=0.1)
    return grad


@case("blind: a full backward hook of a marked layer that moves its buffer", "stem", "body", "head", inherent=True)
class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.body.register_buffer("seen", torch.zeros(WIDTH))
        self.body.register_full_backward_hook(self.note)

    @staticmethod
    def note(module, grad_input, grad_output):
        module.seen.add_(grad_output[0].sum(0))

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.stem(x))))


@glue("blind: inference_mode as a decorator of a helper")
def _(net, h, x):
    @torch.inference_mode()
    def weights(y):
        return net.inner(y).softmax(1)

    return h * weights(x).clone()


@glue("blind: inference_mode for a statistic, its clone used", within=True)
def _(net, h, x):
    with torch.inference_mode():
        gate = net.inner(x).sigmoid()
    return h * gate.clone()


@glue("blind: inference_mode on hidden values: nothing goes back")
def _(net, h, x):
    with torch.inference_mode():
        gate = h.softmax(1)
    return h * gate.clone()
