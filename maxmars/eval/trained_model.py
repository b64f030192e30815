"""Trained models: reading from a run, a checkpoint or Hugging Face, and export to Hugging Face.

`find_target` resolves a path to a `Target`, which knows config, parameters and tokenizer of a run
and of a Hugging Face model alike. Damage of a checkpoint shows only when its arrays are read, so
`Target.first_sound` repeats a whole use with the next older one. Code of the user's own runs only
from the run's copies (`recorded_code`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Integer

from maxmars.checkpoint import Checkpoint, find, first_sound, load_params, read
from maxmars.config import DataConfig, EvalConfig, GPT2Config, MeshConfig, ModelConfig, from_dict
from maxmars.config.checks import require
from maxmars.config.errors import EXTERNAL_ERRORS, about, in_words
from maxmars.config.mesh import check_mesh_divides_model
from maxmars.data import tokenizer as tokenizers
from maxmars.data.tokenizer import GPT2Tokenizer, Tokenizer
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import is_remote, naming, read_json, resolve
from maxmars.distributed.progress import Progress
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.workdir import CHECKPOINTS, CONFIG, MODEL_SOURCE, SOURCES, TOKENIZER
from maxmars.model import hub, huggingface
from maxmars.model.language_model import LanguageModel, make_model
from maxmars.model.parameters import Parameters, abstract_module

Result = TypeVar("Result")
_MOST_PADDING = 256  # rows of a vocabulary are rounded up to a multiple of 64, 128 or 256


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model as `load` returns it."""

    config: ModelConfig
    params: Any
    """Nested dict of arrays, on the mesh, in the shardings of training: the evaluated parameters,
    where a run trains others (with `ema_decay`, or by its optimizer)."""
    tokenizer: Tokenizer
    mesh: Mesh
    name: str
    """For people: `quickstart, step 500`, with `, evaluation parameters` where they are not the
    trained ones; the name of a Hugging Face directory; or OWNER/NAME@ and the first digits of the
    commit for a model on the hub."""
    origin: str = ""
    """Path of the checkpoint or Hugging Face directory, or `hf:OWNER/NAME@COMMIT`."""
    digest: str | None = None
    """Digest of the whole state in the checkpoint; None for a Hugging Face directory."""

    @property
    def start(self) -> int:
        """Id of the token that stands for an empty prompt. In a run of maxmars a text follows the
        end of another, whatever token the tokenizer names as the beginning."""
        return self.tokenizer.eot if self.digest is not None else self.tokenizer.bos

    @property
    def model(self) -> LanguageModel:
        """The model with these parameters: int32 tokens [B, T] to logits [B, T, V]."""
        return make_model(self.config, self.params)

    def logits(
        self, tokens: Integer[np.ndarray | Array, "B T"]
    ) -> Float[np.ndarray, "B T vocab_size"]:
        """Logits of the next token at every position, in float32 at least.

        Compiled once for each shape, while `model` compiles at each call. Any number of rows is
        split over the mesh. Every process calls with the same tokens and gets all logits.

        Raises:
          ValueError: the rows are longer than `max_seq_len`.
        """
        shards = sharding.batch_shards(self.mesh)
        padding = -len(tokens) % shards
        rows = np.pad(np.asarray(tokens, np.int32), ((0, padding), (0, 0)))
        with jax.set_mesh(self.mesh):
            logits = _logits(self.params, rows, config=self.config)
            return np.asarray(logits)[: len(tokens), :, : self.config.vocab_size]


@functools.partial(jax.jit, static_argnames="config")
def _logits(
    params: Any, tokens: Int[Array, "B T"], *, config: ModelConfig
) -> Float[Array, "B T V"]:
    tokens = sharding.constrain(tokens, "batch", "length")
    logits = make_model(config, params)(tokens)
    return sharding.constrain(logits, None, None, None)  # each process has all of them


