"""Text to tokens to batches: tokenizers, token shards on disk, and the input pipeline."""
