"""Answers to the exercises 14, by cell: (the mistake, a part of the message, the lines between the markers)."""

from __future__ import annotations


def changed(answer: str, old: str, new: str) -> str:
    """A right answer with one mistake in it."""
    assert answer.count(old) == 1, (old, answer)
    return answer.replace(old, new)


LINE_BY_LINE = r"""
found, data, buffer = [], [], b""
for moment, chunk in chunks:
    buffer += chunk
    *lines, buffer = buffer.split(b"\n")
    for line in lines:
        line = line.rstrip(b"\r").decode("utf-8")
        if line.startswith("data:"):
            data.append(line[5:].lstrip(" "))
        elif not line:
            if data:
                found.append((moment, "\n".join(data)))
            data = []
return found
"""

TIMES = """
first = last = tokens = None
text, pieces = "", 0
for moment, data in events:
    if data == "[DONE]":
        break
    message = json.loads(data)
    usage = message.get("usage")
    if usage:
        tokens = usage["completion_tokens"]
    if not message["choices"]:
        continue
    content = message["choices"][0]["delta"].get("content")
    if not content:
        continue
    if first is None:
        first = moment
    last = moment
    text += content
    pieces += 1
n = pieces if tokens is None else tokens
ttft = first - due
tpot = None if n == 1 else (last - first) / (n - 1)
return ttft, tpot, text
"""

HEADER = """
length = int.from_bytes(file[0:8], byteorder="little", signed=False)
header = json.loads(file[8 : 8 + length].decode("utf-8"))
header.pop("__metadata__", None)
result = {}
for name, info in header.items():
    start = info["data_offsets"][0] + length + 8
    end = info["data_offsets"][1] + length + 8
    if end > len(file):
        raise ValueError("the file is cut off")
    result[name] = (info["dtype"], info["shape"], (start, end))
return result
"""

FELT = """
latencies = []
for due, sent, first, finished in requests:
    if finished is not None:
        latencies.append(finished - due)
if len(latencies) == 0:
    return [], None
rank = math.ceil(0.99 * len(latencies))
p99 = sorted(latencies)[rank - 1]
return latencies, p99
"""

GOODPUT = """
count = 0
for due, sent, first, finished in requests:
    if finished is None:
        continue
    ttft = first - due
    whole = finished - due
    if ttft <= first_limit and whole <= whole_limit:
        count += 1
return count / seconds
"""

CHOOSE = """
chosen = []
for form in formats:
    if "bytes" in needs and form["bytes"] > needs["bytes"]:
        continue
    if "bits" in needs and form["bits"] < needs["bits"]:
        continue
    if "holds" in needs and not needs["holds"].issubset(form["holds"]):
        continue
    for reader in form["readers"]:
        if "reader" in needs and reader["name"] != needs["reader"]:
            continue
        if "device" in needs and needs["device"] not in reader["devices"]:
            continue
        if needs.get("python") is False and reader["python"]:
            continue
        chosen.append(form)
        break
chosen.sort(key=lambda form: form["bytes"])
return [form["name"] for form in chosen]
"""

