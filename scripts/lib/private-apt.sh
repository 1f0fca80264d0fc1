# shellcheck shell=bash
# Sourced: `private_apt` is apt-get for another Debian suite, with sources, lists, cache and status of
# its own below $work, and `private_kernel` the kernel that a meta package of that suite leads to. Neither
# /etc/apt nor dpkg's database is touched.
# Needs: $suite, $work (an empty directory), and the functions say and fail.
: "${suite:?}" "${work:?}"
if [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null; then fail "not Debian: install it by other means"; fi
[ "$(id -u)" = 0 ] || fail "not root: install it by other means"

# apt itself says where its sources lead, whatever format they are written in.
# shellcheck disable=SC1091
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
uris=$(apt-get --print-uris update 2>/dev/null | sed -n "s/^'\(.*\)\/dists\/\([^/]*\)\/InRelease'.*/\2 \1/p")
mirror_of() { awk -v a="$1" -v b="$2" '$1 == a || $1 == b { print $2; exit }' <<<"$uris"; }
mirror=$(mirror_of "$codename" stable)
[ -n "$mirror" ] || fail "apt has no source for Debian $codename, so no mirror is known"
security=$(mirror_of "$codename-security" stable-security)
keys=$(find /usr/share/keyrings -name 'debian-archive-keyring.*' 2>/dev/null | sort | head -n 1)
[ -n "$keys" ] || fail "the package debian-archive-keyring is missing"

# With an empty dpkg status apt resolves the whole closure, the C library included.
mkdir -p "$work"/{lists/partial,cache/archives/partial}
: >"$work/status"
echo "deb [signed-by=$keys] $mirror $suite main" >"$work/sources.list"
if [ "$suite" != sid ]; then
  echo "deb [signed-by=$keys] ${security:-$mirror-security} $suite-security main" >>"$work/sources.list"
fi
private_options=(-oDir::Etc::sourcelist="$work/sources.list" -oDir::Etc::sourceparts=/dev/null
  -oDir::Etc::preferencesparts=/dev/null -oDir::State="$work" -oDir::State::Lists="$work/lists"
  -oDir::State::status="$work/status" -oDir::Cache="$work/cache" -oAPT::Install-Recommends=false
  -oDebug::NoLocking=1 -oAPT::Sandbox::User=root -oAPT::Update::Error-Mode=any)
private_apt() {
  apt-get -qq -y "${private_options[@]}" "$@" >>"$work/log" 2>&1 ||
    fail "apt-get $1 for $suite failed: $(grep -m 1 '^[EW]:' "$work/log" || echo "see apt's own sources")"
}
private_kernel() {
  apt-cache "${private_options[@]}" depends "$1" | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p'
}
