"""examples/train_bert.py, and both examples with Hugging Face's models: what they promise a user.

The names of transformers_case are here for its metadata, which "flash_attention_2" asks for on a GPU.
"""

import csv
import importlib.util
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
OPTIONS = "--context 48 --batch 6 --warmup 4 --device cpu".split()
SMALL = {"gpt2": "--eval-windows 8 --sample-tokens 5", "bert": "--eval-documents 12"}
HUGGING_FACE = {"gpt2": "--model gpt2-toy", "bert": "--model bert-toy"}


@pytest.fixture(scope="module")
def examples():
    def load(name):
        spec = importlib.util.spec_from_file_location(f"train_{name}", EXAMPLES / f"train_{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return {name: load(name) for name in SMALL}


@pytest.fixture(scope="module")
def bert(examples):
    return examples["bert"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Paragraphs of one letter to more than a context."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    paragraphs = (["the quick brown fox, lazy dögs"] * (i * 7 % 4) + ["1 2 3 4 5 6 7 8 9"[:i % 16 + 1]]
                  for i in range(400))
    path.write_text("\n\n".join(map(" ".join, paragraphs)), encoding="utf-8")
    return path


@pytest.fixture
def run(examples, data, tmp_path):
    """run(example, name, options) -> (exit status, rows of the CSV), in the folder tmp_path / name"""
    def run(example, name, options=""):
        options = ["--data", str(data), "--out", str(tmp_path / name), *OPTIONS, *SMALL[example].split(),
                   *options.split()]
        status = examples[example].main(options)
        with open(tmp_path / name / "losses.csv", newline="") as file:
            return status, list(csv.DictReader(file))
    return run


def losses(rows, column="train_loss"):
    return [float(row[column]) for row in rows if row[column]]


@pytest.fixture(params=["own", "hugging_face"])
def model(request):
    """-> the options for an example's model: the one in its file, or transformers'"""
    if request.param == "own":
        return dict.fromkeys(SMALL, "")
    import transformers_case  # noqa: F401
    return HUGGING_FACE


def test_command_trains_and_writes_its_files(data, tmp_path):
    command = [sys.executable, EXAMPLES / "train_bert.py", "--data", data, "--out", tmp_path / "out",
               *OPTIONS, *SMALL["bert"].split(), "--steps", "40", "--eval-every", "20"]
    done = subprocess.run(map(str, command), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "losses.png", "losses.csv", "checkpoint.pt", "summary.json"}
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["held_out_loss_at_start"] == pytest.approx(5.8, abs=0.3)  # about ln 320
    assert summary["held_out_loss"] < 3.6 and summary["train_loss"] < 4.5
    assert summary["tokens_per_second"] > 0 and 0.2 < summary["padding"] < 0.8
    assert f"{summary['padding']:.0%} of padding" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("out "))
    assert line.split()[1] == "flash" and line.split()[-1] == f"{summary['held_out_loss']:.4f}"


@pytest.fixture
def curves(run, device):
    """curves(example, options) -> by attention, the training and held-out losses of 12 steps; they fall, and
    those of flash and sdpa are those of standard attention. Under dropout they could not be: its draws depend
    on the layout."""
    def curves(example, options):
        found, tolerance = {}, 2e-4 if device == "cpu" else 0.03  # bfloat16 there
        for attention in ("standard", "sdpa", "flash"):
            status, rows = run(example, attention, f"--steps 12 --eval-every 4 --attention {attention} "
                                                   f"--device {device} {options}")
            assert status == 0
            found[attention] = losses(rows) + losses(rows, "held_out_loss")
        assert found["flash"] == pytest.approx(found["standard"], abs=tolerance)
        assert found["sdpa"] == pytest.approx(found["standard"], abs=tolerance)
        assert found["flash"][11] < found["flash"][0] - 0.5
        return rows
    return curves


def test_packed_and_padded_give_the_same_curve(curves, model):
    tokens = [int(row["tokens"]) for row in curves("bert", model["bert"]) if row["tokens"]]
    assert len(set(tokens)) > 3 and max(tokens) < 6 * 48


def test_hugging_face_gpt2(curves):
    import transformers_case  # noqa: F401
    curves("gpt2", "--lr 1e-3 --model gpt2-toy")


@pytest.mark.parametrize("example,attention", [("bert", "flash"), ("bert", "standard"), ("gpt2", "flash")])
def test_interrupted_and_resumed_equals_straight(examples, run, model, monkeypatch, example, attention):
    """Ctrl-C in the third step, with dropout: the checkpoint holds every generator and the data position."""
    options = (f"--steps 6 --eval-every 2 --dropout 0.1 --accumulate 2 --attention {attention} "
               f"{model[example]}")
    _, straight = run(example, "straight", options)
    trainer_class = examples[example].Trainer
    train_step = trainer_class.train_step

    def interrupted_step(trainer):
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        train_step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_class, "train_step", interrupted_step)
        status, rows = run(example, "parts", options)
    assert status == 130 and rows[-1]["step"] == "3"
    torch.manual_seed(0)
    status, resumed = run(example, "parts", options + " --resume")
    assert status == 0
    assert losses(resumed) == losses(straight)
    assert losses(resumed, "held_out_loss") == losses(straight, "held_out_loss")