def load(path: str | Path | Target, *, mesh: Mesh | None = None) -> TrainedModel:
    """Read a trained model: its parameters, configuration and tokenizer.

    Args:
      path: working directory of a run (its newest sound checkpoint is read), its `checkpoints`
        directory, one step in there, all of them also on `gs://`; a Hugging Face GPT-2 directory
        with safetensors; `hf:OWNER/NAME[@REVISION]` for one on the hub, which is fetched if need
        be; or a result of `find_target`.
      mesh: the mesh of the parameters, in the shardings of training; of any size and any number of
        processes, all of which call. None is the first device of this process.

    Raises:
      FileNotFoundError: there is no model at this path, or no tokenizer.
      ValueError: the model is damaged or no GPT-2, its code differs from the recorded code, or the
        mesh does not divide the model.
      ImportError: the tokenizer's library (extra `hf`) is not installed.
      OSError: a model on the hub cannot be fetched; see `hub.fetch`.
    """
    mesh = mesh or sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    target = path if isinstance(path, Target) else find_target(path)

    def read_model(checkpoint: Checkpoint | None) -> TrainedModel:
        config = target.config(checkpoint)
        if checkpoint is None:
            # `tensor` must divide the vocabulary, so pad it; padding changes no result.
            multiple = math.lcm(config.vocab_pad_multiple, mesh.shape["tensor"])
            config = dataclasses.replace(config, vocab_pad_multiple=multiple)
        return TrainedModel(
            config=config,
            tokenizer=target.tokenizer(config),
            params=target.params(checkpoint, config, _abstract_params(config, mesh)),
            mesh=mesh,
            name=target.name(checkpoint),
            origin=target.origin(checkpoint),
            digest=None if checkpoint is None else checkpoint.digest,
        )

    return target.first_sound(read_model)


