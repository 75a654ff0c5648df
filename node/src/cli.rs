//! The command line: what each command takes, prints and answers with.

mod bundle;
mod check;
mod cluster;
#[cfg(test)]
mod documents;
mod door;
mod exec;
mod import;
mod init;
mod issued;
mod keys;
mod log;
mod manual;
mod person;
mod program;
mod show;
mod talk;
mod teller;
mod top;
mod watch;

use crate::daemon;
use crate::journal;
use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use clap_complete::Shell;
use dunlin_api::Request;
use dunlin_api::files::CONTROL;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// Keeps virtual machines alive when their host dies.
#[derive(Parser)]
#[command(name = "dunlin", version, max_term_width = 100, after_help = EXAMPLES)]
struct Arguments {
    /// The daemon's control socket
    #[arg(
        long,
        global = true,
        env = "DUNLIN_SOCKET",
        default_value = CONTROL,
        value_name = "PATH"
    )]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  dunlin check                       is this host able to run protected VMs?
  dunlin init /etc/dunlin --cluster home --host a=10.0.0.1:7700 --host b=10.0.0.2:7700 --host c=10.0.0.3:7700
  dunlin host /etc/dunlin/a/host.toml     run the daemon of host a (copy the folders to their hosts first)
  dunlin cluster init home --host a=10.0.0.1:7700 --host b=10.0.0.2:7700 --host c=10.0.0.3:7700
                                     begin a cluster on host a; it prints the lines to run on b and c
  dunlin import --libvirt shop -o shop.toml      make a VM's file from a libvirt domain
  dunlin check shop.toml             what is missing on its hosts
  dunlin up redis.toml               start a VM, and protect it
  dunlin status --watch              see it run
  dunlin switchover redis            move it to its backup without losing anything

Exit codes: 0 done; 1 failed; 2 bad input, nothing was changed; 3 (status, up, protect, policy, replace, move) a VM that asks for
protection has none; 4 (verify-disk) the images differ.";

