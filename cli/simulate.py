"""`assigner simulate`: a plan priced anew from a profile."""

from pathlib import Path
from typing import Annotated

import typer

from . import console
from .options import Json, PlanFile


def simulate_command(
    plan: PlanFile,
    *,
    profile: Annotated[
        Path,
        typer.Option("--profile", metavar="PROFILE", help="The measurements to price it with.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """Price a plan with a profile, and say whether it fits."""
    from assigner.plan import load_plan
    from assigner.profile import load_profile
    from assigner.report.prediction import prediction_data, prediction_report
    from assigner.simulate import predict

    found = load_plan(plan)
    now = predict(found, load_profile(profile))
    if as_json:
        console.show_json(prediction_data(found, now))
    else:
        console.show(prediction_report(found, now))
