"""`maxmars generate` as a terminal, a pipe and a program see it."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys

import pytest
from running import environment

from maxmars.cli import main
from maxmars.eval import load
from maxmars.eval.generate import generate_texts

COMMAND = [sys.executable, "-m", "maxmars", "generate"]
LONG = "300000"  # tokens: a minute or more


@pytest.mark.seconds
def test_text_is_that_of_the_python_function(finished_run, capsys):
    prompts = ["the ", "a", "", "the "]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    options = ["--max-new-tokens", "20", "--batch-size", "2", "--mesh.fsdp", "8"]
    main(["generate", str(finished_run), *given, *options])
    printed = capsys.readouterr()
    texts = generate_texts(load(finished_run), prompts, max_new_tokens=20, batch_size=2)
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert printed.out == "\n---------------\n".join(whole) + "\n"
    following = f"next: maxmars generate {finished_run} --interactive --mesh.fsdp=8"
    assert printed.err.splitlines()[-1] == following


def test_programs_give_a_line_and_get_a_line(finished_run, monkeypatch, capsys):
    prompts = ["the ", "ä b", " c", "the "]
    options = ["generate", str(finished_run), "--max-new-tokens", "9"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(prompts)))
    main([*options, "--interactive", "--json"])
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert all(list(row) == ["prompt", "continuation", "num_tokens", "end"] for row in rows)
    assert all((row["num_tokens"] == 9) == (row["end"] == "length") for row in rows)
    assert rows[0]["continuation"] != rows[3]["continuation"]
    main([*options, "--json", *(f"--prompt={prompt}" for prompt in prompts)])
    assert capsys.readouterr().out == printed


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words, variables):
        self.file, other = os.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *words],  # which Ctrl-C reaches
            stdin=other,
            stdout=other,
            stderr=other,
            env=variables | {"TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(other)
        self.output = b""

    def read(self):
        assert select.select([self.file], [], [], 60)[0], self.output
        self.output += os.read(self.file, 1 << 16)

    def read_until(self, text):
        """Returns the output up to this text."""
        while text not in self.output:
            self.read()
        before, _, self.output = self.output.partition(text)
        return before

    def send(self, text):
        os.write(self.file, text)

    def exit_code(self):
        """Reads to the end."""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while True:
                self.read()
        os.close(self.file)
        return self.process.wait(timeout=60)


@pytest.mark.slow
def test_at_a_terminal_ctrl_c_ends_a_continuation_and_ctrl_d_the_command(finished_run, tmp_path):
    words = [*COMMAND, str(finished_run), "--interactive", "--max-new-tokens", LONG]
    terminal = Terminal(*words, variables=environment(tmp_path / "cache"))
    shown = terminal.read_until(b"> ")
    assert b"loading" not in shown or b"\x1b[2K" in shown.rpartition(b"loading")[2]
    for prompt in (b"the model", b"learns"):
        terminal.send(prompt + b"\n")
        while len(terminal.output) < 1000:  # its echo, then the text
            terminal.read()
        terminal.send(b"\x03")
        assert prompt in terminal.read_until(b"^C")
        terminal.read_until(b"\n\r\n")
        terminal.read_until(b"> ")
    terminal.send(b"\x04")
    assert terminal.exit_code() == 0
    assert b"Traceback" not in terminal.output


@pytest.mark.slow
def test_a_pipe_gets_text_while_it_is_made_and_ctrl_c_exits_with_130(finished_run, tmp_path):
    words = [*COMMAND, str(finished_run), "--prompt", "the ", "--max-new-tokens", LONG]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment(tmp_path / "cache"), **pipes) as process:
        assert process.stdout.read(100).startswith(b"the ")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"\ninterrupted; this command does not continue" in error
    assert b"Traceback" not in error
