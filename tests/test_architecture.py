"""The rules of the house, so that they stay true: who may include what, and how long things may grow."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CPP = sorted(p for suffix in ("h", "cpp", "cuh", "cu") for p in CSRC.rglob(f"*.{suffix}"))
PYTHON = sorted(p for folder in ("flash_attn", "tests") for p in (ROOT / folder).rglob("*.py"))
ATTENTION = sorted((CSRC / "attention").glob("*.h"))
# What a file of a room may include: rooms further down only. problem.h is the floor.
BELOW = {
    "torch": {"torch", "engine.h", "cpu", "attention", "problem.h"},
    "engine": {"engine.h", "cpu", "cuda", "attention", "problem.h"},
    "cpu": {"cpu", "attention", "problem.h"},
    "cuda": {"cuda", "attention", "problem.h"},
    "attention": {"attention", "problem.h"},
    "problem": set(),
}
# The same within csrc/cuda, for its folders; launch.h and kernel.h are everybody's. Engines know nothing of
# each other, and what every engine may share is in any/.
CUDA_BELOW = {"ptx": {"ptx"}, "tile": {"tile", "ptx"}, "any": {"any", "tile", "ptx"}}
CUDA_ENGINE_BELOW = {"any", "tile", "ptx"}


def room_of(path):
    first = path.relative_to(CSRC).parts[0]
    return first.split(".")[0]


def name(path):
    return str(path.relative_to(ROOT))


def code_of(text):
    """C++ without its comments and string literals."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"//[^\n]*", "", text)


def includes_of(path):
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), flags=re.M)


def offenders(files, pattern, where=lambda path: True):
    return [name(p) for p in files if where(p) and re.search(pattern, code_of(p.read_text()))]


def test_there_is_something_to_check():
    assert len(CPP) > 15 and len(PYTHON) > 15 and len(ATTENTION) >= 6
    assert {"torch", "cpu", "attention", "problem"} <= {room_of(p) for p in CPP}


