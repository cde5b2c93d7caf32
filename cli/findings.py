"""What a machine has for measuring, solving and training, and how to get what is missing: for `assigner doctor`.

It looks at the machine, and at Python, the packages that assigner needs, its solvers, and what else it can use, without
importing torch or PuLP into this process.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.machine.cgroup import allowed_cores, core_limit, free_memory, memory_limit
from assigner.machine.kernel import usable_cores
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Group = Literal["needed", "machine", "optional"]
_TITLES: dict[Group, str] = {"needed": "what assigner needs", "machine": "this machine", "optional": "optional"}

ASK_TORCH = """
import json, torch, torch.distributed as d
here = d.is_available()
backends = [name for name in ("gloo", "nccl") if here and getattr(d, f"is_{name}_available")()]
cuda = torch.cuda
def free(n):
    try:
        return cuda.mem_get_info(n)[0]
    except RuntimeError:  # another process has it for itself
        return None
devices = [[cuda.get_device_name(n), cuda.get_device_properties(n).total_memory, free(n)]
           for n in range(cuda.device_count())]
print(json.dumps({
    "backends": backends,
    "cuda": torch.version.cuda,
    "threads": torch.get_num_threads(),
    "nccl": ".".join(map(str, cuda.nccl.version())) if "nccl" in backends and devices else None,
    "devices": devices,
}))
"""
TORCH_WAIT_S = 120

ASK_SOLVERS = """
import json, pulp
found = {}
for name, make in (("HiGHS", pulp.HiGHS), ("CBC", pulp.PULP_CBC_CMD)):
    try:
        problem, x = pulp.LpProblem("try", pulp.LpMaximize), pulp.LpVariable("x", 0, 9, "Integer")
        problem += x
        problem += 2 * x <= 5
        problem.solve(make(msg=False))
        found[name] = "" if x.value() == 2 else f"it says {x.value()} where 2 is right"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
"""Has each solver solve a problem of one variable, whose optimum is 2."""

_BOUND = re.compile(r"(>=|<|==)\s*([\d.]+)")


_EXTRAS = (
    ("transformers", "", "Hugging Face models", "pip install transformers"),
    ("accelerate", "", "takes what export --to device-map writes", "pip install accelerate"),
    ("torchgpipe", "", "takes what export --to torchgpipe writes", "pip install torchgpipe"),
    ("Graphviz", "dot", "draws what export --to dot writes", "apt-get (or brew) install graphviz"),
    ("mpi4py", "", "carries messages where the backend is mpi", "pip install 'mpi4py>=4'"),
    ("MPI launcher", "mpirun", "another way to start ranks", "apt-get install openmpi-bin"),
)
"""What something optional needs: a package, or what has a program, with the program; what for, and how to get it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    `absent`: not here, and nothing needs it; `note`: worth knowing; `missing`: something cannot be done without it. The
    remedy is how to get it, and empty where nothing is missing; `value` is the detail as a plain value, for `--json`.
    """

    what: str
    state: Literal["ok", "absent", "note", "missing"]
    detail: str
    remedy: str = ""
    value: Any = None
    group: Group = "needed"


def examine() -> list[Finding]:
    """Everything that `doctor` reports, in its order."""
    torch, solvers = _ask("torch", ASK_TORCH), _ask("pulp", ASK_SOLVERS)
    groups: dict[Group, Iterable[Finding]] = {
        "needed": _programs(torch, solvers),
        "machine": (_cores(), _threads(torch), _memory(), *_accelerators(torch), *_backends(torch), _lab()),
        "optional": _extras(),
    }
    return [replace(each, group=group) for group, found in groups.items() for each in found]


def _ask(package: str, code: str) -> dict[str, Any] | None:
    """What a short program prints, run by this interpreter; None: it failed, or lacks its package."""
    if installed(package) is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_WAIT_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def _cores() -> Finding:
    usable = usable_cores()
    limit, text = core_limit(), fmt.plural(usable, "core")
    if limit is not None and limit < usable:
        text += f", limited to {limit:.1f} by a control group"
    return Finding("processor", "ok", text, value={"cores": usable, "limit": limit})