WRONG = {
    "events": [
        ("a chunk is an event", "Here a chunk holds two events", r"""
            found = []
            for moment, chunk in chunks:
                text = chunk.decode().strip()
                if text.startswith("data: "):
                    found.append((moment, text[6:]))
            return found
        """),
        ("chunks split as lines", "Here chunks end inside a line", r"""
            found = []
            for moment, chunk in chunks:
                for line in chunk.decode().splitlines():
                    if line.startswith("data: "):
                        found.append((moment, line[6:]))
            return found
        """),
        ("chunks decoded one by one", "Here a chunk ends inside a character", r"""
            found, data, buffer = [], [], ""
            for moment, chunk in chunks:
                buffer += chunk.decode()
                while "\n" in buffer:
                    line, _, buffer = buffer.partition("\n")
                    line = line.rstrip("\r")
                    if line.startswith("data:"):
                        data.append(line[5:].strip())
                    elif not line and data:
                        found.append((moment, "\n".join(data)))
                        data = []
            return found
        """),
        ("half characters replaced", "Here a chunk ends inside a character", r"""
            found, data, buffer = [], [], ""
            for moment, chunk in chunks:
                buffer += chunk.decode("utf-8", errors="ignore")
                while "\n" in buffer:
                    line, _, buffer = buffer.partition("\n")
                    line = line.rstrip("\r")
                    if line.startswith("data:"):
                        data.append(line[5:].strip())
                    elif not line and data:
                        found.append((moment, "\n".join(data)))
                        data = []
            return found
        """),
        ("an event ends with its line of data", "Here a chunk ends before the empty line", r"""
            found, rest = [], b""
            for moment, chunk in chunks:
                rest += chunk
                while b"\n" in rest:
                    line, rest = rest.split(b"\n", 1)
                    line = line.rstrip(b"\r").decode()
                    if line.startswith("data:"):
                        found.append((moment, line[5:].strip()))
            return found
        """),
        ("two line feeds only", r"Here lines end with \r\n", r"""
            found, rest = [], b""
            for moment, chunk in chunks:
                rest += chunk
                while b"\n\n" in rest:
                    event, rest = rest.split(b"\n\n", 1)
                    lines = event.decode().split("\n")
                    data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
                    if data:
                        found.append((moment, "\n".join(data)))
            return found
        """),
        ("only at the end of a chunk", "The moments: ", r"""
            found, rest = [], b""
            for moment, chunk in chunks:
                rest += chunk.replace(b"\r\n", b"\n")
                if rest.endswith(b"\n"):
                    for event in rest.decode().strip().split("\n\n"):
                        if event.startswith("data:"):
                            found.append((moment, event[5:].strip()))
                    rest = b""
            return found
        """),
        ("line ends mended chunk by chunk", r"Here chunks end between \r and \n", r"""
            found, rest = [], b""
            for moment, chunk in chunks:
                rest += chunk.replace(b"\r\n", b"\n")
                while b"\n\n" in rest:
                    event, rest = rest.split(b"\n\n", 1)
                    lines = event.decode().split("\n")
                    data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
                    if data:
                        found.append((moment, "\n".join(data)))
            return found
        """),
        ("a comment is an event", "an empty line after no data ends no event",
         changed(LINE_BY_LINE, "if data:", "if True:")),
        ("whatever begins with data", "Here are comments and fields other than data", changed(
            LINE_BY_LINE, '''"data:"):
            data.append(line[5:].lstrip(" "))''', '''"data"):
            data.append(line.partition(":")[2].strip())''')),
        ("every line is data", "Here are comments and fields other than data",
         changed(LINE_BY_LINE, '''if line.startswith("data:"):
            data.append(line[5:].lstrip(" "))''', '''if line:
            data.append(line.partition(":")[2].strip())''')),
        ("needs the space", "Here no space stands after `data:`",
         changed(LINE_BY_LINE, '''"data:"):
            data.append(line[5:]''', '''"data: "):
            data.append(line[6:]''')),
        ("cuts six letters", "Here no space stands after `data:`", changed(LINE_BY_LINE, "line[5:]", "line[6:]")),
        ("keeps the space", "Here each chunk holds one event", changed(LINE_BY_LINE, '.lstrip(" ")', "")),
        ("the last line of data", "Here an event has two lines of data", changed(
            LINE_BY_LINE, 'data.append(line[5:].lstrip(" "))', 'data = [line[5:].lstrip(" ")]')),
        ("joined without a line end", "Here an event has two lines of data",
         changed(LINE_BY_LINE, r'"\n".join', '"".join')),
        ("str.splitlines", "at which str.splitlines ends a line", r"""
            found, data, rest = [], [], b""
            for moment, chunk in chunks:
                rest += chunk
                end = rest.rfind(b"\n") + 1
                whole, rest = rest[:end].decode(), rest[end:]
                for line in whole.splitlines():
                    if line.startswith("data:"):
                        data.append(line[5:].strip())
                    elif line == "" and data:
                        found.append((moment, "\n".join(data)))
                        data = []
            return found
        """),
        ("split at data:", "Here the data itself holds `data:`",
         changed(LINE_BY_LINE, 'line[5:].lstrip(" ")', 'line.split("data:")[1].strip()')),
        ("the unfinished event, too", "what lacks its empty line is no event", changed(
            LINE_BY_LINE, "return found", r'''tail = buffer.decode()
if tail.startswith("data:"):
    data.append(tail[5:].strip())
if data:
    found.append((moment, "\n".join(data)))
return found''')),
        ("the moment when it began", "The moments: ", r"""
            found, data, rest, began = [], [], b"", None
            for moment, chunk in chunks:
                if not rest and not data:
                    began = moment
                rest += chunk
                while b"\n" in rest:
                    line, rest = rest.split(b"\n", 1)
                    line = line.rstrip(b"\r").decode()
                    if line.startswith("data:"):
                        data.append(line[5:].strip())
                    elif line == "" and data:
                        found.append((began, "\n".join(data)))
                        data, began = [], moment
            return found
        """),
        ("all at the end", "The moments: ", changed(LINE_BY_LINE, "return found",
                                                    "return [(moment, data) for _, data in found]")),
        ("the data without its moment", "an event: ", changed(
            LINE_BY_LINE, r'(moment, "\n".join(data))', r'"\n".join(data)')),
        ("bytes", "expected text", changed(changed(changed(
            LINE_BY_LINE, '.decode("utf-8")', ""), '''line.startswith("data:"):
            data.append(line[5:].lstrip(" "))''', '''line.startswith(b"data:"):
            data.append(line[5:].lstrip())'''), r'"\n".join', r'b"\n".join')),
    ],
    "stream_times": [
        ("from when it was sent", "from when the request was sent", changed(TIMES, "first - due", "first - sent")),
        ("a moment, no time", "That is a moment on the clock", changed(TIMES, "first - due", "first")),
        ("the role is a token", "The first message names the role", changed(
            TIMES, "ttft = first - due", "ttft = events[0][0] - due")),
        ("an empty delta is a token", "A delta with an empty text is no token",
         changed(TIMES, "if not content:", "if content is None:")),
        ("n gaps", "n tokens have n - 1 gaps", changed(TIMES, "/ (n - 1)", "/ n")),
        ("pieces", "`usage` says how many there were", changed(
            TIMES, "pieces if tokens is None else tokens", "pieces")),
        ("pieces, n gaps", "and n of them have n - 1 gaps", changed(changed(
            TIMES, "pieces if tokens is None else tokens", "pieces"), "/ (n - 1)", "/ n")),
        ("all tokens", "total_tokens counts the prompt", changed(
            TIMES, "completion_tokens", "total_tokens")),
        ("up to the reason", "not with the message that says why it ended", changed(
            TIMES, '''    content = message''', '''    last = moment
    content = message''').replace("    last = moment\n    text", "    text")),
        ("up to the end of the stream", "not with [DONE]", changed(
            TIMES, "(last - first)", "(events[-1][0] - first)")),
        ("the whole time over all tokens", "The time to the first token is no gap", changed(
            TIMES, "(last - first) / (n - 1)", "(last - due) / n")),
        ("from the role", "not with the role", changed(
            TIMES, "(last - first)", "(last - events[0][0])")),
        ("milliseconds", "asked for are seconds", changed(
            TIMES, "return ttft, tpot, text", "return 1000 * ttft, 1000 * tpot if tpot else tpot, text")),
        ("the other way round", "That is TPOT", changed(TIMES, "return ttft, tpot, text", "return tpot, ttft, text")),
        ("stripped", "nothing is stripped", changed(
            TIMES, "return ttft, tpot, text", "return ttft, tpot, text.strip()")),
        ("joined by spaces", "The pieces bring their own spaces", changed(
            TIMES, "text += content", 'text += content if not text else " " + content')),
        ("blank pieces are left out", "a piece of them is a piece", changed(
            TIMES, "if not content:", "if not content or not content.strip():")),
        ("a choice in every message", "A message may have no choices", changed(
            TIMES, '''    if not message["choices"]:
        continue
''', "")),
        ("[DONE] is JSON", "which is no JSON", changed(TIMES, '''    if data == "[DONE]":
        break
''', "")),
        ("usage in every message", "A delta may lack `content`, and a message `usage`", changed(
            TIMES, 'message.get("usage")', 'message["usage"]')),
        ("content in every delta", "A delta may lack `content`", changed(TIMES, '.get("content")', '["content"]')),
        ("null is no dict", "Here content and usage are null where there is none", changed(changed(
            TIMES, 'usage = message.get("usage")', 'usage = message.get("usage", {})'),
            "if usage:", "if usage != {}:")),
        ("usage in a message of its own", "Here `usage` is in a message that has choices", changed(
            TIMES, "if usage:", 'if usage and not message["choices"]:')),
        ("the first message is skipped", "Here the first message has text at once", changed(
            TIMES, "in events:", "in events[1:]:")),
        ("the first token says something", "it was generated like any other", changed(
            TIMES, '''    if first is None:
''', '''    if not text.strip():
''')),
        ("[DONE] anywhere", "Here the text holds [DONE]", changed(TIMES, 'data == "[DONE]"', '"[DONE]" in data')),
        ("no pace is 0", "expected None", changed(TIMES, "None if n == 1", "0.0 if n == 1")),
        ("one token is divided by 0", "TPOT is None", changed(TIMES, "None if n == 1 else ", "")),
        ("usage must be there", "TPOT in s", changed(
            TIMES, "n = pieces if tokens is None else tokens", "n = pieces + 1 if tokens is None else tokens")),
        ("nothing returned", "None. Is a `return` missing?", changed(TIMES, "return ttft, tpot, text", "print(ttft)")),
    ],
    "read_header": [
        ("from the end of the header", "not from the file's first byte", changed(changed(
            HEADER, '[0] + length + 8', '[0]'), '[1] + length + 8', '[1]')),
        ("without the 8 bytes", "The 8 bytes of the length stand before", changed(changed(
            HEADER, '[0] + length + 8', '[0] + length'), '[1] + length + 8', '[1] + length')),
        ("without the header", "The header itself lies between", changed(changed(
            HEADER, '[0] + length + 8', '[0] + 8'), '[1] + length + 8', '[1] + 8')),
        ("metadata is a tensor", "`__metadata__`", changed(HEADER, 'header.pop("__metadata__", None)\n', "")),
        ("metadata in the result", "`__metadata__` is among the tensors", """
            begin = 8 + int.from_bytes(file[:8], "little")
            found = {}
            for name, entry in json.loads(file[8:begin]).items():
                start, end = entry.get("data_offsets", [0, 0])
                if begin + end > len(file):
                    raise ValueError(name)
                found[name] = entry.get("dtype"), entry.get("shape"), (begin + start, begin + end)
            return found
        """),
        ("big endian", "least byte first", changed(HEADER, '"little"', '"big"')),
        ("big endian by struct", "least byte first", """
            import struct

            (length,) = struct.unpack(">Q", file[:8])
            header = json.loads(file[8 : 8 + length])
            return {name: (x["dtype"], x["shape"], tuple(x["data_offsets"])) for name, x in header.items()}
        """),
        ("one byte of length", "least byte first", changed(HEADER, "int.from_bytes(file[0:8], byteorder=\"little\", "
                                                           "signed=False)", "file[0]")),
        ("the header right after four bytes", "least byte first", changed(HEADER, "file[8 : 8 + length]",
                                                                          "file[4 : 4 + length]")),
        ("a length for an end", "The second number is where the data ends", changed(
            HEADER, "end = info[\"data_offsets\"][1] + length + 8", "end = start + info[\"data_offsets\"][1]").replace(
            "if end > len(file)", "if info[\"data_offsets\"][1] + length + 8 > len(file)")),
        ("start and length", "not how long it is", changed(HEADER, "(start, end))", "(start, end - start))")),
        ("the last byte", "The end is the byte after the last one", changed(
            HEADER, "(start, end))", "(start, end - 1))")),
        ("one after the other", "The data need not lie in the order of the names", """
            sizes = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "F8_E4M3": 1, "U8": 1}
            length = int.from_bytes(file[:8], "little")
            at, found = 8 + length, {}
            for name, x in json.loads(file[8 : 8 + length]).items():
                if name == "__metadata__":
                    continue
                size = sizes[x["dtype"]] * math.prod(x["shape"])
                found[name] = x["dtype"], x["shape"], (at, at + size)
                at += size
            if at > len(file):
                raise ValueError("too short")
            return found
        """),
        ("the spaces do not count", "The spaces that fill the header up", """
            length = int.from_bytes(file[:8], "little")
            text = file[8 : 8 + length].decode().strip()
            begin, found = 8 + len(text.encode()), {}
            for name, x in json.loads(text).items():
                if name != "__metadata__":
                    start, end = x["data_offsets"]
                    found[name] = x["dtype"], x["shape"], (begin + start, begin + end)
            if any(end > len(file) for _, _, (_, end) in found.values()):
                raise ValueError("too short")
            return found
        """),
        ("Latin letters", "in UTF-8", changed(HEADER, '.decode("utf-8")', '.decode("latin-1")')),
        ("plain letters", "in UTF-8", changed(HEADER, '.decode("utf-8")', '.decode("ascii")')),
        ("all names with underscores", "none but `__metadata__` is special", changed(
            changed(HEADER, 'header.pop("__metadata__", None)\n', ""), "for name, info in header.items():\n",
            'for name, info in header.items():\n    if name.startswith("__"):\n        continue\n')),
        ("all with metadata in the name", "none but `__metadata__` is special", changed(
            changed(HEADER, 'header.pop("__metadata__", None)\n', ""), "for name, info in header.items():\n",
            'for name, info in header.items():\n    if "metadata" in name:\n        continue\n')),
        ("the end of the braces", "Here the header has `__metadata__`", """
            length = int.from_bytes(file[:8], "little")
            end = file.index(b"}}") + 2
            header = json.loads(file[8:end])
            header.pop("__metadata__", None)
            found = {}
            for name, x in header.items():
                a, b = x["data_offsets"]
                if 8 + length + b > len(file):
                    raise ValueError(name)
                found[name] = x["dtype"], x["shape"], (8 + length + a, 8 + length + b)
            return found
        """),
        ("no look at the length", "before its last tensor does", changed(HEADER, '''    if end > len(file):
        raise ValueError("the file is cut off")
''', "")),
        ("the data's own length", "before its last tensor does", changed(
            HEADER, "if end > len(file)", 'if info["data_offsets"][1] > len(file)')),
        ("the last name only", "before its last tensor does", changed(changed(HEADER, '''    if end > len(file):
        raise ValueError("the file is cut off")
''', ""), "return result", "if result and end > len(file):\n    raise ValueError\nreturn result")),
        ("a full file is too short", "This file is whole", changed(HEADER, "end > len(file)", "end >= len(file)")),
        ("no tensor, no file", "a file may hold no tensor", changed(
            HEADER, "return result", "if not result:\n    raise ValueError('no tensors')\nreturn result")),
        ("the largest of none", "a file may hold no tensor", changed(
            HEADER, "return result",
            "assert max(end for _, _, (_, end) in result.values()) <= len(file)\nreturn result")),
        ("four in a row", "dtype, shape, (start, end)", changed(HEADER, "(start, end))", "start, end)")),
    ],
    "bytes_by_dtype": [
        ("elements", "Those are elements", """
            total = {}
            for dtype, shape, _ in tensors.values():
                total[dtype] = total.get(dtype, 0) + math.prod(shape)
            return total
        """),
        ("the last of each", "their bytes add up",
         "return {dtype: end - start for dtype, _, (start, end) in tensors.values()}"),
        ("how many", "numbers of tensors", """
            from collections import Counter

            return dict(Counter(dtype for dtype, _, _ in tensors.values()))
        """),
        ("ends", "sums of ends", """
            total = {}
            for dtype, _, place in tensors.values():
                total[dtype] = total.get(dtype, 0) + place[1]
            return total
        """),
        ("one more", "nothing is added to end - start", """
            total = {}
            for dtype, _, (start, end) in tensors.values():
                total[dtype] = total.get(dtype, 0) + (end - start + 1)
            return total
        """),
        ("four bytes each", "Not every element has 4 bytes", """
            total = {}
            for dtype, shape, _ in tensors.values():
                total[dtype] = total.get(dtype, 0) + 4 * math.prod(shape)
            return total
        """),
        ("two bytes each", "Not every element has 2 bytes", """
            total = {}
            for dtype, shape, _ in tensors.values():
                total[dtype] = total.get(dtype, 0) + 2 * math.prod(shape)
            return total
        """),
        ("a dtype that was forgotten", "whatever its dtype is", """
            size = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
            total = {}
            for dtype, shape, _ in tensors.values():
                total[dtype] = total.get(dtype, 0) + size[dtype] * math.prod(shape)
            return total
        """),
        ("a scalar is nothing", "A scalar, shape [], has one element", """
            size = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "U8": 1}
            total = {}
            for dtype, shape, _ in tensors.values():
                count = 0 if len(shape) == 0 else shape[0]
                for n in shape[1:]:
                    count *= n
                total[dtype] = total.get(dtype, 0) + size[dtype] * count
            return total
        """),
        ("a sum of sizes", "sizes multiply", """
            size = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "U8": 1}
            total = {}
            for dtype, shape, _ in tensors.values():
                total[dtype] = total.get(dtype, 0) + size[dtype] * sum(shape)
            return total
        """),
        ("a total", "expected dict", "return sum(end - start for _, _, (start, end) in tensors.values())"),
        ("not set to 0 first", "raised KeyError", """
            total = {}
            for dtype, _, (start, end) in tensors.values():
                total[dtype] += end - start
            return total
        """),
    ],
    "felt": [
        ("from when it was sent", "coordinated omission", changed(FELT, "finished - due", "finished - sent")),
        ("from the first token", "That is the time after the first token", changed(
            FELT, "finished - due", "finished - first")),
        ("up to the first token", "That is the time to the first token", changed(
            FELT, "finished - due", "first - due")),
        ("how late", "how late the requests were sent", changed(FELT, "finished - due", "sent - due")),
        ("a failure takes no time", "with a time of 0", changed(
            FELT, "        latencies.append(finished - due)", '''        latencies.append(finished - due)
    else:
        latencies.append(0.0)''')),
        ("a failure ends with its first token", "is no answer, though its first token came", """
            latencies = [(end or first) - due for due, _, first, end in requests if end or first]
            if not latencies:
                return [], None
            return latencies, sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1]
        """),
        ("a failure has an end", "has None as its end", """
            latencies = [end - due for due, _, _, end in requests]
            return latencies, sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1]
        """),
        ("sorted", "They are sorted", """
            latencies = sorted(end - due for due, _, _, end in requests if end is not None)
            if not latencies:
                return [], None
            return latencies, latencies[math.ceil(0.99 * len(latencies)) - 1]
        """),
        ("not sorted at all", "The latencies are not sorted", changed(FELT, "sorted(latencies)", "latencies")),
        ("the rank as an index", "That has the rank after", changed(
            FELT, "[rank - 1]", "[min(rank, len(latencies) - 1)]")),
        ("int of it", "That has the rank after", changed(FELT, "sorted(latencies)[rank - 1]",
                                                         "sorted(latencies)[int(0.99 * len(latencies))]")),
        ("rounded down", "the rank is rounded up", changed(FELT, "math.ceil(0.99 * len(latencies))",
                                                          "max(1, int(0.99 * len(latencies)))")),
        ("the largest", "That is the largest", changed(FELT, "sorted(latencies)[rank - 1]", "max(latencies)")),
        ("the mean", "That is the mean", changed(FELT, "sorted(latencies)[rank - 1]",
                                                 "sum(latencies) / len(latencies)")),
        ("the largest first", "that is near the smallest", changed(
            FELT, "sorted(latencies)[rank - 1]", "sorted(latencies, reverse=True)[rank - 1]")),
        ("NumPy's rule", "That lies between two latencies (NumPy's rule)", """
            import numpy as np

            latencies = [end - due for due, _, _, end in requests if end is not None]
            return latencies, float(np.percentile(latencies, 99)) if latencies else None
        """),
        ("the rule of statistics", "That lies between two latencies (the rule of `statistics`)", """
            import statistics

            latencies = [end - due for due, _, _, end in requests if end is not None]
            return latencies, statistics.quantiles(latencies, n=100)[98] if latencies else None
        """),
        ("of those as sent", "the p99 of ", """
            latencies = [end - due for due, _, _, end in requests if end is not None]
            sent = sorted(end - at for _, at, _, end in requests if end is not None)
            return latencies, sent[math.ceil(0.99 * len(sent)) - 1] if sent else None
        """),
        ("one is always there", "Without a whole answer there is no p99", changed(
            FELT, "if len(latencies) == 0:\n    return [], None\n", "")),
        ("0 for none", "expected ([], None)", changed(FELT, "return [], None", "return [], 0.0")),
        ("the p99 alone", "expected list or tuple", changed(FELT, "return latencies, p99", "return p99")),
    ],
    "goodput": [
        ("from when it was sent", "coordinated omission", changed(changed(
            GOODPUT, "first - due", "first - sent"), "finished - due", "finished - sent")),
        ("the whole from the first token", "counts from when it was due, too", changed(
            GOODPUT, "finished - due", "finished - first")),
        ("broken off is good", "broke off after its first token", """
            count = 0
            for due, sent, first, finished in requests:
                if first is None or first - due > first_limit:
                    continue
                if finished is None or finished - due <= whole_limit:
                    count += 1
            return count / seconds
        """),
        ("failed requests", "Failed requests are counted", """
            count = 0
            for due, _, first, finished in requests:
                if finished is None or (first - due <= first_limit and finished - due <= whole_limit):
                    count += 1
            return count / seconds
        """),
        ("the first token only", "Only the first token's limit", changed(GOODPUT, " and whole <= whole_limit", "")),
        ("the whole only", "Only the whole answer's limit", changed(GOODPUT, "ttft <= first_limit and ", "")),
        ("either", "both must be kept", changed(GOODPUT, " and whole", " or whole")),
        ("the worse of two goodputs", "Only the whole answer's limit is looked at", """
            whole = [request for request in requests if request[3] is not None]
            one = sum(first - due <= first_limit for due, _, first, _ in whole)
            two = sum(end - due <= whole_limit for due, _, _, end in whole)
            return min(one, two) / seconds
        """),
        ("a share", "a share of the requests", changed(GOODPUT, "count / seconds", "count / len(requests)")),
        ("a share of the answers", "a share of the whole answers", changed(
            GOODPUT, "count / seconds",
            "count / max(1, sum(finished is not None for *_, finished in requests))")),
        ("a count", "That is a count", changed(GOODPUT, "count / seconds", "count")),
        ("throughput", "That is throughput", changed(GOODPUT, "ttft <= first_limit and whole <= whole_limit", "True")),
        ("the load", "That is the load", "return len(requests) / seconds"),
        ("strictly", "A time exactly at its limit keeps it", changed(changed(
            GOODPUT, "ttft <=", "ttft <"), "whole <=", "whole <")),
        ("strictly, the first token", "A first token exactly at its limit", changed(GOODPUT, "ttft <=", "ttft <")),
        ("strictly, the whole", "A whole answer exactly at its limit", changed(GOODPUT, "whole <=", "whole <")),
        ("seconds of its own", "they do not end with the last answer", changed(
            GOODPUT, "count / seconds",
            "count / (max(end or 0 for *_, end in requests) - min(due for due, *_ in requests) or 1)")),
        ("no failures", "has None as its end", changed(GOODPUT, "    if finished is None:\n        continue\n", "")),
    ],
    "choose": [
        ("each need by some reader", "two that are each half right do not help", """
            chosen = []
            for form in formats:
                names = {reader["name"] for reader in form["readers"]}
                devices = {device for reader in form["readers"] for device in reader["devices"]}
                free = any(not reader["python"] for reader in form["readers"])
                if needs.get("reader") not in {None, *names}:
                    continue
                if needs.get("device") not in {None, *devices}:
                    continue
                if not needs.get("python", True) and not free:
                    continue
                if not needs.get("holds", set()) <= form["holds"]:
                    continue
                if form["bytes"] <= needs.get("bytes", math.inf) and form["bits"] >= needs.get("bits", 0):
                    chosen.append(form)
            return [form["name"] for form in sorted(chosen, key=lambda form: form["bytes"])]
        """),
        ("every reader", "One reader that fits is enough", """
            def good(reader):
                return (
                    needs.get("reader") in (None, reader["name"])
                    and ("device" not in needs or needs["device"] in reader["devices"])
                    and (needs.get("python") is not False or not reader["python"])
                )

            fit = [
                form
                for form in formats
                if all(map(good, form["readers"]))
                and form["bytes"] <= needs.get("bytes", math.inf)
                and form["bits"] >= needs.get("bits", 0)
                and needs.get("holds", set()) <= form["holds"]
            ]
            return [form["name"] for form in sorted(fit, key=lambda form: form["bytes"])]
        """),
        ("the first reader", "Not the first reader alone", changed(
            CHOOSE, 'in form["readers"]', 'in form["readers"][:1]')),
        ("any reader's name", "Which reader the customer has", changed(
            CHOOSE, 'reader["name"] != needs["reader"]', "False")),
        ("any device", "The device is not looked at", changed(
            CHOOSE, 'needs["device"] not in reader["devices"]', "False")),
        ("Python is everywhere", "a reader that needs it is none", changed(
            CHOOSE, 'needs.get("python") is False and reader["python"]', "False")),
        ("whatever it holds", "What a format must hold", changed(
            CHOOSE, 'not needs["holds"].issubset(form["holds"])', "False")),
        ("any size", "The size is not looked at", changed(CHOOSE, 'form["bytes"] > needs["bytes"]', "False")),
        ("any bits", "The bits are not looked at", changed(CHOOSE, 'form["bits"] < needs["bits"]', "False")),
        ("holds some of it", "everything that is needed, not some of it", changed(
            CHOOSE, 'not needs["holds"].issubset(form["holds"])', 'not needs["holds"] & form["holds"]')),
        ("holds just that", "A format may hold more", changed(
            CHOOSE, 'not needs["holds"].issubset(form["holds"])', 'needs["holds"] != form["holds"]')),
        ("holds no more", "the chosen formats", changed(
            CHOOSE, 'needs["holds"].issubset(form["holds"])', 'needs["holds"].issuperset(form["holds"])')),
        ("smaller than the limit", "A size exactly at the limit", changed(CHOOSE, '["bytes"] >', '["bytes"] >=')),
        ("more bits than needed", "So many bits as are needed", changed(CHOOSE, '["bits"] <', '["bits"] <=')),
        ("both limits are left out", "at its limit fits", changed(changed(
            CHOOSE, '["bits"] <', '["bits"] <='), '["bytes"] >', '["bytes"] >=')),
        ("at most so many bits", "the least that is needed, not the most", changed(CHOOSE, '["bits"] <', '["bits"] >')),
        ("as they come", "in the order of the table", changed(
            CHOOSE, 'chosen.sort(key=lambda form: form["bytes"])\n', "")),
        ("the largest first", "The smallest comes first", changed(
            CHOOSE, 'form["bytes"])\n', 'form["bytes"], reverse=True)\n')),
        ("by name", "They are sorted by name", 'needs, formats = dict(needs), list(formats)\n' + changed(
            CHOOSE, 'lambda form: form["bytes"]', 'lambda form: form["name"]')),
        ("by bits", "They are sorted by bits", changed(
            CHOOSE, 'lambda form: form["bytes"]', 'lambda form: form["bits"]')),
        ("by name among equals", "as they stand in the table", changed(
            CHOOSE, 'lambda form: form["bytes"]', 'lambda form: (form["bytes"], form["name"])')),
        ("the smallest alone", "not the smallest alone", changed(
            CHOOSE, 'for form in chosen]', 'for form in chosen[:1]]')),
        ("its name", "expected a list of names", changed(
            CHOOSE, 'return [form["name"] for form in chosen]', 'return chosen[0]["name"] if chosen else None')),
        ("the formats", "expected their names", changed(CHOOSE, '[form["name"] for form in chosen]', "chosen")),
        ("every need is named", "A format has name, bytes, bits, holds and readers", changed(
            CHOOSE, '"reader" in needs and ', "")),
        ("Python must be used where it is", "a reader may need it or not", changed(
            CHOOSE, 'needs.get("python") is False and reader["python"]',
            '"python" in needs and reader["python"] != needs["python"]')),
        ("once for each reader", "A format is named once", changed(CHOOSE, "        break\n", "")),
        ("no need, no format", "every format fits", "if not needs:\n    return []\n" + CHOOSE),
        ("the last resort", "Nothing is so small", changed(
            CHOOSE, "return [", "chosen = chosen or sorted(formats, key=lambda form: form['bytes'])[:1]\nreturn [")),
        ("sorted in place", "changed its argument 2", 'formats.sort(key=lambda form: form["bytes"])\n' + CHOOSE),
    ],
}  # fmt: skip

