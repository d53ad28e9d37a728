"""The environment of a child process: an allowlist of this one's variables, so that no token or password gets there.

A node speaks with strangers in two of its children (the DHT's process and p2pd below it), and neither has any use for
the keys that a person's shell, a CI job or a notebook carries about.

It stands alone because children of several kinds are started with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

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
"""Not PYTHONSTARTUP, PYTHONINSPECT, PYTHONHOME or PYTHONPYCACHEPREFIX, nor LD_PRELOAD: they say which code runs."""
PREFIXES: Final = (
    *("SKIPSTONE_", "LC_", "GRPC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "NCCL_", "HIP_", "ROCR_", "HSA_"),
)
PATHS: Final = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})
"""Lists of folders that programs, code or libraries come from: handed on, for whoever set them decided about this
process too, but without relative and empty entries, which mean the folder that the user happens to stand in."""


def child_environment(inherited: Mapping[str, str], **more: str) -> dict[str, str]:
    """The environment for a child of a process that has `inherited`; `more` comes on top."""
    kept = {name: value for name, value in inherited.items() if name in NAMES or name.startswith(PREFIXES)}
    for name in PATHS & inherited.keys():
        if folders := [folder for folder in inherited[name].split(os.pathsep) if os.path.isabs(folder)]:
            kept[name] = os.pathsep.join(folders)
    return kept | more


def with_packages(inherited: Mapping[str, str], packages: str, **more: str) -> dict[str, str]:
    """The environment, as `child_environment`, for a child that is to import from the folder `packages` before any
    other of PYTHONPATH.
    """
    kept = child_environment(inherited, **more)
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (packages, kept.get("PYTHONPATH"))))}
