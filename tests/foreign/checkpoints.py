"""torch.utils.checkpoint in every form, at the root and in marked modules."""

from __future__ import annotations

import functools
import warnings

import torch
from foreign.case import case
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from workloads import TOKENS, WIDTH, adam, next_token, tokens


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Stack(nn.Module):
    """Blocks between an embedding and a head; `run` says how a block is called."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Feed() for _ in range(3))

    def run(self, block, x):
        return block(x)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


stack = functools.partial(case, batch=tokens, loss=next_token, optimizer=adam)
MARKS = ("embed", "blocks.*", "head")


@stack("checkpoint of marked blocks at the root, use_reentrant=False", *MARKS)
class NotReentrant(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


@stack("checkpoint of marked blocks at the root, use_reentrant=True", *MARKS)
class Reentrant(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


@stack("checkpoint of marked blocks at the root, default", *MARKS)
class Default(Stack):
    def run(self, block, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checkpoint(block, x)


@stack("checkpoint only in training, preserve_rng_state=False", *MARKS)
class InTraining(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False) if self.training else block(x)


@stack("checkpoint of a function of the root between marks, use_reentrant=True", *MARKS)
class FunctionReentrant(Stack):
    def run(self, block, x):
        return checkpoint(lambda h: torch.tanh(h) * 2, block(x), use_reentrant=True)


@stack("checkpoint of a function of the root between marks, use_reentrant=False", *MARKS)
class FunctionNotReentrant(Stack):
    def run(self, block, x):
        return checkpoint(lambda h: torch.tanh(h) * 2, block(x), use_reentrant=False)


@stack("checkpoint of a function around a marked block and glue", *MARKS)
class Around(Stack):
    def run(self, block, x):
        return checkpoint(lambda h: torch.tanh(block(h) * 2), x, use_reentrant=True)


@stack("checkpoint of unmarked blocks", "embed", "head")
class Unmarked(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


@stack("checkpoint of unmarked blocks, not reentrant", "embed", "head")
class UnmarkedNotReentrant(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class Inner(Feed):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return x + checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


@stack("checkpoint inside marked blocks, use_reentrant=True", *MARKS)
class InsideReentrant(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner(use_reentrant=True) for _ in range(3))


@stack("checkpoint inside marked blocks, use_reentrant=False", *MARKS)
class InsideNotReentrant(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner(use_reentrant=False) for _ in range(3))


@stack("checkpoint_sequential over marked blocks, reentrant", *MARKS)
class SequentialReentrant(Stack):
    def forward(self, ids):
        x = checkpoint_sequential(list(self.blocks), 2, self.embed(ids), use_reentrant=True)
        return self.head(x)


@stack("checkpoint_sequential over marked blocks, not reentrant", *MARKS)
class SequentialNotReentrant(Stack):
    def forward(self, ids):
        x = checkpoint_sequential(list(self.blocks), 2, self.embed(ids), use_reentrant=False)
        return self.head(x)


@stack("checkpoint_sequential inside a marked Sequential wrapper", "embed", "body", "head")
class SequentialInside(nn.Module):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Feed() for _ in range(4)))

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(TOKENS, WIDTH), self.Body(), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


@stack("checkpoint with several arguments, keyword ones and None", *MARKS)
class Arguments(nn.Module):
    class Block(Feed):
        def forward(self, x, mask=None, *, scale=1.0):
            h = super().forward(x) * scale
            return h if mask is None else h * mask

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, ids):
        x, mask = self.embed(ids), (ids > 2).unsqueeze(-1).double()
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x, mask if n else None, scale=0.5, use_reentrant=False)
        return self.head(x)


@stack("checkpoint by functools.partial, in the way of transformers", *MARKS)
class ByPartial(Stack):
    def __init__(self):
        super().__init__()
        self.gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)

    def run(self, block, x):
        return self.gradient_checkpointing_func(block.__call__, x)


@stack("checkpoint of a function that holds a parameter of the root", *MARKS)
class RootParameter(Stack):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def run(self, block, x):
        return checkpoint(lambda h: h * self.scale, block(x), use_reentrant=True)


@stack("checkpoint of a block with dropout, masks kept by its RNG state", *MARKS, random=True)
class WithDropout(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Feed(), nn.Dropout(0.3)) for _ in range(3))

    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class Frozen(Stack):
    """A frozen embedding, whose results want gradients by a hook, as in `gradient_checkpointing_enable`."""

    kind, use_reentrant, hooked = Feed, True, True

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(self.kind() for _ in range(3))
        if self.hooked:
            self.embed.register_forward_hook(lambda *given: given[-1].requires_grad_(True))

    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


@stack("checkpoint behind a frozen embedding whose hook calls requires_grad_, use_reentrant=True", *MARKS)
class FrozenReentrant(Frozen):
    pass


@stack("checkpoint behind a frozen embedding whose hook calls requires_grad_, use_reentrant=False", *MARKS)
class FrozenNotReentrant(Frozen):
    use_reentrant = False


@stack("checkpoint behind a frozen embedding, unmarked, whose hook calls requires_grad_", "blocks.*", "head")
class FrozenUnmarked(Frozen):
    pass


@stack("checkpoint behind a frozen embedding: without a hook nothing in it trains, use_reentrant=True", *MARKS)
class FrozenAlone(Frozen):
    hooked = False


class Again(Frozen):
    kind = functools.partial(Inner, use_reentrant=True)

    def run(self, block, x):
        return block(x)


@stack("checkpoint inside marked blocks behind a frozen embedding whose hook calls requires_grad_", *MARKS)
class FrozenInside(Again):
    pass


@stack("checkpoint behind a frozen embedding and a frozen layer in one marked module", "stem", "blocks.*", "head")
class FrozenStem(Frozen):
    hooked = False

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids):
            return torch.tanh(self.mix(self.embed(ids).requires_grad_(True)))

    def __init__(self):
        super().__init__()
        self.stem = self.Stem().requires_grad_(False)
        del self.embed

    def forward(self, ids):
        x = self.stem(ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Asking(Stack):
    """Blocks with a reentrant checkpoint inside; `lead` makes what the first one reads."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner(use_reentrant=True) for _ in range(3))

    def lead(self, x):
        return x

    def forward(self, ids):
        x = self.lead(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FrozenAsking(Asking):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


@stack("checkpoint inside marked blocks behind a frozen embedding: the first one alone does not train", *MARKS)
class FirstAlone(FrozenAsking):
    pass


@stack("checkpoint inside marked blocks behind the root's own requires_grad_ of a frozen result", *MARKS)
class RootRequires(FrozenAsking):
    def lead(self, x):
        return x.requires_grad_() if self.training else x


@stack("checkpoint inside marked blocks behind the root's own x.requires_grad = True, then written", *MARKS)
class RootSets(FrozenAsking):
    def lead(self, x):
        x = x * 2
        x.requires_grad = True
        with torch.no_grad():
            x.add_(0.1)
        return x


@stack("checkpoint inside the second marked block alone that reads what the root has require a gradient", *MARKS)
class SecondReader(FrozenAsking):
    def forward(self, ids):
        x = self.embed(ids)
        y = self.blocks[0](x)
        z = self.blocks[1](x.requires_grad_())
        return self.head(self.blocks[2](y + z))


@stack("checkpoint inside marked blocks behind a trained embedding, detached at the root", *MARKS)
class RootDetaches(Asking):
    def lead(self, x):
        return x.detach()


class Detached(nn.Embedding):
    """Trained by what it returns beside."""

    def forward(self, ids):
        x = super().forward(ids)
        return x.detach(), x


@stack("checkpoint inside marked blocks behind the detached one of two results of a partition", *MARKS)
class DetachedResult(Asking):
    def __init__(self):
        super().__init__()
        self.embed = Detached(TOKENS, WIDTH)

    def forward(self, ids):
        x, beside = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + beside)