RIGHT = {
    "events": [
        r"""
        found, data, rest = [], [], b""
        for moment, chunk in chunks:
            rest += chunk
            while True:
                ends = [i for i in (rest.find(b"\n"), rest.find(b"\r")) if i >= 0]
                if not ends or (rest[min(ends) :] == b"\r"):
                    break
                line, after = rest[: min(ends)].decode(), rest[min(ends) :]
                rest = after[2:] if after.startswith(b"\r\n") else after[1:]
                if line.startswith("data:"):
                    data.append(line[5:].removeprefix(" "))
                elif line == "" and data:
                    found.append((moment, "\n".join(data)))
                    data = []
        return found
        """,
        LINE_BY_LINE,
        r"""
        found, rest = [], b""
        for moment, chunk in chunks:
            rest = (rest + chunk).replace(b"\r\n", b"\n")
            while b"\n\n" in rest or rest.startswith(b"\n"):
                if rest.startswith(b"\n"):
                    rest = rest[1:]
                    continue
                event, rest = rest.split(b"\n\n", 1)
                lines = [line for line in event.decode().split("\n") if line.startswith("data:")]
                if lines:
                    found.append((moment, "\n".join(line[5:].removeprefix(" ") for line in lines)))
        return found
        """,
        r"""
        found, line, data = [], bytearray(), []
        for moment, chunk in chunks:
            for byte in chunk:
                if byte != 10:
                    line.append(byte)
                    continue
                text = bytes(line).removesuffix(b"\r").decode()
                line.clear()
                field, _, value = text.partition(":")
                if field == "data":
                    data.append(value[1:] if value.startswith(" ") else value)
                if not text and data:
                    found.append([moment, "\n".join(data)])
                    data = []
        return found
        """,
        r"""
        import bisect
        import itertools
        import re

        body = b"".join(chunk for _, chunk in chunks)
        ends = list(itertools.accumulate(len(chunk) for _, chunk in chunks))
        found, lines = [], []
        for match in re.finditer(rb"([^\n]*?)\r?\n", body):
            if match[1].startswith(b"data:"):
                lines.append(re.sub(r"^data: ?", "", match[1].decode()))
            elif not match[1] and lines:
                moment = chunks[bisect.bisect_left(ends, match.end())][0]
                found.append((moment, "\n".join(lines)))
                lines = []
        return tuple(found)
        """,
        r"""
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")()
        text, data, found = "", [], []
        for moment, chunk in chunks:
            text += decoder.decode(chunk)
            while (end := text.find("\n")) >= 0:
                line, text = text[:end], text[end + 1 :]
                line = line[:-1] if line.endswith("\r") else line
                if line == "":
                    found += [(moment, "\n".join(data))] if data else []
                    data = []
                elif line.startswith("data:"):
                    data += [line[6:] if line[5:6] == " " else line[5:]]
        return found
        """,
    ],
    "stream_times": [
        TIMES,
        """
        messages = [(moment, json.loads(data)) for moment, data in events if data != "[DONE]"]
        texts = [
            (moment, choice["delta"]["content"])
            for moment, message in messages
            for choice in message.get("choices") or []
            if choice.get("delta", {}).get("content")
        ]
        counts = [message["usage"]["completion_tokens"] for _, message in messages if message.get("usage")]
        n = counts[-1] if counts else len(texts)
        span = texts[-1][0] - texts[0][0]
        return [texts[0][0] - due, span / (n - 1) if n > 1 else None, "".join(text for _, text in texts)]
        """,
        """
        import numpy as np

        when, what, n = [], [], 0
        for moment, data in events:
            if data == "[DONE]":
                continue
            message = json.loads(data)
            n = (message.get("usage") or {}).get("completion_tokens", n)
            delta = message["choices"][0]["delta"] if message["choices"] else {}
            if len(delta.get("content") or "") > 0:
                when.append(moment)
                what.append(delta["content"])
        n = n or len(what)
        if n == 1:
            return np.float64(when[0] - due), None, what[0]
        return np.float64(when[0] - due), np.sum(np.diff(when)) / (n - 1), "".join(what)
        """,
    ],
    "read_header": [
        HEADER,
        """
        import struct

        (size,) = struct.unpack_from("<Q", file)
        header = json.loads(bytes(file[8 : 8 + size]))
        found = {
            name: [x["dtype"], tuple(x["shape"]), [8 + size + x["data_offsets"][0], 8 + size + x["data_offsets"][1]]]
            for name, x in header.items()
            if name != "__metadata__"
        }
        if max((place[1] for _, _, place in found.values()), default=0) > len(file):
            raise ValueError("cut off")
        return found
        """,
        """
        import io

        stream = io.BytesIO(file)
        length = sum(byte << 8 * i for i, byte in enumerate(stream.read(8)))
        header = json.loads(stream.read(length).decode().rstrip())
        data = stream.read()
        found = {}
        for name in sorted(set(header) - {"__metadata__"}):
            start, end = header[name]["data_offsets"]
            if len(data[start:end]) < end - start:
                raise ValueError(f"{name} is incomplete")
            found[name] = header[name]["dtype"], header[name]["shape"], (start + length + 8, end + length + 8)
        return found
        """,
        """
        length = int.from_bytes(file[:8], "little")
        found = {}
        for name, entry in json.loads(file[8:][:length]).items():
            if "data_offsets" in entry:
                start, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], (8 + length + start, 8 + length + end)
        assert_size = sum(end - start for _, _, (start, end) in found.values())
        if 8 + length + assert_size > len(file):
            raise ValueError("too short")
        return found
        """,
    ],
    "bytes_by_dtype": [
        """
        from collections import defaultdict

        total = defaultdict(int)
        for dtype, shape, (start, end) in tensors.values():
            total[dtype] += end - start
        return total
        """,
        """
        from collections import Counter

        total = Counter()
        for dtype, _, place in tensors.values():
            total.update({dtype: place[1] - place[0]})
        return total
        """,
        """
        dtypes = {dtype for dtype, _, _ in tensors.values()}
        return {
            dtype: sum(place[1] - place[0] for kind, _, place in tensors.values() if kind == dtype) for dtype in dtypes
        }
        """,
    ],
    "felt": [
        FELT,
        """
        import numpy as np

        whole = [request for request in requests if request[3] is not None]
        latencies = np.array([request[3] - request[0] for request in whole])
        if len(whole) == 0:
            return [], None
        return latencies, np.sort(latencies)[int(np.ceil(99 * len(whole) / 100)) - 1]
        """,
        """
        latencies = [end - due for due, _, _, end in requests if end is not None]
        for latency in sorted(latencies):
            if 100 * sum(other <= latency for other in latencies) >= 99 * len(latencies):
                return latencies, latency
        return [], None
        """,
        """
        import numpy as np

        latencies = [finished - due for due, _, _, finished in requests if finished]
        return latencies, np.percentile(latencies, 99, method="inverted_cdf") if latencies else None
        """,
        """
        latencies = []
        for request in requests:
            if request[-1]:
                latencies.append(request[-1] - request[0])
        if latencies:
            return latencies, sorted(latencies, reverse=True)[len(latencies) // 100]
        return latencies, None
        """,
    ],
    "goodput": [
        GOODPUT,
        """
        good = [
            1
            for due, _, first, finished in requests
            if None not in (first, finished) and first <= due + first_limit and finished <= due + whole_limit
        ]
        return len(good) / seconds
        """,
        """
        def good(request):
            due, sent, first, finished = request
            return bool(finished) and not (first - due > first_limit or finished - due > whole_limit)

        return sum(map(good, requests)) / seconds
        """,
        """
        import numpy as np

        table = np.array([[np.nan if x is None else x for x in request] for request in requests])
        return ((table[:, 2] - table[:, 0] <= first_limit) & (table[:, 3] - table[:, 0] <= whole_limit)).sum() / seconds
        """,
    ],
    "choose": [
        CHOOSE,
        """
        tests = {
            "reader": lambda form, reader, need: reader["name"] == need,
            "device": lambda form, reader, need: need in reader["devices"],
            "python": lambda form, reader, need: need or not reader["python"],
            "holds": lambda form, reader, need: need <= form["holds"],
            "bytes": lambda form, reader, need: form["bytes"] <= need,
            "bits": lambda form, reader, need: form["bits"] >= need,
        }
        fits = lambda form, reader: all(tests[key](form, reader, need) for key, need in needs.items())
        names = []
        for form in sorted(formats, key=lambda form: form["bytes"]):
            if any(fits(form, reader) for reader in form["readers"]):
                names.append(form["name"])
        return names
        """,
        """
        left = list(formats)
        if needs.get("bytes") is not None:
            left = [x for x in left if x["bytes"] <= needs["bytes"]]
        if needs.get("bits") is not None:
            left = [x for x in left if x["bits"] >= needs["bits"]]
        for part in needs.get("holds", []):
            left = [x for x in left if part in x["holds"]]
        pairs = [(x, reader) for x in left for reader in x["readers"]]
        if "reader" in needs:
            pairs = [(x, reader) for x, reader in pairs if reader["name"] == needs["reader"]]
        if "device" in needs:
            pairs = [(x, reader) for x, reader in pairs if needs["device"] in reader["devices"]]
        if not needs.get("python", True):
            pairs = [(x, reader) for x, reader in pairs if not reader["python"]]
        names = {x["name"] for x, _ in pairs}
        sizes = sorted((x["bytes"], i) for i, x in enumerate(formats) if x["name"] in names)
        return [formats[i]["name"] for _, i in sizes]
        """,
    ],
}
