"""Code of the user's own in several files that import each other: found, hashed and run as one."""

import sys

from refusals import refused, stopped

from maxmars.cli import main
from maxmars.config.own_modules import digest_of, files_of
from maxmars.config.user_code import Source
from maxmars.distributed.recorded_code import keep_code, recorded_copy

FILES = {
    "several.py": "from several_sizes import WIDTH\n",
    "several_sizes.py": "WIDTH = 8\n",
    "code/several_model.py": "from several_layers.table import make\n",
    "code/several_layers/__init__.py": "",
    "code/several_layers/table.py": "from .start import make\n",
    "code/several_layers/start.py": """
def make():
    from several_common import SCALE
    return SCALE
""",
    "code/several_common.py": "SCALE = 0.02\n",
    "code/several_data.py": "import several_noise.draw as draw\n\ndef make(): return draw.NOISE\n",
    "code/several_noise/draw.py": "NOISE = 3\n",
    "code/several_apart.py": "raise ValueError('nothing imports it')\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_belongs_together(tmp_path):
    write(tmp_path, FILES)
    code = tmp_path / "code"
    assert [*files_of(tmp_path / "several.py")] == ["several.py", "several_sizes.py"]
    layers = {f"several_layers/{name}.py" for name in ("__init__", "table", "start")}
    model = {"several_model.py", "several_common.py"} | layers
    assert files_of(code / "several_model.py").keys() == model
    data = {"several_data.py", "several_noise/draw.py"}
    assert files_of(code / "several_data.py").keys() == data
    alone = code / "several_common.py"
    source = Source.parse(f"{alone}:SCALE")
    assert source.sha256 == digest_of({"any name": alone.read_bytes()})
    # Modules of the standard library and maxmars are not looked for, whatever lies there.
    write(tmp_path, {"json.py": "1 / 0", "maxmars/config.py": "1 / 0"})
    write(tmp_path, {"plain.py": "import json, maxmars.config\nfrom . import nothing\n"})
    assert [*files_of(tmp_path / "plain.py")] == ["plain.py"]

    both = [f"{code}/several_{name}.py:make" for name in ("model", "data")]
    before = [Source.parse(name) for name in both]
    assert [source.load()() for source in before] == [0.02, 3]
    alone.write_text("SCALE = 0.02  # as before\n")
    after = [Source.parse(name) for name in both]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]


def test_a_neighbour_may_import_the_file_that_imports_it(tmp_path):
    files = {
        "mutual.py": "from mutual_too import f\n\nK = 3\n",
        "mutual_too.py": "def f():\n    from mutual import K\n    return K\n",
    }
    write(tmp_path, files)
    assert Source.parse(f"{tmp_path}/mutual.py:f").load()() == 3


def test_a_name_of_an_installed_package_is_refused(tmp_path):
    write(tmp_path, {"named.py": "import scipy\n", "scipy.py": "X = 1\n"})
    with refused(ValueError, "scipy.py", "rename"):
        Source.parse(f"{tmp_path}/named.py:X").load()


def test_what_an_earlier_session_kept_is_not_in_the_way(tmp_path):
    """`helper.py` that became a package, and a name of a part's folder."""
    write(tmp_path, {"early.py": "import early_helper\n\ndef f(): return early_helper.X\n"})
    run, sources = tmp_path / "run", []
    for files in ({"early_helper.py": "X = 1\n"}, {"early_helper/__init__.py": "X = 2\n"}):
        write(tmp_path, files)
        sources.append(Source.parse(f"{tmp_path}/early.py:f"))
        keep_code(sources[-1], run, "sources")
        (tmp_path / "early_helper.py").unlink(missing_ok=True)
    for source, helper in zip(
        sources, ("early_helper.py", "early_helper/__init__.py"), strict=True
    ):
        assert [*recorded_copy(source, run, "sources", "").files()] == ["early.py", helper]


def test_an_edited_file_runs_anew_and_another_of_its_name_is_refused(tmp_path):
    files = {
        "edited.py": "from edited_by import X\nimport edited_too as Y\n\ndef f(): return X, Y.Z\n"
    }
    files |= {"edited_by.py": "X = 1\n", "edited_too.py": "from edited_by import X as Z\n"}
    write(tmp_path / "a", files)
    write(tmp_path / "b", files)
    source = f"{tmp_path}/a/edited.py:f"
    first = Source.parse(source).load()
    assert Source.parse(source).load() is first
    assert Source.parse(f"{tmp_path}/b/edited.py:f").load()() == (1, 1)  # the same text
    (tmp_path / "a" / "edited_by.py").write_text("X = 2\n")
    assert Source.parse(source).load()() == (2, 2)
    assert first()[0] == 1
    assert not [*tmp_path.rglob("*.pyc")]
    with refused(ValueError, "edited_by", "b"):
        Source.parse(f"{tmp_path}/b/edited.py:f").load()
    sys.modules.pop("edited_by")


def test_a_name_that_cannot_be_imported_is_named_with_the_file_that_wanted_it(tmp_path):
    write(tmp_path, {"lacking.py": "import lacking_too\n", "lacking_too.py": "import lacks_it\n"})
    config = f"quickstart:optimizer={tmp_path}/lacking.py:make"
    with stopped(1, "lacks_it", "lacking_too.py:1"):
        main(["train", config, "--workdir", str(tmp_path / "run"), "--num-processes", "1"])
