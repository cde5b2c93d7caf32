from assigner.report.machine import Finding, machine_data, machine_report
from assigner.report.sheet import Line


def test_ready_machine():
    """Nothing missing: the last line says what can be done."""
    found = [Finding("python", "ok", "3.12"), Finding("CBC", "note", "not found", "apt install coinor-cbc")]
    assert machine_report(found)[-1].text.startswith("ready")
    assert machine_data(found)["ready"] is True


def test_missing_thing_is_marked_with_its_remedy():
    """What is missing is marked, has its remedy on a line, and is named at the end."""
    found = [Finding("python", "ok", "3.12"), Finding("torch", "missing", "not installed", "pip install torch")]
    sheet, remedy, verdict = machine_report(found)
    assert sheet.marked == {1}
    assert remedy == Line("torch: pip install torch", "warning")
    assert verdict.text == "missing: torch"
    assert machine_data(found)["ready"] is False