def test_torch_headers_only_in_torch():
    for path in CPP:
        foreign = [i for _, i in includes_of(path) if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", i)]
        assert room_of(path) == "torch" or not foreign, f"{name(path)}: {foreign}"


def test_stable_abi_only():
    """One binary for every torch: nothing of torch's C++ but the stable ABI."""
    for path in CPP:
        for _, include in includes_of(path):
            if re.match(r"(torch|ATen|c10)/", include):
                assert re.match(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/", include), (
                    f"{name(path)}: {include}")


def test_includes_point_down():
    for path in CPP:
        for quote, include in includes_of(path):
            if quote != '"':
                continue
            target = (path.parent / include).resolve()
            assert target.is_file(), f"{name(path)} includes {include}, which is not beside it"
            parts = target.relative_to(CSRC).parts
            room = room_of(path)
            assert parts[0] in BELOW[room], f"{name(path)} ({room}) includes {'/'.join(parts)}"


def test_includes_within_cuda_point_down():
    cuda = CSRC / "cuda"
    for path in (p for p in CPP if p.is_relative_to(cuda)):
        parts = path.relative_to(cuda).parts
        folder = parts[0] if len(parts) > 1 else None
        below = CUDA_BELOW.get(folder, {folder, *CUDA_ENGINE_BELOW}) if folder else set()
        for quote, include in includes_of(path):
            target = (path.parent / include).resolve()
            if quote == '"' and target.is_relative_to(cuda) and target.parent != cuda:
                assert target.parent.name in below, f"{name(path)} includes {include}"


def test_cuda_only_in_cuda():
    pattern = r"__global__|__device__|__shared__|<<<|\bcuda[A-Z]\w*\("
    assert not offenders(CPP, pattern, lambda p: room_of(p) not in ("cuda", "attention"))
    for path in CPP:
        foreign = [i for quote, i in includes_of(path)
                   if quote == "<" and re.match(r"(cuda|cub\b|cute\b|cutlass|thrust)", i)]
        assert room_of(path) == "cuda" or not foreign, f"{name(path)}: {foreign}"


def test_every_header_is_included_once_only():
    for path in CPP:
        if path.suffix in (".h", ".cuh"):
            assert path.read_text().count("#pragma once") == 1, name(path)


def test_asm_only_in_ptx():
    assert not offenders(CPP, r"\basm\b", lambda p: "csrc/cuda/ptx" not in p.as_posix())


def test_attention_knows_no_engine():
    pattern = r"threadIdx|blockIdx|blockDim|__shared__|__syncthreads|<immintrin|_mm\d+_|omp "
    assert not offenders(ATTENTION, pattern)


def test_nothing_prints_or_exits():
    assert not offenders(CPP, r"\b(f?printf|puts|exit|abort|std::cout|std::cerr)\b\s*(\(|<<)")


def test_nothing_is_left_to_do():
    files = [p for p in (*CPP, *PYTHON) if p != Path(__file__).resolve()]
    assert not [name(p) for p in files if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", p.read_text())]


@pytest.mark.parametrize("files,limit", [(CPP, 500), (PYTHON, 500), (ATTENTION, 200)],
                         ids=["c++", "python", "attention"])
def test_file_length(files, limit):
    long = {name(p): n for p in files if (n := len(p.read_text().splitlines())) > limit}
    assert not long


def test_line_length():
    long = [f"{name(p)}:{i}" for p in (*CPP, *PYTHON) for i, line in enumerate(p.read_text().splitlines(), 1)
            if len(line) > 110]
    assert not long


def test_no_trailing_space_no_tabs():
    bad = [f"{name(p)}:{i}" for p in (*CPP, *PYTHON) for i, line in enumerate(p.read_text().splitlines(), 1)
           if line != line.rstrip() or "\t" in line]
    assert not bad


def looks_like_code(comment):
    """A comment line that is a statement: assignment, call, return, head of a block, directive."""
    statement = (r"(return\b[^,]*|[\w:.>-]+\(.*\)"
                 r"|((const|auto)\s+)?[\w:<>*&]+(\s+[\w:*&<>]+)?(\[[^\]]*\])?\s*[-+*/|&]?=\s*[^,]*);$")
    return bool(re.match(statement, comment.strip())
                or re.match(r"(if|for|while|switch)\s*\(.*\)\s*\{?$", comment.strip())
                or re.match(r"#\s*(include|define|if|endif)\b", comment.strip()))


def looks_like_python(comment):
    comment = comment.strip()
    return bool(re.match(r"(def|class|if|for|while|with)\s.*:$|(import|from)\s+\w+(\s+import|$)", comment)
                or re.match(r"[\w.]+(\[.*\])?\s*[+*/-]?=\s*\S+\(.*\)$|return\b.*[()\[\]]", comment)
                or re.match(r"(assert|print)\b.*[()=]", comment))


def test_the_heuristics_know_code_from_prose():
    for line in ("x = f(y);", "if (a < b) {", "#include <x>", "const int* p = q;", "f(a, b);", "return x;"):
        assert looks_like_code(line), line
    assert not looks_like_code("rng_state int64 [2] = (seed, offset), needed if dropout_p > 0;")
    assert not looks_like_code("masked before exp; a row that sees no key (Sq > Sk) gives 0")
    for line in ("x = f(y)", "for x in y:", "import os", "def f(x):"):
        assert looks_like_python(line), line
    assert not looks_like_python("the window is inclusive") and not looks_like_python("for every row, once")


def test_no_commented_out_code():
    bad = []
    for path in CPP:
        for i, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*//(.*)", line)
            if match and looks_like_code(match[1]):
                bad.append(f"{name(path)}:{i}: {line.strip()}")
    for path in PYTHON:
        for i, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*#(.*)", line)
            if match and looks_like_python(match[1]):
                bad.append(f"{name(path)}:{i}: {line.strip()}")
    assert not bad


def test_no_score_matrix_in_python():
    """No arithmetic on [S, S]: the Python side neither multiplies matrices nor takes a softmax. The self-test
    in info.py has to, to compare with, and attention weights that a caller asks for are that matrix."""
    allowed = {"flash_attn/info.py", "flash_attn/nn/attention_weights.py"}
    forbidden = {"einsum", "softmax", "matmul", "bmm", "baddbmm", "logsumexp"}
    for path in (ROOT / "flash_attn").rglob("*.py"):
        if name(path) in allowed:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        called = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes
                  if isinstance(node, ast.Call)}
        products = any(isinstance(node, ast.MatMult) for node in nodes)
        assert not products and not called & forbidden, name(path)


@pytest.mark.parametrize("header", ATTENTION, ids=lambda p: p.name)
def test_attention_headers_compile_alone(header, tmp_path):
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n')
    done = subprocess.run(["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(source)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_attention_headers_compile_for_a_gpu(tmp_path):
    """All of them in one translation unit, and one in a kernel: host and device alike."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = tmp_path / "kernel.cu"
    source.write_text("".join(f'#include "{h}"\n' for h in (CSRC / "problem.h", *ATTENTION)) + (
        "__global__ void dropped(flash::ForwardProblem problem, bool* out) {\n"
        "    out[threadIdx.x] = !flash::Dropout(problem, 0, 0).keep(threadIdx.x, 0);\n"
        "}\n"))
    command = [nvcc, "-std=c++20", "-arch=sm_80", "-Werror", "all-warnings", "-ptx", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "kernel.ptx")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ".entry" in (tmp_path / "kernel.ptx").read_text()
