"""flash_attn.nn.replace_attention: the same model before and after, in training and inference."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import flash_attn.nn
from flash_attn.nn import replace_attention


def dtype_of(device):
    return torch.float64 if device == "cpu" else torch.float32


class VisionTransformer(nn.Module):
    """Patches, a class token, pre-norm blocks whose attention is asked for weights that nobody reads."""

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x):
            rows = self.norm_1(x)
            x = x + self.attention(rows, rows, rows)[0]
            return x + self.mlp(self.norm_2(x))

    def __init__(self, width=32, heads=4, layers=2, classes=5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(self.Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class Detector(nn.Module):
    """Learned queries that attend to each other, and to a padded memory, as in a detection transformer."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        layer = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout=0.0)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.queries = nn.Parameter(torch.randn(11, 1, width))

    def forward(self, memory):
        padding = torch.zeros(memory.shape[1], memory.shape[0], dtype=torch.bool, device=memory.device)
        padding[0, -3:] = True
        return self.decoder(
            self.queries.expand(-1, memory.shape[1], -1), memory, memory_key_padding_mask=padding,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(11, memory.device, memory.dtype))


def encoder(**options):
    options = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, **options), 2, enable_nested_tensor=True)


MODELS = {
    "vision transformer": (VisionTransformer, (3, 3, 16, 16), 2),
    "detector": (Detector, (13, 2, 32), 4),
    "encoder": (encoder, (2, 9, 32), 2),
    "encoder, norm first": (lambda: encoder(norm_first=True, batch_first=False), (2, 9, 32), 2),
    "transformer": (lambda: nn.Transformer(32, 4, 1, 1, 64, 0.0), None, 3),
}


def call(model, x, kind):
    return model(x, x[:5]) if kind == "transformer" else model(x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", MODELS)
def test_trained_alike(kind, device):
    """An optimizer made before goes on training the same parameters; loss for loss the same."""
    make, shape, count = MODELS[kind]
    theirs = make().to(device, dtype_of(device))
    ours = copy.deepcopy(theirs)
    x = torch.randn(shape or (7, 2, 32)).to(device, dtype_of(device))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (theirs, ours)]
    parameters = dict(ours.named_parameters())
    state = copy.deepcopy(ours.state_dict())
    report = replace_attention(ours)
    assert len(report.replaced) == count and not report.left
    assert all(parameter is parameters[name] for name, parameter in ours.named_parameters())
    assert list(ours.state_dict()) == list(state)
    losses = []
    for model, optimizer in zip((theirs, ours), optimizers):
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = call(model, x, kind).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0]
    tolerance = 1e-9 if device == "cpu" else 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    for training in (True, False):
        with torch.no_grad():
            results = [call(model.train(training), x, kind) for model in (theirs, ours)]
        torch.testing.assert_close(*results, rtol=100 * tolerance, atol=100 * tolerance)


def count_calls(model):
    calls = []
    for module in model.modules():
        if isinstance(module, flash_attn.nn.MultiheadAttention):
            kind = type("Counting", (flash_attn.nn.MultiheadAttention,), {})
            kind.forward = lambda self, *args, **kwargs: (
                calls.append(1), flash_attn.nn.MultiheadAttention.forward(self, *args, **kwargs))[1]
            module.__class__ = kind
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Support for mismatched")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "padding in the middle", "causal", "causal, padding"])
@pytest.mark.parametrize("grad", [False, True])
def test_encoder(grad, masks, training, device):
    """In inference torch computes padded batches as nested tensors, in one fused kernel per layer. Ours are
    called all the same, and give what torch gives, zeros at padded positions included."""
    theirs = encoder().to(device, dtype_of(device)).train(training)
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    calls = count_calls(ours)
    x = torch.randn(3, 9, 32).to(device, dtype_of(device))
    options = {}
    if "padding" in masks:
        padding = torch.zeros(3, 9, dtype=torch.bool, device=device)
        padding[1, 4:] = padding[2, 1:] = True
        if "middle" in masks:
            padding[0, 3] = True
        options["src_key_padding_mask"] = padding
    if "causal" in masks:
        options["mask"] = nn.Transformer.generate_square_subsequent_mask(9, device, x.dtype)
    with torch.set_grad_enabled(grad):
        expected, actual = (model(x, **options) for model in (theirs, ours))
    assert len(calls) == 2
    tolerance = 1e-10 if device == "cpu" else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    nested = masks == "padding" and not training and not grad
    assert not nested or (actual[padding] == 0).all()


def test_fully_padded_sequence_is_finite():
    """Where torch's fused kernel gives NaN."""
    for make in (encoder, lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)):
        model = make().eval()
        if isinstance(model, nn.TransformerEncoder):
            model.use_nested_tensor = False
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1] = True
        x = torch.randn(2, 5, 32)
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padding)
            replace_attention(model)
            actual = model(x, src_key_padding_mask=padding)
        assert expected[1].isnan().all() and actual.isfinite().all()
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)


