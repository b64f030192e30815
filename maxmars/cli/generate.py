"""`maxmars generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from maxmars.config import MeshConfig
from maxmars.config.command_line import UsageError, parse_options


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue prompts with a trained model: the newest checkpoint of a run, one of its
    checkpoints, or a Hugging Face GPT-2 directory."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Working directory of a run, such as runs/quickstart, one of its checkpoints, a Hugging Face
    directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    prompt: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")
    ] = ()
    """Text to continue; may be given several times."""
    prompt_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with a prompt in each line; empty lines are skipped."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """Write one JSON object a line there, with `prompt` and `continuation`, and print no text."""
    max_new_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 200
    """Most tokens to add to a prompt; it ends earlier at an end of text."""
    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability; None takes all."""
    seed: int = 0
    """Seed of the sampling. A continuation does not depend on the other prompts; a prompt that is
    given twice gets two samples."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Number of prompts continued at once."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices: `tensor` and `fsdp` split a model that is too large for one."""


def run(argv: list[str]) -> int:
    """Run `maxmars generate`."""
    arguments = parse_options(GenerateArguments, argv, prog="maxmars generate")
    prompts, output = _prompts(arguments), arguments.output
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        where = f"lies in {output.parent}, which does not exist"
        problem = "is a directory" if output.is_dir() else where
        raise UsageError(f"--output {output} {problem}; name a file to write.")
    # Imported late: they load JAX, which --help and wrong arguments need not wait for.
    from maxmars.distributed import sharding
    from maxmars.eval import load
    from maxmars.eval.generate import Sampling, generate_texts

    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    continuations = generate_texts(
        load(arguments.target, mesh=sharding.make_mesh(arguments.mesh)),
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
    )
    found = list(zip(prompts, continuations, strict=True))
    if output is None:
        print("\n---------------\n".join(prompt + continuation for prompt, continuation in found))
    else:
        lines = [json.dumps({"prompt": p, "continuation": c}, ensure_ascii=False) for p, c in found]
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{len(lines):,} continuations written to {output}")
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
