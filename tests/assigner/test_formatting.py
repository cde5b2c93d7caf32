import pytest

from assigner import formatting as fmt


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.012"), (1.234, "1.23"), (9.996, "10.0"), (12.34, "12.3"), (99.96, "100"), (123.4, "123"),
     (1234567, "1,234,567"), (-12.34, "-12.3"), (None, "-"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value, text):
    """A number keeps three significant digits, and never turns into an exponent."""
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.3, "12.3 s"), (1.0, "1.00 s"), (0.0123, "12.3 ms"), (4.2e-5, "42.0 µs"), (0, "0 s"), (None, "-")],
)
def test_seconds(value, text):
    """A duration has the unit that suits it."""
    assert fmt.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(15.1 * 2**30, "15.1 GiB"), (2**20, "1.00 MiB"), (1536, "1.50 KiB"), (12, "12.0 B")]
)
def test_sizes(value, text):
    """Bytes are counted in powers of 1024, and named so."""
    assert fmt.size(value) == text


def test_rates():
    """Of so few samples a second that none would be seen, those of an hour."""
    assert [fmt.rate(each) for each in (1234.5, 0.032, 0.0004, 0.0, None)] == [
        "1,234 samples/s", "0.032 samples/s", "1.44 samples/h", "0 samples/s", "-"
    ]  # fmt: skip


def test_one_unit_for_a_column():
    """A column's unit suits its largest value, and all its values use it."""
    unit = fmt.time_unit(0.5, None, 0.0004)
    assert unit.name == "ms"
    assert [unit.show(value) for value in (0.5, None, 0.0004)] == ["500", "-", "0.400"]


def test_shares_and_ratios():
    """Shares are percent with one decimal, ratios have two; nothing is minus zero."""
    assert fmt.percent(0.123) == "12.3 %"
    assert fmt.points(0.05, sign=True) == "+5.0"
    assert fmt.points(-1e-9, sign=True) == "0.0"
    assert fmt.ratio(1.849) == "1.85x"
    assert fmt.against(3.0, 2.0) == 1.5
    assert fmt.against(3.0, 0) is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embed", "blocks.0", "blocks.1", "blocks.2", "head"], "embed, blocks.0-2 (3), head"),
        (["blocks.0", "blocks.1"], "blocks.0, blocks.1"),
        (["b.0", "b.2", "b.3", "b.4"], "b.0, b.2-4 (3)"),
        (["b.2", "b.1", "b.0"], "b.2, b.1, b.0"),
        (["a1.x", "a2.x", "a3.x"], "a1-3.x (3)"),
        (["l1.0", "l1.1", "l1.2", "l2.0", "l2.1", "l2.2"], "l1.0-2 (3), l2.0-2 (3)"),
        (["b.9", "b.10", "b.11"], "b.9-11 (3)"),
        ([], ""),
    ],
)
def test_names_that_count_become_ranges(names, text):
    """Three or more names that count up in one place are a range; all others stay as they are."""
    assert fmt.ranges(names) == text


def test_plurals():
    """One is singular, and a micro-batch has its own plural."""
    assert [fmt.plural(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert fmt.plural(0, "stage") == "0 stages"


@pytest.mark.parametrize("share", [0, 0.04, 0.3, 0.5, 0.99, 1, 1.4])
def test_bars_have_one_width(share):
    """A bar is as wide as asked whatever it shows, and says where it would overflow."""
    bar = fmt.bar(share, width=8)
    assert len(bar) == 8
    assert ("!" in bar) == (share > 1)


def test_spreads_above_the_median_are_said_as_multiples():
    """A share up to all of it, then how many times the median: 350 % of what, nobody would know."""
    assert [fmt.spread(share) for share in (0.354, 1.0, 2.5)] == ["35 %", "100 %", "2.5 times the median"]
    assert [fmt.spread_points(share) for share in (0.354, 1.0, 10.448)] == ["35.4", "100.0", "10.4x"]


def test_words_in_a_row_have_one_and_before_the_last():
    """One stands alone, two have no comma; the word between the last two may be another."""
    assert [fmt.series("abc"[:count]) for count in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert fmt.series([2, 4, 8], "or") == "2, 4 or 8"
