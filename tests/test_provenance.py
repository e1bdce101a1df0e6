import hashlib
import shutil

from d5p4_lab.provenance import command, weights_hash
from tests.checkpoints import write_mdlm

COMMANDS = [
    (["d5p4", "reproduce", "qa"], "d5p4 reproduce qa"),
    (["d5p4", "--out", "/home/someone/results/box"], "d5p4 --out box"),
    (["--out=/home/someone/box", "--set", "model=/models/books"], "--out=box --set model=books"),
    (["--set", 'judges=["/a/b/judge", "~/c/other"]'], """--set 'judges=["judge", "other"]'"""),
    (["--out", "/home/some one/my box"], "--out 'my box'"),
    # Not of this machine alone:
    (["--out", "results/box", "--set", "beta=[1, 2.5]"], "--out results/box --set 'beta=[1, 2.5]'"),
    (["https://example.org/a/b"], "https://example.org/a/b"),
    (["/", "~", ".."], "/ '~' .."),
]


def test_a_command_names_no_folder_of_this_machine():
    for words, expected in COMMANDS:
        assert command(words) == f"python -m d5p4_lab {expected}"


def test_the_hash_is_of_the_weights_and_not_of_their_place(tmp_path):
    folder = write_mdlm(tmp_path / "one")
    before = weights_hash(folder)
    shutil.copytree(folder, tmp_path / "two")
    (tmp_path / "two" / "config.json").write_text("{}")
    assert weights_hash(tmp_path / "two") == before
    assert before == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights_hash(write_mdlm(tmp_path / "two", seed=1)) != before
