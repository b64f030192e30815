"""Checks of a run before machines are requested: data, packages, keys and GPUs.

The run would else fail on its hosts, days later if there is a queue. As a user's --setup or --patch
may mount and install anything, most checks pass with one of them.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath

from maxmars.config import GPT2Config, MixtureConfig, MixturePart, TokenShardsConfig, TrainConfig
from maxmars.config.checks import UsageError
from maxmars.config.errors import pip_install
from maxmars.config.user_code import sources_in
from maxmars.launch.job import PackedCode, RunOptions
from maxmars.launch.slurm import SlurmOptions

_TRACKERS = {"wandb": "log.wandb", "tensorboardX": "log.tensorboard"}
_KEY = "WANDB_API_KEY"


def data_paths(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Options and paths of the directories of tokens and files of text that a config names."""
    data = config.data
    if isinstance(data, TokenShardsConfig):
        yield "--data.path", data.path
    elif isinstance(data, MixtureConfig):
        parts = (part for part in data.parts if isinstance(part, MixturePart))
        yield from (("--data.path", part.path) for part in parts)
    paths = (one.place for one in config.eval.data)
    yield from (("--eval.data", path) for path in paths if isinstance(path, str))


def check_data(
    config: TrainConfig,
    options: RunOptions,
    code: PackedCode,
    *,
    mounts: Sequence[str],
    way_out: str,
) -> None:
    """Check that the hosts find the data: in a bucket, among the files that go along, or below one
    of `mounts`; with --setup everything passes.

    Raises:
      UsageError: the hosts do not find a path; the message has `way_out`, how to bring it there.
    """
    if options.setup is not None:
        return
    for option, path in data_paths(config):
        is_mounted = any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)
        if not (path.startswith("gs://") or is_mounted or code.has(path)):
            raise UsageError(
                f"{option} {path} is a path of this machine, and nothing brings it to the "
                f"hosts; name one in a bucket, such as gs://BUCKET/tokens, {way_out}, or "
                "take a small one of this folder along by --include."
            )


def check_packages(config: TrainConfig, options: RunOptions, *, shares_packages: bool) -> None:
    """Check that the hosts have the packages and the key of the run's trackers. Where the hosts
    have the packages of this Python, also import the user's files here.

    Args:
      config: config of the run.
      options: options of the launch; with --setup everything passes.
      shares_packages: whether the hosts have at least the packages that are installed here.

    Raises:
      UsageError: a package or the key of Weights & Biases is missing on the hosts. Any other
        exception is that of `Source.load`.
    """
    if options.setup is not None:
        return
    for source in sources_in(config) if shares_packages else ():
        source.load()
    log = config.log
    wanted = {"wandb": log.wandb is not None, "tensorboardX": log.tensorboard}
    for package, field in _TRACKERS.items():
        if wanted[package] and not (shares_packages and importlib.util.find_spec(package)):
            raise UsageError(
                f"--{field} needs the package {package}, which the run's Python does not have; "
                "install it there, on hosts elsewhere by --setup FILE.sh, or leave it out."
            )
    if log.wandb == "online" and _KEY not in options.env and not (shares_packages and _has_key()):
        raise UsageError(
            f"--log.wandb online needs a key, which the hosts do not have: set {_KEY} here and add "
            f"--env {_KEY}, or take --log.wandb offline."
        )


def _has_key() -> bool:
    """Whether Weights & Biases finds a key on this machine."""
    homes = (Path.home() / ".netrc", Path(os.environ.get("NETRC", "")))
    return _KEY in os.environ or any(path.is_file() for path in homes)


def check_gpus(options: SlurmOptions) -> None:
    """Check that the JAX of this Python, which a SLURM job uses, can use the job's GPUs.

    Raises:
      UsageError: JAX would train on CPUs.
    """
    gpu_option = options.gpu_option
    if gpu_option is None or options.may_have_other_packages:
        return
    platforms = os.environ.get("JAX_PLATFORMS", "")  # the job inherits it
    if platforms.partition(",")[0] == "cpu":
        raise UsageError(
            f"{gpu_option}, and JAX_PLATFORMS={platforms} is set, by which the run would train on "
            "CPUs: unset it."
        )
    if not _has_jax_plugin():
        raise UsageError(
            f"{gpu_option}, and the JAX of {sys.executable}, which the run uses, has no CUDA and "
            f"would train on CPUs: {pip_install('cuda')}."
        )


def _has_jax_plugin() -> bool:
    """Whether JAX finds a plugin; without one it knows only CPUs and TPUs."""
    spec = importlib.util.find_spec("jax_plugins")  # a namespace package
    folders = [] if spec is None else spec.submodule_search_locations or []
    return bool(entry_points(group="jax_plugins")) or any(pkgutil.iter_modules(folders))


def estimate_parameters(config: TrainConfig) -> int:
    """Approximate number of parameters of a GPT-2; 0 for another model."""
    model = config.model
    if not isinstance(model, GPT2Config):
        return 0
    # A block has 4 D² in attention and 8 D² in the MLP.
    return model.embed_dim * (12 * model.num_layers * model.embed_dim + model.vocab_size)
