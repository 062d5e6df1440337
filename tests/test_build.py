"""What the build decides before it compiles: for which GPUs; and how its reports are judged after."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
toolkit = runpy.run_path(ROOT / "csrc" / "cuda" / "toolkit.py", run_name="toolkit")
check_loops = runpy.run_path(ROOT / "tools" / "check_loops.py", run_name="check_loops")
NVCC_13 = toolkit["Toolkit"]("nvcc", "13.0", (75, 80, 86, 89, 90, 100, 120, 121))
NVCC_12 = toolkit["Toolkit"]("nvcc", "12.0", (75, 80, 86, 89, 90))


def chosen(environment, nvcc=NVCC_13, gpus=()):
    architectures, why = toolkit["choose"](nvcc, environment, lambda: sorted(gpus))
    assert why and "\n" not in why
    return ", ".join(map(str, architectures)), why


@pytest.mark.parametrize("text,expected", [
    ("80;90", "8.0, 9.0"), ("8.0;9.0+PTX", "8.0, 9.0+PTX"), ("7.0 7.5 8.0 8.6+PTX", "8.0, 8.6+PTX"),
    ("90a,100", "9.0, 10.0"), ("9.0;9.0+PTX", "9.0+PTX"), ("120", "12.0"), ("12.0+ptx", "12.0+PTX"),
])
def test_lists_of_architectures(text, expected):
    assert chosen({"FLASH_ATTN_CUDA_ARCHS": text})[0] == expected
    assert chosen({"TORCH_CUDA_ARCH_LIST": text})[0] == expected


@pytest.mark.parametrize("text", ["Hopper", "80;hopper", "9"])
def test_what_is_no_architecture(text):
    with pytest.raises(SystemExit, match="FLASH_ATTN_CUDA_ARCHS"):
        chosen({"FLASH_ATTN_CUDA_ARCHS": text})


def test_all_is_one_of_each_generation_that_the_compiler_knows():
    assert chosen({"FLASH_ATTN_CUDA_ARCHS": "all"})[0] == "8.0, 9.0, 10.0, 12.0+PTX"
    assert chosen({"FLASH_ATTN_CUDA_ARCHS": "ALL"}, NVCC_12)[0] == "8.0, 9.0+PTX"


def test_who_decides():
    both = {"FLASH_ATTN_CUDA_ARCHS": "80", "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert chosen(both, gpus=[120])[0] == "8.0"
    assert chosen({"TORCH_CUDA_ARCH_LIST": "9.0"}, gpus=[120])[0] == "9.0"
    assert chosen({}, gpus=[90, 86])[0] == "8.6, 9.0"


def test_a_gpu_that_the_compiler_does_not_know_yet():
    assert chosen({}, NVCC_12, gpus=[100])[0] == "9.0+PTX"


def test_no_gpu_engine():
    assert chosen({"FLASH_ATTN_CUDA_ARCHS": "none"}, gpus=[90])[0] == ""
    assert "8.0" in chosen({}, gpus=[75])[1]
    for nvcc, word in ((None, "nvcc"), (NVCC_13, "FLASH_ATTN_CUDA_ARCHS")):
        architectures, why = chosen({}, nvcc)
        assert architectures == "" and word in why and "CPU engine only" in why
    with pytest.raises(SystemExit, match="nvcc"):
        chosen({"FLASH_ATTN_CUDA_ARCHS": "90"}, None)


REPORT = """\
ptxas info    : Compiling entry function '_ZN5flash4cuda6kernelILNS1_8FeaturesE{features}EEEvi' for 'sm_80'
ptxas info    : Function properties for _ZN5flash4cuda6kernelILNS1_8FeaturesE{features}EEEvi
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 792 bytes cmem[0]
{more}seconds: 12.3
"""


CALLED = """\
ptxas info    : Function properties for _ZN5flash4cuda13run_carefullyEv
    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
