"""Receipts of a real comparison of tiny models: repeated, forged, and ranked."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from maxmars import cli
from maxmars.compare.receipt import read_receipt
from maxmars.config import ModuleConfig, OptaxConfig, PythonSourcesConfig, to_dict


@pytest.fixture
def receipt(compared, tmp_path):
    """A copy of the receipt of Lion."""
    return shutil.copy(compared / "receipt-lion.json", tmp_path / "receipt-lion.json")


def forge(path, change):
    """Change the fields of a receipt, and its hash with them."""
    fields = json.loads(path.read_text())
    change(fields)
    del fields["sha256"]
    text = json.dumps(fields, sort_keys=True)
    path.write_text(json.dumps(fields | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def test_a_receipt_holds_what_the_comparison_found(compared, receipt):
    found = read_receipt(receipt)
    report = json.loads((compared / "report.json").read_text())
    (lion,) = (o for o in report["outcomes"] if o["name"] == "lion")
    assert sum(found.losses) / len(found.losses) == pytest.approx(lion["loss"]["mean"])
    assert found.config.optimizer.learning_rate == lion["setting"]["learning_rate"]
    assert [cell.cell.seed for cell in found.cells] == report["seeds"]
    assert [row["setting"] for row in found.tuning["tried"]] == [
        row["setting"] for row in lion["settings"]
    ]


def test_its_cells_are_repeated_bit_by_bit(receipt, capsys):
    cli.main(["track", "verify", str(receipt), "--cells", "2"])
    printed = capsys.readouterr().out
    assert "seed 0, 4 steps: equal bit by bit" in printed
    assert "seed 1, 4 steps: equal bit by bit" in printed
    assert "confirmed, 2 of 2 cells" in printed
    assert "changed since" not in printed


@pytest.mark.slow
def test_its_first_steps_are_repeated_bit_by_bit(receipt, capsys):
    cli.main(["track", "verify", str(receipt), "--steps", "2"])
    printed = capsys.readouterr().out
    assert "seed 0, 2 steps: equal bit by bit" in printed
    assert "the first 2 steps are confirmed of 1 of 2 cells; the final losses were not" in printed


@pytest.mark.slow
def test_the_first_steps_of_a_run_that_is_shorter_than_its_warmup(receipt, capsys):
    def warm_up(fields):
        fields["config"]["schedule"]["warmup_steps"] = 5
        for cell in fields["cells"]:  # of a rate that hardly grows
            cell["cell"]["setting"] = [["learning_rate", 1e-9]]
            cell["train_losses"] = cell["train_losses"][:1]
        fields["config"]["optimizer"]["learning_rate"] = 1e-9

    forge(receipt, warm_up)
    cli.main(["track", "verify", str(receipt), "--steps", "1"])
    assert "seed 0, 1 steps: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_under_soap_only_whole_runs_are_judged_on_another_machine(
    compare_command, tmp_path, capsys
):
    """Its first bases depend on rounding, here imitated."""
    config, workdir = tmp_path / "config.py", tmp_path / "soap"
    text = Path(compare_command[1]).read_text().replace('"lion"]', '"lion", "soap"]')
    text = text.replace("import CheckpointConfig", "import SoapConfig, CheckpointConfig")
    config.write_text(text.replace("LionConfig()", "SoapConfig()"))
    words = ["compare", str(config), "--optimizers", "soap", "--seeds", "1", "--steps", "4"]
    words += ["--learning-rates", "3e-3", "--budget", "1", "--finalists", "1"]
    cli.main([*words, "--workdir", str(workdir)])

    def round_otherwise(fields):
        for loss in fields["cells"][0]["train_losses"]:
            loss[1] += 0.1

    receipt = workdir / "receipt-soap.json"
    forge(receipt, round_otherwise)
    cli.main(["track", "verify", str(receipt)])
    printed = capsys.readouterr().out
    assert "seed 0, 4 steps: equal up to rounding (losses differ by at most 1.0e-01)" in printed
    with pytest.raises(SystemExit) as end:
        cli.main(["track", "verify", str(receipt), "--steps", "2"])
    assert end.value.code == 1
    assert "only whole runs are judged: leave out --steps." in capsys.readouterr().out


@pytest.mark.slow
def test_a_last_step_that_the_receipt_did_not_log_is_not_compared(receipt, capsys):
    def log_fewer(fields):
        fields["config"]["log"]["every"] = 2
        for cell in fields["cells"]:
            cell["train_losses"] = [row for row in cell["train_losses"] if row[0] != 3]

    forge(receipt, log_fewer)
    cli.main(["track", "verify", str(receipt), "--steps", "3"])
    assert "seed 0, 3 steps: equal bit by bit" in capsys.readouterr().out


@pytest.mark.slow
def test_on_another_mesh_rounding_may_differ(receipt, capsys):
    def split(fields):
        fields["config"]["mesh"]["fsdp"] = 4
        fields["cells"][0]["environment"] |= {"jax": "0.1", "num_cores": 999}

    forge(receipt, split)
    cli.main(["track", "verify", str(receipt)])
    printed = capsys.readouterr().out
    assert "seed 0, 4 steps: equal" in printed
    assert printed.startswith("changed since the receipt: jax 0.1 -> ")
    assert "num_cores 999 -> " in printed


def better(fields):
    cell = fields["cells"][0]
    cell["loss"] = cell["curve"]["losses"][-1] = cell["loss"] - 0.05


def slightly_better(fields):
    cell = fields["cells"][0]
    cell["loss"] = cell["curve"]["losses"][-1] = cell["loss"] - 0.015


def better_on_the_way(fields):
    fields["cells"][0]["curve"]["losses"][0] -= 1


def easier_start(fields):
    fields["cells"][0]["train_losses"][0][1] -= 0.01


def other_tokens(fields):
    fields["cells"][0]["tokens"] = "0" * 64


def higher_rate(fields):
    fields["config"]["optimizer"]["learning_rate"] *= 4
    for cell in fields["cells"]:
        cell["cell"]["setting"][0][1] *= 4


def no_numbers(fields):
    higher_rate(fields)
    for cell in fields["cells"]:
        for row in cell["train_losses"][1:]:
            row[1] = "NaN"


@pytest.mark.parametrize(
    ("change", "steps", "problem"),
    [
        pytest.param(no_numbers, "2", "a training loss differs by inf", marks=pytest.mark.slow),
        (better, "4", "the final loss differs by 0.05 nats"),
        (
            slightly_better,
            "4",
            "the run is equal bit by bit, but a validation loss differs by 0.015",
        ),
        (easier_start, "4", "a training loss differs by 0.01"),
        pytest.param(easier_start, "2", "a training loss differs by 0.01", marks=pytest.mark.slow),
        pytest.param(
            better_on_the_way, "4", "a validation loss differs by 1", marks=pytest.mark.slow
        ),
        (other_tokens, "4", "the tokens are other ones"),
        pytest.param(higher_rate, "4", "a training loss differs by", marks=pytest.mark.slow),
    ],
)
def test_a_forged_receipt_is_refused(change, steps, problem, receipt, capsys):
    forge(receipt, change)
    with pytest.raises(SystemExit) as stop:
        cli.main(["track", "verify", str(receipt), "--steps", steps])
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert f"REFUSED, {problem}" in printed
    assert printed.endswith(f"{receipt}: REFUSED\n")


def one_lucky_seed(fields):
    fields["cells"][1] = fields["cells"][0]


def other_setting(fields):
    fields["cells"][0]["cell"]["setting"] = [["learning_rate", 123.0]]


def other_name(fields):
    fields["cells"][0]["cell"]["contender"] = "adamw"


def loss_beside_its_curve(fields):
    fields["cells"][0]["loss"] -= 0.05


def lowest_loss(fields):
    fields["cells"][0]["loss"] = "-Infinity"


def no_digest(fields):
    fields["cells"][0]["tokens"] = 3


def no_environment(fields):
    fields["cells"][0]["environment"] = [1]


def no_time(fields):
    fields["cells"][0]["step_time_s"] = "fast"


def no_data(fields):
    fields["cells"][0]["data"] = []


def curve_without_an_end(fields):
    fields["cells"][0]["curve"]["tokens"].pop()


def curve_of_texts(fields):
    fields["cells"][0]["curve"]["steps"] = "x"


def no_number_of_steps(fields):
    fields["config"]["num_steps"] = None


def no_model(fields):
    fields["config"]["model"] = None


def seed_that_is_a_path(fields):
    fields["config"]["seed"] = fields["cells"][0]["cell"]["seed"] = "../../elsewhere"


def no_cells(fields):
    fields["cells"] = []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (one_lucky_seed, "the seeds [0, 0], of which each may be there once"),
        (no_cells, "the seeds [], of which"),
        (seed_that_is_a_path, "is damaged ("),
        (other_setting, "the setting {'learning_rate': 123.0} is not that of its config"),
        (other_name, "a cell of 'adamw' is in a receipt of 'lion'"),
        (loss_beside_its_curve, "the loss of seed 0 is not where its curve ends"),
        (lowest_loss, "the loss of seed 0 is -inf"),
        (no_digest, "is damaged ("),
        (no_environment, "is damaged ("),
        (no_time, "is damaged ("),
        (no_data, "is damaged ("),
        (curve_without_an_end, "is damaged ("),
        (curve_of_texts, "is damaged ("),
        (no_number_of_steps, "is damaged ("),
        (no_model, "is damaged ("),
    ],
)
def test_a_receipt_whose_parts_do_not_agree_is_none(change, problem, receipt, capsys):
    forge(receipt, change)
    for command in (["verify", str(receipt)], ["board", str(receipt.parent)]):
        with pytest.raises(SystemExit):
            cli.main(["track", *command])
        assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_name_that_is_a_path_leads_nowhere(receipt, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"

    def rename(fields):
        fields["name"] = str(elsewhere)
        for cell in fields["cells"]:
            cell["cell"]["contender"] = str(elsewhere)

    forge(receipt, rename)
    cli.main(["track", "verify", str(receipt), "--steps", "1"])
    assert "seed 0, 1 steps: equal bit by bit" in capsys.readouterr().out
    assert not elsewhere.exists()


OWN_MODEL = """
from pathlib import Path

