"""What planning needs to know of a model: homes, the order of visits, and what a token costs in each. Shapes only.

A model on the meta device is enough; nothing is allocated. Active shares of experts and the kinds of attention come
from the transformers config, where there is one; what blocks keep inside for their backward from a forward on the meta
device (`kept.py`); everything else from the modules themselves.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

from torch import nn

from megatrain.spec.discover import FoundLayer, find_layers, is_plain_linear
from megatrain.spec.homes import Formats, HomePlan, plan_homes
from megatrain.spec.kept import KeptInside, kept_inside


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of one layer."""

    num_heads: int
    """Of queries."""

    num_kv_heads: int
    """Of keys and values, each for several heads of queries where there are fewer."""

    key_dim: int
    """Of a head, for queries and keys."""

    value_dim: int

    window: int | None
    """Tokens that a token sees at most; None: all before it."""

    @property
    def width(self) -> int:
        """Heads x (head dim of keys + head dim of values)."""
        return self.num_heads * (self.key_dim + self.value_dim)

    @property
    def whole_width(self) -> int:
        """Numbers a token of queries, keys, values and what comes of them."""
        return (self.num_heads + self.num_kv_heads) * (self.key_dim + self.value_dim)

    def num_pairs(self, length: int) -> int:
        """(query, key) pairs of one causal sequence."""
        seen = length if self.window is None else min(self.window, length)
        return seen * (seen + 1) // 2 + (length - seen) * seen


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer, and what a token costs in its forward."""

    name: str
    kind: str
    """`block`, `embedding`, `head` or `other`."""

    home: int
    """Index in `ModelSpec.homes`."""

    matrix_parameters: int
    """Of the matrix products that one token takes part in: active experts only, no look-ups."""

    output_width: int
    """Sum of the outputs of those products: numbers a token that the layer makes."""

    attention: Attention | None

    has_plain_logits: bool = False
    """A linear layer as PyTorch has it, whose output may be made in pieces."""

    has_dropout: bool = False
    """Its forward draws random numbers when it trains."""
    may_tile: bool = False
    """All but its attention does each token alone, as far as the modules tell: no experts, no dropout."""

    kept: KeptInside | None = None
    """Inside a block for its backward, its input too, where it is not compiled; None: not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """A model without weights."""

    name: str
    homes: tuple[HomePlan, ...]
    layers: tuple[LayerSpec, ...]
    """In the order of the forward, as far as the order of definition tells."""

    trainable: frozenset[int]
    """ids of the parameters that train (keys of `HomePlan.parameters`)."""

    formats: Formats
    num_parameters: int
    """Tied ones once."""

    active_parameters: int
    """Of one token: matrices with its active experts, without look-ups."""

    hidden_size: int
    vocabulary_size: int
    """Width of the logits; 0 for a model without a head."""

    max_length: int | None
    """Positions that the config allows; None: it does not say."""

    tile_tokens: int | bool | None = False
    """`Config.tile_tokens`, where blocks run in tiles at all."""

    @property
    def num_blocks(self) -> int:
        return sum(layer.kind == "block" for layer in self.layers)

    @property
    def attention_width(self) -> int:
        """Of all layers."""
        return sum(layer.attention.width for layer in self.layers if layer.attention is not None)


def model_spec(model: nn.Module, formats: Formats, name: str) -> ModelSpec:
    """Raises UserError for a model without repeated blocks."""
    found = find_layers(model)
    homes = plan_homes(model, found, formats)
    config = text_config(model)
    hidden = getattr(config, "hidden_size", None) or _width_of(found)
    home_of = {id(layer): index for index, home in enumerate(homes) for layer in home.layers}
    share = active_share(config)
    attentions = attention_layers(config)
    kept = _kept_inside(model, found, homes, attentions)
    layers, num_blocks = [], 0
    for layer in found:
        attention = None
        if layer.kind == "block":
            attention = attentions[num_blocks] if num_blocks < len(attentions) else None
            num_blocks += 1
        matrix, width = _products(layer, share, hidden)
        layers.append(
            LayerSpec(
                name=layer.name,
                kind=layer.kind,
                home=home_of[id(layer)],
                matrix_parameters=matrix,
                output_width=width,
                attention=attention,
                has_plain_logits=layer.kind == "head" and is_plain_linear(layer.module),
                has_dropout=_has_dropout(layer.module),
                may_tile=attention is not None and _may_tile(layer.module),
                kept=kept.get(layer.name),
            )
        )
    heads = [layer.module for layer in found if layer.kind == "head" and isinstance(layer.module, nn.Linear)]
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return ModelSpec(
        name=name,
        homes=tuple(homes),
        layers=tuple(layers),
        trainable=frozenset(key for key, parameter in parameters.items() if parameter.requires_grad),
        formats=formats,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        active_parameters=sum(layer.matrix_parameters for layer in layers),
        hidden_size=hidden,
        vocabulary_size=max((head.out_features for head in heads), default=0),
        max_length=getattr(config, "max_position_embeddings", None),
    )


