"""Reader of Dockerfiles (plugins/tasks/sandboxes/dockerfile.py)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from alphaapollo.plugins.tasks.sandboxes.dockerfile import (
    DEFAULT_PATH,
    Copy,
    Image,
    Run,
    expand_variables,
    read_dockerfile,
)


def read(folder: Path, text: str) -> Image:
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder)


def commands(image: Image) -> list[str]:
    return [step.command for step in image.steps if isinstance(step, Run)]


def copies(image: Image) -> list[Copy]:
    return [step for step in image.steps if isinstance(step, Copy) and step.sources]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """Folder with a.py, b.py, "c d.txt", sub/x and sub/deep/y."""
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.py", "b.py", "c d.txt", "sub/x", "sub/deep/y"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_instructions_of_a_usual_task(context: Path) -> None:
    image = read(
        context,
        """# A task
FROM --platform=linux/amd64 python:3.12-slim AS main
ENV GREETING="hello world" NUMBER=3
WORKDIR /src
WORKDIR ../app
COPY --chmod=755 a.py ./
RUN pip install \\
    # the test runner
    pytest \\

    numpy
EXPOSE 80
CMD ["bash"]
""",
    )
    environment = {"GREETING": "hello world", "NUMBER": "3"}
    assert image == Image(
        base="python:3.12-slim",
        steps=(
            Copy((), "/src/"),
            Copy((), "/app/"),
            Copy((context / "a.py",), "/app/", 0o755),
            Run("pip install     pytest     numpy", "/app", environment),
        ),
        workdir="/app",
        environment=environment,
        unsupported=(),
    )


def test_arguments_have_defaults_and_reach_commands(tmp_path: Path) -> None:
    image = read(
        tmp_path,
        "ARG V=3.12\nFROM python:${V}-slim\nARG V\nARG A=1 B='x $A'\nARG NONE\nENV A=2 C=$A\nRUN echo $A",
    )
    assert image.base == "python:3.12-slim"
    assert image.environment == {"A": "2", "C": "1"}
    (step,) = image.steps
    assert step == Run("echo $A", "/", {"V": "3.12", "A": "2", "B": "x $A", "C": "1"})


def test_env_forms(tmp_path: Path) -> None:
    image = read(
        tmp_path,
        "FROM x\nENV A one two\nENV B='$A' C=\"$A!\" D=a\\ b E=$UNKNOWN F=${A:-z}${Z:-$A}\nENV PATH=/opt/bin:$PATH\n",
    )
    assert image.environment == {
        "A": "one two",
        "B": "$A",
        "C": "one two!",
        "D": "a b",
        "E": "",
        "F": "one twoone two",
        "PATH": f"/opt/bin:{DEFAULT_PATH}",
    }


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$A-${A}b", "1-1b"),
        ("${EMPTY:-d}${EMPTY-d}${NONE-d}", "dd"),
        ("${A:+yes}${EMPTY:+yes}${EMPTY+set}", "yesset"),
        ("${NONE:-${A}x}", "1x"),
        (r"\$A", "$A"),
        (r""" '$A' "$A" '"' "'" "\"" """.strip(), """$A 1 " ' \""""),
        ("100$", "100$"),
    ],
)
def test_variables_are_replaced_as_in_docker(text: str, expanded: str) -> None:
    assert expand_variables(text, {"A": "1", "EMPTY": ""}) == expanded


@pytest.mark.parametrize(
    ("line", "sources", "target"),
    [
        ("COPY a.py x.py", ["a.py"], "/app/x.py"),
        ("COPY a.py .", ["a.py"], "/app/"),
        ("COPY a.py /app", ["a.py"], "/app/"),  # WORKDIR has created it
        ("COPY [ab].py sub /data/", ["a.py", "b.py", "sub"], "/data/"),
        ("COPY sub /data", ["sub"], "/data/"),
        ("COPY . .", ["."], "/app/"),
        ('COPY ["c d.txt", "e f.txt"]', ["c d.txt"], "/app/e f.txt"),
        ("ADD --chown=1000:1000 --link ${NAME}.py /x", ["a.py"], "/x"),
    ],
)
def test_copy(context: Path, line: str, sources: list[str], target: str) -> None:
    image = read(context, f"FROM x\nENV NAME=a\nWORKDIR /app\n{line}\n")
    assert image.unsupported == ()
    assert copies(image) == [Copy(tuple((context / source) for source in sources), target)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("COPY none.py /x", "none.py"),
        ("COPY ../secret /x", "../secret"),
        ("COPY outside /x", "outside"),
        ("COPY a.py b.py /x", "/x"),
        ("RUNN true", "RUNN"),
    ],
)
def test_an_error_names_file_and_line(context: Path, line: str, named: str) -> None:
    secret = context.parent / f"{context.name}_secret"
    secret.write_text("secret")
    (context / "outside").symlink_to(secret)
    with pytest.raises(ValueError) as error:
        read(context, f"# comment\nFROM x\nRUN a \\\n  b\n\n# comment\n{line}\n")
    assert f"{context / 'Dockerfile'}:7:" in str(error.value)
    assert named in str(error.value)


