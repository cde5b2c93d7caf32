"""All that needs a GPU, in order of its value, within 15 minutes and without a network: `make gpu`.

Each part is a row or some in benchmarks/gpu/RESULT.md, written after every part, so that what was found stays if a
later part does not end. The parts that time something run one after another, the others then side by side. On a
machine without a CUDA device it says what it would do, and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT = HERE / "RESULT.md"
WHEELS = ROOT / ".whl"
LIMIT_S = 15 * 60.0
WAITS_S = 1.5  # of a sleep of 2 s: the host has waited for the other stream
STEP_WITHIN, PEAK_UNDER = 0.15, 0.05
MODEL = "examples/gpt.py:workload(width=512,context=128,blocks=12,batch_size=16)"
LOOPS = {
    "large": {"width": 512, "context": 256, "blocks": 12, "batch_size": 32},
    "small": {"width": 128, "context": 64, "blocks": 4, "batch_size": 8},
}
FOREIGN = (
    ("cuda:0", "towers blind_models vision decoders encoders sciences torchs_own sequences"),
    ("cuda:0", "blind_habits blind_python python_state buffers control_flow patches calls randomness"),
    ("cuda:0", "blind_tensors inplace written aliases containers outputs"),
    ("cuda:0", "checkpoints hooks backward optimizers training_habits loops"),
    ("cuda:0,cpu", "checkpoints sequences loops"),
)
SIDE_BY_SIDE = 12
TESTS = [
    "tests/assigner/test_ordering.py",
    "tests/assigner/test_profiler_devices.py",
    "tests/assigner/test_recorder.py",
    "tests/assigner/test_device_habits.py",
]


class FailedError(Exception):
    """A part did not end, or not well."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        part: Its letter.
        what: What was looked at.
        found: What was seen.
        wanted: What should be seen; empty: nobody knows.
        ok: Whether it is so; None: nobody can say.
    """

    part: str
    what: str
    found: str
    wanted: str = ""
    ok: bool | None = None

    def line(self) -> str:
        """In Markdown."""
        verdict = {True: "yes", False: "**no**", None: ""}[self.ok]
        cells = (self.part, self.what, self.found, self.wanted, verdict)
        return "| " + " | ".join(each.replace("|", "/").replace("\n", " ") for each in cells) + " |"


@dataclass(frozen=True)
class Bench:
    """Where the parts run, and how long they may.

    Args:
        folder: For profiles, plans and traces.
        until_s: The end, by `time.monotonic`.
        logs: Where what the commands say is kept.
        running: Commands, by the numbers of their processes.
    """

    folder: Path
    until_s: float
    logs: Path | None = None
    running: set[int] = field(default_factory=set)

    def end(self, *_: object) -> None:
        """End with all that was started: a signal's handler."""
        for each in [*self.running]:
            os.killpg(each, signal.SIGKILL)
        os._exit(1)

    def ran(self, *command: str, most_s: float, **variables: str) -> str:
        """What a command has written.

        Raises:
            FailedError: it failed, or did not end in time.
        """
        left = min(most_s, self.until_s - time.monotonic())
        if left <= 0:
            raise FailedError("the time was spent")
        said, begin = self._log(command)
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, text=True, errors="replace", start_new_session=True,
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.running.add(process.pid)
        try:
            process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise FailedError(f"did not end in {left:.0f} s; its last words: {_last(_text_of(said, begin))}") from None
        finally:
            self.running.discard(process.pid)
        text = _text_of(said, begin)
        if process.returncode:
            raise FailedError(f"ended with {process.returncode}: {_last(text)}")
        return text

    def _log(self, command: Sequence[str]) -> tuple[IO[bytes], int]:
        """Where a command writes, and from where on."""
        if self.logs is None:
            said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read, and closed, when the command has ended
        else:
            self.logs.mkdir(parents=True, exist_ok=True)
            said = tempfile.NamedTemporaryFile(dir=self.logs, suffix=".log", delete=False)  # noqa: SIM115 - as above
            said.write(f"{shlex.join(command)}\n".encode())
            said.flush()
        return said, said.tell()

    def assigner(self, *arguments: str | Path, most_s: float) -> str:
        """One command of the program."""
        return self.ran(sys.executable, "-m", "assigner_cli", *map(str, arguments), most_s=most_s)

    def script(self, name: str, *arguments: str, most_s: float, **variables: str) -> Any:
        """What a script of this folder has found: JSON on its last line."""
        text = self.ran(sys.executable, str(HERE / name), *arguments, most_s=most_s, **variables)
        return json.loads(text.strip().splitlines()[-1])

    def read(self, name: str) -> Any:
        """A JSON file of the folder."""
        return json.loads((self.folder / name).read_text())


