"""Answers to the exercises 08, by cell: (the mistake, a part of the message, the lines between the markers)."""

GRID = """
    blocks = weight.unflatten(1, (-1, group))
    low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
    scale, low = ((high - low) / 15).clamp(min=1e-12).bfloat16(), low.bfloat16()
"""
COUNT = """
    heads = 2 * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
    weights = shape["layers"] * shape["hidden"] * (heads + 3 * shape["inner"])
    per_weight = bits / 8 + (4 / group if group else 0)
    head = 2 * shape["vocab"] * shape["hidden"]
    cache = 2 * 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context
    return weights * per_weight + head + cache
"""

WRONG = {
    "pack": [
        ("low half first", "the even column belongs in the high half", """
            if codes.shape[1] % 2:
                raise ValueError(codes.shape)
            return codes[:, ::2] | codes[:, 1::2] << 4
        """),
        ("left and right half", "Neighbours share a byte", """
            left, right = codes.chunk(2, dim=1)
            return left << 4 | right
        """),
        ("added", "moved up by 4 bits", "return codes[:, ::2] + codes[:, 1::2]"),
        ("along the rows", "two codes of a row", """
            rows = codes[: len(codes) // 2 * 2]
            return rows[::2] << 4 | rows[1::2]
        """),
        ("no bytes", "expected torch.uint8", "return codes[:, ::2].int() * 16 + codes[:, 1::2]"),
        ("drops the odd column", "expected ValueError", """
            even = codes.shape[1] // 2 * 2
            return codes[:, :even:2] << 4 | codes[:, 1:even:2]
        """),
    ],
    "unpack": [
        ("side by side", "all high halves come first", "return torch.cat([packed >> 4, packed & 15], dim=1)"),
        ("swapped", "the high half is the even column",
         "return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)"),
        ("not masked", "mask it off", "return torch.stack((packed >> 4, packed), dim=2).flatten(1)"),
        ("signed", "The sign bit came along", """
            signed = packed.view(torch.int8)
            return torch.stack((signed >> 4, signed & 15), dim=2).flatten(1).view(torch.uint8)
        """),
    ],
    "test_round": [
        ("weights around zero, a wide margin", "chosen before scale and low are rounded", """
            weight = torch.linspace(-1, 1, 32).reshape(1, 32)
            codes, scales, lows = program(weight, 8)
            read = codes * scales.float().repeat_interleave(8, 1) + lows.float().repeat_interleave(8, 1)
            assert (read - weight).abs().max() < 0.05
        """),
        ("half a step", "fails on a program that is right", """
            weight = 1 + torch.linspace(0, 0.3, 64).reshape(2, 32)
            codes, scales, lows = program(weight, 8)
            scale = scales.float().repeat_interleave(8, 1)
            read = codes * scale + lows.float().repeat_interleave(8, 1)
            assert ((read - weight).abs() <= 0.51 * scale).all()
        """),
        ("shapes only", "passes on a broken program", """
            codes, scales, lows = program(torch.ones(2, 32), 8)
            assert codes.shape == (2, 32) and scales.shape == lows.shape == (2, 4)
        """),
    ],
    "mended_round": [
        ("not mended", "the nearest stored point", """
            blocks = weight.unflatten(1, (-1, group))
            low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
            scale = ((high - low) / 15).clamp(min=1e-12)
            codes = ((blocks - low) / scale).round().to(torch.uint8)
            return codes.flatten(1), scale.squeeze(2).bfloat16(), low.squeeze(2).bfloat16()
        """),
        ("no clamp", "needs a clamp", GRID + """
    codes = ((blocks - low.float()) / scale.float()).round().to(torch.int16).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2), low.squeeze(2)
        """),
        ("the grid kept in FP32", "expected torch.bfloat16", """
            blocks = weight.unflatten(1, (-1, group))
            low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
            scale = ((high - low) / 15).clamp(min=1e-12)
            codes = ((blocks - low) / scale).round().to(torch.uint8)
            return codes.flatten(1), scale.squeeze(2), low.squeeze(2)
        """),
        ("cut off", "or cut off", GRID + """
    codes = ((blocks - low.float()) / scale.float()).clamp(0, 15).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2), low.squeeze(2)
        """),
    ],
    "choose_group": [
        (
            "divides the matrix",
            "does not divide the row width",
            """
            for group in sorted(sizes, reverse=True):
                if weight.numel() % group == 0 and loss_of(weight, group) <= budget:
                    return group, 4 + 32 / group
            return None
        """,
        ),
        ("upwards, to the first failure", "is None, but 32 keeps it", """
            best = None
            for group in sorted(s for s in sizes if weight.shape[1] % s == 0):
                if loss_of(weight, group) > budget:
                    break
                best = group, 4 + 32 / group
            return best
        """),
        ("the least loss", "with fewer bytes", """
            fits = [s for s in sizes if weight.shape[1] % s == 0 and loss_of(weight, s) <= budget]
            group = min(fits, key=lambda s: loss_of(weight, s), default=None)
            return group and (group, 4 + 32 / group)
        """),
        ("no scales", "Scale and zero of each block are not counted", """
            fits = [s for s in sizes if weight.shape[1] % s == 0 and loss_of(weight, s) <= budget]
            return (max(fits), 4) if fits else None
        """),
        ("one number a block", "has two numbers", """
            fits = [s for s in sizes if weight.shape[1] % s == 0 and loss_of(weight, s) <= budget]
            return (max(fits), 4 + 16 / max(fits)) if fits else None
        """),
        ("sizes that do not divide", "ValueError", """
            for group in sorted(sizes, reverse=True):
                if loss_of(weight, group) <= budget:
                    return group, 4 + 32 / group
        """),
        ("always an answer", "expected None", """
            fits = [s for s in sizes if weight.shape[1] % s == 0 and loss_of(weight, s) <= budget]
            group = max(fits, default=16)
            return group, 4 + 32 / group
        """),
    ],
    "step_bytes": [
        (
            "scales at four bits only",
            "Scales and zeros are not counted",
            """
            attention = 2 * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
            weights = shape["layers"] * shape["hidden"] * (attention + 3 * shape["inner"])
            each = bits / 8 + (4 / group if bits == 4 else 0)
            cache = 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context
            return weights * each + 2 * shape["vocab"] * shape["hidden"] + cache
        """,
        ),
        ("no scales", "Scales and zeros are not counted", COUNT.replace("(4 / group if group else 0)", "0")),
        ("bits as bytes", "Are bits taken for bytes", COUNT.replace("bits / 8 + (4 / group if group else 0)", "bits")),
        ("the head in four bits", "The head is kept in 16 bits", COUNT.replace(
            "weights * per_weight + head", "(weights + head / 2) * per_weight")),
        ("the embedding as well", "looks up one row", COUNT.replace("per_weight + head", "per_weight + 2 * head")),
        ("no cache", "The cache is not counted", COUNT.replace(" + cache", "")),
        ("keys only", "The cache holds keys and values", COUNT.replace("cache = 2 * 2 *", "cache = 2 *")),
        ("all heads alike", "K and V have kv_heads heads", COUNT.replace(
            '2 * (shape["heads"] + shape["kv_heads"])', '4 * shape["heads"]')),
        ("two matrices in the MLP", "three matrices", COUNT.replace("3 * shape", "2 * shape")),
    ],
    "tokens_per_second": [
        ("no fixed part", "fixed_ms, is left out", "return gbps * 1e9 / nbytes"),
        ("ms and seconds", "added to seconds", "return 1 / (fixed_ms + nbytes / (gbps * 1e9))"),
        ("a time", "not a rate", "return fixed_ms + nbytes / (gbps * 1e6)"),
        ("the slower of the two", "they add up", "return 1e3 / max(fixed_ms, nbytes / (gbps * 1e6))"),
    ],
}  # fmt: skip

