import subprocess

import pytest

from alphaapollo.plugins.port.shell import MAX_EXPANDED, list_script_commands

# What bash itself computes, too.
EXPANSION = r"""
X='1 2' EMPTY= LIST=('a b' c) NUMBER=5 # a comment, isn't read
LIST+=(
    "d" # of an item
    e\ f
)
export Y=2 Z
Y+=b
run '$X' "$X/b" $X/b a$X "" ${EMPTY} $Y
run "${LIST[@]}" x"${LIST[@]}"y ${LIST[@]} ${LIST[1]} $LIST "${NONE[@]}" ${UNSET:-d} "${EMPTY:-$X e}" ${X:+yes}
run $(((NUMBER + 1) * 2 / 3)) $((NUMBER%3-$NUMBER)) \$X "it's \"so\" (fine)" a=b=c "x  y" | run ${EMPTY-d}z | run a#b
run $'it\'s\n \x41 é ☃' "$'x'"
run a \
  b > /dev/null 2>&1 && run "--o=$X" < <(:) &
wait
read -r -d '' TEXT <<EOF
first $X \
  'second'
EOF
run $TEXT
cat <<'END' > /dev/null
run x
END
"""


def words(source: str, **variables: str) -> list[list[str]]:
    """The commands, with `<...>` around the parts that depend on the machine, and `?...?` around what is not known."""
    commands = list_script_commands(source, "folder/x.sh", variables)
    return [[word.translate({2: "<", 3: ">", 5: "?", 6: "?"}) for word in command.words] for command in commands]


def test_words_are_those_of_bash():
    record = "run() { printf '%s\\0' run \"$@\" END >&3; }\nexec 3>&2\n"
    done = subprocess.run(["bash", "-c", record + EXPANSION], capture_output=True, text=True)
    expected = [call.split("\0")[:-1] for call in done.stderr.split("END\0")[:-1]]
    found = [command for command in words(EXPANSION) if command[0] == "run"]
    assert len(found) == 9 and sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            'run $HOME/data ~/data "${HOME}x" ${NEEDED:?give it} $OTHER',
            "<${HOME}>/data <${HOME}>/data <${HOME}>x <${NEEDED}> <${OTHER}>",
        ),
        (
            "N=5; run $((OTHER * N)) $(($(nproc) * 2)) $((N ** 2))",
            "<$((${OTHER} * 5))> <$(($(nproc) * 2))> <$((5 ** 2))>",
        ),
        (
            "Y=%d; run $(date +$Y)_a `pwd` $(nproc | awk '{print $1}')",
            "<$(date +%d)>_a <${PWD}> <$(nproc | awk '{print $1}')>",
        ),
        ('X=a/b; run ${X##*/} "${X//a/b}"_c ${#X}', "<${X##*/}> <${X//a/b}>_c <${#X}>"),
        ('A="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"; run $A $(dirname $0) $0', ". folder folder/x.sh"),
        ("cd /data; run $PWD", "<$(cd /data && pwd)>"),
        ('run $1 ${2:-two} "$@"', "<${1}> two"),
        ("if [ a = b ]; then X=1; fi; run $X", "?X is set inside `if` (line 1)?"),
        ("for X in 1 2; do run $X; done", "?X is set by `for` (line 1)?"),
        ("X=1\n[[ -n $X && (a < b) ]] && X=2\nrun $X", "?X is set after && (line 2)?"),
        ("X=1; ((X++)); run $((X + 1))", "?X is set by `((` (line 1)?"),
        ("f() { run $1 $X; }\nX=5\nf a", "?$1 is an argument of a function? 5"),
        ("set -euo pipefail\nrun a; exit\nrun b", "a"),
        ("run $(((1 - 8) / 2)) $(((1 - 8) % 2)) $((1 / 0)) a\\\n", "-3 -1 <$((1 / 0))> a"),
    ],
)
def test_values_that_are_not_known(source: str, found: str):
    (command,) = [command for command in words(source) if command[0] == "run"]
    assert " ".join(command[1:]) == found


def test_given_values_and_arguments():
    assert words("X=1; run ${Y:-2} $X", X="7", Y="8") == [["run", "8", "7"]]
    script = 'if [ $# -lt 2 ]; then exit 1; fi\nX=$1\nshift 1\nif a; then L=(x); fi\nrun $X "$@" "${L[@]}"'
    assert words(script, **{"1": "a b", "2": "c"}, L="k=1 'l m'")[-1] == ["run", "a", "b", "c", "k=1", "l m"]
    assert words('if a; then L=(x); fi\nrun "${L[@]}"', L="")[-1] == ["run"]
    assert words("NNODES=3\nNPROC_PER_NODE=2 swift sft") == [["swift", "sft", "NPROC_PER_NODE=2", "NNODES=3"]]


def test_lines_and_conditions():
    source = (
        '\nif [ "$(nproc)" -gt 2 ]; then x \\\n  y; else\nrun; fi\ntest -e /etc || run 1\r\n{ run 2; } && ( run 3 )'
    )
    commands = list_script_commands(source, "a.sh", {})
    found = {(command.line, *command.words): command.condition for command in commands if "run" in command.words}
    assert found == {
        (4, "run"): "inside `if` (line 2)",
        (5, "run", "1"): "after || (line 5)",
        (6, "run", "2"): "inside `{` (line 6)",
        (6, "run", "3"): "",
    }


@pytest.mark.parametrize(
    "source",
    ["if true; then x", "for i in 1; do x", "x; fi", "case a in a) x ;;", "x 'y", 'x "$(y"', "x <<A\nb", "f() {"],
)
def test_a_broken_script_is_refused_with_its_line(source: str):
    with pytest.raises(ValueError, match=r"a\.sh: line 2: .* Correct"):
        list_script_commands(f"run\n{source}", "a.sh", {})


def test_values_that_double_each_other_are_refused():
    source = "X=" + "x" * 100 + "\n" + "X=$X$X\n" * 40
    with pytest.raises(ValueError, match=f"longer than {MAX_EXPANDED >> 20} MiB"):
        list_script_commands(source, "a.sh", {})
