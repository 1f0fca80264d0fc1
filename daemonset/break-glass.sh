#!/bin/sh
# Takes kura-shaper off this node, without the agent and without Python: sh, tc and a writable disk are enough.
#
#   break-glass.sh [--reason TEXT] [--device NAME]... [--state-dir DIR] [--without-marker]
#   break-glass.sh --check          changes nothing
#
# In this order: the marker that keeps an agent off, now and after a redeploy; our root qdisc, in whose place the kernel
# puts its own default; our filters on the egress hook; our pinned tcx links. Then it looks whether all of that is gone,
# and stays gone for a few seconds. Nothing of anybody else's is touched. Traffic goes on, without limits.
#
# Exit code: 0 nothing of ours is left; 1 something is; 2 usage; 3 the kernel or the disk refused; 4 can't look.
# It can be run again at any time. `kura-shaper enable`, or removing the marker, lets an agent shape this node again.
set -u
export LC_ALL=C PATH="${PATH:-}:/usr/sbin:/sbin:/usr/bin:/bin"

state=/var/lib/kura-shaper reason='break-glass' devices='' check='' marker=yes
usage() { sed -n '4,5s/^# *//p' "$0" 2>/dev/null; }
say() { printf 'break-glass: %s\n' "$*"; }
die() { code=$1; shift; say "FAILED: $*"; exit "$code"; }
while [ $# -gt 0 ]; do
  case $1 in
    --check) check=yes ;;
    --without-marker) marker= ;;
    --reason | --device | --state-dir)
      [ $# -ge 2 ] || { usage; die 2 "$1 needs a value"; }
      case $1 in
        --reason) reason=$2 ;;
        --device) devices="$devices $2" ;;
        --state-dir) state=$2 ;;
      esac
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) usage; die 2 "unknown argument $1" ;;
  esac
  shift
done

command -v tc >/dev/null || die 4 "no tc here; run this on the node itself (chroot /host)"
for name in $devices; do [ -e "/proc/sys/net/ipv4/conf/$name" ] || die 2 "no device $name here"; done

# Reading. Each prints what of ours there is, and fails when it can't be known.
chosen() { [ -z "$devices" ] && return 0; case " $devices " in *" $1 "*) return 0 ;; esac; return 1; }
all_qdiscs() { tc qdisc show; }

# Devices whose root is ours: an mq 1f:, or an HTB 20: with a default class of ours.
our_roots() {
  shown=$(all_qdiscs) || return 1
  printf '%s\n' "$shown" | while read -r _ kind handle _ device place rest; do
    [ "$place" = root ] || continue
    case "$kind $handle $rest " in
      'mq 1f: '*) ;;
      'htb 20: '*' default 0x12 '* | 'htb 20: '*' default 0x2 '*) ;;
      *) continue ;;
    esac
    chosen "$device" && echo "$device"
  done
  return 0
}

# Lines `DEVICE PRIORITY KIND`: bpf at 11 and 13, fw at 12, for every protocol, on the egress hook.
our_filters() {
  shown=$(all_qdiscs) || return 1
  for device in $(printf '%s\n' "$shown" | sed -n 's/^qdisc clsact [^ ]* dev \([^ ]*\) .*/\1/p'); do
    chosen "$device" || continue
    filters=$(tc filter show dev "$device" egress) || return 1
    printf '%s\n' "$filters" | sed -n \
      -e "s/^filter protocol all pref \(1[13]\) bpf .*/$device \1 bpf/p" \
      -e "s/^filter protocol all pref \(12\) fw .*/$device \1 fw/p" | sort -u
  done
}

# Links of this network namespace: its number ends their names, the device's comes before it.
our_pins() {
  namespace=$(stat -Lc %i /proc/self/ns/net) || return 1
  for directory in /sys/fs/bpf/kura-shaper /run/kura-shaper/bpf; do
    for pin in "$directory/steer_"*"_$namespace" "$directory/steer_"*"_${namespace}_new"; do
      [ -e "$pin" ] || continue
      if [ -n "$devices" ]; then
        index=${pin##*/steer_} index=${index%%_*} is_chosen=''
        for name in $devices; do
          [ "$(ip -o link show dev "$name" 2>/dev/null | cut -d: -f1)" = "$index" ] && is_chosen=yes
        done
        [ -n "$is_chosen" ] || continue
      fi
      echo "$pin"
    done
  done
}

# Sets left, in words.
look() {
  if ! { roots=$(our_roots) && filters=$(our_filters) && pins=$(our_pins); }; then
    die 4 "the kernel's state can't be read"
  fi
  left=''
  for device in $roots; do left="$left; root qdisc on $device"; done
  [ -n "$filters" ] && left="$left; filters on the egress hook of $(printf '%s\n' "$filters" | cut -d' ' -f1 | sort -u | tr '\n' ' ')"
  for pin in $pins; do left="$left; $pin"; done
  left=${left#; }
}

look
if [ -n "$check" ]; then
  if [ -e "$state/disabled" ]; then say "the marker $state/disabled is there"; else say "there is no marker"; fi
  [ -z "$left" ] && { say "nothing of ours is here"; exit 0; }
  say "here: $left"
  exit 1
fi

write_marker() {
  said=$(printf '%s' "$reason" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')
  fresh=$state/.disabled-break-glass
  mkdir -p "$state" || return 1
  printf '{"reason": "%s", "who": "break-glass.sh@%s", "at": "%s"}\n' "$said" "$(uname -n)" \
    "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" >"$fresh" || return 1
  # Where sync knows no files it writes everything out.
  chmod 644 "$fresh" && { sync "$fresh" 2>/dev/null || sync; } && mv -f "$fresh" "$state/disabled"
}

# 1. The marker, whole or not at all, before anything that an agent would mend.
if [ -n "$marker" ]; then
  write_marker || die 3 "no marker at $state; --without-marker goes on, and an agent puts everything back"
  say "an agent keeps off: $state/disabled"
fi

# 2. to 4. An agent that was in the middle of a look holds the device's lock, and does not begin another.
remove_root() {
  say "removing the root qdisc of $1"
  for lock in "$state/$1."*.lock; do
    if [ -e "$lock" ] && command -v flock >/dev/null; then
      flock -w 15 "$lock" tc qdisc del dev "$1" root && return 0
      say "not under the lock $lock; going on without it"
    fi
  done
  tc qdisc del dev "$1" root
}
remove_filters() {
  printf '%s\n' "$filters" | {
    refused=0
    while read -r device priority kind; do
      [ -n "$device" ] || continue
      say "removing filters $priority ($kind) of the egress hook of $device"
      tc filter del dev "$device" egress protocol all pref "$priority" || refused=1
    done
    return "$refused"
  }
}
rounds=0 quiet=0 refusals=0
while :; do
  refused=0
  for device in $roots; do remove_root "$device" || refused=1; done
  remove_filters || refused=1
  for pin in $pins; do
    say "removing $pin"
    rm -f "$pin" || refused=1
  done
  refusals=$((refusals + refused))
  # 5. Gone, and still gone after an agent would have had time for a look.
  sleep 1
  look
  if [ -z "$left" ]; then quiet=$((quiet + 1)); else quiet=0; fi
  [ "$quiet" -ge 2 ] && break
  [ "$refusals" -ge 3 ] && die 3 "refused, see above; still here: $left"
  rounds=$((rounds + 1))
  [ "$rounds" -ge 6 ] && die 1 "still here, somebody puts it back: $left"
done
tc qdisc show | grep ' root ' | while read -r line; do say "now: $line"; done
say "done: nothing of ours is left"
