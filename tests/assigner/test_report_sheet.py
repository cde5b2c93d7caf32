import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from assigner.report.sheet import Column, Line, Sheet, draw, markdown

SHEET = Sheet(
    "title",
    (Column("name", "text"), Column("step ms"), Column("less", rank=1), Column("least", rank=2)),
    (("first, second, third, fourth", "1,234", "22222222", "33333333"), ("b", "5", "2", "3")),
    frozenset({0}),
)


def printed(report, width):
    stream = io.StringIO()
    Console(file=stream, width=width, height=25, markup=False).print(draw(report, width=width), crop=False)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("width", "headers"),
    [(200, ["name", "step ms", "less", "least"]), (44, ["name", "step ms", "less"]), (34, ["name", "step ms"])],
)
def test_less_important_columns_leave_first(width, headers):
    """Columns go in the order of their rank, until the rest fits."""
    assert [column.header for column in SHEET.fitted(width).columns] == headers


def test_columns_without_room_are_named():
    """Below a table stands what it lacks there; nothing where it has all."""
    assert "no room at 34 columns for: less, least" in " ".join(printed([SHEET], 34).split())
    assert "no room" not in printed([SHEET], 200)


def test_marked_rows_stay_marked():
    """Leaving out columns keeps the marks and the title."""
    assert SHEET.fitted(30).marked == {0}
    assert SHEET.fitted(30).title == "title"


@pytest.mark.parametrize("width", [34, 44, 80, 10_000])
def test_numbers_stand_right_and_whole(width):
    """Numbers end where their header ends, and are never cut; no line is too long."""
    lines = printed([SHEET], width).splitlines()
    assert all(len(line) <= width for line in lines)
    header = next(line for line in lines if "step ms" in line)
    row = next(line for line in lines if "1,234" in line)
    assert row.index("1,234") + len("1,234") == header.index("step ms") + len("step ms")


def test_square_brackets_are_text():
    """A name with brackets is printed as it is, not taken for markup."""
    sheet = Sheet("t[0]", (Column("name", "name"),), (("layers[0]",), ("[bold]x",)))
    out = printed([sheet, Line("see [red]this")], 80)
    assert all(text in out for text in ("t[0]", "layers[0]", "[bold]x", "see [red]this"))


def test_blank_lines_stand_around_tables_only():
    """Lines follow each other; a table has an empty line on either side."""
    lines = printed([Line("one"), Line("two"), SHEET, Line("three")], 80).splitlines()
    assert lines[:4] == ["one", "two", "", "title"]
    assert lines[-2:] == ["", "three"]


def test_markdown_has_every_column_and_escapes():
    """Markdown gets the whole table, numbers to the right, and its own signs escaped."""
    sheet = Sheet("a_b", (Column("name", "text"), Column("n", rank=9)), (("x|y*`[z](http://a)", "1"),))
    assert markdown([sheet, Line("done")]).splitlines() == [
        "**a\\_b**", "", "| name | n |", "| --- | ---: |", "| x\\|y\\*\\`\\[z](http://a) | 1 |", "", "done",
    ]  # fmt: skip


def test_control_characters_are_written_out():
    """A warning or a reason in a file cannot steer the terminal: cells and lines have its escapes as text."""
    console = Console(file=io.StringIO(), width=80)
    sheet = Sheet("", (Column("name", "text"),), (("\x1b[2Jcell",),))
    console.print(draw((Line("\x1b]0;title\x07line"), sheet), width=80))
    out = console.file.getvalue()
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"\x1b[2Jcell" in out
    assert r"\x1b]0;title\x07line" in out


@pytest.mark.parametrize("width", [100, 80, 60, 44, 30, 12])
@pytest.mark.parametrize("text", ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "ip-10-0-12-30.eu-west-1", "層" * 20])
def test_two_texts_give_way_to_figures(width, text):
    """Texts are folded; where even that is not enough the table is wider than the terminal, and no figure is cut."""
    columns = (Column("worker", "name"), Column("kind", "text"), Column("host", "text", least=32), Column("memory GiB"))
    sheet = Sheet("", columns, (("worker:0/cuda:0", text, text[::-1], "115.25"),))
    lines = printed([sheet], width).splitlines()
    assert sum("115.25" in line and "worker:0/cuda:0" in line for line in lines) == 1
    assert max(map(cell_len, lines)) <= max(width, 15 + 6 + 6 + 10 + 3 * 2)


def test_no_column_is_lost_where_nothing_fits():
    """Every header and every figure is on a screen that is too narrow for all of them."""
    columns = (Column("#"), Column("worker", "name"), Column("host", "name"), Column("ms"))
    rows = (("1", "worker:0/cpu-of-some", "a-host-of-a-very-long-name", "12.5"),)
    for width in range(20, 70, 3):
        shown = printed([Sheet("", columns, rows)], width)
        assert all(text in shown for text in ("#", "ms", *rows[0])), width


@pytest.mark.parametrize("width", range(12, 90, 6))
def test_headers_are_folded_at_words(width):
    """However short the cells below are that have to give way, and where there is no room the table is wider."""
    columns = (Column("partitions", "text"), Column("what changes", "text"), Column("step ms"))
    sheet = Sheet("", columns, (("p0 p1 p2 p3 p4 p5 p6 p7", "a b c d e f g h i j k l m", "1.5"),))
    lines = printed([sheet], width).splitlines()
    assert {"partitions", "what", "changes", "step", "ms", "1.5"} <= {*" ".join(lines).split()}
    assert max(map(len, lines)) <= max(width, 10 + 7 + 7 + 2 * 2)


def test_a_word_is_folded_only_where_all_texts_have_to():
    """A column that can be folded between words gives way first."""
    columns = (Column("what", "text"), Column("on", "text"), Column("ms"))
    sheet = Sheet("", columns, (("blocks 0 to 11 of 12", "worker:0/cpu", "1.5"),))
    assert sheet.widths(12 + 6 + 3 + 2 * 2) == [6, 12, 3]
    assert sheet.widths(10 + 6 + 3 + 2 * 2) == [8, 8, 3]