def test_resume_refuses_another_model(run):
    import transformers_case  # noqa: F401
    run("bert", "one", "--steps 1")
    with pytest.raises(SystemExit, match="model: None then, bert-toy now"):
        run("bert", "one", "--steps 1 --resume --model bert-toy")


def test_options_that_contradict(run, capsys):
    with pytest.raises(SystemExit):
        run("bert", "one", "--model bert-base-uncased --size tiny")
    assert "--model bert-base-uncased is of --size base" in capsys.readouterr().err


def test_table_has_every_run(run, tmp_path, capsys):
    run("bert", "padded", "--steps 2 --attention sdpa")
    run("bert", "packed", f"--steps 2 --compare {tmp_path / 'padded'}")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[-2:]] == [["packed", "flash"], ["padded", "sdpa"]]
    assert lines[-1][-2:] == lines[-2][-2:]  # both losses, to four digits


def test_documents(bert, tmp_path):
    """Every document whole, or cut at the context; what is too short for a masked word and context is not."""
    text = "\n\n".join(["def f():\n\n    return 1", "x" * 70, "tiny", *["y" * 20] * 40])
    (tmp_path / "text.txt").write_text(text)
    options = ["--data", str(tmp_path / "text.txt"), "--context", "32", "--batch", "2"]
    vocabulary, train, held_out = bert.load_data(bert.parse_arguments(options))
    texts = [vocabulary.decode(document.tolist()).rstrip("\0") for document in train]
    assert texts[:5] == ["def f():\n\n    return 1", "x" * 32, "x" * 32, "y" * 20, "y" * 20]
    assert len(held_out) >= 2 and set(torch.cat(held_out).tolist()) == {ord("y"), 0}
    with pytest.raises(SystemExit, match="are too few for --batch 64"):
        bert.load_data(bert.parse_arguments([*options, "--batch", "64"]))


def test_batch_masks_words(bert):
    """15 % of the tokens; of those eight in ten show the mask, one another token; never the end of a text."""
    rng = torch.Generator().manual_seed(0)
    documents = [torch.cat([torch.randint(1, 100, (n - 1,), generator=rng), torch.zeros(1)]).byte()
                 for n in (9, 400, 1000, 20, 30000)]
    batch, original = bert.Batch.of(documents, 100, rng, "cpu"), torch.cat(documents).long()
    assert torch.equal(batch.targets, original[batch.masked]) and (batch.targets != 0).all()
    others = torch.ones(len(original), dtype=torch.bool)
    others[batch.masked] = False
    shown = batch.tokens_packed[batch.masked]
    assert torch.equal(batch.tokens_packed[others], original[others])
    share = [len(shown) / len(original), *((shown == x).float().mean() for x in (100, batch.targets))]
    assert share == pytest.approx([0.15, 0.8, 0.1 + 0.1 / 99], abs=0.02)
    assert len(bert.mask_words(torch.tensor([5, 6, 0]), 100, torch.Generator().manual_seed(2))[1]) >= 1


def test_batch_layouts_agree(bert):
    rng = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 100, (n,), generator=rng) for n in (9, 40, 8)]
    batch = bert.Batch.of(documents, 100, rng, "cpu")
    padded, mask = batch.tokens_padded(), batch.mask()
    assert padded.shape == (3, 40) and mask.sum(1).tolist() == [9, 40, 8] and not padded[~mask].any()
    assert torch.equal(padded[mask], batch.tokens_packed) and batch.cu_seqlens.tolist() == [0, 9, 49, 57]
    masked = batch.tokens_packed[batch.masked_rows(packed=True)]
    assert torch.equal(padded.flatten()[batch.masked_rows(packed=False)], masked)
    assert batch.positions.tolist() == [*range(9), *range(40), *range(8)]


def test_neighbours_and_padding_do_not_matter(bert):
    """A document's loss is the same alone, in a batch, packed and padded."""
    args = bert.parse_arguments(["--context", "48"])
    torch.manual_seed(0)
    model = bert.Bert(args, 100).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rng = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 100, (n,), generator=rng) for n in (9, 40, 17)]

    def loss(documents, attention):
        model.packed = attention in bert.PACKED
        for layer in model.layers:
            layer.attend = bert.ATTENTION[attention]
        batch = bert.Batch.of(documents, 100, torch.Generator(), "cpu")
        batch.masked = torch.arange(batch.tokens)
        batch.targets = batch.tokens_packed = torch.cat(documents)
        return model(batch).item() * batch.tokens

    alone = math.fsum(loss([document], "standard") for document in documents)
    for attention in bert.ATTENTION:
        assert loss(documents, attention) == pytest.approx(alone, rel=1e-5)