@stack("checkpoint inside marked blocks behind a frozen one that reads a detached result", "mix", *MARKS)
class DetachedBefore(DetachedResult):
    def __init__(self):
        super().__init__()
        self.mix = Feed().requires_grad_(False)

    def forward(self, ids):
        x, beside = self.embed(ids)
        x = self.mix(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + beside)


@stack("checkpoint of a marked block at the root that reads a detached result", *MARKS)
class DetachedAtRoot(DetachedResult):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, ids):
        x, beside = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x + beside)


@stack("checkpoint inside marked blocks behind a result that is filled in slice by slice", *MARKS)
class Filled(Asking):
    class Table(nn.Embedding):
        def forward(self, ids):
            x = super().forward(ids)
            made = torch.empty_like(x)
            made[:, :1], made[:, 1:] = x[:, :1], x[:, 1:]
            return made

    def __init__(self):
        super().__init__()
        self.embed = self.Table(TOKENS, WIDTH)


@stack("checkpoint inside marked blocks behind a result that is detached in the first step alone", *MARKS,
       inherent=True, refusal="has a gradient now, and had none in the forward that the model was cut by")  # fmt: skip
class Warming(Asking):
    class Table(nn.Embedding):
        calls = 0

        def forward(self, ids):
            self.calls += self.training
            x = super().forward(ids)
            return x if self.calls > 1 else x.detach()

    def __init__(self):
        super().__init__()
        self.embed = self.Table(TOKENS, WIDTH)


def freeze_embedding(step, parameters, _):
    for name, parameter in parameters.items():
        if name.startswith("embed"):
            parameter.requires_grad_(step != 1)


@stack("checkpoint inside marked blocks, the loop freezes the embedding in front for a step", *MARKS,
       loop=freeze_embedding)  # fmt: skip
class LoopFreezes(Asking):
    pass


@stack("checkpoint inside the last marked block, the loop freezes all that is trained in front for a step", *MARKS,
       loop=freeze_embedding)  # fmt: skip
class LoopFreezesInFront(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Tanh(), nn.GELU(), Inner(use_reentrant=True)])


@stack("checkpoint of marked blocks at the root, the loop freezes the embedding in front for a step", *MARKS,
       loop=freeze_embedding, refusal="has no gradient now, and had one in the forward")  # fmt: skip
class LoopFreezesRoot(Stack):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class Weighed(Feed):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.requires_grad else 1.0)


@stack("marked blocks ask whether x.requires_grad, the loop freezes all that is trained in front for a step", *MARKS,
       loop=freeze_embedding)  # fmt: skip
class LoopFreezesAsked(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Tanh(), Weighed(), Weighed()])


@stack("marked blocks ask whether x.requires_grad of what a tensor made in the forward makes require one", *MARKS)
class MadeToRequire(LoopFreezesAsked):
    class Table(nn.Embedding):
        def forward(self, ids):
            x = super().forward(ids)
            return x.detach() + torch.zeros_like(x, requires_grad=True)

    def __init__(self):
        super().__init__()
        self.embed = self.Table(TOKENS, WIDTH).requires_grad_(False)


@stack("the root asks whether h.requires_grad, the loop freezes the embedding in front for a step", *MARKS,
       loop=freeze_embedding, refusal="has no gradient now, and had one in the forward")  # fmt: skip
class LoopFreezesRootAsked(Stack):
    def run(self, block, x):
        return block(x) * (2.0 if self.training and x.requires_grad else 1.0)
