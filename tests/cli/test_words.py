"""What the words after a command change, and which are refused: by exit code, and by one line, or
a box of tyro's, that names what is wrong; nothing is written."""

import dataclasses
import functools
import itertools
import math
import os
import re
import typing

import pytest

from maxmars import cli
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config.checks import union_types
from maxmars.config.load import load_config

HEADER = """
from maxmars.config import *

def make(**fields):
    fields = dict(num_steps=3000, global_batch_size=8, model=GPT2Config.small()) | fields
    return TrainConfig(**dict(name="tiny", data=PythonSourcesConfig()) | fields)

def get_config():
"""
FILES = {
    "EMPTY": "\n",
    "TEXT.txt": "text " * 50,
    "DEEP.jsonl": "[" * 200_000,
    "mars.py": HEADER + "    return make(optimizer=MarsConfig())\n",
    "mixture.py": HEADER
    + """
    parts = (MixturePart(path="a", weight=0.7), MixturePart(path="b", weight=0.3))
    return make(data=MixtureConfig(parts=parts), optimizer=AdamWConfig())
""",
    "own.py": HEADER
    + """
    options = dict(rate=None, more=[], betas=[0.9, 0.99], names=["a"], mixed=[1, 0.5], on=True)
    options |= dict(deep=dict(number=1))
    return make(optimizer=OptaxConfig(make="own.py:make", learning_rate=0.1, options=options))
""",
}


def write_files(folder):
    for name, text in FILES.items():
        (folder / name).write_text(text)


# Words of a command line, and what each has changed.
CHANGES = {
    "every kind": {
        "mars.py --seed=5 --num-steps 1e3": {"seed": 5, "num_steps": 1000},
        "--optimizer.learning-rate 1": {"optimizer.learning_rate": 1.0},
        "--optimizer.eps 1e-30 --eval.num_windows 2_000": {"eval.num_windows": 2000},
        "--model.use-bias False --optimizer.exact True": {"optimizer.exact": True},
        "--gradient-clip-norm None --mesh.fsdp 4": {"gradient_clip_norm": None},
        "--model.remat dots --log.wandb None": {"model.remat": "dots", "log.wandb": None},
        "--name=-x --eval.hellaswag-path None": {"name": "-x", "eval.hellaswag_path": None},
    },
    "the last of two": {
        f"mars.py --seed 1 --seed {2**32 - 1}": {"seed": 2**32 - 1},
    },
    "of an own function": {
        "own.py --optimizer.options.rate 3": {"optimizer.options.rate": 3},
        "--optimizer.options.betas 0.8": {"optimizer.options.betas": (0.8,)},
        "--optimizer.options.names b c": {"optimizer.options.names": ("b", "c")},
        "--optimizer.options.mixed -2 3": {"optimizer.options.mixed": (-2, 3.0)},
        "--optimizer.options.on False": {"optimizer.options.on": False},
        "--optimizer.options.deep.number 3": {"optimizer.options.deep.number": 3},
    },
    "of a mixture": {
        "mixture.py --data.parts.1.weight 0.1": {"data.parts.1.weight": 0.1},
        "--data.parts.0.path c": {"data.parts.0.path": "c", "data.parts.0.weight": 0.7},
        "--data.order random_windows": {"data.order": "random_windows"},
    },
}


def value_of(config, name):
    for part in name.split("."):
        is_field = not isinstance(config, (dict, tuple))
        key = int(part) if isinstance(config, tuple) else part
        config = getattr(config, part) if is_field else config[key]
    return config


