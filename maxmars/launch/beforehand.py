"""What would fail on other machines only after they were asked for, and what is unwise there."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath

from maxmars.config import (
    GPT2Config,
    MixtureConfig,
    MixturePart,
    TokenShardsConfig,
    TrainConfig,
)
from maxmars.config.checks import UsageError
from maxmars.config.errors import pip_install
from maxmars.config.user_code import sources_in
from maxmars.launch.job import PackedCode, RunOptions
from maxmars.launch.slurm import SlurmOptions

_TRACKERS = {"wandb": "log.wandb", "tensorboardX": "log.tensorboard"}
_KEY = "WANDB_API_KEY"


def data_places(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The directories of tokens and files of text that a config names, each behind its option."""
    data = config.data
    if isinstance(data, TokenShardsConfig):
        yield "--data.path", data.path
    elif isinstance(data, MixtureConfig):
        parts = (part for part in data.parts if isinstance(part, MixturePart))
        yield from (("--data.path", part.path) for part in parts)
    places = (one.place for one in config.eval.data)
    yield from (("--eval.data", place) for place in places if isinstance(place, str))


def check_data_reach(
    config: TrainConfig,
    options: RunOptions,
    code: PackedCode,
    *,
    mounts: Sequence[str],
    way: str,
) -> None:
    """Check that machines elsewhere find the data: in a bucket, in what goes along, or where
    `mounts` or the user's own --setup put them.

    Raises:
      UsageError: they do not; `way` says what would bring them there.
    """
    if options.setup is not None:
        return
    for option, path in data_places(config):
        is_mounted = any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)
        if not (path.startswith("gs://") or is_mounted or code.has(path)):
            raise UsageError(
                f"{option} {path} is a path of this machine, and nothing brings it to the "
                f"hosts; name one in a bucket, such as gs://BUCKET/tokens, {way}, or "
                "take a small one of this folder along by --include."
            )


def check_packages_reach(config: TrainConfig, options: RunOptions, *, has_package: bool) -> None:
    """Check that the run's Python elsewhere has the packages, and the key, of the trackers that the
    run asks for. Where the hosts have what is installed here, also import the user's files, here.

    Args:
      config: of the run.
      options: of the launch; what --setup installs and exports is not known here.
      has_package: whether the hosts have what is installed here, or more.

    Raises:
      UsageError: a package or the key of Weights & Biases is missing there. Any other
        exception is that of `Source.load`.
    """
    if options.setup is not None:
        return
    for source in sources_in(config) if has_package else ():
        source.load()
    log = config.log
    wanted = {"wandb": log.wandb is not None, "tensorboardX": log.tensorboard}
    for package, field in _TRACKERS.items():
        if wanted[package] and not (has_package and importlib.util.find_spec(package)):
            raise UsageError(
                f"--{field} needs the package {package}, which the run's Python does not have; "
                "install it there, on hosts elsewhere by --setup FILE.sh, or leave it out."
            )
    if log.wandb == "online" and _KEY not in options.env and not (has_package and _has_key()):
        raise UsageError(
            f"--log.wandb online needs a key, which the hosts do not have: set {_KEY} here and add "
            f"--env {_KEY}, or take --log.wandb offline."
        )


def _has_key() -> bool:
    """Whether Weights & Biases finds a key here."""
    homes = (Path.home() / ".netrc", Path(os.environ.get("NETRC", "")))
    return _KEY in os.environ or any(path.is_file() for path in homes)


def check_gpus_reach(options: SlurmOptions) -> None:
    """Check that the JAX of this Python, which the run uses, can use the job's GPUs.

    Raises:
      UsageError: JAX would train on CPUs.
    """
    asked = options.asked_gpus
    if asked is None or options.may_have_other_packages:  # which are not known here
        return
    platforms = os.environ.get("JAX_PLATFORMS", "")  # which the job inherits
    if platforms.partition(",")[0] == "cpu":
        raise UsageError(
            f"{asked}, and JAX_PLATFORMS={platforms} is set, by which the run would train on CPUs: "
            "unset it."
        )
    if not _has_jax_plugin():
        raise UsageError(
            f"{asked}, and the JAX of {sys.executable}, which the run uses, has no CUDA and would "
            f"train on CPUs: {pip_install('cuda')}."
        )


def _has_jax_plugin() -> bool:
    """Whether JAX finds a plugin, without which it knows CPUs and TPUs alone."""
    spec = importlib.util.find_spec("jax_plugins")  # a namespace package
    folders = [] if spec is None else spec.submodule_search_locations or []
    return bool(entry_points(group="jax_plugins")) or any(pkgutil.iter_modules(folders))


def parameters(config: TrainConfig) -> int:
    """Parameters of a GPT-2, about; 0 of another model."""
    model = config.model
    if not isinstance(model, GPT2Config):
        return 0
    return model.embed_dim * (12 * model.num_layers * model.embed_dim + model.vocab_size)
