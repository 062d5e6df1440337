"""Trains a BERT, masked words from both sides, on your own text, without computing anything for padding.

    python examples/train_bert.py                                # tiny, bytes, the Python library's sources
    python examples/train_bert.py --attention standard           # the same run on padded batches
    python examples/train_bert.py --compare runs/bert-tiny-standard   # both curves in one plot, and a table
    python examples/train_bert.py --data my_texts/ --size base   # byte pairs (BPE) learnt from your text
    python examples/train_bert.py --model bert-base-uncased      # Hugging Face's BERT on flash_attention_2

A document is a paragraph (of a program: a function, a class), so lengths differ widely. A batch is padded to
its longest document for standard attention and for sdpa. With flash attention its documents lie one after
another, packed once, before the first layer, and only flash_attn_varlen_func has to know where each begins:
the linear layers do no work on padding either. All attentions see the same documents with the same words
masked, so their losses coincide; tokens/s counts no padding.

The output folder holds losses.csv, losses.png, checkpoint.pt and summary.json. Ctrl-C saves and leaves;
--resume goes on from there, and ends where an undisturbed run would have ended.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for who loads this file by its path

import training_loop  # noqa: E402  (found on the path set just above, as the modules below)
from text_data import END_OF_TEXT, load_texts  # noqa: E402
from training_loop import column, report, summarize, train  # noqa: E402, F401

SIZES = {
    "tiny": dict(layers=4, heads=4, width=128, context=512, vocab="bytes", vocab_size=4096,
                 batch=8, accumulate=1, steps=1500, lr=1e-3, warmup=100, eval_every=100),
    "base": dict(layers=12, heads=12, width=768, context=512, vocab="bpe", vocab_size=30522,
                 batch=64, accumulate=4, steps=5000, lr=2e-4, warmup=500, eval_every=250),
    "large": dict(layers=24, heads=16, width=1024, context=512, vocab="bpe", vocab_size=30522,
                  batch=32, accumulate=8, steps=5000, lr=1e-4, warmup=1000, eval_every=250),
}
# The names of Hugging Face's models of these sizes, except for the toy.
MODELS = {"bert-toy": "tiny", "bert-base-uncased": "base", "bert-large-uncased": "large"}
MASKED = 0.15  # of the tokens; of these, eight in ten show the mask, one another token, one itself
SHORTEST = 8  # tokens in a document


@dataclasses.dataclass
class Batch:
    """Documents one after another, T tokens in all, some of them masked, and how they lie in [B, S]."""
    tokens_packed: torch.Tensor  # [T]
    positions: torch.Tensor  # [T], within the document
    cu_seqlens: torch.Tensor  # int32 [B + 1], where each document begins among the T
    places: torch.Tensor  # [T], where each token is in the flattened padded batch
    masked: torch.Tensor  # [M], which of the T have to be guessed
    targets: torch.Tensor  # [M], what they are
    max_seqlen: int  # S

    @classmethod
    def of(cls, documents, vocab_size, rng, device):
        """documents: a list of token tensors. Everything is made on the CPU: no wait for the device."""
        lengths = torch.tensor([len(document) for document in documents])
        tokens, cu_seqlens = torch.cat(documents).long(), F.pad(lengths.cumsum(0), (1, 0))
        S, document = int(lengths.max()), torch.arange(len(documents)).repeat_interleave(lengths)
        positions = torch.arange(len(tokens)) - cu_seqlens[document]
        shown, masked = mask_words(tokens, vocab_size, rng)
        tensors = (shown, positions, cu_seqlens.int(), document * S + positions, masked, tokens[masked])
        return cls(*(tensor.to(device, non_blocking=True) for tensor in tensors), max_seqlen=S)

    @property
    def tokens(self):
        return len(self.tokens_packed)

    def tokens_padded(self):  # -> [B, S], the end of text on the padding
        padded = self.tokens_packed.new_full(((len(self.cu_seqlens) - 1) * self.max_seqlen,), END_OF_TEXT)
        return padded.index_copy(0, self.places, self.tokens_packed).unflatten(0, (-1, self.max_seqlen))

    def mask(self):  # -> bool [B, S], true for tokens
        return torch.arange(self.max_seqlen, device=self.places.device) < self.cu_seqlens.diff()[:, None]

    def masked_rows(self, packed):  # -> [M], where the masked tokens are among the T, or in flattened [B, S]
        return self.masked if packed else self.places[self.masked]


def mask_words(tokens, vocab_size, rng):
    """-> tokens as the model sees them, and the indices of those it has to guess, at least one."""
    chance = torch.rand(len(tokens), generator=rng).masked_fill(tokens == END_OF_TEXT, 1.0)
    masked = (chance <= max(MASKED, chance.min())).nonzero().flatten()
    how, shown = torch.rand(len(masked), generator=rng), tokens.clone()
    others = torch.randint(1, vocab_size, (len(masked),), generator=rng)
    shown[masked] = torch.where(how < 0.8, vocab_size, torch.where(how < 0.9, others, tokens[masked]))
    return shown, masked


def flash_attention(qkv, batch, dropout_p):  # qkv [T, 3, H, D] -> [T, H, D]
    from flash_attn import flash_attn_varlen_qkvpacked_func
    return flash_attn_varlen_qkvpacked_func(qkv, batch.cu_seqlens, batch.max_seqlen, dropout_p)


def sdpa_attention(qkv, batch, dropout_p):  # qkv [B, S, 3, H, D] -> [B, S, H, D]
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
    mask = batch.mask()[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p).transpose(1, 2)


def standard_attention(qkv, batch, dropout_p):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    probabilities = scores.masked_fill(~batch.mask()[:, None, None], -math.inf).softmax(-1).to(v.dtype)
    return (F.dropout(probabilities, dropout_p) @ v).transpose(1, 2)


ATTENTION = {"flash": flash_attention, "sdpa": sdpa_attention, "standard": standard_attention}
PACKED = {"flash"}


class Layer(nn.Module):
    """BERT's: the norm comes after each branch is added."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.heads, self.dropout, self.attend = config.heads, config.dropout, ATTENTION[config.attention]
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, batch):  # [T, width] or [B, S, width]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        attended = self.attend(qkv, batch, self.dropout if self.training else 0.0).flatten(-2)
        x = self.norm_attention(x + F.dropout(self.attention_out(attended), self.dropout, self.training))
        branch = self.mlp_out(F.gelu(self.mlp_in(x)))
        return self.norm_mlp(x + F.dropout(branch, self.dropout, self.training))


