"""`assigner schema`: the JSON Schemas of the file formats."""

from typing import Annotated, Any, Literal

import typer

from . import console

Kind = Literal["profile", "plan", "trace"]


def schema_command(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="profile, plan or trace.")],
) -> None:
    """Print the JSON Schema of a file format."""
    console.show_json(json_schema(kind))


def json_schema(kind: Kind) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one kind of file, with the head that every file has."""
    from assigner.formats import plan, profile, trace
    from assigner.formats.document import schema

    document, versions = {
        "profile": (profile.Profile, profile.VERSIONS),
        "plan": (plan.Plan, plan.VERSIONS),
        "trace": (trace.Trace, trace.VERSIONS),
    }[kind]
    rules, majors = schema(document), [version.partition(".")[0] for version in versions]
    known = majors[0] if len(majors) == 1 else f"[{''.join(majors)}]"
    head = {"kind": {"const": kind}, "format_version": {"type": "string", "pattern": rf"^{known}\.[0-9]+$"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"assigner {kind}, format {majors[-1]}.0",
        "type": "object",
        "properties": {**rules["properties"], **head},
        "required": [*head, *rules["required"]],
    }
