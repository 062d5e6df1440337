"""examples/train_gpt2.py from the outside: what it promises a user, on a tiny folder of text."""

import csv
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gpt2.py"
OPTIONS = "--context 32 --batch 4 --warmup 4 --eval-windows 8 --sample-tokens 5 --device cpu".split()


@pytest.fixture(scope="module")
def gpt2():
    spec = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in ("a.txt", "inner/b.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        text = "".join(f"{i}: the quick brown fox, {i % 7} lazy dögs\n" for i in range(300))
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "undecodable.txt").write_bytes(b"\xff\xfe\xfa" * 1000)
    (folder / "picture.png").write_bytes(b"no text by its name" * 1000)
    return folder


@pytest.fixture
def run(gpt2, data, tmp_path):
    """run(name, options) -> (exit status, rows of the CSV), in the folder tmp_path / name"""
    def run(name, options=""):
        out = tmp_path / name
        status = gpt2.main(["--data", str(data), "--out", str(out), *OPTIONS, *options.split()])
        with open(out / "losses.csv", newline="") as file:
            return status, list(csv.DictReader(file))
    return run


def losses(rows, column="train_loss"):
    return [float(row[column]) for row in rows if row[column]]


def test_command_trains_and_writes_its_files(data, tmp_path):
    command = [sys.executable, SCRIPT, "--data", data, "--out", tmp_path / "out", *OPTIONS,
               "--steps", "25", "--eval-every", "10"]
    done = subprocess.run(map(str, command), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("losses.png", "checkpoint.pt", "summary.json"):
        assert str(tmp_path / "out" / name) in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "losses.png", "losses.csv", "checkpoint.pt", "summary.json"}
    assert "tokens/s" in done.stdout and "peak memory" in done.stdout
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["held_out_loss_at_start"] == pytest.approx(5.5, abs=0.3)  # ln 256
    assert summary["held_out_loss"] < 3.6 and summary["train_loss"] < 5
    assert summary["steps"] == 25 and summary["config"]["attention"] == "flash"
    assert summary["tokens_per_second"] > 0 and summary["peak_memory_bytes"] > 1e7 and summary["seconds"] > 0


def test_attentions_give_the_same_curve(run, device):
    curves, tolerance = {}, 2e-4 if device == "cpu" else 0.03  # bfloat16 there
    for attention in ("standard", "sdpa", "flash"):
        options = f"--steps 12 --eval-every 4 --attention {attention} --device {device}"
        status, rows = run(attention, options)
        assert status == 0 and [row["step"] for row in rows if row["held_out_loss"]] == ["0", "4", "8", "12"]
        curves[attention] = losses(rows) + losses(rows, "held_out_loss")
    assert curves["sdpa"] == pytest.approx(curves["standard"], abs=tolerance)
    assert curves["flash"] == pytest.approx(curves["standard"], abs=tolerance)


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_interrupted_and_resumed_equals_straight(gpt2, run, monkeypatch, attention):
    """Ctrl-C in the third step, with dropout: the checkpoint holds every generator and the data position."""
    options = f"--steps 6 --eval-every 2 --dropout 0.1 --accumulate 2 --attention {attention}"
    _, straight = run("straight", options)
    train_step = gpt2.Trainer.train_step

    def interrupted_step(trainer):
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        train_step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(gpt2.Trainer, "train_step", interrupted_step)
        status, rows = run("parts", options)
    assert status == 130 and rows[-1]["step"] == "3"
    torch.manual_seed(0)
    status, resumed = run("parts", options + " --resume")
    assert status == 0
    assert losses(resumed) == losses(straight)
    assert losses(resumed, "held_out_loss") == losses(straight, "held_out_loss")


def test_resume_refuses_another_run(run):
    with pytest.raises(SystemExit, match="there is no .*checkpoint.pt"):
        run("none", "--resume")
    run("one", "--steps 1")
    with pytest.raises(SystemExit, match="seed: 1 then, 2 now"):
        run("one", "--steps 1 --seed 2 --resume")


def test_compare_plots_every_run(gpt2, run, tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    labels, savefig = [], Figure.savefig

    def noting_savefig(figure, *args, **kwargs):
        labels.extend(text.get_text() for text in figure.axes[0].get_legend().get_texts())
        savefig(figure, *args, **kwargs)

    run("first", "--steps 2")
    monkeypatch.setattr(Figure, "savefig", noting_savefig)
    run("second", f"--steps 2 --compare {tmp_path / 'first'}")
    assert labels == ["second, train", "second, held out", "first, train", "first, held out"]
    assert (tmp_path / "second" / "losses.png").stat().st_size > 10_000


def test_without_tqdm_and_matplotlib(run, monkeypatch, capsys, tmp_path):
    for name in ("tqdm", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    status, rows = run("plain", "--steps 4 --eval-every 2")
    printed = capsys.readouterr().out
    assert status == 0 and len(losses(rows)) == 4 and not (tmp_path / "plain" / "losses.png").exists()
    assert "step 2/4: loss" in printed and "s left" in printed and "flash-attn[examples]" in printed


def test_bpe(gpt2, run, tmp_path):
    status, rows = run("bpe", "--steps 2 --vocab bpe --vocab-size 300")
    assert status == 0
    (path,) = (tmp_path / "bpe").glob("bpe-300-*.json")
    vocabulary = gpt2.BpeVocabulary(None, None, path)
    text = "7: the quick brown fox, dögs never seen: ñ\n" * 3
    tokens = vocabulary.encode([text, text], piece=50)
    assert vocabulary.size <= 300 and vocabulary.decode(tokens.tolist()) == text * 2
    assert (tokens == gpt2.END_OF_TEXT).sum() == 2 and tokens[-1] == gpt2.END_OF_TEXT


def test_data_says_what_is_missing(run, tmp_path):
    with pytest.raises(SystemExit, match="no such file"):
        run("a", f"--data {tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no text in it"):
        run("b", f"--data {tmp_path / 'empty'}")
    (tmp_path / "short.md").write_text("short")
    with pytest.raises(SystemExit, match="give more text or a shorter context"):
        run("c", f"--data {tmp_path / 'short.md'}")
