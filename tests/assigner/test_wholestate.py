"""The whole model's state on one rank: what the plain model's strict load_state_dict takes, and what it gives."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from whole_models import MODELS, Renaming, plain_after
from workloads import WIDTH, make_plan, normalised, pipeline_of, workload

from assigner import load_weights
from assigner.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def same(one: Any, other: Any) -> bool:
    """Equal values, and equal types of them."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=0.0, atol=1e-10)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_the_plain_models(name: str, tmp_path: Path) -> None:
    """Live and from a checkpoint: key for key that of a plain loop, and strictly loaded; training goes on as before."""
    made = MODELS[name][0]()
    plan = make_plan(made, micro_batches=1)
    with pipeline_of(made, plan) as pipeline:
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
        expected = plain_after(made, 3).state_dict()
        found = pipeline.full_state_dict()
        assert found is not None
        pipeline.save(tmp_path / "at")
        drawn = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state()))
        again = pipeline.full_state_dict(to=None)
        assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state())))
        assert same(dict(expected), dict(found))
        assert same(dict(again), dict(found))
        before = {key: each.clone() for key, each in found.items() if isinstance(each, torch.Tensor)}
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(3, 5)]
        assert all(torch.equal(each, found[key]) for key, each in before.items())
    if name == "transposed":
        with pytest.raises(UsageError, match="the model's own state_dict makes 'turned'"):
            load_weights(tmp_path / "at")
    else:
        assert same(dict(found), load_weights(tmp_path / "at"))
    if name != "growing":  # as in plain PyTorch: a buffer that was None is no key of a new model
        made.model().load_state_dict(found, strict=True)
        with pipeline_of(made, plan) as pipeline:
            assert pipeline.load_state_dict(found) == ([], [])
            assert same(dict(pipeline.full_state_dict()), dict(found))
    with pipeline_of(made, plan) as pipeline:
        pipeline.load(tmp_path / "at")
        assert same(dict(pipeline.full_state_dict()), dict(found))
        assert [pipeline.step(made.make_batch(8, n)) for n in range(3, 5)] == losses


def test_extra_state_that_has_changed_is_carried(tmp_path: Path) -> None:
    """What the modules of the pipeline say, not those of the builder; and what is given reaches them."""
    made = MODELS["extra state"][0]()
    with pipeline_of(made, make_plan(made)) as pipeline:
        module = pipeline._installed.share.modules["1"].get_submodule("1")
        module.facts["seen"], module.note = 7, torch.ones(2)
        pipeline.save(tmp_path / "at")
        found = pipeline.full_state_dict()
        assert found["1._extra_state"]["facts"] == {"seen": 7, "names": ("a", None)}
        assert found["0._extra_state"]["facts"]["seen"] == 0
        assert same(load_weights(tmp_path / "at"), dict(found))
        module.facts = {"a": object()}
        with pytest.raises(UsageError, match=r"get_extra_state\(\)"):
            pipeline.full_state_dict()
        with pytest.raises(UsageError, match=r"1\._extra_state"):
            pipeline.save(tmp_path / "other")
    with pipeline_of(made, make_plan(made)) as pipeline:
        for load in (lambda: pipeline.load(tmp_path / "at"), lambda: pipeline.load_state_dict(found)):
            module = pipeline._installed.share.modules["1"].get_submodule("1")
            module.facts = {}
            load()
            assert module.facts["seen"] == 7
            assert torch.equal(module.note, torch.ones(2))


def test_weights_that_nobody_reads_are_kept(tmp_path: Path) -> None:
    """Those of a state_dict that was loaded, not those of the builder: in the next one, and in a checkpoint."""
    made = MODELS["buffers"][0]()
    given = made.model().state_dict()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.load_state_dict(given)
        pipeline.save(tmp_path / "at")
        assert torch.equal(pipeline.full_state_dict()["unread.weight"], given["unread.weight"])
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert not torch.equal(pipeline.full_state_dict()["unread.weight"], given["unread.weight"])
        pipeline.load(tmp_path / "at")
        assert torch.equal(pipeline.full_state_dict()["unread.weight"], given["unread.weight"])


@pytest.mark.slow
def test_weights_that_were_kept_in_inference_mode_are_loaded(tmp_path: Path) -> None:
    """As by a function that validates; and what is built, moved or loaded there is trained on, as in a plain loop."""
    made = MODELS["tied"][0]()
    plan, first = make_plan(made), made.make_batch(8, 0)
    with pipeline_of(made, plan) as pipeline:
        pipeline.step(first)
        pipeline.save(tmp_path / "saved")
        best = {key: each.clone() for key, each in pipeline.full_state_dict().items()}
        losses = [pipeline.step(first) for _ in range(2)]
    with torch.inference_mode():
        pipeline = pipeline_of(made, plan)
        kept = copy.deepcopy(best)
    with pipeline:
        for restore in (pipeline.load_state_dict, torch.inference_mode()(pipeline.load_state_dict)):
            restore(kept)
            assert same(dict(pipeline.full_state_dict()), best)
        pipeline.step(first)
        with torch.inference_mode():
            pipeline.load(tmp_path / "saved")
            pipeline.move(make_plan(made, micro_batches=1))
            pipeline.move(plan)
        assert [pipeline.step(first) for _ in range(2)] == losses
        with torch.inference_mode(), pytest.raises(UsageError, match="it would train nothing"):
            pipeline.step(first)


