"""`maxmars generate`: continue prompts with a trained model.

`eval/generate.py` yields pieces of text of all prompts as they are drawn; here they are put in the
order of the prompts, and printed at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from maxmars.cli.parse import parse_options
from maxmars.config import MeshConfig
from maxmars.config.checks import CheckedConfig, Count, NotNegative, Positive, Rule, UsageError
from maxmars.config.errors import about
from maxmars.distributed.progress import Progress, loading_jax

if TYPE_CHECKING:  # it loads JAX, which --help and wrong arguments need not wait for
    from maxmars.eval.generate import Piece

_SEPARATOR = "---------------"
_PROBABILITY = Rule(lambda value: 0 < value <= 1, "must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(CheckedConfig):
    """Continue prompts with a trained model.

    Text is printed as it is drawn, each prompt before its continuation. Several prompts are
    continued together, and printed in their order. When the model's context is full, generation
    goes on from the last half of the context."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        'maxmars generate runs/quickstart --prompt "def " --prompt "class "',
        "maxmars generate hf:openai-community/gpt2 --interactive",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "prompt",
        "interactive",
        "json",
        "max-new-tokens",
        "temperature",
        "top-k",
        "top-p",
        "seed",
    )

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Model: the working directory of a run, such as runs/quickstart, for its newest checkpoint,
    one of the checkpoints, a Hugging Face directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    prompt: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")
    ] = ()
    """Text to continue; give the option several times for several prompts."""
    interactive: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Read prompts, one a line, from a terminal or pipe to Ctrl-D; Ctrl-C ends a continuation."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a line of JSON for each prompt when its continuation has ended: `prompt`,
    `continuation`, `num_tokens`, and `end`, which is "end_of_text", "length" or "interrupted"."""
    max_new_tokens: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 200
    """Largest number of tokens in a continuation, which ends earlier at an end of text."""
    temperature: NotNegative[float] = 0.8
    """Sampling temperature; below 1 draws likely tokens more often, 0 always the likeliest."""
    top_k: Positive[int] | None = 40
    """Number of likeliest tokens to sample from; None samples from all."""
    top_p: Annotated[float, _PROBABILITY] | None = None
    """Sample from the likeliest tokens that together have this probability; None from all."""
    seed: int = 0
    """Seed of the sampling. A continuation does not depend on the other prompts; a prompt given
    twice gets two samples."""
    batch_size: Annotated[Count[int], tyro.conf.arg(metavar="N")] = 16
    """Number of prompts continued at once."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices: `tensor` and `fsdp` split a model that is too large for one device."""


def run(argv: list[str]) -> int:
    """Run `maxmars generate`."""
    # Prompts go into no record, and may look like credentials.
    arguments = parse_options(GenerateArguments, argv, prog="maxmars generate", recorded=False)
    prompts, as_json = list(arguments.prompt), arguments.json
    if bool(prompts) == arguments.interactive:
        raise UsageError("give prompts either by --prompt TEXT or by --interactive.")
    for prompt in prompts:
        _check_is_text(prompt, "--prompt")
    with Progress(stderr=True) as progress:
        stream = _load(arguments, progress)
        if arguments.interactive:
            while (prompt := _read_prompt()) is not None:
                _print_continuation(prompt, stream([prompt]), as_json=as_json, is_interactive=True)
            return 0
        for index, pieces in itertools.groupby(_in_order(stream(prompts)), lambda p: p.index):
            if index and not as_json:
                print(_SEPARATOR)
            _print_continuation(prompts[index], pieces, as_json=as_json, is_interactive=False)
    if not as_json:
        mesh = [
            f"--mesh.{axis.name}={size}"
            for axis in dataclasses.fields(MeshConfig)
            if (size := getattr(arguments.mesh, axis.name)) != axis.default
        ]
        again = shlex.join(["maxmars", "generate", arguments.target, "--interactive", *mesh])
        print(f"next: {again}", file=sys.stderr)
    return 0


def _check_is_text(prompt: str, origin: str) -> None:
    # In the command line, Python has lone surrogates for bytes that are no UTF-8.
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UsageError(f"{origin} {prompt!a} is not UTF-8 text.")


def _load(
    arguments: GenerateArguments, progress: Progress
) -> Callable[[list[str]], Iterator[Piece]]:
    """Load the model; returns a function from prompts to pieces of their continuations."""
    with loading_jax(stderr=True):
        from maxmars.distributed import sharding
        from maxmars.eval import load
        from maxmars.eval.generate import INTERACTIVE_CHUNK, MAX_CHUNK, Sampling, stream_texts
        from maxmars.eval.trained_model import find_target
        from maxmars.train import compile_cache

    # Outside the block below, as a download from the hub shows its own progress.
    target = find_target(arguments.target)
    with progress.waiting(f"loading {arguments.target}"):
        mesh = sharding.make_mesh(arguments.mesh)
        compile_cache.keep_in_cache(mesh.devices.flat[0].platform)
        trained = load(target, mesh=mesh)
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    seen = Counter[bytes]()

    def stream(prompts: list[str]) -> Iterator[Piece]:
        pieces = stream_texts(
            trained,
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            chunk=MAX_CHUNK if arguments.json else INTERACTIVE_CHUNK,
            seen=seen,
        )
        with progress.waiting("compiling for this length"):
            first = next(pieces)
        yield first
        yield from pieces

    return stream


def _in_order(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces sorted by prompt: each piece of the first prompt at once, then the second's, ..."""
    waiting: dict[int, list[Piece]] = {}
    current = 0
    for piece in pieces:
        waiting.setdefault(piece.index, []).append(piece)
        while ready := waiting.pop(current, None):
            yield from ready
            if ready[-1].end is None:
                break
            current += 1


def _print_continuation(
    prompt: str, pieces: Iterable[Piece], *, as_json: bool, is_interactive: bool
) -> None:
    """Print a prompt and the pieces of its continuation, or a line of JSON after the last piece.

    Ctrl-C ends the continuation if the prompt was typed at a terminal, else the command.
    """
    received: list[Piece] = []
    try:
        for piece in pieces:
            if not as_json:
                print(piece.text if received else prompt + piece.text, end="", flush=True)
            received.append(piece)
    except KeyboardInterrupt:
        if not (is_interactive and sys.stdin.isatty()):
            raise
    fields = {
        "prompt": prompt,
        "continuation": "".join(piece.text for piece in received),
        "num_tokens": sum(len(piece.tokens) for piece in received),
        "end": (received[-1].end if received else None) or "interrupted",
    }
    print(json.dumps(fields, ensure_ascii=False) if as_json else "", flush=True)
    if is_interactive and not as_json:
        print(file=sys.stderr)


def _read_prompt() -> str | None:
    """Read the next prompt from standard input; None at its end."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    try:
        # `input` may only be used where it prints to a terminal; else "> " would be in the output.
        if is_terminal and sys.stdout.isatty():
            import readline  # noqa: F401  (gives input() editing and a history)

            prompt = input("> ")
        else:
            if is_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            with about("standard input"):
                line = sys.stdin.readline() if sys.stdin is not None else ""
            if not line:
                raise EOFError
            prompt = line.removesuffix("\n")
    except EOFError:
        if is_terminal:
            print(file=sys.stderr)  # Ctrl-D leaves the cursor behind "> "
        return None
    _check_is_text(prompt, "the prompt")
    return prompt
