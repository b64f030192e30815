import io
import re

import pytest
from rich.console import Console

from maxmars import distributed
from maxmars.metrics import duration, short
from maxmars.progress_line import ProgressLine

pytestmark = pytest.mark.smoke


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_line(num_steps, clock):
    output = io.StringIO()
    console = Console(file=output, width=80, highlight=False)
    return ProgressLine(num_steps, console=console, clock=clock), output


def test_plain_lines_away_from_a_terminal():
    clock = Clock()
    line, output = plain_line(1200, clock)
    line.message("step 0: validation loss 5.5512")
    clock.now = 20.0  # compilation
    rates = {"perf/tokens_per_sec": 12_345.0, "perf/step_time": 0.5}
    line.update(10, {"train/loss": 4.25, **rates})
    clock.now = 25.0
    line.update(20, {"train/loss": 4.0, **rates})  # so soon after the one before it is left out
    clock.now = 120.0
    line.update(110, {"train/loss": 3.0, "perf/mfu": 0.4512, **rates})
    line.message("saved [step] 110")
    line.update(1200, {"train/loss": 2.5})
    line.finish("done:\n  a long text " + 30 * "that ")
    printed = output.getvalue().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", text) for text in printed[:-1]] == [
        "step 0: validation loss 5.5512",
        "step   10/1200  loss 4.2500  12.3k tok/s  ETA 9:55",
        "step  110/1200  loss 3.0000  12.3k tok/s  MFU 45.1%  ETA 18:10",
        "saved [step] 110",
        "step 1200/1200  loss 2.5000",
        "done:",
    ]
    assert all(re.match(r"\d\d:\d\d:\d\d ", text) for text in printed[:-1])
    assert len(printed[-1]) > 150  # files are not wrapped
    assert "\x1b" not in output.getvalue()


def test_the_live_line_fits_80_columns_and_messages_stay_above_it():
    output = io.StringIO()
    clock = Clock()
    console = Console(file=output, width=80, force_terminal=True, highlight=False)
    line = ProgressLine(1_000_000, console=console, clock=clock)
    worst = {"train/loss": 10.81234, "perf/tokens_per_sec": 123_456_789.0, "perf/mfu": 0.512}
    line.update(1, worst)
    clock.now = 10.0
    line.message("step 2: validation loss 9.0000")
    line.update(2, worst)
    line.close()
    printed = output.getvalue()
    last = "step       2/1000000  loss 10.8123  123M tok/s  MFU 51.2%  ETA 115d 17h"
    assert len(last) <= 80
    assert last in printed
    assert printed.index("step 2: validation") < printed.index(last)
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") == 1  # the cursor comes back


def test_on_a_terminal_long_messages_break_between_words_and_the_end_stays_last():
    output = io.StringIO()
    console = Console(file=output, width=40, force_terminal=True, highlight=False)
    line = ProgressLine(2, console=console)
    line.message(
        "  a message that is rather long for so narrow a screen, with /some/very/long/path"
    )
    line.update(1, {"train/loss": 1.0})
    line.finish("stopped")
    printed = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", output.getvalue()).splitlines()
    assert "  a message that is rather long for so" in printed[0] + printed[1]
    assert "    narrow a screen, with" in printed
    assert "    /some/very/long/path" in printed
    assert printed[-1] == "stopped"
    assert "step 1/2  loss 1.0000" in printed[-2]


def test_neither_notebooks_nor_colours_make_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    line = ProgressLine(2)
    line.update(1, {"train/loss": 1.0})
    line.finish("done")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert [text[9:] for text in printed.splitlines()] == ["step 1/2  loss 1.0000", "done"]


def test_other_processes_only_write_their_logs(monkeypatch):
    monkeypatch.setattr(distributed, "is_primary", lambda: False)
    output, copied = io.StringIO(), []
    line = ProgressLine(2, console=Console(file=output))
    line.copy_to(copied.append)
    line.update(1, {"train/loss": 1.0})
    line.finish("text")
    assert output.getvalue() == ""
    assert copied == ["step 1/2  loss 1.0000", "text"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.4, "0"), (999.4, "999"), (999.6, "1.00k"), (12_345.0, "12.3k"), (999_999.0, "1.00M")],
)
def test_short_numbers(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.0, "0:07"), (754.0, "12:34"), (3723.0, "1:02:03"), (86_399.6, "1d 00h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