def _text_of(said: IO[bytes], begin: int) -> str:
    with said:
        said.seek(begin)
        return said.read().decode(errors="replace")


def _last(text: str) -> str:
    """The first error, or the last lines."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?(error:|\w*(Error|Exception):)", line)]
    return " / ".join(errors[:1] or lines[-3:])[-400:]


def tests(bench: Bench) -> Iterator[Row]:
    """The tests that skip without a GPU."""
    try:
        text = bench.ran(sys.executable, "-m", "pytest", "-q", "-m", "gpu", *TESTS, most_s=240.0)
    except FailedError as error:
        yield Row("A", "pytest -m gpu", str(error), "all pass", ok=False)
        return
    yield Row("A", "pytest -m gpu", text.strip().splitlines()[-1], "all pass; those for two GPUs skip", ok=True)


def loading(bench: Bench) -> Iterator[Row]:
    """Whether what a host does waits for a stream that it does not use, as NCCL's kernels would make it wait."""
    for mode in ("LAZY", "EAGER"):
        for what in ("kernel", "matmul", "allocation", "pinned", "given back"):
            found = bench.script("loading.py", what, most_s=40.0, CUDA_MODULE_LOADING=mode)
            said = "waits for the other stream" if found["host_s"] > WAITS_S else "does not wait"
            yield Row("B", f"first {what}, {mode}", f"{found['host_s']:.3f} s of {found['sleep_s']:.1f} s: {said}")


def _trained(bench: Bench, part: str, name: str, what: str) -> Iterator[Row]:
    """A plan's run beside its prediction."""
    plan, trace, steps = (bench.folder / f"{name}{end}" for end in (".plan", ".trace", ".steps"))
    bench.assigner(
        "run", plan, "--", "examples/train.py", "--steps", "40", "--trace", trace, "--json", steps, most_s=120.0
    )
    yield from compared(bench, part, name, what)


def compared(bench: Bench, part: str, name: str, what: str) -> Iterator[Row]:
    """The run of a plan, by its trace and its losses, beside the prediction."""
    plan, trace = bench.folder / f"{name}.plan", bench.folder / f"{name}.trace"
    against = json.loads(bench.assigner("simulate", plan, "--against", trace, "--json", most_s=60.0))
    losses = bench.read(f"{name}.steps")["losses"]
    yield Row(part, f"{what}: loss", f"{losses[0]:.4f} to {losses[-1]:.4f}", "falls", ok=losses[-1] < losses[0])
    step = against["step"]
    yield Row(
        part, f"{what}: step", f"{1e3 * step['measured_s']:.2f} ms, predicted {1e3 * step['predicted_s']:.2f} ms",
        f"within {STEP_WITHIN:.0%}", ok=abs(step["error"]) <= STEP_WITHIN,
    )  # fmt: skip
    for each in against["workers"]:
        seen, said = each["measured_peak_bytes"], each["predicted_peak_bytes"]
        if seen is None or said is None:
            yield Row(part, f"{what}: peak of {each['worker']}", "not told")
            continue
        yield Row(
            part, f"{what}: peak of {each['worker']}", f"{seen / 2**20:.0f} MiB, predicted {said / 2**20:.0f} MiB",
            f"at most {PEAK_UNDER:.0%} more", ok=seen <= said * (1 + PEAK_UNDER),
        )  # fmt: skip


def mixed(bench: Bench) -> Iterator[Row]:
    """A GPU and a CPU: profiled, solved so that both work, trained and compared."""
    profile, plan = bench.folder / "mixed.profile", bench.folder / "mixed.plan"
    bench.assigner(
        "profile", MODEL, "-o", profile, "--workers", "2", "--devices", "cuda:0,cpu", "--threads", "8", "--force-busy",
        most_s=240.0,
    )  # fmt: skip
    bench.assigner("solve", profile, "-o", plan, "--pin", "embed=worker:1", "--pin", "head=worker:0", most_s=60.0)
    yield from _trained(bench, "C", "mixed", "cuda:0 and cpu")


