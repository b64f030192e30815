"""`maxmars data prepare` on Apache Beam: the same tasks, the same bytes.

    python3 -m venv beam
    beam/bin/pip install 'apache-beam[gcp]==2.77.*' 'protobuf<7' 'pyarrow<26' \
      etils[epath] gcsfs jaxtyping numpy rich tiktoken tyro
    beam/bin/pip install --no-deps .
    beam/bin/python tools/prepare_on_beam.py 'gs://BUCKET/texts/*.jsonl' gs://BUCKET/tokens \
      --tokenizer gpt2 --runner DataflowRunner --project PROJECT --region REGION \
      --temp_location gs://BUCKET/beam --sdk_container_image IMAGE

Beam needs older libraries than maxmars, hence an environment of its own; of maxmars, preparing
needs no other than these. Options that are not listed below are Beam's. Workers on other machines
need the same packages, for example by a container image, and SOURCE and OUT must be in a bucket or
in a directory that all machines share. On this machine:

    beam/bin/python tools/prepare_on_beam.py 'texts/*.txt' tokens \
      --runner DirectRunner --direct_num_workers 2 --direct_running_mode multi_processing
"""

from __future__ import annotations

import argparse

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from maxmars.data.open_corpus import PRESETS, open_corpus
from maxmars.data.prepare import Preparation
from maxmars.data.tokenizer import load
from maxmars.distributed.files import resolve


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="see `maxmars data prepare --help`")
    parser.add_argument("out", metavar="OUT", help="directory to write")
    parser.add_argument("--tokenizer", default="byte", help="byte, gpt2 or a tokenizer.json")
    parser.add_argument("--validation-fraction", type=float)
    parser.add_argument("--text-field")
    parser.add_argument("--document-separator", help="what stands between documents of a .txt")
    parser.add_argument("--task-bytes", type=int, help="text of a task, about")
    parser.add_argument("--allow-lossy", action="store_true", help="see `data prepare --help-all`")
    parser.add_argument("--skip-bad", type=int, default=0, help="bad lines to leave out, at most")
    given, beam_options = parser.parse_known_args()
    fraction = given.validation_fraction
    if fraction is None:
        preset = PRESETS.get(given.source)
        fraction = 0.1 if preset is None else preset.validation_fraction
    preparation = Preparation(
        corpus=open_corpus(
            given.source, text_field=given.text_field, separator=given.document_separator
        ),
        out=resolve(given.out),
        tokenizer=load(given.tokenizer),
        source=given.source,
        validation_fraction=fraction,
        task_bytes=given.task_bytes,
        allow_lossy=given.allow_lossy,
        skip_bad=given.skip_bad,
    )
    preparation.begin()
    with beam.Pipeline(options=PipelineOptions(beam_options)) as pipeline:
        numbers = pipeline | beam.Create(range(len(preparation.tasks))) | beam.Reshuffle()
        _ = numbers | beam.Map(preparation.run_task)
    preparation.finish()
    print(f"next: maxmars train quickstart:data={given.out}")


if __name__ == "__main__":
    main()