"""


def check_kernels(folder):
    command = [sys.executable, ROOT / "tools" / "check_kernels.py", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("features,stack,stores,loads,more,word", [
    (0, 0, 0, 0, "", None), (0, 64, 0, 0, "", None), (0, 16, 8, 12, "", None),
    (0, 24, 24, 24, "", "spills 48 bytes"), (0, 160, 150, 150, "", "spills 300 bytes"),
    (2, 160, 150, 150, "", None), (1, 600, 600, 600, "", "spills 1200"),
    (0, 88, 0, 0, CALLED.format(spilled=138), None),
    (0, 0, 0, 0, CALLED.format(spilled=600), "spills 1200"),
    (0, 0, 0, 0, "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
     "serialized due to...\n", "C7510"),
])
def test_reports_of_the_compiler(features, stack, stores, loads, more, word, tmp_path):
    report = REPORT.format(features=features, stack=stack, stores=stores, loads=loads, more=more)
    (tmp_path / "sm80_forward.log").write_text(report)
    (tmp_path / "cpp.log").write_text("seconds: 1.0\n")
    status, printed = check_kernels(tmp_path)
    assert "sm80_forward" in printed and "254" in printed and "12.3" in printed and "sm_80" in printed
    assert (status, "FAILED" in printed) == ((0, False) if word is None else (1, True))
    assert word is None or word in printed


@pytest.mark.parametrize("stores,status", [(8, 0), (150, 1)])
def test_hopper_may_spill_a_little(stores, status, tmp_path):
    (tmp_path / "sm90_forward.log").write_text(
        REPORT.format(features=0, stack=stores, stores=stores, loads=stores, more=""))
    assert check_kernels(tmp_path)[0] == status


def test_no_reports_at_all(tmp_path):
    status, printed = check_kernels(tmp_path)
    assert status == 1 and "no kernel" in printed


SASS = """\
\t\tFunction : _ZN5flash4cuda17attention_forwardEv
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x01 */
        /*0020*/               @P0 BRA 0x80 ;                      /* 0x01 */
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x01 */
        /*0040*/                   {between} ;                     /* 0x01 */
        /*0050*/              @!P1 BRA 0x10 ;                      /* 0x01 */
        /*0060*/                   STL [R1], R3 ;                  /* 0x01 */
        /*0070*/                   BRA 0x0 ;                       /* 0x01 */
        /*0080*/                   S2R R4, SR_TID.X ;              /* 0x01 */
        /*0090*/                   BRA 0x30 ;                      /* 0x01 */
        /*00a0*/                   BRA 0xa0 ;                      /* 0x01 */
"""


@pytest.mark.parametrize("between,local,special", [
    ("FADD R5, R5, R6", 0, 1), ("LDL.64 R5, [R1+0x8]", 1, 1), ("@P2 STL [R1], R5", 1, 1),
    ("S2UR UR5, SR_CgaCtaId", 0, 2),
])
def test_loops_with_products(between, local, special):
    """The innermost one counts, with what its branches skip, and what they jump to behind it."""
    functions = check_loops["functions_of"](SASS.format(between=between))
    assert list(functions) == ["_ZN5flash4cuda17attention_forwardEv"]
    loops = list(check_loops["loops_of"](*functions.values()))
    assert loops == [check_loops["Loop"](products=2, instructions=7, local=local, special=special)]


@pytest.mark.parametrize("kernel,head_dim,function,products", [
    ("forward", 128, "forward", {8 + 80 // 16}), ("backward", 128, "backward", {8 + 8 + 4 + 4 + 8}),
    ("wide_backward", 192, "key_gradients", {12 + 4, 8 + 4}),  # values of 128
    ("wide_backward", 256, "key_gradients", {16 + 3}),
    ("wide_backward", 256, "query_gradient", {16 + 16 + 4}),
    ("wide_backward", 256, "stored_query_gradient", {4}), ("bias_gradient", 64, "bias_gradient", {4 + 4}),
])
def test_products_of_a_step(kernel, head_dim, function, products):
    row = next(row for row in check_loops["ROWS"] if (row.engine, row.kernel) == ("sm90", kernel)
               and row.configuration.head_dim == head_dim and not getattr(row.configuration, "few", 0))
    assert check_loops["expected"](row, f"attention_{function}") == products
