"""What training scripts do about devices: it trains on a GPU as plain torch does; on a CPU as far as it goes there."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils import _pytree as pytree
from workloads import make_plan

from assigner import Pipeline, Workload
from assigner.errors import UsageError
from assigner.model import singleprocess
from assigner.model.deferred import DeferredModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.formats.plan import Plan

WIDTH, ROWS = 8, 8


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbers(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def sequences(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
    return torch.randn(rows, 5, WIDTH, generator=generator), torch.randn(rows, 5, WIDTH, generator=generator)


def workload(model: Callable[[], nn.Module], batch: Any = numbers, loss: Any = mse_loss, **words: Any) -> Workload:
    words = {"marks": ("parts.*",), **words}
    return Workload(model, batch, loss, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=ROWS, seed=3, **words)


def placed(made: Workload, device: str) -> Plan:
    plan = make_plan(made)
    return replace(plan, stages=tuple(replace(each, sole_worker=f"worker:0/{device}") for each in plan.stages))


def trained(made: Workload, device: str, batch: Any = None) -> list[float]:
    """Two losses of the pipeline, which are those of plain torch on the device, with weights drawn as on a CPU."""
    batch = batch or made.make_batch(ROWS, 0)
    with Pipeline(made, placed(made, device)) as pipeline:
        first = {name: each.clone() for name, each in pipeline.full_state_dict().items()}
        found = [float(pipeline.step(batch)) for _ in range(2)]
    model = made.model().to(device)
    model.load_state_dict(first)
    optimizer = made.make_optimizer(model.named_parameters())
    inputs, targets = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), batch)
    plain = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = made.compute_loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert found == pytest.approx(plain, rel=1e-4)
    return found


def gradients(made: Workload, device: str, remat: Any) -> dict[str, torch.Tensor]:
    with Pipeline(made, placed(made, device), remat=remat) as pipeline:
        pipeline.step(made.make_batch(ROWS, 0), update=False)
        return {name: each.clone() for name, each in pipeline.gradients().items()}


class Net(nn.Module):
    """Its parts one after another."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts or [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x, *others)
        return x


class Masked(nn.Linear):
    """Reads another input of the model's."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask


@pytest.mark.long
def test_expanded_tensors_reach_their_device(device: str) -> None:
    """As an input that each part reads, and as targets."""

    def batch(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
        x, _ = numbers(rows, generator)
        return (x, torch.linspace(0, 1, WIDTH).expand(rows, WIDTH)), torch.ones(1, WIDTH).expand(rows, WIDTH)

    trained(workload(lambda: Net(Masked(WIDTH, WIDTH), Masked(WIDTH, WIDTH)), batch), device)


class Recurrent(nn.LSTM):
    """Its outputs alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.long
def test_dropout_between_recurrent_layers_is_drawn_alike_by_a_recompute(device: str) -> None:
    """What rematerialises has the gradients of what does not; and no weights are copied in each forward."""

    def build() -> nn.Module:
        made = Recurrent(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)
        return Net(nn.Linear(WIDTH, WIDTH), made, nn.Linear(WIDTH, WIDTH))

    made = workload(build, sequences)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*contiguous chunk.*")
        kept, again = (gradients(made, device, remat) for remat in ("never", "always"))
    assert max(float((kept[name] - again[name]).abs().max()) for name in kept) < 1e-6


@pytest.mark.long
def test_recurrent_layers_train_as_plain_torch_does(device: str) -> None:
    """Their weights lie in one piece of memory on a GPU, and are trained there."""
    build = lambda: Net(nn.Linear(WIDTH, WIDTH), Recurrent(WIDTH, WIDTH, 2, batch_first=True))  # noqa: E731
    trained(workload(build, sequences), device)


