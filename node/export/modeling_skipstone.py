"""Code of an exported model with `model.token_rank`, for `transformers` with `trust_remote_code=True`."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class SkipstoneConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    model_type = "skipstone"
    token_rank: int = 0


class SkipstoneForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Llama in which each block, and the head, adds a trained row of the token to its input."""

    config_class = SkipstoneConfig

    def __init__(self, config: SkipstoneConfig) -> None:
        super().__init__(config)
        self._tokens: Tensor | None = None
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        readers = [(layer, (layer.input_layernorm, layer.post_attention_layernorm)) for layer in self.model.layers]
        for reader, norms in (*readers, (self.model, (self.model.norm,))):
            table = nn.Embedding(config.vocab_size, config.token_rank)
            spread = nn.Linear(config.token_rank, config.hidden_size, bias=False)
            reader.token_rows = nn.Sequential(OrderedDict(embed_tokens=table, spread=spread))
            for norm in norms:
                norm.register_forward_pre_hook(partial(self._add, reader.token_rows))
        self.post_init()  # type: ignore[no-untyped-call]

    def _begin(self, model: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._tokens = named.get("input_ids")
        if self._tokens is None:
            raise ValueError("this model needs input_ids: its blocks read a row for each token")

    def _add(self, rows: Callable[[Tensor], Tensor], norm: nn.Module, values: tuple[Tensor, ...]) -> Tensor:
        assert self._tokens is not None
        return values[0] + rows(self._tokens.to(values[0].device))