def _kept_inside(
    model: nn.Module, found: list[FoundLayer], homes: list[HomePlan], attentions: list[Attention | None]
) -> dict[str, KeptInside]:
    """By name of block, of those that are known. Rows shorter than every window are measured apart from longer ones."""
    dtypes = {key: field.dtype for home in homes for key, field in home.parameters.items()}
    max_length = getattr(text_config(model), "max_position_embeddings", None)
    windows = {attention.window for attention in attentions if attention is not None and attention.window}
    if not windows:
        return kept_inside(model, found, dtypes, max_length=max_length)
    shorter = min(windows) // 2
    short = kept_inside(model, found, dtypes, max_length=shorter if max_length is None else min(shorter, max_length))
    long = kept_inside(model, found, dtypes, window=max(windows), max_length=max_length)
    blocks = [layer.name for layer in found if layer.kind == "block"]
    kept = {**long, **short}
    for name, attention in zip(blocks, attentions, strict=False):
        if name in short and name in long and attention is not None and attention.window:
            kept[name] = dataclasses.replace(short[name], long_rows=(attention.window, long[name]))
    return kept


def with_bf16_masters(spec: ModelSpec) -> ModelSpec:
    """The spec of the same model without low halves of masters."""
    homes = []
    for home in spec.homes:
        fields = {id(field): dataclasses.replace(field, is_split=False) for field in home.fields}
        parameters = {key: fields[id(field)] for key, field in home.parameters.items()}
        homes.append(dataclasses.replace(home, fields=list(fields.values()), parameters=parameters))
    formats = dataclasses.replace(spec.formats, master="bf16")
    return dataclasses.replace(spec, homes=tuple(homes), formats=formats)


def with_whole_logits(spec: ModelSpec) -> ModelSpec:
    """The spec of the same model where none are made in pieces."""
    return dataclasses.replace(
        spec, layers=tuple(dataclasses.replace(layer, has_plain_logits=False) for layer in spec.layers)
    )


def _may_tile(module: nn.Module) -> bool:
    """Knows experts by their stacked weights or by their list, as `_products` does."""
    has_experts = any(".experts." in f".{name}" or p.dim() > 2 for name, p in module.named_parameters())
    return not has_experts and not any(isinstance(inside, nn.Dropout) and inside.p > 0 for inside in module.modules())


def text_config(model: nn.Module) -> object:
    """The transformers config of the language model inside, or None."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    if hasattr(config, "allow_global_per_layer_attribute_access"):
        # Layers of several sizes: the config's own values stand for all of them here.
        config = copy.copy(config)
        config.allow_global_per_layer_attribute_access = True
    return config


def active_share(config: object) -> float:
    """Share of the experts that one token goes through."""
    num_active = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        num_experts = getattr(config, name, None)
        if num_active and num_experts:
            return num_active / num_experts
    return 1.0


def attention_layers(config: object) -> list[Attention | None]:
    """For each hidden layer its attention; None for one that has another mixer. Empty if the config does not say."""
    num_heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not num_heads or not hidden:
        return []
    num_layers = getattr(config, "num_hidden_layers", 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    key_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    window = getattr(config, "sliding_window", None)
    one = Attention(
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=None,
    )
    return [
        dataclasses.replace(one, window=window if "sliding" in kind else None)
        if "attention" in kind and "linear" not in kind
        else None
        for kind in kinds
    ]


def _products(layer: FoundLayer, share: float, hidden: int) -> tuple[int, int]:
    """Parameters of a token's matrix products, and the sum of their outputs."""
    if layer.kind == "embedding":
        return 0, 0
    matrix = width = 0.0
    for name, parameter in layer.module.named_parameters():
        if parameter.dim() < 2:
            continue
        is_expert = ".experts." in f".{name}"
        numel = parameter.numel() * (share if is_expert else 1.0)
        matrix += numel
        # Stacked experts are stored either way round: by their size alone.
        width += numel / (hidden if is_expert or parameter.dim() > 2 else parameter.shape[-1])
    return int(matrix), int(width)


def _has_dropout(module: nn.Module) -> bool:
    """As far as attributes tell: a share above zero that is named so."""
    return any(
        "drop" in f"{type(part).__name__.lower()} {name}" and type(value) is float and value > 0
        for part in module.modules()
        for name, value in vars(part).items()
    )


def _width_of(found: list[FoundLayer]) -> int:
    """Of the hidden state of a model without a config: the commonest size of its blocks' matrices."""
    sizes = [
        size
        for layer in found
        if layer.kind == "block"
        for parameter in layer.module.parameters()
        if parameter.dim() >= 2
        for size in parameter.shape[-2:]
    ]
    return max(set(sizes), key=sizes.count, default=1)