#[derive(Subcommand)]
enum Command {
    /// Says whether this host can run protected VMs, or whether a VM's hosts can run that VM, and how to fix what is missing
    #[command(
        after_help = "With a VM's file, this host's daemon asks all hosts of the VM and compares their answers: disk sizes, bridges, CPU flags, \
                            QEMU, memory. Nothing is started or changed. Exit codes: 0 nothing is missing; 1 something is; 2 the file is wrong."
    )]
    Check {
        /// The VM's file, to check all hosts of the VM. Without it, only this host is checked
        #[arg(value_name = "VM.TOML")]
        file: Option<PathBuf>,
        /// Check only this host for this VM. No daemon needs to run
        #[arg(long, value_name = "VM.TOML", conflicts_with = "file")]
        vm: Option<PathBuf>,
        /// This host's configuration, if it has one; its certificates are checked
        #[arg(
            long,
            default_value = check::USUAL_CONFIG,
            value_name = "HOST.TOML",
            conflicts_with = "file"
        )]
        config: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Makes a VM's file from a libvirt domain, and says what cannot be carried over, and why
    #[command(after_help = "Example:\n  dunlin import --libvirt shop -o shop.toml && dunlin check shop.toml")]
    Import(import::Import),
    /// Begins a cluster, lets hosts and people into it, renews and revokes their keys, and shows the hosts' state
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Writes the configuration and the keys of a new cluster into folders, which you then copy to its hosts
    Init {
        /// The folder to create
        dir: PathBuf,
        /// The cluster's name
        #[arg(long)]
        cluster: String,
        /// A host, and the address where its daemon listens; give this option once for each host
        #[arg(long = "host", value_name = "NAME=ADDRESS:PORT", required = true, value_parser = init::host)]
        hosts: Vec<(String, SocketAddr)>,
        /// The control socket of each host's daemon. If it is not the default one, name it to every command
        /// (--socket or DUNLIN_SOCKET). A relative path is relative to the folder of host.toml
        #[arg(long, default_value = CONTROL, value_name = "PATH")]
        control: PathBuf,
        /// The folder where each host's daemon keeps its state. A relative path is relative to the folder of host.toml.
        /// The package's service uses /var/lib/dunlin
        #[arg(long, default_value = "state", value_name = "PATH")]
        state: PathBuf,
    },
    /// Runs this host's daemon until it is told to stop
    Host {
        /// The host's configuration
        #[arg(value_name = "HOST.TOML")]
        file: PathBuf,
    },
    /// Starts a VM on its hosts, and waits until it is protected
    Up {
        /// The VM's configuration
        #[arg(value_name = "VM.TOML")]
        file: PathBuf,
        /// Do not wait until it is protected
        #[arg(long)]
        no_wait: bool,
        /// Start with this host's disks, whatever the other hosts have. Without it, a VM that was shut down ('dunlin down')
        /// boots where its disks are newest. A VM of which its hosts remember nothing boots on its first member
        #[arg(long, value_name = "HOST")]
        from: Option<String>,
    },
    /// Shows the state of this host's VMs
    Status {
        /// Keep showing it
        #[arg(long)]
        watch: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Shows what each VM of this host does and costs per second, and the latest events
    Top,
    /// Shows this host's events
    Events {
        /// Go on with new events
        #[arg(long, short)]
        follow: bool,
        /// Only events since then: this long ago (10m, 2h, 1day), or since a time in UTC ('2026-01-31 23:59:59')
        #[arg(long, value_name = "WHEN", value_parser = show::moment)]
        since: Option<u64>,
        /// Print JSON, one object a line
        #[arg(long)]
        json: bool,
    },
    /// Moves a VM to its backup. Nothing is lost
    #[command(alias = "failover")]
    Switchover {
        /// The VM
        vm: String,
    },
    /// Changes how a VM is replicated while it runs. Its backup joins anew. 'none' pauses its protection
    #[command(
        after_help = "docs/output.md says what each policy does. A policy holds until the next 'dunlin policy', or until all hosts are \
                            lost, so change the VM's file as well."
    )]
    Policy {
        /// The VM
        vm: String,
        /// dunlin, plover, colo, str, remus or none
        policy: String,
        /// Do not wait until it is protected under the new policy
        #[arg(long)]
        no_wait: bool,
    },
    /// Has a backup join at once, and waits until the VM is protected
    #[command(
        after_help = "Exit codes: 0 the VM is protected; 1 this failed, or could not be asked; 2 the VM cannot be protected; 3 it runs but is not \
                            protected, and the line says why."
    )]
    Protect {
        /// The VM
        vm: String,
        /// Do not wait until it is protected
        #[arg(long, conflicts_with = "alone")]
        no_wait: bool,
        /// The option of earlier versions for 'promote --force'
        #[arg(long, hide = true)]
        alone: bool,
        /// The same
        #[arg(long, hide = true, requires = "alone")]
        from_disk: bool,
        /// The same
        #[arg(long, hide = true, requires = "from_disk")]
        force_stale: bool,
    },
    /// Makes this host serve a VM alone, without a majority, because you say that the other hosts are dead
    Promote {
        /// The VM
        vm: String,
        /// Confirm that you know that the other hosts are dead. If they are not, two hosts may speak for the VM
        #[arg(long, required = true)]
        force: bool,
        /// If no copy of the VM is alive anywhere, boot it from this host's disk. What was only in the VM's memory is lost
        #[arg(long)]
        from_disk: bool,
        /// With --from-disk, if another host is known to have gone on without this one and is now gone for good: boot from
        /// this host's older disk. What clients were told since then is lost
        #[arg(long, requires = "from_disk")]
        force_stale: bool,
    },
    /// Brings in a new machine in place of a dead host. It has the dead host's name and address, keys for that name, and
    /// a running daemon. Never start the dead host again
    #[command(
        after_help = "Example, after the new machine's daemon was started as host a:\n  dunlin replace redis a"
    )]
    Replace {
        /// The VM
        vm: String,
        /// The host's name
        host: String,
    },
    /// Makes another host of the cluster the backup, the witness or the standby of a VM, while the VM runs
    ///
    /// The host that has this part now may be dead or alive. It leaves the group, and removes its copy of the VM when it hears of that. Its
    /// disks are left as they are. A new backup gets the VM's memory and disks while the VM runs. To move the primary, run 'dunlin switchover'
    /// first.
    ///
    /// A bare program's parts move in the same way, by a copy of the running program. Both hosts need CRIU for that.
    ///
    /// A standby has no copy until it gets the part of a host that stays away. It is only asked whether it could take that part.
    #[command(
        group = clap::ArgGroup::new("part").required(true),
        after_help = "Examples:\n  dunlin move shop --backup d\n  dunlin move shop --witness e\n  dunlin move shop --standby f"
    )]
    Move {
        /// The VM
        vm: String,
        /// The host of the new backup
        #[arg(long, value_name = "HOST", group = "part")]
        backup: Option<String>,
        /// The host of the new witness
        #[arg(long, value_name = "HOST", group = "part")]
        witness: Option<String>,
        /// The new standby
        #[arg(long, value_name = "HOST", group = "part")]
        standby: Option<String>,
        /// Have no standby any more
        #[arg(long, group = "part")]
        no_standby: bool,
        /// Allow this although the backup is well. The VM is NOT protected until the new backup has its copy
        #[arg(long, requires = "backup")]
        unprotected_meanwhile: bool,
    },
    /// Compares the disks of a VM's two hosts, block by block, while it runs
    #[command(after_help = "Exit codes: 0 equal; 1 not compared (no backup, or it was lost); 4 they differ.")]
    VerifyDisk {
        /// The VM
        vm: String,
        /// Send the blocks that differ again
        #[arg(long)]
        repair: bool,
    },
    /// Makes a disk of this host misbehave, or makes its daemon die or step down, for tests. The daemon must have been started with DUNLIN_FAULTS=1
    #[command(hide = true)]
    Inject {
        /// The VM
        vm: String,
        /// write-error=on, read-error=on, flush-error=on, flush-hang=on, full=on, hang=on, state-hang=on, bytes-per-s=N, or none;
        /// die-at=LINE: this daemon dies there; step-down-at=LINE: it loses an election there
        fault: String,
        /// Which disk, in the order of the VM's file
        #[arg(long, default_value_t = 0)]
        disk: usize,
    },
    /// Writes what a helper needs to see of this host into one file: status, events, logs, metrics, threads, configuration. It holds no
    /// key and no secret
    SupportBundle {
        /// The file to write, which must not exist yet. Without it: dunlin-HOST-TIME.tar.gz
        #[arg(short, long, value_name = "FILE.TAR.GZ")]
        output: Option<PathBuf>,
        /// This host's configuration
        #[arg(long, default_value = "/etc/dunlin/host.toml", value_name = "HOST.TOML")]
        config: PathBuf,
    },
    /// Shows what the copy of a bare program on this host has printed
    Logs {
        /// The program
        vm: String,
        /// How many of the last lines to show
        #[arg(short = 'n', long, default_value_t = 200)]
        lines: u32,
        /// Go on with what it prints next, until Ctrl-C
        #[arg(short, long)]
        follow: bool,
        /// Show where the outputs of its two copies differed while this host was the primary, and what each of them was
        #[arg(long, conflicts_with_all = ["lines", "follow"])]
        differences: bool,
    },
    /// Runs a command beside a bare program, in the namespaces of its copy on this host alone. Nothing of it is replicated
    #[command(after_help = exec::EXAMPLES)]
    Exec {
        /// The program
        vm: String,
        /// Do not say where it runs
        #[arg(short, long)]
        quiet: bool,
        /// The command and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Tests a bare server program, without a VM
    Program {
        #[command(subcommand)]
        command: program::Command,
    },
    /// Works with shared logs: entries that programs agree on across the hosts of the cluster, kept on disk (docs/log-service.md)
    Log {
        #[command(subcommand)]
        what: log::Log,
    },
    /// Prints the version of this program, and of the protocol that it speaks with other hosts
    Version {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Prints completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Writes the manual pages into a folder, for whoever makes a package
    #[command(hide = true)]
    Manual {
        /// The folder
        dir: PathBuf,
    },
    /// Shuts a VM down on all its hosts; its disks stay
    Down {
        /// The VM
        vm: String,
        /// End it at once, without asking the guest to shut down
        #[arg(long)]
        now: bool,
        /// Remove the VM from this host alone, although no majority of its hosts can agree to that. The other hosts are not
        /// asked: one that is alive goes on, and one that returns keeps its part, until you run this command there too
        #[arg(long)]
        force: bool,
    },
}

/// Parses, runs, and says what went wrong in one line.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if !matches!(arguments.command, Command::Host { .. }) {
        end_with_reader();
    }
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("dunlin: {}", one_line(&error));
            if error.downcast_ref::<daemon::BadInput>().is_some() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Whoever reads what a command prints may have seen enough (`| head -1`): the command ends then, and there is nothing to tell.
