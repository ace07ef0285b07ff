"""Features of answers: phrases of one to five words or marks, and kinds of repetition.

A phrase is a tuple of tokens: words in lower case, other characters, START and END of the answer. A phrase that is in
an answer's own prompt is not counted, because the prompt may ask for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from scipy.sparse import csr_array

Phrase = tuple[str, ...]

START, END, CUT = "<start>", "<end>", "<cut>"
ENDS = {START, END, "\n"}
REPEATS, COPIES, SHARED = ("<repeats>",), ("<copies>",), ("<shared>",)
REPETITIONS = {
    REPEATS: "answers that repeat themselves (at most half of their sequences of three words are different)",
    COPIES: "answers that copy the prompt (at least half of their sequences of four words are in it)",
    SHARED: "answers that are also given to other prompts, apart from words of the prompt",
}
TOKEN = re.compile(r"[^\W_]+(?:['-][^\W_]+)*|[^\w\s]|_|\n")
MAX_SIZE = 5  # tokens of a phrase
MAX_TOKENS = 100  # tokens at the beginning of an answer, and at its end, that are read
MAX_PHRASES = 4000
MIN_PROMPTS = 3  # whose answers have a phrase; at least 2 % of the prompts
MIN_WORDS = 8  # of an answer that repeats itself or its prompt
MIN_OWN_WORDS = 3  # different words besides those of the prompt in an answer that is given to several prompts
SAME_ANSWERS = 0.5  # share of answers that makes two features variants


def find_tokens(text: str) -> list[str]:
    """Return words in lower case and other characters; of a long text only those of its two ends."""
    tokens = TOKEN.findall(text.strip().lower())
    return tokens if len(tokens) <= 2 * MAX_TOKENS else [*tokens[:MAX_TOKENS], CUT, *tokens[-MAX_TOKENS:]]


def list_phrases(tokens: Sequence[str], sizes: Sequence[int] = range(1, MAX_SIZE + 1)) -> Iterator[Phrase]:
    """Yield all sequences of successive tokens of these sizes."""
    for size in sizes:
        yield from zip(*(tokens[start:] for start in range(size)), strict=False)


def find_frequent_phrases(groups: Sequence[Sequence[Sequence[str]]], min_groups: int) -> list[Phrase]:
    """Return the phrases in the answers (tokens) of at least `min_groups` groups, the most frequent ones first.

    Longer phrases are counted only if both of their parts are frequent, which bounds memory.
    """
    counts = Counter[Phrase]()
    for size in range(1, MAX_SIZE + 1):
        new = Counter[Phrase]()
        for answers in groups:
            found = {phrase for tokens in answers for phrase in list_phrases(tokens, [size])}
            new.update(one for one in found if size == 1 or (one[1:] in counts and one[:-1] in counts))
        counts |= Counter({phrase: count for phrase, count in new.items() if count >= min_groups})
    return [one for one, _ in counts.most_common(MAX_PHRASES) if CUT not in one and not {START, END}.issuperset(one)]


def find_features(
    texts: Sequence[str], is_complete: Iterable[bool], prompts: Sequence[str]
) -> tuple[list[Phrase], csr_array]:
    """Find the frequent features of N answers to these prompts [N]. Returns F features and their presence [N, F]."""
    tokens = [[START, *find_tokens(text), *[END] * end] for text, end in zip(texts, is_complete, strict=True)]
    groups = defaultdict[str, list[int]](list)
    for at, prompt in enumerate(prompts):
        groups[prompt].append(at)
    min_groups = max(MIN_PROMPTS, len(groups) // 50)
    features = find_frequent_phrases([[tokens[at] for at in group] for group in groups.values()], min_groups)
    columns = {feature: column for column, feature in enumerate([*features, *REPETITIONS])}
    found: list[list[Phrase]] = [[] for _ in texts]
    users = defaultdict[Phrase, list[int]](list)  # own words of an answer -> answers
    for prompt, group in groups.items():
        known = {*list_phrases(TOKEN.findall(prompt.lower()))}
        for at in group:
            words = [token for token in tokens[at][1:] if token[0].isalnum()]
            phrases = columns.keys() & {*list_phrases(tokens[at])}
            found[at] = [*(one for one in phrases if strip_ends(one) not in known), *find_repetitions(words, known)]
            users[tuple(word for word in words if (word,) not in known)].append(at)
    for own, same in users.items():
        if len({*own}) >= MIN_OWN_WORDS and len({prompts[at] for at in same}) > 1:
            for at in same:
                found[at].append(SHARED)
    indices = np.array([columns[one] for row in found for one in row], np.int64)
    starts = np.cumsum([0, *map(len, found)])
    return [*columns], csr_array((np.ones(len(indices)), indices, starts), shape=(len(texts), len(columns)))


def strip_ends(phrase: Phrase) -> Phrase:
    """Return a phrase without START, END and line breaks at its ends."""
    inner = [at for at, token in enumerate(phrase) if token not in ENDS]
    return phrase[inner[0] : inner[-1] + 1] if inner else ()


def find_repetitions(words: Sequence[str], known: set[Phrase]) -> Iterator[Phrase]:
    """Yield the kinds of repetition in the words of an answer to a prompt with the phrases `known`."""
    if len(words) >= MIN_WORDS:
        threes, fours = [*list_phrases(words, [3])], [*list_phrases(words, [4])]
        if 2 * len({*threes}) <= len(threes):
            yield REPEATS
        if 2 * sum(four in known for four in fours) >= len(fours):
            yield COPIES


def get_category(feature: Phrase) -> str:
    """Return the category of a feature: phrase (with a word), format or repetition."""
    if feature in REPETITIONS:
        return "repetition"
    return "phrase" if any(token[0].isalpha() for token in feature) else "format"


def is_variant(one: Phrase, other: Phrase, users: frozenset[int], other_users: frozenset[int]) -> bool:
    """Return whether two features are mostly of the same answers or, if they have a token in common, one is mostly of
    answers of the other."""
    common, smaller = len(users & other_users), min(len(users), len(other_users))
    has_same_token = bool({*one} & {*other} - ENDS)
    return common > SAME_ANSWERS * (smaller if has_same_token else len(users | other_users))


def describe_feature(feature: Phrase, text: str) -> str:
    """Describe a feature, in the spelling of an answer that has it, e.g. `answers that begin with "The number"`."""
    if feature in REPETITIONS:
        return REPETITIONS[feature]
    words = [token for token in feature if token not in (START, END)]
    match = re.search(r"\s*?".join(map(re.escape, words)), text, re.IGNORECASE)
    verb = "begin with" if feature[0] == START else "end with" if feature[-1] == END else "contain"
    return f"answers that {verb} {(match[0] if match else ' '.join(words))!r}"
