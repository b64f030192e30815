"""`maxmars data prepare` on Apache Beam: the same tasks, the same bytes.

    python3 -m venv beam
    beam/bin/pip install 'apache-beam[gcp]==2.77.*' 'protobuf<7' 'pyarrow<26' \
      etils[epath] gcsfs jaxtyping numpy rich tiktoken tyro
    beam/bin/pip install --no-deps .
    beam/bin/python tools/prepare_on_beam.py 'gs://BUCKET/texts/*.jsonl' gs://BUCKET/tokens \
      --tokenizer gpt2 -- --runner DataflowRunner --project PROJECT --region REGION \
      --temp_location gs://BUCKET/beam --sdk_container_image IMAGE

Before `--` stand the words of `maxmars data prepare`, after it Beam's options. Beam needs older
libraries than maxmars, hence an environment of its own; of maxmars, preparing needs no other than
these. Workers on other machines need the same packages, for example by a container image, and
SOURCE and OUT must be in a bucket or in a directory that all machines share. On this machine:

    beam/bin/python tools/prepare_on_beam.py 'texts/*.txt' tokens \
      -- --runner DirectRunner --direct_num_workers 2 --direct_running_mode multi_processing
"""

from __future__ import annotations

import sys

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from maxmars.cli.data import PrepareArguments, open_preparation, training_command
from maxmars.cli.parse import parse_options


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parse_options(PrepareArguments, words[:end], prog="prepare_on_beam.py")
    if arguments.workers is not None or arguments.tasks:
        sys.exit("error: Beam shares the work, so --workers and --tasks do not apply.")
    preparation = open_preparation(arguments)
    preparation.begin()
    with beam.Pipeline(options=PipelineOptions(words[end + 1 :])) as pipeline:
        numbers = pipeline | beam.Create(range(len(preparation.recipe.tasks))) | beam.Reshuffle()
        _ = numbers | beam.Map(preparation.run_task)
    metadata = preparation.finish()
    assert metadata is not None  # all tasks are done
    tokens = {name: split.num_tokens for name, split in metadata.splits.items()}
    print(training_command(arguments.out, tokens, metadata.tokenizer))


if __name__ == "__main__":
    main()