# --- what a path means ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """Location of a trained model: a run, one of its checkpoints, or a Hugging Face directory.

    In the methods, a checkpoint of None stands for the Hugging Face model.
    """

    path: str
    """The argument of `find_target`."""
    directory: epath.Path
    """Working directory of the run, or directory of the Hugging Face model."""
    checkpoints: epath.Path | None = None
    """Directory of the run's checkpoints; None for a Hugging Face model."""
    step: int | None = None
    """Step of the checkpoint; None is the newest sound one."""
    snapshot: hub.Snapshot | None = None
    """Snapshot of a model on the hub; None for other models."""

    def first_sound(self, use: Callable[[Checkpoint | None], Result]) -> Result:
        """Result of `use` for the newest checkpoint in which it finds no damage, see
        `maxmars.checkpoint.first_sound`; for None if this is a Hugging Face model."""
        if self.checkpoints is None:
            return use(None)
        return first_sound(self.checkpoints, lambda checkpoint, skipped: use(checkpoint), self.step)

    def recorded_config(self, checkpoint: Checkpoint | None = None) -> Any:
        """The `ModelConfig` as recorded in the files; no code runs.

        Args:
          checkpoint: a checkpoint of the run; None takes the newest sound one.
        """
        if self.checkpoints is None:
            return huggingface.read_config(Path(self.directory))
        return (checkpoint or read(self.checkpoints, self.step)).config.model

    def config(self, checkpoint: Checkpoint | None = None) -> Any:
        """The `ModelConfig` to use the model on any devices; see `recorded_config`.

        A module of the user's own comes from the run's copy of its file.

        Raises:
          ValueError: see `recorded_code`.
        """
        config = self.recorded_config(checkpoint)
        if isinstance(config, GPT2Config):
            # A run may have recorded an implementation that only its own devices have.
            return dataclasses.replace(config, attention="auto")
        return recorded_code(config, self.directory, MODEL_SOURCE)

    def params(self, checkpoint: Checkpoint | None, config: Any, abstract: Any) -> Any:
        """The parameters, in the shapes, dtypes and shardings of `abstract`."""
        if checkpoint is None:
            return huggingface.load_params(Path(self.directory), config, abstract)
        return load_params(checkpoint, abstract)

    def name(self, checkpoint: Checkpoint | None) -> str:
        """Name of the model, for people; see `TrainedModel.name`."""
        if checkpoint is None:
            return self.directory.name if self.snapshot is None else self.snapshot.name
        evaluated = ", evaluation parameters" if checkpoint.has_evaluation_params else ""
        return f"{self.directory.name}, step {checkpoint.step}{evaluated}"

    def origin(self, checkpoint: Checkpoint | None) -> str:
        """Path that names exactly this checkpoint or model; see `TrainedModel.origin`."""
        if checkpoint is None:
            return str(self.directory) if self.snapshot is None else self.snapshot.origin
        return str(checkpoint.path)

    @property
    def tokenizer_path(self) -> epath.Path:
        """Directory of the tokenizer's files."""
        return self.directory if self.checkpoints is None else self.directory / TOKENIZER

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer that the model was trained with.

        A Hugging Face directory without a tokenizer gets GPT-2's, and a note on stderr, if the
        vocabulary has the size of GPT-2's, or that size rounded up as in nanoGPT (50,304).

        Raises:
          FileNotFoundError: there is no tokenizer, and the vocabulary is not GPT-2's.
          ValueError: the tokenizer has more tokens than the model.
          ValueError, ImportError, OSError: see `maxmars.data.tokenizer.load`.
        """
        directory, is_run = self.tokenizer_path, self.checkpoints is not None
        if is_run and not directory.is_dir():
            raise FileNotFoundError(
                f"{directory} is missing: a run keeps the tokenizer of its data there. Copy it "
                "from where the run was trained, or start its `maxmars train` command again, which "
                "writes it anew; other programs' tokens name it by --data.tokenizer, and data of "
                "your own by GrainConfig(tokenizer='byte') or 'gpt2'."
            )
        try:
            tokenizer = tokenizers.load(directory)
        except FileNotFoundError:
            padding = config.vocab_size - GPT2Tokenizer.vocab_size
            if is_run or not 0 <= padding < _MOST_PADDING:
                raise
            tokenizer = GPT2Tokenizer()
            if processes.is_primary():
                rows = f" and {padding} rows of padding" if padding else ""
                print(
                    f"{self.origin(None)} has no tokenizer files; GPT-2's tokenizer is used, since "
                    f"the vocabulary has its size{rows}.",
                    file=sys.stderr,
                )
        require(
            tokenizer.num_text_ids <= config.vocab_size,
            f"the tokenizer in {directory} has {tokenizer.num_text_ids} tokens, but the model only "
            f"{config.vocab_size}; put the one that it was trained with there.",
        )
        return tokenizer

    def data(self) -> DataConfig | None:
        """The data that a run was trained on; None for a Hugging Face model.

        Functions of the user's own come from the run's copies of their files.

        Raises:
          ValueError: see `recorded_code`.
        """
        if self.checkpoints is None:
            return None
        return recorded_code(read(self.checkpoints, self.step).config.data, self.directory, SOURCES)

    def evaluation(self) -> EvalConfig:
        """Settings of evaluation with which a run last started. Pass them through `recorded_code`
        before a function in them runs. Without this record: defaults, and for a run the number of
        windows that the checkpoint records."""
        if self.checkpoints is None:
            return EvalConfig()
        if (record := read_json(self.directory / CONFIG)) is None:
            return EvalConfig(num_windows=read(self.checkpoints, self.step).config.eval.num_windows)
        with about(self.directory / CONFIG):
            return from_dict(record["eval"])


def _abstract_params(config: ModelConfig, mesh: Mesh) -> Any:
    check_mesh_divides_model(config, mesh.shape)
    return Parameters(config, mesh).sharded


def find_target(path: str | Path) -> Target:
    """Resolve a path to a run, a checkpoint or a Hugging Face directory; fetch `hf:...`.

    Args:
      path: see `load`.

    Raises:
      FileNotFoundError: the path does not exist, or is a run that has not saved a checkpoint.
      ValueError: the path is something else.
      ImportError, OSError: see `files.require_access` for `gs://`, and `hub.fetch` for the hub.
    """
    if hub.is_on_hub(path):
        snapshot = hub.fetch(path)
        return Target(path=str(path), directory=resolve(snapshot.directory), snapshot=snapshot)
    directory = resolve(path)
    if not directory.exists():
        raise FileNotFoundError(
            f"{path} does not exist; name the working directory of a run, such as "
            "runs/quickstart, one of its checkpoints, a Hugging Face directory, or a model on the "
            "hub (hf:OWNER/NAME)."
        )
    if (checkpoints_and_step := find(directory)) is not None:
        checkpoints, step = checkpoints_and_step
        run = checkpoints.parent
        return Target(path=str(path), directory=run, checkpoints=checkpoints, step=step)
    if not is_remote(directory) and huggingface.is_hf_directory(Path(directory)):
        return Target(path=str(path), directory=directory)
    if (directory / CHECKPOINTS).is_dir() or directory.name == CHECKPOINTS:
        raise FileNotFoundError(
            f"{path} holds no checkpoint yet; a run writes the first after checkpoint.every steps "
            "and one at its end."
        )
    raise ValueError(
        f"{path} is neither a run (it has no directory {CHECKPOINTS}), nor a checkpoint, nor a "
        "Hugging Face directory on a disk (it has no model.safetensors, and no config.json with a "
        "model_type)."
    )


# --- export ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of `export_model`."""

    name: str
    architecture: str
    """Class of `transformers` that loads the model."""
    num_parameters: int
    """Number of parameters, vocabulary padding left out."""
    num_bytes: int
    """Size of the weights."""
    num_files: int
    """Number of files with weights."""
    notes: list[str]
    """Sentences about parts that the export lacks."""
    config: ModelConfig
    dtype: huggingface.Dtype
    """Dtype of the weights."""
    target: Target
    checkpoint: Checkpoint | None
    """The exported checkpoint; None for a Hugging Face model."""


