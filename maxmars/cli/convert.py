"""`maxmars export` and `maxmars import`: models to and from Hugging Face, on a disk or the hub."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig, UsageError
from maxmars.config.errors import about


@dataclass(frozen=True, kw_only=True)
class ExportArguments(CheckedConfig):
    """Write a model as a directory that transformers.GPT2LMHeadModel.from_pretrained loads, or the
    class that the `export` of a module of your own names.

    Its README.md is a model card: what the run says about architecture, data, optimizer, losses,
    scores, hardware and digests; loss_curve.png is drawn with the extra `report`. Read the card
    before you publish it.

    The weights go to model.safetensors, above 5 GB to several files; the weights of one file are
    in memory at once. With --push, the directory is then uploaded to the Hugging Face hub.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars export runs/quickstart hf/quickstart",
        "maxmars export runs/quickstart hf/quickstart --push OWNER/NAME --private",
    )

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Working directory of a run, one checkpoint of it such as runs/quickstart/checkpoints/500, a
    Hugging Face directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    out: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[OUT]")] = None
    """Directory to make. With --push it may be left out, if TARGET is a directory that was exported
    before."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in it; float32 keeps every bit."""
    push: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """Upload the directory to this model of the Hugging Face hub, which is made if it is missing
    (extra `hf`). Log in before by `hf auth login`, or set HF_TOKEN."""
    private: bool = False
    """With --push, make it private, if it is new."""
    report: Annotated[str | None, tyro.conf.arg(metavar="FILE.json,...")] = None
    """What `maxmars eval TARGET --output FILE.json` wrote: its scores are told in the card."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments(CheckedConfig):
    """Write a Hugging Face GPT-2 as a checkpoint, with digests, in a new directory.

    Commands that take a run also take a Hugging Face model as it is; import it where later damage
    must be noticed, or the model must be in a bucket.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars import hf:openai-community/gpt2 runs/gpt2",
        "maxmars import hf/my_model gs://bucket/runs/my_model",
    )

    hf_model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_MODEL")]
    """hf:OWNER/NAME[@REVISION] on the hub, or a directory with config.json, model.safetensors (or
    several such files and their index), and tokenizer files."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to make."""
    eot_token: str | None = None
    """The token of its vocabulary that ends a document; by default the one that its files name."""


def run_export(argv: list[str]) -> int:
    """Run `maxmars export`."""
    arguments = parse_options(ExportArguments, argv, prog="maxmars export")
    if arguments.push is None:
        if arguments.out is None:
            raise UsageError("OUT is missing; name the directory to make.")
        if arguments.private:
            raise UsageError("--private belongs to --push OWNER/NAME; give both or none.")
    elif arguments.out is None:
        given = {"--dtype": arguments.dtype != "float32", "--report": arguments.report is not None}
        for flag in filter(given.get, given):
            raise UsageError(
                f"{flag} needs OUT: without it, the directory {arguments.target} is pushed as it "
                "is."
            )
    # Nobody shall wait for an export that cannot be pushed.
    if arguments.push is not None:
        _check_push(arguments)
    directory, architecture = arguments.target, ""
    if arguments.out is not None:
        directory = arguments.out
        architecture = _export(arguments, directory)
    if arguments.push is not None:
        return _push(directory, arguments.push, private=arguments.private)
    print(f'load it by transformers.{architecture}.from_pretrained("{directory}")')
    return 0


def _check_push(arguments: ExportArguments) -> None:
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.model import hub, huggingface

    repository, out = arguments.push or "", arguments.out
    try:
        hub.check_name(repository)
    except ValueError as error:
        raise UsageError(f"--push {error}") from error
    if out is None:
        directory = Path(arguments.target).expanduser()
        if not huggingface.is_hf_directory(directory):
            raise UsageError(
                f"OUT is missing, and {arguments.target} is no Hugging Face directory that could "
                "be pushed as it is; name the directory to make."
            )
        huggingface.open_weights(directory, huggingface.read_config(directory))
    elif Path(out).expanduser().exists():
        raise FileExistsError(
            f"{out} exists; push it as it is by "
            f"`{_push_command(out, repository, private=arguments.private)}`, delete it, or choose "
            "another name."
        )
    hub.check_push(repository, private=arguments.private)


def _export(arguments: ExportArguments, out: str) -> str:
    """Returns the class of `transformers` that loads it."""
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.eval.trained_model import Exported, export_model
        from maxmars.train.card import CARD, read_report, write_card

    reports = [read_report(path) for path in (arguments.report or "").split(",") if path]
    card_notes = []

    def add_card(directory: Path, exported: Exported) -> None:
        name, hub = Path(out).name, arguments.push
        card_notes[:] = write_card(directory, exported, name=name, hub=hub, reports=reports)

    exported = export_model(
        arguments.target,
        out,
        dtype=arguments.dtype,
        add_files=add_card,
    )
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    print(
        f"{out}: {exported.name}, {exported.num_bytes / 1e9:.3g} GB of {arguments.dtype} weights "
        f"in {files}"
    )
    for note in [*exported.notes, *card_notes]:
        print(note)
    print(f"{CARD} in it is the model card; read it, and choose a license there")
    return exported.architecture


def _push(directory: str, repository: str, *, private: bool) -> int:
    from maxmars.model import hub

    again = _push_command(directory, repository, private=private)
    still_here = f"{directory} is whole; push it again by `{again}`"
    pushed = None
    with contextlib.suppress(KeyboardInterrupt), about(still_here):
        pushed = hub.push(Path(directory).expanduser(), repository, private=private)
    if pushed is None:
        print(f"\ninterrupted; {still_here}", file=sys.stderr)
        return 130
    kind = "private" if pushed.private else "public"
    if not pushed.is_new:
        print(f"{repository} ({kind}) has these files already; nothing changed: {pushed.url}")
    else:
        print(f"pushed to {repository} ({kind}): {pushed.url}")
    if pushed.deleted:
        print(f"deleted there, as of another model: {', '.join(pushed.deleted)}")
    print(f'next: maxmars generate hf:{repository} --prompt "The "')
    return 0


def _push_command(directory: str, repository: str, *, private: bool) -> str:
    words = ["maxmars", "export", directory, "--push", repository]
    return shlex.join([*words, "--private"] if private else words)


def run_import(argv: list[str]) -> int:
    """Run `maxmars import`."""
    arguments = parse_options(ImportArguments, argv, prog="maxmars import")
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.eval.trained_model import import_model
        from maxmars.model.parameters import Parameters

    model = import_model(arguments.hf_model, arguments.out, eot_token=arguments.eot_token)
    count = Parameters(model.config).count / 1e6
    print(f"{arguments.out}: {count:.2f}M parameters of {model.origin} as checkpoint 0")
    print(f"next: {shlex.join(['maxmars', 'eval', arguments.out])}")
    return 0
