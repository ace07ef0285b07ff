from pathlib import Path

import pytest

from alphaapollo.plugins.port.shell import list_script_commands


def words(source: str, path: str = "folder/x.sh", **variables: str) -> list[list[str]]:
    """The commands, with `<...>` around the parts that depend on the machine."""
    commands, _ = list_script_commands(source, path, variables)
    return [[word.replace("\2", "<").replace("\3", ">") for word in found] for _, found in commands]


# One script for many words, because each start of the sandbox takes time.
EXPANSION = r"""
X='1 2' EMPTY= LIST=('a b' c) PATHS=a/b/c.txt UP=UP NUMBER=5 form=%d
run '$X' "$X/b" $X/b a$X "" ${EMPTY}
run "${LIST[@]}" x"${LIST[@]}"y ${#LIST[@]} "${NONE[@]}" ${UNSET:-d} "${EMPTY:-d e}" ${X:+yes}
run ${PATHS##*/} ${PATHS%.txt} ${PATHS//\//-} ${UP,,} $(((NUMBER + 1) * 2 / 3)) \$X "it's (fine)"
run $HOME/data ~/data "${HOME}x" ${NEEDED:?give it} $((OTHER * NUMBER)) $(($OTHER / 2)) "$(date +%Y)_$UP"
run $(date +$form) $(nproc | awk '{print $1}') $(echo "$UP" | tr A-Z a-z) `pwd` $HOSTNAME $RANDOM
run $(($(nproc) * 2)) ${OTHER}
"""


def test_expansion():
    assert words(EXPANSION)[-1] == ["run", "<$(($(nproc) * 2))>", "<${OTHER}>"]
    found = [command for command in words(EXPANSION) if command[0] == "run"]
    assert found[:-1] == [
        ["run", "$X", "1 2/b", "1", "2/b", "a1", "2", ""],
        ["run", "a b", "c", "xa b", "cy", "2", "d", "d e", "yes"],
        ["run", "c.txt", "a/b/c", "a-b-c.txt", "up", "4", "$X", "it's (fine)"],
        [
            *["run", "<${HOME}>/data", "<${HOME}>/data", "<${HOME}>x", "<${NEEDED}>"],
            *["<$((${OTHER} * 5))>", "<$((${OTHER} / 2))>", "<$(date +%Y)>_UP"],
        ],
        [
            *["run", "<$(date +%d)>", "<$(nproc | awk '{print $1}')>", '<$(echo "UP" | tr A-Z a-z)>'],
            *["<${PWD}>", "<${HOSTNAME}>", "<${RANDOM}>"],
        ],
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("export X=1 Y=2\nX+=b; L=(1); L+=(2 3)\nrun $X$Y ${L[@]}", [["run", "1b2", "1", "2", "3"]]),
        ("if [ a = b ]; then x; elif [[ a == a && -n 1 ]]; then y; else z; fi", [["y"]]),
        ("if [ 3 -gt 2 ] && ! [ -z 1 ] && (( 4 % 2 == 0 )); then x; fi", [["x"]]),
        (
            "case ab in a) x ;; a* | c) y ;; *) z ;; esac\nfor i in 1 2; do run $i; done",
            [["y"], ["run", "1"], ["run", "2"]],
        ),
        ("f() { run $1 $2; }\nf a b\n{ run c; } && ( run d )", [["run", "a", "b"], ["run", "c"], ["run", "d"]]),
        ("set -euo pipefail\nfalse\nmkdir m && run", [["mkdir", "m"], ["run"]]),
        ("run a \\\n  b > logs/log 2>&1\ncat <<EOF > f\nrun x\nEOF\nrun y", [["run", "a", "b"], ["cat"], ["run", "y"]]),
        ('{ run a; } > $HOME/log 2> "$HOME/my log"\nexec > >(tee log) 2>&1\nrun b', [["run", "a"], ["run", "b"]]),
        (
            "X=$(python3 -c 'import n' 2>/dev/null && echo n || echo g)\nrun $X",
            [["python3", "-c", "import n"], ["run", "g"]],
        ),
        ('X="$(cd "$(dirname "/a/b/c.sh")/.." && pwd)"; run $X $(basename a/b.sh .sh)', [["run", "/a", "b"]]),
        ('run "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" $0', [["run", "folder", "folder/x.sh"]]),
        ('/usr/bin/python3 -m a\n"$HOME/bin/python" -m b', [["python3", "-m", "a"], ["python", "-m", "b"]]),
        ('if [ -z "$GIVEN" ]; then echo usage; exit 1; fi\nrun $GIVEN', [["run", "<${GIVEN}>"]]),
        ('if [ $# -lt 2 ]; then exit 1; fi\nrun $1 ${2:-two} "$@"', [["run", "<${1}>", "two", "<${1}>"]]),
        ("run $FIRST\nFIRST=${FIRST:-1}\nrun $FIRST", [["run"], ["run", "1"]]),
        ("while ! ray status; do sleep 5; done\nrun & wait", [["ray", "status"], ["run"]]),
    ],
)
def test_commands(source: str, found: list[list[str]]):
    assert sorted(words(source)) == sorted(found)  # of a pipeline, either side may come first


def test_variables_from_outside_win():
    assert words("X=1; run ${Y:-2} $X", X="7", Y="8") == [["run", "8", "7"]]


def test_lines_and_notes():
    source = '\nif [ "$(nproc)" -gt 2 ]; then x; fi\nrun\ntest -e /etc || [[ -d /etc ]] || run'
    commands, notes = list_script_commands(source, "a.sh", {})
    assert [line for line, found in commands if found == ["run"]] == [3, 4]
    facts = (("line 2:", "[ $(nproc) -gt 2 ]"), ("line 4:", "[ -e /etc ]"), ("line 4:", "[ -d /etc ]"))
    assert all(note.startswith(line) and note.endswith(end) for note, (line, end) in zip(notes, facts, strict=True))


def test_a_script_that_does_not_end_is_stopped(tmp_path: Path):
    target = tmp_path / "kept"
    target.write_text("as it was")
    source = f"run a\n/bin/rm -f {target}\nrm -f {target}\necho x > {target}\nf() {{ f | f & }}; f; while :; do :; done"
    commands, notes = list_script_commands(source, "a.sh", {})
    assert ["run", "a"] in [found for _, found in commands]
    assert any(note.startswith("stopped: ") for note in notes)
    assert target.read_text() == "as it was"


@pytest.mark.parametrize("source", ["if true; then x", "for i in 1; do x", "x; fi", "case a in a) x ;;", "x 'y"])
def test_a_broken_script_is_refused_with_its_line(source: str):
    with pytest.raises(ValueError, match=r"a\.sh: line \d+: "):
        list_script_commands(f"run\n{source}", "a.sh", {})


def test_a_machine_without_the_sandbox_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="Bash cannot run"):
        list_script_commands("run", "a.sh", {})
