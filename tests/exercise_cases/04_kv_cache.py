"""Answers to the exercises 04, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "tokens_read": [
        ("the prompt again and again", "The text grows", "return new * prompt, prompt + new - 1"),
        (
            "from the first new token on",
            "the last token is read by nobody",
            """
            return sum(prompt + done for done in range(1, new + 1)), prompt + new - 1
        """,
        ),
        (
            "without the prefill",
            "the prefill",
            """
            return sum(prompt + done for done in range(1, new)), prompt + new - 1
        """,
        ),
        ("the last pass alone", "all passes were asked for", "return prompt + new - 1, prompt + new - 1"),
        (
            "the last token is read",
            "nothing comes after it",
            """
            return sum(prompt + done for done in range(new)), prompt + new
        """,
        ),
        (
            "the prompt forgotten",
            "The prompt must be read, too, once",
            """
            return sum(prompt + done for done in range(new)), new
        """,
        ),
        ("one number", "expected list or tuple", "return sum(prompt + done for done in range(new))"),
    ],
    "kv_cache": [
        (
            "all written anew",
            "what is stored is copied at every step",
            """
            end = self.tokens + k.shape[2]
            if end > self.keys.shape[2]:
                raise ValueError("full")
            self.keys[:, :, :end] = torch.cat([self.keys[:, :, : self.tokens], k], 2)
            self.values[:, :, :end] = torch.cat([self.values[:, :, : self.tokens], v], 2)
            self.tokens = end
            return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
        (
            "grows",
            "is another buffer than at the start",
            """
            if self.tokens + k.shape[2] > self.keys.shape[2]:
                raise ValueError("full")
            self.keys = torch.cat([self.keys[:, :, : self.tokens], k], dim=2)
            self.values = torch.cat([self.values[:, :, : self.tokens], v], dim=2)
            self.tokens = self.keys.shape[2]
            return self.keys, self.values
        """,
        ),
        (
            "the whole buffer",
            "the whole buffer, empty slots too",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens = end
            return self.keys, self.values
        """,
        ),
        (
            "only the new ones",
            "the new tokens' alone",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens = end
            return k, v
        """,
        ),
        (
            "over the first ones",
            "written over the first ones",
            """
            new = k.shape[2]
            self.keys[:, :, :new] = k
            self.values[:, :, :new] = v
            self.tokens += new
            return self.keys[:, :, : self.tokens], self.values[:, :, : self.tokens]
        """,
        ),
        (
            "not advanced",
            "advance it by the new ones",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
        (
            "advanced by one",
            "advance it by the new ones",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens += 1
            return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
        (
            "copies",
            "are a copy of what is stored",
            """
            end = self.tokens + k.shape[2]
            if end > self.keys.shape[2]:
                raise ValueError("full")
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens = end
            return self.keys[:, :, :end].clone(), self.values[:, :, :end].clone()
        """,
        ),
        (
            "changed places",
            "changed places",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens = end
            return self.values[:, :, :end], self.keys[:, :, :end]
        """,
        ),
        (
            "overflows unseen",
            "one more token does not fit",
            """
            end = self.tokens + k.shape[2]
            self.keys[:, :, self.tokens : end] = k[:, :, : self.keys.shape[2] - self.tokens]
            self.values[:, :, self.tokens : end] = v[:, :, : self.keys.shape[2] - self.tokens]
            self.tokens = min(end, self.keys.shape[2])
            return self.keys[:, :, : self.tokens], self.values[:, :, : self.tokens]
        """,
        ),
        (
            "full one token early",
            "the tokens fit exactly",
            """
            end = self.tokens + k.shape[2]
            if end >= self.keys.shape[2]:
                raise ValueError("full")
            self.keys[:, :, self.tokens : end] = k
            self.values[:, :, self.tokens : end] = v
            self.tokens = end
            return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
        (
            "counts before it checks",
            "Check before you change anything",
            """
            begin, self.tokens = self.tokens, self.tokens + k.shape[2]
            if self.tokens > self.keys.shape[2]:
                raise ValueError("full")
            self.keys[:, :, begin : self.tokens] = k
            self.values[:, :, begin : self.tokens] = v
            return self.keys[:, :, : self.tokens], self.values[:, :, : self.tokens]
        """,
        ),
        (
            "writes what fits, then complains",
            "Check before you write anything",
            """
            end, room = self.tokens + k.shape[2], self.keys.shape[2] - self.tokens
            self.keys[:, :, self.tokens : end] = k[:, :, :room]
            self.values[:, :, self.tokens : end] = v[:, :, :room]
            if end > self.keys.shape[2]:
                raise ValueError("full")
            self.tokens = end
            return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
    ],
    "cache_bytes": [
        (
            "keys only",
            "the factor 2 is missing",
            """
            c = config
            return c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * tokens * bytes_per_number
        """,
        ),
        (
            "query heads",
            "Query heads are not stored",
            """
            c = config
            return 2 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"] * tokens * bytes_per_number
        """,
        ),
        (
            "the hidden size",
            "Is it the hidden size?",
            """
            return 2 * config["num_hidden_layers"] * config["hidden_size"] * tokens * bytes_per_number
        """,
        ),
        (
            "hidden over heads",
            "it need not be hidden size over heads",
            """
            head_dim = config["hidden_size"] // config["num_attention_heads"]
            numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
            return 2 * numbers * tokens * bytes_per_number
        """,
        ),
        (
            "one layer",
            "Every layer stores its own",
            """
            return 2 * config["num_key_value_heads"] * config["head_dim"] * tokens * bytes_per_number
        """,
        ),
        (
            "always BF16",
            "bytes",
            """
            return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * tokens
        """,
        ),
        (
            "bits",
            "Is it in bits?",
            """
            numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
            return 16 * numbers * tokens * bytes_per_number
        """,
        ),
    ],
    "users_that_fit": [
        (
            "weights forgotten",
            "The weights take room, too",
            """
            return memory // cache_bytes(config, tokens, bytes_per_number)
        """,
        ),
        (
            "rounded up",
            "Whole users only",
            """
            return max(0, math.ceil((memory - weights) / cache_bytes(config, tokens, bytes_per_number)))
        """,
        ),
        (
            "negative users",
            "the weights alone do not fit",
            """
            return (memory - weights) // cache_bytes(config, tokens, bytes_per_number)
        """,
        ),
        (
            "parts of users",
            "expected a whole number",
            """
            return max(0, (memory - weights) / cache_bytes(config, tokens, bytes_per_number))
        """,
        ),
    ],
    "test_step": [
        (
            "at once only",
            "passes on a broken program",
            """
            x = torch.randn(7, 6)
            assert checks.read(program, x, [7]).shape == x.shape
        """,
        ),
        (
            "token by token only",
            "The fault that it misses: the position is counted after",
            """
            x = torch.randn(7, 6)
            assert torch.allclose(checks.read(program, x, [7]), checks.read(program, x, [1] * 7), atol=1e-4)
        """,
        ),
        (
            "the keys of one way",
            "fails on a program that is right",
            """
            x = torch.randn(7, 6)
            _, keys, _ = program(x, x[:0], x[:0])
            assert torch.allclose(keys, checks.rotate(x, torch.arange(7)), atol=1e-4)
        """,
        ),
        (
            "returns",
            "a test speaks by `assert`",
            """
            x = torch.randn(7, 6)
            return torch.allclose(checks.read(program, x, [7]), checks.read(program, x, [5, 1, 1]), atol=1e-4)
        """,
        ),
    ],
    "mended_step": [
        (
            "not mended",
            "The fault: the position is counted after",
            """
            values = torch.cat([values, piece])
            positions = len(values) + torch.arange(len(piece))
            rotated = checks.rotate(piece, positions)
            keys = torch.cat([keys, rotated])
            scores = rotated @ keys.T / math.sqrt(piece.shape[-1])
            last_seen = len(keys) - len(piece) + torch.arange(len(piece))
            hidden = torch.arange(len(keys)) > last_seen[:, None]
            return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values, keys, values
        """,
        ),
        (
            "from 0 again",
            "The fault: the position begins at 0 again",
            """
            past, new = len(keys), len(piece)
            rotated = checks.rotate(piece, torch.arange(new))
            keys, values = torch.cat([keys, rotated]), torch.cat([values, piece])
            scores = rotated @ keys.T / math.sqrt(piece.shape[-1])
            hidden = torch.arange(past + new) > past + torch.arange(new)[:, None]
            return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values, keys, values
        """,
        ),
        (
            "the mask from 0 again",
            "aligned top-left",
            """
            past, new = len(keys), len(piece)
            rotated = checks.rotate(piece, past + torch.arange(new))
            keys, values = torch.cat([keys, rotated]), torch.cat([values, piece])
            scores = rotated @ keys.T / math.sqrt(piece.shape[-1])
            hidden = torch.arange(past + new) > torch.arange(new)[:, None]
            return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values, keys, values
        """,
        ),
        (
            "no mask",
            "The fault: tokens see later ones",
            """
            rotated = checks.rotate(piece, len(keys) + torch.arange(len(piece)))
            keys, values = torch.cat([keys, rotated]), torch.cat([values, piece])
            scores = rotated @ keys.T / math.sqrt(piece.shape[-1])
            return scores.softmax(dim=-1) @ values, keys, values
        """,
        ),
        (
            "the cache is not handed on",
            "The fault: what was cached is not looked at",
            """
            rotated = checks.rotate(piece, len(keys) + torch.arange(len(piece)))
            scores = rotated @ rotated.T / math.sqrt(piece.shape[-1])
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            return weights @ piece, torch.cat([keys, rotated]), torch.cat([values, piece])
        """,
        ),
    ],
}

RIGHT = {
    "tokens_read": ["return new * prompt + new * (new - 1) // 2, prompt + (new - 1)"],
    "kv_cache": [
        """
            where = torch.arange(self.tokens, self.tokens + k.shape[2])
            if where[-1] >= self.keys.shape[2]:
                raise ValueError("no room")
            for buffer, new in ((self.keys, k), (self.values, v)):
                buffer.index_copy_(2, where, new)
            self.tokens += len(where)
            return [self.keys[..., : self.tokens, :], self.values[..., : self.tokens, :]]
        """,
        """
        new = k.shape[2]
        if new > self.keys.shape[2] - self.tokens:
            raise ValueError("the cache is full")
        for buffer, x in ((self.keys, k), (self.values, v)):
            buffer.narrow(2, self.tokens, new).copy_(x)
        self.tokens += new
        return [buffer.narrow(2, 0, self.tokens) for buffer in (self.keys, self.values)]
    """,
    ],
    "cache_bytes": [
        """
        per_layer = config["num_key_value_heads"] * config["head_dim"] * bytes_per_number  # of one token's keys
        return sum(tokens * (per_layer + per_layer) for _ in range(config["num_hidden_layers"]))
    """
    ],
    "users_that_fit": [
        """
        users = 0
        while weights + (users + 1) * cache_bytes(config, tokens, bytes_per_number) <= memory:
            users += 1
        return users
    """
    ],
    "test_step": [
        """
        x = torch.randn(8, 4)
        token_by_token = checks.read(program, x, [1] * 8)
        for split in range(1, 8):
            whole = checks.read(program, x, [split, 8 - split])
            assert (whole - token_by_token).abs().max() < 1e-4
    """
    ],
    "mended_step": [
        """
        past, values = len(values), torch.cat([values, piece])
        rotated = checks.rotate(values, torch.arange(len(values)))  # the cache holds keys as they are
        allowed = torch.ones(len(piece), len(values), dtype=torch.bool).tril(past)
        output = torch.nn.functional.scaled_dot_product_attention(
            rotated[None, past:], rotated[None], values[None], attn_mask=allowed
        )
        return output[0], torch.cat([keys, piece]), values
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "tokens_read": [
        (
            "a closed form with new squared",
            "out, the tokens read without a cache",
            """
        return new * prompt + new * new // 2, prompt + new - 1
        """,
        ),
        (
            "swapped",
            "out, the tokens read without a cache",
            """
        return prompt + new - 1, sum(range(prompt, prompt + new))
        """,
        ),
        (
            "one pass too many",
            "the last token of the answer is not read again.",
            """
        return sum(prompt + i for i in range(new + 1)), prompt + new - 1
        """,
        ),
    ],
    "kv_cache": [
        (
            "values into keys",
            "Keys and values have changed places.",
            """
        end = self.tokens + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError("full")
        self.keys[:, :, self.tokens : end], self.values[:, :, self.tokens : end] = v, k
        self.tokens = end
        return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
        (
            "a roll",
            "write into the slots, do not replace the buffer",
            """
        n = k.shape[2]
        if self.tokens + n > self.keys.shape[2]:
            raise ValueError("full")
        self.keys = torch.roll(self.keys, n, 2)
        self.values = torch.roll(self.values, n, 2)
        self.keys[:, :, :n], self.values[:, :, :n] = k, v
        self.tokens += n
        return self.keys[:, :, : self.tokens], self.values[:, :, : self.tokens]
        """,
        ),
        (
            "IndexError",
            "slots are taken, so one more token does not fit",
            """
        end = self.tokens + k.shape[2]
        if end > self.keys.shape[2]:
            raise IndexError("full")
        self.keys[:, :, self.tokens : end], self.values[:, :, self.tokens : end] = k, v
        self.tokens = end
        return self.keys[:, :, :end], self.values[:, :, :end]
        """,
        ),
    ],
    "cache_bytes": [
        (
            "bytes fixed at 2",
            "? The bytes of a number are given.",
            """
        numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        return 2 * tokens * numbers * 2
        """,
        ),
    ],
    "users_that_fit": [
        (
            "one fewer to be safe",
            "the number of users is",
            """
        return max(0, (memory - weights - 1) // cache_bytes(config, tokens, bytes_per_number))
        """,
        ),
    ],
    "mended_step": [
        (
            "no scale",
            "The scores are not divided by the root of dim.",
            """
        past, new = len(keys), len(piece)
        positions = past + torch.arange(new)
        rotated = checks.rotate(piece, positions)
        keys, values = torch.cat([keys, rotated]), torch.cat([values, piece])
        hidden = torch.arange(past + new) > positions[:, None]
        return (rotated @ keys.T).masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values, keys, values
        """,
        ),
    ],
    "test_step": [
        (
            "twice the same",
            "test_step passes on a broken program, so it proves nothing",
            """
        x = torch.randn(7, 6)
        assert torch.equal(checks.read(program, x, [7]), checks.read(program, x, [7]))
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "tokens_read": [
        """
        return torch.tensor([new * prompt + new * (new - 1) // 2, prompt + new - 1])
        """,
    ],
    "kv_cache": [
        """
        n = k.shape[2]
        if n > self.keys.shape[2] - self.tokens:
            raise ValueError("full")
        self.keys.narrow(2, self.tokens, n).copy_(k)
        self.values.narrow(2, self.tokens, n).copy_(v)
        self.tokens += n
        return self.keys[..., : self.tokens, :], self.values[..., : self.tokens, :]
        """,
    ],
    "test_step": [
        """
        torch.manual_seed(0)
        x = torch.randn(9, 4)
        whole = checks.read(program, x, [9])
        mixed = checks.read(program, x, [6, 1, 1, 1])
        single = checks.read(program, x, [1] * 9)
        backwards = checks.read(program, x, [1, 1, 7])
        assert (whole - mixed).abs().max() < 1e-3 and (whole - single).abs().max() < 1e-3
        assert (whole - backwards).abs().max() < 1e-3
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
