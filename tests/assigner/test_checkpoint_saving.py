"""Saves on one rank that are killed, fail or must not be made: under its name a checkpoint is complete, old or new."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from checkpoint_cases import cut_short, trained, two_layers
from safetensors import SafetensorError
from torch import nn
from workloads import WIDTH, skips, workload

from assigner import load_weights
from assigner.errors import FormatError, UsageError
from assigner.runtime.checkpoints import swapping
from assigner.runtime.checkpoints.shards import Index, write_index
from assigner.runtime.checkpoints.swapping import SavingLock, part_of, put_in_place

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks


@pytest.mark.long
@pytest.mark.parametrize("way", ["exchanged", "renamed"])
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(forked: ForkedRanks, tmp_path: Path, way: str):
    """Killed at every touch of a file and at random moments: the old or the new one, whole; no leftovers at last."""
    (end,) = forked.run("killed_saves.py", tmp_path / "at", way)
    found = json.loads(end.output)
    assert found["points"] > 20
    assert found["old"] > 0
    assert found["new"] > 0
    assert (found["gone"] > 0) == (way == "renamed")


def test_what_saves_have_left_is_named(tmp_path: Path):
    """Where there is no checkpoint, or a broken one, `load` says what lies beside it, and what of it is whole."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at")
        (tmp_path / "at").rename(tmp_path / ".at.01234567.before")
        (tmp_path / ".at.01234567.part").mkdir()
        (tmp_path / ".at.b.01234567.part").mkdir()  # of another name
        with pytest.raises(UsageError, match="at is no checkpoint") as refused:
            pipeline.load(tmp_path / "at")
        assert f"left {tmp_path}/.at.01234567.part and {tmp_path}/.at.01234567.before (whole)" in refused.value.hint
        with pytest.raises(UsageError, match="at is no checkpoint") as refused:
            load_weights(tmp_path / "at")
        assert f"{tmp_path}/.at.01234567.before (whole)" in refused.value.hint
        pipeline.save(tmp_path / "at")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".at.b.01234567.part", "at"]
        (tmp_path / ".at.part").mkdir()
        cut_short(tmp_path / "at" / "training.json")
        with pytest.raises(FormatError, match=r"training\.json: cannot be read") as broken:
            pipeline.load(tmp_path / "at")
        assert f"left {tmp_path}/.at.part:" in broken.value.hint


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One half of the old one and one of the new one would be neither."""
    made = skips()
    read = Index.read
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "at")

        def replaced(folder: Path, kind: str) -> Index:
            if kind == "model":
                pipeline.save(tmp_path / "at", force=True)
            return read(folder, kind)

        monkeypatch.setattr(Index, "read", replaced)
        with pytest.raises(FormatError, match="at was replaced while it was read"):
            pipeline.load(tmp_path / "at")


def test_two_runs_do_not_save_to_one_name_at_once(tmp_path: Path):
    """The second one is told so, and what stands there stays; a run that was killed keeps nobody out."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at")
        lock = SavingLock(tmp_path / "at")
        with pytest.raises(UsageError, match=r"another run is saving to .*at now"):
            pipeline.save(tmp_path / "at", force=True)
        assert pipeline.load(tmp_path / "at") is None
        lock.close()
        (tmp_path / ".at.saving").touch()
        pipeline.save(tmp_path / "at", "second", force=True)
        assert pipeline.load(tmp_path / "at") == "second"
        assert [path.name for path in tmp_path.iterdir()] == ["at"]


@pytest.mark.parametrize("way", ["exchanged", "renamed"])
def test_two_runs_at_once_lose_nothing_where_a_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    """Each writes to a folder of its own, and removes its own alone."""
    monkeypatch.setattr(swapping.fcntl, "flock", mock.Mock(side_effect=OSError(37, "No locks available")))
    if way == "renamed":
        monkeypatch.setattr(swapping, "_exchange", lambda *_: False)
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at", "old")
        seen, at = [], iter(range(9))

        def meanwhile(part: Path, name: str, save: str) -> None:
            number = next(at)
            if number == 0:
                pipeline.save(tmp_path / "at", "other", force=True)
                seen.append(pipeline.load(tmp_path / "at"))
            write_index(part, name, save)

        monkeypatch.setattr("assigner.runtime.checkpoints.saving.write_index", meanwhile)
        pipeline.save(tmp_path / "at", "own", force=True)
        assert [*seen, pipeline.load(tmp_path / "at")] == ["other", "own"]
        assert [path.name for path in tmp_path.iterdir()] == ["at"]


def test_files_of_two_saves_are_no_checkpoint(tmp_path: Path):
    """As a copy over an older one leaves them when it is cut short; of files without a number nothing is known."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "early", "early")
        pipeline.step(skips().make_batch(8, 5))
        pipeline.save(tmp_path / "late", "late")
        names = sorted(path.name for path in (tmp_path / "early").iterdir())
        assert len(names) == 5
        for name in names:
            mixed = shutil.copytree(tmp_path / "early", tmp_path / f"mixed-{name}")
            shutil.copy(tmp_path / "late" / name, mixed / name)
            with pytest.raises(FormatError, match="are of two saves"):
                pipeline.load(mixed)
        for index in (tmp_path / "early").glob("*.index.json"):
            content = json.loads(index.read_text())
            del content["metadata"]
            index.write_text(json.dumps(content))
        assert pipeline.load(tmp_path / "early") == "early"


def test_what_is_not_whole_takes_no_name(tmp_path: Path):
    """As a folder that somebody has emptied."""
    (tmp_path / "at").mkdir()
    (tmp_path / "at" / "training.json").touch()
    part = part_of(tmp_path / "at", "01234567")
    part.mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(part, tmp_path / "at")
    assert (tmp_path / "at" / "training.json").is_file()


def test_a_checkpoint_that_another_run_has_saved_meanwhile_is_not_replaced_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The place is looked at once more when no other run can save there."""
    with trained(skips()) as pipeline:
        others = iter([lambda: pipeline.save(tmp_path / "at", "other")])

        def locked(folder: Path) -> SavingLock:
            next(others, lambda: None)()
            return SavingLock(folder)

        monkeypatch.setattr("assigner.runtime.checkpoints.saving.SavingLock", locked)
        with pytest.raises(UsageError, match="at exists"):
            pipeline.save(tmp_path / "at", "own")
        assert pipeline.load(tmp_path / "at") == "other"


