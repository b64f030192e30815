"""Which cells are run, on losses that are made up."""

import math

import pytest
from tiny import tiny_config

from maxmars.compare.cells import Cell, CellResult, Contender
from maxmars.compare.search import best_rate, edge_of_grid, next_cells

GRID = (1e-3, 2e-3, 4e-3, 8e-3)
CONTENDERS = [Contender(name=n, config=tiny_config(), learning_rates=GRID) for n in ("a", "b")]


def result(cell, loss):
    return CellResult(
        cell=cell,
        loss=loss,
        diverged=None,
        step_time_s=0.1,
        seconds=1.0,
        initial_weights="",
        tokens="",
    )


def search(loss, seeds=(0, 1, 2), contenders=CONTENDERS):
    """The batches of cells that are asked for, and all results."""
    asked, results = [], {}
    while cells := next_cells(contenders, seeds, results):
        asked.append(cells)
        assert len(asked) < 20
        results |= {cell: result(cell, loss(cell)) for cell in cells}
    return asked, results


def bowl(cell, best=2e-3):
    return 2.0 + math.log2(cell.learning_rate / best) ** 2 + 0.01 * cell.seed


def test_a_scan_then_seeds_at_the_best_rate():
    asked, results = search(bowl)
    scan, rest = asked
    assert [(c.contender, c.learning_rate) for c in scan[:3]] == [
        ("a", 1e-3),
        ("b", 1e-3),
        ("a", 2e-3),
    ]
    assert len(scan) == 8
    assert {c.seed for c in scan} == {0}
    assert {(c.learning_rate, c.seed) for c in rest} == {(2e-3, 1), (2e-3, 2)}
    assert best_rate(CONTENDERS[0], (0, 1, 2), results) == 2e-3


def test_a_neighbour_that_the_scan_cannot_tell_apart_gets_all_seeds_and_may_win():
    def loss(cell):
        if cell.seed == 0:
            return bowl(cell, 2e-3 * 2**0.49)  # 2e-3 is better by a hair
        return bowl(cell, 4e-3) + 0.2 * cell.seed

    asked, results = search(loss, contenders=CONTENDERS[:1])
    assert len(asked) == 3
    assert {c.learning_rate for c in asked[1]} == {2e-3}
    assert {c.learning_rate for c in asked[2]} == {4e-3}
    assert best_rate(CONTENDERS[0], (0, 1, 2), results) == 4e-3


def test_a_finished_cell_is_not_asked_for_again():
    done = Cell(contender="a", learning_rate=2e-3, seed=0)
    cells = next_cells(CONTENDERS, (0, 1), {done: result(done, 2.0)})
    assert len(cells) == 7
    assert done not in cells


def test_one_seed_is_a_scan_alone():
    asked, _ = search(bowl, seeds=(5,))
    assert [len(cells) for cells in asked] == [8]


def test_diverged_rates_get_no_more_seeds():
    asked, results = search(lambda c: math.inf if c.learning_rate > 1e-3 else 2.0)
    assert {c.learning_rate for c in asked[1]} == {1e-3}
    assert best_rate(CONTENDERS[0], (0, 1, 2), results) == 1e-3
    asked, results = search(lambda c: math.inf)
    assert len(asked) == 1
    assert best_rate(CONTENDERS[0], (0, 1, 2), results) is None


def test_a_best_rate_that_diverges_with_another_seed_loses():
    def loss(cell):
        return math.inf if (cell.learning_rate, cell.seed) == (2e-3, 1) else bowl(cell)

    asked, results = search(loss, contenders=CONTENDERS[:1])
    assert best_rate(CONTENDERS[0], (0, 1, 2), results) in (1e-3, 4e-3)
    assert len(asked) == 3


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 2)])
def test_losses_that_are_all_equal_come_to_an_end(seeds):
    _, results = search(lambda c: 2.0, seeds=seeds)
    assert len(results) == len(CONTENDERS) * (len(GRID) + 2 * (len(seeds) - 1))


def test_the_rate_by_which_to_extend_a_grid():
    (contender, _), rates = CONTENDERS, [edge_of_grid(CONTENDERS[0], rate) for rate in GRID]
    assert rates == [("low", 5e-4), None, None, ("high", 1.6e-2)]
    single = Contender(name="a", config=contender.config, learning_rates=(1e-3,))
    assert edge_of_grid(single, 1e-3) == ("high", 2e-3)
