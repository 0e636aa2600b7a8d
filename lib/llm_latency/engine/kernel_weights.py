"""Weights for the kernel: rounded in groups of 32, and laid out in the order in which it reads them."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llm_latency.compat import head_dim
from llm_latency.engine import kernel_library
from llm_latency.engine.attention import rotary_tables
from llm_latency.engine.weights import check_model
from llm_latency.quantization.rounding import check_weight

GROUP = 32
LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight in groups of 32 along the row: q uint8 [out, in], scales FP16 [out, in / 32], minima likewise or None.

    Four bits with a minimum, weight = q * scale + minimum, is GGUF's Q4_1; eight without, weight = (q - 128) * scale,
    its Q8_0. A weight that comes from such a file lies on its grid already and is found on it again, since each group
    holds its own smallest and largest code: rounding loses nothing then, not the last bit.
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that these codes stand for."""
        q = self.q.view(*self.scales.shape, GROUP).float()  # [out, groups, 32]
        if self.minima is None:
            return ((q - 128) * self.scales.float()[..., None]).view_as(self.q)
        return (q * self.scales.float()[..., None] + self.minima.float()[..., None]).view_as(self.q)


def round_weight(weight: Tensor, bits: int) -> Codes:
    """Round a weight [out, in] to 4 or 8 bits in groups of 32; a row that is no multiple is filled up.

    Raises ValueError for other bits, NaN or infinity, and for values beyond FP16's range.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    check_weight(weight)
    weight = weight.detach().float()
    if bool((weight.abs().amax() > LARGEST_HALF).item()):
        raise ValueError(f"a weight of {weight.abs().amax().item():.6g} is beyond FP16, in which scales are kept")
    rest = -weight.shape[1] % GROUP
    if rest:  # by copies of the last column, which do not widen the grid; the activations there are zeros
        weight = torch.cat((weight, weight[:, -1:].expand(-1, rest)), dim=1)
    groups = weight.reshape(weight.shape[0], -1, GROUP)  # [out, groups, 32]
    if bits == 8:
        scales, minima = (groups.abs().amax(dim=2) / 127).half(), None
        offset, low, high = 0.0, -127, 127
    else:
        minima = groups.amin(dim=2).half()
        scales = ((groups.amax(dim=2) - groups.amin(dim=2)) / 15).half()
        offset, low, high = minima.float()[..., None], 0, 15
    divisor = torch.where(scales > 0, scales, 1).float()[..., None]
    q = ((groups - offset) / divisor).round_().clamp_(low, high)  # on the grid as it is stored
    q = (q + 128 if bits == 8 else q).to(torch.uint8)
    return Codes(q.view_as(weight), scales, minima)


def pack(codes: Codes, lanes: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in the order of kernel.cpp's `Matrix`: uint8 and FP16, tiles of `lanes` rows.

    Rows are filled up with zeros to a whole tile.
    """
    rest = -codes.q.shape[0] % lanes
    q, scales = _more_rows(codes.q, rest), _more_rows(codes.scales, rest)
    tiles, groups = q.shape[0] // lanes, scales.shape[1]
    if codes.minima is None:
        # columns of a group: [8 vectors][4 bytes] -> [tiles, groups, 8, lanes, 4]
        q = q.view(tiles, lanes, groups, 8, 4).permute(0, 2, 3, 1, 4)
        return q.contiguous(), scales.view(tiles, lanes, groups).transpose(1, 2).contiguous()
    # columns of a group: [2 nibbles][4 vectors][4 bytes] -> [tiles, groups, 4, lanes, 4]
    q = q.view(tiles, lanes, groups, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)
    both = torch.stack((scales, _more_rows(codes.minima, rest)))  # [2, rows, groups]
    both = both.view(2, tiles, lanes, groups).permute(1, 3, 0, 2)  # [tiles, groups, 2, lanes]
    return q[0] | (q[1] << 4), both.contiguous()