def _threads(torch: dict[str, Any] | None) -> Finding:
    """Compute threads that torch takes by itself; more of them than cores slow each other down."""
    asked, cores = os.environ.get("OMP_NUM_THREADS"), max(1, int(allowed_cores()))
    if torch is None:
        return Finding("threads", "note", "unknown; torch does not start")
    found = torch["threads"]
    text = f"{found} in a process" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    value = {"torch": found, "OMP_NUM_THREADS": asked}
    if found > cores:
        why = f"{text}, where {fmt.plural(cores, 'core')} may be used"
        return Finding("threads", "note", why, f"export OMP_NUM_THREADS={cores}", value)
    return Finding("threads", "ok", f"{text}; profile and plans set their own", value=value)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limit, free = memory_limit(), free_memory()
    text = "unknown" if total is None else fmt.size(total)
    if limit is not None and (total is None or limit < total):
        text += f", limited to {fmt.size(limit)} by a control group"
    text += f"; {fmt.size(free)} free"
    value = {"total_bytes": total, "limit_bytes": limit, "free_bytes": free}
    return Finding("memory", "ok", text, value=value)


def _accelerators(torch: dict[str, Any] | None) -> Iterator[Finding]:
    smi = _nvidia_smi()
    if torch is None:
        yield Finding("accelerators", "note", ", ".join(smi) or "none found", value=smi)
        return
    devices = torch["devices"]
    if devices:
        for n, (name, size, free) in enumerate(devices):
            text = f"{name}, {fmt.size(size)}, " + ("in use" if free is None else f"{fmt.size(free)} free")
            yield Finding(f"cuda:{n}", "ok", text, value={"name": name, "bytes": size, "free_bytes": free})
    elif smi:
        remedy = "install a torch built for CUDA: https://pytorch.org/get-started/locally"
        yield Finding("accelerators", "note", f"{', '.join(smi)}, which torch does not see", remedy, [])
    else:
        yield Finding("accelerators", "ok", "none; workers are CPU processes", value=[])


def _backends(torch: dict[str, Any] | None) -> Iterator[Finding]:
    """What carries messages between ranks: gloo is needed, NCCL where there are GPUs."""
    if torch is None:
        return
    has = torch["backends"]
    if "gloo" in has:
        yield Finding("gloo", "ok", "carries messages between CPUs", value=True)
    else:
        remedy = "install a torch built with gloo, as PyTorch's own wheels are"
        yield Finding("gloo", "missing", "this torch was built without; profile and run need it", remedy, False)
    if "nccl" in has:
        text = torch["nccl"] or "no GPU to carry messages between"
        yield Finding("NCCL", "ok", text, value=torch["nccl"] or True)
    elif torch["devices"]:
        remedy = "install a torch built with NCCL"
        yield Finding("NCCL", "note", "not in this torch; messages of GPUs go through the CPU", remedy, False)
    else:
        yield Finding("NCCL", "absent", "not in this torch; between GPUs only", value=False)


def _lab() -> Finding:
    """What `assigner lab` needs and nothing else does."""
    from assigner.lab import lacks

    found = lacks()
    value = [lack.feature for lack in found]
    if not found:
        return Finding("lab", "ok", "makes clusters of unlike hosts", value=value)
    if all(lack.feature == "latency" for lack in found):
        return Finding("lab", "ok", "makes clusters of unlike hosts, without latency_ms", value=value)
    detail = f"assigner lab lacks {'; '.join(lack.what for lack in found)}"
    return Finding("lab", "note", detail, "; ".join(dict.fromkeys(lack.remedy for lack in found)), value)


def _nvidia_smi() -> list[str]:
    """Names of the accelerators that the driver lists."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 - the driver's own tool
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def installed(package: str) -> str | None:
    """A package's version; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _programs(torch: dict[str, Any] | None, solvers: dict[str, Any] | None) -> Iterator[Finding]:
    """Python, what assigner cannot do without, and the solvers, each with why it does not solve; None: nobody knows."""
    here = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield Finding("python", "ok", here, value=platform.python_version())
    yield Finding("assigner", "ok", installed("assigner") or "not installed as a package", value=installed("assigner"))
    uses = {"torch": "profile and run need it", "PuLP": "solve needs it", "HiGHS": "solve needs it"}
    for name, use in uses.items():
        package = {"PuLP": "pulp", "HiGHS": "highspy"}.get(name, name)
        yield _needed(name, package, use, (solvers or {}).get(name, ""))
    yield _cbc((solvers or {}).get("CBC", ""))
    if torch is None and installed("torch") is not None:
        remedy = "pip install --force-reinstall torch"
        yield Finding("torch start", "missing", "torch is installed and does not start", remedy)


