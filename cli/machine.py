"""Looks at this machine for `assigner doctor`, without importing torch or PuLP into this process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.cgroup import core_limit, memory_limit
from assigner.report.machine import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK_TORCH = """
import json, torch, torch.distributed as d
here = d.is_available()
print(json.dumps({
    "backends": [name for name in ("gloo", "nccl", "mpi") if here and getattr(d, f"is_{name}_available")()],
    "cuda": torch.version.cuda,
    "devices": [[torch.cuda.get_device_name(n), torch.cuda.get_device_properties(n).total_memory]
                for n in range(torch.cuda.device_count())],
}))
"""
TORCH_WAIT_S = 120


def examine() -> list[Finding]:
    """Everything that `doctor` reports, in its order."""
    return [_python(), *_packages(), _cbc(), _cores(), _memory(), *_accelerators(), _lab()]


def _python() -> Finding:
    found = platform.python_version()
    return Finding("python", "ok", f"{found} ({platform.system()} {platform.machine()})", value=found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    uses = {
        "torch": ("torch", "profile and run need it"),
        "PuLP": ("pulp", "solve needs it"),
        "HiGHS": ("highspy", "solve --solver highs needs it"),
    }
    for name, (package, use) in uses.items():
        found = _version(package)
        if found is None:
            yield Finding(name, "missing", f"not installed; {use}", f"pip install {package}")
        else:
            yield Finding(name, "ok", found, value=found)


def _cbc() -> Finding:
    """CBC comes inside PuLP for the common platforms; elsewhere it is a program on the path."""
    spec = find_spec("pulp")
    places = spec.submodule_search_locations if spec else None
    system = {"linux": "linux", "darwin": "osx", "win32": "win"}.get(sys.platform, sys.platform)
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") and system == "linux" else "i64"
    bundled = [Path(place, "solverdir", "cbc", system, machine, "cbc") for place in places or ()]
    found = next((str(path) for path in bundled if os.access(path, os.X_OK)), None) or shutil.which("cbc")
    if found is None:
        return Finding("CBC", "note", "not found; solve --solver highs works without", "apt install coinor-cbc")
    return Finding("CBC", "ok", "with PuLP" if "solverdir" in found else found, value=found)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit, text = core_limit(), fmt.plural(usable, "core")
    if limit is not None and limit < usable:
        text += f", limited to {limit:.1f} by a control group"
    return Finding("processor", "ok", text, value={"cores": usable, "limit": limit})


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limit = memory_limit()
    text = "unknown" if total is None else fmt.size(total)
    if limit is not None and (total is None or limit < total):
        text += f", limited to {fmt.size(limit)} by a control group"
    return Finding("memory", "ok", text, value={"total_bytes": total, "limit_bytes": limit})


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


def _ask_torch() -> dict[str, Any] | None:
    if _version("torch") is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_WAIT_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def _accelerators() -> Iterator[Finding]:
    answer = _ask_torch()
    smi = _nvidia_smi()
    if answer is None:
        if _version("torch") is not None:
            yield Finding(
                "torch start", "missing", "torch is installed and does not start", "pip install --force-reinstall torch"
            )
        detail = ", ".join(smi) if smi else "none found"
        yield Finding("accelerators", "note", detail, value=smi)
        return
    devices = answer["devices"]
    if devices:
        text = ", ".join(f"{name} ({fmt.size(size)})" for name, size in devices)
        yield Finding("accelerators", "ok", text, value=devices)
    elif smi:
        yield Finding(
            "accelerators", "note", f"{', '.join(smi)}, which torch does not see",
            "install a torch built for CUDA: https://pytorch.org/get-started/locally", [],
        )  # fmt: skip
    else:
        yield Finding("accelerators", "ok", "none; workers are CPU processes", value=[])
    backends = answer["backends"]
    if "gloo" in backends:
        yield Finding("backends", "ok", ", ".join(backends), value=backends)
    else:
        yield Finding("backends", "missing", ", ".join(backends) or "none", "install a torch built with gloo", backends)


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
