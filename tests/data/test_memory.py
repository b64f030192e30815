"""What text and tokens take of a host's memory: pieces of a file, never the file."""

import pytest
from running import finish_well, start_python

MEGABYTE = 1_000_000
MEASURE = '''
import os, re, sys
import numpy as np
from pathlib import Path
from maxmars.cli import main
from maxmars.data.corpus import FileRange, TextFiles
from maxmars.data.formats import open_directory
from maxmars.data.windows import TokenWindows

os.chdir(sys.argv[1])

def memory(name):
    """In bytes: `VmHWM` is the peak, `RssAnon` what is no page of a file."""
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def prepare(name):
    main(["data", "prepare", f"{name}.txt", name, "--workers", "0"])

def read(name, count):
    windows = TokenWindows(open_directory(name).stream("train"), 1024)
    for seed in range(count):
        windows.read(np.random.default_rng(seed).integers(0, len(windows), 8))
'''
PREPARE = f"""{MEASURE}
prepare("small")
before = memory("VmHWM")
prepare("large")
print("PRINTED", memory("VmHWM") - before)
before = memory("RssAnon")
read("large", 200)
print("PRINTED", memory("RssAnon") - before)
import pyarrow.parquet
before = memory("VmHWM")
texts = (block for text in TextFiles(["a.parquet"]).read(FileRange(0)) for block in text.blocks)
print("PRINTED", sum(map(len, texts)))
print("PRINTED", memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_neither_preparing_nor_reading_takes_the_memory_of_a_file(tmp_path):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    lines = "".join(f"Line {i} of a text that somebody made up.\n" for i in range(25_000))
    (tmp_path / "small.txt").write_text(lines[:10_000])
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(150):
            file.write(lines)
    assert (tmp_path / "large.txt").stat().st_size > 150 * MEGABYTE
    table = pyarrow.table({"text": [f"{i}" * MEGABYTE for i in range(10)] * 25})
    options = {"compression": "zstd", "use_dictionary": False, "write_batch_size": 1}
    parquet.write_table(table, tmp_path / "a.parquet", **options)  # in one group of rows
    (output,) = finish_well([start_python(tmp_path, "-c", PREPARE, tmp_path)])
    printed = [line for line in output.splitlines() if line.startswith("PRINTED ")]
    prepared, read, size, of_rows = [int(line.split()[1]) for line in printed]
    # Measured: 15 MB; and less than 0.1 MB, of 270 MB of tokens.
    assert prepared < 60 * MEGABYTE
    assert read < 30 * MEGABYTE
    assert size == 250 * MEGABYTE
    assert of_rows < size
