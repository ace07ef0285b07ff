import pytest

from alphaapollo.config.port.expansion import MARK, Scope, expand, unknown
from alphaapollo.config.port.grammar import parse
from alphaapollo.config.port.lexer import tokens
from alphaapollo.config.port.shell import read_script


def words(source: str, **variables: str) -> list[list[str]]:
    return [command.words for command in read_script(source, variables).commands]


def fields(word: str, **variables: str | list[str]) -> list[str]:
    return expand(word, Scope(answer=lambda _: None, variables=dict(variables)))


def test_words_and_operators():
    found = [
        token.text for token in tokens("a 'b c'\"$d e\" \\\n  f=(1 # no)\n2) && g; # h\ni <<EOF\ntext\nEOF\nj 2>&1")
    ]
    assert found == ["a", "'b c'\"$d e\"", "f=(1 # no)\n2)", "&&", "g", ";", "\n", "i", "\n", "\n", "j", ">&", "1"]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("a", ["a"]),
        ("'$X'", ["$X"]),
        ('"$X"/b', ["1 2/b"]),
        ("$X/b", ["1", "2/b"]),
        ("a$X", ["a1", "2"]),
        ("", []),
        ('""', [""]),
        ("${EMPTY}", []),
        ('"${LIST[@]}"', ["a b", "c"]),
        ('x"${LIST[@]}"y', ["xa b", "cy"]),
        ("${LIST[1]}", ["c"]),
        ("${#LIST[@]}", ["2"]),
        ('"${NONE[@]}"', []),
        ("${NONE:-d}", ["d"]),
        ('"${EMPTY:-d e}"', ["d e"]),
        ("${EMPTY-d}", []),
        ("${X:+yes}", ["yes"]),
        ("${PATHS##*/}", ["c.txt"]),
        ("${PATHS%.txt}", ["a/b/c"]),
        ("${PATHS%%/*}", ["a"]),
        ("${PATHS#*/}", ["b/c.txt"]),
        ("${PATHS//\\//-}", ["a-b-c.txt"]),
        ("${UP,,}", ["up"]),
        ("$(((NUMBER + 1) * 2 / 3))", ["4"]),
        ("\\$X", ["$X"]),
        ('"it\'s (fine)"', ["it's (fine)"]),
        ("$HOME/data", [f"{MARK}$HOME{MARK}/data"]),
        ("${NEEDED:?give it}", [unknown("${NEEDED}")]),
        ("$((OTHER * 2))", [unknown("$((OTHER * 2))")]),
        ("$(date +%Y)_$X", [unknown("$(date +%Y)") + "_1", "2"]),
    ],
)
def test_expansion(word: str, found: list[str]):
    known = {"X": "1 2", "EMPTY": "", "LIST": ["a b", "c"], "PATHS": "a/b/c.txt", "UP": "UP", "NUMBER": "5"}
    assert fields(word, **known) == found


def test_what_is_not_known_has_the_scripts_own_values_put_in():
    assert fields("$(date +$form)", form="%d") == [unknown("$(date +%d)")]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a 1\nb 2", [["a", "1"], ["b", "2"]]),
        ("X=1; run $X", [["run", "1"]]),
        ("export X=1 Y=2\nrun $X$Y", [["run", "12"]]),
        ("X=a; X+=b; L=(1); L+=(2 3); run $X ${L[@]}", [["run", "ab", "1", "2", "3"]]),
        ("if [ a = b ]; then x; elif [[ a == a && -n 1 ]]; then y; else z; fi", [["y"]]),
        ("if [ 3 -gt 2 ] && ! [ -z 1 ]; then x; fi", [["x"]]),
        ("if (( 4 % 2 != 0 )); then x; else y; fi", [["y"]]),
        ("case ab in a) x ;; a* | c) y ;; *) z ;; esac", [["y"]]),
        ("for i in 1 2; do run $i; done", [["run", "1"], ["run", "2"]]),
        ("f() { run $1 $2; }\nf a b", [["run", "a", "b"]]),
        ("[ a = b ] && x || y", [["y"]]),
        ("mkdir m && run", [["mkdir", "m"], ["run"]]),
        ("run a \\\n  b > log 2>&1 | tee log", [["run", "a", "b"], ["tee", "log"]]),
        ("X=$(python3 -c 'import n' && echo n || echo g); run $X", [["run", "g"]]),
        ('X="$(cd "$(dirname "/a/b/c.sh")/.." && pwd)"; run $X', [["run", "/a"]]),
        ("cat <<EOF > f\nrun x\nEOF\nrun y", [["cat"], ["run", "y"]]),
        ("{ run a; } && ( run b )", [["run", "a"], ["run", "b"]]),
    ],
)
def test_commands(source: str, found: list[list[str]]):
    assert words(source) == found


def test_variables_from_outside_win():
    assert words("X=1; run ${Y:-2} $X", X="7", Y="8") == [["run", "8", "7"]]


def test_what_cannot_be_told_is_noted():
    reader = read_script('if [ "$#" -lt 2 ]; then usage; fi\nwhile read line; do x; done\nrun')
    assert [command.words for command in reader.commands] == [["run"]]
    assert reader.notes == [
        'line 1: cannot tell whether `[ "$#" -lt 2 ]`; taken as false',
        "line 2: a while loop was not followed",
    ]


@pytest.mark.parametrize("source", ["if true; then x", "for i in 1; do x", "x; fi", "case a in a) x ;;"])
def test_a_broken_script_is_refused_with_its_line(source: str):
    with pytest.raises(ValueError, match="line 1: "):
        parse(source)
