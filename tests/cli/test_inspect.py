import numpy as np
import pytest
import tokenizers
from token_directories import write_llm_c, write_nanogpt, write_tfds

from maxmars.cli import main
from maxmars.cli.data import differences
from maxmars.data.prepare import prepare
from maxmars.data.sources import read_metadata
from maxmars.data.tokenizer import ByteTokenizer

DOCUMENTS = [(f"{i}", f"{i:04d} ".ljust(20, "x")) for i in range(300)]


def run(out, documents=DOCUMENTS, **options):
    prepare(documents, out, tokenizer=ByteTokenizer(), source="a [test]", **options)
    return out


@pytest.fixture
def directory(tmp_path):
    return run(tmp_path / "tokens", task_bytes=1000)


def inspect(capsys, *arguments):
    code = 0
    try:
        main(["data", "inspect", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out + err


def test_counts_and_sample(directory, capsys):
    code, text = inspect(capsys, directory)
    assert code == 0
    split = read_metadata(directory).splits["train"]
    assert f"{split.num_tokens:,}" in text
    assert f"{split.num_documents:,}" in text
    assert "21.0" in text  # tokens a document
    assert "1.00" in text  # bytes a token
    assert "a [test]" in text
    assert "train: '0000 xxxxxxxxxxxxxxx'" in text
    assert "checksum" in text
    assert text.endswith(f"next: maxmars train quickstart:data={directory}\n")


def test_text_that_a_tokenizer_cannot_spell_is_refused(tmp_path, capsys):
    """Such as one of bytes that knows those alone that it was trained on, the trainer's default."""
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<|endoftext|>"], show_progress=False)
    own.train_from_iterator(["the cat sat on the mat"], trainer)
    own.save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 900 + "\n")
    (tmp_path / "b.txt").write_text("the Cat sat on the mat " * 900 + "\n")
    out = tmp_path / "out"
    words = ["data", "prepare", str(tmp_path / "*.txt"), str(out), "--tokenizer"]
    words += [str(tmp_path / "own.json"), "--workers", "0"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "'C'" in error
    assert "2.17%" in error
    assert error.count("\n") == 1
    assert not out.exists()
    main([*words, "--allow-lossy"])
    assert "2.17%" in capsys.readouterr().out
    assert "2.17%" in inspect(capsys, out)[1]
    assert "--allow-lossy" in read_metadata(out).command


@pytest.mark.parametrize("name", ["train_00001.bin", "val_documents.bin"])
def test_damage_is_found(directory, capsys, name):
    data = bytearray((directory / name).read_bytes())
    data[2] ^= 1  # another token of the vocabulary
    (directory / name).write_bytes(data)
    code, text = inspect(capsys, directory)
    assert code == 1
    assert f"{name} " in text
    assert inspect(capsys, directory, "--no-verify")[0] == 0
    (directory / name).unlink()
    code, text = inspect(capsys, directory)
    assert code == 1
    assert f"lacks {name}" in text


def test_the_same_stream_in_other_files(directory, tmp_path, capsys):
    other = run(tmp_path / "other", task_bytes=700)
    code, text = inspect(capsys, directory, "--compare", other)
    assert code == 0
    assert "same tokens" in text
    assert differences(other, directory) == []


def test_another_stream(directory, tmp_path, capsys):
    changed = [(name, text.replace("0250", "025!")) for name, text in DOCUMENTS]
    other = run(tmp_path / "other", changed)
    code, text = inspect(capsys, directory, "--compare", other)
    assert code == 1
    (found,) = differences(directory, other)
    assert found in text
    place = int(found.removeprefix("train from token ").removesuffix(" on").replace(",", ""))
    assert place % 21 == 3
    longer = run(tmp_path / "longer", [*DOCUMENTS, ("last", "last")])
    assert [line.partition(":")[0] for line in differences(directory, longer)] == [
        "tokens of train"
    ]


def test_no_sample_without_the_tokenizer(directory, capsys):
    (directory / "tokenizer.json").write_text("{}")
    code, text = inspect(capsys, directory)
    assert code == 0
    assert "no sample: " in text


def test_no_such_directory(tmp_path, capsys):
    code, text = inspect(capsys, tmp_path / "none")
    assert code == 1
    assert "does not exist" in text
    (tmp_path / "file.txt").touch()
    code, text = inspect(capsys, tmp_path / "file.txt")
    assert code == 1
    assert "file.txt" in text
    code, text = inspect(capsys, "https://example.com/tokens")
    assert code == 1
    assert "gs://BUCKET/PATH" in text


STREAM, VAL = np.arange(900) % 300, np.arange(70)


def write_llm_c_files(directory, train, val):
    for i, part in enumerate(np.split(train, [400])):
        write_llm_c(directory / f"books_train_{i:06d}.bin", part)
    write_llm_c(directory / "books_val_000000.bin", val)


@pytest.mark.parametrize(("write", "num_files"), [(write_nanogpt, 1), (write_llm_c_files, 2)])
def test_files_of_other_programs(tmp_path, capsys, write, num_files):
    write(tmp_path / "theirs", STREAM, VAL)
    code, text = inspect(capsys, tmp_path / "theirs")
    assert code == 0
    assert "another program" in text
    rows = [line.replace("│", " ").split()[:3] for line in text.splitlines()]
    assert ["train", "900", str(num_files)] in rows
    assert ["val", "70", "1"] in rows
    assert text.endswith(f"--data.path {tmp_path / 'theirs'}\n")


def test_the_command_says_what_is_not_the_default(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n" * 40)
    arguments = ["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "out")]
    given = ["--shard-tokens", "100", "--task-bytes", "300"]
    main([*arguments, *given, "--workers", "0"])
    command = read_metadata(tmp_path / "out").command
    assert command.startswith(f"maxmars {' '.join(arguments)} --tokenizer byte ")
    assert command.endswith(" ".join(given))


def test_files_of_another_program_and_a_dataset_of_tfds(tmp_path, capsys):
    write_nanogpt(tmp_path / "nanogpt", STREAM, VAL)
    dataset = write_tfds(tmp_path, {"train": np.split(STREAM, 9), "val": np.split(VAL, 2)})
    code, text = inspect(capsys, dataset, "--compare", tmp_path / "nanogpt")
    assert code == 0, text
    assert "same tokens" in text
    write_nanogpt(tmp_path / "cut", STREAM[:-1], VAL)
    code, text = inspect(capsys, tmp_path / "nanogpt", "--compare", tmp_path / "cut")
    assert code == 1
    assert "tokens of train: 900 and 899" in text
