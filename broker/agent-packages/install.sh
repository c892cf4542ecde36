#!/bin/sh
# Installs the Farhand agent on this machine from its broker, or updates an installed agent to the broker's version.
#
#   curl --proto '=https' -fsSL https://BROKER/install.sh | sudo sh -s -- [OPTIONS]
#
#   --join-token T, --join-token-file F, or the variable FARHAND_JOIN_TOKEN   needed until the machine has joined
#   --no-service                       installs only the program, /usr/local/bin/farhand-agent, and no service; prints
#                                      how to start it
#   all other options                  are passed to `farhand-agent install`: --name, --tags, --allow, --root, --user
set -eu

from=@FROM@
pin=@PIN@
broker=@BROKER@
place=/opt/farhand-agent
link=/usr/local/bin/farhand-agent

# Only functions follow, up to the last line: a script that is cut off during its download must run nothing.
fail() {
  echo "install.sh: $*" >&2
  exit 1
}

# fetch NAME FILE: downloads a file, only from the broker.
fetch() {
  if command -v curl >/dev/null; then
    set -- -fsS -o "$2" "$from/$1"
    case $from in https://*) set -- --proto '=https' "$@" ;; esac
    if [ -n "$pin" ]; then set -- -k --pinnedpubkey "$pin" "$@"; fi
    curl "$@"
  elif [ -n "$pin" ]; then
    fail "curl is needed, because wget cannot compare the broker's certificate with a pinned key; install curl"
  elif command -v wget >/dev/null; then
    wget -q -O "$2" "$from/$1"
  else
    fail "curl or wget is needed; install one of them"
  fi || fail "$from/$1 could not be downloaded"
}

sum() {
  sha256sum "$1" | cut -d ' ' -f 1
}

# quote WORD: prints a word for a command line that a person pastes into a shell.
quote() {
  case $1 in
    '' | *[!A-Za-z0-9_.:/@%+=,-]*) printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf %s "$1" ;;
  esac
}

# by_hand OPTIONS: prints the command that starts the agent without a service, without the options for services.
by_hand() {
  set -- --join-token-file FILE "$@"
  [ "$named" = yes ] || set -- --broker "${broker:-HOST:8421}" "$@"
  printf farhand-agent
  while [ $# -gt 0 ]; do
    case $1 in
      --user | --trust-key) [ $# -lt 2 ] || shift ;;
      --user=* | --trust-key=* | --allow-sudo) ;;
      *)
        printf ' '
        quote "$1"
        ;;
    esac
    shift
  done
}

check_machine() {
  [ "$(uname -s)" = Linux ] || fail "there are packages only for Linux"
  if [ "$service" = yes ] && ! [ -d /run/systemd/system ]; then
    fail "systemd does not run on this machine, so the agent cannot be a service; nothing was installed.
To install only the program, add the option --no-service: … | sudo sh -s -- --no-service
Then start the agent by hand, with the join token in FILE: $(by_hand "$@")"
  fi
  [ "$(id -u)" = 0 ] || fail "this script must run as root; use sudo"
  for program in sha256sum tar gzip mktemp readlink timeout head flock; do
    command -v "$program" >/dev/null || fail "the program $program is needed; install it"
  done
  case $(uname -m) in
    x86_64 | amd64) arch=x64 ;;
    aarch64 | arm64) arch=arm64 ;;
    *) fail "there is no package for $(uname -m), only for x86_64 and aarch64" ;;
  esac
}

# has_joined: true if this machine has joined the broker that the token pins.
has_joined() {
  # This script runs as root. The agent's user owns /var/lib/farhand-agent and could put a FIFO or endless file there.
  identity=$(timeout 5 head -c 65536 /var/lib/farhand-agent/identity.json 2>/dev/null) || return 1
  case $identity in
    *'"machine_id":null'*) return 1 ;;
    *"\"fingerprint\":\"$(printf %s "$token" | cut -d . -f 2)\""*) return 0 ;;
    *) return 1 ;;
  esac
}

# check_sums FILE: compares FILE, the downloaded SHA256SUMS, with the SHA-256 in the join token. A machine that has
# already joined may have an outdated token, or none.
check_sums() {
  if [ -n "$token" ]; then
    expected=$(printf %s "$token" | cut -d . -f 3)
    if [ -n "$expected" ] && [ "$(sum "$1")" = "$expected" ]; then return; fi
    if ! has_joined; then
      [ -n "$expected" ] || fail "this join token was created while the broker had no packages; create a new one"
      fail "the packages of $from have changed since this join token was created; create a new one"
    fi
    echo "install.sh: this machine has already joined this broker: updating it without the join token" >&2
  else
    [ -e /var/lib/farhand-agent/identity.json ] || [ -e /var/lib/farhand-agent/join-token ] || [ "$service" = no ] ||
      fail "a join token is needed: use --join-token-file FILE or the variable FARHAND_JOIN_TOKEN"
  fi
  # Without a checked SHA-256, only the connection protects the packages: it must be HTTPS or lead to this machine.
  case $from in
    https://* | http://127.* | http://localhost | http://localhost[:/]* | 'http://[::1]'*) ;;
    *) fail "$from is not encrypted, so others could replace the packages; create a new join token" ;;
  esac
}

