#!/usr/bin/env bash
# Runs this checkout's tests against one wheel under several versions of torch, each in a fresh environment.
#
#     tools/test_torch_versions.sh WHEEL [VERSION...]        # default: 2.10.0 2.11.0 newest
#
# The installed wheel is tested, never the source tree: pytest starts outside the checkout, imports test files
# without putting their folders on sys.path, and stops if flash_attn came from anywhere but the environment.
# Tests marked slow use all cores by themselves and run apart; the others run on all cores. If the first version
# takes more than SLOW_SECONDS (default 300), the others leave out the slow ones.
# Prints one line a version at the end, then pytest's closing line, of the first version that failed or else
# of the last; exit status 1 if any failed. PYTHON (default python3) makes environments, TMPDIR holds them:
# each torch with its CUDA libraries takes several GB, and is removed before the next.
set -euo pipefail

wheel=$(realpath "${1:?usage: tools/test_torch_versions.sh WHEEL [VERSION...]}")
shift
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.10.0 2.11.0 newest)
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

make_environment() {
    # Debian's python3 may lack ensurepip, and then makes an environment without pip, or none.
    if ! "${PYTHON:-python3}" -m venv "$1" 2>"$work/venv.log"; then
        rm -rf "$1"
        [ -d "$work/virtualenv" ] \
            || "${PYTHON:-python3}" -m pip install -q --target "$work/virtualenv" virtualenv
        PYTHONPATH="$work/virtualenv" "${PYTHON:-python3}" -m virtualenv -q "$1"
    fi
}

# Loaded by pytest with -p, in each of its processes: stops if the code under test is not the wheel's.
mkdir "$work/plugin" "$work/elsewhere"
cat >"$work/plugin/installed_wheel.py" <<'PLUGIN'
import pathlib
import sys

import pytest


def pytest_sessionstart():
    try:
        import flash_attn
    except ImportError:
        return  # has its own report, which leaving here would swallow
    where = pathlib.Path(flash_attn.__file__).resolve()
    if not where.is_relative_to(pathlib.Path(sys.prefix).resolve()):
        raise pytest.UsageError(f"flash_attn came from {where}, not from the installed wheel")
PLUGIN

run_tests() {  # environment, pytest options...
    local environment=$1
    shift
    # tests/ holds modules that test files import by name (reference.py and others).
    (cd "$work/elsewhere" && PYTHONPATH="$work/plugin:$checkout/tests" PYTHONDONTWRITEBYTECODE=1 \
        "$environment/bin/pytest" -q -p no:cacheprovider -p installed_wheel --import-mode=importlib "$@" \
        "$checkout/tests")
}

run_part() {  # environment, log, pytest options...; sets `closing`, unless tests have failed before
    local environment=$1 log=$2 result=0
    shift 2
    run_tests "$environment" "$@" 2>&1 | tee "$log" || result=1
    [ "$status" = 0 ] || return 1
    closing=$(grep -E '(passed|failed|error|skipped|no tests ran).* in [0-9.]+s' "$log" | tail -n 1) \
        || closing=$(tail -n 1 "$log")
    return $result
}

test_version() {  # version; sets `found`, `closing`
    local version=$1 environment="$work/environment" log="$work/log" torch="torch" status=0
    [ "$version" = newest ] || torch="torch==$version"
    found=$version closing="not installed"
    make_environment "$environment" || return 1
    echo "install $torch and $(basename "$wheel")[test]"
    "$environment/bin/python" -m pip install -q "$torch" "$wheel[test]" || return 1
    found=$("$environment/bin/python" -c 'import torch; print(torch.__version__)') || return 1
    closing="wrong symbols"
    "$environment/bin/python" "$checkout/tools/check_abi.py" "$wheel" --torch-lib \
        "$("$environment/bin/python" -c 'import torch; print(torch.__path__[0])')" || return 1
    echo "pytest under torch $found${without_slow:+, without slow tests}"
    run_part "$environment" "$log" -n "$(nproc)" -m "not slow and not large" || status=1
    if [ -z "$without_slow" ]; then
        local of_others=$closing
        run_part "$environment" "$log" -m "slow and not large" && closing=$of_others || status=1
    fi
    return $status
}

summary=() failed=0 without_slow= last=
for version in "${versions[@]}"; do
    begin=$SECONDS result=ok
    echo "== torch $version"
    test_version "$version" || result=FAILED
    [ $failed = 1 ] || last=$closing
    [ $result = ok ] || failed=1
    rm -rf "$work/environment"
    echo "== torch $version: $((SECONDS - begin)) s"
    summary+=("torch $found: $result, $((SECONDS - begin)) s: $closing")
    [ $((SECONDS - begin)) -le "${SLOW_SECONDS:-300}" ] || without_slow=yes
done
printf '%s\n' "${summary[@]}"
echo "$last"
exit $failed
