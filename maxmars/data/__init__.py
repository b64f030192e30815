"""Text to tokens to batches: tokenizers, token shards on disk, and the input pipeline.

`dataset` and `documents` open a directory of tokens as Grain datasets, for maps and packing of your
own; `examples` is what a run reads, in order. These three are imported at their first use, because
tokenizers and `maxmars data` need neither Grain nor JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxmars.data.datasets import dataset, documents, examples

__all__ = ["dataset", "documents", "examples"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from maxmars.data import datasets

    return getattr(datasets, name)
