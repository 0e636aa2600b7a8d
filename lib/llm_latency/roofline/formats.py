"""How many bytes a stored number takes, its share of the scales included."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How the values of a matrix row (of weights) or of one head's vector (in a cache) are stored.

    bits: of one value. group_size: values of a row that share a scale; 0 means the whole row shares one.
    group_bytes: bytes of what a group shares: 0 for floating point, 2 for a scale, 4 for a scale and a zero point in
    16 bits each. compute: the dtype in which products of such values are computed.
    """

    name: str
    bits: int
    group_size: int = 0
    group_bytes: int = 0
    compute: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise ValueError(f"bits={self.bits!r}: expected 4, 8, 16 or 32")
        if self.group_size < 0 or self.group_bytes < 0:
            raise ValueError(f"group_size={self.group_size} and group_bytes={self.group_bytes} must not be negative")

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of `rows` rows of `columns` values. Groups lie along a row; a last, shorter one has its own scale."""
        if rows < 0 or columns < 0:
            raise ValueError(f"a matrix of {rows} rows and {columns} columns: sizes must not be negative")
        groups = -(-columns // (self.group_size or columns)) if columns else 0
        return rows * (-(-columns * self.bits // 8) + groups * self.group_bytes)


# INT8: one 16-bit scale for each row (output channel, or token and head). INT4: 16-bit scale and zero point for every
# 32 values, the layout of `torch.ops.aten._weight_int4pack_mm_for_cpu`. Both are unpacked and multiplied in BF16.
FORMATS: dict[str, NumberFormat] = {
    "float32": NumberFormat("float32", 32, compute="float32"),
    "bfloat16": NumberFormat("bfloat16", 16, compute="bfloat16"),
    "float16": NumberFormat("float16", 16, compute="float16"),
    "int8": NumberFormat("int8", 8, group_bytes=2),
    "int4": NumberFormat("int4", 4, group_size=32, group_bytes=4),
}


def number_format(dtype: str | NumberFormat) -> NumberFormat:
    """A format by its dtype's name, or the format itself where one is given. Raises ValueError for an unknown name."""
    if isinstance(dtype, NumberFormat):
        return dtype
    if dtype not in FORMATS:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(FORMATS)} or a NumberFormat")
    return FORMATS[dtype]
