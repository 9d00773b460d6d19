#!/usr/bin/env bash
# Builds the Jaeger that tests marked `jaeger` start, and prints its path; if it is there, only that.
# All that Go downloads and compiles for it is in a folder that is gone at the end, however it ends.
set -euo pipefail

version=1.76.0
module=github.com/jaegertracing/jaeger
home="${XDG_CACHE_HOME:-$HOME/.cache}/idemguard/jaeger-$version"
binary="$home/jaeger"
fail() { echo "build_jaeger: $*" >&2; exit 1; }

mkdir -p "$home"
if [ ! -x "$binary" ] && command -v flock >/dev/null 2>&1; then
  exec 9>"$home/lock"
  flock 9 # a second build waits here, and finds what the first one made
  rm -rf "$home"/build.* # of one that was killed
fi
[ -x "$binary" ] && { echo "$binary"; exit; }

go=$(PATH="$PATH:/usr/local/go/bin" command -v go) || fail "Go is needed: https://go.dev/doc/install"
child= work=
leave() {
  [ -z "$child" ] || { kill -- "-$child" && wait "$child"; } 2>/dev/null || true
  rm -rf ${work:+"$work"}
}
trap leave EXIT
trap 'exit 130' INT TERM HUP
work=$(mktemp -d "$home/build.XXXXXX")
set -m # a group of its own for each child, so that the compilers it starts end with it
# in the background, so that a signal is heard at once; without the lock, which must not outlive us
go() {
  nice "$go" "$@" </dev/null >&2 9>&- &
  child=$!
  wait "$child" || return
  child=
}

export GOCACHE="$work/cache" GOMODCACHE="$work/modules" GOTMPDIR="$work" GOWORK=off CGO_ENABLED=0
export GOFLAGS="-modcacherw -buildvcs=false" # what it downloads can be removed
cd "$work"
# not `go install`: it refuses a module that replaces another one
go mod download "$module@v$version" || fail "the module cannot be downloaded"
mv "$GOMODCACHE/$module@v$version" source
cd source
go build -trimpath -ldflags "-s -w" -o "$work/jaeger" ./cmd/jaeger || fail "it does not build"
"$work/jaeger" version >&2 || fail "it does not run"
mv "$work/jaeger" "$binary" # in one step: it is there as a whole, or not at all
echo "$binary"