def test_a_count_of_batches_that_a_plain_dict_lacks_goes_on() -> None:
    """As torch has it; its loading code sets it to 0 in a model without memory, of a dict that has no version."""
    made = workload(normalised, "0", "1", "3")
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        pipeline.load_state_dict({"0.bias": torch.zeros(WIDTH, dtype=torch.float64)}, strict=False)
        assert pipeline.state_dict()["1.num_batches_tracked"] == 1
        whole = pipeline.full_state_dict()
        assert whole is not None
        pipeline.load_state_dict({name: each for name, each in whole.items() if "num_batches" not in name})
        assert pipeline.state_dict()["1.num_batches_tracked"] == 1


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    """Keys, shapes, types and names of one tensor: refused in words, and everything is as it was."""
    made = MODELS["tied"][0]()
    with pipeline_of(made, make_plan(made)) as pipeline:
        before = dict(pipeline.full_state_dict())
        given = {key: torch.zeros_like(each) for key, each in before.items()}
        refused: dict[str, Any] = {
            r"Missing key\(s\).*norm\.bias": {key: each for key, each in given.items() if key != "norm.bias"},
            r"Unexpected key\(s\).*\"more\"": {**given, "more": torch.zeros(1)},
            r"size mismatch for positions": {**given, "positions": torch.zeros(2, 2)},
            r"'tokens\.weight' and 'head\.weight' are one tensor": {
                **given, "head.weight": torch.ones_like(given["head.weight"]),
            },
            r"'positions' is complex128.*values would be lost": {
                **given, "positions": given["positions"].to(torch.complex128),
            },
            r"no values for 'positions'": {**given, "positions": given["positions"].to("meta")},
            "a list is no state_dict": [],
            "no rank has given a state_dict": None,
        }  # fmt: skip
        for words, state in refused.items():
            with pytest.raises(UsageError, match=words):
                pipeline.load_state_dict(state)
            assert same(before, dict(pipeline.full_state_dict()))
        assert not any(each.requires_grad for each in given.values())
        one_name = {
            key: each.to(torch.float16) for key, each in given.items() if key not in ("head.weight", "norm.bias")
        }
        found = pipeline.load_state_dict({**one_name, "more": torch.zeros(1)}, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["norm.bias"], ["more"])
        after = dict(pipeline.full_state_dict())
        assert same(after, {**given, "norm.bias": before["norm.bias"]})
        assert made.make_batch is not None
        pipeline.step(made.make_batch(8, 0))


def test_buffers_of_a_model_that_renames_them_are_saved(tmp_path: Path) -> None:
    """Running statistics go into a checkpoint though the model's state_dict has another name for them."""
    made = workload(Renaming, "inner", "last")
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        pipeline.save(tmp_path / "at")
        mean = pipeline.full_state_dict()["core.1.running_mean"]
    assert mean.shape == (WIDTH,)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.load(tmp_path / "at")
        assert torch.equal(pipeline.full_state_dict()["core.1.running_mean"], mean)


@pytest.mark.parametrize(
    "value",
    [
        None, True, -0.0, float("inf"), 2**53 + 1, -(2**200), "a\ud800\x00", [], (), {}, {"a": {"b": [1, (2, None)]}},
        {3: "x", (1, 2): 4.5}, torch.tensor(3.5), torch.zeros(0, 3),
        [torch.ones(2, 3).t(), {"t": torch.tensor(1 + 2j)}],
        torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_a_shared_value_is_what_it_was(value: Any) -> None:
    """Of one type and value, whatever it holds; and a copy."""
    made = MODELS["tied"][0]()
    with pipeline_of(made, make_plan(made)) as pipeline:
        found = pipeline.share(value)
        if isinstance(value, list) and value:
            assert torch.equal(found[0], value[0])
            assert torch.equal(found[1]["t"], value[1]["t"])
        else:
            assert same(found, value)
            assert str(found) == str(value)
        assert found is not value or not isinstance(value, torch.Tensor | list | dict) or not value


def test_what_cannot_be_shared_is_refused_in_words() -> None:
    """The message says where it is; and the pipeline goes on."""
    made = MODELS["tied"][0]()
    circle: list[Any] = []
    circle.append(circle)
    with pipeline_of(made, make_plan(made)) as pipeline:
        for value, words in (
            ({"a": [object()]}, r"value\['a'\]\[0\] is a object; only plain values and tensors go to other ranks"),
            (circle, "nested too deeply, or holds itself"),
            (10**5000, "cannot be shared"),
            (torch.ones(2).to_sparse(), "of layout sparse_coo"),
            (torch.ones(2, device="meta"), "on the meta device"),
        ):
            with pytest.raises(UsageError, match=words):
                pipeline.share(value)
        with pytest.raises(UsageError, match="there is no rank 1"):
            pipeline.share(1, source=1)
        assert math_isnan(pipeline.share(float("nan")))


def math_isnan(value: float) -> bool:
    return value != value  # noqa: PLR0124 - NaN
