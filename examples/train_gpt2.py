"""Trains a GPT-2 on your own text: from a toy on two CPU cores in two minutes to GPT-2 medium on a GPU.

    python examples/train_gpt2.py                                # tiny, bytes, the Python library's sources
    python examples/train_gpt2.py --data my_texts/ --size gpt2   # byte pairs (BPE) learnt from your text
    python examples/train_gpt2.py --attention standard           # the same run with the whole score matrix
    python examples/train_gpt2.py --resume --compare runs/gpt2-tiny-standard   # both curves in one plot

The output folder holds losses.csv, losses.png, checkpoint.pt and summary.json. Ctrl-C saves and leaves;
--resume goes on from there, and ends where an undisturbed run would have ended.
"""

import argparse
import csv
import hashlib
import importlib
import json
import math
import os
import signal
import statistics
import sys
import sysconfig
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

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
# What a resumed run must share with its checkpoint; the rest (device, compile, more steps, ...) is free.
FIXED_ON_RESUME = ("size", "vocab", "vocab_size", "context", "batch", "accumulate", "seed", "text")
TEXT_SUFFIXES = set(".txt .md .rst .tex .html .json .jsonl .csv .py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs "
                    ".go .java .kt .js .ts .jsx .tsx .rb .pl .lua .sh .sql .toml .yaml .yml .ini".split())
# Of the standard library: no tests, no packages of yours, and no tables (encodings, pydoc_data).
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
END_OF_TEXT = 0


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


