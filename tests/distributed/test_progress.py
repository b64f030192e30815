import errno
import io
import logging
import re
import time

import pytest
from refusals import refused
from rich.console import Console

from maxmars.config.numbers import duration, short
from maxmars.distributed.progress import HostLog, Progress

pytestmark = pytest.mark.smoke


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def on_file(clock, **options):
    output = io.StringIO()
    console = Console(file=output, width=80, highlight=False)
    return Progress(console=console, clock=clock, **options), output


def on_terminal(width, clock, **options):
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, highlight=False)
    return Progress(console=console, clock=clock, **options), output


def without_times(text):
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in text.splitlines()]


def without_escapes(text):
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text).replace("\r", "\n")


def test_plain_lines_away_from_a_terminal():
    clock = Clock()
    progress, output = on_file(clock)
    progress.message("step 0: validation loss 5.5512")
    clock.now = 20.0  # compilation
    progress.update("step 10", 10, 1200)
    clock.now = 25.0
    progress.update("step 20", 20, 1200)  # so soon after the one before it is left out
    clock.now = 120.0
    progress.update("step 110", 110, 1200)
    progress.message("saved [step] 110")
    progress.update("step 1200", 1200, 1200, keep=True)
    progress.close()
    progress.message("done:\n  a long text " + 30 * "that ")
    printed = output.getvalue().splitlines()
    assert without_times("\n".join(printed[:-1])) == [
        "step 0: validation loss 5.5512",
        "step 10",
        "step 110  ETA 18:10",
        "saved [step] 110",
        "step 1200",
        "done:",
    ]
    assert all(re.match(r"\d\d:\d\d:\d\d ", text) for text in printed[:-1])
    assert len(printed[-1]) > 150  # files are not wrapped
    assert "\x1b" not in output.getvalue()


def test_a_short_task_shows_nothing():
    clock = Clock()
    progress, output = on_file(clock, stderr=True)
    progress.update("copying", 1, 3)
    clock.now = 2.5
    assert output.getvalue() == ""
    progress.update("copying", 2, 3)
    assert without_times(output.getvalue()) == ["copying  ETA 0:03"]


def test_the_live_line_fits_80_columns_and_messages_stay_above_it():
    clock = Clock()
    progress, output = on_terminal(80, clock)
    worst = "step       {}/1000000  loss 10.8123  123M tok/s  MFU 51.2%"
    progress.update(worst.format(1), 1, 1_000_000)
    clock.now = 10.0
    progress.message("step 2: validation loss 9.0000")
    progress.update(worst.format(2), 2, 1_000_000)
    progress.close()
    printed = output.getvalue()
    last = worst.format(2) + " ETA 115d 17h"
    assert last in printed
    assert all(len(line) <= 80 for line in without_escapes(printed).splitlines())
    assert printed.index("step 2: validation") < printed.index(last)
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") == 1  # the cursor comes back


def test_kept_lines_stay_on_a_terminal_and_in_a_file():
    for make in (lambda: on_file(Clock()), lambda: on_terminal(80, Clock())):
        progress, output = make()
        for step in (1, 2, 3, 4):
            progress.update(f"step {step}/4", step, 4, keep=step != 3)
        progress.close()
        printed = without_escapes(output.getvalue())
        kept = re.findall(r"^(?:[\d:]+ )?(step [\d/]+).*\n", printed, re.MULTILINE)
        assert kept == ["step 1/4", "step 2/4", "step 4/4"]


def test_on_a_terminal_long_messages_break_between_words_and_the_end_stays_last():
    progress, output = on_terminal(40, Clock())
    progress.message(
        "  a message that is rather long for so narrow a screen, with /some/very/long/path"
    )
    progress.update("step 1/2", 1, 2)
    progress.close()
    progress.message("stopped")
    printed = without_escapes(output.getvalue()).splitlines()
    assert "  a message that is rather long for so" in printed
    assert "    narrow a screen, with" in printed
    assert "    /some/very/long/path" in printed
    assert printed[-1] == "stopped"
    assert any(line.rstrip().endswith("━━━━━ step 1/2") for line in printed[:-1])


def test_colours_make_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stderr in (False, True):
        with Progress(stderr=stderr) as progress:
            progress.update("step 1/2", 1, 2)
        progress.message("done")
    for printed in capsys.readouterr():
        assert without_times(printed) in (["step 1/2", "done"], ["done"])


def test_a_quiet_run_only_writes_its_log():
    copied = []
    progress, output = on_file(Clock(), quiet=True)
    progress.copy_to(copied.append)
    progress.update("step 1/2", 1, 2)
    progress.message("text")
    assert output.getvalue() == ""
    assert copied == ["step 1/2", "text"]


