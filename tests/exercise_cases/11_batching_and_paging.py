"""Answers to the exercises 11, by cell: (the mistake, a part of the message, the lines between the markers)."""

APPEND = """
    table, old = pool.tables.get(name, []), pool.filled.get(name, 0)
    missing = math.ceil((old + count) / pool.page_size) - len(table)
    if missing > len(pool.free):
        raise OutOfPages(f"{name} needs {missing} pages, {len(pool.free)} are free")
    table = table + [pool.free.pop() for _ in range(missing)]
    pool.tables[name], pool.filled[name] = table, old + count
    places = [divmod(i, pool.page_size) for i in range(old, old + count)]
    return [table[page] * pool.page_size + offset for page, offset in places]
"""
PLAN = """
    plan = {name: 1 for name, left in running if left == 1}
    budget -= len(plan)
    readers = [request for request in running if request[1] > 1]
    for name, left in readers + waiting[: places - len(running)]:
        if budget > 0:
            plan[name] = min(left, budget)
            budget -= plan[name]
    return plan
"""
GOODPUT = """
    in_time = 0
    for arrived, tokens in requests:
        if not tokens or tokens[0] - arrived > first_ms:
            continue
        gaps = len(tokens) - 1
        if gaps == 0 or (tokens[-1] - tokens[0]) / gaps <= gap_ms:
            in_time += 1
    return in_time / seconds
"""

WRONG = {
    "append": [
        ("new pages for each call", "partly empty is filled first", APPEND.replace(
            "math.ceil((old + count) / pool.page_size) - len(table)", "math.ceil(count / pool.page_size)")),
        ("one page too many", "a full one needs no successor", APPEND.replace(
            "math.ceil((old + count) / pool.page_size)", "((old + count) // pool.page_size + 1)")),
        ("no look at the free list", "expected OutOfPages", APPEND.replace("missing > len(pool.free)", "False")),
        ("takes what there is, then gives up", "All or nothing", """
            table, old = list(pool.tables.get(name, [])), pool.filled.get(name, 0)
            while len(table) < math.ceil((old + count) / pool.page_size):
                if not pool.free:
                    raise OutOfPages(name)
                table.append(pool.free.pop())
            pool.tables[name], pool.filled[name] = table, old + count
            size = pool.page_size
            return [table[i // size] * size + i % size for i in range(old, old + count)]
        """),
        ("slots side by side", "wherever that page is", APPEND.replace(
            "return [table[page] * pool.page_size + offset for page, offset in places]",
            "return [table[0] * pool.page_size + i for i in range(old, old + count)]")),
        ("leaves a table behind", "left a table for the request", APPEND.replace(
            "pool.tables.get(name, [])", "pool.tables.setdefault(name, [])")),
    ],
    "release": [
        ("loses the pages", "pages are lost", "del pool.tables[name], pool.filled[name]"),
        ("keeps the table", "there are tables for", "pool.free += pool.tables[name]"),
        ("keeps the count", "filled is", "pool.free += pool.tables.pop(name)"),
        ("frees one page twice", "twice in the books", """
            table = pool.tables.pop(name)
            pool.free += table + table[:1]
            del pool.filled[name]
        """),
    ],
    "plan_step": [
        ("prompts first", "somebody who reads an answer waits", """
            plan = {}
            running = [r for r in running if r[1] > 1] + [r for r in running if r[1] == 1]
            for name, left in running + waiting[: places - len(running)]:
                if budget > 0:
                    plan[name] = min(left, budget)
                    budget -= plan[name]
            return plan
        """),
        ("decodes for nothing", "part of the budget", PLAN.replace("budget -= len(plan)", "pass")),
        ("whole prompts", "it is read in chunks", PLAN.replace("if budget > 0:", "if left <= budget:")),
        ("pieces of nothing", "Nobody computes 0 tokens", PLAN.replace("if budget > 0:", "if True:")),
        ("everybody joins", "Not everybody who waits has a place", PLAN.replace("waiting[: places - len(running)]",
                                                                           "waiting")),
        ("nobody joins before all have left", "Nobody joins", PLAN.replace(
            "waiting[: places - len(running)]", "(waiting[:places] if not running else [])")),
        ("the budget for each", "what one has taken, the next", PLAN.replace("budget -= plan[name]", "pass")),
    ],
    "goodput": [
        ("throughput", "That is throughput", "return sum(bool(tokens) for _, tokens in requests) / seconds"),
        ("the first token only", "Only the first token", GOODPUT.replace(
            "(tokens[-1] - tokens[0]) / gaps <= gap_ms", "True")),
        ("n gaps", "n - 1 gaps", GOODPUT.replace(
            "(tokens[-1] - tokens[0]) / gaps", "(tokens[-1] - tokens[0]) / len(tokens)")),
        ("prefill as a gap", "no gap between tokens", GOODPUT.replace(
            "gaps == 0 or (tokens[-1] - tokens[0]) / gaps", "(tokens[-1] - arrived) / len(tokens)")),
        ("one token is late", "An answer of one token has no gap", GOODPUT.replace(
            "gaps == 0 or ", "gaps > 0 and ")),
        ("each gap", "The mean gap is judged", GOODPUT.replace(
            "(tokens[-1] - tokens[0]) / gaps", "max(b - a for a, b in zip(tokens, tokens[1:]))")),
        ("a count", "That is a count", GOODPUT.replace("in_time / seconds", "in_time")),
        ("no arrival", "counts from the arrival", GOODPUT.replace("tokens[0] - arrived", "tokens[0]")),
    ],
    "knee": [
        (
            "the last of two runs",
            "two runs were made at a load of 8",
            """
            best = None
            for load, good in sorted(dict(runs).items()):
                if good < share * load:
                    break
                best = load
            return best
        """,
        ),
        (
            "the better of two runs",
            "two runs were made at a load of 8",
            """
            best = None
            for load, good in sorted(runs, key=lambda run: (run[0], -run[1])):
                if good < share * load:
                    break
                best = load
            return best
        """,
        ),
        ("the largest goodput", "may already fall far behind", "return max(runs, key=lambda run: run[1])[0]"),
        ("a lucky run", "was lucky",
         "return max((load for load, good in runs if good >= share * load), default=None)"),
        ("the first that falls behind", "the last that does not", """
            for load, good in sorted(runs):
                if good < share * load:
                    return load
        """),
        ("0 for none", "expected None", """
            best = 0
            for load, good in sorted(runs):
                if good < share * load:
                    break
                best = load
            return best
        """),
    ],
    "test_next": [
        ("equal lengths", "a shorter row is read at its padding", """
            model, prompts = ToyModel(), [[5, 3, 8], [2, 9, 4]]
            alone = [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]
            assert program(model, prompts) == alone
        """),
        ("asks the program itself", "one position early", """
            model, prompts = ToyModel(), [[5, 3, 8], [2, 9, 4, 1, 7, 6, 3]]
            assert program(model, prompts) == [program(model, [prompt])[0] for prompt in prompts]
        """),
        ("wants one call and nothing else", "a shorter row is read at its padding", """
            model, prompts = ToyModel(), [[5, 3, 8], [2, 9, 4, 1, 7, 6, 3]]
            program(model, prompts)
            assert model.calls == 1
        """),
    ],
    "mended_next": [
        ("not mended", "Which position of a padded row", """
            longest = max(len(prompt) for prompt in prompts)
            ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
            return model(ids)[:, -1].argmax(-1).tolist()
        """),
        ("padding on the left", "Which position of a padded row", """
            longest = max(len(prompt) for prompt in prompts)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
            return model(ids)[:, -1].argmax(-1).tolist()
        """),
        ("0 is padding", "is token 0 taken for padding", """
            longest = max(len(prompt) for prompt in prompts)
            ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
            last = (ids != 0).sum(dim=1) - 1
            return model(ids)[torch.arange(len(prompts)), last].argmax(-1).tolist()
        """),
        ("one by one", "expected one pass for all",
         "return [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]"),
    ],
}  # fmt: skip