def load_tokens(args):
    """-> vocabulary, training tokens, held-out tokens. Notes the texts' fingerprint in args.text.

    Held out is the last tenth of every text: the same kind of text as the rest, whatever the data, and never
    in a training window; it works for one file and for a thousand.
    """
    texts = read_texts(args.data)
    if not texts:
        raise SystemExit(f"--data {args.data}: no text in it (looked for {' '.join(sorted(TEXT_SUFFIXES))})")
    args.text = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    held_out = [text[len(text) * 9 // 10:] for text in texts]
    train = [text[:len(text) * 9 // 10] for text in texts]
    if args.vocab == "bytes":
        vocabulary = ByteVocabulary()
    else:
        path = args.out / f"bpe-{args.vocab_size}-{args.text}.json"
        vocabulary = BpeVocabulary(train, args.vocab_size, path)
    train, held_out = vocabulary.encode(train), vocabulary.encode(held_out)
    if min(len(train), len(held_out)) <= args.context:
        raise SystemExit(f"--data {args.data}: {len(held_out)} held-out tokens (a tenth of all) are too few "
                         f"for --context {args.context}: give more text or a shorter context")
    return vocabulary, train, held_out


class Trainer:
    """Model, optimizer, data position and history: everything that a checkpoint holds."""

    def __init__(self, args, vocab_size, train_tokens, held_out_tokens):
        self.args, self.train_tokens, self.held_out_tokens = args, train_tokens, held_out_tokens
        self.config = json.loads(json.dumps(vars(args), default=str))  # plain values, for the files
        self.device = torch.device(args.device)
        self.tokens_per_step = args.batch * args.accumulate * args.context
        torch.manual_seed(args.seed)
        self.model = GPT2(args, vocab_size).to(self.device)  # drawn on the CPU: the same on every device
        self.forward = torch.compile(self.model) if args.compile else self.model
        self.parameters = sum(p.numel() for p in self.model.parameters())
        groups = [dict(params=[p for p in self.model.parameters() if p.dim() >= 2], weight_decay=0.1),
                  dict(params=[p for p in self.model.parameters() if p.dim() < 2], weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        # The data has its own generator: dropout's draws from the default ones depend on the attention.
        self.data_rng = torch.Generator().manual_seed(args.seed)
        self.generators = [self.data_rng, torch.default_generator]
        if self.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[self.device.index or 0])
        self.history, self.seconds = [], 0.0
        self.checkpoint = args.out / "checkpoint.pt"

    @property
    def step(self):
        return self.history[-1]["step"] if self.history else 0

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16")

    def windows(self, tokens, starts):
        """-> inputs and targets [len(starts), context], the targets one token ahead."""
        spans = [tokens[start:start + self.args.context + 1] for start in starts]
        spans = torch.stack(spans).to(self.device).long()
        return spans[:, :-1], spans[:, 1:]

    def learning_rate(self):
        """Linear warmup, then a cosine down to a tenth."""
        args, step = self.args, self.step
        if step < args.warmup:
            return args.lr * (step + 1) / args.warmup
        progress = (step - args.warmup) / max(1, args.steps - args.warmup)
        return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train_step(self):
        args, begin, lr = self.args, time.perf_counter(), self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = 0.0
        for _ in range(args.accumulate):
            last = len(self.train_tokens) - args.context
            starts = torch.randint(last, (args.batch,), generator=self.data_rng)
            with self.autocast():
                loss = self.forward(*self.windows(self.train_tokens, starts)) / args.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        train_loss = total.item()  # waits for the device, so that the seconds below are this step's
        self.history.append(dict(step=self.step + 1, lr=lr, train_loss=train_loss,
                                 step_seconds=time.perf_counter() - begin))

    @torch.no_grad()
    def held_out_loss(self):
        """Over the same evenly spaced windows each time: two numbers differ by the model alone."""
        self.model.eval()
        last = len(self.held_out_tokens) - self.args.context - 1
        starts = [last * i // max(1, self.args.eval_windows - 1) for i in range(self.args.eval_windows)]
        total = 0.0
        for first in range(0, len(starts), self.args.batch):
            batch = starts[first:first + self.args.batch]
            with self.autocast():
                total += self.forward(*self.windows(self.held_out_tokens, batch)).item() * len(batch)
        self.model.train()
        return total / len(starts)

    def tokens_per_second(self, last=0):
        """From the median of the last steps (0: all), which neither compiling nor a busy moment moves."""
        return self.tokens_per_step / statistics.median(column(self.history[-last:], "step_seconds"))

    def save(self):
        state = dict(config=self.config, history=self.history, seconds=self.seconds,
                     model=self.model.state_dict(), optimizer=self.optimizer.state_dict(),
                     generators=[generator.get_state() for generator in self.generators])
        replace_file(self.checkpoint, lambda temporary: torch.save(state, temporary))
        replace_file(self.args.out / "losses.csv", lambda temporary: write_losses(temporary, self.history))

    def resume(self):
        if not self.checkpoint.exists():
            raise SystemExit(f"--resume: there is no {self.checkpoint}; drop --resume, or give its --out")
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        then, now = state["config"], self.config
        changed = [f"{k}: {then[k]} then, {now[k]} now" for k in FIXED_ON_RESUME if then[k] != now[k]]
        if changed:
            raise SystemExit(f"--resume: {self.checkpoint} belongs to another run ({'; '.join(changed)}); "
                             "give the same options, or another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history, self.seconds = state["history"], state["seconds"]
        for generator, generator_state in zip(self.generators, state["generators"]):
            generator.set_state(generator_state)


def show_progress(trainer, bar, held_out, evaluated):
    """On the bar, or without tqdm as a line at every evaluation."""
    args, rate = trainer.args, trainer.tokens_per_second(last=20)
    text = f"loss {trainer.history[-1]['train_loss']:.3f}, held-out {held_out:.3f}, {rate:,.0f} tokens/s"
    if bar is not None:
        bar.set_postfix_str(text, refresh=False)
        bar.update()
    elif evaluated:
        left = (args.steps - trainer.step) * trainer.tokens_per_step / rate
        print(f"step {trainer.step}/{args.steps}: {text}, {left:.0f} s left", flush=True)


def train(trainer):
    """-> whether it came to the end, not stopped by Ctrl-C."""
    args, begin, tqdm = trainer.args, time.perf_counter() - trainer.seconds, optional_module("tqdm")
    # Ctrl-C waits for the step under way, so that the checkpoint is exact; a second one doesn't wait.
    stop = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: (stop.set(), signal.signal(signal.SIGINT, previous)))
    try:
        if not trainer.history:
            trainer.history.append(dict(step=0, held_out_loss=trainer.held_out_loss()))
        held_out = column(trainer.history, "held_out_loss")[-1]
        bar = tqdm and tqdm.tqdm(total=args.steps, initial=trainer.step, unit="step")
        while trainer.step < args.steps and not stop.is_set():
            trainer.train_step()
            evaluate = trainer.step % args.eval_every == 0 or trainer.step == args.steps
            if evaluate:
                held_out = trainer.history[-1]["held_out_loss"] = trainer.held_out_loss()
            trainer.seconds = time.perf_counter() - begin
            show_progress(trainer, bar, held_out, evaluate)
            if evaluate:
                trainer.save()
        if trainer.step < args.steps:
            trainer.save()
        if bar is not None:
            bar.close()
    finally:
        signal.signal(signal.SIGINT, previous)
    return trainer.step >= args.steps


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


def optional_module(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def replace_file(path, write):
    """Written beside it and renamed: whoever interrupts leaves the old file, not half of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write(temporary)
    os.replace(temporary, path)


def column(history, name):
    return [row[name] for row in history if name in row]


def write_losses(path, history):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "lr", "train_loss", "held_out_loss", "step_seconds"])
        writer.writeheader()
        writer.writerows(history)


def read_losses(folder, column):  # -> steps, losses
    with open(folder / "losses.csv", newline="") as file:
        return zip(*((int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row[column]))


def plot_losses(folders, path):
    """Training losses raw (faint) and smoothed, held-out losses as points. -> whether matplotlib is there"""
    matplotlib_figure = optional_module("matplotlib.figure")  # without pyplot: needs no display
    if matplotlib_figure is None:
        return False
    figure = matplotlib_figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, folder in enumerate(folders):
        steps, losses = read_losses(folder, "train_loss")
        half = len(losses) // 100
        smooth = [statistics.fmean(losses[max(0, i - half):i + half + 1]) for i in range(len(losses))]
        # Where curves coincide, all must be seen: the first lies beneath, wide and solid, the others dashed.
        color, width, line, point = f"C{number}", *((1.5, "--", "x") if number else (4, "-", "o"))
        axes.plot(steps, losses, color=color, linewidth=0.5, alpha=0.2)
        axes.plot(steps, smooth, line, color=color, linewidth=width, alpha=0.8, label=f"{folder.name}, train")
        axes.plot(*read_losses(folder, "held_out_loss"), point, color=color, label=f"{folder.name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def summarize(trainer, continuation):
    held_out = column(trainer.history, "held_out_loss")
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
    else:  # of the whole process; Windows does not tell
        resource, unit = optional_module("resource"), 1 if sys.platform == "darwin" else 1024
        peak = resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    summary = dict(
        config=trainer.config, parameters=trainer.parameters, steps=trainer.step,
        train_loss=statistics.fmean(column(trainer.history, "train_loss")[-20:]), held_out_loss=held_out[-1],
        held_out_loss_at_start=held_out[0], tokens_per_second=trainer.tokens_per_second(),
        seconds=trainer.seconds, peak_memory_bytes=peak, torch=torch.__version__, sample=continuation)
    text = json.dumps(summary, indent=2) + "\n"
    replace_file(trainer.args.out / "summary.json", lambda temporary: temporary.write_text(text))
    return summary


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="the model, and the options below that are not given")
    add("--attention", choices=ATTENTION, default="flash")
    add("--data", type=Path, help="a text file or a folder of them; default: the Python library's sources")
    add("--vocab", choices=("bytes", "bpe"), help="bpe needs the package tokenizers")
    for name in ("vocab-size", "context", "batch", "steps", "warmup", "accumulate", "eval-every"):
        add(f"--{name}", type=int)
    add("--lr", type=float)
    add("--dropout", type=float, default=0.0)
    add("--eval-windows", type=int, default=64, help="contexts of held-out text in an evaluation")
    add("--seed", type=int, default=1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16 is by autocast, and the default on a GPU")
    add("--compile", action="store_true")
    add("--out", type=Path, help="default: runs/gpt2-<size>-<attention>")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--compare", type=Path, nargs="+", default=[], metavar="DIR", help="plot these runs' losses as well")
    add("--prompt", help="default: the first words of the held-out text")
    add("--sample-tokens", type=int, default=300)
    add("--temperature", type=float, default=0.8)
    add("--top-k", type=int, default=50)
    args = parser.parse_args(argv)
    for name, value in SIZES[args.size].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    args.out = args.out or Path("runs") / f"gpt2-{args.size}-{args.attention}"
    for folder in args.compare:
        if not (folder / "losses.csv").exists():
            parser.error(f"--compare {folder}: there is no losses.csv in it")
    if args.attention == "flash" and not hasattr(optional_module("flash_attn"), "flash_attn_qkvpacked_func"):
        parser.error("flash_attn cannot be imported: install it (pip install .), or take --attention sdpa")
    return args


def main(argv=None):
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary, train_tokens, held_out_tokens = load_tokens(args)
    trainer = Trainer(args, vocabulary.size, train_tokens, held_out_tokens)
    if args.resume:
        trainer.resume()
    times = args.steps * trainer.tokens_per_step / len(train_tokens)
    print(f"gpt2-{args.size}: {trainer.parameters:,} parameters, {args.attention} attention, {args.dtype} on "
          f"{args.device}; {len(train_tokens):,} training tokens, read {times:.2g} times", flush=True)
    if not train(trainer):
        print(f"stopped after step {trainer.step} of {args.steps}, and saved {trainer.checkpoint}: "
              "the same command with --resume goes on")
        return 130
    prompt = args.prompt or vocabulary.decode(held_out_tokens[:args.context // 4].tolist())
    continuation = sample(trainer, vocabulary, vocabulary.encode([prompt])[:-1].tolist())  # no end of text
    summary = summarize(trainer, continuation)
    plotted = plot_losses([args.out, *args.compare], args.out / "losses.png")
    print(f"\n{prompt} [...] {continuation}\n\nheld-out loss {summary['held_out_loss_at_start']:.3f} -> "
          f"{summary['held_out_loss']:.3f}, {summary['tokens_per_second']:,.0f} tokens/s, "
          f"{trainer.seconds:.0f} s, peak memory {(summary['peak_memory_bytes'] or math.nan) / 1e9:.2f} GB")
    files = ("losses.png" if plotted else "losses.csv", "checkpoint.pt", "summary.json")
    print(*(args.out / file for file in files), sep="\n")
    if not plotted or optional_module("tqdm") is None:
        print('pip install "flash-attn[examples]" gives the progress bar and the curve as a PNG')
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside the training steps, or the second one inside
        sys.exit(130)
