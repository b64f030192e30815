"""Every option of every command, given wrongly: one line that names it, and exit code 2."""

import re
import typing
from pathlib import Path

import pytest

from maxmars import cli
from maxmars.cli.audit import AuditArguments
from maxmars.cli.compare import CompareArguments, ReportArguments, VerifyArguments
from maxmars.cli.convert import ExportArguments, ImportArguments
from maxmars.cli.data import InspectArguments, PrepareArguments
from maxmars.cli.eval import EvalArguments
from maxmars.cli.generate import GenerateArguments
from maxmars.cli.plan import PlanArguments
from maxmars.cli.train import TrainArguments, VerifyResumeArguments
from maxmars.config.command_line import (
    UsageError,
    load_config,
    parse_arguments,
    parse_config,
    parse_options,
)
from maxmars.config.options import options_of
from maxmars.launch.gke import GkeOptions, JobSet
from maxmars.launch.slurm import SlurmName, SlurmOptions
from maxmars.launch.tpu_vm import TpuOptions, TpuVm

pytestmark = pytest.mark.smoke

RUN = "--name a --workdir /w"
WITH_CONFIG = {
    "train quickstart": TrainArguments,
    "verify-resume quickstart": VerifyResumeArguments,
    "compare compare_tiny": CompareArguments,
    "plan quickstart": PlanArguments,
}
PLAIN = {
    "eval x": EvalArguments,
    "generate x": GenerateArguments,
    "export x y": ExportArguments,
    "import x y": ImportArguments,
    "audit x": AuditArguments,
    "report x": ReportArguments,
    "data prepare x y": PrepareArguments,
    "data inspect x": InspectArguments,
    "compare verify x": VerifyArguments,
    f"launch tpu-vm quickstart {RUN} --zone us-east5-a --accelerator v6e-8": TpuOptions,
    "launch tpu-vm status --name a --zone us-east5-a": TpuVm,
    f"launch gke quickstart {RUN} --topology v6e:4x4": GkeOptions,
    "launch gke status --name a": JobSet,
    f"launch slurm quickstart {RUN}": SlurmOptions,
    "launch slurm status --name a": SlurmName,
}
GPT2 = "gpt2:size=tiny,optimizer="
OPTIMIZERS = ("ademamix", "muon", "sophia", "mars")


def options_and_words(command):
    """The options of a command, without those of the config, and its words without theirs."""
    words = command.split()
    if command in PLAIN:
        options = options_of(PLAIN[command], switches=True)
    else:
        arguments = WITH_CONFIG[command]
        options = options_of(arguments(config=load_config(words[1])), switches=False)
        options = [option for option in options if option.owner is arguments]
    for option in options:
        if not option.is_positional:
            place = words.index(option.flag) if option.flag in words else len(words)
            yield option, words[:place] + words[place + 2 :]


def wrong_values(option):
    """Values that are of another type than the option's, or that no such option takes."""
    if any(kind in (str, Path) for kind in (option.hint, *typing.get_args(option.hint))):
        return []
    values = ["no such value"]
    if int in (option.hint, *typing.get_args(option.hint)):
        values += ["1.5", "2e3"]
    return values


def error_of(capsys, words):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    printed = capsys.readouterr()
    assert stop.value.code == 2, words
    assert printed.out == "", words
    assert re.fullmatch(r"maxmars: error: .*\.\n", printed.err), (words, printed.err)
    return printed.err


def check(option, words, capsys):
    """Give an option wrongly in each way; returns how many."""
    flag = option.flag
    assert f"no option {flag}x" in error_of(capsys, [*words, f"{flag}x", "1"])
    if option.is_switch:
        assert "takes no value" in error_of(capsys, [*words, f"{flag}=maybe"])
        return 2
    if flag != "--max-memory":  # whose value may be left out
        assert f"{flag} needs a value" in error_of(capsys, [*words, flag])
    looked_up_first = ("--optimizers", "--sizes")  # they say which configs to load
    if not option.is_repeated and flag not in looked_up_first:
        assert f"{flag} is given twice" in error_of(capsys, [*words, flag, "1", flag, "2"])
    values = wrong_values(option)
    for value in values:
        assert f"{flag} {value} must be " in error_of(capsys, [*words, flag, value])
    return 3 + len(values)


@pytest.mark.parametrize("command", [*WITH_CONFIG, *PLAIN])
def test_every_option_of_a_command(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(check(option, words, capsys) for option, words in options_and_words(command))
    assert not list(tmp_path.iterdir())


def test_every_field_of_a_config_refuses_another_type(capsys):
    config = load_config("quickstart")
    for option in options_of(config, switches=False):
        for value in wrong_values(option)[:1]:
            words = ["train", "quickstart", option.flag, value]
            assert f"{option.flag} {value} must be " in error_of(capsys, words)


def test_every_integer_of_a_config_refuses_what_no_machine_holds(capsys):
    """Beyond 64 bits everywhere, beyond 32 where JAX counts."""
    counts = {"global-batch-size", "model.vocab-size", "eval.batch-size", "guard.history"}
    counts |= {"num-steps", "schedule.warmup-steps", "model.num-layers", "mesh.fsdp"}
    found = set()
    for option in options_of(load_config("quickstart"), switches=False):
        if int in (option.hint, *typing.get_args(option.hint)):
            name = option.flag.removeprefix("--")
            found.add(name)
            for value in [2**63, *([2**31] if name in counts else [])]:
                words = ["train", "quickstart", option.flag, str(value)]
                assert f"{option.flag} {value} must " in error_of(capsys, words)
    assert counts < found


def refusal(parse, *arguments, **keywords):
    """The error of a command line that is refused; "" if it is taken."""
    try:
        parse(*arguments, **keywords)
    except UsageError as error:
        return str(error)
    return ""


def is_number(option):
    return bool({int, float} & {option.hint, *typing.get_args(option.hint)})


@pytest.mark.slow
@pytest.mark.parametrize("spec", [f"{GPT2}{name}" for name in OPTIMIZERS])
def test_every_field_of_every_config(spec):
    """Also by numbers out of range: a field takes them, or names itself and the rule."""
    for option in filter(is_number, options_of(load_config(spec), switches=False)):
        for value in ("-1", "nan", "999999999"):
            error = refusal(parse_config, spec, [f"{option.flag}={value}"], "maxmars train")
            assert re.fullmatch(rf"({option.flag} {value}.*)?", error)


@pytest.mark.parametrize(
    "command", [*PLAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_CONFIG)]
)
def test_numbers_out_of_range_name_the_option(command):
    for option, words in options_and_words(command):
        for value in ("-1", "nan") if is_number(option) else ():
            given = [*words, f"{option.flag}={value}"]
            if command in WITH_CONFIG:
                error = refusal(parse_arguments, WITH_CONFIG[command], given[1:], prog="maxmars")
            else:
                del given[: len(command.split()[: 1 + (words[0] in ("data", "launch", "compare"))])]
                error = refusal(parse_options, PLAIN[command], given, prog="maxmars")
            assert re.fullmatch(rf"({option.flag} {value} must .*)?", error)
