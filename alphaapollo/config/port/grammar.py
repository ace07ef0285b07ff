"""A shell script as a tree: sequences, branches, cases, loops, functions. Words stay as they were written."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.port.lexer import Token, tokens

ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}


@dataclass(frozen=True)
class Simple:
    """`python3 -m verl.trainer.main_ppo trainer.nnodes=1`, `X=1`, `[ a = b ]`."""

    words: list[str]
    line: int


@dataclass(frozen=True)
class Sequential:
    """What follows each other, each with what stands before it: `&&`, `||`, `!`, or `;` for anything else."""

    parts: list[tuple[str, Node]]


@dataclass(frozen=True)
class Branches:
    """if, elif, else."""

    branches: list[tuple[Node, Node]]
    otherwise: Node | None


@dataclass(frozen=True)
class Cases:
    """case: a body for each list of patterns."""

    subject: str
    cases: list[tuple[list[str], Node]]


@dataclass(frozen=True)
class Loop:
    """for; without a name: while or until."""

    name: str | None
    items: list[str]
    body: Node
    line: int


@dataclass(frozen=True)
class Function:
    name: str
    body: Node


Node = Simple | Sequential | Branches | Cases | Loop | Function


def parse(source: str) -> Node:
    """The tree of a script. ValueError: an if, case or loop that does not end."""
    parser = _Parser(list(tokens(source)))
    body = parser.sequence()
    if not parser.done:
        raise ValueError(f"line {parser.line}: `{parser.peek()}` belongs to nothing before it.")
    return body


class _Parser:
    def __init__(self, found: list[Token]):
        self.tokens, self.at = found, 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.tokens)

    @property
    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 0

    def peek(self) -> str:
        return "" if self.done else self.tokens[self.at].text

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1].text

    def expect(self, text: str) -> None:
        if self.peek() != text:
            raise ValueError(f"line {self.line}: expected `{text}`, got `{self.peek() or 'the end of the script'}`.")
        self.take()

    def skip_blank(self) -> None:
        while self.peek() in ("\n", ";", "&") and not self.done:
            self.take()

    def sequence(self) -> Sequential:
        """Up to a word or sign that ends it, which stays."""
        parts: list[tuple[str, Node]] = []
        self.skip_blank()
        while not self.done and self.peek() not in ENDS and self.peek() not in (")", ";;"):
            sign = ";"
            if self.peek() in ("&&", "||", "|"):
                sign = self.take()
                self.skip_blank()
            if self.peek() == "!":
                self.take()
                parts.append((sign, Sequential([("!", self.one())])))
            else:
                parts.append((sign, self.one()))
            self.skip_blank()
        return Sequential(parts)

    def one(self) -> Node:
        match self.peek():
            case "if":
                return self.branches()
            case "case":
                return self.cases()
            case "for" | "while" | "until":
                return self.loop()
            case "{" | "(":
                return self.group()
            case "function":
                self.take()
        if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text == "(":
            return self.function()
        return self.simple()

    def simple(self) -> Node:
        words, line = [], self.line
        inside = self.peek() == "[["
        while not self.done and (inside or self.tokens[self.at].kind != "operator"):
            token = self.tokens[self.at]
            self.at += 1
            if token.kind == "redirection" and not inside:
                self.at += 1  # its target
                continue
            words.append(token.text)
            inside = inside and token.text != "]]"
        if not words and not self.done:
            raise ValueError(f"line {self.line}: cannot read `{self.peek()}`.")
        return Simple(words, line)

    def branches(self) -> Node:
        branches: list[tuple[Node, Node]] = []
        self.expect("if")
        while True:
            condition = self.sequence()
            self.expect("then")
            branches.append((condition, self.sequence()))
            if self.peek() != "elif":
                break
            self.take()
        otherwise = None
        if self.peek() == "else":
            self.take()
            otherwise = self.sequence()
        self.expect("fi")
        return self.redirected(Branches(branches, otherwise))

    def cases(self) -> Node:
        self.expect("case")
        subject = self.take()
        self.expect("in")
        found: list[tuple[list[str], Node]] = []
        self.skip_blank()
        while not self.done and self.peek() != "esac":
            patterns = []
            while self.peek() != ")" and not self.done:
                if (text := self.take()) not in ("|", "("):
                    patterns.append(text)
            self.expect(")")
            found.append((patterns, self.sequence()))
            if self.peek() == ";;":
                self.take()
            self.skip_blank()
        self.expect("esac")
        return Cases(subject, found)

    def loop(self) -> Node:
        line, name, items = self.line, None, []
        if self.take() == "for" and self.peek()[:2] != "((":
            name = self.take()
            if self.peek() == "in":
                self.take()
                while self.peek() not in (";", "\n", "do"):
                    items.append(self.take())
            self.skip_blank()
        else:
            self.sequence()
        self.expect("do")
        body = self.sequence()
        self.expect("done")
        return self.redirected(Loop(name, items, body, line))

    def group(self) -> Node:
        close = "}" if self.take() == "{" else ")"
        body = self.sequence()
        self.expect(close)
        return self.redirected(body)

    def function(self) -> Node:
        name = self.take()
        self.expect("(")
        self.expect(")")
        self.skip_blank()
        return Function(name, self.one())

    def redirected(self, node: Node) -> Node:
        while not self.done and self.tokens[self.at].kind == "redirection":
            self.at += 2
        return node
