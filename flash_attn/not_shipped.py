"""What users of flash_attn may look for and this library does not have: an ImportError that says what to use.

Importing this module puts a finder behind Python's own, so a module that is really installed always wins.
"""

import importlib.abc
import importlib.machinery
import sys

MODULES = {
    "flash_attn.flash_attn_triton": "use flash_attn.flash_attn_func",
    "flash_attn.flash_attn_triton_og": "use flash_attn.flash_attn_func",
    "flash_attn.flash_blocksparse_attention": "use flash_attn.flash_attn_block_sparse_func",
    "flash_attn.flash_blocksparse_attn_interface": "use flash_attn.flash_attn_block_sparse_func",
    "flash_attn.fused_softmax": "use flash_attn.flash_attn_func, or torch.softmax",
    "flash_attn.layers.patch_embed": "use a torch.nn.Conv2d whose stride is its kernel size",
    "flash_attn.models": "use the models of the transformers package with attn_implementation="
                         '"flash_attention_2"',
    "flash_attn.modules.block": "use torch modules around flash_attn.modules.mha.MHA",
    "flash_attn.modules.embedding": "use torch.nn.Embedding",
    "flash_attn.modules.mlp": "use torch.nn.Linear and an activation of torch.nn.functional",
    "flash_attn.ops.activations": "use the activations of torch.nn.functional under torch.compile",
    "flash_attn.ops.fused_dense": "use torch.nn.Linear under torch.compile",
    "flash_attn.ops.layer_norm": "use flash_attn.ops.triton.layer_norm.layer_norm_fn",
    "flash_attn.ops.rms_norm": "use flash_attn.ops.triton.layer_norm.RMSNorm or rms_norm_fn",
    "flash_attn.ops.triton.k_activations": "use the activations of torch.nn.functional under torch.compile",
    "flash_attn.ops.triton.linear": "use torch.nn.functional.linear under torch.compile",
    "flash_attn.ops.triton.mlp": "use torch.nn.Linear and an activation of torch.nn.functional",
    "flash_attn.utils": "use torch.utils.benchmark, torch.distributed or the transformers package",
}


def _refusal(name, instead):
    return ImportError(f"flash_attn: {name} is not part of this library; {instead}", name=name)


def absent_names(module, **instead_of):
    """A module's __getattr__, for names that others expect there: name="what to use instead"."""

    def __getattr__(name):
        if name in instead_of:
            raise _refusal(f"{module}.{name}", instead_of[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


class _Refuser(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the list and raises where they would be executed. find_spec alone stays quiet, as
    it does where the files exist and the extensions that they need do not."""

    def find_spec(self, fullname, path=None, target=None):
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module):
        raise _refusal(module.__name__, MODULES[module.__name__])


sys.meta_path.append(_Refuser())
