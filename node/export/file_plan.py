"""The plan of an exported folder: names of files, which parameter is in which, and what `skipstone.json` says.

config.json, generation_config.json          LlamaConfig and defaults of `generate`
model.safetensors                            all parameters, float32; or
model-00001-of-00003.safetensors, ...        several such files, and
model.safetensors.index.json                 which parameter is in which of them
tokenizer.json, tokenizer_config.json        the run's tokenizer
manifest.toml, manifest.router               the run's signed manifest, and its router if it has one
skipstone.json                               the run, and a digest of each module

All modules of a run with experts, of which each stage has several with the same names of parameters, lie in files of
their own, and no program but this one reads them: `shards` is 0 then, and there is no config.json.

module-0.0.safetensors, module-1.0.safetensors, module-1.1.safetensors, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.model.shapes import Shape, parameter_bytes, parameter_shapes
from node.observability.version import installed_version
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.types import ModuleId

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
INDEX: Final = "model.safetensors.index.json"
MANIFEST: Final = "manifest.toml"
ORIGIN: Final = "skipstone.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"

FORMAT: Final = 1
"""Of `skipstone.json`."""
SHARD_BYTES: Final = 4 * 10**9
"""Most that one file of parameters holds, unless a single parameter is larger; also what writing it takes in memory."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of parameters."""

    file: str
    shapes: Mapping[str, Shape]


def plan_shards(manifest: Manifest, modules: Sequence[ModuleId], limit_bytes: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """The shards of the parameters in the order of these modules, of which each stage has one, cut so that a module is
    read once and a shard never waits for a later module's end.
    """
    pieces: list[dict[str, Shape]] = [{}]
    size = 0
    for module in modules:
        for name, shape in parameter_shapes(manifest, module).items():
            own = parameter_bytes({name: shape})
            if pieces[-1] and size + own > limit_bytes:
                pieces.append({})
                size = 0
            pieces[-1][name] = shape
            size += own
    return tuple(Shard(_file_name(number, len(pieces)), piece) for number, piece in enumerate(pieces, start=1))


def index_json(shards: tuple[Shard, ...]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    size = sum(parameter_bytes(shard.shapes) for shard in shards)
    files = {name: shard.file for shard in shards for name in shard.shapes}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}


def origin_json(signed: SignedManifest, digests: Mapping[ModuleId, bytes], shards: tuple[Shard, ...]) -> dict[str, Any]:
    """The content of `skipstone.json`; without shards each module has a file of its own.

    Args:
        digests: those of `node.model.initialization.digest_of_tensors`.
    """
    stages = signed.manifest.stages
    return {
        "format": FORMAT,
        "skipstone": installed_version(),
        "run": signed.run,
        "name": signed.manifest.name,
        "author": signed.author,
        "protocol": signed.manifest.protocol,
        "stages": {
            "blocks": list(stages.blocks),
            "visited_per_path": stages.visited_per_path,
            "trained_with_skipping": stages.visited_per_path < stages.count - 1,
        },
        "shards": len(shards),
        "modules": {str(module): digest.hex() for module, digest in digests.items()},
    }


def module_file(module: ModuleId) -> str:
    """The file of one module, in a folder that has all of a run with experts."""
    return f"module-{module}.safetensors"


def shard_files(count: int) -> list[str]:
    """The names of the shards of an export in `count` pieces."""
    return [_file_name(number, count) for number in range(1, count + 1)]


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
