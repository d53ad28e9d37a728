"""Child processes: an allowlist for the environment, and a program that ends a command with its parent.

`python -I -S child_process.py PARENT_PID COMMAND ...` runs isolated, so this module imports only the standard library.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

_OPEN_FILES = 4096  # p2pd itself has no limit; 256 of macOS are few for a node's links
# Without PYTHONSTARTUP, PYTHONINSPECT, PYTHONHOME, PYTHONPYCACHEPREFIX and LD_PRELOAD, which choose the code that runs
NAMES: Final = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR", "COLUMNS"),
        *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
        *("VIRTUAL_ENV", "SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE", "APPDATA", "LOCALAPPDATA"),
        *("GOMEMLIMIT", "GOMAXPROCS", "GOGC", "HIVEMIND_LOGLEVEL"),
        *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
        *("PYTHONFAULTHANDLER", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
    }
)
PREFIXES: Final = (
    *("SKIPSTONE_", "LC_", "GRPC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "NCCL_", "HIP_", "ROCR_", "HSA_"),
)
# Passed without relative and empty entries, which mean the current folder
PATHS: Final = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})


def child_environment(inherited: Mapping[str, str], **more: str) -> dict[str, str]:
    """Returns a child's environment: the variables of `inherited` that are on the allowlist, plus `more`."""
    kept = {name: value for name, value in inherited.items() if name in NAMES or name.startswith(PREFIXES)}
    for name in PATHS & inherited.keys():
        if folders := [folder for folder in inherited[name].split(os.pathsep) if os.path.isabs(folder)]:
            kept[name] = os.pathsep.join(folders)
    return kept | more


def with_packages(inherited: Mapping[str, str], packages: str, **more: str) -> dict[str, str]:
    """Returns the environment of a child (`child_environment`) that imports from the folder `packages` first."""
    kept = child_environment(inherited, **more)
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (packages, kept.get("PYTHONPATH"))))}


def set_open_files(*, at_most: bool) -> None:
    """Lets this process open _OPEN_FILES files and sockets if the system allows, or more unless `at_most`."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if at_most or 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Runs a command that ends with its parent: by PR_SET_PDEATHSIG on Linux; elsewhere the node kills the group."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before prctl
            sys.exit(1)
    set_open_files(at_most=True)
    os.execv(command[0], command)  # noqa: S606  # without a shell


if __name__ == "__main__":
    main()
