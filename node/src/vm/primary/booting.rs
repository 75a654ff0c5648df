//! The VM's process begins: a boot, or a backup's that goes on as the primary's.

use crate::vm::event::LoopEvent;
use crate::vm::held_memory::Taken;
use crate::vm::machine::{Machine, MachineError, Started};
use crate::vm::nics::Nics;
use crate::vm::state::primary::{Boots, PrimaryRole};
use crate::vm::state::speculating::Speculating;
use crate::vm::state::{Role, VmLoop};
use dunlin_api::{EventKind, FailoverStatus};
use dunlin_core::output::gate::Voice;
use dunlin_guest::Start;
use dunlin_guest::probe::{memory_available_bytes, memory_needed_bytes};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl VmLoop {
    pub(in crate::vm) fn boot(&mut self) {
        let session = self.new_session();
        let mut primary = PrimaryRole::new(None, self.first_rules());
        primary.starting = Some(session);
        primary.boots = Boots::of(self.cold.has_lived);
        self.role = Role::Primary(primary);
        // A VM that boots has no use for it, and nobody else will have.
        self.host.held_memory.forget(&self.config.name);
        self.start_machine(session, Start::Boot, None);
    }

    /// It did not start, and its time has come again. Only while this host leads: nobody else may boot the VM then.
    pub(in crate::vm) fn boot_again(&mut self) {
        let (now_us, leads) = (self.now_us(), self.agreement.leads());
        let due = |primary: &mut PrimaryRole| leads && primary.boots.is_due(now_us);
        if !self.primary().is_some_and(due) {
            return;
        }
        let session = self.new_session();
        if let Some(primary) = self.primary() {
            primary.starting = Some(session);
        }
        self.start_machine(session, Start::Boot, None);
    }

    /// Starts QEMU on a thread that lives as long as the process it starts: a parent's death signal is tied to it. Its memory begins as what was
    /// `held` of the VM, if it is told so; what is held of others makes room for it.
    pub(in crate::vm) fn start_machine(&mut self, session: u64, start: Start, mut held: Option<Taken>) {
        let (config, to_loop, term) = (self.config.clone(), self.inbox.to_loop.clone(), self.group.term());
        let (host, shared) = (self.host.clone(), self.shared.clone());
        if matches!(start, Start::Boot) {
            self.shared.reigns(term, true);
        }
        self.ending.starts_under_way += 1;
        let work = move || {
            let memory = &host.held_memory;
            let _promised = memory.promised.to_start(config.spec.memory_bytes());
            let own_bytes = held.as_ref().map_or(0, Taken::bytes);
            let needed_bytes = memory_needed_bytes(&config.spec).saturating_sub(own_bytes);
            memory.make_room(&config.name, needed_bytes, memory_available_bytes);
            let disks_to = to_loop.clone();
            let tell = move |number, event| disks_to.send(LoopEvent::Disk { number, event });
            let result = Machine::start(&config, start, term, &host.state, &shared, &mut held, tell);
            match (&result, held) {
                (Ok(started), _) => memory.promised.to_run(started.machine.qemu.memory()),
                // The next join begins with it.
                (Err(_), Some(held)) => memory.give_back(&config.name, held),
                (Err(_), None) => {}
            }
            to_loop.send(LoopEvent::MachineStarted { session, result });
        };
        if let Err(error) = std::thread::Builder::new().name("start-qemu".into()).spawn(work) {
            self.ending.starts_under_way -= 1;
            self.machine_started(session, Err(MachineError::Thread(error)));
        }
    }

    /// A machine whose join is over before it has started leaves its memory to the next join; one that has begun needs no other's.
    fn mind_memory(&self, session: u64, result: &Result<Started, MachineError>) {
        let is_awaited = match &self.role {
            Role::Backup(backup) => backup.session == session,
            Role::Primary(primary) => primary.starting == Some(session),
            Role::None => false,
        };
        match result {
            Ok(_) if is_awaited => self.host.held_memory.forget(&self.config.name),
            Ok(started) => self.hold_memory(&started.machine),
            // It was given back, and the VM has ended meanwhile.
            Err(_) if self.shared.over.load(Ordering::SeqCst) => {
                self.host.held_memory.forget(&self.config.name);
            }
            Err(_) => {}
        }
    }

    pub(in crate::vm) fn machine_started(&mut self, session: u64, result: Result<Started, MachineError>) {
        if let Ok(started) = &result {
            // A disk that misbehaves does so for every copy of the VM on this host.
            for (number, fault) in &self.care.injected {
                if let Some(disk) = started.machine.disks.all().get(*number) {
                    disk.faults().inject(*fault);
                    self.care.faulty.push((*number, disk.faults().clone()));
                }
            }
        }
        self.mind_memory(session, &result);
        if matches!(&self.role, Role::Backup(_)) {
            return self.backup_started(session, result);
        }
        let Some(primary) = self.primary() else { return };
        if primary.starting != Some(session) {
            return;
        }
        primary.starting = None;
        let opened = result.and_then(|started| {
            let nics = Nics::open(&self.config, started.ports)?;
            Ok((started.machine, nics, started.sockets))
        });
        match opened {
            Ok((machine, nics, sockets)) => {
                let (accel, why) = machine.qemu.accel();
                let how = why.map_or(String::new(), |why| format!(" ({why})"));
                let accel = format!("{accel:?}").to_uppercase();
                self.event(
                    EventKind::Started,
                    format!(
                        "QEMU {} runs, {accel}{how}, its cards by {}",
                        machine.qemu.version(),
                        self.config.spec.nic_backend.name()
                    ),
                );
                self.net.nics = Some(nics);
                let limits = self.speculation_limits();
                self.net.speculating = sockets.map(|sockets| Speculating::primary(sockets, limits));
                if let Some(primary) = self.primary() {
                    primary.machine = Some(machine);
                    primary.boots.started();
                }
                self.agreement.leadership.booted();
                let voice = self.agreement.leadership.voice();
                self.net.output = self.new_output(voice, self.agreement.state().epoch.next());
                if voice == Voice::Alone {
                    self.stands_alone();
                }
            }
            Err(why) => self.does_not_start(&why.to_string()),
        }
    }

    fn does_not_start(&mut self, why: &str) {
        let now_us = self.now_us();
        let again = self
            .primary()
            .and_then(|primary| primary.boots.failed(now_us, why));
        let text = match again {
            Some(_) => format!("the VM does not start: {why}; it is tried again until it does"),
            None => format!("the VM does not start: {why}"),
        };
        self.order_failed(&text);
        if again != Some(false) {
            self.event(EventKind::Failed, text);
        }
        if again.is_none() {
            self.shown.failure = Some(why.to_owned());
            self.drop_machine();
        }
    }

    /// A backup has become the primary.
    pub(in crate::vm) fn become_primary(&mut self, machine: Arc<Machine>, failover: FailoverStatus) {
        // What QEMU says of the end of the session is about that, and explains no later end of its own.
        machine.qemu.stderr().turn_page();
        self.role = Role::Primary(PrimaryRole::new(Some(machine), self.first_rules()));
        self.shown.failover = Some(failover);
    }
}
