# ruff: noqa: E501
"""The questions that the draft is distilled and tested on: programming exercises, code to explain, and general chat.

Every question is a template filled with one topic. Topics are split by hand into those for training and those held out;
no topic, and no piece of code, stands on both sides. The course's own standard request (two numbers that add up to a
target) is held out with them, so that the ladder never measures a draft on what it was trained with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

EXERCISES = """
reversing a linked list; finding the middle of a linked list; detecting a cycle in a linked list; merging two sorted lists;
removing duplicates from a sorted array; rotating an array by k places; moving all zeros to the end of a list;
finding the majority element of a list; finding the missing number between 1 and n; finding the first repeated number;
finding the second largest number; counting even and odd numbers; computing a running average; computing prefix sums;
finding the maximum subarray sum; finding the maximum product of a subarray; the container with most water;
trapping rain water; the best time to buy and sell a stock; finding a peak in a list; binary search in a sorted array;
searching in a rotated sorted array; finding the square root of an integer by bisection; finding the k-th largest number;
bubble sort; insertion sort; selection sort; merge sort; quicksort; heap sort; counting sort; radix sort;
sorting a list of words by length; checking whether a list is sorted; merging overlapping intervals;
inserting an interval into a sorted list; scheduling the most meetings in one room; minimum number of meeting rooms;
checking whether a string is a palindrome; the longest palindromic substring; checking whether two words are anagrams;
grouping anagrams; the longest substring without repeating characters; the longest common prefix of a list of words;
counting the vowels in a sentence; counting how often each word occurs; reversing the words of a sentence;
compressing a string by run lengths; converting a Roman numeral to an integer; converting an integer to binary;
adding two binary strings; validating balanced parentheses; evaluating an expression in postfix notation;
simplifying a file path; decoding a run-length encoded string; implementing a Caesar cipher; finding a word in a grid;
string matching with the Knuth-Morris-Pratt algorithm; the edit distance between two words; the longest common subsequence;
the longest increasing subsequence; the coin change problem; the 0/1 knapsack problem; climbing stairs one or two at a time;
the house robber problem; unique paths in a grid; the minimum path sum in a grid; the word break problem;
partitioning a set into two equal sums; the Fibonacci numbers with memoisation; the factorial of a number by recursion;
computing powers by repeated squaring; the greatest common divisor by Euclid's algorithm; checking whether a number is prime;
the sieve of Eratosthenes; finding all divisors of a number; checking for a perfect square; the digital root of a number;
reversing the digits of an integer; checking for an Armstrong number; happy numbers; Pascal's triangle; the Tower of Hanoi;
generating all permutations; generating all subsets; generating balanced parentheses; combinations that add up to a target;
the N-queens puzzle; solving a Sudoku by backtracking; letter combinations of a phone number; flood fill in an image;
counting islands in a grid; the shortest path in a maze; breadth-first search in a graph; depth-first search in a graph;
Dijkstra's shortest path algorithm; the Bellman-Ford algorithm; topological sorting of courses; detecting a cycle in a graph;
Kruskal's minimum spanning tree; Prim's minimum spanning tree; union-find with path compression; checking for a bipartite graph;
cloning a graph; the number of connected components; the Floyd-Warshall algorithm; the word ladder problem;
the depth of a binary tree; inverting a binary tree; checking whether a tree is symmetric; level order traversal of a tree;
in-order traversal without recursion; the lowest common ancestor in a tree; validating a binary search tree;
inserting into a binary search tree; deleting from a binary search tree; the diameter of a binary tree;
serialising a binary tree; the path sum in a tree; building a tree from its traversals; a prefix tree for words;
balancing a search tree; a segment tree for range sums; a Fenwick tree; a stack with constant-time minimum;
a queue made of two stacks; a circular buffer; a least recently used cache; a hash map from scratch; a priority queue;
the sliding window maximum; the median of a stream of numbers; the next greater element; the largest rectangle in a histogram;
rotating a matrix by 90 degrees; the spiral order of a matrix; transposing a matrix; multiplying two matrices;
setting matrix rows and columns to zero; Conway's game of life; searching in a sorted matrix; the diagonal sums of a matrix;
counting set bits; finding the single number by XOR; swapping two numbers without a third; checking for a power of two;
reversing bits; the Hamming distance; bit masks for subsets; the Gray code; FizzBuzz; a number guessing game;
a temperature converter; a leap year check; a simple calculator; rolling dice; rock, paper, scissors; hangman; tic-tac-toe;
a to-do list on the command line; reading a CSV file and adding up a column; counting the lines of a file;
finding the longest line of a file; parsing a date; a password strength check; generating a random password;
validating an e-mail address with a regular expression; extracting phone numbers from text; a bank account class;
an inventory class; a decorator that measures time; a generator of prime numbers; a context manager for files;
flattening a nested list; removing an item from a dictionary while iterating; inverting a dictionary; sorting a dictionary by value;
merging two dictionaries; list comprehensions with a condition; zipping two lists; sorting objects by two keys;
finding common elements of two lists; the intersection of two sorted arrays; splitting a list into chunks;
the jump game; gas stations on a circular route; distributing candies; the minimum number of arrows to burst balloons;
task scheduling with cooldown; reorganising a string; the egg drop problem; matrix chain multiplication; the longest valid parentheses;
wildcard matching; regular expression matching; burst balloons; palindrome partitioning; the interleaving of two strings;
counting inversions in an array; the Dutch national flag problem; shuffling a list fairly; reservoir sampling;
the majority vote algorithm; the birthday paradox by simulation; estimating pi by random points; a linear congruential generator
"""

HELD_OUT_EXERCISES = """
two numbers that add up to a target; three numbers that add up to zero; the product of an array except itself;
the longest consecutive run of integers; validating a Sudoku board; removing the n-th node from the end of a list;
converting an integer to a Roman numeral; the zigzag conversion of a string; multiplying two numbers given as strings;
isomorphic strings; the right side view of a tree; the k-th smallest element of a search tree; course schedules with prerequisites;
rotting oranges in a grid; the cheapest flight with at most k stops; the maximal square of ones in a matrix;
decoding ways of a digit string; the ugly numbers; excel column titles; counting and saying numbers
"""

CHAT_TOPICS = """
growing tomatoes on a balcony; baking bread at home; making a vegetable soup; cooking rice; planning a week of dinners;
a healthy breakfast; brewing coffee; making tea; storing vegetables; saving money each month; making a household budget;
paying back a loan; opening a bank account; buying a used car; riding a bicycle in traffic; repairing a flat tyre;
learning to swim; running a first five kilometres; stretching after sport; sleeping better; drinking enough water;
dealing with stress; meditation; making new friends; giving a speech; writing a thank-you letter; writing a complaint;
applying for a job; preparing for an interview; asking for a pay rise; working from home; running a meeting;
managing time; setting goals; keeping a diary; learning a language; learning the guitar; learning to draw;
taking better photographs; reading more books; writing a short story; writing a poem about the sea; a story about a lost dog;
a story about a lighthouse keeper; a dialogue between two robots; a fairy tale about a clever fox; a letter from the future;
why the sky is blue; how rainbows form; why the seasons change; how tides work; what causes earthquakes; how volcanoes erupt;
how clouds form; what a hurricane is; how plants make food; how bees make honey; why leaves change colour; how birds migrate;
how whales breathe; why cats purr; training a puppy; caring for goldfish; how vaccines work; how the heart works;
how the lungs work; what DNA is; how memory works; why we dream; how the eye sees; how muscles grow; what vitamins do;
how antibiotics work; what gravity is; what light is; how magnets work; how electricity flows; how batteries work;
how solar panels work; how wind turbines work; how a refrigerator works; how a car engine works; how aeroplanes fly;
how rockets work; what black holes are; how stars are born; the planets of the solar system; the phases of the moon;
what an atom is; the periodic table; acids and bases; why iron rusts; how soap cleans; the states of matter; the water cycle;
the carbon cycle; climate change; recycling; renewable energy; deforestation; coral reefs; endangered animals; deserts; rainforests;
the Roman Empire; ancient Egypt; ancient Greece; the Middle Ages; the Renaissance; the printing press; the industrial revolution;
the French Revolution; the First World War; the Second World War; the Cold War; the fall of the Berlin Wall; the Silk Road;
the Vikings; the Aztecs; the history of writing; the history of money; the history of chess; the invention of the telephone;
democracy; how laws are made; what inflation is; supply and demand; how taxes work; what a stock is; how insurance works;
what a computer does; how the internet works; what an operating system is; what an algorithm is; what a database is;
what machine learning is; how search engines work; what encryption is; how a computer stores pictures; what a compiler does;
how e-mail works; what a virus is on a computer; choosing a strong password; backing up files; what open source means;
percentages; fractions; the Pythagorean theorem; prime numbers; probability with dice; averages and medians; what pi is;
solving a linear equation; the area of a circle; negative numbers; reading a graph; logical puzzles; a riddle about time;
visiting Paris; visiting Japan; a weekend in Rome; camping in the mountains; packing a suitcase; travelling by train;
a day at the beach; hiking safely; reading a map; what to see in London; Mount Everest; the Amazon river; the Sahara; Antarctica;
Mozart; Beethoven; jazz music; the instruments of an orchestra; Shakespeare; Leonardo da Vinci; Van Gogh; modern art; the theatre;
the rules of football; the rules of tennis; playing chess; the Olympic Games; board games for a family; organising a birthday party;
choosing a present; being a good neighbour; helping a friend who is sad; being polite; telling the truth; what makes a good leader;
why exercise is good; eating less sugar; vegetarian food; washing clothes; cleaning a kitchen; painting a room; planting a tree;
saving water at home; saving electricity; first aid for a burn; what to do in a storm; road safety for children; teaching a child to read
"""

HELD_OUT_CHAT_TOPICS = """
making pancakes; keeping houseplants alive; choosing running shoes; learning to type; writing a birthday speech;
a story about a dragon who is afraid of fire; how glaciers move; why the ocean is salty; how spiders spin webs; what enzymes do;
how a microwave oven works; what a comet is; photosynthesis in winter; the Great Wall of China; the discovery of penicillin;
what compound interest is; how GPS finds a place; square roots; a holiday in Iceland; the rules of basketball
"""

CODE_TEMPLATES = (
    "Explain to a beginner how this exercise is solved: {}.",
    "Explain the solution of this programming exercise: {}.",
    "What is the idea behind {}? Explain it step by step.",
    "Write a Python function for {} and explain it.",
    "I do not understand {}. Can you help me?",
    "What is the time and space complexity of {}?",
    "What mistakes do beginners make with {}?",
    "How would you test a program for {}?",
    "Explain {} with a small example.",
    "Which data structure helps with {}, and why?",
    "Compare a slow and a fast way of {}.",
    "A learner asks about {}. Give a short hint without the whole solution.",
    "Describe {} in plain English, without code.",
    "Write a short Python program for {}.",
    "Why does the usual solution for {} work? Prove it in simple words.",
)

CHAT_TEMPLATES = (
    "Tell me about {}.",
    "Explain {} in simple words.",
    "Can you give me some tips on {}?",
    "What should everyone know about {}?",
    "Write a short text about {}.",
    "I am curious about {}. Where do I start?",
    "Explain {} to a ten-year-old.",
    "Give me five facts about {}.",
    "What are common mistakes or misunderstandings about {}?",
    "Write a paragraph about {} for a school newspaper.",
    "Why is {} interesting?",
    "Answer briefly: what matters most about {}?",
)

SNIPPETS = (
    "def largest(xs):\n    best = xs[0]\n    for x in xs[1:]:\n        if x > best:\n            best = x\n    return best",
    "def is_palindrome(s):\n    left, right = 0, len(s) - 1\n    while left < right:\n        if s[left] != s[right]:\n            return False\n        left, right = left + 1, right - 1\n    return True",
    "def fib(n, seen={}):\n    if n < 2:\n        return n\n    if n not in seen:\n        seen[n] = fib(n - 1) + fib(n - 2)\n    return seen[n]",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
    "def count_words(text):\n    counts = {}\n    for word in text.lower().split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts",
    "def reverse(head):\n    previous = None\n    while head:\n        head.next, previous, head = previous, head, head.next\n    return previous",
    "def max_subarray(xs):\n    best = current = xs[0]\n    for x in xs[1:]:\n        current = max(x, current + x)\n        best = max(best, current)\n    return best",
    "def binary_search(xs, target):\n    low, high = 0, len(xs)\n    while low < high:\n        middle = (low + high) // 2\n        if xs[middle] < target:\n            low = middle + 1\n        else:\n            high = middle\n    return low",
    "def primes(n):\n    sieve = [True] * (n + 1)\n    for p in range(2, int(n ** 0.5) + 1):\n        if sieve[p]:\n            sieve[p * p :: p] = [False] * len(sieve[p * p :: p])\n    return [p for p in range(2, n + 1) if sieve[p]]",
    "def balanced(text):\n    stack = []\n    pairs = {')': '(', ']': '[', '}': '{'}\n    for c in text:\n        if c in pairs.values():\n            stack.append(c)\n        elif c in pairs and (not stack or stack.pop() != pairs[c]):\n            return False\n    return not stack",
    "def merge(a, b):\n    result = []\n    i = j = 0\n    while i < len(a) and j < len(b):\n        if a[i] <= b[j]:\n            result.append(a[i])\n            i += 1\n        else:\n            result.append(b[j])\n            j += 1\n    return result + a[i:] + b[j:]",
    "def depth(node):\n    if node is None:\n        return 0\n    return 1 + max(depth(node.left), depth(node.right))",
    "def bfs(graph, start):\n    seen, queue = {start}, [start]\n    for node in queue:\n        for neighbour in graph[node]:\n            if neighbour not in seen:\n                seen.add(neighbour)\n                queue.append(neighbour)\n    return queue",
    "def coin_change(coins, amount):\n    best = [0] + [float('inf')] * amount\n    for total in range(1, amount + 1):\n        for coin in coins:\n            if coin <= total:\n                best[total] = min(best[total], best[total - coin] + 1)\n    return best[amount]",
    "def bubble_sort(xs):\n    for end in range(len(xs) - 1, 0, -1):\n        for i in range(end):\n            if xs[i] > xs[i + 1]:\n                xs[i], xs[i + 1] = xs[i + 1], xs[i]\n    return xs",
    "def hanoi(n, a, b, c):\n    if n == 0:\n        return\n    hanoi(n - 1, a, c, b)\n    print(a, '->', c)\n    hanoi(n - 1, b, a, c)",
    "def subsets(xs):\n    result = [[]]\n    for x in xs:\n        result += [s + [x] for s in result]\n    return result",
    "def transpose(m):\n    return [list(row) for row in zip(*m)]",
    "def anagrams(words):\n    groups = {}\n    for word in words:\n        groups.setdefault(''.join(sorted(word)), []).append(word)\n    return list(groups.values())",
    "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n    def pop(self):\n        return self.items.pop()",
    "def flatten(xs):\n    for x in xs:\n        if isinstance(x, list):\n            yield from flatten(x)\n        else:\n            yield x",
    "def single(xs):\n    result = 0\n    for x in xs:\n        result ^= x\n    return result",
    "def caesar(text, k):\n    return ''.join(chr((ord(c) - 97 + k) % 26 + 97) for c in text)",
    "def quicksort(xs):\n    if len(xs) < 2:\n        return xs\n    p = xs[0]\n    return quicksort([x for x in xs[1:] if x < p]) + [p] + quicksort([x for x in xs[1:] if x >= p])",
    "def climb(n):\n    a, b = 1, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "def max_profit(prices):\n    lowest, best = prices[0], 0\n    for price in prices:\n        lowest = min(lowest, price)\n        best = max(best, price - lowest)\n    return best",
    "def has_cycle(head):\n    slow = fast = head\n    while fast and fast.next:\n        slow, fast = slow.next, fast.next.next\n        if slow is fast:\n            return True\n    return False",
    "def power(x, n):\n    result = 1\n    while n:\n        if n % 2:\n            result *= x\n        x, n = x * x, n // 2\n    return result",
    "def fizzbuzz(n):\n    for i in range(1, n + 1):\n        print('Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or i)",
    "def longest_unique(s):\n    start, best, last = 0, 0, {}\n    for i, c in enumerate(s):\n        start = max(start, last.get(c, -1) + 1)\n        last[c] = i\n        best = max(best, i - start + 1)\n    return best",
    "def permutations(xs):\n    if not xs:\n        return [[]]\n    return [[x] + p for i, x in enumerate(xs) for p in permutations(xs[:i] + xs[i + 1:])]",
    "def move_zeros(xs):\n    place = 0\n    for i, x in enumerate(xs):\n        if x != 0:\n            xs[place], xs[i] = xs[i], xs[place]\n            place += 1",
    "def is_prime(n):\n    if n < 2:\n        return False\n    d = 2\n    while d * d <= n:\n        if n % d == 0:\n            return False\n        d += 1\n    return True",
    "def islands(grid):\n    def sink(r, c):\n        if 0 <= r < len(grid) and 0 <= c < len(grid[0]) and grid[r][c]:\n            grid[r][c] = 0\n            for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0)):\n                sink(r + dr, c + dc)\n            return 1\n        return 0\n    return sum(sink(r, c) for r in range(len(grid)) for c in range(len(grid[0])))",
)

HELD_OUT_SNIPPETS = (
    "def two_sum(numbers, target):\n    seen = {}\n    for position, number in enumerate(numbers):\n        if target - number in seen:\n            return seen[target - number], position\n        seen[number] = position",
    "def product_except_self(xs):\n    n = len(xs)\n    out = [1] * n\n    left = right = 1\n    for i in range(n):\n        out[i] *= left\n        left *= xs[i]\n        out[n - 1 - i] *= right\n        right *= xs[n - 1 - i]\n    return out",
    "def longest_run(xs):\n    numbers = set(xs)\n    best = 0\n    for x in numbers:\n        if x - 1 not in numbers:\n            end = x\n            while end in numbers:\n                end += 1\n            best = max(best, end - x)\n    return best",
    "def roman(n):\n    result = ''\n    for value, sign in TABLE:\n        while n >= value:\n            result += sign\n            n -= value\n    return result",
    "def decode_ways(s):\n    a, b = 1, int(s[0] != '0')\n    for i in range(1, len(s)):\n        c = 0\n        if s[i] != '0':\n            c += b\n        if '10' <= s[i - 1 : i + 1] <= '26':\n            c += a\n        a, b = b, c\n    return b",
    "def right_view(root):\n    level, out = [root], []\n    while level:\n        out.append(level[-1].value)\n        level = [c for n in level for c in (n.left, n.right) if c]\n    return out",
)

SNIPPET_TEMPLATES = (
    "Explain to a beginner why this solution works and how long it takes.\n{}",
    "{}\nWhat does this function do? Go through it line by line.",
    "{}\nExplain this code in simple words.",
    "Is this code correct? What could go wrong?\n{}",
    "{}\nGive an example of input and output.",
    "Solution:\n{}\nExplain the idea, then the loop, then the running time.",
    "{}\nHow could it be made faster or clearer?",
    "{}\nWrite three tests for this function.",
    "Format: plain English, short sentences, no headings, no lists. Begin with the idea.\n{}\nExplain this solution.",
    "A learner handed in this code. Praise what is good and suggest one change.\n{}",
    "{}\nName each variable once and say what it holds.",
    "{}\nHow much memory does this need, and why?",
    "Translate this Python code into plain words, step by step.\n{}",
    "{}\nWhich special cases does this code treat, and which does it forget?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A user's question. kind: "exercise", "code" or "chat"."""

    kind: str
    topic: str
    text: str


def topics(kind: str, held_out: bool) -> tuple[str, ...]:
    """All topics of a kind on one side of the split. For "code" a topic is the code itself."""
    if kind == "code":
        return HELD_OUT_SNIPPETS if held_out else SNIPPETS
    texts = {
        ("exercise", False): EXERCISES,
        ("exercise", True): HELD_OUT_EXERCISES,
        ("chat", False): CHAT_TOPICS,
        ("chat", True): HELD_OUT_CHAT_TOPICS,
    }
    if (kind, held_out) not in texts:
        raise ValueError(f"kind must be 'exercise', 'code' or 'chat', got {kind!r}")
    return tuple(topic.strip() for topic in texts[kind, held_out].split(";"))


TEMPLATES: dict[str, Sequence[str]] = {
    "exercise": CODE_TEMPLATES,
    "code": SNIPPET_TEMPLATES,
    "chat": CHAT_TEMPLATES,
}


def questions(held_out: bool) -> list[Question]:
    """Every question of one side: each template with each topic, in a fixed shuffled order."""
    every = [
        Question(kind, topic, template.format(topic))
        for kind, templates in TEMPLATES.items()
        for topic in topics(kind, held_out)
        for template in templates
    ]
    random.Random(7).shuffle(every)
    return every
