"""Files of an exported folder, and their contents.

config.json, generation_config.json          LlamaConfig and defaults of `generate`
modeling_skipstone.py                        the model's code, for `model.token_rank`
model.safetensors                            all parameters in float32, or
model-00001-of-00003.safetensors, ...        several such files, and
model.safetensors.index.json                 the file of each parameter
tokenizer.json, tokenizer_config.json        the run's tokenizer
chat_template.jinja, ...                     what the start model's folder had of these (`data.token_files`)
manifest.toml, manifest.router               the run's signed manifest, and its router if it has one
skipstone.json                               the run, and a digest of each module

In a run with experts, modules of one stage share parameter names. An export of all of them has one file per module
(`module-1.0.safetensors`), `shards` 0 and no config.json, and only this program reads it.
An export of some stages is a model of their blocks, numbered anew. Its skipstone.json lists them as `only_stages`.

Blocks compute like LlamaForCausalLM and its relatives, so weights need no permutation. The byte-level alphabet is that
of GPT-2 (Radford et al. 2019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from node.data.tokenizers import ByteTokenizer, Tokenizer, unpacked
from node.model.residual import Residual
from node.model.shapes import EMBEDDING, Shape, names_in_part, parameter_bytes, parameter_shapes, writes
from node.observability.version import installed_version
from protocol.manifest.manifest import Manifest, ModelSection
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.types import ModuleId

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
INDEX: Final = "model.safetensors.index.json"
MANIFEST: Final = "manifest.toml"
ORIGIN: Final = "skipstone.json"
MODELING: Final = "modeling_skipstone"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"

FORMAT: Final = 1
SHARD_BYTES: Final = 4 * 10**9  # Largest parameter file in bytes, which is also the memory needed to write it


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of an export, and the shapes of its parameters."""

    file: str
    shapes: Mapping[str, Shape]


def full_width(manifest: Manifest) -> Manifest:
    """Returns the manifest of the exported model, whose blocks write all of `hidden`."""
    if not manifest.model.residual:
        return manifest
    return manifest.model_copy(update={"model": manifest.model.model_copy(update={"residual": 0})})


def at_full_width(manifest: Manifest, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns a module's parameters for `full_width`. They make the same logits: T + E U, and U^T W of each output."""
    residual = Residual(manifest.model, manifest.seed)
    if residual.directions is None:
        return parameters
    rows = residual.directions.float()
    found = {name: rows.T @ tensor if writes(name) else tensor for name, tensor in parameters.items()}
    if EMBEDDING in found:
        found[EMBEDDING] = found[EMBEDDING] @ rows
        for part in torch.split(torch.arange(manifest.model.vocabulary), 2**14):
            found[EMBEDDING][part] += residual.fixed(part).float()
    return found


def plan_shards(manifest: Manifest, modules: Sequence[ModuleId], limit_bytes: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Splits the modules' parameters into files of limited size, in order, so that each module is read once."""
    names = names_in_part(manifest, modules)
    pieces: list[dict[str, Shape]] = [{}]
    size = 0
    for module in modules:
        for name, shape in parameter_shapes(manifest, module).items():
            own = parameter_bytes({name: shape})
            if pieces[-1] and size + own > limit_bytes:  # a single tensor may exceed the limit
                pieces.append({})
                size = 0
            pieces[-1][names[name]] = shape
            size += own
    return tuple(Shard(shard_file(number, len(pieces)), piece) for number, piece in enumerate(pieces, start=1))


def index_json(shards: tuple[Shard, ...]) -> dict[str, Any]:
    """Returns the content of `model.safetensors.index.json`."""
    size = sum(parameter_bytes(shard.shapes) for shard in shards)
    files = {name: shard.file for shard in shards for name in shard.shapes}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}


def origin_json(signed: SignedManifest, digests: Mapping[ModuleId, bytes], shards: int) -> dict[str, Any]:
    """Returns the content of `skipstone.json`. `shards`: their number, or 0 if each module has a separate file."""
    stages, there = signed.manifest.stages, sorted({module.stage for module in digests})
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
        **({} if len(there) == stages.count else {"only_stages": there}),
        "shards": shards,
        "modules": {str(module): digest.hex() for module, digest in digests.items()},
    }


def module_file(module: ModuleId) -> str:
    """Returns the file name of one module in an export of all experts."""
    return f"module-{module}.safetensors"


def shard_file(number: int, count: int) -> str:
    """Returns the file name of a shard, numbered from 1, in an export in `count` shards."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


Json = dict[str, Any]


def model_config(manifest: Manifest, modules: Sequence[ModuleId], special: Json) -> Json:
    """Returns the content of `config.json` with the keys of `special` tokens. Parameters are always float32."""
    model = manifest.model
    classes = {"AutoConfig": f"{MODELING}.SkipstoneConfig", "AutoModelForCausalLM": f"{MODELING}.SkipstoneForCausalLM"}
    own: Json = {"architectures": ["SkipstoneForCausalLM"], "model_type": "skipstone", "auto_map": classes}
    return {
        "architectures": [f"{model.family.capitalize()}ForCausalLM"],
        "model_type": model.family,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": sum(manifest.stages.blocks[module.stage] for module in modules),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions or model.sequence,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "attention_bias": model.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        **special,
        **({} if model.family == "llama" else {"sliding_window": model.sliding_window}),
        **(own | {"token_rank": model.token_rank} if model.token_rank else {}),
    }


def _rope_scaling(model: ModelSection) -> Json | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }


def token_files(manifest: Manifest, modules: Sequence[ModuleId], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns config.json and the files about tokens, with the start model's settings if the run has one.

    Adds to them the token with which this run teaches the model to end, so that `generate` stops there.
    """
    files, end, ends = unpacked(manifest.data.token_files), tokenizer.end_of_document, list(tokenizer.ends)
    beginning = end if tokenizer.beginning is None else tokenizer.beginning
    own = {"bos_token_id": beginning, "eos_token_id": ends if len(ends) > 1 else end, "pad_token_id": None}
    special = {key: files[CONFIG][key] for key in own if key in files[CONFIG]} if CONFIG in files else own
    generation = dict(files.get(GENERATION_CONFIG, {key: special[key] for key in special if special[key] is not None}))
    stops = generation.get("eos_token_id", special.get("eos_token_id"))
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if tokenizer.learned_end not in listed:
        generation["eos_token_id"] = [*listed, tokenizer.learned_end]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.name_of(beginning),
        "eos_token": tokenizer.name_of(end),
        "model_max_length": manifest.model.sequence,
        "clean_up_tokenization_spaces": False,
        # The byte tokenizer reads no end-of-document token in text.
        "split_special_tokens": manifest.data.tokenizer == "bytes",
    }
    own_files: Json = {CONFIG: model_config(manifest, modules, special), GENERATION_CONFIG: generation}
    if manifest.model.token_rank:
        own_files[f"{MODELING}.py"] = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    return {TOKENIZER_CONFIG: tokenizer_config, **files, **own_files}


def byte_tokenizer() -> Json:
    """Returns the content of `tokenizer.json` for the byte tokenizer: byte-level BPE without merges."""
    unset = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"id": 256, "content": ByteTokenizer().name_of(256), **unset, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [special],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Returns GPT-2's character for each byte: the byte itself if printable, else a character from 256 upwards."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = iter(range(256, 512))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(256)]
