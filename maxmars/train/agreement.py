"""Agreement of all processes of a run, before its first step, on config, code and versions.

JAX does not compare programs: processes that differ would compute parts of the same arrays by
different programs, and train to the end without an error. So all exchange a hash of such facts, and
the facts themselves only where hashes differ, to name the difference. Data are compared when they
are opened, see `data.batches.open_data`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from maxmars.checkpoint.environment import package_digest, package_versions
from maxmars.config import TrainConfig, to_dict
from maxmars.distributed import processes
from maxmars.train.init_from import InitFrom

_PATHS = ("path", "hellaswag_path", "file", "place")  # each host may have its own copies
_MAX_NAMED = 4  # differing facts in an error
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")


def check_agreement(
    config: TrainConfig,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
) -> None:
    """Compare between processes all facts that decide the steps of a run; all processes must call.

    The facts are config and command line, paths excepted; the text of maxmars and of the user's own
    files that the config names; versions of libraries; and JAX's settings that change programs.

    Raises:
      ValueError: two processes differ. Every process raises; the error names process, field and
        values.
    """
    if jax.process_count() == 1:
        return
    facts = _facts(config, init_from, resume_overrides)
    text = json.dumps(facts, default=str)
    if processes.first_mismatch(hashlib.sha256(text.encode()).hexdigest()) is None:
        return
    differing = processes.first_mismatch(text)
    assert differing is not None  # different hashes have different texts
    process, other, primary = differing[0], *map(json.loads, differing[1:])
    names = [name for name in {**primary, **other} if primary.get(name) != other.get(name)]
    differences = [f"{n} is {other.get(n)} and not {primary.get(n)}" for n in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        differences.append(f"and {len(names) - _MAX_NAMED} more")
    raise ValueError(
        f"process {process} would train another run than process 0: {', '.join(differences)}; "
        "start all processes with the same command, files and installation."
    )


def _facts(
    config: TrainConfig, init_from: InitFrom | None, resume_overrides: Sequence[str]
) -> dict[str, Any]:
    facts: dict[str, Any] = dict(_leaves(to_dict(config)))
    facts["--init-from"] = "absent" if init_from is None else "given"  # its path may differ
    facts["--init-optimizer-state"] = init_from is not None and init_from.optimizer_state
    facts["--resume-overrides"] = ",".join(sorted(resume_overrides)) or None
    facts["the text of maxmars"] = package_digest()
    facts["python"] = platform.python_version()
    facts |= package_versions()
    return facts | {name: getattr(jax.config, name) for name in _JAX_SETTINGS}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values in a result of `to_dict`, paths excepted."""
    field = name.rpartition(".")[2]
    if field in _PATHS:
        return
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from _leaves(child, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
