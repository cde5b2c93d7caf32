from assigner.report.doctor import Finding, doctor_data, doctor_report, is_ready
from assigner.report.sheet import Line


def test_ready_machine():
    """Nothing missing: the last line says what can be done."""
    found = [Finding("python", "ok", "3.12"), Finding("CBC", "note", "not found", "apt install coinor-cbc")]
    assert doctor_report(found)[-1].text.startswith("ready")
    assert doctor_data(found)["ready"] is True


def test_missing_thing_is_marked_with_its_remedy():
    """What is missing is marked, has its remedy on a line, and is named at the end."""
    found = [Finding("python", "ok", "3.12"), Finding("torch", "missing", "not installed", "pip install torch")]
    sheet, remedy, verdict = doctor_report(found)
    assert sheet.marked == {1}
    assert [row[0].rstrip() for row in sheet.rows] == ["python", "torch"]
    assert remedy == Line("torch: pip install torch", "warning")
    assert verdict.text == "missing: torch"
    assert doctor_data(found)["ready"] is False


def test_groups_are_tables_in_one_grid():
    """What is needed, the machine, what is optional; what is absent is no reason to worry, and its remedy is plain."""
    found = [
        Finding("python", "ok", "3.12"),
        Finding("memory", "ok", "8 GiB", group="machine"),
        Finding("transformers", "absent", "Hugging Face models", "pip install transformers", group="optional"),
    ]
    needed, machine, optional, way, verdict = doctor_report(found)
    assert [sheet.title for sheet in (needed, machine, optional)] == ["what assigner needs", "this machine", "optional"]
    assert len({len(sheet.rows[0][0]) for sheet in (needed, machine, optional)}) == 1
    assert way == Line("transformers: pip install transformers")
    assert verdict.text.startswith("ready")
    assert is_ready(found)