# unpack FOLDER: downloads, checks and unpacks the package for this machine; sets `version`.
unpack() {
  fetch packages/SHA256SUMS "$1/SHA256SUMS"
  check_sums "$1/SHA256SUMS"
  line=$(grep -E "^[0-9a-f]{64}  farhand-agent-[0-9A-Za-z.+-]+-linux-$arch\.tar\.gz\$" "$1/SHA256SUMS") ||
    fail "the broker has no package for $arch"
  file=${line#*  }
  version=${file#farhand-agent-}
  version=${version%"-linux-$arch.tar.gz"}
  fetch "packages/$file" "$1/$file"
  [ "$(sum "$1/$file")" = "${line%%  *}" ] || fail "$file is damaged: its SHA-256 is not the one in SHA256SUMS"
  tar -xzf "$1/$file" -C "$1" --no-same-owner
  mv "$1/${file%.tar.gz}" "$1/program"
  "$1/program/bin/farhand-agent" --version >/dev/null || fail "the agent does not run on this machine"
}

# put FOLDER: moves the new version to a directory of its own, and makes `current` point to it in one step.
put() {
  name=$version-${1##*/.new-}
  mv "$1/program" "$place/$name"
  point "$name"
  mkdir -p "${link%/*}"
  ln -sfn "$place/current/bin/farhand-agent" "$link"
}

# point NAME: makes the link `current` point to a version.
point() {
  rm -f "$folder/current"
  ln -s "$1" "$folder/current"
  mv -Tf "$folder/current" "$place/current"
}

# sweep: deletes the files that interrupted installations left, and all versions except the new one.
# Deletes nothing while an upgrade by the broker runs, which may have to return to an older version.
sweep() {
  [ ! -e /var/lib/farhand-agent-upgrade/state.json ] || return 0
  for old in "$place"/* "$place"/.new-*; do
    case ${old##*/} in current | "$name" | "${folder##*/}") ;; *) rm -rf "$old" ;; esac
  done
}

is_running() {
  [ "$service" = yes ] && systemctl is-active --quiet farhand-agent
}

# knows_broker: true if the settings of this machine name a broker. If there is a token, the machine must also have
# joined the broker that the token pins.
knows_broker() {
  grep -q '^broker = ' /etc/farhand/agent.toml 2>/dev/null || return 1
  [ -z "$token" ] || has_joined
}

# start: installs and starts the service. An update writes the unit file again, so that it starts the new version.
start() {
  if [ "$service" = no ]; then
    echo "farhand-agent $version is installed: $link"
    echo "To start it, as the user that its commands run as: $(by_hand "$@")"
    echo "FILE must contain the join token; it is needed at the first start only."
  else
    [ "$named" = yes ] || knows_broker || set -- --broker "$broker" "$@"
    FARHAND_JOIN_TOKEN=$token "$link" install "$@"
  fi
}

# leave: runs at exit. If the installation fails after put, restores the previous version, if there is one.
leave() {
  if [ -n "$name" ] && [ -n "$before" ]; then
    point "$before"
    rm -rf "${place:?}/$name"
    if [ "$ran" = yes ] || is_running; then systemctl restart farhand-agent || true; fi
    echo "install.sh: the installation failed; the previous version was restored" >&2
  fi
  rm -rf "$folder"
}

main() {
  token=${FARHAND_JOIN_TOKEN:-}
  service=yes
  named=no
  left=$#
  while [ "$left" -gt 0 ]; do
    word=$1
    shift
    left=$((left - 1))
    case $word in
      --join-token | --join-token-file)
        [ "$left" -gt 0 ] || fail "$word needs a value"
        if [ "$word" = --join-token ]; then token=$1; else token=$(cat "$1"); fi
        shift
        left=$((left - 1))
        ;;
      --join-token=*) token=${word#*=} ;;
      --join-token-file=*) token=$(cat "${word#*=}") ;;
      --no-service) service=no ;;
      --broker | --broker=*)
        named=yes
        set -- "$@" "$word"
        ;;
      *) set -- "$@" "$word" ;;
    esac
  done
  check_machine "$@"
  umask 022
  mkdir -p "$place"
  exec 9<"$place"
  flock -n 9 || fail "this script is running already on this machine; try again when it has ended"
  folder=$(mktemp -d "$place/.new-XXXXXX")
  name=
  before=
  trap leave EXIT
  trap 'exit 1' HUP INT TERM
  unpack "$folder"
  before=$(readlink "$place/current") || before=
  ran=no
  if is_running; then ran=yes; fi
  put "$folder"
  code=0
  start "$@" || code=$?
  [ "$code" = 0 ] || exit "$code"
  before=
  sweep
}

# If the download is cut off within this line, the open brace is a syntax error. Without the brace, main could then run
# without its arguments.
{ main "$@"; }
