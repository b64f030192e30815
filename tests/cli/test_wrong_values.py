"""Every option of every command, given wrongly: one line that names it, and exit code 2."""

import functools
import re

import pytest

from maxmars import cli

pytestmark = pytest.mark.smoke

RUN = "--name a --workdir /w"
COMMANDS = [
    "train quickstart",
    "verify-resume quickstart",
    "compare compare_tiny",
    "plan quickstart",
    "eval x",
    "generate x",
    "export x y",
    "import x y",
    "audit x",
    "report x",
    "data prepare x y",
    "data inspect x",
    "compare verify x",
    f"launch tpu-vm quickstart {RUN} --zone us-east5-a --accelerator v6e-8",
    "launch tpu-vm status --name a --zone us-east5-a",
    f"launch gke quickstart {RUN} --topology v6e:4x4",
    "launch gke status --name a",
    f"launch slurm quickstart {RUN}",
    "launch slurm status --name a",
]
NUMBERS = {"N", "X", "I", "K", "SECONDS", "MONEY", "LOSS"}
ANY_TEXT = {"TEXT", "PATH", "FILE.json", "FILE.py:NAME"}


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs a command in an empty directory; gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(words):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert not list(tmp_path.iterdir())
        return stop.value.code, capsys.readouterr()

    return call


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


def refusal(call, words):
    code, printed = call(words)
    assert code == 2, words
    assert printed.out == "", words
    assert re.fullmatch(r"maxmars: error: .*\.\n", printed.err), (words, printed.err)
    return printed.err


def without(words, flag):
    place = words.index(flag) if flag in words else len(words)
    return words[:place] + words[place + 2 :]


def wrong_values(value):
    """Values that are of another type than those which are written so."""
    kinds = set(value.removesuffix(" ...").split("|"))
    if "N" in kinds:
        return ["1.5", "no such value"]
    is_choice = "|" in value and kinds.isdisjoint(ANY_TEXT)
    return ["no such value"] if kinds & NUMBERS or is_choice else []


@pytest.mark.seconds
@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command(command, call, options_of):
    config = set(options_of("train quickstart")) if command in COMMANDS[1:4] else set()
    own = {flag: value for flag, value in options_of(command).items() if flag not in config}
    assert own or command == "import x y"
    for flag, value in own.items():
        words = without(command.split(), flag)
        if not value:  # a switch
            assert f"{flag}=maybe" in refusal(call, [*words, f"{flag}=maybe"])
            continue
        assert flag in refusal(call, [*words, flag])
        for wrong in wrong_values(value):
            assert f"{flag} {wrong} must be " in refusal(call, [*words, flag, wrong])
    flag = next(iter(own), "--option")
    assert f"no option {flag}x" in refusal(call, [*command.split(), f"{flag}x", "1"])


@pytest.mark.seconds
def test_every_integer_of_a_config_refuses_what_no_machine_holds(call, options_of):
    """Beyond 64 bits everywhere, beyond 32 where JAX counts."""
    counts = {"global-batch-size", "model.vocab-size", "eval.batch-size", "guard.history"}
    counts |= {"num-steps", "schedule.warmup-steps", "model.num-layers", "mesh.fsdp"}
    found = {flag[2:] for flag, value in options_of("train quickstart").items() if value[:1] == "N"}
    assert counts < found
    for name in found:
        for value in [2**63, *([2**31] if name in counts else [])]:
            error = refusal(call, ["train", "quickstart", f"--{name}", str(value)])
            assert f"--{name} {value} must " in error


OUT_OF_RANGE = [
    "eval x --batch-size 0",
    "eval x --mesh.fsdp 0",
    "eval x --lm-eval.num-fewshot -1",
    "generate x --max-new-tokens 0",
    "generate x --temperature -1.0",
    "generate x --temperature nan",
    "generate x --top-p 2.0",
    "audit x --replay 0",
    "data prepare x y --workers -1",
    "data prepare x y --validation-fraction 1.0",
    f"launch slurm quickstart {RUN} --nodes 0",
    f"launch gke quickstart {RUN} --topology v6e:4x4 --max-restarts -1",
    "verify-resume quickstart --steps 1",
    "compare compare_tiny --workdir x --seeds 0",
    "plan quickstart --topology cpu:8 --price -1.0",
    "plan quickstart --topology cpu:8 --max-memory 0.0",
    "train quickstart --process-id -1",
]


@pytest.mark.parametrize("words", OUT_OF_RANGE)
def test_a_number_out_of_range_is_named_with_its_option(words, call):
    *_, flag, value = words.split()
    assert f"{flag} {value} must " in refusal(call, words.split())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ademamix", "muon", "sophia", "mars"])
@pytest.mark.parametrize("value", ["-1", "nan", "999999999"])
def test_every_field_of_every_config(optimizer, value, call, options_of):
    """A field takes a number, or the error names it: `--optimizer.b1 -1.0` or `seed=-1`."""
    command = f"plan gpt2:size=tiny,optimizer={optimizer}"
    numbers = [flag for flag, kind in options_of(command).items() if set(kind) & {"N", "X"}]
    assert len(numbers) > 30
    for flag in numbers:
        error = refusal(call, [*command.split(), f"{flag}={value}"])
        leaf = flag.rpartition(".")[2].lstrip("-").replace("-", "_")
        told = rf"needs --topology|{flag} {value}|\b{leaf}={value}"
        assert re.search(told, error), (flag, error)
