import json
import math
import re
from dataclasses import replace

import pytest

from assigner.formats.document import encode
from assigner.formats.stage import Replica
from assigner.schedule.cost import CostModel
from assigner.schedule.program import build_program
from assigner.schedule.simulate import run_program
from assigner.validation.observed import rehearsed

KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}


def violations(rule, value, path="$"):
    """What a JSON Schema (as much of it as ours use) has against a value."""
    if "anyOf" in rule:
        found = [list(violations(each, value, path)) for each in rule["anyOf"]]
        return [] if any(not each for each in found) else found[0]
    wrong = [] if fits(rule, value) else [f"{path}: {value!r} against {rule}"]
    if isinstance(value, dict):
        wrong += [f"{path}.{name}: missing" for name in rule.get("required", ()) if name not in value]
        for name, inner in rule.get("properties", {}).items():
            wrong += violations(inner, value[name], f"{path}.{name}") if name in value else []
    if isinstance(value, list) and "items" in rule:
        wrong += [each for n, item in enumerate(value) for each in violations(rule["items"], item, f"{path}[{n}]")]
    return wrong


def fits(rule, value):
    kind = rule.get("type")
    if kind == "null":
        return value is None
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        rule.get("const", value) == value
        and value in rule.get("enum", [value])
        and (not isinstance(value, str) or re.search(rule.get("pattern", ""), value) is not None)
        and (not number or rule.get("minimum", -math.inf) <= value <= rule.get("maximum", math.inf))
    )


@pytest.mark.parametrize(("kind", "file"), [("profile", "profile.json"), ("plan", "solved.json")])
def test_files_obey_their_schema(assigner, folder, kind, file):
    """What we write is what the schema says, and the schema says which draft it follows."""
    schema = json.loads(assigner("schema", kind).stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"kind", "format_version", "workload"} <= set(schema["required"])
    assert violations(schema, json.loads((folder / file).read_text())) == []


def test_a_trace_obeys_its_schema(assigner, profile, equal):
    """A trace as it is written, messages and missing memory included, is what `schema trace` says."""
    program = build_program(equal, profile.edges)
    trace = rehearsed(run_program(program, CostModel(profile)), CostModel(profile))
    schema = json.loads(assigner("schema", "trace").stdout)
    assert violations(schema, encode(trace)) == []
    assert violations(schema, {**encode(trace), "steps": 0})


def test_a_plan_with_replicas_obeys_its_schema(assigner, equal):
    """Neither a worker beside replicas nor replicas beside a worker is asked for; a replica takes one or more."""
    count = equal.micro_batches - 1
    shares = (Replica(equal.workers[0], count), Replica(equal.workers[1], 1))
    stages = (replace(equal.stages[0], sole_worker=None, replicas=shares), *equal.stages[1:])
    document = encode(replace(equal, stages=stages))
    schema = json.loads(assigner("schema", "plan").stdout)
    assert violations(schema, document) == []
    document["stages"][0]["replicas"][1]["micro_batches"] = 0
    assert violations(schema, document)


@pytest.mark.parametrize(
    ("field", "value"), [("format_version", "3.0"), ("kind", "profile"), ("micro_batches", 0), ("stages", {})]
)
def test_schema_refuses_what_the_reader_refuses(assigner, folder, field, value):
    """A wrong version, kind, count or type violates the schema, and `show` exits with 5."""
    document = {**json.loads((folder / "solved.json").read_text()), field: value}
    schema = json.loads(assigner("schema", "plan").stdout)
    assert violations(schema, document)
    (folder / "bad.json").write_text(json.dumps(document))
    assert assigner("show", "bad.json").exit_code == 5
