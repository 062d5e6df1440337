"""Texts from a file or a folder, and vocabularies that make tokens of them: bytes, or byte pairs (BPE)."""

import hashlib
import os
import sysconfig
from pathlib import Path

import torch

TEXT_SUFFIXES = set(".txt .md .rst .tex .html .json .jsonl .csv .py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs "
                    ".go .java .kt .js .ts .jsx .tsx .rb .pl .lua .sh .sql .toml .yaml .yml .ini".split())
# Of the standard library: no tests, no packages of yours, and no tables (encodings, pydoc_data).
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
END_OF_TEXT = 0


def read_texts(data):
    """The texts, in an order that depends on their paths alone."""
    root = Path(data or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--data {root}: no such file or folder")
    suffixes, skipped = (TEXT_SUFFIXES, set()) if data else ({".py"}, STDLIB_SKIPPED)
    paths = [root] if root.is_file() else [
        path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix.lower() in suffixes
        and skipped.isdisjoint(path.relative_to(root).parts)]
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, PermissionError):
            continue
    return [text for text in texts if text]


class ByteVocabulary:
    size = 256  # END_OF_TEXT is the byte 0, which text does not contain

    def encode(self, texts):
        joined = b"".join(text.encode() + b"\0" for text in texts)
        return torch.frombuffer(bytearray(joined), dtype=torch.uint8)

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


class BpeVocabulary:
    """Byte pairs learnt from the training texts, and kept at `path`."""

    def __init__(self, texts, size, path):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        if not path.exists():
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
                vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
            replace_file(path, lambda temporary: tokenizer.save(str(temporary)))
        self.tokenizer = Tokenizer.from_file(str(path))
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, texts, piece=1 << 16, pieces_at_once=256):
        # A token cut at a piece's end costs nothing, and pieces bound the tokenizer's memory.
        pieces = [(text[i:i + piece], [END_OF_TEXT] * (i + piece >= len(text)))
                  for text in texts for i in range(0, len(text), piece)]
        encoded = []
        for first in range(0, len(pieces), pieces_at_once):
            batch, ends = zip(*pieces[first:first + pieces_at_once])
            for encoding, end in zip(self.tokenizer.encode_batch(batch), ends):
                encoded.append(torch.tensor(encoding.ids + end, dtype=torch.int32))
        return torch.cat(encoded)

    def decode(self, tokens):
        return self.tokenizer.decode(tokens)


def load_texts(args):
    """-> vocabulary, training texts, held-out texts. Notes the texts' fingerprint in args.text.

    Held out is the last tenth of every text: the same kind of text as the rest, whatever the data, and never
    trained on; it works for one file and for a thousand.
    """
    texts = read_texts(args.data)
    if not texts:
        raise SystemExit(f"--data {args.data}: no text in it (looked for {' '.join(sorted(TEXT_SUFFIXES))})")
    args.text = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    held_out = [text[len(text) * 9 // 10:] for text in texts]
    train = [text[:len(text) * 9 // 10] for text in texts]
    if args.vocab == "bytes":
        return ByteVocabulary(), train, held_out
    path = args.out / f"bpe-{args.vocab_size}-{args.text}.json"
    return BpeVocabulary(train, args.vocab_size, path), train, held_out


def replace_file(path, write):
    """Written beside it and renamed: whoever interrupts leaves the old file, not half of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write(temporary)
    os.replace(temporary, path)
