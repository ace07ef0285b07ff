# What bash reads before the script that is ported. Commands that bash does not have itself are recorded on descriptor 3,
# not run. A value that depends on the machine is its own text between the bytes 2 and 3: \2${HOME}\3, \2$(date)\3.
exec 3>&1 1>&0 # the output of the script itself goes to the /dev/null of stdin

for __name in HOME PWD OLDPWD PATH HOSTNAME RANDOM SECONDS EPOCHSECONDS; do
    unset -v "$__name"
    printf -v "$__name" '\2${%s}\3' "$__name"
done

exit() { :; } # a script without its arguments prints its usage and would end
source() { :; }
.() { :; }
exec() { "$@"; }
pushd() { cd "$@"; }
popd() { :; }
set() { :; } # the run goes on after errors
ulimit() { :; }
kill() { return 1; }
pwd() { printf '%s\n' "$PWD"; }

# Scripts see no files, and cannot compare a number of the machine: such a condition is false and noted.
function [ {
    local __line=${BASH_LINENO[0]} __status=0
    if [[ ${FUNCNAME[1]-} == test ]]; then __line=${BASH_LINENO[1]}; fi
    builtin [ "$@" 2>&0 || __status=$?
    if [[ $__status -gt 1 || " $*" == *\ -[defrswx]\ * ]]; then
        printf '%s: line %d: depends on the machine: [ %s\n' "$0" "$__line" "$*" >&2
    fi
    return "$__status"
}
test() { [ "$@" ]; }

cd() {
    if [[ ${1-} == -- ]]; then shift; fi
    PWD=${1-$HOME}
    while [[ $PWD =~ ^(.*)/[^/]*[^/.][^/]*/\.\.(/.*)?$ ]]; do PWD=${BASH_REMATCH[1]}${BASH_REMATCH[2]}; done
    PWD=${PWD:-/}
}

dirname() {
    if [[ $1 == -- ]]; then shift; fi
    local __path=${1%/}
    if [[ $__path == */* ]]; then __path=${__path%/*}; else __path=.; fi
    printf '%s\n' "${__path:-/}"
}

basename() {
    if [[ $1 == -- ]]; then shift; fi
    local __path=${1%/}
    __path=${__path##*/}
    printf '%s\n' "${__path%"${2-}"}"
}

# unknown TEXT: the text as a value that depends on the machine. Byte 4 is a space that separates no words.
unknown() {
    local __text=${1//[$'\2\3']/}
    printf '\2%s\3' "${__text//[[:space:]]/$'\4'}"
}

# arithmetic EXPRESSION: the number, or the expression with its variables filled in if one depends on the machine.
arithmetic() {
    local __rest=$1 __text= __part __no_name=$'^(\2[^\3]*\3|[^[:alpha:]_\2]+)'
    while [[ $__rest =~ $__no_name || $__rest =~ ^[[:alnum:]_]+ ]]; do
        __part=${BASH_REMATCH[0]}
        __rest=${__rest#"$__part"}
        if [[ $__part == [[:alpha:]_]* ]]; then __text+=${!__part-$__part}; else __text+=$__part; fi
    done
    if [[ $__text == *$'\2'* ]]; then unknown "\$(($__text))"; else printf '%d' "$((__text))"; fi
}

# Bash calls this, in a process of its own, for a command that it does not find. Its output is the value of `$(command)`.
command_not_found_handle() {
    local __word __input __text=
    for __word; do
        printf '%d\37%d\37%s\0' "$BASHPID" "${BASH_LINENO[0]}" "$__word" >&3
        if [[ $__word != *$'\2'* && $__word == *[!A-Za-z0-9_./:=+%@,-]* ]]; then __word=${__word@Q}; fi
        __text+=" $__word"
    done
    case $1 in # ms-swift reads these from the environment of a command
        swift | megatron)
            for __word in NPROC_PER_NODE NNODES; do
                if [[ -n ${!__word-} ]]; then printf '%d\37%d\37%s\0' "$BASHPID" "${BASH_LINENO[0]}" "$__word=${!__word}" >&3; fi
            done
            ;;
    esac
    case "$*" in
        mkdir\ * | touch\ * | rm\ * | sleep\ *) return 0 ;;
        python*\ -c\ *print*) ;;
        python*\ -c\ *) return 1 ;; # "is this package installed?"
    esac
    IFS= read -r -d '' __input
    __input=${__input%$'\n'}
    case $__input in
        '') ;;
        $'\2$('*$')\3') __text=" ${__input:3:-2} |$__text" ;;
        *) __text=" echo \"$__input\" |$__text" ;;
    esac
    unknown "\$(${__text# })"
    case $1 in
        python* | npu-smi | rocm-smi | lspci | grep | which | pip*) return 1 ;;
    esac
}