def foreign(bench: Bench) -> Iterator[Row]:
    """Models that nobody here wrote, on a GPU (and a CPU) beside plain torch there."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        judged = [
            (devices, modules, [pool.submit(_judged, bench, devices, module) for module in modules.split()])
            for devices, modules in FOREIGN
        ]
        for devices, modules, waiting in judged:
            lines = [line for each in waiting for line in each.result()]
            bad = [line for line in lines if not line["allowed"]]
            text = ", ".join(f"{count} {kind}" for kind, count in Counter(line["kind"] for line in lines).items())
            what = f"models of tests/foreign on {devices}: {modules}"
            yield Row("G", what, text, "as plain torch there, or refused as on CPUs", ok=not bad)
            for each in bad:
                yield Row("G", each["case"], f"{each['kind']}: {each['words'][:300]}")


def _judged(bench: Bench, devices: str, module: str) -> list[dict[str, Any]]:
    """The verdicts on a module's cases, but for those that plain torch cannot train there."""
    ranks = devices.count(",") + 1
    path = bench.folder / f"{module} {ranks}.json"
    words = ["--only", f"^{module}:", "--devices", devices, "--ranks", str(ranks), "--json", str(path)]
    words += ["--micro-batches", "2", "--remat", "all", "--patience", "60"]
    try:
        bench.ran(sys.executable, "tests/foreign/run.py", *words, most_s=240.0)
    except FailedError as error:  # so it does where a case is not as it should be
        unfinished = {"kind": "unfinished", "case": module, "words": str(error), "allowed": False}
        found = json.loads(path.read_text()) if path.exists() else []
        if not found or "did not end" in str(error):
            found.append(unfinished)
    else:
        found = json.loads(path.read_text())
    return [line for line in found if line["kind"] != "broken"]


def loops(bench: Bench) -> Iterator[Row]:
    """The pipeline's step on one GPU beside a loop by hand."""
    for size, given in LOOPS.items():
        each = bench.script("onegpu.py", "loops", "cuda:0", json.dumps(given), most_s=120.0)
        text = f"{each['ratio']:.3f} ({each['least']:.3f} to {each['most']:.3f}) of {1e3 * each['hand_s']:.2f} ms"
        yield Row("H", f"{size} GPT, 4 micro-batches: step beside one by hand", text)