RIGHT = {
    "append": ["""
        table, slots = list(pool.tables.get(name, [])), []
        free, old = list(pool.free), pool.filled.get(name, 0)
        for i in range(old, old + count):
            if i == len(table) * pool.page_size:
                if not free:
                    raise OutOfPages(name)
                table.append(free.pop(0))
            slots.append(table[-1] * pool.page_size + i % pool.page_size)
        pool.free, pool.tables[name], pool.filled[name] = free, table, old + count
        return slots
    """],
    "release": ["""
        pool.free = pool.tables[name] + pool.free
        del pool.tables[name], pool.filled[name]
    """],
    "plan_step": ["""
        plan, left_over = {}, budget - sum(left == 1 for _, left in running)
        for name, left in sorted(running, key=lambda r: r[1] > 1):
            count = 1 if left == 1 else min(left, left_over)
            left_over -= count if left > 1 else 0
            if count:
                plan[name] = count
        for place, (name, left) in enumerate(waiting):
            if len(running) + place >= places or not left_over:
                break
            plan[name] = min(left, left_over)
            left_over -= plan[name]
        return plan
    """],
    "goodput": ["""
        def good(arrived, tokens):
            if not tokens:
                return False
            gaps = [b - a for a, b in zip(tokens, tokens[1:])] or [0]
            return tokens[0] <= arrived + first_ms and sum(gaps) / len(gaps) <= gap_ms
        return len([1 for request in requests if good(*request)]) / seconds
    """],
    "knee": ["""
        behind = min((load for load, good in runs if good < share * load), default=math.inf)
        return max((load for load, _ in runs if load < behind), default=None)
    """],
    "test_next": [
        """
            for prompts in ([[5]], [[1, 2, 3, 0], [4, 5], [6]], [[7, 8], [9, 1, 2, 3, 4]]):
                model = ToyModel()
                want = [int(ToyModel()(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]
                assert list(program(model, prompts)) == want
                assert model.calls == 1
        ""","""
        prompts = [[5], [1, 2, 3, 4], [9, 9]]
        for prompt, token in zip(prompts, program(ToyModel(), prompts)):
            state = 1
            for i in prompt:
                state = (state * 31 + i + 7) % 997
            assert token == state % 97
    """],
    "mended_next": ["""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
        choices = model(ids).argmax(dim=-1)
        return [int(row[len(p) - 1]) for row, p in zip(choices, prompts)]
    """],
}  # fmt: skip

