"""Marks of tests that compile for chips that are not there, by the compiler of an extra."""

from importlib.util import find_spec

import pytest


def _needs(extra, *modules):
    missing = not all(map(find_spec, modules))
    return [
        pytest.mark.slow,
        pytest.mark.usefixtures("uncached"),
        pytest.mark.skipif(missing, reason=f"its compiler (extra `{extra}`) is not installed"),
    ]


FOR_TPUS = _needs("tpu", "libtpu")
FOR_GPUS = _needs("cuda", "jax_plugins", "jax_plugins.xla_cuda13")


def for_tpus(test):
    return _marked(test, FOR_TPUS)


def for_gpus(test):
    return _marked(test, FOR_GPUS)


def _marked(test, marks):
    for mark in marks:
        test = mark(test)
    return test
