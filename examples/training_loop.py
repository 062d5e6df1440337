"""What the training examples share: options, training with checkpoints and resume, progress, loss curves.

An example derives its trainer from Trainer and says what a batch is; everything else is here. Ctrl-C saves
and leaves; a resumed run ends where an undisturbed one would have ended.
"""

import csv
import importlib
import json
import math
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from text_data import replace_file

# What a resumed run must share with its checkpoint; the rest (device, compile, more steps, ...) is free.
FIXED_ON_RESUME = ("model", "size", "vocab", "vocab_size", "context", "batch", "accumulate", "seed", "text")
COLUMNS = ["step", "lr", "train_loss", "held_out_loss", "step_seconds", "tokens"]


class Trainer:
    """Model, optimizer, data position and history: everything that a checkpoint holds.

    A derived class draws batches, `draw()` for training and `held_out_batches()`, whose `tokens` counts
    tokens (padding is none) and whose `targets` are what the loss is a mean over; `loss(batch)` is that mean.
    """

    def __init__(self, args, build_model, tokens_per_step):
        self.args, self.tokens_per_step = args, tokens_per_step
        self.config = json.loads(json.dumps(vars(args), default=str))  # plain values, for the files
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = build_model().to(self.device)  # drawn on the CPU: the same on every device
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

    def draw(self):
        raise NotImplementedError

    def held_out_batches(self):
        """The same batches each time: two losses differ by the model alone."""
        raise NotImplementedError

    def loss(self, batch):
        raise NotImplementedError

    def padding(self):
        """The share of padding in a padded batch."""
        return 0.0

    @property
    def step(self):
        return self.history[-1]["step"] if self.history else 0

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16")

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
        total, tokens = 0.0, 0
        for _ in range(args.accumulate):
            batch = self.draw()
            with self.autocast():
                loss = self.loss(batch) / args.accumulate
            loss.backward()
            total += loss.detach()
            tokens += batch.tokens
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        train_loss = total.item()  # waits for the device, so that the seconds below are this step's
        self.history.append(dict(step=self.step + 1, lr=lr, train_loss=train_loss, tokens=tokens,
                                 step_seconds=time.perf_counter() - begin))

    @torch.no_grad()
    def held_out_loss(self):
        self.model.eval()
        total, targets = 0.0, 0
        for batch in self.held_out_batches():
            with self.autocast():
                total += self.loss(batch).item() * batch.targets.numel()
            targets += batch.targets.numel()
        self.model.train()
        return total / targets

    def tokens_per_second(self, last=0):
        """The median of the last steps (0: all), which neither compiling nor a busy moment moves."""
        rows = [row for row in self.history[-last:] if "step_seconds" in row]
        return statistics.median(row["tokens"] / row["step_seconds"] for row in rows)

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
    if trainer.step < args.steps:
        print(f"stopped after step {trainer.step} of {args.steps}, and saved {trainer.checkpoint}: "
              "the same command with --resume goes on")
    return trainer.step >= args.steps


def optional_module(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def column(history, name):
    return [row[name] for row in history if name in row]


def write_losses(path, history):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
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


def summarize(trainer, **more):
    """-> what summary.json holds; `more` is the example's own."""
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
        seconds=trainer.seconds, peak_memory_bytes=peak, torch=torch.__version__, **more)
    text = json.dumps(summary, indent=2) + "\n"
    replace_file(trainer.args.out / "summary.json", lambda temporary: temporary.write_text(text))
    return summary


def report(trainer, summary):
    """Prints the run's numbers, draws its curve, and names its files."""
    args = trainer.args
    plotted = plot_losses([args.out, *args.compare], args.out / "losses.png")
    print(f"\nheld-out loss {summary['held_out_loss_at_start']:.3f} -> "
          f"{summary['held_out_loss']:.3f}, {summary['tokens_per_second']:,.0f} tokens/s, "
          f"{trainer.seconds:.0f} s, peak memory {(summary['peak_memory_bytes'] or math.nan) / 1e9:.2f} GB")
    files = ("losses.png" if plotted else "losses.csv", "checkpoint.pt", "summary.json")
    print(*(args.out / file for file in files), sep="\n")
    if not plotted or optional_module("tqdm") is None:
        print('pip install "flash-attn[examples]" gives the progress bar and the curve as a PNG')


def add_options(parser, sizes, models, attentions):
    """The options of every example: sizes has what each --size sets, models the --size of each --model."""
    add = parser.add_argument
    add("--size", choices=sizes, help="the model, and the options below that are not given; default: tiny")
    add("--model", choices=models, help="Hugging Face's model of that size instead of the one in this file\n"
        "(random weights; needs the package transformers)")
    add("--attention", choices=attentions, default="flash")
    add("--data", type=Path, help="a text file or a folder of them; default: the Python library's sources")
    add("--vocab", choices=("bytes", "bpe"), help="bpe needs the package tokenizers")
    for name in ("vocab-size", "context", "batch", "steps", "warmup", "accumulate", "eval-every"):
        add(f"--{name}", type=int)
    add("--lr", type=float)
    add("--dropout", type=float, default=0.0)
    add("--seed", type=int, default=1)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16 is by autocast, and the default on a GPU")
    add("--compile", action="store_true")
    add("--out", type=Path, help="default: runs/<model>-<size>-<attention>")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--compare", type=Path, nargs="+", default=[], metavar="DIR", help="plot these runs' losses as well")


def parse_options(parser, argv, name, sizes, models):
    """Fills in what --size, or the size of --model, decides, and checks what can be checked before work."""
    args = parser.parse_args(argv)
    if args.model and args.size not in (None, models[args.model]):
        parser.error(f"--model {args.model} is of --size {models[args.model]}: give one of the two")
    args.size = models[args.model] if args.model else args.size or "tiny"
    for option, value in sizes[args.size].items():
        if getattr(args, option, None) is None:
            setattr(args, option, value)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    run = f"hugging-face-{args.model}" if args.model else f"{name}-{args.size}"
    args.out = args.out or Path("runs") / f"{run}-{args.attention}"
    for folder in args.compare:
        if not (folder / "losses.csv").exists():
            parser.error(f"--compare {folder}: there is no losses.csv in it")
    if args.attention == "flash" and not hasattr(optional_module("flash_attn"), "flash_attn_varlen_func"):
        parser.error("flash_attn cannot be imported: install it (pip install .), or take --attention sdpa")
    if args.model and optional_module("transformers") is None:
        parser.error(f"--model {args.model} needs the package transformers: pip install transformers")
    return args