fn end_with_reader() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let words = panic.payload().downcast_ref::<String>();
        // The words of `println!` in the standard library; it has no other way to say so.
        if words.is_some_and(|words| words.starts_with("failed printing to stdout")) {
            std::process::exit(1);
        }
        tell(panic);
    }));
}

/// The whole chain on one line; a cause that its error's own words have told already is not told twice.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let words = cause.to_string();
        let words = words.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = words;
        } else if !line.contains(&words) {
            line = format!("{line}: {words}");
        }
    }
    line
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let socket = &arguments.socket;
    match arguments.command {
        Command::Check {
            file: Some(file),
            json,
            ..
        } => check::all(socket, &file, json),
        Command::Check { vm, config, json, .. } => check::run(vm.as_deref(), &config, json),
        Command::Cluster(command) => cluster::run(socket, &command),
        Command::SupportBundle { output, config } => bundle::run(socket, &config, output),
        Command::Import(import) => import::run(&import),
        Command::Program { command } => Ok(program::run(command)),
        Command::Init {
            dir,
            cluster,
            hosts,
            control,
            state,
        } => init::run(&dir, &cluster, &hosts, &control, &state),
        Command::Host { file } => {
            journal::begin();
            daemon::run(&file).map(|()| ExitCode::SUCCESS)
        }
        Command::Up { file, no_wait, from } => {
            let text = std::fs::read_to_string(&file)
                .map_err(|error| daemon::BadInput(format!("{}: {error}", file.display())))?;
            let request = Request::Up {
                text: text.clone(),
                origin: file.display().to_string(),
                from,
            };
            let code = talk::simple(socket, &request)?;
            if no_wait || code != ExitCode::SUCCESS {
                return Ok(code);
            }
            let name = talk::vm_name(&text).context("the daemon took a file without a name")?;
            talk::wait_until_up(socket, &name, None)
        }
        Command::Status { watch, json } => show::status(socket, watch, json),
        Command::Top => top::run(socket),
        Command::Events { follow, since, json } => show::events(socket, follow, since, json),
        Command::Switchover { vm } => talk::simple(socket, &Request::Failover { vm }),
        Command::Policy { vm, policy, no_wait } => {
            let request = Request::Policy {
                vm: vm.clone(),
                policy: policy.clone(),
            };
            match talk::simple(socket, &request)? {
                ExitCode::SUCCESS if policy != "none" && !no_wait => {
                    talk::wait_until_up(socket, &vm, Some(&policy))
                }
                code => Ok(code),
            }
        }
        Command::Protect {
            vm,
            no_wait,
            alone,
            from_disk,
            force_stale,
        } => {
            let request = Request::Protect {
                vm: vm.clone(),
                alone,
                from_disk,
                force_stale,
            };
            match talk::simple(socket, &request)? {
                ExitCode::SUCCESS if !alone && !no_wait => talk::wait_until_up(socket, &vm, None),
                code => Ok(code),
            }
        }
        Command::Promote {
            vm,
            force,
            from_disk,
            force_stale,
        } => {
            let request = Request::Protect {
                vm,
                alone: force,
                from_disk,
                force_stale,
            };
            talk::simple(socket, &request)
        }
        Command::Replace { vm, host } => {
            let request = Request::Replace { vm: vm.clone(), host };
            match talk::simple(socket, &request)? {
                ExitCode::SUCCESS => talk::wait_until_up(socket, &vm, None),
                code => Ok(code),
            }
        }
        Command::Move {
            vm,
            backup,
            witness,
            standby,
            no_standby,
            unprotected_meanwhile,
        } => {
            // Nothing is copied to a standby.
            let is_copied = standby.is_none() && !no_standby;
            let request = Request::Move {
                vm: vm.clone(),
                backup,
                witness,
                standby,
                no_standby,
                unprotected_meanwhile,
            };
            match talk::simple(socket, &request)? {
                ExitCode::SUCCESS if is_copied => talk::wait_until_up(socket, &vm, None),
                code => Ok(code),
            }
        }
        Command::Logs {
            vm,
            lines,
            follow,
            differences,
        } => {
            let request = Request::Logs {
                vm,
                lines,
                follow,
                differences,
            };
            talk::logs(socket, &request)
        }
        Command::Exec { vm, quiet, command } => exec::run(socket, vm, command, quiet),
        Command::Log { what } => log::run(socket, what),
        Command::Version { json } => Ok(manual::version(json)),
        Command::Completions { shell } => manual::completions::<Arguments>(shell),
        Command::Manual { dir } => manual::pages::<Arguments>(&dir),
        Command::Inject { vm, fault, disk } => talk::simple(socket, &Request::Inject { vm, disk, fault }),
        Command::VerifyDisk { vm, repair } => talk::verify_disk(socket, vm, repair),
        Command::Down { vm, now, force } => talk::down(socket, &vm, now, force),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::client::Client;
    use clap::CommandFactory;

    #[test]
    fn an_error_is_one_line_and_tells_its_cause_once() {
        let missing = std::path::Path::new("/no/such/dunlin.sock");
        let error = Client::connect(missing)
            .err()
            .expect("nobody listens there")
            .into();
        let line = one_line(&error);
        assert_eq!(line.matches("os error 2").count(), 1, "{line}");
        let io = std::io::Error::other("no room\nat all");
        let error = anyhow::Error::from(io).context("writing a file");
        assert_eq!(one_line(&error), "writing a file: no room at all");
    }

    #[test]
    fn what_init_writes_is_where_commands_look() {
        Arguments::command().debug_assert();
        let init = [
            "dunlin",
            "init",
            "d",
            "--cluster",
            "c",
            "--host",
            "a=10.0.0.1:7700",
        ];
        let arguments = Arguments::try_parse_from(init).expect("README's words");
        let Command::Init { control, .. } = arguments.command else {
            panic!("init")
        };
        assert_eq!(control, arguments.socket);
    }
}
