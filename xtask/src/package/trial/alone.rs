//! One host without VMs: the package from its installation to its purge.

use anyhow::{Context, Result};

use super::machine::Machine;

/// What is done, and why it must succeed. A line that it says with `>` is shown.
const STEPS: [(&str, &str); 16] = [
    (
        "installs",
        r"
files > /run/before
apt-get install -y --no-install-recommends $this",
    ),
    (
        "knows its version",
        r#"
dunlin version --json | grep '"protocol":'
dunlin version | sed 's/^/> /'"#,
    ),
    (
        "has manual pages, completions and a file of settings that Debian guards",
        r"
man -w dunlin dunlin-up dunlin-switchover
man dunlin | grep 'dunlin switchover redis'
bash -c 'source /usr/share/bash-completion/bash_completion 2>/dev/null; source /usr/share/bash-completion/completions/dunlin; complete -p dunlin'
test -s /usr/share/zsh/vendor-completions/_dunlin
dpkg-query -W -f '${Conffiles}\n' dunlin | grep '^ /etc/dunlin/environment '
equal 750 $(stat -c %a /etc/dunlin)",
    ),
    (
        "has a user for QEMU, who may open /dev/kvm and owns nothing",
        r"
id -nG dunlin | grep -w kvm
not grep . <(find / -xdev -user dunlin)",
    ),
    (
        "waits for its configuration",
        r"
systemctl is-enabled dunlin
not systemctl is-failed dunlin
not systemctl is-active dunlin",
    ),
    (
        "refuses a bad configuration in one line, and does not try again",
        r"
ip link set lo up
dunlin init /root/one --cluster one --state /var/lib/dunlin --host a=127.0.0.1:7700 --host b=127.0.0.2:7700 --host c=127.0.0.3:7700
cp /root/one/a/* /etc/dunlin/
sed -i 's/^state/stat/' /etc/dunlin/host.toml
not systemctl start dunlin
systemctl is-failed dunlin
equal 0 $(systemctl show -P NRestarts dunlin)
journal > /tmp/said
sed 's/^/> /' /tmp/said
equal 1 $(wc -l < /tmp/said)
grep '/etc/dunlin/host.toml: line 3: unknown field `stat`' /tmp/said",
    ),
    (
        "starts from what 'dunlin init' wrote, and says when it is ready",
        r#"
cp /root/one/a/* /etc/dunlin/
# Somebody who takes events, or refuses them: the page's own port. Either way the daemon notes how far it is.
sed -i '1i notify_url = "http://127.0.0.1:7702/events"' /etc/dunlin/host.toml
systemctl start dunlin
equal running $(systemctl show -P SubState dunlin)
journal | sed -n 's/^ready: /> ready: /p' | grep ."#,
    ),
    (
        "answers on the socket that the command line looks at",
        r#"
dunlin status | sed 's/^/> /'
dunlin status --json | grep '"host":"a"'
equal '600 root' "$(stat -c '%a %U' /run/dunlin/dunlin.sock)"
equal 755 $(stat -c %a /run/dunlin)"#,
    ),
    (
        "keeps its state where Debian does",
        r"
test -e /var/lib/dunlin/lock
dunlin log create trial a
dunlin log propose trial first
test -d /var/lib/dunlin/logs/trial
within test -e /var/lib/dunlin/notified
equal 750 $(stat -c %a /var/lib/dunlin)
not test -e /etc/dunlin/state",
    ),
    (
        "is exposed no more than is said of it",
        r"
systemd-analyze security --no-pager dunlin.service | sed -n 's/^.*\(Overall exposure level.*\)/> \1/p' | grep .",
    ),
    (
        "says that it is alive, and is ended and started again when it stands still",
        r#"
equal 30s $(systemctl show -P WatchdogUSec dunlin)
mkdir -p /run/systemd/system/dunlin.service.d
printf '[Service]\nWatchdogSec=3\nTimeoutAbortSec=1\n' > /run/systemd/system/dunlin.service.d/short.conf
systemctl daemon-reload
systemctl restart dunlin
is() { systemctl show -P "$1" dunlin; }
newer() { test "$(is WatchdogTimestampMonotonic)" != "$last"; }
for turn in 1 2 3; do last=$(is WatchdogTimestampMonotonic); within newer; done
old=$(is MainPID)
kill -STOP $old
again() { test "$(is NRestarts)" = 1 && test "$(is SubState)" = running; }
within again
equal 1 $(is NRestarts)
journalctl --sync
journalctl -u dunlin -o cat | sed -n 's/^dunlin.service: \(Watchdog timeout.*\)/> \1/p' | grep .
rm -r /run/systemd/system/dunlin.service.d
systemctl daemon-reload
systemctl restart dunlin"#,
    ),
    (
        "is the new program after an upgrade",
        r#"
old=$(systemctl show -P MainPID dunlin)
echo '# mine' >> /etc/dunlin/environment
apt-get install -y $later
not equal $old $(systemctl show -P MainPID dunlin)
equal running $(systemctl show -P SubState dunlin)
dunlin status
grep '# mine' /etc/dunlin/environment
dunlin version --json | grep -E '"commit":"[0-9a-f]{40}'
dpkg-query -W -f '> ${Version}\n' dunlin"#,
    ),
    (
        "tells the journal what happened by fields, and as text",
        r#"
journal DUNLIN_KIND=host-begins | grep 'kind="host-begins"'"#,
    ),
    (
        "ends cleanly",
        r#"
systemctl stop dunlin
equal success $(systemctl show -P Result dunlin)
equal 0 $(systemctl show -P ExecMainStatus dunlin)
not test -e /run/dunlin
equal '' "$(pgrep -x dunlin || true)"
systemctl start dunlin"#,
    ),
    (
        "keeps state and configuration when it is removed",
        r"
apt-get remove -y dunlin
test -e /etc/dunlin/host.toml
test -e /var/lib/dunlin/events.jsonl
test -e /var/lib/dunlin/notified
test -d /var/lib/dunlin/logs/trial
not test -e /run/dunlin",
    ),
    (
        "leaves nothing when it is purged",
        r#"
apt-get purge -y dunlin
rm -r /root/one
files > /run/after
comm -13 /run/before /run/after > /run/left
# man-db keeps pages that somebody looked at.
not grep -i dunlin <(grep -v '^/var/cache/man/' /run/left)
not grep dunlin /etc/passwd /etc/group /etc/shadow
not grep . <(find /run /tmp /dev -name '*dunlin*')
equal '' "$(pgrep -x dunlin || true)"
echo "> new in the root, caches aside: $(grep -v '^/var/cache/' /run/left | tr '\n' ' ')""#,
    ),
];

/// What the steps are written in. Of the journal they read what the service's last run said: the host may have had the package before. With `set -e` a command that is not to succeed would be overlooked behind a plain `!`.
const WORDS: &str = r#"
not() { if "$@"; then echo "it should not be so: $*"; exit 1; fi; }
within() { for turn in $(seq 600); do if "$@"; then return 0; fi; sleep 0.1; done; echo "not within a minute: $*"; exit 1; }
equal() { if test "$1" = "${2-}"; then return 0; fi; echo "'${2-}' and not '$1'"; return 1; }
journal() { journalctl --sync; journalctl -t dunlin -o cat "_SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID dunlin)" "$@"; }
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp \) -prune -o -print | sort; }
"#;

/// Plays them one after the other; an error names the step. Returns how many there were.
pub fn run(machine: &Machine, this: &str, later: &str) -> Result<usize> {
    let debs = format!("this=/root/{this}\nlater=/root/{later}\n");
    for (what, script) in STEPS {
        let said = machine
            .run(&format!("{debs}{WORDS}{script}"))
            .with_context(|| format!("the package {what}"))?;
        println!("package: {what} ... ok");
        for line in said.lines().filter_map(|line| line.strip_prefix("> ")) {
            println!("           {line}");
        }
    }
    Ok(STEPS.len())
}
