"""What the tests of Hugging Face's transformers share: tiny models, and how right their results must be.

transformers asks importlib.metadata who owns the package flash_attn and takes it for FlashAttention-2 only if
that distribution is named flash-attn (or flash_attn; 2.3.3 or later). An installed wheel says so; a checkout
that is merely on PYTHONPATH has no metadata at all. `provide_metadata` then lets the build backend write what
`pip install` would install, a dist-info with `Name: flash-attn`, its version and top_level.txt, into a
temporary folder on sys.path. transformers reads the metadata once, so that happens before its import.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))
DISTRIBUTION = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({!r})"


def owners():
    names = importlib.metadata.packages_distributions().get("flash_attn", [])
    return {name.replace("_", "-") for name in names}


def provide_metadata():
    """-> the temporary folder that holds it, or None where a distribution is installed."""
    if "flash-attn" in owners():
        return None
    folder = tempfile.TemporaryDirectory(prefix="flash-attn-metadata-")
    command = [sys.executable, "-c", DISTRIBUTION.format(folder.name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no distribution flash-attn, and setuptools cannot write its metadata: {done.stderr}",
                    allow_module_level=True)
    sys.path.append(folder.name)
    return folder


METADATA = provide_metadata() if importlib.util.find_spec("transformers") else None
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

VOCABULARY, WIDTH, LAYERS, HEADS, WINDOW = 48, 64, 2, 4, 8
LENGTHS = (23, 9, 40, 17)  # of the sequences in a batch; most are longer than the window
# The usual initial weights, 0.02, make attention nearly uniform, and then few mistakes show.
COMMON = dict(vocab_size=VOCABULARY, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
LLAMA = dict(COMMON, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS,
             num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=128)
BART = dict(vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, init_std=0.2,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=96,
            decoder_ffn_dim=96, max_position_embeddings=128, dropout=0.0, pad_token_id=0, bos_token_id=1,
            eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=2,
            tie_word_embeddings=False)  # tied, it says the same word again and again
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),  # grouped queries
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    "gpt2": lambda: transformers.GPT2Config(
        **COMMON, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=128, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0),
    "bert": lambda: transformers.BertConfig(
        **COMMON, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=96, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0),
    "bart": lambda: transformers.BartConfig(**BART),
}
DECODERS = ["llama", "mistral", "gemma2", "gpt2"]
AUTO = {"bert": "AutoModelForMaskedLM", "bart": "AutoModelForSeq2SeqLM"}


class Models:
    """One set of weights, representable in dtype, in three models: `tested` with the implementation under
    test in dtype, `standard` with eager in dtype, `exact` with eager in float32."""

    def __init__(self, name, implementation, dtype, device="cpu"):
        torch.manual_seed(1)
        auto = getattr(transformers, AUTO.get(name, "AutoModelForCausalLM"))
        weights = auto.from_config(CONFIGS[name]()).to(dtype).state_dict()
        kinds = dict(tested=(implementation, dtype), standard=("eager", dtype),
                     exact=("eager", torch.float32))
        for kind, (attention, kind_dtype) in kinds.items():
            model = auto.from_config(CONFIGS[name](), attn_implementation=attention, dtype=kind_dtype)
            model.load_state_dict(weights)
            setattr(self, kind, model.to(device).eval())
        self.dtype, self.device = dtype, device
        rng = torch.Generator().manual_seed(2)
        self.sequences = [torch.randint(3, VOCABULARY, (n,), generator=rng).to(device) for n in LENGTHS]

    def padded(self, side):
        """-> arguments of one call with all sequences, and the mask of what is no padding, both [B, S]."""
        tokens, mask = pad(self.sequences, side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return dict(input_ids=tokens, attention_mask=mask, position_ids=positions), mask.bool()

    def packed(self):
        """-> arguments of one call with all sequences one after another, in a batch of one."""
        positions = torch.cat([torch.arange(len(x), device=self.device) for x in self.sequences])
        tokens = torch.cat(self.sequences)[None]
        return dict(input_ids=tokens, position_ids=positions[None]), torch.ones_like(tokens).bool()

    def one_by_one(self, model):
        """The specification: each sequence in a call of its own, nothing to be masked."""
        return torch.cat([call(model, input_ids=x[None]).logits[0] for x in self.sequences])


def call(model, **arguments):
    # A cache has a say in what transformers takes for a packed batch; training has none.
    return model(**arguments, use_cache=False) if hasattr(model, "generation_config") else model(**arguments)


def pad(sequences, side):
    S = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), S, dtype=torch.int64, device=sequences[0].device)
    mask = torch.zeros_like(tokens)
    for row, x in enumerate(sequences):
        place = slice(S - len(x), S) if side == "left" else slice(0, len(x))
        tokens[row, place], mask[row, place] = x, 1
    return tokens, mask


def check(models, tested, one_by_one):
    """Logits and gradients of `tested(model)`, [tokens, vocabulary] logits, against the exact model's
    `one_by_one(model)`: at most twice the error of the standard model; in float32 a part in 10^5."""
    exact, standard = (evaluate(model, one_by_one) for model in (models.exact, models.standard))
    actual = evaluate(models.tested, tested)
    total = torch.stack([value.norm() for name, value in exact.items() if name != "logits"]).norm()
    sums = {}
    for name, value in exact.items():
        error, standard_error = ((x[name] - value).norm() for x in (actual, standard))
        assert error.isfinite(), name
        limit = 1e-5 * value.norm() if models.dtype == torch.float32 else 2 * standard_error
        kind = "logits" if name == "logits" else "gradients"
        sums[kind] = [a + b * b for a, b in zip(sums.get(kind, (0, 0)), (error, limit))]
        # One parameter's gradient may be nothing but rounding (that of a key's bias is 0).
        floor = 1e-6 * total if models.dtype == torch.float32 else 0.2 * torch.finfo(models.dtype).eps * total
        assert kind == "logits" or error <= 2 * limit + floor, f"{name}: {error:.3g}, at most {limit:.3g}"
    for kind, (error, limit) in sums.items():
        assert error <= limit, f"{kind}: error {error.sqrt():.3g}, at most {limit.sqrt():.3g}"


def evaluate(model, logits_of):
    """-> float32 logits and the gradients of a fixed weighted sum of them, by parameter."""
    model.zero_grad()
    logits = logits_of(model).float()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    (logits * weights).sum().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    return dict(gradients, logits=logits.detach())


def check_batch(models, layout):
    """layout: "left" or "right" (padding), "packed", or "equal" (lengths, neither padding nor packing)."""
    if layout == "equal":
        shortest = min(map(len, models.sequences))
        models.sequences = [x[:shortest] for x in models.sequences]
        arguments, mask = models.padded("right")
        del arguments["attention_mask"], arguments["position_ids"]
    else:
        arguments, mask = models.packed() if layout == "packed" else models.padded(layout)
    check(models, lambda model: call(model, **arguments).logits[mask], models.one_by_one)


def check_cross_attention(models, side):
    """An encoder's padded sequences, and a decoder with tokens of its own. The standard is the padded batch
    too, since the encoder's positions count from the padding on."""
    tokens, mask = pad(models.sequences, side)
    rng = torch.Generator().manual_seed(4)
    # No more queries than the shortest sequence has keys: see test_cuda_transformers.py.
    targets = torch.randint(3, VOCABULARY, (len(tokens), min(LENGTHS)), generator=rng).to(tokens)

    def logits(model):
        output = call(model, input_ids=tokens, attention_mask=mask, decoder_input_ids=targets)
        return output.logits.flatten(0, 1)

    check(models, logits, logits)


