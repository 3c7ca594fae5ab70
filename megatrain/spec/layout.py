"""Flat layout of a home: where each parameter sits in the bytes that cross the link.

Rule: fields start at pages, in every section: a view of a slot is as aligned as a tensor of its own, and a field on
disk can be read and written alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_ELEMENTS = 2048
"""A page of low halves or of bf16 weights: what lies on disk is read and written by pages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Field:
    """One parameter inside a home. Identity is the object: fields are compared by `is`."""

    name: str
    """The parameter's original qualified name (the first one, when it is tied)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype on the wire: what the device computes with."""

    saved_dtype: torch.dtype
    """Dtype the model was loaded in: what is written when it is saved."""

    is_split: bool
    """The master is fp32 in two halves: `dtype` (bf16) on the wire and 16 low bits at home."""

    offset: int
    """Start, in elements, in every per-element section (low bits)."""

    wire_offset_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def wire_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def padded(numel: int) -> int:
    """Elements that a field of `numel` takes up, gap included."""
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def wire_bytes(fields: list[Field]) -> int:
    """Length of the wire section that holds `fields`."""
    # A field without elements shares its offset with the next one, so the last offset need not be the end.
    return max(field.wire_offset_bytes + field.wire_bytes for field in fields)


def span(tensor: torch.Tensor) -> int | None:
    """Elements of memory from the first to the last one of `tensor`, gaps included. None if two share a place."""
    num_elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < num_elements:
            return None
        num_elements += stride * (size - 1)
    return num_elements


def view_field(wire: torch.Tensor, field: Field) -> torch.Tensor:
    """The field as a tensor of its shape and dtype, viewing `wire` (flat uint8: a slot or a home)."""
    start = field.wire_offset_bytes
    return wire[start : start + field.wire_bytes].view(field.dtype).view(field.shape)


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Which fields of a home get gradients, packed without the others.

    A new one is made when the set of trainable fields changes.
    """

    offsets: dict[Field, int]
    """Start of each trainable field, in elements."""

    numel: int

    @classmethod
    def of(cls, fields: list[Field]) -> GradientLayout:
        offsets, total = {}, 0
        for field in fields:
            offsets[field] = total
            total += padded(field.numel)
        return cls(offsets=offsets, numel=total)

    def flat(self, whole: torch.Tensor, field: Field) -> torch.Tensor:
        """The field's gradient (flat), viewing `whole` of `numel` elements."""
        start = self.offsets[field]
        return whole[start : start + field.numel]

    def view(self, whole: torch.Tensor, field: Field) -> torch.Tensor:
        """As `flat`, in the field's shape."""
        return self.flat(whole, field).view(field.shape)