def test_a_layer_built_with_ours_is_not_bypassed():
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval()
    expected = layer(torch.ones(1, 3, 32))
    state = layer.self_attn.state_dict()
    layer.self_attn = flash_attn.nn.MultiheadAttention(32, 4, batch_first=True)
    layer.self_attn.load_state_dict(state)
    for model in (layer.eval(), copy.deepcopy(layer)):
        calls = count_calls(model)
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(1, 3, 32)), expected.detach())
        assert len(calls) == 1


def test_nested_tensors():
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    nested = torch.nested.as_nested_tensor([torch.randn(n, 32) for n in (5, 1, 8)])
    with torch.no_grad():
        results = [module(nested, nested, nested, need_weights=False)[0] for module in (theirs, ours)]
    for mine, right in zip(results[1].unbind(), results[0].unbind()):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    for options in ({}, {"need_weights": False, "attn_mask": torch.zeros(8, 8)}):
        with pytest.raises(AssertionError, match="NestedTensor"):
            ours(nested, nested, nested, **options)
    with pytest.raises(AssertionError, match="NestedTensor"):
        ours(nested, nested, torch.randn(3, 8, 32), need_weights=False)


def test_hooks_and_mode_stay():
    model = encoder()
    seen = []
    attention = model.layers[0].self_attn
    attention.register_forward_hook(lambda module, inputs, output: seen.append("after"))
    attention.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    attention.in_proj_weight.register_hook(lambda gradient: seen.append("gradient"))
    model.layers[1].eval()
    attention.in_proj_weight.requires_grad_(True)
    attention.out_proj.bias.requires_grad_(False)
    replace_attention(model)
    assert model.layers[0].self_attn is attention and attention.training
    assert not model.layers[1].self_attn.training and not attention.out_proj.bias.requires_grad
    model(torch.randn(1, 4, 32)).sum().backward()
    assert seen == ["before", "after", "gradient"]


def test_pruned_weights():
    """torch.nn.utils.prune computes in_proj_weight before each forward: it goes on to."""
    theirs, ours = nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2)
    prune.random_unstructured(theirs, "in_proj_weight", 0.5)
    prune.identity(ours, "in_proj_weight")
    ours.load_state_dict(theirs.state_dict())
    assert replace_attention(ours).replaced == [""]
    x = torch.randn(4, 2, 16)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x), rtol=1e-4, atol=1e-5)
    assert (ours.in_proj_weight == 0).float().mean() > 0.3


class Overriding(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Naming(nn.MultiheadAttention):
    pass


def test_report():
    """What is left is left alone, and the reason said."""
    model = nn.ModuleDict({
        "plain": nn.MultiheadAttention(8, 2),
        "overriding": Overriding(8, 2),
        "naming": Naming(8, 2),
        "parametrised": parametrizations.weight_norm(nn.MultiheadAttention(8, 2), "in_proj_weight"),
        "out_proj parametrised": nn.MultiheadAttention(8, 2),
        "quantisable": torch.ao.nn.quantizable.MultiheadAttention(8, 2),
        "patched": nn.MultiheadAttention(8, 2),
        "wide": nn.MultiheadAttention(514, 2),
        "ours": flash_attn.nn.MultiheadAttention(8, 2),
        "no attention": nn.Linear(8, 8),
        "layer": nn.TransformerEncoderLayer(8, 2, 8),
    })
    model["shared"] = model["plain"]
    model["patched"].forward = lambda *args: None
    parametrizations.weight_norm(model["out_proj parametrised"].out_proj)
    kinds = {name: type(module) for name, module in model.named_modules()}
    report = replace_attention(model)
    assert report.replaced == ["plain", "out_proj parametrised", "layer.self_attn"]
    words = {"overriding": "overrides forward", "naming": "subclass", "parametrised": "parametris",
             "quantisable": "quanti", "patched": "on the object", "wide": "257", "ours": "already"}
    assert list(report.left) == list(words)
    text = str(report)
    assert text.splitlines()[0] == "3 replaced by flash_attn.nn.MultiheadAttention, 7 left"
    for name, word in words.items():
        assert word in report.left[name] and f"{name}: {report.left[name]}" in text
    for name, module in model.named_modules():
        if name in report.replaced or name == "shared":
            assert type(module) is flash_attn.nn.MultiheadAttention and f"  replaced  {name}" in text
        else:
            assert type(module) is kinds[name], name
    assert replace_attention(model).replaced == []
    assert replace_attention(nn.Linear(2, 2)) == flash_attn.nn.Replacement([], {})
    x = torch.randn(3, 1, 8)
    for name in ("plain", "out_proj parametrised"):
        assert all(result.isfinite().all() for result in model[name](x, x, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_left():
    report = replace_attention(nn.Sequential(torch.jit.script(nn.MultiheadAttention(8, 2))))
    assert not report.replaced and "torch.jit" in report.left["0"]


def test_one_module_itself():
    module = nn.MultiheadAttention(8, 2)
    report = replace_attention(module)
    assert type(module) is flash_attn.nn.MultiheadAttention and "(the model)" in str(report)
    padding = torch.tensor([[True, True]])
    x = torch.randn(2, 1, 8)
    assert torch.equal(module(x, x, x, key_padding_mask=padding)[0], module.out_proj.bias.expand(2, 1, 8))