# Found by answering the exercises anew
for _cell, _answers in {
    "plan_step": [
        (
            "shortest first",
            "first come, first served, or a long one waits for ever.",
            """
        plan = {name: 1 for name, left in running if left == 1}
        budget -= len(plan)
        readers = [request for request in running if request[1] > 1]
        joiners = waiting[: places - len(running)]

        for name, left in sorted(readers + joiners, key=lambda r: r[1]):
            if budget > 0:
                plan[name] = min(left, budget)
                budget -= plan[name]
        return plan
        """,
        ),
        (
            "newest reader first",
            "The newest reader comes first",
            """
        plan = {name: 1 for name, left in running if left == 1}
        budget -= len(plan)
        readers = [request for request in running if request[1] > 1]
        joiners = waiting[: places - len(running)]

        for name, left in readers[::-1] + joiners:
            if budget > 0:
                plan[name] = min(left, budget)
                budget -= plan[name]
        return plan
        """,
        ),
        (
            "joiners first",
            "Those who wait are served before those who run and read.",
            """
        plan = {name: 1 for name, left in running if left == 1}
        budget -= len(plan)
        readers = [request for request in running if request[1] > 1]
        joiners = waiting[: places - len(running)]

        for name, left in joiners + readers:
            if budget > 0:
                plan[name] = min(left, budget)
                budget -= plan[name]
        return plan
        """,
        ),
        (
            "ends at what does not fit",
            "The plan ends at a prompt that does not fit whole",
            """
        plan = {name: 1 for name, left in running if left == 1}
        budget -= len(plan)
        readers = [request for request in running if request[1] > 1]
        joiners = waiting[: places - len(running)]

        for name, left in readers + joiners:
            if left > budget:
                break
            plan[name] = left
            budget -= left
        return plan
        """,
        ),
    ],
    "goodput": [
        (
            "strictly below",
            "A first token or a mean gap exactly at its limit is in time.",
            """
        good = 0
        for arrived, t in requests:
            if t and t[0] - arrived < first_ms and (len(t) == 1 or (t[-1] - t[0]) / (len(t) - 1) < gap_ms):
                good += 1
        return good / seconds
        """,
        ),
        (
            "a share",
            "That is a share of the requests",
            """
        good = 0
        for arrived, t in requests:
            if t and t[0] - arrived <= first_ms and (len(t) == 1 or (t[-1] - t[0]) / (len(t) - 1) <= gap_ms):
                good += 1
        return good / len(requests)
        """,
        ),
    ],
    "knee": [
        (
            "strictly more",
            "A goodput of exactly the share of its load keeps up.",
            """
        best = None
        for load, good in sorted(runs):
            if not good > share * load:
                break
            best = load
        return best
        """,
        ),
        (
            "the goodput at the knee",
            "asked for is the load.",
            """
        best = None
        for load, good in sorted(runs):
            if good < share * load:
                break
            best = good
        return best
        """,
        ),
    ],
    "append": [
        (
            "as many as needed, less one free",
            "append raised OutOfPages for",
            """
        table, old = pool.tables.get(name, []), pool.filled.get(name, 0)
        missing = math.ceil((old + count) / pool.page_size) - len(table)
        if missing >= len(pool.free):
            raise OutOfPages(name)
        table = table + [pool.free.pop() for _ in range(missing)]
        pool.tables[name], pool.filled[name] = table, old + count
        places = [divmod(i, pool.page_size) for i in range(old, old + count)]
        return [table[page] * pool.page_size + offset for page, offset in places]
        """,
        ),
    ],
    "mended_next": [
        (
            "the last that is not 0",
            "Which position of a padded row predicts its next token? And is token",
            """
        longest = max(map(len, prompts))
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
        last = [max(i for i in range(longest) if row[i] != 0 or i == 0) for row in ids.tolist()]
        return model(ids)[torch.arange(len(prompts)), last].argmax(-1).tolist()
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "mended_next": [
        """
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
        choice = model(ids).argmax(-1)
        return choice.gather(1, torch.tensor([[len(p) - 1] for p in prompts]))[:, 0]
        """,
    ],
    "knee": [
        """
        best = None
        for load, good in sorted(runs):
            if good / load >= share:
                best = load
            else:
                return best
        return best
        """,
    ],
    "goodput": [
        """
        import statistics

        def in_time(arrived, t):
            if not t or t[0] > arrived + first_ms:
                return False
            gaps = [b - a for a, b in zip(t, t[1:])]
            return not gaps or statistics.fmean(gaps) <= gap_ms

        return sum(in_time(*r) for r in requests) / seconds
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
