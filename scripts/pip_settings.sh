# Sourced: tells uv, which does not read pip's configuration, where pip takes packages from (index-url, extra-index-url,
# find-links, cert). uv's own variables win where they are set. Needs a .venv.

pip_settings="$(.venv/bin/python -m pip config list 2>/dev/null || true)"

pip_setting() { # one value of `pip config list`, which names environment variables, then sections of its files
    local scope value
    for scope in :env: install global; do
        value="$(sed -n "s/^$scope\.$1='\(.*\)'\$/\1/p" <<<"$pip_settings")"
        if [ -n "$value" ]; then
            echo "${value//\\n/ }"
            return
        fi
    done
}

find_links=""
for place in $(pip_setting find-links); do # uv stops at a folder that is not there, pip goes on
    case $place in *://*) ;; *) [ -e "$place" ] || continue ;; esac
    find_links+="${find_links:+,}$place"
done
export UV_FIND_LINKS="${UV_FIND_LINKS:-$find_links}"
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && [ -n "$(pip_setting index-url)" ]; then
    UV_DEFAULT_INDEX="$(pip_setting index-url)"
    export UV_DEFAULT_INDEX
fi
if [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ] && [ -n "$(pip_setting extra-index-url)" ]; then
    UV_INDEX="$(pip_setting extra-index-url)"
    export UV_INDEX UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # pip's way: all indexes are equal
fi
if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "$(pip_setting cert)" ]; then
    SSL_CERT_FILE="$(pip_setting cert)"
    export SSL_CERT_FILE
fi