def through_nccl(bench: Bench) -> Iterator[Row]:
    """A profile and a training through NCCL, by two ranks on one GPU that are made to believe that each has one."""
    profile, plan, steps = (bench.folder / f"apart.{end}" for end in ("profile", "plan", "steps"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start.append("tests/runs/apart.py")
    small = MODEL.replace("blocks=12", "blocks=4")
    bench.ran(
        *start, "-m", "assigner_cli", "profile", small, "-o", str(profile), "--devices", "cuda:0,cuda:0",
        "--force-busy", "--no-check", "--micro-batches", "4", "--max-message", "1048576", most_s=150.0,
    )  # fmt: skip
    for link in bench.read("apart.profile")["links"]:
        ways = f"{link['source']} to {link['target']}"
        yield Row("I", f"link {ways}", link["backend"], "nccl", ok=link["backend"] == "nccl")
    bench.assigner("solve", profile, "-o", plan, "--baseline", "equal", most_s=60.0)
    bench.ran(
        *start, "examples/train.py", "--plan", str(plan), "--steps", "20", "--json", str(steps), most_s=90.0
    )  # fmt: skip
    losses = bench.read("apart.steps")["losses"]
    yield Row("I", "loss", f"{losses[0]:.4f} to {losses[-1]:.4f}", "falls", ok=losses[-1] < losses[0])


def shared(bench: Bench) -> Iterator[Row]:
    """Two ranks on one GPU."""
    profile, plan = bench.folder / "shared.profile", bench.folder / "shared.plan"
    bench.assigner(
        "profile", MODEL, "-o", profile, "--workers", "2", "--devices", "cuda:0,cuda:0", "--threads", "4",
        "--force-busy", most_s=240.0,
    )  # fmt: skip
    bench.assigner("solve", profile, "-o", plan, "--baseline", "equal", most_s=60.0)
    for link in bench.read("shared.profile")["links"]:
        busy = f"sender {link['sender_busy']:.2f}, receiver {link['receiver_busy']:.2f}, by {link['backend']}"
        fits = link["backend"] == "gloo" and max(link["sender_busy"], link["receiver_busy"]) < 1
        yield Row("D", f"busy shares {link['source']} to {link['target']}", busy, "gloo, below 1", ok=fits)
    yield from _trained(bench, "D", "shared", "two ranks on cuda:0")


def waits(bench: Bench) -> Iterator[Row]:
    """What a step's host waits for its GPU for."""
    found = bench.script("onegpu.py", "waits", "cuda:0", most_s=90.0)
    yield Row("E", "waits of a step of 4 micro-batches", str(found["waits"]), "at most 4", ok=found["waits"] <= 4)
    for place, count in sorted(found["places"].items(), key=lambda each: -each[1])[:5]:
        yield Row("E", f"of these in {place}", str(count))


def precision_and_memory(bench: Bench) -> Iterator[Row]:
    """Rematerialisation's memory, other precisions, and a checkpoint that leaves the GPU."""
    peaks = bench.script("onegpu.py", "remat", "cuda:0", json.dumps(LOOPS["large"]), most_s=120.0)["peaks"]
    text = ", ".join(f"{mode} {size / 2**20:.1f} MiB" for mode, size in peaks.items())
    falls = peaks["never"] >= peaks["except_last"] >= peaks["always"] and peaks["never"] > peaks["always"]
    yield Row("F", "peak by remat", text, "never, then except_last, then always", ok=falls)
    for precision in ("bfloat16", "float16"):
        losses = bench.script("onegpu.py", precision, "cuda:0", most_s=60.0)["losses"]
        yield Row(
            "F", f"autocast {precision}", f"{losses[0]:.4f} to {losses[-1]:.4f}", "falls", ok=losses[-1] < losses[0]
        )
    found = bench.script("onegpu.py", "checkpoint", "cuda:0", most_s=60.0)
    close = abs(found["cpu"] - found["device"]) < 1e-9
    yield Row(
        "F", "checkpoint of cuda:0 on cpu: loss", f"{found['device']:.10f}, {found['cpu']:.10f}", "equal", ok=close
    )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "A": tests,
    "B": loading,
    "C": mixed,
    "D": shared,
    "E": waits,
    "F": precision_and_memory,
    "G": foreign,
    "H": loops,
    "I": through_nccl,
}
TIMED = "CDH"


def has_gpu() -> bool:
    """Whether torch is here and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def install_wheels() -> None:
    """Make what was carried in `.whl` importable here and in what is started here."""
    wheels = sorted(WHEELS.glob("*.whl"))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    site = Path(tempfile.mkdtemp(prefix="assigner-gpu-"))
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
        subprocess.run([*pip, str(site), *map(str, wheels)], check=True)
    (site / "assigner_cli").symlink_to(ROOT / "cli")  # as an installation has it
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *paths])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def rows_of(bench: Bench, part: str) -> list[Row]:
    """What a part has found, up to where it failed; each row is printed."""
    rows = list[Row]()
    begun = time.monotonic()
    try:
        for row in PARTS[part](bench):
            print(row.line(), flush=True)
            rows.append(row)
    except Exception as error:  # noqa: BLE001 - what the other parts find must stay
        found = str(error) if isinstance(error, FailedError) else repr(error)
        rows.append(Row(part, PARTS[part].__doc__ or "", found, "an end", ok=False))
        print(rows[-1].line(), flush=True)
    print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def all_rows(bench: Bench, parts: str) -> Iterator[list[Row]]:
    """Of each part, as it ends."""
    for part in parts:
        if part in TIMED:
            yield rows_of(bench, part)
    with ThreadPoolExecutor(len(PARTS)) as pool:
        for ended in as_completed([pool.submit(rows_of, bench, part) for part in parts if part not in TIMED]):
            yield ended.result()


def written(rows: list[Row], begun_s: float, *, ended: bool) -> str:
    """The table, with where and when it was made."""
    import torch

    where = (
        f"{torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} visible; torch {torch.__version__}, Python"
        f" {platform.python_version()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC;"
        f" {time.monotonic() - begun_s:.0f} s."
    )
    facts = [
        where,
        "" if ended else "\nNot all parts have ended: what is missing below was not run.\n",
        "| part | what | found | wanted | so |",
        "| --- | --- | --- | --- | --- |",
        *(row.line() for row in sorted(rows, key=lambda row: row.part)),
    ]
    return "# What a GPU said\n\nMade by `make gpu`, see README.md.\n\n" + "\n".join(facts) + "\n"


def main() -> int:
    """Run the parts, or say what they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="".join(PARTS), help="letters of the parts to run, in this order")
    parser.add_argument("--logs", type=Path, help="keep what each command says in files here")
    parser.add_argument("--files", type=Path, help="keep profiles, plans and traces in this folder, which is there")
    options = parser.parse_args()
    parts = options.parts
    if strange := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: there is no part {strange[0]!r}; they are {', '.join(PARTS)}")
    if not has_gpu():
        print("skipped: torch sees no CUDA device here. Nothing was run, and nothing was written. On one it would run:")
        for part in parts:
            print(f"  {part}  {PARTS[part].__doc__}")
        print(f"and write {RESULT.relative_to(ROOT)}, in {LIMIT_S / 60:.0f} minutes at most.")
        return 0
    install_wheels()
    begun, rows = time.monotonic(), list[Row]()
    with contextlib.ExitStack() as stack:
        folder = options.files or stack.enter_context(tempfile.TemporaryDirectory())
        bench = Bench(Path(folder), begun + LIMIT_S, options.logs)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, bench.end)
        for n, found in enumerate(all_rows(bench, parts), 1):
            rows += found
            RESULT.write_text(written(rows, begun, ended=n == len(parts)), encoding="utf-8")
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
