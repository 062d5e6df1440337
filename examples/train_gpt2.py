"""Trains a GPT-2 on your own text: from a toy on two CPU cores in two minutes to GPT-2 medium on a GPU.

    python examples/train_gpt2.py                                # tiny, bytes, the Python library's sources
    python examples/train_gpt2.py --data my_texts/ --size gpt2   # byte pairs (BPE) learnt from your text
    python examples/train_gpt2.py --attention standard           # the same run with the whole score matrix
    python examples/train_gpt2.py --resume --compare runs/gpt2-tiny-standard   # both curves in one plot
    python examples/train_gpt2.py --model gpt2                   # Hugging Face's GPT-2 on flash_attention_2

The output folder holds losses.csv, losses.png, checkpoint.pt and summary.json. Ctrl-C saves and leaves;
--resume goes on from there, and ends where an undisturbed run would have ended.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for who loads this file by its path

import training_loop  # noqa: E402  (found on the path set just above, as the modules below)
from text_data import END_OF_TEXT, BpeVocabulary, load_texts  # noqa: E402, F401  (some for who loads this)
from training_loop import column, report, summarize, train  # noqa: E402, F401

SIZES = {
    "tiny": dict(layers=4, heads=4, width=128, context=256, vocab="bytes", vocab_size=4096,
                 batch=4, accumulate=1, steps=1800, lr=3e-3, warmup=50, eval_every=100),
    "small": dict(layers=6, heads=6, width=384, context=512, vocab="bpe", vocab_size=8192,
                  batch=16, accumulate=1, steps=2000, lr=1e-3, warmup=100, eval_every=100),
    "gpt2": dict(layers=12, heads=12, width=768, context=1024, vocab="bpe", vocab_size=50257,
                 batch=16, accumulate=4, steps=5000, lr=6e-4, warmup=250, eval_every=250),
    "gpt2-medium": dict(layers=24, heads=16, width=1024, context=1024, vocab="bpe", vocab_size=50257,
                        batch=8, accumulate=8, steps=5000, lr=3e-4, warmup=250, eval_every=250),
}
# The names of Hugging Face's models of these sizes, except for the toy.
MODELS = {"gpt2-toy": "tiny", "gpt2": "gpt2", "gpt2-medium": "gpt2-medium"}


def flash_attention(qkv, dropout_p):  # qkv [B, S, 3, H, D] -> [B, S, H, D]
    from flash_attn import flash_attn_qkvpacked_func
    return flash_attn_qkvpacked_func(qkv, dropout_p, causal=True)


def sdpa_attention(qkv, dropout_p):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True).transpose(1, 2)


def standard_attention(qkv, dropout_p):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    S = q.shape[2]
    future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
    return (F.dropout(probabilities, dropout_p) @ v).transpose(1, 2)


ATTENTION = {"flash": flash_attention, "sdpa": sdpa_attention, "standard": standard_attention}


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.width
        self.heads, self.dropout, self.attend = config.heads, config.dropout, ATTENTION[config.attention]
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # [B, S, width]
        B, S, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(B, S, 3, self.heads, width // self.heads)
        attended = self.attend(qkv, self.dropout if self.training else 0.0).reshape(B, S, width)
        x = x + F.dropout(self.attention_out(attended), self.dropout, self.training)
        hidden = F.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")
        return x + F.dropout(self.mlp_out(hidden), self.dropout, self.training)


class GPT2(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        self.dropout = config.dropout
        # Matrix products like multiples of 64; no text has the padding's tokens.
        self.tokens = nn.Embedding(-(-vocab_size // 64) * 64, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # 2 * layers branches add up in the residual stream: its variance shall not grow with depth.
                branch = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets=None):  # both [B, S] -> the mean loss, or the last position's logits
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x[:, -1] if targets is None else x)
        logits = F.linear(x, self.tokens.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(NamedTuple):
    """Pieces of the text: inputs and targets, both [B, context], the targets one token ahead."""
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def tokens(self):
        return self.inputs.numel()


def load_data(args):
    """-> vocabulary, training tokens, held-out tokens"""
    vocabulary, train, held_out = load_texts(args)
    train, held_out = vocabulary.encode(train), vocabulary.encode(held_out)
    if min(len(train), len(held_out)) <= args.context:
        raise SystemExit(f"--data {args.data}: {len(held_out)} held-out tokens (a tenth of all) are too few "
                         f"for --context {args.context}: give more text or a shorter context")
    return vocabulary, train, held_out


def build_model(args, vocab_size):
    if args.model:
        import hugging_face
        return hugging_face.GPT2(args, vocab_size)
    return GPT2(args, vocab_size)


class Trainer(training_loop.Trainer):
    def __init__(self, args, vocab_size, train_tokens, held_out_tokens):
        super().__init__(args, lambda: build_model(args, vocab_size),
                         tokens_per_step=args.batch * args.accumulate * args.context)
        self.train_tokens, self.held_out_tokens = train_tokens, held_out_tokens

    def windows(self, tokens, starts):
        spans = [tokens[start:start + self.args.context + 1] for start in starts]
        spans = torch.stack(spans).to(self.device).long()
        return Windows(spans[:, :-1], spans[:, 1:])

    def draw(self):
        last = len(self.train_tokens) - self.args.context
        starts = torch.randint(last, (self.args.batch,), generator=self.data_rng)
        return self.windows(self.train_tokens, starts)

    def held_out_batches(self):
        """Evenly spaced windows."""
        last = len(self.held_out_tokens) - self.args.context - 1
        starts = [last * i // max(1, self.args.eval_windows - 1) for i in range(self.args.eval_windows)]
        for first in range(0, len(starts), self.args.batch):
            yield self.windows(self.held_out_tokens, starts[first:first + self.args.batch])

    def loss(self, windows):
        return self.forward(*windows)


@torch.no_grad()
def sample(trainer, vocabulary, prompt):
    """-> a continuation of the prompt's tokens; each new token looks at the whole context afresh."""
    args, rng = trainer.args, torch.Generator().manual_seed(trainer.args.seed)
    trainer.model.eval()
    tokens = list(prompt)
    for _ in range(args.sample_tokens):
        with trainer.autocast():
            logits = trainer.model(torch.tensor([tokens[-args.context:]], device=trainer.device))
        logits, candidates = logits[0, :vocabulary.size].float().cpu().topk(min(args.top_k, vocabulary.size))
        chosen = (logits / args.temperature).softmax(-1).multinomial(1, generator=rng)
        tokens.append(candidates[chosen].item())
    return vocabulary.decode(tokens[len(prompt):])


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    training_loop.add_options(parser, SIZES, MODELS, ATTENTION)
    add = parser.add_argument
    add("--eval-windows", type=int, default=64, help="contexts of held-out text in an evaluation")
    add("--prompt", help="default: the first words of the held-out text")
    add("--sample-tokens", type=int, default=300)
    add("--temperature", type=float, default=0.8)
    add("--top-k", type=int, default=50)
    return training_loop.parse_options(parser, argv, "gpt2", SIZES, MODELS)


def main(argv=None):
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary, train_tokens, held_out_tokens = load_data(args)
    trainer = Trainer(args, vocabulary.size, train_tokens, held_out_tokens)
    if args.resume:
        trainer.resume()
    times = args.steps * trainer.tokens_per_step / len(train_tokens)
    name = f"Hugging Face's {args.model}" if args.model else f"gpt2-{args.size}"
    print(f"{name}: {trainer.parameters:,} parameters, {args.attention} attention, {args.dtype} on "
          f"{args.device}; {len(train_tokens):,} training tokens, read {times:.2g} times", flush=True)
    if not train(trainer):
        return 130
    prompt = args.prompt or vocabulary.decode(held_out_tokens[:args.context // 4].tolist())
    continuation = sample(trainer, vocabulary, vocabulary.encode([prompt])[:-1].tolist())  # no end of text
    print(f"\n{prompt} [...] {continuation}")
    report(trainer, summarize(trainer, sample=continuation))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside the training steps, or the second one inside
        sys.exit(130)