def test_a_file_without_an_image_is_an_error(tmp_path: Path) -> None:
    for text, named in (("# nothing\n", "FROM"), ("RUN true\nFROM x\n", "RUN"), ("FROM $NONE\n", "FROM")):
        with pytest.raises(ValueError, match=named):
            read(tmp_path, text)
    with pytest.raises(ValueError, match="none"):
        read_dockerfile(tmp_path / "none")


def test_forms_of_run(tmp_path: Path) -> None:
    image = read(
        tmp_path,
        """FROM x
RUN ["echo", "a b", "$HOME"]
RUN --mount=type=cache,target=/root/.cache pip install .
RUN [ -f /x ] || echo "# no comment"
RUN <<EOF
# a comment of the shell
set -e
echo "$HOME"
EOF
RUN <<-'END'
\techo 1
\tEND
RUN cat <<A > /a && cat <<"B" > /b
one
A
two
B
RUN <<EOF
#!/usr/bin/env python3
print(1)
EOF
RUN echo $((1 <<2)) "<<NONE"
RUN cat <<< word
CMD ["bash"]
""",
    )
    assert commands(image) == [
        "echo 'a b' '$HOME'",
        "pip install .",
        '[ -f /x ] || echo "# no comment"',
        '# a comment of the shell\nset -e\necho "$HOME"\n',
        "echo 1\n",
        'cat <<A > /a && cat <<"B" > /b\none\nA\ntwo\nB',
        "/usr/bin/env python3 /dev/stdin <<'EOF'\n#!/usr/bin/env python3\nprint(1)\nEOF",
        'echo $((1 <<2)) "<<NONE"',
        "cat <<< word",
    ]


def test_run_has_the_shell_of_docker(tmp_path: Path) -> None:
    text = 'FROM x\nRUN a\nSHELL ["bash", "-ec"]\nRUN a\nRUN ["a"]\n'
    steps = read(tmp_path, text).steps
    assert [step.shell for step in steps if isinstance(step, Run)] == [("/bin/sh", "-c"), ("bash", "-ec"), ()]
    with pytest.raises(ValueError, match="Dockerfile:2: "):
        read(tmp_path, "FROM x\nSHELL bash -c\n")


@pytest.mark.parametrize(
    "text",
    [
        "ENV A=aaaaaaaa\n" + "ENV A=$A$A\n" * 40,
        "RUN true\n" * 2000,
        "RUN " + "x" * (1 << 20),
        f"COPY {'a' * 5000} /x",
    ],
)
def test_files_without_an_end_are_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError):
        read(tmp_path, f"FROM x\n{text}")


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("# comment\n*.py\nDockerfile\n sub ", ["c d.txt"]),
        ("*\n!sub/deep", ["sub/deep", "sub/deep/y"]),
        ("sub/**\n!sub/**/y\n?.py\nD*e\n", ["c d.txt", "sub", "sub/deep/y"]),
        ("!a.py\na.*\nsub/../b.py\n**/deep/**\nc\\ d*\nx\nD**e", ["sub", "sub/deep", "sub/x"]),
        ("sub\n!" + "*d" * 100, ["Dockerfile", "a.py", "b.py", "c d.txt"]),
    ],
)
def test_files_of_dockerignore_are_not_copied(context: Path, patterns: str, names: list[str]) -> None:
    (context / ".dockerignore").write_text(patterns)
    (step,) = copies(read(context, "FROM x\nCOPY . /\n"))
    found = sorted(str(path.relative_to(context)) for _, path in step.list_files())
    assert [name for name in found if name != ".dockerignore"] == names


def test_copy_of_an_ignored_file_is_an_error(context: Path) -> None:
    (context / ".dockerignore").write_text("a.py\nsub\n!sub/x")
    with pytest.raises(ValueError, match=r"Dockerfile:2: 'a\.py'"):
        read(context, "FROM x\nCOPY a.py /\n")
    (step,) = copies(read(context, "FROM x\nCOPY sub /\n"))
    assert [path.name for _, path in step.list_files()] == ["x"]
    (context / ".dockerignore").write_text("[z-a]")
    with pytest.raises(ValueError, match="dockerignore"):
        read(context, "FROM x\n")


def test_instructions_without_docker_are_listed(context: Path) -> None:
    with tarfile.open(context / "files.tar.gz", "w:gz") as archive:
        archive.add(context / "a.py", "a.py")
    lines = [
        "USER agent",
        'ENTRYPOINT ["/run.sh"]',
        "COPY --from=builder /a /b",
        "COPY --chmod=u+x a.py /x",
        "COPY --exclude=x sub /y",
        "ADD https://example.com/file /file",
        "ADD git@github.com:a/b.git /b",
        "ADD files.tar.gz /data/",
        "RUN --mount=type=secret,id=a --mount=type=cache,target=/b true",
        "RUN --network=none true",
        "ONBUILD RUN true",
    ]
    image = read(context, "\n".join(["FROM x", "USER root", "USER 0:0", "COPY files.tar.gz /data/", *lines]))
    assert image.unsupported == tuple(lines)
    assert [copy.sources for copy in copies(image)] == [(context / "files.tar.gz",)]


def test_only_the_last_stage_is_the_image(context: Path) -> None:
    image = read(
        context, "FROM gcc AS builder\nENV A=1\nWORKDIR /b\nRUN make\nFROM debian\nCOPY --from=builder /b /b\n"
    )
    assert image == Image("debian", (), "/", {}, ("FROM debian", "COPY --from=builder /b /b"))
