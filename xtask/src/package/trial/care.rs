//! A cluster's keys, roles and a request for help, from packages alone and under the package's unit, while clients count.
//!
//! * **Decides:** that keys are exchanged without stopping the VM or losing its backup, that a revoked host is refused in one line and let in again, that
//!   roles are kept, and that a support bundle holds none of the hosts' keys.
//! * **Not here:** every way in which each of it is refused (`node/tests/keys.rs`, `roles.rs`, `bundle.rs`).

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::testbed::Testbed;

use super::machine::{Machine, PATIENCE};
use super::three::{ACKNOWLEDGED, LOOK_AGAIN, await_protected, count, plan};

/// Plays it on a cluster whose VM is protected.
pub fn run(testbed: &Testbed, machines: &[Machine; 3], say: &dyn Fn(&str)) -> Result<()> {
    let plan = plan();
    let counter = count(testbed.node("client"), &plan)?;
    let [a, _, c] = machines;
    let lost = |machine: &Machine| -> Result<usize> {
        let events = machine.run("dunlin events --json")?;
        Ok(events
            .lines()
            .filter(|line| line.contains("\"unprotected\""))
            .count())
    };
    let before = [lost(&machines[0])?, lost(&machines[1])?];
    for command in ["dunlin cluster rotate", "dunlin cluster rotate --authority"] {
        a.run(command)?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    }
    await_protected(machines, &plan.name)?;
    ensure!(
        before == [lost(&machines[0])?, lost(&machines[1])?],
        "the VM lost its backup while keys were exchanged"
    );
    say("all keys and the authority were exchanged under load; the VM kept its backup");

    a.run("dunlin cluster revoke c")?;
    let refused = await_journal(c, "this host's certificate was revoked")?;
    say(&format!("host c is refused: {refused}"));
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let said = std::thread::scope(|scope| {
        let door = scope.spawn(|| a.run("dunlin cluster token c | tee /root/token"));
        let begun = Instant::now();
        let join = loop {
            let said = fs::read_to_string(a.path("/root/token")).unwrap_or_default();
            let line = said
                .lines()
                .map(str::trim)
                .find(|line| line.starts_with("dunlin cluster join "));
            if let Some(line) = line.filter(|_| said.ends_with('\n')) {
                break line.to_owned();
            }
            ensure!(
                !door.is_finished() && begun.elapsed() < PATIENCE,
                "dunlin cluster token printed none: {said}"
            );
            std::thread::sleep(LOOK_AGAIN);
        };
        c.run("systemctl stop dunlin; rm /etc/dunlin/*.toml /etc/dunlin/*.pem")?;
        c.run(&join)?;
        c.run("systemctl start dunlin")?;
        door.join().expect("it returns an error and does not panic")
    });
    said.context("host c is let in again")?;
    a.run("timeout 60 sh -c 'until dunlin cluster status; do sleep 0.2; done'")?;
    say("and was let in again by a new token");

    a.run(
        "groupadd -f watch\nid ann >/dev/null 2>&1 || useradd -G watch ann\n\
         sed -i '1i viewers = \"watch\"' /etc/dunlin/host.toml\nsystemctl restart dunlin",
    )?;
    await_protected(machines, &plan.name)?;
    a.run("runuser -u ann -- dunlin status || test $? = 3")?;
    let refused = a.run("if runuser -u ann -- dunlin down shop 2>&1; then exit 1; fi")?;
    ensure!(
        refused.contains("may not do that") && refused.trim().lines().count() == 1,
        "a viewer says 'down': {refused}"
    );
    say(&format!(
        "a viewer may look, and not shut down: {}",
        refused.trim()
    ));

    a.run("cd; rm -f bundle.tar.gz; dunlin support-bundle --output bundle.tar.gz")?;
    let text = a.run("cd; tar -xOzf bundle.tar.gz")?;
    for machine in machines {
        let key = fs::read_to_string(machine.path("/etc/dunlin/key.pem"))?;
        let secret = key
            .lines()
            .filter(|line| !line.starts_with("-----"))
            .max_by_key(|line| line.len());
        let secret = secret.context("a key's text")?;
        ensure!(
            !text.contains(secret),
            "host {}'s key is in the bundle",
            machine.name()
        );
    }
    ensure!(text.contains("shop"), "the bundle tells nothing of the VM");
    say("a support bundle was made under the unit, and holds none of the hosts' keys");
    let (report, _) = counter.finish()?;
    say(&format!(
        "clients: {} acknowledged, {} lost, {} doubled, {} connections broken",
        report.acknowledged, report.lost, report.doubled, report.resets
    ));
    ensure!(report.is_clean(), "clients were let down: {report:?}");
    Ok(())
}

/// The first line of the service's journal that says it.
fn await_journal(machine: &Machine, words: &str) -> Result<String> {
    let begun = Instant::now();
    loop {
        let said = machine.run("journalctl --sync; journalctl -u dunlin -o cat")?;
        if let Some(line) = said.lines().find(|line| line.contains(words)) {
            return Ok(line.to_owned());
        }
        ensure!(
            begun.elapsed() < PATIENCE,
            "host {}: its journal never says '{words}'",
            machine.name()
        );
        std::thread::sleep(LOOK_AGAIN);
    }
}
