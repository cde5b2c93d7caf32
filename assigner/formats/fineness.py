"""How finely a workload allows its batches to be cut, and into how many micro-batches of how many rows they are."""

from __future__ import annotations

from dataclasses import dataclass

from assigner import formatting as fmt


@dataclass(frozen=True)
class Fineness:
    """The most micro-batches of a batch, and the fewest rows of a micro-batch.

    A batch that is not cut at all is always allowed, however few rows it has.

    Args:
        max_micro_batches: Of a batch; None: any number.
        min_rows: Of a micro-batch; None: any number.
    """

    max_micro_batches: int | None = None
    min_rows: int | None = None

    def most(self, rows: int) -> int:
        """The most micro-batches that so many rows may be cut into."""
        most = rows if self.max_micro_batches is None else min(rows, self.max_micro_batches)
        return max(1, most if self.min_rows is None else min(most, rows // self.min_rows))

    def obstacle(self, micro_batches: int, rows: int) -> str | None:
        """Why so many rows may not be cut into so many micro-batches, in words; None: they may."""
        if self.max_micro_batches is not None and micro_batches > self.max_micro_batches:
            return f"Workload.max_micro_batches allows {fmt.plural(self.max_micro_batches, 'micro-batch')} at most"
        left = rows // micro_batches
        if self.min_rows is not None and left < self.min_rows and micro_batches > 1:
            return (
                f"Workload.min_rows asks for {self.min_rows} or more rows in each, and a batch of {rows} leaves {left}"
            )
        return None


ANY = Fineness()
"""However finely one likes."""


def micro_batch_count(rows: int, most: int, size: int, fineness: Fineness = ANY) -> int:
    """How many micro-batches a batch is cut into: `most` of `size` rows as planned, or fewer where rows are few.

    Fewer also where one of them would have a single row though more are planned for it, which BatchNorm cannot
    normalise, for example. None gets over one row more than planned for that; so memory stays as predicted. And fewer
    where the workload allows no more, whatever they then get.
    """
    most = min(most, fineness.most(rows))
    each = -(-rows // most)
    while rows // -(-rows // each) == 1 < rows and each <= size and size > 1:
        each += 1
    return -(-rows // each)


def cut_into(batch: int, count: int) -> int:
    """How many micro-batches training makes of a batch that is to have so many."""
    return micro_batch_count(batch, count, -(-batch // count))


def cut_obstacle(batch: int, count: int) -> str | None:
    """Why training does not cut a batch into so many micro-batches, in words; None: it does."""
    cut = cut_into(batch, count)
    return None if cut == count else f"training cuts a batch of {batch} into {split_text(batch, cut)} instead"


def rows_each(batch: int, count: int, *, joint: str = " or ") -> str:
    """How many rows each of so many micro-batches has: `8`, or `6 or 7` where the batch does not come out even.

    Training makes them at most one row apart.
    """
    least, rest = divmod(batch, count)
    return f"{least:,}{joint}{least + 1:,}" if rest else f"{least:,}"


def split_text(batch: int, count: int) -> str:
    """How a batch is cut, for a sentence: `4 micro-batches of 8`."""
    return f"{fmt.plural(count, 'micro-batch')} of {rows_each(batch, count)}"


def cut_text(batch: int, count: int) -> str:
    """How a batch is cut, for a table: `4 x 8`, or `5 x 6-7`."""
    return f"{count} x {rows_each(batch, count, joint='-')}"