class Scaled(nn.Linear):
    """Made on a device with a tensor that is no buffer, and a buffer made of numbers."""

    def __init__(self, device: str) -> None:
        super().__init__(WIDTH, WIDTH, device=device)
        self.mask = torch.ones(WIDTH, device=device).cumsum(0) / WIDTH
        self.register_buffer("scale", torch.arange(WIDTH, device=device) * torch.tensor([0.1] * WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask + self.scale


@pytest.mark.long
def test_a_model_is_built_on_its_device(device: str) -> None:
    """With `device=`, and with `to`."""
    trained(workload(lambda: Net(Scaled(device), nn.Linear(WIDTH, WIDTH, device=device))), device)
    trained(workload(lambda: Net().to(device)), device)


class Named(nn.Linear):
    """Names the script's device in its forward."""

    def __init__(self, device: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.device)
        return super().forward(x) + torch.ones(WIDTH, device=self.device)


class NamedBetween(Net):
    """The same between its parts."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x.to(self.device)) + torch.ones(WIDTH, device=self.device)
        return self.parts[1](x.cuda() if self.device != "cpu" else x)


@pytest.mark.long
def test_forwards_name_their_device(device: str) -> None:
    """The script's, in a part and between the parts."""
    trained(workload(lambda: Net(Named(device), Named(device))), device)
    trained(workload(lambda: NamedBetween(device)), device)


class OnDefault(Net):
    """Makes a tensor where the script makes them."""

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](x) * torch.full((WIDTH,), 0.5))


@pytest.fixture
def default(device: str) -> Iterator[str]:
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.mark.long
def test_the_script_has_a_default_device(default: str) -> None:
    """What is made without a device is made there, also within a forward."""

    def batch(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
        return tuple(torch.randn(rows, WIDTH, generator=generator, device="cpu") for _ in range(2))

    trained(workload(OnDefault, batch), default)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["meta"])
def test_weights_do_not_depend_on_the_default_device(device: str, other: str) -> None:
    """Also where a rank draws what others hold only to come to its own."""
    found = []
    for each in (None, other if device == "cpu" else device):
        deferred = DeferredModel(Net, seed=3)
        torch.set_default_device(each)
        try:
            found.append(deferred.materialise(["parts.1.weight"])["parts.1.weight"].cpu())
        finally:
            torch.set_default_device(None)
    assert torch.equal(*found)


def classes(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, WIDTH, (rows,), generator=generator)


@pytest.mark.long
def test_a_loss_has_class_weights(device: str) -> None:
    """They come to where the outputs are, wherever the script has them."""
    weights = torch.linspace(0.5, 2, WIDTH)
    for where in {"cpu", device}:
        trained(workload(Net, classes, nn.CrossEntropyLoss(weight=weights.to(where)), loss_over="batch"), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_closes_over_a_tensor_that_is_elsewhere() -> None:
    """It is said which, and how to write it."""
    weights = torch.ones(WIDTH)
    made = workload(Net, loss=lambda out, targets: (weights * (out - targets) ** 2).mean())
    with (
        pytest.raises(UsageError, match="a tensor that is not where the outputs are, on cuda:0"),
        Pipeline(made, placed(made, "cuda:0")) as pipeline,
    ):
        pipeline.step(made.make_batch(ROWS, 0))


class Attention(nn.Module):
    """Attention at the root, whose result has unlike strides by kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (each.view(rows, length, 2, width // 2).transpose(1, 2) for each in self.parts[0](x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.parts[1](mixed.transpose(1, 2).contiguous().view(rows, length, width))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_leave_strides_of_their_own(device: str, dtype: torch.dtype) -> None:
    """A view between partitions is right for those of each device."""

    def batch(rows: int, generator: torch.Generator) -> tuple[Any, Any]:
        x, y = sequences(rows, generator)
        return x.to(dtype), y.to(dtype)

    trained(workload(lambda: Attention().to(dtype), batch), device)


@pytest.mark.long
def test_a_batch_is_on_the_device_already(device: str) -> None:
    """Where the script has put it."""
    made = workload(Net)
    trained(made, device, pytree.tree_map(lambda each: each.to(device), made.make_batch(ROWS, 0)))


@pytest.mark.long
def test_the_scripts_generators_go_on(device: str) -> None:
    """A pipeline leaves a GPU's as it leaves the CPU's."""
    made = workload(Net)
    plan = placed(made, device)
    torch.manual_seed(99)
    of = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = of()
    with Pipeline(made, plan):
        pass
    assert torch.equal(before, of())


class Asks(torch.autograd.Function):
    """Whose backward asks for its thread, as logging does."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), singleprocess.is_user_code()))
        threading.current_thread()
        return gradients[0]


seen: list[tuple[int, bool]] = []


def test_a_backward_in_autograds_thread_is_the_users(device: str) -> None:
    """Also once it has asked which thread it is in."""
    seen.clear()
    x = torch.ones(2, device=device, requires_grad=True)
    for _ in range(2):
        Asks.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    own = threading.get_ident()
    assert [users for thread, users in seen if thread != own] == [True] * (2 if device != "cpu" else 0)
