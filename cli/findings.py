"""Looks at this machine for `assigner doctor`, without importing torch or PuLP into this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.machine.cgroup import core_limit, free_memory, memory_limit
from assigner.machine.kernel import usable_cores
from assigner.report.doctor import Finding

from .packages import ASK_SOLVERS, extras, installed, programs

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def examine() -> list[Finding]:
    """Everything that `doctor` reports, in its order."""
    torch, solvers = _ask_torch(), _ask_solvers()
    here = (_cores(), _threads(torch), _memory(), *_accelerators(torch), *_backends(torch), _lab())
    return [*programs(solvers), *here, *extras()]


def _ask(code: str) -> dict[str, Any] | None:
    """What a short program prints, run by this interpreter; None: it failed."""
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_WAIT_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def _ask_torch() -> dict[str, Any] | None:
    return None if installed("torch") is None else _ask(ASK_TORCH)


def _ask_solvers() -> dict[str, Any] | None:
    return None if installed("pulp") is None else _ask(ASK_SOLVERS)


def _cores() -> Finding:
    usable = usable_cores()
    limit, text = core_limit(), fmt.plural(usable, "core")
    if limit is not None and limit < usable:
        text += f", limited to {limit:.1f} by a control group"
    return Finding("processor", "ok", text, value={"cores": usable, "limit": limit}, group="machine")


def _threads(torch: dict[str, Any] | None) -> Finding:
    """Compute threads that torch takes by itself; more of them than cores slow each other down."""
    limit, asked = core_limit(), os.environ.get("OMP_NUM_THREADS")
    cores = max(1, int(min(usable_cores(), limit if limit is not None else usable_cores())))
    if torch is None:
        return Finding("threads", "note", "unknown; torch does not start", group="machine")
    found = torch["threads"]
    text = f"{found} in a process" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    value = {"torch": found, "OMP_NUM_THREADS": asked}
    if found > cores:
        why = f"{text}, where {fmt.plural(cores, 'core')} may be used"
        return Finding("threads", "note", why, f"export OMP_NUM_THREADS={cores}", value, "machine")
    return Finding("threads", "ok", f"{text}; profile and plans set their own", value=value, group="machine")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limit, free = memory_limit(), free_memory()
    text = "unknown" if total is None else fmt.size(total)
    if limit is not None and (total is None or limit < total):
        text += f", limited to {fmt.size(limit)} by a control group"
    text += f"; {fmt.size(free)} free"
    value = {"total_bytes": total, "limit_bytes": limit, "free_bytes": free}
    return Finding("memory", "ok", text, value=value, group="machine")


def _accelerators(torch: dict[str, Any] | None) -> Iterator[Finding]:
    smi = _nvidia_smi()
    if torch is None:
        if installed("torch") is not None:
            yield Finding(
                "torch start", "missing", "torch is installed and does not start", "pip install --force-reinstall torch"
            )
        yield Finding("accelerators", "note", ", ".join(smi) or "none found", value=smi, group="machine")
        return
    devices = torch["devices"]
    if devices:
        for n, (name, size, free) in enumerate(devices):
            text = f"{name}, {fmt.size(size)}, " + ("in use" if free is None else f"{fmt.size(free)} free")
            yield Finding(
                f"cuda:{n}", "ok", text, value={"name": name, "bytes": size, "free_bytes": free}, group="machine"
            )
    elif smi:
        yield Finding(
            "accelerators", "note", f"{', '.join(smi)}, which torch does not see",
            "install a torch built for CUDA: https://pytorch.org/get-started/locally", [], "machine",
        )  # fmt: skip
    else:
        yield Finding("accelerators", "ok", "none; workers are CPU processes", value=[], group="machine")


def _backends(torch: dict[str, Any] | None) -> Iterator[Finding]:
    """What carries messages between ranks: gloo is needed, NCCL where there are GPUs."""
    if torch is None:
        return
    has = torch["backends"]
    if "gloo" in has:
        yield Finding("gloo", "ok", "carries messages between CPUs", value=True, group="machine")
    else:
        remedy = "install a torch built with gloo, as PyTorch's own wheels are"
        yield Finding(
            "gloo", "missing", "this torch was built without; profile and run need it", remedy, False, "machine"
        )
    if "nccl" in has:
        text = torch["nccl"] or "no GPU to carry messages between"
        yield Finding("NCCL", "ok", text, value=torch["nccl"] or True, group="machine")
    elif torch["devices"]:
        remedy = "install a torch built with NCCL"
        yield Finding(
            "NCCL", "note", "not in this torch; messages of GPUs go through the CPU", remedy, False, "machine"
        )
    else:
        yield Finding("NCCL", "absent", "not in this torch; between GPUs only", value=False, group="machine")


def _lab() -> Finding:
    """What `assigner lab` needs and nothing else does."""
    from assigner.lab import lacks

    found = lacks()
    value = [lack.feature for lack in found]
    if not found:
        return Finding("lab", "ok", "makes clusters of unlike hosts", value=value, group="machine")
    if all(lack.feature == "latency" for lack in found):
        return Finding("lab", "ok", "makes clusters of unlike hosts, without latency_ms", value=value, group="machine")
    detail = f"assigner lab lacks {'; '.join(lack.what for lack in found)}"
    return Finding("lab", "note", detail, "; ".join(dict.fromkeys(lack.remedy for lack in found)), value, "machine")


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
