# as_nobody.sh PREFIX TOP COPY COMMAND...: run COMMAND as an unprivileged user, in a mount namespace where PREFIX (the
# Python installation) can be reached although TOP, a folder above it, is closed to others. Needs root.
set -e
PREFIX=$1 TOP=$2 COPY=$3
shift 3
if [ -n "$TOP" ]; then
    mount --bind "$PREFIX" "$COPY"
    mount -t tmpfs -o mode=755 none "$TOP"
    mkdir -p "$PREFIX"
    mount --bind "$COPY" "$PREFIX"
fi
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
