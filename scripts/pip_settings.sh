# Source this file to pass pip's configuration (index-url, extra-index-url, find-links, cert) to uv, which does not read
# it. Variables of uv that are already set are kept. Needs .venv.

pip_settings="$(.venv/bin/python -m pip config list 2>/dev/null || true)"

pip_setting() { # print a value of `pip config list`; environment variables come before configuration files
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
for place in $(pip_setting find-links); do # uv fails on a missing folder, pip ignores it
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
    export UV_INDEX UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # as pip: the best version of all indexes
fi
if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "$(pip_setting cert)" ]; then
    SSL_CERT_FILE="$(pip_setting cert)"
    export SSL_CERT_FILE
fi
