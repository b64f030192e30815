"""Results of cells that never ran."""

from maxmars.compare.cells import Cell, CellResult


def cell_result(cell: Cell, loss: float) -> CellResult:
    """A cell that ended at this loss, and of which nothing else is known."""
    return CellResult(
        cell=cell,
        loss=loss,
        diverged=None,
        step_time_s=None,
        seconds=1.0,
        initial_weights="",
        tokens="",
        curve=None,
        train_losses=(),
        final_state=None,
        environment={},
    )
