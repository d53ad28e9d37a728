"""The JSON files that `transformers` and `tokenizers` read beside the weights, made from the manifest.

Our blocks are computed as LlamaForCausalLM and its kin compute them (rotary halves included), so the weights need no
permutation.

Sources: LlamaConfig and its kin of transformers 4 and 5; the byte-level alphabet of GPT-2 (Radford et al. 2019), which
the `ByteLevel` pre-tokenizer of `tokenizers` has.
"""

from __future__ import annotations

from typing import Any, Final

from protocol.manifest.manifest import Manifest
from protocol.manifest.model import ModelSection

Json = dict[str, Any]

BYTES_END_OF_DOCUMENT: Final = "<|endoftext|>"
"""How the byte tokenizer's 256 is written; in a text it stays 13 bytes (`split_special_tokens`)."""
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model_config(manifest: Manifest, end_of_document: int) -> Json:
    """The content of `config.json`. The weights' type is float32, in which a swarm keeps its parameters, whatever it
    multiplies in.
    """
    model = manifest.model
    return {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": sum(manifest.stages.blocks),
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
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
        **({} if model.family == "llama" else {"sliding_window": model.sliding_window}),
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


def generation_config(end_of_document: int) -> Json:
    """The content of `generation_config.json`: an empty prompt begins where a document has ended, and a text ends with
    its document.
    """
    return {"bos_token_id": end_of_document, "eos_token_id": end_of_document}


def tokenizer_config(manifest: Manifest, end_of_document: str) -> Json:
    """The content of `tokenizer_config.json`. A text that spells out the end of a document is text like any other in
    the byte tokenizer.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "model_max_length": manifest.model.sequence,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": manifest.data.tokenizer == "bytes",
    }


def byte_tokenizer() -> Json:
    """The content of `tokenizer.json` in which a byte's token is its value and 256 ends a document: byte-level BPE
    without any merge.
    """
    special = {
        "id": 256,
        "content": BYTES_END_OF_DOCUMENT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else one from 256 on, in order."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = iter(range(256, 512))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(256)]