def _needed(name: str, package: str, use: str, failure: str) -> Finding:
    found, wanted = installed(package), _wanted(package)
    remedy = f"pip install '{package}{wanted}'"
    if found is None:
        return Finding(name, "missing", f"not installed; {use}", remedy)
    if not _within(found, wanted):
        return Finding(name, "missing", f"{found}, where {wanted} is needed", remedy, found)
    if failure:
        return Finding(
            name, "missing", f"{found} does not work: {failure}", f"pip install --force-reinstall {package}", found
        )
    return Finding(name, "ok", found, value=found)


def _wanted(package: str) -> str:
    """The versions that assigner asks for, as its own metadata has them: `>=2.10,<2.16`."""
    try:
        lines = requires("assigner") or []
    except PackageNotFoundError:  # run from a folder that is not installed
        return ""
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\s*([^;]*)", line)  # those of extras have a marker behind a `;`
        if match and match[1].lower() == package:
            return ",".join(sorted(match[2].replace(" ", "").split(","), reverse=True))
    return ""


def _within(found: str, wanted: str) -> bool:
    mine = _numbers(found)
    for sign, bound in _BOUND.findall(wanted):
        other = _numbers(bound)
        if not {">=": mine >= other, "<": mine < other, "==": mine[: len(other)] == other}[sign]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    leading = re.match(r"[\d.]+", text)
    return tuple(int(part) for part in leading[0].strip(".").split(".")) if leading else ()


def _cbc(failure: str) -> Finding:
    """CBC comes inside PuLP for the common platforms; elsewhere it is a program on the path."""
    spec = find_spec("pulp")
    places = spec.submodule_search_locations if spec else None
    system = {"linux": "linux", "darwin": "osx", "win32": "win"}.get(sys.platform, sys.platform)
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") and system == "linux" else "i64"
    bundled = [Path(place, "solverdir", "cbc", system, machine, "cbc") for place in places or ()]
    found = next((str(path) for path in bundled if os.access(path, os.X_OK)), None) or shutil.which("cbc")
    if found is None:
        return Finding("CBC", "note", "not found; HiGHS does without", "apt-get install coinor-cbc")
    if failure:
        return Finding(
            "CBC", "note", f"does not work: {failure}; HiGHS does without", "apt-get install coinor-cbc", found
        )
    return Finding("CBC", "ok", "with PuLP" if "solverdir" in found else found, value=found)


def _extras() -> Iterator[Finding]:
    """What something optional needs."""
    for name, program, use, remedy in _EXTRAS:
        found = shutil.which(program) if program else installed(name)
        if found is None:
            yield Finding(name, "absent", use, remedy)
        else:
            yield Finding(name, "ok", f"{found}; {use}", value=found)


def doctor_report(findings: Sequence[Finding]) -> Report:
    """What `assigner doctor` prints: a table a group, how to get what is not here, and a verdict."""
    missing = ", ".join(each.what for each in findings if each.state == "missing")
    ready = Line("ready to profile, solve and train", "strong")
    return (*_sheets(findings), *_remedies(findings), Line(f"missing: {missing}", "warning") if missing else ready)


def _sheets(findings: Sequence[Finding]) -> Iterator[Sheet]:
    width = max((len(each.what) for each in findings), default=0)
    for group, title in _TITLES.items():
        mine = [each for each in findings if each.group == group]
        if mine:
            rows = tuple((each.what.ljust(width), each.state.ljust(len("missing")), each.detail) for each in mine)
            marked = frozenset(n for n, each in enumerate(mine) if each.state == "missing")
            yield Sheet(title, (Column("", "name"), Column("state", "name"), Column("found", "text")), rows, marked)


def _remedies(findings: Sequence[Finding]) -> Iterator[Line]:
    """What must or should be done, then what can be."""
    for each in sorted(findings, key=lambda each: each.state == "absent"):
        if each.remedy:
            yield Line(f"{each.what}: {each.remedy}", "plain" if each.state == "absent" else "warning")


def is_ready(findings: Sequence[Finding]) -> bool:
    """True if nothing is missing that something needs."""
    return all(each.state != "missing" for each in findings)


def doctor_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for `--json`."""
    return {"kind": "doctor", "ready": is_ready(findings), "findings": [encode(each) for each in findings]}