def export_model(
    path: str | Path,
    out: str | Path,
    *,
    dtype: huggingface.Dtype = "float32",
    max_file_bytes: int = huggingface.MAX_FILE_BYTES,
    add_files: Callable[[Path, Exported], None] = lambda directory, exported: None,
) -> Exported:
    """Write a model as a Hugging Face directory.

    `out` appears complete or not at all. For GPT-2, memory holds the weights of one file at a time,
    vocabulary padding is left out, and missing biases are written as zeros. A module of the user's
    own gives its fields and arrays in Hugging Face's terms by its method `export`.

    Args:
      path: see `load`.
      out: directory to make.
      dtype: dtype of the written weights.
      max_file_bytes: most bytes of a file of weights.
      add_files: called with the complete directory before it is renamed to `out`; may write more
        files there, such as the model card of `maxmars.train.card`.

    Raises:
      FileExistsError: `out` exists.
      FileNotFoundError, ValueError: see `load`; a model without a tokenizer is exported too.
      OSError: the disk is full or cannot be written to.
    """
    target = find_target(path)
    with _atomic_directory(out) as directory, Progress(stderr=True) as status:
        exported = target.first_sound(
            lambda checkpoint: _write_directory(
                directory, target, checkpoint, dtype, max_file_bytes, status
            )
        )
        status.update("adding files")
        add_files(directory, exported)
        return exported


def _write_directory(
    directory: Path,
    target: Target,
    checkpoint: Checkpoint | None,
    dtype: huggingface.Dtype,
    max_file_bytes: int,
    status: Progress,
) -> Exported:
    """Write weights, configuration and tokenizer of a checkpoint, or of a Hugging Face model."""
    config = target.config(checkpoint)
    model = _hf_model(target, checkpoint, config)
    num_bytes, notes, tokenizer = model.num_bytes(dtype), [], None
    try:
        tokenizer = target.tokenizer(config)
    except EXTERNAL_ERRORS as error:  # the weights are of use without it
        notes.append(f"Tokenizer files were not written: {in_words(error)}")
    files = huggingface.write_model(
        directory,
        dataclasses.replace(model, arrays=_with_progress(model, num_bytes, status)),
        dtype=dtype,
        ends_of_text=None if tokenizer is None else (tokenizer.bos, tokenizer.eot),
        max_file_bytes=max_file_bytes,
    )
    if tokenizer is not None:
        tokenizers.save(tokenizer, directory, max_seq_len=config.max_seq_len)
    num_parameters = sum(map(math.prod, model.shapes.values()))
    if isinstance(config, GPT2Config):  # without the biases of zeros that an export may add
        num_parameters = Parameters(dataclasses.replace(config, vocab_pad_multiple=1)).count
    return Exported(
        name=target.name(checkpoint),
        architecture=model.architecture,
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        num_files=len(files),
        notes=notes,
        config=config,
        dtype=dtype,
        target=target,
        checkpoint=checkpoint,
    )


