"""Answers to the exercises 07, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "quantise": [
        (
            "a least scale that is too large",
            "Is the least scale",
            """
            scales = (x.abs().amax(dim, keepdim=True) / 127).clamp(min=1e-3)
            return (x / scales).round().to(torch.int8), scales
        """,
        ),
        (
            "a little added to each scale",
            "added to every scale",
            """
            scales = x.abs().amax(dim, keepdim=True) / 127 + 1e-6
            return (x / scales).round().to(torch.int8), scales
        """,
        ),
        ("the other dimension", "Is it another dimension", """
            scales = (x.abs().amax(dim=1 - dim, keepdim=True) / 127).clamp(min=1e-12)
            return (x / scales).round().to(torch.int8), scales
        """),
        ("one scale for all", "one scale for all", """
            scales = x.abs().max() / 127
            return (x / scales).round().to(torch.int8), scales
        """),
        ("128", "gets the code 127, not 128", """
            scales = (x.abs().amax(dim=dim, keepdim=True) / 128).clamp(min=1e-12)
            return (x / scales).round().clamp(-128, 127).to(torch.int8), scales
        """),
        ("cut off", "cut off, not rounded", """
            scales = (x.abs().amax(dim=dim, keepdim=True) / 127).clamp(min=1e-12)
            return (x / scales).to(torch.int8), scales
        """),
        ("no abs", "may be negative", """
            scales = (x.amax(dim=dim, keepdim=True) / 127).clamp(min=1e-12)
            return (x / scales).round().clamp(-127, 127).to(torch.int8), scales
        """),
        ("zeros", "0 / 0 is NaN", """
            scales = x.abs().amax(dim=dim, keepdim=True) / 127
            return (x / scales).round().to(torch.int8), scales
        """),
        ("clips", "clips outliers", """
            scales = (3 * x.std(dim=dim, keepdim=True) / 127).clamp(min=1e-12)
            return (x / scales).round().clamp(-127, 127).to(torch.int8), scales
        """),
    ],
    "cache_bytes": [
        ("no scales", "No scale is counted", """
            exact = min(window, tokens)
            old = tokens - exact
            return 4 * exact * channels + 2 * old * channels + 2 * channels * (old % group)
        """),
        ("full groups only", "round the number of groups up", """
            exact = min(window, tokens)
            old = tokens - exact
            scales = 2 * old + 2 * channels * (old // group)
            return 4 * exact * channels + 2 * old * channels + scales + 2 * channels * (old % group)
        """),
        ("no open group", "keys of the open group", """
            exact = min(window, tokens)
            old = tokens - exact
            return 4 * exact * channels + 2 * old * channels + 2 * old + 2 * channels * math.ceil(old / group)
        """),
        ("window beyond the text", "more tokens than there are", """
            old = max(tokens - window, 0)
            scales = 2 * old + 2 * channels * math.ceil(old / group)
            return 4 * window * channels + 2 * old * channels + scales + 2 * channels * (old % group)
        """),
    ],
    "largest_window": [
        ("upwards, to the first misfit", "do not rise steadily", """
            if cache_bytes(tokens, 0, channels, group) > budget:
                return None
            window = 0
            while window < tokens and cache_bytes(tokens, window + 1, channels, group) <= budget:
                window += 1
            return window
        """),
        ("by halving", "do not rise steadily", """
            low, high = -1, tokens
            while low < high:
                middle = (low + high + 1) // 2
                if cache_bytes(tokens, middle, channels, group) <= budget:
                    low = middle
                else:
                    high = middle - 1
            return low if low >= 0 else None
        """),
        ("0 is no answer", "0 is an answer, too", """
            fits = [w for w in range(tokens + 1) if cache_bytes(tokens, w, channels, group) <= budget]
            return (max(fits) or None) if fits else None
        """),
        ("strictly below", "not less", """
            for window in range(tokens, -1, -1):
                if cache_bytes(tokens, window, channels, group) < budget:
                    return window
        """),
        ("0 where nothing fits", "expected None", """
            return max([w for w in range(tokens + 1) if cache_bytes(tokens, w, channels, group) <= budget], default=0)
        """),
    ],
    "append": [
        (
            "minus nothing",
            "x[-0:] is all of x",
            """
            both = torch.cat([cache.exact, x])
            old, cache.exact = both[: -cache.residual], both[-cache.residual :]
            codes, scales = quantise(old, 1)
            cache.codes = torch.cat([cache.codes, codes])
            cache.scales = torch.cat([cache.scales, scales])
        """,
        ),
        ("everything becomes codes", "0 tokens are exact", """
            codes, scales = quantise(x, dim=1)
            cache.codes = torch.cat([cache.codes, codes])
            cache.scales = torch.cat([cache.scales, scales])
        """),
        ("the window never slides", "only those that leave it become codes", """
            cache.exact = torch.cat([cache.exact, x])
        """),
        ("the new ones leave", "the window does not hold exactly the newest", """
            exact = torch.cat([cache.exact, x])
            codes, scales = quantise(exact[cache.residual:], dim=1)
            cache.codes = torch.cat([cache.codes, codes])
            cache.scales = torch.cat([cache.scales, scales])
            cache.exact = exact[:cache.residual]
        """),
        ("one scale for a call", "scale of its own", """
            exact = torch.cat([cache.exact, x])
            leaving = max(len(exact) - cache.residual, 0)
            gone = exact[:leaving]
            scales = torch.full((leaving, 1), float(gone.abs().max()) / 127 if leaving else 0.0)
            cache.codes = torch.cat([cache.codes, (gone / scales).round().to(torch.int8)])
            cache.scales = torch.cat([cache.scales, scales])
            cache.exact = exact[leaving:]
        """),
    ],
    "crop": [
        (
            "wiped in place",
            "wrote into the cache",
            """
            held = len(cache.codes) + len(cache.exact)
            if n < 0 or n > held:
                raise ValueError(n)
            kept = held - n
            exact = max(0, kept - len(cache.codes))
            cache.exact[exact:] = 0
            cache.exact, cache.codes, cache.scales = cache.exact[:exact], cache.codes[:kept], cache.scales[:kept]
        """,
        ),
        ("minus zero", "x[:-0] is x[:0]", """
            if n < 0 or n > len(cache.codes) + len(cache.exact):
                raise ValueError(n)
            deeper = max(n - len(cache.exact), 0)
            cache.exact = cache.exact[:-n]
            cache.codes = cache.codes[: len(cache.codes) - deeper]
            cache.scales = cache.scales[: len(cache.scales) - deeper]
        """),
        ("the window only", "the others are among the codes", """
            if n < 0 or n > len(cache.codes) + len(cache.exact):
                raise ValueError(n)
            cache.exact = cache.exact[: max(len(cache.exact) - n, 0)]
        """),
        ("scales forgotten", "and scales of", """
            old = cache.codes.shape[0]
            kept = old + cache.exact.shape[0] - n
            if n < 0 or kept < 0:
                raise ValueError(n)
            cache.codes = cache.codes[:kept]
            cache.exact = cache.exact[: max(kept - old, 0)]
        """),
        ("the oldest", "the window holds other numbers", """
            if n < 0 or n > len(cache.codes) + len(cache.exact):
                raise ValueError(n)
            deeper = max(n - len(cache.exact), 0)
            cache.exact = cache.exact[n:]
            cache.codes = cache.codes[: len(cache.codes) - deeper]
            cache.scales = cache.scales[: len(cache.scales) - deeper]
        """),
        ("reads back into the window", "A code stays a code", """
            if n < 0 or n > len(cache.read()):
                raise ValueError(n)
            left = cache.read()[: len(cache.read()) - n]
            old = max(len(left) - cache.residual, 0)
            cache.codes, cache.scales = cache.codes[:old], cache.scales[:old]
            cache.exact = left[old:]
        """),
        ("no error", "expected ValueError", """
            old = cache.codes.shape[0]
            kept = max(old + cache.exact.shape[0] - n, 0)
            cache.codes, cache.scales = cache.codes[:kept], cache.scales[:kept]
            cache.exact = cache.exact[: max(kept - old, 0)]
        """),
    ],
    "test_through": [
        ("one chunk", "larger than the first chunk is clipped", """
            x = torch.tensor([[1.0, 0.5, -0.25], [1.0, 0.1, 0.2]])
            assert (program([x]) - x).abs().max() <= 0.51 / 127
        """),
        ("large tokens only", "the small ones vanish", """
            chunks = [torch.ones(2, 3), torch.tensor([[10.0, 0.5, -0.1], [9.0, 0.2, 1.0]])]
            x = torch.cat(chunks)
            assert (program(chunks) - x).abs().max() <= 0.51 * 10 / 127
        """),
        ("wants it exact", "fails on a program that is right", """
            chunks = [torch.ones(2, 3), torch.tensor([[10.0, 0.5, -0.1]])]
            assert torch.equal(program(chunks), torch.cat(chunks))
        """),
    ],
    "mended_through": [
        ("not mended", "steps at a later token", """
            step = chunks[0].abs().amax() / 127
            return torch.cat([(chunk / step).round().clamp(-127, 127) for chunk in chunks]) * step
        """),
        ("a step for all", "steps at a later token", """
            x = torch.cat(chunks)
            step = x.abs().amax() / 127
            return (x / step).round() * step
        """),
        ("no INT8 at all", "has not been through INT8", "return torch.cat(chunks)"),
        ("zeros", "holds NaN", """
            x = torch.cat(chunks)
            step = x.abs().amax(1, keepdim=True) / 127
            return (x / step).round() * step
        """),
    ],
}  # fmt: skip

RIGHT = {
    "quantise": ["""
        top = x.abs().max(dim=dim, keepdim=True).values
        scales = torch.where(top > 0, top / 127, torch.ones_like(top))
        return torch.clamp(torch.round(x / scales), -127, 127).char(), scales
    """],
    "cache_bytes": ["""
        old = max(tokens - window, 0)
        groups, rest = divmod(old, group)
        keys = old * channels + 2 * channels * (groups + (rest > 0)) + 2 * rest * channels
        return keys + old * (channels + 2) + 2 * 2 * channels * (tokens - old)
    """],
    "largest_window": ["""
        fits = [w for w in range(tokens + 1) if cache_bytes(tokens, w, channels, group) <= budget]
        return fits[-1] if fits else None
    """],
    "append": ["""
        for row in x.split(1):
            exact = torch.cat([cache.exact, row])
            if len(exact) > cache.residual:
                codes, scales = quantise(exact[:1], dim=1)
                cache.codes = torch.cat([cache.codes, codes])
                cache.scales = torch.cat([cache.scales, scales])
                exact = exact[1:]
            cache.exact = exact
    """],
    "crop": ["""
        if not 0 <= n <= len(cache.codes) + len(cache.exact):
            raise ValueError(n)
        in_window = min(n, len(cache.exact))
        cache.exact = cache.exact[: len(cache.exact) - in_window]
        deeper = n - in_window
        if deeper:
            cache.codes, cache.scales = cache.codes[:-deeper], cache.scales[:-deeper]
    """],
    "test_through": ["""
        big = torch.tensor([[50.0, 1.0], [0.5, 0.25]])
        found = program([torch.ones(1, 2), big])
        assert abs(found[1, 0] - 50) < 0.1
        assert abs(found[2, 0] - 0.5) < 0.001 and abs(found[2, 1] - 0.25) < 0.0021
    """],
    "mended_through": ["""
        rows = []
        for chunk in chunks:
            for row in chunk:
                top = row.abs().max().item() or 1.0
                rows.append((row * 127 / top).round() * top / 127)
        return torch.stack(rows)
    """],
}  # fmt: skip

# Found by answering the exercises anew
for _cell, _answers in {
    "quantise": [
        (
            "127.5",
            "wrong, most at",
            """
        scales = (x.abs().amax(dim=dim, keepdim=True) / 127.5).clamp(min=1e-12)
        return (x / scales).round().clamp(-127, 127).to(torch.int8), scales
        """,
        ),
        (
            "floor",
            "The codes are rounded down, not to the nearest.",
            """
        scales = (x.abs().amax(dim=dim, keepdim=True) / 127).clamp(min=1e-12)
        return (x / scales).floor().to(torch.int8), scales
        """,
        ),
        (
            "upside down",
            "a scale is what one step of the code is worth.",
            """
        scales = 127 / x.abs().amax(dim=dim, keepdim=True).clamp(min=1e-12)
        return (x * scales).round().to(torch.int8), scales
        """,
        ),
    ],
    "cache_bytes": [
        (
            "values at two bytes",
            "scales are not counted.",
            """
        exact = min(window, tokens)
        old = tokens - exact
        keys = 2 * channels * (math.ceil(old / group) + old % group)
        return 4 * exact * channels + 2 * old * channels + keys
        """,
        ),
        (
            "exact keys only",
            "An exact number takes",
            """
        exact = min(window, tokens)
        old = tokens - exact
        keys = 2 * channels * (math.ceil(old / group) + old % group)
        return 2 * exact * channels + 2 * old * channels + 2 * old + keys
        """,
        ),
    ],
    "largest_window": [
        (
            "up to the first misfit",
            "Does the search stop at the first that does not fit? The bytes do not",
            """
        best = None
        for window in range(tokens + 1):
            if cache_bytes(tokens, window, channels, group) > budget:
                break
            best = window
        return best
        """,
        ),
        (
            "the smallest",
            ", and is the smallest that does",
            """
        for window in range(tokens + 1):
            if cache_bytes(tokens, window, channels, group) <= budget:
                return window
        """,
        ),
    ],
    "crop": [
        (
            "one too many",
            "tokens are held, and all may be forgotten",
            """
        old = cache.codes.shape[0]
        kept = old + cache.exact.shape[0] - n
        if n < 0 or kept <= 0:
            raise ValueError("too many")
        cache.codes, cache.scales = cache.codes[:kept], cache.scales[:kept]
        cache.exact = cache.exact[: max(kept - old, 0)]
        """,
        ),
    ],
    "append": [
        (
            "the scale of the window",
            "Does each token have a scale of its own, and are old tokens in order?",
            """
        exact = torch.cat([cache.exact, x])
        leaving = max(exact.shape[0] - cache.residual, 0)
        codes, scales = quantise(exact, dim=0)
        cache.codes = torch.cat([cache.codes, codes[:leaving]])
        cache.scales = torch.cat([cache.scales, scales.amax(1, keepdim=True).expand(leaving, 1)])
        cache.exact = exact[leaving:]
        """,
        ),
    ],
    "mended_through": [
        (
            "exact",
            "the mended result is no whole multiple of the steps",
            """
        return torch.cat(chunks)
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "quantise": [
        """
        biggest, _ = x.abs().max(dim=dim, keepdim=True)
        scales = torch.where(biggest > 0, biggest / 127, torch.ones_like(biggest))
        return torch.clamp(torch.round(x / scales), -127, 127).char(), scales
        """,
    ],
    "largest_window": [
        """
        return max((w for w in range(tokens + 1) if cache_bytes(tokens, w, channels, group) <= budget), default=None)
        """,
    ],
    "crop": [
        """
        exact, codes = len(cache.exact), len(cache.codes)
        if not 0 <= n <= exact + codes:
            raise ValueError(n)
        deep = max(0, n - exact)
        cache.exact = cache.exact[: exact - min(n, exact)]
        cache.codes, cache.scales = cache.codes[: codes - deep], cache.scales[: codes - deep]
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
