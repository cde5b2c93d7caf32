"""What is said of a check."""

import pytest

from assigner.formats.profile import Verification
from assigner.report.profile import verification_data, verification_report, verification_text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Verification(result="equal", exact=True, seconds=3.1), "computes, to the last bit (checked in 3.10 s)"),
        (Verification(result="equal", seconds=3.1), "computes, within rounding"),
        (Verification(result="uncertain", seconds=3.1), "cannot be compared with the model"),
    ],
)
def test_the_result_is_one_line(found, said):
    """With the time that it took."""
    assert said in verification_text(found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Verification(result="equal", partitions=3, rows=5, micro_batches=2), "with and without rematerialisation"),
        (Verification(result="equal", partitions=3, rows=5, trained=False), "outputs of 5 rows in 1 micro-batch"),
        (Verification(result="equal", way="pieces", trained=False, rows=5), "one at a time for lack of memory"),
    ],
)
def test_a_report_says_what_was_compared(found, said):
    """And each caution on a line of its own."""
    result, way, *cautions = verification_report(found, "m.py:w")
    assert result.text.startswith("m.py:w: the partitions compute")
    assert said in way.text
    assert cautions == []


def test_cautions_are_lines_and_json_has_all():
    """For people, and for programs."""
    found = Verification(result="equal", cautions=("the loss mixes rows",))
    assert verification_report(found, "m.py:w")[2].text == "caution: the loss mixes rows"
    assert verification_data(found, "m.py:w")["cautions"] == ["the loss mixes rows"]