def _more_rows(x: Tensor, count: int) -> Tensor:
    return torch.cat((x, x.new_zeros(count, x.shape[1]))) if count else x


class KernelWeights:
    """Everything that the kernel reads of a model, in one stretch of memory, and the structures that say where.

    struct: `kernel_library.Model`.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.struct = kernel_library.Model()
        self._tensors: list[tuple[ctypes.Structure, str, Tensor]] = []
        self.matrix_bytes = 0

    @classmethod
    def from_model(cls, model: nn.Module, lanes: int, positions: int) -> KernelWeights:
        """Take the weights of a transformers model: layers in 4 bits, the head in 8. Raises ValueError if unfit."""
        check_model(model)
        config, base, head = model.config, model.model, model.lm_head
        self = cls(lanes)
        self._sizes(
            layers=len(base.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            outputs=head.out_features,
            positions=positions,
            eps=config.rms_norm_eps,
        )
        self._embed(base.embed_tokens.weight)
        self._rotations(base.rotary_emb.inv_freq, base.rotary_emb.attention_scaling)
        self._keep_floats(self.struct, "norm", base.norm.weight)
        for into, layer in zip(self._layers, base.layers, strict=True):
            self._keep_floats(into, "attention_norm", layer.input_layernorm.weight)
            self._keep_floats(into, "ffn_norm", layer.post_attention_layernorm.weight)
            attention, ffn = layer.self_attn, layer.mlp
            self._matrix(into.qkv, 4, *map(_parts, (attention.q_proj, attention.k_proj, attention.v_proj)))
            self._matrix(into.output, 4, _parts(attention.o_proj))
            self._matrix(into.gate_up, 4, *map(_parts, (ffn.gate_proj, ffn.up_proj)), alternate=True)
            self._matrix(into.down, 4, _parts(ffn.down_proj))
        self._matrix(self.struct.head, 8, _parts(head))
        self._settle()
        return self

    @classmethod
    def from_feature_layer(
        cls, layer: nn.Module, embedding: Tensor, head: Tensor, lanes: int, positions: int, bits: int
    ) -> KernelWeights:
        """Take a conditioned draft's layer, a `speculative.FeatureLayer`, in 4 or 8 bits, and the target's embedding
        [vocab, hidden] and head rows [v, hidden], these in 8. Raises ValueError if unfit."""
        shape, self = layer.shape, cls(lanes)
        self._sizes(
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            outputs=head.shape[0],
            positions=positions,
            eps=shape.norm_eps,
        )
        self._embed(embedding)
        self._rotations(shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim), 1.0)
        for name, norm in (("norm", layer.out_norm), ("token_norm", layer.token_norm)):
            self._keep_floats(self.struct, name, norm)
        self._keep_floats(self.struct, "feature_norm", layer.feature_norm)
        into = self._layers[0]
        self._keep_floats(into, "attention_norm", layer.attention_norm)
        self._keep_floats(into, "ffn_norm", layer.ffn_norm)
        self._matrix(self.struct.join, bits, _parts(layer.join))
        self._matrix(into.qkv, bits, _parts(layer.qkv))
        self._matrix(into.output, bits, _parts(layer.output))
        self._matrix(into.gate_up, bits, *((half, None) for half in layer.gate_up.weight.chunk(2)), alternate=True)
        self._matrix(into.down, bits, _parts(layer.down))
        self._matrix(self.struct.head, 8, (head, None))
        self._settle()
        return self

    def _sizes(self, **sizes: int | float) -> None:
        if sizes["hidden"] % GROUP:
            raise ValueError(f"the kernel needs a hidden size divisible by {GROUP}; this model has {sizes['hidden']}")
        if sizes["head_dim"] % 16:
            raise ValueError(f"the kernel needs a head_dim divisible by 16; this model has {sizes['head_dim']}")
        for name, size in sizes.items():
            setattr(self.struct, name, size)
        self._layers = (kernel_library.Layer * sizes["layers"])()
        self.struct.layer = ctypes.addressof(self._layers)

    def _embed(self, weight: Tensor) -> None:
        if weight.device.type != "cpu":
            raise ValueError(f"the kernel runs on a CPU; this model is on {weight.device}")
        self.embedding = weight.detach().float().contiguous()  # shared with an FP32 model, not copied
        self.struct.vocab, self.struct.embedding = weight.shape[0], self.embedding.data_ptr()

    def _rotations(self, frequencies: Tensor, scaling: float) -> None:
        cosines, sines = rotary_tables(frequencies, self.struct.positions, scaling)
        self._keep_floats(self.struct, "cosines", cosines)
        self._keep_floats(self.struct, "sines", sines)

    @property
    def step_bytes(self) -> int:
        """Bytes that a pass of one row reads: every matrix, the norms, one row of the embedding."""
        norms = 2 * self.struct.layers + (3 if self.struct.join.rows else 1)
        return self.matrix_bytes + (norms + 1) * 4 * self.struct.hidden

    def _matrix(
        self, into: kernel_library.Matrix, bits: int, *parts: tuple[Tensor, Tensor | None], alternate: bool = False
    ) -> None:
        """Put weights [out, in] with their biases one below the other; `alternate`: a tile of each in turn."""
        weights, biases = ([part[i] for part in parts] for i in range(2))
        if len({bias is None for bias in biases}) > 1:
            raise ValueError("cannot fuse linear layers of which only some have a bias")
        has_bias = biases[0] is not None
        biases = [bias.detach().float()[:, None] for bias in biases] if has_bias else []  # [out, 1] each
        if alternate:  # filled up so that the next matrix finds whole groups; silu(0) * 0 is 0
            rest = -weights[0].shape[0] % GROUP
            weights = [_alternate([_more_rows(w.detach(), rest) for w in weights], self.lanes)]
            biases = [_alternate([_more_rows(b, rest) for b in biases], self.lanes)] if has_bias else []
        codes = round_weight(torch.cat(weights), bits)
        q, scales = pack(codes, self.lanes)
        into.rows, into.columns, into.bits = q.shape[0] * self.lanes, codes.q.shape[1], bits
        self._keep(into, "codes", q)
        self._keep(into, "scales", scales)
        self.matrix_bytes += q.nbytes + scales.nbytes
        if has_bias:
            bias = _more_rows(torch.cat(biases), into.rows - sum(b.shape[0] for b in biases))
            if not torch.isfinite(bias).all():
                raise ValueError("a bias holds NaN or infinity")
            self._keep_floats(into, "bias", bias)
            self.matrix_bytes += bias.nbytes

    def _keep(self, into: ctypes.Structure, field: str, tensor: Tensor) -> None:
        self._tensors.append((into, field, tensor.contiguous()))

    def _keep_floats(self, into: ctypes.Structure, field: str, tensor: Tensor) -> None:
        self._keep(into, field, tensor.detach().float())

    def _settle(self) -> None:
        """Move everything into one stretch of memory, in huge pages where the system gives them: a step reads so many
        pages that looking up their addresses would cost a tenth of its time."""
        places, size = [], 0
        for _, _, tensor in self._tensors:
            places.append(size)
            size += -(-tensor.nbytes // 64) * 64
        self._memory = mmap.mmap(-1, size + (2 << 20))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        arena = torch.frombuffer(self._memory, dtype=torch.uint8)
        for (into, field, tensor), place in zip(self._tensors, places, strict=True):
            view = arena[place : place + tensor.nbytes]
            view.copy_(tensor.reshape(-1).view(torch.uint8))
            setattr(into, field, view.data_ptr())
        self._arena, self._tensors = arena, []


def _parts(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _alternate(parts: list[Tensor], lanes: int) -> Tensor:
    """Two matrices [out, n] as one [2 * out, n]: `lanes` rows of the first, `lanes` of the second, and so on."""
    rows, width = parts[0].shape
    return torch.stack([part.view(rows // lanes, lanes, width) for part in parts], dim=1).reshape(2 * rows, width)
