"""What tests of refusals ask: the type of the error, and that it names what is wrong."""

import contextlib

import pytest

from maxmars.config.errors import in_words


@contextlib.contextmanager
def refused(kind, *named):
    """Expect an error of this type (or of these), whose words and notes contain each of these."""
    with pytest.raises(kind) as raised:
        yield raised
    for word in named:
        assert str(word) in in_words(raised.value)