def check_autocast(name, implementation, device="cpu"):
    """float32 weights in training, under autocast, which gives attention float32 q and k and bfloat16 v."""
    models = Models(name, implementation, torch.float32, device)
    models.dtype = torch.bfloat16
    for model in (models.tested, models.standard):
        model.forward = torch.autocast(torch.device(device).type, torch.bfloat16)(model.forward)
    check_batch(models, "right")


def check_generation(models, steps=16):
    """Greedy, with a cache, from prompts of different lengths. Every token must be the one that the exact
    model, without a cache, takes after the tokens before it; in half precision, unless the exact model's
    logits of both are as close as twice the standard model's error there."""
    tokens, mask = pad(models.sequences, "left")
    encoder_decoder = models.tested.config.is_encoder_decoder
    output = models.tested.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=steps,
                                    do_sample=False, pad_token_id=0)
    assert output.shape[1] == steps + (1 if encoder_decoder else tokens.shape[1])
    if encoder_decoder:
        arguments = dict(input_ids=tokens, attention_mask=mask, decoder_input_ids=output)
    else:
        mask = torch.cat([mask, torch.ones_like(output[:, tokens.shape[1]:])], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        arguments = dict(input_ids=output, attention_mask=mask, position_ids=positions)
    with torch.no_grad():
        exact, standard = (call(model, **arguments).logits[:, -steps - 1:-1].float()
                           for model in (models.exact, models.standard))
    chosen = exact.gather(-1, output[:, -steps:, None])[..., 0]
    behind = exact.amax(-1) - chosen
    limit = 0.0 if models.dtype == torch.float32 else 2 * (standard - exact).abs().max()
    assert behind.max() <= limit, f"{behind.max():.3g} behind the largest logit, at most {limit:.3g}"
    assert (behind == 0).float().mean() >= 0.9
    assert len(output[:, -steps:].unique()) > 3


def report(device, implementation):
    """A row for each model, layout and dtype: the largest difference to float32 eager, sequence by sequence,
    of the tested model and of eager in the same dtype, relative to the largest number."""
    print(f"{'model':8} {'layout':7} {'dtype':9} {'logits':>8} {'eager':>8} {'gradients':>10} {'eager':>8}")
    for name in [*DECODERS, "bert"]:
        # Of float32 models Transformers' own path asks an nn.Linear for another dtype; GPT-2 has none.
        refuses_float32 = name == "gpt2" and implementation == "flash_attention_2"
        for dtype in (torch.bfloat16,) if refuses_float32 else (torch.float32, torch.bfloat16):
            for layout in ("right", "packed"):
                models = Models(name, implementation, dtype, device)
                arguments, mask = models.packed() if layout == "packed" else models.padded(layout)
                exact, standard = (evaluate(m, models.one_by_one) for m in (models.exact, models.standard))
                actual = evaluate(models.tested, lambda m, a=arguments, k=mask: call(m, **a).logits[k])
                row = []
                for names in (["logits"], exact.keys() - {"logits"}):
                    largest = max(exact[n].abs().max() for n in names)
                    row += [max((x[n] - exact[n]).abs().max() for n in names) / largest
                            for x in (actual, standard)]
                numbers = "{:8.1e} {:8.1e} {:10.1e} {:8.1e}".format(*map(float, row))
                print(f"{name:8} {layout:7} {str(dtype).removeprefix('torch.'):9} {numbers}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        report("cuda", "flash_attention_2")
    else:
        import hugging_face

        hugging_face.register_adapter()
        report("cpu", hugging_face.ADAPTER)