class Bert(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        self.dropout, self.packed = config.dropout, config.attention in PACKED
        # One more than the text has, for the mask; and matrix products like multiples of 64.
        self.tokens = nn.Embedding(-(-(vocab_size + 1) // 64) * 64, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.norm_embedding, self.norm_head = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head, self.bias = nn.Linear(config.width, config.width), nn.Parameter(
            torch.zeros(self.tokens.num_embeddings))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch):  # -> the mean loss over the masked tokens
        if self.packed:
            x = self.tokens(batch.tokens_packed) + self.positions(batch.positions)
        else:
            x = self.tokens(batch.tokens_padded()) + self.positions.weight[:batch.max_seqlen]
        x = F.dropout(self.norm_embedding(x), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, batch)
        # Only what is masked is worth a guess: a seventh of the largest matrix product.
        rows = x.reshape(-1, x.shape[-1])[batch.masked_rows(self.packed)]
        guess = self.norm_head(F.gelu(self.head(rows)))
        return F.cross_entropy(F.linear(guess, self.tokens.weight, self.bias), batch.targets)


def split_documents(texts):
    """Paragraphs: what stands between blank lines, with the indented paragraphs after it."""
    return [part for text in texts for part in re.split(r"\n\s*\n(?=\S)", text) if part.strip()]


def load_data(args):
    """-> vocabulary, training documents, held-out documents: lists of token tensors, none above context."""
    vocabulary, *parts = load_texts(args)
    train, held_out = (
        [piece for document in in_documents(vocabulary.encode(split_documents(texts)))
         for piece in document.split(args.context) if len(piece) >= SHORTEST] for texts in parts)
    if min(len(train), len(held_out)) < args.batch:
        raise SystemExit(f"--data {args.data}: {len(held_out)} held-out documents (in a tenth of the text) "
                         f"are too few for --batch {args.batch}: give more text or a smaller batch")
    return vocabulary, train, held_out


def in_documents(tokens):
    ends = (tokens == END_OF_TEXT).nonzero().flatten() + 1
    return tokens.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


def build_model(args, vocab_size):
    if args.model:
        import hugging_face
        return hugging_face.Bert(args, vocab_size + 1)
    return Bert(args, vocab_size)


class Trainer(training_loop.Trainer):
    def __init__(self, args, vocab_size, train_documents, held_out_documents):
        mean = sum(map(len, train_documents)) / len(train_documents)
        super().__init__(args, lambda: build_model(args, vocab_size),
                         tokens_per_step=mean * args.batch * args.accumulate)
        self.vocab_size = vocab_size
        self.train_documents, self.held_out_documents = train_documents, held_out_documents

    def batch(self, documents, chosen, rng):
        return Batch.of([documents[i] for i in chosen], self.vocab_size, rng, self.device)

    def draw(self):
        chosen = torch.randint(len(self.train_documents), (self.args.batch,), generator=self.data_rng)
        return self.batch(self.train_documents, chosen.tolist(), self.data_rng)

    def held_out_batches(self):
        """Evenly spaced documents."""
        count, rng = self.args.eval_documents, torch.Generator().manual_seed(0)
        chosen = [len(self.held_out_documents) * i // count for i in range(count)]
        for first in range(0, count, self.args.batch):
            yield self.batch(self.held_out_documents, chosen[first:first + self.args.batch], rng)

    def loss(self, batch):
        return self.forward(batch)

    def padding(self, batches=200):
        lengths = torch.tensor([len(document) for document in self.train_documents]).float()
        rng = torch.Generator().manual_seed(0)
        drawn = lengths[torch.randint(len(lengths), (batches, self.args.batch), generator=rng)]
        return 1 - (drawn.sum() / (drawn.amax(dim=1).sum() * self.args.batch)).item()


def table(folders):
    """The runs in folders, one a line, from their summaries."""
    yield f"{'run':40}{'attention':>12}{'tokens/s':>12}{'peak GB':>10}{'loss':>10}{'held out':>10}"
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        yield (f"{folder.name:40}{summary['config']['attention']:>12}{summary['tokens_per_second']:12,.0f}"
               f"{(summary['peak_memory_bytes'] or math.nan) / 1e9:10.2f}{summary['train_loss']:10.4f}"
               f"{summary['held_out_loss']:10.4f}")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    training_loop.add_options(parser, SIZES, MODELS, ATTENTION)
    parser.add_argument("--eval-documents", type=int, default=128, help="held-out documents in an evaluation")
    return training_loop.parse_options(parser, argv, "bert", SIZES, MODELS)


def main(argv=None):
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary, train_documents, held_out_documents = load_data(args)
    trainer = Trainer(args, vocabulary.size, train_documents, held_out_documents)
    if args.resume:
        trainer.resume()
    name = f"Hugging Face's {args.model}" if args.model else f"bert-{args.size}"
    padding = trainer.padding()
    batches = "packed, without the" if args.attention in PACKED else "padded, with"
    print(f"{name}: {trainer.parameters:,} parameters, {args.attention} attention, {args.dtype} on "
          f"{args.device}; {len(train_documents):,} training documents, drawn "
          f"{args.steps * args.batch * args.accumulate / len(train_documents):.2g} times, in batches "
          f"{batches} {padding:.0%} of padding", flush=True)
    if not train(trainer):
        return 130
    report(trainer, summarize(trainer, padding=padding))
    finished = [folder for folder in args.compare if (folder / "summary.json").exists()]
    print("", *table([args.out, *finished]), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside the training steps, or the second one inside
        sys.exit(130)
