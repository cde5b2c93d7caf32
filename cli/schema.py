"""`assigner schema`: the JSON Schemas of the two file formats."""

from typing import Annotated, Any, Literal

import typer

from . import console


def schema_command(
    kind: Annotated[
        Literal["profile", "plan"], typer.Argument(metavar="KIND", help="profile or plan.", show_default=False)
    ],
) -> None:
    """Print the JSON Schema of a file format."""
    console.show_json(json_schema(kind))


def json_schema(kind: Literal["profile", "plan"]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of profile or plan files, with the head that every file has."""
    from assigner import plan, profile
    from assigner.document import schema

    document, major = (profile.Profile, profile.MAJOR) if kind == "profile" else (plan.Plan, plan.MAJOR)
    rules = schema(document)
    head = {"kind": {"const": kind}, "format_version": {"type": "string", "pattern": rf"^{major}\.[0-9]+$"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"assigner {kind}, format {major}.0",
        "type": "object",
        "properties": {**rules["properties"], **head},
        "required": [*head, *rules["required"]],
    }