@pytest.mark.smoke
@pytest.mark.parametrize("name", CHANGES)
def test_options_change_fields(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    changes = CHANGES[name]
    config = parse_arguments(ConfigArguments, " ".join(changes).split(), prog="x").config
    for fields in changes.values():
        for field, value in fields.items():
            assert (value_of(config, field), type(value_of(config, field))) == (value, type(value))


RUN = "--name a --workdir /w"
TPU_VM = f"launch tpu-vm quickstart {RUN} --zone us-east5-a --accelerator v6e-8"
GKE = f"launch gke quickstart {RUN} --topology v6e:4x4"
SLURM = f"launch slurm quickstart {RUN}"
MARS, OWN = "train mars.py", "train own.py --optimizer.options"
PLAN = "plan mars.py --topology cpu:8"
ALONE = "train quickstart --num-processes 1"  # it is too late here to look for other processes
REFUSALS = [
    # There is no such command, CONFIG or option.
    (2, "trian", "`train`"),
    (2, "train quickstrat", "did you mean `quickstart`"),
    (2, "train quickstart:optimizer=mras", "did you mean `optimizer=mars`"),
    (2, "train --help ./model.py", "./model.py"),  # no help of the group `model`
    (2, "data", "prepare, inspect"),
    (2, "data prepare", "SOURCE", "OUT"),
    (2, "launch slurm quickstart --name a", "--workdir DIR"),
    (2, "launch gke stop --name a", "status, logs, delete"),
    (2, "data prepare python out --wokers 2", "--workers {None}|INT"),
    (2, f"{MARS} --xyzzy 3", "--xyzzy"),
    (2, f"{MARS} 3", "Unrecognized options: 3"),
    (2, f"{OWN}.deep.nmuber 1", "--optimizer.options.deep.number INT"),
    (2, f"{SLURM} --num-steps 3", "-- --num-steps"),
    *((2, f"{launch} -- --dry-run", "maxmars train") for launch in (TPU_VM, GKE, SLURM)),
    (2, f"{SLURM} -- --model.num-layer 2", "--model.num-layers INT"),
    (2, f"{SLURM} --coordinator h:1", "Unrecognized options: --coordinator"),
    (2, "data prepare EMPTY out --allow-lossy=True", "Unrecognized options: True"),
    (2, "data prepare EMPTY out TEXT.txt", "quote a pattern of files"),
    (2, f"{SLURM} --data x", "quickstart:data=x`"),
    # A value is missing or of another type.
    (2, f"{MARS} --seed --num-steps 1", "--seed"),
    (2, f"{MARS} --name -x", "--name"),
    (2, f"{MARS} --num-steps=many", "--num-steps: many must be an integer"),
    (2, f"{MARS} --num-steps 1e400", "--num-steps: 1e400"),
    (2, f"{MARS} --model.remat atention", "'--model.remat'", "'atention'", "'attention'"),
    (2, "train own.py --optimizer.make no", "--optimizer.make no"),
    (2, f"{OWN}.betas 0.9 x", "--optimizer.options.betas", "'x'"),
    (2, f"{OWN}.mixed 0.5 1", "--optimizer.options.mixed", "'0.5'"),
    (2, f"{OWN}.mixed 1 0.5 1", "Unrecognized options: 1"),
    (2, f"{OWN}.on 1", "--optimizer.options.on", "'1'"),
    (2, "plan mars.py --topology cpu:8 --max-memory much", "--max-memory", "much"),
    # A value is out of range, or does not go with another.
    (2, f"{MARS} --model.num-heads 5", "embed_dim=768", "num_heads=5"),
    (2, f"{MARS} --optimizer.b1 1.5", "config.optimizer", "b1=1.5 must lie in [0, 1)"),
    (2, f"{MARS} --mesh.fsdp 0", "config.mesh", "fsdp=0 must be greater than zero"),
    (2, f"{MARS} --optimizer.eps nan", "eps=nan", "finite"),
    (2, f"{MARS} --schedule.warmup-steps 9 --schedule.decay-steps 5", "warmup_steps=9", "steps=5"),
    (2, f"{MARS} --num-microbatches 3", "global_batch_size=8", "num_microbatches=3"),
    (2, f"{MARS} --start-timeout-s 0", "start_timeout_s=0.0 must be"),
    (2, "train mixture.py --data.parts.1.weight -1", "config.data.parts.1", "weight=-1.0"),
    (2, "train quickstart --process-id -1", "process_id=-1 must"),
    (2, f"{MARS} --init-optimizer-state", "--init-from PATH"),
    (2, "train --init-optimizer-state mars.py", "before its options"),
    (2, f"{MARS} --init-optimizer-state True", "True"),
    (2, "compare compare_tiny --workdir x --seeds 0", "seeds=0 must"),
    (2, "plan mars.py", "--topology"),
    (2, f"{PLAN} --price -1.0", "price=-1.0 must"),
    (2, f"{PLAN} --max-memory 0.0", "max_memory=0.0 must"),
    (2, f"{PLAN} --max-memory chip", "CPU"),
    (2, f"{PLAN} --remat full", "--remat", "'full'", "'all'"),
    (2, f"{PLAN} --remat all --hlo step.txt", "--hlo", "--model.remat"),
    (2, f"{PLAN} --num-slices 2", "--num-slices 2"),
    (1, f"{PLAN} --mesh.fsdp 3", "3 devices"),
    (2, "audit x --replay 0", "replay=0 must"),
    (2, "rewind x", "--to"),
    (2, "rewind x --to -1", "to=-1"),
    (2, "rewind x --to 1 --skip-examples -1", "skip_examples=-1"),
    (1, "rewind x --to 1", "x is not the directory of a run"),
    (2, f"{SLURM} --nodes 0", "nodes=0 must"),
    (2, f"{GKE} --max-restarts -1", "max_restarts=-1"),
    (2, "generate x --max-new-tokens 0", "max_new_tokens=0 must"),
    (2, "generate x --prompt a --top-p 2", "top_p=2.0 must lie in (0, 1]"),
    (2, "generate x", "--prompt TEXT"),
    (2, "generate x --prompt a --interactive", "--interactive"),
    (2, "generate x --prompt-file FILE", "--prompt-file"),
    (2, "eval x --hellaswag.too-long cut", "--hellaswag.too-long"),
    (2, "generate x --prompt \udcff", "UTF-8"),
    (2, "eval x --mesh.fsdp 0", "Error parsing mesh", "fsdp=0 must"),
    (2, "eval x --lm-eval.num-fewshot -1", "num_fewshot=-1 must"),
    (2, "eval x --backend lm-eval --tasks ,", "--tasks"),
    (2, "eval x --backend lm-eval --tasks a --against y", "--against"),
    (2, "eval x --lm-eval.limit 3", "--backend lm-eval"),
    (2, "eval x --tasks piqa", "'piqa'"),
    (2, "data prepare x y --validation-fraction 1.0", "validation_fraction=1.0 must"),
    (2, "data prepare TEXT.txt out --tasks=2/2", "0 <= I < N"),
    (2, "data prepare TEXT.txt out --tasks=-1/2", "0 <= I < N"),
    (2, "data prepare TEXT.txt out --workers=-1", "workers=-1 must"),
    # What a command needs is not there, or of no use.
    (1, f"{ALONE} --workdir gs:/bucket/run", "gs:/bucket/run"),
    (1, f"{ALONE} --workdir s3://b/run", "s3://b/run"),
    (1, f"{ALONE} --workdir=''", "''"),
    (1, f"{ALONE} --init-from ''", "''"),
    (1, "compare compare_tiny --workdir '' --dry-run", "''"),
    (1, "compare compare_tiny --workdir gs:/bucket/c --dry-run", "gs:/bucket/c"),
    (1, "compare verify ''", "''"),
    (2, "report x --out gs://bucket/c", "--out gs://bucket/c"),
    (2, "audit x --output gs://bucket/a.json", "--output gs:/bucket/a.json"),
    (2, f"{PLAN} --output gs://bucket/a.json", "--output gs:/bucket/a.json"),
    (1, "audit ''", "''"),
    (1, "generate '' --prompt a", "''"),
    (1, "report x --out ''", "''"),
    (1, f"{ALONE} --workdir EMPTY/x", "EMPTY/x"),
    (1, "train quickstart --workdir NOT-\udcff-UTF-8", "NOT-\\xff-UTF-8"),
    (1, "generate x --prompt a", "x does not exist"),
    (1, "export x out", "x does not exist"),
    (1, "export EMPTY out", "EMPTY"),
    (2, "export x", "OUT"),
    (2, "export x out --push me/new", "--push"),
    (2, "import hf:a/b out", "import"),
    (1, "data prepare *.text out", "*.text"),
    (1, "data prepare pyhton out", "python"),
    (1, "data prepare . out", ". is a directory; name its files"),
    (1, "data prepare TEXT.txt s3://b/out", "s3://b/out"),
    (1, "data prepare DEEP.jsonl out", "DEEP.jsonl, line 1"),
    (1, "data prepare HUGE.txt out", "17.6TB"),
    (1, "data prepare TEXT.txt /proc/out", "/proc/out"),
    (1, "data inspect MISSING", "MISSING"),
]
# Commands with all that they need, each of whose options is then given wrongly.
COMMANDS = [
    *("train quickstart", "compare compare_tiny", "plan quickstart"),
    *("eval x", "generate x", "export x y", "audit x", "rewind x --to 1", "report x"),
    *("data prepare x y", "data inspect x", "compare verify x"),
    *(TPU_VM, "launch tpu-vm status --name a --zone us-east5-a"),
    *(GKE, "launch gke status --name a"),
    *(SLURM, "launch slurm status --name a"),
]
NUMBERS = {"INT", "FLOAT", "N", "I", "K", "SECONDS", "MONEY"}
ANY_TEXT = {"STR", "PATH", "FILE.json", "FILE.py:NAME"}


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs a command, which writes no file and finds no program on PATH; gives its exit code and
    what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COLUMNS", "100")
    for variable in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # restored: `plan` sets them

    def call(words):
        before = set(tmp_path.iterdir())
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert set(tmp_path.iterdir()) == before
        return stop.value.code, capsys.readouterr()

    return call


def refusal(call, words, code=2):
    """What a refused command line printed: our line, or the words in tyro's box."""
    got, printed = call(words)
    assert got == code, (words, printed.err)
    assert printed.out == "" or code == 1, words
    *progress, error = printed.err.splitlines()
    if code == 2 and error.isspace():  # the end of a box, as drawn where no terminal is
        return " ".join(printed.err.split())
    assert error.startswith("maxmars: error: ")
    assert not progress or code == 1, (words, printed.err)
    return error


# Those that get past the words of a command are smoke tests.
ROWS = [
    pytest.param(row, id=row[1], marks=[pytest.mark.smoke] if row[0] == 1 else [])
    for row in REFUSALS
]


@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_is_named(row, call, tmp_path):
    code, words, *named = row
    write_files(tmp_path)
    with (tmp_path / "HUGE.txt").open("wb") as file:
        file.truncate(1 << 43)  # without blocks on the disk
    error = refusal(call, [word.replace("''", "") for word in words.split()], code)
    assert [part for part in named if part not in error] == []


@pytest.mark.parametrize("option", ["model.use-bias", "data.verify"])
def test_a_negated_boolean_is_told_the_option_with_its_values(option, call):
    group, leaf = option.split(".")
    for word in (f"--no-{option}", f"--{group}.no-{leaf}"):
        assert f"--{option} {{True,False}}" in refusal(call, ["train", "quickstart", word])


@pytest.mark.parametrize("config", ["{}", "quickstart:optimizer={},data=x", "quickstart:{}"])
def test_a_refusal_is_one_line_whatever_is_typed(config, call):
    for text in ("9\n9", "\u2028é"):
        assert refusal(call, ["train", config.format(text)]).isprintable()


def test_the_value_of_an_unknown_option_is_not_told(call):
    """It may be a credential, and schedulers keep what a job printed."""
    for words in (["--data.options.api-keyy", "hunter2"], ["--data.options.api-keyy=hunter2"]):
        # The second lacks --workdir.
        for command in ("train quickstart", "launch slurm gpt2 --name r"):
            error = refusal(call, [*command.split(), *words])
            assert "--data.options.api-keyy" in error
            assert "hunter2" not in error
            assert ("--workdir" in error) == command.startswith("launch")


WITH_OPTIONS = (
    HEADER.replace("get_config()", "get_config(password: str = '')")
    + """
    login = dict(password="", url="")
    data = GrainConfig(source="own_data.py:windows", options=login)
    model = ModuleConfig(make="own.py:model", options=login, vocab_size=9, max_seq_len=8)
    optimizer = OptaxConfig(make="own.py:make", learning_rate=0.1, options=login)
    return make(data=data, model=model, optimizer=optimizer)
"""
)
SLURM = "--name a --workdir /a --nodes 1 --gpus-per-node 8 --dry-run"
CREDENTIALS = [
    ("train own.py --data.options.password hunter2", "--data.options.password"),
    ("train own.py --model.options.password=hunter2", "model.options.password"),
    ("train own.py --optimizer.options.password hunter2", "optimizer.options.password"),
    ("train own.py --data.options.url https://me:hunter2@host/x", "data.options.url"),
    ("train own.py:password=hunter2", "password"),
    ("train written.py", "optimizer.options.api_key"),
    ("train quickstart --workdir gs://me:hunter2@bucket/run", "--workdir"),
    ("train quickstart --init-from gs://me:hunter2@bucket/run", "--init-from"),
    ("train quickstart --data.path gs://me:hunter2@bucket/tokens", "data.path"),
    ("train quickstart --name hf_hunter2hunter2hunter2", "--name"),
    ("plan own.py --data.options.password hunter2", "data.options.password"),
    ("compare own.py --workdir c --data.options.password hunter2", "data.options.password"),
    ("data prepare https://me:hunter2@host/a.txt tokens", "data prepare"),
    ("data prepare TEXT.txt gs://hunter2@bucket/tokens", "data prepare"),
    ("data prepare TEXT.txt tokens --text-field hf_hunter2hunter2hunter2", "--text-field"),
    ("eval https://me:hunter2@host/run", "maxmars eval"),
    ("export runs/a gs://me:hunter2@bucket/model", "maxmars export"),
    ("audit gs://me:hunter2@bucket/run", "maxmars audit"),
    ("report gs://me:hunter2@bucket/run", "maxmars report"),
    (f"launch slurm own.py:password=hunter2 {SLURM}", "password"),
    (f"launch slurm own.py {SLURM} -- --data.options.password hunter2", "data.options.password"),
]


@pytest.mark.parametrize("row", CREDENTIALS, ids=lambda row: row[0])
def test_credentials_are_refused_where_they_enter_a_record(row, call, tmp_path, own_checks_only):
    words, named = row
    write_files(tmp_path)
    (tmp_path / "own.py").write_text(WITH_OPTIONS)
    written = "make='o.py:f', learning_rate=1, options=dict(api_key='hunter2')"
    text = f"{HEADER}    return make(optimizer=OptaxConfig({written}))\n"
    (tmp_path / "written.py").write_text(text)
    error = refusal(call, words.split())
    assert named in error
    assert "hunter2" not in error


def test_a_prompt_is_no_record(call):
    assert "no_such_run" in refusal(
        call, ["generate", "no_such_run", "--prompt", "Bearer abcdefgh"], code=1
    )


@pytest.fixture
def options_of(call):
    """The options of a command and how their values are written, as --help-all tells them."""

    @functools.cache
    def options_of(command):
        code, printed = call([*command.split(), "--help-all"])
        assert code == 0
        row = r"^  (--\w[\w.-]*)(?:, --\S+)?(?: (?! )(.+?))?(?:  .*)?$"
        return dict(re.findall(row, printed.out, re.MULTILINE))

    return options_of


def without(words, flag):
    start = words.index(flag) if flag in words else len(words)
    return words[:start] + words[start + 2 :]


def wrong_value(value):
    """A value of another type than those which are written so; None if there is none."""
    kinds = set(re.split(r"[|{},\[\] ]", value)) - {"", "None"}
    if "INT" in kinds:
        return "1.5"
    is_choice = value.startswith("{") and kinds.isdisjoint(ANY_TEXT)
    return "no such value" if kinds & NUMBERS or is_choice else None


@pytest.mark.parametrize("command", COMMANDS)
def test_each_kind_of_option_of_a_command(command, call, options_of):
    """One option of each way to write a value: its rule is that of all which are written so."""
    of_config = set(options_of("train quickstart")) if command in COMMANDS[1:3] else set()
    own = {flag: value for flag, value in options_of(command).items() if flag not in of_config}
    kinds = {value: flag for flag, value in own.items()}
    for value, flag in kinds.items():
        words = without(command.split(), flag)
        if not value:  # a switch
            assert "maybe" in refusal(call, [*words, f"{flag}=maybe"])
        elif wrong := wrong_value(value):
            error = refusal(call, [*words, flag, wrong])
            assert flag in error
            assert wrong in error
    # None of several values is ().
    for flag in [flag for value, flag in kinds.items() if value and "..." not in value][:1]:
        assert flag in refusal(call, [*without(command.split(), flag), flag])
    flag = next(iter(own))
    assert f"{flag}x" in refusal(call, [*command.split(), f"{flag}x", "1"])


def number_fields(config, names=(), kinds=frozenset({int, float})):
    """The fields of a config, at every depth, that take a number."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if dataclasses.is_dataclass(value):
            yield from number_fields(value, (*names, name), kinds)
        elif kinds & set(union_types(hint)):
            yield (*names, name)


def replaced(config, names, value):
    name, *rest = names
    value = replaced(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


def error_of(config, names, value):
    """What a config says of a value; None if it takes it."""
    try:
        replaced(config, names, value)
    except ValueError as error:
        return str(error)


@pytest.mark.usefixtures("own_checks_only")
@pytest.mark.parametrize("optimizer", ["mars", "adamw", "muon"])
def test_every_number_of_every_config(optimizer):
    """A field takes a number, or the error names both: `seed=-1`."""
    config = load_config(f"gpt2:size=tiny,optimizer={optimizer}")
    fields = list(number_fields(config))
    assert len(fields) > 30
    for names, value in itertools.product(fields, [-1, math.nan, 999_999_999]):
        error = error_of(config, names, value)
        assert error is None or f"{names[-1]}={value}" in error


def test_every_integer_of_a_config_refuses_what_no_machine_holds():
    """Beyond 64 bits everywhere, beyond 32 where JAX counts."""
    counts = {"global_batch_size", "model.vocab_size", "eval.batch_size", "guard.history"}
    counts |= {"num_steps", "schedule.warmup_steps", "model.num_layers", "mesh.fsdp"}
    config = load_config("quickstart")
    integers = {".".join(names) for names in number_fields(config, kinds={int})}
    assert counts < integers
    for name in integers:
        for value in [2**63, *([2**31] if name in counts else [])]:
            error = error_of(config, name.split("."), value)
            assert error is not None, name
            assert f"{value} must " in error
