"""Listed orders in a run, under all that a training does beside its steps."""

import pytest


@pytest.mark.long
@pytest.mark.distributed
def test_listed_orders_train_evaluate_save_and_move_as_others(forked, tmp_path):
    """Ties, clipping, evaluations of fewer rows, checkpoints, moves and running statistics; unlike orders are told."""
    forked.run("listed.py", tmp_path, ranks=2)
