"""The cluster file, as TOML: hosts that are not alike, and the wires between them; what they ask beyond this machine.

One declaration reads and checks it, as for the other formats; here an unknown field is an error too, since the file is
written by hand and a misspelt limit would be no limit.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.files import parse_toml, read_text
from assigner.formats.document import Count, Range, check_unique, decode, unknown_fields
from assigner.machine.cgroup import allowed_cores, free_memory
from assigner.machine.kernel import processor_model

if TYPE_CHECKING:
    from assigner.lab.derive import Derived, DerivedField

MOST_HOSTS = 250
HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # without a letter it is an address
_WIDTH = 110  # of the comments in a file that is written
_MIB = 1 << 20

Cores = Annotated[float, Range(0.01, 4096)]
MebiBytes = Annotated[float, Range(1, 1 << 40)]
Megabits = Annotated[float, Range(0.1, 1e6)]
Milliseconds = Annotated[float, Range(0, 10_000)]


@dataclass(frozen=True)
class Host:
    """One host of a cluster.

    Args:
        name: Its name in the output, in a profile and in a plan's pins; left out: h0, h1, ...
        nproc: Processes (ranks) on it.
        cpu: Cores that all its processes share; None: no limit.
        memory_mib: Memory of all its processes in MiB; beyond it the kernel kills one. None: no limit.
        rack: Hosts of one rack share a switch.
        bandwidth_mbit: Of its wire, in each direction, in Mbit/s; None: as fast as this machine.
        latency_ms: Added to what it sends, in ms.
    """

    name: str = ""
    nproc: Count = 1
    cpu: Cores | None = None
    memory_mib: MebiBytes | None = None
    rack: str = ""
    bandwidth_mbit: Megabits | None = None
    latency_ms: Milliseconds = 0.0


@dataclass(frozen=True)
class RackLink:
    """The wire from each rack's switch to the others.

    Args:
        bandwidth_mbit: In each direction, in Mbit/s; None: as fast as this machine.
        latency_ms: One way between two racks, in ms.
    """

    bandwidth_mbit: Megabits | None = None
    latency_ms: Milliseconds = 0.0


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of their ranks, and the wire between their racks.

    Raises:
        FormatError: no host, too many, two of one name, or a name that a host cannot have.
    """

    host: tuple[Host, ...]
    rack_link: RackLink = RackLink()

    def __post_init__(self) -> None:
        if not 0 < len(self.host) <= MOST_HOSTS:
            raise FormatError(f"host: {len(self.host)} of them; a cluster has 1 to {MOST_HOSTS}")
        check_unique([host.name for host in self.host], "host[{}].name")
        for n, host in enumerate(self.host):
            if not HOST_NAME.fullmatch(host.name) or host.name.lower() == "localhost":
                raise FormatError(
                    f"host[{n}].name: {host.name!r} is not allowed; expected up to 63 letters, digits, '-', '_' and '.'"
                    ", at least one letter, and another name than localhost"
                )

    @property
    def racks(self) -> tuple[str, ...]:
        """The racks' names, each once."""
        return tuple(dict.fromkeys(host.rack for host in self.host))

    @property
    def has_latency(self) -> bool:
        """True if any wire adds latency."""
        between_racks = self.rack_link.latency_ms > 0 and len(self.racks) > 1
        return between_racks or any(host.latency_ms > 0 for host in self.host)


def load_cluster(path: Path | str) -> Cluster:
    """Read and check a cluster file.

    Raises:
        UsageError: the file cannot be read.
        FormatError: it is not a sound cluster; the message names file, place, value and what is allowed.
    """
    path = Path(path)
    text = read_text(path, hint="examples/clusters/ has cluster files to start from")
    try:
        return parse_cluster(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error


def parse_cluster(text: str) -> Cluster:
    """A cluster from the text of its file.

    Raises:
        FormatError: as `load_cluster`, without the file's name.
    """
    document = parse_toml(text)
    for where, name, known in unknown_fields(Cluster, document):
        near = get_close_matches(name, known, n=1)
        raise FormatError(
            f"{where}: unknown; a cluster file has {', '.join(known)} here",
            hint=f"did you mean {near[0]}?" if near else "examples/clusters/README.md lists the fields",
        )
    hosts = document.get("host")
    for n, host in enumerate(hosts if isinstance(hosts, list) else ()):
        if isinstance(host, dict) and host.get("name", "") == "":
            host["name"] = f"h{n}"
    if hosts is None:
        raise FormatError("host: missing", hint="each host is a table: [[host]], then its fields")
    found: Cluster = decode(Cluster, document)
    return found


@dataclass(frozen=True)
class Machine:
    """This machine, as far as this process may use it: what is free, or what a control group leaves."""

    cores: float
    memory_bytes: float
    processor: str

    @classmethod
    def here(cls) -> Machine:
        """The machine that this process runs on."""
        return cls(allowed_cores(), free_memory(), processor_model())


def strains(cluster: Cluster, machine: Machine) -> list[str]:
    """A sentence for each thing of which the hosts together want more than there is.

    Hosts that slow each other down tell nothing about plans.
    """
    found = []
    wanted = sum(host.nproc if host.cpu is None else host.cpu for host in cluster.host)
    if wanted > machine.cores:
        found.append(
            f"the hosts want {wanted:.2f} cores together and this machine has {machine.cores:.2f}:"
            " they will slow each other down, and no figure holds"
        )
    limits = sum((host.memory_mib or 0.0) * _MIB for host in cluster.host)
    if limits > machine.memory_bytes:
        found.append(
            f"the hosts' memory limits are {fmt.size(limits)} together and this machine has"
            f" {fmt.size(machine.memory_bytes)} free: it may run out before a host does"
        )
    return found


def cluster_text(derived: Derived, source: str) -> str:
    """A derived cluster as the text of a cluster file: each number with a comment that says where it comes from.

    The first line names the source, the command that made it.
    """
    source = fmt.printable(source).replace("\n", "\\n")  # a comment is one line of UTF-8
    notes = [line for note in derived.notes for line in textwrap.wrap(note, _WIDTH)]
    blocks = ["\n".join(f"# {line}" for line in (f"Made by: {source}", *notes))]
    blocks += [_table("[[host]]", host) for host in derived.hosts]
    if derived.rack_link:
        blocks.append(_table("[rack_link]", derived.rack_link))
    return "\n\n".join(blocks) + "\n"


def _table(head: str, fields: dict[str, DerivedField]) -> str:
    lines = [head]
    for name, setting in fields.items():
        comment = f"  # {setting.comment}" if setting.comment else ""
        if setting.value is None:
            lines.append(f"# {name}: {setting.comment}")
        else:
            value = json.dumps(setting.value) if isinstance(setting.value, str) else f"{setting.value:.6g}"
            lines.append(f"{name} = {value}{comment}")
    return "\n".join(lines)
