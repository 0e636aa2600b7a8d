"""Answers to the exercises 05, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "mean_loss": [
        (
            "one sum in BF16",
            "The sum of the chunks was kept in BF16",
            """
            total = sum(chunk.sum() for chunk in chunks)
            return total.item() / sum(len(chunk) for chunk in chunks)
        """,
        ),
        (
            "one value after the other",
            "stood still",
            """
            total = torch.zeros((), dtype=torch.bfloat16)
            for chunk in chunks:
                for value in chunk:
                    total = total + value
            return total.item() / sum(len(chunk) for chunk in chunks)
        """,
        ),
        ("a tensor in BF16", "BF16", "return torch.cat(chunks).mean()"),
        (
            "chunk sums in BF16",
            "BF16",
            """
            return sum(chunk.sum().item() for chunk in chunks) / sum(len(chunk) for chunk in chunks)
        """,
        ),
        (
            "mean of means",
            "a mean of means",
            """
            return sum(chunk.float().mean().item() for chunk in chunks) / len(chunks)
        """,
        ),
        (
            "over the chunks",
            "divide by the number of tokens",
            """
            return sum(chunk.float().sum().item() for chunk in chunks) / len(chunks)
        """,
        ),
        (
            "a running mean in BF16",
            "BF16",
            """
            mean, count = torch.zeros((), dtype=torch.bfloat16), 0
            for chunk in chunks:
                count += len(chunk)
                mean = mean + (chunk.mean() - mean) * len(chunk) / count
            return mean.item()
        """,
        ),
    ],
    "rms_norm": [
        (
            "all in the input's dtype",
            "the square overflows",
            """
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
        """,
        ),
        (
            "only the square is wide",
            "its scale itself was rounded to",
            """
            scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)
            return x * scale * weight
        """,
        ),
        (
            "stays wide",
            "the input's was asked for",
            """
            wide = x.float()
            return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        """,
        ),
        (
            "no eps",
            "eps belongs under the root",
            """
            wide = x.float()
            return (wide / wide.pow(2).mean(-1, keepdim=True).sqrt() * weight.float()).to(x.dtype)
        """,
        ),
        (
            "eps behind the root",
            "not outside it",
            """
            wide = x.float()
            return (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)
        """,
        ),
        (
            "an eps of its own",
            "Is eps another one",
            """
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)
        """,
        ),
        (
            "no weight",
            "Is the weight left out?",
            """
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        """,
        ),
        (
            "the sum",
            "not their sum",
            """
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
        """,
        ),
        (
            "one mean for all",
            "of every row alone",
            """
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean() + eps) * weight.float()).to(x.dtype)
        """,
        ),
        (
            "a layer norm",
            "does not subtract the mean",
            """
            wide = x.float() - x.float().mean(-1, keepdim=True)
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
        """,
        ),
    ],
    "count_graphs": [
        (
            "compiled for each input",
            "compiled anew for each input",
            """
            counts, graphs = [], []
            for x in inputs:
                torch._dynamo.reset()
                compiled = torch.compile(fn, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=dynamic)
                compiled(x)
                counts.append(len(graphs))
            return counts
        """,
        ),
        (
            "different shapes",
            "Those are different shapes",
            """
            torch._dynamo.reset()
            return [len({x.shape for x in inputs[: i + 1]}) for i in range(len(inputs))]
        """,
        ),
        (
            "rules instead of counting",
            "the counts are",
            """
            counts = [len({x.shape for x in inputs[: i + 1]}) for i in range(len(inputs))]
            return [min(n, {None: 2, True: 1, False: n}[dynamic]) for n in counts]
        """,
        ),
        (
            "new ones",
            "those so far were asked for",
            """
            torch._dynamo.reset()
            graphs, counts = [], []
            compiled = torch.compile(fn, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=dynamic)
            for x in inputs:
                compiled(x)
                counts.append(len(graphs))
                graphs.clear()
            return counts
        """,
        ),
        (
            "dynamic forgotten",
            "Is `dynamic` handed on",
            """
            torch._dynamo.reset()
            graphs, counts = [], []
            compiled = torch.compile(fn, backend=lambda g, _: graphs.append(g) or g.forward)
            for x in inputs:
                compiled(x)
                counts.append(len(graphs))
            return counts
        """,
        ),
        (
            "no reset",
            "reset at the start of every count",
            """
            graphs, counts = [], []
            compiled = torch.compile(fn, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=dynamic)
            for x in inputs:
                compiled(x)
                counts.append(len(graphs))
            return counts
        """,
        ),
        (
            "the last count",
            "expected list or tuple",
            """
            torch._dynamo.reset()
            graphs = []
            compiled = torch.compile(fn, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=dynamic)
            for x in inputs:
                compiled(x)
            return len(graphs)
        """,
        ),
    ],
    "choose_buckets": [
        (
            "squares",
            "padding squared",
            """
            different = sorted(set(lengths))

            def padding(buckets):
                return sum((lambda bucket: (bucket - n) ** 2)(min(b for b in buckets if b >= n)) for n in lengths)

            choices = itertools.combinations(different[:-1], min(graphs, len(different)) - 1)
            return list(min(((*choice, different[-1]) for choice in choices), key=padding))
        """,
        ),
        (
            "shares of the lengths",
            "taken as a share of its length",
            """
            different = sorted(set(lengths))

            def padding(buckets):
                return sum((lambda bucket: bucket / n)(min(b for b in buckets if b >= n)) for n in lengths)

            choices = itertools.combinations(different[:-1], min(graphs, len(different)) - 1)
            return list(min(((*choice, different[-1]) for choice in choices), key=padding))
        """,
        ),
        (
            "even steps",
            "Are the buckets evenly spaced?",
            """
            return [-(-max(lengths) * i // graphs) for i in range(1, graphs + 1)]
        """,
        ),
        (
            "as many prompts in each",
            "is not as little padding",
            """
            ordered = sorted(lengths)
            return [ordered[-(-len(ordered) * i // graphs) - 1] for i in range(1, graphs + 1)]
        """,
        ),
        (
            "each length once",
            "How often does each length come?",
            """
            def padding(buckets):
                return sum(min(b for b in buckets if b >= n) - n for n in set(lengths))

            *others, longest = sorted(set(lengths))
            choices = itertools.combinations(others, min(graphs - 1, len(others)))
            return list(min(((*choice, longest) for choice in choices), key=padding))
        """,
        ),
        (
            "the longest forgotten",
            "fits into no bucket",
            """
            often = sorted(set(lengths) - {max(lengths)}, key=lengths.count)
            return often[-graphs:]
        """,
        ),
        (
            "the most frequent",
            "do not decide",
            """
            different = sorted(set(lengths))
            often = [n for n in sorted(different, key=lengths.count, reverse=True) if n != different[-1]]
            return [*often[: graphs - 1], max(lengths)]
        """,
        ),
        ("one for every length", "are more graphs than that", "return sorted(set(lengths))"),
        ("one for all", "Is only one bucket used?", "return [max(lengths)]"),
    ],
}

RIGHT = {
    "mean_loss": ["return torch.cat(chunks).double().mean()"],
    "rms_norm": [
        """
        wide = x.to(torch.float64)
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        return (wide / (root + eps).sqrt()).to(x.dtype) * weight  # rounded before the weight, as in transformers
    """
    ],
    "count_graphs": [
        """
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(fn, backend="eager", dynamic=dynamic)
        counts = []
        for x in inputs:
            compiled(x)
            counts.append(counters["stats"]["unique_graphs"])
        return counts
    """
    ],
    "choose_buckets": [
        """
        different = sorted(set(lengths))
        best = {(0, 0): (0, ())}  # (lengths covered, buckets used): padding, buckets
        for used in range(1, graphs + 1):
            for end in range(1, len(different) + 1):
                options = []
                for start in range(end):
                    if (start, used - 1) in best:
                        padding, buckets = best[start, used - 1]
                        bucket = different[end - 1]
                        padding += sum(bucket - n for n in lengths if different[start] <= n <= bucket)
                        options.append((padding, (*buckets, bucket)))
                if options:
                    best[end, used] = min(options)
        return min(value for (end, _), value in best.items() if end == len(different))[1]
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "mean_loss": [
        (
            "rounded",
            "five digits were asked for.",
            """
        total = sum(chunk.double().sum().item() for chunk in chunks)
        return round(total / sum(len(chunk) for chunk in chunks), 2)
        """,
        ),
        (
            "a median",
            "; expected 2.",
            """
        return torch.cat(chunks).float().median()
        """,
        ),
        (
            "the sum",
            "the mean was asked for.",
            """
        return torch.cat(chunks).float().sum()
        """,
        ),
    ],
    "rms_norm": [
        (
            "the root rounded",
            "Square, mean and root belong into FP",
            """
        wide = x.float()
        root = (wide.square().mean(-1, keepdim=True) + eps).sqrt().to(x.dtype)
        return x / root * weight
        """,
        ),
        (
            "over the rows",
            "The mean is over the last dimension, not over the rows.",
            """
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(0, keepdim=True) + eps) * weight.float()).to(x.dtype)
        """,
        ),
        (
            "no root",
            "Is the root left out?",
            """
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
        """,
        ),
    ],
    "choose_buckets": [
        (
            "one more at a time",
            "Are buckets added one by one? The best set need not hold the best smal",
            """
        def padding(buckets):
            return sum(min(b for b in buckets if b >= n) - n for n in lengths)

        buckets = [max(lengths)]
        while len(buckets) < graphs:
            left = set(lengths) - set(buckets)
            if not left:
                break
            buckets.append(min(sorted(left), key=lambda n: padding([*buckets, n])))
        return buckets
        """,
        ),
        (
            "one fewer at a time",
            "Are buckets given up one by one? The best set need not lie in the best",
            """
        def padding(buckets):
            return sum(min(b for b in buckets if b >= n) - n for n in lengths)

        buckets = sorted(set(lengths))
        while len(buckets) > graphs:
            gone = min(buckets[:-1], key=lambda n: padding([b for b in buckets if b != n]))
            buckets.remove(gone)
        return buckets
        """,
        ),
        (
            "the longest ones",
            "the many short prompts are padded most.",
            """
        return sorted(set(lengths))[-graphs:]
        """,
        ),
    ],
    "count_graphs": [
        (
            "counts calls",
            "are calls counted, or is it compiled anew for each input?",
            """
        return list(range(1, len(inputs) + 1))
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "mean_loss": [
        """
        import numpy as np

        return np.concatenate([chunk.float().numpy() for chunk in chunks]).astype(np.float64).mean()
        """,
    ],
    "rms_norm": [
        """
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
        """,
        """
        hidden = x.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
        return weight * hidden.to(x.dtype)
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
