#!/bin/bash
# Install what the demo or the tests need from the distribution, and only what is missing.
#
# Usage: tools/setup-debian.sh [--dry-run] demo|test
#
# Debian and Ubuntu. As root it calls apt-get itself, else through sudo. PYTHON names the
# interpreter that the virtual environment will be made with (default: python3).
# Exit status: 0 done · 2 usage · 69 not to be had · 77 needs root.
set -euo pipefail

# The incident is played with the real tools: DKMS and kbuild, depmod, and what reads modules.
readonly DEMO_PACKAGES=(
    dkms kmod gcc libc6-dev make patch git       # build modules as the host would
    libelf-dev                                   # objtool of unpacked kernel headers needs libelf
    binutils openssl xz-utils zstd cpio          # look into, sign and compress them
    fakeroot                                     # dkms on a tree that is not root's
    ca-certificates
)
readonly TEST_PACKAGES=(
    mmdebstrap initramfs-tools-core              # system roots and initial RAM disks
    linux-base                                   # linux-version, the order of kernels
    shellcheck man-db mandoc                     # linters that are no Python packages
    hyperfine
    systemd-container                            # boot Debian in a container
    qemu-system-x86 fdisk e2fsprogs              # boot it as a virtual machine
    prometheus prometheus-alertmanager prometheus-node-exporter
    chromium                                     # what a person sees
    haproxy                                      # the front before the lanes
)
# Tests start these themselves, on loopback; as services they would listen to everybody.
readonly NOT_AS_SERVICE=(prometheus prometheus-alertmanager prometheus-node-exporter haproxy)
readonly POLICY=/usr/sbin/policy-rc.d

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    local status=$1
    shift
    say "$@"
    exit "$status"
}

is_installed() {
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null) == ?i* ]]
}

# Debian splits ensurepip out of python3; an interpreter from elsewhere needs no package.
venv_package() {
    local python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        echo python3-venv
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$(basename "$(readlink -f "$(command -v "$python")")")-venv"
    fi
}

missing_packages() {
    local package
    for package in "$@"; do
        is_installed "$package" || echo "$package"
    done
    venv_package
}

have_candidates() {
    local package
    for package in "$@"; do
        apt-cache show --no-all-versions "$package" >/dev/null 2>&1 || return 1
    done
}

as_root() {
    if [[ $(id -u) -eq 0 ]]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    elif command -v sudo >/dev/null; then
        sudo env DEBIAN_FRONTEND=noninteractive "$@"
    else
        die 77 "needs root, and there is no sudo. Run as root: apt-get install ${missing[*]}"
    fi
}

# Another apt may be at work on a machine that has just started: wait for it.
apt() { as_root apt-get -q -o DPkg::Lock::Timeout=300 "$@"; }

update_lists() {
    say "fetching the package lists: apt-get update"
    apt update || say "apt-get update failed; trying with the lists as they are"
}

# invoke-rc.d(8) and deb-systemd-invoke ask this program, if there is one, before they start anything.
start_no_services() {
    [[ -e $POLICY ]] && return
    trap 'as_root rm -f "$POLICY"' EXIT
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$POLICY" >/dev/null
    as_root chmod 755 "$POLICY"
}

# Recommended packages are left out: dkms recommends a kernel's headers and a mail of others.
install_packages() { apt install -y --no-install-recommends "$@"; }

# Their packages enable them: they would start with the next boot.
disable_services() {
    local package
    command -v systemctl >/dev/null || return 0
    for package in "${NOT_AS_SERVICE[@]}"; do
        if [[ " ${missing[*]} " == *" $package "* ]]; then
            as_root systemctl disable "$package.service" || say "$package.service stays enabled"
        fi
    done
}

main() {
    local dry_run=
    if [[ ${1-} == --dry-run ]]; then
        dry_run=yes
        shift
    fi
    local wanted=("${DEMO_PACKAGES[@]}")
    case ${1-} in
        demo) ;;
        test) wanted+=("${TEST_PACKAGES[@]}") ;;
        *) die 2 "usage: $0 [--dry-run] demo|test" ;;
    esac
    command -v apt-get >/dev/null || die 69 "no apt-get here; install these by other means: ${wanted[*]}"

    mapfile -t missing < <(missing_packages "${wanted[@]}")
    [[ ${#missing[@]} -eq 0 ]] && return
    say "missing: ${missing[*]}"
    [[ -n $dry_run ]] && return

    have_candidates "${missing[@]}" || update_lists
    have_candidates "${missing[@]}" || die 69 "apt knows no candidate for some of: ${missing[*]};" \
        "check /etc/apt/sources.list and the network, then run apt-get update"
    say "installing with apt-get: ${missing[*]}"
    start_no_services
    # Lists that are days old name files that the archive has since replaced.
    install_packages "${missing[@]}" || { update_lists && install_packages "${missing[@]}"; } ||
        die 69 "apt-get could not install: ${missing[*]}; its own message is above"
    disable_services
}

main "$@"
