"""What the further list's cases are refused with, where they are: regular expressions by the case's name."""

from __future__ import annotations

REFUSALS = {
    "blind: a loop over the rows of the batch": "one number of rows",
    "blind: a loop over the rows, each by itself, in a marked module": "one number of rows|rows",
    "blind: AdaIN in MUNIT's way: the root assigns a hidden value to a marked module": "is set from outside",
    "blind: BatchNorm put in eval by the root's forward": "is set from outside",
    "blind: Perceiver: latents repeated over the batch, cross-attention with einsum": "called again",
    "blind: a Function whose backward moves a buffer": "neither a tensor nor a plain value",
    "blind: a Function whose backward moves a buffer, in a marked module": "changes a buffer",
    "blind: a Function with a vmap rule, inside vmap": "cannot be traced",
    "blind: a child that reads its parent's parameter by a weakref": "not its own",
    "blind: a context manager around a marked call sets a global that it reads": "is set from outside",
    "blind: a contextvar set by the root's forward, read by a marked module": "is set from outside",
    "blind: a dataclass as input": "which is no tensor|into which nobody looks",
    "blind: a dict with attributes as output": "holds tensors in its own way",
    "blind: a full backward hook of a marked layer that moves its buffer": "changes a buffer",
    "blind: a marked module is given a function of torch": "neither a tensor nor a plain value",
    "blind: a marked module is given a lambda": "neither a tensor nor a plain value",
    "blind: a marked module is given a module of the root": "neither a tensor nor a plain value",
    "blind: a memory bank by sample index, index_copy_ at the root": "does not hold under the plan",
    "blind: a nested tensor of ragged rows, in a marked module": "cannot be traced",
    "blind: a product with a sparse matrix made in forward": "cannot be traced",
    "blind: a table of positions that grows with the sequence, unmarked": "does not hold under the plan",
    "blind: a tensor hook that closes over another hidden value": "holds a",
    "blind: a tensor hook that moves a buffer (gradient statistics), in a marked module": "hooks on to|a buffer",
    "blind: an autocast island in bfloat16 at the root": "cannot be cut",
    "blind: around a marked call: a class attribute": "is set from outside",
    "blind: around a marked call: the default dtype": "is set from outside",
    "blind: enable_grad inside a no_grad helper, in a marked module's way, in a marked module": "own parameters",
    "blind: experts with nonzero and index_add_, not marked": "cannot be traced",
    "blind: float() of a constant buffer at the root": "cannot be traced",
    "blind: forward-mode dual numbers, in a marked module": "cannot be traced",
    "blind: h.is_leaf and h.grad_fn asked at the root": "grad_fn",
    "blind: inputs: a key that forward does not read": "cannot be traced",
    "blind: loss: of shape [1]": "Workload.loss gave",
    "blind: one row in every batch": "cannot be traced",
    "blind: retention, projections marked alone": "does not hold under the plan",
    "blind: teacher.eval() in every forward, a marked dropout in it": "is set from outside",
    "blind: the builder gives one and the same model each time": "a loaded tensor",
    "blind: the loss closes over a layer of the model and applies it": "the script uses",
    "blind: the loss closes over the model: an L2 term over its parameters": "the script uses",
    "blind: the optimizer closes over the model and ignores what it is given": "not given|Workload.optimizer failed",
    "blind: the root assigns an input to a marked module (conditioning)": "is set from outside",
    "blind: the root sets a plain attribute of a marked module before it calls it": "is set from outside",
    "blind: the root asks whether a parameter has a gradient yet": "looks at the gradient",
    "blind: torch.func.jvp of an unmarked layer, at the root": "cannot be traced",
    "blind: torch.func.jvp, in a marked module": "cannot be traced",
    "blind: optimizer: the rate from the norm of all first weights": "other workers hold have .*no values",
    "blind: tolist() of a buffer that a marked module moves": "which another worker holds too",
    "blind: vmap of jacrev at the root": "cannot be traced|computes gradients between partitions",
}

SHOWS_THROUGH = frozenset(
    (
        "blind: type(h) is torch.Tensor decides at the root",
        "blind: the root asks whether a parameter's type is nn.Parameter",
        "blind: the root asks isinstance(h.size(0), int)",
        "blind: the root asks hasattr(h, ...) for what a subclass has",
        "blind: the root asks has_torch_function",
        "unseen: a product with its own .data, in one operation",
        "unseen: a .data that a marked module hands on, read before a write",
        "unseen: a .data that a module saves whose forward needs values",
    )
)
"""Code between partitions that asks what its tensors and sizes are made of: a capture cannot hide what it works with.
And writes that autograd does not see, where a capture does not see either what a backward has saved.
`assigner check` refuses these, and `profile` with it."""
