"""A trained model, from wherever one may be: a run, one of its checkpoints, or Hugging Face."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from maxmars import distributed, hf, sharding
from maxmars.checkpoint import find, load_model
from maxmars.config import GPT2Config
from maxmars.data.tokenizer import Tokenizer, saved_tokenizer
from maxmars.mesh_checks import check_mesh_divides_model
from maxmars.model import graph_and_abstract_params, logical_axes
from maxmars.workdir import Workdir, require_access, resolve

CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that can be used."""

    config: GPT2Config
    params: Any
    """Nested dict of arrays, on the mesh, in the model's shardings."""
    tokenizer: Tokenizer
    name: str
    """For reports: `quickstart, step 500` or the name of a Hugging Face directory."""
    mesh: Mesh


@dataclass(frozen=True, kw_only=True)
class RunTarget:
    """A target that is a run."""

    workdir: Workdir
    checkpoints: Workdir
    step: int | None
    """None is the newest sound checkpoint."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with.

        Raises:
          FileNotFoundError: the run's directory has none.
          ValueError, ImportError: see `saved_tokenizer`.
        """
        directory = self.workdir / TOKENIZER
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{directory} is missing: beside its checkpoints a run keeps its tokenizer, "
                "without which text cannot be read; copy it from where the run was trained."
            )
        return saved_tokenizer(directory)

    def name(self, step: int) -> str:
        """The name of its model at a step."""
        return f"{self.workdir.name}, step {step}"


@dataclass(frozen=True, kw_only=True)
class HFTarget:
    """A target that is a Hugging Face directory."""

    directory: Path

    def tokenizer(self, config: GPT2Config) -> Tokenizer:
        """Its tokenizer; says so on stderr where GPT-2's must be assumed.

        Raises:
          FileNotFoundError, ImportError, ValueError: see `maxmars.hf.load_hf_tokenizer`.
        """
        tokenizer, is_its_own = hf.load_hf_tokenizer(self.directory, config)
        if not is_its_own and distributed.is_primary():
            print(
                f"{self.directory} has no tokenizer files; its vocabulary has the size of GPT-2's, "
                "whose tokenizer is taken.",
                file=sys.stderr,
            )
        return tokenizer


def open_trained_model(target: str | Path, *, mesh: Mesh) -> TrainedModel:
    """The model of a target, its parameters on a mesh.

    Args:
      target: working directory of a run (the newest sound checkpoint is taken), its `checkpoints`
        directory, one step in there, all of them also on `gs://`, or a Hugging Face GPT-2 directory
        with safetensors.
      mesh: where the parameters go, in the shardings of training; of any size and any number of
        processes, all of which call.

    Raises:
      FileNotFoundError: there is nothing of the kind, or no tokenizer.
      ValueError: what is there is damaged or no GPT-2, or the mesh does not divide it.
      ImportError: the library of the tokenizer (extra `hf`) is not installed.
    """

    def abstract_params(config: GPT2Config) -> Any:
        check_mesh_divides_model(config, mesh.shape)
        shardings = sharding.tree_shardings(mesh, logical_axes(config))
        return sharding.with_shardings(graph_and_abstract_params(config)[1], shardings)

    match find_target(target):
        case HFTarget(directory=directory) as found:
            config = hf.load_config(directory)
            # Its vocabulary is what it is: padded so that `tensor` divides it, nothing changes.
            multiple = math.lcm(config.vocab_pad_multiple, mesh.shape["tensor"])
            config = dataclasses.replace(config, vocab_pad_multiple=multiple)
            hf.open_weights(directory, config)  # what is wrong is found before anything is loaded
            tokenizer, name = found.tokenizer(config), directory.name
            params = hf.load_params(directory, config, abstract_params(config))
        case RunTarget() as found:
            tokenizer = found.tokenizer()
            model = load_model(found.checkpoints, abstract_params, found.step)
            # It need not run on the devices that it was trained on.
            config = dataclasses.replace(model.config, attention="auto")
            params, name = model.params, found.name(model.step)
            if tokenizer.vocab_size > config.vocab_size:
                raise ValueError(
                    f"the tokenizer in {found.workdir / TOKENIZER} has {tokenizer.vocab_size} "
                    f"tokens, but the model only {config.vocab_size}; it is that of another run."
                )
    return TrainedModel(config=config, params=params, tokenizer=tokenizer, name=name, mesh=mesh)


def find_target(target: str | Path) -> RunTarget | HFTarget:
    """What a target is.

    Raises:
      FileNotFoundError: nothing is there, or a run that has not saved a checkpoint.
      ValueError: something else is there.
      ImportError, OSError: it is on `gs://`; see `workdir.require_access`.
    """
    path = resolve(target)
    require_access(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{target} does not exist; name the working directory of a run, such as "
            "runs/quickstart, one of its checkpoints, or a Hugging Face directory."
        )
    found = find(path)
    if found is not None:
        directory, step = found
        checkpoints = resolve(directory)
        return RunTarget(workdir=checkpoints.parent, checkpoints=checkpoints, step=step)
    if isinstance(path, Path) and hf.is_hf_directory(path):
        return HFTarget(directory=path)
    if (path / CHECKPOINTS).is_dir() or path.name == CHECKPOINTS:
        raise FileNotFoundError(
            f"{target} holds no checkpoint yet; a run writes the first after checkpoint.every "
            "steps and one at its end."
        )
    raise ValueError(
        f"{target} is neither a run (it has no directory {CHECKPOINTS}, and is none and no step in "
        "one) nor a Hugging Face directory on a disk (it has no model.safetensors, and no "
        "config.json with a model_type)."
    )