def _hf_model(target: Target, checkpoint: Checkpoint | None, config: Any) -> huggingface.HFModel:
    """The model in Hugging Face's terms, with arrays that are read one at a time."""
    if checkpoint is None:
        weights = huggingface.open_weights(Path(target.directory), config)
        return huggingface.gpt2_model(
            config, lambda layout: (weights[name].read() for name in layout.names)
        )
    if isinstance(config, GPT2Config):
        return huggingface.gpt2_model(config, functools.partial(_read_layout, checkpoint))
    return _own_export(target, checkpoint, config)


def _with_progress(
    model: huggingface.HFModel, num_bytes: int, status: Progress
) -> Iterator[np.ndarray]:
    """The arrays of a model; `status` shows the name of each before it is written."""
    for name, array in zip(model.shapes, model.arrays, strict=True):
        status.update(f"writing {name} ({num_bytes / 1e9:.1f} GB in all)")
        yield array


def _own_export(target: Target, checkpoint: Checkpoint, config: Any) -> huggingface.HFModel:
    """The model of the user's own module in Hugging Face's terms, by the module's `export`.

    Raises:
      ValueError: the module has no `export`, or `export` returns something else.
    """
    subject = f"{checkpoint.path} holds the model of {config.make}"
    if not hasattr(abstract_module(config), "export"):
        raise ValueError(
            f"{subject}, which has no method export, and is no GPT-2: export cannot know which "
            "model of Hugging Face's it is; add the method, or take the arrays of "
            "`load(...).params` in Python to another format."
        )
    mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    params = target.params(checkpoint, config, _abstract_params(config, mesh))
    match make_model(config, params).module.export():
        case {"architectures": [str(), *_]} as fields, {**arrays} if arrays:
            shapes = {name: np.shape(array) for name, array in arrays.items()}
            return huggingface.HFModel(
                fields=fields, shapes=shapes, arrays=map(np.asarray, arrays.values())
            )
    raise ValueError(
        f"{subject}, whose export must return the fields of config.json, a dict with "
        "architectures, and a dict of arrays by name."
    )


def _read_layout(checkpoint: Checkpoint, layout: huggingface.HFLayout) -> Iterable[np.ndarray]:
    """Read one parameter of a checkpoint as Hugging Face's arrays, one a layer where stacked."""
    leaf = flatten_dict(Parameters(checkpoint.config.model).abstract)[layout.path]
    array = np.asarray(
        jax.tree.leaves(load_params(checkpoint, unflatten_dict({layout.path: leaf})))[0]
    )
    return array if layout.stacked else [array]


@contextlib.contextmanager
def _atomic_directory(out: str | Path) -> Generator[Path]:
    """A directory that is renamed to `out` at the end of the block, and removed after an error."""
    if "://" in str(out):
        raise ValueError(f"{out} is no local path; write to a local disk and copy the result.")
    out = Path(resolve(out))
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another name.")
    directory = out.with_name(f".{out.name}.partial")
    shutil.rmtree(directory, ignore_errors=True)  # left by an attempt that was killed
    directory.mkdir(parents=True)
    try:
        with naming(out):
            yield directory
            for path in (*directory.rglob("*"), directory):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)  # else a power cut could leave the name without the contents
                os.close(descriptor)
            directory.rename(out)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
