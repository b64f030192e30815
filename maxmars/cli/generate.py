"""`maxmars generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from maxmars.cli.config_file import UsageError
from maxmars.config import MeshConfig

_RULE = "-" * 15


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue prompts with a trained model: the newest checkpoint of a run, one of its
    checkpoints, or a Hugging Face GPT-2 directory."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Working directory of a run, such as runs/quickstart, one of its checkpoints, or a Hugging
    Face directory."""
    prompt: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")
    ] = ()
    """Text to continue; may be given several times."""
    prompt_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with a prompt in each line; empty lines are skipped."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """Write a JSON object with `prompt` and `continuation` a line there, instead of text to the
    terminal."""
    max_new_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 200
    """Most tokens to add to a prompt; it ends earlier at an end of text."""
    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability; None takes all."""
    seed: int = 0
    """Seed of the sampling. What a prompt gets does not depend on the others; one that is given
    twice gets two samples."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Prompts that are continued at once."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices: `tensor` and `fsdp` split a model that is too large for one."""


def run(argv: list[str]) -> int:
    """Run `maxmars generate`."""
    arguments = tyro.cli(GenerateArguments, args=argv, prog="maxmars generate")
    prompts = _prompts(arguments)
    _check_output(arguments.output)
    from maxmars import sharding  # loads JAX
    from maxmars.generate import generate_texts
    from maxmars.sampling import Sampling
    from maxmars.trained_model import open_trained_model

    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    model = open_trained_model(arguments.target, mesh=sharding.make_mesh(arguments.mesh))
    continuations = generate_texts(
        model,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
    )
    found = list(zip(prompts, continuations, strict=True))
    if arguments.output is None:
        print(f"\n{_RULE}\n".join(prompt + continuation for prompt, continuation in found))
    else:
        lines = [json.dumps({"prompt": p, "continuation": c}, ensure_ascii=False) for p, c in found]
        arguments.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


def _prompts(arguments: GenerateArguments) -> list[str]:
    path = arguments.prompt_file
    if (path is None) == (not arguments.prompt):
        raise UsageError("give prompts either by --prompt TEXT or by --prompt-file FILE.")
    if path is None:
        return list(arguments.prompt)
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); --prompt-file takes a text file with "
            "a prompt in each line."
        ) from error
    if not prompts:
        raise ValueError(f"{path} has no prompt; --prompt-file takes one in each line.")
    return prompts


def _check_output(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a directory" if path.is_dir() else f"lies in {path.parent}, which does not exist"
        raise UsageError(f"--output {path} {what}; name a file to write.")