def test_a_file_that_goes_while_it_is_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch opens it a second time, and has an error of its own for that."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at")
        error = RuntimeError("unable to open file <x> in read-only mode: No such file or directory (2)")
        monkeypatch.setattr("assigner.runtime.checkpoints.shards.safe_open", mock.Mock(side_effect=error))
        with pytest.raises(FormatError, match=r"model-00000\.safetensors: cannot be read: unable to open file"):
            pipeline.load(tmp_path / "at")
        with pytest.raises(FormatError, match="cannot be read"):
            load_weights(tmp_path / "at")


def test_whoever_may_read_one_file_may_read_all(tmp_path: Path):
    """The user's umask says who."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at")
    (mode,) = {path.stat().st_mode & 0o777 for path in (tmp_path / "at").iterdir()}
    (tmp_path / "new").touch()
    assert mode == (tmp_path / "new").stat().st_mode & 0o777


def test_a_folder_that_is_not_there_has_a_way_out(tmp_path: Path):
    """What is to be named."""
    with trained(skips()) as pipeline, pytest.raises(UsageError, match="there is no such folder") as refused:
        pipeline.load(tmp_path / "at")
    assert "pipeline.save" in (refused.value.hint or "")


def test_a_full_disk_keeps_what_stood_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error says why, nothing half is left, and training goes on."""
    made = skips()
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "at")
        for name, error in (
            ("shards.save_file", SafetensorError("Error while serializing: No space left on device (os error 28)")),
            ("shards.flush", OSError(28, "No space left on device")),
            ("saving.put_in_place", OSError(28, "No space left on device")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(f"assigner.runtime.checkpoints.{name}", mock.Mock(side_effect=error))
                with pytest.raises(UsageError, match=r"cannot write .*at: .*No space left on device"):
                    pipeline.save(tmp_path / "at", force=True)
            assert [path.name for path in tmp_path.iterdir()] == ["at"]
        assert pipeline.step(made.make_batch(8, 9)) > 0
        pipeline.load(tmp_path / "at")
        assert pipeline.steps == 3


def test_a_place_that_cannot_be_is_told(tmp_path: Path):
    """A name that is too long, one below a file, a link in a circle: an error with the path, and training goes on."""
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    with trained(skips()) as pipeline:
        for place in ("x" * 300, "file/at", "circle"):
            with pytest.raises(UsageError, match=place):
                pipeline.save(tmp_path / place)
            with pytest.raises(UsageError, match=place):
                pipeline.load(tmp_path / place)
            with pytest.raises(UsageError, match=place):
                load_weights(tmp_path / place)
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for state in (deep, 10**5000):
            with pytest.raises(UsageError, match="state cannot be saved"):
                pipeline.save(tmp_path / "at", state=state)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file"]


def test_weights_that_have_diverged_replace_nothing(tmp_path: Path):
    """A weight with NaN is not saved; a buffer may hold NaN, and does so again when it is loaded."""
    made = workload(two_layers)
    with trained(made) as pipeline:
        pipeline.state_dict()["1.running_mean"][2] = float("nan")
        pipeline.save(tmp_path / "at")
        pipeline.load(tmp_path / "at")
        assert pipeline.state_dict()["1.running_mean"].isnan().tolist() == [n == 2 for n in range(8)]
        with torch.no_grad():
            pipeline.state_dict()["0.weight"][0, 0] = float("nan")
        with pytest.raises(UsageError, match=r"'0\.weight' holds 1 NaN"):
            pipeline.save(tmp_path / "at", force=True)
        pipeline.load(tmp_path / "at")
        assert not any(each.isnan().any() for _, each in pipeline.named_parameters())


class Turned(nn.Module):
    """Numbers of a type that safetensors has no name for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.turns = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.turns).abs()

    def double(self) -> Turned:
        self.first.double()
        return self


def test_a_weight_of_a_type_that_files_do_not_know_is_named_and_training_goes_on(tmp_path: Path):
    made = workload(lambda: nn.Sequential(Turned(), nn.Linear(WIDTH, 1)))
    with trained(made) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(UsageError, match=r"'0\.turns' is of type torch\.complex128"):
            pipeline.save(tmp_path / "at")
        assert not (tmp_path / "at").exists()
        pipeline.step(made.make_batch(8, 1))


def test_files_of_others_in_a_checkpoint_are_kept(tmp_path: Path):
    """What somebody has put beside the weights is not removed with an old checkpoint; a link stays a link."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "at")
        (tmp_path / "at" / "config.json").write_text("{}")
        with pytest.raises(UsageError, match=r"holds 'config\.json'"):
            pipeline.save(tmp_path / "at", force=True)
        (tmp_path / "at" / "config.json").rename(tmp_path / "config.json")
        (tmp_path / "latest").symlink_to("at")
        pipeline.steps = 7
        pipeline.save(tmp_path / "latest", force=True)
        assert (tmp_path / "latest").is_symlink()
        assert json.loads((tmp_path / "at" / "training.json").read_text())["steps"] == 7
