"""`assigner check`: is a model that is cut into partitions still the model that it was?"""

from typing import TYPE_CHECKING, Annotated

import typer

from . import completion, console
from .options import Json

if TYPE_CHECKING:
    from assigner.formats.profile import Verification
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload


def check_command(
    workload: Annotated[str, completion.WORKLOAD],
    *,
    mark: Annotated[
        list[str] | None,
        typer.Option(help="Name pattern of partitions, as in profile. Repeatable."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; else as torch likes.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a model's partitions with the model as it is.

    Both train for two steps on a few rows, on this machine's CPU: the partitions apart from each other, with and
    without rematerialisation. Losses, gradients, buffers, parameters and outputs are equal, or the exit code is 2 and
    the first one that differs is named, with the partition or line where that begins. Of a model too large for that
    forwards alone are compared; one that differs from itself cannot be: it says so. profile does the same first.
    """
    import torch

    from assigner.model.marking import partition_graph
    from assigner.model.workload import load_workload
    from assigner.report.profile import verification_data, verification_report

    if threads is not None:
        torch.set_num_threads(threads)
    with console.prints_aside():
        made = load_workload(workload)
        with console.under_way("looking for the model's partitions"):
            graph = partition_graph(made, tuple(mark or ()) or None)
        found = compared(made, graph)
    if as_json:
        console.show_json(verification_data(found, workload))
    else:
        console.show(verification_report(found, workload))


def compared(workload: "Workload", graph: "PartitionGraph") -> "Verification":
    """The check, with a word on a terminal that it is under way; raises as `check_model`."""
    from assigner.verification.checking import check_model

    with console.under_way("comparing the partitions with the model as it is"):
        return check_model(workload, graph)
