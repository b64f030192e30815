"""The last line of a command names the next one, which works as it is printed."""

import shlex

import numpy as np
import pytest
from refusals import stopped
from test_commands import ALONE
from token_directories import write_llm_c, write_nanogpt

from maxmars.cli import main

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 200


def following(capsys, *words):
    """The words after `maxmars` of the command that another one names in its last line."""
    main(list(map(str, words)))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("next: maxmars ")
    return shlex.split(last)[2:]


@pytest.fixture
def characters(tmp_path):
    """As nanoGPT's `shakespeare_char` leaves a directory: the text, its ids, and a pickle."""
    directory = tmp_path / "shakespeare_char"
    ids = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    stream = np.array([ids[character] for character in TEXT])
    write_nanogpt(directory, *np.split(stream, [len(stream) * 9 // 10]))
    (directory / "input.txt").write_text(TEXT)
    (directory / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")  # is never loaded
    return directory


SHORT = """--num-steps 1 --global-batch-size 8 --model.num-layers 1 --model.num-heads 2
    --model.embed-dim 32 --model.max-seq-len 32 --model.scan-unroll 1 --eval.every None
    --num-processes 1"""


@pytest.mark.seconds
@pytest.mark.usefixtures("without_figures")
def test_nanogpts_characters_are_trained_on_and_generated(characters, tmp_path, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for words in (["data", "inspect", characters], ["train", f"quickstart:data={characters}"]):
        with stopped(
            1,
            str(characters / "meta.pkl"),
            f"maxmars data prepare {characters / 'input.txt'} OUT --tokenizer byte",
        ):
            main([*map(str, words), *(ALONE if words[0] == "train" else ())])
    # Bare ids train, and no command is named that needs their text.
    bare = ["train", f"quickstart:data={characters}", "--data.vocab-size", "65", "--workdir"]
    report = following(capsys, *bare, tmp_path / "bare", *SHORT.split(), "--model.vocab-size", "65")
    main(report)
    # The five lines of tools/examples/your_own_text.md.
    ids = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    own = Tokenizer(models.WordLevel(ids | {"<|endoftext|>": len(ids)}, "<|endoftext|>"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.decoder = decoders.Fuse()
    own.save(str(characters / "tokenizer.json"))
    capsys.readouterr()
    train = following(capsys, "data", "inspect", characters)
    assert "--model.vocab-size" not in train
    generate = following(capsys, *train, "--workdir", tmp_path / "run", *SHORT.split())
    main([*generate, "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith("Once")


def named_for_700_bytes(tmp_path, capsys, *options):
    """The words after the config with which `maxmars train` fits so little text."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT[:700])
    words = following(capsys, "data", "prepare", text, out, "--workers", "0", *options)
    assert words[:2] == ["train", f"quickstart:data={out}"]
    assert following(capsys, "data", "inspect", out) == words
    return words[2:]


def test_the_model_fits_what_was_prepared(tmp_path, capsys):
    assert named_for_700_bytes(tmp_path, capsys) == ["--model.max-seq-len", "16"]


@pytest.mark.seconds
def test_what_has_no_validation_split_is_trained_on_without(tmp_path, capsys):
    named = named_for_700_bytes(tmp_path, capsys, "--validation-fraction", "0")
    assert named == ["--eval.every", "None", "--model.max-seq-len", "64"]
    words = ["train", f"quickstart:data={tmp_path / 'out'}", *named, "--workdir", tmp_path / "run"]
    short = "--num-steps 1 --model.num-layers 1 --model.embed-dim 32 --model.scan-unroll 1"
    assert following(capsys, *words, *short.split(), *ALONE)[0] == "generate"


def test_tokens_of_gpt2_get_a_model_of_their_size(tmp_path, capsys):
    directory = tmp_path / "tokens"
    stream = np.random.default_rng(0).integers(0, 50257, 3_000_000)
    write_llm_c(directory / "a_val_000000.bin", stream[:2000])
    write_llm_c(directory / "a_train_000000.bin", stream)
    assert following(capsys, "data", "inspect", directory)[1] == f"quickstart:data={directory}"
    for number in range(1, 44):
        (directory / f"a_train_{number:06d}.bin").symlink_to(directory / "a_train_000000.bin")
    words = following(capsys, "data", "inspect", directory)
    assert words[1:] == ["gpt2:size=small,optimizer=mars", "--data.path", str(directory)]


def test_too_little_text_names_no_training(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a short text")
    main(["data", "prepare", str(tmp_path / "text.txt"), str(tmp_path / "out"), "--workers", "0"])
    assert "next: " not in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".txt", ".jsonl.gz"])
def test_a_folder_is_told_the_pattern_of_its_own_files(tmp_path, ending):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for name in (f"a{ending}", f"deep/b{ending}", "c.json", "README.md"):
        (tmp_path / "texts" / name).write_text("")
    with stopped(1, f"'{tmp_path}/texts/**/*{ending}'"):
        main(["data", "prepare", str(tmp_path / "texts"), str(tmp_path / "out")])
