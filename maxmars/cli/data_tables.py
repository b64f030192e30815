"""What `maxmars data inspect` prints of a directory of tokens."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from maxmars.data.inspect import format_of, load_matching_tokenizer, summarise
from maxmars.data.sources import Metadata

_SAMPLE_CHARACTERS = 300


def print_summary(directory: Path, metadata: Metadata) -> None:
    """Print where the tokens are from, their counts, and a sample of each split."""
    console = Console(highlight=False, soft_wrap=True)
    facts = {
        "format": format_of(metadata),
        "source": metadata.source,
        "command": metadata.command,
        "tokenizer": f"{metadata.tokenizer}, vocabulary of {metadata.vocab_size:,}",
        "digest": metadata.tokenizer_digest,
        "part": metadata.part and f"{metadata.part.index} of {metadata.part.count}, from 0",
    }
    console.print(f"[bold]{directory}[/]")
    for name, value in facts.items():
        if value is not None:
            console.print(f"  {name:<10}", value, markup=False)
    try:
        tokenizer = load_matching_tokenizer(directory, metadata)
    except (ImportError, OSError, ValueError) as error:
        console.print(f"no sample: {error}", markup=False)
        tokenizer = None
    summaries = summarise(directory, metadata, tokenizer)
    table = Table("split", *(f"{name}" for name in _COLUMNS))
    for column in table.columns[1:]:
        column.justify = "right"
    for s in summaries:
        ratio = "" if s.bytes_per_token is None else f"{s.bytes_per_token:.2f}"
        a_document = f"{s.num_tokens / s.num_documents:,.1f}" if s.num_documents else ""
        counts = (s.num_tokens, s.num_documents, s.num_shards)
        table.add_row(s.name, *(f"{count:,}" for count in counts), a_document, ratio)
    console.print(table)
    for s in summaries:
        if s.sample is not None:
            cut = s.sample[:_SAMPLE_CHARACTERS]
            console.print(f"{s.name}: {cut!r}{'...' if cut != s.sample else ''}", markup=False)


_COLUMNS = ("tokens", "documents", "files", "tokens/document", "bytes/token")