def test_the_log_of_a_host_has_the_time_and_errors(tmp_path):
    with HostLog(tmp_path, 3) as log:
        log.write("step 1")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 1\n", log.path.read_text())
    with refused(ValueError, "no data"), HostLog(tmp_path, 3):
        raise ValueError("no data")
    text = (tmp_path / "logs" / "host_003.log").read_text()
    assert text.count("step 1") == 1  # of the run before
    assert "Traceback" in text
    assert text.endswith("ValueError: no data\n")


class _FailsInTheEnd:
    def __del__(self):
        raise RuntimeError("a write under way")


def test_errors_that_cannot_be_raised_go_to_the_log_of_the_run(tmp_path, capsys):
    with HostLog(tmp_path, 0) as log:
        _FailsInTheEnd()  # deleted at once
    assert "RuntimeError: a write under way" in log.path.read_text()
    assert capsys.readouterr().err == ""


def test_warnings_are_lines_of_the_task_and_of_its_log(tmp_path, capfd):
    progress, output = on_file(Clock())
    logger = logging.getLogger("maxmars.somewhere")
    with progress, HostLog(tmp_path, 0) as log:
        progress.message("opening")
        logger.warning("checkpoint %d skipped", 4)
        progress.copy_to(log.write)
        logger.warning("line 1 skipped")
        logger.info("a detail")
    logger.warning("after it")
    lines = ["opening", "checkpoint 4 skipped", "line 1 skipped"]
    assert without_times(output.getvalue()) == lines
    logged = log.path.read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in logged] == lines
    assert "skipped" not in capfd.readouterr().err


def test_numbers_and_durations_are_short():
    numbers = {0.4: "0", 999.4: "999", 999.6: "1.00k", 12_345.0: "12.3k", 999.96e12: "1.00P"}
    assert {number: short(number) for number in numbers} == numbers
    durations = {7.0: "0:07", 754.0: "12:34", 3723.0: "1:02:03", 86_399.6: "1d 00h"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


@pytest.mark.seconds
def test_a_wait_of_over_two_seconds_is_shown_with_its_seconds_and_goes_away():
    clock = Clock()
    live, terminal = on_terminal(80, clock, stderr=True)
    plain, file = on_file(clock)
    with plain.waiting("not long"):
        pass
    with live.waiting("loading a model"), plain.waiting("auditing"):
        clock.now = 7.0
        while "loading a model 0:07" not in terminal.getvalue() or not file.getvalue():
            time.sleep(0.01)
    *_, after = terminal.getvalue().split("loading a model 0:07")
    assert "\x1b[2K" in after
    assert "\n" not in after
    assert without_times(file.getvalue()) == ["auditing"]


def test_the_row_of_a_task_and_its_pace_outlive_a_wait():
    clock = Clock()
    progress, output = on_terminal(80, clock)
    progress.update("step 1/9", 1, 9)
    clock.now = 10.0
    with progress.waiting("step 1: validation"):
        pass
    progress.update("step 2/9", 2, 9)
    progress.close()
    assert "step 2/9 ETA 1:10" in output.getvalue()


@pytest.mark.seconds
def test_lines_that_were_printed_outlive_the_row_of_a_wait():
    clock = Clock()
    progress, output = on_terminal(80, clock)
    progress.update("step 1/9", 1, 9)
    with progress.waiting("step 1: validation"):
        while "step 1: validation" not in output.getvalue():
            time.sleep(0.01)
    before = len(output.getvalue())
    progress.message("step 1: validation loss 9.0000")
    progress.update("step 2/9", 2, 9)
    progress.close()
    _, after = output.getvalue()[before:].split("validation loss 9.0000\n")
    up = sum(int(count or 1) for count in re.findall(r"\x1b\[(\d*)A", after))
    assert up <= after.count("\n")  # it goes up over its own rows alone


@pytest.mark.seconds
@pytest.mark.filterwarnings("error")
def test_a_wait_soon_after_another_line_is_shown_and_a_full_disk_stops_nothing():
    def fail(text):
        raise OSError(errno.ENOSPC, "no space")

    (progress, output), (other, _) = on_file(Clock()), on_file(Clock())
    progress.update("step 1/9", 1, 9)
    other.copy_to(fail)
    with progress.waiting("compiling"), other.waiting("compiling"):
        time.sleep(2.5)
    assert without_times(output.getvalue()) == ["step 1/9", "compiling"]
