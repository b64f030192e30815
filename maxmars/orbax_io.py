"""What Orbax needs around it: its options, and less noise about what it raises anyway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Generator
from typing import Any
from unittest import mock

import jax
from orbax.checkpoint import v1


def orbax_context(
    *, tree: Any = None, partial_load: bool = False, alone: bool = False
) -> v1.Context:
    """Options of every Orbax call: `meta` is JSON, arrays are not compressed.

    Args:
      tree: arrays, abstract or not, that are written or read: bounds the memory for doing so. Left
        alone, Orbax copies them all at once.
      partial_load: read the named arrays only.
      alone: this process does not wait for the others. Reading needs no waiting, and in Orbax those
        that could read their part would wait for one that could not.
    """
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="meta")  # else strings become arrays
    context = v1.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = partial_load
    # Weights shrink by a tenth at most, which takes as long as writing them and as much memory.
    context.array.saving.use_compression = False
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = _in_flight(tree)
    if alone and jax.process_count() > 1:
        index = jax.process_index()
        context.multiprocessing.primary_host = index
        context.multiprocessing.active_processes = {index}
        context.multiprocessing.barrier_sync_key_prefix = f"alone{index}"
    return context


def _in_flight(tree: Any) -> int | None:
    """Bytes of a tree to have in work at a time: a sixteenth of this process's share, but at least
    the largest leaf, as Orbax refuses less than what one of them may need."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    return max(*sizes, sum(sizes) // (16 * jax.process_count()), 2**20) + 1 if sizes else None


def root_cause(error: Exception) -> str:
    """The innermost error in one line; Orbax wraps it in others, about handlers."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    first_line = next(iter(str(error).strip().splitlines()), "").split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {first_line[:400]}"


class FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that finishes its tasks before it closes."""

    def close(self) -> None:
        """Finish, then close."""
        tasks = () if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def quiet_reads() -> Generator[None, None, None]:
    """Keep Orbax quiet about damaged arrays.

    At the first array that cannot be read it closes its event loop over the reads of the others,
    each of which then prints a stack trace into the user's terminal.
    """
    with contextlib.ExitStack() as stack:
        for module in filter(None, (asyncio, sys.modules.get("uvloop"))):
            stack.enter_context(mock.patch.object(module, "new_event_loop", FinishingLoop))
        yield


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs what it also raises, and each array that it gave up reading after the first error;
    our own errors say the same in one line."""
    path = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"
    return path not in record.pathname and path not in record.getMessage()


for _name in ("absl", "asyncio", None):
    logging.getLogger(_name).addFilter(_not_from_orbax)
