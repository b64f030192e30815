"""What tests of refusals ask: the type of the error or the exit code, and what is named."""

import contextlib
import io

import pytest

from maxmars.config.errors import in_words


@contextlib.contextmanager
def refused(kind, *named):
    """Expect an error of this type (or of these), whose words and notes contain each of these."""
    with pytest.raises(kind) as raised:
        yield raised
    for word in named:
        assert str(word) in in_words(raised.value)


class Errors(io.StringIO):
    """What a command wrote to stderr."""

    @property
    def lines(self):
        return self.getvalue().splitlines()


@contextlib.contextmanager
def stopped(code, *named):
    """Expect a command to exit with this code, without a traceback, and its errors to contain each
    of these; where they are wrapped in a box, the words count."""
    errors = Errors()
    with pytest.raises(SystemExit) as raised, contextlib.redirect_stderr(errors):
        yield errors
    text = errors.getvalue()
    assert raised.value.code == code, text
    assert "Traceback" not in text
    words = " ".join(text.replace("│", " ").replace("|", " ").split())
    for word in map(str, named):
        assert word in text or word in words, text