Path(__file__).with_name("ran").touch()

def make(**options):
    raise ValueError
"""


def test_the_model_of_a_receipt_is_not_run_to_read_it(receipt, tmp_path, capsys):
    (tmp_path / "theirs.py").write_text(OWN_MODEL)

    def take_model(fields):
        model = ModuleConfig(make=f"{tmp_path / 'theirs.py'}:make", vocab_size=257, max_seq_len=16)
        fields["config"]["model"] = to_dict(model)
        del fields["num_parameters"]

    forge(receipt, take_model)
    with pytest.raises(SystemExit):
        cli.main(["track", "board", str(tmp_path)])
    assert "is damaged (KeyError('num_parameters'))" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


OWN_CODE = """
import jax, optax

def make(learning_rate, *, matrix_specs, mesh, b1):
    print("the code of the receipt runs")
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    return optax.lion(learning_rate, b1=b1, b2=0.98, weight_decay=1.0, mask=decays)
"""


def test_code_that_a_receipt_carries_runs_only_when_it_could_be_read(receipt, tmp_path, capsys):
    place = f"{hashlib.sha256(OWN_CODE.encode()).hexdigest()[:16]}/mine.py"

    def carry(fields):
        rate = fields["config"]["optimizer"]["learning_rate"]
        own = OptaxConfig(make=f"{place}:make", options={"b1": 0.95}, learning_rate=rate)
        fields["config"]["optimizer"] = to_dict(own)
        fields["sources"] = {place: OWN_CODE}

    forge(receipt, carry)
    command = ["track", "verify", str(receipt)]
    code = ["--code", str(tmp_path / "code")]
    for words, message in (
        (command, "carries mine.py, which does not come with maxmars"),
        ([*command, *code], "read it, then give the same command again"),
    ):
        with pytest.raises(SystemExit):
            cli.main(words)
        printed = capsys.readouterr()
        assert message in printed.err
        assert "the code of the receipt runs" not in printed.out
    assert (tmp_path / "code" / place).read_text() == OWN_CODE
    cli.main([*command, *code])  # it computes what Lion did
    printed = capsys.readouterr().out
    assert "the code of the receipt runs" in printed
    assert "confirmed, 1 of 2 cells" in printed

    for sources, message in (
        ({place: OWN_CODE + "#"}, "is not the place of its text"),
        ({}, "does not carry"),
    ):
        forge(receipt, lambda fields, sources=sources: fields.update(sources=sources))
        with pytest.raises(SystemExit):
            cli.main([*command, *code])
        assert message in capsys.readouterr().err


def test_tokens_of_another_python_are_named(receipt, capsys):
    def of_python_sources(fields):
        fields["config"]["data"] = to_dict(PythonSourcesConfig())
        for cell in fields["cells"]:
            cell["environment"]["python"] = "3.9.1"

    forge(receipt, of_python_sources)
    with pytest.raises(SystemExit):
        cli.main(["track", "verify", str(receipt)])
    assert "They are the sources of Python 3.9.1, and this is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["verify", "{receipt}", "--cells", "3"], 1, "--cells 3: the receipt has 2 cells"),
        (["verify", "{receipt}", "--cells", "0"], 2, "--cells 0 must be greater than zero"),
        (["verify", "{receipt}", "--data", "{folder}/x"], 1, "x does not exist"),
        (["verify", "{folder}/none.json"], 1, "has no none.json"),
        (["verify", "{folder}/other.json"], 1, "is no receipt of `maxmars compare`"),
        (["verify", "{folder}/changed.json"], 1, "was changed after it was written"),
        (["verify", "{folder}/damaged.json"], 1, "is damaged (KeyError('curve'))"),
        (["board", "{folder}/empty"], 1, "has no receipt-*.json"),
        (["verfy"], 2, "needs one of verify, board, not 'verfy'"),
    ],
)
def test_what_cannot_be_tracked(words, code, message, receipt, tmp_path, capsys):
    text = receipt.read_text()
    damaged = shutil.copy(receipt, tmp_path / "damaged.json")
    forge(damaged, lambda fields: fields["cells"][0].pop("curve"))
    (tmp_path / "changed.json").write_text(text.replace('"name": "lion"', '"name": "lioN"'))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        cli.main(["track", *(w.format(receipt=receipt, folder=tmp_path) for w in words)])
    assert stop.value.code == code
    assert message in capsys.readouterr().err


def test_a_board_ranks_what_was_measured_on_the_same(compared, tmp_path, capsys):
    for name in ("adamw", "lion"):
        (tmp_path / name).mkdir()
        shutil.copy(compared / f"receipt-{name}.json", tmp_path / name)
    other = tmp_path / "receipt-longer.json"
    shutil.copy(compared / "receipt-lion.json", other)

    def longer(fields):
        fields["name"] = "longer"
        for cell in fields["cells"]:
            cell["cell"]["contender"] = "longer"
        fields["config"]["num_steps"] = 8
        fields["config"]["eval"]["every"] = 1  # of which the last counts

    forge(other, longer)
    cli.main(["track", "board", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count("parameters, ") == 2  # two divisions
    divisions = json.loads((tmp_path / "board.json").read_text())
    ranked = max((division["entries"] for division in divisions), key=len)
    assert {entry["name"] for entry in ranked} == {"adamw", "lion"}
    assert ranked[0]["loss"]["mean"] <= ranked[1]["loss"]["mean"]
    page = (tmp_path / "board.md").read_text()
    assert "| adamw/receipt-adamw.json |" in page
    assert (tmp_path / "board-1.png").read_bytes()[:4] == b"\x89PNG"
    # By the steps to a loss that all have reached, or none.
    cli.main(["track", "board", str(tmp_path), "--target", "9"])
    (division,) = json.loads((tmp_path / "board.json").read_text())
    assert [entry["num_steps"] for entry in division["entries"]] == [4, 4, 8]
    assert all(entry["reached"] for entry in division["entries"])
    cli.main(["track", "board", str(tmp_path), "--target", "0.1"])
    (division,) = json.loads((tmp_path / "board.json").read_text())
    assert not any(entry["reached"] for entry in division["entries"])


@pytest.mark.slow
def test_other_tokens_are_another_division(compared, tmp_path):
    """Also with other seeds, of which no two digests of tokens can be compared."""
    for name in ("here", "seeds", "data", "python"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "receipt-lion.json"
        shutil.copy(compared / "receipt-lion.json", path)
        if name == "here":
            continue

        def change(fields, name=name):
            fields["config"]["seed"] += 100
            for cell in fields["cells"]:
                cell["cell"]["seed"] += 100
                cell["tokens"] = "0" * 64
                if name == "data":
                    cell["data"] = "0" * 64

        forge(path, change)

    def of_python_sources(fields, version):
        fields["config"]["data"] = to_dict(PythonSourcesConfig())
        for cell in fields["cells"]:
            cell["data"] = None
            cell["environment"]["python"] = version

    forge(tmp_path / "python" / "receipt-lion.json", lambda f: of_python_sources(f, "3.9.1"))
    shutil.copytree(tmp_path / "python", tmp_path / "python2")
    forge(tmp_path / "python2" / "receipt-lion.json", lambda f: of_python_sources(f, "3.9.2"))
    cli.main(["track", "board", str(tmp_path)])
    divisions = json.loads((tmp_path / "board.json").read_text())
    groups = {frozenset(e["receipt"].split("/")[0] for e in d["entries"]) for d in divisions}
    assert groups == {
        frozenset({"here", "seeds"}),
        frozenset({"data"}),
        frozenset({"python"}),
        frozenset({"python2"}),
    }


def test_a_target_is_reached_by_the_final_losses_of_all_seeds(receipt, tmp_path):
    """(target - mean) times the root of two seeds must be 0.004, as in modded-nanogpt."""

    def reached(target):
        cli.main(["track", "board", str(tmp_path), "--target", str(target)])
        (division,) = json.loads((tmp_path / "board.json").read_text())
        (entry,) = division["entries"]
        return entry["reached"]

    def lower_before_the_end(fields):
        for cell in fields["cells"]:
            cell["curve"]["losses"][0] = 0.1

    forge(receipt, lower_before_the_end)  # only the last evaluation counts
    mean = sum(read_receipt(receipt).losses) / 2
    assert reached(mean + 0.0041 / 2**0.5)
    assert not reached(mean + 0.0039 / 2**0.5)

    def diverge(fields):
        fields["cells"][1]["loss"] = "Infinity"

    forge(receipt, diverge)
    assert not reached(mean + 1)