RIGHT = {
    "pack": [
        """
        if codes.shape[1] % 2 == 1:
            raise ValueError("odd")
        pairs = codes.unflatten(1, (-1, 2))
        return pairs[..., 0] * 16 + pairs[..., 1]
    """
    ],
    "unpack": [
        """
        codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8)
        codes[:, ::2], codes[:, 1::2] = packed // 16, packed % 16
        return codes
    """
    ],
    "test_round": [
        """
        weight = 3.01 + torch.arange(16.0).reshape(1, 16) / 1000
        codes, scales, lows = program(weight, 16)
        assert codes.max() < 16
        points = torch.arange(16) * scales.float() + lows.float()
        for w, code in zip(weight[0], codes[0].long()):
            assert abs(points[0, code] - w) <= (points[0] - w).abs().min() + 1e-6
        weight = torch.tensor([[0.0, 15.0, 0.9, 1.1]])
        assert program(weight, 4)[0].tolist() == [[0, 15, 1, 1]]
    """
    ],
    "mended_round": [
        GRID
        + """
    points = torch.arange(16) * scale.float() + low.float()
    codes = (blocks[..., None] - points[:, :, None]).abs().argmin(dim=-1)
    return codes.flatten(1).to(torch.uint8), scale.squeeze(2), low.squeeze(2)
    """
    ],
    "choose_group": [
        """
        fits = [s for s in sizes if weight.shape[1] % s == 0 and loss_of(weight, s) <= budget]
        return (max(fits), 4 + 2 * 16 / max(fits)) if fits else None
    """
    ],
    "step_bytes": [
        """
            attention = 2 * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
            weights = shape["layers"] * shape["hidden"] * (attention + 3 * shape["inner"])
            blocks = 0 if group is None else weights // group
            cache = 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context
            return weights * bits // 8 + 4 * blocks + 2 * shape["vocab"] * shape["hidden"] + cache
        """,
        """
        total = 0
        for name in ("heads", "kv_heads", "kv_heads", "heads"):
            total += shape["hidden"] * shape[name] * shape["head_dim"]
        total += 3 * shape["hidden"] * shape["inner"]
        total *= shape["layers"]
        weights = total * 2 if bits == 16 else total * bits / 8 + total / group * 4
        kv = context * shape["layers"] * 2 * shape["kv_heads"] * shape["head_dim"] * 2
        return weights + shape["vocab"] * shape["hidden"] * 2 + kv
    """,
    ],
    "tokens_per_second": ["return 1 / (fixed_ms / 1000 + nbytes / 1e9 / gbps)"],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "pack": [
        (
            "times 15",
            "the packed weight",
            """
        if codes.shape[1] % 2:
            raise ValueError("odd")
        return codes[:, ::2] * 15 + codes[:, 1::2]
        """,
        ),
        (
            "odd columns high",
            "the even column belongs in the high half of the byte.",
            """
        if codes.shape[1] % 2:
            raise ValueError("odd")
        return codes[:, 1::2] << 4 | codes[:, ::2]
        """,
        ),
    ],
    "unpack": [
        (
            "one row after the other",
            "the unpacked codes",
            """
        return torch.stack((packed >> 4, packed & 15), dim=0).flatten(0, 1)
        """,
        ),
    ],
    "mended_round": [
        (
            "no clamp",
            "A weight just outside the rounded grid needs a clamp",
            """
        blocks = weight.unflatten(1, (-1, group))
        low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
        scale, low = ((high - low) / 15).clamp(min=1e-12).bfloat16(), low.bfloat16()
        codes = ((blocks - low.float()) / scale.float()).round().to(torch.int16).to(torch.uint8)
        return codes.flatten(1), scale.squeeze(2), low.squeeze(2)
        """,
        ),
        (
            "sixteen steps",
            "Sixteen points have fifteen steps between them.",
            """
        blocks = weight.unflatten(1, (-1, group))
        low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
        scale, low = ((high - low) / 16).clamp(min=1e-12).bfloat16(), low.bfloat16()
        codes = ((blocks - low.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
        return codes.flatten(1), scale.squeeze(2), low.squeeze(2)
        """,
        ),
    ],
    "choose_group": [
        (
            "whole bits",
            "`//` cuts the fraction off.",
            """
        for group in sorted(sizes, reverse=True):
            if weight.shape[1] % group == 0 and loss_of(weight, group) <= budget:
                return group, 4 + 32 // group
        """,
        ),
        (
            "below the budget",
            "is exactly the budget, and so keeps it",
            """
        for group in sorted(sizes, reverse=True):
            if weight.shape[1] % group == 0 and loss_of(weight, group) < budget:
                return group, 4 + 32 / group
        """,
        ),
        (
            "bytes",
            "bits each for scale and zero.",
            """
        for group in sorted(sizes, reverse=True):
            if weight.shape[1] % group == 0 and loss_of(weight, group) <= budget:
                return group, 4 + 4 / group
        """,
        ),
    ],
    "step_bytes": [
        (
            "KV heads everywhere",
            "Q and O have `heads` heads.",
            """
        heads = 4 * shape["kv_heads"] * shape["head_dim"]
        weights = shape["layers"] * shape["hidden"] * (heads + 3 * shape["inner"])
        per_weight = bits / 8 + (4 / group if group else 0)
        cache = 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context
        return weights * per_weight + 2 * shape["vocab"] * shape["hidden"] + cache
        """,
        ),
    ],
    "tokens_per_second": [
        (
            "GiB",
            "the tokens per second",
            """
        return 1 / (fixed_ms / 1e3 + nbytes / (gbps * 2**30))
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "step_bytes": [
        """
        heads = 2 * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
        weights = shape["layers"] * shape["hidden"] * (heads + 3 * shape["inner"])
        total = weights * bits / 8 + (4 * weights / group if group else 0) + 2 * shape["vocab"] * shape["hidden"]
        return int(total + 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context)
        """,
    ],
    "pack": [
        """
        out, width = codes.shape
        if width % 2 == 1:
            raise ValueError("no pairs")
        pairs = codes.reshape(out, width // 2, 2).int()
        return (pairs[..., 0] * 16 + pairs[..., 1]).to(torch.uint8)
        """,
    ],
    "choose_group": [
        """
        fitting = [g for g in sizes if weight.shape[1] % g == 0 and loss_of(weight, g) <= budget]
        return None if not fitting else (max(fitting), 4 + (16 + 16) / max(fitting))
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
